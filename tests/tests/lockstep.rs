//! Whole models in lockstep, in f64: the training step equals the oracle, and on every mesh one device.

use std::collections::BTreeMap;

use ir::{Mesh, Name, Op};
use meshc_tests::oracle::{Oracle, read, tensors};
use meshc_tests::whole::here;
use models::{Config, Shape};
use runtime::lockstep::{Feeds, assemble, one_device, run};
use runtime::tensor::Tensor;

fn feeds(oracle: &Oracle, graph: &ir::Graph, step: usize) -> Feeds<f64> {
    let weights = tensors(&oracle.folder.join("model.safetensors"));
    let data = tensors(&oracle.folder.join("data.safetensors"));
    let mut feeds: Feeds<f64> = BTreeMap::new();
    for state in &graph.states {
        let shape = state.shape();
        let value = match state.views.first() {
            Some(view) => Tensor { shape, data: weights[&*view.file].1.clone() },
            None => Tensor::full(&shape, 0.0),
        };
        feeds.insert(state.name.clone(), value);
    }
    for input in &graph.inputs {
        let shape: Vec<usize> = input.dims.iter().map(|(_, n)| *n).collect();
        let n: usize = shape.iter().product();
        let value = match &*input.name {
            "position" => Tensor::from_fn(&shape, |i| (i % shape[1]) as f64),
            name => Tensor { data: data[name].1[step * n..(step + 1) * n].to_vec(), shape },
        };
        feeds.insert(input.name.clone(), value);
    }
    feeds
}

fn compiled(oracle: &Oracle, mesh: &str) -> ir::ShardedGraph {
    let config = Config::read(&oracle.folder).unwrap();
    let batch = oracle.case["global_batch"].as_u64().unwrap() as usize;
    let sequence = oracle.case["sequence"].as_u64().unwrap() as usize;
    let mut graph = models::build(&config, Shape { batch, sequence }).unwrap();
    graph.optimizer = Some(oracle.adamw());
    graph.dump = true;
    let mesh = Mesh::parse(mesh).unwrap();
    let places = planner::conventions::places(&graph, &mesh);
    planner::choose::compile(graph, &mesh, places, &here(), &mut |_, _| {}).sharded
}

fn taps(graph: &ir::Graph) -> BTreeMap<Name, ir::Value> {
    let tap = |n: &ir::Node| if let Op::Tap(name) = &n.op { Some((name.clone(), n.args[0])) } else { None };
    graph.nodes.iter().filter_map(tap).collect()
}

#[test]
fn one_device_equals_the_oracle() {
    for name in ["gpt2", "llama", "llama_masked"] {
        let oracle = read(name);
        let sharded = compiled(&oracle, "");
        let graph = &sharded.graph;
        let taps = taps(graph);
        let mut state = feeds(&oracle, graph, 0);
        for step in 0..3 {
            let mut now = feeds(&oracle, graph, step);
            for (name, value) in &state {
                if graph.state(name).is_some() {
                    now.insert(name.clone(), value.clone());
                }
            }
            let values = one_device(graph, &now);
            let at = |tap: &str| values[taps[tap].index()].data[0];
            for (tap, key) in [("loss", "loss_per_step"), ("grad_norm", "grad_norm_per_step")] {
                let want = oracle.numbers(key)[step];
                assert!((at(tap) - want).abs() < 1e-6 * want, "{name} step {step} {tap}: {} {want}", at(tap));
            }
            if step == 0 {
                for (tap, value) in &taps {
                    let Some((_, want)) = oracle.expected.get(&**tap) else { continue };
                    let got = &values[value.index()].data;
                    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(worst < 1e-6, "{name} {tap}: off by {worst:e}");
                }
            }
            for node in &graph.nodes {
                if let Op::Assign(name) = &node.op {
                    state.insert(name.clone(), values[node.args[0].index()].clone());
                }
            }
        }
    }
}

#[test]
fn every_mesh_equals_one_device() {
    for name in ["gpt2", "llama"] {
        let oracle = read(name);
        for mesh in ["dp=2", "tp=2", "dp=2,tp=2", "tp=3,dp=5"] {
            let sharded = compiled(&oracle, mesh);
            let feeds = feeds(&oracle, &sharded.graph, 0);
            let want = one_device(&sharded.graph, &feeds);
            let got = run(&sharded, &feeds, runtime::eval::eval);
            for (v, pieces) in got.iter().enumerate() {
                let whole = assemble(pieces, &sharded.shardings[v], &sharded.mesh).unwrap();
                let d = whole.distance(&want[v]);
                assert!(d < 1e-10, "{name} on {mesh}: v{v} is off by {d:e}");
            }
        }
    }
}
