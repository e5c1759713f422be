//! The plan as text: at most 100 columns, a unit on every number.

pub use comfy_table::Table;
use comfy_table::{CellAlignment, presets};

use crate::cluster::Cluster;
use crate::plan::{Choice, Comm, Plan};
use crate::units::{bytes, count, grouped, many, seconds};

/// The plan of a model called `title`.
pub fn text(plan: &Plan, title: &str, cluster: &Cluster) -> String {
    let axes: Vec<String> = plan.mesh.iter().map(|a| format!("{}={}", a.axis, a.size)).collect();
    let mesh = if axes.is_empty() { "one device".to_string() } else { axes.join(",") };
    let s = &plan.schedule;
    let mut out =
        format!("{title} on mesh {mesh}: {}, {}\n", many(plan.ranks, "rank"), many(s.stages, "stage"));
    out += &format!(
        "  {} parameters, {} tokens a step in {}, {} a step\n",
        grouped(plan.model.parameters as u64),
        grouped(plan.model.tokens_per_step as u64),
        many(s.microbatches, "micro-batch"),
        count(plan.model.flops_full, "FLOP"),
    );
    let memory = cluster.memory.map_or(String::new(), |m| format!(", {} memory", bytes(m)));
    out += &format!(
        "  cluster {}: a rank has {}/s, {}/s to memory, {}/s to others{memory}\n\n",
        cluster.name,
        count(cluster.flops, "FLOP"),
        bytes(cluster.memory_bandwidth),
        bytes(cluster.bandwidth)
    );
    out += &stages(plan);
    out += "\n";
    out += &pipeline(plan);
    out += &comm(plan);
    for g in &plan.full_gathers {
        let size = bytes(g.bytes as f64);
        out += &format!(
            "  {} is gathered to {size} to go from {} to {}: nothing cheaper\n",
            g.tensor, g.from, g.to
        );
    }
    out += "\n";
    let t = &plan.time;
    out += &format!(
        "step {}: computing {}, communicating {}, waiting {}; {} tokens/s, MFU {:.1} %\n",
        seconds(t.step_seconds),
        seconds(t.compute_seconds),
        seconds(t.exposed_comm_seconds),
        seconds(t.bubble_seconds),
        grouped(t.tokens_per_second.round() as u64),
        100.0 * t.mfu
    );
    out += &fits(plan);
    out
}

/// An empty table with a header and no lines.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.to_vec());
    table
}

/// The table as text, right-aligned from column `from` on.
pub fn show(mut table: Table, from: usize) -> String {
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if i == 0 { 2 } else { 1 }, 1));
        if i >= from {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let text = table.to_string();
    text.lines().map(|l| format!("{}\n", l.trim_end())).collect()
}

fn stages(plan: &Plan) -> String {
    let memory = ["stage", "parameters", "optimizer", "gradients", "activations", "temporary", "peak"];
    let several = plan.memory.stages.len() > 1;
    let time: &[&str] = if several { &["computing", "idle"] } else { &["time"] };
    let mut rows = table(&[&memory, time].concat());
    for (m, t) in plan.memory.stages.iter().zip(&plan.time.stages) {
        let b = |n: usize| bytes(n as f64);
        let mut row = vec![
            m.stage.to_string(),
            b(m.parameters),
            b(m.optimizer),
            b(m.gradients),
            b(m.activations),
            b(m.temporary),
            b(m.peak),
        ];
        match several {
            true => row.extend([seconds(t.compute_seconds), seconds(t.idle_seconds)]),
            false => row.push(seconds(plan.time.step_seconds)),
        }
        rows.add_row(row);
    }
    show(rows, 1)
}

/// What the table promises, and how it runs.
fn pipeline(plan: &Plan) -> String {
    if plan.drawing.is_empty() {
        return String::new();
    }
    let s = &plan.schedule;
    let virtuals =
        if s.virtuals > 1 { format!(", {} virtual stages a rank", s.virtuals) } else { String::new() };
    let lines: String =
        plan.drawing.lines().map(|l| format!("  {l}").trim_end().to_string() + "\n").collect();
    format!(
        "  schedule {}{virtuals}: {} a micro-batch and direction; idle by the table alone {:.1} %\n\n{lines}\n",
        s.kind,
        many(s.boundary_transfers_per_microbatch, "transfer"),
        100.0 * s.ideal.bubble_fraction
    )
}

