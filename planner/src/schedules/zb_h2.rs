//! ZB-H2: the backward split and the pipe filled twice: at most 2 P - 1 micro-batches in flight.
//!
//! The longest span of a rank is M (F + I + W) + (P - 1)(F + I - 2 W) where M >= 2 P - 1: ranks start and end askew.
//! Source: arXiv 2401.10241, section 2.

use ir::schedule::Schedule;

use super::refused::{Refused, Size};
use super::zero_bubble;

/// The table.
pub(super) fn table(size: &Size) -> Result<Schedule, Refused> {
    size.one_stage_a_rank("zb-h2", "")?;
    Ok(zero_bubble::table(size, 2))
}
