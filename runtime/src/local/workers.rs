//! The workers: threads that stay, each with some ranks, which it runs in turn until each is blocked. The thread that
//! asks for a step is one of them.
//!
//! Whoever has nothing to do spins a little, then lets others run, then sleeps for moments, and looks whether all ranks
//! wait for each other. One error or panic stops all.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::code::Code;
use super::error::RunError;
use super::meet::{Meet, Meeting};
use super::rank::{Desk, Rank, Step, Turn};

/// What the threads share.
pub struct Shared {
    /// What each rank was last seen at: see [`mark`].
    marks: Vec<AtomicU64>,
    failed: AtomicBool,
    error: Mutex<Option<RunError>>,
    gate: Mutex<Gate>,
    opened: Condvar,
    /// The number of the step, for those who look without the lock.
    number: AtomicU64,
    running: AtomicUsize,
    workers: usize,
    /// Whether each worker has a core to itself, so that spinning keeps nobody from working.
    room: bool,
}

struct Gate {
    number: u64,
    job: Job,
    quit: bool,
}

/// The step that is run. Valid from the opening of the gate until no worker runs.
#[derive(Clone, Copy)]
struct Job(*const Step<'static>);

// SAFETY: all that a step leads to is shared safely: code and inputs are only read, cells and counts are atomic, tap
// targets are written one element by one rank.
unsafe impl Send for Job {}

/// Whether so many workers can have a core each.
pub fn have_room(workers: usize) -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| workers <= cores.get())
}

const RUNNING: u64 = 0;
const ENDED: u64 = 1;

/// A blocked rank's meeting as a number. A rank that goes on leaves it there: the meeting is then complete, which tells.
fn mark(at: Meeting) -> u64 {
    ((at.group as u64) << 32 | at.number as u64) + 2
}

fn meeting(mark: u64) -> Meeting {
    let at = mark - 2;
    Meeting { group: (at >> 32) as usize, number: (at & u64::from(u32::MAX)) as usize }
}

/// All workers of a local run.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    mine: Bench,
}

/// A worker's own things.
struct Bench {
    ranks: Vec<Rank>,
    desk: Desk,
    /// Marks as first seen.
    seen: Vec<u64>,
}

impl Workers {
    /// Starts them. The ranks are dealt out in runs of neighbours.
    pub fn start(
        arenas: &[*mut u8],
        code: &Code,
        workers: usize,
        scratch: usize,
    ) -> Result<Workers, RunError> {
        let ranks = arenas.len();
        let workers = workers.clamp(1, ranks);
        let shared = Arc::new(Shared {
            marks: std::iter::repeat_with(AtomicU64::default).take(ranks).collect(),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            gate: Mutex::new(Gate { number: 0, job: Job(std::ptr::null()), quit: false }),
            opened: Condvar::new(),
            number: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            workers,
            room: have_room(workers),
        });
        let bench = |w: usize| Bench {
            ranks: (w * ranks / workers..(w + 1) * ranks / workers)
                .map(|r| Rank::new(r, arenas[r], code))
                .collect(),
            desk: Desk::new(scratch, code.operands),
            seen: vec![0; ranks],
        };
        let mut all = Workers { shared, threads: Vec::new(), mine: bench(0) };
        for w in 1..workers {
            let (shared, mut bench) = (Arc::clone(&all.shared), bench(w));
            let thread = std::thread::Builder::new()
                .name(format!("worker {w}"))
                .spawn(move || shared.serve(&mut bench))
                .map_err(RunError::Thread)?;
            all.threads.push(thread);
        }
        Ok(all)
    }

