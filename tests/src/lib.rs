//! What the tests share: oracles, and graphs of the models that they are about.

pub mod oracle;
