//! What is computed again by the maps that read it, instead of being stored.
//!
//! A sum of a tensor and smaller ones, as of a product and its bias, is so computed where all that read it are maps: the
//! tensor is kept in its place, which takes no more memory, and one pass over it less is made.
//!
//! ```text
//! launch b0, b1 -> b2, b3 map [a=4, b=8] { r0 = load 0 [a, b]  r1 = load 1 [b]  r2 = add r0, r1  store 0 [a, b] r2
//!                                          r4 = exp r2  store 1 [a, b] r4 }
//! launch b2 -> b4 map [a=4, b=8] { r0 = load 0 [a, b]  r1 = tanh r0  store 0 [a, b] r1 }
//!   ->
//! launch b0, b1 -> b3 map [a=4, b=8] { r0 = load 0 [a, b]  r1 = load 1 [b]  r2 = add r0, r1  r3 = exp r2  store 0 [a, b] r3 }
//! launch b0, b1 -> b4 map [a=4, b=8] { r0 = load 0 [a, b]  r1 = load 1 [b]  r2 = add r0, r1  r3 = tanh r2  store 0 [a, b] r3 }
//! ```

use std::sync::Arc;

use ir::DType;
use ir::kernel::{Access, Body, Map, Register, Step};
use ir::program::{BufferId, Buffers, Instruction, Region, Stage};
use ir::schedule::Kind;
use rustc_hash::{FxHashMap, FxHashSet};

use super::group::Group;
use super::{MOST_STEPS, map_of};

/// How an element of a buffer is computed from elements of others.
pub(super) struct Again {
    pub(super) reads: Buffers,
    pub(super) types: Vec<DType>,
    /// Where each is loaded, and where the result is stored, by the same loops.
    pub(super) loads: Vec<Access>,
    pub(super) stored: Access,
    /// What is made of them: register `i` is that of load `i`.
    pub(super) of: Step,
}

impl Again {
    /// A map that computes it by itself where it loaded operand `i`, with its operands; none if it loads that otherwise than
    /// dimension by dimension, or a row would then be reduced from what is the same all over it.
    pub(super) fn within(
        &self,
        map: &Map,
        i: usize,
        (reads, types): (&Buffers, &[DType]),
    ) -> Option<(Map, Buffers, Vec<DType>)> {
        let (mut reads, mut types) = (reads.clone(), types.to_vec());
        let mut steps: Vec<Step> = Vec::with_capacity(map.steps.len() + self.loads.len());
        let mut registers: Vec<Register> = Vec::with_capacity(map.steps.len());
        for step in &map.steps {
            let Some((_, access)) = step.read().filter(|(read, _)| *read == i) else {
                steps.push(step.renamed(|r| registers[r]));
                registers.push(steps.len() - 1);
                continue;
            };
            if access.iter().any(|dim| dim.len() != 1) {
                return None;
            }
            let here = |l: &usize| Some(access[self.stored.iter().position(|dim| dim[0] == *l)?][0]);
            let mut own: Vec<Register> = Vec::with_capacity(self.loads.len());
            for (buffer, (dtype, load)) in self.reads.iter().zip(self.types.iter().zip(&self.loads)) {
                let dims = load.iter().map(|dim| dim.iter().map(here).collect());
                let access: Access = dims.collect::<Option<_>>()?;
                let read = reads.iter().position(|b| b == buffer).unwrap_or_else(|| {
                    reads.push(*buffer);
                    types.push(*dtype);
                    reads.len() - 1
                });
                let load = match step {
                    // An index outside of the range gives 0, and so does the sum of zeros.
                    Step::LoadAt { looked, at, .. } => {
                        let zeros =
                            matches!(self.of, Step::Add(_)) && access.iter().flatten().any(|l| l == looked);
                        zeros.then(|| Step::LoadAt { read, access, looked: *looked, at: registers[*at] })?
                    }
                    Step::Load { .. }
                    | Step::Const(_)
                    | Step::Iota(_)
                    | Step::Random { .. }
                    | Step::Unary(..)
                    | Step::Binary(..)
                    | Step::Add(_)
                    | Step::Mul(..)
                    | Step::Select(..)
                    | Step::Cast(..)
                    | Step::Row(..)
                    | Step::Store { .. }
                    | Step::Accumulate { .. } => Step::Load { read, access },
                };
                own.push(known(&mut steps, load));
            }
            registers.push(known(&mut steps, self.of.renamed(|r| own[r])));
        }
        let mut new = Map { steps, ..map.clone() };
        let (before, after) = (map.of_point(), new.of_point());
        let kept =
            |step: &Step| !step.reduces() || step.uses().iter().all(|r| before[*r] == after[registers[*r]]);
        if !map.steps.iter().all(kept) {
            return None;
        }
        reads.remove(i);
        types.remove(i);
        for step in &mut new.steps {
            if let Step::Load { read, .. } | Step::LoadAt { read, .. } = step
                && *read > i
            {
                *read -= 1;
            }
        }
        Some((new, reads, types))
    }

    /// A launch of a map that computes it by itself where it loaded it; none if that is something else.
    fn in_launch(&self, instruction: &Instruction, buffer: BufferId) -> Option<Instruction> {
        let Instruction::Launch { kernel, reads, writes } = instruction else { return None };
        let (_, map) = map_of(instruction)?;
        let i = reads.iter().position(|b| *b == buffer)?;
        let (map, reads, types) = self.within(map, i, (reads, &kernel.reads))?;
        let mut kernel = Arc::clone(kernel);
        let new = Arc::make_mut(&mut kernel);
        let fits = map.steps.len() <= MOST_STEPS;
        (new.body, new.reads) = (Body::Map(map), types);
        fits.then(|| Instruction::Launch { kernel, reads, writes: writes.clone() })
    }
}

