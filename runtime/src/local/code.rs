//! What a rank interprets: the program's instructions with everything resolved that does not change from step to step.
//! One op for each instruction, at the same place.

use std::sync::Arc;

use ir::program::Call;
use ir::schedule::Kind;
use ir::{DType, Name};

use super::blocks::Block;
use super::bucket::Bucket;
use crate::cpu::Compiled;

/// Where a buffer starts in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In slot 0.
    pub offset: usize,
    /// From one slot to the next; 0 outside the slots.
    pub per_slot: usize,
}

impl Place {
    /// In a slot.
    pub fn in_slot(self, slot: usize) -> usize {
        self.offset + self.per_slot * slot
    }
}

/// One instruction, resolved for a rank.
pub enum Op {
    /// Copies this rank's piece of an input.
    Feed {
        /// The input.
        input: Name,
        /// Bytes of an element.
        size: usize,
        /// Whole tensor to piece; none if the piece is empty.
        block: Option<Block>,
        /// The piece.
        to: Place,
    },
    /// Runs a kernel.
    Launch {
        /// The kernel.
        kernel: Arc<Compiled>,
        /// Its operands.
        reads: Vec<Place>,
        /// Its results.
        writes: Vec<Place>,
    },
    /// Copies elements within the rank; the places may be the same.
    Copy {
        /// Which; none if there are none.
        block: Option<Block>,
        /// Bytes of an element.
        size: usize,
        /// From where.
        from: Place,
        /// Where to.
        to: Place,
    },
    /// Writes the same number everywhere.
    Fill {
        /// Of what type.
        dtype: DType,
        /// How often.
        elements: usize,
        /// Which.
        number: f64,
        /// Where to.
        to: Place,
    },
    /// Arrives at a collective.
    Start {
        /// Where the wait finds it.
        token: usize,
        /// Which group, by place in [`Code::groups`].
        group: usize,
        /// This rank's place in the group.
        member: usize,
        /// What the group does.
        bucket: Arc<Bucket>,
    },
    /// Waits until a collective is done, and helps.
    Wait {
        /// Which.
        token: usize,
        /// What it does.
        bucket: Arc<Bucket>,
    },
    /// Arrives at a message, to send or to receive it: that of the call's micro-batch.
    Post {
        /// Its place among what the segment starts.
        token: usize,
        /// Which channel, by place in [`Code::groups`].
        group: usize,
        /// 0 sends, 1 receives.
        member: usize,
        /// What goes over it.
        bucket: Arc<Bucket>,
    },
    /// Waits until the message of the call's micro-batch is there, and helps.
    Done {
        /// Which channel.
        group: usize,
        /// What goes over it.
        bucket: Arc<Bucket>,
    },
    /// Hands a piece to the host.
    Tap {
        /// The tap, by place among those of the segment.
        tap: usize,
        /// Its name.
        name: Name,
        /// Of what type.
        dtype: DType,
        /// How many elements the piece has.
        elements: usize,
        /// Piece to whole tensor; none if the piece is empty.
        block: Option<Block>,
        /// Whether this rank is the first that has this piece.
        first: bool,
        /// The piece.
        from: Place,
    },
}

/// A segment's ops.
pub struct SegmentCode {
    /// Which actions run it.
    pub kind: Kind,
    /// The ops, one an instruction.
    pub ops: Vec<Op>,
    /// How many collectives and messages it starts.
    pub tokens: usize,
}

/// All that a rank does.
pub struct RankCode {
    /// In which row of the pipeline it is.
    pub row: usize,
    /// The segments.
    pub segments: Vec<SegmentCode>,
    /// A step.
    pub calls: Vec<Call>,
}

/// All that all ranks do.
pub struct Code {
    /// By rank.
    pub ranks: Vec<RankCode>,
    /// The members of each group, in order.
    pub groups: Vec<Vec<usize>>,
    /// The most scratch that a kernel needs.
    pub scratch: usize,
    /// The most operands that a launch has.
    pub operands: usize,
}
