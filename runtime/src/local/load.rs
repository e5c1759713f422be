//! A program made ready for the ranks of this process: every rule checked that memory safety rests on, every address,
//! region and kernel resolved.
//!
//! That instructions do not touch the buffers of a collective in flight is left to the verifier of programs.

mod between;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use ir::kernel::{Body, Kernel};
use ir::program::{ALIGN, Buffer, BufferId, Instruction, Message, Program, Region as Life, Stage, Transfer};
use ir::schedule::Kind;
use ir::{Mesh, Move, Reduce, Sharding, extent};

use super::blocks::{Block, Region, elements};
use super::bucket::{Bucket, Moved};
use super::code::{Code, Op, Place, RankCode, SegmentCode};
use super::collective::Collective;
use super::error::RunError;
use super::message::{Channel, Channels};
use crate::cpu::{Compiled, compile};

/// The global ranges of the piece of a tensor that the rank at `at` has.
pub fn region(shape: &[usize], sharding: &Sharding, mesh: &Mesh, at: &[usize]) -> Region {
    shape.iter().zip(&sharding.dims).map(|(n, axes)| extent(*n, axes, mesh, at)).collect()
}

/// The ranges of a whole tensor.
pub fn whole(shape: &[usize]) -> Region {
    shape.iter().map(|n| 0..*n).collect()
}

/// Whether the rank at `at` is the first of those of its row of a pipeline that have the same piece.
fn is_first(sharding: &Sharding, mesh: &Mesh, at: &[usize]) -> bool {
    let split = |axis| sharding.dims.iter().any(|axes| axes.contains(&axis));
    mesh.all().all(|axis| at[axis.index()] == 0 || Some(axis) == mesh.pipeline() || split(axis))
}

/// Resolves a program, with collectives in shares of so many bytes.
pub fn load(program: &Program, share_bytes: usize) -> Result<Code, RunError> {
    if program.stages.len() != program.mesh.rows() {
        return Err(RunError::Stages { rows: program.mesh.rows(), stages: program.stages.len() });
    }
    for stage in &program.stages {
        check_buffers(program, stage)?;
        check_calls(program, stage)?;
    }
    let mut loader = Loader {
        program,
        stage: &program.stages[0],
        row: 0,
        channels: Channels::of(program)?,
        share_bytes,
        code: Code { ranks: Vec::new(), groups: Vec::new(), scratch: 0, operands: 0 },
        groups: HashMap::new(),
        kernels: HashMap::new(),
        buckets: HashMap::new(),
        joined: 0,
        messages: HashMap::new(),
    };
    for rank in 0..program.mesh.ranks() {
        loader.joined = 0;
        loader.row = program.mesh.row(rank);
        loader.stage = &program.stages[loader.row];
        let rank_code = loader.rank(rank)?;
        loader.code.ranks.push(rank_code);
    }
    Ok(loader.code)
}

fn check_buffers(program: &Program, stage: &Stage) -> Result<(), RunError> {
    let arena = stage.arena_bytes();
    for (i, b) in stage.buffers.iter().enumerate() {
        let buffer = BufferId(i as u32);
        if b.offset.is_none() {
            return Err(RunError::Unplaced(buffer));
        }
        // Of its own region: then buffers of different regions never meet, in whatever slot.
        let region = stage.sizes[Life::ALL.iter().position(|r| *r == b.region).unwrap_or(0)];
        for slot in 0..stage.slots.max(1) {
            let (start, bytes) = (stage.address(buffer, slot), b.bytes(&program.mesh));
            let outside = b.offset.is_some_and(|offset| offset + bytes > region);
            if !start.is_multiple_of(ALIGN) || outside || start + bytes > arena {
                return Err(RunError::Place { buffer, start, end: start + bytes, align: ALIGN, arena });
            }
        }
    }
    Ok(())
}

fn check_calls(program: &Program, stage: &Stage) -> Result<(), RunError> {
    let fed = |i: &Instruction| matches!(i, Instruction::Feed { .. });
    for (call, c) in stage.calls.iter().enumerate() {
        let wrong = |fault: String| Err(RunError::Call { call, fault });
        let Some(segment) = stage.segments.get(c.segment) else {
            return wrong(format!("runs segment {}, but there are {}", c.segment, stage.segments.len()));
        };
        if c.slot >= stage.slots.max(1) {
            return wrong(format!("uses slot {}, but there are {}", c.slot, stage.slots));
        }
        if c.microbatch.is_some_and(|m| m >= program.microbatches) {
            return wrong(format!("runs {:?}, but there are {}", c.microbatch, program.microbatches));
        }
        if c.microbatch.is_none() && program.microbatches != 1 && segment.instructions.iter().any(fed) {
            return wrong("feeds an input, but has no micro-batch".to_string());
        }
    }
    Ok(())
}

