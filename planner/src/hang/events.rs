//! What each row of the pipeline starts and waits for in a step, call by call, and whether the rows mean the same by it.

use std::collections::BTreeMap;

use ir::Axis;
use ir::program::{Call, Instruction, Message, Program, Segment, Stage, Transfer};
use rustc_hash::FxHashMap;

use super::Ends;
use super::fault::{Fault, Place};

/// What happens. Of a channel, or of a communicator of several rows, by place; and which of the things that happen there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A message is on its way.
    Send { channel: usize, number: usize },
    /// Waits until it is sent.
    Sent { channel: usize, number: usize },
    /// Is ready for a message.
    Receive { channel: usize, number: usize },
    /// Waits until it is there.
    Received { channel: usize, number: usize },
    /// Is at a collective of several rows.
    Start { communicator: usize, number: usize },
    /// Waits until all are.
    Wait { communicator: usize, number: usize },
}

/// What happens, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) what: What,
    /// Of the row's calls.
    pub(super) call: usize,
    /// The buffer of a message.
    buffer: u32,
    /// Nothing else is done between the event before and this one.
    joined: bool,
}

/// One end of a message: in which row and in which of its calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) row: usize,
    pub(super) call: usize,
    microbatch: Option<usize>,
}

/// All that goes of one value from one stage to another.
pub(super) struct Channel {
    pub(super) message: Message,
    pub(super) sends: Vec<End>,
    pub(super) receives: Vec<End>,
}

/// A collective of several rows as one of them starts it.
struct Joint<'a> {
    call: usize,
    microbatch: Option<usize>,
    parts: &'a [Transfer],
}

/// The ranks along some axes, the pipeline's among them: ranks of every row.
pub(super) struct Communicator<'a> {
    axes: Vec<Axis>,
    /// By row what it starts, in order.
    rows: Vec<Vec<Joint<'a>>>,
}

/// All events of a step.
pub(super) struct Events<'a> {
    pub(super) program: &'a Program,
    /// By row.
    pub(super) rows: Vec<Vec<Event>>,
    pub(super) channels: Vec<Channel>,
    pub(super) communicators: Vec<Communicator<'a>>,
    /// Collectives within rows.
    inside: usize,
    /// What was found while they were listed.
    faults: Vec<Fault>,
}

/// What of a segment concerns other rows.
enum Op<'a> {
    Send(usize),
    Receive(usize),
    /// Of a token.
    Done(u32, bool),
    Start(usize, u32, &'a [Transfer]),
    Wait(u32),
}

struct Brief<'a> {
    /// Each with its place in the segment and its buffer.
    ops: Vec<(usize, u32, Op<'a>)>,
    /// How many groups of ranks meet within the row.
    inside: usize,
    length: usize,
}

