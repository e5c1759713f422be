//! After it a state is written where it lies, by the kernel that computes it, wherever nothing needs its old content
//! any more; an assign is left only where something does.
//!
//! After `fuse`, which brings the kernel together, and before `place`, which then needs no room for the new state.
//!
//! ```text
//! launch b0, b1 -> b2 map ... { r0 = load 0 [a]  ...  store 0 [a] r5 }      launch b0, b1 -> b0 map ...
//! assign b2 -> b0                                                      ->
//! ```

use ir::kernel::{Body, Kernel, Step};
use ir::program::{BufferId, Instruction, Program, Region, Segment, Stage};

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        for s in 0..stage.segments.len() {
            while let Some(assign) = next(stage, s) {
                let segment = &mut stage.segments[s];
                let Instruction::Assign { from, to } = segment.instructions.remove(assign) else { continue };
                rename(segment, from, to);
            }
        }
    }
}

/// The place of an assign that the launch which computes its operand can do itself.
fn next(stage: &Stage, s: usize) -> Option<usize> {
    let instructions = &stage.segments[s].instructions;
    instructions.iter().position(|instruction| {
        let Instruction::Assign { from, to } = instruction else { return false };
        let launch = instructions.iter().position(|i| i.writes().contains(from));
        launch.is_some_and(|launch| fits(stage, s, launch, *from, *to))
    })
}

fn fits(stage: &Stage, s: usize, launch: usize, from: BufferId, to: BufferId) -> bool {
    let (a, b) = (&stage.buffers[from.index()], &stage.buffers[to.index()]);
    let alike =
        a.region == Region::Scratch && a.dtype == b.dtype && a.shape == b.shape && a.sharding == b.sharding;
    let instructions = &stage.segments[s].instructions;
    let later = instructions[launch + 1..].iter().any(|i| i.reads().contains(&to));
    let written = instructions.iter().filter(|i| i.writes().contains(&to)).count() > 1;
    let last_call = stage.calls.iter().rposition(|c| c.segment == s);
    let other_segments = last_call.is_some_and(|at| {
        let rest = stage.calls[at + 1..].iter().map(|c| &stage.segments[c.segment]);
        rest.flat_map(|s| &s.instructions).any(|i| i.reads().contains(&to))
    });
    let Instruction::Launch { kernel, reads, writes } = &instructions[launch] else { return false };
    alike && !later && !written && !other_segments && writes_in_place(kernel, reads, writes, from, to)
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

fn rename(segment: &mut Segment, old: BufferId, new: BufferId) {
    let swap = |b: &mut BufferId| {
        if *b == old {
            *b = new;
        }
    };
    for instruction in &mut segment.instructions {
        instruction.buffers_mut().into_iter().for_each(swap);
    }
}
