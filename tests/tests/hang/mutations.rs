//! What is changed in a program: each as a wrong pass might, and how many of a hundred the check must find. The rest may be
//! harmless.

use std::collections::BTreeSet;

use ir::program::{BufferId, Duty, Instruction, Program, Stage};
use meshc_tests::random::Random;

/// A kind of change.
pub struct Mutation {
    /// What is wrong afterwards.
    pub name: &'static str,
    /// How many of a hundred must be found; the others are run.
    pub needed: usize,
    /// Makes one; says whether it could.
    pub change: fn(&mut Program, &mut Random) -> bool,
}

/// Every kind.
pub const MUTATIONS: &[Mutation] = &[
    Mutation { name: "a send is dropped", needed: 100, change: |p, r| dropped(p, r, is_send, is_sent) },
    Mutation {
        name: "a receive is dropped",
        needed: 100,
        change: |p, r| dropped(p, r, is_receive, is_received),
    },
    Mutation { name: "two sends swap what they are called", needed: 100, change: labels_swapped },
    Mutation { name: "two sends swap what they send", needed: 100, change: buffers_swapped },
    Mutation { name: "two sends swap their places", needed: 0, change: sends_swapped },
    Mutation { name: "two calls of a segment swap", needed: 50, change: calls_swapped },
    Mutation { name: "a message has another peer", needed: 100, change: peer },
    Mutation { name: "a call is of another micro-batch", needed: 100, change: microbatch },
    Mutation { name: "a message uses another buffer", needed: 100, change: buffer },
    Mutation { name: "a call uses another slot", needed: 90, change: slot },
    Mutation { name: "a collective is dropped on one row", needed: 100, change: collective },
    Mutation { name: "a wait comes before its start", needed: 100, change: wait_first },
    Mutation { name: "a wait is dropped", needed: 100, change: |p, r| one_removed(p, r, is_wait) },
    Mutation {
        name: "waits for what is sent come earlier",
        needed: 0,
        change: |p, r| call_moved(p, r, Duty::Clear, false),
    },
    Mutation {
        name: "a row gets ready to receive later",
        needed: 0,
        change: |p, r| call_moved(p, r, Duty::Post, true),
    },
    Mutation { name: "a receive comes later in its segment", needed: 0, change: receive_later },
];

fn is_send(i: &Instruction) -> bool {
    matches!(i, Instruction::Send { .. })
}

fn is_sent(i: &Instruction) -> bool {
    matches!(i, Instruction::Sent { .. })
}

fn is_receive(i: &Instruction) -> bool {
    matches!(i, Instruction::Receive { .. })
}

fn is_received(i: &Instruction) -> bool {
    matches!(i, Instruction::Received { .. })
}

fn is_start(i: &Instruction) -> bool {
    matches!(i, Instruction::Start { .. })
}

fn is_wait(i: &Instruction) -> bool {
    matches!(i, Instruction::Wait { .. }) || is_sent(i) || is_received(i)
}

fn token(i: &Instruction) -> Option<u32> {
    match i {
        Instruction::Start { token, .. }
        | Instruction::Wait { token }
        | Instruction::Send { token, .. }
        | Instruction::Sent { token, .. }
        | Instruction::Receive { token, .. }
        | Instruction::Received { token, .. } => Some(*token),
        Instruction::Feed { .. }
        | Instruction::Launch { .. }
        | Instruction::Local { .. }
        | Instruction::Assign { .. }
        | Instruction::Tap { .. } => None,
    }
}

/// Where an instruction stands: row, segment, place.
type Spot = (usize, usize, usize);

fn spots(program: &Program, is: fn(&Instruction) -> bool) -> Vec<Spot> {
    let mut all = Vec::new();
    for (row, stage) in program.stages.iter().enumerate() {
        for (s, segment) in stage.segments.iter().enumerate() {
            let here = segment.instructions.iter().enumerate().filter(|(_, i)| is(i));
            all.extend(here.map(|(k, _)| (row, s, k)));
        }
    }
    all
}

fn pick<T: Copy>(of: &[T], random: &mut Random) -> Option<T> {
    (!of.is_empty()).then(|| *random.pick(of))
}

fn at(program: &mut Program, (row, s, k): Spot) -> &mut Instruction {
    &mut program.stages[row].segments[s].instructions[k]
}

fn one_removed(p: &mut Program, random: &mut Random, is: fn(&Instruction) -> bool) -> bool {
    let Some((row, s, k)) = pick(&spots(p, is), random) else { return false };
    p.stages[row].segments[s].instructions.remove(k);
    true
}

