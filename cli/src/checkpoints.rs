//! Checkpoints of a training run: what they say of it, when they are written, and where a run goes on.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use ir::Graph;
use ir::program::Program;
use ir::state::{Role, State};
use runtime::checkpoint::{self, About, Checkpoint, CheckpointError, Described};
use runtime::files::save::{create_dir_all, write_text};
use runtime::local::Local;
use serde::Deserialize;

use crate::args::TrainArgs;
use crate::commands::export;
use crate::failure::Failure;
use crate::request::Request;

/// Where checkpoints of a run go.
pub(crate) struct Checkpoints {
    dir: PathBuf,
    every: Option<usize>,
    keep: usize,
    about: About,
}

/// Where a run starts: the number of its first step, and of the batch that it reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Start {
    pub(crate) step: usize,
    pub(crate) position: usize,
}

/// The flags make sense together.
pub(crate) fn check(args: &TrainArgs) -> Result<(), Failure> {
    for (flag, n) in [("--every", args.every), ("--keep", Some(args.keep))] {
        if n == Some(0) {
            return Err(Failure::Request(format!("{flag} 0: at least 1 is needed")));
        }
    }
    Ok(())
}

/// The checkpoint that the run goes on from, if it does; every file of it is checked.
pub(crate) fn found(args: &TrainArgs) -> Result<Option<Checkpoint>, Failure> {
    let Some(dir) = &args.checkpoint else { return Ok(None) };
    if !args.resume {
        // Two runs in one folder would remove each other's.
        return match checkpoint::list(dir)?.last() {
            None => Ok(None),
            Some((step, _)) => Err(Failure::Request(format!(
                "{} holds checkpoints up to step {step}: --resume goes on from the last; for a new run give another folder",
                dir.display()
            ))),
        };
    }
    let Some(found) = checkpoint::newest(dir)? else {
        note(args, &format!("{} holds no checkpoint: the run starts at step 0", dir.display()));
        return Ok(None);
    };
    let seed = found.index().seed;
    if seed != args.seed {
        return Err(Failure::Request(format!(
            "--seed {}, but the run in {} has --seed {seed}: other rows would be drawn",
            args.seed,
            found.folder().display()
        )));
    }
    Ok(Some(found))
}

impl Checkpoints {
    /// Where checkpoints of the run go, if they are asked for. `found` is of this model.
    ///
    /// # Errors
    /// A checkpoint of another model.
    pub(crate) fn of(
        args: &TrainArgs,
        request: &Request,
        program: &Program,
        found: Option<&Checkpoint>,
    ) -> Result<Option<Checkpoints>, Failure> {
        let Some(dir) = &args.checkpoint else { return Ok(None) };
        let about = about(args, request, program)?;
        if let Some(found) = found {
            found.is_of(&about.states)?;
            let made = &found.index().settings;
            let differ = about.settings.iter().filter(|(flag, now)| {
                !["mesh", "zero"].contains(&flag.as_str()) && made.get(*flag) != Some(*now)
            });
            for (flag, now) in differ {
                let was = made.get(flag).map_or("unknown", String::as_str);
                note(args, &format!("--{flag} was {was} when the checkpoint was made and is {now} now"));
            }
        }
        Ok(Some(Checkpoints { dir: dir.clone(), every: args.every, keep: args.keep, about }))
    }

    /// Makes the folder, and removes what killed runs left half done.
    pub(crate) fn prepare(&self) -> Result<(), Failure> {
        create_dir_all(&self.dir).map_err(|e| Failure::Write(e.to_string()))?;
        Ok(checkpoint::clean(&self.dir)?)
    }

    /// Whether one is due when so many steps are done.
    pub(crate) fn due(&self, done: usize) -> bool {
        self.every.is_some_and(|every| done.is_multiple_of(every))
    }

    /// Writes a checkpoint, and removes old ones once it is durable. Of what several ranks hold one copy is written, so they
    /// must agree.
    pub(crate) fn write(&self, local: &Local, done: Start) -> Result<PathBuf, Failure> {
        let Start { step, position } = done;
        if let Some((state, [a, b])) = local.drifted() {
            return Err(Failure::Run(format!(
                "after step {step} ranks {a} and {b} hold different copies of {state}; no checkpoint is written"
            )));
        }
        let about = About { step, position, ..self.about.clone() };
        let folder = checkpoint::write(&self.dir, &about, &local.pieces())?;
        checkpoint::prune(&self.dir, self.keep)?;
        Ok(folder)
    }
}

