//! Dropout (Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting"): numbers of a tensor are
//! set to 0 with a probability, and the others made larger so that the mean stays. Which ones follows from the counter of
//! `random` alone, so the backward pass draws them again instead of having them kept.

use std::collections::HashSet;
use std::sync::Arc;

use crate::dsl::{Model, Tensor};
use crate::graph::Rewrite;
use crate::{Binary, DType, Graph, Name, Node, Op, Value};

/// The role of the product of a tensor and what is kept of it, and of the number that a random one must reach.
const DROPPED: &str = "dropped";
const THRESHOLD: &str = "threshold";

/// Numbers of `x` are 0 with probability `p`, else larger by 1 / (1 - p). `name` sets what is dropped here apart from other
/// places of the model. `x` has the dimension `b` of the batch. Of `p` = 0 nothing is built.
#[track_caller]
pub fn dropout(m: &mut Model, x: &Tensor, p: f64, name: &str) -> Tensor {
    if p == 0.0 { x.clone() } else { m.composite("dropout", |m| dropped(m, x, p, name)) }
}

/// The same inside another composite.
#[track_caller]
pub(super) fn dropped(m: &mut Model, x: &Tensor, p: f64, name: &str) -> Tensor {
    if !(0.0..1.0).contains(&p) {
        m.wrong(format!("the rate of dropout `{name}` is {p}, but from 0 to below 1 is needed"));
    }
    if !(p > 0.0 && p < 1.0) {
        return x.clone();
    }
    let dims = x.dims.join(" ");
    let random = m.random(&dims, name);
    let threshold = m.constant(threshold(p), DType::F32);
    m.role(&threshold, THRESHOLD);
    let kept = m.binary(Binary::Ge, &random, &threshold);
    let kept = m.cast(&kept, DType::F32);
    let out = m.einsum_scaled(scale(p), &dims, &[x, &kept]);
    m.role(&out, DROPPED);
    out
}

/// The least multiple of 2^-24 that is at least p: as random numbers are such, it splits them as p does, and f32 holds it.
fn threshold(p: f64) -> f64 {
    let unit = f64::from(1 << 24);
    (p * unit).ceil() / unit
}

fn scale(p: f64) -> f64 {
    1.0 / (1.0 - p)
}

/// The product of a tensor and what is kept of it, if a node is one.
pub(super) fn kept(node: &Node) -> Option<(f64, Value)> {
    let Op::Einsum { scale } = node.op else { return None };
    let is = node.tag.as_ref().is_some_and(|t| &*t.role == DROPPED);
    node.args.get(1).filter(|_| is).map(|kept| (scale, *kept))
}

/// Whether something is dropped in a graph as it was written.
#[must_use]
pub fn has_dropout(graph: &Graph) -> bool {
    graph.nodes.iter().any(|n| kept(n).is_some())
}

/// Sets all rates of dropout of a graph as it was written, before any pass; at 0 nothing is left of it, nor of inputs and
/// states that only it used.
pub fn set_dropout(graph: &mut Graph, p: f64) {
    for node in &mut graph.nodes {
        if kept(node).is_some() {
            node.op = Op::Einsum { scale: scale(p) };
        } else if matches!(node.op, Op::Const(_)) && node.tag.as_ref().is_some_and(|t| &*t.role == THRESHOLD)
        {
            node.op = Op::Const(threshold(p));
        }
    }
    if p == 0.0 && has_dropout(graph) {
        without(graph);
    }
}

