//! Small situations in which others combined pieces wrongly, or moved more than they had to, each with what is right.

use std::slice::from_ref;

use ir::dsl::{Model, Tensor as Named};
use ir::program::Program;
use ir::verify_program::verify_program;
use ir::{DType, Graph, Mesh, Reduce, ShardedGraph, Sharding, composite, moves};
use meshc_tests::backend::{Left, equals, left_by, left_by_one_device, loaded};
use meshc_tests::meaning::{equals_one_device, places, step};
use meshc_tests::random::Random;
use meshc_tests::traffic::disagree;
use planner::cluster::read;
use planner::plan::plan;
use runtime::eval::eval;
use runtime::local::Traffic;
use runtime::lockstep::Feeds;
use runtime::tensor::Tensor;

/// A graph of one input, after the passes, and what it is fed.
struct Case {
    sharded: ShardedGraph,
    feeds: Feeds<f64>,
}

impl Case {
    fn new(
        shape: &[(&str, usize)],
        mesh: &str,
        place: &str,
        x: &[f64],
        body: fn(&mut Model, &Named),
    ) -> Case {
        let mut m = Model::new();
        shape.iter().for_each(|(name, size)| m.dim(name, *size));
        let dims: Vec<&str> = shape.iter().map(|(name, _)| *name).filter(|n| !n.starts_with('k')).collect();
        let input = m.input("x", DType::F32, &dims.join(" "));
        body(&mut m, &input);
        let graph: Graph = m.finish().unwrap_or_else(|e| panic!("{}", e[0]));
        let sizes: Vec<usize> = graph.inputs[0].dims.iter().map(|(_, n)| *n).collect();
        let mesh = Mesh::parse(mesh).unwrap_or_else(|e| panic!("{e}"));
        let sharded = step(graph, &mesh, places(&[("x", place)], &mesh));
        let feeds = Feeds::from([("x".into(), Tensor { shape: sizes, data: x.to_vec() })]);
        Case { sharded, feeds }
    }

    /// What is tapped; every value in lockstep and in f64, and the program on the local backend, equal one device.
    fn taps(&self) -> Left {
        equals_one_device(&self.sharded, &self.feeds, eval).unwrap_or_else(|e| panic!("{e}"));
        let program = self.program();
        let graph = &self.sharded.graph;
        for workers in [1, 2, self.sharded.mesh.ranks()] {
            equals(graph, &program, from_ref(&self.feeds), workers, 1e-6).unwrap_or_else(|e| panic!("{e}"));
        }
        left_by_one_device(graph, from_ref(&self.feeds))
    }

    fn program(&self) -> Program {
        let mut program = passes::lower(&self.sharded);
        passes::PROGRAM.iter().for_each(|pass| (pass.run)(&mut program));
        assert_eq!(verify_program(&program), Ok(()));
        program
    }

    /// What the transport did.
    fn traffic(&self) -> Vec<Traffic> {
        let program = self.program();
        let mut local = loaded(&program, &self.feeds, 2).unwrap_or_else(|e| panic!("{e}"));
        left_by(&mut local, &self.sharded.graph, &program, from_ref(&self.feeds))
            .unwrap_or_else(|e| panic!("{e}"));
        local.traffic()
    }

    /// How the values lie that are reduced over a split dimension.
    fn partial(&self) -> Vec<Reduce> {
        let partial = self.sharded.shardings.iter().flat_map(|s| &s.partial);
        let mut all: Vec<Reduce> = partial.map(|(_, reduce)| *reduce).collect();
        all.sort();
        all.dedup();
        all
    }
}

#[test]
fn a_largest_is_combined_as_the_largest_and_not_summed() {
    let case = Case::new(&[("v", 8)], "tp=8", "[tp]", &[30.0; 8], |m, x| {
        let max = m.reduce(Reduce::Max, x, "v");
        let p = composite::softmax(m, x, "v");
        m.tap("max", &max);
        m.tap("p", &p);
    });
    assert_eq!(case.partial(), [Reduce::Sum, Reduce::Max]);
    let taps = case.taps();
    // 240 would be their sum, and each exponential 0.
    assert_eq!(taps["tap max"].data, [30.0]);
    assert_eq!(taps["tap p"].data, [0.125; 8]);
}

#[test]
fn the_place_of_the_largest_is_a_global_index() {
    let case = Case::new(&[("v", 4)], "tp=2", "[tp]", &[10.0, 5.0, 3.0, 8.0], |m, x| {
        let best = m.argmax(x, "v");
        m.tap("best", &best);
    });
    assert_eq!(case.partial(), [Reduce::Top]);
    // 1 would be the larger of the ranks' own 0 and 1.
    assert_eq!(case.taps()["tap best"].data, [0.0]);
    let other = Case::new(&[("v", 4)], "tp=2", "[tp]", &[8.0, 5.0, 3.0, 10.0], |m, x| {
        let best = m.argmax(x, "v");
        m.tap("best", &best);
    });
    assert_eq!(other.taps()["tap best"].data, [3.0]);
}

