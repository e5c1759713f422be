//! What the tests share: oracles, random numbers, and whether a sharded graph means what its graph means.

pub mod meaning;
pub mod oracle;
pub mod random;
pub mod whole;
