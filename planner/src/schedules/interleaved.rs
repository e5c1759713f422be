//! Interleaved 1F1B: L stages a rank in loop order, depth-first: groups of N = P micro-batches run through a rank's stages,
//! and forwards and backwards take turns. `--group N` makes larger groups, up to M, which is breadth-first.
//!
//! Runs for every M and L: [`super::looped`] has the remainder rule. With L = 1 it is 1F1B. Makespan
//! (M + (P - 1) / L)(F + B) where M is a multiple of P; P (1 + (P - 1) / (P L)) micro-batches are in flight on rank 0.
//! Sources: Narayanan et al., arXiv 2104.04473, section 2.2.2; Korthikanti et al., arXiv 2205.05198, section 4.2.3.

use ir::schedule::Schedule;

use super::refused::{Refused, Size};
use super::{looped, one_f_one_b};

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.some()?;
    if size.virtuals == 1 {
        size.ungrouped("interleaved with --virtual 1", "has one stage a rank to run a group through")?;
        return one_f_one_b::table(size);
    }
    looped::fits(size)?;
    Ok(looped::table(size, size.group.unwrap_or(size.stages)))
}
