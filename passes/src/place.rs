//! After it every buffer has an offset in its region, and the regions have sizes: values that are never alive together
//! share memory.
//!
//! Last, since it needs to know of every instruction what it reads and writes. A map that reads an operand for the
//! last time, element by element, may write its result in the same place; so may an all_reduce.
//!
//! ```text
//! b3 = f32 8x32 @ [dp, _] scratch+?        ->        b3 = f32 8x32 @ [dp, _] scratch+128
//! ```

use std::collections::HashMap;

use ir::kernel::Body;
use ir::program::{ALIGN, Buffer, BufferId, Buffers, Instruction, Program, Region, Stage};
use ir::{Mesh, Move};

pub(crate) fn run(program: &mut Program) {
    for stage in &mut program.stages {
        place(stage, &program.mesh);
    }
}

/// Buffers that share one place: the first instruction that writes one, the last that uses one, and the bytes.
#[derive(Clone, Copy)]
struct Block {
    region: Region,
    segment: usize,
    first: usize,
    last: usize,
    bytes: usize,
}

fn place(stage: &mut Stage, mesh: &Mesh) {
    let lives = lives(stage);
    let mut owner: Vec<usize> = (0..stage.buffers.len()).collect();
    let mut blocks: Vec<Option<Block>> = lives
        .iter()
        .zip(&stage.buffers)
        .map(|(life, buffer)| {
            let (first, last, segment) = (*life)?;
            let bytes = buffer.bytes(mesh).next_multiple_of(ALIGN);
            Some(Block { region: buffer.region, segment, first, last, bytes })
        })
        .collect();
    for id in share(stage, mesh, &lives, &mut owner, &mut blocks) {
        stage.buffers[id.index()].region = Region::Step;
    }
    let mut offsets = vec![None; stage.buffers.len()];
    let mut sizes = [0usize; 4];
    let state = states(&stage.buffers, mesh, &mut offsets);
    for (size, region) in sizes.iter_mut().zip(Region::ALL) {
        *size = match region {
            Region::State => state,
            Region::Step | Region::Slot | Region::Scratch => fill(stage, &blocks, region, &mut offsets),
        };
    }
    for i in 0..stage.buffers.len() {
        let mut root = i;
        while owner[root] != root {
            root = owner[root];
        }
        stage.buffers[i].offset = offsets[root].or(Some(0));
    }
    stage.sizes = sizes;
}

fn states(buffers: &[Buffer], mesh: &Mesh, offsets: &mut [Option<usize>]) -> usize {
    let mut end = 0;
    for (i, buffer) in buffers.iter().enumerate().filter(|(_, b)| b.region == Region::State) {
        offsets[i] = Some(end);
        end += buffer.bytes(mesh).next_multiple_of(ALIGN);
    }
    end
}

type Life = Option<(usize, usize, usize)>;

/// For each buffer the first and last instruction that uses it, counted through all segments in the order in which a
/// micro-batch goes through those of a stage, and its segment. A collective uses its buffers until its wait.
fn lives(stage: &Stage) -> Vec<Life> {
    let mut lives: Vec<Life> = vec![None; stage.buffers.len()];
    let mut at = 0;
    for s in 0..stage.segments.len() {
        let mut open: HashMap<u32, Buffers> = HashMap::new();
        for instruction in &stage.segments[s].instructions {
            let mut used = instruction.reads();
            used.extend(instruction.writes());
            if let Some((token, _)) = instruction.started() {
                open.insert(token, used.clone());
            }
            if let Instruction::Wait { token } = instruction {
                used.extend(open.get(token).into_iter().flatten().copied());
            }
            for b in used {
                let life = lives[b.index()].get_or_insert((at, at, s));
                life.1 = at;
            }
            at += 1;
        }
    }
    lives
}

