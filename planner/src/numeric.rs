//! Runs a plan in lockstep beside one device, on random input, and names the first value that differs; then the program
//! itself on this machine's CPUs.

use std::collections::BTreeMap;

use ir::program::Program;
use ir::state::{Init, Input, Role};
use ir::{DType, Graph, Name, Op, ShardedGraph, Value};
use runtime::cpu::cast;
use runtime::data::random::{below, normal, stream_of};
use runtime::local::{HostTensor, Local, RunError, Taps};
use runtime::lockstep::{self, Feeds, Kernel, assemble, one_device_over};
use runtime::tensor::Tensor;

use crate::names;

/// How far sums in another order may take a value in f64, relative to 1 + its size.
const LOCKSTEP: f64 = 1e-10;

/// How far f32 may take what a step leaves behind from f64, as a share of a tensor's largest number. AdamW turns rounding
/// in a gradient near 0 into a step of the whole rate, so parameters get that much more.
const PROGRAM: f64 = 2e-4;

/// The same where activations are bf16, of 8 bits: a gradient is a sum of products that each passed some of them.
const MIXED: f64 = 5e-2;

/// The input that says which row of the global batch each is.
const ROW: &str = "row";

/// A value that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Wrong {
    /// Its number, if it is a value of the graph.
    pub value: Option<Value>,
    /// What a person calls it.
    pub name: String,
    /// What is wrong with it.
    pub what: String,
}

/// Holds the sharded graph in lockstep against one device, every value, fed by micro-batches. Returns how many.
///
/// # Errors
/// The first value that differs.
pub fn lockstep(sharded: &ShardedGraph, feeds: &[Feeds<f64>], kernel: Kernel<f64>) -> Result<usize, Wrong> {
    let want = one_device_over(&sharded.graph, feeds);
    let got = lockstep::run_over(sharded, feeds, kernel);
    let makers = sharded.graph.makers();
    for node in &sharded.graph.nodes {
        for v in &node.results {
            let wrong = |what: String| {
                let name = names::name(&sharded.graph, &makers, *v);
                Wrong { value: Some(*v), name, what }
            };
            let sharding = sharded.sharding(*v);
            let whole = assemble(&got[v.index()], sharding, &sharded.mesh).map_err(&wrong)?;
            let d = whole.distance(&want[v.index()]);
            if d.is_nan() || d > LOCKSTEP {
                let how = sharding.show(&sharded.mesh);
                return Err(wrong(format!("`{}` on {how} is off by {d:.1e} from one device", node.op)));
            }
        }
    }
    Ok(want.len())
}

/// Runs one step of the program on CPUs and holds what it leaves behind against one device in f64. Returns how many
/// tensors.
///
/// # Errors
/// The first that differs, or what stopped the run.
pub fn program(
    sharded: &ShardedGraph,
    program: &Program,
    feeds: &[Feeds<f64>],
    workers: usize,
) -> Result<Result<usize, Wrong>, RunError> {
    let graph = &sharded.graph;
    let want = one_device_over(graph, feeds);
    let mixed = graph.values.iter().any(|v| v.dtype == DType::BF16);
    let limit = if mixed { MIXED } else { PROGRAM };
    let mut local = Local::new(program, workers)?;
    for state in &graph.states {
        let whole = &feeds[0][&state.name];
        match state.dtype {
            DType::F32 | DType::BF16 => local.fill_state::<RunError>(&state.name, &mut |ranges, out| {
                let mut piece = whole.clone();
                for (dim, range) in ranges.iter().enumerate() {
                    piece = piece.slice(dim, range.clone());
                }
                out.iter_mut().zip(&piece.data).for_each(|(o, x)| *o = *x as f32);
                Ok(())
            })?,
            DType::I32 => local.set_integer(&state.name, whole.data[0] as i32)?,
            DType::F64 | DType::F16 | DType::I64 | DType::U32 | DType::Bool => {}
        }
    }
    let host = |feeds: &Feeds<f64>| {
        let one = |i: &Input| {
            let data = &feeds[&i.name].data;
            let tensor = if i.dtype.is_float() {
                HostTensor::F32(data.iter().map(|x| *x as f32).collect())
            } else {
                HostTensor::I32(data.iter().map(|x| *x as i32).collect())
            };
            (i.name.clone(), tensor)
        };
        graph.inputs.iter().map(one).collect::<BTreeMap<Name, HostTensor>>()
    };
    let host: Vec<_> = feeds.iter().map(host).collect();
    let tapped: Vec<(Name, Value)> = graph
        .nodes
        .iter()
        .filter_map(|n| if let Op::Tap(t) = &n.op { Some((t.clone(), n.args[0])) } else { None })
        .collect();
    let mut taps = Taps::of(tapped.iter().map(|(t, _)| &**t));
    local.step(&host, &mut taps)?;
    let mut compared = 0;
    for (name, v) in &tapped {
        if let Some(wrong) = taps.get(name).and_then(|t| differs(name, t, &want[v.index()], limit)) {
            return Ok(Err(wrong));
        }
        compared += 1;
    }
    for node in &graph.nodes {
        let Op::Assign(name) = &node.op else { continue };
        let Some(state) = graph.state(name).filter(|s| s.dtype.is_float()) else { continue };
        let found = local.read_state(name)?;
        let slack = match state.role {
            Role::Parameter { .. } | Role::Master(_) => 10.0 * limit,
            Role::Moment(_) | Role::Step => limit,
        };
        if let Some(wrong) = differs(name, &found, &want[node.args[0].index()], slack) {
            return Ok(Err(wrong));
        }
        compared += 1;
    }
    Ok(Ok(compared))
}

