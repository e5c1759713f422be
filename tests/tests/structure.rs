//! What is communicated, read off the program: data parallelism is one all_reduce of each gradient and two scalars,
//! tensor parallelism as much as two of [tokens, hidden] a layer and direction, and nothing wide is moved.

use std::collections::BTreeMap;

use ir::program::{Instruction, Program, Transfer};
use ir::schedule::Kind;
use ir::state::Role;
use meshc_tests::oracle::read;
use meshc_tests::whole::training_step;
use passes::Compiled;
use planner::cost::{Lies, message};

/// A collective: what, over which axes, in which segment, of which global shape.
#[derive(Clone, Debug, PartialEq)]
struct Call {
    op: &'static str,
    axes: String,
    kind: Kind,
    shape: Vec<usize>,
}

fn calls(program: &Program) -> Vec<Call> {
    let stage = &program.stages[0];
    let mut out = Vec::new();
    for segment in &stage.segments {
        for instruction in &segment.instructions {
            for Transfer { step, from, .. } in instruction.transfers() {
                let (axes, shape) =
                    (program.mesh.show(step.axes()), stage.buffers[from.index()].shape.clone());
                out.push(Call { op: step.name(), axes, kind: segment.kind, shape });
            }
        }
    }
    out
}

const LAYERS: usize = 4;
/// Rows, tokens and width of both oracles.
const HIDDEN: [usize; 3] = [8, 32, 32];

#[test]
fn data_parallelism_is_one_all_reduce_a_gradient_and_two_scalars() {
    for model in ["gpt2", "llama"] {
        for mesh in ["dp=2", "dp=4", "dp=3"] {
            let program = training_step(&read(model), mesh, false, &mut |_, _| {}).program;
            let calls = calls(&program);
            assert!(
                calls.iter().all(|c| c.op == "all_reduce" && c.axes == "dp"),
                "{model} {mesh}: {calls:?}"
            );
            let scalars = calls.iter().filter(|c| c.shape.is_empty()).count();
            assert_eq!(scalars, 2, "the sum of losses and the count");
            let mut gradients: Vec<Vec<usize>> =
                calls.iter().filter(|c| !c.shape.is_empty()).map(|c| c.shape.clone()).collect();
            let parameters = program.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. }));
            let mut wanted: Vec<Vec<usize>> = parameters.map(|s| s.shape()).collect();
            gradients.sort();
            wanted.sort();
            assert_eq!(gradients, wanted, "{model} {mesh}");
        }
    }
}

/// What a rank sends of activations, in units of (n - 1) / n of [tokens, hidden], by layer and direction.
fn activations(compiled: &Compiled, mesh: &ir::Mesh) -> BTreeMap<(u32, bool), f64> {
    let graph = &compiled.sharded.graph;
    let makers = graph.makers();
    let stage = &compiled.program.stages[0];
    let mut sent = BTreeMap::new();
    for segment in stage.segments.iter().filter(|s| s.kind != Kind::Optimizer) {
        for Transfer { step, from, to } in segment.instructions.iter().flat_map(Instruction::transfers) {
            let (from, to) = (&stage.buffers[from.index()], &stage.buffers[to.index()]);
            let data = mesh.find("dp").unwrap_or_default();
            if from.shape != HIDDEN || step.axes().iter().any(|a| data.contains(a)) {
                continue;
            }
            let value = from.value.or(to.value).unwrap();
            let message = message(step, Lies::of(from), Lies::of(to), mesh);
            let n = message.group as f64;
            let rows = HIDDEN[0].div_ceil(mesh.pieces(&data));
            let unit = (n - 1.0) / n * (rows * HIDDEN[1] * HIDDEN[2] * 4) as f64;
            let layer = graph.nodes[makers[value.index()]].mark.layer;
            *sent.entry((layer, segment.kind == Kind::Forward)).or_insert(0.0) += message.wire_bytes / unit;
        }
    }
    sent
}

/// Two all_reduces, or as many bytes: what is gathered before the wide products is scattered behind them. The embedding
/// adds to the first layer, the head's input to the last.
#[test]
fn tensor_parallelism_is_four_shares_of_the_activations_a_layer_and_direction() {
    for (model, wide) in [("gpt2", [128, 103]), ("llama", [88, 101])] {
        for mesh in ["tp=2", "tp=3", "tp=4", "dp=2,tp=2", "tp=2,dp=2", "dp=2,tp=4"] {
            let compiled = training_step(&read(model), mesh, false, &mut |_, _| {});
            // Uneven pieces are padded: 11 of 32 tokens are a third.
            let padding = if mesh == "tp=3" { 33.0 / 32.0 } else { 1.0 };
            for ((layer, forward), units) in activations(&compiled, &compiled.program.mesh) {
                let ends = layer == 0 || layer as usize == LAYERS - 1;
                let most = if ends { 6.0 } else { 4.0 };
                assert!(
                    units <= most * padding + 1e-9,
                    "{model} {mesh}: layer {layer}, forward {forward}: {units}"
                );
            }
            for call in calls(&compiled.program).iter().filter(|c| c.axes.starts_with("tp")) {
                let moved = call.shape.iter().any(|n| wide.contains(n));
                assert!(!moved, "{model} {mesh}: {call:?} moves what is wide");
                let known = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"].contains(&call.op);
                assert!(known, "{model} {mesh}: {call:?}");
            }
        }
    }
}

