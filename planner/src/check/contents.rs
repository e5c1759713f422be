//! A message is made of the value that it names, and lands where that value is meant to be; and every state that the step
//! assigns is written wherever it is kept. What the program alone cannot tell: two values of one size look alike.

use std::collections::BTreeSet;

use ir::program::{BufferId, Instruction, Message, Posted, Program};
use ir::schedule::Kind;
use ir::{Graph, Name, Op, ShardedGraph, Unary, Value, moves_of};

/// All that is wrong with it.
pub(super) fn contents(graph: &Graph, sharded: &ShardedGraph, program: &Program, faults: &mut Vec<String>) {
    let names = Names::of(graph, sharded);
    for (row, stage) in program.stages.iter().enumerate() {
        for (s, segment) in stage.segments.iter().enumerate() {
            for (k, instruction) in segment.instructions.iter().enumerate() {
                let Some(Posted { message, buffer: id, sends, .. }) = instruction.posted() else { continue };
                let holds = stage.buffers[id.index()].value;
                // A row that adds up nothing sends its own part of a sum over rows.
                let part = sends && segment.kind == Kind::Optimizer;
                if !holds.is_some_and(|v| names.fits(graph, v, message.value, part)) {
                    let at = format!("stage {row}, segment {}, instruction {k}", stage.name_of(s));
                    faults.push(wrong(&at, message, id, holds, sends));
                }
            }
        }
    }
    states(graph, program, faults);
}

fn wrong(at: &str, message: Message, id: BufferId, holds: Option<Value>, sends: bool) -> String {
    let Message { value, from, to } = message;
    let holds = holds.map_or("something else".to_string(), |v| v.to_string());
    let does = if sends { "sends" } else { "receives" };
    format!("{at}: {does} {value} from stage {from} to stage {to}, but {id} is for {holds}")
}

/// Which values are one.
struct Names(Vec<usize>);

impl Names {
    /// A value that is only passed on shares the buffer of what it is.
    fn of(graph: &Graph, sharded: &ShardedGraph) -> Names {
        let mut first: Vec<usize> = (0..graph.values.len()).collect();
        for node in &graph.nodes {
            let ([from, ..], [to]) = (&node.args[..], &node.results[..]) else { continue };
            let same = match node.op {
                Op::Unary(Unary::Stop) | Op::Accumulate => true,
                Op::Reshard => {
                    let (a, b) = (sharded.sharding(*from), sharded.sharding(*to));
                    moves_of(graph.shape(*from), a, b, &sharded.mesh).is_empty()
                }
                Op::Input(_)
                | Op::State(_)
                | Op::Const(_)
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
                | Op::Cast
                | Op::Assign(_)
                | Op::Tap(_) => false,
            };
            if same {
                first[to.index()] = first[from.index()];
            }
        }
        Names(first)
    }

    fn same(&self, a: Value, b: Value) -> bool {
        self.0.get(a.index()).is_some_and(|first| self.0.get(b.index()) == Some(first))
    }

    /// Whether what a buffer is for may be sent as a value.
    fn fits(&self, graph: &Graph, holds: Value, value: Value, part: bool) -> bool {
        let summand = || {
            let maker = graph.nodes.iter().find(|n| n.results.contains(&value));
            maker.is_some_and(|n| n.op == Op::Add && n.args.iter().any(|v| self.same(*v, holds)))
        };
        self.same(holds, value) || part && summand()
    }
}

/// Every state that is assigned is written in each row that keeps it.
fn states(graph: &Graph, program: &Program, faults: &mut Vec<String>) {
    let assigned: BTreeSet<&Name> = graph
        .nodes
        .iter()
        .filter_map(|n| if let Op::Assign(name) = &n.op { Some(name) } else { None })
        .collect();
    for (row, stage) in program.stages.iter().enumerate() {
        let called: BTreeSet<usize> = stage.calls.iter().map(|c| c.segment).collect();
        let instructions = called.iter().filter_map(|s| stage.segments.get(*s)).flat_map(|s| &s.instructions);
        let written: BTreeSet<BufferId> = instructions.flat_map(Instruction::writes).collect();
        for (i, buffer) in stage.buffers.iter().enumerate() {
            let id = BufferId(i as u32);
            if let Some(name) =
                buffer.state.as_ref().filter(|n| assigned.contains(n) && !written.contains(&id))
            {
                faults.push(format!("stage {row}: nothing writes `{name}`, which the step assigns"));
            }
        }
    }
}
