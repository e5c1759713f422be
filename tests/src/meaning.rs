//! Whether a sharded graph means what its graph means: all ranks in lockstep against one device, value by value.

use std::collections::BTreeMap;

use ir::state::{Role, State};
use ir::{Graph, Mesh, Name, Node, Op, ShardedGraph, Sharding, Value, verify};
use runtime::lockstep::{Feeds, Kernel, assemble, one_device, run};
use runtime::tensor::Tensor;

use crate::random::Random;

/// A graph after all passes on graphs and sharded graphs, verified after each.
///
/// # Panics
/// If a pass breaks a rule.
pub fn step(mut graph: Graph, mesh: &Mesh, places: BTreeMap<Name, Sharding>) -> ShardedGraph {
    for pass in passes::GRAPH {
        (pass.run)(&mut graph);
        expect(pass.name, verify::verify(&graph));
    }
    sharded(ShardedGraph::new(graph, mesh.clone(), places))
}

/// A sharded graph after all passes on sharded graphs, verified before and after each.
///
/// # Panics
/// If a pass breaks a rule.
pub fn sharded(mut sharded: ShardedGraph) -> ShardedGraph {
    expect("the reader", verify::verify(&sharded.graph));
    for pass in passes::SHARDED {
        (pass.run)(&mut sharded);
        expect(pass.name, verify::verify_sharded(&sharded));
    }
    sharded
}

/// Stops with all broken rules.
///
/// # Panics
/// If there is one.
pub fn expect<E: std::fmt::Display>(after: &str, verified: Result<(), Vec<E>>) {
    if let Err(errors) = verified {
        let all: Vec<String> = errors.iter().map(ToString::to_string).collect();
        panic!("after {after}:\n{}", all.join("\n"));
    }
}

/// Places by name, as in `[("x", "[dp, _]")]`.
///
/// # Panics
/// If one cannot be read.
pub fn places(of: &[(&str, &str)], mesh: &Mesh) -> BTreeMap<Name, Sharding> {
    let read = |text| Sharding::parse(text, mesh).unwrap_or_else(|e| panic!("{e}"));
    of.iter().map(|(name, text)| ((*name).into(), read(text))).collect()
}

/// A tensor of these numbers.
pub fn tensor(shape: &[usize], data: &[f64]) -> Tensor<f64> {
    assert_eq!(shape.iter().product::<usize>(), data.len(), "{shape:?}");
    Tensor { shape: shape.to_vec(), data: data.to_vec() }
}

/// Something for every input and state that `given` lacks: floats of both signs, moments of one, integers in `0..4`.
pub fn feeds(graph: &Graph, given: Feeds<f64>, seed: u64) -> Feeds<f64> {
    let mut random = Random::new(seed);
    let mut feeds = given;
    let inputs = graph.inputs.iter().map(|i| (&i.name, i.dtype, &i.dims, false));
    let moment = |s: &State| matches!(s.role, Role::Moment(_));
    let states = graph.states.iter().map(|s| (&s.name, s.dtype, &s.dims, moment(s)));
    for (name, dtype, dims, moment) in inputs.chain(states) {
        let shape: Vec<usize> = dims.iter().map(|(_, n)| *n).collect();
        let number = |_| match dtype.is_float() {
            true if moment => random.between(0.0, 1.0),
            true => random.number(),
            false => random.below(4) as f64,
        };
        feeds.entry(name.clone()).or_insert_with(|| Tensor::from_fn(&shape, number));
    }
    feeds
}

/// What is tapped, by name.
pub fn taps(graph: &Graph) -> BTreeMap<Name, Value> {
    let tap = |n: &Node| if let Op::Tap(name) = &n.op { Some((name.clone(), n.args[0])) } else { None };
    graph.nodes.iter().filter_map(tap).collect()
}

/// Whether every value on every rank is what one device computes; `kernel` is that of the ranks.
///
/// # Errors
/// The first value that is not.
pub fn equals_one_device(
    sharded: &ShardedGraph,
    feeds: &Feeds<f64>,
    kernel: Kernel<f64>,
) -> Result<(), String> {
    let want = one_device(&sharded.graph, feeds);
    for (v, pieces) in run(sharded, feeds, kernel).iter().enumerate() {
        let whole =
            assemble(pieces, &sharded.shardings[v], &sharded.mesh).map_err(|e| format!("v{v}: {e}"))?;
        let off = whole.distance(&want[v]);
        if off > 1e-10 {
            return Err(format!("v{v} is off by {off:.1e} on {}", sharded.mesh));
        }
    }
    Ok(())
}
