//! Small situations with uneven pieces, split vocabularies and split tokens in which others computed a wrong value.

use std::collections::BTreeMap;

use ir::composite::cross_entropy;
use ir::dsl::{Model, Tensor as Named};
use ir::graph::Loss;
use ir::state::{AdamW, Init};
use ir::{DType, Mesh, Op, Reduce, ShardedGraph, Unary, moves};
use meshc_tests::meaning::{equals_one_device, feeds, places, step, taps, tensor};
use runtime::eval::eval;
use runtime::lockstep::{Feeds, run};
use runtime::tensor::Tensor;

/// A finished model on a mesh, its inputs and states at `at`.
fn on(m: Model, mesh: &str, at: &[(&str, &str)]) -> ShardedGraph {
    let mesh = Mesh::parse(mesh).unwrap();
    step(m.finish().unwrap(), &mesh, places(at, &mesh))
}

/// What is tapped on each rank, by name; every value on every rank is what one device computes.
fn tapped(sharded: &ShardedGraph, given: Feeds<f64>) -> BTreeMap<String, Vec<Tensor<f64>>> {
    let feeds = feeds(&sharded.graph, given, 1);
    equals_one_device(sharded, &feeds, eval).unwrap_or_else(|e| panic!("{e}"));
    let values = run(sharded, &feeds, eval);
    taps(&sharded.graph).into_iter().map(|(name, v)| (name.to_string(), values[v.index()].clone())).collect()
}

/// Every rank holds this number, to 1e-6, as it is written in the cases.
#[track_caller]
fn on_every_rank(pieces: &[Tensor<f64>], want: f64) {
    for (rank, piece) in pieces.iter().enumerate() {
        assert!(
            piece.data.len() == 1 && (piece.data[0] - want).abs() < 1e-6,
            "rank {rank}: {:?}, not {want}",
            piece.data
        );
    }
}

fn fed(name: &str, data: &[f64]) -> Feeds<f64> {
    [(name.into(), tensor(&[data.len()], data))].into()
}

/// B09: fewer elements than ranks.
#[test]
fn pieces_may_be_empty_and_come_back() {
    for (n, sizes) in [(4, [1, 1, 1, 1]), (3, [1, 1, 1, 0]), (2, [1, 1, 0, 0]), (1, [1, 0, 0, 0])] {
        let mut m = Model::new();
        m.dim("a", n);
        let x = m.input("x", DType::F32, "a");
        let y = m.unary(Unary::Relu, &x);
        m.constrain(&y, "[tp]");
        m.tap("piece", &y);
        let whole = m.unary(Unary::Relu, &y);
        m.constrain(&whole, "[_]");
        m.tap("whole", &whole);
        let sharded = on(m, "tp=4", &[("x", "[tp]")]);
        let data: Vec<f64> = (1..=n).map(|i| i as f64).collect();
        let out = tapped(&sharded, fed("x", &data));
        assert_eq!(out["piece"].iter().map(|t| t.data.len()).collect::<Vec<_>>(), sizes);
        assert!(out["whole"].iter().all(|t| t.data == data), "{n}: {:?}", out["whole"]);
    }
}

/// B11: what pads pieces to equal sizes is never read.
#[test]
fn padding_is_in_no_reduction() {
    let mut m = Model::new();
    m.dim("a", 5);
    let x = m.input("x", DType::F32, "a");
    let mean = m.einsum_scaled(0.2, "", &[&x]);
    m.tap("mean", &mean);
    let max = m.reduce(Reduce::Max, &x, "a");
    m.tap("max", &max);
    let shifted = m.sub(&x, &max);
    let e = m.unary(Unary::Exp, &shifted);
    let sum = m.reduce(Reduce::Sum, &e, "a");
    let log = m.unary(Unary::Log, &sum);
    let lse = m.add(&[&max, &log]);
    m.tap("logsumexp", &lse);
    let elements: Vec<Named> = (0..5)
        .map(|i| {
            let at = m.constant(f64::from(i), DType::I32);
            m.gather("", &x, "a", &at)
        })
        .collect();
    let product = m.einsum("", &elements.iter().collect::<Vec<_>>());
    m.tap("product", &product);
    let sharded = on(m, "tp=4", &[("x", "[tp]")]);
    let out = tapped(&sharded, fed("x", &[-3.0, -1.0, -2.0, -5.0, -4.0]));
    // Padded with zeros they would be -1.875, 0, 0 and 1.274819.
    for (name, want) in [("mean", -3.0), ("max", -1.0), ("product", -120.0), ("logsumexp", -0.548_086)] {
        on_every_rank(&out[name], want);
    }
}

