//! How many bytes of gradients one call reduces, unless the user says.
//!
//! Gradients of G bytes in buckets of b bytes are G/b calls, each of which costs a start and its latency, a; and when the
//! backward pass ends, the last bucket is still to be sent, b/w at w bytes/s. The sum of both is least at
//! b = sqrt(G a w): between the latency of many calls and the late start of few.

use ir::state::Role;
use ir::{Mesh, Part, ShardedGraph, local_shape};

use crate::choose::space::is_data;
use crate::cluster::Cluster;

/// For a training step, or one that gathers parameters, on more than one rank; else there is nothing to put into buckets.
pub fn bytes(sharded: &ShardedGraph, cluster: &Cluster) -> Option<usize> {
    let mesh = &sharded.mesh;
    let data: Vec<_> = mesh.all().filter(|axis| is_data(mesh, *axis)).collect();
    // Where the batch is whole, gradients are summed over other axes.
    let group = if mesh.pieces(&data) > 1 { mesh.pieces(&data) } else { mesh.ranks() };
    let all = gradients(sharded, mesh);
    let trains = sharded.graph.nodes.iter().any(|n| n.mark.part == Part::Weight);
    (group > 1 && all > 0 && (trains || !sharded.decisions.again.is_empty())).then(|| {
        let sent = 2.0 * (group - 1) as f64 / group as f64;
        let (call, rate) = (cluster.launch + 2.0 * cluster.latency, cluster.bandwidth / sent);
        (all as f64 * call * rate).sqrt().round() as usize
    })
}

/// Bytes of all gradients of a rank before they are reduced: over the axes of the batch each is whole.
fn gradients(sharded: &ShardedGraph, mesh: &Mesh) -> usize {
    let graph = &sharded.graph;
    let wide = graph.precision.map(|p| p.sums.bytes());
    let of = |state: &ir::state::State| {
        let mut place = sharded.decisions.places[&state.name].clone();
        place.dims.iter_mut().for_each(|axes| axes.retain(|axis| !is_data(mesh, *axis)));
        let shape: Vec<usize> = state.dims.iter().map(|(_, n)| *n).collect();
        let elements: usize = local_shape(&shape, &place, mesh).iter().product();
        elements * wide.unwrap_or(state.dtype.bytes())
    };
    let trained = |s: &&ir::state::State| matches!(s.role, Role::Parameter { trainable: true, .. });
    graph.states.iter().filter(trained).map(of).sum()
}