/// Joins the block of a result to that of an operand that dies where it is made, where the kernel allows it. Returns the
/// results that so lie among what is kept for a step.
fn share(
    stage: &Stage,
    mesh: &Mesh,
    lives: &[Life],
    owner: &mut [usize],
    blocks: &mut [Option<Block>],
) -> Vec<BufferId> {
    let mut kept: Vec<BufferId> = Vec::new();
    for (s, segment) in stage.segments.iter().enumerate() {
        let settled = settled(stage, s);
        // Where each collective is waited for, and how many read each buffer.
        let mut waits: HashMap<u32, usize> = HashMap::new();
        let mut sent: HashMap<BufferId, usize> = HashMap::new();
        for (i, instruction) in segment.instructions.iter().enumerate() {
            if let Instruction::Wait { token } = instruction {
                waits.insert(*token, i);
            }
            let parts = instruction.transfers();
            parts.iter().for_each(|p| *sent.entry(p.from).or_default() += 1);
        }
        for (i, instruction) in segment.instructions.iter().enumerate() {
            for (from, to) in in_place(instruction) {
                let (a, b) = (&stage.buffers[from.index()], &stage.buffers[to.index()]);
                // A collective holds both until its wait.
                let wait = instruction.started().map_or(0, |(token, ..)| waits[&token] - i);
                let (Some((_, last, _)), Some((first, ..))) = (lives[from.index()], lives[to.index()]) else {
                    continue;
                };
                // What else reads the operand meanwhile must not see the result; a collective that started before may.
                let other = wait > 0 && sent[&from] > 1;
                let mut beside = segment.instructions[i..i + wait].iter().skip(1);
                let sizes = a.bytes(mesh) == b.bytes(mesh)
                    && a.dtype == b.dtype
                    && !other
                    && !beside.any(|x| x.reads().contains(&from));
                let scratch = |b: &Buffer| b.region == Region::Scratch;
                // What is kept for a step is free behind its last use in a segment that runs once.
                let step = (a.region == Region::Step || kept.contains(&from)) && settled;
                let movable =
                    if step { scratch(b) || b.region == Region::Step } else { scratch(a) && scratch(b) };
                if !sizes || !movable || last != first + wait || owner[to.index()] != to.index() {
                    continue;
                }
                let mut root = from.index();
                while owner[root] != root {
                    root = owner[root];
                }
                let (Some(into), Some(mine)) = (blocks[root], blocks[to.index()]) else { continue };
                if into.last != last {
                    continue;
                }
                blocks[root] = Some(Block { last: mine.last, ..into });
                if step && scratch(b) {
                    kept.push(to);
                }
                blocks[to.index()] = None;
                owner[to.index()] = root;
            }
        }
    }
    kept
}

/// Whether a segment is called once, behind all calls of the segments before it: then a last use in it is the last of the
/// step.
fn settled(stage: &Stage, s: usize) -> bool {
    let own: Vec<usize> = (0..stage.calls.len()).filter(|c| stage.calls[*c].segment == s).collect();
    let later = |at: usize| stage.calls[at + 1..].iter().all(|c| c.segment > s);
    matches!(own[..], [at] if later(at))
}

/// The operands and results of an instruction that may lie in the same place.
fn in_place(instruction: &Instruction) -> Vec<(BufferId, BufferId)> {
    match instruction {
        Instruction::Start { parts, .. } => {
            let reduced = parts.iter().filter(|p| matches!(p.step, Move::AllReduce { .. }));
            reduced.map(|p| (p.from, p.to)).collect()
        }
        Instruction::Launch { kernel, reads, writes } => {
            let Body::Map(map) = &kernel.body else { return Vec::new() };
            let mut pairs: Vec<(BufferId, BufferId)> = Vec::new();
            for (w, to) in writes.iter().enumerate() {
                let free = |from: &BufferId| !pairs.iter().any(|(f, _)| f == from);
                let from = reads.iter().enumerate().find(|(r, from)| map.in_place(*r, w) && free(from));
                pairs.extend(from.map(|(_, from)| (*from, *to)));
            }
            pairs
        }
        Instruction::Feed { .. }
        | Instruction::Local { .. }
        | Instruction::Wait { .. }
        | Instruction::Assign { .. }
        | Instruction::Send { .. }
        | Instruction::Sent { .. }
        | Instruction::Receive { .. }
        | Instruction::Received { .. }
        | Instruction::Tap { .. } => Vec::new(),
    }
}

/// Places the blocks of a region, the largest first, each at the lowest offset that is free while it lives. Returns the
/// size of the region.
fn fill(stage: &Stage, blocks: &[Option<Block>], region: Region, offsets: &mut [Option<usize>]) -> usize {
    let mut ids: Vec<usize> =
        (0..blocks.len()).filter(|i| blocks[*i].is_some_and(|b| b.region == region)).collect();
    ids.sort_by_key(|i| (std::cmp::Reverse(blocks[*i].map_or(0, |b| b.bytes)), *i));
    // Scratch of one segment is free for the next, whatever their order; a slot is that of one stage at a time.
    let among = |b: &Block| match region {
        Region::Scratch => b.segment,
        Region::Slot => stage.segments[b.segment].stage,
        Region::State | Region::Step => 0,
    };
    let mut placed: HashMap<usize, Vec<(usize, Block)>> = HashMap::new();
    let mut size = 0;
    for i in ids {
        let Some(block) = blocks[i] else { continue };
        let placed = placed.entry(among(&block)).or_default();
        let together = |o: &Block| o.first <= block.last && block.first <= o.last;
        let mut busy: Vec<(usize, usize)> =
            placed.iter().filter(|(_, o)| together(o)).map(|(at, o)| (*at, at + o.bytes)).collect();
        busy.sort_unstable();
        let mut at = 0;
        for (from, to) in busy {
            if at + block.bytes <= from {
                break;
            }
            at = at.max(to);
        }
        offsets[i] = Some(at);
        size = size.max(at + block.bytes);
        placed.push((at, block));
    }
    size
}
