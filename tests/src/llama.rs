//! Llamas in mixed precision on ranks of the batch, priced for h100.

use ir::graph::Precision;
use ir::schedule::Schedule;
use ir::state::AdamW;
use ir::{DType, Mesh, Places};
use models::{Config, Shape};
use passes::Compiled;
use planner::choose::compile;
use planner::cluster::Cluster;
use planner::conventions::{free, places};
use planner::plan::{Plan, plan};
use planner::zero::{self, Zero};

/// All of whose dimensions divide by 8.
pub const SMALL: &str = r#"{
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

/// Of 1.3B parameters.
pub const LARGE: &str = r#"{
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

/// What the small one is fed.
pub const FEW: Shape = Shape { batch: 8, sequence: 32 };
/// What the large one is fed.
pub const MANY: Shape = Shape { batch: 64, sequence: 2048 };

/// How a step is split.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// The mesh.
    pub mesh: &'static str,
    /// What is split over `dp`.
    pub zero: Zero,
    /// The type of gradients.
    pub gradients: DType,
    /// How many micro-batches there are.
    pub microbatches: usize,
    /// The size of buckets, if it is not to be chosen.
    pub bucket_bytes: Option<usize>,
}

/// Eight ranks, gradients in f32, one micro-batch.
pub const PLAIN: How =
    How { mesh: "dp=8", zero: Zero::Off, gradients: DType::F32, microbatches: 1, bucket_bytes: None };

/// The training step of a Llama.
pub fn compiled(config: &str, shape: Shape, how: How) -> (Compiled, Cluster) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    let config = Config::read(folder.path()).expect("a config");
    let mut graph = models::build(&config, shape).expect("a model");
    graph.optimizer = Some(AdamW::default());
    graph.scatters = how.zero >= Zero::Gradients;
    let sums = if how.microbatches > 1 { DType::F32 } else { how.gradients };
    graph.precision = Some(Precision { gradients: how.gradients, sums });
    let mesh = Mesh::parse(how.mesh).expect("a mesh");
    let mut placed = Places::from(places(&graph, &mesh));
    placed.free = free(&graph, &placed.at, &mesh);
    placed.schedule = Schedule::one_stage(how.microbatches);
    placed.bucket_bytes = how.bucket_bytes;
    zero::split(how.zero, &graph, &mesh, &mut placed);
    let h100 = planner::cluster::read("h100").expect("a cluster");
    (compile(graph, &mesh, placed, &h100, &mut |_, _| {}), h100)
}

/// Its plan.
pub fn planned(config: &str, shape: Shape, how: How) -> Plan {
    let (compiled, h100) = compiled(config, shape, how);
    plan(&compiled.sharded, &compiled.program, &h100)
}
