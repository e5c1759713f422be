//! Composites: what papers give a name. Each has a body of primitives, written in the DSL; those whose gradient is
//! better written by hand have a gradient body too. Their nodes carry the tag (composite, instance, role).

mod attention;
mod cross_entropy;
mod dropout;
mod norm;
mod pointwise;
mod rotary;
mod softmax;

use std::collections::BTreeMap;

pub use attention::{Attention, attention};
pub use cross_entropy::cross_entropy;
pub use dropout::{dropout, has_dropout, set_dropout};
pub use norm::{layer_norm, rms_norm};
pub use pointwise::{gelu_tanh, silu, softcap};
pub use rotary::{Frequencies, Rotation, Scaling, rotary, rotation};
pub use softmax::softmax;

use crate::dsl::{Model, Tensor};
use crate::{Name, Node, Value};

/// The nodes of an instance that have a role, by role.
pub type Roles = BTreeMap<Name, Node>;

/// A composite whose gradient has a body.
#[derive(Clone, Copy, Debug)]
pub struct Gradient {
    /// The composite.
    pub composite: &'static str,
    /// The role of the node whose result is differentiated.
    pub output: &'static str,
    /// Writes the gradient: from the nodes of the instance and the gradient of its output, the gradients of the
    /// values that it depends on.
    pub body: fn(&mut Model, &Roles, &Tensor) -> Vec<(Value, Tensor)>,
}

/// Every gradient body.
pub const GRADIENTS: &[Gradient] = &[
    Gradient { composite: "attention", output: "out", body: attention::gradient },
    Gradient { composite: "cross_entropy", output: "nll", body: cross_entropy::gradient },
    Gradient { composite: "gelu_tanh", output: "out", body: pointwise::gelu_gradient },
    Gradient { composite: "silu", output: "out", body: pointwise::silu_gradient },
    Gradient { composite: "softcap", output: "out", body: pointwise::softcap_gradient },
    Gradient { composite: "rotary", output: "out", body: rotary::gradient },
];

/// Composites whose kernels can be one, a chain, so that what is between their products is never kept.
pub const ONE_KERNEL: &[&str] = &["attention", "attention_gradient"];
