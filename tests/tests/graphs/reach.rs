//! What is drawn reaches everything: every op, every move, every kind of kernel, every way to lie.

use std::collections::BTreeSet;

use ir::kernel::{Body, Contract};
use ir::program::Instruction;
use ir::schedule::Kind;
use ir::{Binary, Move, Op, Unary};

use crate::build::Builder;
use crate::check::compiled_anyhow;
use crate::recipe::Recipe;

/// An op without its attribute.
fn name(op: &Op) -> String {
    let text = op.to_string();
    text.split('(').next().unwrap_or(&text).to_string()
}

/// Whether a loop is in both operands and the result, so that there is a product for each point of it.
fn batched(c: &Contract) -> bool {
    let has = |access: &ir::kernel::Access, l: usize| access.iter().flatten().any(|x| *x == l);
    (0..c.loops.len()).any(|l| has(&c.a, l) && has(&c.b, l) && has(&c.out, l))
}

/// What a kernel is called here.
fn body(of: &Body) -> &'static str {
    if let Body::Map(map) = of {
        return if map.steps.len() > 12 { "a long map" } else { "a map" };
    }
    if let Body::Contract(c) = of {
        return if batched(c) { "a contraction in batches" } else { "a contraction" };
    }
    if let Body::Scatter(_) = of { "a sum by index" } else { "another" }
}

#[test]
fn every_op_move_and_kernel_is_drawn() {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for seed in 0..300 {
        let Some(compiled) = compiled_anyhow(&Builder::build(&Recipe::draw(seed)), seed) else { continue };
        let (graph, mesh) = (&compiled.sharded.graph, &compiled.sharded.mesh);
        seen.extend(graph.nodes.iter().map(|n| name(&n.op)));
        for (n, axes) in graph
            .values
            .iter()
            .zip(&compiled.sharded.shardings)
            .flat_map(|(t, s)| t.shape.iter().zip(&s.dims))
        {
            seen.extend((axes.len() > 1).then(|| "several axes on a dimension".to_string()));
            let pieces = mesh.pieces(axes);
            seen.extend((!n.is_multiple_of(pieces)).then(|| "uneven pieces".to_string()));
            seen.extend((*n < pieces).then(|| "empty pieces".to_string()));
        }
        let passes = compiled.program.stages[0].segments.iter().filter(|s| s.kind == Kind::Backward).count();
        seen.extend((passes > 1).then(|| "a last backward pass".to_string()));
        for instruction in compiled.program.stages[0].segments.iter().flat_map(|s| &s.instructions) {
            let local = if let Instruction::Local { step, .. } = instruction { Some(step) } else { None };
            seen.extend((instruction.transfers().len() > 1).then(|| "a bucket".to_string()));
            for step in instruction.transfers().iter().map(|p| &p.step).chain(local) {
                let max = matches!(step, Move::AllReduce { reduce: ir::Reduce::Max, .. });
                seen.insert(if max { "all_reduce(max)".to_string() } else { step.name().to_string() });
                seen.extend((step.axes().len() > 1).then(|| "a move over several axes".to_string()));
            }
            if let Instruction::Launch { kernel, .. } = instruction {
                seen.insert(body(&kernel.body).to_string());
            }
        }
    }
    let ops =
        ["input", "state", "const", "iota", "einsum", "add", "reduce_max", "select", "gather", "scatter"];
    let more = ["cast", "accumulate", "reshard", "assign", "tap"];
    let moves =
        ["all_reduce", "all_reduce(max)", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "slice"];
    let ways = [
        "a bucket",
        "a last backward pass",
        "a move over several axes",
        "several axes on a dimension",
        "uneven pieces",
        "empty pieces",
    ];
    let kernels = ["a long map", "a map", "a contraction in batches", "a contraction", "a sum by index"];
    let functions = Unary::ALL.iter().map(|u| u.name()).chain(Binary::ALL.iter().map(|b| b.name()));
    let all = [&ops[..], &more, &moves, &ways, &kernels].concat();
    let missing: Vec<&str> = all.into_iter().chain(functions).filter(|n| !seen.contains(*n)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}
