//! Normalisation over dimensions of a tensor: RMS norm over those of its weight, layer norm over the last.

use crate::Unary;
use crate::dsl::{Model, Tensor};

fn last(x: &Tensor) -> String {
    x.dims.last().map_or(String::new(), ToString::to_string)
}

fn rest(x: &Tensor) -> String {
    x.dims[..x.dims.len().saturating_sub(1)].join(" ")
}

/// x over its root mean square, times `weight`, along the dimensions of `weight` (Zhang and Sennrich, "Root Mean Square
/// Layer Normalization").
#[track_caller]
pub fn rms_norm(m: &mut Model, x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let rest: Vec<&str> = x.dims.iter().filter(|d| !weight.dims.contains(d)).map(|d| &**d).collect();
    let n: usize = weight.dims.iter().map(|d| m.size(d)).product();
    m.composite("rms_norm", |m| {
        let square = m.einsum_scaled(1.0 / n as f64, &rest.join(" "), &[x, x]);
        let square = m.offset(&square, eps);
        let inverse = m.unary(Unary::Rsqrt, &square);
        let out = m.mul(&[x, &inverse, weight]);
        m.role(&out, "out");
        out
    })
}

/// x minus its mean, over its standard deviation, times `weight` plus `bias` (Ba et al., "Layer Normalization").
#[track_caller]
pub fn layer_norm(m: &mut Model, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Tensor {
    let (over, rest) = (last(x), rest(x));
    let n = m.size(&over) as f64;
    m.composite("layer_norm", |m| {
        let mean = m.einsum_scaled(1.0 / n, &rest, &[x]);
        let centred = m.sub(x, &mean);
        let variance = m.einsum_scaled(1.0 / n, &rest, &[&centred, &centred]);
        let variance = m.offset(&variance, eps);
        let inverse = m.unary(Unary::Rsqrt, &variance);
        let scaled = m.mul(&[&centred, &inverse, weight]);
        let out = m.add(&[&scaled, bias]);
        m.role(&out, "out");
        out
    })
}
