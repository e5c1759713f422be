//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// What the help of the whole program ends with.
const EXAMPLES: &str = "\
Examples:
  meshc plan ./gpt2 --mesh dp=2,tp=2               what is communicated and needed
  meshc check ./gpt2 --mesh dp=2,tp=2 --numeric    held against one device
  meshc data encode text.txt --tokenizer tokenizer.json -o text.npy
  meshc train ./gpt2 --mesh dp=2,tp=2 --data text.npy --seq 128 --steps 200
  meshc plan ./llama --mesh dp=8,tp=8 --cluster h100 --format json

MODEL is a folder with a Hugging Face config.json (and weights), a config.json,
or a graph in text form. What is not built yet says so and exits with 2.";

/// Decides how a model is split over a mesh of devices, shows it, proves it, and trains it.
#[derive(Debug, Parser)]
#[command(name = "meshc", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compile; print communication, memory and step time (needs no weights)
    Plan(PlanArgs),
    /// Print the program after every pass
    Trace(TraceArgs),
    /// Print a plan file: instructions, schedule table, buffers
    Show(ShowArgs),
    /// Prove a plan well-formed, matched and memory-safe; --numeric: hold it against one device
    Check(CheckArgs),
    /// Plan, check and run training steps
    Train(Box<TrainArgs>),
    /// Write a checkpoint or a model as Hugging Face files
    Export(ExportArgs),
    /// Text to token ids
    Data(DataArgs),
    /// Measure this machine
    Bench(BenchArgs),
    /// The best ways to split (not built yet)
    #[command(hide = true)]
    Search(Later),
    /// A table of measured runs against the cost model (not built yet)
    #[command(hide = true)]
    Predict(Later),
    /// What differs between two plans (not built yet)
    #[command(hide = true)]
    Diff(Later),
    /// Execute a plan file (not built yet)
    #[command(hide = true)]
    Run(Later),
    /// Loss and perplexity (not built yet)
    #[command(hide = true)]
    Eval(Later),
    /// Prefill and decode (not built yet)
    #[command(hide = true)]
    Generate(Later),
    /// CUDA sources of a plan (not built yet)
    #[command(hide = true)]
    Kernels(Later),
}

/// Arguments of a command that is not built yet.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Later {
    /// Anything.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub rest: Vec<String>,
}

/// Which model, and how it is split.
#[derive(Clone, Debug, Args)]
pub struct SplitArgs {
    /// A folder with config.json, a config.json, or a graph in text form; for check and train also a plan file
    pub model: Option<PathBuf>,
    /// Axes and sizes, outermost first: pp layers (a pipeline), dp batch, tp heads, hidden and vocabulary, dpo a second
    /// batch axis
    #[arg(long, default_value = "", hide_default_value = true, value_name = "dp=2,tp=2")]
    pub mesh: String,
    /// Rows of a step, over all ranks; 8 unless the batches or the model say otherwise
    #[arg(long, value_name = "B")]
    pub global_batch: Option<usize>,
    /// Tokens of a row; 128 unless the batches or the model say otherwise
    #[arg(long, value_name = "S")]
    pub seq: Option<usize>,
    /// Micro-batches of a step, one after the other; their gradients are summed. 1, or 4 for each rank of a pipeline
    #[arg(long, value_name = "M")]
    pub microbatches: Option<usize>,
    /// What the plan is priced for: NAME, NAME:GPUS or a RON file (here, h100)
    #[arg(long, default_value = "here", value_name = "NAME[:GPUS]|FILE")]
    pub cluster: String,
    /// What one step is
    #[arg(long, value_enum, default_value_t = Mode::Train)]
    pub mode: Mode,
    /// Overrides all rates of dropout of the config, from 0 (none) to below 1; only training has dropout
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// In which order micro-batches go through a pipeline (--mesh pp=4): gpipe, 1f1b (the default), interleaved, looping,
    /// zb-h1, zb-h2, zb-v, dualpipe-v; auto, the fastest by price that fits; or a file with a line a rank, as in
    /// 0F0 0F1 0B0 0B1 0O
    #[arg(long, value_name = "KIND|FILE")]
    pub schedule: Option<String>,
    /// Virtual stages a rank of the pipeline; 1, or 2 for the kinds that have several
    #[arg(long, value_name = "L")]
    pub r#virtual: Option<usize>,
    /// Layers of each virtual stage, `_` for as many as is best; cut by the price of layers, embedding and head unless given
    #[arg(long, value_name = "8,8,_,_")]
    pub stages: Option<String>,
    /// Micro-batches that go through a virtual stage before the next one's turn: from P (depth-first, interleaved) to M
    /// (breadth-first, looping)
    #[arg(long, value_name = "N")]
    pub group: Option<usize>,
    /// What is sharded over dp: 1 optimizer state, 2 and gradients, 3 and parameters
    #[arg(long, value_name = "0|1|2|3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero: u8,
    /// Gradients are reduced, and parameters gathered, in calls of up to so many bytes, 0: each by itself; by the
    /// cluster's figures unless given
    #[arg(long, value_name = "BYTES")]
    pub bucket_bytes: Option<usize>,
    /// When gradients are synchronised: once a step (--zero 0, 1) or after each micro-batch (--zero 2, 3)
    #[arg(long, value_enum)]
    pub sync: Option<Sync>,
    /// What the backward pass computes again instead of keeping it: the inside of attention, or all of a layer
    #[arg(long, value_enum, default_value_t = Again::None)]
    pub recompute: Again,
    /// Compute type: bf16 keeps parameters and activations in bf16, and a master of each parameter in f32
    #[arg(long, value_enum, default_value_t = Float::F32)]
    pub dtype: Float,
    /// The type in which gradients of parameters are kept and sent; several micro-batches are summed in f32
    #[arg(long, value_enum, default_value_t = Float::F32)]
    pub grad_dtype: Float,
    /// Which model dimension goes to which axes, a rule a line: `f = tp`, `lm_head.weight: d = tp even`
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
}

