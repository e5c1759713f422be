//! The plan as text: at most 100 columns, a unit on every number.

use comfy_table::{CellAlignment, Table, presets};

use crate::cluster::Cluster;
use crate::plan::{Choice, Comm, Plan};
use crate::units::{bytes, count, grouped, seconds};

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

fn many(n: usize, what: &str) -> String {
    let plural = match what {
        "micro-batch" => "micro-batches".to_string(),
        _ => format!("{what}s"),
    };
    format!("{} {}", grouped(n as u64), if n == 1 { what } else { &plural })
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.to_vec());
    table
}

/// Right-aligned from column `from` on.
fn show(mut table: Table, from: usize) -> String {
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
    let mut rows =
        table(&["stage", "parameters", "optimizer", "gradients", "activations", "temporary", "peak", "time"]);
    for m in &plan.memory.stages {
        let b = |n: usize| bytes(n as f64);
        rows.add_row(vec![
            m.stage.to_string(),
            b(m.parameters),
            b(m.optimizer),
            b(m.gradients),
            b(m.activations),
            b(m.temporary),
            b(m.peak),
            seconds(plan.time.step_seconds),
        ]);
    }
    show(rows, 1)
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
    let mut rows =
        table(&["collective", "axes", "phase", "group", "calls", "bytes", "wire a rank", "time", "exposed"]);
    for (k, n, [b, w, s, e]) in kinds {
        rows.add_row(vec![
            k.op.to_string(),
            k.axes.join("."),
            k.phase.to_string(),
            many(k.group_size, "rank"),
            many(n, "call"),
            bytes(b),
            bytes(w),
            seconds(s),
            seconds(e),
        ]);
    }
    show(rows, 3) + &buckets(plan)
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
