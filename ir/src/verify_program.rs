//! The rules that every program keeps. All that are broken are reported.
//!
//! - Operands have the element types, sizes and splits that their kernel's accesses say.
//! - A step uses registers defined before it; rows are reduced from numbers of the point; stores reach every element.
//! - The kernels of a chain share its loops; what is between them is written once, before it is read.
//! - A move leads from the sharding of what it reads to that of what it writes.
//! - Each collective is waited for once, in its segment, and its buffers are not touched meanwhile. What one call moves
//!   goes by one collective over the same axes.
//! - A message has one sender and one receiver, where its stages live; it is waited for once in each micro-batch, and its
//!   buffers are not touched meanwhile.
//! - What is read was written before, in the order of the calls, and once buffers are placed nobody wrote over it since.
//!   What lies in a slot is read for the micro-batch that it was written for.
//! - Buffers lie inside their regions, aligned; a state is assigned what is like it; what leaves is not partial.

mod chain;
mod memory;
mod messages;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::kernel::{Access, Body, Kernel, Loop, Map, Step, TopK};
use crate::program::{ALIGN, BufferId, Instruction, Message, Program, Region, Stage, Transfer};
use crate::{Axes, DType, Mesh, Move, Reduce};

/// A rule that a program breaks, and where.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{at}: {kind}")]
pub struct ProgramError {
    /// Segment and place of the instruction, or the buffer.
    pub at: String,
    /// The rule.
    pub kind: ProgramFault,
}

