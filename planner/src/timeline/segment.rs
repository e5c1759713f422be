//! What one segment does when, by the clock of the rank that runs it: launches one after the other, collectives of its row beside
//! them one after the other. What a wait then still waits for is exposed.

use std::collections::HashMap;

use ir::Mesh;
use ir::program::{BufferId, Instruction, Message, Segment, Stage};

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

/// What happens in a segment, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Launches, for so many seconds.
    Compute(f64),
    /// A wait for a collective of the row, for so many seconds that nothing hides.
    Exposed(u32, f64),
    /// A message starts.
    Send(Message),
    /// The row is ready for a message.
    Post(Message),
    /// It waits until one is sent.
    Sent(Message),
    /// It waits until one has come.
    Received(Message),
    /// It comes to a collective of all rows, with its place among those.
    Join(usize),
    /// It waits for that.
    Joined(usize),
}

/// A collective of the row: its name, and from when to when it runs, seconds after the start of the segment if nothing else
/// is waited for.
#[derive(Clone, Debug, PartialEq)]
pub struct Flight {
    /// Which.
    pub token: u32,
    /// The field's name.
    pub op: &'static str,
    /// Its start.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// What a segment does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// In order.
    pub events: Vec<Event>,
    /// The collectives of the row.
    pub flights: Vec<Flight>,
}

impl Profile {
    /// For each token how long its wait waits.
    pub fn exposed(&self) -> impl Iterator<Item = (u32, f64)> {
        self.events.iter().filter_map(|event| match event {
            Event::Exposed(token, seconds) => Some((*token, *seconds)),
            Event::Compute(_)
            | Event::Send(_)
            | Event::Post(_)
            | Event::Sent(_)
            | Event::Received(_)
            | Event::Join(_)
            | Event::Joined(_) => None,
        })
    }
}

/// The messages of a stage by token.
pub fn messages(stage: &Stage) -> HashMap<u32, Message> {
    let ends = stage.segments.iter().flat_map(|s| &s.instructions).filter_map(Instruction::posted);
    ends.map(|end| (end.token, end.message)).collect()
}

/// What a segment does. `joins` counts the collectives of all rows before it in its stage, and goes on counting.
pub fn profile(
    stage: &Stage,
    segment: &Segment,
    mesh: &Mesh,
    cluster: &Cluster,
    messages: &HashMap<u32, Message>,
    joins: &mut usize,
) -> Profile {
    let mut out = Profile::default();
    let (mut now, mut free) = (0.0, 0.0);
    let mut ends: HashMap<u32, f64> = HashMap::new();
    let mut joined: HashMap<u32, usize> = HashMap::new();
    let message = |token: &u32| messages.get(token).copied();
    for instruction in &segment.instructions {
        match instruction {
            Instruction::Start { token, parts } => {
                if parts.iter().any(|p| p.joins_stages(mesh)) {
                    joined.insert(*token, *joins);
                    out.events.push(Event::Join(*joins));
                    *joins += 1;
                    continue;
                }
                let call = cost::call(parts, stage, mesh);
                let start = f64::max(free, now);
                free = start + cost::message_seconds(call, cluster);
                ends.insert(*token, free);
                if let (Some(first), true) = (parts.first(), call.group > 1) {
                    out.flights.push(Flight { token: *token, op: first.step.name(), start, end: free });
                }
            }
            Instruction::Wait { token } => {
                if let Some(place) = joined.get(token) {
                    out.events.push(Event::Joined(*place));
                    continue;
                }
                let end = ends.get(token).copied().unwrap_or(now);
                out.events.push(Event::Exposed(*token, (end - now).max(0.0)));
                now = f64::max(now, end);
            }
            Instruction::Send { message, .. } => out.events.push(Event::Send(*message)),
            Instruction::Receive { message, .. } => out.events.push(Event::Post(*message)),
            Instruction::Sent { token, .. } => out.events.extend(message(token).map(Event::Sent)),
            Instruction::Received { token, .. } => out.events.extend(message(token).map(Event::Received)),
            Instruction::Feed { .. }
            | Instruction::Launch { .. }
            | Instruction::Local { .. }
            | Instruction::Assign { .. }
            | Instruction::Tap { .. } => {
                let seconds = computing(stage, instruction, mesh, cluster);
                now += seconds;
                match out.events.last_mut() {
                    Some(Event::Compute(before)) => *before += seconds,
                    Some(_) | None => out.events.push(Event::Compute(seconds)),
                }
            }
        }
    }
    out
}
