//! Small situations in which others computed a wrong value, each with the value that is right.

use std::collections::BTreeMap;

use ir::dsl::Model;
use ir::state::{AdamW, Init};
use ir::{Binary, DType, Mesh, Op, ShardedGraph, Value, parse_sharded};
use meshc_tests::meaning::{equals_one_device, feeds, places, sharded, step, taps, tensor};
use runtime::eval::eval;
use runtime::lockstep::{Feeds, run};
use runtime::tensor::Tensor;

/// A sharded graph in the text form, after the passes on sharded graphs.
fn read(text: &str) -> ShardedGraph {
    sharded(parse_sharded(text).unwrap_or_else(|e| panic!("{e}")))
}

fn fed(of: &[(&str, &[usize], &[f64])]) -> Feeds<f64> {
    of.iter().map(|(name, shape, data)| ((*name).into(), tensor(shape, data))).collect()
}

/// What is tapped on each rank, by name.
fn tapped(sharded: &ShardedGraph, feeds: &Feeds<f64>) -> BTreeMap<String, Vec<Tensor<f64>>> {
    equals_one_device(sharded, feeds, eval).unwrap_or_else(|e| panic!("{e}"));
    let values = run(sharded, feeds, eval);
    taps(&sharded.graph).into_iter().map(|(name, v)| (name.to_string(), values[v.index()].clone())).collect()
}

/// Every rank holds these numbers.
#[track_caller]
fn on_every_rank(pieces: &[Tensor<f64>], want: &[f64]) {
    for (rank, piece) in pieces.iter().enumerate() {
        let off = tensor(&piece.shape, want).distance(piece);
        assert!(off < 1e-12, "rank {rank} holds {:?}, not {want:?}", piece.data);
    }
}

/// What a value's piece is on each rank.
fn locals(sharded: &ShardedGraph, feeds: &Feeds<f64>, value: Value) -> Vec<Vec<f64>> {
    run(sharded, feeds, eval)[value.index()].iter().map(|t| t.data.clone()).collect()
}

#[test]
fn a_partial_sum_plus_a_constant_is_not_added_once_a_rank() {
    let graph = read(
        "sharded mesh tp=2
        place x [tp]
        input x : f32 [k=10]
        v0 = input(x) : -> k : f32 10 micro | 0 forward
        v1 = einsum v0 : k -> () : f32 () micro | 0 forward
        v2 = const(10.0) : -> () : f32 () | 0 forward
        v3 = add v1, v2 : (), () -> () : f32 () micro | 0 forward
        tap(y) v3 : () -> | 0 forward",
    );
    let x: Vec<f64> = (0..10).map(f64::from).collect();
    let feeds = fed(&[("x", &[10], &x)]);
    assert_eq!(locals(&graph, &feeds, Value(1)), [[10.0], [35.0]]);
    // 65 would be the constant of both ranks.
    on_every_rank(&tapped(&graph, &feeds)["y"], &[55.0]);
}

#[test]
fn a_norm_of_a_partial_sum_is_not_the_sum_of_norms() {
    let graph = read(
        "sharded mesh tp=2
        place x [tp, _]
        input x : f32 [k=2, a=2]
        v0 = input(x) : -> k a : f32 2x2 micro | 0 forward
        v1 = einsum v0 : k a -> a : f32 2 micro | 0 forward
        v2 = einsum v1, v1 : a, a -> () : f32 () micro | 0 forward
        v3 = sqrt v2 : () -> () : f32 () micro | 0 forward
        tap(norm) v3 : () -> | 0 forward",
    );
    let feeds = fed(&[("x", &[2, 2], &[1.0, 3.0, 2.0, 1.0])]);
    assert_eq!(locals(&graph, &feeds, Value(1)), [[1.0, 3.0], [2.0, 1.0]]);
    // 5.3983 would be the sum of the ranks' norms.
    on_every_rank(&tapped(&graph, &feeds)["norm"], &[5.0]);
}

#[test]
fn no_function_that_is_not_linear_acts_on_a_partial_sum() {
    let graph = read(
        "sharded mesh tp=2
        place x [tp, _]
        input x : f32 [k=2, a=2]
        v0 = input(x) : -> k a : f32 2x2 micro | 0 forward
        v1 = einsum v0 : k a -> a : f32 2 micro | 0 forward
        v2 = reduce_max v1 : a -> () : f32 () micro | 0 forward
        v3 = abs v1 : a -> a : f32 2 micro | 0 forward
        v4 = relu v1 : a -> a : f32 2 micro | 0 forward
        v5 = exp v1 : a -> a : f32 2 micro | 0 forward
        tap(max) v2 : () -> | 0 forward
        tap(abs) v3 : a -> | 0 forward
        tap(relu) v4 : a -> | 0 forward
        tap(exp) v5 : a -> | 0 forward
        constrain v3 [_]
        constrain v4 [_]
        constrain v5 [_]",
    );
    let feeds = fed(&[("x", &[2, 2], &[1.0, -2.0, -3.0, 4.0])]);
    assert_eq!(locals(&graph, &feeds, Value(1)), [[1.0, -2.0], [-3.0, 4.0]]);
    let taps = tapped(&graph, &feeds);
    // On the pieces, then summed, they would be 5, [4, 6] and [1, 4].
    on_every_rank(&taps["max"], &[2.0]);
    on_every_rank(&taps["abs"], &[2.0, 2.0]);
    on_every_rank(&taps["relu"], &[0.0, 2.0]);
    on_every_rank(&taps["exp"], &[(-2f64).exp(), 2f64.exp()]);
}

