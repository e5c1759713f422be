//! The program: for each class of ranks (a stage) its segments of instructions, and the list of calls that run them.
//! Two levels, so that many micro-batches cost calls and not instructions. Ranks appear only when it is loaded.

use std::fmt;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

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

/// The few buffers that an instruction reads or writes.
pub type Buffers = SmallVec<[BufferId; 4]>;

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
    /// Which composite it was made in, if that is one of [`crate::composite::ONE_KERNEL`].
    pub inside: Option<u32>,
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
        let dims = self.shape.iter().zip(&self.sharding.dims);
        dims.map(|(n, axes)| crate::bound(*n, axes, mesh)).product::<usize>() * self.dtype.bytes()
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

impl Transfer {
    /// Whether stages of a pipeline do it together.
    pub fn joins_stages(&self, mesh: &Mesh) -> bool {
        let pipeline = mesh.pipeline();
        self.step.axes().iter().any(|axis| Some(*axis) == pipeline)
    }
}

/// What goes from a stage of a pipeline to another: a value of the micro-batch, or of the step, that its call is for. The
/// k-th sent and the k-th received of the same from, to and value are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The value of the sharded graph.
    pub value: Value,
    /// The virtual stage that has it.
    pub from: usize,
    /// The virtual stage that needs it.
    pub to: usize,
}

