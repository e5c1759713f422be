//! What a person sees of a long run: a bar on a terminal, plain lines elsewhere, nothing if quiet.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::commands::print;
use crate::failure::Failure;

/// About how many plain lines a run prints.
const LINES: usize = 40;

/// The numbers of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) step: usize,
    pub(crate) loss: f32,
    pub(crate) tokens_per_second: f64,
}

/// The progress of a run of `steps`, of which the first ones may be done.
pub(crate) struct Progress {
    steps: usize,
    first: usize,
    bar: Option<ProgressBar>,
    quiet: bool,
    start: Instant,
}

impl Progress {
    pub(crate) fn new(steps: usize, first: usize, quiet: bool) -> Progress {
        let terminal = std::io::stdout().is_terminal() && !quiet;
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stdout());
            let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  {eta} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { steps, first, bar, quiet, start: Instant::now() }
    }

    pub(crate) fn row(&self, row: Row) -> Result<(), Failure> {
        let text = format!("loss {:.4}  {:.0} tokens/s", row.loss, row.tokens_per_second);
        if let Some(bar) = &self.bar {
            bar.set_message(text);
            bar.set_position(row.step as u64 + 1);
            return Ok(());
        }
        let every = self.steps.div_ceil(LINES).max(1);
        if self.quiet || !(row.step.is_multiple_of(every) || row.step + 1 == self.steps) {
            return Ok(());
        }
        let done = row.step + 1;
        let each = self.start.elapsed().as_secs_f64() / done.saturating_sub(self.first).max(1) as f64;
        let left = each * (self.steps - done) as f64;
        print(&format!("step {:>5}/{}  {text}  {left:.0} s left\n", row.step, self.steps))
    }

    pub(crate) fn finish(&self) {
        self.bar.iter().for_each(ProgressBar::finish);
    }
}
