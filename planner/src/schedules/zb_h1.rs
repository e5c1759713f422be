//! ZB-H1: the backward split, with the activations of 1F1B: at most P micro-batches whose weight gradient is to come.
//!
//! Makespan M (F + I + W) + (P - 1)(F + I - W) where M >= P. Source: arXiv 2401.10241, section 2.

use ir::schedule::Schedule;

use super::refused::{Refused, Size};
use super::zero_bubble;

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.one_stage_a_rank("zb-h1", "")?;
    Ok(zero_bubble::table(size, 1))
}