#[test]
fn the_host_reads_no_contribution() {
    let graph = read(
        "sharded mesh dp=2
        place x [dp]
        input x : f32 [b=2]
        v0 = input(x) : -> b : f32 2 micro | 0 forward
        v1 = einsum v0 : b -> () : f32 () micro | 0 forward
        tap(loss) v1 : () -> | 0 forward
        tap(log) v1 : () -> | 0 forward",
    );
    let feeds = fed(&[("x", &[2], &[0.25, 0.75])]);
    assert_eq!(locals(&graph, &feeds, Value(1)), [[0.25], [0.75]]);
    let taps = tapped(&graph, &feeds);
    on_every_rank(&taps["loss"], &[1.0]);
    on_every_rank(&taps["log"], &[1.0]);
    let reshards: Vec<_> = graph.graph.nodes.iter().filter(|n| n.op == Op::Reshard).collect();
    assert_eq!(reshards.len(), 1, "{graph}");
}

#[test]
fn a_row_parallel_bias_is_added_once_and_has_its_whole_gradient() {
    let mut m = Model::new();
    for (name, size) in [("d", 2), ("f", 2)] {
        m.dim(name, size);
    }
    let x = m.input("x", DType::F32, "d");
    let w = m.parameter("w", "d f", Init::Zeros);
    let bias = m.parameter("bias", "f", Init::Zeros);
    let y = m.einsum("f", &[&x, &w]);
    let y = m.add(&[&y, &bias]);
    m.tap("y", &y);
    let loss = m.einsum("", &[&y]);
    let count = m.constant(1.0, DType::F32);
    m.loss(&loss, &count);
    let mut graph = m.finish().unwrap();
    graph.optimizer = Some(AdamW::default());
    graph.dump = true;
    let mesh = Mesh::parse("tp=2").unwrap();
    let places = places(&[("x", "[_]"), ("w", "[tp, _]"), ("bias", "[_]")], &mesh);
    let sharded = step(graph, &mesh, places);
    let given = fed(&[
        ("x", &[2], &[1.0, 1.0]),
        ("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0]),
        ("bias", &[2], &[10.0, 20.0]),
    ]);
    let taps = tapped(&sharded, &feeds(&sharded.graph, given, 1));
    // Twice the bias would give [24, 46]; half of it on each rank a gradient of [0.5, 0.5].
    on_every_rank(&taps["y"], &[14.0, 26.0]);
    on_every_rank(&taps["grad.bias"], &[1.0, 1.0]);
}

/// The mean over the labels that count of `w` times a number of each token, on two ranks with a row each.
fn mean(losses: &[f64], labels: &[f64]) -> BTreeMap<String, Vec<Tensor<f64>>> {
    let mut m = Model::new();
    for (name, size) in [("b", 2), ("s", 8)] {
        m.dim(name, size);
    }
    let x = m.input("x", DType::F32, "b s");
    let labels_in = m.input("labels", DType::I32, "b s");
    let w = m.parameter("w", "", Init::Ones);
    let zero = m.constant(0.0, DType::I32);
    let counts = m.binary(Binary::Ge, &labels_in, &zero);
    let counts = m.cast(&counts, DType::F32);
    let sum = m.einsum("", &[&x, &counts, &w]);
    let count = m.einsum("", &[&counts]);
    m.loss(&sum, &count);
    let mut graph = m.finish().unwrap();
    graph.optimizer = Some(AdamW { clip: Some(1.0), ..AdamW::default() });
    graph.dump = true;
    let mesh = Mesh::parse("dp=2").unwrap();
    let places = places(&[("x", "[dp, _]"), ("labels", "[dp, _]")], &mesh);
    let sharded = step(graph, &mesh, places);
    let given = fed(&[("x", &[2, 8], losses), ("labels", &[2, 8], labels), ("w", &[], &[1.0])]);
    tapped(&sharded, &feeds(&sharded.graph, given, 1))
}

#[test]
fn a_loss_is_a_sum_over_a_count_and_no_mean_of_means() {
    let losses = [[3.0; 8], [0.5; 8]].concat();
    let labels = [&[1.0; 2][..], &[-100.0; 6], &[1.0; 8]].concat();
    let taps = mean(&losses, &labels);
    // 6 over 2 tokens and 4 over 8: the mean of the means would be 1.75.
    on_every_rank(&taps["loss"], &[1.0]);
    on_every_rank(&taps["grad.w"], &[1.0]);
}

#[test]
fn a_batch_without_labels_has_loss_and_gradient_zero() {
    let taps = mean(&[2.0; 16], &[-100.0; 16]);
    for name in ["loss", "grad.w", "grad_norm"] {
        on_every_rank(&taps[name], &[0.0]);
    }
}
