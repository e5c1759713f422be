//! Maps that do next to nothing (a constant, an index, a cast to f32) are computed again by each map that uses them,
//! instead of being stored; and so is what compares two smaller tensors, as the mask of attention does with positions.

use std::sync::Arc;

use ir::DType;
use ir::kernel::{Body, Map, Step};
use ir::program::{BufferId, Instruction, Stage};
use rustc_hash::{FxHashMap, FxHashSet};

use super::again::Again;
use super::map_of;

/// Inlines such operands in all segments; a map that nothing reads any more is gone.
pub(super) fn run(stage: &mut Stage) {
    let mut small: FxHashMap<BufferId, Map> = FxHashMap::default();
    let mut writers: FxHashMap<BufferId, usize> = FxHashMap::default();
    let writes = stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::writes);
    writes.for_each(|b| *writers.entry(b).or_default() += 1);
    let mut wide: FxHashMap<BufferId, (usize, BufferId)> = FxHashMap::default();
    let mut comparisons: FxHashMap<BufferId, (usize, Again)> = FxHashMap::default();
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
                let source = comparisons.get(&reads[i]).filter(|(at, _)| *at == segment).and_then(map);
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
        if let Some((to, source)) = compared(instruction)
            && [to].iter().chain(&source.reads).all(|b| writers.get(b).is_none_or(|n| *n == 1))
        {
            comparisons.insert(to, (segment, source));
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
        let cheap =
            |b: &BufferId| small.contains_key(b) || wide.contains_key(b) || comparisons.contains_key(b);
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

/// What a launch compares and where it stores that, if each of the two has fewer elements than the result.
fn compared(instruction: &Instruction) -> Option<(BufferId, Again)> {
    let Instruction::Launch { kernel, reads, writes } = instruction else { return None };
    let Body::Map(map) = &kernel.body else { return None };
    let [a, b, of @ Step::Binary(_, 0, 1), Step::Store { access: stored, of: 2, .. }] = &map.steps[..] else {
        return None;
    };
    let loads = [a.load()?, b.load()?];
    let plain = stored.iter().all(|dim| dim.len() == 1) && stored.len() == map.loops.len();
    let smaller = loads.iter().all(|(_, access)| access.iter().flatten().count() < stored.len());
    let again = Again {
        reads: loads.iter().map(|(read, _)| reads[*read]).collect(),
        types: loads.iter().map(|(read, _)| kernel.reads[*read]).collect(),
        loads: loads.iter().map(|(_, access)| (*access).clone()).collect(),
        stored: stored.clone(),
        of: of.clone(),
    };
    (plain && smaller && kernel.writes[..] == [DType::Bool]).then(|| (writes[0], again))
}