/// What one step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Forward, backward and update.
    Train,
    /// Forward only.
    Forward,
    /// The first pass over a prompt.
    #[value(hide = true)]
    Prefill,
    /// One token after a prompt.
    #[value(hide = true)]
    Decode,
}

/// What the backward pass computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Again {
    /// Nothing.
    None,
    /// The inside of attention.
    Selective,
    /// All but what goes from layer to layer.
    Full,
}

/// A type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Float {
    /// 32 bits.
    F32,
    /// 16 bits, with the range of f32.
    Bf16,
}

/// When gradients are synchronised over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sync {
    /// After the last micro-batch.
    Once,
    /// After each, into accumulators that are split as optimizer state is.
    Each,
}

/// How a plan is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For scripts.
    Json,
}

/// `meshc plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// How to split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Text for people, JSON for scripts
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Writes the plan to a file, for show, check and train
    #[arg(short, long, value_name = "PLAN")]
    pub output: Option<PathBuf>,
    /// Writes when everything happens, by price, for Chrome's chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "F.json")]
    pub trace: Option<PathBuf>,
    /// Exit 2 if it does not fit
    #[arg(long)]
    pub require_fit: bool,
    /// Why each product is split as it is and each reshard goes its way; of TENSOR, what led to what runs
    #[arg(long, num_args = 0..=1, default_missing_value = "", value_name = "TENSOR")]
    pub explain: Option<String>,
}

/// `meshc trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// How to split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Only this pass
    #[arg(long, value_name = "NAME")]
    pub pass: Option<String>,
}

/// `meshc show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// A file that `plan -o` wrote
    pub plan: PathBuf,
    /// As this rank sees it: sizes of its own pieces
    #[arg(long, value_name = "R")]
    pub rank: Option<usize>,
    /// Only this stage
    #[arg(long, value_name = "S")]
    pub stage: Option<usize>,
}

/// `meshc check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// How to split; MODEL may be a plan file.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Run it in lockstep beside one device, on random input, and name the first value that differs
    #[arg(long)]
    pub numeric: bool,
    /// Of the random input, and of dropout
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// What the help of `meshc train` ends with.
const TRAIN_EXAMPLES: &str = "\
Examples:
  meshc train ./gpt2 --mesh dp=4 --zero 3 --data text.npy --seq 128 --steps 2000 --checkpoint run --every 100
  meshc train ./gpt2 --mesh tp=2 --data text.npy --seq 128 --steps 2000 --checkpoint run --every 100 --resume
The second goes on, on another mesh, where the first was stopped.";

/// `meshc train`.
#[derive(Debug, Args)]
#[command(after_help = TRAIN_EXAMPLES)]
pub struct TrainArgs {
    /// How to split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Tensors `inputs` and `labels`, int64 [steps, global batch, sequence]; -100 does not count
    #[arg(long, value_name = "F.safetensors", conflicts_with = "data")]
    pub batches: Option<PathBuf>,
    /// Token ids, 1-d; rows are drawn at random from --seed, the same for every mesh
    #[arg(long, value_name = "F.npy")]
    pub data: Option<PathBuf>,
    /// Steps
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub steps: usize,
    /// Largest learning rate
    #[arg(long, default_value_t = 1e-3, value_name = "X")]
    pub lr: f64,
    /// Learning rate at the end
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub min_lr: f64,
    /// Steps in which the rate rises
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub warmup: usize,
    /// Decay of the means of gradients and of their squares
    #[arg(long, default_value = "0.9,0.95", value_name = "B1,B2")]
    pub betas: String,
    /// Added to the root of the mean of squares
    #[arg(long, default_value_t = 1e-8, value_name = "X")]
    pub eps: f64,
    /// Of file tensors of two or more dimensions
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub weight_decay: f64,
    /// Largest global norm of the gradient
    #[arg(long, value_name = "X")]
    pub clip: Option<f64>,
    /// Of initial weights, drawn rows and dropout
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// local: all ranks in this process on CPU
    #[arg(long, default_value = "local", value_name = "local|mpi|cuda")]
    pub backend: String,
    /// Threads of the local backend; by default as many as cores, at most as many as ranks
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// One JSON line a step
    #[arg(long, value_name = "F.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Writes when everything happened in the last step, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "F.json")]
    pub trace: Option<PathBuf>,
    /// Prints where the time of the steps went, by kind of instruction and for the slowest ones; the first step does not count
    #[arg(long, conflicts_with = "trace")]
    pub profile: bool,
    /// step-N.safetensors for each step: logits, and grad.NAME before clipping
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    /// At the end: config.json and model.safetensors
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Sharded checkpoints: at the end, at SIGINT and SIGTERM, and as --every says
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps between checkpoints, as in `--checkpoint out --every 100`
    #[arg(long, value_name = "N", requires = "checkpoint")]
    pub every: Option<usize>,
    /// Checkpoints that stay; older ones are removed
    #[arg(long, value_name = "K", default_value_t = 2, requires = "checkpoint")]
    pub keep: usize,
    /// Go on from the newest checkpoint, on this mesh or another; from the start if there is none
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
    /// Token ids for evaluation
    #[arg(long, value_name = "F.npy", hide = true)]
    pub eval_data: Option<PathBuf>,
    /// Steps between evaluations
    #[arg(long, value_name = "N", hide = true)]
    pub eval_every: Option<usize>,
    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
}

