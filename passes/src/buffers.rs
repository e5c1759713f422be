//! What passes on programs do with buffers alike.

use ir::program::{BufferId, Region, Stage};

/// Renumbers buffers so that those that nothing names any more are gone.
pub(crate) fn drop_unused(stage: &mut Stage) {
    let mut used = vec![false; stage.buffers.len()];
    for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
        instruction.reads().iter().chain(&instruction.writes()).for_each(|b| used[b.index()] = true);
    }
    for (i, buffer) in stage.buffers.iter().enumerate() {
        used[i] |= buffer.region == Region::State;
    }
    let mut now = vec![BufferId(0); used.len()];
    for (next, i) in (0..used.len()).filter(|i| used[*i]).enumerate() {
        now[i] = BufferId(next as u32);
    }
    let mut i = 0;
    stage.buffers.retain(|_| {
        i += 1;
        used[i - 1]
    });
    let rename = |b: &mut BufferId| *b = now[b.index()];
    for instruction in stage.segments.iter_mut().flat_map(|s| &mut s.instructions) {
        instruction.buffers_mut().into_iter().for_each(rename);
    }
}
