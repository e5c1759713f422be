//! After it every operand is as its node needs it: a reshard stands wherever one was not. Equal needs share a reshard,
//! whose mark is that of its first user, so that a gradient is reduced in the update that uses it.
//!
//! Needs the strategies of all nodes, so it comes after `choose`.
//!
//! ```text
//! v2 = einsum v0, v1 : ... @ [dp, _] partial(tp)
//! v3 = exp v2 : ...                              needs v2 as [dp, _]
//!   ->
//! v3 = reshard v2 : ... @ [dp, _]
//! v4 = exp v3
//! ```

use std::collections::HashMap;

use ir::graph::{Mark, NewNode, Rewrite};
use ir::rows::{Strategy, layout};
use ir::{Dim, Graph, Op, Part, ShardedGraph, Sharding, Signature, Value};

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let old = std::mem::take(&mut sharded.graph);
    let strategies = std::mem::take(&mut sharded.decisions.strategies);
    let old_shardings = std::mem::take(&mut sharded.shardings);
    let mut new = Rewrite::of(&old);
    let mut shardings: Vec<Sharding> = Vec::new();
    let mut kept: Vec<Strategy> = Vec::new();
    let mut made: HashMap<(Value, Sharding), Value> = HashMap::new();
    let needs: Vec<Vec<Sharding>> = old
        .nodes
        .iter()
        .zip(&strategies)
        .map(|(node, strategy)| match node.op == Op::Reshard {
            true => Vec::new(),
            false => layout(&old, node, strategy, &sharded.mesh).map_or(Vec::new(), |l| l.args),
        })
        .collect();
    let first = first_parts(&old, &needs);
    for ((node, strategy), needs) in old.nodes.iter().zip(strategies).zip(&needs) {
        let mut args: Vec<Value> = node.args.iter().map(|v| new.at(*v)).collect();
        for ((v, needed), was) in args.iter_mut().zip(needs).zip(&node.args) {
            if shardings[v.index()] == *needed {
                continue;
            }
            let source = *v;
            *v = *made.entry((source, needed.clone())).or_insert_with(|| {
                let part = first.get(&(*was, needed)).copied().unwrap_or(node.mark.part);
                let value = push_reshard(&mut new, source, Mark { part, ..node.mark });
                shardings.push(needed.clone());
                kept.push(Strategy {
                    split: vec![Vec::new(); new.graph.shape(source).len()],
                    pass: Vec::new(),
                });
                value
            });
        }
        let at = new.copy(&old, node);
        new.graph.nodes[at].args = args;
        shardings.extend(node.results.iter().map(|v| old_shardings[v.index()].clone()));
        kept.push(strategy);
    }
    sharded.graph = new.finish(&old);
    sharded.shardings = shardings;
    sharded.decisions.strategies = kept;
    sharded.agreed = true;
}

/// For each value as it is needed, the first part of a step that needs it so: nodes of a later part may stand before
/// those of an earlier one, but run behind them.
fn first_parts<'a>(graph: &Graph, needs: &'a [Vec<Sharding>]) -> HashMap<(Value, &'a Sharding), Part> {
    let mut first = HashMap::new();
    for (node, needs) in graph.nodes.iter().zip(needs) {
        for (v, needed) in node.args.iter().zip(needs) {
            let part = first.entry((*v, needed)).or_insert(node.mark.part);
            *part = node.mark.part.min(*part);
        }
    }
    first
}

fn push_reshard(new: &mut Rewrite, source: Value, mark: Mark) -> Value {
    let dims: Vec<Dim> = (0..new.graph.shape(source).len()).map(|i| vec![i]).collect();
    let factors = (0..dims.len()).map(|i| format!("i{i}").into()).collect();
    let signature = Signature { factors, args: vec![dims.clone()], results: vec![dims] };
    let dtype = new.graph.ty(source).dtype;
    let (op, args) = (Op::Reshard, vec![source]);
    let node =
        NewNode { op, signature, args, dtype, known: Vec::new(), mark, tag: None, of: None, like: None };
    let value = new.graph.push(node).unwrap_or_else(|e| panic!("a reshard keeps the shape: {e}"));
    value.unwrap_or_else(|| panic!("a reshard has a result"))
}
