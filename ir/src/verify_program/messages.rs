//! Every message has one sender and one receiver, in the rows where its stages live, and both mean the same by it.

use std::collections::BTreeMap;

use super::{Check, ProgramError, ProgramFault};
use crate::program::{Buffer, BufferId, Instruction, Message, Posted, Program, Region};

/// Where one end of a message stands.
struct End<'a> {
    token: u32,
    row: usize,
    at: String,
    buffer: &'a Buffer,
}

/// All rules of messages that a program breaks.
pub(super) fn messages(program: &Program, errors: &mut Vec<ProgramError>) {
    let mut ends: BTreeMap<Message, [Vec<End>; 2]> = BTreeMap::new();
    for (row, stage) in program.stages.iter().enumerate() {
        for (i, segment) in stage.segments.iter().enumerate() {
            for (k, instruction) in segment.instructions.iter().enumerate() {
                let Some(Posted { token, message, buffer, sends }) = instruction.posted() else { continue };
                let at = format!("stage {row}, segment {}, instruction {k}", stage.name_of(i));
                let buffer = &stage.buffers[buffer.index()];
                let ends = &mut ends.entry(message).or_default()[usize::from(!sends)];
                // The last micro-batch may have a segment of its own, that sends the same.
                if !ends.iter().any(|e| (e.row, e.token) == (row, token)) {
                    ends.push(End { token, row, at, buffer });
                }
            }
        }
    }
    let mut report = |at: &str, kind| errors.push(ProgramError { at: at.to_string(), kind });
    for (message, [sends, receives]) in &ends {
        for (here, there, stage) in [(sends, receives, message.from), (receives, sends, message.to)] {
            for (i, end) in here.iter().enumerate() {
                if program.homes.get(stage) != Some(&end.row) {
                    report(&end.at, ProgramFault::Elsewhere(*message, stage));
                } else if i > 0 || there.len() != 1 {
                    report(&end.at, ProgramFault::NoPeer(*message));
                }
            }
        }
        if let ([a], [b]) = (&sends[..], &receives[..])
            && (a.buffer.dtype, &a.buffer.shape, &a.buffer.sharding)
                != (b.buffer.dtype, &b.buffer.shape, &b.buffer.sharding)
        {
            report(&b.at, ProgramFault::OtherEnd(*message));
        }
    }
}

/// What rows have copies of, all of them change or none.
pub(super) fn copies(program: &Program, errors: &mut Vec<ProgramError>) {
    let mut changed: BTreeMap<&str, usize> = BTreeMap::new();
    let mut kept: Vec<(usize, &str)> = Vec::new();
    for (row, stage) in program.stages.iter().enumerate() {
        let writes = stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::writes);
        let mut written = vec![false; stage.buffers.len()];
        writes.for_each(|id| written[id.index()] = true);
        for (i, buffer) in stage.buffers.iter().enumerate().filter(|(_, b)| b.region == Region::State) {
            let Some(name) = &buffer.state else { continue };
            match written[i] {
                true => {
                    changed.entry(name).or_insert(row);
                }
                false => kept.push((row, name)),
            }
        }
    }
    for (row, name) in kept {
        if let Some(other) = changed.get(name) {
            let (at, kind) = (format!("stage {row}"), ProgramFault::Drifts(name.to_string(), *other));
            errors.push(ProgramError { at, kind });
        }
    }
}

impl Check<'_, '_> {
    /// Tokens of messages are unique in a stage, and each is waited for by one instruction that means the same buffer.
    pub(super) fn tokens(&mut self, s: usize) {
        let mut starts: BTreeMap<u32, Vec<(bool, BufferId)>> = BTreeMap::new();
        let mut ends: BTreeMap<u32, Vec<(bool, BufferId)>> = BTreeMap::new();
        for instruction in self.stage.segments.iter().flat_map(|s| &s.instructions) {
            match instruction {
                Instruction::Send { token, from, .. } => {
                    starts.entry(*token).or_default().push((true, *from))
                }
                Instruction::Receive { token, to, .. } => {
                    starts.entry(*token).or_default().push((false, *to))
                }
                Instruction::Sent { token, from } => ends.entry(*token).or_default().push((true, *from)),
                Instruction::Received { token, to } => ends.entry(*token).or_default().push((false, *to)),
                Instruction::Feed { .. }
                | Instruction::Launch { .. }
                | Instruction::Local { .. }
                | Instruction::Start { .. }
                | Instruction::Wait { .. }
                | Instruction::Assign { .. }
                | Instruction::Tap { .. } => {}
            }
        }
        let at = format!("stage {s}");
        for (token, from) in &starts {
            let to = ends.remove(token).unwrap_or_default();
            // The last micro-batch may have segments of its own.
            let fits = !to.is_empty() && from.iter().chain(&to).all(|end| *end == from[0]);
            if !fits {
                self.report(&at, ProgramFault::NotWaited(*token));
            }
        }
        for token in ends.into_keys() {
            self.report(&at, ProgramFault::NotStarted(token));
        }
    }
}
