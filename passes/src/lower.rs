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

mod kernels;

use ir::program::{Buffer, BufferId, Call, Instruction, Program, Region, Segment, Stage};
use ir::schedule::{Action, Kind};
use ir::{Node, Op, Part, ShardedGraph, Unary, Value, moves_of};

/// Lowers a graph of one stage.
pub fn lower(sharded: &ShardedGraph) -> Program {
    let graph = &sharded.graph;
    let mut lowering = Lowering {
        sharded,
        kinds: vec![Vec::new(); graph.values.len()],
        buffers: Vec::new(),
        of_value: vec![None; graph.values.len()],
        microbatches: sharded.decisions.schedule.microbatches(),
        segments: [Kind::Begin, Kind::Forward, Kind::Backward, Kind::Optimizer]
            .map(|kind| Segment { kind, instructions: Vec::new() })
            .to_vec(),
        tokens: 0,
        assigns: Vec::new(),
    };
    lowering.find_uses();
    for (i, node) in graph.nodes.iter().enumerate() {
        lowering.node(i, node);
    }
    let Lowering { buffers, mut segments, assigns, microbatches, .. } = lowering;
    // A state keeps what it holds until the end of its segment, whoever reads it there.
    for (kind, assign) in assigns {
        segments.iter_mut().filter(|s| s.kind == kind).for_each(|s| s.instructions.push(assign.clone()));
    }
    let segments: Vec<Segment> = segments.into_iter().filter(|s| !s.instructions.is_empty()).collect();
    let row = sharded.decisions.schedule.rows.first();
    let call = |action: &Action| {
        let segment = segments.iter().position(|s| s.kind == action.kind)?;
        Some(Call { segment, microbatch: action.microbatch, slot: 0 })
    };
    let begin = Action { stage: 0, kind: Kind::Begin, microbatch: None };
    let calls = [&begin].into_iter().chain(row.into_iter().flatten()).filter_map(call).collect();
    let stage = Stage { buffers, segments, calls, slots: 1, sizes: [0; 4] };
    Program {
        mesh: sharded.mesh.clone(),
        inputs: graph.inputs.clone(),
        states: graph.states.clone(),
        microbatches,
        bucket_bytes: sharded.decisions.bucket_bytes,
        stages: vec![stage],
    }
}

struct Lowering<'a> {
    sharded: &'a ShardedGraph,
    /// For each value the segments in which it is made or used.
    kinds: Vec<Vec<Kind>>,
    buffers: Vec<Buffer>,
    of_value: Vec<Option<BufferId>>,
    microbatches: usize,
    segments: Vec<Segment>,
    tokens: u32,
    assigns: Vec<(Kind, Instruction)>,
}

fn kind(node: &Node) -> Kind {
    match node.mark.part {
        Part::Forward => Kind::Forward,
        Part::Input | Part::Weight => Kind::Backward,
        Part::Update => Kind::Optimizer,
    }
}

/// Whether the result is the operand itself, so that both share a buffer. With one micro-batch a sum over
/// micro-batches is one.
fn is_alias(node: &Node, microbatches: usize) -> bool {
    let same = node.signature.args.first() == node.signature.results.first();
    let copies = node.op == Op::Unary(Unary::Stop) || node.op == Op::Accumulate && microbatches == 1;
    same && copies
}

