//! Tests over tables: every op in pieces, every pair of shardings, every gradient, the optimizer against plain code, whole
//! steps on any mesh; and planted faults, each of which one of these must find.

mod faults;
mod gradients;
mod moves;
mod optimizer;
mod signatures;
mod whole_steps;
