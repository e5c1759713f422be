//! The program: for each class of ranks (a stage) its segments of instructions, and the list of calls that run them.
//! Two levels, so that many micro-batches cost calls and not instructions. Ranks appear only when it is loaded.

use std::fmt;

use crate::kernel::Kernel;
use crate::schedule::Kind;
use crate::state::{Input, State};
use crate::{DType, Mesh, Move, Name, Sharding, Value};

/// A buffer of a stage, by its place in [`Stage::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

impl BufferId {
    /// Its place.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b{}", self.0)
    }
}

/// How long what a buffer holds is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// From step to step.
    State,
    /// For a step.
    Step,
    /// From a micro-batch's forward to its backward; there is one for each micro-batch in flight.
    Slot,
    /// Within a segment.
    Scratch,
}

impl Region {
    /// Every region, in the order in which they lie in the arena.
    pub const ALL: [Region; 4] = [Region::State, Region::Step, Region::Slot, Region::Scratch];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Region::State => "state",
            Region::Step => "step",
            Region::Slot => "slot",
            Region::Scratch => "scratch",
        }
    }
}

/// A piece of a rank's arena that holds this rank's piece of a value, dense and row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// The state that it holds.
    pub state: Option<Name>,
    /// The value of the sharded graph that it holds.
    pub value: Option<Value>,
    /// Element type.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// How it lies on the mesh.
    pub sharding: Sharding,
    /// How long it is needed.
    pub region: Region,
    /// Where it starts in its region, in bytes; none until `place` ran.
    pub offset: Option<usize>,
}

/// Buffers start at multiples of this many bytes: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

impl Buffer {
    /// The bytes that the largest piece takes.
    pub fn bytes(&self, mesh: &Mesh) -> usize {
        crate::local_shape(&self.shape, &self.sharding, mesh).iter().product::<usize>() * self.dtype.bytes()
    }
}

/// What a collective does with one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// What is done.
    pub step: Move,
    /// What it reads.
    pub from: BufferId,
    /// What it writes.
    pub to: BufferId,
}

/// One instruction. What is live when is data and no instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    /// Puts this rank's piece of an input's micro-batch into a buffer.
    Feed {
        /// The input.
        input: Name,
        /// Where to.
        to: BufferId,
    },
    /// Runs a kernel.
    Launch {
        /// What is computed.
        kernel: Kernel,
        /// Its operands.
        reads: Vec<BufferId>,
        /// Its results; one may be the buffer of an operand that it reads element by element.
        writes: Vec<BufferId>,
    },
    /// A change of sharding without communication.
    Local {
        /// A slice or to_partial.
        step: Move,
        /// What it reads.
        from: BufferId,
        /// What it writes.
        to: BufferId,
    },
    /// Starts a collective. Its buffers are not touched until the wait.
    Start {
        /// Which wait belongs to it; unique in the segment.
        token: u32,
        /// The tensors that one call moves: one, or those of a bucket. All by the same collective over the same axes.
        parts: Vec<Transfer>,
    },
    /// Waits until a collective is done.
    Wait {
        /// Its token.
        token: u32,
    },
    /// Copies a buffer into a state. Left out where the state's own buffer was written.
    Assign {
        /// What it reads.
        from: BufferId,
        /// The state's buffer.
        to: BufferId,
    },
    /// Hands this rank's piece of a buffer to the host.
    Tap {
        /// The name under which the host gets it.
        name: Name,
        /// The buffer.
        from: BufferId,
    },
}

impl Instruction {
    /// The start of a collective that moves one tensor.
    pub fn start(token: u32, step: Move, from: BufferId, to: BufferId) -> Instruction {
        Instruction::Start { token, parts: vec![Transfer { step, from, to }] }
    }

