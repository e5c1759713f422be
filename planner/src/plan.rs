//! The plan: what a program communicates, needs and takes, derived from its instructions. Field names are those of
//! `meshc plan --format json`.

use std::collections::{BTreeMap, HashMap};

use ir::program::{BufferId, Instruction, Program, Region, Segment, Stage};
use ir::schedule::Kind;
use ir::state::Role;
use ir::{Op, Part, ShardedGraph, Value, moves_of};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::cost::Lies;
use crate::schedules;
use crate::schedules::draw::draw;
use crate::schedules::figures::{Figures, figures};
use crate::timeline::actions::times;
use crate::timeline::{RowTime, Timeline, timeline};
use crate::{cost, names};

/// A plan.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The model.
    pub model: Model,
    /// The mesh's axes, outermost first.
    pub mesh: Vec<MeshAxis>,
    /// How many ranks.
    pub ranks: usize,
    /// What is communicated.
    pub comm: Vec<Comm>,
    /// Sums over it.
    pub comm_total: CommTotal,
    /// Gradients are reduced in calls of up to so many bytes; null where none are, 0: each by itself.
    pub bucket_bytes: Option<usize>,
    /// Bytes a rank.
    pub memory: Memory,
    /// Who does what when.
    pub schedule: Figures,
    /// Seconds.
    pub time: Time,
    /// The table as it runs, to scale; empty for one stage.
    #[serde(skip)]
    pub drawing: String,
    /// How each matrix product is split, and each reshard goes; empty unless a search was asked why.
    pub choices: Vec<Choice>,
    /// Values that are gathered along an axis only to be split by it elsewhere: nothing cheaper was found.
    pub full_gathers: Vec<FullGather>,
}

/// A value that is gathered whole along some axes, which then split it in another way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FullGather {
    /// What.
    pub tensor: String,
    /// How it lay.
    pub from: String,
    /// How it lies then.
    pub to: String,
    /// Bytes of what is gathered.
    pub bytes: usize,
}

/// What the model is and a step of it costs.
#[derive(Clone, Debug, Serialize)]
pub struct Model {
    /// Elements of all parameters.
    pub parameters: usize,
    /// Those that a token meets: all, in a dense model.
    pub active_parameters: usize,
    /// Model FLOPs of a step, no recompute, attention counted whole.
    pub flops_full: f64,
    /// The same with the causal half of attention.
    pub flops_causal: f64,
    /// Tokens, or rows of a model without a sequence, of a step.
    pub tokens_per_step: usize,
}

/// An axis of the mesh.
#[derive(Clone, Debug, Serialize)]
pub struct MeshAxis {
    /// Its name.
    pub axis: String,
    /// Its size.
    pub size: usize,
}

/// Calls of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comm {
    /// all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast; send: to the next stage, or any other.
    pub op: &'static str,
    /// Over these axes.
    pub axes: Vec<String>,
    /// Ranks that talk.
    pub group_size: usize,
    /// Of this stage.
    pub stage: usize,
    /// forward, backward, update or once.
    pub phase: &'static str,
    /// What is sent; of a bucket the first, and how many more.
    pub tensor: String,
    /// All that is sent.
    pub tensors: Vec<String>,
    /// Calls a rank in a step.
    pub count: usize,
    /// Bytes of a call's full tensor.
    pub bytes: usize,
    /// Bytes that a rank sends in a call.
    pub wire_bytes: f64,
    /// Seconds of a call.
    pub seconds: f64,
    /// Seconds of a call that no computation hides; of a send those that its receiver waits.
    pub exposed_seconds: f64,
}

/// Sums of communication.
#[derive(Clone, Debug, Serialize)]
pub struct CommTotal {
    /// Of a step, the largest over ranks.
    pub wire_bytes_per_rank: f64,
    /// By kind of collective, of the stage whose ranks send most.
    pub by_op: BTreeMap<&'static str, OpTotal>,
}

