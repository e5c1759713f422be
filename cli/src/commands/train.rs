//! `meshc train`: plan, check and run training steps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ir::Name;
use ir::state::{AdamW, State};
use models::Shape;
use passes::Compiled;
use planner::timeline::trace::measured;
use planner::{check, names, plan, units};
use runtime::checkpoint::Checkpoint;
use runtime::data::batches::Batches;
use runtime::data::npy::Npy;
use runtime::data::rows::Rows;
use runtime::data::sample::Sample;
use runtime::data::{Batch, Source};
use runtime::files::save::{Data, create_dir_all, write_tensors};
use runtime::files::weights::Weights;
use runtime::local::{HostTensor, Local, Mark, RunError, Taps};
use serde::Serialize;

use super::{export, print, write_trace};
use crate::args::TrainArgs;
use crate::checkpoints::{self, Checkpoints, Start};
use crate::failure::Failure;
use crate::loaded::{FileTensors, file_tensors, fill, put, unused, workers};
use crate::planned::{plan_file, planned};
use crate::profile::Watch;
use crate::progress::{Progress, Row};
use crate::request::{self, Origin, Request};

/// A line of the metrics file.
#[derive(Serialize)]
struct Metrics {
    step: usize,
    loss: f32,
    grad_norm: f32,
    lr: f32,
    tokens: usize,
    seconds: f64,
}

pub(crate) fn run(origin: &Origin, args: &TrainArgs) -> Result<(), Failure> {
    not_built(args)?;
    checkpoints::check(args)?;
    let adamw = adamw(args)?;
    let batches = args.batches.as_deref().map(Batches::open).transpose()?;
    let fed = batches.as_ref().map(|b| Shape { batch: b.global_batch(), sequence: b.sequence() });
    let (request, compiled) = match plan_file(&args.split) {
        Some(path) => planned(path, args)?,
        None => {
            let mut request = request::read(origin, &args.split, fed)?;
            request.graph.seed(args.seed);
            if request.graph.loss.is_none() {
                return Err(Failure::Request(format!("{} has no loss to train on", request.title)));
            }
            let compiled = request.compile(adamw, args.dump.is_some(), &mut |_, _| {});
            (request, compiled)
        }
    };
    fits(&request, &compiled)?;
    // Nothing starts that is not proved.
    check::check(&compiled.sharded, &compiled.program).map_err(Failure::Check)?;
    let source = source(args, batches, &request)?;
    let found = checkpoints::found(args)?;
    let checkpoints = Checkpoints::of(args, &request, &compiled.program, found.as_ref())?;
    let start = found
        .as_ref()
        .map_or(Start::default(), |c| Start { step: c.index().step, position: c.index().position });
    let mut outputs = Outputs::open(args, checkpoints, start)?;
    let mut local = Local::new(&compiled.program, workers(args.workers, request.mesh.ranks()))?;
    match &found {
        Some(found) => resume(&mut local, &compiled, args, found)?,
        None => initialise(&mut local, &compiled, args)?,
    }
    steps(&mut local, &request, &compiled, args, &source, &mut outputs, start)?;
    save(&local, &request, &compiled, args)
}

fn not_built(args: &TrainArgs) -> Result<(), Failure> {
    let later =
        |there: bool, what: &str| if there { Err(Failure::NotBuilt(what.to_string())) } else { Ok(()) };
    later(args.eval_data.is_some() || args.eval_every.is_some(), "--eval-data and --eval-every")?;
    match args.backend.as_str() {
        "local" => Ok(()),
        "mpi" | "cuda" => Err(Failure::NotBuilt(format!("--backend {}", args.backend))),
        other => Err(Failure::Request(format!("--backend {other}: there are local, mpi and cuda"))),
    }
}

