//! Looping, breadth-first: L stages a rank in loop order; all micro-batches run through a rank's first stage, then through its
//! second, and so on, and backward against it. A stage's gradients are done early, one stage after the other.
//!
//! Runs for every M and L. With M < P a value that left the last rank is not yet back when the first rank is done with the
//! stage before: its forward waits, P - M slots a turn. With L = 1 it is GPipe. Makespan (M + (P - 1) / L)(F + B) where
//! M >= P; M micro-batches are in flight. Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.

use ir::schedule::Schedule;

use super::looped;
use super::refused::{Refused, Size};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.some()?;
    size.ungrouped("looping", "takes all micro-batches as one group")?;
    Ok(looped::table(size, size.microbatches))
}
