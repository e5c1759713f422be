//! Cross entropy of logits against labels; a label below 0 does not count. The gradient is from the logits and their
//! log-sum-exp. Split over the vocabulary it is the vocabulary-parallel loss (Shoeybi et al., "Megatron-LM",
//! section 3) without code of its own.

use super::{Roles, softmax};
use crate::dsl::{Model, Tensor};
use crate::{Binary, DType, Unary, Value};

/// The sum of the negative log-likelihoods over the labels that count, and how many count, from logits [b s v] and
/// labels [b s].
#[track_caller]
pub fn cross_entropy(m: &mut Model, logits: &Tensor, labels: &Tensor) -> (Tensor, Tensor) {
    let nll = m.composite("cross_entropy", |m| {
        let (max, sum, _) = softmax::sum_exp(m, logits, "v");
        let log = m.unary(Unary::Log, &sum);
        let lse = m.add(&[&max, &log]);
        m.role(&lse, "lse");
        let picked = m.gather("b s", logits, "v", labels);
        m.role(&picked, "picked");
        let nll = m.sub(&lse, &picked);
        m.role(&nll, "nll");
        nll
    });
    let zero = m.constant(0.0, DType::I32);
    let counts = m.binary(Binary::Ge, labels, &zero);
    let counts = m.cast(&counts, DType::F32);
    let sum = m.einsum("", &[&nll, &counts]);
    let count = m.einsum("", &[&counts]);
    (sum, count)
}

pub(super) fn gradient(m: &mut Model, roles: &Roles, dnll: &Tensor) -> Vec<(Value, Tensor)> {
    let picked = &roles["picked"];
    let (logits, labels) = (m.tensor(picked.args[0]), m.tensor(picked.args[1]));
    let lse = m.tensor(roles["lse"].results[0]);
    let of = Some(picked.results[0]);
    m.composite("cross_entropy_gradient", |m| {
        let shifted = m.sub(&logits, &lse);
        let p = m.unary(Unary::Exp, &shifted);
        let from_lse = m.mul(&[&p, dnll]);
        m.of(of);
        let from_picked = m.scatter("b s v", dnll, &labels);
        m.of(None);
        let dlogits = m.sub(&from_lse, &from_picked);
        vec![(logits.value, dlogits)]
    })
}
