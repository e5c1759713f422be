//! What a step leaves behind, its taps and the states that it assigns: on one device, and on the local backend.

use std::collections::{BTreeMap, BTreeSet};

use ir::program::Program;
use ir::state::{Role, State};
use ir::{DType, Graph, Name, Op, Scope};
use runtime::data::random::stream_of;
use runtime::local::{HostTensor, Local, RunError, Taps};
use runtime::lockstep::{Feeds, one_device_over};
use runtime::tensor::Tensor;

use crate::random::Random;

/// How far f32 may take what a step leaves behind from f64, as a share of 1 and the size of the number: sixteen times
/// what f32 rounds once. Feeds are exact in f32, values stay below 16, sums are short and scaled, and no function is
/// applied where its slope is above 5, so that rounding hardly grows; over 2,000 random graphs nothing was further off
/// than 3e-7.
pub const F32: f64 = 2e-6;

/// Tensors by what they are, as in `tap y` and `state w`.
pub type Left = BTreeMap<String, Tensor<f64>>;

/// The feeds of the micro-batches of a step: states are those of the first.
pub fn feeds_over(graph: &Graph, seed: u64, microbatches: usize) -> Vec<Feeds<f64>> {
    (0..microbatches as u64).map(|m| feeds(graph, seed + m * 1_000_003)).collect()
}

/// Numbers that f32 holds exactly, so that both kinds of arithmetic start from the same: floats are multiples of 1/8
/// from -2 to 2, indices lie in -1..=5, so that some look up nothing, a moment is one, the step is 3.
pub fn feeds(graph: &Graph, seed: u64) -> Feeds<f64> {
    let moment = |s: &State| matches!(s.role, Role::Moment(_));
    let inputs = graph.inputs.iter().map(|i| (&i.name, i.dtype, &i.dims, false));
    let states = graph.states.iter().map(|s| (&s.name, s.dtype, &s.dims, moment(s)));
    let mut feeds: Feeds<f64> = BTreeMap::new();
    for (name, dtype, dims, moment) in inputs.chain(states) {
        let random = &mut Random::new(seed ^ stream_of(name));
        let shape: Vec<usize> = dims.iter().map(|(_, n)| *n).collect();
        let number = |_| match dtype.is_float() {
            true if moment => (1 + random.below(16)) as f64 / 32.0,
            true => random.below(33) as f64 / 8.0 - 2.0,
            false => random.below(7) as f64 - 1.0,
        };
        feeds.insert(name.clone(), Tensor::from_fn(&shape, number));
    }
    let steps = graph.states.iter().filter(|s| s.role == Role::Step);
    steps.for_each(|s| {
        feeds.insert(s.name.clone(), Tensor::full(&s.shape(), 3.0));
    });
    feeds
}

/// The same numbers in the shapes that another form of the graph gives its inputs and states: merged dimensions may have
/// been taken apart.
pub fn as_given_to(graph: &Graph, feeds: &Feeds<f64>) -> Feeds<f64> {
    let inputs = graph.inputs.iter().map(|i| (&i.name, &i.dims));
    let states = graph.states.iter().map(|s| (&s.name, &s.dims));
    let shaped = |(name, dims): (&Name, &Vec<(Name, usize)>)| {
        let data = feeds.get(name)?.data.clone();
        Some((name.clone(), Tensor { shape: dims.iter().map(|(_, n)| *n).collect(), data }))
    };
    inputs.chain(states).filter_map(shaped).collect()
}

/// Tensors as rows of numbers, for comparing forms of a graph.
pub fn flat(left: Left) -> Left {
    left.into_iter().map(|(name, t)| (name, Tensor { shape: vec![t.data.len()], data: t.data })).collect()
}

/// What a step leaves behind on one device, in f64, fed by micro-batches.
pub fn left_by_one_device(graph: &Graph, feeds: &[Feeds<f64>]) -> Left {
    let values = one_device_over(graph, feeds);
    let left = |(name, v): (String, ir::Value)| (name, values[v.index()].clone());
    names(graph, feeds.len()).into_iter().map(left).collect()
}

