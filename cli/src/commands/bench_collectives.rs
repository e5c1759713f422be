//! `meshc bench collectives`: how long collectives among ranks of this process take, in the columns of nccl-tests, and beside
//! a plain copy.

use std::collections::BTreeMap;
use std::time::Instant;

use ir::parse_program;
use ir::program::Program;
use planner::units;
use runtime::local::{Local, Taps};
use serde::Serialize;

use super::print;
use crate::args::{CollectivesArgs, Format};
use crate::failure::Failure;
use crate::loaded::workers;
use crate::machine::copy_rate;

/// A collective that is measured.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// How a tensor of so many elements lies before and after, and the move.
    before: &'static str,
    after: &'static str,
    step: &'static str,
    redop: &'static str,
    /// Whether each rank gives a row of the tensor, and not a share or a copy of all.
    of_rows: bool,
    /// Of the time of the size at the bandwidth of the bus, as nccl-tests counts it (its doc/PERFORMANCE.md), over n ranks.
    bus: fn(f64) -> f64,
}

const KINDS: [Kind; 4] = [
    Kind {
        name: "all_reduce",
        before: "[_, _] partial(x)",
        after: "[_, _]",
        step: "all_reduce(x)",
        redop: "sum",
        of_rows: false,
        bus: |n| 2.0 * (n - 1.0) / n,
    },
    Kind {
        name: "all_gather",
        before: "[x, _]",
        after: "[_, _]",
        step: "all_gather(x, dim 0)",
        redop: "none",
        of_rows: false,
        bus: |n| (n - 1.0) / n,
    },
    Kind {
        name: "reduce_scatter",
        before: "[_, _] partial(x)",
        after: "[x, _]",
        step: "reduce_scatter(x, dim 0)",
        redop: "sum",
        of_rows: false,
        bus: |n| (n - 1.0) / n,
    },
    Kind {
        name: "all_to_all",
        before: "[x, _]",
        after: "[_, x]",
        step: "all_to_all(x, dim 0 to 1)",
        redop: "none",
        of_rows: true,
        bus: |n| (n - 1.0) / n,
    },
];

/// One line. Sizes are bytes as in nccl-tests: of an all_gather what each rank has afterwards, of the others what each gives.
#[derive(Serialize)]
struct Line {
    collective: &'static str,
    bytes: usize,
    count: usize,
    redop: &'static str,
    microseconds: f64,
    /// 10^9 bytes a second.
    algbw: f64,
    busbw: f64,
    /// Of the time in which one thread copies as many bytes.
    times_of_copy: f64,
}

#[derive(Serialize)]
struct Measured {
    ranks: usize,
    workers: usize,
    /// Bytes copied a second.
    copy: f64,
    lines: Vec<Line>,
}

pub(crate) fn run(args: &CollectivesArgs) -> Result<(), Failure> {
    let wrong = |what: &str| Err(Failure::Request(what.to_string()));
    if args.ranks < 2 {
        return wrong("--ranks: collectives need at least 2");
    }
    if args.min_bytes == 0 || args.min_bytes > args.max_bytes || args.factor < 2 || args.iterations == 0 {
        return wrong(
            "sizes go from --min-bytes, at least 1, to --max-bytes by a --factor of at least 2; --iterations are at least 1",
        );
    }
    let workers = workers(args.workers, args.ranks);
    let mut measured = Measured { ranks: args.ranks, workers, copy: copy_rate() / 2.0, lines: Vec::new() };
    for kind in KINDS {
        let mut size = args.min_bytes;
        while size <= args.max_bytes {
            measured.lines.push(line(kind, size, args, measured.copy, workers)?);
            size = size.saturating_mul(args.factor);
        }
    }
    match args.format {
        Format::Text => print(&text(&measured)),
        Format::Json => {
            let text = serde_json::to_string_pretty(&measured).map_err(|e| Failure::Run(e.to_string()))?;
            print(&(text + "\n"))
        }
    }
}

fn line(
    kind: Kind,
    bytes: usize,
    args: &CollectivesArgs,
    copy: f64,
    workers: usize,
) -> Result<Line, Failure> {
    let n = args.ranks;
    let columns = match kind.of_rows {
        true => (bytes / 4).next_multiple_of(n).max(n),
        false => (bytes / 4).div_ceil(n).max(1),
    };
    let count = if kind.of_rows { columns } else { columns * n };
    // Small ones so often in a step that the step itself does not count.
    let repeats = (1_000_000 / bytes).clamp(1, 200);
    let text = program(kind, n, columns, repeats);
    let program: Program =
        parse_program(&text).map_err(|e| Failure::Run(format!("the program of {}: {e}", kind.name)))?;
    let mut local = Local::new(&program, workers)?;
    let mut seconds = Vec::new();
    for i in 0..args.iterations + 2 {
        let start = Instant::now();
        local.step(&[BTreeMap::new()], &mut Taps::default())?;
        seconds.extend((i >= 2).then(|| start.elapsed().as_secs_f64() / repeats as f64));
    }
    seconds.sort_by(f64::total_cmp);
    let time = seconds[seconds.len() / 2];
    let bytes = count * 4;
    let algbw = bytes as f64 / time;
    Ok(Line {
        collective: kind.name,
        bytes,
        count,
        redop: kind.redop,
        microseconds: 1e6 * time,
        algbw: 1e-9 * algbw,
        busbw: 1e-9 * algbw * (kind.bus)(n as f64),
        times_of_copy: time * copy / bytes as f64,
    })
}

/// The same collective again and again.
fn program(kind: Kind, ranks: usize, columns: usize, repeats: usize) -> String {
    let room = (4 * ranks * columns).next_multiple_of(64);
    let calls = "call 0O once slot 0\n".repeat(repeats);
    let Kind { before, after, step, .. } = kind;
    format!(
        "program mesh x={ranks} microbatches 1
         stage 0 slots 1 sizes 0 0 0 {}
         b0 = f32 {ranks}x{columns} @ {before} scratch+0
         b1 = f32 {ranks}x{columns} @ {after} scratch+{room}
         segment 0O
           t0 = start {step} b0 -> b1
           wait t0
         {calls}",
        2 * room
    )
}

fn text(measured: &Measured) -> String {
    let mut out = format!(
        "# {} ranks in one process on {} workers; a copy on one thread: {}/s; medians\n",
        measured.ranks,
        measured.workers,
        units::count(measured.copy, "B")
    );
    for (i, l) in measured.lines.iter().enumerate() {
        if i == 0 || measured.lines[i - 1].collective != l.collective {
            out += &format!(
                "#\n# {}\n# {:>12} {:>12} {:>8} {:>8} {:>6} {:>10} {:>8} {:>8} {:>6}   of copy\n# {:>12} {:>12} {:>8} {:>8} {:>6} {:>10} {:>8} {:>8}\n",
                l.collective,
                "size",
                "count",
                "type",
                "redop",
                "root",
                "time",
                "algbw",
                "busbw",
                "#wrong",
                "(B)",
                "(elements)",
                "",
                "",
                "",
                "(us)",
                "(GB/s)",
                "(GB/s)"
            );
        }
        out += &format!(
            "  {:>12} {:>12} {:>8} {:>8} {:>6} {:>10.2} {:>8.2} {:>8.2} {:>6}   {:.2}\n",
            l.bytes, l.count, "float", l.redop, -1, l.microseconds, l.algbw, l.busbw, "N/A", l.times_of_copy
        );
    }
    out
}
