//! The calls of each row, from the table: its actions in order, and between them when a row gets ready to receive, when it
//! waits until something is sent, and in which slot each micro-batch lies.
//!
//! A row gets ready for what an action needs one action ahead where it can: that is early enough for the transfer to run
//! beside computing, and no earlier, since one that waits may hold up what else the device does. It waits until something
//! is sent only before the memory is used again, and only once the other side is ready for it by the clock of the table:
//! every wait is for something earlier on that clock, so no circle of waits can arise, even if a send ends no sooner than
//! it is received (rendezvous). Between two actions what is early comes first, [`LATE`] on that clock before the rest.

use std::collections::BTreeSet;

use ir::program::{Call, Duty, Instruction, Message, Stage};
use ir::schedule::simulate::{Durations, Times, Work, simulate};
use ir::schedule::{Action, Kind, Schedule};
use rustc_hash::{FxHashMap, FxHashSet};

/// Writes the calls and the number of slots of every row.
///
/// # Panics
/// If the table cannot be run: it is checked when it is read.
pub(super) fn calls(schedule: &Schedule, homes: &[usize], stages: &mut [Stage]) {
    let work = Work { forward: 1.0, input: 1.0, weight: 1.0, optimizer: 0.0 };
    let times = simulate(schedule, &Durations::even(work, schedule.stages(), 0.0))
        .unwrap_or_else(|stuck| panic!("the table was checked, but {stuck}"));
    let segments: Vec<Segments> = stages.iter().map(Segments::of).collect();
    let clock = Clock::of(schedule, &times, homes, stages, &segments);
    let all: Vec<(Vec<Call>, usize)> = (0..stages.len())
        .map(|row| {
            let late = Walk::of(&clock, &segments[row], row, 0).run(schedule);
            let early = Walk::of(&clock, &segments[row], row, late.1).run(schedule);
            // Being early must not cost memory.
            if early.1 <= late.1 { early } else { late }
        })
        .collect();
    for (stage, (calls, slots)) in stages.iter_mut().zip(all) {
        (stage.calls, stage.slots) = (calls, slots);
    }
}

/// Actions take whole units of time; what is not early comes this much after the end of the action before.
const LATE: f64 = 0.25;

/// Where the segments of a row are.
struct Segments {
    at: FxHashMap<(usize, Kind, Duty), usize>,
    /// The stages that have something to do for a micro-batch: one without nodes has not, and takes no slot.
    run: FxHashSet<usize>,
    /// The stages whose backward is cut into halves.
    halved: FxHashSet<usize>,
}

impl Segments {
    fn of(stage: &Stage) -> Segments {
        let all = || stage.segments.iter();
        let once = |kind| matches!(kind, Kind::Begin | Kind::Optimizer);
        let half = |kind| matches!(kind, Kind::Input | Kind::Weight);
        let mut at = FxHashMap::default();
        all().enumerate().for_each(|(i, s)| {
            at.entry((s.stage, s.kind, s.duty)).or_insert(i);
        });
        Segments {
            at,
            run: all().filter(|s| !once(s.kind)).map(|s| s.stage).collect(),
            halved: all().filter(|s| half(s.kind)).map(|s| s.stage).collect(),
        }
    }
}

/// Who receives what a segment waits to be sent: by the stage and kind of that.
type Receivers = FxHashMap<(usize, Kind), Vec<(usize, Kind)>>;

/// When rows are ready to receive, at the latest.
struct Clock {
    receivers: Receivers,
    microbatches: usize,
    /// By [`Clock::place`]; none for what is not in the table.
    each: Vec<Option<When>>,
    /// By row, action by action, when what stands before it ends.
    boundaries: Vec<Vec<f64>>,
}

#[derive(Clone, Copy)]
struct When {
    /// When the row ends what stands before the action.
    before: f64,
    /// The same one action earlier.
    earlier: f64,
    /// Whether the row gets ready for it, a backward, one action ahead.
    early: bool,
}

