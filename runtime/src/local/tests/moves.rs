//! Every move on random meshes and shardings, in flight together, for every number of workers: equal to lockstep.

use ir::program::{BufferId, Call, Duty, Instruction, Program, Region, Segment, Stage};
use ir::schedule::Kind;
use ir::{Axes, Axis, DType, Mesh, Move, Reduce, Sharding, moves};
use proptest::prelude::*;

use super::super::load::{load, region};
use super::super::{Local, Taps};
use super::{buffer, place};
use crate::lockstep::apply;
use crate::pairs;
use crate::tensor::Tensor;

/// A random sharding: each axis splits a dimension, is partial in one of these ways, or does nothing.
fn sharding(mesh: &Mesh, dims: usize, ways: [Reduce; 2], dice: &[usize]) -> Sharding {
    let mut sharding = Sharding::replicated(dims);
    let mut axes: Vec<Axis> = mesh.all().collect();
    if dice[7].is_multiple_of(2) {
        axes.reverse();
    }
    for (i, axis) in axes.into_iter().enumerate() {
        match dice[i] % (dims + 3) {
            d if d < dims => sharding.dims[d].push(axis),
            d if d == dims => sharding.partial.push((axis, ways[0])),
            d if d == dims + 1 => sharding.partial.push((axis, ways[1])),
            _ => {}
        }
    }
    sharding.partial.sort();
    sharding
}

/// A program that does the moves one after the other, each with a buffer of its own, or in place where dice say so.
fn chain(
    mesh: &Mesh,
    shape: &[usize],
    from: &Sharding,
    steps: &[Move],
    in_place: bool,
) -> (Program, Vec<BufferId>) {
    let mut stage = Stage { slots: 1, ..Stage::default() };
    stage.buffers.push(buffer(DType::F32, shape, from.clone(), Region::Step));
    let mut ids = vec![BufferId(0)];
    let mut program =
        Program { mesh: mesh.clone(), microbatches: 1, stages: vec![stage], ..Program::default() };
    place(&mut program);
    let mut instructions = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        let stage = &mut program.stages[0];
        let before = ids[i];
        let source = stage.buffers[before.index()].clone();
        let mut target = buffer(DType::F32, shape, step.after(&source.sharding), Region::Step);
        let may = matches!(step, Move::AllReduce { .. } | Move::Slice { .. } | Move::ToPartial { .. });
        if in_place && may {
            target.offset = source.offset;
        }
        stage.buffers.push(target);
        let (from, to) = (before, BufferId(stage.buffers.len() as u32 - 1));
        ids.push(to);
        let (step, token) = (step.clone(), i as u32);
        if step.is_collective() {
            instructions.push(Instruction::start(token, step, from, to));
            instructions.push(Instruction::Wait { token });
        } else {
            instructions.push(Instruction::Local { step, from, to });
        }
        place(&mut program);
    }
    let stage = &mut program.stages[0];
    stage.segments.push(Segment { stage: 0, kind: Kind::Optimizer, duty: Duty::Work, instructions });
    stage.calls.push(Call { segment: 0, microbatch: None, slot: 0 });
    (program, ids)
}

impl Local {
    fn put(&mut self, id: BufferId, pieces: &[Tensor<f32>]) {
        for (rank, piece) in pieces.iter().enumerate() {
            let start = self.program.stages[0].address(id, 0);
            let arena = self.arenas[rank].start();
            // SAFETY: the piece is of the buffer's region, and no step runs.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.data.as_ptr(), arena.add(start).cast(), piece.data.len());
            }
        }
    }

    fn take(&self, id: BufferId) -> Vec<Vec<f32>> {
        let ranks = 0..self.arenas.len();
        ranks.map(|rank| bytemuck::cast_slice(self.piece(id, rank)).to_vec()).collect()
    }
}

