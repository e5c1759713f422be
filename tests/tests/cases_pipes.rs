//! Small situations of pipelines in which others computed a wrong value, hung or lost layers, on the local backend.

use std::collections::BTreeMap;

use ir::dsl::{Model, Tensor};
use ir::kernel::Body;
use ir::program::{Call, Duty, Instruction, Program, Region, Stage};
use ir::schedule::Kind;
use ir::state::{AdamW, Init, Role};
use ir::{DType, Graph, Mesh, Move, Name, Places, Reduce, Unary};
use meshc_tests::meaning::places;
use meshc_tests::oracle::read;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, here, piped, split_step};
use passes::Compiled;
use planner::check::check;
use planner::choose::compile;
use planner::cluster::Cluster;
use planner::schedules::figures::in_flight;
use planner::stages::{asked, costs, cut};
use planner::timeline::timeline;
use planner::zero::{self, Zero};
use runtime::local::{HostTensor, Local, RunError, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

type Feeds = BTreeMap<Name, HostTensor>;

/// The training step of a graph that is cut by its layers.
fn step(mut graph: Graph, mesh: &str, at: &[(&str, &str)], split: Split, clip: Option<f64>) -> Compiled {
    graph.optimizer = Some(AdamW { clip, ..AdamW::default() });
    graph.dump = true;
    graph.scatters = split.zero >= Zero::Gradients;
    let mesh = Mesh::parse(mesh).expect("a mesh");
    let mut placed = Places::from(places(at, &mesh));
    for state in &graph.states {
        placed.at.entry(state.name.clone()).or_insert(ir::Sharding::replicated(state.dims.len()));
    }
    (placed.schedule, graph.stages) = piped(&graph, &mesh, split);
    zero::split(split.zero, &graph, &mesh, &mut placed);
    compile(graph, &mesh, placed, &here(), &mut |_, _| {})
}

/// It made ready, every parameter with this number.
fn filled(compiled: &Compiled, number: impl Fn(&str) -> f32) -> Local {
    let mut local = Local::new(&compiled.program, 2).expect("a program that runs");
    for state in compiled.program.states.iter().filter(|s| s.dtype.is_float()) {
        let is_parameter = matches!(state.role, Role::Parameter { .. });
        let number = if is_parameter { number(&state.name) } else { 0.0 };
        local
            .fill_state::<RunError>(&state.name, &mut |_, out| {
                out.fill(number);
                Ok(())
            })
            .expect("a state");
    }
    local
}

fn floats(of: &[(&str, &[f32])]) -> Feeds {
    of.iter().map(|(name, data)| ((*name).into(), HostTensor::F32(data.to_vec()))).collect()
}

/// B26: of GPipe all micro-batches live at once, of 1F1B as many as stages follow, of interleaved some chunks more; and so
/// many slots a rank has. A slot that is still being sent cannot be taken again, which may cost one or two.
#[test]
fn as_many_micro_batches_live_as_the_table_says() {
    let oracle = read("llama_deep");
    for (kind, l, m, live, more) in [
        ("gpipe", 1, 8, [8, 8, 8, 8], 0),
        ("1f1b", 1, 8, [4, 3, 2, 1], 0),
        ("1f1b", 1, 2, [2, 2, 2, 1], 0),
        ("interleaved", 2, 8, [11, 9, 7, 5], 1),
        ("looping", 2, 8, [16, 16, 16, 16], 0),
        ("zb-h1", 1, 8, [4, 4, 4, 4], 0),
        ("zb-v", 2, 8, [8, 8, 8, 8], 1),
    ] {
        let split = Split { microbatches: m, schedule: Some((kind, l)), ..PLAIN };
        let (compiled, _) = split_step(&oracle, "pp=4", split, false, &mut |_, _| {});
        let figures = in_flight(&compiled.sharded.decisions.schedule);
        assert_eq!(figures, live.map(|n| n as f64 / l as f64), "{kind}, M={m}");
        for (stage, live) in compiled.program.stages.iter().zip(live) {
            assert!((live..=live + more).contains(&stage.slots), "{kind}, M={m}: {} slots", stage.slots);
        }
    }
}

/// A chain of layers, each with a weight.
fn chain(layers: usize) -> Graph {
    let mut m = Model::new();
    m.dim("b", 4);
    m.dim("d", 8);
    m.dim("e", 8);
    let mut x: Tensor = m.input("x", DType::F32, "b d");
    for i in 0..layers {
        m.layer(i as u32);
        let w = m.parameter(&format!("w{i}"), "d e", Init::Normal(0.1));
        let y = m.einsum("b e", &[&x, &w]);
        x = m.rename(&y, "e", "d");
    }
    m.behind_layers();
    let sum = m.einsum("", &[&x]);
    let count = m.constant(4.0, DType::F32);
    m.loss(&sum, &count);
    m.finish().expect("a graph")
}

fn products(stage: &Stage, virtual_stage: usize) -> usize {
    let forward =
        |s: &&ir::program::Segment| (s.stage, s.kind, s.duty) == (virtual_stage, Kind::Forward, Duty::Work);
    let product = |i: &&Instruction| matches!(i, Instruction::Launch { kernel, .. } if matches!(kernel.body, Body::Contract(_)));
    stage.segments.iter().filter(forward).flat_map(|s| &s.instructions).filter(product).count()
}

/// B34: 30 layers on 4 ranks are 8, 8, 7, 7; with a last stage of 6 they are 8, 8, 8, 6; 8 virtual stages have 4 or 3, in the
/// order of the loop. Every layer is in one stage.
#[test]
fn no_layer_is_lost_in_an_uneven_cut() {
    let graph = chain(30);
    let costs = costs(&graph, 1, false, &here());
    let sizes = |stages: &[usize], n: usize| -> Vec<usize> {
        // The first mark stands before the layers, the last behind them.
        (0..n).map(|k| stages[1..31].iter().filter(|s| **s == k).count()).collect()
    };
    // What stands before and behind the layers weighs, but less than a layer.
    assert_eq!(*sizes(&cut(&costs, 4), 4).iter().max().unwrap(), 8);
    assert_eq!(sizes(&asked("_,_,_,_", &graph, &costs, 4, 1).unwrap(), 4), [8, 8, 7, 7]);
    let eight = asked("_,_,_,_,_,_,_,_", &graph, &costs, 4, 2).unwrap();
    assert_eq!(sizes(&eight, 8), [4, 4, 4, 4, 4, 4, 3, 3]);
    assert_eq!(sizes(&asked("_,_,_,6", &graph, &costs, 4, 1).unwrap(), 4), [8, 8, 8, 6]);
    for wrong in ["8,8,7,6", "8,8,8,8", "30", "8,8,7,x"] {
        assert!(asked(wrong, &graph, &costs, 4, 1).is_err(), "{wrong}");
    }
    let split = Split { microbatches: 4, schedule: Some(("looping", 2)), ..PLAIN };
    let compiled = step(graph, "pp=4", &[], split, None);
    let found: Vec<usize> =
        (0..8).map(|k| products(&compiled.program.stages[compiled.program.homes[k]], k)).collect();
    assert_eq!((found.iter().sum::<usize>(), found.iter().max()), (30, Some(&4)));
    assert_eq!(compiled.program.homes, [0, 1, 2, 3, 0, 1, 2, 3]);
}

/// A weight that the first and the last of two layers use.
fn tied() -> Graph {
    let mut m = Model::new();
    m.dim("b", 2);
    m.dim("d", 6);
    let (x, y) = (m.input("x", DType::F32, "b"), m.input("y", DType::F32, "b"));
    m.layer(0);
    let w = m.parameter("w", "d", Init::Ones);
    let first = m.einsum("", &[&x, &w]);
    m.layer(1);
    let last = m.einsum("", &[&y, &w]);
    let sum = m.add(&[&first, &last]);
    let count = m.constant(2.0, DType::F32);
    m.loss(&sum, &count);
    m.finish().expect("a graph")
}

/// B35: gradients 1 and 2 on the ranks of one stage, 3 and 4 on those of the other, are 10 over 2 rows, 5, on all four, whatever
/// is sharded; and both copies stay the same. In a V both uses are on one rank, which sends nothing for it.
#[test]
fn what_two_stages_share_is_summed_over_both() {
    let feeds = floats(&[("x", &[1.0, 2.0]), ("y", &[3.0, 4.0])]);
    let at = [("x", "[dp]"), ("y", "[dp]")];
    for zero in ZERO {
        for (kind, l) in [("1f1b", 1), ("zb-h1", 1), ("gpipe", 1)] {
            let split = Split { zero, schedule: Some((kind, l)), ..PLAIN };
            let compiled = step(tied(), "dp=2,pp=2", &at, split, None);
            let mut local = filled(&compiled, |_| 1.0);
            let mut taps = Taps::of(["grad.w", "loss", "grad_norm"]);
            for _ in 0..2 {
                local.step(std::slice::from_ref(&feeds), &mut taps).expect("a step");
                assert_eq!(taps.get("grad.w").unwrap().data, [5.0; 6], "{zero:?}, {kind}");
                assert_eq!(taps.number("grad_norm"), Some(150.0_f32.sqrt()), "{zero:?}, {kind}");
                assert_eq!(local.drifted(), None, "{zero:?}, {kind}");
            }
        }
    }
    let split = Split { microbatches: 2, schedule: Some(("zb-v", 2)), ..PLAIN };
    let mut graph = tied();
    graph.layers = 2;
    let compiled = step(graph, "pp=1", &[], split, None);
    let shared = compiled.program.stages[0].buffers.iter().filter(|b| b.state.as_deref() == Some("w"));
    assert_eq!(shared.count(), 1);
}

/// The collectives over `dp` that reduce sums, with the places of their segments.
fn reductions(program: &Program, stage: &Stage) -> Vec<(usize, usize)> {
    let dp = program.mesh.find("dp").expect("a mesh with dp");
    let sums = |m: &Move| matches!(m, Move::AllReduce { axes, reduce: Reduce::Sum } | Move::ReduceScatter { axes, reduce: Reduce::Sum, .. } if *axes == dp);
    let mut found = Vec::new();
    for (s, segment) in stage.segments.iter().enumerate() {
        for part in segment.instructions.iter().flat_map(Instruction::transfers) {
            let shape = &stage.buffers[part.from.index()].shape;
            if sums(&part.step) && !shape.is_empty() {
                found.push((s, shape.len()));
            }
        }
    }
    found
}

/// B37: where the backward is split, each gradient is reduced once, behind its last W, and replicas stay the same.
#[test]
fn a_split_backward_reduces_each_gradient_once() {
    let oracle = read("llama_deep");
    for kind in ["zb-h1", "zb-h2", "1f1b"] {
        let split = Split { microbatches: 2, schedule: Some((kind, 1)), ..PLAIN };
        let (compiled, rows) = split_step(&oracle, "dp=2,pp=2", split, false, &mut |_, _| {});
        let program = &compiled.program;
        for stage in &program.stages {
            let is_parameter = |name: &Name| {
                let known = program.states.iter().find(|s| s.name == *name);
                known.is_some_and(|s| matches!(s.role, Role::Parameter { .. }))
            };
            let states = stage.buffers.iter().filter(|b| b.region == Region::State);
            let parameters = states.filter(|b| b.state.as_ref().is_some_and(is_parameter)).count();
            let found = reductions(program, stage);
            assert_eq!(found.len(), parameters, "{kind}");
            let last = if kind == "1f1b" { Kind::Backward } else { Kind::Weight };
            for (s, _) in found {
                let segment = &stage.segments[s];
                assert_eq!(segment.kind, last, "{kind}");
                let calls: Vec<_> = stage.calls.iter().filter(|c| c.segment == s).collect();
                assert_eq!(calls.len(), 1, "{kind}: in the last one only");
                assert_eq!(calls[0].microbatch, Some(1), "{kind}");
            }
        }
        let mut local = Local::new(program, 2).expect("a program that runs");
        fill(&mut local, program, &oracle);
        local.step(&all_feeds(&oracle, &rows, 0), &mut Taps::default()).expect("a step");
        assert_eq!(local.drifted(), None, "{kind}");
    }
}

/// B38: the output of each micro-batch meets its own label: 1 and 1, 2 and 10, 3 and 100, 4 and 1000 are 4321, over 4.
#[test]
fn an_output_meets_the_label_of_its_micro_batch() {
    let graph = || {
        let mut m = Model::new();
        m.dim("b", 1);
        let (x, label) = (m.input("x", DType::F32, "b"), m.input("label", DType::F32, "b"));
        m.layer(0);
        let w = m.parameter("w", "", Init::Ones);
        let y = m.einsum("b", &[&x, &w]);
        m.layer(1);
        let u = m.parameter("u", "", Init::Ones);
        let sum = m.einsum("", &[&y, &label, &u]);
        let count = m.constant(1.0, DType::F32);
        m.loss(&sum, &count);
        m.finish().expect("a graph")
    };
    let feeds: Vec<Feeds> = [1.0_f32, 10.0, 100.0, 1000.0]
        .iter()
        .enumerate()
        .map(|(m, label)| floats(&[("x", &[m as f32 + 1.0]), ("label", &[*label])]))
        .collect();
    for kind in ["gpipe", "1f1b", "zb-h1", "zb-h2"] {
        let split = Split { microbatches: 4, schedule: Some((kind, 1)), ..PLAIN };
        let compiled = step(graph(), "pp=2", &[], split, None);
        let mut local = filled(&compiled, |_| 1.0);
        let mut taps = Taps::of(["loss", "grad.w", "grad.u"]);
        local.step(&feeds, &mut taps).expect("a step");
        for tap in ["loss", "grad.w", "grad.u"] {
            assert_eq!(taps.number(tap), Some(4321.0 / 4.0), "{kind}: {tap}");
        }
    }
}

/// B45's kind: a gradient that is not finite on one stage, where the loss is finite, is known on all ranks before any of them
/// steps: the step stops, and no state has changed anywhere.
#[test]
fn what_is_not_finite_on_one_stage_stops_all() {
    let graph = || {
        let mut m = Model::new();
        m.dim("d", 4);
        let x = m.input("x", DType::F32, "d");
        m.layer(0);
        let w = m.parameter("w", "d", Init::Ones);
        let y = m.einsum("d", &[&x, &w]);
        m.layer(1);
        let u = m.parameter("u", "d", Init::Ones);
        // Its slope at 0 is infinite.
        let root = m.unary(Unary::Sqrt, &u);
        let sum = m.add(&[&y, &root]);
        let sum = m.einsum("", &[&sum]);
        let count = m.constant(1.0, DType::F32);
        m.loss(&sum, &count);
        m.finish().expect("a graph")
    };
    let feeds = floats(&[("x", &[1.0; 4])]);
    for (mesh, kind) in [("pp=2", "1f1b"), ("dp=2,pp=2", "zb-h1"), ("pp=2", "gpipe")] {
        for clip in [None, Some(1.0)] {
            let split = Split { schedule: Some((kind, 1)), ..PLAIN };
            let compiled = step(graph(), mesh, &[], split, clip);
            let (mut local, before) = (filled(&compiled, u_is_0), filled(&compiled, u_is_0));
            let mut taps = Taps::of(["loss"]).finite("loss").finite("grad_norm");
            let stopped = local.step(std::slice::from_ref(&feeds), &mut taps);
            let what = stopped.expect_err("the norm is infinite").to_string();
            assert!(what.contains("grad_norm"), "{what}");
            assert!(local.same_states(&before), "{mesh}, {kind}, {clip:?}");
            // The same without the zero goes on.
            let mut fine = filled(&compiled, |_| 1.0);
            fine.step(std::slice::from_ref(&feeds), &mut taps).expect("a step");
            assert!(!fine.same_states(&before), "{mesh}, {kind}, {clip:?}");
        }
    }
}

fn u_is_0(name: &str) -> f32 {
    f32::from(u8::from(name != "u"))
}

/// What runs runs in the order of the table, on every rank; and no stage before what it needs.
#[test]
fn the_measured_order_is_that_of_the_table() {
    let oracle = read("llama_deep");
    for (kind, l) in [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)] {
        let split = Split { microbatches: 8, schedule: Some((kind, l)), ..PLAIN };
        let (compiled, rows) = split_step(&oracle, "pp=4", split, false, &mut |_, _| {});
        let program = &compiled.program;
        let mut local = Local::new(program, 2).expect("a program that runs");
        fill(&mut local, program, &oracle);
        let marks = local.step_recorded(&all_feeds(&oracle, &rows, 0), &mut Taps::default()).expect("a step");
        let mut ends: BTreeMap<(usize, Kind, usize), f64> = BTreeMap::new();
        let mut found: Vec<Vec<String>> = Vec::new();
        for (row, marks) in marks.iter().enumerate() {
            let stage = &program.stages[row];
            let mut names = Vec::new();
            let mut before = 0.0;
            for mark in marks.iter().filter(|m| m.wait.is_none()) {
                assert!(
                    mark.start >= before && mark.end >= mark.start,
                    "{kind}: calls run one after the other"
                );
                before = mark.end;
                let call = stage.calls[mark.call];
                let segment = &stage.segments[call.segment];
                if let (Duty::Work, Some(m)) = (segment.duty, call.microbatch) {
                    names.push(format!("{}{}{m}", segment.stage, segment.kind.letter()));
                    ends.insert((segment.stage, segment.kind, m), mark.end);
                }
            }
            found.push(names);
        }
        for (row, actions) in compiled.sharded.decisions.schedule.rows.iter().enumerate() {
            let halves = |a: &ir::schedule::Action| match (a.kind, found[row].contains(&a.to_string())) {
                (Kind::Optimizer, _) => Vec::new(),
                (_, true) => vec![a.to_string()],
                (_, false) => ["I", "W"].map(|k| a.to_string().replace('B', k)).to_vec(),
            };
            let table: Vec<String> = actions.iter().flat_map(halves).collect();
            assert_eq!(found[row], table, "{kind}, row {row}");
        }
        for ((stage, of, m), end) in &ends {
            if let (Kind::Forward, Some(before)) = (of, stage.checked_sub(1)) {
                assert!(ends[&(before, Kind::Forward, *m)] <= *end, "{kind}: {stage}F{m}");
            }
        }
    }
}

