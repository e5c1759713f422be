//! When each action of a table runs, if every rank does its row in order and each action starts as soon as what it needs is
//! there. Event-driven: an action is looked at once, and once more if it had to wait.

use crate::schedule::{Action, Kind, Schedule};
use rustc_hash::FxHashMap;

use super::stuck::{self, Stuck};

/// How long the actions of a virtual stage take, in any unit of time. A whole backward takes input and weight together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// F.
    pub forward: f64,
    /// I.
    pub input: f64,
    /// W.
    pub weight: f64,
    /// O.
    pub optimizer: f64,
}

impl Work {
    /// Of an action. What only moves parameters and gradients takes none: it runs beside the computing.
    fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Forward => self.forward,
            Kind::Backward => self.input + self.weight,
            Kind::Input => self.input,
            Kind::Weight => self.weight,
            Kind::Optimizer => self.optimizer,
            Kind::Begin | Kind::Unshard | Kind::Drop | Kind::Reduce => 0.0,
        }
    }
}

/// How long everything takes, in one unit of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// For each virtual stage.
    pub stages: Vec<Work>,
    /// From the end of an action to when what it gives is on another rank: latency, which occupies no rank.
    pub hop: f64,
}

impl Durations {
    /// Every stage takes the same.
    pub fn even(work: Work, stages: usize, hop: f64) -> Durations {
        Durations { stages: vec![work; stages], hop }
    }
}

/// When an action runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Its start; the step begins at 0.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// When every action of a table runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// A span for each action, as in the table's rows.
    pub rows: Vec<Vec<Span>>,
}

impl Times {
    /// When the last action ends.
    pub fn makespan(&self) -> f64 {
        self.rows.iter().flatten().map(|s| s.end).fold(0.0, f64::max)
    }

    /// From a rank's first start to its last end.
    pub fn span(&self, rank: usize) -> f64 {
        let row = &self.rows[rank];
        row.last().zip(row.first()).map_or(0.0, |(last, first)| last.end - first.start)
    }

    /// The largest span of a rank.
    pub fn longest_span(&self) -> f64 {
        (0..self.rows.len()).map(|rank| self.span(rank)).fold(0.0, f64::max)
    }

    /// How long a rank computes.
    pub fn busy(&self, rank: usize) -> f64 {
        self.rows[rank].iter().map(|s| s.end - s.start).sum()
    }

    /// Idle time of all ranks over the whole step, as a part of it; 0 for a table without work.
    pub fn bubble_fraction(&self) -> f64 {
        let whole = self.makespan() * self.rows.len() as f64;
        let busy: f64 = (0..self.rows.len()).map(|rank| self.busy(rank)).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

/// Where the end of what an action gives stands: by kind, stage and micro-batch. None for what nobody waits for.
fn slot(given: Action, stages: usize, microbatches: usize) -> Option<usize> {
    let kind = match given.kind {
        Kind::Forward => 0,
        Kind::Input | Kind::Backward => 1,
        Kind::Weight | Kind::Begin | Kind::Unshard | Kind::Drop | Kind::Reduce | Kind::Optimizer => {
            return None;
        }
    };
    given.microbatch.map(|m| (kind * stages + given.stage) * microbatches + m)
}

/// Runs a table.
///
/// # Errors
/// Where ranks wait for each other, or for what no row has.
///
/// # Panics
/// If a stage of the table has no home or no durations.
pub fn simulate(schedule: &Schedule, durations: &Durations) -> Result<Times, Stuck> {
    let (stages, microbatches) = (schedule.stages(), schedule.microbatches());
    let mut ends = vec![f64::NAN; 2 * stages * microbatches];
    let mut waiting: FxHashMap<usize, Vec<usize>> = FxHashMap::default();
    let mut rows: Vec<Vec<Span>> = schedule.rows.iter().map(|row| Vec::with_capacity(row.len())).collect();
    let mut ready: Vec<usize> = (0..rows.len()).collect();
    while let Some(rank) = ready.pop() {
        while let Some(action) = schedule.rows[rank].get(rows[rank].len()) {
            let mut start = rows[rank].last().map_or(0.0, |s| s.end);
            let mut missing = None;
            for need in action.needs(stages) {
                let Some(slot) = slot(need, stages, microbatches) else { continue };
                let hop = if schedule.homes[need.stage] == rank { 0.0 } else { durations.hop };
                if ends[slot].is_nan() {
                    missing = Some(slot);
                } else {
                    start = start.max(ends[slot] + hop);
                }
            }
            if let Some(slot) = missing {
                waiting.entry(slot).or_default().push(rank);
                break;
            }
            let end = start + durations.stages[action.stage].of(action.kind);
            rows[rank].push(Span { start, end });
            if let Some(slot) = slot(action.gives(), stages, microbatches) {
                ends[slot] = end;
                ready.extend(waiting.remove(&slot).into_iter().flatten());
            }
        }
    }
    let done: Vec<usize> = rows.iter().map(Vec::len).collect();
    if rows.iter().zip(&schedule.rows).all(|(times, row)| times.len() == row.len()) {
        Ok(Times { rows })
    } else {
        Err(stuck::find(schedule, &done))
    }
}
