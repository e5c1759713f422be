//! Dropout: what is dropped is the same on every mesh, for every number of micro-batches and when it is computed again, and
//! nothing else decides it than seed, step, name and place.

use std::collections::BTreeMap;

use ir::composite::dropout;
use ir::dsl::Model;
use ir::graph::Recompute;
use ir::schedule::Schedule;
use ir::state::{AdamW, Init};
use ir::{DType, Graph, Mesh, Name, Op, Part, Places};
use meshc_tests::meaning::places;
use meshc_tests::oracle::read;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, here, split_step_with};
use models::Dropout;
use passes::Compiled;
use planner::choose::compile;
use planner::numeric::{all_feeds as random, lockstep, program};
use planner::zero::Zero;
use runtime::data::rows::Rows;
use runtime::eval::eval;
use runtime::local::{HostTensor, Local, Taps};
use runtime::lockstep::run_over;
use runtime::tensor::Tensor;

/// What of 4x4 ones is kept at rate 0.5, seed 7, step 0, by the name `y`: B50's mask.
const MASK: [[u8; 4]; 4] = [[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]];

/// Ones of so many rows and columns of which some are dropped, tapped as `y`, lying as is asked.
fn ones(rows: usize, columns: usize, p: f64, name: &str, seed: u64, lies: &str) -> Graph {
    let mut m = Model::new();
    m.dim("b", rows);
    m.dim("d", columns);
    let x = m.input("x", DType::F32, "b d");
    let y = dropout(&mut m, &x, p, name);
    m.constrain(&y, lies);
    m.tap("y", &y);
    let mut graph = m.finish().unwrap();
    graph.seed(seed);
    graph
}

fn on(graph: Graph, mesh: &str, row: &str, x: &str, microbatches: usize) -> Compiled {
    let mesh = Mesh::parse(mesh).unwrap();
    let mut places = Places::from(places(&[("row", row), ("x", x), ("step", "[]")], &mesh));
    places.schedule = Schedule::one_stage(microbatches);
    compile(graph, &mesh, places, &here(), &mut |_, _| {})
}

fn fed(rows: &Rows, columns: usize) -> Vec<BTreeMap<Name, HostTensor>> {
    let one = |numbers: Vec<i32>| {
        let x = HostTensor::F32(vec![1.0; numbers.len() * columns]);
        BTreeMap::from([("row".into(), HostTensor::I32(numbers)), ("x".into(), x)])
    };
    rows.numbers().into_iter().map(one).collect()
}

/// What of ones is left, whole, by a run on the local backend.
fn left(compiled: &Compiled, rows: &Rows, columns: usize, step: i32) -> Vec<f32> {
    let mut local = Local::new(&compiled.program, 2).unwrap();
    local.set_integer("step", step).unwrap();
    let mut taps = Taps::of(["y"]);
    local.step(&fed(rows, columns), &mut taps).unwrap();
    rows.join(taps.all("y")).unwrap().data
}

/// The same on one device.
fn left_of(rows: usize, columns: usize, p: f64, name: &str, seed: u64, step: i32) -> Vec<f32> {
    let compiled = on(ones(rows, columns, p, name, seed, "[_, _]"), "", "[_]", "[_, _]", 1);
    left(&compiled, &Rows::chunks(rows, 1), columns, step)
}

#[test]
fn b50_what_is_dropped_is_the_same_however_it_is_split() {
    let want: Vec<f32> = MASK.iter().flatten().map(|kept| 2.0 * f32::from(*kept)).collect();
    assert_eq!(left_of(4, 4, 0.5, "y", 7, 0), want);
    for (mesh, row, x, lies) in [
        ("tp=2", "[_]", "[_, _]", "[_, _]"),
        ("tp=4", "[_]", "[_, _]", "[_, _]"),
        ("dp=2", "[dp]", "[dp, _]", "[dp, _]"),
        ("dp=4", "[dp]", "[dp, _]", "[dp, _]"),
        ("dp=3", "[dp]", "[dp, _]", "[dp, _]"),
        ("tp=2", "[_]", "[_, tp]", "[_, tp]"),
        ("tp=4", "[_]", "[_, tp]", "[_, tp]"),
        ("tp=3", "[_]", "[_, tp]", "[_, tp]"),
        ("dp=2,tp=2", "[dp]", "[dp, tp]", "[dp, tp]"),
    ] {
        let ranks =
            Mesh::parse(mesh).unwrap().find("dp").map_or(1, |a| Mesh::parse(mesh).unwrap().size(a[0]));
        let each = 4usize.div_ceil(ranks);
        let pieces: Vec<_> = (0..ranks).map(|r| (r * each).min(4)..((r + 1) * each).min(4)).collect();
        for microbatches in [1, 2, 4] {
            let rows = Rows::of(&pieces, microbatches);
            let compiled = on(ones(rows.each(), 4, 0.5, "y", 7, lies), mesh, row, x, microbatches);
            let found = left(&compiled, &rows, 4, 0);
            assert_eq!(found, want, "{lies} on {mesh}, {microbatches} micro-batches");
        }
    }
}

