//! From a graph whose operands agree to a program: one launch a node, a start and a wait for each collective of a
//! reshard, a buffer for each value. Nothing is fused and no buffer has an offset yet.
//!
//! A value that is used in its own segment only is scratch; what the backward needs of the forward is in the slot of
//! its micro-batch; what the update needs of both is of the step. A sum over several micro-batches is set to 0 in a
//! segment that runs first, and each micro-batch adds to it.
//!
//! ```text
//! v2 = einsum v0, v1 : m k, k n -> m n @ [_, _] partial(tp)     launch b0, b1 -> b2 contract(1.0) [...]
//! v3 = reshard v2 : ... @ [_, _]                                t0 = start all_reduce(tp) b2 -> b3
//!                                                               wait t0
//! ```

mod calls;
mod crossing;
mod kernels;
mod sites;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ir::composite::ONE_KERNEL;
use ir::kernel::Kernel;
use ir::program::{Buffer, BufferId, Buffers, Duty, Instruction, Message, Program, Region, Segment, Stage};
use ir::schedule::Kind;
use ir::{Graph, Name, Node, Op, ShardedGraph, Unary, Value, moves_of};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use kernels::{Kernels, Plain};
use sites::{Crossing, Site, Sites, sites};

/// Lowers a graph, by the table of its decisions.
pub fn lower(sharded: &ShardedGraph) -> Program {
    let graph = &sharded.graph;
    let schedule = &sharded.decisions.schedule;
    let microbatches = schedule.microbatches();
    let sites = sites(graph, schedule);
    let rows = (0..sites.first.len()).map(|row| Row::new(&sites, row)).collect();
    let mut lowering = Lowering {
        sharded,
        root: roots(sharded, microbatches),
        inside: inside(graph),
        sites,
        rows,
        microbatches,
        uses: FxHashMap::default(),
        crossed: BTreeSet::new(),
        brought: BTreeSet::new(),
        at: FxHashMap::default(),
        pending: FxHashMap::default(),
        kernels: Kernels::default(),
        assigns: Vec::new(),
    };
    lowering.find_uses();
    for (i, node) in graph.nodes.iter().enumerate() {
        lowering.cross(i);
        for site in lowering.sites.of[i].clone() {
            lowering.node(i, node, site);
        }
    }
    // A state keeps what it holds until the end of its segment, whoever reads it there.
    for (site, assign) in std::mem::take(&mut lowering.assigns) {
        lowering.emit(site, Duty::Work, assign);
    }
    let homes = lowering.sites.homes.clone();
    let mut stages: Vec<Stage> = lowering.rows.into_iter().map(Row::stage).collect();
    calls::calls(schedule, &homes, &mut stages);
    Program {
        mesh: sharded.mesh.clone(),
        inputs: graph.inputs.clone(),
        states: graph.states.clone(),
        microbatches,
        bucket_bytes: sharded.decisions.bucket_bytes,
        homes,
        stages,
    }
}

/// By value the value whose buffer it shares.
fn roots(sharded: &ShardedGraph, microbatches: usize) -> Vec<usize> {
    let graph = &sharded.graph;
    let mut root: Vec<usize> = (0..graph.values.len()).collect();
    for node in graph.nodes.iter().filter(|n| is_alias(n, microbatches)) {
        root[node.results[0].index()] = root[node.args[0].index()];
    }
    root
}

/// By value the instance of a composite that can run as one kernel.
fn inside(graph: &Graph) -> Vec<Option<u32>> {
    let mut inside = vec![None; graph.values.len()];
    for node in &graph.nodes {
        let tag = node.tag.as_ref().filter(|tag| ONE_KERNEL.contains(&&*tag.composite));
        node.results.iter().for_each(|v| inside[v.index()] = tag.map(|tag| tag.instance));
    }
    inside
}

/// Whether the result is the operand itself, so that both share a buffer. With one micro-batch a sum over
/// micro-batches is one.
fn is_alias(node: &Node, microbatches: usize) -> bool {
    let same = node.signature.args.first() == node.signature.results.first();
    let copies = node.op == Op::Unary(Unary::Stop) || node.op == Op::Accumulate && microbatches == 1;
    same && copies
}

/// What becomes a stage of the program.
struct Row {
    buffers: Vec<Buffer>,
    segments: Vec<Segment>,
    states: BTreeMap<Name, BufferId>,
    tokens: u32,
}

