//! That a program ends on all ranks is proved before it runs: small programs whose order is wrong, situations in which
//! others hung, every schedule, and programs that were changed.

mod cases;
mod models;
mod mutants;
mod mutations;
mod orders;
mod ranks;
mod schedules;
mod sums;
