//! After it attention is one kernel, forward and backward: its maps and contractions are a chain, so that scores and weights
//! are between them and nowhere else.
//!
//! Two contractions of one composite that maps lead between are in a chain, with those maps, and with maps that make what
//! only they read. A collective between them leaves two kernels, as does anything that is read elsewhere too.
//!
//! ```text
//! launch b1, b2 -> b4 contract(0.5) [..] [b, s, kv, e], [b, t, kv, e] -> [b, kv, s, t]
//! launch b4 -> b5 map [b, kv, s | t] { .. }
//! launch b5, b3 -> b6 contract(1.0) [..] [b, kv, s, t], [b, t, kv, e] -> [b, s, kv, e]
//!   ->
//! launch b1, b2, b3 -> b6 chain [b, kv, s] {
//!   0, 1 -> i0 contract(0.5) [..] [b, s, kv, e], [b, t, kv, e] -> [b, kv, s, t]
//!   i0 -> i1 map [b, kv, s | t] { .. }
//!   i1, 2 -> 0 contract(1.0) [..] [b, kv, s, t], [b, t, kv, e'] -> [b, s, kv, e']
//! }
//! ```

mod link;

use std::sync::Arc;

use ir::kernel::{Body, Kernel};
use ir::program::{BufferId, Buffers, Instruction, Program, Region, Stage};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{buffers, like};

pub(crate) fn run(program: &mut Program) {
    like::once(&mut program.stages, stage_chains);
    program.stages.iter_mut().for_each(buffers::drop_unused);
}

fn stage_chains(stage: &mut Stage) {
    let mut kernels: Vec<Arc<Kernel>> = Vec::new();
    for s in 0..stage.segments.len() {
        let mut instructions = std::mem::take(&mut stage.segments[s].instructions);
        for instance in instances(stage, &instructions) {
            if let Some(with) = chained(stage, &instructions, instance, &mut kernels) {
                instructions = with;
            }
        }
        stage.segments[s].instructions = instructions;
    }
}

/// The composites that have a contraction in the segment, in order.
fn instances(stage: &Stage, instructions: &[Instruction]) -> Vec<u32> {
    let mut seen = FxHashSet::default();
    let all = instructions.iter().filter_map(|i| instance(stage, i));
    all.filter(|instance| seen.insert(*instance)).collect()
}

/// The composite of a contraction.
fn instance(stage: &Stage, instruction: &Instruction) -> Option<u32> {
    let contraction = matches!(instruction.kernel()?.body, Body::Contract(_));
    let writes = instruction.writes();
    writes.first().filter(|_| contraction).and_then(|b| stage.buffers[b.index()].inside)
}

fn is_launch(instruction: &Instruction) -> bool {
    instruction.kernel().is_some()
}

fn is_map(instruction: &Instruction) -> bool {
    instruction.kernel().is_some_and(|kernel| matches!(kernel.body, Body::Map(_)))
}

/// Who makes and who reads what in a segment.
struct Flow<'a> {
    stage: &'a Stage,
    instructions: &'a [Instruction],
    makers: FxHashMap<BufferId, usize>,
    readers: FxHashMap<BufferId, Vec<usize>>,
}

