//! Pipeline schedules as tables: made by kind, read from a file, checked, simulated, measured and drawn. Plain functions on
//! [`ir::schedule::Schedule`]; nothing here knows what an action computes or sends.
//!
//! What is true of every table made here:
//! - a stage does its forwards, and its backwards, in the order of micro-batches, so that every kind adds up gradients in
//!   the same order and gives the same sums;
//! - a row ends with the optimizer of each of its stages;
//! - an action waits for what it needs ([`ir::schedule::Action::needs`]). Where few micro-batches run round a loop, those
//!   waits are the idle time of the simulation, and nothing is read before it has come: no kind has a least M.

pub mod check;
pub mod draw;
mod dualpipe_v;
pub mod figures;
mod gpipe;
mod interleaved;
mod looped;
mod looping;
mod one_f_one_b;
pub mod read;
pub mod refused;
#[cfg(test)]
mod tests;
mod zb_h1;
mod zb_h2;
mod zb_v;
mod zero_bubble;

use ir::schedule::{Action, Schedule};

use refused::{Refused, Size};

/// A kind of schedule.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    /// What `--schedule` calls it.
    pub name: &'static str,
    /// L where the user names none.
    pub virtuals: usize,
    /// The table for a size, or why there is none.
    pub table: fn(&Size) -> Result<Schedule, Refused>,
}

/// Every kind.
pub const SCHEDULES: &[Named] = &[
    Named { name: "gpipe", virtuals: 1, table: gpipe::table },
    Named { name: "1f1b", virtuals: 1, table: one_f_one_b::table },
    Named { name: "interleaved", virtuals: 2, table: interleaved::table },
    Named { name: "looping", virtuals: 2, table: looping::table },
    Named { name: "zb-h1", virtuals: 1, table: zb_h1::table },
    Named { name: "zb-h2", virtuals: 1, table: zb_h2::table },
    Named { name: "zb-v", virtuals: 2, table: zb_v::table },
    Named { name: "dualpipe-v", virtuals: 2, table: dualpipe_v::table },
];

/// The kind of a name.
pub fn named(name: &str) -> Option<&'static Named> {
    SCHEDULES.iter().find(|s| s.name == name)
}

/// What a table is called: the kind that makes it, the usual one if several do, or `table`.
pub fn name_of(schedule: &Schedule) -> &'static str {
    let stages = schedule.rows.len();
    let virtuals = schedule.stages() / stages.max(1);
    let size = Size { stages, virtuals, microbatches: schedule.microbatches(), group: None };
    let makes = |kind: &&Named| (kind.table)(&size).is_ok_and(|table| table == *schedule);
    let usual = SCHEDULES.iter().filter(|s| s.name == "1f1b").chain(SCHEDULES);
    usual.into_iter().find(makes).map_or("table", |kind| kind.name)
}

/// Rows with the optimizer of each of their stages at the end.
fn finished(rows: Vec<Vec<Action>>, homes: Vec<usize>) -> Schedule {
    let mut schedule = Schedule { rows, homes };
    for row in 0..schedule.rows.len() {
        let ends: Vec<Action> = schedule.stages_of(row).map(Action::optimizer).collect();
        schedule.rows[row].extend(ends);
    }
    schedule
}