impl Row {
    /// With a segment for everything that its stages may do, in the order in which a micro-batch goes through them.
    fn new(sites: &Sites, row: usize) -> Row {
        let stages = (0..sites.homes.len()).filter(|k| sites.homes[*k] == row);
        let mut segments = Vec::new();
        let mut add = |stage, kind, duty| {
            segments.push(Segment { stage, kind, duty, instructions: Vec::new() });
        };
        add(sites.first[row], Kind::Begin, Duty::Work);
        for stage in stages {
            for (kind, duty) in [
                (Kind::Forward, Duty::Post),
                (Kind::Forward, Duty::Work),
                (Kind::Forward, Duty::Clear),
                (Kind::Backward, Duty::Post),
                (Kind::Backward, Duty::Work),
                (Kind::Input, Duty::Post),
                (Kind::Input, Duty::Work),
                (Kind::Weight, Duty::Post),
                (Kind::Weight, Duty::Work),
                (Kind::Backward, Duty::Clear),
                (Kind::Input, Duty::Clear),
                (Kind::Weight, Duty::Clear),
            ] {
                add(stage, kind, duty);
            }
        }
        add(sites.first[row], Kind::Optimizer, Duty::Work);
        Row { buffers: Vec::new(), segments, states: BTreeMap::new(), tokens: 0 }
    }

    fn stage(self) -> Stage {
        let mut segments: Vec<Segment> =
            self.segments.into_iter().filter(|s| !s.instructions.is_empty()).collect();
        // What a forward sends is waited for before its stage is ready for a backward; where that receives nothing, late.
        let backward = |s: &&Segment| s.duty == Duty::Post && matches!(s.kind, Kind::Backward | Kind::Input);
        let receive: BTreeSet<usize> = segments.iter().filter(backward).map(|s| s.stage).collect();
        let late =
            |s: &Segment| (s.kind, s.duty) == (Kind::Forward, Duty::Clear) && !receive.contains(&s.stage);
        segments.sort_by_key(|s| s.kind == Kind::Optimizer || late(s));
        segments.sort_by_key(|s| s.kind == Kind::Optimizer);
        Stage { buffers: self.buffers, segments, calls: Vec::new(), slots: 1, sizes: [0; 4] }
    }

    fn push(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId((self.buffers.len() - 1) as u32)
    }

    fn token(&mut self) -> u32 {
        self.tokens += 1;
        self.tokens - 1
    }
}

struct Lowering<'a> {
    sharded: &'a ShardedGraph,
    /// By value that whose buffer it shares.
    root: Vec<usize>,
    /// By value the composite that it is made in, if that can run as one kernel.
    inside: Vec<Option<u32>>,
    sites: Sites,
    rows: Vec<Row>,
    microbatches: usize,
    /// For each value in a stage the kinds of segments in which it is made or used.
    uses: FxHashMap<(usize, usize), SmallVec<[Kind; 16]>>,
    /// What a stage sends or receives: it outlives its segment.
    crossed: BTreeSet<(usize, usize)>,
    /// What the update was brought so far.
    brought: BTreeSet<Value>,
    /// Where a value lies in a stage.
    at: FxHashMap<(Value, usize), BufferId>,
    /// What a stage receives and did not use yet: its token, and in which kind of segment it comes.
    pending: FxHashMap<(Value, usize), (u32, Kind)>,
    kernels: Kernels<'a>,
    assigns: Vec<(Site, Instruction)>,
}

