//! ZB-V: two stages a rank in a V, the backward split, and no more than P micro-batches in flight on any rank.
//!
//! Rank s holds stage s, *down*, and stage 2 P - 1 - s, *up*. The order is made for as many micro-batches as fill the V,
//! 2 P - 1, and what is beyond M is left out; so it runs for every M >= 1. Source: Qi et al., Zero Bubble
//! Pipeline Parallelism, arXiv 2401.10241, section 6, in the order of PyTorch's ScheduleZBVZeroBubble; made for stages
//! whose F, I and W take equal times.

use ir::schedule::{Action, Kind, Schedule, v_order};

use super::finished;
use super::refused::{Refused, Size};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.two_stages_in_a_v("zb-v")?;
    Ok(finished((0..size.stages).map(|rank| row(size, rank)).collect(), v_order(size.stages, 2)))
}

fn row(size: &Size, rank: usize) -> Vec<Action> {
    let stages = size.stages;
    let filled = size.microbatches.max(2 * stages - 1);
    let (down, up) = (rank, 2 * stages - 1 - rank);
    let all = |stage, kind| (0..filled).map(move |m| Action::new(stage, kind, m));
    let (mut f0, mut f1) = (all(down, Kind::Forward), all(up, Kind::Forward));
    let (mut i0, mut i1) = (all(down, Kind::Input), all(up, Kind::Input));
    let (mut w0, mut w1) = (all(down, Kind::Weight), all(up, Kind::Weight));
    let mut row: Vec<Action> = f0.by_ref().take(2 * (stages - rank) - 1).collect();
    for _ in 0..rank {
        row.extend(f1.next().into_iter().chain(f0.next()));
    }
    for _ in rank..stages {
        row.extend([&mut f1, &mut i1].into_iter().filter_map(Iterator::next));
        row.extend(w1.next());
    }
    while f1.len() > 0 {
        row.extend(f0.next().into_iter().chain(i0.next()).chain(w0.next()));
        row.extend(f1.next().into_iter().chain(i1.next()).chain(w1.next()));
    }
    for _ in 0..rank {
        row.extend(i0.next().into_iter().chain(i1.next()));
    }
    for _ in rank..stages {
        row.extend(i0.next().into_iter().chain(w0.next()));
    }
    row.extend(w1.chain(w0));
    row.retain(|action| action.microbatch.is_some_and(|m| m < size.microbatches));
    row
}
