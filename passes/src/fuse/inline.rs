//! Maps that do next to nothing (a constant, an index, a cast to f32) are computed again by each map that uses them,
//! instead of being stored; and so is what compares two smaller tensors, as the mask of attention does with positions.

use std::sync::Arc;

use ir::DType;
use ir::kernel::{Body, Map, Step};
use ir::program::{BufferId, Buffers, Instruction, Stage};
use rustc_hash::{FxHashMap, FxHashSet};

use super::map_of;

/// Inlines such operands in all segments; a map that nothing reads any more is gone.
pub(super) fn run(stage: &mut Stage) {
    let mut small: FxHashMap<BufferId, Map> = FxHashMap::default();
    let mut writers: FxHashMap<BufferId, usize> = FxHashMap::default();
    let writes = stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::writes);
    writes.for_each(|b| *writers.entry(b).or_default() += 1);
    let mut wide: FxHashMap<BufferId, (usize, BufferId)> = FxHashMap::default();
    let mut compared: FxHashMap<BufferId, (usize, Compared)> = FxHashMap::default();
    let segments = stage.segments.iter_mut().enumerate();
    for (segment, instruction) in segments.flat_map(|(i, s)| s.instructions.iter_mut().map(move |x| (i, x))) {
        if let Instruction::Launch { kernel, reads, .. } = instruction
            && let Body::Map(_) = kernel.body
        {
            // A number that is loaded is f32 in its register, whatever it was in memory.
            for (i, read) in reads.iter_mut().enumerate() {
                if let Some((_, source)) = wide.get(read).filter(|(at, _)| *at == segment) {
                    *read = *source;
                    Arc::make_mut(kernel).reads[i] = stage.buffers[source.index()].dtype;
                }
            }
            let mut i = 0;
            while i < reads.len() {
                let map = |s| if let Body::Map(map) = &kernel.body { Some((map, s)) } else { None };
                let source = small.get(&reads[i]).and_then(map);
                let source = source.filter(|(map, s)| takes(map, reads, reads[i], s));
                match source.and_then(|(map, s)| replaced(map, i, s)) {
                    Some(with) => {
                        let kernel = Arc::make_mut(kernel);
                        kernel.body = Body::Map(with);
                        kernel.reads.remove(i);
                        reads.remove(i);
                    }
                    None => i += 1,
                }
            }
            let mut i = 0;
            while i < reads.len() {
                let map = |s| if let Body::Map(map) = &kernel.body { Some((map, s)) } else { None };
                let source = compared.get(&reads[i]).filter(|(at, _)| *at == segment).and_then(map);
                match source.and_then(|(map, (_, source))| source.within(map, i, (reads, &kernel.reads))) {
                    Some((with, from, types)) => {
                        let kernel = Arc::make_mut(kernel);
                        (kernel.body, kernel.reads, *reads) = (Body::Map(with), types, from);
                    }
                    None => i += 1,
                }
            }
        }
        if let Some((_, map)) = map_of(instruction)
            && instruction.reads().is_empty()
            && let [Step::Const(_) | Step::Iota(_), Step::Store { .. }] = map.steps[..]
            && let [to] = instruction.writes()[..]
            && writers[&to] == 1
        {
            small.insert(to, map.clone());
        }
        if let Some((to, source)) = Compared::of(instruction)
            && [to].iter().chain(&source.reads).all(|b| writers.get(b).is_none_or(|n| *n == 1))
        {
            compared.insert(to, (segment, source));
        }
        if let Some((from, to)) = widened(instruction)
            && writers[&to] == 1
            && writers.get(&from).is_none_or(|n| *n == 1)
        {
            wide.insert(to, (segment, from));
        }
    }
    let read: FxHashSet<BufferId> =
        stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::reads).collect();
    for segment in &mut stage.segments {
        let cheap = |b: &BufferId| small.contains_key(b) || wide.contains_key(b) || compared.contains_key(b);
        let unread = |b: &BufferId| cheap(b) && !read.contains(b);
        segment.instructions.retain(|i| !i.writes().iter().any(unread));
    }
}

/// What a launch reads and writes that only casts a narrower float to f32, element by element.
fn widened(instruction: &Instruction) -> Option<(BufferId, BufferId)> {
    let (kernel, map) = map_of(instruction)?;
    let [Step::Load { access: from, .. }, Step::Cast(DType::F32, 0), Step::Store { access: to, of: 1, .. }] =
        &map.steps[..]
    else {
        return None;
    };
    let narrow = kernel.reads[0].is_float() && kernel.reads[0].bytes() < DType::F32.bytes();
    let ([read], [write]) = (&instruction.reads()[..], &instruction.writes()[..]) else { return None };
    (narrow && from == to).then_some((*read, *write))
}

