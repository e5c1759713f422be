//! Small situations of micro-batches, split state and clipping in which others computed a wrong value, on the local backend.

use std::collections::BTreeMap;

use ir::dsl::Model;
use ir::schedule::Schedule;
use ir::state::{AdamW, Init};
use ir::{Binary, DType, Graph, Mesh, Name, Places};
use meshc_tests::meaning::places;
use meshc_tests::oracle::read;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, here, split_step};
use planner::choose::compile;
use planner::zero::{self, Zero};
use runtime::local::{HostTensor, Local, RunError, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

type Feeds = BTreeMap<Name, HostTensor>;

/// What a step taps of `names`, every f32 state 1 at first.
fn tapped(
    mut graph: Graph,
    mesh: &str,
    at: &[(&str, &str)],
    zero: Zero,
    feeds: &[Feeds],
    names: &[&str],
) -> Vec<Vec<f32>> {
    graph.optimizer = Some(AdamW { clip: Some(1.0), ..AdamW::default() });
    graph.dump = true;
    graph.scatters = zero >= Zero::Gradients;
    let mesh = Mesh::parse(mesh).expect("a mesh");
    let mut placed = Places::from(places(at, &mesh));
    for state in &graph.states {
        placed.at.entry(state.name.clone()).or_insert(ir::Sharding::replicated(state.dims.len()));
    }
    placed.schedule = Schedule::one_stage(feeds.len());
    zero::split(zero, &graph, &mesh, &mut placed);
    let compiled = compile(graph, &mesh, placed, &here(), &mut |_, _| {});
    let mut local = Local::new(&compiled.program, 2).expect("a program that runs");
    for state in compiled.program.states.iter().filter(|s| s.dtype.is_float()) {
        let one = f32::from(u8::from(matches!(state.role, ir::state::Role::Parameter { .. })));
        local
            .fill_state::<RunError>(&state.name, &mut |_, out| {
                out.fill(one);
                Ok(())
            })
            .expect("a state");
    }
    let mut taps = Taps::of(names.iter().copied());
    local.step(feeds, &mut taps).expect("a step");
    names.iter().map(|name| taps.get(name).expect("a tap").data.clone()).collect()
}

/// The mean over the labels that count of `w` times a number of each token.
fn mean() -> Graph {
    let mut m = Model::new();
    m.dim("b", 2);
    m.dim("s", 4);
    let x = m.input("x", DType::F32, "b s");
    let labels = m.input("labels", DType::I32, "b s");
    let w = m.parameter("w", "", Init::Ones);
    let zero = m.constant(0.0, DType::I32);
    let counts = m.binary(Binary::Ge, &labels, &zero);
    let counts = m.cast(&counts, DType::F32);
    let sum = m.einsum("", &[&x, &counts, &w]);
    let count = m.einsum("", &[&counts]);
    m.loss(&sum, &count);
    m.finish().expect("a graph")
}

/// B39: sums 6 over 2 tokens and 4 over 8 are a mean of 1, whether the parts are ranks or micro-batches; of no label at all 0.
#[test]
fn micro_batches_make_no_mean_of_means() {
    let of = |x: [f32; 8], labels: [i32; 8]| -> Feeds {
        [("x".into(), HostTensor::F32(x.to_vec())), ("labels".into(), HostTensor::I32(labels.to_vec()))]
            .into()
    };
    let none = of([2.0; 8], [-100; 8]);
    let parts = [of([3.0; 8], [1, -100, -100, -100, 1, -100, -100, -100]), of([0.5; 8], [1; 8])];
    let places = [("x", "[dp, _]"), ("labels", "[dp, _]")];
    for zero in ZERO {
        for mesh in ["dp=1", "dp=2", "dp=3"] {
            for (feeds, want) in [(parts.to_vec(), 1.0), (vec![none.clone(); 3], 0.0)] {
                let names = ["loss", "grad.w", "grad_norm"];
                let found = tapped(mean(), mesh, &places, zero, &feeds, &names);
                assert_eq!(found, [[want]; 3], "{zero:?} on {mesh}");
            }
        }
    }
}

/// B59 (b): ranks that hold the same weights, moments and masters still hold the same bits after some steps, whatever is
/// split: what they compute of them they compute in the same order, or add up together.
#[test]
fn replicas_do_not_drift_apart() {
    let oracle = read("llama");
    for mesh in ["tp=2", "dp=3", "dp=2,tp=2", "tp=3,dp=2"] {
        for zero in ZERO {
            let split = Split { zero, microbatches: 2, ..PLAIN };
            let (compiled, rows) = split_step(&oracle, mesh, split, false, &mut |_, _| {});
            let mut local = Local::new(&compiled.program, 2).expect("a program that runs");
            fill(&mut local, &compiled.program, &oracle);
            for step in 0..2 {
                local.step(&all_feeds(&oracle, &rows, step), &mut Taps::default()).expect("a step");
                assert_eq!(local.drifted(), None, "{mesh}, {zero:?}");
            }
        }
    }
}

/// B42 (a): gradients 3 and 4 in pieces and 12 whole have the norm 13, however they are split: each counts once.
#[test]
fn the_norm_counts_each_gradient_once() {
    let graph = || {
        let mut m = Model::new();
        m.dim("d", 2);
        m.dim("one", 1);
        let x = m.input("x", DType::F32, "d");
        let w = m.parameter("w", "d", Init::Ones);
        let u = m.parameter("u", "one", Init::Ones);
        let a = m.einsum("", &[&x, &w]);
        let b = m.einsum_scaled(12.0, "", &[&u]);
        let sum = m.add(&[&a, &b]);
        let count = m.constant(1.0, DType::F32);
        m.loss(&sum, &count);
        m.finish().expect("a graph")
    };
    let feeds = [[("x".into(), HostTensor::F32(vec![3.0, 4.0]))].into()];
    for zero in ZERO {
        for (mesh, place) in [("tp=2", "[tp]"), ("dp=2", "[_]"), ("dp=3", "[_]"), ("dp=2,tp=2", "[tp]")] {
            let names = ["grad_norm", "grad.w", "grad.u"];
            let found = tapped(graph(), mesh, &[("w", place)], zero, &feeds, &names);
            assert_eq!(found, [vec![13.0], vec![3.0, 4.0], vec![12.0]], "{zero:?} on {mesh}");
        }
    }
}
