//! What several families share: the inputs of a language model, a linear layer, an activation, the loss.

use ir::composite::{cross_entropy, gelu_tanh, silu};
use ir::dsl::{Model, Tensor};
use ir::state::{Init, View};
use ir::{DType, Unary};

use crate::{Config, ModelError, Shape};

/// What each micro-batch of a language model is fed: token ids, labels that are already shifted, and where in its
/// sequence each token stands.
pub(crate) struct Tokens {
    pub(crate) inputs: Tensor,
    pub(crate) labels: Tensor,
    pub(crate) position: Tensor,
}

pub(crate) fn tokens(m: &mut Model, shape: Shape) -> Tokens {
    m.dim("b", shape.batch);
    m.dim("s", shape.sequence);
    Tokens {
        inputs: m.input("inputs", DType::I32, "b s"),
        labels: m.input("labels", DType::I32, "b s"),
        position: m.input("position", DType::I32, "b s"),
    }
}

/// A parameter whose file tensor has another shape: its last or first dimensions merged.
#[track_caller]
pub(crate) fn parameter(m: &mut Model, name: &str, dims: &str, file_shape: &[usize], init: Init) -> Tensor {
    let shape: Vec<usize> = dims.split_whitespace().map(|d| m.size(d)).collect();
    let view = View::whole(name, file_shape).reshape(&shape);
    let views = view.map_or(Vec::new(), |v| vec![v]);
    m.parameter_from(name, dims, init, views)
}

pub(crate) fn activation(m: &mut Model, name: &str, x: &Tensor) -> Option<Tensor> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" => Some(gelu_tanh(m, x)),
        "silu" | "swish" => Some(silu(m, x)),
        "relu" => Some(m.unary(Unary::Relu, x)),
        "tanh" => Some(m.unary(Unary::Tanh, x)),
        _ => None,
    }
}

/// The activation that a config names, checked before the model is built.
pub(crate) fn activation_name<'a>(
    config: &'a Config,
    key: &str,
    default: &'a str,
) -> Result<&'a str, ModelError> {
    let name = config.text_or(key, default)?;
    let known = ["gelu_new", "gelu_pytorch_tanh", "silu", "swish", "relu", "tanh"];
    if known.contains(&name) {
        return Ok(name);
    }
    let (found, needed) = (format!("`{name}`"), format!("one of {}", known.join(", ")));
    Err(ModelError::Value { key: key.to_string(), found, needed })
}

/// Logits [b s v] from the last hidden state and a table [v d]; the loss and the tap that dumps use.
pub(crate) fn head(m: &mut Model, x: &Tensor, table: &Tensor, labels: &Tensor) {
    let logits = m.einsum("b s v", &[x, table]);
    m.tap("logits", &logits);
    let (sum, count) = cross_entropy(m, &logits, labels);
    m.loss(&sum, &count);
}