/// Logits [b s v] of one token as a parameter, and their gradient.
fn loss_of_logits(scale: f64, smoothing: f64) -> Model {
    let mut m = Model::new();
    for (name, size) in [("b", 1), ("s", 1), ("v", 8)] {
        m.dim(name, size);
    }
    let raw = m.parameter("raw", "b s v", Init::Zeros);
    let labels = m.input("labels", DType::I32, "b s");
    let logits = m.scale(scale, &raw);
    m.tap("logits", &logits);
    let (plain, count) = cross_entropy(&mut m, &logits, &labels);
    // The form of Megatron-LM: alpha V / (V - 1) of the mean of all log-probabilities.
    let alpha = smoothing * 8.0 / 7.0;
    let max = m.reduce(Reduce::Max, &logits, "v");
    let max = m.unary(Unary::Stop, &max);
    let shifted = m.sub(&logits, &max);
    let e = m.unary(Unary::Exp, &shifted);
    let sum = m.reduce(Reduce::Sum, &e, "v");
    let log = m.unary(Unary::Log, &sum);
    let log_probabilities = m.sub(&shifted, &log);
    let mean = m.einsum_scaled(-alpha / 8.0, "", &[&log_probabilities]);
    let kept = m.scale(1.0 - alpha, &plain);
    let loss = m.add(&[&kept, &mean]);
    m.loss(&loss, &count);
    m
}

/// B46: cross entropy with the vocabulary split.
#[test]
fn a_split_vocabulary_has_one_loss() {
    let logits: Vec<f64> = (0..8).map(|i| f64::from(i) * 0.5).collect();
    let run = |mesh: &str, scale: f64, smoothing: f64| {
        let mut graph = loss_of_logits(scale, smoothing).finish().unwrap();
        graph.optimizer = Some(AdamW::default());
        graph.dump = true;
        let mesh = Mesh::parse(mesh).unwrap();
        let sharded = step(graph, &mesh, places(&[("raw", "[_, _, tp]")], &mesh));
        let given: Feeds<f64> =
            [("raw".into(), tensor(&[1, 1, 8], &logits)), ("labels".into(), tensor(&[1, 1], &[5.0]))].into();
        (tapped(&sharded, given), sharded)
    };
    for mesh in ["tp=2", "tp=3", "tp=8"] {
        let (out, sharded) = run(mesh, 1.0, 0.0);
        // 2.147600 and 1.880933 would be each rank's own; 2.607414 that of whole logits counted twice.
        on_every_rank(&out["loss"], 1.914_267);
        let wide = sharded
            .graph
            .nodes
            .iter()
            .filter(|n| n.op == Op::Reshard && sharded.graph.shape(n.results[0]).len() == 3);
        assert_eq!(wide.count(), 0, "no logits are moved");
        let plain = out["grad.raw"].iter().flat_map(|t| t.data.clone()).collect::<Vec<f64>>();
        let (out, _) = run(mesh, 1.0, 0.1);
        on_every_rank(&out["loss"], 1.999_981);
        let smooth = out["grad.raw"].iter().flat_map(|t| t.data.clone()).collect::<Vec<f64>>();
        for (i, (a, b)) in plain.iter().zip(&smooth).enumerate().filter(|(i, _)| *i != 5) {
            assert!((a - b - 0.1 / 7.0).abs() < 1e-9, "off the target, at {i}: {a} {b}");
        }
        let (out, _) = run(mesh, 1000.0, 0.0);
        on_every_rank(&out["loss"], 1000.0);
    }
}

