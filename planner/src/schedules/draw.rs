//! The timeline as text for a terminal: a row a rank, to scale, idle time as dots, in bands of time that fit the width.
//!
//! ```text
//! rank 0 | 0F0 0F1 ........ 0B0     0B1     0O
//! rank 1 | ... 1F0 1B0     1F1 1B1     .... 1O
//! ```
//!
//! It is a schedule file too: [`super::read`] takes what stands here for the table that it shows.

use ir::schedule::Schedule;

use ir::schedule::simulate::Times;

/// How much longer than its labels alone a row may become where the shortest actions are much shorter than others.
const STRETCH: f64 = 4.0;

/// Draws a table that ran at these times, no line longer than `width` columns, or than a rank and one action need.
pub fn draw(schedule: &Schedule, times: &Times, width: usize) -> String {
    let label = schedule.rows.len().saturating_sub(1).to_string().len();
    let head = "rank  | ".len() + label;
    let scale = scale(schedule, times);
    let rows: Vec<Vec<(usize, String)>> =
        (0..schedule.rows.len()).map(|rank| cells(schedule, times, rank, scale)).collect();
    let ends = rows.iter().flatten().map(|(at, text)| at + text.len()).max().unwrap_or(0);
    let longest = rows.iter().flatten().map(|(_, text)| text.len()).max().unwrap_or(1);
    let mut out = String::new();
    let mut from = 0;
    while from < ends {
        let to = band_end(&rows, from, width.saturating_sub(head).max(longest));
        for (rank, row) in rows.iter().enumerate() {
            let mut line = String::new();
            for (at, text) in row.iter().filter(|(at, _)| (from..to).contains(at)) {
                line.extend(std::iter::repeat_n(' ', at - from - line.len()));
                line.push_str(text);
            }
            out.push_str(format!("rank {rank:label$} | {line}").trim_end());
            out.push('\n');
        }
        from = to;
        if from < ends {
            out.push('\n');
        }
    }
    out
}

/// Columns for a unit of time: the shortest action has room for the longest label and a blank, unless that makes the
/// drawing much longer than its labels.
fn scale(schedule: &Schedule, times: &Times) -> f64 {
    let cell = schedule.rows.iter().flatten().map(|a| a.to_string().len() + 1).max().unwrap_or(1) as f64;
    let lengths = times.rows.iter().flatten().map(|s| s.end - s.start).filter(|length| *length > 0.0);
    let shortest = lengths.fold(f64::INFINITY, f64::min);
    let most = schedule.rows.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let fine = (times.makespan() / (STRETCH * most)).max(shortest);
    if fine.is_finite() && fine > 0.0 { cell / fine } else { 1.0 }
}

/// What stands in a row, at which column: actions, and dots where the rank idles. A label that lies under the one before
/// moves to the right.
fn cells(schedule: &Schedule, times: &Times, rank: usize, scale: f64) -> Vec<(usize, String)> {
    let mut cells: Vec<(usize, String)> = Vec::new();
    let (mut free, mut ended) = (0, 0.0);
    for (action, span) in schedule.rows[rank].iter().zip(&times.rows[rank]) {
        let column = |time: f64| (time * scale).round() as usize;
        let at = column(span.start).max(free);
        let idle = column(ended).max(free);
        if span.start > ended {
            // One by one, so that a band may end between them.
            cells.extend((idle..at.saturating_sub(1)).map(|dot| (dot, ".".to_string())));
        }
        let text = action.to_string();
        free = at + text.len() + 1;
        ended = span.end;
        cells.push((at, text));
    }
    cells
}

/// Where a band ends that starts at a column: the last column before which every text begun has its room.
fn band_end(rows: &[Vec<(usize, String)>], from: usize, room: usize) -> usize {
    let over =
        |(at, text): &&(usize, String)| *at < from + room && at + text.len() > from + room && *at > from;
    rows.iter().flatten().filter(over).map(|(at, _)| *at).min().unwrap_or(from + room)
}
