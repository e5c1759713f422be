//! After it gradients that are ready one after the other are reduced by one call, up to the bytes that were decided (Li et
//! al., "PyTorch Distributed", section 3.2.2): fewer calls wait less, and the first still start early. So are the new
//! parameters gathered that the update ends with; and those that are kept in shards, when the first of a bucket is used
//! (Zhao et al., "PyTorch FSDP", section 3.2). Of these little is gathered at once: see [`ONCE`].
//!
//! What is needed before the last of a bucket is ready starts another, so no use waits for a bucket.
//!
//! Behind `assign`, which may make a collective write a state, and before `overlap`, which moves calls apart from their
//! waits.
//!
//! ```text
//! t0 = start all_reduce(dp) b1 -> b2             launch b0 -> b3
//! wait t0                                        t0 = start all_reduce(dp) b1 -> b2 + all_reduce(dp) b3 -> b4
//! launch b0 -> b3                           ->   wait t0
//! t1 = start all_reduce(dp) b3 -> b4
//! wait t1
//! ```

use std::collections::BTreeMap;

use ir::program::{BufferId, Instruction, Program, Region, Stage, Transfer};
use ir::schedule::Kind;
use ir::{Axis, DType, Mesh, Move, Reduce};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::uses::{Made, between_stages, following};

/// A bucket of gathered parameters is no more than this part of all that its segment gathers, so that two, one in use and
/// one on its way, are little beside what sharding saves.
const ONCE: usize = 16;

pub(crate) fn run(program: &mut Program) {
    let Some(limit) = program.bucket_bytes else { return };
    for stage in &mut program.stages {
        for s in 0..stage.segments.len() {
            let all = std::mem::take(&mut stage.segments[s].instructions);
            let kind = stage.segments[s].kind;
            let found = chains(&all, kind, stage, &program.mesh);
            let (gathers, sums): (Vec<Chain>, Vec<Chain>) = found.into_iter().partition(|c| c.gathers);
            let whole: usize = gathers.iter().map(|c| c.bytes).sum();
            let mut found = buckets(sums, limit);
            found.extend(buckets(gathers, limit.min(whole / ONCE)));
            stage.segments[s].instructions = joined(all, found);
        }
    }
}

