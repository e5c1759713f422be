//! `meshc bench checkpoint`: how fast a made-up state is written as a checkpoint, beside a plain write of the same bytes
//! to the same disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ir::DType;
use runtime::checkpoint::{self, About, Described, Piece};
use runtime::data::random::philox;
use runtime::files::save::create_dir_all;
use serde::Serialize;

use super::print;
use crate::args::{CheckpointArgs, Format};
use crate::failure::Failure;

/// Elements of a state; the last one is smaller.
const STATE: usize = 1 << 24;

/// Bytes of a plain write: those of `dd bs=1M`.
const BLOCK: usize = 1 << 20;

/// Each way is measured so often, in turn; the median counts.
const ROUNDS: usize = 5;

/// What was measured. Rates are 10^6 bytes a second, until the disk has them.
#[derive(Serialize)]
struct Measured {
    bytes: usize,
    ranks: usize,
    plain: f64,
    checkpoint: f64,
    share: f64,
}

pub(crate) fn run(args: &CheckpointArgs) -> Result<(), Failure> {
    let wrong = |what: String| Err(Failure::Request(what));
    if !(args.gb > 0.0 && args.gb <= 1000.0) {
        return wrong(format!("--gb {}: a number above 0 and at most 1000 is needed", args.gb));
    }
    if args.ranks == 0 {
        return wrong("--ranks 0: at least 1 is needed".to_string());
    }
    let elements = ((args.gb * 1e9 / 4.0).round() as usize).max(1);
    // Random bits, so that nothing on the way can make them shorter.
    let mut data: Vec<u32> = Vec::with_capacity(elements + 3);
    (0..elements.div_ceil(4)).for_each(|i| data.extend(philox([i as u32, (i >> 32) as u32, 0, 0], [1, 2])));
    data.truncate(elements);
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    drop(data);
    let (about, boxes) = state(elements, args.ranks);
    let pieces: Vec<Piece<'_>> = boxes
        .iter()
        .map(|(state, rank, ranges, at)| Piece {
            state: state.clone(),
            dtype: DType::F32,
            rank: *rank,
            ranges: vec![ranges.clone()],
            bytes: &bytes[at * 4..(at + ranges.len()) * 4],
        })
        .collect();
    create_dir_all(&args.output).map_err(|e| Failure::Write(e.to_string()))?;
    let scratch = Scratch::new(&args.output)?;
    let (mut plain, mut checkpoints) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let path = scratch.0.join("plain");
        plain.push(timed(|| write_plain(&path, &bytes))?);
        fs::remove_file(&path)
            .map_err(|e| Failure::Write(format!("cannot remove {}: {e}", path.display())))?;
        checkpoints
            .push(timed(|| checkpoint::write(&scratch.0, &about, &pieces).map(drop).map_err(Failure::from))?);
        checkpoint::prune(&scratch.0, 0)?;
    }
    let rate = |seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        bytes.len() as f64 / 1e6 / seconds[ROUNDS / 2]
    };
    let (plain, checkpoint) = (rate(&mut plain), rate(&mut checkpoints));
    let share = checkpoint / plain;
    report(&Measured { bytes: bytes.len(), ranks: args.ranks, plain, checkpoint, share }, args.format)
}

/// A state's name, a rank, what it has of the state, and where that is in all elements.
type Split = (String, usize, Range<usize>, usize);

/// States with so many elements in all, each split evenly over the ranks.
fn state(elements: usize, ranks: usize) -> (About, Vec<Split>) {
    let mut states = Vec::new();
    let mut boxes = Vec::new();
    for start in (0..elements).step_by(STATE) {
        let (name, n) = (format!("made.up.{}", states.len()), STATE.min(elements - start));
        let each = n.div_ceil(ranks);
        for rank in 0..ranks {
            let range = (rank * each).min(n)..((rank + 1) * each).min(n);
            boxes.push((name.clone(), rank, range.clone(), start + range.start));
        }
        let (dtype, shape, views) = (DType::F32, vec![n], Vec::new());
        states.push(Described { name, dtype, cut: shape.clone(), shape, views });
    }
    let (settings, texts, model) = (BTreeMap::new(), Vec::new(), "made up".to_string());
    (About { step: 1, position: 1, seed: 0, model, settings, states, texts }, boxes)
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn write_plain(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let written = || {
        let mut file = File::create(path)?;
        bytes.chunks(BLOCK).try_for_each(|block| file.write_all(block))?;
        file.sync_all()
    };
    written().map_err(|e| Failure::Write(format!("cannot write {}: {e}", path.display())))
}

fn report(m: &Measured, format: Format) -> Result<(), Failure> {
    match format {
        Format::Json => {
            let text = serde_json::to_string_pretty(m).map_err(|e| Failure::Run(e.to_string()))?;
            print(&(text + "\n"))
        }
        Format::Text => print(&format!(
            "{:.0} MB, median of {ROUNDS}, until the disk has them\n\
             one plain file:          {:.0} MB/s\n\
             checkpoint of {:>2} ranks: {:.0} MB/s, {:.1} % of that\n",
            m.bytes as f64 / 1e6,
            m.plain,
            m.ranks,
            m.checkpoint,
            100.0 * m.share
        )),
    }
}

/// A folder that is removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(dir: &Path) -> Result<Scratch, Failure> {
        let path = dir.join(format!(".meshc-bench-{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| Failure::Write(format!("cannot make {}: {e}", path.display())))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
