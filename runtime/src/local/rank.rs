//! A rank: a place in its calls, and what it does there, op by op, until it is blocked at a wait.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use ir::Name;

use super::code::{Code, Op, Place};
use super::copy::Tile;
use super::error::RunError;
use super::host::{HostTensor, TapTargets};
use super::meet::{Meet, Meeting, Progress};
use super::numbers;
use super::profile::Profile;
use super::record::{Mark, Recorder};
use super::traffic::Counts;

/// What a worker needs for whichever rank it runs.
pub struct Desk {
    scratch: Vec<u8>,
    tile: Box<Tile>,
    reads: Vec<*const u8>,
    writes: Vec<*mut u8>,
}

// SAFETY: the pointers are only of use within a launch; between launches nobody reads them.
unsafe impl Send for Desk {}

impl Desk {
    /// Large enough for every kernel.
    pub fn new(scratch: usize, operands: usize) -> Desk {
        let (reads, writes) = (Vec::with_capacity(operands), Vec::with_capacity(operands));
        Desk { scratch: vec![0; scratch], tile: Tile::new(), reads, writes }
    }
}

/// What all ranks share in a step.
pub struct Step<'a> {
    /// What they do.
    pub code: &'a Code,
    /// Where they meet.
    pub meet: &'a Meet,
    /// What they did.
    pub counts: &'a Counts,
    /// The inputs, by micro-batch.
    pub feeds: &'a [BTreeMap<Name, HostTensor>],
    /// Where taps go.
    pub taps: &'a TapTargets,
    /// The taps that must be finite.
    pub finite: &'a BTreeSet<Name>,
    /// Who takes the times.
    pub recorder: Option<&'a Recorder>,
    /// Who adds up how long ops take.
    pub profile: Option<&'a Profile>,
}

/// What an op came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It is done; there may be another.
    Moved,
    /// It waits for others.
    Blocked(Meeting),
    /// There was none left.
    Done,
}

/// A rank's place in the step.
pub struct Rank {
    /// Its number.
    pub number: usize,
    arena: *mut u8,
    call: usize,
    op: usize,
    /// How many collectives it started, by group.
    started: Vec<usize>,
    /// Where the collectives of this call are, by token.
    open: Vec<Meeting>,
    /// When the call began, and the wait in it, if somebody takes the times.
    call_began: f64,
    wait_began: Option<f64>,
}

// SAFETY: the arena belongs to this rank while it runs; others touch only what it left in a post, by the rules there.
unsafe impl Send for Rank {}

impl Rank {
    /// At the start of a step.
    ///
    /// The arena must be the one that the rank's code was loaded for, and live as long as the rank.
    pub fn new(number: usize, arena: *mut u8, code: &Code) -> Rank {
        let tokens = code.ranks[number].segments.iter().map(|s| s.tokens).max().unwrap_or(0);
        let started = vec![0; code.groups.len()];
        let open = vec![Meeting { group: 0, number: 0 }; tokens];
        Rank { number, arena, call: 0, op: 0, started, open, call_began: 0.0, wait_began: None }
    }

    /// Back to the start of a step.
    pub fn reset(&mut self) {
        (self.call, self.op) = (0, 0);
        self.wait_began = None;
        self.started.fill(0);
    }

    /// Where it is: the call and the op.
    pub fn at(&self) -> (usize, usize) {
        (self.call, self.op)
    }

    /// Goes on until it is blocked or done, or until `stop` says so between two ops. Whether it moved, and what it came to.
    ///
    /// # Errors
    /// A tap that must be finite and is not; ranks that meet for different things.
    pub fn run(
        &mut self,
        step: &Step,
        desk: &mut Desk,
        stop: impl Fn() -> bool,
    ) -> Result<(bool, Turn), RunError> {
        let mut moved = false;
        loop {
            match self.one(step, desk)? {
                Turn::Moved if stop() => return Ok((true, Turn::Moved)),
                Turn::Moved => moved = true,
                turn @ (Turn::Blocked(_) | Turn::Done) => return Ok((moved, turn)),
            }
        }
    }

