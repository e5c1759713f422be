//! Scaled dot-product attention with grouped KV heads and a causal mask by position (Vaswani et al., "Attention Is All
//! You Need", section 3.2.1; Ainslie et al., "GQA"). The gradient is from q, k, v, the output and the log-sum-exp of
//! the scores (Dao et al., "FlashAttention", section 3.1), so that no scores are kept from forward to backward.

use super::{Roles, dropout, softmax};
use crate::dsl::{Model, Tensor};
use crate::{Binary, DType, Name, Op, Unary, Value};

/// What masked scores are: so low that their weight is 0, and finite.
const MASKED: f64 = -1e30;

/// What becomes of the products of queries and keys. A number is a plain one with that scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// What multiplies them.
    pub scale: f64,
    /// How many tokens one sees, itself the last; none: all before it too (Beltagy et al., "Longformer", section 3.1).
    pub window: Option<usize>,
    /// A score x is c tanh(x / c) for this c (Gemma Team, "Gemma 2", section 2).
    pub softcap: Option<f64>,
    /// Which weights are dropped: the rate, and the name of the place; none: none.
    pub dropout: Option<(f64, Name)>,
}

impl From<f64> for Attention {
    fn from(scale: f64) -> Attention {
        Attention { scale, window: None, softcap: None, dropout: None }
    }
}

/// Attention of queries `q` [b s kv group ...] to keys and values `k`, `v` [b t kv ...]; without `group` each head has
/// keys of its own. `position` [b s] says where a token stands: it sees those at or before it, in its window. The other
/// dimensions of `q` are those of a head. Returns [b s kv group ...] with the head dimensions of `v`.
#[track_caller]
pub fn attention(
    m: &mut Model,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    position: &Tensor,
    how: impl Into<Attention>,
) -> Tensor {
    let Attention { scale, window, softcap, dropout } = how.into();
    m.composite("attention", |m| {
        let inner = scale / softcap.unwrap_or(1.0);
        let scores = m.einsum_scaled(inner, &format!("{} t", rows(q)), &[q, k]);
        m.role(&scores, "scores");
        let scores = softcap.map_or(scores.clone(), |cap| capped(m, &scores, cap).1);
        let reach = window.map(|window| {
            let key_position = m.rename(position, "s", "t");
            m.offset(&key_position, window as f64 - 1.0)
        });
        let masked = masked(m, &scores, position, reach.as_ref());
        let parts = softmax::parts(m, &masked, "t");
        m.role(&parts.lse, "lse");
        m.role(&parts.out, "weights");
        let mut dims: Vec<Name> = ["b", "s", "kv"].map(Name::from).to_vec();
        dims.extend(group(q));
        dims.extend(v.dims[3..].iter().cloned());
        let weights =
            dropout.map_or(parts.out.clone(), |(p, name)| dropout::dropped(m, &parts.out, p, &name));
        let out = m.einsum(&dims.join(" "), &[&weights, v]);
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

/// Of scores that are divided by `cap` already: their tanh, and `cap` times that.
#[track_caller]
fn capped(m: &mut Model, scores: &Tensor, cap: f64) -> (Tensor, Tensor) {
    let tanh = m.unary(Unary::Tanh, scores);
    let capped = m.scale(cap, &tanh);
    m.role(&capped, "capped");
    (tanh, capped)
}

/// Scores of keys behind the query, or whose `reach` [b t], the last position that sees them, is before it, are low.
#[track_caller]
fn masked(m: &mut Model, scores: &Tensor, position: &Tensor, reach: Option<&Tensor>) -> Tensor {
    let key_position = m.rename(position, "s", "t");
    let seen = m.binary(Binary::Ge, position, &key_position);
    m.role(&seen, "seen");
    let low = m.constant(MASKED, DType::F32);
    let causal = m.select(&seen, scores, &low);
    let Some(reach) = reach else { return causal };
    let near = m.binary(Binary::Ge, reach, position);
    m.role(&near, "near");
    m.select(&near, &causal, &low)
}

/// An operand of a node, its dimensions named as in the node's signature.
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

fn scale(roles: &Roles, role: &str) -> Option<f64> {
    roles.get(role).and_then(|n| if let Op::Einsum { scale } = n.op { Some(scale) } else { None })
}

/// With weights p and their gradient dp the scores have p (dp - sum p dp), where the sum is that of the output times
/// its gradient; a soft cap multiplies by its slope, 1 - tanh^2. Where weights are dropped by a mask k, the output is that of
/// p k, and dp is k times the gradient of that; the sum stays what it is.
pub(super) fn gradient(m: &mut Model, roles: &Roles, dout: &Tensor) -> Vec<(Value, Tensor)> {
    let (q, k, v) = (operand(roles, "scores", 0), operand(roles, "scores", 1), operand(roles, "out", 1));
    let position = operand(roles, "seen", 0);
    let reach = roles.contains_key("near").then(|| operand(roles, "near", 0));
    let (out, lse) = (result(roles, "out"), result(roles, "lse"));
    let (inner, cap) = (scale(roles, "scores").unwrap_or(1.0), scale(roles, "capped"));
    let outer = inner * cap.unwrap_or(1.0);
    let dims = |t: &Tensor| t.dims.join(" ");
    let rows = rows(&q);
    let kept = roles.get("dropped").and_then(dropout::kept);
    let (scores_of, out_of) = (Some(roles["scores"].results[0]), Some(out.value));
    m.composite("attention_gradient", |m| {
        m.of(scores_of);
        let scores = m.einsum_scaled(inner, &format!("{rows} t"), &[&q, &k]);
        m.of(None);
        let (tanh, scores) = match cap.map(|cap| capped(m, &scores, cap)) {
            Some((tanh, scores)) => (Some(tanh), scores),
            None => (None, scores),
        };
        let masked = masked(m, &scores, &position, reach.as_ref());
        let shifted = m.sub(&masked, &lse);
        let weights = m.unary(Unary::Exp, &shifted);
        let dout = Tensor { value: dout.value, dims: out.dims.clone() };
        m.of(out_of);
        let drop = |m: &mut Model, x: &Tensor| match kept {
            None => x.clone(),
            Some((scale, value)) => {
                let kept = Tensor { value, dims: x.dims.clone() };
                m.einsum_scaled(scale, &dims(x), &[x, &kept])
            }
        };
        m.of(None);
        let dropped = drop(m, &weights);
        m.of(out_of);
        let dv = m.einsum(&dims(&v), &[&dropped, &dout]);
        let dweights = m.einsum(&format!("{rows} t"), &[&dout, &v]);
        m.of(None);
        let dweights = drop(m, &dweights);
        let mean = m.einsum(&rows, &[&dout, &out]);
        let centred = m.sub(&dweights, &mean);
        let dscores = match &tanh {
            None => m.mul(&[&weights, &centred]),
            Some(tanh) => {
                let square = m.einsum_scaled(-1.0, &dims(tanh), &[tanh, tanh]);
                let slope = m.offset(&square, 1.0);
                m.mul(&[&weights, &centred, &slope])
            }
        };
        m.of(scores_of);
        let dq = m.einsum_scaled(outer, &dims(&q), &[&dscores, &k]);
        let dk = m.einsum_scaled(outer, &dims(&k), &[&dscores, &q]);
        m.of(None);
        vec![(q.value, dq), (k.value, dk), (v.value, dv)]
    })
}