/// The conventions are kept: `tp` splits no batch and is never taken off a matrix parameter, `dp` stays with the batch.
#[test]
fn conventions_are_kept() {
    for model in meshc_tests::whole::MODELS {
        for mesh in ["tp=2", "tp=4", "dp=2,tp=2", "tp=3", "dp=2,tp=4"] {
            let sharded = training_step(&read(model), mesh, false, &mut |_, _| {}).sharded;
            let (graph, makers) = (&sharded.graph, sharded.graph.makers());
            let [tp, dp] = ["tp", "dp"].map(|name| sharded.mesh.find(name).unwrap_or_default());
            for (node, strategy) in graph.nodes.iter().zip(&sharded.decisions.strategies) {
                let at = format!("{model} {mesh}: {} {}", node.op, node.signature);
                if let Some(b) = node.signature.factor("b").filter(|_| node.op != ir::Op::Reshard) {
                    assert!(strategy.split[b].iter().all(|a| !tp.contains(a)), "{at} splits the batch by tp");
                    assert!(dp.iter().all(|a| strategy.split[b].contains(a)), "{at} does not split it by dp");
                }
                let from = node.args.first().map(|v| makers[v.index()]);
                if let (ir::Op::Reshard, Some(ir::Op::State(name))) =
                    (&node.op, from.map(|i| &graph.nodes[i].op))
                {
                    let [from, to] = [node.args[0], node.results[0]].map(|v| sharded.sharding(v));
                    let large = graph.shape(node.args[0]).iter().filter(|n| **n > 1).count() > 1;
                    let kept = from
                        .dims
                        .iter()
                        .zip(&to.dims)
                        .all(|(a, b)| a.iter().all(|x| !tp.contains(x) || b.contains(x)));
                    assert!(!large || kept, "{at}: {name} is gathered over tp");
                }
            }
        }
    }
}

#[test]
fn every_printed_form_parses_back_to_itself() {
    for (model, mesh) in [("gpt2", "dp=2,tp=2"), ("llama", "tp=3"), ("llama", "")] {
        let mut names = Vec::new();
        training_step(&read(model), mesh, true, &mut |name, form| {
            let text = form.to_string();
            let again = match text.split_whitespace().next() {
                Some("graph") => ir::parse_graph(&text).map(|g| g.to_string()),
                Some("sharded") => ir::parse_sharded(&text).map(|g| g.to_string()),
                Some(_) | None => ir::parse_program(&text).map(|p| p.to_string()),
            };
            assert_eq!(again.as_deref(), Ok(&*text), "{model} on `{mesh}` after {name}");
            names.push(name);
        });
        assert_eq!(names.len(), 19);
    }
}

/// No rank holds more than its share of the vocabulary's columns, and nothing else grows with the vocabulary.
#[test]
fn no_rank_holds_more_logits_than_its_share() {
    for model in ["gpt2", "llama", "gemma2"] {
        let oracle = read(model);
        let vocabulary = models::vocabulary(&models::Config::read(&oracle.folder).unwrap()).unwrap();
        for (mesh, tp) in
            [("tp=2", 2usize), ("tp=3", 3), ("tp=4", 4), ("tp=8", 8), ("dp=2,tp=4", 4), ("tp=5,dp=2", 5)]
        {
            let program = training_step(&oracle, mesh, false, &mut |_, _| {}).program;
            let mut wide = 0;
            for buffer in &program.stages[0].buffers {
                let local = ir::local_shape(&buffer.shape, &buffer.sharding, &program.mesh);
                if !buffer.shape.contains(&vocabulary) {
                    continue;
                }
                // The columns of logits; of a table, and what belongs to it, some dimension.
                let share = |(n, mine): (&usize, &usize)| *mine <= n.div_ceil(tp);
                let mut dims = buffer.shape.iter().zip(&local);
                let held = match buffer.shape.len() {
                    2 => dims.any(share),
                    _ => dims.filter(|(n, _)| **n == vocabulary).all(share),
                };
                assert!(held, "{model} on {mesh}: {local:?} of {:?}", buffer.shape);
                wide += 1;
            }
            assert!(wide >= 4, "{model} on {mesh}: logits, table, moments");
        }
    }
}
