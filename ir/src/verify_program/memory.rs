//! Follows the calls of a step: what is valid when something is read, and which messages are under way.
//!
//! A segment does the same to memory in every call, so it is followed once, instruction by instruction; a call then takes
//! a few operations on sets of buffers, and many micro-batches cost little.

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Check, ProgramFault};
use crate::program::{BufferId, Buffers, Instruction, Region, Segment, Stage, Transfer};

/// A set of buffers.
#[derive(Clone, Debug, Default, PartialEq)]
struct Bits(Vec<u64>);

impl Bits {
    fn of(buffers: usize) -> Bits {
        Bits(vec![0; buffers.div_ceil(64)])
    }
    fn has(&self, id: BufferId) -> bool {
        self.0[id.index() / 64] >> (id.index() % 64) & 1 == 1
    }
    fn set(&mut self, id: BufferId) {
        self.0[id.index() / 64] |= 1 << (id.index() % 64);
    }
    fn clear(&mut self, id: BufferId) {
        self.0[id.index() / 64] &= !(1 << (id.index() % 64));
    }
    /// Adds those of the others that are in a set, or are not.
    fn add_among(&mut self, other: &Bits, set: &Bits, inside: bool) {
        let of = |m: &u64| if inside { *m } else { !*m };
        self.0.iter_mut().zip(other.0.iter().zip(&set.0)).for_each(|(a, (b, m))| *a |= b & of(m));
    }
    fn less(&mut self, other: &Bits) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a &= !b);
    }
    fn meets(&self, other: &Bits) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }
    fn within(&self, a: &Bits, b: &Bits) -> bool {
        self.0.iter().zip(a.0.iter().zip(&b.0)).all(|(s, (a, b))| s & !(a | b) == 0)
    }
}

/// What a buffer holds, as far as one segment knows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Local {
    /// What it held before.
    Unknown,
    /// What was written.
    Valid,
    /// Another took its memory.
    Killed(BufferId),
    /// A message is to come, with this token.
    Coming(u32),
}

/// What a segment does to memory.
struct Summary {
    /// What it reads before it writes it, and where.
    needs: Vec<(BufferId, usize)>,
    needed: Bits,
    /// What of that, and of what arrives, is in a slot.
    asked: Bits,
    /// Messages that were made ready for in another segment, and where they come.
    arrivals: Vec<(BufferId, usize)>,
    /// What it writes itself.
    writes: Bits,
    kills: Bits,
    gains: Bits,
    /// What is of its micro-batch when it ends, or will be once it has come.
    owned: Vec<BufferId>,
    /// What is still to come, or being sent, when it ends.
    coming: Bits,
    sending: Bits,
    /// What was being sent before and now is sent.
    sent: Bits,
    /// Rules that it breaks by itself.
    faults: Vec<(usize, ProgramFault)>,
    /// The tokens of messages, and whether each starts.
    tokens: Vec<(u32, bool, usize)>,
}

/// By buffer those that share bytes with it; each with itself only until buffers are placed.
struct Overlaps(Vec<Vec<BufferId>>);

impl Overlaps {
    fn of(stage: &Stage, bytes: &[usize]) -> Overlaps {
        let mut all = vec![Vec::new(); stage.buffers.len()];
        if stage.buffers.iter().any(|b| b.offset.is_none()) {
            return Overlaps(all);
        }
        for region in Region::ALL {
            let inside = |i: &usize| stage.buffers[*i].region == region && bytes[*i] > 0;
            let start = |i: usize| stage.buffers[i].offset.unwrap_or(0);
            let mut order: Vec<usize> = (0..stage.buffers.len()).filter(inside).collect();
            order.sort_by_key(|i| (start(*i), *i));
            let mut open: Vec<usize> = Vec::new();
            for i in order {
                open.retain(|o| start(*o) + bytes[*o] > start(i));
                for o in &open {
                    all[*o].push(BufferId(i as u32));
                    all[i].push(BufferId(*o as u32));
                }
                open.push(i);
            }
        }
        Overlaps(all)
    }
}

/// Whether two buffers lie in one place, as those of an all_reduce may.
fn shares(stage: &Stage, a: BufferId, b: BufferId) -> bool {
    let (a, b) = (&stage.buffers[a.index()], &stage.buffers[b.index()]);
    a.region == b.region && a.offset.is_some() && a.offset == b.offset
}

/// What an instruction reads and writes. A collective reads until its wait, and has written only then.
fn uses(
    stage: &Stage,
    instruction: &Instruction,
    started: &FxHashMap<u32, &[Transfer]>,
) -> (Buffers, Buffers) {
    let (mut reads, mut writes) = (instruction.reads(), instruction.writes());
    if let Instruction::Wait { token } = instruction {
        for p in started.get(token).copied().unwrap_or_default() {
            reads.extend((p.from != p.to && !shares(stage, p.from, p.to)).then_some(p.from));
            writes.push(p.to);
        }
    }
    (reads, writes)
}

