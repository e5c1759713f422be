//! `meshc export`: a checkpoint, or a model, read or initialised, as Hugging Face files.

use ir::state::{Init, Role};
use models::{Config, Dropout, Shape};
use runtime::checkpoint::Checkpoint;
use runtime::data::random::fill_normal;
use runtime::files::save::{Data, create_dir_all, write_tensors, write_text};
use runtime::files::weights::Weights;
use runtime::tensor::Tensor;

use super::print;
use crate::args::ExportArgs;
use crate::checkpoints;
use crate::failure::Failure;
use crate::loaded::{FileTensors, put, put_views, read_whole};

pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    let half = match args.dtype.as_str() {
        "f32" => false,
        "bf16" => true,
        other => return Err(Failure::Request(format!("--dtype {other}: files are f32 or bf16"))),
    };
    if let Some(checkpoint) = checkpoints::named(&args.model)? {
        return from_checkpoint(&checkpoint, args, half);
    }
    let config = Config::read(&args.model)?;
    let graph = models::build(
        &Config { dropout: Dropout::Everywhere(0.0), ..config.clone() },
        Shape { batch: 1, sequence: 1 },
    )?;
    let weights = if args.model.is_dir() { Weights::open(&args.model)? } else { None };
    let mut files = FileTensors::new();
    for state in graph.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. })) {
        let shape = state.shape();
        let mut whole: Tensor<f32> = Tensor::full(&shape, 0.0);
        let all: Vec<_> = shape.iter().map(|n| 0..*n).collect();
        match (&weights, state.init) {
            (Some(weights), _) => read_whole(weights, state, &mut whole.data)?,
            (None, Init::Zeros) => {}
            (None, Init::Ones) => whole.data.fill(1.0),
            (None, Init::Normal(std)) => {
                fill_normal(args.seed, &state.name, std as f32, &shape, &all, &mut whole.data)
                    .map_err(|e| Failure::Run(e.to_string()))?
            }
        }
        put(&mut files, state, &whole)?;
    }
    write(&args.output, Some(&config_text(&config)?), &files, half)?;
    told(args, &files, if weights.is_some() { "read" } else { "initialised" })
}

/// The parameters of a checkpoint, as a run that ended there would have saved them.
fn from_checkpoint(checkpoint: &Checkpoint, args: &ExportArgs, half: bool) -> Result<(), Failure> {
    let mut files = FileTensors::new();
    for (name, entry) in checkpoint.index().states.iter().filter(|(_, entry)| !entry.views.is_empty()) {
        put_views(&mut files, &entry.views(), &checkpoint.whole(name)?)?;
    }
    write(&args.output, checkpoint.text("config.json")?.as_deref(), &files, half)?;
    told(args, &files, &format!("of step {}", checkpoint.index().step))
}

fn told(args: &ExportArgs, files: &FileTensors, from: &str) -> Result<(), Failure> {
    let elements: usize = files.values().map(|(_, data)| data.len()).sum();
    let (n, grouped) = (files.len(), planner::units::grouped(elements as u64));
    print(&format!(
        "{}: {n} tensors, {grouped} parameters, {from}, as {}\n",
        args.output.display(),
        args.dtype
    ))
}

/// The text of a model's config.json.
pub(crate) fn config_text(config: &Config) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(&config.keys).map_err(|e| Failure::Run(e.to_string()))?;
    Ok(text + "\n")
}

/// Writes model.safetensors and, for a model that has one, config.json, each whole or not at all.
pub(crate) fn write(
    folder: &std::path::Path,
    config: Option<&str>,
    files: &FileTensors,
    half: bool,
) -> Result<(), Failure> {
    let failed = |e: runtime::files::FileError| Failure::Write(e.to_string());
    create_dir_all(folder).map_err(failed)?;
    let format = ("format".to_string(), "pt".to_string());
    let metadata: Vec<_> = config.iter().map(|_| format.clone()).collect();
    let path = folder.join("model.safetensors");
    if half {
        let rounded: Vec<(String, Vec<usize>, Vec<half::bf16>)> = files
            .iter()
            .map(|(name, (shape, data))| {
                (name.clone(), shape.clone(), data.iter().map(|x| half::bf16::from_f32(*x)).collect())
            })
            .collect();
        let tensors: Vec<_> = rounded.iter().map(|(n, s, d)| (n.clone(), s.clone(), Data::Bf16(d))).collect();
        write_tensors(&path, &tensors, &metadata).map_err(failed)?;
    } else {
        let tensors: Vec<_> = files.iter().map(|(n, (s, d))| (n.clone(), s.clone(), Data::F32(d))).collect();
        write_tensors(&path, &tensors, &metadata).map_err(failed)?;
    }
    config.map_or(Ok(()), |text| write_text(&folder.join("config.json"), text).map_err(failed))
}
