//! Where the time of steps went, as a table by kind of instruction and a list of the slowest instructions.

use std::collections::HashMap;

use ir::kernel::Body;
use ir::program::{Instruction, Program};
use passes::Compiled;
use planner::render::{self, Table};
use planner::{names, units};
use runtime::local::{Local, Profile, Spent};

use crate::failure::Failure;
use crate::machine;

/// How many of the slowest instructions are listed.
const SLOWEST: usize = 12;

/// Clocks of steps, and what they are held against.
pub(crate) struct Watch {
    /// The clocks.
    pub profile: Profile,
    steps: usize,
    /// Of all steps together.
    seconds: f64,
    product_rate: f64,
    copy_rate: f64,
}

/// Times and work of instructions of one kind.
#[derive(Default)]
struct Sum {
    kind: &'static str,
    runs: u64,
    seconds: f64,
    flops: f64,
    bytes: f64,
}

impl Sum {
    fn add(&mut self, s: &Spent) {
        self.runs += s.runs;
        self.seconds += s.seconds;
        self.flops += s.flops;
        self.bytes += s.bytes;
    }
}

impl Watch {
    /// Measures what a core can do, before anything else runs.
    pub(crate) fn new(local: &Local) -> Result<Watch, Failure> {
        let (product_rate, copy_rate) = (machine::product_rate()?, machine::copy_rate());
        Ok(Watch { profile: local.profile(), steps: 0, seconds: 0.0, product_rate, copy_rate })
    }

    /// A step ended.
    pub(crate) fn stepped(&mut self, seconds: f64) {
        self.steps += 1;
        self.seconds += seconds;
    }

    /// The table. Times are of a step, summed over `workers`.
    pub(crate) fn text(&self, local: &Local, compiled: &Compiled, workers: usize) -> String {
        let program = &compiled.program;
        let spent = local.spent(&self.profile);
        let steps = self.steps.max(1) as f64;
        let (step, all) = (self.seconds / steps, self.seconds / steps * workers as f64);
        let mut out = format!(
            "time of {} on {}: {} a step; a core: products {}/s, copies {}/s\n\n",
            units::many(self.steps, "step"),
            units::many(workers, "worker"),
            units::seconds(step),
            units::count(self.product_rate, "FLOP"),
            units::bytes(self.copy_rate)
        );
        let mut table =
            render::table(&["instruction", "runs", "time a step", "share", "FLOP/s", "bytes/s", "of roof"]);
        for sum in sums(program, &spent) {
            table.add_row(self.cells(sum.kind.to_string(), &sum, steps, all));
        }
        let working = spent.iter().map(|s| s.seconds).sum::<f64>() / steps;
        let waiting = (all - working).max(0.0);
        let mut last =
            vec!["waiting".to_string(), String::new(), units::seconds(waiting), share(waiting, all)];
        last.resize(7, String::new());
        table.add_row(last);
        out += &render::show(table, 1);
        out += "\nslowest instructions\n";
        out += &render::show(self.slowest(compiled, &spent, steps, all), 2);
        out
    }

    /// The slowest instructions. Those that do the same work, as in each layer, are one line.
    fn slowest(&self, compiled: &Compiled, spent: &[Spent], steps: f64, all: f64) -> Table {
        let graph = &compiled.sharded.graph;
        let makers = graph.makers();
        let mut alike: Vec<(String, Spent, usize, Sum)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for s in spent.iter().filter(|s| s.runs > 0) {
            let stage = &compiled.program.stages[s.row];
            let instruction = &stage.segments[s.segment].instructions[s.instruction];
            let kind = kind(instruction);
            let shown = format!("{} {kind} {}", stage.name_of(s.segment), loops(instruction));
            let work = format!("{shown} {} {}", s.flops / s.runs as f64, s.bytes / s.runs as f64);
            let at = *places.entry(work).or_insert(alike.len());
            if at == alike.len() {
                alike.push((shown.trim_end().to_string(), *s, 0, Sum { kind, ..Sum::default() }));
            }
            let (_, _, n, sum) = &mut alike[at];
            *n += 1;
            sum.add(s);
        }
        alike.sort_by(|a, b| b.3.seconds.total_cmp(&a.3.seconds));
        let header = ["of", "instruction", "runs", "time a step", "share", "FLOP/s", "bytes/s", "of roof"];
        let mut table = render::table(&header);
        for (shown, first, n, sum) in alike.into_iter().take(SLOWEST) {
            let stage = &compiled.program.stages[first.row];
            let instruction = &stage.segments[first.segment].instructions[first.instruction];
            let used = instruction.writes().into_iter().chain(instruction.reads()).next();
            let value = used.and_then(|b| stage.buffers[b.index()].value);
            let mut of = value.map_or(String::new(), |v| names::name(graph, &makers, v));
            if n > 1 {
                of += &format!(" and {} alike", n - 1);
            }
            let mut cells = vec![of];
            cells.extend(self.cells(shown, &sum, steps, all));
            table.add_row(cells);
        }
        table
    }