#[test]
fn of_equal_ones_on_several_ranks_the_lowest_index_is_first() {
    let x = [1.0, 7.0, 0.0, 7.0, 7.0, -1.0];
    let case = Case::new(&[("v", 6), ("k", 4)], "tp=4", "[tp]", &x, |m, x| {
        let pairs = m.top_k(x, "v", "k");
        let index = m.top_indices(&pairs);
        m.tap("index", &index);
    });
    assert_eq!(case.taps()["tap index"].data, [1.0, 3.0, 4.0, 0.0]);
}

#[test]
fn the_best_of_the_best_of_pieces_are_the_best() {
    let mut random = Random::new(20);
    let x: Vec<f64> = (0..2 * 8192).map(|_| (random.below(1 << 20)) as f64 / 1024.0 - 512.0).collect();
    let sizes = [("b", 2), ("v", 8192), ("k1", 1), ("k4", 4)];
    let case = Case::new(&sizes, "tp=8", "[_, tp]", &x, |m, x| {
        for k in ["k1", "k4"] {
            let pairs = m.top_k(x, "v", k);
            let (values, indices) = (m.top_values(&pairs), m.top_indices(&pairs));
            m.tap(&format!("{k}.values"), &values);
            m.tap(&format!("{k}.indices"), &indices);
        }
    });
    assert_eq!(case.partial(), [Reduce::Top]);
    let taps = case.taps();
    for b in 0..2 {
        let row = &x[b * 8192..(b + 1) * 8192];
        let mut sorted: Vec<(f64, usize)> = row.iter().copied().zip(0..).collect();
        sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (values, places): (Vec<f64>, Vec<f64>) = sorted[..4].iter().map(|(x, i)| (*x, *i as f64)).unzip();
        assert_eq!(taps["tap k4.values"].data[4 * b..4 * b + 4], values);
        assert_eq!(taps["tap k4.indices"].data[4 * b..4 * b + 4], places);
        assert_eq!((taps["tap k1.values"].data[b], taps["tap k1.indices"].data[b]), (values[0], places[0]));
    }
    // Pairs travel, k of each rank, and no logits: 2 rows of 1 and of 4 pairs.
    let bytes: Vec<usize> = case.traffic().iter().map(|t| t.bytes).collect();
    assert!(bytes.iter().all(|n| *n <= 2 * 4 * 2 * 4), "{bytes:?}");
}

#[test]
fn a_rank_with_fewer_than_k_gives_what_it_has() {
    let x = [3.0, f64::NEG_INFINITY, 5.0];
    let case = Case::new(&[("v", 3), ("k", 3)], "tp=4", "[tp]", &x, |m, x| {
        let pairs = m.top_k(x, "v", "k");
        m.tap("pairs", &pairs);
    });
    // The least value there is still comes before what is absent.
    assert_eq!(case.taps()["tap pairs"].data, [5.0, 2.0, 3.0, 0.0, f64::NEG_INFINITY, 1.0]);
}

/// A tensor of 8x8 that is asked to lie otherwise, and the calls that this takes, which the plan knows too.
fn calls(mesh: &str, from: &str, body: fn(&mut Model, &Named)) -> Vec<(&'static str, f64)> {
    let x: Vec<f64> = (0..64).map(f64::from).collect();
    let case = Case::new(&[("a", 8), ("b", 8)], mesh, from, &x, body);
    let doubled: Vec<f64> = x.iter().map(|x| 2.0 * x).collect();
    assert_eq!(case.taps()["tap y"].data, doubled);
    let (program, traffic) = (case.program(), case.traffic());
    let cluster = read("here").unwrap();
    assert_eq!(disagree(&plan(&case.sharded, &program, &cluster), &traffic, &program.mesh), None);
    traffic.iter().map(|t| (t.op, t.wire_bytes)).collect()
}

#[test]
fn a_split_goes_to_another_dimension_by_all_to_all() {
    let found = calls("x=4", "[x, _]", |m, x| {
        let y = m.scale(2.0, x);
        m.constrain(&y, "[_, x]");
        m.tap("y", &y);
    });
    // 192 B would be an all_gather.
    assert_eq!(found, [("all_to_all", 48.0)]);
}

#[test]
fn splits_change_places_by_a_permutation() {
    let found = calls("x=2,y=2", "[x, y]", |m, x| {
        let y = m.scale(2.0, x);
        m.constrain(&y, "[y, x]");
        m.tap("y", &y);
    });
    assert_eq!(found, [("permute", 64.0)]);
    let mesh = Mesh::parse("x=2,y=2").unwrap();
    let sharding = |text| Sharding::parse(text, &mesh).unwrap();
    let steps = moves(&sharding("[x, y]"), &sharding("[y, x]"), &mesh);
    // Two of the ranks keep their piece, two swap theirs.
    let sources: Vec<usize> = (0..4).map(|rank| steps[0].source(&mesh, rank)).collect();
    assert_eq!((steps.len(), sources), (1, vec![0, 2, 1, 3]));
}