/// Sums of one kind of collective.
#[derive(Clone, Debug, Default, Serialize)]
pub struct OpTotal {
    /// Calls a rank in a step.
    pub count: usize,
    /// Bytes that a rank sends in a step.
    pub wire_bytes: f64,
}

/// Bytes a rank.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// The largest arena.
    pub peak_bytes: usize,
    /// Whether it fits.
    pub fits: bool,
    /// What there is; null if not known.
    pub available_bytes: Option<f64>,
    /// By stage.
    pub stages: Vec<StageMemory>,
}

/// Bytes of a rank of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageMemory {
    /// Which.
    pub stage: usize,
    /// Parameters.
    pub parameters: usize,
    /// What is kept for a step: gradients.
    pub gradients: usize,
    /// Moments and the step.
    pub optimizer: usize,
    /// What is kept from forward to backward.
    pub activations: usize,
    /// Within a segment.
    pub temporary: usize,
    /// All of it.
    pub peak: usize,
}

/// Seconds of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Time {
    /// All.
    pub step_seconds: f64,
    /// Kernels.
    pub compute_seconds: f64,
    /// Collectives that nothing hides.
    pub exposed_comm_seconds: f64,
    /// Waiting for other stages, and what else is left of the step, of the stage that has most to do.
    pub bubble_seconds: f64,
    /// By stage.
    pub stages: Vec<StageTime>,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Model FLOPs (attention whole) over what the devices could do.
    pub mfu: f64,
}

/// Seconds of a rank of a stage.
#[derive(Clone, Debug, Serialize)]
pub struct StageTime {
    /// Which.
    pub stage: usize,
    /// Kernels.
    pub compute_seconds: f64,
    /// Transfers that nothing hides.
    pub exposed_comm_seconds: f64,
    /// Waiting for what other stages have not done yet, and for the end of the step.
    pub idle_seconds: f64,
}

/// How a matrix product is split, or a reshard goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// The op: a signature, or from where to where a value is brought.
    pub op: String,
    /// What it makes.
    pub tensor: String,
    /// `gather`, `scatter` or `local` and the split of factors; or collectives.
    pub chosen: String,
    /// Bytes that a rank sends for operands and result.
    pub wire_bytes: f64,
    /// Seconds of that and of the op.
    pub seconds: f64,
    /// What else could be, all else as it was chosen.
    pub alternatives: Vec<Alternative>,
}

/// Another way to split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// Factor by factor.
    pub strategy: String,
    /// Bytes that a rank sends.
    pub wire_bytes: f64,
    /// Seconds.
    pub seconds: f64,
}

/// The plan of a compiled program.
pub fn plan(sharded: &ShardedGraph, program: &Program, cluster: &Cluster) -> Plan {
    let model = model(sharded);
    let timeline = timeline(program, cluster);
    let comm = comm(sharded, program, cluster, &timeline);
    let ranks = program.mesh.ranks();
    let step = timeline.seconds();
    let (compute, exposed) = timeline.busiest().map_or((0.0, 0.0), |row| (row.compute, row.exposed));
    // A step in which nothing runs has no rate.
    let rate = |work: f64| if step > 0.0 { work / step } else { 0.0 };
    let time = Time {
        step_seconds: step,
        compute_seconds: compute,
        exposed_comm_seconds: exposed,
        bubble_seconds: (step - compute - exposed).max(0.0),
        stages: stage_times(&timeline),
        tokens_per_second: rate(model.tokens_per_step as f64),
        mfu: rate(model.flops_full) / (ranks as f64 * cluster.rate(mixed(program))),
    };
    let comm_total = comm_total(&comm, program.stages.len());
    let axis = |(name, of): (ir::Name, Vec<ir::Axis>)| MeshAxis {
        axis: name.to_string(),
        size: program.mesh.pieces(&of),
    };
    let mesh = program.mesh.outer().into_iter().map(axis).collect();
    Plan {
        model,
        mesh,
        ranks,
        comm,
        comm_total,
        bucket_bytes: program.bucket_bytes,
        memory: memory(program, cluster),
        schedule: schedule(sharded),
        time,
        drawing: drawing(sharded, program, &timeline),
        choices: Vec::new(),
        full_gathers: full_gathers(sharded),
    }
}