/// One end of a message that an instruction starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// What the wait for it has, too.
    pub token: u32,
    /// Which message.
    pub message: Message,
    /// What is sent, or where it is received.
    pub buffer: BufferId,
    /// Whether this end sends.
    pub sends: bool,
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
        /// What is computed; equal launches share it.
        kernel: Arc<Kernel>,
        /// Its operands.
        reads: Buffers,
        /// Its results; one may be the buffer of an operand that it reads element by element.
        writes: Buffers,
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
    /// Starts to send a buffer to the rank of another stage that lies as this one. It is not written until it is sent.
    Send {
        /// Which [`Instruction::Sent`] belongs to it; unique in the stage.
        token: u32,
        /// What is sent.
        message: Message,
        /// What it reads.
        from: BufferId,
    },
    /// Waits until a message is sent, for its micro-batch.
    Sent {
        /// Its token.
        token: u32,
        /// What was sent.
        from: BufferId,
    },
    /// Is ready to receive: the buffer is not touched until it is received.
    Receive {
        /// Which [`Instruction::Received`] belongs to it; unique in the stage.
        token: u32,
        /// What comes.
        message: Message,
        /// What it writes.
        to: BufferId,
    },
    /// Waits until a message has come, for its micro-batch.
    Received {
        /// Its token.
        token: u32,
        /// What came.
        to: BufferId,
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

    /// The kernel that it runs.
    pub fn kernel(&self) -> Option<&Kernel> {
        match self {
            Instruction::Launch { kernel, .. } => Some(kernel),
            Instruction::Feed { .. }
            | Instruction::Local { .. }
            | Instruction::Start { .. }
            | Instruction::Wait { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => None,
        }
    }

    /// Token and tensors of the collective that it starts.
    pub fn started(&self) -> Option<(u32, &[Transfer])> {
        match self {
            Instruction::Start { token, parts } => Some((*token, parts)),
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Wait { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => None,
        }
    }

    /// The tensors of the collective that it starts; none if it starts none.
    pub fn transfers(&self) -> &[Transfer] {
        self.started().map_or(&[], |(_, parts)| parts)
    }

    /// The end of a message that it starts: to send it, or to be ready for it.
    pub fn posted(&self) -> Option<Posted> {
        match self {
            Instruction::Send { token, message, from } => {
                Some(Posted { token: *token, message: *message, buffer: *from, sends: true })
            }
            Instruction::Receive { token, message, to } => {
                Some(Posted { token: *token, message: *message, buffer: *to, sends: false })
            }
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Start { .. }
            | Instruction::Wait { .. }
            | Instruction::Sent { .. }
            | Instruction::Received { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => None,
        }
    }

    /// The message that it starts to send or is ready to receive.
    pub fn message(&self) -> Option<Message> {
        self.posted().map(|end| end.message)
    }

    /// The buffers that it reads.
    pub fn reads(&self) -> Buffers {
        match self {
            Instruction::Feed { .. }
            | Instruction::Wait { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. } => Buffers::new(),
            Instruction::Launch { reads, .. } => reads.clone(),
            Instruction::Start { parts, .. } => parts.iter().map(|p| p.from).collect(),
            Instruction::Local { from, .. }
            | Instruction::Send { from, .. }
            | Instruction::Sent { from, .. }
            | Instruction::Assign { from, .. }
            | Instruction::Tap { from, .. } => smallvec![*from],
        }
    }

    /// The buffers that it writes.
    pub fn writes(&self) -> Buffers {
        match self {
            Instruction::Feed { to, .. }
            | Instruction::Local { to, .. }
            | Instruction::Receive { to, .. }
            | Instruction::Received { to, .. }
            | Instruction::Assign { to, .. } => smallvec![*to],
            Instruction::Start { parts, .. } => parts.iter().map(|p| p.to).collect(),
            Instruction::Launch { writes, .. } => writes.clone(),
            Instruction::Wait { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Tap { .. } => Buffers::new(),
        }
    }
}

impl Instruction {
    /// Every buffer that it names, to be renamed.
    pub fn buffers_mut(&mut self) -> Vec<&mut BufferId> {
        match self {
            Instruction::Feed { to, .. }
            | Instruction::Receive { to, .. }
            | Instruction::Received { to, .. } => vec![to],
            Instruction::Launch { reads, writes, .. } => reads.iter_mut().chain(writes).collect(),
            Instruction::Local { from, to, .. } | Instruction::Assign { from, to } => vec![from, to],
            Instruction::Start { parts, .. } => {
                parts.iter_mut().flat_map(|p| [&mut p.from, &mut p.to]).collect()
            }
            Instruction::Send { from, .. }
            | Instruction::Sent { from, .. }
            | Instruction::Tap { from, .. } => {
                vec![from]
            }
            Instruction::Wait { .. } => Vec::new(),
        }
    }
}

/// What a segment does for its actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Duty {
    /// The action itself.
    Work,
    /// Gets ready to receive what the action needs.
    Post,
    /// Waits until what the action made is sent.
    Clear,
}

impl Duty {
    /// Each, for parsing.
    pub const ALL: [Duty; 3] = [Duty::Work, Duty::Post, Duty::Clear];

    /// Behind the name of its segment in the text form.
    pub fn suffix(self) -> &'static str {
        match self {
            Duty::Work => "",
            Duty::Post => ".post",
            Duty::Clear => ".clear",
        }
    }
}

/// The straight instructions of one kind of action of a virtual stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The virtual stage whose actions run it; of what a row does once, its first.
    pub stage: usize,
    /// Which actions run it.
    pub kind: Kind,
    /// What it does for them.
    pub duty: Duty,
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

/// What all ranks of a row of the pipeline do: a physical stage, of one or several virtual ones.
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
    /// What a segment is called: its virtual stage and the letter of its kind, what it does for it, and a prime for each
    /// like segment before it.
    pub fn name_of(&self, segment: usize) -> String {
        let of = &self.segments[segment];
        let like = |s: &&Segment| (s.stage, s.kind, s.duty) == (of.stage, of.kind, of.duty);
        let before = self.segments[..segment].iter().filter(like).count();
        format!("{}{}{}{}", of.stage, of.kind.letter(), of.duty.suffix(), "'".repeat(before))
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
    /// For each virtual stage of the pipeline its row, by place in `stages`.
    pub homes: Vec<usize>,
    /// The classes of ranks, one a row of the pipeline.
    pub stages: Vec<Stage>,
}
