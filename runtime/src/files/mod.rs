//! Tensors in files: safetensors read by slices and written whole, and nothing left half written.

mod error;
pub mod mapped;
pub mod save;
pub mod weights;
pub mod window;

pub use error::FileError;