fn adamw(args: &TrainArgs) -> Result<AdamW, Failure> {
    let wrong = |what: String| Err(Failure::Request(what));
    let betas: Option<Vec<f64>> = args.betas.split(',').map(|b| b.trim().parse().ok()).collect();
    let betas = betas.filter(|b| b.len() == 2 && b.iter().all(|x| (0.0..1.0).contains(x)));
    let Some(betas) = betas else {
        return wrong(format!(
            "--betas {}: two numbers from 0 to below 1 are needed, as in 0.9,0.95",
            args.betas
        ));
    };
    if args.steps == 0 {
        return wrong("--steps 0: at least 1 is needed".to_string());
    }
    for (flag, x) in [
        ("--lr", args.lr),
        ("--min-lr", args.min_lr),
        ("--eps", args.eps),
        ("--weight-decay", args.weight_decay),
    ] {
        if !(x >= 0.0 && x.is_finite()) {
            return wrong(format!("{flag} {x}: a number of at least 0 is needed"));
        }
    }
    if let Some(clip) = args.clip.filter(|c| !(*c > 0.0 && c.is_finite())) {
        return wrong(format!("--clip {clip}: a number above 0 is needed"));
    }
    Ok(AdamW {
        lr: args.lr,
        min_lr: args.min_lr,
        warmup: args.warmup,
        steps: args.steps,
        // The logarithm of a decay of 0 is none: the smallest number does what 0 would.
        beta1: betas[0].max(f64::MIN_POSITIVE),
        beta2: betas[1].max(f64::MIN_POSITIVE),
        eps: args.eps,
        weight_decay: args.weight_decay,
        clip: args.clip,
    })
}

fn source(args: &TrainArgs, batches: Option<Batches>, request: &Request) -> Result<Source, Failure> {
    let known = ["inputs", "labels", "position", "row"];
    if let Some(other) = request.graph.inputs.iter().find(|i| !known.contains(&&*i.name)) {
        return Err(Failure::Request(format!(
            "input `{}` of {} is fed by nothing: --batches and --data feed inputs, labels and position [rows, tokens], and row [rows]",
            other.name, request.title
        )));
    }
    if let Some(batches) = batches {
        if batches.steps() < args.steps {
            let message = format!("--steps {}, but the batches hold {} steps", args.steps, batches.steps());
            return Err(Failure::Request(message));
        }
        return Ok(Source::Batches(batches));
    }
    let Some(path) = &args.data else {
        return Err(Failure::Request(
            "nothing to train on: give token ids with --data F.npy, or --batches F.safetensors".to_string(),
        ));
    };
    let Shape { batch, sequence } = request.shape;
    Ok(Source::Sample(Sample::new(Npy::open(path)?, args.seed, batch, sequence)?))
}

fn fits(request: &Request, compiled: &Compiled) -> Result<(), Failure> {
    let plan = request.plan(compiled);
    let Some(available) = plan.memory.available_bytes.filter(|_| !plan.memory.fits) else { return Ok(()) };
    let peak = plan.memory.peak_bytes as f64;
    Err(Failure::Request(format!(
        "a rank needs {}, but has {}: {} are missing",
        units::bytes(peak),
        units::bytes(available),
        units::bytes(peak - available)
    )))
}

/// Files that are written while training; opened before the first step, so that an unwritable one costs no work.
struct Outputs {
    metrics: Option<File>,
    checkpoints: Option<Checkpoints>,
}

impl Outputs {
    fn open(args: &TrainArgs, checkpoints: Option<Checkpoints>, start: Start) -> Result<Outputs, Failure> {
        let metrics = args.metrics.as_deref().map(|path| {
            if args.resume {
                checkpoints::keep_lines(path, start.step)?;
            }
            let file = File::options()
                .create(true)
                .write(true)
                .append(args.resume)
                .truncate(!args.resume)
                .open(path);
            file.map_err(|e| Failure::Write(format!("cannot write {}: {e}", path.display())))
        });
        for folder in [&args.dump, &args.save].into_iter().flatten() {
            create_dir_all(folder).map_err(|e| Failure::Write(e.to_string()))?;
        }
        checkpoints.as_ref().map_or(Ok(()), Checkpoints::prepare)?;
        Ok(Outputs { metrics: metrics.transpose()?, checkpoints })
    }

    /// Writes a checkpoint, if there are any, behind the lines that lead to it.
    fn checkpoint(&self, local: &Local, done: Start) -> Result<Option<PathBuf>, Failure> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(None) };
        if let Some(metrics) = &self.metrics {
            metrics.sync_data().map_err(|e| Failure::Write(format!("cannot write the metrics: {e}")))?;
        }
        checkpoints.write(local, done).map(Some)
    }
}

