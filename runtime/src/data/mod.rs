//! What a training run reads: batches as they stand in a file, or rows drawn from a text; and the random
//! numbers for both rows and first weights, which are the same on every mesh.

pub mod batches;
mod error;
pub mod npy;
pub mod random;
pub mod rows;
pub mod sample;
mod source;
pub mod text;

pub use error::DataError;
pub use source::{Batch, IGNORED, Source};
