//! Every op that has a gradient, and every composite: the gradient that autodiff writes is the slope of the loss, and a
//! gradient body is what the gradients of the primitives come to.

use std::collections::{BTreeMap, BTreeSet};

use ir::composite::{self, rotation};
use ir::dsl::{Model, Tensor};
use ir::state::{Init, Role, State};
use ir::{Binary, DType, Graph, Name, Op, Unary, Value};
use meshc_tests::meaning::{feeds, tensor};
use meshc_tests::random::Random;
use runtime::lockstep::{Feeds, one_device};

/// What a row computes from its parameters.
type Body = Box<dyn Fn(&mut Model, &[Tensor]) -> Tensor>;

/// A graph whose loss is a weighted sum of what the body gives.
struct Row {
    name: String,
    /// For each parameter, named `p0`, `p1`, ..., its dimensions.
    parameters: &'static [&'static str],
    body: Body,
    /// Whether parameters are positive; else they have both signs.
    positive: bool,
}

const SIZES: &[(&str, usize)] = &[
    ("a", 3),
    ("c", 2),
    ("b", 2),
    ("s", 3),
    ("t", 3),
    ("kv", 2),
    ("group", 2),
    ("e", 2),
    ("two", 2),
    ("h", 2),
    ("v", 5),
];

fn row(
    name: &str,
    parameters: &'static [&'static str],
    body: impl Fn(&mut Model, &[Tensor]) -> Tensor + 'static,
) -> Row {
    Row { name: name.to_string(), parameters, body: Box::new(body), positive: false }
}

fn primitives() -> Vec<Row> {
    let mut rows = vec![
        row("einsum", &["a c", "c v", "v"], |m, p| m.einsum_scaled(0.7, "v a", &[&p[0], &p[1], &p[2]])),
        row("einsum twice the same", &["a c"], |m, p| m.einsum_scaled(-0.5, "a", &[&p[0], &p[0], &p[0]])),
        row("einsum broadcast", &["a"], |m, p| m.einsum_scaled(3.0, "a c", &[&p[0]])),
        row("add", &["a c", "c", ""], |m, p| m.add(&[&p[0], &p[1], &p[2], &p[1]])),
        row("select", &["a c", "c"], |m, p| {
            let zero = m.constant(0.0, DType::F32);
            let positive = m.binary(Binary::Ge, &p[0], &zero);
            m.select(&positive, &p[0], &p[1])
        }),
        row("gather", &["v e"], |m, p| {
            let index = m.input("index", DType::I32, "b s");
            m.gather("b s e", &p[0], "v", &index)
        }),
        row("gather summed", &["v e"], |m, p| {
            let index = m.input("index", DType::I32, "b s");
            m.gather("b e", &p[0], "v", &index)
        }),
        row("gather batched", &["b s v"], |m, p| {
            let index = m.input("index", DType::I32, "b s");
            m.gather("b s", &p[0], "v", &index)
        }),
        row("scatter", &["b s e"], |m, p| {
            let index = m.input("index", DType::I32, "b s");
            m.scatter("v e", &p[0], &index)
        }),
        row("reduce_max", &["a c v"], |m, p| m.reduce(ir::Reduce::Max, &p[0], "v")),
        row("cast", &["a c"], |m, p| {
            let wide = m.cast(&p[0], DType::F64);
            let square = m.mul(&[&wide, &wide]);
            m.cast(&square, DType::F32)
        }),
    ];
    for b in Binary::ALL.into_iter().filter(|b| !b.is_comparison()) {
        rows.push(row(b.name(), &["a c", "c"], move |m, p| m.binary(b, &p[0], &p[1])));
        let wide = move |m: &mut Model, p: &[Tensor]| m.binary(b, &p[1], &p[0]);
        rows.push(row(&format!("{} turned", b.name()), &["a c", "c"], wide));
    }
    for u in Unary::ALL.into_iter().filter(|u| *u != Unary::Stop) {
        let positive = matches!(u, Unary::Log | Unary::Sqrt | Unary::Rsqrt);
        rows.push(Row { positive, ..row(u.name(), &["a c"], move |m, p| m.unary(u, &p[0])) });
    }
    rows
}

