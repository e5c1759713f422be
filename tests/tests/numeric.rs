//! The planner's numeric checks find what is wrong with a model and say where: a faulty kernel in lockstep, a faulty
//! program on CPUs, collectives that are not those of the plan.

use std::ops::Range;
use std::sync::Arc;

use ir::kernel::{Body, Step};
use ir::program::{BufferId, Instruction, Program};
use ir::schedule::Kind;
use ir::{Binary, Mesh, Node, Op, ShardedGraph, Unary};
use meshc_tests::oracle::read;
use meshc_tests::whole::here;
use models::{Config, Shape};
use passes::Compiled;
use planner::check::check;
use planner::hang::{Transport, ends};
use planner::numeric::{feeds, lockstep, program};
use runtime::eval::eval;
use runtime::lockstep::Kernel;
use runtime::tensor::Tensor;

const MODELS: [&str; 2] = ["gpt2", "llama"];

/// A short training step of an oracle's model on four ranks.
fn compiled(model: &str) -> Compiled {
    let oracle = read(model);
    let config = Config::read(&oracle.folder).unwrap();
    let mut graph = models::build(&config, Shape { batch: 4, sequence: 6 }).unwrap();
    graph.optimizer = Some(oracle.adamw());
    graph.dump = true;
    let mesh = Mesh::parse("dp=2,tp=2").unwrap();
    let places = planner::conventions::places(&graph, &mesh);
    planner::choose::compile(graph, &mesh, places, &here(), &mut |_, _| {})
}

