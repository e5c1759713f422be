//! Whether a sharded graph means what its graph means: all ranks in lockstep against one device, value by value.

use std::collections::BTreeMap;

use ir::state::{Role, State};
use ir::{Decisions, Graph, Mesh, Name, Node, Op, ShardedGraph, Sharding, Value, verify};
use planner::choose::space::Space;
use planner::choose::{choose, groups};
use runtime::lockstep::{Feeds, Kernel, assemble, one_device, run};
use runtime::tensor::Tensor;

use crate::whole::{here, wire};

use crate::random::Random;

/// A graph after all passes on graphs and sharded graphs, verified after each, split so that the fewest bytes are sent.
///
/// # Panics
/// If a pass breaks a rule.
pub fn step(graph: Graph, mesh: &Mesh, places: BTreeMap<Name, Sharding>) -> ShardedGraph {
    step_by(graph, mesh, places, &|s| choose(s, &wire()))
}

/// A graph after all passes on graphs and sharded graphs, verified after each.
///
/// # Panics
/// If a pass breaks a rule.
pub fn step_by(
    mut graph: Graph,
    mesh: &Mesh,
    places: BTreeMap<Name, Sharding>,
    choose: passes::Choose,
) -> ShardedGraph {
    for pass in passes::GRAPH {
        (pass.run)(&mut graph);
        expect(pass.name, verify::verify(&graph));
    }
    let mut sharded = ShardedGraph::new(graph, mesh.clone(), places);
    passes::shard(&mut sharded, choose, &mut |_, _| {});
    sharded
}

/// Every node split in any way that may be chosen, whatever it costs.
pub fn any_ways(sharded: &ShardedGraph, random: &mut Random) -> Decisions {
    let here = here();
    let mut space = Space::of(sharded, &here, None);
    let mut strategies = vec![Default::default(); sharded.graph.nodes.len()];
    for group in groups::all(&mut space, &sharded.graph) {
        // States keep their places.
        let given = matches!(sharded.graph.nodes[group.members[0]].op, Op::State(_) | Op::Assign(_));
        let way = if given { 0 } else { random.below(group.ways[0].all.len()) };
        for (i, ways) in group.members.iter().zip(&group.ways) {
            strategies[*i] = ways.all[way].strategy.clone();
        }
    }
    Decisions { strategies, ..sharded.decisions.clone() }
}

/// A sharded graph, split so that the fewest bytes are sent, after all passes on sharded graphs, verified before and
/// after each.
///
/// # Panics
/// If a pass breaks a rule.
pub fn sharded(mut sharded: ShardedGraph) -> ShardedGraph {
    expect("the reader", verify::verify(&sharded.graph));
    passes::shard(&mut sharded, &|s| choose(s, &wire()), &mut |_, _| {});
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
