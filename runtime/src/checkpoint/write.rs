//! A checkpoint written: aside in the same folder, every file durable, then given its name. Whoever kills the process at
//! any moment leaves the checkpoints that were whole before.
//!
//! Shards are written by several threads straight from the ranks' memory, and their checksums are made on the way.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use ir::DType;
use xxhash_rust::xxh3::Xxh3;

use super::CheckpointError;
use super::folder::{Aside, name_of};
use super::index::{Described, FILE, Index, Listed, Part, hex, key};
use crate::files::save::{Header, header};

/// What is checksummed and handed to the system at once: it stays in a core's cache between the two.
const CHUNK: usize = 1 << 20;

/// What a checkpoint is of.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// How many steps were done.
    pub step: usize,
    /// How many batches were used.
    pub position: usize,
    /// Of initial weights and drawn rows.
    pub seed: u64,
    /// What the model is called.
    pub model: String,
    /// The settings of the run, by the names of flags.
    pub settings: BTreeMap<String, String>,
    /// All states.
    pub states: Vec<Described>,
    /// Text files that lie beside the shards.
    pub texts: Vec<(String, String)>,
}

/// A piece of a state as one rank has it; of the ranks that have the same piece only one writes it.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// The state.
    pub state: String,
    /// Of what type its elements are.
    pub dtype: DType,
    /// Who has it.
    pub rank: usize,
    /// What it has of each dimension of the state on the mesh.
    pub ranges: Vec<Range<usize>>,
    /// Its elements, row-major, as they lie.
    pub bytes: &'a [u8],
}

/// A file to be written.
struct Todo<'a> {
    name: String,
    head: Vec<u8>,
    parts: Vec<&'a [u8]>,
}

/// Writes the checkpoint of a step into its own folder in `dir`, which exists, and returns the folder.
///
/// # Errors
/// What the system refuses, a folder of that step above all; then nothing has changed.
pub fn write(dir: &Path, about: &About, pieces: &[Piece<'_>]) -> Result<PathBuf, CheckpointError> {
    let name = name_of(about.step);
    let folder = dir.join(&name);
    if folder.exists() {
        let source = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(CheckpointError::Io { path: folder, action: "write the checkpoint", source });
    }
    let aside = Aside::new(dir, &name)?;
    let mut index = Index::of(about);
    let mut todo = shards(&mut index, pieces);
    let text = |(name, text): &(String, String)| Todo {
        name: name.clone(),
        head: text.clone().into_bytes(),
        parts: Vec::new(),
    };
    todo.extend(about.texts.iter().map(text));
    index.files = write_all(&aside.0, todo)?;
    write_all(
        &aside.0,
        vec![Todo { name: FILE.to_string(), head: index.text().into_bytes(), parts: Vec::new() }],
    )?;
    sync_folder(&aside.0)?;
    fs::rename(&aside.0, &folder).map_err(failed(&folder, "give the checkpoint its name"))?;
    sync_folder(dir)?;
    Ok(folder)
}

/// A shard for each rank that has something, and the pieces noted in the index.
fn shards<'a>(index: &mut Index, pieces: &[Piece<'a>]) -> Vec<Todo<'a>> {
    let mut by_rank: BTreeMap<usize, Vec<&Piece<'a>>> = BTreeMap::new();
    for piece in pieces.iter().filter(|p| !p.bytes.is_empty()) {
        by_rank.entry(piece.rank).or_default().push(piece);
    }
    let mut todo = Vec::new();
    for (rank, mut pieces) in by_rank {
        // Wide elements first, so that every tensor is aligned to its own.
        pieces.sort_by_key(|p| std::cmp::Reverse(p.dtype.bytes()));
        let file = format!("rank-{rank:05}.safetensors");
        let named: Vec<(String, Vec<usize>)> = pieces
            .iter()
            .map(|p| (key(&p.state, &p.ranges), p.ranges.iter().map(Range::len).collect()))
            .collect();
        for (piece, (key, _)) in pieces.iter().zip(&named) {
            if let Some(entry) = index.states.get_mut(&piece.state) {
                let ranges = piece.ranges.iter().map(|r| (r.start, r.end)).collect();
                entry.pieces.push(Part { file: file.clone(), key: key.clone(), ranges });
            }
        }
        let entries = pieces.iter().zip(&named).map(|(p, (name, shape))| Header {
            name,
            dtype: tag(p.dtype),
            shape,
            bytes: p.bytes.len(),
        });
        todo.push(Todo {
            name: file,
            head: header(entries, &[]),
            parts: pieces.iter().map(|p| p.bytes).collect(),
        });
    }
    todo
}

/// Writes files with as many threads as there are cores.
fn write_all(folder: &Path, todo: Vec<Todo<'_>>) -> Result<BTreeMap<String, Listed>, CheckpointError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(todo.len());
    let queue = Mutex::new(todo.into_iter());
    // A poisoned queue is one whose thread panicked; the scope passes that on.
    let next = || queue.lock().ok()?.next();
    let work = || -> Result<Vec<(String, Listed)>, CheckpointError> {
        let mut done = Vec::new();
        while let Some(file) = next() {
            let path = folder.join(&file.name);
            let listed = write_one(&path, &file).map_err(failed(&path, "write"))?;
            done.push((file.name, listed));
        }
        Ok(done)
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = work()?;
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all.into_iter().collect())
    })
}

fn write_one(path: &Path, what: &Todo<'_>) -> io::Result<Listed> {
    let mut out = Summed { file: File::create_new(path)?, hash: Xxh3::new(), bytes: 0 };
    // Small tensors are gathered; a chunk is larger than the buffer and goes past it.
    let mut buffered = BufWriter::with_capacity(CHUNK / 2, &mut out);
    for part in [&what.head[..]].iter().chain(&what.parts) {
        for chunk in part.chunks(CHUNK) {
            buffered.write_all(chunk)?;
        }
    }
    buffered.flush()?;
    drop(buffered);
    out.file.sync_all()?;
    Ok(Listed { bytes: out.bytes, xxh3: hex(out.hash.digest()) })
}

/// A file, and the checksum of what was written to it.
struct Summed {
    file: File,
    hash: Xxh3,
    bytes: u64,
}

impl Write for Summed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.file.write(buffer)?;
        self.hash.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The name of an element type in a safetensors file.
pub(super) fn tag(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::U32 => "U32",
        DType::Bool => "BOOL",
    }
}

/// Makes the names in a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(failed(folder, "make the folder durable"))
}

pub(super) fn failed<'a>(path: &'a Path, action: &'static str) -> impl Fn(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Io { path: path.to_path_buf(), action, source }
}
