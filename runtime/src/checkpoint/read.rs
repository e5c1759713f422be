//! A checkpoint read: every file is checked against the index before anything of it is used; then pieces are copied out
//! of the mapped shards, whatever mesh asks.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use half::{bf16, f16};
use ir::DType;
use xxhash_rust::xxh3::xxh3_64;

use super::CheckpointError;
use super::flat::{Box, copy, runs};
use super::index::{Described, Entry, FILE, Index, Listed, Part, hex};
use super::write::{failed, tag};
use crate::files::mapped::{Mapped, map};
use crate::tensor::Tensor;

/// A checkpoint whose files are all as they were written.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    index: Index,
    shards: BTreeMap<String, Mapped>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and checks every file in it.
    ///
    /// # Errors
    /// The first file that is missing or not what was written.
    pub fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
        let path = folder.join(FILE);
        let bytes = fs::read(&path).map_err(failed(&path, "read"))?;
        let index = match std::str::from_utf8(&bytes) {
            Ok(text) => Index::parse(&path, text)?,
            Err(e) => return Err(CheckpointError::Damaged { path, problem: e.to_string() }),
        };
        check(folder, &index.files)?;
        let mut shards = BTreeMap::new();
        for (name, entry) in &index.states {
            for part in &entry.pieces {
                if !shards.contains_key(&part.file) {
                    shards.insert(part.file.clone(), Mapped::open(&folder.join(&part.file))?);
                }
                check_part(&shards[&part.file], name, entry, part)?;
            }
        }
        Ok(Checkpoint { folder: folder.to_path_buf(), index, shards })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it says about itself.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// A text file that lies beside the shards; none if there is none.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn text(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        if !self.index.files.contains_key(name) {
            return Ok(None);
        }
        let path = self.folder.join(name);
        fs::read_to_string(&path).map(Some).map_err(failed(&path, "read"))
    }

    /// The checkpoint has these states and no others, in their types and shapes.
    ///
    /// # Errors
    /// The first state that differs.
    pub fn is_of(&self, states: &[Described]) -> Result<(), CheckpointError> {
        let differs = |state: &str, is: String, needed: String| {
            let (path, state) = (self.folder.clone(), state.to_string());
            Err(CheckpointError::Mismatch { path, state, is, needed })
        };
        for state in states {
            let needed = format!("{} {:?}", state.dtype, state.shape);
            match self.index.states.get(&state.name) {
                None => return differs(&state.name, "missing".to_string(), needed),
                Some(entry) if entry.dtype != state.dtype.name() || entry.shape != state.shape => {
                    return differs(&state.name, format!("{} {:?}", entry.dtype, entry.shape), needed);
                }
                Some(_) => {}
            }
        }
        let other = self.index.states.iter().find(|(name, _)| !states.iter().any(|s| s.name == **name));
        match other {
            Some((name, entry)) => {
                differs(name, format!("{} {:?}", entry.dtype, entry.shape), "no such state".to_string())
            }
            None => Ok(()),
        }
    }

    /// Copies a piece of a state out: the box `ranges` of it in the shape that a mesh has cut it to, row-major.
    ///
    /// # Errors
    /// An unknown state; a box that does not fit it.
    pub fn read(
        &self,
        state: &str,
        cut: &[usize],
        ranges: &[Range<usize>],
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let entry = self.entry(state)?;
        let differs = |is: String, needed: String| CheckpointError::Mismatch {
            path: self.folder.clone(),
            state: state.to_string(),
            is,
            needed,
        };
        let size = size(entry);
        let to = runs(Box { shape: cut, ranges })
            .map_err(|e| differs(format!("{:?}", entry.cut), format!("{cut:?}: {e}")))?;
        let needed: usize = to.iter().map(Range::len).sum();
        let elements = cut.iter().product::<usize>();
        if elements != entry.cut.iter().product::<usize>() || needed * size != out.len() {
            return Err(differs(format!("{:?}", entry.cut), format!("{cut:?}")));
        }
        let mut copied = 0;
        for part in entry.pieces.iter().filter(|_| needed > 0) {
            let Some(tensor) = self.shards[&part.file].get(&part.key) else { continue };
            let from = runs(Box { shape: &entry.cut, ranges: &part.region() })
                .map_err(|e| differs(format!("{:?}", entry.cut), e.to_string()))?;
            copied += copy(&from, tensor.bytes, &to, out, size);
        }
        if copied != needed {
            let problem = format!("the pieces of state {state:?} overlap or leave a hole");
            return Err(CheckpointError::Damaged { path: self.folder.join(FILE), problem });
        }
        Ok(())
    }

    /// All bytes of a state, row-major.
    ///
    /// # Errors
    /// An unknown state.
    pub fn bytes(&self, state: &str) -> Result<Vec<u8>, CheckpointError> {
        let entry = self.entry(state)?;
        let all: Vec<Range<usize>> = entry.cut.iter().map(|n| 0..*n).collect();
        let mut out = vec![0; entry.cut.iter().product::<usize>() * size(entry)];
        self.read(state, &entry.cut, &all, &mut out)?;
        Ok(out)
    }

    /// A state of real numbers, whole, in its shape in the model.
    ///
    /// # Errors
    /// An unknown state, or one of integers.
    pub fn whole(&self, state: &str) -> Result<Tensor<f32>, CheckpointError> {
        let entry = self.entry(state)?;
        let bytes = self.bytes(state)?;
        let data: Vec<f32> = match dtype(entry) {
            DType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
            DType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            DType::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            DType::I64 | DType::I32 | DType::U32 | DType::Bool => {
                return Err(CheckpointError::Mismatch {
                    path: self.folder.clone(),
                    state: state.to_string(),
                    is: entry.dtype.clone(),
                    needed: "real numbers".to_string(),
                });
            }
        };
        Ok(Tensor { shape: entry.shape.clone(), data })
    }

    fn entry(&self, state: &str) -> Result<&Entry, CheckpointError> {
        let unknown =
            || CheckpointError::UnknownState { path: self.folder.clone(), state: state.to_string() };
        self.index.states.get(state).ok_or_else(unknown)
    }
}

