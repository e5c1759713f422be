//! Decisions and prices: where things lie, what a program costs, and the plan that is printed.

pub mod cluster;
pub mod conventions;
pub mod cost;
pub mod names;
pub mod plan;
pub mod render;
pub mod units;