/// B47: a norm's weight on split tokens.
#[test]
fn a_weight_on_split_tokens_sums_its_gradient() {
    let mut m = Model::new();
    m.dim("s", 4);
    m.dim("d", 2);
    let x = m.input("x", DType::F32, "s d");
    let gamma = m.parameter("gamma", "d", Init::Ones);
    let y = m.einsum("s d", &[&x, &gamma]);
    let sum = m.einsum("", &[&y]);
    let count = m.constant(1.0, DType::F32);
    m.loss(&sum, &count);
    let mut graph = m.finish().unwrap();
    assert!(matches!(graph.loss, Some(Loss { .. })));
    graph.optimizer = Some(AdamW::default());
    graph.dump = true;
    let mesh = Mesh::parse("tp=2").unwrap();
    let sharded = step(graph, &mesh, places(&[("x", "[tp, _]")], &mesh));
    let given = tensor(&[4, 2], &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0]);
    let out = tapped(&sharded, [("x".into(), given)].into());
    // 3 and 7 would be a sum that is missing, 5 a mean.
    assert!(out["grad.gamma"].iter().all(|t| t.data == [10.0, 100.0]), "{:?}", out["grad.gamma"]);
    // One all_reduce for it, beside that of the loss.
    let calls = sharded.graph.nodes.iter().filter(|n| n.op == Op::Reshard);
    let steps = |n: &ir::Node| {
        moves(sharded.sharding(n.args[0]), sharded.sharding(n.results[0]), &sharded.mesh).len()
    };
    let calls: usize = calls.map(steps).sum();
    assert_eq!(calls, 2);
}

/// B10: pieces are ceil pieces, and a flattened dimension keeps those of its rows.
#[test]
fn a_flattened_dimension_keeps_the_pieces_of_its_rows() {
    let text = "sharded mesh tp=4
        place x [tp, _]
        input x : f32 [a=6, b=256]
        v0 = input(x) : -> a b : f32 6x256 micro | 0 forward
        v1 = einsum v0 : a b -> (a b) : f32 1536 micro | 0 forward
        v2 = exp v1 : n -> n : f32 1536 micro | 0 forward
        tap(y) v2 : n -> | 0 forward";
    let sharded = meshc_tests::meaning::sharded(ir::parse_sharded(text).unwrap());
    assert!(sharded.graph.nodes.iter().all(|n| n.op != Op::Reshard), "nothing is moved");
    let out = tapped(&sharded, Feeds::new());
    assert_eq!(out["y"].iter().map(|t| t.data.len()).collect::<Vec<_>>(), [512, 512, 512, 0]);
}

/// B14: a linear layer over merged rows, tokens split; and 8 over 4 ranks, seen as 2 x 4.
#[test]
fn merged_rows_move_nothing() {
    let text = "sharded mesh cp=2
        place x [_, cp, _]
        place w [_, _]
        input x : f32 [b=2, s=4, d=8]
        state w : f32 [d=8, f=8] parameter(trainable, decays) normal(0.1)
        v0 = input(x) : -> b s d : f32 2x4x8 micro | 0 forward
        v1 = state(w) : -> d f : f32 8x8 | 0 forward
        v2 = einsum v0 : b s d -> (b s) d : f32 8x8 micro | 0 forward
        v3 = einsum v2, v1 : n d, d f -> n f : f32 8x8 micro | 0 forward
        v4 = einsum v3 : (b s) f -> b s f : f32 2x4x8 micro | 0 forward
        tap(y) v4 : b s f -> | 0 forward";
    let sharded = meshc_tests::meaning::sharded(ir::parse_sharded(text).unwrap());
    assert!(sharded.graph.nodes.iter().all(|n| n.op != Op::Reshard), "nothing is moved");
    let y = taps(&sharded.graph)["y"];
    assert_eq!(sharded.sharding(y).show(&sharded.mesh), "[_, cp, _]");
    tapped(&sharded, Feeds::new());

    let text = "sharded mesh x=4
        place v [x]
        input v : f32 [a=8]
        v0 = input(v) : -> a : f32 8 micro | 0 forward
        v1 = einsum v0 : (p q) -> p q : f32 2x4 micro | 0 forward
        v2 = exp v1 : p q -> p q : f32 2x4 micro | 0 forward
        tap(y) v2 : p q -> | 0 forward";
    let sharded = meshc_tests::meaning::sharded(ir::parse_sharded(text).unwrap());
    assert_eq!(sharded.mesh.to_string(), "x=2.2");
    assert!(sharded.graph.nodes.iter().all(|n| n.op != Op::Reshard), "nothing is moved");
    let out = tapped(&sharded, Feeds::new());
    assert!(out["y"].iter().all(|t| t.data.len() == 2));
}