/// A collective alone, or several that one tensor goes through one after the other, such as a reduce_scatter over the
/// inner and an all_reduce over the outer batch axis.
struct Chain {
    /// Whether it gathers a parameter for its use.
    gathers: bool,
    /// Where the starts stand.
    starts: Vec<usize>,
    /// What only follows from it.
    then: Vec<usize>,
    /// By what each start must agree with others of a bucket.
    key: Vec<(&'static str, Vec<Axis>, DType)>,
    /// The first place where it may start, and the last before which it must be done.
    ready: usize,
    due: usize,
    bytes: usize,
}

/// What may go into buckets: sums in the order in which they are ready, parameters in the order in which they are used.
fn chains(all: &[Instruction], kind: Kind, stage: &Stage, mesh: &Mesh) -> Vec<Chain> {
    let made = Made::of(all);
    let following = following(all, mesh);
    let uses: Vec<_> = all.iter().map(|i| made.uses(i)).collect();
    let mut used: FxHashMap<BufferId, Vec<usize>> = FxHashMap::default();
    for (i, (reads, writes)) in uses.iter().enumerate() {
        reads.iter().chain(writes).for_each(|b| used.entry(*b).or_default().push(i));
    }
    let writes = |k: &usize, b: &BufferId| uses[*k].1.contains(b);
    let gathers = |t: &Transfer| {
        let kept = stage.buffers[t.from.index()].region == Region::State;
        kind != Kind::Optimizer && kept && matches!(t.step, Move::AllGather { .. })
    };
    let one = |i: usize| match all[i].transfers() {
        // Stages would not all have the same buckets.
        [_] if between_stages(&all[i], mesh) => None,
        [t] => Some(t).filter(|t| bucketed(&t.step, kind) || gathers(t)),
        [] | [_, ..] => None,
    };
    let mut taken: FxHashSet<usize> = FxHashSet::default();
    let mut found: Vec<Chain> = Vec::new();
    for i in 0..all.len() {
        let Some(first) = one(i).filter(|_| !taken.contains(&i)) else { continue };
        let mut links: Vec<(usize, &Transfer)> = vec![(i, first)];
        let mut behind = after(i, first, &used, all);
        // On to where it goes next.
        while let [next] = behind[..]
            && let Some(part) = one(next).filter(|p| p.from == links[links.len() - 1].1.to)
        {
            links.push((next, part));
            behind = after(next, part, &used, all);
        }
        let (mut then, mut needed): (Vec<usize>, Vec<usize>) =
            behind.into_iter().partition(|k| following.contains(k));
        let direct = then.len();
        // And what follows from that. What leads to another collective does not wait: that one could not join.
        let mut known: FxHashSet<usize> = then.iter().copied().collect();
        let mut at = 0;
        while let Some(k) = then.get(at).copied() {
            if all[k].started().is_some() {
                needed.extend(then.drain(..).take(direct));
                break;
            }
            let next = uses[k].1.iter().flat_map(|b| &used[b]);
            then.extend(next.filter(|n| **n > k && following.contains(n) && known.insert(**n)));
            at += 1;
        }
        let overwritten = |(at, p): &(usize, &Transfer)| {
            used[&p.from].iter().copied().filter(|k| k > at && writes(k, &p.from)).collect::<Vec<_>>()
        };
        let due = needed.into_iter().chain(links.iter().flat_map(overwritten)).min().unwrap_or(usize::MAX);
        // What the backward pass itself goes on with is no gradient.
        let gathers = gathers(first);
        if kind != Kind::Optimizer && due != usize::MAX && !gathers {
            continue;
        }
        let made = used[&first.from].iter().filter(|k| **k < i && writes(k, &first.from));
        let freed = links.iter().flat_map(|(_, p)| &used[&p.to]).filter(|k| **k < i);
        let ready = made.chain(freed).max().map_or(0, |k| k + 1);
        let key = |(_, p): &(usize, &Transfer)| {
            (p.step.name(), p.step.axes().to_vec(), stage.buffers[p.from.index()].dtype)
        };
        let [a, b] = [first.from, first.to].map(|b| stage.buffers[b.index()].bytes(mesh));
        taken.extend(links.iter().map(|(at, _)| at));
        let key = links.iter().map(key).collect();
        let starts = links.iter().map(|(at, _)| *at).collect();
        found.push(Chain { gathers, starts, then, key, ready, due, bytes: a.max(b) });
    }
    found.sort_by_key(|c| (if c.gathers { c.due } else { c.ready }, c.starts[0]));
    found
}

/// Who uses what a start makes, but for its wait.
fn after(
    at: usize,
    part: &Transfer,
    used: &FxHashMap<BufferId, Vec<usize>>,
    all: &[Instruction],
) -> Vec<usize> {
    let is_use = |k: &usize| *k > at && !matches!(all[*k], Instruction::Wait { .. });
    used[&part.to].iter().copied().filter(is_use).collect()
}

/// Sums, and in the update the gathers that end it.
fn bucketed(step: &Move, kind: Kind) -> bool {
    match step {
        Move::AllReduce { reduce, .. } | Move::ReduceScatter { reduce, .. } => *reduce == Reduce::Sum,
        Move::AllGather { .. } => kind == Kind::Optimizer,
        Move::Broadcast { .. }
        | Move::AllToAll { .. }
        | Move::Permute { .. }
        | Move::Slice { .. }
        | Move::ToPartial { .. } => false,
    }
}

/// Chains of one key, while they are not too large and the first is not needed yet when the last is ready.
fn buckets(chains: Vec<Chain>, limit: usize) -> Vec<Vec<Chain>> {
    let mut done: Vec<Vec<Chain>> = Vec::new();
    let mut open: Vec<Vec<Chain>> = Vec::new();
    for chain in chains {
        let fits = |of: &Vec<Chain>| {
            let bytes: usize = of.iter().map(|c| c.bytes).sum();
            let due = of.iter().map(|c| c.due).min().unwrap_or(usize::MAX).min(chain.due);
            bytes + chain.bytes <= limit && chain.ready < due
        };
        match open.iter().position(|of| of[0].key == chain.key) {
            Some(at) if fits(&open[at]) => open[at].push(chain),
            Some(at) => done.push(std::mem::replace(&mut open[at], vec![chain])),
            None => open.push(vec![chain]),
        }
    }
    done.extend(open);
    done.retain(|of| of.len() > 1);
    done
}

/// The instructions with each bucket's calls and waits where its last chain is ready, or its first parameter used, and what
/// only follows from them behind.
fn joined(all: Vec<Instruction>, buckets: Vec<Vec<Chain>>) -> Vec<Instruction> {
    let waits: FxHashMap<u32, usize> = all.iter().enumerate().filter_map(waited).collect();
    let mut gone: FxHashSet<usize> = FxHashSet::default();
    let mut new: FxHashMap<usize, Vec<Instruction>> = FxHashMap::default();
    let mut later: BTreeMap<usize, usize> = BTreeMap::new();
    for of in &buckets {
        let (ready, due) = (of.iter().map(|c| c.ready).max(), of.iter().map(|c| c.due).min());
        let at = if of[0].gathers { due } else { ready }.unwrap_or(0).min(all.len());
        for level in 0..of[0].starts.len() {
            let starts = of.iter().filter_map(|c| all[c.starts[level]].started());
            let (tokens, parts): (Vec<u32>, Vec<&[Transfer]>) = starts.unzip();
            gone.extend(tokens.iter().filter_map(|t| waits.get(t)));
            let start = Instruction::Start { token: tokens[0], parts: parts.concat() };
            new.entry(at).or_default().extend([start, Instruction::Wait { token: tokens[0] }]);
        }
        gone.extend(of.iter().flat_map(|c| &c.starts));
        for k in of.iter().flat_map(|c| &c.then).filter(|k| **k < at) {
            let known = later.entry(*k).or_insert(at);
            *known = at.max(*known);
        }
    }
    for (k, at) in &later {
        new.entry(*at).or_default().push(all[*k].clone());
    }
    gone.extend(later.keys());
    let mut out = Vec::with_capacity(all.len());
    let end = all.len();
    for (i, instruction) in all.into_iter().enumerate() {
        out.extend(new.remove(&i).into_iter().flatten());
        if !gone.contains(&i) {
            out.push(instruction);
        }
    }
    out.extend(new.remove(&end).into_iter().flatten());
    out
}

fn waited((at, instruction): (usize, &Instruction)) -> Option<(u32, usize)> {
    match instruction {
        Instruction::Wait { token } => Some((*token, at)),
        Instruction::Start { .. }
        | Instruction::Feed { .. }
        | Instruction::Launch { .. }
        | Instruction::Local { .. }
        | Instruction::Assign { .. }
        | Instruction::Send { .. }
        | Instruction::Sent { .. }
        | Instruction::Receive { .. }
        | Instruction::Received { .. }
        | Instruction::Tap { .. } => None,
    }
}
