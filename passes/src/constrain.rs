//! After it a value that is constrained, or lies as a state does, is the result of a reshard, from which every later use starts. A reshard
//! that turns out to change nothing is dropped when shardings are known.
//!
//! Before anything is chosen, so that the choice sees a constraint as a node whose result lies as was asked.
//!
//! ```text
//! v1 = exp v0              constrain v1 [tp, _]
//! v2 = sin v1
//!   ->
//! v1 = exp v0
//! v2 = reshard v1          constrain v2 [tp, _]
//! v3 = sin v2
//! ```

use std::collections::HashSet;

use ir::graph::Rewrite;
use ir::{ShardedGraph, Value};

use crate::reshard::push_reshard;
use crate::simplify::asked_of;

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let asked: HashSet<Value> = asked_of(&sharded.graph).collect();
    if asked.is_empty() {
        return;
    }
    let old = std::mem::take(&mut sharded.graph);
    let mut new = Rewrite::of(&old);
    // What each value is behind its own node, before it is moved: a backward node belongs to its forward node still.
    let mut made = vec![None; old.values.len()];
    for node in &old.nodes {
        let at = new.copy(&old, node);
        new.graph.nodes[at].of = node.of.and_then(|v| made[v.index()]);
        node.results.iter().for_each(|v| made[v.index()] = new.now[v.index()]);
        for v in node.results.iter().filter(|v| asked.contains(v)) {
            let source = new.at(*v);
            new.now[v.index()] = Some(push_reshard(&mut new, source, node.mark));
        }
    }
    sharded.graph = new.finish(&old);
}