/// The rules, in the words of the message.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProgramFault {
    /// Operands that a kernel has and a launch lacks, or the other way round.
    #[error("the kernel has {kernel} operands, the launch gives {launch}")]
    Operands {
        /// Of the kernel.
        kernel: usize,
        /// Of the launch.
        launch: usize,
    },
    /// Another element type.
    #[error("{0} is {1}, but its kernel takes it as {2}")]
    Type(BufferId, DType, DType),
    /// A dimension that is not what its loops run over.
    #[error("dimension {dim} of {buffer} is {found}, but its loops run over {needed}")]
    Extent {
        /// The buffer.
        buffer: BufferId,
        /// Its dimension.
        dim: usize,
        /// Size and axes of the buffer.
        found: String,
        /// Size and axes of the loops.
        needed: String,
    },
    /// Another number of dimensions.
    #[error("{0} has {1} dimensions, but its access has {2}")]
    Dims(BufferId, usize, usize),
    /// A register, operand or loop that is not there.
    #[error("step {0} names {1}, which is not defined before it")]
    Undefined(usize, String),
    /// A row reduced from what is the same all over it.
    #[error("step {0} reduces a register that is the same for the whole row")]
    RowOfRow(usize),
    /// A store that does not reach everything.
    #[error("step {0} stores without the loop {1}, so that several points write one element")]
    StoreLacks(usize, String),
    /// A move between other shardings.
    #[error("{step} leads from {from} to {to}, but {buffer} is {found}")]
    Move {
        /// The move.
        step: String,
        /// Where from.
        from: String,
        /// Where to.
        to: String,
        /// What it writes.
        buffer: BufferId,
        /// How that lies.
        found: String,
    },
    /// Pairs merged where there are none.
    #[error(
        "{step} merges pairs, but the last two dimensions of {buffer} are no whole blocks of pairs in f32"
    )]
    NoPairs {
        /// The move.
        step: String,
        /// What it reads.
        buffer: BufferId,
    },
    /// Pairs merged by a step of a map.
    #[error("step {0} combines single numbers by merging pairs")]
    PairsOfMap(usize),
    /// A chain whose kernels do not go together.
    #[error("kernel {0} of a chain {1}")]
    Chain(usize, String),
    /// A loop of a top-k that is not what it must be.
    #[error("loop {0} of a top-k is {1}")]
    TopK(String, &'static str),
    /// A move of what does not lie so.
    #[error("{step} is no move of {buffer}, which is {sharding}")]
    NoMove {
        /// The move.
        step: String,
        /// What it reads.
        buffer: BufferId,
        /// How that lies.
        sharding: String,
    },
    /// Unlike buffers where like ones are needed.
    #[error("{0} and {1} differ in shape or element type")]
    Unlike(BufferId, BufferId),
    /// One call of nothing, or of unlike collectives.
    #[error("one call does {0}, but has to do one collective over the same axes")]
    Mixed(String),
    /// Two collectives with one token, or one in flight when its segment ends.
    #[error("collective t{0} is started, but not waited for once")]
    NotWaited(u32),
    /// A wait for nothing.
    #[error("waits for t{0}, which is not in flight")]
    NotStarted(u32),
    /// A buffer of a collective in flight.
    #[error("uses {0}, which collective t{1} still holds")]
    InFlight(BufferId, u32),
    /// Read before it is written.
    #[error("reads {0}, which nothing has written")]
    NotWritten(BufferId),
    /// Read and written by one kernel, but not element by element.
    #[error("writes {0} over what it reads of it, but not element by element")]
    InPlace(BufferId),
    /// Memory that another buffer took.
    #[error("reads {0}, whose memory {1} has taken since")]
    Overwritten(BufferId, BufferId),
    /// A buffer outside of its region.
    #[error("{0} of {1} bytes at {2} does not lie in its region of {3} bytes, or is not aligned")]
    Outside(BufferId, usize, usize, usize),
    /// Read for another micro-batch than it was written for.
    #[error("reads {buffer}, which is of {}, for {}", of(*found), of(*needed))]
    OtherMicrobatch {
        /// The buffer, in a slot.
        buffer: BufferId,
        /// Whose it is.
        found: Option<usize>,
        /// Whose it must be.
        needed: Option<usize>,
    },
    /// Written while it is sent.
    #[error("writes {0} before it is sent")]
    BeingSent(BufferId),
    /// A message with no other end, or several.
    #[error("{} from stage {} to {} needs one send and one receive", .0.value, .0.from, .0.to)]
    NoPeer(Message),
    /// An end of a message in another row.
    #[error("{} from stage {} to {} is not where stage {} lives", .0.value, .0.from, .0.to, .1)]
    Elsewhere(Message, usize),
    /// Ends that differ.
    #[error("{} from stage {} to {} is received as something else", .0.value, .0.from, .0.to)]
    OtherEnd(Message),
    /// A state that one row changes and another with a copy of it does not.
    #[error("state `{0}` is changed by stage {1}, but not here, where it lies too")]
    Drifts(String, usize),
    /// Rows that are not those of the mesh, or homes that are not there.
    #[error("{0} rows on {1} ranks of a pipeline, of stages that live in rows {2:?}")]
    Rows(usize, usize, Vec<usize>),
    /// A partial value that leaves.
    #[error("{0} is {1}: what is assigned or handed out must not be partial")]
    Partial(BufferId, String),
    /// No such input or state.
    #[error("there is no {0} `{1}`")]
    Missing(&'static str, String),
    /// A call that cannot be.
    #[error("calls segment {0} in slot {1}, of {2} segments and {3} slots")]
    Call(usize, usize, usize, usize),
}

fn of(microbatch: Option<usize>) -> String {
    microbatch.map_or("no micro-batch".to_string(), |m| format!("micro-batch {m}"))
}

/// All rules that a program breaks.
///
/// # Errors
/// The broken rules.
pub fn verify_program(program: &Program) -> Result<(), Vec<ProgramError>> {
    let mut errors = Vec::new();
    let mut right = Right::default();
    for (s, stage) in program.stages.iter().enumerate() {
        let mut check = Check { program, stage, mesh: &program.mesh, errors: &mut errors, right: &mut right };
        for (i, segment) in stage.segments.iter().enumerate() {
            let name = stage.name_of(i);
            let mut in_flight: BTreeMap<u32, &[Transfer]> = BTreeMap::new();
            for (k, instruction) in segment.instructions.iter().enumerate() {
                let at = format_args!("stage {s}, segment {name}, instruction {k}");
                check.instruction(&at, instruction);
                check.flight(&at, instruction, &mut in_flight);
            }
            for token in in_flight.keys() {
                let at = format!("stage {s}, segment {name}");
                check.report(&at, ProgramFault::NotWaited(*token));
            }
        }
        check.places(s);
        check.tokens(s);
        check.memory(s);
    }
    let (rows, homes) = (program.stages.len(), &program.homes);
    if rows != program.mesh.rows() || homes.iter().any(|row| *row >= rows) {
        let kind = ProgramFault::Rows(rows, program.mesh.rows(), homes.clone());
        errors.push(ProgramError { at: "program".to_string(), kind });
    }
    messages::messages(program, &mut errors);
    messages::copies(program, &mut errors);
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// For kernels a launch that breaks no rule, and its stage.
type Right<'a> = FxHashMap<*const Kernel, Launched<'a>>;

/// A stage, and what a launch in it reads and writes.
type Launched<'a> = (&'a Stage, &'a [BufferId], &'a [BufferId]);

struct Check<'a, 'b> {
    program: &'a Program,
    stage: &'a Stage,
    mesh: &'a Mesh,
    errors: &'b mut Vec<ProgramError>,
    right: &'b mut Right<'a>,
}

impl<'a> Check<'a, '_> {
    fn report(&mut self, at: &dyn Display, kind: ProgramFault) {
        self.errors.push(ProgramError { at: at.to_string(), kind });
    }

    fn instruction(&mut self, at: &dyn Display, instruction: &'a Instruction) {
        match instruction {
            Instruction::Launch { kernel, reads, writes } => {
                let (key, here) = (Arc::as_ptr(kernel), (self.stage, &reads[..], &writes[..]));
                if self.right.get(&key).is_some_and(|known| alike(*known, here)) {
                    return;
                }
                let before = self.errors.len();
                self.launch(at, kernel, reads, writes);
                if self.errors.len() == before {
                    self.right.insert(key, here);
                }
            }
            Instruction::Local { step, from, to } => self.moves(at, step, *from, *to),
            Instruction::Start { parts, .. } => {
                parts.iter().for_each(|p| self.moves(at, &p.step, p.from, p.to));
                let kind = |p: &Transfer| (p.step.name(), p.step.axes().to_vec());
                if parts.is_empty() || parts.iter().any(|p| kind(p) != kind(&parts[0])) {
                    let all: Vec<String> = parts.iter().map(|p| p.step.show(self.mesh)).collect();
                    self.report(at, ProgramFault::Mixed(all.join(", ")));
                }
            }
            Instruction::Assign { from, to } => {
                let (a, b) = (&self.stage.buffers[from.index()], &self.stage.buffers[to.index()]);
                if a.dtype != b.dtype || a.shape != b.shape || a.sharding != b.sharding {
                    self.report(at, ProgramFault::Unlike(*from, *to));
                }
                self.whole(at, *from);
            }
            Instruction::Tap { from, .. } => self.whole(at, *from),
            Instruction::Feed { input, to } => {
                let found = self.program.inputs.iter().find(|i| i.name == *input);
                let buffer = &self.stage.buffers[to.index()];
                match found {
                    None => self.report(at, ProgramFault::Missing("input", input.to_string())),
                    Some(i) if i.dims.iter().map(|(_, n)| *n).eq(buffer.shape.iter().copied()) => {}
                    Some(_) => self.report(at, ProgramFault::Unlike(*to, *to)),
                }
            }
            Instruction::Wait { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. } => {}
        }
    }

    fn moves(&mut self, at: &dyn Display, step: &Move, from: BufferId, to: BufferId) {
        let (a, b) = (&self.stage.buffers[from.index()], &self.stage.buffers[to.index()]);
        let pairs = step.reduce() == Some(Reduce::Top);
        if pairs && !step.has_pairs(&a.shape, &a.sharding, a.dtype) {
            let step = step.show(self.mesh);
            self.report(at, ProgramFault::NoPairs { step, buffer: from });
        }
        if a.dtype != b.dtype || a.shape != b.shape {
            self.report(at, ProgramFault::Unlike(from, to));
        } else if !step.fits(&a.sharding) {
            let (step, sharding) = (step.show(self.mesh), a.sharding.show(self.mesh));
            self.report(at, ProgramFault::NoMove { step, buffer: from, sharding });
        } else if step.after(&a.sharding) != b.sharding {
            let needed = step.after(&a.sharding).show(self.mesh);
            let (step, from) = (step.show(self.mesh), a.sharding.show(self.mesh));
            let found = b.sharding.show(self.mesh);
            self.report(at, ProgramFault::Move { step, from, to: needed, buffer: to, found });
        }
    }

    fn whole(&mut self, at: &dyn Display, id: BufferId) {
        let sharding = &self.stage.buffers[id.index()].sharding;
        if !sharding.partial.is_empty() {
            let text = sharding.show(self.mesh);
            self.report(at, ProgramFault::Partial(id, text));
        }
    }

    fn launch(&mut self, at: &dyn Display, kernel: &Kernel, reads: &[BufferId], writes: &[BufferId]) {
        for (types, ids) in [(&kernel.reads, reads), (&kernel.writes, writes)] {
            if types.len() != ids.len() {
                return self.report(at, ProgramFault::Operands { kernel: types.len(), launch: ids.len() });
            }
            for (dtype, id) in types.iter().zip(ids) {
                let found = self.stage.buffers[id.index()].dtype;
                if found != *dtype {
                    self.report(at, ProgramFault::Type(*id, found, *dtype));
                }
            }
        }
        for (w, id) in writes.iter().enumerate() {
            let Some(r) = reads.iter().position(|b| b == id) else { continue };
            let fits = match &kernel.body {
                Body::Map(map) => map.in_place(r, w),
                Body::Contract(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => false,
            };
            if !fits {
                self.report(at, ProgramFault::InPlace(*id));
            }
        }
        let loops = kernel.body.loops();
        match &kernel.body {
            Body::Map(map) => {
                for step in &map.steps {
                    if let Some((read, access)) = step.read() {
                        self.operand(at, access, &loops, reads.get(read));
                    }
                    if let Some((write, access, _)) = step.write() {
                        self.operand(at, access, &loops, writes.get(write));
                    }
                }
                self.steps(at, map, &loops);
            }
            Body::Chain(c) => self.chain(at, c, kernel, reads, writes),
            Body::Contract(c) => {
                self.operand(at, &c.a, &loops, reads.first());
                self.operand(at, &c.b, &loops, reads.get(1));
                self.operand(at, &c.out, &loops, writes.first());
            }
            Body::Scatter(s) => {
                self.operand(at, &s.source, &loops, reads.first());
                self.operand(at, &s.index, &loops, reads.get(1));
                self.operand(at, &s.out, &loops, writes.first());
            }
            Body::TopK(t) => {
                self.operand(at, &t.source, &loops, reads.first());
                self.operand(at, &t.out, &loops, writes.first());
                self.top_k(at, t);
            }
        }
    }

    /// What is searched is read and not written, and the pairs are whole.
    fn top_k(&mut self, at: &dyn Display, t: &TopK) {
        let name = |l: usize| t.loops.get(l).map_or(format!("{l}"), |l| l.name.to_string());
        let has = |access: &Access, l: usize| access.iter().flatten().any(|x| *x == l);
        if !has(&t.source, t.searched) || has(&t.out, t.searched) {
            let fault = ProgramFault::TopK(name(t.searched), "searched, but not read alone");
            return self.report(at, fault);
        }
        let Some((kept, [k, pair])) = t.out.split_last_chunk::<2>() else {
            return self.report(at, ProgramFault::TopK(name(t.searched), "written without pairs"));
        };
        for dim in [k, pair] {
            let whole = dim.iter().all(|l| t.loops.get(*l).is_some_and(|l| l.axes.is_empty()));
            if !whole || dim.len() != 1 || has(&t.source, dim[0]) {
                let l = dim.first().map_or(String::new(), |l| name(*l));
                return self.report(at, ProgramFault::TopK(l, "of pairs, but not whole"));
            }
        }
        if t.loops[pair[0]].size != 2 {
            self.report(at, ProgramFault::TopK(name(pair[0]), "of pairs, but not of size 2"));
        }
        let spread =
            |l: usize| l != t.searched && has(&t.source, l) != kept.iter().flatten().any(|x| *x == l);
        if let Some(l) = (0..t.loops.len()).find(|l| spread(*l)) {
            self.report(at, ProgramFault::TopK(name(l), "read or written, but not both"));
        }
    }

    fn operand(&mut self, at: &dyn Display, access: &Access, loops: &[&Loop], id: Option<&BufferId>) {
        let Some(id) = id else { return self.report(at, ProgramFault::Operands { kernel: 1, launch: 0 }) };
        let buffer = &self.stage.buffers[id.index()];
        if access.len() != buffer.shape.len() {
            return self.report(at, ProgramFault::Dims(*id, buffer.shape.len(), access.len()));
        }
        for (dim, over) in access.iter().enumerate() {
            if let Some(l) = over.iter().find(|l| **l >= loops.len()) {
                return self.report(at, ProgramFault::Undefined(0, format!("loop {l}")));
            }
            let size: usize = over.iter().map(|l| loops[*l].size).product();
            let axes: Axes = over.iter().flat_map(|l| &loops[*l].axes).copied().collect();
            let (n, split) = (buffer.shape[dim], &buffer.sharding.dims[dim]);
            if n != size || *split != axes {
                let found = format!("{n} over {}", self.mesh.show(split));
                let needed = format!("{size} over {}", self.mesh.show(&axes));
                self.report(at, ProgramFault::Extent { buffer: *id, dim, found, needed });
            }
        }
    }

    fn steps(&mut self, at: &dyn Display, map: &Map, loops: &[&Loop]) {
        for (i, step) in map.steps.iter().enumerate() {
            let undefined = |r: &usize| *r >= i || !map.steps[*r].defines();
            if let Some(r) = step.uses().into_iter().find(undefined) {
                return self.report(at, ProgramFault::Undefined(i, format!("r{r}")));
            }
        }
        let point = map.of_point();
        let (n, outer) = (map.loops.len(), map.loops.len() - map.row);
        for (i, step) in map.steps.iter().enumerate() {
            match step {
                Step::Store { access, of, .. } => {
                    let has = |l: usize| access.iter().flatten().any(|x| *x == l);
                    let lacks = (0..if point[*of] { n } else { outer }).find(|l| !has(*l));
                    if let Some(l) = lacks {
                        self.report(at, ProgramFault::StoreLacks(i, loops[l].name.to_string()));
                    }
                }
                Step::Accumulate { reduce: Reduce::Top, .. } | Step::Row(Reduce::Top, _) => {
                    self.report(at, ProgramFault::PairsOfMap(i));
                }
                Step::Row(_, r) if !point[*r] => self.report(at, ProgramFault::RowOfRow(i)),
                Step::Iota(l) if *l >= n => self.report(at, ProgramFault::Undefined(i, format!("loop {l}"))),
                Step::Random { inner, .. } => {
                    let here = |l: &&usize| **l >= n;
                    let twice = (1..inner.len()).find(|i| inner[..*i].contains(&inner[*i]));
                    if let Some(l) = inner.iter().find(here).or(twice.map(|i| &inner[i])) {
                        self.report(at, ProgramFault::Undefined(i, format!("loop {l}")));
                    }
                }
                Step::Load { .. }
                | Step::LoadAt { .. }
                | Step::Accumulate { .. }
                | Step::Row(..)
                | Step::Iota(_)
                | Step::Const(_)
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Mul(..)
                | Step::Select(..)
                | Step::Cast(..) => {}
            }
        }
    }

    fn flight<'p>(
        &mut self,
        at: &dyn Display,
        instruction: &'p Instruction,
        in_flight: &mut BTreeMap<u32, &'p [Transfer]>,
    ) {
        if !in_flight.is_empty() {
            let writes = instruction.writes();
            // What a collective reads may be read by others too.
            let holds = |p: &Transfer, id: BufferId| p.to == id || p.from == id && writes.contains(&id);
            for id in instruction.reads().into_iter().chain(writes.iter().copied()) {
                let held = in_flight.iter().find(|(_, parts)| parts.iter().any(|p| holds(p, id)));
                if let Some(token) = held.map(|(t, _)| *t) {
                    self.report(at, ProgramFault::InFlight(id, token));
                }
            }
        }
        if let Some((token, parts)) = instruction.started() {
            let apart = |i: usize, o: &Transfer| {
                let mut others = parts.iter().enumerate().filter(|(k, _)| *k != i);
                others.any(|(_, p)| p.to == o.to || p.to == o.from)
            };
            if let Some((_, part)) = parts.iter().enumerate().find(|(i, p)| apart(*i, p)) {
                self.report(at, ProgramFault::InFlight(part.from, token));
            }
            if in_flight.insert(token, parts).is_some() {
                self.report(at, ProgramFault::NotWaited(token));
            }
        }
        if let Instruction::Wait { token } = instruction
            && in_flight.remove(token).is_none()
        {
            self.report(at, ProgramFault::NotStarted(*token));
        }
    }

    fn places(&mut self, s: usize) {
        for (i, buffer) in self.stage.buffers.iter().enumerate() {
            let Some(offset) = buffer.offset else { continue };
            let region = Region::ALL.iter().position(|r| *r == buffer.region).unwrap_or(0);
            let (bytes, size) = (buffer.bytes(self.mesh), self.stage.sizes[region]);
            if offset + bytes > size || !offset.is_multiple_of(ALIGN) {
                let fault = ProgramFault::Outside(BufferId(i as u32), bytes, offset, size);
                self.report(&format!("stage {s}"), fault);
            }
        }
    }
}

/// Whether one kernel, launched here and there, keeps the same rules: its operands are like each other, and lie in place
/// alike.
fn alike((stage, reads, writes): Launched, (other, from, to): Launched) -> bool {
    let like = |(a, b): (&BufferId, &BufferId)| {
        let (a, b) = (&stage.buffers[a.index()], &other.buffers[b.index()]);
        a.dtype == b.dtype && a.shape == b.shape && a.sharding == b.sharding
    };
    let place = |id: &BufferId, among: &[BufferId]| among.iter().position(|b| b == id);
    reads.len() == from.len()
        && writes.len() == to.len()
        && writes.iter().zip(to).all(|(a, b)| place(a, reads) == place(b, from))
        && reads.iter().zip(from).all(like)
        && writes.iter().zip(to).all(like)
}
