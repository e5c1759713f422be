//! The planted faults: what is wrong, how many of a hundred must be found, and what is broken for it. Where fewer than all
//! must be, some change nothing: the scale of zeros, one of two equal operands, the order of what does not meet.

use std::collections::HashSet;

use ir::kernel::{Access, Map, Step};
use ir::program::{BufferId, Instruction, Program, Region};
use ir::{Binary, Mesh, Move, Reduce, Unary};

use super::Broken::{
    self, Collective, Contraction, Dropped, Late, Map as InMap, Program as InProgram, Scatter,
};

pub const FAULTS: &[(&str, usize, Broken)] = &[
    ("a store has its loops in another order", 90, InMap(|m| any(m, |s| store(s).is_some_and(reverse)))),
    ("a load has its loops in another order", 80, InMap(|m| any(m, |s| load(s).is_some_and(reverse)))),
    ("a load is of another operand", 80, InMap(other_operand)),
    ("a product has another scale", 60, InMap(|m| any(m, scale))),
    ("a sum lacks its last operand", 60, InMap(|m| any(m, less))),
    ("a difference is turned", 60, InMap(|m| any(m, turned))),
    ("a choice is turned", 50, InMap(|m| any(m, chosen))),
    ("a function is another", 60, InMap(|m| any(m, function))),
    ("a row is reduced otherwise", 60, InMap(|m| any(m, row))),
    ("an accumulation is another", 60, InMap(|m| any(m, accumulation))),
    ("a random number is of another name", 60, InMap(|m| any(m, renamed))),
    ("a random number counts over a loop less", 50, InMap(|m| any(m, counts_less))),
    ("a step reads a later register", 100, InMap(late_register)),
    ("a contraction has another scale", 60, Contraction(|c| set(&mut c.scale, 3.0))),
    (
        "a contraction runs over fewer of its split loops",
        100,
        Contraction(|c| c.loops.iter_mut().any(|l| l.axes.pop().is_some())),
    ),
    ("a scatter looks up another loop", 60, Scatter(|s| set(&mut s.looked, 0))),
    ("a collective combines otherwise", 60, Collective(combine)),
    ("a collective is over its axes in another order", 90, Collective(reorder)),
    ("a collective is over fewer axes", 100, Collective(fewer)),
    ("a collective is over another axis", 60, Collective(other_axis)),
    ("a collective is of another dimension", 90, Collective(dimension)),
    ("a wait is missing", 100, Dropped(|i| matches!(i, Instruction::Wait { .. }))),
    ("a feed is missing", 100, Dropped(|i| matches!(i, Instruction::Feed { .. }))),
    ("a launch is missing", 90, Dropped(|i| matches!(i, Instruction::Launch { .. }))),
    ("a local move is missing", 100, Dropped(|i| matches!(i, Instruction::Local { .. }))),
    ("an assignment is missing", 60, Dropped(|i| matches!(i, Instruction::Assign { .. }))),
    ("a tap is missing", 100, InProgram(untapped)),
    ("a wait is late", 60, Late(|i| matches!(i, Instruction::Wait { .. }))),
    ("two live buffers have one place", 90, InProgram(one_place)),
    (
        "a region is too small",
        100,
        InProgram(|p| p.stages[0].sizes.iter_mut().rev().any(|s| *s > 0 && set(s, *s - 64))),
    ),
    ("a buffer is whole that was split", 100, InProgram(whole)),
    ("the last segment is called first", 60, InProgram(last_first)),
    ("two taps are of each other's values", 60, InProgram(taps)),
];

/// Sets what is another; whether it was.
fn set<T: PartialEq>(at: &mut T, to: T) -> bool {
    let other = *at != to;
    *at = to;
    other
}

/// Changes the last step that can be changed, so that what follows from it is little.
fn any(map: &mut Map, change: impl Fn(&mut Step) -> bool) -> bool {
    map.steps.iter_mut().rev().any(change)
}

fn store(step: &mut Step) -> Option<&mut Access> {
    if let Step::Store { access, .. } = step { Some(access) } else { None }
}

fn load(step: &mut Step) -> Option<&mut Access> {
    if let Step::Load { access, .. } = step { Some(access) } else { None }
}

fn reverse(access: &mut Access) -> bool {
    access.reverse();
    access.first() != access.last()
}

fn other_operand(map: &mut Map) -> bool {
    let reads = map.steps.iter().filter_map(Step::load).map(|(read, _)| read).max().unwrap_or(0);
    any(map, |s| {
        if let Step::Load { read, .. } = s {
            reads > 0 && set(read, (*read + 1) % (reads + 1))
        } else {
            false
        }
    })
}

fn scale(step: &mut Step) -> bool {
    if let Step::Mul(scale, of) = step { !of.is_empty() && set(scale, 1.5 * *scale) } else { false }
}

fn less(step: &mut Step) -> bool {
    if let Step::Add(of) = step { of.len() > 1 && of.pop().is_some() } else { false }
}

fn turned(step: &mut Step) -> bool {
    let Step::Binary(Binary::Sub | Binary::Div | Binary::Ge, x, y) = step else { return false };
    std::mem::swap(x, y);
    x != y
}

fn chosen(step: &mut Step) -> bool {
    let Step::Select(_, x, y) = step else { return false };
    std::mem::swap(x, y);
    x != y
}

fn function(step: &mut Step) -> bool {
    let other = |f: Unary| match f {
        Unary::Sin => Unary::Cos,
        Unary::Cos | Unary::Tanh => Unary::Sin,
        Unary::Exp => Unary::Expm1,
        Unary::Abs | Unary::Relu => Unary::Stop,
        Unary::Sqrt => Unary::Rsqrt,
        Unary::Step => Unary::Sign,
        Unary::Expm1 | Unary::Log | Unary::Rsqrt | Unary::Sigmoid | Unary::Sign | Unary::Stop => Unary::Exp,
    };
    if let Step::Unary(f, _) = step { set(f, other(*f)) } else { false }
}