impl Plan {
    /// The same, of a step in which only some of the rows that are computed count: the others fill up micro-batches.
    pub fn counting(mut self, rows: usize, of: usize) -> Plan {
        let share = rows as f64 / of.max(1) as f64;
        self.model.tokens_per_step = self.model.tokens_per_step * rows / of.max(1);
        let scaled = [&mut self.model.flops_full, &mut self.model.flops_causal];
        scaled
            .into_iter()
            .chain([&mut self.time.tokens_per_second, &mut self.time.mfu])
            .for_each(|x| *x *= share);
        self
    }
}

fn model(sharded: &ShardedGraph) -> Model {
    let graph = &sharded.graph;
    let parameters: usize =
        graph.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. })).map(|s| s.elements()).sum();
    let (mut dense, mut attention) = (0.0, 0.0);
    for node in graph.nodes.iter().filter(|n| n.mark.part == Part::Forward && n.is_product()) {
        let flops = 2.0 * node.sizes.iter().map(|n| *n as f64).product::<f64>();
        match &node.tag {
            Some(tag) if &*tag.composite == "attention" => attention += flops,
            Some(_) | None => dense += flops,
        }
    }
    // The backward pass has two products for each of the forward pass.
    let trains = graph.nodes.iter().any(|n| n.mark.part == Part::Weight);
    let passes = if trains { 3.0 } else { 1.0 };
    let tokens =
        graph.inputs.iter().map(|i| i.dims.iter().take(2).map(|(_, n)| n).product()).max().unwrap_or(0);
    let rows = |i: &ir::state::Input| !i.dtype.is_float();
    let tokens = match graph.inputs.iter().find(|i| rows(i)) {
        Some(_) => tokens,
        None => graph.inputs.iter().filter_map(|i| i.dims.first().map(|(_, n)| *n)).max().unwrap_or(0),
    };
    // The graph is that of a micro-batch.
    let microbatches = sharded.decisions.schedule.microbatches();
    let each = passes * microbatches as f64;
    Model {
        parameters,
        active_parameters: parameters,
        flops_full: each * (dense + attention),
        flops_causal: each * (dense + attention / 2.0),
        tokens_per_step: microbatches * tokens,
    }
}

/// Whether products read bf16.
fn mixed(program: &Program) -> bool {
    let narrow = |i: &Instruction| i.kernel().is_some_and(cost::bf16);
    each_segment(program).any(|(_, _, segment, _)| segment.instructions.iter().any(narrow))
}

/// The phase of a segment.
pub fn phase(kind: Kind) -> &'static str {
    match kind {
        Kind::Forward => "forward",
        Kind::Backward | Kind::Input | Kind::Weight => "backward",
        Kind::Optimizer => "update",
        Kind::Begin | Kind::Unshard | Kind::Drop | Kind::Reduce => "once",
    }
}

fn calls(stage: &Stage, segment: usize) -> usize {
    stage.calls.iter().filter(|c| c.segment == segment).count()
}

fn each_segment(program: &Program) -> impl Iterator<Item = (usize, &Stage, &Segment, usize)> {
    program.stages.iter().enumerate().flat_map(|(s, stage)| {
        stage.segments.iter().enumerate().map(move |(i, segment)| (s, stage, segment, calls(stage, i)))
    })
}

/// Sums over what a rank of the stage that sends most does.
fn comm_total(comm: &[Comm], stages: usize) -> CommTotal {
    let of = |stage: usize| {
        let mut by_op: BTreeMap<&'static str, OpTotal> = BTreeMap::new();
        for row in comm.iter().filter(|c| c.stage == stage) {
            let total = by_op.entry(row.op).or_default();
            total.count += row.count;
            total.wire_bytes += row.count as f64 * row.wire_bytes;
        }
        let wire_bytes_per_rank = by_op.values().map(|t| t.wire_bytes).sum();
        CommTotal { wire_bytes_per_rank, by_op }
    };
    let most = |a: &CommTotal, b: &CommTotal| a.wire_bytes_per_rank.total_cmp(&b.wire_bytes_per_rank);
    (0..stages)
        .rev()
        .map(of)
        .max_by(most)
        .unwrap_or(CommTotal { wire_bytes_per_rank: 0.0, by_op: BTreeMap::new() })
}

