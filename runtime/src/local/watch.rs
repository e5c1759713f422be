//! Where a number first went wrong: the calls once more, instruction by instruction on all ranks side by side, each
//! result looked at before anything is done with it. Slow; for after a step that stopped.

use std::collections::BTreeMap;

use ir::program::{BufferId, Buffers, Instruction, Region as Life};
use ir::schedule::Kind;
use ir::{Name, Value};

use super::Local;
use super::blocks::elements;
use super::error::RunError;
use super::host::{HostTensor, TapTargets};
use super::load::region;
use super::numbers;
use super::rank::{Desk, Rank, Step, Turn};
use super::traffic::Counts;

/// The first element that is no finite number.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// On which rank.
    pub rank: usize,
    /// In which segment.
    pub segment: Kind,
    /// After which instruction of it, from 0.
    pub instruction: usize,
    /// In which buffer.
    pub buffer: BufferId,
    /// The value that the buffer holds, if it is noted.
    pub value: Option<Value>,
    /// Where in the whole tensor.
    pub index: Vec<usize>,
    /// What it is.
    pub number: f64,
}

impl Local {
    /// Runs the calls of a step once more, and finds the first element that an instruction wrote and that is not finite.
    /// Ends before the first instruction that writes a state, so that the states stay as they are.
    ///
    /// Minus infinity is what the maximum of nothing is, and what masks write: it counts only if there is no NaN and no
    /// plus infinity.
    ///
    /// # Errors
    /// Wrong feeds.
    pub fn first_not_finite(
        &mut self,
        feeds: &[BTreeMap<Name, HostTensor>],
    ) -> Result<Option<NotFinite>, RunError> {
        self.check_feeds(feeds)?;
        self.meet.reset();
        let code = &self.code;
        let arenas = self.arenas.iter_mut().map(super::arena::Arena::start);
        let mut ranks: Vec<Option<Rank>> =
            arenas.enumerate().map(|(r, arena)| Some(Rank::new(r, arena, code))).collect();
        let mut desk = Desk::new(code.scratch, code.operands);
        let (taps, finite) = (TapTargets::default(), std::collections::BTreeSet::new());
        let counts = Counts::new(code);
        let step = Step {
            code,
            meet: &self.meet,
            counts: &counts,
            feeds,
            taps: &taps,
            finite: &finite,
            recorder: None,
            profile: None,
        };
        let mut minus = None;
        loop {
            let mut moved = false;
            for slot in &mut ranks {
                let Some(rank) = slot else { continue };
                let stage = self.stage_of(rank.number);
                let (call, op) = rank.at();
                let call = stage.calls.get(call);
                let instructions = call.map(|c| &stage.segments[c.segment].instructions);
                let instruction = instructions.and_then(|all| all.get(op));
                let state = |b: &BufferId| stage.buffers[b.index()].region == Life::State;
                if instruction.is_some_and(|i| i.writes().iter().any(state)) {
                    *slot = None;
                    continue;
                }
                if rank.one(&step, &mut desk)? != Turn::Moved {
                    continue;
                }
                moved = true;
                let (Some(call), Some(all), Some(instruction)) = (call, instructions, instruction) else {
                    continue;
                };
                for buffer in ready(all, instruction) {
                    let Some((index, number)) = self.bad(buffer, rank.number, call.slot) else { continue };
                    let found = NotFinite {
                        rank: rank.number,
                        segment: stage.segments[call.segment].kind,
                        instruction: op,
                        buffer,
                        value: stage.buffers[buffer.index()].value,
                        index,
                        number,
                    };
                    if number == f64::NEG_INFINITY {
                        minus.get_or_insert(found);
                    } else {
                        return Ok(Some(found));
                    }
                }
            }
            if !moved {
                return Ok(minus);
            }
        }
    }

    /// The first element of a rank's piece that is not finite; minus infinity only if there is no other.
    fn bad(&self, id: BufferId, rank: usize, slot: usize) -> Option<(Vec<usize>, f64)> {
        let (mesh, stage) = (&self.program.mesh, self.stage_of(rank));
        let buffer = &stage.buffers[id.index()];
        if !buffer.dtype.is_float() {
            return None;
        }
        let ranges = region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank));
        let start = &self.arenas[rank].all()[stage.address(id, slot)..];
        // SAFETY: the buffer lies in the arena, aligned, with the elements of its region.
        let number = |i: usize| unsafe { numbers::get(buffer.dtype, start.as_ptr(), i) };
        let all = 0..elements(&ranges);
        let worst = |i: &usize| !number(*i).is_finite() && number(*i) != f64::NEG_INFINITY;
        let place = all.clone().find(worst).or_else(|| all.clone().find(|i| !number(*i).is_finite()))?;
        let mut index: Vec<usize> = vec![0; ranges.len()];
        let mut rest = place;
        for (d, range) in ranges.iter().enumerate().rev() {
            index[d] = range.start + rest % range.len();
            rest /= range.len();
        }
        Some((index, number(place)))
    }
}

/// What is written when an instruction has been done: of a collective, at its wait.
fn ready(all: &[Instruction], instruction: &Instruction) -> Buffers {
    match instruction {
        Instruction::Start { .. }
        | Instruction::Send { .. }
        | Instruction::Sent { .. }
        | Instruction::Receive { .. }
        | Instruction::Tap { .. } => Buffers::new(),
        Instruction::Wait { token: waited } => all
            .iter()
            .filter(|i| i.started().is_some_and(|(token, _)| token == *waited))
            .flat_map(Instruction::writes)
            .collect(),
        Instruction::Feed { .. }
        | Instruction::Launch { .. }
        | Instruction::Local { .. }
        | Instruction::Received { .. }
        | Instruction::Assign { .. } => instruction.writes(),
    }
}
