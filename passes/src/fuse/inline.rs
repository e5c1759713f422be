//! Maps that read nothing and do next to nothing (a constant, an index) are computed again by each map that uses them,
//! instead of being stored.

use std::collections::{HashMap, HashSet};

use ir::kernel::{Body, Map, Step};
use ir::program::{BufferId, Instruction, Stage};

use super::map_of;

/// Inlines such operands in all segments; a map that nothing reads any more is gone.
pub(super) fn run(stage: &mut Stage) {
    let mut small: HashMap<BufferId, Map> = HashMap::new();
    for instruction in stage.segments.iter_mut().flat_map(|s| &mut s.instructions) {
        if let Instruction::Launch { kernel, reads, .. } = instruction
            && let Body::Map(map) = &mut kernel.body
        {
            while let Some(i) =
                reads.iter().position(|b| small.get(b).is_some_and(|s| takes(map, reads, *b, s)))
            {
                replace(map, i, &small[&reads[i]]);
                reads.remove(i);
                kernel.reads.remove(i);
            }
        }
        if let Some((_, map)) = map_of(instruction)
            && instruction.reads().is_empty()
            && map.steps.len() <= 2
        {
            small.insert(instruction.writes()[0], map.clone());
        }
    }
    let read: HashSet<BufferId> =
        stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::reads).collect();
    for segment in &mut stage.segments {
        let unread = |b: &BufferId| small.contains_key(b) && !read.contains(b);
        segment.instructions.retain(|i| !i.writes().iter().any(unread));
    }
}

/// Whether every use of the operand is a plain load.
fn takes(map: &Map, reads: &[BufferId], buffer: BufferId, source: &Map) -> bool {
    let constant = matches!(source.steps[0], Step::Const(_));
    let at = reads.iter().position(|b| *b == buffer);
    let plain = |access: &ir::kernel::Access| constant || access.len() == 1 && access[0].len() == 1;
    map.steps.iter().filter_map(Step::load).all(|(read, access)| Some(read) != at || plain(access))
        && map.steps.iter().filter_map(Step::load_at).all(|read| Some(read) != at)
}

/// Puts the one number that `source` computes in the place of each load of operand `i`.
fn replace(map: &mut Map, i: usize, source: &Map) {
    for step in &mut map.steps {
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
}
