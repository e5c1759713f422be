//! A plan file that is trained as it stands: split, optimizer and sizes are in it.

use std::path::{Path, PathBuf};

use clap::Parser;
use ir::Places;
use ir::composite::has_dropout;
use ir::program::Instruction;
use models::Shape;
use passes::Compiled;
use planner::planfile;
use runtime::data::rows::Rows;

use crate::args::{SplitArgs, TrainArgs};
use crate::failure::Failure;
use crate::loaded::read_plan;
use crate::request::Request;

/// The plan file that a command names as its model, if it does.
pub fn plan_file(args: &SplitArgs) -> Option<&Path> {
    let path = args.model.as_deref().filter(|p| p.is_file())?;
    std::fs::read_to_string(path).is_ok_and(|text| text.starts_with(planfile::HEAD)).then_some(path)
}

/// Split flags by themselves: what they are when nobody gives any.
#[derive(Parser)]
struct Alone {
    #[command(flatten)]
    split: SplitArgs,
}

/// What is asked of a plan, and the plan.
///
/// # Errors
/// A file that is no plan or has no training step; flags that would change it.
pub fn planned(path: &Path, args: &TrainArgs) -> Result<(Request, Compiled), Failure> {
    let wrong = |what: String| Failure::Request(format!("{}: {what}", path.display()));
    let usual = SplitArgs { model: Some(PathBuf::from(path)), ..Alone::parse_from([""]).split };
    if format!("{:?}", args.split) != format!("{usual:?}") {
        return Err(wrong(
            "a plan has its split in it; flags that say how to split do not apply".to_string(),
        ));
    }
    let optimizer = [
        ("--lr", args.lr != 1e-3),
        ("--min-lr", args.min_lr != 0.0),
        ("--warmup", args.warmup != 0),
        ("--betas", args.betas != "0.9,0.95"),
        ("--eps", args.eps != 1e-8),
        ("--weight-decay", args.weight_decay != 0.0),
        ("--clip", args.clip.is_some()),
        ("--dump", args.dump.is_some()),
    ];
    if let Some((flag, _)) = optimizer.iter().find(|(_, given)| *given) {
        return Err(wrong(format!("a plan has its optimizer and its taps in it; {flag} does not apply")));
    }
    let (sharded, program) = read_plan(path)?;
    let instructions = program.stages.iter().flat_map(|s| &s.segments).flat_map(|s| &s.instructions);
    let tells = |i: &Instruction| matches!(i, Instruction::Tap { name, .. } if &**name == "grad_norm");
    if !instructions.into_iter().any(tells) {
        return Err(wrong("it has no training step; one is planned with --mode train".to_string()));
    }
    if args.seed != 0 && has_dropout(&sharded.graph) {
        return Err(wrong("its dropout has a seed already; --seed does not apply".to_string()));
    }
    if std::fs::read_to_string(path).is_ok_and(|text| text.lines().any(|l| l == planfile::FILLED)) {
        let what =
            "its micro-batches end in rows that do not count, and only the model's own command knows which";
        return Err(wrong(what.to_string()));
    }
    let size = |d: usize| program.inputs.iter().filter_map(|i| i.dims.get(d)).map(|(_, n)| *n).max();
    let rows = Rows::chunks(size(0).unwrap_or(1), program.microbatches);
    let shape = Shape { batch: rows.counted(), sequence: size(1).unwrap_or(1) };
    let stem = path.file_stem().map_or_else(|| "plan".to_string(), |n| n.to_string_lossy().into_owned());
    let places = Places { schedule: sharded.decisions.schedule.clone(), ..Places::default() };
    let request = Request {
        title: stem,
        config: None,
        graph: sharded.graph.clone(),
        shape,
        rows,
        mesh: program.mesh.clone(),
        places,
        schedule: planner::schedules::name_of(&sharded.decisions.schedule).to_string(),
        cluster: planner::cluster::read(&args.split.cluster)?,
    };
    Ok((request, Compiled { sharded, program }))
}
