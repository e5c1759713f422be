//! 1F1B: after a warm-up of P - 1 - s forwards on rank s, one forward and one backward by turns. Runs for every M >= 1, one
//! stage a rank; min(P - s, M) micro-batches are in flight.
//!
//! Makespan (M + P - 1)(F + B). Source: Narayanan et al., arXiv 2104.04473, section 2.2.1.

use ir::schedule::{Action, Kind, Schedule, loop_order};

use super::finished;
use super::refused::{Refused, Size};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.one_stage_a_rank("1f1b", "; interleaved is its order over several")?;
    Ok(finished((0..size.stages).map(|s| row(size, s)).collect(), loop_order(size.stages, 1)))
}

fn row(size: &Size, stage: usize) -> Vec<Action> {
    let mut forwards = (0..size.microbatches).map(|m| Action::new(stage, Kind::Forward, m));
    let mut row: Vec<Action> = forwards.by_ref().take(size.stages - 1 - stage).collect();
    for m in 0..size.microbatches {
        row.extend(forwards.next());
        row.push(Action::new(stage, Kind::Backward, m));
    }
    row
}
