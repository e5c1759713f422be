//! Why a table does not run to its end: the shortest cycle of ranks that wait for each other, or an action that is nowhere.

use std::collections::VecDeque;
use std::fmt;

use crate::schedule::{Action, Schedule};

/// A rank that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The rank.
    pub rank: usize,
    /// The action at which it stands.
    pub at: Action,
    /// What it needs first, as the table has it.
    pub needs: Action,
}

/// Why a table does not run to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Each rank waits for an action that the next one does later in its row; the last one's next is the first.
    Cycle(Vec<Wait>),
    /// The action is in no row.
    Nowhere(Wait),
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} stands at {}, which needs {}", self.rank, self.at, self.needs)
    }
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stuck::Cycle(waits) => {
                write!(f, "ranks wait for each other: ")?;
                for (i, wait) in waits.iter().enumerate() {
                    let next = &waits[(i + 1) % waits.len()];
                    let end = if i + 1 < waits.len() { "; " } else { "" };
                    write!(f, "{wait}, after {} of rank {}{end}", next.at, next.rank)?;
                }
                Ok(())
            }
            Stuck::Nowhere(wait) => write!(f, "{wait}, and no row has it"),
        }
    }
}

/// The reason, where rank r has done the first `done[r]` actions of its row and none can go on.
pub(super) fn find(schedule: &Schedule, done: &[usize]) -> Stuck {
    let waits: Vec<(Wait, Option<usize>)> =
        (0..done.len()).flat_map(|rank| waits_of(schedule, done, rank)).collect();
    if let Some((wait, _)) = waits.iter().find(|(_, on)| on.is_none()) {
        return Stuck::Nowhere(*wait);
    }
    let cycles = (0..done.len()).filter_map(|rank| cycle(&waits, rank));
    Stuck::Cycle(cycles.min_by_key(Vec::len).unwrap_or_default())
}

/// For what a rank waits, each with the rank that has it yet to do.
fn waits_of(schedule: &Schedule, done: &[usize], rank: usize) -> Vec<(Wait, Option<usize>)> {
    let Some(at) = schedule.rows[rank].get(done[rank]) else { return Vec::new() };
    let ranks = 0..schedule.rows.len();
    let mut waits = Vec::new();
    for need in at.needs(schedule.stages()) {
        let is = |action: &&Action| action.gives() == need;
        if ranks.clone().any(|r| schedule.rows[r][..done[r]].iter().any(|a| is(&a))) {
            continue;
        }
        let found = ranks.clone().find_map(|r| Some((r, *schedule.rows[r][done[r]..].iter().find(is)?)));
        let needs = found.map_or(need, |(_, action)| action);
        waits.push((Wait { rank, at: *at, needs }, found.map(|(r, _)| r)));
    }
    waits
}

/// The shortest cycle through a rank, if it is on one.
fn cycle(waits: &[(Wait, Option<usize>)], start: usize) -> Option<Vec<Wait>> {
    let mut paths = VecDeque::from([vec![]]);
    let mut seen = Vec::new();
    while let Some(path) = paths.pop_front() {
        let at = path.last().map_or(Some(start), |(_, on): &(Wait, Option<usize>)| *on)?;
        for wait in waits.iter().filter(|(wait, _)| wait.rank == at) {
            let longer: Vec<_> = path.iter().copied().chain([*wait]).collect();
            if wait.1 == Some(start) {
                return Some(longer.into_iter().map(|(wait, _)| wait).collect());
            }
            if wait.1.is_some_and(|on| !seen.contains(&on)) {
                seen.extend(wait.1);
                paths.push_back(longer);
            }
        }
    }
    None
}
