//! The nouns of meshc: what flows from the user's model to the instructions that run. Knows no other crate.

pub mod composite;
mod draw;
pub mod dsl;
mod dtype;
pub mod graph;
pub mod kernel;
mod mesh;
mod moves;
mod op;
pub mod program;
pub mod rows;
pub mod schedule;
mod sharded;
mod sharding;
pub mod signature;
pub mod state;
mod text;
pub mod verify;
pub mod verify_program;

pub use draw::Draw;
pub use dtype::DType;
pub use graph::{Graph, Node, Part, Scope, Value, ValueType};
pub use mesh::{Axes, Axis, Mesh, MeshError, Name, PIPELINE};
pub use moves::{Move, moves, moves_of};
pub use op::{Binary, FactorKind, Op, Unary};
pub use sharded::{Decisions, Places, Reshard, ShardedGraph};
pub use sharding::{Reduce, Sharding, bound, extent, local_shape, piece};
pub use signature::{Dim, Factor, Signature, Signatures, SizeError};
pub use text::{ParseError, parse_graph, parse_program, parse_sharded};