impl<'a> Events<'a> {
    /// Of a program.
    pub(super) fn of(program: &'a Program) -> Events<'a> {
        let mut events = Events {
            program,
            rows: Vec::new(),
            channels: Vec::new(),
            communicators: Vec::new(),
            inside: 0,
            faults: Vec::new(),
        };
        let mut numbers = Numbers::default();
        for (row, stage) in program.stages.iter().enumerate() {
            let list = events.row(row, stage, &mut numbers);
            events.rows.push(list);
        }
        events
    }

    /// What a segment does with others, in short.
    fn brief(&mut self, segment: &'a Segment, numbers: &mut Numbers) -> Brief<'a> {
        let mesh = &self.program.mesh;
        let pipeline = mesh.pipeline().filter(|axis| mesh.size(*axis) > 1);
        let ranks = mesh.ranks() / mesh.rows();
        let mut brief = Brief { ops: Vec::new(), inside: 0, length: segment.instructions.len() };
        let mut joint: Vec<u32> = Vec::new();
        for (at, instruction) in segment.instructions.iter().enumerate() {
            let (buffer, op) = match instruction {
                Instruction::Send { message, from, .. } => {
                    (from.0, Op::Send(numbers.channel(*message, &mut self.channels)))
                }
                Instruction::Receive { message, to, .. } => {
                    (to.0, Op::Receive(numbers.channel(*message, &mut self.channels)))
                }
                Instruction::Sent { token, from } => (from.0, Op::Done(*token, true)),
                Instruction::Received { token, to } => (to.0, Op::Done(*token, false)),
                Instruction::Start { token, parts } => {
                    let mut axes = parts.first().map_or(Vec::new(), |p| p.step.axes().to_vec());
                    if !axes.iter().any(|a| Some(*a) == pipeline) {
                        brief.inside += ranks / mesh.pieces(&axes).max(1);
                        continue;
                    }
                    // Members are the same whatever the order of axes.
                    axes.retain(|a| mesh.size(*a) > 1);
                    axes.sort_unstable();
                    let rows = self.program.stages.len();
                    let communicator = numbers.communicator(axes, rows, &mut self.communicators);
                    joint.push(*token);
                    (u32::MAX, Op::Start(communicator, *token, parts))
                }
                Instruction::Wait { token } if joint.contains(token) => (u32::MAX, Op::Wait(*token)),
                Instruction::Wait { .. }
                | Instruction::Feed { .. }
                | Instruction::Launch { .. }
                | Instruction::Local { .. }
                | Instruction::Assign { .. }
                | Instruction::Tap { .. } => continue,
            };
            brief.ops.push((at, buffer, op));
        }
        brief
    }

    fn row(&mut self, row: usize, stage: &'a Stage, numbers: &mut Numbers) -> Vec<Event> {
        let briefs: Vec<Brief> = stage.segments.iter().map(|s| self.brief(s, numbers)).collect();
        let mut list = List { row, events: Vec::new(), open: FxHashMap::default(), clean: false };
        // A token of a message is one channel's, in whatever segment it starts.
        let mut tokens: FxHashMap<(u32, bool), usize> = FxHashMap::default();
        for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
            if let Instruction::Send { token, message, .. } = instruction {
                tokens.insert((*token, true), numbers.channel(*message, &mut self.channels));
            } else if let Instruction::Receive { token, message, .. } = instruction {
                tokens.insert((*token, false), numbers.channel(*message, &mut self.channels));
            }
        }
        for (c, call) in stage.calls.iter().enumerate() {
            let Some(brief) = briefs.get(call.segment) else { continue };
            self.inside += brief.inside;
            let mut last = None;
            let mut started: Vec<(u32, What)> = Vec::new();
            for (at, buffer, op) in &brief.ops {
                let joined = last.map_or(*at == 0 && list.clean, |before: usize| before + 1 == *at);
                last = Some(*at);
                let what = match op {
                    Op::Send(channel) => self.start(*channel, true, c, call, &mut list),
                    Op::Receive(channel) => self.start(*channel, false, c, call, &mut list),
                    Op::Done(token, sends) => {
                        let channel = tokens.get(&(*token, *sends)).copied();
                        let number = channel.and_then(|k| list.open.remove(&(k, *sends, call.microbatch)));
                        let Some((channel, number)) = channel.zip(number) else {
                            let what = if *sends { "sent" } else { "received" };
                            let place = self.place(row, c);
                            self.faults.push(Fault::NotStarted { what: format!("{what} t{token}"), place });
                            continue;
                        };
                        match sends {
                            true => What::Sent { channel, number },
                            false => What::Received { channel, number },
                        }
                    }
                    Op::Start(communicator, token, parts) => {
                        let all = &mut self.communicators[*communicator].rows[row];
                        all.push(Joint { call: c, microbatch: call.microbatch, parts });
                        let (communicator, number) = (*communicator, all.len() - 1);
                        started.push((*token, What::Wait { communicator, number }));
                        What::Start { communicator, number }
                    }
                    Op::Wait(token) => match started.iter().position(|(t, _)| t == token) {
                        Some(at) => started.swap_remove(at).1,
                        None => {
                            let place = self.place(row, c);
                            self.faults.push(Fault::NotStarted { what: format!("wait t{token}"), place });
                            continue;
                        }
                    },
                };
                list.events.push(Event { what, call: c, buffer: *buffer, joined });
            }
            if brief.length > 0 {
                list.clean = last.is_some_and(|at| at + 1 == brief.length);
            }
        }
        let mut left: Vec<_> = list.open.into_keys().collect();
        left.sort_unstable();
        for (channel, sends, microbatch) in left {
            let channel = &self.channels[channel];
            let all = if sends { &channel.sends } else { &channel.receives };
            let end = all.iter().rev().find(|e| e.row == row && e.microbatch == microbatch);
            let (message, place) = (channel.message, self.place(row, end.map_or(0, |e| e.call)));
            self.faults.push(Fault::NotWaited { message, place });
        }
        list.events
    }

    fn start(&mut self, channel: usize, sends: bool, c: usize, call: &Call, list: &mut List) -> What {
        let of = &mut self.channels[channel];
        let all = if sends { &mut of.sends } else { &mut of.receives };
        let number = all.len();
        all.push(End { row: list.row, call: c, microbatch: call.microbatch });
        if list.open.insert((channel, sends, call.microbatch), number).is_some() {
            let (message, place) = (of.message, self.place(list.row, c));
            self.faults.push(Fault::Twice { message, place });
        }
        match sends {
            true => What::Send { channel, number },
            false => What::Receive { channel, number },
        }
    }

    /// A call, in words.
    pub(super) fn place(&self, row: usize, call: usize) -> Place {
        let stage = &self.program.stages[row];
        let of = stage.calls.get(call);
        Place {
            rank: self.program.mesh.in_row(0, row),
            call,
            segment: of.map_or(String::new(), |c| stage.name_of(c.segment)),
            microbatch: of.and_then(|c| c.microbatch),
        }
    }

    /// All in which rows differ.
    pub(super) fn faults(&mut self) -> Vec<Fault> {
        let mut faults = std::mem::take(&mut self.faults);
        let mut channels: Vec<&Channel> = self.channels.iter().collect();
        channels.sort_by_key(|c| c.message);
        channels.into_iter().for_each(|c| self.labels(c, &mut faults));
        self.communicators.iter().for_each(|c| self.orders(c, &mut faults));
        faults
    }

    /// The k-th that is sent and the k-th that is received are of one micro-batch, and each is of another.
    fn labels(&self, channel: &Channel, faults: &mut Vec<Fault>) {
        let message = channel.message;
        let place = |end: &End| self.place(end.row, end.call);
        for (i, (sent, received)) in channel.sends.iter().zip(&channel.receives).enumerate() {
            if sent.microbatch != received.microbatch {
                let (sent, received) = (place(sent), place(received));
                return faults.push(Fault::Labels { message, number: i, sent, received });
            }
        }
        let (n, m) = (channel.sends.len(), channel.receives.len());
        if let Some(end) = channel.sends.get(m) {
            return faults.push(Fault::NotReceived { message, place: place(end) });
        }
        if let Some(end) = channel.receives.get(n) {
            return faults.push(Fault::NotSent { message, place: place(end) });
        }
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|i| (channel.sends[*i].microbatch, *i));
        let twice = |w: &&[usize]| channel.sends[w[0]].microbatch == channel.sends[w[1]].microbatch;
        if let Some(pair) = order.windows(2).find(twice) {
            faults.push(Fault::Twice { message, place: place(&channel.sends[pair[1]]) });
        }
    }

