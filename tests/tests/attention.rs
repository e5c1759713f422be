//! Attention is one kernel forward and one backward, in every model and however it is split: nothing that has queries and
//! keys is stored. It gives what its kernels give one by one.

use ir::graph::Recompute;
use ir::kernel::Body;
use ir::program::{Instruction, Program};
use meshc_tests::oracle::{Oracle, read};
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, split_step_with};
use models::Dropout;
use planner::zero::Zero;
use runtime::data::rows::Rows;
use runtime::local::{Local, Taps};

fn launches(program: &Program) -> impl Iterator<Item = &Instruction> {
    program.stages.iter().flat_map(|s| &s.segments).flat_map(|s| &s.instructions)
}

/// How many chains there are, and what is stored with queries and keys.
fn found(program: &Program) -> (usize, Vec<String>) {
    let (mut chains, mut stored) = (0, Vec::new());
    for instruction in launches(program) {
        let Instruction::Launch { kernel, writes, .. } = instruction else { continue };
        chains += usize::from(matches!(kernel.body, Body::Chain(_)));
        for u in kernel.uses().into_iter().filter(|u| u.written) {
            let has = |name: &str| u.dims.iter().flatten().any(|l| &*l.name == name);
            if has("s") && has("t") {
                stored.push(format!("{}", writes[u.operand]));
            }
        }
    }
    (chains, stored)
}

/// All passes on the program of a step but the one that makes chains.
fn without_chains(sharded: &ir::ShardedGraph) -> Program {
    let mut program = passes::lower(sharded);
    passes::PROGRAM.iter().filter(|p| p.name != "chain").for_each(|pass| (pass.run)(&mut program));
    program
}

#[test]
fn nothing_is_stored_that_has_queries_and_keys() {
    let zero = Split { zero: Zero::Parameters, microbatches: 2, ..PLAIN };
    let piped = Split { schedule: Some(("zb-h1", 1)), microbatches: 4, ..PLAIN };
    let selective = Split { recompute: Recompute::Selective, ..PLAIN };
    let cases = [
        ("llama", "", PLAIN, 8),
        ("llama", "dp=2,tp=2", zero, 8),
        ("llama", "tp=4", PLAIN, 8),
        // What is computed again is a chain, too.
        ("llama", "", selective, 12),
        ("llama_deep", "pp=2", piped, 16),
        ("gpt2", "tp=2", PLAIN, 8),
        ("gemma2", "dp=2", PLAIN, 4),
        ("mistral", "tp=2", PLAIN, 4),
        ("qwen2", "dp=2,tp=2", PLAIN, 4),
        ("qwen3", "", PLAIN, 4),
    ];
    for (model, mesh, split, needed) in cases {
        // A mask that both chains of a backward pass read is stored.
        let rates: &[f64] = if split.recompute == Recompute::Selective { &[0.0] } else { &[0.0, 0.1] };
        for dropout in rates.iter().map(|p| Dropout::Everywhere(*p)) {
            let oracle = read(model);
            let (compiled, _) = split_step_with(&oracle, dropout, mesh, split, false, &mut |_, _| {});
            let (chains, stored) = found(&compiled.program);
            let text = format!("{model} on `{mesh}`, {split:?}, {dropout:?}");
            assert_eq!(stored, Vec::<String>::new(), "{text}");
            assert_eq!(chains, needed, "{text}");
        }
    }
}

/// Losses and norms of a few steps.
fn run(program: &Program, oracle: &Oracle, rows: &Rows) -> Vec<f32> {
    let mut local = Local::new(program, 1).unwrap();
    fill(&mut local, program, oracle);
    let mut numbers = Vec::new();
    for step in 0..3 {
        let mut taps = Taps::of(["loss", "grad_norm"]);
        local.step(&all_feeds(oracle, rows, step), &mut taps).unwrap();
        numbers.extend(["loss", "grad_norm"].map(|name| taps.number(name).unwrap()));
    }
    numbers
}

#[test]
fn chains_give_what_their_kernels_give() {
    for (model, mesh, p) in [("llama", "dp=2,tp=2", 0.0), ("gemma2", "", 0.0), ("gpt2", "tp=2", 0.25)] {
        let oracle = read(model);
        let dropout = Dropout::Everywhere(p);
        let (compiled, rows) = split_step_with(&oracle, dropout, mesh, PLAIN, false, &mut |_, _| {});
        let apart = without_chains(&compiled.sharded);
        assert_eq!(found(&apart).0, 0);
        let (chained, apart) = (run(&compiled.program, &oracle, &rows), run(&apart, &oracle, &rows));
        // Sums over queries and keys are cut otherwise; the losses are means of some hundred of them, in f32.
        for (x, y) in chained.iter().zip(&apart) {
            assert!((x - y).abs() <= 2e-5 * y.abs(), "{model}: {chained:?}, not {apart:?}");
        }
    }
}
