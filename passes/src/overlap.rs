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

use ir::Mesh;
use ir::program::{BufferId, Buffers, Instruction, Program, Region, Stage, Transfer};
use rustc_hash::FxHashSet;

use crate::sky::Sky;
use crate::uses::{Made, between_stages, following};

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        for s in 0..stage.segments.len() {
            let all = std::mem::take(&mut stage.segments[s].instructions);
            let all = started_early(all, stage, &program.mesh);
            stage.segments[s].instructions = waited_late(all, &program.mesh);
        }
    }
}

/// Each start moved up: to behind what makes what it reads and what still needs the place that it writes. What is ready
/// first is then sent first.
fn started_early(all: Vec<Instruction>, stage: &Stage, mesh: &Mesh) -> Vec<Instruction> {
    let kept = |p: &Transfer| stage.buffers[p.from.index()].region == Region::State;
    let made = Made::of(&all);
    let mut out: Vec<Instruction> = Vec::with_capacity(all.len());
    // What each of them reads and writes.
    let mut uses: Vec<(Buffers, Buffers)> = Vec::with_capacity(all.len());
    // What was gathered last from a state.
    let mut gathered = Buffers::new();
    for instruction in all {
        let Some((_, parts)) = instruction.started() else {
            uses.push(made.uses(&instruction));
            out.push(instruction);
            continue;
        };
        let (from, to) = (instruction.reads(), instruction.writes());
        let ahead = if parts.iter().all(kept) {
            std::mem::replace(&mut gathered, to.clone())
        } else {
            Buffers::new()
        };
        let any = |all: &[BufferId], of: &[BufferId]| of.iter().any(|b| all.contains(b));
        let blocks = |at: usize| {
            let (reads, writes) = &uses[at];
            // The wait of the gather before is no use of it, but it starts first.
            let other = out[at].started().is_some() && any(writes, &ahead);
            let order = between_stages(&instruction, mesh) && between_stages(&out[at], mesh);
            any(writes, &from) || any(reads, &to) || any(writes, &to) || other || order
        };
        let mut at = out.len();
        let mut used = None;
        while at > 0 && !blocks(at - 1) {
            at -= 1;
            used = if any(&uses[at].0, &ahead) { Some(at) } else { used };
        }
        // It starts with the first use of the one before.
        let at = used.unwrap_or(at);
        uses.insert(at, (from, to));
        out.insert(at, instruction);
    }
    out
}

/// Each wait moved down: to before what uses what its collective makes, or writes what it reads.
fn waited_late(all: Vec<Instruction>, mesh: &Mesh) -> Vec<Instruction> {
    let following: FxHashSet<usize> = following(&all, mesh);
    let mut sky = Sky::default();
    for (i, instruction) in all.into_iter().enumerate() {
        if !matches!(instruction, Instruction::Wait { .. }) {
            sky.take(instruction, following.contains(&i));
        }
    }
    sky.end()
}