#[test]
fn ranks_of_one_row_drop_the_same_and_those_of_others_not() {
    let compiled = on(ones(4, 4, 0.5, "y", 7, "[dp, _]"), "dp=2,tp=2", "[dp]", "[dp, _]", 1);
    let feeds = BTreeMap::from([
        ("row".into(), Tensor::from_fn(&[4], |i| i as f64)),
        ("x".into(), Tensor::full(&[4, 4], 1.0)),
        ("step".into(), Tensor::full(&[], 0.0)),
    ]);
    let values = run_over::<f64>(&compiled.sharded, &[feeds], eval);
    let tap = compiled.sharded.graph.nodes.iter().find(|n| matches!(n.op, Op::Tap(_))).unwrap();
    let pieces = &values[tap.args[0].index()];
    assert_eq!(pieces[0].data, pieces[1].data);
    assert_eq!(pieces[2].data, pieces[3].data);
    assert_ne!(pieces[0].data, pieces[2].data);
}

#[test]
fn another_seed_step_or_name_drops_others() {
    let all = [
        left_of(8, 8, 0.5, "y", 7, 0),
        left_of(8, 8, 0.5, "y", 8, 0),
        left_of(8, 8, 0.5, "y", 7, 1),
        left_of(8, 8, 0.5, "z", 7, 0),
    ];
    for (i, a) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|b| a != b), "{i}");
    }
    assert_eq!(left_of(8, 8, 0.5, "y", 7, 1), all[2]);
}

/// Of n numbers the share that is kept has the deviation sqrt(p (1 - p) / n), their mean sqrt(p / (1 - p) / n): four of
/// them are allowed.
#[test]
fn as_many_are_kept_as_the_rate_says_and_the_mean_stays() {
    for p in [0.1, 0.5, 0.9] {
        let left = left_of(64, 1000, p, "y", 7, 0);
        let n = left.len() as f64;
        let kept = left.iter().filter(|x| **x != 0.0).count() as f64 / n;
        let mean = left.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        assert!((kept - (1.0 - p)).abs() < 4.0 * (p * (1.0 - p) / n).sqrt(), "{p}: {kept} are kept");
        assert!((mean - 1.0).abs() < 4.0 * (p / (1.0 - p) / n).sqrt(), "{p}: the mean is {mean}");
    }
}

/// The backward pass draws again: nothing as large as the numbers goes from forward to backward.
#[test]
fn no_mask_is_kept() {
    let mut m = Model::new();
    [("b", 4), ("s", 3), ("d", 8)].iter().for_each(|(name, size)| m.dim(name, *size));
    let w = m.parameter("w", "d", Init::Ones);
    let x = m.input("x", DType::F32, "b s d");
    let x = m.mul(&[&x, &w]);
    let y = dropout(&mut m, &x, 0.5, "y");
    let loss = m.einsum("", &[&y, &y]);
    let count = m.constant(1.0, DType::F32);
    m.loss(&loss, &count);
    let mut graph = m.finish().unwrap();
    graph.optimizer = Some(AdamW::default());
    passes::GRAPH.iter().for_each(|pass| (pass.run)(&mut graph));
    let (drawn, makers) = (graph.drawn(), graph.makers());
    let backward = graph.nodes.iter().filter(|n| matches!(n.mark.part, Part::Input | Part::Weight));
    for v in backward.flat_map(|n| &n.args).filter(|v| drawn[v.index()]) {
        assert_ne!(graph.nodes[makers[v.index()]].mark.part, Part::Forward, "{v} is kept");
    }
    let draws = graph.nodes.iter().filter(|n| matches!(n.op, Op::Random(_))).count();
    assert_eq!(draws, 2);
}