    /// Does one op.
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn one(&mut self, step: &Step, desk: &mut Desk) -> Result<Turn, RunError> {
        let code = &step.code.ranks[self.number];
        let Some(call) = code.calls.get(self.call) else { return Ok(Turn::Done) };
        let segment = &code.segments[call.segment];
        let Some(op) = segment.ops.get(self.op) else {
            if let Some(recorder) = step.recorder {
                let (start, end) = (self.call_began, recorder.now());
                recorder.note(self.number, Mark { call: self.call, wait: None, start, end });
            }
            (self.call, self.op) = (self.call + 1, 0);
            return Ok(Turn::Moved);
        };
        if let Some(recorder) = step.recorder {
            if self.op == 0 && self.wait_began.is_none() {
                self.call_began = recorder.now();
            }
            if matches!(op, Op::Wait { .. } | Op::Done { .. }) && self.wait_began.is_none() {
                self.wait_began = Some(recorder.now());
            }
        }
        let began = step.profile.map(|profile| (profile, Instant::now()));
        let clock = |done| {
            if let Some((profile, began)) = began {
                profile.note(self.number, call.segment, self.op, began.elapsed(), done);
            }
        };
        let arena = self.arena;
        let address = |place: Place| {
            // SAFETY: `load` checked that every buffer lies in the arena, in every slot.
            unsafe { arena.add(place.in_slot(call.slot)) }
        };
        match op {
            Op::Feed { input, size, block, to } => {
                if let Some(block) = block {
                    let whole = &step.feeds[call.microbatch.unwrap_or(0)][input];
                    let (source, target) = (whole.bytes().as_ptr(), address(*to));
                    block.runs(0..block.elements(), usize::MAX, |from, to, n| {
                        // SAFETY: the step checked the size of the whole tensor; the piece is this rank's own.
                        unsafe {
                            let (from, to) = (source.add(from * size), target.add(to * size));
                            std::ptr::copy_nonoverlapping(from, to, n * size);
                        }
                    });
                }
            }
            Op::Launch { kernel, reads, writes } => {
                desk.reads.clear();
                desk.reads.extend(reads.iter().map(|p| address(*p).cast_const()));
                desk.writes.clear();
                desk.writes.extend(writes.iter().map(|p| address(*p)));
                // SAFETY: `load` checked types, sizes, alignment and overlaps; the arena was zeroed, so all of it can be
                // read; the program keeps collectives in flight away from these buffers.
                unsafe { kernel.run(&desk.reads, &desk.writes, &mut desk.scratch) };
            }
            Op::Copy { block, size, from, to } => {
                if let Some(block) = block {
                    let (source, target) = (address(*from).cast_const(), address(*to));
                    block.runs(0..block.elements(), usize::MAX, |from, to, n| {
                        // SAFETY: both are this rank's pieces. In place no run is written before it is read, for
                        // elements only move toward the start, in ascending order.
                        unsafe { std::ptr::copy(source.add(from * size), target.add(to * size), n * size) };
                    });
                }
            }
            Op::Fill { dtype, elements, number, to } => {
                // SAFETY: this rank's piece.
                unsafe { numbers::fill(*dtype, address(*to), *elements, *number) };
            }
            Op::Start { token, group, member, bucket } => {
                let at = Meeting { group: *group, number: self.started[*group] };
                self.started[*group] += 1;
                self.open[*token] = at;
                step.counts.add(self.number, call.segment, *token);
                let home = (arena, call.slot);
                // SAFETY: `load` checked that every piece lies in the arena; the program leaves them alone until the wait.
                unsafe { step.meet.arrive(at, *member, bucket, home, &mut desk.tile)? };
            }
            Op::Wait { token, bucket } => {
                let at = self.open[*token];
                // SAFETY: this rank started it.
                match unsafe { step.meet.help(at, bucket, &mut desk.tile) } {
                    Progress::Done => {}
                    Progress::Missing => return Ok(Turn::Blocked(at)),
                    Progress::Taken => {
                        clock(false);
                        return Ok(Turn::Blocked(at));
                    }
                }
            }
            Op::Post { token, group, member, bucket } => {
                let at = Meeting { group: *group, number: call.microbatch.unwrap_or(0) };
                step.counts.add(self.number, call.segment, *token);
                let home = (arena, call.slot);
                // SAFETY: `load` checked that the piece lies in the arena; the program leaves it alone until the message is
                // sent, or received.
                unsafe { step.meet.arrive(at, *member, bucket, home, &mut desk.tile)? };
            }
            Op::Done { group, bucket } => {
                let at = Meeting { group: *group, number: call.microbatch.unwrap_or(0) };
                // SAFETY: this rank arrived there.
                match unsafe { step.meet.help(at, bucket, &mut desk.tile) } {
                    Progress::Done => {}
                    Progress::Missing => return Ok(Turn::Blocked(at)),
                    Progress::Taken => {
                        clock(false);
                        return Ok(Turn::Blocked(at));
                    }
                }
            }
            Op::Tap { tap, name, dtype, elements, block, first, from } => {
                if let (Some(block), true) = (block, *first)
                    && let Some(target) = step.taps.of(code.row, self.call, *tap)
                {
                    let source = address(*from).cast_const();
                    block.runs(0..block.elements(), usize::MAX, |from, to, n| {
                        for i in 0..n {
                            // SAFETY: this rank's piece; the target is a whole tensor, and only this rank has this piece.
                            unsafe {
                                *target.add(to + i) = numbers::get(*dtype, source, from + i) as f32;
                            }
                        }
                    });
                }
                // SAFETY: this rank's piece.
                let number = |i| unsafe { numbers::get(*dtype, address(*from), i) };
                if step.finite.contains(name) && !(0..*elements).all(|i| number(i).is_finite()) {
                    return Err(RunError::NotFinite { tap: name.clone() });
                }
            }
        }
        clock(true);
        if let (Some(recorder), Some(start)) = (step.recorder, self.wait_began.take()) {
            let mark = Mark { call: self.call, wait: Some(self.op), start, end: recorder.now() };
            recorder.note(self.number, mark);
        }
        self.op += 1;
        Ok(Turn::Moved)
    }
}
