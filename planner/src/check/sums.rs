//! Every micro-batch goes once through every segment, and a sum over micro-batches is whole when it is read: each has
//! added to it once, and none adds later. So a partial gradient is reduced when it is whole; that it is reduced before it is
//! assigned, and what is reduced is not reduced again, follows from shardings and is the verifier's.

use std::collections::BTreeMap;

use ir::program::{BufferId, Duty, Instruction, Program, Region, Stage};
use ir::schedule::Kind;

/// What an instruction does with a sum.
#[derive(Clone, Copy)]
enum Touch {
    /// Writes it without reading it.
    Sets,
    /// Reads and writes it, for a micro-batch.
    Adds,
    /// Uses what it is.
    Reads,
}

/// A sum, as far as the step came.
struct Sum {
    added: Vec<bool>,
    count: usize,
    read: bool,
    /// One fault a sum is enough.
    wrong: bool,
}

/// What is wrong with the micro-batches and sums of a program. Returns how many sums the largest row has.
pub(super) fn sums(program: &Program, faults: &mut Vec<String>) -> usize {
    let each = program.stages.iter().enumerate().map(|(row, stage)| {
        once(row, stage, program.microbatches, faults);
        whole(row, stage, program.microbatches, faults)
    });
    each.max().unwrap_or(0)
}

/// Whether a segment is for micro-batches.
fn of_microbatches(kind: Kind) -> bool {
    match kind {
        Kind::Begin | Kind::Optimizer => false,
        Kind::Forward
        | Kind::Backward
        | Kind::Input
        | Kind::Weight
        | Kind::Unshard
        | Kind::Drop
        | Kind::Reduce => true,
    }
}

/// Each micro-batch has one call of each segment, or of one that does the same for the last.
fn once(row: usize, stage: &Stage, microbatches: usize, faults: &mut Vec<String>) {
    let mut families: BTreeMap<(usize, Kind, Duty), (usize, Vec<usize>)> = BTreeMap::new();
    let key = |s: usize| (stage.segments[s].stage, stage.segments[s].kind, stage.segments[s].duty);
    for s in 0..stage.segments.len() {
        families.entry(key(s)).or_insert((s, vec![0; microbatches]));
    }
    let name = |s: usize| stage.name_of(s);
    for (c, call) in stage.calls.iter().enumerate() {
        let Some((first, counts)) = families.get_mut(&key(call.segment)) else { continue };
        let place = match (of_microbatches(stage.segments[call.segment].kind), call.microbatch) {
            (false, None) => Some(0),
            (true, Some(m)) => Some(m),
            (true, None) | (false, Some(_)) => None,
        };
        match place.and_then(|m| counts.get_mut(m)) {
            Some(count) => *count += 1,
            None => {
                let of = call.microbatch.map_or("once".to_string(), |m| format!("for micro-batch {m}"));
                faults.push(format!("stage {row}, call {c}: {} is called {of}", name(*first)));
            }
        }
    }
    for (first, counts) in families.values() {
        let many = of_microbatches(stage.segments[*first].kind);
        let fits = |n: &usize| if many { *n == 1 } else { *n <= 1 };
        if let Some(m) = counts.iter().position(|n| !fits(n)) {
            let (n, name) = (counts[m], name(*first));
            let of = if many { format!("for micro-batch {m}") } else { "in a step".to_string() };
            faults.push(format!("stage {row}: {name} is called {n} times {of}"));
        }
    }
}

/// Follows the sums of a row through its calls. Returns how many there are.
fn whole(row: usize, stage: &Stage, microbatches: usize, faults: &mut Vec<String>) -> usize {
    let mut sums: BTreeMap<BufferId, Sum> = BTreeMap::new();
    for segment in stage.segments.iter().filter(|s| of_microbatches(s.kind)) {
        for instruction in &segment.instructions {
            for b in added(instruction).filter(|b| stage.buffers[b.index()].region == Region::Step) {
                let added = vec![false; microbatches];
                sums.insert(b, Sum { added, count: 0, read: false, wrong: false });
            }
        }
    }
    let touches: Vec<Vec<(usize, BufferId, Touch)>> = stage
        .segments
        .iter()
        .map(|segment| {
            let many = of_microbatches(segment.kind);
            let all = segment.instructions.iter().enumerate();
            all.flat_map(|(k, i)| touched(i, many).into_iter().map(move |(b, touch)| (k, b, touch)))
                .filter(|(_, b, _)| sums.contains_key(b))
                .collect()
        })
        .collect();
    for (c, call) in stage.calls.iter().enumerate() {
        for (k, b, touch) in touches.get(call.segment).into_iter().flatten() {
            let Some(sum) = sums.get_mut(b).filter(|s| !s.wrong) else { continue };
            if let Some(what) = sum.step(*touch, call.microbatch, microbatches) {
                sum.wrong = true;
                let name = stage.name_of(call.segment);
                faults.push(format!("stage {row}, call {c}, segment {name}, instruction {k}: {what} {b}"));
            }
        }
    }
    for (b, sum) in sums.iter().filter(|(_, s)| !s.wrong && s.count != microbatches) {
        faults.push(format!("stage {row}: {} of {microbatches} micro-batches are added to {b}", sum.count));
    }
    sums.len()
}

impl Sum {
    /// What is wrong with what happens to it, if something is.
    fn step(&mut self, touch: Touch, microbatch: Option<usize>, of: usize) -> Option<String> {
        let whole = self.count == of;
        match touch {
            Touch::Sets if self.count == 0 || whole && self.read => None,
            Touch::Sets => Some("writes over the sum".to_string()),
            Touch::Adds => {
                let Some(added) = microbatch.and_then(|m| self.added.get_mut(m)) else {
                    return Some("adds for no micro-batch to the sum".to_string());
                };
                if self.read {
                    return Some("adds, after it was read, to the sum".to_string());
                }
                self.count += 1;
                std::mem::replace(added, true).then(|| "adds a micro-batch twice to the sum".to_string())
            }
            Touch::Reads if !whole => {
                Some(format!("reads, with {} of {of} micro-batches, the sum", self.count))
            }
            Touch::Reads => {
                self.read = true;
                None
            }
        }
    }
}

/// What a launch both reads and writes.
fn added(instruction: &Instruction) -> impl Iterator<Item = BufferId> {
    let launches = instruction.kernel().is_some();
    let (reads, writes) = (instruction.reads(), instruction.writes());
    writes.into_iter().filter(move |b| launches && reads.contains(b))
}

/// What an instruction does with each of its buffers, if it is a sum.
fn touched(instruction: &Instruction, many: bool) -> Vec<(BufferId, Touch)> {
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let adds: Vec<BufferId> = added(instruction).filter(|_| many).collect();
    let mut all: Vec<(BufferId, Touch)> = adds.iter().map(|b| (*b, Touch::Adds)).collect();
    all.extend(reads.iter().filter(|b| !adds.contains(b)).map(|b| (*b, Touch::Reads)));
    let sets = writes.iter().filter(|b| !reads.contains(b));
    all.extend(sets.map(|b| (*b, Touch::Sets)));
    all
}
