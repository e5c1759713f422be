//! How long the instructions of a step took, for those who ask: the time that workers spent in each, over all its runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ir::program::{Instruction, Program};

use super::code::{Code, Op};

/// What an instruction took, over all its runs on all ranks of its row of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spent {
    /// The row of the pipeline, by place in [`Program::stages`].
    pub row: usize,
    /// The segment, by place in [`ir::program::Stage::segments`].
    pub segment: usize,
    /// The instruction, by place in the segment.
    pub instruction: usize,
    /// How often it ran.
    pub runs: u64,
    /// Seconds in it. Of a collective, in moving: waiting for others is no time of its own.
    pub seconds: f64,
    /// Operations on numbers in all runs.
    pub flops: f64,
    /// Bytes of the operands that it reads and writes in all runs.
    pub bytes: f64,
}

/// Runs of one op on one rank, and nanoseconds in it.
#[derive(Debug, Default)]
struct Clock {
    runs: AtomicU64,
    nanos: AtomicU64,
}

/// The clocks of all ops, which add up over the steps that they are handed to.
#[derive(Debug)]
pub struct Profile {
    /// By rank, segment and op.
    clocks: Vec<Vec<Vec<Clock>>>,
}

impl Profile {
    /// All at 0.
    pub(super) fn of(code: &Code) -> Profile {
        let ops = |n| std::iter::repeat_with(Clock::default).take(n).collect();
        let segments =
            |rank: &super::code::RankCode| rank.segments.iter().map(|s| ops(s.ops.len())).collect();
        Profile { clocks: code.ranks.iter().map(segments).collect() }
    }

    /// An op took so long, and is done or not.
    pub(super) fn note(&self, rank: usize, segment: usize, op: usize, took: Duration, done: bool) {
        let clock = &self.clocks[rank][segment][op];
        clock.runs.fetch_add(u64::from(done), Ordering::Relaxed);
        clock.nanos.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// What each instruction took, in the order of the program.
    pub(super) fn spent(&self, program: &Program, code: &Code) -> Vec<Spent> {
        let mut all = Vec::new();
        for (row, stage) in program.stages.iter().enumerate() {
            let ranks: Vec<usize> = (0..code.ranks.len()).filter(|r| code.ranks[*r].row == row).collect();
            for (s, segment) in stage.segments.iter().enumerate() {
                for (i, instruction) in segment.instructions.iter().enumerate() {
                    let operands = instruction.reads().into_iter().chain(instruction.writes());
                    let bytes: usize = operands.map(|b| stage.buffers[b.index()].bytes(&program.mesh)).sum();
                    let mut spent = Spent {
                        row,
                        segment: s,
                        instruction: i,
                        runs: 0,
                        seconds: 0.0,
                        flops: 0.0,
                        bytes: 0.0,
                    };
                    for rank in &ranks {
                        let clock = &self.clocks[*rank][s][i];
                        let runs = clock.runs.load(Ordering::Relaxed);
                        spent.runs += runs;
                        spent.seconds += clock.nanos.load(Ordering::Relaxed) as f64 * 1e-9;
                        spent.flops += runs as f64 * flops(&code.ranks[*rank].segments[s].ops[i]);
                        spent.bytes += runs as f64 * moved(instruction, bytes);
                    }
                    all.push(spent);
                }
            }
        }
        all
    }
}

fn flops(op: &Op) -> f64 {
    match op {
        Op::Launch { kernel, .. } => kernel.flops(),
        Op::Feed { .. }
        | Op::Copy { .. }
        | Op::Fill { .. }
        | Op::Start { .. }
        | Op::Wait { .. }
        | Op::Post { .. }
        | Op::Done { .. }
        | Op::Tap { .. } => 0.0,
    }
}

/// A collective is counted where it starts, whoever of its members moves it and when.
fn moved(instruction: &Instruction, bytes: usize) -> f64 {
    match instruction {
        Instruction::Wait { .. } | Instruction::Sent { .. } | Instruction::Received { .. } => 0.0,
        Instruction::Feed { .. }
        | Instruction::Launch { .. }
        | Instruction::Local { .. }
        | Instruction::Start { .. }
        | Instruction::Send { .. }
        | Instruction::Receive { .. }
        | Instruction::Assign { .. }
        | Instruction::Tap { .. } => bytes as f64,
    }
}
