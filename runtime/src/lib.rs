//! Programs executed: the CPU backend, `lockstep`, data and files. Knows no pass and no price.

pub mod checkpoint;
pub mod cpu;
pub mod data;
pub mod draw;
pub mod eval;
pub mod files;
pub mod local;
pub mod lockstep;
pub mod pairs;
pub mod tensor;