    /// Every row starts the same, in the same order.
    fn orders(&self, communicator: &Communicator, faults: &mut Vec<Fault>) {
        let Some(first) = communicator.rows.first() else { return };
        for (row, other) in communicator.rows.iter().enumerate().skip(1) {
            let differs = |i: &usize| match (first.get(*i), other.get(*i)) {
                (Some(a), Some(b)) => !self.same((0, a), (row, b)),
                (None, _) | (_, None) => true,
            };
            if let Some(number) = (0..first.len().max(other.len())).find(differs) {
                let axes = self.program.mesh.show(&communicator.axes);
                let show = |row: usize, joint: Option<&Joint>| match joint {
                    Some(joint) => (self.place(row, joint.call).to_string(), self.show(row, joint)),
                    None => {
                        (format!("rank {}", self.program.mesh.in_row(0, row)), "nothing more".to_string())
                    }
                };
                let (one, other) = (show(0, first.get(number)), show(row, other.get(number)));
                return faults.push(Fault::Collectives { axes, number, one, other });
            }
        }
    }

    fn same(&self, (row, a): (usize, &Joint), (other, b): (usize, &Joint)) -> bool {
        let buffer = |row: usize, id: ir::program::BufferId| {
            let b = &self.program.stages[row].buffers[id.index()];
            (b.dtype, &b.shape, &b.sharding)
        };
        let like = |(x, y): (&Transfer, &Transfer)| {
            x.step == y.step
                && buffer(row, x.from) == buffer(other, y.from)
                && buffer(row, x.to) == buffer(other, y.to)
        };
        a.microbatch == b.microbatch
            && a.parts.len() == b.parts.len()
            && a.parts.iter().zip(b.parts).all(like)
    }

