//! GPipe: all forwards, then all backwards. Runs for every M >= 1, one stage a rank; M micro-batches are in flight.
//!
//! Makespan (M + P - 1)(F + B). Source: Huang et al., GPipe, arXiv 1811.06965, section 2.3.

use ir::schedule::{Action, Kind, Schedule, loop_order};

use super::finished;
use super::refused::{Refused, Size};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.one_stage_a_rank("gpipe", "; looping is its order over several")?;
    let all = |stage, kind| (0..size.microbatches).map(move |m| Action::new(stage, kind, m));
    let row = |stage| all(stage, Kind::Forward).chain(all(stage, Kind::Backward)).collect();
    Ok(finished((0..size.stages).map(row).collect(), loop_order(size.stages, 1)))
}
