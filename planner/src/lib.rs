//! Decisions and prices: where things lie, what a program costs, and the plan that is printed.

pub mod buckets;
pub mod check;
pub mod choose;
pub mod cluster;
pub mod conventions;
pub mod cost;
pub mod even;
pub mod explain;
pub mod hang;
pub mod names;
pub mod numeric;
pub mod plan;
pub mod planfile;
pub mod render;
pub mod rules;
pub mod schedules;
pub mod stages;
pub mod timeline;
pub mod units;
pub mod zero;