fn otherwise(reduce: &mut Reduce) -> bool {
    let other = if *reduce == Reduce::Sum { Reduce::Max } else { Reduce::Sum };
    set(reduce, other)
}

fn row(step: &mut Step) -> bool {
    if let Step::Row(reduce, _) = step { otherwise(reduce) } else { false }
}

fn accumulation(step: &mut Step) -> bool {
    if let Step::Accumulate { reduce, .. } = step { otherwise(reduce) } else { false }
}

fn renamed(step: &mut Step) -> bool {
    if let Step::Random { draw, .. } = step { set(&mut draw.name, "other".into()) } else { false }
}

fn counts_less(step: &mut Step) -> bool {
    if let Step::Random { inner, .. } = step { inner.pop().is_some() } else { false }
}

fn late_register(map: &mut Map) -> bool {
    let n = map.steps.len();
    any(map, |s| if let Step::Unary(_, r) = s { set(r, n) } else { false })
}

fn combine(step: &mut Move, _: &Mesh) -> bool {
    if let Move::AllReduce { reduce, .. } | Move::ReduceScatter { reduce, .. } = step {
        otherwise(reduce)
    } else {
        false
    }
}

fn axes(step: &mut Move) -> Option<&mut Vec<ir::Axis>> {
    let (Move::AllReduce { axes, .. }
    | Move::ReduceScatter { axes, .. }
    | Move::AllGather { axes, .. }
    | Move::AllToAll { axes, .. }) = step
    else {
        return None;
    };
    Some(axes)
}

/// Of an all_reduce the order says nothing, and of an all_gather nothing that a backend which goes by regions needs.
fn reorder(step: &mut Move, mesh: &Mesh) -> bool {
    let orderless = matches!(step, Move::AllReduce { .. } | Move::AllGather { .. });
    let Some(axes) = axes(step) else { return false };
    axes.reverse();
    !orderless && axes.iter().filter(|a| mesh.size(**a) > 1).count() > 1
}

fn fewer(step: &mut Move, _: &Mesh) -> bool {
    axes(step).is_some_and(|axes| axes.len() > 1 && axes.pop().is_some())
}

fn other_axis(step: &mut Move, mesh: &Mesh) -> bool {
    let Some(axes) = axes(step) else { return false };
    let other = mesh.all().find(|a| mesh.size(*a) > 1 && !axes.contains(a));
    other.is_some_and(|other| set(axes, vec![other]))
}

fn dimension(step: &mut Move, _: &Mesh) -> bool {
    if let Move::AllToAll { from, to, .. } = step {
        std::mem::swap(from, to);
        return true;
    }
    let (Move::ReduceScatter { dim, .. } | Move::AllGather { dim, .. }) = step else { return false };
    set(dim, 0)
}

/// Of one micro-batch: what is tapped of each of several is not looked at.
fn untapped(program: &mut Program) -> bool {
    if program.microbatches > 1 {
        return false;
    }
    for segment in &mut program.stages[0].segments {
        if let Some(at) = segment.instructions.iter().position(|i| matches!(i, Instruction::Tap { .. })) {
            segment.instructions.remove(at);
            return true;
        }
    }
    false
}

/// Two operands of a launch that lie apart.
fn one_place(program: &mut Program) -> bool {
    let stage = &mut program.stages[0];
    let scratch = |b: &BufferId| stage.buffers[b.index()].region == Region::Scratch;
    let pair = stage.segments.iter().flat_map(|s| &s.instructions).find_map(|i| {
        let Instruction::Launch { reads, .. } = i else { return None };
        let mine: Vec<BufferId> = reads.iter().copied().filter(scratch).collect();
        let large = |b: &BufferId| stage.buffers[b.index()].bytes(&program.mesh) > 0;
        if let [a, b, ..] = mine[..] { (large(&a) && large(&b)).then_some((a, b)) } else { None }
    });
    let Some((a, b)) = pair else { return false };
    let offset = stage.buffers[b.index()].offset;
    set(&mut stage.buffers[a.index()].offset, offset)
}

/// A split buffer that something reads or writes.
fn whole(program: &mut Program) -> bool {
    let stage = &mut program.stages[0];
    let all = stage.segments.iter().flat_map(|s| &s.instructions);
    let launched: HashSet<BufferId> =
        all.filter(|i| matches!(i, Instruction::Launch { .. })).flat_map(Instruction::writes).collect();
    let mut split =
        stage.buffers.iter_mut().enumerate().filter(|(i, _)| launched.contains(&BufferId(*i as u32)));
    split.any(|(_, b)| b.sharding.dims.iter_mut().any(|d| d.pop().is_some()))
}

fn last_first(program: &mut Program) -> bool {
    let calls = &mut program.stages[0].calls;
    calls.reverse();
    calls.len() > 1
}

/// Two taps of buffers alike.
fn taps(program: &mut Program) -> bool {
    let stage = &mut program.stages[0];
    let buffers = stage.buffers.clone();
    let mut taps: Vec<&mut BufferId> = Vec::new();
    for instruction in stage.segments.iter_mut().flat_map(|s| &mut s.instructions) {
        if let Instruction::Tap { from, .. } = instruction {
            taps.push(from);
        }
    }
    let Some((first, rest)) = taps.split_first_mut() else { return false };
    let alike = |b: BufferId| buffers[b.index()].shape == buffers[first.index()].shape && b != **first;
    let Some(other) = rest.iter_mut().find(|b| alike(***b)) else { return false };
    std::mem::swap(*first, *other);
    true
}
