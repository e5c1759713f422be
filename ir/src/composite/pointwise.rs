//! Activations and the soft cap. Their gradients are from one tensor alone, the operand or, of the cap, the result, so
//! that nothing else is kept from forward to backward.

use super::Roles;
use crate::dsl::{Model, Tensor};
use crate::{Op, Unary, Value};

/// The constants of the tanh form: sqrt(2 / pi), and the weight of the cube.
const OUTER: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044715;

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, "Gaussian Error Linear Units").
#[track_caller]
pub fn gelu_tanh(m: &mut Model, x: &Tensor) -> Tensor {
    m.composite("gelu_tanh", |m| {
        let (tanh, _) = gelu_parts(m, x);
        let t = m.offset(&tanh, 1.0);
        let out = m.einsum_scaled(0.5, &x.dims.join(" "), &[x, &t]);
        m.role(&out, "out");
        out
    })
}

/// The tanh, and x squared.
#[track_caller]
fn gelu_parts(m: &mut Model, x: &Tensor) -> (Tensor, Tensor) {
    let dims = x.dims.join(" ");
    let square = m.mul(&[x, x]);
    let factor = m.scale(OUTER * CUBE, &square);
    let factor = m.offset(&factor, OUTER);
    let inner = m.einsum(&dims, &[x, &factor]);
    (m.unary(Unary::Tanh, &inner), square)
}

/// dy (0.5 (1 + t) + 0.5 x (1 - t^2) sqrt(2 / pi) (1 + 3 * 0.044715 x^2)).
pub(super) fn gelu_gradient(m: &mut Model, roles: &Roles, dy: &Tensor) -> Vec<(Value, Tensor)> {
    let x = Tensor { value: roles["out"].args[0], dims: dy.dims.clone() };
    let dims = x.dims.join(" ");
    m.composite("gelu_tanh_gradient", |m| {
        let (t, square) = gelu_parts(m, &x);
        let slope = m.scale(3.0 * OUTER * CUBE, &square);
        let slope = m.offset(&slope, OUTER);
        let rest = m.einsum_scaled(-1.0, &dims, &[&t, &t]);
        let rest = m.offset(&rest, 1.0);
        let curved = m.mul(&[&x, &slope, &rest]);
        let local = m.add(&[&t, &curved]);
        let local = m.offset(&local, 1.0);
        let dx = m.einsum_scaled(0.5, &dims, &[dy, &local]);
        vec![(x.value, dx)]
    })
}

/// x times its sigmoid (Elfwing et al., "Sigmoid-Weighted Linear Units").
#[track_caller]
pub fn silu(m: &mut Model, x: &Tensor) -> Tensor {
    m.composite("silu", |m| {
        let s = m.unary(Unary::Sigmoid, x);
        let out = m.mul(&[x, &s]);
        m.role(&out, "out");
        out
    })
}

/// dy s (1 + x (1 - s)), s the sigmoid of x.
pub(super) fn silu_gradient(m: &mut Model, roles: &Roles, dy: &Tensor) -> Vec<(Value, Tensor)> {
    let x = Tensor { value: roles["out"].args[0], dims: dy.dims.clone() };
    m.composite("silu_gradient", |m| {
        let s = m.unary(Unary::Sigmoid, &x);
        let rest = m.scale(-1.0, &s);
        let rest = m.offset(&rest, 1.0);
        let curved = m.mul(&[&x, &rest]);
        let curved = m.offset(&curved, 1.0);
        let dx = m.mul(&[dy, &s, &curved]);
        vec![(x.value, dx)]
    })
}

/// cap tanh(x / cap) (Bello et al., "Neural Combinatorial Optimization with Reinforcement Learning", for logits).
#[track_caller]
pub fn softcap(m: &mut Model, x: &Tensor, cap: f64) -> Tensor {
    m.composite("softcap", |m| {
        let inner = m.scale(1.0 / cap, x);
        m.role(&inner, "divided");
        let tanh = m.unary(Unary::Tanh, &inner);
        let out = m.scale(cap, &tanh);
        m.role(&out, "out");
        out
    })
}

/// dy (1 - (y / cap)^2).
pub(super) fn softcap_gradient(m: &mut Model, roles: &Roles, dy: &Tensor) -> Vec<(Value, Tensor)> {
    let out = &roles["out"];
    let y = Tensor { value: out.results[0], dims: dy.dims.clone() };
    let cap = if let Op::Einsum { scale } = out.op { scale } else { 1.0 };
    let x = roles["divided"].args[0];
    m.composite("softcap_gradient", |m| {
        let square = m.einsum_scaled(-1.0 / (cap * cap), &y.dims.join(" "), &[&y, &y]);
        let slope = m.offset(&square, 1.0);
        let dx = m.mul(&[dy, &slope]);
        vec![(x, dx)]
    })
}
