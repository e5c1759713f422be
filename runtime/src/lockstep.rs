//! What a sharded graph means: all ranks in one thread, node by node, every collective written out. Slow and simple;
//! every backend and every plan is held against it. Beside it the same graph on one device.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::{
    DType, Graph, Mesh, Move, Name, Node, Op, Part, Reduce, ShardedGraph, Sharding, extent, moves, piece,
};

use crate::eval::eval;
use crate::tensor::{Real, Tensor};

/// The whole tensors of inputs and states, by name.
pub type Feeds<T> = BTreeMap<Name, Tensor<T>>;

/// The kernel that `run` calls for a node; another one is a planted fault.
pub type Kernel<T> = fn(&Node, &[Range<usize>], &[&Tensor<T>]) -> Tensor<T>;

/// Every value of a graph on one device, in a step of one micro-batch.
///
/// # Panics
/// If a feed is missing: the caller makes them from the graph's tables.
pub fn one_device<T: Real>(graph: &Graph, feeds: &Feeds<T>) -> Vec<Tensor<T>> {
    one_device_over(graph, std::slice::from_ref(feeds))
}

/// Every value of a graph on one device, fed by micro-batches: of what is computed for each, that of the last. States are
/// those of the first.
///
/// # Panics
/// As [`one_device`].
pub fn one_device_over<T: Real>(graph: &Graph, feeds: &[Feeds<T>]) -> Vec<Tensor<T>> {
    let mut values: Vec<Option<Tensor<T>>> = vec![None; graph.values.len()];
    for (node, m) in order(graph, feeds.len()) {
        let Some(result) = node.results.first() else { continue };
        let feeds = if matches!(node.op, Op::State(_)) { &feeds[0] } else { &feeds[m] };
        let ranges: Vec<Range<usize>> = node.sizes.iter().map(|n| 0..*n).collect();
        let args: Vec<&Tensor<T>> = node.args.iter().filter_map(|v| values[v.index()].as_ref()).collect();
        let value = if let Op::Input(name) | Op::State(name) = &node.op {
            feeds[name].clone()
        } else if node.op == Op::Reshard {
            args[0].clone()
        } else {
            eval(node, &ranges, &args)
        };
        let value = if node.op == Op::Cast { cast(value, graph.ty(*result).dtype) } else { value };
        let sum = values[result.index()].take().filter(|_| node.op == Op::Accumulate && m > 0);
        values[result.index()] = Some(match sum {
            Some(sum) => Tensor::combine(&[&sum, &value], Reduce::Sum),
            None => value,
        });
    }
    values.into_iter().flatten().collect()
}

/// What is computed, and for which micro-batch: the update is behind them all, but for sums over them, wherever they are
/// marked.
fn order(graph: &Graph, microbatches: usize) -> impl Iterator<Item = (&Node, usize)> {
    let sum = move |n: &Node| microbatches > 1 && n.op == Op::Accumulate;
    let update = move |n: &&Node| n.mark.part == Part::Update && !sum(n);
    let each = move |m| graph.nodes.iter().filter(move |n| !update(n)).map(move |n| (n, m));
    (0..microbatches).flat_map(each).chain(graph.nodes.iter().filter(update).map(|n| (n, 0)))
}

/// Every value on every rank, in a step of one micro-batch: `[value][rank]`.
///
/// # Panics
/// If a feed is missing, or an operand is not as its node needs it.
pub fn run<T: Real>(sharded: &ShardedGraph, feeds: &Feeds<T>, kernel: Kernel<T>) -> Vec<Vec<Tensor<T>>> {
    run_over(sharded, std::slice::from_ref(feeds), kernel)
}

