//! After it a state is written where it lies, by the kernel that computes it or the collective that brings it, wherever nothing needs its old content
//! any more; an assign is left only where something does.
//!
//! After `fuse`, which brings the kernel together, and before `place`, which then needs no room for the new state.
//!
//! ```text
//! launch b0, b1 -> b2 map ... { r0 = load 0 [a]  ...  store 0 [a] r5 }      launch b0, b1 -> b0 map ...
//! assign b2 -> b0                                                      ->
//! ```

use crate::buffers;
use ir::kernel::{Body, Kernel, Step};
use ir::program::{BufferId, Instruction, Program, Region, Segment, Stage};
use rustc_hash::{FxHashMap, FxHashSet};

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        let last_call = last_calls(stage);
        for s in 0..stage.segments.len() {
            let mut assigns: Vec<(usize, BufferId, BufferId)> = assigns(&stage.segments[s]);
            if assigns.is_empty() {
                continue;
            }
            let uses = uses(stage, s, &last_call);
            // What several states are assigned is written where the first lies, and copied from there.
            let mut seen: FxHashSet<BufferId> = FxHashSet::default();
            assigns.retain(|(_, from, _)| seen.insert(*from));
            let fit: Vec<_> =
                assigns.into_iter().filter(|(_, from, to)| fits(stage, s, &uses, *from, *to)).collect();
            let now: FxHashMap<BufferId, BufferId> = fit.iter().map(|(_, from, to)| (*from, *to)).collect();
            let gone: FxHashSet<usize> = fit.iter().map(|(at, ..)| *at).collect();
            let segment = &mut stage.segments[s];
            let mut at = 0;
            segment.instructions.retain(|_| {
                at += 1;
                !gone.contains(&(at - 1))
            });
            for instruction in &mut segment.instructions {
                instruction.buffers_mut().into_iter().for_each(|b| *b = now.get(b).copied().unwrap_or(*b));
            }
        }
        buffers::drop_unused(stage);
    }
}

fn assigns(segment: &Segment) -> Vec<(usize, BufferId, BufferId)> {
    let assign = |(at, i): (usize, &Instruction)| {
        if let Instruction::Assign { from, to } = i { Some((at, *from, *to)) } else { None }
    };
    segment.instructions.iter().enumerate().filter_map(assign).collect()
}

/// Where buffers are written and read.
struct Uses {
    /// In the segment: the instructions that write a buffer.
    writes: FxHashMap<BufferId, Vec<usize>>,
    /// In the segment: the last instruction that reads a buffer.
    last_read: FxHashMap<BufferId, usize>,
    /// Buffers that segments called later in the step read.
    later: FxHashSet<BufferId>,
}

/// Of each segment its last call, if it has one.
fn last_calls(stage: &Stage) -> Vec<Option<usize>> {
    let mut last = vec![None; stage.segments.len()];
    stage.calls.iter().enumerate().for_each(|(at, call)| last[call.segment] = Some(at));
    last
}

fn uses(stage: &Stage, s: usize, last_call: &[Option<usize>]) -> Uses {
    let mut uses =
        Uses { writes: FxHashMap::default(), last_read: FxHashMap::default(), later: FxHashSet::default() };
    for (at, instruction) in stage.segments[s].instructions.iter().enumerate() {
        instruction.writes().into_iter().for_each(|b| uses.writes.entry(b).or_default().push(at));
        uses.last_read.extend(instruction.reads().into_iter().map(|b| (b, at)));
    }
    if last_call[s].is_some() {
        let later = stage.segments.iter().zip(last_call).filter(|(_, last)| **last > last_call[s]);
        uses.later = later.flat_map(|(s, _)| &s.instructions).flat_map(Instruction::reads).collect();
    }
    uses
}

/// Whether what makes `from`, a launch or a collective, can write it where the state `to` lies.
fn fits(stage: &Stage, s: usize, uses: &Uses, from: BufferId, to: BufferId) -> bool {
    let (a, b) = (&stage.buffers[from.index()], &stage.buffers[to.index()]);
    let alike =
        a.region == Region::Scratch && a.dtype == b.dtype && a.shape == b.shape && a.sharding == b.sharding;
    let Some([launch]) = uses.writes.get(&from).map(Vec::as_slice) else { return false };
    let once = uses.writes.get(&to).is_some_and(|w| w.len() == 1);
    let read_later = uses.last_read.get(&to).is_some_and(|at| at > launch) || uses.later.contains(&to);
    let in_place = match &stage.segments[s].instructions[*launch] {
        Instruction::Launch { kernel, reads, writes } => writes_in_place(kernel, reads, writes, from, to),
        Instruction::Start { parts, .. } => parts.iter().all(|p| p.from != to),
        Instruction::Feed { .. }
        | Instruction::Local { .. }
        | Instruction::Wait { .. }
        | Instruction::Assign { .. }
        | Instruction::Send { .. }
        | Instruction::Sent { .. }
        | Instruction::Receive { .. }
        | Instruction::Received { .. }
        | Instruction::Tap { .. } => false,
    };
    alike && once && !read_later && in_place
}

/// Whether the kernel stores each element of the new state after its only loads of that element of the old one.
fn writes_in_place(
    kernel: &Kernel,
    reads: &[BufferId],
    writes: &[BufferId],
    from: BufferId,
    to: BufferId,
) -> bool {
    let Body::Map(map) = &kernel.body else { return false };
    let Some(write) = writes.iter().position(|b| *b == from) else { return false };
    match reads.iter().position(|b| *b == to) {
        Some(read) => map.in_place(read, write),
        None => map.steps.iter().filter_map(Step::store).any(|(w, ..)| w == write),
    }
}
