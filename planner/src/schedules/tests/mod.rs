//! Schedules against what is published of them, against tables of others, and over many sizes.

mod faults;
mod figures;
mod paper;
mod pictures;
mod pytorch;
mod sizes;

use ir::schedule::Schedule;

use super::named;
use super::refused::{Refused, Size};

fn size(stages: usize, microbatches: usize, virtuals: usize) -> Size {
    Size { stages, virtuals, microbatches, group: None }
}

fn made(kind: &str, size: &Size) -> Result<Schedule, Refused> {
    let kind = named(kind).unwrap_or_else(|| panic!("no schedule {kind}"));
    (kind.table)(size)
}

/// The table of a kind for P, M, L.
#[track_caller]
fn table(kind: &str, stages: usize, microbatches: usize, virtuals: usize) -> Schedule {
    made(kind, &size(stages, microbatches, virtuals)).unwrap_or_else(|e| panic!("{kind}: {e}"))
}