    fn show(&self, row: usize, joint: &Joint) -> String {
        let mesh = &self.program.mesh;
        let part = |p: &Transfer| {
            let b = &self.program.stages[row].buffers[p.from.index()];
            format!("{} of {} {:?} @ {}", p.step.show(mesh), b.dtype, b.shape, b.sharding.show(mesh))
        };
        joint.parts.iter().map(part).collect::<Vec<_>>().join(" + ")
    }

    /// What a wait is for, in words.
    pub(super) fn waits_for(&self, what: What) -> String {
        match what {
            What::Send { channel, .. } | What::Sent { channel, .. } => {
                let m = self.channels[channel].message;
                format!("sent {} to stage {}", m.value, m.to)
            }
            What::Receive { channel, .. } | What::Received { channel, .. } => {
                let m = self.channels[channel].message;
                format!("received {} from stage {}", m.value, m.from)
            }
            What::Start { communicator, number } | What::Wait { communicator, number } => {
                let joint = self.communicators[communicator].rows.iter().enumerate();
                let known = joint.filter_map(|(row, all)| Some((row, all.get(number)?))).next();
                known.map_or(String::new(), |(row, joint)| self.show(row, joint))
            }
        }
    }

    /// The call in which a row starts what it has in a communicator.
    pub(super) fn joins_in(&self, communicator: usize, number: usize, row: usize) -> usize {
        self.communicators[communicator].rows[row].get(number).map_or(0, |j| j.call)
    }

    /// In each run of events of messages with nothing between them all starts come first, but for those that use a buffer
    /// that was waited for in the same run.
    pub(super) fn group(&mut self) {
        for row in &mut self.rows {
            let mut out: Vec<Event> = Vec::with_capacity(row.len());
            let mut waits: Vec<Event> = Vec::new();
            for event in row.drain(..) {
                let uses = |w: &Event| w.buffer == event.buffer;
                let starts = match event.what {
                    What::Send { .. } | What::Receive { .. } => true,
                    What::Sent { .. } | What::Received { .. } | What::Start { .. } | What::Wait { .. } => {
                        false
                    }
                };
                let joint = matches!(event.what, What::Start { .. } | What::Wait { .. });
                if !event.joined || joint || starts && waits.iter().any(uses) {
                    out.append(&mut waits);
                }
                if starts || joint { out.push(event) } else { waits.push(event) }
            }
            out.append(&mut waits);
            *row = out;
        }
    }

    /// What happens in a step, if everything does.
    pub(super) fn ends(&self) -> Ends {
        let mesh = &self.program.mesh;
        let (ranks, each) = (mesh.ranks(), mesh.ranks() / mesh.rows());
        let together =
            |c: &Communicator| c.rows.first().map_or(0, Vec::len) * ranks / mesh.pieces(&c.axes).max(1);
        Ends {
            collectives: self.inside + self.communicators.iter().map(together).sum::<usize>(),
            messages: self.channels.iter().map(|c| c.sends.len() * each).sum(),
            ranks,
        }
    }
}

/// The events of a row while they are listed.
struct List {
    row: usize,
    events: Vec<Event>,
    /// What started and was not waited for: by channel, side and micro-batch.
    open: FxHashMap<(usize, bool, Option<usize>), usize>,
    /// Whether the last call ended with an event.
    clean: bool,
}

/// Which channel and which communicator has which place.
#[derive(Default)]
struct Numbers {
    channels: FxHashMap<Message, usize>,
    communicators: BTreeMap<Vec<Axis>, usize>,
}

impl Numbers {
    fn channel(&mut self, message: Message, all: &mut Vec<Channel>) -> usize {
        *self.channels.entry(message).or_insert_with(|| {
            all.push(Channel { message, sends: Vec::new(), receives: Vec::new() });
            all.len() - 1
        })
    }

    fn communicator(&mut self, axes: Vec<Axis>, rows: usize, all: &mut Vec<Communicator>) -> usize {
        *self.communicators.entry(axes.clone()).or_insert_with(|| {
            all.push(Communicator { axes, rows: std::iter::repeat_with(Vec::new).take(rows).collect() });
            all.len() - 1
        })
    }
}
