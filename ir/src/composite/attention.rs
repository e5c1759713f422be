//! Scaled dot-product attention with grouped KV heads and a causal mask by position (Vaswani et al., "Attention Is All
//! You Need", section 3.2.1; Ainslie et al., "GQA"). The gradient is from q, k, v, the output and the log-sum-exp of
//! the scores (Dao et al., "FlashAttention", section 3.1), so that no scores are kept from forward to backward.

use super::{Roles, softmax};
use crate::dsl::{Model, Tensor};
use crate::{Binary, DType, Name, Op, Unary, Value};

/// What masked scores are: so low that their weight is 0, and finite.
const MASKED: f64 = -1e30;

/// Attention of queries `q` [b s kv group ...] to keys and values `k`, `v` [b t kv ...]; without `group` each head has
/// keys of its own. `position` [b s] says where a token stands: it sees those at or before it. The other dimensions of
/// `q` are those of a head; `scale` multiplies the scores. Returns [b s kv group ...] with the head dimensions of `v`.
#[track_caller]
pub fn attention(m: &mut Model, q: &Tensor, k: &Tensor, v: &Tensor, position: &Tensor, scale: f64) -> Tensor {
    m.composite("attention", |m| {
        let masked = masked_scores(m, q, k, position, scale);
        let parts = softmax::parts(m, &masked, "t");
        m.role(&parts.lse, "lse");
        m.role(&parts.out, "weights");
        let mut dims: Vec<Name> = ["b", "s", "kv"].map(Name::from).to_vec();
        dims.extend(group(q));
        dims.extend(v.dims[3..].iter().cloned());
        let out = m.einsum(&dims.join(" "), &[&parts.out, v]);
        m.role(&out, "out");
        out
    })
}

/// The dimension that queries of one KV head have, if there are several.
fn group(q: &Tensor) -> Option<Name> {
    q.dims.iter().find(|d| &***d == "group").cloned()
}

/// The dimensions of scores, in front of `t`.
fn rows(q: &Tensor) -> String {
    if group(q).is_some() { "b kv group s".to_string() } else { "b kv s".to_string() }
}

#[track_caller]
fn masked_scores(m: &mut Model, q: &Tensor, k: &Tensor, position: &Tensor, scale: f64) -> Tensor {
    let scores = m.einsum_scaled(scale, &format!("{} t", rows(q)), &[q, k]);
    m.role(&scores, "scores");
    let key_position = m.rename(position, "s", "t");
    let seen = m.binary(Binary::Ge, position, &key_position);
    m.role(&seen, "seen");
    let low = m.constant(MASKED, DType::F32);
    m.select(&seen, &scores, &low)
}

/// The names that a node's signature gives an operand's dimensions.
fn operand(roles: &Roles, role: &str, i: usize) -> Tensor {
    let node = &roles[role];
    let dims = node.signature.args[i].iter().map(|d| node.signature.factors[d[0]].clone()).collect();
    Tensor { value: node.args[i], dims }
}

fn result(roles: &Roles, role: &str) -> Tensor {
    let node = &roles[role];
    let dims = node.signature.results[0].iter().map(|d| node.signature.factors[d[0]].clone()).collect();
    Tensor { value: node.results[0], dims }
}

pub(super) fn gradient(m: &mut Model, roles: &Roles, dout: &Tensor) -> Vec<(Value, Tensor)> {
    let (q, k, v) = (operand(roles, "scores", 0), operand(roles, "scores", 1), operand(roles, "out", 1));
    let position = operand(roles, "seen", 0);
    let (out, lse) = (result(roles, "out"), result(roles, "lse"));
    let scale = if let Op::Einsum { scale } = roles["scores"].op { scale } else { 1.0 };
    let dims = |t: &Tensor| t.dims.join(" ");
    let rows = rows(&q);
    let (scores_of, out_of) = (Some(roles["scores"].results[0]), Some(out.value));
    m.composite("attention_gradient", |m| {
        m.of(scores_of);
        let scores = m.einsum_scaled(scale, &format!("{rows} t"), &[&q, &k]);
        m.of(None);
        let key_position = m.rename(&position, "s", "t");
        let seen = m.binary(Binary::Ge, &position, &key_position);
        let low = m.constant(MASKED, DType::F32);
        let masked = m.select(&seen, &scores, &low);
        let shifted = m.sub(&masked, &lse);
        let weights = m.unary(Unary::Exp, &shifted);
        let dout = Tensor { value: dout.value, dims: out.dims.clone() };
        m.of(out_of);
        let dv = m.einsum(&dims(&v), &[&weights, &dout]);
        let dweights = m.einsum(&format!("{rows} t"), &[&dout, &v]);
        m.of(None);
        let mean = m.einsum(&rows, &[&dout, &out]);
        let centred = m.sub(&dweights, &mean);
        let dscores = m.mul(&[&weights, &centred]);
        m.of(scores_of);
        let dq = m.einsum_scaled(scale, &dims(&q), &[&dscores, &k]);
        let dk = m.einsum_scaled(scale, &dims(&k), &[&dscores, &q]);
        m.of(None);
        vec![(q.value, dq), (k.value, dk), (v.value, dv)]
    })
}
