//! The planted faults, by what is wrong.

use std::sync::Arc;

use ir::{Binary, Move, Node, Op, Reduce, Sharding, Unary, moves};
use runtime::eval::eval;
use runtime::lockstep::apply;
use runtime::tensor::Tensor;

use super::Broken::{self, Gradient, Kernel, Optimizer};
use super::{follows, from_zero, kernel, leads, pass, performs};

/// Every fault: what is wrong, and what is broken for it.
pub(super) fn faults() -> Vec<(&'static str, Broken)> {
    [rows(), kinds(), steps(), slopes(), updates(), kernels()].into_iter().flatten().collect()
}

const EINSUM: Op = Op::Einsum { scale: 1.0 };

fn rows() -> Vec<(&'static str, Broken)> {
    use Reduce::{Max, Sum};
    vec![
        ("the exponential of a partial sum is a partial sum", pass(Op::Unary(Unary::Exp), Sum, &[0])),
        ("the absolute value of one too", pass(Op::Unary(Unary::Abs), Sum, &[0])),
        ("relu of one too", pass(Op::Unary(Unary::Relu), Sum, &[0])),
        ("an einsum passes two partial operands together", pass(EINSUM, Sum, &[0, 1])),
        ("an einsum passes a partial max", pass(EINSUM, Max, &[0])),
        ("a division passes a partial denominator", pass(Op::Binary(Binary::Div), Sum, &[1])),
        ("a sum passes one partial operand beside whole ones", pass(Op::Add, Sum, &[0])),
        ("a difference too", pass(Op::Binary(Binary::Sub), Sum, &[0])),
        ("a select passes one partial operand", pass(Op::Select, Sum, &[1])),
        ("the smaller of partial maxes is a partial max", pass(Op::Binary(Binary::Min), Max, &[0, 1])),
        ("a comparison of partial sums is a partial sum", pass(Op::Binary(Binary::Ge), Sum, &[0, 1])),
        ("a largest of partial sums is a partial sum", pass(Op::ReduceMax, Sum, &[0])),
    ]
}

fn kinds() -> Vec<(&'static str, Broken)> {
    vec![
        (
            "a largest of pieces is a partial sum",
            follows(Op::ReduceMax, |l| {
                l.results[0].partial.iter_mut().for_each(|(_, r)| *r = Reduce::Sum);
            }),
        ),
        ("a largest of pieces is whole", follows(Op::ReduceMax, |l| l.results[0].partial.clear())),
        ("the best of pieces are whole", follows(Op::TopK, |l| l.results[0].partial.clear())),
        (
            "the best of pieces are the largest numbers",
            follows(Op::TopK, |l| l.results[0].partial.iter_mut().for_each(|(_, r)| *r = Reduce::Max)),
        ),
        ("a search without its rank's offset", kernel(|n, r, a| from_zero(&Op::TopK, n, r, a))),
        ("a contraction of pieces is whole", follows(EINSUM, |l| l.results[0].partial.clear())),
        ("a gather from a split table is whole", follows(Op::Gather, |l| l.results[0].partial.clear())),
        ("a scatter of split rows is whole", follows(Op::Scatter, |l| l.results[0].partial.clear())),
        ("a gather looks up without its rank's offset", kernel(|n, r, a| from_zero(&Op::Gather, n, r, a))),
        ("a scatter without it", kernel(|n, r, a| from_zero(&Op::Scatter, n, r, a))),
        ("an iota without it", kernel(|n, r, a| from_zero(&Op::Iota, n, r, a))),
        ("random numbers without it", kernel(drawn_from_zero)),
    ]
}

fn steps() -> Vec<(&'static str, Broken)> {
    vec![
        (
            "reduce_scatter keeps the first piece",
            performs(|step, pieces, mesh| {
                let right = apply(step, pieces, mesh);
                let Move::ReduceScatter { axes, reduce, dim } = step else { return right };
                let all = apply(&Move::AllReduce { axes: axes.clone(), reduce: *reduce }, pieces, mesh);
                all.iter().zip(&right).map(|(t, r)| t.slice(*dim, 0..r.shape[*dim])).collect()
            }),
        ),
        (
            "all_gather joins in the wrong order",
            performs(|step, pieces, mesh| {
                let Move::AllGather { axes, dim } = step else { return apply(step, pieces, mesh) };
                let axes = axes.iter().rev().copied().collect();
                apply(&Move::AllGather { axes, dim: *dim }, pieces, mesh)
            }),
        ),
        (
            "all_reduce sums twice",
            performs(|step, pieces, mesh| {
                let once = apply(step, pieces, mesh);
                if let Move::AllReduce { .. } = step { apply(step, &once, mesh) } else { once }
            }),
        ),
        (
            "all_reduce sums where the largest is wanted",
            performs(|step, pieces, mesh| {
                let Move::AllReduce { axes, .. } = step else { return apply(step, pieces, mesh) };
                apply(&Move::AllReduce { axes: axes.clone(), reduce: Reduce::Sum }, pieces, mesh)
            }),
        ),
        (
            "all_reduce takes the largest numbers of pairs",
            performs(|step, pieces, mesh| {
                let Move::AllReduce { axes, reduce: Reduce::Top } = step else {
                    return apply(step, pieces, mesh);
                };
                apply(&Move::AllReduce { axes: axes.clone(), reduce: Reduce::Max }, pieces, mesh)
            }),
        ),
        (
            "permute sends a block where one comes from",
            performs(|step, pieces, mesh| {
                let Move::Permute { axes, to } = step else { return apply(step, pieces, mesh) };
                apply(&Move::Permute { axes: to.clone(), to: axes.clone() }, pieces, mesh)
            }),
        ),
        (
            "to_partial leaves every copy",
            performs(|step, pieces, mesh| {
                if let Move::ToPartial { .. } = step { pieces.to_vec() } else { apply(step, pieces, mesh) }
            }),
        ),
        ("nothing moves", leads(|_, _, _| Vec::new())),
        (
            "a detour leads through a partial value",
            leads(|from, to, mesh| {
                let whole = Sharding::replicated(to.dims.len());
                if from == to || from.partial.is_empty() {
                    return moves(from, to, mesh);
                }
                let partial = Sharding { partial: from.partial.clone(), ..whole.clone() };
                [moves(from, &whole, mesh), moves(&whole, &partial, mesh), moves(&partial, to, mesh)].concat()
            }),
        ),
        (
            "a call for each axis",
            leads(|from, to, mesh| {
                let each = |step: Move| {
                    let Move::AllReduce { axes, reduce } = step else { return vec![step] };
                    axes.iter().map(|a| Move::AllReduce { axes: vec![*a], reduce }).collect()
                };
                moves(from, to, mesh).into_iter().flat_map(each).collect()
            }),
        ),
    ]
}

