//! What can be wrong with a config.

use std::path::PathBuf;

/// Why a config is no model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// There is no such file.
    #[error("{0} has no config.json: MODEL is a folder with a Hugging Face config.json, or such a file")]
    NoConfig(PathBuf),
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The file is no JSON object.
    #[error("{0} is no config: {1}")]
    Json(PathBuf, String),
    /// A model type that is not built in.
    #[error("model_type `{found}` is not supported; supported are {known}")]
    UnknownType {
        /// What the config says.
        found: String,
        /// What there is.
        known: String,
    },
    /// A key that is missing.
    #[error("config.json lacks `{0}`, which a {1} needs")]
    Missing(String, &'static str),
    /// A key with a value that makes no sense.
    #[error("config.json: `{key}` is {found}, but needs to be {needed}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it needs to be.
        needed: String,
    },
    /// A key that would change the mathematics.
    #[error(
        "config.json: `{key}` is {found}; a {family} with that computes something that meshc does not support yet{hint}"
    )]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The model type.
        family: &'static str,
        /// What would work.
        hint: String,
    },
    /// A sequence longer than the model has positions.
    #[error("a sequence of {sequence} tokens, but the model has {positions} positions")]
    Positions {
        /// Asked.
        sequence: usize,
        /// There.
        positions: usize,
    },
    /// What the family's own code got wrong for this config.
    #[error("this config gives no consistent model: {0}")]
    Build(String),
}
