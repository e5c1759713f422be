//! When what happens in a step, by the prices of a cluster: every row of the pipeline does its calls in order, and waits for
//! messages and for collectives of all rows. A message runs from when it is sent and received for, and takes its latency and
//! its bytes; messages do not slow each other down.

pub mod actions;
pub mod segment;
pub mod trace;

use std::collections::HashMap;

use ir::program::{Instruction, Message, Program};

use crate::cluster::Cluster;
use crate::cost;
use segment::{Event, Profile, messages, profile};

/// When a call ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Which call of its row.
    pub call: usize,
    /// Its start, in seconds from that of the step.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// When a message ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sending {
    /// What was sent.
    pub message: Message,
    /// For which micro-batch.
    pub microbatch: Option<usize>,
    /// Its start.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// What a rank of a row does with its time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowTime {
    /// Its calls.
    pub spans: Vec<Span>,
    /// Seconds of kernels.
    pub compute: f64,
    /// Seconds in which it waits for transfers that run.
    pub exposed: f64,
    /// Seconds in which it waits for what other rows have not done yet.
    pub waiting: f64,
    /// When it ends.
    pub end: f64,
}

/// A step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// By row.
    pub rows: Vec<RowTime>,
    /// All messages.
    pub messages: Vec<Sending>,
    /// What waits for each message are exposed, in seconds of all its micro-batches.
    pub exposed_messages: HashMap<Message, f64>,
    /// The same of each collective of all rows, by row and place.
    pub exposed_joins: HashMap<(usize, usize), f64>,
    /// What each segment does, by row.
    pub profiles: Vec<Vec<Profile>>,
}

impl Timeline {
    /// When the last row ends.
    pub fn seconds(&self) -> f64 {
        self.rows.iter().map(|r| r.end).fold(0.0, f64::max)
    }

    /// The row that has most to do.
    pub fn busiest(&self) -> Option<&RowTime> {
        self.rows.iter().max_by(|a, b| (a.compute + a.exposed).total_cmp(&(b.compute + b.exposed)))
    }
}

type Key = (Message, Option<usize>);

/// What is known of a message so far.
#[derive(Clone, Copy, Default)]
struct Known {
    sent: Option<f64>,
    posted: Option<f64>,
}

/// Where a row is.
#[derive(Clone, Copy, Default)]
struct At {
    call: usize,
    event: usize,
    now: f64,
    began: f64,
    /// When the call before ended.
    free: f64,
    /// Seconds of kernels in the call so far.
    computed: f64,
}

struct Run<'a> {
    program: &'a Program,
    seconds: HashMap<Message, f64>,
    known: HashMap<Key, Known>,
    joins: Vec<Vec<Option<f64>>>,
    join_seconds: Vec<f64>,
    out: Timeline,
}

/// Runs a step of a program.
pub fn timeline(program: &Program, cluster: &Cluster) -> Timeline {
    let mesh = &program.mesh;
    let mut profiles = Vec::new();
    let mut join_seconds: Vec<f64> = Vec::new();
    let mut seconds: HashMap<Message, f64> = HashMap::new();
    for stage in &program.stages {
        let (messages, mut joins) = (messages(stage), 0);
        let of = |s| profile(stage, s, mesh, cluster, &messages, &mut joins);
        profiles.push(stage.segments.iter().map(of).collect::<Vec<_>>());
        let mut place = 0;
        for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
            if let Instruction::Send { message, from, .. } = instruction {
                let bytes = stage.buffers[from.index()].bytes(mesh);
                seconds.insert(*message, message_seconds(program, *message, bytes, cluster));
            }
            if let Some((_, parts)) =
                instruction.started().filter(|(_, parts)| parts.iter().any(|p| p.joins_stages(mesh)))
            {
                let all = cost::message_seconds(cost::call(parts, stage, mesh), cluster);
                join_seconds.resize(join_seconds.len().max(place + 1), 0.0);
                join_seconds[place] = f64::max(join_seconds[place], all);
                place += 1;
            }
        }
    }
    let rows = program.stages.len();
    let mut run = Run {
        program,
        seconds,
        known: HashMap::new(),
        joins: vec![vec![None; rows]; join_seconds.len()],
        join_seconds,
        out: Timeline { rows: vec![RowTime::default(); rows], profiles, ..Timeline::default() },
    };
    let mut at = vec![At::default(); rows];
    let mut ready: Vec<usize> = (0..rows).rev().collect();
    while let Some(row) = ready.pop() {
        if run.go_on(row, &mut at[row]) {
            // Whoever waited may go on.
            ready = (0..rows).rev().collect();
        }
    }
    for (row, at) in run.out.rows.iter_mut().zip(&at) {
        row.end = at.now;
    }
    run.out
}

