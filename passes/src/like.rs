//! What is done to the launches of a stage, done once for stages that are alike: those of a pipeline that run the same
//! kernels on the same buffers, whatever values and states these hold.

use std::mem::{discriminant, take};
use std::sync::Arc;

use ir::program::{Instruction, Stage};
use rustc_hash::FxHashMap;

/// Does to each stage what `work` does, which sees of instructions besides launches only what they read and write, keeps
/// them in order, renames no buffer, and changes of buffers only how long they are needed.
pub(crate) fn once(stages: &mut [Stage], work: impl Fn(&mut Stage)) {
    let first = |s: usize| (0..s).find(|r| alike(&stages[*r], &stages[s]));
    let like: Vec<Option<usize>> = (0..stages.len()).map(first).collect();
    for (s, like) in like.into_iter().enumerate() {
        let (before, stage) = stages.split_at_mut(s);
        match like {
            Some(like) => follow(&before[like], &mut stage[0]),
            None => work(&mut stage[0]),
        }
    }
}

/// Whether the same is to be done to both.
fn alike(a: &Stage, b: &Stage) -> bool {
    a.buffers.len() == b.buffers.len()
        && a.segments.len() == b.segments.len()
        && a.buffers.iter().zip(&b.buffers).all(|(a, b)| a.region == b.region && a.dtype == b.dtype)
        && composites(a, b)
        && a.segments.iter().zip(&b.segments).all(|(a, b)| {
            let all = a.instructions.iter().zip(&b.instructions);
            let long = a.kind == b.kind && a.instructions.len() == b.instructions.len();
            long && all.into_iter().all(|(a, b)| same(a, b))
        })
}

/// Whether what is made in one composite here is so there.
fn composites(a: &Stage, b: &Stage) -> bool {
    let mut like: FxHashMap<Option<u32>, Option<u32>> = FxHashMap::default();
    let mut back = like.clone();
    a.buffers.iter().zip(&b.buffers).all(|(a, b)| {
        *like.entry(a.inside).or_insert(b.inside) == b.inside
            && *back.entry(b.inside).or_insert(a.inside) == a.inside
    })
}

/// Whether two instructions are the same kernel on the same buffers, or do anything else to the same buffers.
fn same(a: &Instruction, b: &Instruction) -> bool {
    let kernels = match (a, b) {
        (Instruction::Launch { kernel: a, .. }, Instruction::Launch { kernel: b, .. }) => Arc::ptr_eq(a, b),
        (Instruction::Wait { token: a }, Instruction::Wait { token: b }) => a == b,
        (a, b) => {
            discriminant(a) == discriminant(b) && a.started().map(|(t, _)| t) == b.started().map(|(t, _)| t)
        }
    };
    kernels && a.reads() == b.reads() && a.writes() == b.writes()
}

/// Gives a stage the launches of one that was like it and the regions of its buffers, and leaves it everything else.
fn follow(done: &Stage, stage: &mut Stage) {
    for (done, buffer) in done.buffers.iter().zip(&mut stage.buffers) {
        buffer.region = done.region;
    }
    for (done, segment) in done.segments.iter().zip(&mut stage.segments) {
        let launches = |i: &Instruction| matches!(i, Instruction::Launch { .. });
        let mut others = take(&mut segment.instructions).into_iter().filter(|i| !launches(i));
        let next = |i: &Instruction| if launches(i) { Some(i.clone()) } else { others.next() };
        segment.instructions = done.instructions.iter().filter_map(next).collect();
    }
}
