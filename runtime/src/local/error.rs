//! What can go wrong when a program is loaded or run.

use ir::program::BufferId;
use ir::schedule::Kind;
use ir::{DType, Name};

use crate::cpu::KernelError;

/// Why a program cannot be loaded, or why a step stopped.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Another number of stages than rows of the pipeline.
    #[error("the mesh has {rows} rows of a pipeline, but the program has {stages} stages")]
    Stages {
        /// Of the mesh.
        rows: usize,
        /// Of the program.
        stages: usize,
    },
    /// What stages do together, but do not mean the same by.
    #[error("between stages: {fault}")]
    Between {
        /// What was needed, and what is.
        fault: String,
    },
    /// `place` did not run.
    #[error("{0} has no offset: the buffers are placed before a program is loaded")]
    Unplaced(BufferId),
    /// A buffer that does not lie in the arena, or not where one can start.
    #[error(
        "{buffer} takes bytes {start}..{end}, but must start at a multiple of {align} and lie in its region, \
         and in the arena of {arena} bytes"
    )]
    Place {
        /// The buffer.
        buffer: BufferId,
        /// Where it starts.
        start: usize,
        /// Where it ends.
        end: usize,
        /// What the start must be a multiple of.
        align: usize,
        /// The size of the arena.
        arena: usize,
    },
    /// An instruction that breaks a rule.
    #[error("segment {}, instruction {instruction}: {fault}", .segment.letter())]
    Malformed {
        /// Which segment.
        segment: Kind,
        /// Which instruction of it, from 0.
        instruction: usize,
        /// What was needed, and what is.
        fault: String,
    },
    /// A call that names what does not exist.
    #[error("call {call}: {fault}")]
    Call {
        /// Which call, from 0.
        call: usize,
        /// What was needed, and what is.
        fault: String,
    },
    /// A kernel that the CPU cannot run.
    #[error("segment {}, instruction {instruction}: {source}", .segment.letter())]
    Kernel {
        /// Which segment.
        segment: Kind,
        /// Which instruction of it, from 0.
        instruction: usize,
        /// Why.
        source: KernelError,
    },
    /// The machine has no room for an arena.
    #[error("cannot get an arena of {bytes} bytes for a rank: {source}")]
    Memory {
        /// How many bytes were asked for.
        bytes: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A worker could not be started.
    #[error("cannot start a worker: {0}")]
    Thread(std::io::Error),
    /// Another number of micro-batches than the program has.
    #[error("a step takes {needed} micro-batches, but was fed {found}")]
    Microbatches {
        /// What the program has.
        needed: usize,
        /// What was fed.
        found: usize,
    },
    /// An input that is missing or of another type or size.
    #[error("micro-batch {microbatch}: input `{name}` needs {needed}, but has {found}")]
    Feed {
        /// Which micro-batch.
        microbatch: usize,
        /// Which input.
        name: Name,
        /// What it needs.
        needed: String,
        /// What it has.
        found: String,
    },
    /// A state that the program does not keep.
    #[error("the program keeps no state `{0}`")]
    UnknownState(Name),
    /// A state of another kind than the call is for.
    #[error("state `{name}` is {found}, and {needed} is asked for")]
    StateType {
        /// Which state.
        name: Name,
        /// What is asked for.
        needed: &'static str,
        /// What it is.
        found: DType,
    },
    /// A number that must be finite is not. The step stopped before anything after it ran.
    #[error("`{tap}` is not finite")]
    NotFinite {
        /// The tap.
        tap: Name,
    },
    /// No rank can go on.
    #[error("no rank can go on:\n{}", .ranks.join("\n"))]
    Stuck {
        /// For each rank that has not ended, what it waits for.
        ranks: Vec<String>,
    },
    /// Ranks met for different collectives.
    #[error("ranks {members:?} met, but for different collectives: {found}")]
    Mismatched {
        /// The group.
        members: Vec<usize>,
        /// What each came for.
        found: String,
    },
    /// A worker panicked: a bug.
    #[error("a worker panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
}
