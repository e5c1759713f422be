//! Instructions one after the other, with the collectives that are in flight and what waits for them: each is waited for when
//! something needs it, and what only follows from it comes then.

use std::collections::{BTreeMap, BTreeSet};

use ir::Move;
use ir::program::{BufferId, Instruction};
use rustc_hash::FxHashMap;

/// So many collectives that copy are in flight at once.
const DEPTH: usize = 2;

/// What is put off until everything before it is done.
struct Later {
    instruction: Option<Instruction>,
    /// How many collectives and others that are put off it waits for.
    waits: usize,
    /// What waits for it.
    then: Vec<usize>,
}

/// The instructions so far, the starts in flight behind them by number, and what is put off, in order.
#[derive(Default)]
pub(crate) struct Sky {
    out: Vec<Instruction>,
    flying: BTreeMap<usize, Instruction>,
    started: usize,
    /// Of those in flight: what each makes, what they read, which of them copy, and from which another goes on.
    makes: FxHashMap<BufferId, usize>,
    takes: FxHashMap<BufferId, Vec<usize>>,
    copying: BTreeSet<usize>,
    goes_on: BTreeSet<usize>,
    later: Vec<Later>,
    /// What is put off, by the start that it waits for, by what it reads, and by what it writes.
    waiting: FxHashMap<usize, Vec<usize>>,
    read: FxHashMap<BufferId, BTreeSet<usize>>,
    written: FxHashMap<BufferId, BTreeSet<usize>>,
    /// What waits for nothing more.
    ready: BTreeSet<usize>,
}

impl Sky {
    /// The next instruction. One that only follows from what is in flight comes when that is done.
    pub(crate) fn take(&mut self, instruction: Instruction, follows: bool) {
        if follows {
            let (starts, before) = (self.needed(&instruction), self.met(&instruction));
            if !starts.is_empty() || !before.is_empty() {
                self.put_off(instruction, &starts, &before);
                return;
            }
        }
        while let Some(start) = self.needed(&instruction).first() {
            self.land(*start);
        }
        if instruction.started().is_some() {
            // What goes on to another collective had until now.
            while let Some(start) = self.goes_on.first() {
                self.land(*start);
            }
        }
        while let Some(start) = self.in_the_way(&instruction) {
            self.land(start);
        }
        self.put(instruction);
    }

    /// All of them, when everything is done.
    pub(crate) fn end(mut self) -> Vec<Instruction> {
        while let Some((start, _)) = self.flying.first_key_value() {
            self.land(*start);
        }
        self.out
    }

    /// The starts in flight that make what an instruction uses, or read what it writes.
    fn needed(&self, instruction: &Instruction) -> BTreeSet<usize> {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let makes = reads.iter().chain(&writes).filter_map(|b| self.makes.get(b));
        makes.chain(writes.iter().filter_map(|b| self.takes.get(b)).flatten()).copied().collect()
    }

    /// What is put off and writes what an instruction uses, or uses what it writes.
    fn met(&self, instruction: &Instruction) -> BTreeSet<usize> {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let made = reads.iter().chain(&writes).filter_map(|b| self.written.get(b)).flatten();
        made.chain(writes.iter().filter_map(|b| self.read.get(b)).flatten()).copied().collect()
    }

    fn put_off(&mut self, instruction: Instruction, starts: &BTreeSet<usize>, before: &BTreeSet<usize>) {
        let i = self.later.len();
        starts.iter().for_each(|start| self.waiting.entry(*start).or_default().push(i));
        before.iter().for_each(|b| self.later[*b].then.push(i));
        if instruction.started().is_some() {
            self.goes_on.extend(starts);
        }
        instruction.reads().into_iter().for_each(|b| {
            self.read.entry(b).or_default().insert(i);
        });
        instruction.writes().into_iter().for_each(|b| {
            self.written.entry(b).or_default().insert(i);
        });
        let waits = starts.len() + before.len();
        self.later.push(Later { instruction: Some(instruction), waits, then: Vec::new() });
    }

    /// Its number, if it is a start.
    fn put(&mut self, instruction: Instruction) -> Option<usize> {
        let number = instruction.started().is_some().then_some(self.started);
        if let Some(number) = number {
            self.started += 1;
            for t in instruction.transfers() {
                self.makes.insert(t.to, number);
                self.takes.entry(t.from).or_default().push(number);
            }
            self.copying.extend(copies(&instruction).then_some(number));
            self.flying.insert(number, instruction.clone());
        }
        self.out.push(instruction);
        number
    }

    /// Where so many copy already, the one that was started first.
    fn in_the_way(&self, instruction: &Instruction) -> Option<usize> {
        let many = copies(instruction) && self.copying.len() >= DEPTH;
        self.copying.first().filter(|_| many).copied()
    }

    /// Waits for one that is in flight, and goes on with what follows.
    fn land(&mut self, number: usize) {
        let Some(start) = self.flying.remove(&number) else { return };
        for t in start.transfers() {
            self.makes.remove(&t.to);
            self.takes.entry(t.from).or_default().retain(|n| *n != number);
        }
        self.copying.remove(&number);
        self.goes_on.remove(&number);
        self.out.extend(start.started().map(|(token, _)| Instruction::Wait { token }));
        for i in self.waiting.remove(&number).into_iter().flatten() {
            self.one_less(i);
        }
        while let Some(i) = self.ready.first().copied() {
            let next = self.later[i].instruction.as_ref();
            match next.and_then(|next| self.in_the_way(next)) {
                Some(start) => self.land(start),
                None => self.come(i),
            }
        }
    }

    fn one_less(&mut self, i: usize) {
        self.later[i].waits -= 1;
        self.ready.extend((self.later[i].waits == 0).then_some(i));
    }

    /// What was put off is next. What waited for a start waits for its collective from now on.
    fn come(&mut self, i: usize) {
        self.ready.remove(&i);
        let Some(next) = self.later[i].instruction.take() else { return };
        for b in next.reads() {
            self.read.entry(b).or_default().remove(&i);
        }
        for b in next.writes() {
            self.written.entry(b).or_default().remove(&i);
        }
        let number = self.put(next);
        for then in std::mem::take(&mut self.later[i].then) {
            let needs = self.later[then].instruction.as_ref().map(|next| (self.needed(next), next.started()));
            match (number, needs) {
                (Some(number), Some((needed, started))) if needed.contains(&number) => {
                    self.goes_on.extend(started.is_some().then_some(number));
                    self.waiting.entry(number).or_default().push(then);
                }
                (Some(_) | None, _) => self.one_less(then),
            }
        }
    }
}

/// Whether a collective needs two places: an all_reduce works in one.
fn copies(instruction: &Instruction) -> bool {
    let parts = instruction.transfers();
    !parts.iter().all(|p| matches!(p.step, Move::AllReduce { .. }))
}