/// What each rank holds at first: other numbers on each, with signs, such that the order of a sum shows.
fn pieces(mesh: &Mesh, shape: &[usize], from: &Sharding) -> Vec<Tensor<f32>> {
    let piece = |rank: usize| {
        let ranges = region(shape, from, mesh, &mesh.coordinate(rank));
        let shape: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
        Tensor::from_fn(&shape, |i| ((i * 7919 + rank * 104_729) % 2003) as f64 * 0.317 - 300.0)
    };
    (0..mesh.ranks()).map(piece).collect()
}

fn check(mesh: &Mesh, shape: &[usize], from: &Sharding, to: &Sharding, in_place: bool) {
    check_of(mesh, shape, from, to, in_place, pieces(mesh, shape, from));
}

fn check_of(
    mesh: &Mesh,
    shape: &[usize],
    from: &Sharding,
    to: &Sharding,
    in_place: bool,
    first: Vec<Tensor<f32>>,
) {
    let steps = moves(from, to, mesh);
    let last = steps.iter().fold(first.clone(), |at, step| apply(step, &at, mesh));
    let expected: Vec<Vec<f32>> = last.into_iter().map(|t| t.data).collect();
    let (program, ids) = chain(mesh, shape, from, &steps, in_place);
    for workers in [1, 2, mesh.ranks()] {
        for (inline, share) in [(0, 64), (usize::MAX, 128 << 10)] {
            let code = load(&program, share).unwrap();
            let mut local = Local::of(&program, code, workers, inline).unwrap();
            for _ in 0..2 {
                local.put(ids[0], &first);
                local.step(&[std::collections::BTreeMap::new()], &mut Taps::default()).unwrap();
                let got = local.take(*ids.last().unwrap());
                assert_eq!(got, expected, "{steps:?}, {workers} workers, inline below {inline}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn equal_to_lockstep(
        sizes in proptest::collection::vec(1usize..=4, 1..=3),
        shape in proptest::collection::vec(0usize..=9, 1..=3),
        a in proptest::collection::vec(0usize..60, 8),
        b in proptest::collection::vec(0usize..60, 8),
        in_place in any::<bool>(),
    ) {
        let text: Vec<String> = sizes.iter().enumerate().map(|(i, n)| format!("a{i}={n}")).collect();
        let mesh = Mesh::parse(&text.join(",")).unwrap();
        prop_assume!(mesh.ranks() <= 24);
        let ways = [Reduce::Sum, Reduce::Max];
        let from = sharding(&mesh, shape.len(), ways, &a);
        let mut to = sharding(&mesh, shape.len(), ways, &b);
        // Contributions of two kinds combine in no order: a partial axis keeps its kind, or goes.
        to.partial.retain(|p| from.partial.contains(p) || from.axes().all(|a| a != p.0));
        check(&mesh, &shape, &from, &to, in_place);
    }

    #[test]
    fn pairs_are_merged_as_in_lockstep(
        sizes in proptest::collection::vec(1usize..=4, 1..=3),
        shape in proptest::collection::vec(0usize..=9, 0..=2),
        k in 0usize..=5,
        a in proptest::collection::vec(0usize..60, 8),
        b in proptest::collection::vec(0usize..60, 8),
        in_place in any::<bool>(),
    ) {
        let text: Vec<String> = sizes.iter().enumerate().map(|(i, n)| format!("a{i}={n}")).collect();
        let mesh = Mesh::parse(&text.join(",")).unwrap();
        prop_assume!(mesh.ranks() <= 24);
        let pairs = |dice: &[usize]| {
            let mut sharding = sharding(&mesh, shape.len(), [Reduce::Top; 2], dice);
            sharding.dims.extend([Axes::new(), Axes::new()]);
            sharding
        };
        let (from, to) = (pairs(&a), pairs(&b));
        let shape: Vec<usize> = shape.iter().copied().chain([k, 2]).collect();
        let first = pieces(&mesh, &shape, &from).into_iter().map(sorted).collect();
        check_of(&mesh, &shape, &from, &to, in_place, first);
    }
}

/// The same numbers as pairs in order, of few values, so that some are equal.
fn sorted(mut piece: Tensor<f32>) -> Tensor<f32> {
    let block: usize = piece.shape.iter().rev().take(2).product();
    for block in piece.data.chunks_mut(block.max(1)) {
        let numbers = block.to_vec();
        pairs::clear(block);
        for pair in numbers.chunks(2) {
            pairs::insert(block, [(pair[0] / 100.0).round(), pair[1]]);
        }
    }
    piece
}

#[test]
fn large_ones_are_shared_out() {
    let mesh = Mesh::parse("a=2,b=3").unwrap();
    let parse = |text| Sharding::parse(text, &mesh).unwrap();
    for (from, to) in [
        ("[_, _] partial(a, b)", "[_, _]"),
        ("[a, b]", "[_, _]"),
        ("[_, _] partial(b)", "[_, b]"),
        ("[a.b, _]", "[a, b]"),
        ("[a, _]", "[_, a.b]"),
    ] {
        check(&mesh, &[257, 1031], &parse(from), &parse(to), true);
    }
}

#[test]
fn pieces_change_places() {
    let mesh = Mesh::parse("a=2,b=2,c=3").unwrap();
    let parse = |text| Sharding::parse(text, &mesh).unwrap();
    for (from, to) in [
        ("[a, b]", "[b, a]"),
        ("[a.b, c]", "[b.a, c]"),
        ("[a, _]", "[b, _]"),
        ("[a, _] partial(c)", "[b, _] partial(c)"),
    ] {
        let steps = moves(&parse(from), &parse(to), &mesh);
        assert!(matches!(steps[..], [Move::Permute { .. }]), "{steps:?}");
        check(&mesh, &[7, 5], &parse(from), &parse(to), false);
    }
}

#[test]
fn in_flight_together() {
    let mesh = Mesh::parse("a=2,b=3").unwrap();
    let from = Sharding::parse("[b, _] partial(a)", &mesh).unwrap();
    let shape = [7, 40];
    let steps =
        ["all_gather(b, dim 0)", "all_reduce(a)", "reduce_scatter(a, dim 1)", "all_to_all(b, dim 0 to 1)"]
            .map(|text| Move::parse(text, &mesh).unwrap());
    let mut stage = Stage { slots: 1, ..Stage::default() };
    stage.buffers.push(buffer(DType::F32, &shape, from.clone(), Region::Step));
    let mut instructions = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        stage.buffers.push(buffer(DType::F32, &shape, step.after(&from), Region::Step));
        let (token, step) = (i as u32, step.clone());
        instructions.push(Instruction::start(token, step, BufferId(0), BufferId(token + 1)));
    }
    instructions.extend([2, 0, 3, 1].map(|token| Instruction::Wait { token }));
    stage.segments.push(Segment { stage: 0, kind: Kind::Optimizer, duty: Duty::Work, instructions });
    stage.calls = vec![Call { segment: 0, microbatch: None, slot: 0 }; 20];
    let mut program =
        Program { mesh: mesh.clone(), microbatches: 1, stages: vec![stage], ..Program::default() };
    place(&mut program);
    let first = pieces(&mesh, &shape, &from);
    for workers in [1, 2, 3, 6] {
        for inline in [0, 500, usize::MAX] {
            let mut local = Local::of(&program, load(&program, 64).unwrap(), workers, inline).unwrap();
            local.put(BufferId(0), &first);
            for _ in 0..30 {
                local.step(&[std::collections::BTreeMap::new()], &mut Taps::default()).unwrap();
                for (i, step) in steps.iter().enumerate() {
                    let to = BufferId(i as u32 + 1);
                    let expected: Vec<_> = apply(step, &first, &mesh).into_iter().map(|t| t.data).collect();
                    assert_eq!(local.take(to), expected, "{step:?}, {workers} workers");
                    let nothing: Vec<_> = expected.iter().map(|d| Tensor::full(&[d.len()], 0.0)).collect();
                    local.put(to, &nothing);
                }
            }
        }
    }
}
