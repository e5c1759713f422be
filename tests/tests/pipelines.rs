//! Whole models on pipelines: every kind of schedule has the losses of the oracle, sends what was planned and takes the
//! memory that was planned. `MESHC_PIPES=all` tries all of them, else a fifth.

use meshc_tests::oracle::{Oracle, read};
use meshc_tests::tables::hold;
use meshc_tests::traffic::disagree;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, here, split_step, split_step_with};
use models::Dropout;
use planner::check::check;
use planner::numeric::{all_feeds as random, program};
use planner::plan::plan;
use planner::schedules::SCHEDULES;
use planner::schedules::figures::figures;
use planner::zero::Zero;
use runtime::local::{Local, Taps};

/// A kind, and with how many virtual stages a rank it is tried.
const KINDS: [(&str, &[usize]); 8] = [
    ("gpipe", &[1]),
    ("1f1b", &[1]),
    ("interleaved", &[1, 2]),
    ("looping", &[1, 2]),
    ("zb-h1", &[1]),
    ("zb-h2", &[1]),
    ("zb-v", &[2]),
    ("dualpipe-v", &[2]),
];

/// A model, a mesh, and how its step is split.
type Case = (&'static str, &'static str, Split);

/// Every case that is tried.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (kind, virtuals) in KINDS {
        for l in virtuals {
            let of = |microbatches, zero| Split { microbatches, zero, schedule: Some((kind, *l)), ..PLAIN };
            for mesh in ["pp=2", "pp=4"] {
                for m in [1, 2, 3, 4, 8, 16] {
                    all.push(("llama_deep", mesh, of(m, Zero::Off)));
                }
            }
        }
        let l = virtuals[virtuals.len() - 1];
        let of = |microbatches, zero| Split { microbatches, zero, schedule: Some((kind, l)), ..PLAIN };
        for zero in [Zero::Moments, Zero::Gradients, Zero::Parameters] {
            for mesh in ["dp=2,pp=2", "pp=2,tp=2"] {
                for m in [2, 4] {
                    all.push(("llama_deep", mesh, of(m, zero)));
                }
            }
        }
        for model in ["gpt2", "gemma2", "qwen2"] {
            for mesh in ["pp=2", "pp=4", "pp=2,tp=2"] {
                all.push((model, mesh, of(4, Zero::Off)));
            }
            all.push((model, "dp=2,pp=2", of(2, Zero::Gradients)));
        }
    }
    all
}

/// All of them, or every fifth.
fn some() -> Vec<Case> {
    let every = if std::env::var("MESHC_PIPES").is_ok_and(|v| v == "all") { 1 } else { 5 };
    cases().into_iter().step_by(every).collect()
}

#[test]
fn every_kind_is_tried() {
    assert!(SCHEDULES.iter().all(|s| KINDS.iter().any(|(kind, _)| *kind == s.name)));
    for kind in KINDS {
        assert!(
            some().iter().any(|(.., split)| split.schedule.is_some_and(|(k, _)| k == kind.0)),
            "{kind:?}"
        );
    }
}

