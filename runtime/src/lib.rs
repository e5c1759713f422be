//! Programs executed: the CPU backend, `lockstep`, data and files. Knows no pass and no price.

pub mod data;
pub mod files;
