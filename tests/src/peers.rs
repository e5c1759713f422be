//! Programs that are also written for XLA: an MLP and a transformer block, forward and as a step of plain gradient descent,
//! with the same shardings of inputs, parameters and results. What XLA sends is that of its optimized HLO (JAX 0.10.2, 8
//! host devices).

use ir::composite::{gelu_tanh, softmax};
use ir::dsl::{Model, Tensor};
use ir::program::Program;
use ir::state::Init;
use ir::{Binary, DType, Graph, Mesh, Part, ShardedGraph};
use planner::choose::best;
use planner::cluster::Cluster;

use crate::meaning::places;

/// Kind of collective, bytes of its outputs on a device, devices that talk.
pub type Sent = (&'static str, f64, f64);

/// A program: its name, mesh, where its tensors lie, and what XLA sends.
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The mesh, as on the command line.
    pub mesh: &'static str,
    /// Whether it is the block, and not the MLP.
    pub block: bool,
    /// Whether it is a step of training.
    pub train: bool,
    /// By the name of a parameter; `x`, `y` and the result lie as `x`.
    pub places: &'static [(&'static str, &'static str)],
    /// What XLA sends.
    pub xla: &'static [Sent],
}

const TP: &[(&str, &str)] = &[("w1", "[_, tp]"), ("w2", "[tp, _]"), ("x", "[_, _]")];
const DP: &[(&str, &str)] = &[("w1", "[_, _]"), ("w2", "[_, _]"), ("x", "[dp, _]")];
const FSDP: &[(&str, &str)] = &[("w1", "[dp, _]"), ("w2", "[dp, _]"), ("x", "[dp, _]")];
const BOTH: &[(&str, &str)] = &[("w1", "[_, tp]"), ("w2", "[tp, _]"), ("x", "[dp, _]")];
const SP: &[(&str, &str)] = &[("w1", "[_, tp]"), ("w2", "[tp, _]"), ("x", "[tp, _]")];
const BLOCK_TP: &[(&str, &str)] = &[
    ("ln1", "[_]"),
    ("ln2", "[_]"),
    ("wq", "[_, tp, _]"),
    ("wk", "[_, tp, _]"),
    ("wv", "[_, tp, _]"),
    ("wo", "[tp, _, _]"),
    ("w1", "[_, tp]"),
    ("w2", "[tp, _]"),
    ("x", "[_, _, _]"),
];
const BLOCK_DP: &[(&str, &str)] = &[
    ("ln1", "[_]"),
    ("ln2", "[_]"),
    ("wq", "[_, _, _]"),
    ("wk", "[_, _, _]"),
    ("wv", "[_, _, _]"),
    ("wo", "[_, _, _]"),
    ("w1", "[_, _]"),
    ("w2", "[_, _]"),
    ("x", "[dp, _, _]"),
];
const BLOCK_FSDP: &[(&str, &str)] = &[
    ("ln1", "[dp]"),
    ("ln2", "[dp]"),
    ("wq", "[dp, _, _]"),
    ("wk", "[dp, _, _]"),
    ("wv", "[dp, _, _]"),
    ("wo", "[dp, _, _]"),
    ("w1", "[dp, _]"),
    ("w2", "[dp, _]"),
    ("x", "[dp, _, _]"),
];
const BLOCK_BOTH: &[(&str, &str)] = &[
    ("ln1", "[_]"),
    ("ln2", "[_]"),
    ("wq", "[dp, tp, _]"),
    ("wk", "[dp, tp, _]"),
    ("wv", "[dp, tp, _]"),
    ("wo", "[tp, _, dp]"),
    ("w1", "[dp, tp]"),
    ("w2", "[tp, dp]"),
    ("x", "[dp, _, _]"),
];

const fn mlp(
    name: &'static str,
    mesh: &'static str,
    train: bool,
    places: &'static [(&'static str, &'static str)],
    xla: &'static [Sent],
) -> Case {
    Case { name, mesh, block: false, train, places, xla }
}

const fn block(
    name: &'static str,
    mesh: &'static str,
    places: &'static [(&'static str, &'static str)],
    xla: &'static [Sent],
) -> Case {
    Case { name, mesh, block: true, train: true, places, xla }
}