impl Clock {
    fn of(
        schedule: &Schedule,
        times: &Times,
        homes: &[usize],
        stages: &[Stage],
        segments: &[Segments],
    ) -> Clock {
        let mut clock = Clock {
            receivers: receivers(stages),
            microbatches: schedule.microbatches(),
            each: vec![None; schedule.stages() * schedule.microbatches() * 4],
            boundaries: Vec::new(),
        };
        for (row, spans) in schedule.rows.iter().zip(&times.rows) {
            let mut ends = vec![0.0];
            ends.extend(spans.iter().map(|s| s.end));
            for (i, action) in row.iter().enumerate() {
                for half in halves(*action, &segments[homes[action.stage]]) {
                    let when =
                        When { before: ends[i] + LATE, earlier: ends[i.saturating_sub(1)], early: false };
                    clock.place(half).into_iter().for_each(|at| clock.each[at] = Some(when));
                }
            }
            clock.boundaries.push(ends);
        }
        for row in &schedule.rows {
            clock.find_early(row, homes, segments);
        }
        clock
    }

    /// Where an action that a row can get ready for stands in a table of all.
    fn place(&self, action: Action) -> Option<usize> {
        let kind = match action.kind {
            Kind::Forward => 0,
            Kind::Backward => 1,
            Kind::Input => 2,
            Kind::Weight => 3,
            Kind::Begin | Kind::Unshard | Kind::Drop | Kind::Reduce | Kind::Optimizer => return None,
        };
        Some((action.stage * 4 + kind) * self.microbatches + action.microbatch?)
    }

    fn when(&self, action: Action) -> Option<When> {
        self.each[self.place(action)?]
    }

    fn is_early(&self, action: Action) -> bool {
        self.when(action).is_some_and(|when| when.early)
    }

    /// Finds the backwards of a row that can be early and do not overtake another of their stage, which is not: messages
    /// have no names but their order.
    fn find_early(&mut self, row: &[Action], homes: &[usize], segments: &[Segments]) {
        let mut late: Vec<Action> = Vec::new();
        for action in row {
            let own = halves(*action, &segments[homes[action.stage]]);
            let overtakes = |half: &Action| late.iter().any(|o| (o.stage, o.kind) == (half.stage, half.kind));
            let backward = matches!(action.kind, Kind::Backward | Kind::Input);
            if backward && own.clone().all(|half| self.can_be_early(half) && !overtakes(&half)) {
                for half in own {
                    let at = self.place(half);
                    at.and_then(|at| self.each[at].as_mut()).into_iter().for_each(|when| when.early = true);
                }
                late.clear();
            } else {
                late = own.collect();
            }
        }
    }

    /// When all who receive what an action sends are ready for it. A forward's slot may come late; a backward's is there
    /// since its forward.
    fn ready(&self, action: Action) -> f64 {
        let to = self.receivers.get(&(action.stage, action.kind)).into_iter().flatten();
        to.filter_map(|(stage, kind)| {
            let when = self.when(Action { stage: *stage, kind: *kind, ..action })?;
            Some(if when.early { when.earlier } else { when.before })
        })
        .fold(f64::NEG_INFINITY, f64::max)
    }

    /// Whether a row can get ready for a backward one action ahead: what its forward sent must be gone.
    fn can_be_early(&self, action: Action) -> bool {
        let forward = Action { kind: Kind::Forward, ..action };
        let to = self.receivers.get(&(action.stage, Kind::Forward)).into_iter().flatten();
        let gone = to
            .filter_map(|(stage, kind)| self.when(Action { stage: *stage, kind: *kind, ..forward }))
            .fold(f64::NEG_INFINITY, |latest, when| f64::max(latest, when.before));
        let done = self.when(forward).map_or(f64::NEG_INFINITY, |when| when.before);
        self.when(action).is_some_and(|when| gone < when.earlier && done < when.earlier)
    }
}

/// The segments that an action runs: a whole backward both halves, where a stage has halves.
fn halves(action: Action, segments: &Segments) -> impl Iterator<Item = Action> + Clone {
    let (first, second) = match action.kind {
        Kind::Backward if segments.halved.contains(&action.stage) => (Kind::Input, Some(Kind::Weight)),
        Kind::Begin
        | Kind::Forward
        | Kind::Backward
        | Kind::Input
        | Kind::Weight
        | Kind::Unshard
        | Kind::Drop
        | Kind::Reduce
        | Kind::Optimizer => (action.kind, None),
    };
    [Some(first), second].into_iter().flatten().map(move |kind| Action { kind, ..action })
}