fn slopes() -> Vec<(&'static str, Broken)> {
    fn scale(node: &mut Node, from: f64, to: f64) {
        if node.op == (Op::Einsum { scale: from }) {
            node.op = Op::Einsum { scale: to };
        }
    }
    vec![
        ("an einsum's gradient lacks its scale", Gradient(|n| scale(n, 0.7, 1.0))),
        ("a difference's gradient lacks its sign", Gradient(|n| scale(n, -1.0, 1.0))),
        ("the slope of a root lacks its half", Gradient(|n| scale(n, 0.5, 1.0))),
        (
            "the slope of tanh is 1 + tanh^2",
            Gradient(|n| {
                let from_one = n.op == Op::Binary(Binary::Sub) && n.signature.args[0].is_empty();
                n.op = if from_one { Op::Add } else { n.op.clone() };
            }),
        ),
        (
            "of several contributions the first counts",
            Gradient(|n| {
                if n.op == Op::Add && n.like.is_some() {
                    n.args.truncate(1);
                    Arc::make_mut(&mut n.signature).args.truncate(1);
                }
            }),
        ),
        (
            "the larger's gradient goes to the other",
            Gradient(|n| {
                if n.op == Op::Select {
                    n.args.swap(1, 2);
                    Arc::make_mut(&mut n.signature).args.swap(1, 2);
                }
            }),
        ),
    ]
}

fn updates() -> Vec<(&'static str, Broken)> {
    vec![
        (
            "the bias of the means is not corrected",
            Optimizer(|graph| {
                let nodes = graph.nodes.iter_mut().filter(|n| n.op == Op::Unary(Unary::Expm1));
                nodes.for_each(|n| n.op = Op::Unary(Unary::Exp));
            }),
        ),
        ("the root of squares lacks eps", Optimizer(|graph| constant(graph, 1e-3, 0.0))),
        ("clipping allows the double norm", Optimizer(|graph| constant(graph, 0.5, 1.0))),
        ("warm-up ends a step early", Optimizer(|graph| constant(graph, 3.0, 2.0))),
        (
            "the norm is that of the last gradient",
            Optimizer(|graph| {
                let nodes = graph.nodes.iter_mut();
                let norm = nodes.filter(|n| n.op == Op::Add && n.args.len() == 2 && n.sizes.is_empty());
                for node in norm {
                    node.args[0] = node.args[1];
                }
            }),
        ),
    ]
}

/// A kernel that counts its numbers from its own first.
fn drawn_from_zero(n: &Node, r: &[std::ops::Range<usize>], a: &[&Tensor<f64>]) -> Tensor<f64> {
    if let Op::Random(_) = n.op { from_zero(&n.op, n, r, a) } else { eval(n, r, a) }
}

fn constant(graph: &mut ir::Graph, from: f64, to: f64) {
    graph.nodes.iter_mut().filter(|n| n.op == Op::Const(from)).for_each(|n| n.op = Op::Const(to));
}

fn kernels() -> Vec<(&'static str, Broken)> {
    vec![
        ("a rank looks up without its offset", Kernel(|n, r, a| from_zero(&Op::Gather, n, r, a))),
        ("a rank scatters without its offset", Kernel(|n, r, a| from_zero(&Op::Scatter, n, r, a))),
        (
            "a rank takes the first for the largest",
            Kernel(|n, r, a| {
                let mut out = eval(n, r, a);
                if n.op == Op::ReduceMax && !out.data.is_empty() {
                    let first = out.data[0];
                    out.data.fill(first);
                }
                out
            }),
        ),
        (
            "a rank forgets the scale",
            Kernel(|n, r, a| {
                let plain = Node { op: EINSUM, ..n.clone() };
                eval(if let Op::Einsum { .. } = n.op { &plain } else { n }, r, a)
            }),
        ),
        (
            "a rank forgets the last operand of a sum",
            Kernel(|n, r, a| {
                let mut less: Vec<_> = a.to_vec();
                let zero = Tensor::full(&a.last().map_or(vec![], |t| t.shape.clone()), 0.0);
                if let (Op::Add, Some(last)) = (&n.op, less.last_mut()) {
                    *last = &zero;
                }
                eval(n, r, &less)
            }),
        ),
    ]
}