    fn cells(&self, name: String, sum: &Sum, steps: f64, all: f64) -> Vec<String> {
        let seconds = sum.seconds / steps;
        let rate = |work: f64, show: &dyn Fn(f64) -> String| {
            if work > 0.0 && sum.seconds > 0.0 { show(work / sum.seconds) } else { String::new() }
        };
        // The roofline model (Williams et al., 2009): no faster than the products or the memory allow.
        let roof = f64::max(sum.flops / self.product_rate, sum.bytes / self.copy_rate);
        vec![
            name,
            units::grouped((sum.runs as f64 / steps).round() as u64),
            units::seconds(seconds),
            share(seconds, all),
            rate(sum.flops, &|x| units::count(x, "FLOP")),
            rate(sum.bytes, &units::bytes),
            rate(roof, &|x| format!("{:.0} %", 100.0 * x)),
        ]
    }
}

fn share(part: f64, all: f64) -> String {
    format!("{:.1} %", if all > 0.0 { 100.0 * part / all } else { 0.0 })
}

/// By kind, the longest first.
fn sums(program: &Program, spent: &[Spent]) -> Vec<Sum> {
    let mut sums: Vec<Sum> = Vec::new();
    for s in spent {
        let segment = &program.stages[s.row].segments[s.segment];
        let instruction = &segment.instructions[s.instruction];
        let waited = if let Instruction::Wait { token } = instruction { Some(*token) } else { None };
        // A wait is of the kind that it waits for.
        let started = |i: &&Instruction| waited.is_some() && i.started().map(|(token, _)| token) == waited;
        let kind = kind(segment.instructions.iter().find(started).unwrap_or(instruction));
        let at = sums.iter().position(|sum| sum.kind == kind).unwrap_or_else(|| {
            sums.push(Sum { kind, ..Sum::default() });
            sums.len() - 1
        });
        let sum = &mut sums[at];
        sum.add(&Spent { runs: if waited.is_some() { 0 } else { s.runs }, ..*s });
    }
    sums.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    sums
}

fn kind(instruction: &Instruction) -> &'static str {
    match instruction {
        Instruction::Launch { kernel, .. } => match &kernel.body {
            Body::Contract(_) => "product",
            Body::Map(_) => "map",
            Body::Scatter(_) => "scatter",
            Body::TopK(_) => "top_k",
            Body::Chain(_) => "attention",
        },
        Instruction::Start { parts, .. } => parts.first().map_or("collective", |p| p.step.name()),
        Instruction::Local { step, .. } => step.name(),
        Instruction::Wait { .. } => "wait",
        Instruction::Feed { .. } => "feed",
        Instruction::Assign { .. } => "assign",
        Instruction::Send { .. } | Instruction::Sent { .. } => "send",
        Instruction::Receive { .. } | Instruction::Received { .. } => "receive",
        Instruction::Tap { .. } => "tap",
    }
}

/// The loops of a kernel with their global sizes.
fn loops(instruction: &Instruction) -> String {
    let Some(kernel) = instruction.kernel() else { return String::new() };
    let all: Vec<String> = kernel.body.loops().iter().map(|l| format!("{}={}", l.name, l.size)).collect();
    all.join(" ")
}