/// The index was parsed only if every type in it is one.
fn dtype(entry: &Entry) -> DType {
    entry.dtype.parse().unwrap_or(DType::F32)
}

fn size(entry: &Entry) -> usize {
    dtype(entry).bytes()
}

/// The files have the sizes and checksums of the index; of several that have not, the first by name is told.
fn check(folder: &Path, files: &BTreeMap<String, Listed>) -> Result<(), CheckpointError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(files.len());
    let queue = Mutex::new(files.iter());
    // A poisoned queue is one whose thread panicked; the scope passes that on.
    let next = || queue.lock().ok()?.next();
    let work = || {
        let mut wrong = Vec::new();
        while let Some((name, listed)) = next() {
            wrong.extend(check_file(&folder.join(name), listed).err().map(|e| (name.clone(), e)));
        }
        wrong
    };
    let mut wrong = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut wrong = work();
        for other in others {
            wrong.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        wrong
    });
    wrong.sort_by(|(a, _), (b, _)| a.cmp(b));
    wrong.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
}

fn check_file(path: &Path, listed: &Listed) -> Result<(), CheckpointError> {
    let damaged = |problem| Err(CheckpointError::Damaged { path: path.to_path_buf(), problem });
    let file = map(path)?;
    if file.len() as u64 != listed.bytes {
        return damaged(format!("it has {} bytes, and {} were written", file.len(), listed.bytes));
    }
    let found = hex(xxh3_64(&file));
    if found != listed.xxh3 {
        return damaged(format!("its checksum is {found}, and {} was written", listed.xxh3));
    }
    Ok(())
}

/// A piece is in its shard, in the type and size that the index says.
fn check_part(shard: &Mapped, state: &str, entry: &Entry, part: &Part) -> Result<(), CheckpointError> {
    let shape: Vec<usize> = part.ranges.iter().map(|(a, b)| b - a).collect();
    let damaged = |problem| Err(CheckpointError::Damaged { path: shard.path().to_path_buf(), problem });
    match shard.get(&part.key) {
        None => damaged(format!("it has no tensor {:?}, a piece of state {state:?}", part.key)),
        Some(t) if t.shape != shape || t.dtype.to_string() != tag(dtype(entry)) => damaged(format!(
            "tensor {:?} is {} {:?}, and {} {shape:?} is needed",
            part.key,
            t.dtype,
            t.shape,
            tag(dtype(entry))
        )),
        Some(_) => Ok(()),
    }
}
