//! What can be wrong with a checkpoint. Every error names the file or the state.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::files::FileError;

/// Why a checkpoint could not be written, read or used.
#[derive(Debug, Error)]
#[allow(missing_docs)] // the messages say what the fields are
pub enum CheckpointError {
    /// The system refused.
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: io::Error },

    /// A file that cannot be mapped or is no safetensors file.
    #[error(transparent)]
    File(#[from] FileError),

    /// A file that is not what was written.
    #[error("{path}: is damaged: {problem}")]
    Damaged { path: PathBuf, problem: String },

    /// An index that another version wrote.
    #[error("{path}: has the layout {is}, and this meshc reads {needed}")]
    Layout { path: PathBuf, is: u32, needed: u32 },

    /// The newest checkpoint is not whole. Nothing older is taken without being asked.
    #[error("{source}\n{}", advice(.folder, .older.as_ref()))]
    Newest { source: Box<CheckpointError>, folder: PathBuf, older: Option<PathBuf> },

    /// The checkpoint is of another model.
    #[error("{path}: state `{state}` is {is} in the checkpoint, and the model needs {needed}")]
    Mismatch { path: PathBuf, state: String, is: String, needed: String },

    /// Nothing with that name.
    #[error("{path}: has no state `{state}`")]
    UnknownState { path: PathBuf, state: String },
}

fn advice(folder: &std::path::Path, older: Option<&PathBuf>) -> String {
    match older {
        Some(older) => {
            format!("{} is whole: remove {} to go on from it", older.display(), folder.display())
        }
        None => format!("no older checkpoint is whole; without {} the run starts anew", folder.display()),
    }
}

impl CheckpointError {
    /// The files are in order, but of another model.
    pub fn is_mismatch(&self) -> bool {
        matches!(self, CheckpointError::Mismatch { .. })
    }
}