fn without(graph: &mut Graph) {
    let used = |graph: &Graph| graph.nodes.iter().flat_map(|n| n.args.clone()).collect::<HashSet<Value>>();
    let before = used(graph);
    for node in graph.nodes.iter_mut().filter(|n| kept(n).is_some()) {
        node.args.truncate(1);
        Arc::make_mut(&mut node.signature).args.truncate(1);
    }
    let mut after: HashSet<Value> = HashSet::new();
    let mut keep: Vec<bool> = Vec::new();
    for node in graph.nodes.iter().rev() {
        let gone = |v: &Value| before.contains(v) && !after.contains(v);
        let stays = node.results.is_empty() || !node.results.iter().all(gone) || claimed(graph, node);
        keep.push(stays);
        after.extend(node.args.iter().filter(|_| stays));
    }
    keep.reverse();
    let named = |graph: &Graph| -> HashSet<Name> {
        let name =
            |n: &Node| if let Op::Input(name) | Op::State(name) = &n.op { Some(name.clone()) } else { None };
        graph.nodes.iter().filter_map(name).collect()
    };
    let first = named(graph);
    let mut new = Rewrite::of(graph);
    for (node, _) in graph.nodes.iter().zip(&keep).filter(|(_, keep)| **keep) {
        new.copy(graph, node);
    }
    let (scatters, dump) = (graph.scatters, graph.dump);
    let mut left = Graph { scatters, dump, ..new.finish(graph) };
    let last = named(&left);
    let gone = |name: &Name| first.contains(name) && !last.contains(name);
    left.inputs.retain(|i| !gone(&i.name));
    left.states.retain(|s| !gone(&s.name));
    *graph = left;
}

/// Whether the loss or a constraint speaks of what a node makes.
fn claimed(graph: &Graph, node: &Node) -> bool {
    let loss = graph.loss.iter().flat_map(|l| [l.sum, l.count]);
    let asked = graph.constraints.iter().map(|c| c.value).chain(graph.follows.iter().map(|(v, _)| *v));
    loss.chain(asked).any(|v| node.results.contains(&v))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::verify;

    fn model(p: f64) -> Model {
        let mut m = Model::new();
        [("b", 2), ("d", 4)].iter().for_each(|(name, size)| m.dim(name, *size));
        let x = m.input("x", DType::F32, "b d");
        let y = dropout(&mut m, &x, p, "y");
        m.tap("y", &y);
        m
    }

    #[test]
    fn a_rate_of_0_is_nothing() {
        let graph = model(0.0).finish().unwrap();
        assert_eq!((graph.nodes.len(), graph.inputs.len(), graph.states.len()), (2, 1, 0));
    }

    #[test]
    fn rates_from_0_to_below_1() {
        for p in [-0.1, 1.0, 1.5, f64::NAN, f64::INFINITY] {
            let errors = model(p).finish().unwrap_err();
            assert!(errors[0].message.contains("from 0 to below 1 is needed"), "{}", errors[0]);
        }
    }

    #[test]
    fn a_threshold_splits_numbers_as_its_rate_does() {
        for p in [0.1, 0.5, 0.3, 0.9, 1e-9, 1.0 - 1e-9, 0.7 + 3e-8] {
            let t = threshold(p);
            assert_eq!(f64::from(t as f32), t);
            let unit = 2f64.powi(-24);
            assert!(t >= p && t - unit < p);
        }
    }

    #[test]
    fn rates_are_set_anew() {
        let (mut half, tenth, none) = (model(0.5), model(0.1), model(0.0));
        let mut graph = half.graph().clone();
        set_dropout(&mut graph, 0.1);
        assert_eq!(graph, tenth.finish().unwrap());
        set_dropout(&mut graph, 0.0);
        assert_eq!(verify(&graph), Ok(()));
        let none = none.finish().unwrap();
        assert_eq!((&graph.inputs, &graph.states), (&none.inputs, &none.states));
        assert_eq!(graph.nodes.len(), 3, "what is left is a copy");
        assert!(!has_dropout(&graph));
        // A row that something else uses stays.
        let row = half.row();
        half.tap("row", &row);
        let mut graph = half.finish().unwrap();
        set_dropout(&mut graph, 0.0);
        assert_eq!((graph.inputs.len(), graph.states.len()), (2, 0));
    }
}
