//! What goes between stages of a pipeline: messages from one to another, and collectives of all of them. The ends of both are
//! found in the programs of several stages, and must mean the same.

use std::collections::HashMap;
use std::sync::Arc;

use ir::program::{Buffer, BufferId, Instruction, Message, Program, Transfer};

use super::bucket::Bucket;
use super::code::Op;
use super::error::RunError;

/// An end of a message: its row of the pipeline, and its buffer there.
pub type End = (usize, BufferId);

/// What goes over one way between two ranks, message by message.
#[derive(Clone)]
pub struct Channel {
    /// By place in the code's groups.
    pub group: usize,
    /// The transfer.
    pub bucket: Arc<Bucket>,
}

impl Channel {
    /// The op that arrives there: 0 sends, 1 receives.
    pub fn post(self, token: usize, member: usize) -> Op {
        Op::Post { token, group: self.group, member, bucket: self.bucket }
    }
}

/// What stages do together.
pub struct Channels {
    /// By message who sends and who receives.
    ends: HashMap<Message, [Option<End>; 2]>,
    /// By place among the collectives of several rows, the tensors that each row has there.
    joint: Vec<Vec<Vec<Transfer>>>,
}

fn wrong(fault: String) -> RunError {
    RunError::Between { fault }
}

impl Channels {
    /// Finds both ends of everything.
    ///
    /// # Errors
    /// An end that is missing, twice there, in the wrong row, or means something else than the other.
    pub fn of(program: &Program) -> Result<Channels, RunError> {
        let mut all = Channels { ends: HashMap::new(), joint: Vec::new() };
        for (row, stage) in program.stages.iter().enumerate() {
            let mut joint = 0;
            for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
                match instruction {
                    Instruction::Send { message, from, .. } => all.end(program, *message, 0, (row, *from))?,
                    Instruction::Receive { message, to, .. } => all.end(program, *message, 1, (row, *to))?,
                    Instruction::Start { parts, .. }
                        if parts.iter().any(|p| p.joins_stages(&program.mesh)) =>
                    {
                        if all.joint.len() == joint {
                            all.joint.push(vec![Vec::new(); program.stages.len()]);
                        }
                        all.joint[joint][row].clone_from(parts);
                        joint += 1;
                    }
                    Instruction::Start { .. }
                    | Instruction::Feed { .. }
                    | Instruction::Launch { .. }
                    | Instruction::Local { .. }
                    | Instruction::Wait { .. }
                    | Instruction::Sent { .. }
                    | Instruction::Received { .. }
                    | Instruction::Assign { .. }
                    | Instruction::Tap { .. } => {}
                }
            }
        }
        all.agree(program)?;
        Ok(all)
    }

    fn end(&mut self, program: &Program, message: Message, side: usize, end: End) -> Result<(), RunError> {
        let stage = [message.from, message.to][side];
        if program.homes.get(stage) != Some(&end.0) {
            return Err(wrong(format!("{} is not in the row of stage {stage}", show(&message))));
        }
        let known = &mut self.ends.entry(message).or_default()[side];
        match known {
            // The last micro-batch may have a segment of its own.
            Some(before) if *before != end => {
                Err(wrong(format!("{} has two buffers at one end", show(&message))))
            }
            Some(_) | None => {
                *known = Some(end);
                Ok(())
            }
        }
    }

    fn agree(&self, program: &Program) -> Result<(), RunError> {
        let like =
            |a: &Buffer, b: &Buffer| (a.dtype, &a.shape, &a.sharding) == (b.dtype, &b.shape, &b.sharding);
        let buffer = |(row, id): End| &program.stages[row].buffers[id.index()];
        for (message, ends) in &self.ends {
            let [Some(from), Some(to)] = *ends else {
                return Err(wrong(format!("{} has one end", show(message))));
            };
            if !like(buffer(from), buffer(to)) {
                return Err(wrong(format!("{} is received as something else", show(message))));
            }
        }
        for (i, rows) in self.joint.iter().enumerate() {
            for (row, parts) in rows.iter().enumerate() {
                let pairs = parts.iter().zip(&rows[0]);
                let same = |(a, b): (&Transfer, &Transfer)| {
                    a.step == b.step && like(buffer((row, a.from)), buffer((0, b.from)))
                };
                if parts.len() != rows[0].len() || !pairs.into_iter().all(same) {
                    let fault =
                        format!("collective {i} over the pipeline is another in row {row} than in row 0");
                    return Err(wrong(fault));
                }
            }
        }
        Ok(())
    }

    /// Both ends of a message.
    pub fn ends(&self, message: Message) -> Option<[End; 2]> {
        let [from, to] = *self.ends.get(&message)?;
        Some([from?, to?])
    }

    /// What each row has in a collective over the pipeline.
    pub fn joint(&self, place: usize) -> &[Vec<Transfer>] {
        &self.joint[place]
    }
}

fn show(m: &Message) -> String {
    format!("the message of {} from stage {} to stage {}", m.value, m.from, m.to)
}