/// Rows of one kind of collective, axes and phase, as one.
fn comm(plan: &Plan) -> String {
    if plan.comm.is_empty() {
        return "  no communication\n".to_string();
    }
    let mut kinds: Vec<(&Comm, usize, [f64; 4])> = Vec::new();
    for row in &plan.comm {
        let n = row.count as f64;
        let more = [row.bytes as f64, row.wire_bytes, row.seconds, row.exposed_seconds].map(|x| n * x);
        let same =
            |k: &Comm| k.op == row.op && k.axes == row.axes && k.phase == row.phase && k.stage == row.stage;
        match kinds.iter_mut().find(|(k, ..)| same(k)) {
            Some((_, count, sums)) => {
                *count += row.count;
                sums.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
            }
            None => kinds.push((row, row.count, more)),
        }
    }
    let several = plan.memory.stages.len() > 1;
    let stage: &[&str] = if several { &["stage"] } else { &[] };
    let head = ["collective", "axes", "phase", "group", "calls", "bytes", "wire a rank", "time", "exposed"];
    let mut rows = table(&[stage, &head].concat());
    let cells = |k: &Comm, n: usize, [b, w, s, _]: [f64; 4]| {
        vec![
            k.op.to_string(),
            k.axes.join("."),
            k.phase.to_string(),
            many(k.group_size, "rank"),
            many(n, "call"),
            bytes(b),
            bytes(w),
            seconds(s),
        ]
    };
    // What stages have alike stands once, with the most that is exposed in one.
    let mut alike: Vec<(Vec<String>, Vec<usize>, f64)> = Vec::new();
    for (k, n, sums) in kinds {
        let (row, exposed) = (cells(k, n, sums), sums[3]);
        match alike.iter_mut().find(|(known, ..)| several && *known == row) {
            Some((_, stages, most)) => {
                stages.push(k.stage);
                *most = most.max(exposed);
            }
            None => alike.push((row, vec![k.stage], exposed)),
        }
    }
    for (row, stages, exposed) in alike {
        let of = if several { vec![runs(&stages)] } else { Vec::new() };
        rows.add_row([of, row, vec![seconds(exposed)]].concat());
    }
    show(rows, if several { 4 } else { 3 }) + &buckets(plan)
}

/// Numbers in order as `0, 2..5`.
fn runs(numbers: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for n in numbers {
        match out.last_mut() {
            Some((_, last)) if *last + 1 == *n => *last = *n,
            Some(_) | None => out.push((*n, *n)),
        }
    }
    let show = |(from, to): &(usize, usize)| match to - from {
        0 => from.to_string(),
        1 => format!("{from}, {to}"),
        2.. => format!("{from}..{to}"),
    };
    out.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// How many calls move several tensors.
fn buckets(plan: &Plan) -> String {
    let joined: Vec<&Comm> = plan.comm.iter().filter(|c| c.tensors.len() > 1).collect();
    let Some(most) = plan.bucket_bytes.filter(|_| !joined.is_empty()) else { return String::new() };
    let calls: usize = joined.iter().map(|c| c.count).sum();
    let tensors: usize = joined.iter().map(|c| c.count * c.tensors.len()).sum();
    let are = if calls == 1 { "is a bucket" } else { "are buckets" };
    format!(
        "  {} {are} of up to {}, with {} in all\n",
        many(calls, "call"),
        bytes(most as f64),
        many(tensors, "tensor")
    )
}

/// What was chosen for each product and reshard, and what else could be; those that differ only by their layer once.
pub fn choices(plan: &Plan, exact: bool) -> String {
    let mut kinds: Vec<(Choice, usize)> = Vec::new();
    for choice in &plan.choices {
        let general = Choice { tensor: any_layer(&choice.tensor), ..choice.clone() };
        match kinds.iter_mut().find(|(c, _)| *c == general) {
            Some((_, n)) => *n += 1,
            None => kinds.push((general, 1)),
        }
    }
    let proof = match exact {
        true => "proved: nothing cheaper is in the space that docs/choice.md describes",
        false => "not proved: there was too much to compare, and a cheaper way may exist",
    };
    let mut out =
        format!("what was chosen, and what else could be, with wire bytes a rank and time ({proof})\n");
    for (choice, n) in kinds {
        let times = if n > 1 { format!(" x{n}") } else { String::new() };
        out += &format!("\n{}{times}: {}\n", choice.tensor, choice.op);
        let line = |mark: &str, what: &str, b: f64, s: f64| {
            format!("  {mark} {what:<48} {:>10} {:>9}\n", bytes(b), seconds(s))
        };
        out += &line("*", &choice.chosen, choice.wire_bytes, choice.seconds);
        for a in &choice.alternatives {
            out += &line(" ", &a.strategy, a.wire_bytes, a.seconds);
        }
    }
    out
}

/// A name with `*` for the number of the layer.
fn any_layer(name: &str) -> String {
    let words = name.split_inclusive(['.', ' ']);
    let word = |w: &str| {
        let number = w.trim_end_matches(['.', ' ']);
        let digits = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
        if digits { w.replace(number, "*") } else { w.to_string() }
    };
    words.map(word).collect()
}

fn fits(plan: &Plan) -> String {
    let m = &plan.memory;
    let peak = bytes(m.peak_bytes as f64);
    match m.available_bytes {
        None => format!("memory {peak} a rank\n"),
        Some(available) if m.fits => format!("memory {peak} of {} a rank: fits\n", bytes(available)),
        Some(available) => {
            let missing = bytes(m.peak_bytes as f64 - available);
            format!("memory {peak} of {} a rank: does NOT fit, {missing} are missing\n", bytes(available))
        }
    }
}
