//! One file a command.

pub(crate) mod bench;
pub(crate) mod bench_checkpoint;
pub(crate) mod bench_collectives;
pub(crate) mod check;
pub(crate) mod data;
pub(crate) mod export;
pub(crate) mod plan;
pub(crate) mod show;
pub(crate) mod trace;
pub(crate) mod train;

use std::io::Write;
use std::path::Path;

use planner::timeline::trace::Trace;
use runtime::files::save::write_text;

use crate::failure::Failure;

/// Prints to standard output. A reader that has gone away is no fault.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Write(format!("cannot write to standard output: {e}")))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a timeline for a trace viewer.
fn write_trace(path: &Path, trace: &Trace) -> Result<(), Failure> {
    let text = serde_json::to_string(trace).map_err(|e| Failure::Run(e.to_string()))?;
    write_text(path, &text).map_err(|e| Failure::Write(e.to_string()))
}