type Args<'a> = &'a [&'a Tensor<f64>];

/// A rank's kernel takes the ranges of one kind of op to start at 0.
fn from_zero(op: &Op, node: &Node, ranges: &[Range<usize>], args: Args) -> Tensor<f64> {
    let zero: Vec<Range<usize>> = ranges.iter().map(|r| 0..r.len()).collect();
    eval(node, if node.op == *op { &zero } else { ranges }, args)
}

/// A rank's kernel takes one op for another.
fn instead(op: &Op, other: Op, node: &Node, ranges: &[Range<usize>], args: Args) -> Tensor<f64> {
    let wrong = Node { op: other, ..node.clone() };
    eval(if node.op == *op { &wrong } else { node }, ranges, args)
}

/// What is wrong with the kernel of the ranks, and how the op is called whose value must be named.
const KERNELS: &[(&str, &str, Kernel<f64>)] = &[
    ("a gather looks up without its rank's offset", "gather", |n, r, a| from_zero(&Op::Gather, n, r, a)),
    ("a scatter adds without it", "scatter", |n, r, a| from_zero(&Op::Scatter, n, r, a)),
    ("the largest is the sum", "reduce_max", |n, r, a| {
        instead(&Op::ReduceMax, Op::Einsum { scale: 1.0 }, n, r, a)
    }),
    ("the root is turned", "rsqrt", |n, r, a| {
        instead(&Op::Unary(Unary::Rsqrt), Op::Unary(Unary::Sqrt), n, r, a)
    }),
    ("a comparison is another", "ge", |n, r, a| {
        instead(&Op::Binary(Binary::Ge), Op::Binary(Binary::Eq), n, r, a)
    }),
    ("a product lacks its scale", "einsum", |n, r, a| {
        let plain = Node { op: Op::Einsum { scale: 1.0 }, ..n.clone() };
        eval(if matches!(n.op, Op::Einsum { .. }) { &plain } else { n }, r, a)
    }),
];

/// The op that makes a value, without its attribute.
fn maker(sharded: &ShardedGraph, value: ir::Value) -> String {
    let node = &sharded.graph.nodes[sharded.graph.makers()[value.index()]];
    node.op.to_string().split('(').next().unwrap_or("").to_string()
}

#[test]
fn lockstep_names_the_first_value_that_a_faulty_kernel_makes() {
    for model in MODELS {
        let Compiled { sharded, .. } = compiled(model);
        let feeds = [feeds(&sharded.graph, 3)];
        assert_eq!(lockstep(&sharded, &feeds, eval), Ok(sharded.graph.values.len()), "{model}");
        for (what, op, kernel) in KERNELS {
            let wrong = lockstep(&sharded, &feeds, *kernel).expect_err(what);
            println!("{model}: {what}: {}: {}", wrong.name, wrong.what);
            assert_eq!(wrong.value.map(|v| maker(&sharded, v)).as_deref(), Some(*op), "{model}: {what}");
            assert!(wrong.what.contains(&format!("`{op}")), "{model}: {what}: {}", wrong.what);
            assert!(!wrong.name.is_empty());
        }
    }
}

/// The buffers of states that an instruction writes, by name.
fn written(program: &Program, instruction: &Instruction) -> Vec<String> {
    let state = |b: &BufferId| program.stages[0].buffers[b.index()].state.clone();
    instruction.writes().iter().filter_map(state).map(|n| n.to_string()).collect()
}

/// What a scale is changed by: so much that small tensors, as gradients, are off by more than the check allows, which is
/// a share of 1 and their size.
const FACTOR: f64 = 40.0;

/// Another scale in the last product of a map of at least so many steps, or of a contraction.
fn rescaled(instruction: &mut Instruction, least: usize) -> bool {
    let Instruction::Launch { kernel, .. } = instruction else { return false };
    let kernel = Arc::make_mut(kernel);
    if let Body::Contract(contract) = &mut kernel.body {
        contract.scale *= FACTOR;
        return true;
    }
    let Body::Map(map) = &mut kernel.body else { return false };
    map.steps.len() >= least
        && map.steps.iter_mut().rev().any(|step| {
            if let Step::Mul(scale, _) = step {
                *scale *= FACTOR;
            }
            matches!(step, Step::Mul(..))
        })
}

/// The program with a scale changed in the first launch that fits.
fn tampered(whole: &Program, kind: Kind, fits: impl Fn(&Instruction) -> bool) -> Program {
    let mut program = whole.clone();
    let segment = program.stages[0].segments.iter_mut().find(|s| s.kind == kind).unwrap();
    assert!(segment.instructions.iter_mut().filter(|i| fits(i)).any(|i| rescaled(i, 6)));
    program
}

#[test]
fn a_fault_in_a_program_is_found_and_its_tensor_named() {
    for model in MODELS {
        let compiled = compiled(model);
        let (sharded, whole) = (&compiled.sharded, &compiled.program);
        let feeds = [feeds(&sharded.graph, 3)];
        let wrong = |tampered: &Program| {
            check(sharded, tampered).expect("no rule of form is broken");
            program(sharded, tampered, &feeds, 2).unwrap().expect_err(model).name
        };
        assert!(program(sharded, whole, &feeds, 2).unwrap().is_ok(), "{model}");
        // A forward kernel is seen first in what the host gets first, the logits; a backward one in some gradient.
        let forward = tampered(whole, Kind::Forward, |_| true);
        assert_eq!(wrong(&forward), "logits", "{model}");
        let backward = tampered(whole, Kind::Backward, |_| true);
        assert!(wrong(&backward).starts_with("grad."), "{model}: {}", wrong(&backward));
        // An update is seen in the state that it writes, or in another of the same kernel.
        let update = |i: &Instruction| !written(whole, i).is_empty();
        let optimizer = tampered(whole, Kind::Optimizer, update);
        let name = wrong(&optimizer);
        assert!(whole.states.iter().any(|s| *s.name == *name), "{model}: {name}");
    }
}

#[test]
fn collectives_are_counted_by_the_groups_that_meet() {
    let whole = compiled("gpt2").program;
    let count = |p: &Program| ends(p, Transport::Rendezvous).unwrap().collectives;
    let collectives = count(&whole);
    assert_eq!(ends(&whole, Transport::Rendezvous).unwrap().ranks, 4);
    let start = |p: &mut Program, change: &dyn Fn(&mut ir::Move)| {
        let mut all = p.stages[0].segments.iter_mut().flat_map(|s| &mut s.instructions);
        let found = all.find_map(|i| {
            if let Instruction::Start { parts, .. } = i { Some(&mut parts[0].step) } else { None }
        });
        change(found.expect("a collective"));
    };
    // Over no axis each rank meets itself: more calls, in smaller groups.
    let mut alone = whole.clone();
    start(&mut alone, &|step| {
        if let ir::Move::AllReduce { axes, .. } = step {
            axes.clear();
        }
    });
    assert!(count(&alone) > collectives);
    // A call that is missing is missed on every rank.
    let mut fewer = whole;
    let starts = |i: &Instruction| matches!(i, Instruction::Start { .. });
    let segment = fewer.stages[0].segments.iter_mut().find(|s| s.instructions.iter().any(starts)).unwrap();
    let at = segment.instructions.iter().position(starts).unwrap();
    segment.instructions.remove(at);
    assert!(count(&fewer) < collectives);
}
