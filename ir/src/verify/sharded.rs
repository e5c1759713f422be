//! The rules of a graph on a mesh: those of the graph, and that everything lies where it has to.

use std::mem::discriminant;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::{Fault, VerifyError, called, verify};
use crate::{Axes, Op, ShardedGraph, Sharding, Signature, Value};

/// All rules that a sharded graph breaks, those of its graph too.
///
/// # Errors
/// The broken rules.
pub fn verify_sharded(sharded: &ShardedGraph) -> Result<(), Vec<VerifyError>> {
    let mut errors = verify(&sharded.graph).err().unwrap_or_default();
    check_places(sharded, &mut errors);
    if !errors.is_empty() || sharded.shardings.is_empty() {
        return if errors.is_empty() { Ok(()) } else { Err(errors) };
    }
    let (graph, mesh) = (&sharded.graph, &sharded.mesh);
    let mut right = Right::default();
    for (i, node) in graph.nodes.iter().enumerate() {
        let before = errors.len();
        let mut report = |kind| errors.push(VerifyError { at: called(node), kind });
        for v in &node.results {
            check_sharding(sharded, *v, &mut report);
        }
        if let Op::Input(name) | Op::State(name) | Op::Assign(name) = &node.op {
            let value = node.results.first().or(node.args.first());
            let found = value.map(|v| sharded.sharding(*v));
            let place = sharded.decisions.places.get(name);
            if found != place && (sharded.agreed || !node.results.is_empty()) {
                let show = |s: Option<&Sharding>| s.map_or("nowhere".to_string(), |s| s.show(mesh));
                report(Fault::Place(name.to_string(), show(place), show(found)));
            }
        }
        if matches!(node.op, Op::Reshard | Op::Input(_) | Op::State(_)) {
            continue;
        }
        let known = right.entry(Arc::as_ptr(&node.signature)).or_default();
        if known.iter().any(|other| alike(sharded, *other, i)) {
            continue;
        }
        let Some(layout) = sharded.layout(i) else {
            report(Fault::Strategy(sharded.decisions.strategies[i].show(node, mesh)));
            continue;
        };
        for (v, needed) in node.results.iter().zip(&layout.results) {
            let found = sharded.sharding(*v);
            if found != needed {
                report(Fault::Result { found: found.show(mesh), needed: needed.show(mesh) });
            }
        }
        if sharded.agreed {
            for (v, needed) in node.args.iter().zip(&layout.args) {
                let found = sharded.sharding(*v);
                if found != needed {
                    report(Fault::NeedsReshard(*v, needed.show(mesh), found.show(mesh)));
                }
            }
        }
        if errors.len() == before && known.len() < MOST {
            known.push(i);
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// For signatures nodes that are laid out as their strategies say.
type Right = FxHashMap<*const Signature, Vec<usize>>;

/// So many different nodes of one signature are compared with each; what is like none of them is laid out.
const MOST: usize = 16;

/// Whether two nodes of one signature are laid out alike: what the layout depends on is the same, and so is how their values lie.
fn alike(sharded: &ShardedGraph, a: usize, b: usize) -> bool {
    let graph = &sharded.graph;
    let (x, y) = (&graph.nodes[a], &graph.nodes[b]);
    let like = |(v, w): (&Value, &Value)| {
        graph.ty(*v).dtype == graph.ty(*w).dtype && sharded.sharding(*v) == sharded.sharding(*w)
    };
    discriminant(&x.op) == discriminant(&y.op)
        && x.op.number() == y.op.number()
        && x.sizes == y.sizes
        && x.args.len() == y.args.len()
        && x.results.len() == y.results.len()
        && sharded.decisions.strategies[a] == sharded.decisions.strategies[b]
        && x.args.iter().zip(&y.args).all(like)
        && x.results.iter().zip(&y.results).all(like)
}

/// Places are of entries of the tables, and fit them.
fn check_places(sharded: &ShardedGraph, errors: &mut Vec<VerifyError>) {
    let graph = &sharded.graph;
    let states = graph.states_by_name();
    for (name, place) in &sharded.decisions.places {
        let mut report = |kind| errors.push(VerifyError { at: format!("place {name}"), kind });
        let input = graph.inputs.iter().find(|i| i.name == *name).map(|i| &i.dims);
        let dims = input.or(states.get(&**name).map(|s| &s.dims));
        match dims.map(|dims| dims.iter().map(|(_, n)| *n).collect::<Vec<_>>()) {
            None => report(Fault::Missing("input or state", name.to_string())),
            Some(shape) => fits(place, &shape, &sharded.mesh, &mut report),
        }
    }
}

fn check_sharding(sharded: &ShardedGraph, value: Value, report: &mut impl FnMut(Fault)) {
    fits(sharded.sharding(value), sharded.graph.shape(value), &sharded.mesh, report);
}

fn fits(sharding: &Sharding, shape: &[usize], mesh: &crate::Mesh, report: &mut impl FnMut(Fault)) {
    let dims = shape.len();
    if sharding.dims.len() == dims && sharding.merges() && !sharding.has_pairs(shape) {
        report(Fault::NoPairs(sharding.show(mesh)));
    }
    if sharding.dims.len() != dims {
        report(Fault::Dims { dims, sharding: sharding.show(mesh), found: sharding.dims.len() });
    }
    let axes: Axes = sharding.axes().collect();
    for axis in (1..axes.len()).filter(|i| axes[..*i].contains(&axes[*i])).map(|i| axes[i]) {
        report(Fault::AxisTwice(mesh.name(axis).to_string(), sharding.show(mesh)));
    }
}