/// The values that taps and assignments hand out; of several micro-batches what is of the step.
fn names(graph: &Graph, microbatches: usize) -> Vec<(String, ir::Value)> {
    let name = |op: &Op| {
        let tap = if let Op::Tap(name) = op { Some(format!("tap {name}")) } else { None };
        if let Op::Assign(name) = op { Some(format!("state {name}")) } else { tap }
    };
    let whole = |v: &ir::Value| microbatches == 1 || graph.ty(*v).scope == Scope::Step;
    graph.nodes.iter().filter_map(|n| Some((name(&n.op)?, n.args[0]))).filter(|(_, v)| whole(v)).collect()
}

/// A program, loaded, its states filled. A state that no instruction names has no buffer, and is left out.
///
/// # Errors
/// What the backend says.
pub fn loaded(program: &Program, feeds: &Feeds<f64>, workers: usize) -> Result<Local, RunError> {
    let mut local = Local::new(program, workers)?;
    let mut buffers = program.stages.iter().flat_map(|s| &s.buffers);
    let named: BTreeSet<&Name> = buffers.by_ref().filter_map(|b| b.state.as_ref()).collect();
    let kept = |s: &&State| named.contains(&s.name);
    for state in program.states.iter().filter(kept) {
        let whole = &feeds[&state.name];
        if state.dtype == DType::I32 {
            local.set_integer(&state.name, whole.data[0] as i32)?;
            continue;
        }
        local.fill_state::<RunError>(&state.name, &mut |ranges, out| {
            let piece = ranges.iter().enumerate().fold(whole.clone(), |t, (dim, r)| t.slice(dim, r.clone()));
            out.iter_mut().zip(&piece.data).for_each(|(o, x)| *o = *x as f32);
            Ok(())
        })?;
    }
    Ok(local)
}

/// The inputs of a step, as a backend is fed them.
pub fn host(program: &Program, feeds: &Feeds<f64>) -> BTreeMap<Name, HostTensor> {
    let tensor = |name: &Name, dtype: DType| {
        let data = &feeds[name].data;
        match dtype.is_float() {
            true => HostTensor::F32(data.iter().map(|x| *x as f32).collect()),
            false => HostTensor::I32(data.iter().map(|x| *x as i32).collect()),
        }
    };
    program.inputs.iter().map(|i| (i.name.clone(), tensor(&i.name, i.dtype))).collect()
}

/// What a step of a loaded program leaves behind.
///
/// # Errors
/// What the backend says.
pub fn left_by(
    local: &mut Local,
    graph: &Graph,
    program: &Program,
    feeds: &[Feeds<f64>],
) -> Result<Left, RunError> {
    let tapped = local.taps();
    let mut taps = Taps::of(tapped.iter().map(|t| &**t));
    let fed: Vec<_> = feeds.iter().map(|f| host(program, f)).collect();
    local.step(&fed, &mut taps)?;
    let mut left = Left::new();
    for (text, _) in names(graph, feeds.len()) {
        let found = match text.split_once(' ') {
            Some(("tap", name)) => taps.get(name).cloned(),
            Some((_, name)) => Some(local.read_state(name)?),
            None => None,
        };
        let wide = |t: Tensor<f32>| {
            let data = t.data.iter().map(|x| f64::from(*x)).collect();
            Tensor { shape: t.shape, data }
        };
        left.extend(found.map(|t| (text, wide(t))));
    }
    Ok(left)
}

/// The largest distance, and of which tensor.
pub fn furthest(found: &Left, want: &Left) -> (f64, String) {
    let nothing = (0.0, String::new());
    want.iter().fold(nothing, |worst, (name, want)| {
        let d = found.get(name).map_or(f64::INFINITY, |found| found.distance(want));
        if d > worst.0 || d.is_nan() { (d, name.clone()) } else { worst }
    })
}

/// What of a step is not what one device leaves behind.
///
/// # Errors
/// The tensor that is furthest off, or what stopped the run.
pub fn equals(
    graph: &Graph,
    program: &Program,
    feeds: &[Feeds<f64>],
    workers: usize,
    limit: f64,
) -> Result<Local, String> {
    let mut local = loaded(program, &feeds[0], workers).map_err(|e| e.to_string())?;
    let left = left_by(&mut local, graph, program, feeds).map_err(|e| e.to_string())?;
    let (off, name) = furthest(&left, &left_by_one_device(graph, feeds));
    let text = || format!("{name} is off by {off:.1e} from one device, with {workers} workers");
    if off <= limit { Ok(local) } else { Err(text()) }
}