/// Seconds of a message: like a collective of two, or a copy where both stages live on one rank.
pub fn message_seconds(program: &Program, message: Message, bytes: usize, cluster: &Cluster) -> f64 {
    let apart = program.homes.get(message.from) != program.homes.get(message.to);
    match apart {
        true => cost::message_seconds(cost::send(bytes), cluster),
        false => {
            cost::launch_seconds(cost::Work { bytes: 2.0 * bytes as f64, ..cost::Work::default() }, cluster)
        }
    }
}

impl Run<'_> {
    /// Takes a row as far as it goes. Whether others may go on by it.
    fn go_on(&mut self, row: usize, at: &mut At) -> bool {
        let stage = &self.program.stages[row];
        let mut told = false;
        while let Some(call) = stage.calls.get(at.call) {
            if at.event == 0 {
                at.began = at.now;
            }
            let Some(event) = self.out.profiles[row][call.segment].events.get(at.event).cloned() else {
                let start = f64::max(at.began, at.free);
                let span = Span { call: at.call, start: start.min(at.now), end: at.now };
                at.free = at.now;
                self.out.rows[row].spans.push(span);
                (at.call, at.event, at.computed) = (at.call + 1, 0, 0.0);
                continue;
            };
            let key = |message: Message| (message, call.microbatch);
            match event {
                Event::Compute(seconds) => {
                    at.computed += seconds;
                    at.now += seconds;
                    self.out.rows[row].compute += seconds;
                }
                Event::Exposed(_, seconds) => {
                    at.now += seconds;
                    self.out.rows[row].exposed += seconds;
                }
                Event::Send(message) => {
                    self.known.entry(key(message)).or_default().sent = Some(at.now);
                    told = true;
                    self.complete(key(message));
                }
                Event::Post(message) => {
                    self.known.entry(key(message)).or_default().posted = Some(at.now);
                    told = true;
                    self.complete(key(message));
                }
                Event::Sent(message) | Event::Received(message) => {
                    let known = self.known.get(&key(message)).copied().unwrap_or_default();
                    let (Some(sent), Some(posted)) = (known.sent, known.posted) else { return told };
                    let start = sent.max(posted);
                    let end = start + self.seconds.get(&message).copied().unwrap_or(0.0);
                    let exposed = self.wait(row, at, start, end);
                    // Who sends it waits beside who needs it.
                    if matches!(event, Event::Received(_)) {
                        *self.out.exposed_messages.entry(message).or_default() += exposed;
                    }
                }
                Event::Join(place) => {
                    self.joins[place][row] = Some(at.now);
                    told = true;
                }
                Event::Joined(place) => {
                    let came: Option<Vec<f64>> = self.joins[place].iter().copied().collect();
                    let Some(came) = came else { return told };
                    let start = came.into_iter().fold(0.0, f64::max);
                    let exposed = self.wait(row, at, start, start + self.join_seconds[place]);
                    *self.out.exposed_joins.entry((row, place)).or_default() += exposed;
                }
            }
            at.event += 1;
        }
        told
    }

    /// Waits for what runs from `start` to `end`: before its start for others, then for the transfer. Returns that part.
    fn wait(&mut self, row: usize, at: &mut At, start: f64, end: f64) -> f64 {
        let waiting = (start - at.now).max(0.0);
        let exposed = (end - f64::max(at.now, start)).max(0.0);
        self.out.rows[row].waiting += waiting;
        self.out.rows[row].exposed += exposed;
        if end > at.now {
            // What was computed before it counts as done right before it goes on.
            at.now = end;
            at.began = end - at.computed;
        }
        exposed
    }

    fn complete(&mut self, key: Key) {
        let known = self.known.get(&key).copied().unwrap_or_default();
        if let (Some(sent), Some(posted)) = (known.sent, known.posted) {
            let start = f64::max(sent, posted);
            let end = start + self.seconds.get(&key.0).copied().unwrap_or(0.0);
            self.out.messages.push(Sending { message: key.0, microbatch: key.1, start, end });
        }
    }
}
