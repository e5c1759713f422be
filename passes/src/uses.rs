//! Who uses which buffer in a segment.

use ir::program::{BufferId, Buffers, Instruction};
use ir::{Mesh, Reduce};
use rustc_hash::{FxHashMap, FxHashSet};

/// What the collectives of a segment make, by token.
pub(crate) struct Made(FxHashMap<u32, Buffers>);

impl Made {
    /// Of a segment.
    pub(crate) fn of(all: &[Instruction]) -> Made {
        Made(all.iter().filter_map(|i| i.started().map(|(token, _)| (token, i.writes()))).collect())
    }

    /// What an instruction reads, and what it writes; a wait writes what its collective makes.
    pub(crate) fn uses(&self, instruction: &Instruction) -> (Buffers, Buffers) {
        let mut writes = instruction.writes();
        if let Instruction::Wait { token } = instruction {
            writes.extend(self.0.get(token).into_iter().flatten().copied());
        }
        (instruction.reads(), writes)
    }
}

/// Whether it starts a collective of several stages of a pipeline.
pub(crate) fn between_stages(instruction: &Instruction, mesh: &Mesh) -> bool {
    instruction.transfers().iter().any(|t| t.joins_stages(mesh))
}

/// What only follows from reductions, and may as well come later in its segment whatever the rest of it does: a gradient's
/// next collective, its slice, its addition to a sum over micro-batches. All that touches what these write, or writes what
/// they read, follows too. What stages of a pipeline do together keeps its order, which is the same in all of them.
pub(crate) fn following(all: &[Instruction], mesh: &Mesh) -> FxHashSet<usize> {
    let free = free(all, mesh);
    let mut found = FxHashSet::default();
    let (mut reached, mut read): (FxHashSet<BufferId>, FxHashSet<BufferId>) = Default::default();
    for (i, instruction) in all.iter().enumerate().filter(|(i, _)| free.contains(i)) {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let follows = reads.iter().chain(&writes).any(|b| reached.contains(b))
            || writes.iter().any(|b| read.contains(b));
        let sums = instruction.transfers().iter().any(|t| t.step.reduce() == Some(Reduce::Sum));
        if follows {
            found.insert(i);
            read.extend(reads);
        }
        if follows || sums {
            reached.extend(writes);
        }
    }
    found
}

/// The launches, local moves and starts after which nothing that does not move touches what they write, or writes what they
/// read.
fn free(all: &[Instruction], mesh: &Mesh) -> FxHashSet<usize> {
    let made = Made::of(all);
    // Of what stands behind and does not move.
    let (mut touched, mut written): (FxHashSet<BufferId>, FxHashSet<BufferId>) = Default::default();
    let mut found = FxHashSet::default();
    for (i, instruction) in all.iter().enumerate().rev() {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let free = !writes.iter().any(|b| touched.contains(b))
            && !reads.iter().any(|b| written.contains(b))
            && !between_stages(instruction, mesh);
        match instruction {
            // It goes with its start.
            Instruction::Wait { .. } => continue,
            Instruction::Launch { .. } | Instruction::Local { .. } | Instruction::Start { .. } if free => {
                found.insert(i);
                continue;
            }
            Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Start { .. }
            | Instruction::Feed { .. }
            | Instruction::Assign { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. }
            | Instruction::Tap { .. } => {}
        }
        let (reads, writes) = made.uses(instruction);
        touched.extend(reads.iter().chain(&writes));
        written.extend(writes);
    }
    found
}
