//! Softmax over one dimension, safe for large numbers.

use crate::dsl::{Model, Tensor};
use crate::{Reduce, Unary};

/// What softmax computes on its way.
pub(super) struct Parts {
    /// e^x over its sum.
    pub(super) out: Tensor,
    /// The logarithm of the sum of e^x.
    pub(super) lse: Tensor,
}

/// e^(x - max) over its sum along `over`.
#[track_caller]
pub fn softmax(m: &mut Model, x: &Tensor, over: &str) -> Tensor {
    m.composite("softmax", |m| {
        let parts = parts(m, x, over);
        m.role(&parts.out, "out");
        parts.out
    })
}

#[track_caller]
pub(super) fn parts(m: &mut Model, x: &Tensor, over: &str) -> Parts {
    let (max, sum, e) = sum_exp(m, x, over);
    let out = m.div(&e, &sum);
    let log = m.unary(Unary::Log, &sum);
    let lse = m.add(&[&max, &log]);
    Parts { out, lse }
}

/// The largest x, the sum of e^(x - max), and e^(x - max).
#[track_caller]
pub(super) fn sum_exp(m: &mut Model, x: &Tensor, over: &str) -> (Tensor, Tensor, Tensor) {
    let max = m.reduce(Reduce::Max, x, over);
    let max = m.unary(Unary::Stop, &max);
    let shifted = m.sub(x, &max);
    let e = m.unary(Unary::Exp, &shifted);
    let sum = m.reduce(Reduce::Sum, &e, over);
    (max, sum, e)
}
