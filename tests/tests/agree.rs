//! The plan and what really happens: bytes against those that the transport was given, memory against the arena.

use meshc_tests::oracle::read;
use meshc_tests::traffic::disagree;
use meshc_tests::whole::{MESHES, MODELS, feeds, training_step};
use planner::plan::plan;
use runtime::local::{Local, Taps};

#[test]
fn bytes_and_memory_are_those_of_the_run() {
    let cluster = planner::cluster::read("here").unwrap();
    for model in MODELS {
        let oracle = read(model);
        for mesh in MESHES {
            let compiled = training_step(&oracle, mesh, false, &mut |_, _| {});
            let mut plan = plan(&compiled.sharded, &compiled.program, &cluster);
            let mut local = Local::new(&compiled.program, 2).unwrap();
            local.step(&[feeds(&oracle, 0)], &mut Taps::of(["loss"])).unwrap();
            let traffic = local.traffic();
            assert_eq!(disagree(&plan, &traffic, &compiled.program.mesh), None, "{model} on `{mesh}`");
            assert_eq!(local.arena_bytes(), plan.memory.peak_bytes, "{model} on `{mesh}`");
            assert_eq!(traffic.is_empty(), mesh.is_empty());
            // A plan that is off by four bytes, or lacks a call, is seen.
            if !mesh.is_empty() {
                plan.comm[0].bytes += 4;
                assert!(disagree(&plan, &traffic, &compiled.program.mesh).is_some());
                plan.comm.remove(0);
                assert!(disagree(&plan, &traffic, &compiled.program.mesh).is_some());
            }
        }
    }
}

#[test]
fn any_number_of_workers_gives_the_same_bits() {
    for (model, mesh) in [("gpt2", "dp=2,tp=2"), ("llama", "tp=3,dp=2")] {
        let oracle = read(model);
        let compiled = training_step(&oracle, mesh, false, &mut |_, _| {});
        let ranks = compiled.program.mesh.ranks();
        let runs: Vec<Local> = [1, 2, ranks]
            .into_iter()
            .map(|workers| {
                let mut local = Local::new(&compiled.program, workers).unwrap();
                meshc_tests::whole::fill(&mut local, &compiled.program, &oracle);
                for step in 0..3 {
                    local.step(&[feeds(&oracle, step)], &mut Taps::default()).unwrap();
                }
                local
            })
            .collect();
        assert!(runs[1..].iter().all(|r| r.same_states(&runs[0])), "{model} on {mesh}");
    }
}
