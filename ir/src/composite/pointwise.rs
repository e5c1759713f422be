//! Activations.

use crate::Unary;
use crate::dsl::{Model, Tensor};

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, "Gaussian Error Linear Units").
#[track_caller]
pub fn gelu_tanh(m: &mut Model, x: &Tensor) -> Tensor {
    m.composite("gelu_tanh", |m| {
        let cubic = m.mul(&[x, x, x]);
        let cubic = m.scale(0.044715, &cubic);
        let inner = m.add(&[x, &cubic]);
        let inner = m.scale((2.0 / std::f64::consts::PI).sqrt(), &inner);
        let t = m.unary(Unary::Tanh, &inner);
        let t = m.offset(&t, 1.0);
        let dims = x.dims.join(" ");
        let out = m.einsum_scaled(0.5, &dims, &[x, &t]);
        m.role(&out, "out");
        out
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
