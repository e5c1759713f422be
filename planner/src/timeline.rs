//! When what happens in a segment: launches one after the other, collectives beside them one after the other. What a wait
//! then still waits for is exposed.

use std::collections::HashMap;

use ir::Mesh;
use ir::program::{BufferId, Instruction, Segment, Stage};

use crate::cluster::Cluster;
use crate::cost;

/// Seconds of an instruction on the rank with the largest pieces; a collective takes none by itself.
pub fn computing(stage: &Stage, instruction: &Instruction, mesh: &Mesh, cluster: &Cluster) -> f64 {
    match instruction {
        Instruction::Launch { kernel, reads, writes } => {
            cost::launch_seconds(cost::launch(kernel, reads, writes, stage, mesh), cluster)
        }
        Instruction::Local { from, to, .. } | Instruction::Assign { from, to } => {
            let bytes = |b: &BufferId| stage.buffers[b.index()].bytes(mesh) as f64;
            cost::launch_seconds(
                cost::Work { bytes: bytes(from) + bytes(to), ..cost::Work::default() },
                cluster,
            )
        }
        Instruction::Feed { .. }
        | Instruction::Start { .. }
        | Instruction::Wait { .. }
        | Instruction::Send { .. }
        | Instruction::Sent { .. }
        | Instruction::Receive { .. }
        | Instruction::Received { .. }
        | Instruction::Tap { .. } => 0.0,
    }
}

/// For each token how long its wait waits.
pub fn exposed(stage: &Stage, segment: &Segment, mesh: &Mesh, cluster: &Cluster) -> HashMap<u32, f64> {
    let (mut now, mut free) = (0.0, 0.0);
    let mut ends: HashMap<u32, f64> = HashMap::new();
    let mut exposed = HashMap::new();
    for instruction in &segment.instructions {
        match instruction {
            Instruction::Start { token, parts } => {
                let seconds = cost::message_seconds(cost::call(parts, stage, mesh), cluster);
                free = f64::max(free, now) + seconds;
                ends.insert(*token, free);
            }
            Instruction::Wait { token } => {
                let end = ends.get(token).copied().unwrap_or(now);
                exposed.insert(*token, (end - now).max(0.0));
                now = f64::max(now, end);
            }
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Assign { .. }
            | Instruction::Send { .. }
            | Instruction::Sent { .. }
            | Instruction::Receive { .. }
            | Instruction::Received { .. }
            | Instruction::Tap { .. } => now += computing(stage, instruction, mesh, cluster),
        }
    }
    exposed
}
