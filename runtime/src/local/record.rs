//! When a step did what, for those who ask: for each rank the times of its calls, and of what it waited for.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A call of a rank, or a wait in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Which call of the rank's stage.
    pub call: usize,
    /// Which instruction of its segment waits; none for the call itself.
    pub wait: Option<usize>,
    /// Seconds from the start of the step.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// Takes the times of one step.
pub struct Recorder {
    began: Instant,
    ranks: Vec<Mutex<Vec<Mark>>>,
}

impl Recorder {
    /// From now on, for so many ranks.
    pub fn new(ranks: usize) -> Recorder {
        Recorder { began: Instant::now(), ranks: (0..ranks).map(|_| Mutex::default()).collect() }
    }

    /// Seconds since the start.
    pub fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Notes a mark of a rank.
    pub fn note(&self, rank: usize, mark: Mark) {
        self.ranks[rank].lock().unwrap_or_else(PoisonError::into_inner).push(mark);
    }

    /// The marks of each rank, in order.
    pub fn finish(self) -> Vec<Vec<Mark>> {
        self.ranks
            .into_iter()
            .map(|marks| marks.into_inner().unwrap_or_else(PoisonError::into_inner))
            .collect()
    }
}
