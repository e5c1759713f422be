//! The choice for Llama 3 405B, on one core: all that happens between a training step on a mesh and its decisions.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ir::state::AdamW;
use ir::{Mesh, Places, ShardedGraph};
use meshc_planner::choose::best;
use meshc_planner::cluster::read;
use meshc_planner::conventions::{free, places, refine};
use models::{Config, Shape};

/// The published sizes.
const LLAMA_405B: &str = r#"{
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

fn placed(mesh: &str, batch: usize) -> ShardedGraph {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.json");
    std::fs::write(&path, LLAMA_405B).expect("a file");
    let config = Config::read(&path).expect("a config");
    let mut graph = models::build(&config, Shape { batch, sequence: 8192 }).expect("a model");
    graph.optimizer = Some(AdamW::default());
    let mesh = refine(&graph, &Mesh::parse(mesh).expect("a mesh"));
    let mut at = Places::from(places(&graph, &mesh));
    at.free = free(&graph, &at.at, &mesh);
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

criterion_group!(benches, llama_405b);
criterion_main!(benches);
