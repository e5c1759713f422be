//! The choice for Llama 3 405B, on one core: all that happens between a training step on a mesh and its decisions; and its
//! whole plan on a pipeline of 16 stages, which takes about a second: all but reading and printing of
//! `meshc plan llama3-405b --mesh dp=128,tp=8,pp=16 --cluster h100 --global-batch 2048 --seq 8192 --dtype bf16`, whose
//! micro-batches have a row a rank.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ir::graph::Precision;
use ir::state::AdamW;
use ir::{DType, Graph, Mesh, Places, ShardedGraph};
use meshc_planner::choose::{best, compile};
use meshc_planner::cluster::read;
use meshc_planner::conventions::{free, places, refine};
use meshc_planner::plan::plan;
use meshc_planner::schedules::named;
use meshc_planner::schedules::refused::Size;
use meshc_planner::stages::{costs, cut};
use mimalloc::MiMalloc;
use models::{Config, Shape};

/// As in the binary.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// The published sizes.
const LLAMA_405B: &str = r#"{
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

fn model(mesh: &str, batch: usize) -> (Graph, Mesh, Places) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.json");
    std::fs::write(&path, LLAMA_405B).expect("a file");
    let config = Config::read(&path).expect("a config");
    let mut graph = models::build(&config, Shape { batch, sequence: 8192 }).expect("a model");
    graph.optimizer = Some(AdamW::default());
    let mesh = refine(&graph, &Mesh::parse(mesh).expect("a mesh"));
    let mut at = Places::from(places(&graph, &mesh));
    at.free = free(&graph, &at.at, &mesh);
    (graph, mesh, at)
}

fn placed(mesh: &str, batch: usize) -> ShardedGraph {
    let (mut graph, mesh, at) = model(mesh, batch);
    passes::GRAPH.iter().for_each(|pass| (pass.run)(&mut graph));
    let mut sharded = ShardedGraph::new(graph, mesh, at);
    passes::PLACED.iter().for_each(|pass| (pass.run)(&mut sharded));
    sharded
}

fn llama_405b(c: &mut Criterion) {
    let h100 = read("h100").expect("a cluster");
    let mut group = c.benchmark_group("choose");
    group.sample_size(10);
    for (mesh, batch) in [("dp=128,tp=8", 1024), ("dp=4096,tp=8", 32768)] {
        let sharded = placed(mesh, batch);
        assert!(best(&sharded, &h100).exact);
        let run = |sharded: &ShardedGraph| best(sharded, &h100).decisions;
        group.bench_function(format!("llama 3 405b on {mesh}"), |b| {
            b.iter_batched(|| &sharded, run, BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn whole_plan(c: &mut Criterion) {
    let h100 = read("h100").expect("a cluster");
    let (stages, microbatches) = (16, 64);
    let (mut graph, mesh, mut at) = model("dp=128,tp=8,pp=16", 128);
    graph.precision = Some(Precision { gradients: DType::F32, sums: DType::F32 });
    let size = Size { stages, virtuals: 1, microbatches, group: None };
    at.schedule = (named("1f1b").expect("a kind").table)(&size).expect("a table");
    graph.stages = cut(&costs(&graph, mesh.ranks() / stages, false, &h100), stages);
    let mut group = c.benchmark_group("plan");
    group.sample_size(10);
    group.bench_function("llama 3 405b on dp=128,tp=8,pp=16, 64 micro-batches", |b| {
        b.iter(|| {
            let compiled = compile(graph.clone(), &mesh, at.clone(), &h100, &mut |_, _| {});
            plan(&compiled.sharded, &compiled.program, &h100)
        });
    });
    group.finish();
}

criterion_group!(benches, llama_405b, whole_plan);
criterion_main!(benches);
