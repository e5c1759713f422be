//! A plan file: the sharded graph and the program as text, so that it can be read, edited, checked and run later.

use ir::program::Program;
use ir::{ParseError, ShardedGraph, parse_program, parse_sharded};

/// The first line of a plan file.
pub const HEAD: &str = "meshc plan 1";

/// A line behind the first that says that micro-batches end in rows that do not count.
pub const FILLED: &str = "; filled up";

/// What stands between the sharded graph and the program.
const RULE: &str = "----";

/// A plan file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// Another kind of file.
    #[error("this is no plan file: one starts with `{HEAD}`")]
    Head,
    /// The two parts are not there.
    #[error("a plan file has a sharded graph, a line `{RULE}`, and a program; this one lacks the line")]
    Parts,
    /// A line that cannot be read.
    #[error(transparent)]
    Parse(ParseError),
}

/// The text of a plan file.
pub fn write(sharded: &ShardedGraph, program: &Program) -> String {
    format!("{HEAD}\n{sharded}{RULE}\n{program}")
}

/// The same of a plan whose micro-batches end in rows that do not count.
pub fn write_filled(sharded: &ShardedGraph, program: &Program) -> String {
    write(sharded, program).replacen('\n', &format!("\n{FILLED}\n"), 1)
}

/// Reads a plan file.
///
/// # Errors
/// What is wrong with it, with its line.
pub fn read(text: &str) -> Result<(ShardedGraph, Program), PlanFileError> {
    let mut lines = text.lines();
    if lines.next().map(str::trim) != Some(HEAD) {
        return Err(PlanFileError::Head);
    }
    let at = text.lines().position(|l| l.trim() == RULE).ok_or(PlanFileError::Parts)?;
    // Line numbers stay those of the file: what is before a part is left blank.
    let part = |from: usize, to: usize| -> String {
        let keep = |(i, line): (usize, &'_ str)| {
            if (from..to).contains(&i) { format!("{line}\n") } else { "\n".into() }
        };
        text.lines().enumerate().map(keep).collect()
    };
    let sharded = parse_sharded(&part(1, at)).map_err(PlanFileError::Parse)?;
    let program = parse_program(&part(at + 1, usize::MAX)).map_err(PlanFileError::Parse)?;
    Ok((sharded, program))
}
