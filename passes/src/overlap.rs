//! After it a collective starts as soon as what it reads is there, and is waited for as late as what it makes is needed, so
//! that it runs beside the launches between (Li et al., "PyTorch Distributed", section 3.2.3).
//!
//! What is kept waiting takes memory, so of collectives that copy, only a few are in flight at once; and parameters are
//! gathered one ahead: when the one before is first used.
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

use std::collections::HashMap;

use ir::Move;
use ir::program::{BufferId, Instruction, Program, Region, Stage};

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

/// What an instruction reads, and what it writes; a wait writes what its collective makes.
fn uses(instruction: &Instruction, started: &HashMap<u32, BufferId>) -> (Vec<BufferId>, Vec<BufferId>) {
    let mut writes = instruction.writes();
    if let Instruction::Wait { token } = instruction {
        writes.extend(started.get(token));
    }
    (instruction.reads(), writes)
}

/// Each start moved up: to behind what makes what it reads and what still needs the place that it writes. What is ready
/// first is then sent first.
fn started_early(all: Vec<Instruction>, stage: &Stage) -> Vec<Instruction> {
    let kept = |b: &BufferId| stage.buffers[b.index()].region == Region::State;
    let started: HashMap<u32, BufferId> =
        all.iter().filter_map(Instruction::started).map(|(token, _, to)| (token, to)).collect();
    let mut out: Vec<Instruction> = Vec::with_capacity(all.len());
    // What was gathered last from a state.
    let mut gathered: Option<BufferId> = None;
    for instruction in all {
        let Some((_, from, to)) = instruction.started() else {
            out.push(instruction);
            continue;
        };
        let ahead = if kept(&from) { gathered.replace(to) } else { None };
        let blocks = |before: &Instruction| {
            let (reads, writes) = uses(before, &started);
            let touches = |b: &BufferId| reads.contains(b) || writes.contains(b);
            // The wait of the gather before is no use of it, but it starts first.
            let used = reads.iter().any(|b| Some(*b) == ahead);
            let other = before.started().is_some_and(|(_, _, to)| Some(to) == ahead);
            writes.contains(&from) || touches(&to) || other || used
        };
        let mut at = out.len();
        while at > 0 && !blocks(&out[at - 1]) {
            at -= 1;
        }
        // It starts with the use of the one before, not behind it.
        if at > 0 && uses(&out[at - 1], &started).0.iter().any(|b| Some(*b) == ahead) {
            let (reads, writes) = uses(&out[at - 1], &started);
            let free = !writes.contains(&from) && !reads.contains(&to) && !writes.contains(&to);
            at -= usize::from(free);
        }
        out.insert(at, instruction);
    }
    out
}

/// Each wait moved down: to before what uses what its collective makes, or writes what it reads.
fn waited_late(all: Vec<Instruction>) -> Vec<Instruction> {
    let mut out: Vec<Instruction> = Vec::with_capacity(all.len());
    let mut flying: Vec<Instruction> = Vec::new();
    let wait =
        |out: &mut Vec<Instruction>, flying: &mut Vec<Instruction>, ends: &dyn Fn(&Instruction) -> bool| {
            let mut rest = Vec::new();
            for one in std::mem::take(flying) {
                match (ends(&one), one.started()) {
                    (true, Some((token, ..))) => out.push(Instruction::Wait { token }),
                    (true, None) => {}
                    (false, _) => rest.push(one),
                }
            }
            *flying = rest;
        };
    for instruction in all {
        if matches!(instruction, Instruction::Wait { .. }) {
            continue;
        }
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let needs = |one: &Instruction| {
            one.started().is_some_and(|(_, from, to)| {
                reads.contains(&to) || writes.contains(&to) || writes.contains(&from)
            })
        };
        wait(&mut out, &mut flying, &needs);
        if instruction.started().is_some() {
            while copies(&instruction) && flying.iter().filter(|one| copies(one)).count() >= DEPTH {
                let oldest = flying
                    .iter()
                    .find(|one| copies(one))
                    .and_then(Instruction::started)
                    .map(|(token, ..)| token);
                wait(&mut out, &mut flying, &|one| one.started().map(|(token, ..)| token) == oldest);
            }
            flying.push(instruction.clone());
        }
        out.push(instruction);
    }
    wait(&mut out, &mut flying, &|_| true);
    out
}

/// Whether a collective needs two places: an all_reduce works in one.
fn copies(instruction: &Instruction) -> bool {
    !matches!(instruction, Instruction::Start { step: Move::AllReduce { .. }, .. })
}