impl Lowering<'_> {
    fn find_uses(&mut self) {
        let graph = &self.sharded.graph;
        let mut brought: BTreeSet<Value> = BTreeSet::new();
        for (i, node) in graph.nodes.iter().enumerate() {
            for crossing in self.sites.crossings.get(&i).into_iter().flatten() {
                let from: &[Value] = match crossing {
                    Crossing::Bring(v) => &[*v],
                    Crossing::Sum => &node.args,
                };
                for v in from {
                    let stage = self.origin(*v, &brought);
                    self.uses.entry((self.root[v.index()], stage)).or_default().push(Kind::Optimizer);
                }
                if let Crossing::Bring(v) = crossing {
                    brought.insert(*v);
                }
            }
            for (stage, kind) in &self.sites.of[i] {
                for v in &node.args {
                    let home = self.home(*v, *stage, *kind, &brought);
                    self.uses.entry((self.root[v.index()], home)).or_default().push(*kind);
                }
                for v in &node.results {
                    self.uses.entry((self.root[v.index()], *stage)).or_default().push(*kind);
                }
            }
        }
        for (v, to) in &self.sites.sends {
            let from = self.sites.of[self.maker(*v)].iter().map(|(stage, _)| *stage);
            for stage in from.chain(to.iter().map(|(stage, _)| *stage)) {
                self.crossed.insert((self.root[v.index()], stage));
            }
        }
    }

    /// In which stage of its row a value lies for who uses it in a stage. What the update was brought has a place of its own,
    /// behind those of all stages.
    fn home(&self, v: Value, stage: usize, kind: Kind, brought: &BTreeSet<Value>) -> usize {
        let row = self.sites.homes[stage];
        if kind != Kind::Optimizer {
            return stage;
        }
        if brought.contains(&v) {
            return self.sites.homes.len() + row;
        }
        let maker = self.maker(v);
        let mut there = self.sites.of[maker].iter().map(|(s, _)| *s);
        there.find(|s| self.sites.homes[*s] == row).unwrap_or(stage)
    }

    /// The stage that has a value first, of those that have it by themselves.
    fn origin(&self, v: Value, brought: &BTreeSet<Value>) -> usize {
        let first = self.sites.of[self.maker(v)].iter().map(|(s, _)| *s).min_by_key(|s| self.sites.homes[*s]);
        let first = first.unwrap_or(0);
        if brought.contains(&v) { self.sites.first[self.sites.homes[first]] } else { first }
    }

    fn maker(&self, v: Value) -> usize {
        self.sites.makers[v.index()]
    }

    fn row(&mut self, stage: usize) -> &mut Row {
        &mut self.rows[self.sites.homes[stage]]
    }

    fn region(&self, value: Value, stage: usize) -> Region {
        let key = (self.root[value.index()], stage);
        let kinds = self.uses.get(&key).map_or(&[][..], SmallVec::as_slice);
        if kinds.contains(&Kind::Optimizer) && kinds.iter().any(|k| *k != Kind::Optimizer) {
            Region::Step
        } else if self.crossed.contains(&key) || kinds.iter().any(|k| *k != kinds[0]) {
            Region::Slot
        } else {
            Region::Scratch
        }
    }

    /// A buffer like a value, for something of that shape.
    fn like(&self, value: Value, region: Region) -> Buffer {
        let ty = self.sharded.graph.ty(value);
        Buffer {
            state: None,
            value: Some(value),
            inside: self.inside[value.index()],
            dtype: ty.dtype,
            shape: ty.shape.clone(),
            sharding: self.sharded.sharding(value).clone(),
            region,
            offset: None,
        }
    }

    fn buffer(&mut self, value: Value, stage: usize) -> BufferId {
        let buffer = self.like(value, self.region(value, stage));
        let id = self.row(stage).push(buffer);
        self.at.insert((value, stage), id);
        id
    }

    /// Where a value lies for who uses it in a stage; what was sent there is waited for at its first use.
    fn at(&mut self, v: Value, (stage, kind): Site) -> BufferId {
        let home = self.home(v, stage, kind, &self.brought);
        let known = self.at.get(&(v, home)).copied();
        let id = known.unwrap_or_else(|| panic!("{v} is used in stage {stage} before it is there"));
        if let Some((token, kind)) = self.pending.remove(&(v, home)) {
            self.emit((home, kind), Duty::Work, Instruction::Received { token, to: id });
        }
        id
    }

    fn emit(&mut self, (stage, kind): Site, duty: Duty, instruction: Instruction) {
        let row = self.row(stage);
        let place = row.segments.iter().position(|s| (s.stage, s.kind, s.duty) == (stage, kind, duty));
        let place = place.unwrap_or_else(|| panic!("stage {stage} has no segment {kind:?}"));
        row.segments[place].instructions.push(instruction);
    }

    fn launch(&mut self, site: Site, kernel: Arc<Kernel>, reads: Buffers, to: BufferId) {
        let launch = Instruction::Launch { kernel, reads, writes: smallvec![to] };
        self.emit(site, Duty::Work, launch);
    }

    fn node(&mut self, i: usize, node: &Node, site: Site) {
        let (stage, kind) = site;
        match &node.op {
            Op::State(name) => {
                let known = self.row(stage).states.get(name).copied();
                let id = known.unwrap_or_else(|| {
                    let id = self.buffer(node.results[0], stage);
                    let row = self.row(stage);
                    row.buffers[id.index()].region = Region::State;
                    row.buffers[id.index()].state = Some(name.clone());
                    row.states.insert(name.clone(), id);
                    id
                });
                self.at.insert((node.results[0], stage), id);
            }
            Op::Input(name) => {
                let to = self.buffer(node.results[0], stage);
                self.emit(site, Duty::Work, Instruction::Feed { input: name.clone(), to });
            }
            Op::Assign(name) => {
                let from = self.at(node.args[0], site);
                let from = self.kept_apart(site, from);
                let known = self.row(stage).states.get(name).copied();
                let to = known.unwrap_or_else(|| self.state_never_read(name, stage, from));
                self.assigns.push((site, Instruction::Assign { from, to }));
            }
            Op::Tap(name) => {
                let from = self.at(node.args[0], site);
                self.emit(site, Duty::Work, Instruction::Tap { name: name.clone(), from });
            }
            Op::Reshard => self.reshard(site, node.args[0], node.results[0]),
            Op::Add if self.sums(i) => {}
            _ if is_alias(node, self.microbatches) => {
                let id = self.at(node.args[0], site);
                self.at.insert((node.results[0], stage), id);
            }
            Op::Accumulate => {
                let from = self.at(node.args[0], site);
                let sum = self.buffer(node.results[0], stage);
                let row = self.row(stage);
                row.buffers[sum.index()].region = Region::Step;
                let like = &row.buffers[sum.index()];
                let like = like.clone();
                let (zero, add) =
                    (self.kernels.plain(Plain::Zero, &like), self.kernels.plain(Plain::Add, &like));
                let begin = (self.sites.first[self.sites.homes[stage]], Kind::Begin);
                self.launch(begin, zero, smallvec![], sum);
                self.launch(site, add, smallvec![sum, from], sum);
            }
            Op::Const(_)
            | Op::Iota
            | Op::Random(_)
            | Op::Einsum { .. }
            | Op::Add
            | Op::ReduceMax
            | Op::TopK
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Select
            | Op::Gather
            | Op::Scatter
            | Op::Cast => {
                let (kernel, reads) = self.kernels.of(self.sharded, i);
                let kernel = kernel.clone();
                let reads: SmallVec<[Value; 4]> = reads.iter().map(|k| node.args[*k]).collect();
                let reads = reads.into_iter().map(|v| self.at(v, site)).collect();
                let to = self.buffer(node.results[0], stage);
                self.launch(site, kernel, reads, to);
            }
        }
        if kind != Kind::Optimizer {
            node.results.iter().for_each(|v| self.send(*v, site));
        }
    }

    /// Sends a value to the stages that use it.
    fn send(&mut self, value: Value, site: Site) {
        let (stage, _) = site;
        for (to, kind) in self.sites.sends.get(&value).cloned().unwrap_or_default() {
            let message = Message { value, from: stage, to };
            let from = self.at(value, site);
            let token = self.row(stage).token();
            self.emit(site, Duty::Work, Instruction::Send { token, message, from });
            // What a backward receives comes late: its wait stands behind the backward of the sender, too.
            let backward = if self.sites.split[stage] { Kind::Input } else { Kind::Backward };
            let late = site.1 == Kind::Forward && kind != Kind::Forward;
            let clear = if late { (stage, backward) } else { site };
            self.emit(clear, Duty::Clear, Instruction::Sent { token, from });
            let there = self.buffer(value, to);
            let token = self.row(to).token();
            self.emit((to, kind), Duty::Post, Instruction::Receive { token, message, to: there });
            self.pending.insert((value, to), (token, kind));
        }
    }

    /// What a state holds is copied before it is assigned to another: assigns run one after the other, and that state
    /// may be assigned too.
    fn kept_apart(&mut self, site: Site, from: BufferId) -> BufferId {
        let buffer = self.row(site.0).buffers[from.index()].clone();
        if buffer.region != Region::State {
            return from;
        }
        let kernel = self.kernels.plain(Plain::Copy, &buffer);
        let to = self.row(site.0).push(Buffer {
            state: None,
            value: None,
            inside: None,
            region: Region::Scratch,
            ..buffer
        });
        self.launch(site, kernel, smallvec![from], to);
        to
    }

    /// A state that is only assigned has no value of its own: its buffer is like what it is assigned.
    fn state_never_read(&mut self, name: &Name, stage: usize, from: BufferId) -> BufferId {
        let row = self.row(stage);
        let like = row.buffers[from.index()].clone();
        let id = row.push(Buffer { state: Some(name.clone()), value: None, region: Region::State, ..like });
        row.states.insert(name.clone(), id);
        id
    }

    fn reshard(&mut self, site: Site, from: Value, to: Value) {
        let (stage, _) = site;
        let (start, goal) = (self.sharded.sharding(from).clone(), self.sharded.sharding(to).clone());
        let shape = self.sharded.graph.shape(from);
        let steps = moves_of(shape, &start, &goal, &self.sharded.mesh);
        let mut at = self.at(from, site);
        let mut sharding = start;
        for (i, step) in steps.iter().enumerate() {
            sharding = step.after(&sharding);
            let next = if i + 1 == steps.len() {
                self.buffer(to, stage)
            } else {
                let row = self.row(stage);
                let like = row.buffers[at.index()].clone();
                let (state, value, region) = (None, None, Region::Scratch);
                row.push(Buffer { state, value, region, sharding: sharding.clone(), ..like })
            };
            if step.is_collective() {
                let token = self.row(stage).token();
                self.emit(site, Duty::Work, Instruction::start(token, step.clone(), at, next));
                self.emit(site, Duty::Work, Instruction::Wait { token });
            } else {
                self.emit(site, Duty::Work, Instruction::Local { step: step.clone(), from: at, to: next });
            }
            at = next;
        }
        if steps.is_empty() {
            self.at.insert((to, stage), at);
        }
    }
}