    /// Runs a step with all workers.
    pub fn step(&mut self, step: &Step) -> Result<(), RunError> {
        let shared = &self.shared;
        shared.marks.iter().for_each(|m| m.store(RUNNING, Ordering::Relaxed));
        shared.failed.store(false, Ordering::Relaxed);
        shared.running.store(self.threads.len(), Ordering::Relaxed);
        if !self.threads.is_empty() {
            let mut gate = shared.gate.lock().unwrap_or_else(PoisonError::into_inner);
            gate.number += 1;
            gate.job = Job(std::ptr::from_ref(step).cast());
            shared.number.store(gate.number, Ordering::Release);
            drop(gate);
            shared.opened.notify_all();
        }
        shared.work(step, &mut self.mine);
        // The step may not end before nobody uses it.
        let mut idle = Idle::new(shared.room);
        while shared.running.load(Ordering::Acquire) > 0 {
            idle.rest();
        }
        match shared.error.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.gate.lock().unwrap_or_else(PoisonError::into_inner).quit = true;
        self.shared.number.fetch_add(1, Ordering::Release);
        self.shared.opened.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches every panic of its own.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// A thread's life: one step after the other.
    fn serve(&self, bench: &mut Bench) {
        let mut last = 0;
        loop {
            // The next step often follows at once, and sleeping costs more than it takes to come.
            let mut spins = 0;
            while self.number.load(Ordering::Acquire) == last && self.room && spins < 4000 {
                std::hint::spin_loop();
                spins += 1;
            }
            let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            while gate.number == last && !gate.quit {
                gate = self.opened.wait(gate).unwrap_or_else(PoisonError::into_inner);
            }
            if gate.quit {
                return;
            }
            last = gate.number;
            let job = gate.job;
            drop(gate);
            // SAFETY: the step lives until this worker says below that it has ended.
            self.work(unsafe { &*job.0 }, bench);
            self.running.fetch_sub(1, Ordering::Release);
        }
    }

    /// A worker's part of a step. Never panics.
    fn work(&self, step: &Step, bench: &mut Bench) {
        bench.ranks.iter_mut().for_each(Rank::reset);
        match catch_unwind(AssertUnwindSafe(|| self.drive(step, bench))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.fail(error),
            Err(panic) => self.fail(RunError::Panicked { message: said(&*panic) }),
        }
    }

    fn fail(&self, error: RunError) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    fn drive(&self, step: &Step, bench: &mut Bench) -> Result<(), RunError> {
        let mut idle = Idle::new(self.room);
        loop {
            let (mut any, mut left) = (false, false);
            for rank in &mut bench.ranks {
                let stop = || self.failed.load(Ordering::Acquire);
                if stop() {
                    return Ok(());
                }
                let (moved, turn) = rank.run(step, &mut bench.desk, stop)?;
                any |= moved;
                match turn {
                    Turn::Blocked(at) => {
                        left = true;
                        self.marks[rank.number].store(mark(at), Ordering::Release);
                    }
                    Turn::Done => self.marks[rank.number].store(ENDED, Ordering::Release),
                    Turn::Moved => left = true,
                }
            }
            if !left {
                return Ok(());
            }
            if any {
                idle = Idle::new(self.room);
            } else if idle.rest() || self.workers == 1 {
                self.check_stuck(step.meet, &mut bench.seen)?;
            }
        }
    }

    /// Whether every rank has ended or waits for one that does not come. Each is seen twice at the same meeting, with
    /// members missing the second time; so between the two looks all of them stood still, and nobody is left to move them.
    fn check_stuck(&self, meet: &Meet, seen: &mut [u64]) -> Result<(), RunError> {
        for (seen, mark) in seen.iter_mut().zip(&self.marks) {
            *seen = mark.load(Ordering::Acquire);
            if *seen == RUNNING {
                return Ok(());
            }
        }
        for (seen, mark) in seen.iter().zip(&self.marks) {
            let now = mark.load(Ordering::Acquire);
            if now != *seen || (now != ENDED && !meet.is_missing(meeting(now))) {
                return Ok(());
            }
        }
        let waits = |(rank, mark): (usize, &u64)| format!("rank {rank}: {}", meet.show(meeting(*mark)));
        let ranks: Vec<String> = seen.iter().enumerate().filter(|(_, m)| **m != ENDED).map(waits).collect();
        // With all ended there is nothing to report: their workers are about to return.
        if ranks.is_empty() { Ok(()) } else { Err(RunError::Stuck { ranks }) }
    }
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "no message".to_string())
}

/// How long a worker has had nothing to do.
struct Idle {
    rounds: u32,
}

/// Rounds of spinning, a few microseconds in all, and then of letting others run.
const SPINS: u32 = 32;
const YIELDS: u32 = 512;

impl Idle {
    /// Just now. Where there is no room, it does not spin.
    fn new(room: bool) -> Idle {
        Idle { rounds: if room { 0 } else { SPINS } }
    }

    /// Waits a moment; whether it was a long one.
    fn rest(&mut self) -> bool {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds < SPINS {
            (0..32).for_each(|_| std::hint::spin_loop());
        } else if self.rounds < YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
            return true;
        }
        false
    }
}
