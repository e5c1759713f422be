//! The program of the largest table that is asked for, 64 ranks with 4 stages each and 512 micro-batches (262,400 actions), of
//! a chain of 256 small layers, on one core.

use criterion::{Criterion, criterion_group, criterion_main};
use ir::composite::cross_entropy;
use ir::dsl::Model;
use ir::schedule::Schedule;
use ir::state::{AdamW, Init};
use ir::{DType, Graph, Mesh, Places, ShardedGraph, Unary};
use meshc_planner::check::check;
use meshc_planner::choose::choose;
use meshc_planner::cluster::read;
use meshc_planner::conventions::{free, places};
use meshc_planner::schedules::named;
use meshc_planner::schedules::refused::Size;
use meshc_planner::stages::cut;

const SIZE: Size = Size { stages: 64, virtuals: 4, microbatches: 512, group: None };

fn chain(layers: usize) -> Graph {
    let mut m = Model::new();
    for (name, size) in [("b", 4), ("s", 2), ("d", 6), ("e", 6), ("v", 6)] {
        m.dim(name, size);
    }
    let mut x = m.input("x", DType::F32, "b s d");
    let labels = m.input("labels", DType::I32, "b s");
    for layer in 0..layers {
        m.layer(layer as u32);
        let weight = m.parameter(&format!("w{layer}"), "d e", Init::Normal(0.4));
        let y = m.einsum("b s e", &[&x, &weight]);
        let y = m.rename(&y, "e", "d");
        x = m.unary(Unary::Tanh, &y);
    }
    m.behind_layers();
    let head = m.parameter("head", "d v", Init::Normal(0.4));
    let logits = m.einsum("b s v", &[&x, &head]);
    let (sum, count) = cross_entropy(&mut m, &logits, &labels);
    m.loss(&sum, &count);
    m.finish().expect("a chain is a model")
}

fn sharded(schedule: Schedule) -> ShardedGraph {
    let mut graph = chain(SIZE.stages * SIZE.virtuals);
    graph.optimizer = Some(AdamW::default());
    graph.stages = cut(&vec![1; graph.depth()], schedule.stages());
    let mesh = Mesh::parse("pp=64").expect("a mesh");
    let mut placed = Places::from(places(&graph, &mesh));
    placed.free = free(&graph, &placed.at, &mesh);
    placed.schedule = schedule;
    passes::GRAPH.iter().for_each(|pass| (pass.run)(&mut graph));
    let mut sharded = ShardedGraph::new(graph, mesh, placed);
    let cluster = read("here").expect("a cluster");
    passes::shard(&mut sharded, &|sharded| choose(sharded, &cluster), &mut |_, _| {});
    sharded
}

fn largest(c: &mut Criterion) {
    let mut group = c.benchmark_group("programs, P=64 M=512 L=4");
    group.sample_size(10);
    for kind in ["interleaved", "looping"] {
        let table = || (named(kind).expect("a kind").table)(&SIZE).expect("a table");
        let mut whole = sharded(table());
        let mut made = || {
            whole.decisions.schedule = table();
            let mut program = passes::lower(&whole);
            passes::PROGRAM.iter().for_each(|pass| (pass.run)(&mut program));
            program
        };
        group.bench_function(format!("make {kind}"), |b| b.iter(&mut made));
        let program = made();
        group.bench_function(format!("check {kind}"), |b| {
            b.iter(|| check(&whole, &program).expect("a right program"))
        });
    }
    group.finish();
}

criterion_group!(benches, largest);
criterion_main!(benches);
