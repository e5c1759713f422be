//! Whole models of the oracles, compiled.

use std::collections::BTreeMap;

use ir::{Mesh, Name, Places};
use models::{Config, Shape};
use passes::{Compiled, Trace};
use planner::choose::compile;
use planner::cluster::Cluster;
use planner::conventions::{free, places, refine};
use runtime::local::HostTensor;

use crate::oracle::{Oracle, tensors};

/// The dense models.
pub const MODELS: [&str; 8] =
    ["gpt2", "llama", "llama_masked", "llama_rope", "mistral", "qwen2", "qwen3", "gemma2"];

/// The meshes on which whole models are tried.
pub const MESHES: [&str; 12] = [
    "",
    "dp=2",
    "dp=3",
    "dp=16",
    "tp=2",
    "tp=3",
    "tp=4",
    "tp=8",
    "dp=2,tp=2",
    "dp=2,tp=4",
    "dp=3,tp=2",
    "tp=5,dp=2",
];

/// What prices are those of.
pub fn here() -> Cluster {
    planner::cluster::read("here").expect("a cluster that is built in")
}

/// Prices that are wire bytes; calls and operations only settle what is equal.
pub fn wire() -> Cluster {
    Cluster {
        name: "wire".to_string(),
        devices: None,
        flops: 1e12,
        memory_bandwidth: 1e13,
        memory: None,
        launch: 1e-6,
        latency: 0.0,
        bandwidth: 1e4,
    }
}

/// The training step of an oracle's model on a mesh.
pub fn training_step(oracle: &Oracle, mesh: &str, dump: bool, trace: Trace) -> Compiled {
    let config = Config::read(&oracle.folder).expect("the oracle has a config");
    let size = |key: &str| oracle.case[key].as_u64().expect("a size") as usize;
    let shape = Shape { batch: size("global_batch"), sequence: size("sequence") };
    let mut graph = models::build(&config, shape).expect("the oracle's config is a model");
    graph.optimizer = Some(oracle.adamw());
    graph.dump = dump;
    let mesh = refine(&graph, &Mesh::parse(mesh).expect("a mesh"));
    let mut places = Places::from(places(&graph, &mesh));
    places.free = free(&graph, &places.at, &mesh);
    compile(graph, &mesh, places, &here(), trace)
}

/// The inputs of a step, as a backend is fed them.
pub fn feeds(oracle: &Oracle, step: usize) -> BTreeMap<Name, HostTensor> {
    let data = tensors(&oracle.folder.join("data.safetensors"));
    let of = |name: &str| {
        let (shape, all) = &data[name];
        let n = shape[1] * shape[2];
        all[step * n..(step + 1) * n].iter().map(|x| *x as i32).collect::<Vec<i32>>()
    };
    let inputs = of("inputs");
    let sequence = data["inputs"].0[2];
    let position = (0..inputs.len()).map(|i| (i % sequence) as i32).collect();
    let all = [("inputs", inputs), ("labels", of("labels")), ("position", position)];
    all.into_iter().map(|(name, data)| (name.into(), HostTensor::I32(data))).collect()
}

/// Fills the states: parameters from the oracle's weights, everything else with 0.
pub fn fill(local: &mut runtime::local::Local, program: &ir::program::Program, oracle: &Oracle) {
    let weights = tensors(&oracle.folder.join("model.safetensors"));
    for state in program.states.iter().filter(|s| s.dtype.is_float()) {
        let shape = state.shape();
        let data = state.views.first().map(|v| weights[&*v.file].1.clone());
        let whole = data.map_or_else(
            || runtime::tensor::Tensor::full(&shape, 0.0),
            |data| runtime::tensor::Tensor { shape: shape.clone(), data },
        );
        let filled = local.fill_state::<runtime::local::RunError>(&state.name, &mut |ranges, out| {
            let piece = ranges.iter().enumerate().fold(whole.clone(), |t, (dim, r)| t.slice(dim, r.clone()));
            out.iter_mut().zip(&piece.data).for_each(|(o, x)| *o = *x as f32);
            Ok(())
        });
        filled.expect("the program keeps the state");
    }
}
