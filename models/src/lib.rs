//! Model families: a Hugging Face config to a graph, with the names of its weights. A new family is one file here, a
//! line in `FAMILIES`, and its oracle.

mod blocks;
mod config;
mod decoder;
mod error;
mod gemma2;
mod gpt2;
mod llama;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;
mod rope;
mod windows;

use ir::Graph;
use ir::dsl::Model;

pub use config::{Config, Dropout};
pub use error::ModelError;

/// How large a micro-batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub batch: usize,
    /// Tokens a row.
    pub sequence: usize,
}

type Build = fn(&Config, Shape) -> Result<Graph, ModelError>;

/// By `model_type`.
const FAMILIES: &[(&str, Build)] = &[
    ("gpt2", gpt2::build),
    ("llama", llama::build),
    ("mistral", mistral::build),
    ("qwen2", qwen2::build),
    ("qwen3", qwen3::build),
    ("gemma2", gemma2::build),
    ("phi3", phi3::build),
];

/// The forward pass of a micro-batch of the model that a config describes: inputs `inputs`, `labels`, `position`
/// [b s], parameters by their names in files, a loss, and a tap `logits`.
///
/// # Errors
/// What in the config is missing, wrong, or not supported.
pub fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    let found = config.model_type();
    match FAMILIES.iter().find(|(name, _)| *name == found) {
        Some((_, build)) => build(config, shape),
        None => {
            let known = FAMILIES.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
            Err(ModelError::UnknownType { found: found.to_string(), known })
        }
    }
}

/// The vocabulary that a config names.
pub fn vocabulary(config: &Config) -> Option<usize> {
    named(config, "vocab_size")
}

/// The learned positions that a config names: no row may have more tokens. Rotary positions have no end.
pub fn positions(config: &Config) -> Option<usize> {
    named(config, "n_positions")
}

fn named(config: &Config, key: &str) -> Option<usize> {
    config.keys.get(key).and_then(serde_json::Value::as_u64).map(|n| n as usize)
}

fn finish(model: Model) -> Result<Graph, ModelError> {
    model.finish().map_err(|errors| {
        ModelError::Build(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
    })
}