/// Where several groups share a kind in XLA's count, they are told apart by the shapes of what they send.
pub const CASES: &[Case] = &[
    mlp("mlp forward tp8", "tp=8", false, TP, &[("all_reduce", 524_288.0, 8.0)]),
    mlp("mlp train tp8", "tp=8", true, TP, &[("all_reduce", 524_288.0, 8.0)]),
    mlp("mlp forward dp8", "dp=8", false, DP, &[]),
    mlp("mlp train dp8", "dp=8", true, DP, &[("all_reduce", 8_388_612.0, 8.0)]),
    mlp("mlp forward fsdp8", "dp=8", false, FSDP, &[("all_gather", 8_388_608.0, 8.0)]),
    mlp(
        "mlp train fsdp8",
        "dp=8",
        true,
        FSDP,
        &[
            ("all_gather", 11_010_048.0, 8.0),
            ("all_to_all", 1_114_112.0, 8.0),
            ("all_reduce", 4_194_308.0, 8.0),
        ],
    ),
    mlp("mlp forward dp2 tp4", "dp=2,tp=4", false, BOTH, &[("all_reduce", 262_144.0, 4.0)]),
    mlp(
        "mlp train dp2 tp4",
        "dp=2,tp=4",
        true,
        BOTH,
        &[("all_reduce", 262_144.0, 4.0), ("all_reduce", 2_097_156.0, 2.0)],
    ),
    mlp(
        "mlp forward sp8",
        "tp=8",
        false,
        SP,
        &[("all_gather", 524_288.0, 8.0), ("all_reduce", 524_288.0, 8.0)],
    ),
    mlp(
        "mlp train sp8",
        "tp=8",
        true,
        SP,
        &[("all_gather", 1_048_576.0, 8.0), ("all_reduce", 524_292.0, 8.0)],
    ),
    block("block train tp8", "tp=8", BLOCK_TP, &[("all_reduce", 6_291_456.0, 8.0)]),
    block("block train dp8", "dp=8", BLOCK_DP, &[("all_reduce", 3_147_780.0, 8.0)]),
    block(
        "block train fsdp8",
        "dp=8",
        BLOCK_FSDP,
        &[("all_gather", 3_148_800.0, 8.0), ("all_reduce", 3_147_780.0, 8.0)],
    ),
    block(
        "block train fsdp2 tp4",
        "dp=2,tp=4",
        BLOCK_BOTH,
        &[("all_gather", 786_432.0, 2.0), ("all_reduce", 3_145_728.0, 4.0), ("all_reduce", 788_484.0, 2.0)],
    ),
];

fn layer_norm(m: &mut Model, x: &Tensor, weight: &Tensor) -> Tensor {
    let mean = m.einsum_scaled(1.0 / 256.0, "b s", &[x]);
    let centred = m.sub(x, &mean);
    let variance = m.einsum_scaled(1.0 / 256.0, "b s", &[&centred, &centred]);
    let variance = m.offset(&variance, 1e-5);
    let inverse = m.unary(ir::Unary::Rsqrt, &variance);
    m.einsum("b s d", &[&centred, &inverse, weight])
}

/// The result of the block of eight heads, for 8 rows of 128 tokens.
fn block_of(m: &mut Model) -> Tensor {
    for (name, size) in [("b", 8), ("s", 128), ("t", 128), ("d", 256), ("h", 8), ("e", 32), ("f", 1024)] {
        m.dim(name, size);
    }
    let normal = Init::Normal(0.02);
    let x = m.input("x", DType::F32, "b s d");
    let [ln1, ln2] = ["ln1", "ln2"].map(|n| m.parameter(n, "d", Init::Ones));
    let [wq, wk, wv] = ["wq", "wk", "wv"].map(|n| m.parameter(n, "d h e", normal));
    let (wo, w1, w2) = (
        m.parameter("wo", "h e d", normal),
        m.parameter("w1", "d f", normal),
        m.parameter("w2", "f d", normal),
    );
    let n = layer_norm(m, &x, &ln1);
    let q = m.einsum("b h s e", &[&n, &wq]);
    let [k, v] = [&wk, &wv].map(|w| {
        let all = m.einsum("b h s e", &[&n, w]);
        m.rename(&all, "s", "t")
    });
    let scores = m.einsum_scaled(1.0 / 32f64.sqrt(), "b h s t", &[&q, &k]);
    let (row, column) = (m.iota("s", DType::I32), m.iota("t", DType::I32));
    let seen = m.binary(Binary::Ge, &row, &column);
    let never = m.constant(-1e9, DType::F32);
    let scores = m.select(&seen, &scores, &never);
    let share = softmax(m, &scores, "t");
    let mixed = m.einsum("b h s e", &[&share, &v]);
    let out = m.einsum("b s d", &[&mixed, &wo]);
    let x = m.add(&[&x, &out]);
    let n = layer_norm(m, &x, &ln2);
    let wide = m.einsum("b s f", &[&n, &w1]);
    let wide = gelu_tanh(m, &wide);
    let out = m.einsum("b s d", &[&wide, &w2]);
    m.add(&[&x, &out])
}

