//! What a reshard and a node cost, in the units of the search, from the same functions that price a program.

use ir::rows::{Layout, Strategy};
use ir::{DType, Graph, Mesh, Node, Op, Sharding, Value, bound, moves_of};

use super::tables::{MOST, Price};
use crate::cluster::Cluster;
use crate::cost::{self, Lies, Work};

/// Picoseconds.
fn price(seconds: f64) -> Price {
    ((seconds * 1e12).round() as Price).min(MOST)
}

/// What a reshard sends, and how long it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sent {
    /// Calls.
    pub collectives: usize,
    /// Bytes that a rank sends.
    pub wire_bytes: f64,
    /// Seconds, copies within a rank among them.
    pub seconds: f64,
}

impl Sent {
    /// Both.
    pub fn and(self, other: Sent) -> Sent {
        Sent {
            collectives: self.collectives + other.collectives,
            wire_bytes: self.wire_bytes + other.wire_bytes,
            seconds: self.seconds + other.seconds,
        }
    }

    /// As a price: a picosecond more for each collective.
    pub fn price(&self) -> Price {
        price(self.seconds) + self.collectives as Price
    }
}

/// The moves from one sharding of a tensor to another.
pub fn sent(
    shape: &[usize],
    dtype: DType,
    from: &Sharding,
    to: &Sharding,
    mesh: &Mesh,
    cluster: &Cluster,
) -> Sent {
    let mut at = from.clone();
    let mut total = Sent::default();
    for step in moves_of(shape, from, to, mesh) {
        let next = step.after(&at);
        let (before, after) = (Lies { shape, dtype, sharding: &at }, Lies { shape, dtype, sharding: &next });
        total = total.and(if step.is_collective() {
            let message = cost::message(&step, before, after, mesh);
            let collectives = usize::from(message.group > 1);
            Sent {
                collectives,
                wire_bytes: message.wire_bytes,
                seconds: cost::message_seconds(message, cluster),
            }
        } else {
            let bytes = 2.0 * after.bytes(mesh) as f64;
            Sent { seconds: bytes / cluster.memory_bandwidth, ..Sent::default() }
        });
        at = next;
    }
    total
}

/// Whether an op is computed element by element, so that it joins what is computed before it in one kernel.
pub fn is_map(node: &Node) -> bool {
    let alone = |f| node.signature.results.iter().all(|r| ir::Signature::has(r, f));
    let maps = matches!(
        node.op,
        Op::Einsum { .. } | Op::Add | Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Cast | Op::Random(_)
    );
    maps && (0..node.sizes.len()).all(alone)
}

/// What a node computes on the rank with the largest pieces: as the kernel that it becomes, but for what it shares with
/// others in one. `stored` says which values are written to memory, and so are read from there.
pub fn work(
    graph: &Graph,
    node: &Node,
    strategy: &Strategy,
    layout: &Layout,
    stored: &dyn Fn(Value) -> bool,
    mesh: &Mesh,
) -> Work {
    if node.args.is_empty() || matches!(node.op, Op::Reshard | Op::Assign(_) | Op::Tap(_)) {
        return Work::default();
    }
    // What is looked up is no loop.
    let looked = node.op.looked_up(&node.signature);
    let each = node.sizes.iter().zip(&strategy.split).enumerate().filter(|(f, _)| looked != Some(*f));
    let points: f64 = each.map(|(_, (n, axes))| bound(*n, axes, mesh) as f64).product();
    let bytes = |v: Value, sharding: &Sharding| {
        let ty = graph.ty(v);
        Lies { shape: &ty.shape, dtype: ty.dtype, sharding }.bytes(mesh) as f64
    };
    let product = node.is_product();
    let results =
        node.results.iter().zip(&layout.results).filter(|(v, _)| product || stored(**v) || !is_map(node));
    let written: f64 = results.map(|(v, sharding)| bytes(*v, sharding)).sum();
    let operands = node.args.iter().zip(&layout.args).enumerate();
    let read =
        operands.map(|(k, (v, sharding))| match (node.op == Op::Gather && k == 0, product || stored(*v)) {
            // As much of a table as is looked up.
            (true, _) => written,
            (false, true) => bytes(*v, sharding),
            (false, false) => 0.0,
        });
    let drawn = matches!(node.op, Op::Random(_));
    let each = if drawn { cost::DRAW } else { f64::from(1 + u8::from(product)) };
    let flops = each * points;
    let bf16 = product && node.args.iter().all(|v| graph.ty(*v).dtype == DType::BF16);
    Work { flops, bytes: read.sum::<f64>() + written, bf16 }
}

/// The price of what a node computes.
pub fn computing(work: Work, cluster: &Cluster) -> Price {
    price((work.flops / cluster.rate(work.bf16)).max(work.bytes / cluster.memory_bandwidth))
}