/// A start is dropped, alone or with all its waits.
fn dropped(
    p: &mut Program,
    random: &mut Random,
    starts: fn(&Instruction) -> bool,
    waits: fn(&Instruction) -> bool,
) -> bool {
    let Some((row, s, k)) = pick(&spots(p, starts), random) else { return false };
    let of = token(&p.stages[row].segments[s].instructions.remove(k));
    if random.below(2) == 0 {
        for segment in &mut p.stages[row].segments {
            segment.instructions.retain(|i| !(waits(i) && token(i) == of));
        }
    }
    true
}

/// Two sends of one row, of values that look alike.
fn two_sends(p: &Program, random: &mut Random) -> Option<(Spot, Spot)> {
    let all = spots(p, is_send);
    let look = |(row, s, k): Spot| {
        let stage = &p.stages[row];
        let instruction = &stage.segments[s].instructions[k];
        let from = instruction.reads()[0];
        let buffer = &stage.buffers[from.index()];
        (instruction.message(), from, (row, buffer.dtype, &buffer.shape, &buffer.sharding))
    };
    let mut pairs = Vec::new();
    for a in &all {
        for b in &all {
            let ((m, x, like), (n, y, other)) = (look(*a), look(*b));
            if m != n && x != y && like == other {
                pairs.push((*a, *b));
            }
        }
    }
    pick(&pairs, random)
}

fn labels_swapped(p: &mut Program, random: &mut Random) -> bool {
    let Some((a, b)) = two_sends(p, random) else { return false };
    let (one, other) = (at(p, a).message(), at(p, b).message());
    for (spot, new) in [(a, other), (b, one)] {
        if let (Instruction::Send { message, .. }, Some(new)) = (at(p, spot), new) {
            *message = new;
        }
    }
    true
}

fn buffers_swapped(p: &mut Program, random: &mut Random) -> bool {
    let Some((a, b)) = two_sends(p, random) else { return false };
    let (x, y) = (at(p, a).reads()[0], at(p, b).reads()[0]);
    let (of_a, of_b) = (token(at(p, a)), token(at(p, b)));
    for instruction in p.stages[a.0].segments.iter_mut().flat_map(|s| &mut s.instructions) {
        let new = if token(instruction) == of_a { y } else { x };
        let ours = [of_a, of_b].contains(&token(instruction));
        if let Instruction::Send { from, .. } | Instruction::Sent { from, .. } = instruction
            && ours
        {
            *from = new;
        }
    }
    true
}

/// Of one segment.
fn sends_swapped(p: &mut Program, random: &mut Random) -> bool {
    let all = spots(p, |i| is_send(i) || is_sent(i));
    let near =
        |a: &Spot| all.iter().filter(|b| (b.0, b.1) == (a.0, a.1) && b.2 > a.2).map(|b| (*a, *b)).next();
    let Some((a, b)) = pick(&all.iter().filter_map(near).collect::<Vec<_>>(), random) else { return false };
    p.stages[a.0].segments[a.1].instructions.swap(a.2, b.2);
    true
}

fn calls_swapped(p: &mut Program, random: &mut Random) -> bool {
    let row = random.below(p.stages.len());
    let stage = &mut p.stages[row];
    let sends = |s: usize| stage.segments[s].instructions.iter().any(|i| is_send(i) || is_receive(i));
    let calls: Vec<usize> = (0..stage.calls.len()).filter(|c| sends(stage.calls[*c].segment)).collect();
    let Some(a) = pick(&calls, random) else { return false };
    let next = calls.iter().copied().find(|b| *b > a && stage.calls[*b].segment == stage.calls[a].segment);
    next.inspect(|b| stage.calls.swap(a, *b)).is_some()
}

fn peer(p: &mut Program, random: &mut Random) -> bool {
    let Some(spot) = pick(&spots(p, |i| is_send(i) || is_receive(i)), random) else { return false };
    let stages = p.homes.len();
    let (other, side) = (random.below(stages), random.below(2));
    if let Instruction::Send { message, .. } | Instruction::Receive { message, .. } = at(p, spot) {
        let end = if side == 0 { &mut message.from } else { &mut message.to };
        return std::mem::replace(end, other) != other;
    }
    false
}

fn microbatch(p: &mut Program, random: &mut Random) -> bool {
    let row = random.below(p.stages.len());
    let m = random.below(p.microbatches);
    let calls = &mut p.stages[row].calls;
    let c = random.below(calls.len());
    let known = calls[c].microbatch;
    calls[c].microbatch = known.map(|_| m);
    calls[c].microbatch != known
}

/// A buffer of the same kind that is used in the same way, and its wait with it.
fn buffer(p: &mut Program, random: &mut Random) -> bool {
    let Some(spot) = pick(&spots(p, |i| is_send(i) || is_receive(i)), random) else { return false };
    let (of, sends) = (token(at(p, spot)), is_send(at(p, spot)));
    let old = at(p, spot).reads().into_iter().chain(at(p, spot).writes()).next().unwrap_or(BufferId(0));
    let others = like(&p.stages[spot.0], old);
    let Some(new) = pick(&others, random) else { return false };
    let both = random.below(2) == 0;
    for instruction in p.stages[spot.0].segments.iter_mut().flat_map(|s| &mut s.instructions) {
        let side = is_send(instruction) || is_sent(instruction);
        let message = is_receive(instruction) || is_received(instruction) || side;
        let chosen = both || is_send(instruction) || is_receive(instruction);
        if message && chosen && side == sends && token(instruction) == of {
            instruction.buffers_mut().into_iter().for_each(|b| *b = new);
        }
    }
    true
}

