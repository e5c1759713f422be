//! From `--mesh pp=P`, `--schedule`, `--virtual`, `--stages` and `--group` to a table of actions, and where the model is cut.

use std::path::Path;

use ir::schedule::{Kind, Schedule};
use ir::{Graph, Mesh};
use planner::cluster::Cluster;
use planner::schedules::refused::Size;
use planner::schedules::{SCHEDULES, named, read};
use planner::stages::{asked, costs, cut};

use crate::args::{Float, Mode, SplitArgs};
use crate::failure::Failure;

/// The kind that a step has unless the user names one.
const USUAL: &str = "1f1b";

/// The kind that is chosen.
const AUTO: &str = "auto";

/// No model is deeper.
const DEEPEST: usize = 1 << 14;

/// How a step runs through a pipeline.
pub struct Pipeline {
    /// The kind of schedule, or its file.
    pub kind: String,
    /// The table.
    pub schedule: Schedule,
}

/// How many micro-batches a step has.
pub fn microbatches(args: &SplitArgs, mesh: &Mesh) -> usize {
    let rows = mesh.rows();
    args.microbatches.unwrap_or(if rows > 1 { 4 * rows } else { 1 })
}

/// The table that was asked for; with `auto` one of each kind that has one, with several numbers of virtual stages.
///
/// # Errors
/// A kind that does not exist or has no table of this size; a file that is no table, or one of another size.
pub fn pipelines(
    args: &SplitArgs,
    graph: &Graph,
    mesh: &Mesh,
    microbatches: usize,
) -> Result<Vec<Pipeline>, Failure> {
    let rows = mesh.rows();
    let wanted = args.schedule.as_deref().unwrap_or(USUAL);
    let size = |virtuals| Size { stages: rows, virtuals, microbatches, group: args.group };
    let mut found = match (wanted, named(wanted)) {
        (AUTO, _) => every_kind(args, graph, rows, &size),
        (_, Some(kind)) => {
            let virtuals = args.r#virtual.unwrap_or(kind.virtuals);
            if virtuals > graph.depth().max(kind.virtuals) {
                return Err(Failure::Request(format!(
                    "--virtual {virtuals}: a rank cannot have more stages than the model has places to cut, {}",
                    graph.depth()
                )));
            }
            let schedule = (kind.table)(&size(virtuals)).map_err(|e| Failure::Request(e.to_string()))?;
            vec![Pipeline { kind: kind.name.to_string(), schedule }]
        }
        (_, None) => vec![from_file(args, wanted, rows, microbatches)?],
    };
    if args.mode == Mode::Forward {
        let forward = |p: &mut Pipeline| {
            p.schedule.rows.iter_mut().for_each(|row| row.retain(|a| a.kind == Kind::Forward));
        };
        found.iter_mut().for_each(forward);
    }
    Ok(found)
}

/// The tables that `auto` chooses from: no more virtual stages than the model has places to cut.
fn every_kind(args: &SplitArgs, graph: &Graph, rows: usize, size: &dyn Fn(usize) -> Size) -> Vec<Pipeline> {
    let virtuals = args.r#virtual.map_or(vec![1, 2, 4], |l| vec![l]);
    let mut found: Vec<Pipeline> = Vec::new();
    for kind in SCHEDULES {
        for l in virtuals.iter().filter(|l| rows * **l <= graph.depth().max(rows)) {
            let Ok(schedule) = (kind.table)(&size(*l)) else { continue };
            // Several kinds are one where there is little to order.
            if found.iter().all(|known| known.schedule != schedule) {
                found.push(Pipeline { kind: kind.name.to_string(), schedule });
            }
        }
    }
    found
}

fn from_file(args: &SplitArgs, wanted: &str, rows: usize, microbatches: usize) -> Result<Pipeline, Failure> {
    let wrong = |what: String| Failure::Request(format!("--schedule {wanted}: {what}"));
    if !Path::new(wanted).exists() {
        let kinds: Vec<&str> = SCHEDULES.iter().map(|s| s.name).collect();
        let kinds = kinds.join(", ");
        return Err(wrong(format!("there is no such kind and no such file; kinds are {kinds}, and auto")));
    }
    let text = std::fs::read_to_string(wanted).map_err(|e| wrong(e.to_string()))?;
    let schedule = read::read(&text, wanted).map_err(|e| Failure::Request(e.to_string()))?;
    if schedule.rows.len() != rows {
        let found = schedule.rows.len();
        return Err(wrong(format!("it is a table of {found} ranks, but the mesh has pp={rows}")));
    }
    if schedule.microbatches() != microbatches {
        let found = schedule.microbatches();
        return Err(wrong(format!("it is a table of {found} micro-batches, not {microbatches}")));
    }
    let virtuals = schedule.stages() / rows.max(1);
    if let Some(asked) = args.r#virtual.filter(|v| *v != virtuals) {
        return Err(wrong(format!("it has {virtuals} virtual stages a rank, not --virtual {asked}")));
    }
    if args.group.is_some() {
        return Err(wrong("a table has its order; --group does not apply".to_string()));
    }
    let moves = |kind| matches!(kind, Kind::Unshard | Kind::Drop | Kind::Reduce);
    if let Some(action) = schedule.rows.iter().flatten().find(|a| moves(a.kind)) {
        let what = "an entry of its own for gathering parameters or reducing gradients";
        return Err(Failure::NotBuilt(format!("{action} in {wanted} ({what})")));
    }
    Ok(Pipeline { kind: wanted.to_string(), schedule })
}

/// Where the model is cut: by mark the virtual stage. Nothing if there is one stage.
///
/// # Errors
/// `--stages` that do not fit.
pub fn stages(
    args: &SplitArgs,
    graph: &Graph,
    mesh: &Mesh,
    schedule: &Schedule,
    cluster: &Cluster,
) -> Result<Vec<usize>, Failure> {
    let (rows, count) = (mesh.rows(), schedule.stages());
    if count == 1 && args.stages.is_none() {
        return Ok(Vec::new());
    }
    if graph.depth() > DEEPEST {
        let depth = graph.depth();
        return Err(Failure::Request(format!(
            "the model is {depth} layers deep; at most {DEEPEST} can be cut"
        )));
    }
    let costs = costs(graph, mesh.ranks() / rows, args.dtype == Float::Bf16, cluster);
    match &args.stages {
        Some(text) => {
            asked(text, graph, &costs, rows, count / rows).map_err(|e| Failure::Request(e.to_string()))
        }
        None => Ok(cut(&costs, count)),
    }
}