/// Whether every use of the operand is a plain load.
fn takes(map: &Map, reads: &[BufferId], buffer: BufferId, source: &Map) -> bool {
    let constant = matches!(source.steps[0], Step::Const(_));
    let at = reads.iter().position(|b| *b == buffer);
    let plain = |access: &ir::kernel::Access| constant || access.len() == 1 && access[0].len() == 1;
    map.steps.iter().filter_map(Step::load).all(|(read, access)| Some(read) != at || plain(access))
        && map.steps.iter().filter_map(Step::load_at).all(|read| Some(read) != at)
}

/// The map with the one number that `source` computes in the place of each load of operand `i`; none if a row would
/// then be reduced from what is the same all over it, or a sum count once a row what counted at each point.
fn replaced(map: &Map, i: usize, source: &Map) -> Option<Map> {
    let mut new = map.clone();
    for step in &mut new.steps {
        if let Step::Load { read, access } = step
            && *read == i
        {
            let index = matches!(source.steps[0], Step::Iota(_));
            *step = if index { Step::Iota(access[0][0]) } else { source.steps[0].clone() };
        }
        if let Step::Load { read, .. } | Step::LoadAt { read, .. } = step
            && *read > i
        {
            *read -= 1;
        }
    }
    let (before, after) = (map.of_point(), new.of_point());
    let kept = |step: &Step| !step.reduces() || step.uses().iter().all(|r| before[*r] == after[*r]);
    new.steps.iter().all(kept).then_some(new)
}

/// A map that compares two tensors, each of which has fewer elements than what it stores.
struct Compared {
    reads: Buffers,
    types: Vec<DType>,
    /// Two loads, the comparison and the store.
    map: Map,
}

impl Compared {
    /// What a launch compares, and where it stores that.
    fn of(instruction: &Instruction) -> Option<(BufferId, Compared)> {
        let Instruction::Launch { kernel, reads, writes } = instruction else { return None };
        let Body::Map(map) = &kernel.body else { return None };
        let [
            Step::Load { access: a, .. },
            Step::Load { access: b, .. },
            Step::Binary(_, 0, 1),
            Step::Store { access, of: 2, .. },
        ] = &map.steps[..]
        else {
            return None;
        };
        let plain = access.iter().all(|dim| dim.len() == 1) && access.len() == map.loops.len();
        let smaller = [a, b].iter().all(|of| of.iter().flatten().count() < access.len());
        let compared = Compared { reads: reads.clone(), types: kernel.reads.clone(), map: map.clone() };
        (plain && smaller && kernel.writes[..] == [DType::Bool]).then(|| (writes[0], compared))
    }

    /// A map that compares by itself where it loaded operand `i`, with its operands; none if it loads that otherwise than
    /// dimension by dimension, or a row would then be reduced from what is the same all over it.
    fn within(
        &self,
        map: &Map,
        i: usize,
        (reads, types): (&Buffers, &[DType]),
    ) -> Option<(Map, Buffers, Vec<DType>)> {
        let (mut reads, mut types) = (reads.clone(), types.to_vec());
        let [own_a, own_b, Step::Binary(compare, ..), Step::Store { access: stored, .. }] =
            &self.map.steps[..]
        else {
            return None;
        };
        let mut steps: Vec<Step> = Vec::with_capacity(map.steps.len() + 2);
        let mut registers: Vec<usize> = Vec::with_capacity(map.steps.len());
        for step in &map.steps {
            if step.load_at() == Some(i) {
                return None;
            }
            if let Some((_, access)) = step.load().filter(|(read, _)| *read == i) {
                if access.iter().any(|dim| dim.len() != 1) {
                    return None;
                }
                let here = |l: &usize| Some(access[stored.iter().position(|dim| dim[0] == *l)?][0]);
                let mut load = |own: &Step| {
                    let (read, access) = own.load()?;
                    let dims = access.iter().map(|dim| dim.iter().map(here).collect());
                    let access: Option<ir::kernel::Access> = dims.collect();
                    let read = reads.iter().position(|b| *b == self.reads[read]).unwrap_or_else(|| {
                        reads.push(self.reads[read]);
                        types.push(self.types[read]);
                        reads.len() - 1
                    });
                    steps.push(Step::Load { read, access: access? });
                    Some(steps.len() - 1)
                };
                let (a, b) = (load(own_a)?, load(own_b)?);
                steps.push(Step::Binary(*compare, a, b));
            } else {
                steps.push(step.renamed(|r| registers[r]));
            }
            registers.push(steps.len() - 1);
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
}