/// The loss is a mean over all labels that count; 2e-5 is what f32 takes from it in these few steps.
#[test]
fn every_schedule_has_the_losses_of_the_oracle() {
    let oracles: Vec<(&str, Oracle)> =
        ["llama_deep", "gpt2", "gemma2", "qwen2"].into_iter().map(|name| (name, read(name))).collect();
    for (model, mesh, split) in some() {
        let oracle = &oracles.iter().find(|(name, _)| *name == model).unwrap().1;
        let at = format!("{model} on {mesh}, {split:?}");
        let want = oracle.numbers("loss_per_step");
        let none = Dropout::Everywhere(0.0);
        let (compiled, rows) = split_step_with(oracle, none, mesh, split, false, &mut |_, _| {});
        check(&compiled.sharded, &compiled.program).unwrap_or_else(|e| panic!("{at}: {}", e.join("\n")));
        let plan = plan(&compiled.sharded, &compiled.program, &here());
        // Once a step numbers go over the pipeline, and what stages share.
        let over = plan.comm.iter().filter(|c| c.axes == ["pp"] && c.phase == "update");
        let large = over.filter(|c| c.bytes > 4).count();
        let shares =
            compiled.program.stages.iter().flat_map(|s| &s.buffers).filter(|b| b.state.is_some()).count()
                > compiled.program.states.len() + compiled.program.stages.len() - 1;
        assert_eq!(large > 0, shares, "{at}");
        let mut local = Local::new(&compiled.program, 2).unwrap_or_else(|e| panic!("{at}: {e}"));
        assert_eq!(local.arena_bytes(), plan.memory.peak_bytes, "{at}");
        fill(&mut local, &compiled.program, oracle);
        let mut taps = Taps::of(["loss"]).finite("loss").finite("grad_norm");
        for (step, want) in want.iter().enumerate().take(3) {
            local.step(&all_feeds(oracle, &rows, step), &mut taps).unwrap_or_else(|e| panic!("{at}: {e}"));
            let loss = f64::from(taps.number("loss").unwrap());
            assert!((loss - want).abs() < 2e-5 * want, "{at}: {loss}, not {want}, at step {step}");
        }
        assert_eq!(disagree(&plan, &local.traffic(), &compiled.program.mesh), None, "{at}");
        assert_eq!(local.drifted(), None, "{at}");
    }
}

/// Gradients, norm and everything that a step leaves behind, with weights that two stages share and clipping.
#[test]
fn a_step_on_a_pipeline_equals_one_device() {
    for (model, mesh, kind, l, m, zero) in [
        ("gpt2", "pp=4", "1f1b", 1, 3, Zero::Off),
        ("gpt2", "dp=2,pp=2", "zb-h1", 1, 2, Zero::Parameters),
        ("gemma2", "pp=2,tp=2", "zb-v", 2, 2, Zero::Off),
        ("qwen2", "dp=2,pp=2", "dualpipe-v", 2, 4, Zero::Moments),
        ("llama_deep", "dp=3,pp=2", "interleaved", 2, 2, Zero::Gradients),
    ] {
        let split = Split { microbatches: m, zero, schedule: Some((kind, l)), ..PLAIN };
        let (compiled, _) = split_step(&read(model), mesh, split, true, &mut |_, _| {});
        let feeds = random(&compiled.sharded, 5);
        let found = program(&compiled.sharded, &compiled.program, &feeds, 2).unwrap();
        found.unwrap_or_else(|e| panic!("{model} on {mesh}, {split:?}: {e:?}"));
    }
}

/// The table of docs/pipelines.md.
#[test]
fn the_page_has_the_figures_of_every_kind() {
    let oracle = read("llama_deep");
    let mut rows = String::new();
    for (kind, virtuals) in KINDS {
        for l in virtuals.iter().copied().filter(|l| *l > 1 || virtuals.len() == 1) {
            let split = Split { microbatches: 8, schedule: Some((kind, l)), ..PLAIN };
            let (compiled, _) = split_step(&oracle, "pp=4", split, false, &mut |_, _| {});
            let figures = figures(kind, &compiled.sharded.decisions.schedule).unwrap();
            let list = |numbers: Vec<String>| numbers.join(", ");
            rows += &format!(
                "| {kind} | {l} | {} | {:.1} % | {} | {} | {} |\n",
                figures.ideal.makespan,
                100.0 * figures.ideal.bubble_fraction,
                list(figures.ideal.in_flight.iter().map(ToString::to_string).collect()),
                list(compiled.program.stages.iter().map(|s| s.slots.to_string()).collect()),
                figures.boundary_transfers_per_microbatch,
            );
        }
    }
    hold("pipelines.md", "| schedule | L | makespan | idle | in flight | slots | transfers |", &rows);
}