/// What a step of a model with dropout leaves: the loss and every gradient.
fn step(model: &str, dropout: Dropout, mesh: &str, split: Split, workers: usize) -> BTreeMap<Name, Vec<f32>> {
    let oracle = read(model);
    let (compiled, rows) = split_step_with(&oracle, dropout, mesh, split, true, &mut |_, _| {});
    let mut local = Local::new(&compiled.program, workers).unwrap();
    fill(&mut local, &compiled.program, &oracle);
    local.set_integer("step", 3).unwrap();
    let names: Vec<Name> =
        local.taps().into_iter().filter(|t| t.starts_with("grad.") || &**t == "loss").collect();
    let mut taps = Taps::of(names.iter().map(|n| &**n));
    local.step(&all_feeds(&oracle, &rows, 0), &mut taps).unwrap();
    names.into_iter().map(|name| (name.clone(), taps.get(&name).unwrap().data.clone())).collect()
}

/// As `numeric::program`: a share of the tensor's largest number.
fn close(found: &[f32], want: &[f32]) -> bool {
    let largest = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    found.len() == want.len() && found.iter().zip(want).all(|(a, b)| (a - b).abs() <= 2e-4 * largest)
}

const RATE: Dropout = Dropout::Everywhere(0.1);

#[test]
fn every_split_of_a_model_drops_what_one_device_drops() {
    let full = Split { recompute: Recompute::Full, ..PLAIN };
    let two = Split { microbatches: 2, ..PLAIN };
    let zero = Split { zero: Zero::Parameters, ..PLAIN };
    for model in ["gpt2", "llama"] {
        let want = step(model, RATE, "", PLAIN, 1);
        let without = step(model, Dropout::Everywhere(0.0), "", PLAIN, 1);
        assert!(!close(&want["loss"], &without["loss"]), "{model}: nothing is dropped");
        for (mesh, split) in [
            ("dp=2", PLAIN),
            ("dp=3", two),
            ("tp=2", PLAIN),
            ("dp=2,tp=2", PLAIN),
            ("", two),
            ("dp=2,tp=2", two),
            ("dp=2", zero),
            ("", full),
            (
                "dp=2",
                Split { recompute: Recompute::Selective, zero: Zero::Gradients, microbatches: 2, ..PLAIN },
            ),
        ] {
            let found = step(model, RATE, mesh, split, 2);
            assert_eq!(found.len(), want.len());
            for (name, tensor) in &found {
                assert!(close(tensor, &want[name]), "{model} on `{mesh}`, {split:?}: {name} is off");
            }
        }
    }
}

#[test]
fn what_is_computed_again_drops_the_same() {
    for model in ["gpt2", "llama"] {
        let kept = step(model, RATE, "dp=2", PLAIN, 2);
        for recompute in [Recompute::Selective, Recompute::Full] {
            assert_eq!(step(model, RATE, "dp=2", Split { recompute, ..PLAIN }, 2), kept, "{model}");
        }
    }
}

#[test]
fn lockstep_and_the_program_drop_what_one_device_drops() {
    let oracle = read("gpt2");
    for (mesh, split) in [
        ("dp=2,tp=2", PLAIN),
        ("dp=2", Split { zero: Zero::Parameters, microbatches: 2, recompute: Recompute::Full, ..PLAIN }),
    ] {
        let (compiled, _) = split_step_with(&oracle, RATE, mesh, split, true, &mut |_, _| {});
        let feeds = random(&compiled.sharded, 5);
        lockstep(&compiled.sharded, &feeds, eval).unwrap_or_else(|e| panic!("{mesh}: {e:?}"));
        program(&compiled.sharded, &compiled.program, &feeds, 2)
            .unwrap()
            .unwrap_or_else(|e| panic!("{mesh}: {e:?}"));
    }
}

/// A rank that counts its numbers from its own first, or its rows, is found by lockstep.
#[test]
fn a_local_index_is_found() {
    let oracle = read("gpt2");
    let (compiled, _) = split_step_with(&oracle, RATE, "dp=2,tp=2", PLAIN, true, &mut |_, _| {});
    let feeds = random(&compiled.sharded, 5);
    let found = lockstep(&compiled.sharded, &feeds, |node, ranges, args| {
        let zero: Vec<_> = ranges.iter().map(|r| 0..r.len()).collect();
        eval(node, if let Op::Random(_) = node.op { &zero } else { ranges }, args)
    });
    assert!(found.is_err());
    let found = lockstep(&compiled.sharded, &feeds, |node, ranges, args| {
        let own = Tensor::from_fn(&args.first().map_or(vec![], |t| t.shape.clone()), |i| i as f64);
        let mut with = args.to_vec();
        if let (Op::Random(_), Some(row)) = (&node.op, with.first_mut()) {
            *row = &own;
        }
        eval(node, ranges, &with)
    });
    assert!(found.is_err());
}