impl Lowering<'_> {
    fn find_uses(&mut self) {
        let graph = &self.sharded.graph;
        let mut root: Vec<usize> = (0..graph.values.len()).collect();
        for node in &graph.nodes {
            if is_alias(node, self.microbatches) {
                root[node.results[0].index()] = root[node.args[0].index()];
            }
            for v in node.args.iter().chain(&node.results) {
                self.kinds[root[v.index()]].push(kind(node));
            }
        }
        for (v, r) in root.into_iter().enumerate() {
            self.kinds[v] = self.kinds[r].clone();
        }
    }

    fn region(&self, value: Value) -> Region {
        let kinds = &self.kinds[value.index()];
        let all = |kind: Kind| kinds.iter().all(|k| *k == kind);
        if kinds.first().is_none_or(|first| all(*first)) {
            Region::Scratch
        } else if kinds.contains(&Kind::Optimizer) {
            Region::Step
        } else {
            Region::Slot
        }
    }

    fn buffer(&mut self, value: Value) -> BufferId {
        let ty = self.sharded.graph.ty(value);
        let buffer = Buffer {
            state: None,
            value: Some(value),
            dtype: ty.dtype,
            shape: ty.shape.clone(),
            sharding: self.sharded.sharding(value).clone(),
            region: self.region(value),
            offset: None,
        };
        let id = self.push_buffer(buffer);
        self.of_value[value.index()] = Some(id);
        id
    }

    fn push_buffer(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId((self.buffers.len() - 1) as u32)
    }

    fn at(&self, value: Value) -> BufferId {
        self.of_value[value.index()].unwrap_or_else(|| panic!("{value} is used before it is lowered"))
    }

    fn emit(&mut self, kind: Kind, instruction: Instruction) {
        let segment = self.segments.iter_mut().find(|s| s.kind == kind);
        segment.into_iter().for_each(|s| s.instructions.push(instruction.clone()));
    }

    fn node(&mut self, i: usize, node: &Node) {
        let kind = kind(node);
        match &node.op {
            Op::State(name) => {
                let id = self.buffer(node.results[0]);
                self.buffers[id.index()].region = Region::State;
                self.buffers[id.index()].state = Some(name.clone());
            }
            Op::Input(name) => {
                let to = self.buffer(node.results[0]);
                self.emit(kind, Instruction::Feed { input: name.clone(), to });
            }
            Op::Assign(name) => {
                let from = self.kept_apart(kind, self.at(node.args[0]));
                let to = self.buffers.iter().position(|b| b.state.as_ref() == Some(name));
                let to = to.map(|i| BufferId(i as u32)).unwrap_or_else(|| self.state_never_read(name, from));
                self.assigns.push((kind, Instruction::Assign { from, to }));
            }
            Op::Tap(name) => {
                let from = self.at(node.args[0]);
                self.emit(kind, Instruction::Tap { name: name.clone(), from });
            }
            Op::Reshard => self.reshard(kind, node.args[0], node.results[0]),
            _ if is_alias(node, self.microbatches) => {
                self.of_value[node.results[0].index()] = self.of_value[node.args[0].index()]
            }
            Op::Accumulate => {
                let from = self.at(node.args[0]);
                let sum = self.buffer(node.results[0]);
                self.buffers[sum.index()].region = Region::Step;
                let like = &self.buffers[sum.index()];
                let (zero, add) = (kernels::zero(like), kernels::add(like));
                self.emit(
                    Kind::Begin,
                    Instruction::Launch { kernel: zero, reads: vec![], writes: vec![sum] },
                );
                self.emit(
                    kind,
                    Instruction::Launch { kernel: add, reads: vec![sum, from], writes: vec![sum] },
                );
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
                let (kernel, reads) = kernels::kernel(self.sharded, i);
                let reads = reads.into_iter().map(|v| self.at(v)).collect();
                let to = self.buffer(node.results[0]);
                self.emit(kind, Instruction::Launch { kernel, reads, writes: vec![to] });
            }
        }
    }

    /// What a state holds is copied before it is assigned to another: assigns run one after the other, and that state
    /// may be assigned too.
    fn kept_apart(&mut self, kind: Kind, from: BufferId) -> BufferId {
        let buffer = self.buffers[from.index()].clone();
        if buffer.region != Region::State {
            return from;
        }
        let kernel = kernels::copy(&buffer);
        let to = self.push_buffer(Buffer { state: None, value: None, region: Region::Scratch, ..buffer });
        self.emit(kind, Instruction::Launch { kernel, reads: vec![from], writes: vec![to] });
        to
    }

    /// A state that is only assigned has no value of its own: its buffer is like what it is assigned.
    fn state_never_read(&mut self, name: &ir::Name, from: BufferId) -> BufferId {
        let like = self.buffers[from.index()].clone();
        self.push_buffer(Buffer { state: Some(name.clone()), value: None, region: Region::State, ..like })
    }

    fn reshard(&mut self, kind: Kind, from: Value, to: Value) {
        let (start, goal) = (self.sharded.sharding(from).clone(), self.sharded.sharding(to).clone());
        let shape = self.sharded.graph.shape(from);
        let steps = moves_of(shape, &start, &goal, &self.sharded.mesh);
        let mut at = self.at(from);
        let mut sharding = start;
        for (i, step) in steps.iter().enumerate() {
            sharding = step.after(&sharding);
            let next = if i + 1 == steps.len() {
                self.buffer(to)
            } else {
                let like = self.buffers[at.index()].clone();
                let (state, value, region) = (None, None, Region::Scratch);
                self.push_buffer(Buffer { state, value, region, sharding: sharding.clone(), ..like })
            };
            if step.is_collective() {
                let token = self.tokens;
                self.tokens += 1;
                self.emit(kind, Instruction::start(token, step.clone(), at, next));
                self.emit(kind, Instruction::Wait { token });
            } else {
                self.emit(kind, Instruction::Local { step: step.clone(), from: at, to: next });
            }
            at = next;
        }
        if steps.is_empty() {
            self.of_value[to.index()] = Some(at);
        }
    }
}
