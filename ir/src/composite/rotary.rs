//! Rotary position embedding (Su et al., "RoFormer"), in the form that rotates element i of a head's first half with
//! element i of its second: a head is `two h`. The gradient is the rotation back.

use super::Roles;
use crate::dsl::{Model, Tensor};
use crate::{Binary, DType, Unary, Value};

/// Cosine and sine of the angle of each position and frequency, [b s h].
#[derive(Clone, Debug)]
pub struct Rotation {
    /// Cosine.
    pub cos: Tensor,
    /// Sine.
    pub sin: Tensor,
}

/// How fast element i of a head's half turns: theta^(-i / h) an index of position. A number is theta.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    /// The base.
    pub theta: f64,
    /// How they are changed for long sequences.
    pub scaling: Option<Scaling>,
}

/// Slow frequencies become slower by a factor, fast ones stay, and between them it goes over linearly in the number of
/// turns over the positions of pretraining (Llama 3.1's reference code, `apply_scaling`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// How much slower.
    pub factor: f64,
    /// At most so many turns are slow.
    pub low: f64,
    /// At least so many turns are fast.
    pub high: f64,
    /// The positions of pretraining.
    pub positions: f64,
}

impl From<f64> for Frequencies {
    fn from(theta: f64) -> Frequencies {
        Frequencies { theta, scaling: None }
    }
}

/// The angles of positions [b s] for heads of dimensions `two h`: position times frequency.
#[track_caller]
pub fn rotation(m: &mut Model, position: &Tensor, frequencies: impl Into<Frequencies>) -> Rotation {
    let Frequencies { theta, scaling } = frequencies.into();
    let half = m.size("h") as f64;
    let i = m.iota("h", DType::F32);
    let log = m.scale(-theta.ln() / half, &i);
    let mut frequency = m.unary(Unary::Exp, &log);
    if let Some(scaling) = scaling {
        frequency = scaled(m, &frequency, scaling);
    }
    let position = m.cast(position, DType::F32);
    let angle = m.einsum("b s h", &[&position, &frequency]);
    Rotation { cos: m.unary(Unary::Cos, &angle), sin: m.unary(Unary::Sin, &angle) }
}

/// A share of each frequency is kept, from 0 for the slow to 1 for the fast, and the rest is divided by the factor.
#[track_caller]
fn scaled(m: &mut Model, frequency: &Tensor, by: Scaling) -> Tensor {
    let span = by.high - by.low;
    let kept = m.scale(by.positions / (std::f64::consts::TAU * span), frequency);
    let kept = m.offset(&kept, -by.low / span);
    let (none, all) = (m.constant(0.0, DType::F32), m.constant(1.0, DType::F32));
    let kept = m.binary(Binary::Max, &kept, &none);
    let kept = m.binary(Binary::Min, &kept, &all);
    let share = m.scale(1.0 - 1.0 / by.factor, &kept);
    let share = m.offset(&share, 1.0 / by.factor);
    m.mul(&[frequency, &share])
}

/// Rotates x [b s ... two h].
#[track_caller]
pub fn rotary(m: &mut Model, x: &Tensor, by: &Rotation) -> Tensor {
    m.composite("rotary", |m| {
        let out = rotated(m, x, by, 1.0);
        m.role(&out, "out");
        out
    })
}

/// x cos + (the other half of x) sin, where the other half of the first is the second with its sign turned.
#[track_caller]
fn rotated(m: &mut Model, x: &Tensor, by: &Rotation, direction: f64) -> Tensor {
    let dims = x.dims.join(" ");
    m.dim("other", 2);
    let swapped = dims.replace("two", "other");
    let half = m.iota("other", DType::F32);
    // 0 and 1 become 1 and 0: where the other half lies; and -1 and 1: its sign in the result.
    let flipped = m.scale(-1.0, &half);
    let flipped = m.offset(&flipped, 1.0);
    let index = m.cast(&flipped, DType::I32);
    let sign = m.scale(2.0 * direction, &half);
    let sign = m.offset(&sign, -direction);
    let other = m.gather(&swapped, x, "two", &index);
    m.role(&other, "other");
    let other = m.rename(&other, "other", "two");
    let sign = m.rename(&sign, "other", "two");
    let turned = m.einsum(&dims, &[&other, &by.sin, &sign]);
    m.role(&turned, "turned");
    let kept = m.einsum(&dims, &[x, &by.cos]);
    m.role(&kept, "kept");
    m.add(&[&kept, &turned])
}

pub(super) fn gradient(m: &mut Model, roles: &Roles, dout: &Tensor) -> Vec<(Value, Tensor)> {
    let kept = &roles["kept"];
    let (x, cos, sin) = (kept.args[0], m.tensor(kept.args[1]), m.tensor(roles["turned"].args[1]));
    m.composite("rotary_gradient", |m| {
        let dx = rotated(m, dout, &Rotation { cos, sin }, -1.0);
        vec![(x, dx)]
    })
}
