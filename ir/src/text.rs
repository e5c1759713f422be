//! The text form: what `Display` writes of a graph, a sharded graph or a program, the parsers here read back to an equal
//! one. `;` starts a comment.

mod graph;
mod kernel;
mod program;
mod scan;
mod tables;

pub use graph::{parse_graph, parse_sharded};
pub use program::parse_program;

/// A line that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Which line, counted from 1.
    pub line: usize,
    /// What was expected there.
    pub message: String,
}

/// A line without its comment. A `;` inside a quoted name starts none.
fn code(line: &str) -> &str {
    let mut quoted = false;
    let mut escaped = false;
    for (i, c) in line.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ';' if !quoted => return line[..i].trim_end(),
            _ => {}
        }
    }
    line.trim_end()
}
