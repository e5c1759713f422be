//! DualPipe-V: two stages a rank in a V; a forward of one stage stands beside a whole backward of the other, so that the
//! communication of each can run under the other's computing; only where ranks would idle is the backward split.
//!
//! Rank s holds stage s, *down*, and stage 2 P - 1 - s, *up*. The order is made for at least 2 P micro-batches, and what is
//! beyond M is left out; so it runs for every M >= 1. At most P + 1/2 micro-batches are in flight. Source: DeepSeek's
//! DualPipe, github.com/deepseek-ai/DualPipe, dualpipev.py, whose eight steps are those below; each pair that it runs
//! at once stands here as forward, then backward.

use std::collections::VecDeque;

use ir::schedule::{Action, Kind, Schedule, v_order};

use super::finished;
use super::refused::{Refused, Size};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.two_stages_in_a_v("dualpipe-v")?;
    Ok(finished((0..size.stages).map(|rank| row(size, rank)).collect(), v_order(size.stages, 2)))
}

/// A row as it grows.
struct Row {
    /// The rank's two stages: down, up.
    stages: [usize; 2],
    /// How many forwards and backwards of each are done.
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Weight gradients that are put off, oldest first.
    weights: VecDeque<Action>,
    actions: Vec<Action>,
}

impl Row {
    fn forward(&mut self, which: usize) {
        self.actions.push(Action::new(self.stages[which], Kind::Forward, self.forwards[which]));
        self.forwards[which] += 1;
    }

    fn backward(&mut self, which: usize) {
        self.actions.push(Action::new(self.stages[which], Kind::Backward, self.backwards[which]));
        self.backwards[which] += 1;
    }

    fn input(&mut self, which: usize) {
        let (stage, m) = (self.stages[which], self.backwards[which]);
        self.actions.push(Action::new(stage, Kind::Input, m));
        self.weights.push_back(Action::new(stage, Kind::Weight, m));
        self.backwards[which] += 1;
    }

    fn weight(&mut self) {
        self.actions.extend(self.weights.pop_front());
    }
}

const DOWN: usize = 0;
const UP: usize = 1;

fn row(size: &Size, rank: usize) -> Vec<Action> {
    let filled = size.microbatches.max(2 * size.stages);
    let after = size.stages - 1 - rank;
    let mut row = Row {
        stages: [rank, 2 * size.stages - 1 - rank],
        forwards: [0; 2],
        backwards: [0; 2],
        weights: VecDeque::new(),
        actions: Vec::new(),
    };
    (0..2 * after).for_each(|_| row.forward(DOWN));
    for _ in 0..=rank {
        row.forward(DOWN);
        row.forward(UP);
    }
    for _ in 0..after {
        row.input(UP);
        row.weight();
        row.forward(UP);
    }
    for _ in 0..filled + rank + 1 - 2 * size.stages {
        row.forward(DOWN);
        row.backward(UP);
        row.forward(UP);
        row.backward(DOWN);
    }
    for _ in 0..after {
        row.backward(UP);
        row.forward(UP);
        row.backward(DOWN);
    }
    // Of the last backwards, of both stages by turns, the second half is split.
    for last in 0..2 * (rank + 1) {
        let which = if last % 2 == 0 { UP } else { DOWN };
        if last > rank {
            row.input(which);
        } else {
            row.backward(which);
        }
    }
    for _ in 0..after {
        row.weight();
        row.input(DOWN);
    }
    while !row.weights.is_empty() {
        row.weight();
    }
    row.actions.retain(|action| action.microbatch.is_some_and(|m| m < size.microbatches));
    row.actions
}