    /// Token and tensors of the collective that it starts.
    pub fn started(&self) -> Option<(u32, &[Transfer])> {
        match self {
            Instruction::Start { token, parts } => Some((*token, parts)),
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Wait { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => None,
        }
    }

    /// The tensors of the collective that it starts; none if it starts none.
    pub fn transfers(&self) -> &[Transfer] {
        self.started().map_or(&[], |(_, parts)| parts)
    }

    /// The buffers that it reads.
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Instruction::Feed { .. } | Instruction::Wait { .. } => Vec::new(),
            Instruction::Launch { reads, .. } => reads.clone(),
            Instruction::Start { parts, .. } => parts.iter().map(|p| p.from).collect(),
            Instruction::Local { from, .. }
            | Instruction::Assign { from, .. }
            | Instruction::Tap { from, .. } => vec![*from],
        }
    }

    /// The buffers that it writes.
    pub fn writes(&self) -> Vec<BufferId> {
        match self {
            Instruction::Feed { to, .. } | Instruction::Local { to, .. } | Instruction::Assign { to, .. } => {
                vec![*to]
            }
            Instruction::Start { parts, .. } => parts.iter().map(|p| p.to).collect(),
            Instruction::Launch { writes, .. } => writes.clone(),
            Instruction::Wait { .. } | Instruction::Tap { .. } => Vec::new(),
        }
    }
}

impl Instruction {
    /// Every buffer that it names, to be renamed.
    pub fn buffers_mut(&mut self) -> Vec<&mut BufferId> {
        match self {
            Instruction::Feed { to, .. } => vec![to],
            Instruction::Launch { reads, writes, .. } => reads.iter_mut().chain(writes).collect(),
            Instruction::Local { from, to, .. } | Instruction::Assign { from, to } => vec![from, to],
            Instruction::Start { parts, .. } => {
                parts.iter_mut().flat_map(|p| [&mut p.from, &mut p.to]).collect()
            }
            Instruction::Tap { from, .. } => vec![from],
            Instruction::Wait { .. } => Vec::new(),
        }
    }
}

/// The straight instructions of one kind of action.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Which actions run it.
    pub kind: Kind,
    /// What is done, in order.
    pub instructions: Vec<Instruction>,
}

/// Runs a segment for a micro-batch in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which segment, by place.
    pub segment: usize,
    /// Which micro-batch; none for what is done once a step.
    pub microbatch: Option<usize>,
    /// Where the micro-batch's values are.
    pub slot: usize,
}

/// What all ranks of a stage do.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Stage {
    /// The buffers of a rank.
    pub buffers: Vec<Buffer>,
    /// The segments.
    pub segments: Vec<Segment>,
    /// The calls of a step, in order.
    pub calls: Vec<Call>,
    /// How many micro-batches are in flight at most.
    pub slots: usize,
    /// The size of each region in bytes, in the order of [`Region::ALL`]; slot: of one slot. Set by `place`.
    pub sizes: [usize; 4],
}

impl Stage {
    /// What a segment is called: the letter of its kind, and a prime for each segment of that kind before it.
    pub fn name_of(&self, segment: usize) -> String {
        let kind = self.segments[segment].kind;
        let before = self.segments[..segment].iter().filter(|s| s.kind == kind).count();
        format!("{}{}", kind.letter(), "'".repeat(before))
    }

    /// The bytes of a rank's arena.
    pub fn arena_bytes(&self) -> usize {
        let [state, step, slot, scratch] = self.sizes;
        state + step + slot * self.slots + scratch
    }

    /// Where a buffer starts in the arena.
    ///
    /// # Panics
    /// Before `place` ran.
    pub fn address(&self, id: BufferId, slot: usize) -> usize {
        let buffer = &self.buffers[id.index()];
        let [state, step, size, _] = self.sizes;
        let base = match buffer.region {
            Region::State => 0,
            Region::Step => state,
            Region::Slot => state + step + size * slot,
            Region::Scratch => state + step + size * self.slots,
        };
        base + buffer.offset.expect("the buffers are placed before the program is loaded")
    }
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Program {
    /// The devices.
    pub mesh: Mesh,
    /// What is fed.
    pub inputs: Vec<Input>,
    /// What is kept.
    pub states: Vec<State>,
    /// How many micro-batches a step has.
    pub microbatches: usize,
    /// Gradients are reduced in calls of up to so many bytes; none, or 0: each by itself.
    pub bucket_bytes: Option<usize>,
    /// The classes of ranks.
    pub stages: Vec<Stage>,
}