fn comm(sharded: &ShardedGraph, program: &Program, cluster: &Cluster, timeline: &Timeline) -> Vec<Comm> {
    let makers = sharded.graph.makers();
    let mut rows: Vec<Comm> = Vec::new();
    for (s, stage) in program.stages.iter().enumerate() {
        let mut joins = 0;
        for (i, segment) in stage.segments.iter().enumerate() {
            let count = calls(stage, i);
            let exposed: HashMap<u32, f64> = timeline.profiles[s][i].exposed().collect();
            for instruction in &segment.instructions {
                let tensors_of = |values: &[Option<Value>]| -> Vec<String> {
                    let name = |of: &Option<Value>| {
                        of.map_or(String::new(), |v| names::name(&sharded.graph, &makers, v))
                    };
                    values.iter().map(name).collect()
                };
                let value = |b: BufferId| stage.buffers[b.index()].value;
                let (op, axes, message, seconds, all_exposed, tensors) = match instruction {
                    Instruction::Start { token, parts } => {
                        let message = cost::call(parts, stage, &program.mesh);
                        let step = &parts[0].step;
                        let joint = parts[0].joins_stages(&program.mesh);
                        joins += usize::from(joint);
                        if message.group == 1 {
                            continue;
                        }
                        let seconds = cost::message_seconds(message, cluster);
                        let exposed = match joint {
                            true => timeline.exposed_joins.get(&(s, joins - 1)).copied(),
                            false => exposed.get(token).map(|e| e * count as f64),
                        };
                        let values: Vec<_> = parts.iter().map(|p| value(p.from).or(value(p.to))).collect();
                        (step.name(), step.axes().to_vec(), message, seconds, exposed, tensors_of(&values))
                    }
                    Instruction::Send { message, from, .. } => {
                        if program.homes[message.from] == program.homes[message.to] {
                            continue;
                        }
                        let bytes = stage.buffers[from.index()].bytes(&program.mesh);
                        let call = cost::send(bytes);
                        let exposed = timeline.exposed_messages.get(message).copied();
                        let seconds = cost::message_seconds(call, cluster);
                        let axes = program.mesh.pipeline().into_iter().collect();
                        ("send", axes, call, seconds, exposed, tensors_of(&[Some(message.value)]))
                    }
                    Instruction::Feed { .. }
                    | Instruction::Launch { .. }
                    | Instruction::Local { .. }
                    | Instruction::Wait { .. }
                    | Instruction::Sent { .. }
                    | Instruction::Receive { .. }
                    | Instruction::Received { .. }
                    | Instruction::Assign { .. }
                    | Instruction::Tap { .. } => continue,
                };
                rows.push(Comm {
                    op,
                    axes: program.mesh.show(&axes).split('.').map(str::to_string).collect(),
                    group_size: message.group,
                    stage: s,
                    phase: phase(segment.kind),
                    tensor: match &tensors[..] {
                        [one] => one.clone(),
                        several => format!("{} and {} more", several[0], several.len() - 1),
                    },
                    tensors,
                    count,
                    bytes: message.bytes,
                    wire_bytes: message.wire_bytes,
                    seconds,
                    exposed_seconds: all_exposed.map_or(seconds, |e| e / count.max(1) as f64),
                });
            }
        }
    }
    rows
}

