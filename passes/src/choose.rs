//! After it every value has a sharding: the one that its node's strategy gives it. Operands may still disagree with
//! their users.
//!
//! What is chosen is in the decisions, which the planner writes; here is only what follows from them.
//!
//! ```text
//! v2 = einsum v0, v1 : m k, k n -> m n | split{m=dp n=tp}
//! v2 = einsum v0, v1 : m k, k n -> m n @ [dp, tp] | split{m=dp n=tp}
//! ```

use ir::graph::Constraint;
use ir::rows::Layouts;
use ir::{Mesh, Op, ShardedGraph, Sharding, Value};
use rustc_hash::FxHashMap;

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let graph = &sharded.graph;
    let mut asked: FxHashMap<Value, Sharding> =
        graph.constraints.iter().map(|c| (c.value, asked(c, &sharded.mesh))).collect();
    let places = &sharded.decisions.places;
    asked.extend(graph.follows.iter().filter_map(|(v, name)| Some((*v, places.get(name)?.clone()))));
    let mut shardings = vec![Sharding::replicated(0); graph.values.len()];
    let mut layouts = Layouts::new(graph, &sharded.mesh);
    for (node, strategy) in graph.nodes.iter().zip(&sharded.decisions.strategies) {
        for (i, v) in node.results.iter().enumerate() {
            let whole = || Sharding::replicated(graph.shape(*v).len());
            shardings[v.index()] = if let Op::Input(name) | Op::State(name) = &node.op {
                sharded.decisions.places.get(name).cloned().unwrap_or_else(whole)
            } else if node.op == Op::Reshard {
                asked.get(v).cloned().unwrap_or_else(whole)
            } else {
                layouts.of(node, strategy).map_or_else(whole, |l| l.results[i].clone())
            };
        }
    }
    sharded.shardings = shardings;
}

/// What the user asked, as a sharding; axes that the mesh lacks have size 1.
pub fn asked(constraint: &Constraint, mesh: &Mesh) -> Sharding {
    let axes = |names: &Vec<ir::Name>| names.iter().filter_map(|n| mesh.find(n)).flatten().collect();
    Sharding { dims: constraint.dims.iter().map(axes).collect(), partial: Vec::new() }
}