/// The result of the MLP, for 256 tokens of width 512.
fn mlp_of(m: &mut Model) -> Tensor {
    for (name, size) in [("t", 256), ("d", 512), ("f", 2048)] {
        m.dim(name, size);
    }
    let x = m.input("x", DType::F32, "t d");
    let (w1, w2) = (m.parameter("w1", "d f", Init::Ones), m.parameter("w2", "f d", Init::Ones));
    let wide = m.einsum("t f", &[&x, &w1]);
    let wide = gelu_tanh(m, &wide);
    m.einsum("t d", &[&wide, &w2])
}

fn pass(graph: &mut Graph, name: &str) {
    let pass = passes::GRAPH.iter().find(|p| p.name == name).expect("a pass");
    (pass.run)(graph);
}

/// The whole program.
pub fn graph(case: &Case) -> Graph {
    let mut m = Model::new();
    let (result, dims) = match case.block {
        true => (block_of(&mut m), "b s d"),
        false => (mlp_of(&mut m), "t d"),
    };
    if !case.train {
        m.tap("result", &result);
        let place = case.places.iter().find(|(n, _)| *n == "x").expect("a place").1;
        m.constrain(&result, place);
        return m.finish().expect("a graph");
    }
    let wanted = m.input("y", DType::F32, dims);
    let off = m.sub(&result, &wanted);
    let sum = m.einsum("", &[&off, &off]);
    let one = m.constant(1.0, DType::F32);
    m.loss(&sum, &one);
    let mut graph = m.finish().expect("a graph");
    let elements: usize = graph.inputs[0].dims.iter().map(|(_, n)| n).product();
    pass(&mut graph, "autodiff");
    let gradients = std::mem::take(&mut graph.gradients);
    let loss = graph.loss.take().expect("a loss");
    let mut m = Model::resume(graph, Part::Update);
    for (name, gradient) in gradients {
        let is = |n: &&ir::Node| matches!(&n.op, ir::Op::State(s) if *s == name);
        let state = m.graph().nodes.iter().find(is).expect("the parameter is read").results[0];
        let [old, gradient] = [state, gradient].map(|v| m.tensor(v));
        let gradient = Tensor { dims: old.dims.clone(), ..gradient };
        let all = m.accumulate(&gradient);
        let step = m.scale(-1e-2 / elements as f64, &all);
        let new = m.add(&[&old, &step]);
        m.assign(&name, &new);
    }
    let sum = m.tensor(loss.sum);
    let sum = m.accumulate(&sum);
    let mean = m.scale(1.0 / elements as f64, &sum);
    m.tap("loss", &mean);
    m.constrain(&mean, "[]");
    let mut graph = m.finish().expect("a graph");
    pass(&mut graph, "simplify");
    graph
}

/// The program on its mesh, with what costs least by these prices.
pub fn sharded(case: &Case, prices: &Cluster) -> ShardedGraph {
    let mesh = Mesh::parse(case.mesh).expect("a mesh");
    let mut at: Vec<(&str, &str)> = case.places.to_vec();
    if case.train {
        at.push(("y", at[at.len() - 1].1));
    }
    let mut sharded = ShardedGraph::new(graph(case), mesh.clone(), places(&at, &mesh));
    passes::PLACED.iter().for_each(|pass| (pass.run)(&mut sharded));
    let best = best(&sharded, prices);
    assert!(best.exact, "{}", case.name);
    sharded.decisions = best.decisions;
    passes::CHOSEN.iter().for_each(|pass| (pass.run)(&mut sharded));
    ir::verify::verify_sharded(&sharded).unwrap_or_else(|e| panic!("{}: {}", case.name, e[0]));
    sharded
}

/// What runs.
pub fn program(sharded: &ShardedGraph) -> Program {
    let mut program = passes::lower(sharded);
    passes::PROGRAM.iter().for_each(|pass| (pass.run)(&mut program));
    program
}