/// `meshc export`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  meshc export run/step-000400 -o out     what `train --save out` writes at step 400"
)]
pub struct ExportArgs {
    /// A checkpoint, or a folder of them, whose newest is taken; a folder with config.json and weights; or a config.json,
    /// whose model is then initialised
    pub model: PathBuf,
    /// Where to
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Of initial weights, if there are none
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Element type of the files
    #[arg(long, default_value = "f32", value_name = "f32|bf16")]
    pub dtype: String,
}

/// `meshc data`.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: DataCommand,
}

/// The commands of `meshc data`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Text to token ids
    Encode {
        /// UTF-8 text
        text: PathBuf,
        /// A tokenizer.json
        #[arg(long, value_name = "T")]
        tokenizer: PathBuf,
        /// Where to
        #[arg(short, long, value_name = "F.npy")]
        output: PathBuf,
    },
}

/// `meshc bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What is measured.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// The commands of `meshc bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Training steps on random tokens, as a share of this machine's own rate of matrix products
    Step(Box<StepArgs>),
    /// Writing a checkpoint, as a share of a plain write to the same disk
    Checkpoint(CheckpointArgs),
    /// Collectives among ranks of this process, in the columns of nccl-tests
    Collectives(CollectivesArgs),
    /// Kernels (not built yet)
    #[command(hide = true)]
    Kernels(Later),
}

/// `meshc bench step`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  meshc bench step ./gpt2 --mesh dp=2 --zero 3 --seq 256 --beside \"--mesh dp=2 --seq 256\""
)]
pub struct StepArgs {
    /// How to split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Runs the same model split otherwise too, a step of each in turn: `--beside "--mesh dp=2 --zero 3"`
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    pub beside: Option<String>,
    /// Prints where the time of the steps went, by kind of instruction and for the slowest ones
    #[arg(long, conflicts_with = "format")]
    pub profile: bool,
    /// Steps measured, after two that are not
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub steps: usize,
    /// Threads of the local backend
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Text for people, JSON for scripts
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// How the other one of `meshc bench step --beside` is split.
#[derive(Debug, Parser)]
pub struct BesideArgs {
    /// How to split.
    #[command(flatten)]
    pub split: SplitArgs,
}

/// `meshc bench collectives`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  meshc bench collectives --ranks 8 --min-bytes 65536 --max-bytes 134217728 --factor 4"
)]
pub struct CollectivesArgs {
    /// How many ranks take part
    #[arg(long, default_value_t = 8, value_name = "R")]
    pub ranks: usize,
    /// The smallest size
    #[arg(short = 'b', long, default_value_t = 1 << 16, value_name = "BYTES")]
    pub min_bytes: usize,
    /// The largest size
    #[arg(short = 'e', long, default_value_t = 1 << 26, value_name = "BYTES")]
    pub max_bytes: usize,
    /// From one size to the next
    #[arg(short = 'f', long, default_value_t = 4, value_name = "X")]
    pub factor: usize,
    /// How often each is measured, after two that do not count; the median is shown
    #[arg(short = 'n', long, default_value_t = 10, value_name = "N")]
    pub iterations: usize,
    /// Threads of the local backend
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Text for people, JSON for scripts
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// `meshc bench checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meshc bench checkpoint -o /data/run --gb 4 --ranks 8")]
pub struct CheckpointArgs {
    /// A folder on the disk that is measured; what is written there is removed
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Size of the state, in 10^9 bytes
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    pub gb: f64,
    /// Ranks that the state is split over
    #[arg(long, default_value_t = 4, value_name = "R")]
    pub ranks: usize,
    /// Text for people, JSON for scripts
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}
