//! Whole models of the oracles, compiled.

use std::collections::BTreeMap;

use ir::graph::Recompute;
use ir::schedule::Schedule;
use ir::{Graph, Mesh, Name, Places};
use models::{Config, Dropout, Shape};
use passes::{Compiled, Trace};
use planner::choose::compile;
use planner::cluster::Cluster;
use planner::conventions::{free, pieces, places, refine};
use planner::schedules::named;
use planner::schedules::refused::Size;
use planner::stages::{costs, cut};
use planner::zero::{self, Zero};
use runtime::data::Batch;
use runtime::data::rows::Rows;
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
        flops_bf16: None,
        memory_bandwidth: 1e13,
        memory: None,
        launch: 1e-6,
        latency: 0.0,
        bandwidth: 1e4,
    }
}

/// How a step is split, beyond the mesh.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// What is split over `dp`.
    pub zero: Zero,
    /// How many micro-batches there are.
    pub microbatches: usize,
    /// What is computed again.
    pub recompute: Recompute,
    /// On a mesh with `pp` the kind of schedule and its virtual stages a rank, if not one stage after the other (1f1b).
    pub schedule: Option<(&'static str, usize)>,
}

/// Nothing but the mesh.
pub const PLAIN: Split =
    Split { zero: Zero::Off, microbatches: 1, recompute: Recompute::None, schedule: None };

/// The training step of an oracle's model on a mesh.
pub fn training_step(oracle: &Oracle, mesh: &str, dump: bool, trace: Trace) -> Compiled {
    split_step(oracle, mesh, PLAIN, dump, trace).0
}

/// The same, split further, and which rows its micro-batches have.
pub fn split_step(oracle: &Oracle, mesh: &str, split: Split, dump: bool, trace: Trace) -> (Compiled, Rows) {
    split_step_with(oracle, Dropout::Config, mesh, split, dump, trace)
}

/// The same with other rates of dropout; the seed is 7.
pub fn split_step_with(
    oracle: &Oracle,
    dropout: Dropout,
    mesh: &str,
    split: Split,
    dump: bool,
    trace: Trace,
) -> (Compiled, Rows) {
    let mut config = Config::read(&oracle.folder).expect("the oracle has a config");
    config.dropout = dropout;
    let size = |key: &str| oracle.case[key].as_u64().expect("a size") as usize;
    let shape = Shape { batch: size("global_batch"), sequence: size("sequence") };
    let whole = models::build(&config, shape).expect("the oracle's config is a model");
    let mesh = refine(&whole, &Mesh::parse(mesh).expect("a mesh"));
    let rows = Rows::of(&pieces(&whole, &mesh, &places(&whole, &mesh)), split.microbatches);
    let shape = Shape { batch: rows.each(), ..shape };
    let mut graph = models::build(&config, shape).expect("the oracle's config is a model");
    graph.seed(7);
    graph.optimizer = Some(oracle.adamw());
    graph.dump = dump;
    graph.recompute = split.recompute;
    graph.scatters = split.zero >= Zero::Gradients;
    let mut places = Places::from(places(&graph, &mesh));
    places.free = free(&graph, &places.at, &mesh);
    (places.schedule, graph.stages) = piped(&graph, &mesh, split);
    zero::split(split.zero, &graph, &mesh, &mut places);
    (compile(graph, &mesh, places, &here(), trace), rows)
}

/// The table of a step, and where the model is cut.
pub fn piped(graph: &Graph, mesh: &Mesh, split: Split) -> (Schedule, Vec<usize>) {
    let stages = mesh.rows();
    if stages == 1 && split.schedule.is_none() {
        return (Schedule::one_stage(split.microbatches), Vec::new());
    }
    let (kind, virtuals) = split.schedule.unwrap_or(("1f1b", 1));
    let size = Size { stages, virtuals, microbatches: split.microbatches, group: None };
    let schedule = (named(kind).expect("a kind").table)(&size).unwrap_or_else(|e| panic!("{e}"));
    let costs = costs(graph, mesh.ranks() / stages, false, &here());
    let stages = cut(&costs, schedule.stages());
    (schedule, stages)
}

/// The inputs of a step of one micro-batch, as a backend is fed them.
pub fn feeds(oracle: &Oracle, step: usize) -> BTreeMap<Name, HostTensor> {
    let batch = batch(oracle, step);
    let rows = (0..batch.rows as i32).collect();
    fed(batch, rows)
}

/// The inputs of a step's micro-batches.
pub fn all_feeds(oracle: &Oracle, rows: &Rows, step: usize) -> Vec<BTreeMap<Name, HostTensor>> {
    let batches = rows.split(&batch(oracle, step)).into_iter().zip(rows.numbers());
    batches.map(|(batch, rows)| fed(batch, rows)).collect()
}

fn batch(oracle: &Oracle, step: usize) -> Batch {
    let data = tensors(&oracle.folder.join("data.safetensors"));
    let of = |name: &str| {
        let (shape, all) = &data[name];
        let n = shape[1] * shape[2];
        all[step * n..(step + 1) * n].iter().map(|x| *x as i32).collect::<Vec<i32>>()
    };
    let shape = &data["inputs"].0;
    Batch { inputs: of("inputs"), labels: of("labels"), rows: shape[1], sequence: shape[2] }
}

fn fed(batch: Batch, rows: Vec<i32>) -> BTreeMap<Name, HostTensor> {
    let Batch { inputs, labels, sequence, .. } = batch;
    let position = (0..inputs.len()).map(|i| (i % sequence) as i32).collect();
    let all = [("inputs", inputs), ("labels", labels), ("position", position), ("row", rows)];
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
