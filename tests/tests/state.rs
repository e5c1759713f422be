//! Micro-batches, ZeRO and recompute on whole models: the numbers are those of one device and of the oracle, and bytes and
//! memory those of the run.

use ir::graph::Recompute;
use meshc_tests::oracle::read;
use meshc_tests::traffic::disagree;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, split_step};
use planner::numeric::{all_feeds as random, lockstep, program};
use planner::plan::plan;
use planner::zero::Zero;
use runtime::eval::eval;
use runtime::local::{Local, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

/// Meshes with even and uneven pieces, and numbers of micro-batches.
const SPLITS: [(&str, usize); 7] = [
    ("dp=2", 1),
    ("dp=3", 2),
    ("dp=4", 3),
    ("dp=2,tp=2", 2),
    ("dpo=2,dp=2", 1),
    ("dpo=2,dp=2", 3),
    ("dp=3,tp=2", 1),
];

/// All of them, with everything that is computed again.
fn splits() -> impl Iterator<Item = (&'static str, Split)> {
    let again = [Recompute::None, Recompute::Selective, Recompute::Full];
    SPLITS.iter().enumerate().flat_map(move |(i, (mesh, microbatches))| {
        let of = move |(k, zero): (usize, &Zero)| {
            (
                *mesh,
                Split { zero: *zero, microbatches: *microbatches, recompute: again[(i + k) % 3], ..PLAIN },
            )
        };
        ZERO.iter().enumerate().map(of)
    })
}

#[test]
fn every_split_equals_one_device() {
    // In lockstep whole models are slow: each mesh with one stage of ZeRO, and each stage with some mesh.
    let some = || splits().enumerate().filter(|(i, _)| i % 5 == 0).map(|(_, split)| split);
    for model in ["gpt2", "llama_masked"] {
        let oracle = read(model);
        for (mesh, split) in some() {
            let (compiled, _) = split_step(&oracle, mesh, split, true, &mut |_, _| {});
            let feeds = random(&compiled.sharded, 5);
            let on = |e| panic!("{model} on {mesh}, {split:?}: {e:?}");
            lockstep(&compiled.sharded, &feeds, eval).unwrap_or_else(on);
            program(&compiled.sharded, &compiled.program, &feeds, 2).unwrap().unwrap_or_else(on);
        }
    }
}

/// The loss is a mean over all labels that count, however uneven they lie; 2e-5 is what f32 takes from it.
#[test]
fn every_split_has_the_losses_of_the_oracle() {
    for model in ["llama_masked", "qwen2"] {
        let oracle = read(model);
        let want = oracle.numbers("loss_per_step");
        for (mesh, split) in splits() {
            let (compiled, rows) = split_step(&oracle, mesh, split, false, &mut |_, _| {});
            let mut local = Local::new(&compiled.program, 2).unwrap();
            fill(&mut local, &compiled.program, &oracle);
            let mut taps = Taps::of(["loss"]);
            for (step, want) in want.iter().enumerate().take(3) {
                local.step(&all_feeds(&oracle, &rows, step), &mut taps).unwrap();
                let loss = f64::from(taps.number("loss").unwrap());
                assert!(
                    (loss - want).abs() < 2e-5 * want,
                    "{model} on {mesh}, {split:?}: {loss}, not {want}"
                );
            }
        }
    }
}

#[test]
fn what_is_computed_again_gives_the_same_bits() {
    for mesh in ["dp=2", "dp=2,tp=2"] {
        let oracle = read("llama");
        let run = |recompute| {
            let split = Split { microbatches: 2, recompute, ..PLAIN };
            let (compiled, rows) = split_step(&oracle, mesh, split, false, &mut |_, _| {});
            let mut local = Local::new(&compiled.program, 2).unwrap();
            fill(&mut local, &compiled.program, &oracle);
            (0..2).for_each(|s| local.step(&all_feeds(&oracle, &rows, s), &mut Taps::default()).unwrap());
            let slots = compiled.program.stages[0].sizes[2];
            (local, slots)
        };
        let (none, most) = run(Recompute::None);
        let (selective, fewer) = run(Recompute::Selective);
        let (full, fewest) = run(Recompute::Full);
        assert!(none.same_states(&selective) && none.same_states(&full), "{mesh}");
        assert!(fewest < fewer && fewer < most, "{mesh}: {fewest}, {fewer} and {most} bytes are kept");
    }
}

#[test]
fn bytes_and_memory_are_those_of_the_run() {
    let cluster = planner::cluster::read("here").unwrap();
    let oracle = read("llama");
    for (mesh, split) in splits() {
        let (compiled, rows) = split_step(&oracle, mesh, split, false, &mut |_, _| {});
        let plan = plan(&compiled.sharded, &compiled.program, &cluster);
        let mut local = Local::new(&compiled.program, 2).unwrap();
        local.step(&all_feeds(&oracle, &rows, 0), &mut Taps::default()).unwrap();
        assert_eq!(disagree(&plan, &local.traffic(), &compiled.program.mesh), None, "{mesh}, {split:?}");
        assert_eq!(local.arena_bytes(), plan.memory.peak_bytes, "{mesh}, {split:?}");
    }
}

/// Bytes sent for parameters and gradients, by the formulas of Rajbhandari et al., section 7, to what the loss, the count
/// and the norm add.
#[test]
fn zero_sends_what_it_must() {
    let cluster = planner::cluster::read("here").unwrap();
    let oracle = read("llama");
    for zero in ZERO {
        let (compiled, _) = split_step(&oracle, "dp=4", Split { zero, ..PLAIN }, false, &mut |_, _| {});
        let plan = plan(&compiled.sharded, &compiled.program, &cluster);
        let all = 4.0 * plan.model.parameters as f64;
        let sent = |op: &str| plan.comm_total.by_op.get(op).map_or(0.0, |t| t.wire_bytes) / (0.75 * all);
        let near = |x: f64, y: f64| (x - y).abs() < 0.02;
        let fits = match zero {
            Zero::Off => near(sent("all_reduce"), 2.0) && sent("all_gather") == 0.0,
            Zero::Moments | Zero::Gradients => {
                near(sent("reduce_scatter"), 1.0)
                    && near(sent("all_gather"), 1.0)
                    && near(sent("all_reduce"), 0.0)
            }
            Zero::Parameters => near(sent("reduce_scatter"), 1.0) && sent("all_gather") < 2.0,
        };
        assert!(fits, "{zero:?}: {:?}", plan.comm_total.by_op);
    }
}