impl<'a> Flow<'a> {
    fn new(stage: &'a Stage, instructions: &'a [Instruction]) -> Flow<'a> {
        let mut flow =
            Flow { stage, instructions, makers: FxHashMap::default(), readers: FxHashMap::default() };
        for (i, instruction) in instructions.iter().enumerate() {
            instruction.reads().into_iter().for_each(|b| flow.readers.entry(b).or_default().push(i));
            instruction.writes().into_iter().for_each(|b| {
                flow.makers.insert(b, i);
            });
        }
        flow
    }

    fn readers(&self, at: usize) -> impl Iterator<Item = usize> {
        let all = self.instructions[at].writes().into_iter();
        all.filter_map(|b| self.readers.get(&b)).flatten().copied()
    }

    fn makers(&self, at: usize) -> impl Iterator<Item = usize> {
        self.instructions[at].reads().into_iter().filter_map(|b| self.makers.get(&b)).copied()
    }

    /// What can be reached from `ends`, through maps alone; an end is in it if it is reached.
    fn reached<I: Iterator<Item = usize>>(
        &self,
        ends: &[usize],
        next: impl Fn(usize) -> I,
    ) -> FxHashSet<usize> {
        let mut reached = FxHashSet::default();
        let mut open: Vec<usize> = ends.to_vec();
        while let Some(at) = open.pop() {
            for to in next(at) {
                if (ends.contains(&to) || is_map(&self.instructions[to])) && reached.insert(to) {
                    open.push(to);
                }
            }
        }
        reached
    }

    /// Whether only these read a buffer.
    fn private(&self, buffer: BufferId, members: &FxHashSet<usize>) -> bool {
        self.stage.buffers[buffer.index()].region == Region::Scratch
            && self.readers.get(&buffer).is_some_and(|all| all.iter().all(|r| members.contains(r)))
    }

    /// A map that makes what only members read.
    fn feeder(&self, members: &FxHashSet<usize>) -> Vec<usize> {
        let mut all: Vec<usize> = members.iter().flat_map(|m| self.makers(*m)).collect();
        let only = |at: &usize| self.instructions[*at].writes().iter().all(|b| self.private(*b, members));
        all.retain(|at| !members.contains(at) && is_map(&self.instructions[*at]) && only(at));
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// The segment with the kernels of one composite as a chain; none if it has none.
fn chained(
    stage: &Stage,
    instructions: &[Instruction],
    of: u32,
    kernels: &mut Vec<Arc<Kernel>>,
) -> Option<Vec<Instruction>> {
    let flow = Flow::new(stage, instructions);
    let ends: Vec<usize> =
        (0..instructions.len()).filter(|i| instance(stage, &instructions[*i]) == Some(of)).collect();
    let (behind, before) =
        (flow.reached(&ends, |at| flow.readers(at)), flow.reached(&ends, |at| flow.makers(at)));
    let mut members: FxHashSet<usize> = behind.intersection(&before).copied().collect();
    members.extend(ends.iter().filter(|e| behind.contains(e) || before.contains(e)));
    let mut chain = link::chain(&flow, &members)?;
    // Feeders of feeders too, one after the other: each may be one that does not fit.
    let mut refused = FxHashSet::default();
    while let Some(at) = flow.feeder(&members).into_iter().find(|at| !refused.contains(at)) {
        members.insert(at);
        match link::chain(&flow, &members).filter(|with| with.shared() == chain.shared()) {
            Some(with) => chain = with,
            None => {
                members.remove(&at);
                refused.insert(at);
            }
        }
    }
    placed(&flow, &members, chain.launch(kernels))
}

/// The segment with a launch in the place of the members: behind all that it needs, before all that needs it. None if
/// something needs one member, and another member that.
fn placed(flow: &Flow, members: &FxHashSet<usize>, launch: Instruction) -> Option<Vec<Instruction>> {
    let last = members.iter().copied().max()?;
    let mut out = Vec::with_capacity(flow.instructions.len());
    let mut later: Vec<&Instruction> = Vec::new();
    let (mut made, mut read): (FxHashSet<BufferId>, FxHashSet<BufferId>) = Default::default();
    let mut started: FxHashMap<u32, Buffers> = FxHashMap::default();
    for (i, instruction) in flow.instructions[..=last].iter().enumerate() {
        let (reads, mut writes): (Buffers, Buffers) = (instruction.reads(), instruction.writes());
        let waits = if let Instruction::Wait { token } = instruction { Some(*token) } else { None };
        writes.extend(waits.and_then(|token| started.get(&token)).into_iter().flatten().copied());
        if let Some((token, _)) = instruction.started() {
            started.insert(token, writes.clone());
        }
        // All but launches stay in order.
        let behind = !is_launch(instruction) && later.iter().any(|l| !is_launch(l));
        let needs = behind
            || waits.is_some() && !later.is_empty()
            || reads.iter().chain(&writes).any(|b| made.contains(b))
            || writes.iter().any(|b| read.contains(b));
        if members.contains(&i) {
            // What it needs must not come later.
            let held = |b: &BufferId| later.iter().any(|l| l.writes().contains(b));
            if reads.iter().any(held) {
                return None;
            }
        } else if needs {
            later.push(instruction);
        } else {
            out.push(instruction.clone());
            continue;
        }
        made.extend(writes);
        read.extend(reads);
    }
    out.push(launch);
    out.extend(later.into_iter().cloned());
    out.extend_from_slice(&flow.instructions[last + 1..]);
    Some(out)
}