fn summary(stage: &Stage, segment: &Segment, overlaps: &Overlaps) -> Summary {
    let n = stage.buffers.len();
    let mut local: Vec<Local> = vec![Local::Unknown; n];
    let mut s = Summary {
        needs: Vec::new(),
        needed: Bits::of(n),
        asked: Bits::of(n),
        arrivals: Vec::new(),
        writes: Bits::of(n),
        kills: Bits::of(n),
        gains: Bits::of(n),
        owned: Vec::new(),
        coming: Bits::of(n),
        sending: Bits::of(n),
        sent: Bits::of(n),
        faults: Vec::new(),
        tokens: Vec::new(),
    };
    let mut sending: FxHashMap<BufferId, u32> = FxHashMap::default();
    let mut started: FxHashMap<u32, &[Transfer]> = FxHashMap::default();
    for (k, instruction) in segment.instructions.iter().enumerate() {
        started.extend(instruction.started());
        let (reads, writes) = uses(stage, instruction, &started);
        for id in reads {
            let scratch = stage.buffers[id.index()].region == Region::Scratch;
            match local[id.index()] {
                Local::Valid => {}
                Local::Unknown if scratch => s.faults.push((k, ProgramFault::NotWritten(id))),
                Local::Unknown => {
                    if !s.needed.has(id) {
                        s.needed.set(id);
                        s.needs.push((id, k));
                    }
                }
                Local::Killed(by) => s.faults.push((k, ProgramFault::Overwritten(id, by))),
                Local::Coming(token) => s.faults.push((k, ProgramFault::InFlight(id, token))),
            }
        }
        for id in writes {
            if let Some(token) = sending.get(&id) {
                s.faults.push((k, ProgramFault::InFlight(id, *token)));
            }
            let before = local[id.index()];
            let now = match (instruction, before) {
                (Instruction::Receive { token, .. }, _) => Local::Coming(*token),
                (Instruction::Received { .. }, Local::Coming(_)) => Local::Valid,
                (Instruction::Received { .. }, Local::Unknown) => {
                    s.arrivals.push((id, k));
                    Local::Valid
                }
                (Instruction::Received { .. }, Local::Killed(by)) => {
                    s.faults.push((k, ProgramFault::Overwritten(id, by)));
                    Local::Valid
                }
                (_, Local::Coming(token)) => {
                    s.faults.push((k, ProgramFault::InFlight(id, token)));
                    Local::Valid
                }
                (_, Local::Unknown | Local::Valid | Local::Killed(_)) => Local::Valid,
            };
            if !matches!(instruction, Instruction::Received { .. }) {
                s.writes.set(id);
            }
            for other in &overlaps.0[id.index()] {
                local[other.index()] = Local::Killed(id);
            }
            local[id.index()] = now;
        }
        match instruction {
            Instruction::Send { token, from, .. } => {
                sending.insert(*from, *token);
                s.tokens.push((*token, true, k));
            }
            Instruction::Sent { token, from } => {
                if sending.remove(from).is_none() {
                    s.sent.set(*from);
                }
                s.tokens.push((*token, false, k));
            }
            Instruction::Receive { token, .. } => s.tokens.push((*token, true, k)),
            Instruction::Received { token, .. } => s.tokens.push((*token, false, k)),
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Start { .. }
            | Instruction::Wait { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => {}
        }
    }
    for (id, _) in s.needs.iter().chain(&s.arrivals) {
        if stage.buffers[id.index()].region == Region::Slot {
            s.asked.set(*id);
        }
    }
    for (i, state) in local.into_iter().enumerate() {
        let id = BufferId(i as u32);
        if matches!(state, Local::Valid | Local::Coming(_))
            && stage.buffers[id.index()].region == Region::Slot
        {
            s.owned.push(id);
        }
        match state {
            Local::Unknown => {}
            Local::Valid => s.gains.set(id),
            Local::Killed(_) => s.kills.set(id),
            Local::Coming(_) => {
                s.kills.set(id);
                s.coming.set(id);
            }
        }
    }
    sending.into_keys().for_each(|id| s.sending.set(id));
    s
}

/// What is true of the buffers of one slot, or of those outside the slots.
#[derive(Clone)]
struct Held {
    valid: Bits,
    coming: Bits,
    sending: Bits,
    ever: Bits,
}

impl Check<'_, '_> {
    /// Follows the calls of a step.
    pub(super) fn memory(&mut self, s: usize) {
        let stage = self.stage;
        let n = stage.buffers.len();
        let bytes: Vec<usize> = stage.buffers.iter().map(|b| b.bytes(self.mesh)).collect();
        let overlaps = Overlaps::of(stage, &bytes);
        let mut in_slots = Bits::of(n);
        let empty = Held { valid: Bits::of(n), coming: Bits::of(n), sending: Bits::of(n), ever: Bits::of(n) };
        let mut rest = empty.clone();
        for (i, buffer) in stage.buffers.iter().enumerate() {
            let id = BufferId(i as u32);
            match buffer.region {
                Region::Slot => in_slots.set(id),
                Region::State => {
                    rest.valid.set(id);
                    rest.ever.set(id);
                }
                Region::Step | Region::Scratch => {}
            }
        }
        if stage.slots > stage.calls.len().max(1) {
            // Each slot has a call at the least.
            let fault = ProgramFault::Call(0, stage.slots, stage.segments.len(), stage.slots);
            return self.report(&format!("stage {s}"), fault);
        }
        let mut slots = vec![empty; stage.slots.max(1)];
        // By slot and buffer the micro-batch that it is of.
        let mut owners: Vec<Vec<Option<usize>>> = vec![vec![None; n]; slots.len()];
        // By slot the micro-batch that it was called for last, and what is of it in any case.
        let mut last: Vec<(Option<usize>, Bits)> = vec![(None, Bits::of(n)); slots.len()];
        let mut summaries: Vec<Option<Summary>> = stage.segments.iter().map(|_| None).collect();
        let mut flying: FxHashSet<(u32, Option<usize>)> = FxHashSet::default();
        for (c, call) in stage.calls.iter().enumerate() {
            let Some(segment) = stage.segments.get(call.segment).filter(|_| call.slot < stage.slots) else {
                let fault = ProgramFault::Call(call.segment, call.slot, stage.segments.len(), stage.slots);
                self.report(&format!("stage {s}, call {c}"), fault);
                continue;
            };
            let mut faults: Vec<(usize, ProgramFault)> = Vec::new();
            let first = summaries[call.segment].is_none();
            let does = summaries[call.segment].get_or_insert_with(|| summary(stage, segment, &overlaps));
            if first {
                faults.append(&mut does.faults);
            }
            let slot = &mut slots[call.slot];
            let owner = &mut owners[call.slot];
            let (of, own) = &mut last[call.slot];
            if *of != call.microbatch {
                (*of, *own) = (call.microbatch, Bits::of(n));
            }
            let all_own = does.asked.within(own, own);
            for (id, k) in does.needs.iter().chain(&does.arrivals).filter(|_| !all_own) {
                let known = in_slots.has(*id) && (slot.valid.has(*id) || slot.coming.has(*id));
                if known && owner[id.index()] != call.microbatch {
                    let (found, needed) = (owner[id.index()], call.microbatch);
                    faults.push((*k, ProgramFault::OtherMicrobatch { buffer: *id, found, needed }));
                }
            }
            for id in &does.owned {
                owner[id.index()] = call.microbatch;
                own.set(*id);
            }
            if !does.needed.within(&slot.valid, &rest.valid) {
                for (id, k) in &does.needs {
                    let held = if in_slots.has(*id) { &*slot } else { &rest };
                    if !held.valid.has(*id) {
                        let other = overlaps.0[id.index()].iter().find(|o| held.valid.has(**o));
                        let gone = ProgramFault::NotWritten(*id);
                        let fault = other.filter(|_| held.ever.has(*id));
                        faults.push((*k, fault.map_or(gone, |o| ProgramFault::Overwritten(*id, *o))));
                    }
                }
            }
            for (id, k) in &does.arrivals {
                let held = if in_slots.has(*id) { &*slot } else { &rest };
                if !held.coming.has(*id) {
                    let other = overlaps.0[id.index()].iter().find(|o| held.ever.has(**o));
                    let by = other.copied().unwrap_or(*id);
                    faults.push((*k, ProgramFault::Overwritten(*id, by)));
                }
            }
            for held in [&*slot, &rest] {
                if does.writes.meets(&held.sending) {
                    let busy = |(k, i): (usize, &Instruction)| {
                        let id =
                            i.writes().into_iter().find(|b| held.sending.has(*b) && does.writes.has(*b))?;
                        Some((k, id))
                    };
                    if let Some((k, id)) = segment.instructions.iter().enumerate().find_map(busy) {
                        faults.push((k, ProgramFault::BeingSent(id)));
                    }
                }
            }
            for (held, inside) in [(slot, true), (&mut rest, false)] {
                held.coming.less(&does.writes);
                held.coming.less(&does.kills);
                does.arrivals.iter().for_each(|(id, _)| held.coming.clear(*id));
                held.valid.less(&does.kills);
                held.sending.less(&does.sent);
                for (to, from) in [
                    (&mut held.valid, &does.gains),
                    (&mut held.ever, &does.gains),
                    (&mut held.coming, &does.coming),
                    (&mut held.sending, &does.sending),
                ] {
                    to.add_among(from, &in_slots, inside);
                }
            }
            for (token, starts, k) in &does.tokens {
                let key = (*token, call.microbatch);
                match starts {
                    true if !flying.insert(key) => faults.push((*k, ProgramFault::NotWaited(*token))),
                    false if !flying.remove(&key) => faults.push((*k, ProgramFault::NotStarted(*token))),
                    true | false => {}
                }
            }
            if !faults.is_empty() {
                faults.sort_by_key(|(k, _)| *k);
                let name = stage.name_of(call.segment);
                for (k, fault) in faults {
                    self.report(&format!("stage {s}, call {c}, segment {name}, instruction {k}"), fault);
                }
            }
        }
        let mut left: Vec<_> = flying.into_iter().collect();
        left.sort_unstable();
        for (token, _) in left {
            self.report(&format!("stage {s}"), ProgramFault::NotWaited(token));
        }
    }
}
