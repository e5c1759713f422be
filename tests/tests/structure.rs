//! What is communicated, read off the program: data parallelism is one all_reduce of each gradient and two scalars,
//! tensor parallelism two of [tokens, hidden] a layer and direction, and nothing is gathered.

use ir::program::{Instruction, Program};
use ir::schedule::Kind;
use ir::state::Role;
use meshc_tests::oracle::read;
use meshc_tests::whole::training_step;

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
            if let Instruction::Start { step, from, .. } = instruction {
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

#[test]
fn tensor_parallelism_is_two_all_reduces_a_layer_and_direction() {
    for model in ["gpt2", "llama"] {
        for mesh in ["tp=2", "tp=3", "tp=4", "dp=2,tp=2", "tp=2,dp=2", "dp=2,tp=4"] {
            let program = training_step(&read(model), mesh, false, &mut |_, _| {}).program;
            let calls = calls(&program);
            assert!(calls.iter().all(|c| c.op == "all_reduce"), "{model} {mesh}: {calls:?}");
            let tp: Vec<&Call> = calls.iter().filter(|c| c.axes.starts_with("tp")).collect();
            let hidden = |kind: Kind| tp.iter().filter(|c| c.kind == kind && c.shape == HIDDEN).count();
            // One more for the embedding, split over the vocabulary, and one for the gradient of the head's input.
            assert_eq!(hidden(Kind::Forward), 2 * LAYERS + 1, "{model} {mesh}");
            assert_eq!(hidden(Kind::Backward), 2 * LAYERS + 1, "{model} {mesh}");
            let rest: Vec<&&Call> = tp.iter().filter(|c| c.shape != HIDDEN).collect();
            // The largest logit, the sum of exponentials, the picked logit; and the norm of the gradient.
            let tokens = rest.iter().filter(|c| c.kind == Kind::Forward && c.shape == HIDDEN[..2]).count();
            let norm = rest.iter().filter(|c| c.kind == Kind::Optimizer && c.shape.is_empty()).count();
            // Where `tp` is refined, keys and values are replicated over its second part, and their gradients summed.
            let kv = rest
                .iter()
                .filter(|c| c.kind == Kind::Backward && c.axes == "tp1" && c.shape.len() == 5)
                .count();
            let refined = !program.mesh.aliases.is_empty();
            assert_eq!(kv, if refined { 2 * LAYERS } else { 0 }, "{model} {mesh}: {rest:?}");
            assert_eq!((tokens, norm, rest.len()), (3, 1, 4 + kv), "{model} {mesh}: {rest:?}");
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
        assert_eq!(names.len(), 12);
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
                for (n, mine) in buffer.shape.iter().zip(&local).filter(|(n, _)| **n == vocabulary) {
                    assert!(
                        *mine <= n.div_ceil(tp),
                        "{model} on {mesh}: {mine} of {n} columns in {:?}",
                        buffer.shape
                    );
                    wide += 1;
                }
            }
            assert!(wide >= 4, "{model} on {mesh}: logits, table, moments");
        }
    }
}
