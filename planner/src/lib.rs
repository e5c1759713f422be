//! Decisions and prices: where things lie, what a program costs, and the plan that is printed.

pub mod conventions;