/// What a checkpoint of the run says, but for the step.
fn about(args: &TrainArgs, request: &Request, program: &Program) -> Result<About, Failure> {
    let config = request.config.as_ref().map(export::config_text).transpose()?;
    let clip = args.clip.map_or("none".to_string(), |x| x.to_string());
    let settings: [(&str, String); 14] = [
        ("steps", args.steps.to_string()),
        ("lr", args.lr.to_string()),
        ("min-lr", args.min_lr.to_string()),
        ("warmup", args.warmup.to_string()),
        ("betas", args.betas.clone()),
        ("eps", args.eps.to_string()),
        ("weight-decay", args.weight_decay.to_string()),
        ("clip", clip),
        ("global-batch", request.shape.batch.to_string()),
        ("seq", request.shape.sequence.to_string()),
        ("microbatches", request.rows.microbatches().to_string()),
        ("mesh", request.mesh.to_string()),
        ("zero", args.split.zero.to_string()),
        ("dropout", args.split.dropout.map_or("that of the model".to_string(), |p| p.to_string())),
    ];
    Ok(About {
        step: 0,
        position: 0,
        seed: args.seed,
        model: request.title.clone(),
        settings: settings.into_iter().map(|(k, v)| (k.to_string(), v)).collect::<BTreeMap<_, _>>(),
        states: described(&program.states, &request.graph),
        texts: config.map(|text| ("config.json".to_string(), text)).into_iter().collect(),
    })
}

/// States on a mesh, with the shapes that the model has them in.
fn described(states: &[State], model: &Graph) -> Vec<Described> {
    let of = |state: &State| {
        let parameter = match &state.role {
            Role::Moment(of) | Role::Master(of) => of,
            Role::Parameter { .. } | Role::Step => &state.name,
        };
        let known = model.states.iter().find(|s| s.name == *parameter);
        let described = Described::of(state, known.map_or_else(|| state.shape(), State::shape));
        // What is exported is the master, of which the parameter is what is left in bf16.
        match states.iter().any(|s| matches!(&s.role, Role::Master(of) if *of == state.name)) {
            true => Described { views: Vec::new(), ..described },
            false => described,
        }
    };
    states.iter().map(of).collect()
}

/// Fills every state from a checkpoint, each rank its pieces.
pub(crate) fn load(local: &mut Local, states: &[State], from: &Checkpoint) -> Result<(), Failure> {
    for state in states {
        let cut = state.shape();
        local.fill_bytes::<Failure>(&state.name, &mut |ranges, out| {
            Ok(from.read(&state.name, &cut, ranges, out)?)
        })?;
    }
    Ok(())
}

/// Keeps the lines of a metrics file that stand before a step: the others come again.
pub(crate) fn keep_lines(path: &Path, step: usize) -> Result<(), Failure> {
    #[derive(Deserialize)]
    struct Numbered {
        step: usize,
    }
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Failure::Write(format!("cannot read {}: {e}", path.display()))),
    };
    let text = String::from_utf8_lossy(&bytes);
    // A run that was killed may have left half a line at the end.
    let before = |line: &&str| serde_json::from_str::<Numbered>(line).is_ok_and(|n| n.step < step);
    let kept: Vec<&str> = text.lines().take_while(before).collect();
    let lines: String = kept.iter().map(|line| format!("{line}\n")).collect();
    write_text(path, &lines).map_err(|e| Failure::Write(e.to_string()))
}

/// The checkpoint that a path names: one itself, or the newest in a folder of them; none if it names neither.
pub(crate) fn named(path: &Path) -> Result<Option<Checkpoint>, Failure> {
    if checkpoint::is_checkpoint(path) {
        return Ok(Some(Checkpoint::open(path)?));
    }
    let model = path.join("config.json").is_file();
    match if path.is_dir() { checkpoint::list(path)?.pop() } else { None } {
        None => Ok(None),
        Some((_, newest)) if model => Err(Failure::Request(format!(
            "{} holds both a model and checkpoints: name one, as in {}",
            path.display(),
            newest.display()
        ))),
        Some(_) => Ok(checkpoint::newest(path)?),
    }
}

fn note(args: &TrainArgs, text: &str) {
    if !args.quiet {
        let _ = writeln!(std::io::stderr(), "note: {text}");
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Failure {
        if error.is_mismatch() { Failure::Request(error.to_string()) } else { Failure::Checkpoint(error) }
    }
}
