//! A table that a person wrote, `--schedule FILE`: a line a rank, in order, each with its actions.
//!
//! ```text
//! ; two ranks, two micro-batches
//! 0F0 0F1 0B0 0B1 0O
//! 1F0 1B0 1F1 1B1 1O
//! ```
//!
//! What [`super::draw`] prints is read too: a line may begin with its rank, `rank 1 |`; lines of one rank are joined, and
//! dots, which are idle time, are passed over. A row without an optimizer gets that of its stages at its end.

use ir::schedule::{Action, Kind, Schedule};

use super::check::{Fault, check};

/// Why a file is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Something that is no action, or a rank out of order.
    #[error("{file}:{line}: {what}")]
    Line {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// Lines that make no table.
    #[error("{file}: {what}")]
    Rows {
        /// The file.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// A table that is not right.
    #[error("{file}: the schedule is not right:{}", listed(faults))]
    Faults {
        /// The file.
        file: String,
        /// All that is wrong.
        faults: Vec<Fault>,
    },
}

/// How many faults an error shows.
const SHOWN: usize = 20;

fn listed(faults: &[Fault]) -> String {
    let mut out: String = faults.iter().take(SHOWN).map(|fault| format!("\n  {fault}")).collect();
    if faults.len() > SHOWN {
        out.push_str(&format!("\n  and {} more", faults.len() - SHOWN));
    }
    out
}

/// Reads a table and checks it. `file` is what errors call it.
///
/// # Errors
/// What is wrong in it, with the line if one is to blame.
pub fn read(text: &str, file: &str) -> Result<Schedule, ReadError> {
    let mut rows: Vec<Vec<Action>> = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let wrong = |what| ReadError::Line { file: file.to_string(), line: i + 1, what };
        let line = line.split(';').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let (rank, actions) = labelled(line, rows.len()).map_err(wrong)?;
        if rank == rows.len() {
            rows.push(Vec::new());
        }
        let tokens = actions.split_whitespace().filter(|token| token.contains(|c| c != '.'));
        for token in tokens {
            rows[rank].push(token.parse().map_err(wrong)?);
        }
    }
    let bad = |what| ReadError::Rows { file: file.to_string(), what };
    if rows.is_empty() {
        return Err(bad("there is no row: a line for each rank, such as `0F0 0B0 0O`".to_string()));
    }
    let mut schedule = Schedule::of_rows(rows).map_err(bad)?;
    for rank in 0..schedule.rows.len() {
        if schedule.rows[rank].iter().all(|a| a.kind != Kind::Optimizer) {
            let ends: Vec<Action> = schedule.stages_of(rank).map(Action::optimizer).collect();
            schedule.rows[rank].extend(ends);
        }
    }
    check(&schedule).map_err(|faults| ReadError::Faults { file: file.to_string(), faults })?;
    Ok(schedule)
}

/// The rank of a line and what stands behind it. A line without a rank is the next one.
fn labelled(line: &str, next: usize) -> Result<(usize, &str), String> {
    let Some((label, actions)) = line.split_once('|') else { return Ok((next, line)) };
    let rank = label.trim().strip_prefix("rank").and_then(|n| n.trim().parse::<usize>().ok());
    match rank {
        Some(rank) if rank <= next => Ok((rank, actions)),
        Some(rank) => Err(format!("rank {rank} comes before rank {next}: ranks stand in order")),
        None => Err(format!("`{}` names no rank: before `|` one reads `rank 0`", label.trim())),
    }
}
