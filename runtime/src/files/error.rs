//! What can be wrong with a file of tensors. Every error names the file; the names of tensors come from
//! files, so they are printed quoted and escaped.

use super::window::WindowError;
use safetensors::Dtype;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a file could not be read or written.
#[derive(Debug, Error)]
#[allow(missing_docs)] // the messages say what the fields are
pub enum FileError {
    /// The system refused.
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },

    /// A folder, a pipe or a device, where only a regular file can be mapped.
    #[error("{path}: is not a regular file")]
    NotAFile { path: PathBuf },

    /// Shorter than the length of its own header.
    #[error("{path}: has {bytes} bytes, and a safetensors file needs at least 8")]
    Short { path: PathBuf, bytes: usize },

    /// The header does not fit into the file.
    #[error("{path}: says that its header is {header} bytes, but {rest} bytes follow")]
    HeaderLength { path: PathBuf, header: u64, rest: usize },

    /// The header is too large to be one.
    #[error("{path}: says that its header is {header} bytes, and at most {limit} are read")]
    HeaderLimit { path: PathBuf, header: u64, limit: usize },

    /// The header is no JSON, or not the JSON that was needed.
    #[error("{path}: its header is not that of a safetensors file: {problem}")]
    Header { path: PathBuf, problem: String },

    /// Shape and dtype do not agree with the offsets.
    #[error(
        "{path}: tensor {tensor:?} has the offsets {start} to {end}, but {dtype} {shape:?} needs {needed} bytes"
    )]
    Bytes {
        path: PathBuf,
        tensor: String,
        start: usize,
        end: usize,
        dtype: Dtype,
        shape: Vec<usize>,
        needed: String,
    },

    /// Offsets overlap or leave a hole.
    #[error("{path}: tensor {tensor:?} begins at byte {start} of the data, but must begin at {needed}")]
    Gap { path: PathBuf, tensor: String, start: usize, needed: usize },

    /// A tensor reaches beyond the file.
    #[error("{path}: tensor {tensor:?} ends at byte {end} of the data, but the file has {bytes} bytes of it")]
    Beyond { path: PathBuf, tensor: String, end: usize, bytes: usize },

    /// Bytes at the end belong to no tensor.
    #[error("{path}: its tensors end at byte {end} of the data, but the file has {bytes} bytes of it")]
    Tail { path: PathBuf, end: usize, bytes: usize },

    /// The index is no JSON, or not the JSON that was needed.
    #[error("{path}: is not an index with a weight_map from tensors to files: {problem}")]
    Index { path: PathBuf, problem: String },

    /// The index names something that is no file of its folder.
    #[error("{path}: says that tensor {tensor:?} is in {file:?}, and {problem}")]
    IndexFile { path: PathBuf, tensor: String, file: String, problem: &'static str },

    /// Two files hold tensors of one name.
    #[error("tensor {tensor:?} is in two files, {first} and {second}, and no index says which one counts")]
    Twice { tensor: String, first: PathBuf, second: PathBuf },

    /// No tensor of that name.
    #[error("{path}: has no tensor {tensor:?} among its {count}{similar}")]
    Missing { path: PathBuf, tensor: String, count: usize, similar: String },

    /// Another shape than the model needs.
    #[error("{path}: tensor {tensor:?} is {is:?}, and {needed:?} is needed")]
    Shape { path: PathBuf, tensor: String, is: Vec<usize>, needed: Vec<usize> },

    /// A dtype that cannot stand in this place.
    #[error("{path}: tensor {tensor:?} is {is}, and {needed} is needed")]
    Dtype { path: PathBuf, tensor: String, is: Dtype, needed: &'static str },

    /// A window that does not fit the tensor.
    #[error("{path}: tensor {tensor:?}: {source}")]
    Window { path: PathBuf, tensor: String, source: WindowError },

    /// What was to be written is no tensor.
    #[error("{path}: cannot write tensor {tensor:?}: {problem}")]
    Unwritable { path: PathBuf, tensor: String, problem: String },
}