/// The register of a step, which may already be there.
fn known(steps: &mut Vec<Step>, step: Step) -> Register {
    steps.iter().position(|s| *s == step).unwrap_or_else(|| {
        steps.push(step);
        steps.len() - 1
    })
}

/// The sums of a tensor and smaller ones that a launch stores, with the buffer of each and of the tensor.
fn sums(instruction: &Instruction) -> Vec<(BufferId, BufferId, Again)> {
    let Instruction::Launch { kernel, reads, writes } = instruction else { return Vec::new() };
    let Body::Map(map) = &kernel.body else { return Vec::new() };
    let sum = |(write, stored, of): (usize, &Access, Register)| {
        let Step::Add(terms) = &map.steps[of] else { return None };
        let loads: Vec<(usize, &Access)> =
            terms.iter().map(|r| map.steps[*r].load()).collect::<Option<_>>()?;
        let all = |access: &Access| access.len() == stored.len() && access.iter().all(|dim| dim.len() == 1);
        let mut whole = loads.iter().filter(|(_, access)| access.iter().flatten().count() == stored.len());
        let (tensor, access) = whole.next().filter(|(_, access)| all(access) && all(stored))?;
        let ours = |l: &usize| stored.iter().any(|dim| dim[0] == *l);
        let fits = whole.next().is_none() && access.iter().flatten().all(ours);
        let f32s =
            kernel.writes[write] == DType::F32 && loads.iter().all(|(r, _)| kernel.reads[*r] == DType::F32);
        let again = Again {
            reads: loads.iter().map(|(read, _)| reads[*read]).collect(),
            types: vec![DType::F32; loads.len()],
            loads: loads.iter().map(|(_, access)| (*access).clone()).collect(),
            stored: stored.clone(),
            of: Step::Add((0..loads.len()).collect()),
        };
        (fits && f32s).then_some((writes[write], reads[*tensor], again))
    };
    map.steps.iter().filter_map(Step::store).filter_map(sum).collect()
}

/// Where an instruction is: its segment, and its place there.
type At = (usize, usize);

/// Has sums added up by all that read them, where that can be.
pub(super) fn run(stage: &mut Stage) {
    let mut readers: FxHashMap<BufferId, Vec<At>> = FxHashMap::default();
    let mut writers: FxHashMap<BufferId, usize> = FxHashMap::default();
    let mut found: Vec<(At, BufferId, BufferId, Again)> = Vec::new();
    for (s, segment) in stage.segments.iter().enumerate() {
        for (i, instruction) in segment.instructions.iter().enumerate() {
            instruction.reads().into_iter().for_each(|b| readers.entry(b).or_default().push((s, i)));
            instruction.writes().into_iter().for_each(|b| *writers.entry(b).or_default() += 1);
            found.extend(sums(instruction).into_iter().map(|(to, of, again)| ((s, i), to, of, again)));
        }
    }
    let (mut gone, mut kept): (FxHashSet<BufferId>, FxHashSet<BufferId>) = Default::default();
    for (at, to, tensor, again) in found {
        let places = readers.get(&to).map_or(&[][..], |all| all);
        let region = |b: &BufferId| stage.buffers[b.index()].region;
        let made =
            |b: &BufferId| matches!(region(b), Region::Slot | Region::Scratch) && writers.get(b) == Some(&1);
        let local = places.iter().all(|(s, _)| *s == at.0);
        let updates = [at].iter().chain(places).any(|(s, _)| stage.segments[*s].kind == Kind::Optimizer);
        // Whether it still is, where the sum is read, what it was: a state is the same until the update.
        let lasts = |b: &BufferId| match region(b) {
            Region::State => !updates,
            Region::Slot | Region::Scratch => local && made(b),
            Region::Step => false,
        };
        let mut small = again.reads.iter().filter(|b| **b != tensor);
        // Sums of sums keep the inner one, or the outer one.
        let nested = kept.contains(&to) || again.reads.iter().any(|b| gone.contains(b));
        if places.is_empty() || nested || ![to, tensor].iter().all(made) || !small.all(lasts) {
            continue;
        }
        let one = |(s, i): &At| again.in_launch(&stage.segments[*s].instructions[*i], to);
        let Some(with): Option<Vec<Instruction>> = places.iter().map(one).collect() else { continue };
        for ((s, i), instruction) in places.iter().zip(with) {
            stage.segments[*s].instructions[*i] = instruction;
        }
        if !local {
            stage.buffers[tensor.index()].region = Region::Slot;
        }
        gone.insert(to);
        kept.extend(again.reads);
    }
    for segment in &mut stage.segments {
        let kept = std::mem::take(&mut segment.instructions).into_iter().filter_map(|instruction| {
            if !instruction.writes().iter().any(|b| gone.contains(b)) {
                return Some(instruction);
            }
            let Instruction::Launch { kernel, reads, writes } = &instruction else {
                return Some(instruction);
            };
            let Body::Map(map) = &kernel.body else { return Some(instruction) };
            let group = Group::of(map.clone(), (reads, &kernel.reads), (writes, &kernel.writes));
            group.finish(&|b| !gone.contains(&b))
        });
        segment.instructions = kept.collect();
    }
}
