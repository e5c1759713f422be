//! The plain kernel of each op: its meaning, element by element, over the global range of each factor.

use std::ops::Range;

use ir::signature::Dim;
use ir::{Binary, Factor, Node, Op, Unary};

use crate::tensor::{Real, Tensor, larger};
use crate::{draw, pairs};

/// What a node's result is, given its operands, where each factor runs over `ranges`, this rank's part of its global
/// range. Factors of an operand that is split hold only that part.
///
/// # Panics
/// If an operand's shape is not what the ranges say, or the op is an input, a state or a reshard, or has no result:
/// those are not computed.
pub fn eval<T: Real>(node: &Node, ranges: &[Range<usize>], args: &[&Tensor<T>]) -> Tensor<T> {
    let s = &node.signature;
    let local = |dims: &[Dim]| -> Vec<usize> {
        dims.iter().map(|d| d.iter().map(|f| ranges[*f].len()).product()).collect()
    };
    for (arg, dims) in args.iter().zip(&s.args) {
        assert_eq!(arg.shape, local(dims), "an operand of `{}` {s}", node.op);
    }
    if node.op == Op::TopK {
        return top_k(node, ranges, args[0]);
    }
    let looked = node.op.looked_up(s);
    let start = if node.op == Op::ReduceMax { f64::NEG_INFINITY } else { 0.0 };
    let mut out: Tensor<T> = Tensor::full(&local(&s.results[0]), start);
    let out_strides = strides(&s.results[0], ranges);
    let arg_strides: Vec<Vec<usize>> = s.args.iter().map(|d| strides(d, ranges)).collect();
    let lens: Vec<usize> =
        (0..ranges.len()).map(|f| if Some(f) == looked { 1 } else { ranges[f].len() }).collect();
    let mut at = vec![0usize; ranges.len()];
    let key = if let Op::Random(of) = &node.op { draw::key(of) } else { [0; 2] };
    let inner = s.inner();
    // Sums are made in f64 and rounded once, so that f32 here is the best that f32 can be.
    let mut sums = vec![start; out.data.len()];
    for _ in 0..lens.iter().product::<usize>() {
        let place = |strides: &[usize]| -> usize { at.iter().zip(strides).map(|(i, s)| i * s).sum() };
        let o = place(&out_strides);
        let x = |i: usize| args[i].data[place(&arg_strides[i])].get();
        match &node.op {
            Op::Const(c) => sums[o] = *c,
            Op::Iota => sums[o] = (ranges[s.results[0][0][0]].start + at[s.results[0][0][0]]) as f64,
            Op::Random(_) => {
                let index = inner.iter().fold(0, |i, f| i * node.sizes[*f] + ranges[*f].start + at[*f]);
                let counter = draw::counter([x(0), x(1), x(2)]);
                sums[o] = f64::from(draw::number(key, counter, index as u32));
            }
            Op::Einsum { scale } => sums[o] += scale * (0..args.len()).map(x).product::<f64>(),
            Op::Add => sums[o] = (0..args.len()).map(x).sum(),
            Op::ReduceMax => sums[o] = larger(sums[o], x(0)),
            Op::Unary(u) => sums[o] = unary(*u, x(0)),
            Op::Binary(b) => sums[o] = binary(*b, x(0), x(1)),
            Op::Select => sums[o] = if x(0) != 0.0 { x(1) } else { x(2) },
            Op::Cast | Op::Accumulate => sums[o] = x(0),
            Op::Gather => {
                if let Some(i) = inside(looked, ranges, x(1)) {
                    let f = looked.unwrap_or(0);
                    sums[o] += args[0].data[place(&arg_strides[0]) + i * arg_strides[0][f]].get();
                }
            }
            Op::Scatter => {
                if let Some(i) = inside(looked, ranges, x(1)) {
                    sums[o + i * out_strides[looked.unwrap_or(0)]] += x(0);
                }
            }
            Op::TopK | Op::Input(_) | Op::State(_) | Op::Reshard | Op::Assign(_) | Op::Tap(_) => {
                panic!("`{}` is not computed", node.op)
            }
        }
        for f in (0..lens.len()).rev() {
            at[f] += 1;
            if at[f] < lens[f] {
                break;
            }
            at[f] = 0;
        }
    }
    for (o, sum) in out.data.iter_mut().zip(sums) {
        *o = T::of(sum);
    }
    out
}

/// The best pairs of each row, with global indices.
fn top_k<T: Real>(node: &Node, ranges: &[Range<usize>], source: &Tensor<T>) -> Tensor<T> {
    let s = &node.signature;
    let searched = node.op.searched(s).unwrap_or_else(|| panic!("`{s}` is no top-k"));
    let shape: Vec<usize> =
        s.results[0].iter().map(|d| d.iter().map(|f| ranges[*f].len()).product()).collect();
    let mut out = Tensor::full(&shape, f64::NEG_INFINITY);
    let block: usize = shape[shape.len() - 2..].iter().product();
    let (from, to) = (strides(&s.args[0], ranges), strides(&s.results[0], ranges));
    let factors: Vec<Factor> = s.args[0].iter().flatten().copied().collect();
    for i in 0..source.data.len() {
        let along = |f: Factor| i / from[f] % ranges[f].len();
        let at: usize = factors.iter().map(|f| along(*f) * to[*f]).sum();
        let index = (ranges[searched].start + along(searched)) as f64;
        pairs::insert(&mut out.data[at..at + block], [source.data[i], T::of(index)]);
    }
    out
}

/// Where in its own range a looked-up index lies, if there.
fn inside(looked: Option<Factor>, ranges: &[Range<usize>], index: f64) -> Option<usize> {
    let range = &ranges[looked?];
    let here = index >= range.start as f64 && index < range.end as f64;
    here.then(|| index as usize - range.start)
}

fn strides(dims: &[Dim], ranges: &[Range<usize>]) -> Vec<usize> {
    let mut strides = vec![0; ranges.len()];
    let mut stride = 1;
    for f in dims.iter().rev().flat_map(|d| d.iter().rev()) {
        strides[*f] += stride;
        stride *= ranges[*f].len();
    }
    strides
}

/// A function of one number.
pub fn unary(u: Unary, x: f64) -> f64 {
    match u {
        Unary::Exp => x.exp(),
        Unary::Expm1 => x.exp_m1(),
        Unary::Log => x.ln(),
        Unary::Tanh => x.tanh(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Abs => x.abs(),
        Unary::Sign if x == 0.0 => 0.0,
        Unary::Sign => x.signum(),
        Unary::Relu => larger(x, 0.0),
        Unary::Step => f64::from(x > 0.0),
        Unary::Stop => x,
    }
}

/// A function of two numbers; truth is 1.
pub fn binary(b: Binary, x: f64, y: f64) -> f64 {
    match b {
        Binary::Sub => x - y,
        Binary::Div => x / y,
        Binary::Max => larger(x, y),
        Binary::Min => -larger(-x, -y),
        Binary::Eq => f64::from(x == y),
        Binary::Ge => f64::from(x >= y),
    }
}
