//! What the tests share: oracles, random numbers, what a step leaves behind, and whether a sharded graph means what its
//! graph means.

pub mod backend;
pub mod chain;
pub mod llama;
pub mod meaning;
pub mod oracle;
pub mod peers;
pub mod random;
pub mod spread;
pub mod tables;
pub mod traffic;
pub mod whole;
