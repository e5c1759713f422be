//! Checkpoints: the states of a run as one safetensors shard a rank and an index, whole or not there, read back on any
//! mesh.
//!
//! ```text
//! DIR/step-000200/index.json              what is where: names, shapes, pieces, checksums
//!                 rank-00000.safetensors  the pieces that rank 0 owns, by global name and ranges
//!                 config.json             the model's own, if it has one
//! DIR/.step-000300.4711.part/             being written; a later run removes it
//! ```
//!
//! A piece is a box of the state's global indices. Meshes may cut a state's dimensions differently, but never change its
//! row-major order, so pieces of one are read into pieces of another by their flat positions.

mod error;
mod flat;
mod folder;
mod index;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use error::CheckpointError;
pub use folder::{clean, is_checkpoint, list, newest, prune};
pub use index::{Described, Entry, Index, Listed, Part};
pub use read::Checkpoint;
pub use write::{About, Piece, write};
