//! After it gradients that are summed over micro-batches are reduced while the last backward pass still runs, each as soon as
//! its sum is complete, and not when that pass is over (Li et al., "PyTorch Distributed", section 3.2.4).
//!
//! The backward pass of the last micro-batch becomes a segment of its own. Only what works in place moves there: where
//! gradients are brought to shards of them, shards and sums together would take more room until the update.
//!
//! Behind `assign`, which says what is written in place, and before `bucket`, which joins what moved.
//!
//! ```text
//! segment 0B                          segment 0B
//!   launch b1, b2 -> b1                launch b1, b2 -> b1
//! segment 0O                          segment 0B'
//!   t0 = start all_reduce b1 -> b3     launch b1, b4 -> b1
//!   wait t0                     ->     t0 = start all_reduce b1 -> b3
//! call 0B 0 slot 0                      wait t0
//! call 0B 1 slot 0                    call 0B 0 slot 0
//! call 0O once slot 0                 call 0B' 1 slot 0
//!                                    call 0O once slot 0
//! ```

use std::collections::BTreeMap;

use ir::program::{BufferId, Duty, Instruction, Program, Region, Segment, Stage};
use ir::schedule::Kind;
use ir::{Move, Reduce};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::uses::Made;

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        let mut s = 0;
        while s < stage.segments.len() {
            let of = &stage.segments[s];
            let backward = matches!(of.kind, Kind::Backward | Kind::Input | Kind::Weight);
            let update = stage.segments.iter().position(|s| s.kind == Kind::Optimizer);
            if let Some(update) = update.filter(|_| backward && of.duty == Duty::Work) {
                let found = sums(stage, s, update);
                let calls = stage.calls.iter().filter(|c| c.segment == s).count();
                if calls > 1 && !found.is_empty() {
                    move_to_last(stage, s, update, &found);
                    s += 1;
                }
            }
            s += 1;
        }
    }
}

/// The starts of the update that may come before it, by place, each with the place in the backward pass behind which its
/// operand is complete.
fn sums(stage: &Stage, backward: usize, update: usize) -> BTreeMap<usize, usize> {
    let all = &stage.segments[backward].instructions;
    let collectives = Made::of(all);
    let mut made: FxHashMap<BufferId, usize> = FxHashMap::default();
    for (i, instruction) in all.iter().enumerate() {
        made.extend(collectives.uses(instruction).1.into_iter().map(|b| (b, i)));
    }
    let mut touched: FxHashSet<BufferId> = FxHashSet::default();
    let mut written: FxHashSet<BufferId> = FxHashSet::default();
    let mut found = BTreeMap::new();
    for (i, instruction) in stage.segments[update].instructions.iter().enumerate() {
        if let [one] = instruction.transfers()
            && matches!(one.step, Move::AllReduce { reduce: Reduce::Sum, .. })
            && let Some(at) = made.get(&one.from)
            && !written.contains(&one.from)
            && !touched.contains(&one.to)
            && stage.buffers[one.to.index()].region != Region::State
        {
            found.insert(i, *at);
        }
        written.extend(instruction.writes());
        touched.extend(instruction.reads().into_iter().chain(instruction.writes()));
    }
    found
}

fn move_to_last(stage: &mut Stage, backward: usize, update: usize, found: &BTreeMap<usize, usize>) {
    let all = std::mem::take(&mut stage.segments[update].instructions);
    let tokens: FxHashSet<u32> = found.keys().filter_map(|i| all[*i].started()).map(|(t, _)| t).collect();
    let mut behind: BTreeMap<usize, Vec<Instruction>> = BTreeMap::new();
    for (i, instruction) in all.into_iter().enumerate() {
        match (&instruction, found.get(&i)) {
            (Instruction::Wait { token }, _) if tokens.contains(token) => {}
            (Instruction::Start { token, parts }, Some(at)) => {
                parts.iter().for_each(|t| stage.buffers[t.to.index()].region = Region::Step);
                let wait = Instruction::Wait { token: *token };
                behind.entry(*at).or_default().extend([instruction, wait]);
            }
            (
                Instruction::Start { .. }
                | Instruction::Wait { .. }
                | Instruction::Feed { .. }
                | Instruction::Launch { .. }
                | Instruction::Local { .. }
                | Instruction::Assign { .. }
                | Instruction::Send { .. }
                | Instruction::Sent { .. }
                | Instruction::Receive { .. }
                | Instruction::Received { .. }
                | Instruction::Tap { .. },
                _,
            ) => stage.segments[update].instructions.push(instruction),
        }
    }
    let mut last = Vec::new();
    let mut own: FxHashMap<BufferId, BufferId> = FxHashMap::default();
    for (i, mut instruction) in stage.segments[backward].instructions.clone().into_iter().enumerate() {
        for b in instruction.buffers_mut() {
            // Scratch is of one segment.
            if stage.buffers[b.index()].region == Region::Scratch {
                let next = BufferId(stage.buffers.len() as u32);
                let known = *own.entry(*b).or_insert(next);
                if known == next {
                    stage.buffers.push(stage.buffers[b.index()].clone());
                }
                *b = known;
            }
        }
        last.push(instruction);
        last.extend(behind.remove(&i).into_iter().flatten());
    }
    let segment = Segment { instructions: last, ..stage.segments[backward].clone() };
    stage.segments.insert(backward + 1, segment);
    let end = stage.calls.iter().rposition(|c| c.segment == backward);
    for (i, call) in stage.calls.iter_mut().enumerate() {
        call.segment += usize::from(call.segment > backward || Some(i) == end);
    }
}
