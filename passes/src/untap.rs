//! After it only those taps are left that the host asked for: without a dump, the numbers of the step.
//!
//! Works on whole tensors, after the optimizer wrote its taps, and before `simplify`, which drops what only they used.
//!
//! ```text
//! tap(grad.w) v9        -> nothing
//! tap(loss) v12         -> the same
//! ```

use ir::{Graph, Op};

pub(crate) fn run(graph: &mut Graph) {
    if graph.dump {
        return;
    }
    // A user's own taps are of any shape; only those of the tool's dump are large and unasked for.
    let unasked = |op: &Op| matches!(op, Op::Tap(name) if name.starts_with("grad.") || &**name == "logits");
    graph.nodes.retain(|n| !unasked(&n.op));
}