fn initialise(local: &mut Local, compiled: &Compiled, args: &TrainArgs) -> Result<(), Failure> {
    let states = &compiled.program.states;
    let folder = args.split.model.as_deref().filter(|p| p.is_dir());
    let weights = folder.map(Weights::open).transpose()?.flatten();
    if let Some(weights) = &weights {
        let unused = unused(weights, states);
        if !unused.is_empty() && !args.quiet {
            let shown = unused.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
            let _ =
                writeln!(std::io::stderr(), "note: {} tensors in files are not used: {shown}", unused.len());
        }
    }
    fill(local, states, weights.as_ref(), args.seed)
}

/// Takes up the states of a checkpoint.
fn resume(
    local: &mut Local,
    compiled: &Compiled,
    args: &TrainArgs,
    found: &Checkpoint,
) -> Result<(), Failure> {
    checkpoints::load(local, &compiled.program.states, found)?;
    let (folder, step, steps) = (found.folder().display(), found.index().step, args.steps);
    match args.quiet {
        true => Ok(()),
        false if step >= steps => {
            print(&format!("{folder} is at step {step} of {steps}: nothing is left to do\n"))
        }
        false => print(&format!("going on from {folder}, {step} of {steps} steps are done\n")),
    }
}

fn steps(
    local: &mut Local,
    request: &Request,
    compiled: &Compiled,
    args: &TrainArgs,
    source: &Source,
    outputs: &mut Outputs,
    first: Start,
) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    // A second handler in one process (a test, a caller of the library) leaves the first in place.
    let _ = ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed));
    let Shape { batch, sequence } = request.shape;
    let tokens = batch * sequence;
    let mut wanted: Vec<String> = ["loss", "grad_norm", "lr"].map(String::from).to_vec();
    if args.dump.is_some() {
        wanted.extend(local.taps().iter().map(ToString::to_string));
    }
    let mut taps = Taps::of(wanted.iter().map(String::as_str)).finite("loss").finite("grad_norm");
    let vocabulary = planner::numeric::limits(&request.graph).get("inputs").copied();
    let progress = Progress::new(args.steps, first.step, args.quiet);
    let mut marks: Vec<Vec<Mark>> = Vec::new();
    let mut watch = if args.profile { Some(Watch::new(local)?) } else { None };
    for step in first.step..args.steps {
        let position = first.position + (step - first.step);
        let data = source.batch(position)?;
        if let Some(vocabulary) = vocabulary {
            data.check_vocabulary(vocabulary, position)?;
        }
        let batches = request.rows.split(&data).into_iter().zip(request.rows.numbers());
        let feeds: Vec<_> = batches.map(|(batch, rows)| feeds(request, batch, rows)).collect();
        let start = Instant::now();
        let watched = watch.as_mut().filter(|_| step > first.step || step + 1 == args.steps);
        let done = match (&args.trace, &watched) {
            (None, None) => local.step(&feeds, &mut taps),
            (None, Some(watch)) => local.step_profiled(&feeds, &mut taps, &watch.profile),
            (Some(_), _) => local.step_recorded(&feeds, &mut taps).map(|found| marks = found),
        };
        match done {
            Ok(()) => {}
            Err(RunError::NotFinite { .. }) => return Err(not_finite(local, compiled, step, &feeds)),
            Err(other) => return Err(other.into()),
        }
        let seconds = start.elapsed().as_secs_f64();
        watched.into_iter().for_each(|watch| watch.stepped(seconds));
        let number = |tap: &str| taps.number(tap).unwrap_or(f32::NAN);
        let loss = number("loss");
        if let Some(file) = &mut outputs.metrics {
            let row =
                Metrics { step, loss, grad_norm: number("grad_norm"), lr: number("lr"), tokens, seconds };
            let line = serde_json::to_string(&row).map_err(|e| Failure::Run(e.to_string()))?;
            writeln!(file, "{line}").map_err(|e| Failure::Write(format!("cannot write the metrics: {e}")))?;
        }
        if let Some(folder) = &args.dump {
            dump(folder, step, &taps, &request.rows, &compiled.program.states)?;
        }
        progress.row(Row { step, loss, tokens_per_second: tokens as f64 / seconds })?;
        let stopped = stop.load(Ordering::Relaxed);
        let done = Start { step: step + 1, position: position + 1 };
        let due = outputs.checkpoints.as_ref().is_some_and(|c| c.due(done.step));
        let written =
            if stopped || due || done.step == args.steps { outputs.checkpoint(local, done)? } else { None };
        // A signal that came while a checkpoint was written costs no further step.
        if let Some(path) = args.trace.as_ref().filter(|_| stopped || done.step == args.steps) {
            write_trace(path, &measured(&compiled.program, &marks))?;
        }
        if stopped || (written.is_some() && stop.load(Ordering::Relaxed)) {
            progress.finish();
            let kept = written.map_or(String::new(), |f| format!("; --resume goes on from {}", f.display()));
            return Err(Failure::Run(format!("stopped by a signal after step {step}{kept}")));
        }
    }
    progress.finish();
    let workers = workers(args.workers, request.mesh.ranks());
    watch.map_or(Ok(()), |watch| print(&watch.text(local, compiled, workers)))
}