fn receivers(stages: &[Stage]) -> Receivers {
    let mut kinds: FxHashMap<(usize, ir::Value), Kind> = FxHashMap::default();
    let all = || stages.iter().flat_map(|s| &s.segments);
    for segment in all().filter(|s| s.duty == Duty::Post) {
        for message in segment.instructions.iter().filter_map(Instruction::message) {
            kinds.insert((message.to, message.value), segment.kind);
        }
    }
    let mut found = Receivers::default();
    for stage in stages {
        let ends = stage.segments.iter().flat_map(|s| &s.instructions).filter_map(Instruction::posted);
        let sends: FxHashMap<u32, Message> =
            ends.filter(|end| end.sends).map(|end| (end.token, end.message)).collect();
        for segment in stage.segments.iter().filter(|s| s.duty == Duty::Clear) {
            for instruction in &segment.instructions {
                let Instruction::Sent { token, .. } = instruction else { continue };
                let Some(message) = sends.get(token) else { continue };
                let kind = kinds.get(&(message.to, message.value)).map(|kind| (message.to, *kind));
                found.entry((segment.stage, segment.kind)).or_default().extend(kind);
            }
        }
    }
    found
}

/// What of a slot's last micro-batch is still being sent.
#[derive(Clone, Default)]
struct Slot {
    /// The actions, and until when the receivers are ready.
    sending: Vec<(Action, f64)>,
}

struct Walk<'a> {
    clock: &'a Clock,
    segments: &'a Segments,
    row: usize,
    /// Up to so many slots may be taken early; with 0 none is.
    limit: usize,
    slots: Vec<Slot>,
    /// Those that nobody uses.
    unused: BTreeSet<usize>,
    of: FxHashMap<(usize, usize), usize>,
    posted: FxHashSet<(usize, Kind, usize)>,
    calls: Vec<Call>,
}