/// B31: what a rank gets ready for one action ahead comes beside computing; made ready for right before its use, it is
/// waited for, or ranks wait for each other for ever. The plan's timeline has both: where both end, the early one stalls less or
/// as long; and the checker refuses what does not end.
#[test]
fn receives_one_action_ahead_stall_less() {
    let oracle = read("llama_deep");
    let slow = Cluster { latency: 1e-3, ..here() };
    let (mut less, mut hang) = (0, 0);
    for (kind, l) in [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2)] {
        let split = Split { microbatches: 4, schedule: Some((kind, l)), ..PLAIN };
        let (compiled, _) = split_step(&oracle, "pp=2", split, false, &mut |_, _| {});
        let mut late = compiled.program.clone();
        for stage in &mut late.stages {
            let of = |c: &Call| {
                let s = &stage.segments[c.segment];
                (s.stage, s.kind, s.duty, c.microbatch)
            };
            let (posts, mut calls): (Vec<Call>, Vec<Call>) =
                stage.calls.iter().partition(|c| of(c).2 == Duty::Post);
            for post in posts {
                let (k, kind, _, m) = of(&post);
                let use_at = calls.iter().position(|c| of(c) == (k, kind, Duty::Work, m)).unwrap();
                calls.insert(use_at, post);
            }
            stage.calls = calls;
        }
        // None where ranks wait for each other for ever.
        let stall = |program: &Program| -> Option<f64> {
            let timeline = timeline(program, &slow);
            let ends = timeline.rows.iter().zip(&program.stages).all(|(r, s)| r.spans.len() == s.calls.len());
            ends.then(|| timeline.rows.iter().map(|r| r.exposed + r.waiting).sum())
        };
        assert_eq!(check(&compiled.sharded, &late).is_ok(), stall(&late).is_some(), "{kind}");
        let early = stall(&compiled.program).expect("what is emitted ends");
        let Some(late) = stall(&late) else {
            hang += 1;
            continue;
        };
        assert!(early <= late * (1.0 + 1e-9), "{kind}: {early} s and {late} s");
        less += usize::from(early < 0.999 * late);
    }
    assert!(less >= 1 && hang >= 1, "{less} kinds stall less, {hang} hang if late");
}

/// A comparison that all of these rest on: without a pipeline the same graphs give the same.
#[test]
fn one_stage_gives_the_same() {
    let compiled = step(tied(), "dp=2", &[("x", "[dp]"), ("y", "[dp]")], PLAIN, None);
    let mut local = filled(&compiled, |_| 1.0);
    let mut taps = Taps::of(["grad.w"]);
    let feeds = floats(&[("x", &[1.0, 2.0]), ("y", &[3.0, 4.0])]);
    local.step(std::slice::from_ref(&feeds), &mut taps).expect("a step");
    assert_eq!(taps.get("grad.w").unwrap().data, [5.0; 6]);
}
