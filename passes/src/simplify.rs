//! After it no two nodes of a part compute the same, no node only copies, constant factors stand in one place, and
//! nothing is computed that no state, tap or loss needs.
//!
//! Works on whole tensors, after autodiff and the optimizer, which write for clarity and not for thrift.
//!
//! ```text
//! v3 = einsum(2.0) v2      v4 = einsum(0.5) v3      ->  v2
//! v5 = exp v1              v6 = exp v1              ->  v5 twice
//! ```

use std::borrow::Cow;
use std::collections::HashSet;
use std::mem::{Discriminant, discriminant};

use ir::graph::Rewrite;
use ir::{DType, Dim, Graph, Node, Op, Part, Value};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

pub(crate) fn run(graph: &mut Graph) {
    let merged = merge(graph);
    *graph = drop_unused(merged);
}

/// The values of which something is asked.
pub(crate) fn asked_of(graph: &Graph) -> impl Iterator<Item = Value> {
    graph.constraints.iter().map(|c| c.value).chain(graph.follows.iter().map(|(v, _)| *v))
}

fn merge(graph: &Graph) -> Graph {
    let mut new = Rewrite::of(graph);
    let mut seen: FxHashMap<Key, Value> = FxHashMap::default();
    let mut makers: Makers = FxHashMap::default();
    let asked: HashSet<Value> = asked_of(graph).collect();
    for old in &graph.nodes {
        let mut node = Cow::Borrowed(old);
        fold_scale(&mut node, &new, &makers);
        // What the user asked of a value is asked of no other, however equal.
        let asked = node.results.iter().any(|v| asked.contains(v));
        if let Some(same) = copied(&node, &new).filter(|_| !asked) {
            new.now[node.results[0].index()] = Some(same);
            continue;
        }
        let key = key(&node, old, &new, graph).filter(|_| !asked);
        if let Some(same) = key.as_ref().and_then(|k| seen.get(k)) {
            new.now[node.results[0].index()] = Some(*same);
            continue;
        }
        let first = node.args.first().copied();
        let at = new.put(&graph.values, node.into_owned());
        for v in &new.graph.nodes[at].results {
            makers.insert(*v, (at, first));
        }
        if let (Some(key), Some(v)) = (key, new.graph.nodes[at].results.first()) {
            seen.insert(key, *v);
        }
    }
    new.finish(graph)
}

/// For each new value its node, and the first operand of that node by its old number.
type Makers = FxHashMap<Value, (usize, Option<Value>)>;

/// An einsum takes over the scale of an operand that is only a scaled copy.
fn fold_scale(node: &mut Cow<Node>, new: &Rewrite, makers: &Makers) {
    if !matches!(node.op, Op::Einsum { .. }) {
        return;
    }
    for k in 0..node.args.len() {
        let Some(&(at, Some(source))) = makers.get(&new.at(node.args[k])) else { continue };
        let maker = &new.graph.nodes[at];
        let alone = maker.args.len() == 1 && maker.signature.args.first() == maker.signature.results.first();
        if let Op::Einsum { scale: inner } = maker.op
            && alone
            && maker.mark.part == node.mark.part
        {
            let node = node.to_mut();
            node.args[k] = source;
            if let Op::Einsum { scale } = &mut node.op {
                *scale *= inner;
            }
        }
    }
}

/// What a node only copies.
fn copied(node: &Node, new: &Rewrite) -> Option<Value> {
    let is_copy = matches!(node.op, Op::Einsum { scale } if scale == 1.0) || node.op == Op::Add;
    let alone = is_copy && node.args.len() == 1 && node.signature.args[0] == node.signature.results[0];
    alone.then(|| new.at(node.args[0]))
}

/// What a node computes: equal keys, equal values. Only within a part: what the backward computes again is not kept.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    op: (Discriminant<Op>, u64),
    /// The op as text, if there is a name in it.
    name: Option<String>,
    args: SmallVec<[Value; 4]>,
    dims: (&'a [Vec<Dim>], &'a [Vec<Dim>]),
    sizes: &'a [usize],
    dtype: DType,
    part: &'static str,
}

/// The key of a node whose scale may be folded; `old` is as it was before.
fn key<'a>(node: &Node, old: &'a Node, new: &Rewrite, graph: &Graph) -> Option<Key<'a>> {
    if node.op.has_effect() || node.results.len() != 1 {
        return None;
    }
    let args = node.args.iter().map(|v| new.at(*v)).collect();
    let named = matches!(node.op, Op::Input(_) | Op::State(_) | Op::Random(_));
    let name = named.then(|| node.op.to_string());
    let op = (discriminant(&node.op), node.op.number());
    let part = match node.mark.part {
        Part::Forward => "forward",
        Part::Input | Part::Weight => "backward",
        Part::Update => "update",
    };
    let s = &old.signature;
    let dtype = graph.ty(node.results[0]).dtype;
    Some(Key { op, name, args, dims: (&s.args, &s.results), sizes: &old.sizes, dtype, part })
}

fn drop_unused(mut graph: Graph) -> Graph {
    let mut needed = vec![false; graph.values.len()];
    graph.loss.iter().for_each(|l| {
        needed[l.sum.index()] = true;
        needed[l.count.index()] = true;
    });
    graph.gradients.iter().for_each(|(_, v)| needed[v.index()] = true);
    let mut keep = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        keep[i] = node.op.has_effect() || node.results.iter().any(|v| needed[v.index()]);
        if keep[i] {
            node.args.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    let mut new = Rewrite::of(&graph);
    for (node, _) in std::mem::take(&mut graph.nodes).into_iter().zip(&keep).filter(|(_, k)| **k) {
        new.put(&graph.values, node);
    }
    new.finish(&graph)
}