/// The inputs of a micro-batch that has these rows of the global batch.
fn feeds(request: &Request, data: Batch, numbers: Vec<i32>) -> BTreeMap<Name, HostTensor> {
    let Batch { inputs, labels, rows, sequence } = data;
    let positions = (0..rows * sequence).map(|i| (i % sequence) as i32).collect();
    let all = [("inputs", inputs), ("labels", labels), ("position", positions), ("row", numbers)];
    let used = |name: &str| request.graph.inputs.iter().any(|i| &*i.name == name);
    all.into_iter().filter(|(n, _)| used(n)).map(|(n, v)| (Name::from(n), HostTensor::I32(v))).collect()
}

/// Runs the step again, watching, to say where the first number that is not finite arose.
fn not_finite(
    local: &mut Local,
    compiled: &Compiled,
    step: usize,
    feeds: &[BTreeMap<Name, HostTensor>],
) -> Failure {
    let found = match local.first_not_finite(feeds) {
        Ok(found) => found,
        Err(error) => return error.into(),
    };
    let Some(found) = found else {
        return Failure::Run(format!(
            "step {step}: the loss is not finite; run again, every value was finite"
        ));
    };
    let graph = &compiled.sharded.graph;
    let value = found.value.map_or_else(
        || found.buffer.to_string(),
        |v| format!("{v}, {}", names::name(graph, &graph.makers(), v)),
    );
    Failure::Run(format!(
        "step {step}: the loss is not finite; the first value that is not is {value}: {} at {:?} on rank {}, {}",
        found.number,
        found.index,
        found.rank,
        plan::phase(found.segment)
    ))
}

fn dump(folder: &Path, step: usize, taps: &Taps, rows: &Rows, states: &[State]) -> Result<(), Failure> {
    let mut gradients = FileTensors::new();
    for state in states {
        if let Some(tensor) = taps.get(&format!("grad.{}", state.name)) {
            put(&mut gradients, state, tensor)?;
        }
    }
    let mut tensors: Vec<(String, Vec<usize>, Data)> = Vec::new();
    let logits = rows.join(taps.all("logits"));
    if let Some(logits) = &logits {
        tensors.push(("logits".to_string(), logits.shape.clone(), Data::F32(&logits.data)));
    }
    for (name, (shape, data)) in &gradients {
        tensors.push((format!("grad.{name}"), shape.clone(), Data::F32(data)));
    }
    let path = folder.join(format!("step-{step}.safetensors"));
    write_tensors(&path, &tensors, &[]).map_err(|e| Failure::Write(e.to_string()))
}

fn save(local: &Local, request: &Request, compiled: &Compiled, args: &TrainArgs) -> Result<(), Failure> {
    let Some(folder) = &args.save else { return Ok(()) };
    let files = file_tensors(local, &compiled.program.states)?;
    let config = request.config.as_ref().map(export::config_text).transpose()?;
    export::write(folder, config.as_deref(), &files, false)?;
    if args.quiet {
        return Ok(());
    }
    print(&format!("saved {} tensors in {}\n", files.len(), folder.display()))
}
