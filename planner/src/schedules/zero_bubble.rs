//! The two schedules by hand of Zero Bubble (Qi et al., arXiv 2401.10241, section 2): 1F1B whose backward is split, so
//! that weight gradients, for which nobody waits, fill what was idle.
//!
//! Rank s warms up with `ahead` (P - 1 - s) forwards and puts its weight gradients off by `ahead` s micro-batches: with 1
//! activations stay those of 1F1B (ZB-H1), with 2 the warm-up fills the pipe twice and no rank idles between its first
//! and its last action (ZB-H2). Run for every M >= 1, one stage a rank.

use ir::schedule::{Action, Kind, Schedule, loop_order};

use super::finished;
use super::refused::Size;

/// The table.
pub(super) fn table(size: &Size, ahead: usize) -> Schedule {
    let row = |stage| row(size, stage, ahead);
    finished((0..size.stages).map(row).collect(), loop_order(size.stages, 1))
}

fn row(size: &Size, stage: usize, ahead: usize) -> Vec<Action> {
    let all = |kind| (0..size.microbatches).map(move |m| Action::new(stage, kind, m));
    let (mut forwards, mut weights) = (all(Kind::Forward), all(Kind::Weight));
    let mut row: Vec<Action> = forwards.by_ref().take(ahead * (size.stages - 1 - stage)).collect();
    for (m, input) in all(Kind::Input).enumerate() {
        row.extend(forwards.next());
        row.push(input);
        if m >= ahead * stage {
            row.extend(weights.next());
        }
    }
    row.extend(weights);
    row
}
