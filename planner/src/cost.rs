//! What an instruction costs a rank, from the very instruction that runs: operations, bytes, seconds.

use ir::kernel::{Body, Kernel, Loop, Step};
use ir::program::{Buffer, BufferId, Stage, Transfer};
use ir::{DType, Mesh, Move, Sharding, bound, local_shape};

use crate::cluster::Cluster;

/// The work of a kernel on the rank with the largest pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// Whether the operations are products of bf16.
    pub bf16: bool,
}

/// What a launch does.
pub fn launch(kernel: &Kernel, reads: &[BufferId], writes: &[BufferId], stage: &Stage, mesh: &Mesh) -> Work {
    let bytes = reads.iter().chain(writes).map(|b| stage.buffers[b.index()].bytes(mesh) as f64).sum();
    Work { flops: flops(kernel, mesh), bytes, bf16: bf16(kernel) }
}

/// Operations of a kernel on the rank with the largest pieces.
fn flops(kernel: &Kernel, mesh: &Mesh) -> f64 {
    let over = |loops: &mut dyn Iterator<Item = &Loop>| -> f64 {
        loops.map(|l| bound(l.size, &l.axes, mesh) as f64).product()
    };
    match &kernel.body {
        Body::Map(map) => over(&mut map.loops.iter()) * map.steps.iter().map(step).sum::<f64>(),
        Body::Contract(c) => 2.0 * over(&mut c.loops.iter()),
        Body::Scatter(s) => {
            let inner = s.loops.iter().enumerate().filter(|(i, _)| *i != s.looked);
            over(&mut inner.map(|(_, l)| l))
        }
        Body::TopK(t) => over(&mut t.source.iter().flatten().map(|l| &t.loops[*l])),
        // Also of keys that no query of a block sees: which, only the data say.
        Body::Chain(chain) => chain.links.iter().map(|link| flops(&link.kernel, mesh)).sum(),
    }
}

/// Whether its operations are products of bf16, but for those between them.
pub fn bf16(kernel: &Kernel) -> bool {
    match &kernel.body {
        Body::Contract(_) => kernel.reads[0] == DType::BF16,
        Body::Chain(chain) => chain.links.iter().any(|link| bf16(&link.kernel)),
        Body::Map(_) | Body::Scatter(_) | Body::TopK(_) => false,
    }
}

/// Operations of the matrix products of a kernel.
pub fn product_flops(kernel: &Kernel, mesh: &Mesh) -> f64 {
    match &kernel.body {
        Body::Contract(_) => flops(kernel, mesh),
        Body::Chain(chain) => chain.links.iter().map(|link| product_flops(&link.kernel, mesh)).sum(),
        Body::Map(_) | Body::Scatter(_) | Body::TopK(_) => 0.0,
    }
}

/// Operations of one random number: ten rounds of two wide products, four exclusive ors and two sums give four, and each
/// is then made a float.
pub const DRAW: f64 = 24.0;

/// Operations of a step at a point.
fn step(step: &Step) -> f64 {
    let computes = !step.uses().is_empty();
    if let Step::Random { .. } = step { DRAW } else { f64::from(u8::from(computes)) }
}

/// Seconds of a launch: the longer of computing and moving bytes (Williams et al., "Roofline"), and the start.
pub fn launch_seconds(work: Work, cluster: &Cluster) -> f64 {
    cluster.launch + (work.flops / cluster.rate(work.bf16)).max(work.bytes / cluster.memory_bandwidth)
}

/// What a collective sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Message {
    /// Size of the group.
    pub group: usize,
    /// Bytes of the call's full tensor as sent, padded to equal pieces: all_reduce: the tensor; all_gather: the result;
    /// reduce_scatter: the input; all_to_all: one rank's buffer; permute and broadcast: one rank's piece.
    pub bytes: usize,
    /// Bytes that one rank sends in one call: 2 (n - 1) / n of them for all_reduce, all for permute and broadcast, else
    /// (n - 1) / n.
    pub wire_bytes: f64,
    /// How often ranks wait for each other: twice in an all_reduce, which is a reduce_scatter and an all_gather
    /// (Thakur et al., "Optimization of collective communication operations in MPICH", 2005), else once.
    pub rounds: usize,
}