/// The same, fed by micro-batches as [`one_device_over`].
///
/// # Panics
/// As [`run`].
pub fn run_over<T: Real>(
    sharded: &ShardedGraph,
    feeds: &[Feeds<T>],
    kernel: Kernel<T>,
) -> Vec<Vec<Tensor<T>>> {
    let (graph, mesh) = (&sharded.graph, &sharded.mesh);
    let makers = graph.makers();
    let at: Vec<Vec<usize>> = (0..mesh.ranks()).map(|r| mesh.coordinate(r)).collect();
    let mut values: Vec<Vec<Tensor<T>>> = vec![Vec::new(); graph.values.len()];
    for (node, m) in order(graph, feeds.len()) {
        let Some(result) = node.results.first() else { continue };
        let to = sharded.sharding(*result);
        let feeds = if matches!(node.op, Op::State(_)) { &feeds[0] } else { &feeds[m] };
        let out = if let Op::Input(name) | Op::State(name) = &node.op {
            at.iter().map(|at| feeds[name].piece(to, mesh, at)).collect()
        } else if node.op == Op::Reshard {
            let from = sharded.sharding(node.args[0]);
            reshard(&values[node.args[0].index()], from, to, mesh)
        } else {
            let split = &sharded.decisions.strategies[makers[result.index()]].split;
            let one = |(rank, at): (usize, &Vec<usize>)| {
                let sizes = node.sizes.iter().zip(split);
                let ranges: Vec<Range<usize>> = sizes.map(|(n, axes)| extent(*n, axes, mesh, at)).collect();
                let args: Vec<&Tensor<T>> = node.args.iter().map(|v| &values[v.index()][rank]).collect();
                let value = kernel(node, &ranges, &args);
                if node.op == Op::Cast { cast(value, graph.ty(*result).dtype) } else { value }
            };
            at.iter().enumerate().map(one).collect()
        };
        let sums = std::mem::take(&mut values[result.index()]);
        values[result.index()] = match node.op == Op::Accumulate && m > 0 {
            true => sums.iter().zip(&out).map(|(a, b)| Tensor::combine(&[a, b], Reduce::Sum)).collect(),
            false => out,
        };
    }
    values
}

/// Numbers in another element type: toward 0 in integers, whether they are not 0 in truth values. Floats stay as they
/// are, since what is computed here is exact.
fn cast<T: Real>(mut tensor: Tensor<T>, dtype: DType) -> Tensor<T> {
    let to: fn(f64) -> f64 = match dtype {
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => return tensor,
        DType::I64 | DType::I32 | DType::U32 => f64::trunc,
        DType::Bool => |x| f64::from(x != 0.0),
    };
    tensor.data.iter_mut().for_each(|x| *x = T::of(to(x.get())));
    tensor
}

/// The pieces of all ranks after the moves that lead from one sharding to another.
pub fn reshard<T: Real>(pieces: &[Tensor<T>], from: &Sharding, to: &Sharding, mesh: &Mesh) -> Vec<Tensor<T>> {
    moves(from, to, mesh).iter().fold(pieces.to_vec(), |pieces, step| apply(step, &pieces, mesh))
}

/// The pieces of all ranks after one move.
pub fn apply<T: Real>(step: &Move, pieces: &[Tensor<T>], mesh: &Mesh) -> Vec<Tensor<T>> {
    (0..pieces.len())
        .map(|rank| {
            let members = mesh.group(rank, step.axes());
            let group: Vec<&Tensor<T>> = members.iter().map(|r| &pieces[*r]).collect();
            let at = mesh.coordinate(rank);
            // This rank's part of what the group holds together, cut axis by axis, outermost first.
            let mine = |t: &Tensor<T>, dim: usize| {
                let cut = |range, axis: &ir::Axis| piece(range, mesh.size(*axis), at[axis.index()]);
                t.slice(dim, step.axes().iter().fold(0..t.shape[dim], cut))
            };
            match step {
                Move::AllReduce { reduce, .. } => Tensor::combine(&group, *reduce),
                Move::ReduceScatter { reduce, dim, .. } => mine(&Tensor::combine(&group, *reduce), *dim),
                Move::AllGather { dim, .. } => Tensor::join(&group, *dim),
                Move::Broadcast { .. } => group[0].clone(),
                Move::AllToAll { from, to, .. } => mine(&Tensor::join(&group, *from), *to),
                Move::Permute { .. } => pieces[step.source(mesh, rank)].clone(),
                Move::Slice { dim, .. } => mine(&pieces[rank], *dim),
                Move::ToPartial { axis, reduce } if at[axis.index()] != 0 => {
                    Tensor::full(&pieces[rank].shape, reduce.identity())
                }
                Move::ToPartial { .. } => pieces[rank].clone(),
            }
        })
        .collect()
}

/// The whole tensor from the pieces of all ranks.
///
/// # Errors
/// If ranks that should hold the same do not.
pub fn assemble<T: Real>(
    pieces: &[Tensor<T>],
    sharding: &Sharding,
    mesh: &Mesh,
) -> Result<Tensor<T>, String> {
    let whole = reshard(pieces, sharding, &Sharding::replicated(sharding.dims.len()), mesh);
    for (rank, other) in whole.iter().enumerate() {
        let d = other.distance(&whole[0]);
        if d > 1e-9 && other.data != whole[0].data {
            return Err(format!("ranks 0 and {rank} hold different copies, off by {d:.1e}"));
        }
    }
    Ok(whole[0].clone())
}
