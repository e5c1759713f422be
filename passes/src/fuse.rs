//! After it chains of maps are one map: what one wrote and the next read stays in registers, and what nothing else
//! reads is not written at all.
//!
//! Instructions of a segment are taken in order. A map joins an earlier group if they run over the same space (or it
//! runs over the group's rows only) and everything else that it reads was computed before that group; it then runs
//! where the group runs. So order among groups is that of their first members, and no cycle can arise. What is cheap is
//! computed again where it is read (`inline`, `again`).
//!
//! ```text
//! launch b0 -> b1 map [a=4 | b=8] { r0 = load 0 [a, b]  r1 = exp r0      store 0 [a, b] r1 }
//! launch b1 -> b2 map [a=4 | b=8] { r0 = load 0 [a, b]  r1 = row_sum r0  store 0 [a] r1 }
//!   ->
//! launch b0 -> b2 map [a=4 | b=8] { r0 = load 0 [a, b]  r1 = exp r0  r2 = row_sum r1  store 0 [a] r2 }
//! ```

mod again;
mod group;
mod inline;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::{buffers, like};
use ir::kernel::{Body, Kernel};
use ir::program::{BufferId, Buffers, Instruction, Program, Region, Stage};

use group::Group;

/// A group that has grown to so many steps takes no more: its registers would not stay in the first cache.
const MOST_STEPS: usize = 96;

pub(crate) fn run(program: &mut Program) {
    like::once(&mut program.stages, fuse_stage);
    program.stages.iter_mut().for_each(buffers::drop_unused);
}

fn fuse_stage(stage: &mut Stage) {
    inline::run(stage);
    fuse_segments(stage, With::Makers);
    again::run(stage);
    fuse_segments(stage, With::Siblings);
}

fn fuse_segments(stage: &mut Stage, with: With) {
    let outside = used_outside(stage);
    for (segment, outside) in stage.segments.iter_mut().zip(&outside) {
        segment.instructions = fuse(std::mem::take(&mut segment.instructions), outside, with);
    }
}

/// For each segment, the buffers that must be written though nothing in it reads them.
fn used_outside(stage: &Stage) -> Vec<Vec<bool>> {
    let reads = |i: usize| stage.segments[i].instructions.iter().flat_map(Instruction::reads);
    (0..stage.segments.len())
        .map(|i| {
            let mut used: Vec<bool> = stage.buffers.iter().map(|b| b.region == Region::State).collect();
            for other in (0..stage.segments.len()).filter(|k| *k != i) {
                reads(other).for_each(|b| used[b.index()] = true);
            }
            used
        })
        .collect()
}

/// Which groups a map joins. First those that make what it reads, so that what is between them is not stored; then whole
/// groups those that read the same tensor, so that it is loaded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum With {
    Makers,
    Siblings,
}

/// What is at a place of the new order.
enum Place {
    Group(Group),
    Other(Instruction),
    /// A group that went into a later one.
    Gone,
}

/// Where each buffer is made.
type Made = FxHashMap<BufferId, usize>;

/// Where each buffer is read.
type Readers = FxHashMap<BufferId, SmallVec<[usize; 4]>>;

/// An instruction by itself: a group, if it launches a map.
fn single(instruction: Instruction) -> Place {
    if let Instruction::Launch { kernel, reads, writes } = &instruction
        && let Body::Map(map) = &kernel.body
    {
        Place::Group(Group::of(map.clone(), (reads, &kernel.reads), (writes, &kernel.writes)))
    } else {
        Place::Other(instruction)
    }
}

