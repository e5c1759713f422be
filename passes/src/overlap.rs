//! After it a collective starts as soon as what it reads is there, and is waited for as late as what it makes is needed, so
//! that it runs beside the launches between (Li et al., "PyTorch Distributed", section 3.2.3). What only adds it to a sum
//! comes then, and not before.
//!
//! What is kept waiting takes memory, so of collectives that copy, only a few are in flight at once; and parameters are
//! gathered one call ahead: when what the one before brought is first used.
//!
//! Behind `assign`, which may make a collective write a state, and before `place`, which must know what is in flight.
//!
//! ```text
//! launch b0 -> b1                  launch b0 -> b1
//! launch b2 -> b3                  t0 = start all_reduce(dp) b1 -> b4
//! t0 = start all_reduce b1 -> b4   launch b2 -> b3
//! wait t0                     ->   wait t0
//! launch b4 -> b5                  launch b4 -> b5
//! ```

use std::collections::HashSet;

use ir::Move;
use ir::program::{BufferId, Instruction, Program, Region, Stage, Transfer};

use crate::uses::{Made, following};

/// So many collectives that copy are in flight at once.
const DEPTH: usize = 2;

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        for s in 0..stage.segments.len() {
            let all = std::mem::take(&mut stage.segments[s].instructions);
            let all = started_early(all, stage);
            stage.segments[s].instructions = waited_late(all);
        }
    }
}

/// Each start moved up: to behind what makes what it reads and what still needs the place that it writes. What is ready
/// first is then sent first.
fn started_early(all: Vec<Instruction>, stage: &Stage) -> Vec<Instruction> {
    let kept = |p: &Transfer| stage.buffers[p.from.index()].region == Region::State;
    let made = Made::of(&all);
    let mut out: Vec<Instruction> = Vec::with_capacity(all.len());
    // What was gathered last from a state.
    let mut gathered: Vec<BufferId> = Vec::new();
    for instruction in all {
        let Some((_, parts)) = instruction.started() else {
            out.push(instruction);
            continue;
        };
        let (from, to) = (instruction.reads(), instruction.writes());
        let ahead =
            if parts.iter().all(kept) { std::mem::replace(&mut gathered, to.clone()) } else { Vec::new() };
        let any = |all: &[BufferId], of: &[BufferId]| of.iter().any(|b| all.contains(b));
        let blocks = |before: &Instruction| {
            let (reads, writes) = made.uses(before);
            // The wait of the gather before is no use of it, but it starts first.
            let other = before.started().is_some() && any(&writes, &ahead);
            any(&writes, &from) || any(&reads, &to) || any(&writes, &to) || other
        };
        let mut at = out.len();
        let mut used = None;
        while at > 0 && !blocks(&out[at - 1]) {
            at -= 1;
            used = if any(&out[at].reads(), &ahead) { Some(at) } else { used };
        }
        // It starts with the first use of the one before.
        let at = used.unwrap_or(at);
        out.insert(at, instruction);
    }
    out
}

/// Each wait moved down: to before what uses what its collective makes, or writes what it reads.
fn waited_late(all: Vec<Instruction>) -> Vec<Instruction> {
    let following: HashSet<usize> = following(&all);
    let mut sky = Sky { out: Vec::with_capacity(all.len()), flying: Vec::new(), later: Vec::new() };
    for (i, instruction) in all.into_iter().enumerate() {
        if !matches!(instruction, Instruction::Wait { .. }) {
            sky.take(instruction, following.contains(&i));
        }
    }
    while !sky.flying.is_empty() {
        sky.land(0);
    }
    sky.out
}

/// The instructions so far, the starts that are in flight behind them, and what follows when those are done, in order.
struct Sky {
    out: Vec<Instruction>,
    flying: Vec<Instruction>,
    later: Vec<Instruction>,
}

impl Sky {
    /// The next instruction. One that only follows from what is in flight comes when that is done.
    fn take(&mut self, instruction: Instruction, follows: bool) {
        let waits = self.flying.iter().any(|start| needs(&instruction, start))
            || self.later.iter().any(|before| meet(&instruction, before));
        if follows && waits {
            self.later.push(instruction);
            return;
        }
        while let Some(at) = self.flying.iter().position(|start| needs(&instruction, start)) {
            self.land(at);
        }
        if instruction.started().is_some() {
            // What goes on to another collective had until now.
            let goes_on = |sky: &Sky| {
                let next = |start: &Instruction| {
                    sky.later.iter().any(|next| next.started().is_some() && needs(next, start))
                };
                sky.flying.iter().position(next)
            };
            while let Some(at) = goes_on(self) {
                self.land(at);
            }
        }
        while let Some(at) = self.in_the_way(&instruction) {
            self.land(at);
        }
        self.put(instruction);
    }

    fn put(&mut self, instruction: Instruction) {
        self.flying.extend(instruction.started().is_some().then(|| instruction.clone()));
        self.out.push(instruction);
    }

    /// Where so many copy already, the one that was started first.
    fn in_the_way(&self, instruction: &Instruction) -> Option<usize> {
        let many = self.flying.iter().filter(|start| copies(start)).count() >= DEPTH;
        (copies(instruction) && many).then(|| self.flying.iter().position(copies)).flatten()
    }

    /// Waits for one that is in flight, and goes on with what follows.
    fn land(&mut self, at: usize) {
        let start = self.flying.remove(at);
        self.out.extend(start.started().map(|(token, _)| Instruction::Wait { token }));
        let free = |sky: &Sky| {
            let ready = |(i, next): (usize, &Instruction)| {
                !sky.flying.iter().any(|start| needs(next, start))
                    && !sky.later[..i].iter().any(|before| meet(next, before))
            };
            (0..sky.later.len()).find(|i| ready((*i, &sky.later[*i])))
        };
        while let Some(i) = free(self) {
            match self.in_the_way(&self.later[i]) {
                Some(at) => self.land(at),
                None => {
                    let next = self.later.remove(i);
                    self.put(next);
                }
            }
        }
    }
}

/// Whether an instruction uses what a collective makes, or writes what it reads.
fn needs(instruction: &Instruction, start: &Instruction) -> bool {
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let holds = |t: &Transfer| reads.contains(&t.to) || writes.contains(&t.to) || writes.contains(&t.from);
    start.transfers().iter().any(holds)
}

/// Whether two instructions have an order: one writes what the other uses.
fn meet(a: &Instruction, b: &Instruction) -> bool {
    let uses = |of: &Instruction, written: &[BufferId]| {
        of.reads().iter().chain(&of.writes()).any(|b| written.contains(b))
    };
    uses(a, &b.writes()) || uses(b, &a.writes())
}

/// Whether a collective needs two places: an all_reduce works in one.
fn copies(instruction: &Instruction) -> bool {
    let parts = instruction.transfers();
    !parts.iter().all(|p| matches!(p.step, Move::AllReduce { .. }))
}