/// How a tensor lies.
#[derive(Clone, Copy, Debug)]
pub struct Lies<'a> {
    /// Its global shape.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
    /// Where its elements are.
    pub sharding: &'a Sharding,
}

impl<'a> Lies<'a> {
    /// What a buffer holds.
    pub fn of(buffer: &'a Buffer) -> Lies<'a> {
        Lies { shape: &buffer.shape, dtype: buffer.dtype, sharding: &buffer.sharding }
    }

    /// Bytes of the largest piece.
    pub fn bytes(&self, mesh: &Mesh) -> usize {
        local_shape(self.shape, self.sharding, mesh).iter().product::<usize>() * self.dtype.bytes()
    }
}

/// What a collective sends that leads from one place to another, on the rank with the largest pieces.
pub fn message(step: &Move, from: Lies, to: Lies, mesh: &Mesh) -> Message {
    let group = mesh.pieces(step.axes());
    let share = (group - 1) as f64 / group as f64;
    let local = |b: Lies| local_shape(b.shape, b.sharding, mesh);
    let elements = |shape: &[usize]| shape.iter().product::<usize>();
    let (before, after) = (local(from), local(to));
    let full = match step {
        Move::AllReduce { .. }
        | Move::Broadcast { .. }
        | Move::Permute { .. }
        | Move::Slice { .. }
        | Move::ToPartial { .. } => elements(&before),
        // Every rank gives a piece as large as the largest.
        Move::AllGather { .. } => group * elements(&before),
        // Every rank gets a piece as large as the largest.
        Move::ReduceScatter { .. } => group * elements(&after),
        // Cut along one dimension and joined along another, each into pieces as large as the largest.
        Move::AllToAll { to: dim, .. } => {
            let mut cut = before.clone();
            cut[*dim] = group * after[*dim];
            elements(&cut)
        }
    };
    let bytes = full * from.dtype.bytes();
    let wire = match step {
        Move::AllReduce { .. } => 2.0 * share,
        // A rank whose piece goes to another sends all of it.
        Move::Permute { .. } | Move::Broadcast { .. } if group > 1 => 1.0,
        Move::Permute { .. } | Move::Broadcast { .. } => 0.0,
        Move::ReduceScatter { .. }
        | Move::AllGather { .. }
        | Move::AllToAll { .. }
        | Move::Slice { .. }
        | Move::ToPartial { .. } => share,
    };
    let rounds = match step {
        Move::AllReduce { .. } => 2,
        Move::ReduceScatter { .. }
        | Move::AllGather { .. }
        | Move::Broadcast { .. }
        | Move::AllToAll { .. }
        | Move::Permute { .. }
        | Move::Slice { .. }
        | Move::ToPartial { .. } => 1,
    };
    Message { group, bytes, wire_bytes: wire * bytes as f64, rounds }
}

/// What is sent from one rank to another.
pub fn send(bytes: usize) -> Message {
    Message { group: 2, bytes, wire_bytes: bytes as f64, rounds: 1 }
}

/// What one call sends that moves several tensors: a bucket.
pub fn call(parts: &[Transfer], stage: &Stage, mesh: &Mesh) -> Message {
    let of = |b: BufferId| Lies::of(&stage.buffers[b.index()]);
    let messages = parts.iter().map(|p| message(&p.step, of(p.from), of(p.to), mesh));
    let join = |a: Message, b: Message| Message {
        bytes: a.bytes + b.bytes,
        wire_bytes: a.wire_bytes + b.wire_bytes,
        ..a
    };
    messages.reduce(join).unwrap_or(Message { group: 1, bytes: 0, wire_bytes: 0.0, rounds: 0 })
}

/// Seconds of a collective: its start as a kernel, the latency of its rounds, and its wire bytes (Hockney, "The
/// communication challenge for MPP", 1994).
pub fn message_seconds(message: Message, cluster: &Cluster) -> f64 {
    let start = cluster.launch + message.rounds as f64 * cluster.latency;
    if message.group == 1 { 0.0 } else { start + message.wire_bytes / cluster.bandwidth }
}