fn fuse(instructions: Vec<Instruction>, outside: &[bool], with: With) -> Vec<Instruction> {
    let mut places: Vec<Place> = Vec::new();
    // Where each buffer is made; buffers that are not made in this segment are there from the start.
    let mut made: Made = Made::default();
    let mut readers: Readers = Readers::default();
    let mut started: FxHashMap<u32, Buffers> = FxHashMap::default();
    for instruction in instructions {
        let mut writes = instruction.writes();
        if let Some((token, _)) = instruction.started() {
            started.insert(token, writes.clone());
        }
        if let Instruction::Wait { token } = &instruction {
            writes.extend(started.get(token).into_iter().flatten().copied());
        }
        let reads = instruction.reads();
        let at = match single(instruction) {
            Place::Group(single) => {
                let at = join(&mut places, &made, &readers, single, with);
                let makers: SmallVec<[usize; 4]> =
                    reads.iter().filter_map(|b| made.get(b)).copied().collect();
                for from in makers.into_iter().filter(|from| *from < at) {
                    sink(&mut places, &mut made, &mut readers, from, at);
                }
                at
            }
            other @ (Place::Other(_) | Place::Gone) => {
                places.push(other);
                places.len() - 1
            }
        };
        writes.into_iter().for_each(|b| {
            made.insert(b, at);
        });
        reads.into_iter().for_each(|b| readers.entry(b).or_default().push(at));
    }
    // What some other place loads has to be stored; what only its own group uses stays in registers.
    let mut needed = outside.to_vec();
    for place in &places {
        let loads = match place {
            Place::Other(instruction) => instruction.reads(),
            Place::Group(group) => group.loads(),
            Place::Gone => Buffers::new(),
        };
        loads.into_iter().for_each(|b| needed[b.index()] = true);
    }
    let keep = |b: BufferId| needed[b.index()];
    places
        .into_iter()
        .filter_map(|place| match place {
            Place::Other(instruction) => Some(instruction),
            Place::Group(group) => group.finish(&keep),
            Place::Gone => None,
        })
        .collect()
}

/// Puts a map into the latest group that takes it, or makes one of it. Returns its place.
fn join(places: &mut Vec<Place>, made: &Made, readers: &Readers, single: Group, with: With) -> usize {
    let loads = single.loads();
    let mut makers: Vec<usize> = loads.iter().filter_map(|b| made.get(b)).copied().collect();
    let mut siblings: Vec<usize> = match with {
        With::Makers => Vec::new(),
        With::Siblings => {
            single.large_loads().iter().filter_map(|b| readers.get(b)).flatten().copied().collect()
        }
    };
    for list in [&mut makers, &mut siblings] {
        list.sort_unstable_by(|a, b| b.cmp(a));
        list.dedup();
    }
    let ready = makers.first().copied().unwrap_or(0);
    let candidates: Vec<usize> = makers.into_iter().chain(siblings).filter(|at| *at >= ready).collect();
    for join in [Group::with, Group::widened_with] {
        for at in &candidates {
            if let Place::Group(group) = &places[*at]
                && group.steps() + single.steps() <= MOST_STEPS
                && let Some(joined) = join(group, &single)
            {
                places[*at] = Place::Group(joined);
                return *at;
            }
        }
    }
    places.push(Place::Group(single));
    places.len() - 1
}

/// Moves a group down into a later one that reads what it makes, so that this is not stored, if nothing between them reads
/// it.
fn sink(places: &mut [Place], made: &mut Made, readers: &mut Readers, from: usize, to: usize) {
    let (Place::Group(first), Place::Group(last)) = (&places[from], &places[to]) else { return };
    let (makes, loads) = (first.stores(), first.loads());
    let between = |at: &usize| from < *at && *at < to;
    let read = makes.iter().filter_map(|b| readers.get(b)).flatten().any(between);
    // What it adds to is read where it stands.
    let adds = loads.iter().any(|b| makes.contains(b));
    if read || adds || first.steps() + last.steps() > MOST_STEPS {
        return;
    }
    let Some(joined) = first.with(last) else { return };
    places[to] = Place::Group(joined);
    places[from] = Place::Gone;
    for b in makes {
        made.insert(b, to);
    }
    for b in loads {
        let all = readers.entry(b).or_default();
        all.iter_mut().filter(|at| **at == from).for_each(|at| *at = to);
    }
}

/// The map of a launch, if it is one.
fn map_of(instruction: &Instruction) -> Option<(&Kernel, &ir::kernel::Map)> {
    let kernel = instruction.kernel()?;
    match &kernel.body {
        Body::Map(map) => Some((kernel, map)),
        Body::Contract(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => None,
    }
}