fn composites() -> Vec<Row> {
    let position = |m: &mut Model| m.input("position", DType::I32, "b s");
    let rotated = move |m: &mut Model, p: &[Tensor]| {
        let position = position(m);
        let by = rotation(m, &position, 100.0);
        composite::rotary(m, &p[0], &by)
    };
    let attention = move |m: &mut Model, p: &[Tensor]| {
        let position = position(m);
        composite::attention(m, &p[0], &p[1], &p[2], &position, 0.6)
    };
    let dropped = move |m: &mut Model, p: &[Tensor]| {
        let position = position(m);
        let dropout = Some((0.4, "weights".into()));
        let how = composite::Attention { dropout, softcap: Some(2.0), ..0.6.into() };
        composite::attention(m, &p[0], &p[1], &p[2], &position, how)
    };
    vec![
        row("dropout", &["b s e"], |m, p| composite::dropout(m, &p[0], 0.4, "x")),
        row("attention with dropout", &["b s kv group e", "b t kv e", "b t kv e"], dropped),
        row("softmax", &["a v"], |m, p| composite::softmax(m, &p[0], "v")),
        row("softmax in the middle", &["a v c"], |m, p| composite::softmax(m, &p[0], "v")),
        row("attention", &["b s kv e", "b t kv e", "b t kv h"], attention),
        row("attention with groups", &["b s kv group e", "b t kv e", "b t kv e"], attention),
        row("rms_norm", &["a v", "v"], |m, p| composite::rms_norm(m, &p[0], &p[1], 1e-2)),
        row("layer_norm", &["a v", "v", "v"], |m, p| composite::layer_norm(m, &p[0], &p[1], &p[2], 1e-2)),
        row("gelu_tanh", &["a c"], |m, p| composite::gelu_tanh(m, &p[0])),
        row("silu", &["a c"], |m, p| composite::silu(m, &p[0])),
        row("rotary", &["b s kv two h"], rotated),
        row("rotary with groups", &["b s kv group two h"], rotated),
        row("cross_entropy", &["b s v"], |m, p| {
            let labels = m.input("labels", DType::I32, "b s");
            composite::cross_entropy(m, &p[0], &labels).0
        }),
    ]
}

fn build(row: &Row) -> Graph {
    let mut m = Model::new();
    SIZES.iter().for_each(|(name, size)| m.dim(name, *size));
    let parameters = row.parameters.iter().enumerate();
    let parameters: Vec<Tensor> =
        parameters.map(|(i, dims)| m.parameter(&format!("p{i}"), dims, Init::Ones)).collect();
    let out = (row.body)(&mut m, &parameters);
    let weight = m.input("weight", DType::F32, &out.dims.join(" "));
    let loss = m.einsum("", &[&out, &weight]);
    let count = m.constant(1.0, DType::F32);
    m.loss(&loss, &count);
    m.finish().unwrap_or_else(|e| panic!("{}: {}", row.name, e[0]))
}

/// Labels that do not count, indices outside their range, a position twice.
fn values(row: &Row, graph: &Graph) -> Feeds<f64> {
    let given: Feeds<f64> = BTreeMap::from([
        ("index".into(), tensor(&[2, 3], &[0.0, 4.0, 2.0, -1.0, 2.0, 7.0])),
        ("row".into(), tensor(&[2], &[3.0, 1.0])),
        ("position".into(), tensor(&[2, 3], &[0.0, 1.0, 2.0, 0.0, 0.0, 1.0])),
        ("labels".into(), tensor(&[2, 3], &[1.0, -100.0, 4.0, 0.0, 3.0, -100.0])),
    ]);
    let mut feeds = feeds(graph, given, 5);
    if row.positive {
        let random = &mut Random::new(6);
        feeds.values_mut().flat_map(|t| &mut t.data).for_each(|x| *x = random.between(0.3, 2.0));
    }
    feeds
}

/// The gradient of each parameter that has one.
fn gradients(graph: &Graph, feeds: &Feeds<f64>) -> BTreeMap<Name, runtime::tensor::Tensor<f64>> {
    let values = one_device(graph, feeds);
    graph.gradients.iter().map(|(name, v)| (name.clone(), values[v.index()].clone())).collect()
}

/// How the summed loss changes with each element of a parameter: central differences.
fn slope(graph: &Graph, feeds: &Feeds<f64>, name: &Name) -> runtime::tensor::Tensor<f64> {
    const STEP: f64 = 1e-5;
    let loss = graph.loss.map_or(Value(0), |l| l.sum);
    let mut slope = feeds[name].clone();
    for i in 0..slope.data.len() {
        let at = |by: f64| {
            let mut moved = feeds.clone();
            moved.entry(name.clone()).and_modify(|t| t.data[i] += by);
            one_device(graph, &moved)[loss.index()].data[0]
        };
        slope.data[i] = (at(STEP) - at(-STEP)) / (2.0 * STEP);
    }
    slope
}