struct Loader<'a> {
    program: &'a Program,
    /// That of the rank which is loaded, and its row of the pipeline.
    stage: &'a Stage,
    row: usize,
    channels: Channels,
    share_bytes: usize,
    code: Code,
    groups: HashMap<Vec<usize>, usize>,
    /// By kernel and the ranges of its loops.
    kernels: HashMap<(String, Vec<Range<usize>>), Arc<Compiled>>,
    /// By row, segment, instruction and group; what rows do together by its place among that.
    buckets: HashMap<([usize; 3], usize), Arc<Bucket>>,
    /// How many collectives of several rows the rank has so far.
    joined: usize,
    /// By message and who sends it.
    messages: HashMap<(Message, usize), Channel>,
}

/// Where an instruction stands, for messages.
#[derive(Clone, Copy)]
struct Spot {
    segment: usize,
    kind: Kind,
    instruction: usize,
}

impl Spot {
    fn wrong(self, fault: impl Into<String>) -> RunError {
        RunError::Malformed { segment: self.kind, instruction: self.instruction, fault: fault.into() }
    }
}

impl Loader<'_> {
    fn rank(&mut self, rank: usize) -> Result<RankCode, RunError> {
        let mut segments = Vec::new();
        for (i, segment) in self.stage.segments.iter().enumerate() {
            let mut open = BTreeMap::new();
            let (mut tokens, mut taps) = (0, 0);
            let mut ops = Vec::with_capacity(segment.instructions.len());
            for (instruction, what) in segment.instructions.iter().enumerate() {
                let spot = Spot { segment: i, kind: segment.kind, instruction };
                ops.push(match what {
                    Instruction::Start { token, parts } => {
                        let (op, bucket) = self.start(spot, rank, tokens, parts)?;
                        if open.insert(*token, (tokens, bucket, spot)).is_some() {
                            return Err(spot.wrong(format!("t{token} is started again before its wait")));
                        }
                        tokens += 1;
                        op
                    }
                    Instruction::Wait { token } => match open.remove(token) {
                        Some((token, bucket, _)) => Op::Wait { token, bucket },
                        None => return Err(spot.wrong(format!("waits for t{token}, which is not started"))),
                    },
                    Instruction::Tap { name, from } => {
                        taps += 1;
                        let (buffer, at) = (self.buffer(*from), self.program.mesh.coordinate(rank));
                        if !buffer.sharding.partial.is_empty() {
                            return Err(spot.wrong(format!("taps {from}, which is partial")));
                        }
                        let piece = self.region(*from, rank);
                        Op::Tap {
                            tap: taps - 1,
                            name: name.clone(),
                            dtype: buffer.dtype,
                            elements: elements(&piece),
                            block: Block::common(&piece, &whole(&buffer.shape)),
                            first: is_first(&buffer.sharding, &self.program.mesh, &at),
                            from: self.place(*from),
                        }
                    }
                    Instruction::Feed { input, to } => self.feed(spot, rank, input, *to)?,
                    Instruction::Launch { kernel, reads, writes } => {
                        self.launch(spot, rank, kernel, reads, writes)?
                    }
                    Instruction::Send { message, from, .. } => {
                        let bucket = self.channel(spot, rank, *message, 0, *from)?;
                        tokens += 1;
                        bucket.post(tokens - 1, 0)
                    }
                    Instruction::Receive { message, to, .. } => {
                        let bucket = self.channel(spot, rank, *message, 1, *to)?;
                        tokens += 1;
                        bucket.post(tokens - 1, 1)
                    }
                    Instruction::Sent { token, from } => self.waited(spot, rank, 0, *token, *from)?,
                    Instruction::Received { token, to } => self.waited(spot, rank, 1, *token, *to)?,
                    Instruction::Local { step, from, to } => self.local(spot, rank, step, *from, *to)?,
                    Instruction::Assign { from, to } => self.assign(spot, rank, *from, *to)?,
                });
            }
            if let Some((token, (_, _, spot))) = open.first_key_value() {
                return Err(spot.wrong(format!("t{token} has no wait")));
            }
            segments.push(SegmentCode { kind: segment.kind, ops, tokens });
        }
        Ok(RankCode { row: self.row, segments, calls: self.stage.calls.clone() })
    }

    fn buffer(&self, id: BufferId) -> &Buffer {
        &self.stage.buffers[id.index()]
    }

    fn region(&self, id: BufferId, rank: usize) -> Region {
        let buffer = self.buffer(id);
        region(&buffer.shape, &buffer.sharding, &self.program.mesh, &self.program.mesh.coordinate(rank))
    }

    fn place(&self, id: BufferId) -> Place {
        self.place_in(self.row, id)
    }

    /// Where a buffer lies in the arenas of a row.
    fn place_in(&self, row: usize, id: BufferId) -> Place {
        let stage = &self.program.stages[row];
        let per_slot = if stage.buffers[id.index()].region == Life::Slot { stage.sizes[2] } else { 0 };
        Place { offset: stage.address(id, 0), per_slot }
    }

    /// The bytes that a rank's piece takes, in slot 0.
    fn bytes(&self, id: BufferId, rank: usize) -> Range<usize> {
        let start = self.place(id).offset;
        start..start + elements(&self.region(id, rank)) * self.buffer(id).dtype.bytes()
    }

    fn overlap(&self, a: BufferId, b: BufferId, rank: usize) -> bool {
        let (x, y) = (self.bytes(a, rank), self.bytes(b, rank));
        x.start.max(y.start) < x.end.min(y.end)
    }

    fn feed(&self, spot: Spot, rank: usize, input: &ir::Name, to: BufferId) -> Result<Op, RunError> {
        let Some(known) = self.program.inputs.iter().find(|i| i.name == *input) else {
            return Err(spot.wrong(format!("feeds `{input}`, which is no input")));
        };
        let buffer = self.buffer(to);
        let shape: Vec<usize> = known.dims.iter().map(|(_, n)| *n).collect();
        if shape != buffer.shape || known.dtype != buffer.dtype || !buffer.sharding.partial.is_empty() {
            let fault = format!(
                "input `{input}` is {} {shape:?}, but {to} is {} {:?} @ {}",
                known.dtype,
                buffer.dtype,
                buffer.shape,
                buffer.sharding.show(&self.program.mesh)
            );
            return Err(spot.wrong(fault));
        }
        let block = Block::common(&whole(&shape), &self.region(to, rank));
        Ok(Op::Feed { input: input.clone(), size: buffer.dtype.bytes(), block, to: self.place(to) })
    }

    fn launch(
        &mut self,
        spot: Spot,
        rank: usize,
        kernel: &Kernel,
        reads: &[BufferId],
        writes: &[BufferId],
    ) -> Result<Op, RunError> {
        let (mesh, at) = (&self.program.mesh, self.program.mesh.coordinate(rank));
        let ranges: Vec<Range<usize>> =
            kernel.body.loops().iter().map(|l| extent(l.size, &l.axes, mesh, &at)).collect();
        for (what, ids, types) in [("reads", reads, &kernel.reads), ("writes", writes, &kernel.writes)] {
            let found: Vec<_> = ids.iter().map(|b| self.buffer(*b).dtype).collect();
            if found != *types {
                return Err(spot.wrong(format!("the kernel {what} {types:?}, but its buffers are {found:?}")));
            }
        }
        for of in kernel.uses() {
            let Some(id) = (if of.written { writes } else { reads }).get(of.operand) else {
                return Err(spot.wrong(format!("the kernel has no operand {}", of.operand)));
            };
            let piece = of.dims.iter().flatten().map(|l| extent(l.size, &l.axes, mesh, &at).len());
            let (needed, found) = (piece.product::<usize>(), elements(&self.region(*id, rank)));
            if needed != found {
                let fault =
                    format!("on rank {rank} the kernel uses {needed} elements of {id}, which has {found}");
                return Err(spot.wrong(fault));
            }
        }
        for (i, w) in writes.iter().enumerate() {
            let beside = writes[..i].iter().find(|b| self.overlap(**b, *w, rank));
            let apart = |r: &&BufferId| {
                let same =
                    self.place(**r) == self.place(*w) && self.buffer(**r).dtype == self.buffer(*w).dtype;
                self.overlap(**r, *w, rank) && !(same && matches!(kernel.body, Body::Map(_)))
            };
            if let Some(other) = beside.or_else(|| reads.iter().find(apart)) {
                return Err(spot.wrong(format!("writes {w}, which overlaps {other}")));
            }
        }
        let key = (format!("{kernel:?}"), ranges);
        let compiled = match self.kernels.get(&key) {
            Some(known) => Arc::clone(known),
            None => {
                let new = compile(kernel, mesh, &at).map_err(|source| RunError::Kernel {
                    segment: spot.kind,
                    instruction: spot.instruction,
                    source,
                })?;
                let new = Arc::new(new);
                self.kernels.insert(key, Arc::clone(&new));
                new
            }
        };
        self.code.scratch = self.code.scratch.max(compiled.scratch_bytes());
        self.code.operands = self.code.operands.max(reads.len()).max(writes.len());
        let places = |ids: &[BufferId]| ids.iter().map(|b| self.place(*b)).collect();
        Ok(Op::Launch { kernel: compiled, reads: places(reads), writes: places(writes) })
    }

    /// Whether `to` is what the move makes of `from`, and they do not overlap where they must not.
    fn check_move(
        &self,
        spot: Spot,
        rank: usize,
        step: &Move,
        from: BufferId,
        to: BufferId,
    ) -> Result<(), RunError> {
        let (mesh, a, b) = (&self.program.mesh, self.buffer(from), self.buffer(to));
        let dims = match step {
            Move::AllReduce { .. } | Move::Permute { .. } | Move::ToPartial { .. } => Vec::new(),
            Move::ReduceScatter { dim, .. }
            | Move::AllGather { dim, .. }
            | Move::Broadcast { dim, .. }
            | Move::Slice { dim, .. } => vec![*dim],
            Move::AllToAll { from, to, .. } => vec![*from, *to],
        };
        if dims.iter().any(|d| *d >= a.shape.len()) {
            return Err(spot.wrong(format!(
                "{} of a buffer of {} dimensions",
                step.show(mesh),
                a.shape.len()
            )));
        }
        let after = step.after(&a.sharding);
        if after != b.sharding || a.shape != b.shape || a.dtype != b.dtype {
            let show = |b: &Buffer, s: &Sharding| format!("{} {:?} @ {}", b.dtype, b.shape, s.show(mesh));
            let (step, needed, found) = (step.show(mesh), show(a, &after), show(b, &b.sharding));
            return Err(spot.wrong(format!("{step} of {from} needs {to} to be {needed}, but it is {found}")));
        }
        if step.reduce() == Some(Reduce::Top) && !step.has_pairs(&a.shape, &a.sharding, a.dtype) {
            let (step, how) = (step.show(mesh), a.sharding.show(mesh));
            let found = format!("{} {:?} @ {how}", a.dtype, a.shape);
            return Err(spot.wrong(format!("{step} needs whole pairs of f32, but {from} is {found}")));
        }
        let alone = mesh.pieces(step.axes()) == 1 || !step.is_collective();
        let in_place =
            self.place(from) == self.place(to) && (alone || matches!(step, Move::AllReduce { .. }));
        if !in_place && self.overlap(from, to, rank) {
            return Err(
                spot.wrong(format!("{} cannot work in place, but {to} overlaps {from}", step.show(mesh)))
            );
        }
        Ok(())
    }

    fn local(
        &self,
        spot: Spot,
        rank: usize,
        step: &Move,
        from: BufferId,
        to: BufferId,
    ) -> Result<Op, RunError> {
        self.check_move(spot, rank, step, from, to)?;
        let (before, after) = (self.region(from, rank), self.region(to, rank));
        let dtype = self.buffer(to).dtype;
        let copy = || Op::Copy {
            block: Block::common(&before, &after),
            size: dtype.bytes(),
            from: self.place(from),
            to: self.place(to),
        };
        match step {
            Move::Slice { .. } => Ok(copy()),
            Move::ToPartial { axis, .. } if self.program.mesh.coordinate(rank)[axis.index()] == 0 => {
                Ok(copy())
            }
            Move::ToPartial { reduce, .. } => {
                let (elements, number) = (elements(&after), reduce.identity());
                Ok(Op::Fill { dtype, elements, number, to: self.place(to) })
            }
            Move::AllReduce { .. }
            | Move::ReduceScatter { .. }
            | Move::AllGather { .. }
            | Move::Broadcast { .. }
            | Move::AllToAll { .. }
            | Move::Permute { .. } => {
                Err(spot.wrong(format!("{} is a collective: it is started", step.show(&self.program.mesh))))
            }
        }
    }

    fn assign(&self, spot: Spot, rank: usize, from: BufferId, to: BufferId) -> Result<Op, RunError> {
        let (a, b) = (self.buffer(from), self.buffer(to));
        if a.dtype != b.dtype || a.shape != b.shape || a.sharding != b.sharding {
            return Err(spot.wrong(format!("{from} and {to} are not alike")));
        }
        if self.overlap(from, to, rank) && self.place(from) != self.place(to) {
            return Err(spot.wrong(format!("{to} overlaps {from}")));
        }
        let block = Block::common(&self.region(from, rank), &self.region(to, rank));
        Ok(Op::Copy { block, size: a.dtype.bytes(), from: self.place(from), to: self.place(to) })
    }

    fn start(
        &mut self,
        spot: Spot,
        rank: usize,
        token: usize,
        parts: &[Transfer],
    ) -> Result<(Op, Arc<Bucket>), RunError> {
        let Some(first) = parts.first() else { return Err(spot.wrong("starts nothing")) };
        let mesh = &self.program.mesh;
        for Transfer { step, from, to } in parts {
            if !step.is_collective() {
                return Err(spot.wrong(format!("{} is no collective: it is local", step.show(mesh))));
            }
            if (step.name(), step.axes()) != (first.step.name(), first.step.axes()) {
                let (a, b) = (first.step.show(mesh), step.show(mesh));
                return Err(spot.wrong(format!("one call cannot do {a} and {b}")));
            }
            self.check_move(spot, rank, step, *from, *to)?;
        }
        self.check_apart(spot, rank, parts)?;
        let members = mesh.group(rank, first.step.axes());
        let group = match self.groups.get(&members) {
            Some(group) => *group,
            None => {
                self.code.groups.push(members.clone());
                self.groups.insert(members.clone(), self.code.groups.len() - 1);
                self.code.groups.len() - 1
            }
        };
        let member = members.iter().position(|r| *r == rank).unwrap_or(0);
        let joint = parts.iter().any(|p| p.joins_stages(mesh)).then(|| {
            self.joined += 1;
            self.joined - 1
        });
        let key = match joint {
            Some(place) => ([place, usize::MAX, usize::MAX], group),
            None => ([self.row, spot.segment, spot.instruction], group),
        };
        let bucket = match self.buckets.get(&key) {
            Some(known) => Arc::clone(known),
            None => {
                let moved = |i: usize| match joint {
                    Some(place) => self.moved_together(place, i, &members),
                    None => self.moved(&parts[i], &members),
                };
                let new = Arc::new(Bucket::new((0..parts.len()).map(moved).collect()));
                self.buckets.insert(key, Arc::clone(&new));
                new
            }
        };
        Ok((Op::Start { token, group, member, bucket: Arc::clone(&bucket) }, bucket))
    }

    /// Whether no part of a call writes what another uses.
    fn check_apart(&self, spot: Spot, rank: usize, parts: &[Transfer]) -> Result<(), RunError> {
        let places = |(i, t): (usize, &Transfer)| {
            [(t.from, false), (t.to, true)].map(|(b, w)| (self.bytes(b, rank), w, i))
        };
        let mut all: Vec<_> =
            parts.iter().enumerate().flat_map(places).filter(|(range, ..)| !range.is_empty()).collect();
        all.sort_by_key(|(range, ..)| range.start);
        // What reaches on behind the start of the next.
        let mut open: Vec<(Range<usize>, bool, usize)> = Vec::new();
        for (range, written, part) in all {
            open.retain(|(before, ..)| before.end > range.start);
            if let Some((.., other)) = open.iter().find(|(_, w, p)| *p != part && (*w || written)) {
                let [a, b] = [part, *other].map(|p| &parts[p]);
                let (a, b) = (format!("{} -> {}", a.from, a.to), format!("{} -> {}", b.from, b.to));
                return Err(spot.wrong(format!("one call moves {a} and {b}, which overlap")));
            }
            open.push((range, written, part));
        }
        Ok(())
    }

    fn moved(&self, Transfer { step, from, to }: &Transfer, members: &[usize]) -> Moved {
        let regions = |id| members.iter().map(|r| self.region(id, *r)).collect::<Vec<_>>();
        let (dtype, before, after) = (self.buffer(*from).dtype, regions(*from), regions(*to));
        let collective =
            Collective::new(step, &self.program.mesh, members, dtype, &before, &after, self.share_bytes);
        Moved { collective, from: vec![self.place(*from)], to: vec![self.place(*to)] }
    }
}
