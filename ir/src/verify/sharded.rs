//! The rules of a graph on a mesh: those of the graph, and that everything lies where it has to.

use super::{Fault, VerifyError, called, verify};
use crate::rows::Layouts;
use crate::{Axes, Op, ShardedGraph, Sharding, Value};

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
    let mut layouts = Layouts::new(graph, mesh);
    for (i, node) in graph.nodes.iter().enumerate() {
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
        let Some(layout) = layouts.of(node, &sharded.decisions.strategies[i]) else {
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
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
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