/// Whether `differentiate` gives every row the gradient that it has.
///
/// # Errors
/// The first row that has another.
pub fn check(differentiate: &dyn Fn(&mut Graph)) -> Result<(), String> {
    for row in primitives().iter().chain(&composites()) {
        let forward = build(row);
        let feeds = values(row, &forward);
        let mut graph = forward.clone();
        differentiate(&mut graph);
        let got = gradients(&graph, &feeds);
        let parameter = |s: &&State| matches!(s.role, Role::Parameter { .. });
        for state in forward.states.iter().filter(parameter) {
            let want = slope(&forward, &feeds, &state.name);
            // A parameter without a gradient is one on which the loss does not depend smoothly.
            let zero = runtime::tensor::Tensor::full(&state.shape(), 0.0);
            let off = got.get(&state.name).unwrap_or(&zero).distance(&want);
            if off > 1e-6 {
                return Err(format!("{}: the gradient of {} is off by {off:.1e}", row.name, state.name));
            }
        }
    }
    Ok(())
}

/// The pass.
pub fn autodiff(graph: &mut Graph) {
    let pass = passes::GRAPH.iter().find(|p| p.name == "autodiff");
    pass.iter().for_each(|p| (p.run)(graph));
}

#[test]
fn every_gradient_is_the_slope() {
    check(&autodiff).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_gradient_body_is_the_gradient_of_its_primitives() {
    let mut bodies = 0;
    for row in composites() {
        let (mut with, mut without) = (build(&row), build(&row));
        without.nodes.iter_mut().for_each(|n| n.tag = None);
        let feeds = values(&row, &with);
        autodiff(&mut with);
        autodiff(&mut without);
        bodies += usize::from(with.nodes.len() != without.nodes.len());
        let (got, want) = (gradients(&with, &feeds), gradients(&without, &feeds));
        assert_eq!(got.len(), want.len(), "{}", row.name);
        for (name, value) in &got {
            let off = value.distance(&want[name]);
            assert!(off < 1e-12, "{}: {name} is off by {off:.1e}", row.name);
        }
    }
    assert!(bodies >= composite::GRADIENTS.len(), "some gradient body was not used");
}

#[test]
fn no_gradient_flows_through_stop() {
    let mut graph = build(&row("stop", &["a c"], |m, p| m.unary(Unary::Stop, &p[0])));
    autodiff(&mut graph);
    assert_eq!(graph.gradients, []);
    let mut graph = build(&row("top_k", &["a c v"], |m, p| {
        let pairs = m.top_k(&p[0], "v", "b");
        m.top_values(&pairs)
    }));
    autodiff(&mut graph);
    assert_eq!(graph.gradients, []);
    let mut graph = build(&row("stop", &["a c"], |m, p| {
        let stopped = m.unary(Unary::Stop, &p[0]);
        m.mul(&[&p[0], &stopped])
    }));
    let feeds = feeds(&graph, BTreeMap::new(), 7);
    autodiff(&mut graph);
    // Of x stop(x) w the gradient is x w, half the slope.
    let want: Vec<f64> = feeds["p0"].data.iter().zip(&feeds["weight"].data).map(|(x, w)| x * w).collect();
    assert!(gradients(&graph, &feeds)["p0"].distance(&tensor(&[3, 2], &want)) < 1e-12);
}

#[test]
fn every_op_with_a_gradient_is_in_the_table() {
    let tested: BTreeSet<String> =
        primitives().iter().flat_map(|r| build(r).nodes).map(|n| name(&n.op)).collect();
    let differentiable = |op: &Op| match op {
        Op::Einsum { .. } | Op::Add | Op::ReduceMax | Op::Select | Op::Gather | Op::Scatter | Op::Cast => {
            true
        }
        Op::Unary(u) => *u != Unary::Stop,
        Op::Binary(b) => !b.is_comparison(),
        // Constants and places have none, and sums over micro-batches come after autodiff.
        Op::Input(_)
        | Op::State(_)
        | Op::Const(_)
        | Op::Iota
        | Op::Random(_)
        | Op::TopK
        | Op::Accumulate
        | Op::Reshard
        | Op::Assign(_)
        | Op::Tap(_) => false,
    };
    let missing: Vec<String> = crate::signatures::ops()
        .iter()
        .filter(|op| differentiable(op))
        .map(name)
        .filter(|n| !tested.contains(n))
        .collect();
    assert_eq!(missing, Vec::<String>::new());
}

/// An op without its attribute.
fn name(op: &Op) -> String {
    let text = op.to_string();
    text.split('(').next().unwrap_or(&text).to_string()
}