fn like(stage: &Stage, old: BufferId) -> Vec<BufferId> {
    let of = &stage.buffers[old.index()];
    let all = stage.buffers.iter().enumerate().map(|(i, b)| (BufferId(i as u32), b));
    all.filter(|(id, b)| {
        *id != old
            && (b.dtype, &b.shape, &b.sharding, b.region) == (of.dtype, &of.shape, &of.sharding, of.region)
    })
    .map(|(id, _)| id)
    .collect()
}

fn slot(p: &mut Program, random: &mut Random) -> bool {
    let row = random.below(p.stages.len());
    let stage = &mut p.stages[row];
    let other = random.below(stage.slots.max(1));
    let named = |s: usize| {
        let used = |i: &Instruction| i.reads().into_iter().chain(i.writes()).collect::<BTreeSet<_>>();
        let all: BTreeSet<BufferId> = stage.segments[s].instructions.iter().flat_map(used).collect();
        all.iter().any(|b| stage.buffers[b.index()].region == ir::program::Region::Slot)
    };
    let calls: Vec<usize> = (0..stage.calls.len()).filter(|c| named(stage.calls[*c].segment)).collect();
    let Some(c) = pick(&calls, random) else { return false };
    std::mem::replace(&mut stage.calls[c].slot, other) != other
}

/// Its start, its wait or both.
fn collective(p: &mut Program, random: &mut Random) -> bool {
    let Some((row, s, k)) = pick(&spots(p, is_start), random) else { return false };
    let (of, what) = (token(at(p, (row, s, k))), random.below(3));
    let mut place = 0;
    p.stages[row].segments[s].instructions.retain(|i| {
        let start = place == k;
        place += 1;
        let wait = matches!(i, Instruction::Wait { .. }) && token(i) == of;
        !(start && what != 1 || wait && what != 0)
    });
    true
}

/// In its segment, or the call that has it before the call that starts it.
fn wait_first(p: &mut Program, random: &mut Random) -> bool {
    if random.below(2) == 0 {
        let Some((row, s, k)) = pick(&spots(p, |i| matches!(i, Instruction::Wait { .. })), random) else {
            return false;
        };
        let all = &mut p.stages[row].segments[s].instructions;
        let wait = all.remove(k);
        let start = all.iter().position(|i| is_start(i) && token(i) == token(&wait));
        start.map(|at| all.insert(at, wait)).is_some()
    } else {
        let row = random.below(p.stages.len());
        let stage = &mut p.stages[row];
        let duty = |c: usize| stage.segments[stage.calls[c].segment].duty;
        let waits: Vec<usize> = (0..stage.calls.len()).filter(|c| duty(*c) == Duty::Clear).collect();
        let Some(c) = pick(&waits, random) else { return false };
        let call = stage.calls[c];
        let (of, kind) = (stage.segments[call.segment].stage, stage.segments[call.segment].kind);
        let work = (0..c).find(|b| {
            let s = &stage.segments[stage.calls[*b].segment];
            (s.stage, s.kind, s.duty) == (of, kind, Duty::Work)
                && stage.calls[*b].microbatch == call.microbatch
        });
        let Some(work) = work else { return false };
        stage.calls.remove(c);
        stage.calls.insert(work, call);
        true
    }
}

/// By up to four calls.
fn call_moved(p: &mut Program, random: &mut Random, duty: Duty, later: bool) -> bool {
    let row = random.below(p.stages.len());
    let by = 1 + random.below(4);
    let stage = &mut p.stages[row];
    let of = |c: &usize| stage.segments[stage.calls[*c].segment].duty == duty;
    let Some(c) = pick(&(0..stage.calls.len()).filter(of).collect::<Vec<_>>(), random) else { return false };
    let call = stage.calls.remove(c);
    let to = if later { (c + by).min(stage.calls.len()) } else { c.saturating_sub(by) };
    stage.calls.insert(to, call);
    to != c
}

fn receive_later(p: &mut Program, random: &mut Random) -> bool {
    let Some((row, s, k)) = pick(&spots(p, is_receive), random) else { return false };
    let all = &mut p.stages[row].segments[s].instructions;
    if k + 1 == all.len() {
        return false;
    }
    let to = k + 1 + random.below(all.len() - k - 1);
    let receive = all.remove(k);
    all.insert(to, receive);
    true
}
