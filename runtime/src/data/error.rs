//! What can be wrong with data. Every error names the file or the place in the batch.

use crate::files::FileError;
use std::path::PathBuf;
use thiserror::Error;

/// Why data could not be read, encoded or used.
#[derive(Debug, Error)]
#[allow(missing_docs)] // the messages say what the fields are
pub enum DataError {
    /// The file itself, or a tensor in it.
    #[error(transparent)]
    File(#[from] FileError),

    /// No .npy of token ids.
    #[error("{path}: is not a .npy file of token ids: {problem}")]
    Npy { path: PathBuf, problem: String },

    /// Tensors that are no batches.
    #[error(
        "{path}: tensor {tensor:?} is {is:?}, and [steps, global batch, sequence] is needed, none of them 0"
    )]
    Batches { path: PathBuf, tensor: &'static str, is: Vec<usize> },

    /// A step past the end.
    #[error("{path}: has {steps} steps, counted from 0, and step {step} is needed")]
    Step { path: PathBuf, steps: usize, step: usize },

    /// Too few ids for a single row.
    #[error("{path}: has {ids} token ids, and a row of {sequence} with its labels needs {needed}")]
    Few { path: PathBuf, ids: usize, sequence: usize, needed: usize },

    /// An id that no vocabulary has.
    #[error(
        "{path}: {tensor} of step {step}, row {row}, position {position} is {id}, which does not fit 32 bits"
    )]
    Wide { path: PathBuf, tensor: &'static str, step: usize, row: usize, position: usize, id: i64 },

    /// An id that the model's vocabulary does not have.
    #[error(
        "{tensor} of step {step}, row {row}, position {position} is {id}, but the vocabulary has {vocabulary} tokens{also}"
    )]
    Vocabulary {
        tensor: &'static str,
        step: usize,
        row: usize,
        position: usize,
        id: i32,
        vocabulary: usize,
        also: &'static str,
    },

    /// Bytes that are no text.
    #[error("{path}: is not UTF-8 from byte {byte} on")]
    Text { path: PathBuf, byte: usize },

    /// No tokenizer, or one that cannot do it.
    #[error("{path}: {problem}")]
    Tokenizer { path: PathBuf, problem: String },
}
