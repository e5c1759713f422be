//! What several families share: the inputs of a language model, a linear layer, an activation, the loss.

use std::ops::Range;

use ir::composite::{cross_entropy, gelu_tanh, silu, softcap};
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

/// Some of the rows of a linear layer in a file: a part of a fused tensor, or a tensor of its own.
pub(crate) struct Rows {
    /// The name of the parameter, without what follows it (`weight`, `bias`).
    pub(crate) name: String,
    /// The name in the file.
    pub(crate) file: String,
    /// Which rows.
    pub(crate) rows: Range<usize>,
    /// Of how many.
    pub(crate) of: usize,
}

impl Rows {
    /// A tensor of its own.
    pub(crate) fn whole(name: String, rows: usize) -> Rows {
        Rows { file: name.clone(), name, rows: 0..rows, of: rows }
    }

    /// Tensors of these names and numbers of rows that lie behind each other in the file tensor `file`.
    pub(crate) fn fused<const N: usize>(file: &str, parts: [(&str, usize); N]) -> [Rows; N] {
        let of = parts.iter().map(|(_, rows)| rows).sum();
        let mut start = 0;
        parts.map(|(name, rows)| {
            start += rows;
            Rows { name: format!("{file}.{name}"), file: file.to_string(), rows: start - rows..start, of }
        })
    }

    /// The matrix with so many columns: its rows are the first of `dims`, its columns the last.
    #[track_caller]
    pub(crate) fn matrix(&self, m: &mut Model, dims: &str, columns: usize, init: Init) -> Tensor {
        self.parameter(m, "weight", dims, &[self.of, columns], init)
    }

    /// The vector, 0 at first.
    #[track_caller]
    pub(crate) fn bias(&self, m: &mut Model, dims: &str) -> Tensor {
        self.parameter(m, "bias", dims, &[self.of], Init::Zeros)
    }

    #[track_caller]
    fn parameter(&self, m: &mut Model, what: &str, dims: &str, file: &[usize], init: Init) -> Tensor {
        let shape: Vec<usize> = dims.split_whitespace().map(|d| m.size(d)).collect();
        let view = View::whole(&format!("{}.{what}", self.file), file);
        let view = view.slice(0, self.rows.start, self.rows.end).reshape(&shape);
        let views = view.map_or(Vec::new(), |v| vec![v]);
        m.parameter_from(&format!("{}.{what}", self.name), dims, init, views)
    }
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

/// Logits [b s v] from the last hidden state and a table [v d], softly capped if `cap` says so; the loss and the tap
/// that dumps use.
pub(crate) fn head(m: &mut Model, x: &Tensor, table: &Tensor, cap: Option<f64>, labels: &Tensor) {
    let logits = m.einsum("b s v", &[x, table]);
    let logits = cap.map_or(logits.clone(), |cap| softcap(m, &logits, cap));
    m.tap("logits", &logits);
    let (sum, count) = cross_entropy(m, &logits, labels);
    m.loss(&sum, &count);
}