impl<'a> Walk<'a> {
    fn of(clock: &'a Clock, segments: &'a Segments, row: usize, limit: usize) -> Walk<'a> {
        let (of, posted) = (FxHashMap::default(), FxHashSet::default());
        let unused = BTreeSet::new();
        Walk { clock, segments, row, limit, slots: Vec::new(), unused, of, posted, calls: Vec::new() }
    }

    fn segment(&self, stage: usize, kind: Kind, duty: Duty) -> Option<usize> {
        self.segments.at.get(&(stage, kind, duty)).copied()
    }

    fn call(&mut self, action: Action, duty: Duty, slot: usize) {
        if let Some(segment) = self.segment(action.stage, action.kind, duty) {
            self.calls.push(Call { segment, microbatch: action.microbatch, slot });
        }
    }

    fn run(mut self, schedule: &Schedule) -> (Vec<Call>, usize) {
        let row = schedule.rows.get(self.row).map_or(&[][..], Vec::as_slice);
        let first = schedule.stages_of(self.row).next().unwrap_or(0);
        let once = |kind| Action { stage: first, kind, microbatch: None };
        self.call(once(Kind::Begin), Duty::Work, 0);
        let mut last: FxHashMap<(usize, usize), usize> = FxHashMap::default();
        for (i, action) in row.iter().enumerate().filter(|(_, a)| self.runs(**a)) {
            action.microbatch.into_iter().for_each(|m| {
                last.insert((action.stage, m), i);
            });
        }
        for (i, action) in row.iter().enumerate() {
            let Some(m) = action.microbatch else { continue };
            let now = self.clock.boundaries[self.row][i];
            let next = row.get(i + 1).filter(|a| self.runs(**a)).and_then(|a| Some((*a, a.microbatch?)));
            next.into_iter().for_each(|(next, m)| self.backward_early(next, m, now));
            if !self.runs(*action) {
                continue;
            }
            self.prepare(*action, m, now + LATE);
            next.into_iter().for_each(|(next, m)| self.forward_early(next, m, now + LATE));
            let slot = self.of[&(action.stage, m)];
            for half in halves(*action, self.segments) {
                self.post(half, m, slot);
                self.call(half, Duty::Work, slot);
                if self.segment(half.stage, half.kind, Duty::Clear).is_some() {
                    let ready = self.clock.ready(half);
                    self.slots[slot].sending.push((half, ready));
                }
            }
            if last[&(action.stage, m)] == i {
                self.unused.insert(slot);
            }
        }
        for slot in 0..self.slots.len() {
            self.clear(slot);
        }
        if row.iter().any(|a| a.kind == Kind::Optimizer) {
            self.call(once(Kind::Optimizer), Duty::Work, 0);
        }
        (self.calls, self.slots.len().max(1))
    }

    /// Waits until all that the last micro-batch of a slot sends is sent.
    fn clear(&mut self, slot: usize) {
        for (action, _) in std::mem::take(&mut self.slots[slot].sending) {
            self.call(action, Duty::Clear, slot);
        }
    }

    /// The same for one action of the micro-batch that is there.
    fn clear_one(&mut self, slot: usize, action: Action) {
        let sending = &mut self.slots[slot].sending;
        if let Some(at) = sending.iter().position(|(a, _)| *a == action) {
            sending.remove(at);
            self.call(action, Duty::Clear, slot);
        }
    }

    /// A slot that nobody uses and whose last transfers are received by then.
    fn free(&self, now: f64) -> Option<usize> {
        let fine = |s: &usize| self.slots[*s].sending.iter().all(|(_, ready)| *ready < now);
        self.unused.iter().copied().find(fine)
    }

    /// Gives a micro-batch its slot, and gets ready for what its action receives.
    fn prepare(&mut self, action: Action, m: usize, now: f64) {
        let slot = match self.of.get(&(action.stage, m)) {
            Some(slot) => *slot,
            None => {
                let slot = self.free(now).unwrap_or_else(|| {
                    self.slots.push(Slot::default());
                    self.slots.len() - 1
                });
                self.take(slot, action.stage, m);
                slot
            }
        };
        if let Some(first) = halves(action, self.segments).next() {
            self.post(first, m, slot);
        }
    }

    /// Gets ready for what an action receives, once. What is sent to a second half has no other place to lie than behind
    /// the first, so nothing is ready for it before that has run.
    fn post(&mut self, half: Action, m: usize, slot: usize) {
        let new = self.posted.insert((half.stage, half.kind, m));
        if new && self.segment(half.stage, half.kind, Duty::Post).is_some() {
            if half.kind != Kind::Forward {
                self.clear_one(slot, Action { kind: Kind::Forward, ..half });
            }
            self.call(half, Duty::Post, slot);
        }
    }

    fn take(&mut self, slot: usize, stage: usize, m: usize) {
        self.clear(slot);
        self.unused.remove(&slot);
        self.of.insert((stage, m), slot);
    }

    /// Whether the stage of an action has something to do.
    fn runs(&self, action: Action) -> bool {
        self.segments.run.contains(&action.stage)
    }

    fn receives(&self, action: Action) -> bool {
        let post = |half: Action| self.segment(half.stage, half.kind, Duty::Post).is_some();
        halves(action, self.segments).any(post)
    }

    /// The same for the next action, if it is a forward and that costs no slot.
    fn forward_early(&mut self, action: Action, m: usize, now: f64) {
        let room = self.limit > 0 && (self.slots.len() < self.limit || self.free(now).is_some());
        let new = !self.of.contains_key(&(action.stage, m));
        if action.kind == Kind::Forward && new && room && self.receives(action) {
            self.prepare(action, m, now);
        }
    }

    /// The same for the next action, if it is a backward that can be early.
    fn backward_early(&mut self, action: Action, m: usize, now: f64) {
        let early = halves(action, self.segments).all(|half| self.clock.is_early(half));
        if early && self.of.contains_key(&(action.stage, m)) && self.receives(action) {
            self.prepare(action, m, now);
        }
    }
}