/// How far a tensor is off, as a share of its own largest number: a small tensor is held as tightly as a large one.
fn differs(name: &str, found: &Tensor<f32>, want: &Tensor<f64>, limit: f64) -> Option<Wrong> {
    let scale = want.data.iter().fold(1e-6, |m: f64, x| m.max(x.abs()));
    let pairs = found.data.iter().zip(&want.data);
    let off = pairs.fold(0.0, |worst: f64, (a, b)| {
        let d = (f64::from(*a) - b).abs() / scale;
        if d.is_nan() { f64::INFINITY } else { worst.max(d) }
    });
    let off = if found.data.len() == want.data.len() { off } else { f64::INFINITY };
    let what = format!("the program leaves it off by {off:.1e} of its largest number from one device in f64");
    (off > limit).then(|| Wrong { value: None, name: name.to_string(), what })
}

/// Random inputs for each micro-batch of a step, and states.
pub fn all_feeds(sharded: &ShardedGraph, seed: u64) -> Vec<Feeds<f64>> {
    let microbatches = sharded.decisions.schedule.microbatches();
    (0..microbatches)
        .map(|m| {
            let mut feeds = feeds(&sharded.graph, seed + m as u64);
            // Each micro-batch has rows of its own.
            let numbered = sharded.graph.inputs.iter().any(|i| is_row(i, &limits(&sharded.graph)));
            if let Some(row) = feeds.get_mut(ROW).filter(|_| numbered) {
                let n = row.data.len();
                row.data.iter_mut().for_each(|x| *x += (m * n) as f64);
            }
            feeds
        })
        .collect()
}

/// Whether an input is the numbers of rows: it is called so, and looks nothing up.
fn is_row(input: &Input, limits: &BTreeMap<Name, usize>) -> bool {
    &*input.name == ROW && !input.dtype.is_float() && !limits.contains_key(&input.name)
}

/// Random inputs and states for a graph: parameters as they start, indices inside what they look up, and every fifth
/// label one that does not count.
pub fn feeds(graph: &Graph, seed: u64) -> Feeds<f64> {
    let mut feeds: Feeds<f64> = BTreeMap::new();
    for state in &graph.states {
        let shape = state.shape();
        let parameter = if let Role::Master(of) = &state.role { of } else { &state.name };
        let stream = stream_of(parameter);
        let value = match (&state.role, state.init) {
            (Role::Step, _) => Tensor::full(&shape, 3.0),
            // Moments of an earlier step; a mean of squares is never below 0.
            (Role::Moment(_), _) => {
                Tensor::from_fn(&shape, |i| 1e-3 * f64::from(normal(seed, stream, i as u64)).abs())
            }
            (Role::Parameter { .. } | Role::Master(_), Init::Zeros) => {
                Tensor::from_fn(&shape, |i| 0.1 * f64::from(normal(seed, stream, i as u64)))
            }
            (Role::Parameter { .. } | Role::Master(_), Init::Ones) => {
                Tensor::from_fn(&shape, |i| 1.0 + 0.1 * f64::from(normal(seed, stream, i as u64)))
            }
            (Role::Parameter { .. } | Role::Master(_), Init::Normal(std)) => {
                let std = std.max(0.1);
                Tensor::from_fn(&shape, |i| std * f64::from(normal(seed, stream, i as u64)))
            }
        };
        feeds.insert(state.name.clone(), rounded(value, state.dtype));
    }
    let limits = limits(graph);
    for input in &graph.inputs {
        let shape: Vec<usize> = input.dims.iter().map(|(_, n)| *n).collect();
        let stream = stream_of(&input.name);
        let last = shape.last().copied().unwrap_or(1).max(1);
        let value = if input.dtype.is_float() {
            Tensor::from_fn(&shape, |i| f64::from(normal(seed, stream, i as u64)))
        } else if is_row(input, &limits) {
            Tensor::from_fn(&shape, |i| i as f64)
        } else if &*input.name == "position" {
            Tensor::from_fn(&shape, |i| (i % last) as f64)
        } else {
            let limit = limits.get(&input.name).copied().unwrap_or(last) as u64;
            let labels = &*input.name == "labels";
            let skip = |i: usize| labels && i % 5 == 3;
            Tensor::from_fn(&shape, |i| {
                if skip(i) { -100.0 } else { below(seed, stream, i as u64, limit) as f64 }
            })
        };
        feeds.insert(input.name.clone(), value);
    }
    feeds
}

/// As the element type holds it.
fn rounded(mut tensor: Tensor<f64>, dtype: DType) -> Tensor<f64> {
    if dtype.is_float() && dtype.bytes() < DType::F32.bytes() {
        tensor.data.iter_mut().for_each(|x| *x = cast(dtype, *x));
    }
    tensor
}

/// For each input that is an index, the smallest dimension that it looks up in.
pub fn limits(graph: &Graph) -> BTreeMap<Name, usize> {
    let mut of_value: BTreeMap<Value, Name> = BTreeMap::new();
    let mut limits: BTreeMap<Name, usize> = BTreeMap::new();
    for node in &graph.nodes {
        if let Op::Input(name) = &node.op {
            of_value.insert(node.results[0], name.clone());
        }
        if let Some(f) = node.op.looked_up(&node.signature)
            && let Some(name) = node.args.get(1).and_then(|v| of_value.get(v))
        {
            let limit = limits.entry(name.clone()).or_insert(usize::MAX);
            *limit = (*limit).min(node.sizes[f]);
        }
    }
    limits
}