fn memory(program: &Program, cluster: &Cluster) -> Memory {
    let stages: Vec<StageMemory> = program
        .stages
        .iter()
        .enumerate()
        .map(|(s, stage)| {
            let [state, step, slot, scratch] = stage.sizes;
            let is_parameter = |name: &ir::Name| {
                program.states.iter().any(|s| s.name == *name && matches!(s.role, Role::Parameter { .. }))
            };
            let parameters = stage
                .buffers
                .iter()
                .filter(|b| b.region == Region::State && b.state.as_ref().is_some_and(is_parameter))
                .map(|b| b.bytes(&program.mesh).next_multiple_of(ir::program::ALIGN))
                .sum();
            StageMemory {
                stage: s,
                parameters,
                gradients: step,
                optimizer: state - parameters,
                activations: slot * stage.slots,
                temporary: scratch,
                peak: stage.arena_bytes(),
            }
        })
        .collect();
    let peak_bytes = stages.iter().map(|s| s.peak).max().unwrap_or(0);
    let fits = cluster.memory.is_none_or(|m| peak_bytes as f64 <= m);
    Memory { peak_bytes, fits, available_bytes: cluster.memory, stages }
}

fn stage_times(timeline: &Timeline) -> Vec<StageTime> {
    let step = timeline.seconds();
    let of = |(stage, row): (usize, &RowTime)| StageTime {
        stage,
        compute_seconds: row.compute,
        exposed_comm_seconds: row.exposed,
        idle_seconds: (step - row.compute - row.exposed).max(0.0),
    };
    timeline.rows.iter().enumerate().map(of).collect()
}

/// So many actions of all rows are drawn; more would fill screens.
const DRAWN: usize = 1024;
/// Columns of the drawing.
const WIDTH: usize = 100;

fn drawing(sharded: &ShardedGraph, program: &Program, timeline: &Timeline) -> String {
    let schedule = &sharded.decisions.schedule;
    let actions: usize = schedule.rows.iter().map(Vec::len).sum();
    if schedule.stages() < 2 {
        return String::new();
    }
    if actions > DRAWN {
        return format!("{actions} actions are too many to draw; --format json has the table\n");
    }
    draw(schedule, &times(program, schedule, timeline), WIDTH - 2)
}

fn schedule(sharded: &ShardedGraph) -> Figures {
    let wrong = |stuck| unreachable!("a table that was lowered runs: {stuck}");
    let schedule = &sharded.decisions.schedule;
    figures(schedules::name_of(schedule), schedule).unwrap_or_else(wrong)
}

fn full_gathers(sharded: &ShardedGraph) -> Vec<FullGather> {
    let (graph, mesh) = (&sharded.graph, &sharded.mesh);
    let makers = graph.makers();
    let mut out = Vec::new();
    for node in graph.nodes.iter().filter(|n| n.op == Op::Reshard) {
        let to = sharded.sharding(node.results[0]);
        // A copy that is made from a copy comes from where the first was.
        let (mut source, mut way) = (node.args[0], vec![to]);
        loop {
            way.push(sharded.sharding(source));
            let maker = &graph.nodes[makers[source.index()]];
            match maker.op == Op::Reshard {
                true => source = maker.args[0],
                false => break,
            }
        }
        let mut at = way[way.len() - 1].clone();
        let from = at.show(mesh);
        for goal in way.iter().rev().skip(1) {
            for step in moves_of(graph.shape(source), &at, goal, mesh) {
                at = step.after(&at);
                if step.name() == "all_gather" && step.axes().iter().any(|a| to.axes().any(|b| b == *a)) {
                    let ty = graph.ty(source);
                    let bytes = Lies { shape: &ty.shape, dtype: ty.dtype, sharding: &at }.bytes(mesh);
                    let tensor = names::name(graph, &makers, source);
                    out.push(FullGather { tensor, from: from.clone(), to: to.show(mesh), bytes });
                }
            }
        }
    }
    out
}

/// The operations of all matrix products that run, on the rank with the largest pieces.
pub fn contract_flops(program: &Program) -> f64 {
    let of = |i: &Instruction| i.kernel().map_or(0.0, |kernel| cost::product_flops(kernel, &program.mesh));
    each_segment(program).map(|(_, _, s, n)| n as f64 * s.instructions.iter().map(of).sum::<f64>()).sum()
}
