//! Whether a table is right: each stage does every micro-batch once, on its row, in an order that can be run, and then its
//! optimizer. All that is broken is named, not the first.

use ir::schedule::{Action, Kind, Schedule};
use rustc_hash::FxHashMap;

use ir::schedule::simulate::{Durations, Work, simulate};
use ir::schedule::stuck::Stuck;

/// What is wrong in a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Numbers of micro-batches with gaps.
    #[error(
        "micro-batch {last} is the last, but the table has no more than {actions} actions; the first is 0"
    )]
    Gaps {
        /// The largest number.
        last: usize,
        /// How many actions there are.
        actions: usize,
    },
    /// Rows with unequal numbers of stages.
    #[error("rank {rank} has {stages} stages, but rank 0 has {first}; every rank needs as many")]
    Uneven {
        /// The rank.
        rank: usize,
        /// Its stages.
        stages: usize,
        /// Those of rank 0.
        first: usize,
    },
    /// What no table has: lowering puts it first.
    #[error("{action} on rank {rank} stands in no table: it is done once, before everything")]
    Begin {
        /// The action.
        action: Action,
        /// Where.
        rank: usize,
    },
    /// An action that is not there.
    #[error("stage {}{}: {action} is missing, and belongs to rank {rank}", action.stage, of(action))]
    Missing {
        /// What should be there; a whole backward stands for its halves.
        action: Action,
        /// Where.
        rank: usize,
    },
    /// An action that is there several times.
    #[error("stage {}{}: {action} is done {times} times", action.stage, of(action))]
    Again {
        /// The action.
        action: Action,
        /// How often.
        times: usize,
    },
    /// A backward both whole and split.
    #[error("stage {}{}: {half} is part of {whole}, which is done too", half.stage, of(half))]
    Both {
        /// The whole one.
        whole: Action,
        /// The half.
        half: Action,
    },
    /// An action on a rank that does not have its stage.
    #[error("stage {}{}: {action} is on rank {rank}, but its stage lives on rank {home}", action.stage, of(action))]
    Elsewhere {
        /// The action.
        action: Action,
        /// Where it is.
        rank: usize,
        /// Where it belongs.
        home: usize,
    },
    /// An action before what it needs, on one row.
    #[error("stage {}{}: {action} comes before {needs}, which it needs", action.stage, of(action))]
    Early {
        /// The action.
        action: Action,
        /// What should come first.
        needs: Action,
    },
    /// An action after the optimizer of its rank.
    #[error("stage {}{}: {action} comes after {optimizer}, and the optimizer is last", action.stage, of(action))]
    Late {
        /// The action.
        action: Action,
        /// The optimizer before it.
        optimizer: Action,
    },
    /// Every row is right by itself, but they do not run together.
    #[error("{0}")]
    Stuck(Stuck),
}

/// After so many faults no more missing actions are listed: a file that is no table may lack one for every pair of stage and
/// micro-batch that it names.
const MANY: usize = 100;

fn of(action: &Action) -> String {
    action.microbatch.map_or(String::new(), |m| format!(", micro-batch {m}"))
}

/// Checks a table.
///
/// # Errors
/// All that is wrong: what is wrong row by row, or, if nothing is, why the rows do not run together.
pub fn check(schedule: &Schedule) -> Result<(), Vec<Fault>> {
    let actions = schedule.rows.iter().map(Vec::len).sum();
    if schedule.microbatches() > actions {
        return Err(vec![Fault::Gaps { last: schedule.microbatches() - 1, actions }]);
    }
    let mut faults: Vec<Fault> = uneven(schedule).into_iter().chain(counts(schedule)).collect();
    for rank in 0..schedule.rows.len() {
        faults.extend(row(schedule, rank));
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let even = Durations::even(Work::default(), schedule.stages(), 0.0);
    simulate(schedule, &even).map(|_| ()).map_err(|stuck| vec![Fault::Stuck(stuck)])
}

fn uneven(schedule: &Schedule) -> Vec<Fault> {
    let first = schedule.stages_of(0).count();
    let counts = (0..schedule.rows.len()).map(|rank| (rank, schedule.stages_of(rank).count()));
    let uneven = counts.filter(|(_, stages)| *stages != first);
    uneven.map(|(rank, stages)| Fault::Uneven { rank, stages, first }).collect()
}

/// What is missing, doubled, or both whole and split.
fn counts(schedule: &Schedule) -> Vec<Fault> {
    let microbatches = schedule.microbatches();
    let mut times: FxHashMap<Action, usize> = FxHashMap::default();
    for action in schedule.rows.iter().flatten() {
        *times.entry(*action).or_default() += 1;
    }
    let repeatable = |kind| matches!(kind, Kind::Unshard | Kind::Drop);
    let again = times.iter().filter(|(action, n)| **n > 1 && !repeatable(action.kind));
    let mut again: Vec<(Action, usize)> = again.map(|(action, n)| (*action, *n)).collect();
    again.sort_unstable();
    let mut faults: Vec<Fault> =
        again.into_iter().map(|(action, times)| Fault::Again { action, times }).collect();
    for (stage, rank) in schedule.homes.iter().enumerate() {
        if faults.len() > MANY {
            break;
        }
        let mut needed = vec![Action::optimizer(stage)];
        for m in 0..microbatches {
            let [whole, input, weight] =
                [Kind::Backward, Kind::Input, Kind::Weight].map(|k| Action::new(stage, k, m));
            let halves = [input, weight].into_iter().filter(|half| times.contains_key(half));
            if times.contains_key(&whole) {
                faults.extend(halves.map(|half| Fault::Both { whole, half }));
            } else if halves.count() == 0 {
                needed.push(whole);
            } else {
                needed.extend([input, weight]);
            }
            needed.push(Action::new(stage, Kind::Forward, m));
        }
        let missing = needed.into_iter().filter(|action| !times.contains_key(action));
        faults.extend(missing.map(|action| Fault::Missing { action, rank: *rank }));
    }
    faults
}

/// What is wrong in a row.
fn row(schedule: &Schedule, rank: usize) -> Vec<Fault> {
    let row = &schedule.rows[rank];
    let mut first: FxHashMap<Action, usize> = FxHashMap::default();
    for (at, action) in row.iter().enumerate() {
        first.entry(action.gives()).or_insert(at);
    }
    let mut faults = Vec::new();
    let mut optimizer: Option<Action> = None;
    for (at, action) in row.iter().enumerate() {
        let home = schedule.homes[action.stage];
        if home != rank {
            faults.push(Fault::Elsewhere { action: *action, rank, home });
        }
        if action.kind == Kind::Begin {
            faults.push(Fault::Begin { action: *action, rank });
        }
        let later = action.needs(schedule.stages()).filter_map(|need| first.get(&need).filter(|n| **n > at));
        faults.extend(later.map(|n| Fault::Early { action: *action, needs: row[*n] }));
        match optimizer {
            Some(optimizer) if action.kind != Kind::Optimizer => {
                faults.push(Fault::Late { action: *action, optimizer });
            }
            Some(_) | None => {}
        }
        if action.kind == Kind::Optimizer {
            optimizer = Some(*action);
        }
    }
    faults
}
