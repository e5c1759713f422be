//! A program loaded on this machine's CPUs: its states from files or from a seed, and back into files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ir::program::Program;
use ir::state::{Init, Role, State, View};
use ir::{Name, ShardedGraph};
use planner::planfile;
use runtime::data::random::fill_normal;
use runtime::files::weights::Weights;
use runtime::files::window::{Window, copy_in};
use runtime::local::Local;
use runtime::tensor::Tensor;

use crate::failure::Failure;

/// How many workers run so many ranks, unless asked otherwise.
pub(crate) fn workers(asked: Option<usize>, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    asked.unwrap_or(cores).clamp(1, ranks)
}

/// Reads a plan file.
pub(crate) fn read_plan(path: &Path) -> Result<(ShardedGraph, Program), Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::Request(format!("cannot read {}: {e}", path.display())))?;
    planfile::read(&text).map_err(|e| Failure::Plan(path.display().to_string(), e))
}

/// Fills the states: parameters from weights if there are some, else from the seed; the rest as it starts.
pub(crate) fn fill(
    local: &mut Local,
    states: &[State],
    weights: Option<&Weights>,
    seed: u64,
) -> Result<(), Failure> {
    for state in states {
        if !state.dtype.is_float() {
            local.set_integer(&state.name, 0)?;
            continue;
        }
        let shape = state.shape();
        // A master starts as its parameter, before that is rounded.
        let parameter = if let Role::Master(of) = &state.role { of } else { &state.name };
        local.fill_state::<Failure>(&state.name, &mut |ranges, out| match (&state.role, weights) {
            (Role::Parameter { .. } | Role::Master(_), Some(weights)) if !state.views.is_empty() => {
                read_piece(weights, state, ranges, out)
            }
            (Role::Parameter { .. } | Role::Master(_) | Role::Moment(_) | Role::Step, _) => {
                match state.init {
                    Init::Zeros => out.fill(0.0),
                    Init::Ones => out.fill(1.0),
                    Init::Normal(std) => fill_normal(seed, parameter, std as f32, &shape, ranges, out)
                        .map_err(|e| Failure::Run(e.to_string()))?,
                }
                Ok(())
            }
        })?;
    }
    Ok(())
}

fn read_piece(
    weights: &Weights,
    state: &State,
    ranges: &[Range<usize>],
    out: &mut [f32],
) -> Result<(), Failure> {
    let read = |view: &View, ranges: &[Range<usize>], out: &mut [f32]| {
        let name = name_in(weights, &view.file);
        weights.read(&name, &view.shape, &window(view), ranges, out).map_err(Failure::from)
    };
    if let [view] = &state.views[..] {
        return read(view, ranges, out);
    }
    // Stacked along the first dimension: a view an entry.
    let each = out.len() / ranges[0].len().max(1);
    for (i, at) in ranges[0].clone().enumerate() {
        read(&state.views[at], &ranges[1..], &mut out[i * each..(i + 1) * each])?;
    }
    Ok(())
}

/// Reads a whole parameter.
pub(crate) fn read_whole(weights: &Weights, state: &State, out: &mut [f32]) -> Result<(), Failure> {
    let all: Vec<Range<usize>> = state.dims.iter().map(|(_, n)| 0..*n).collect();
    read_piece(weights, state, &all, out)
}

/// Older files leave out the prefix of the base model.
fn name_in(weights: &Weights, name: &str) -> String {
    let bare = ["transformer.", "model."].iter().find_map(|p| name.strip_prefix(p));
    match bare {
        Some(bare) if weights.get(name).is_none() && weights.get(bare).is_some() => bare.to_string(),
        Some(_) | None => name.to_string(),
    }
}

fn window(view: &View) -> Window {
    Window { offset: view.offset, dims: view.dims.clone() }
}

/// Names of file tensors that no parameter uses.
pub(crate) fn unused(weights: &Weights, states: &[State]) -> Vec<String> {
    let used: Vec<String> = states.iter().flat_map(|s| &s.views).map(|v| name_in(weights, &v.file)).collect();
    weights.names().filter(|n| !used.iter().any(|u| u == n)).map(str::to_string).collect()
}

/// File tensors by name: shape and elements.
pub(crate) type FileTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Puts a whole parameter, or something of its shape, into the file tensors that it is a view of.
pub(crate) fn put(files: &mut FileTensors, state: &State, whole: &Tensor<f32>) -> Result<(), Failure> {
    put_views(files, &state.views, whole)
}

/// Puts a tensor into the file tensors that its parts along the first dimension are views of.
pub(crate) fn put_views(files: &mut FileTensors, views: &[View], whole: &Tensor<f32>) -> Result<(), Failure> {
    let parts = views.len().max(1);
    let each = whole.data.len() / parts;
    for (i, view) in views.iter().enumerate() {
        let n = view.shape.iter().product();
        let (_, file) =
            files.entry(view.file.to_string()).or_insert_with(|| (view.shape.clone(), vec![0.0; n]));
        let window = window(view);
        copy_in(&window, &window.all(), &whole.data[i * each..(i + 1) * each], file)
            .map_err(|e| Failure::Run(format!("{}: {e}", view.file)))?;
    }
    Ok(())
}

/// All parameters as file tensors.
pub(crate) fn file_tensors(local: &Local, states: &[State]) -> Result<FileTensors, Failure> {
    let mut files = FileTensors::new();
    let master = |of: &Name| states.iter().find(|s| matches!(&s.role, Role::Master(p) if p == of));
    for state in states.iter().filter(|s| matches!(s.role, Role::Parameter { .. })) {
        let exact = master(&state.name).unwrap_or(state);
        put(&mut files, state, &local.read_state(&exact.name)?)?;
    }
    Ok(files)
}
