//! The verbs: from the user's graph to the program that runs, one small step at a time.
//!
//! Four ordered lists, by what a pass works on; between them [`ShardedGraph::new`] puts a graph on a mesh, a function of
//! the caller's writes the decisions, and [`lower`] makes instructions. [`compile`] runs them all and verifies after each.

mod assign;
mod atoms;
mod autodiff;
mod bucket;
mod buffers;
mod chain;
mod choose;
mod constrain;
mod driver;
mod fuse;
mod last;
mod like;
mod lower;
mod optimizer;
mod overlap;
mod place;
mod precision;
mod recompute;
mod reshard;
mod simplify;
mod sky;
mod untap;
mod uses;

use ir::program::Program;
use ir::{Graph, ShardedGraph};

pub use choose::asked;
pub use driver::{Choose, Compiled, Trace, compile, shard};
pub use lower::lower;

/// One step, by the name it has in `meshc trace` and in the filetests.
#[derive(Clone, Copy, Debug)]
pub struct Pass<T> {
    /// The name of the step's file.
    pub name: &'static str,
    /// Changes the noun in place.
    pub run: fn(&mut T),
}

/// What works on whole tensors.
pub const GRAPH: &[Pass<Graph>] = &[
    // First, so that the backward pass is a graph like any other and backward collectives need no code of their own.
    Pass { name: "autodiff", run: autodiff::run },
    // Takes the gradients; before sharding, so that ZeRO is only a sharding of its states.
    Pass { name: "optimizer", run: optimizer::run },
    // Takes taps away before `simplify` drops what only they used.
    Pass { name: "untap", run: untap::run },
    // Behind the optimizer, whose update stays in f32; its casts are for `simplify` to merge.
    Pass { name: "precision", run: precision::run },
    // Since the passes before write for clarity: what is written twice is computed once.
    Pass { name: "simplify", run: simplify::run },
    // Behind `simplify`, which would undo it.
    Pass { name: "recompute", run: recompute::run },
];

/// What works on a graph on a mesh before anything is chosen.
pub const PLACED: &[Pass<ShardedGraph>] = &[
    // First: it changes dimensions, and may refine the mesh.
    Pass { name: "atoms", run: atoms::run },
    // Last, since `atoms` cuts what is asked of dimensions: the choice sees a constraint as a node.
    Pass { name: "constrain", run: constrain::run },
];

/// What works on a graph on a mesh when strategies are chosen.
pub const CHOSEN: &[Pass<ShardedGraph>] = &[
    // Gives every value the sharding that follows from its node's strategy.
    Pass { name: "choose", run: choose::run },
    // Makes operands agree, so it needs the shardings of all values.
    Pass { name: "reshard", run: reshard::run },
];

/// What works on instructions.
pub const PROGRAM: &[Pass<Program>] = &[
    // Makes few large kernels of many small ones, so that the passes behind it see what is really stored.
    Pass { name: "fuse", run: fuse::run },
    // Behind `fuse`: a chain is of few large maps. Before all that has to know what is stored.
    Pass { name: "chain", run: chain::run },
    // Needs the kernel that computes a new state in one piece; spares `place` the room for it.
    Pass { name: "assign", run: assign::run },
    // Needs to know what works in place; moves collectives, so before those that join them and part them from their waits.
    Pass { name: "last", run: last::run },
    // Needs to know which collectives write states; joins them before they are moved.
    Pass { name: "bucket", run: bucket::run },
    // Needs to know which collectives write states; what is in flight is for `place` to keep.
    Pass { name: "overlap", run: overlap::run },
    // Last: it needs to know who uses what when.
    Pass { name: "place", run: place::run },
];
