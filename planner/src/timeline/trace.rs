//! A timeline in the format of Chrome's and Perfetto's trace viewers: a process for each row of the pipeline or rank, a thread for
//! each of its streams. Times are microseconds. (Google, "Trace Event Format".)

use ir::program::{Duty, Instruction, Program, Stage};
use runtime::local::Mark;
use serde::Serialize;

use super::Timeline;
use crate::plan::phase;

/// The stream of kernels.
pub const COMPUTE: usize = 0;
/// The stream of collectives and messages.
pub const COMMUNICATE: usize = 1;

/// An event of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TraceEvent {
    /// What is shown.
    pub name: String,
    /// forward, backward, update, once, collective, message or wait.
    pub cat: &'static str,
    /// `X`: from `ts` on for `dur`; `M`: a name for a process or thread.
    pub ph: &'static str,
    /// Microseconds from the start of the step.
    pub ts: f64,
    /// Microseconds.
    pub dur: f64,
    /// Row or rank.
    pub pid: usize,
    /// Stream.
    pub tid: usize,
    /// What else there is to say.
    pub args: serde_json::Value,
}

/// All events of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trace {
    /// In no order.
    #[serde(rename = "traceEvents")]
    pub events: Vec<TraceEvent>,
    /// The unit that a viewer shows.
    #[serde(rename = "displayTimeUnit")]
    pub unit: &'static str,
}

/// A process of a trace and its two streams by name.
pub fn process(pid: usize, name: &str) -> Vec<TraceEvent> {
    let meta = |what: &str, tid: usize, name: &str| TraceEvent {
        name: what.to_string(),
        cat: "once",
        ph: "M",
        ts: 0.0,
        dur: 0.0,
        pid,
        tid,
        args: serde_json::json!({ "name": name }),
    };
    vec![
        meta("process_name", 0, name),
        meta("thread_name", COMPUTE, "compute"),
        meta("thread_name", COMMUNICATE, "communicate"),
    ]
}

/// What is shown of a call: its action, as in the table.
pub fn call_name(stage: &Stage, call: usize) -> String {
    let call = &stage.calls[call];
    let segment = &stage.segments[call.segment];
    let microbatch = call.microbatch.map_or(String::new(), |m| m.to_string());
    format!("{}{}{microbatch}{}", segment.stage, segment.kind.letter(), segment.duty.suffix())
}

fn event(name: String, cat: &'static str, (pid, tid): (usize, usize), from: f64, to: f64) -> TraceEvent {
    let args = serde_json::json!({});
    TraceEvent { name, cat, ph: "X", ts: from * 1e6, dur: (to - from) * 1e6, pid, tid, args }
}

/// The trace of a priced step: a process for each row.
pub fn trace(program: &Program, timeline: &Timeline) -> Trace {
    let mut events = Vec::new();
    for (r, (stage, row)) in program.stages.iter().zip(&timeline.rows).enumerate() {
        events.extend(process(r, &format!("stage {r}")));
        for span in &row.spans {
            let segment = &stage.segments[stage.calls[span.call].segment];
            if segment.duty == Duty::Work || span.end > span.start {
                let (name, cat) = (call_name(stage, span.call), phase(segment.kind));
                events.push(event(name, cat, (r, COMPUTE), span.start, span.end));
            }
            let profile = &timeline.profiles[r][stage.calls[span.call].segment];
            for flight in &profile.flights {
                let (from, to) = (span.start + flight.start, span.start + flight.end);
                events.push(event(flight.op.to_string(), "collective", (r, COMMUNICATE), from, to));
            }
        }
    }
    for sending in &timeline.messages {
        let m = sending.message;
        let microbatch = sending.microbatch.map_or(String::new(), |m| format!(", micro-batch {m}"));
        let name = format!("{} to stage {}{microbatch}", m.value, m.to);
        let row = program.homes.get(m.from).copied().unwrap_or(0);
        events.push(event(name, "message", (row, COMMUNICATE), sending.start, sending.end));
    }
    Trace { events, unit: "ms" }
}

/// The trace of a step that ran: a process for each rank, with what it waited for on its second stream.
pub fn measured(program: &Program, ranks: &[Vec<Mark>]) -> Trace {
    let mut events = Vec::new();
    for (rank, marks) in ranks.iter().enumerate() {
        let row = program.mesh.row(rank);
        let stage = &program.stages[row];
        events.extend(process(rank, &format!("rank {rank}, stage {row}")));
        for Mark { call, wait, start, end } in marks {
            let segment = &stage.segments[stage.calls[*call].segment];
            let name = call_name(stage, *call);
            events.push(match wait {
                None => event(name, phase(segment.kind), (rank, COMPUTE), *start, *end),
                Some(at) => {
                    let what = segment.instructions.get(*at).map_or(String::new(), |i| waited(i, stage));
                    event(format!("{what} in {name}"), "wait", (rank, COMMUNICATE), *start, *end)
                }
            });
        }
    }
    Trace { events, unit: "ms" }
}

/// What an instruction waits for.
fn waited(instruction: &Instruction, stage: &Stage) -> String {
    let value =
        |b: &ir::program::BufferId| stage.buffers[b.index()].value.map_or(b.to_string(), |v| v.to_string());
    match instruction {
        Instruction::Sent { from, .. } => format!("{} sent", value(from)),
        Instruction::Received { to, .. } => format!("{} received", value(to)),
        Instruction::Feed { .. }
        | Instruction::Launch { .. }
        | Instruction::Local { .. }
        | Instruction::Start { .. }
        | Instruction::Wait { .. }
        | Instruction::Send { .. }
        | Instruction::Receive { .. }
        | Instruction::Assign { .. }
        | Instruction::Tap { .. } => "collective".to_string(),
    }
}
