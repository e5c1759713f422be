//! That a program ends on all ranks is proved before it runs: small programs whose order is wrong, every schedule, and
//! programs that were changed.

mod schedules;
