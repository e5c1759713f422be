//! What `choose` compares: elements on the wire. A stand-in for the planner's price until the search comes.

use ir::{Mesh, Move, Sharding, local_shape, moves};

/// What starting a collective costs, in elements. Small, so that bytes decide and a call breaks ties.
const START: f64 = 1e-2;

/// What a slice or to_partial costs, in elements: less than a collective's start. `to_partial` is never worth it: it
/// makes contributions of what is whole, which somebody must then sum.
const SLICE: f64 = 1e-3;
const TO_PARTIAL: f64 = 1e12;

/// The elements that a rank sends to bring a value from one sharding to another.
pub(crate) fn price(from: &Sharding, to: &Sharding, shape: &[usize], mesh: &Mesh) -> f64 {
    if from == to {
        return 0.0;
    }
    let mut at = from.clone();
    let mut sum = 0.0;
    for step in moves(from, to, mesh) {
        let before: usize = local_shape(shape, &at, mesh).iter().product();
        at = step.after(&at);
        let after: usize = local_shape(shape, &at, mesh).iter().product();
        let n = mesh.pieces(step.axes()) as f64;
        let share = (n - 1.0) / n;
        sum += match &step {
            Move::AllReduce { .. } => START + 2.0 * share * before as f64,
            Move::ReduceScatter { .. } | Move::AllToAll { .. } => START + share * before as f64,
            Move::Permute { .. } => START + before as f64,
            Move::AllGather { .. } => START + share * after as f64,
            Move::Slice { .. } => SLICE,
            Move::ToPartial { .. } => TO_PARTIAL,
        };
    }
    sum
}
