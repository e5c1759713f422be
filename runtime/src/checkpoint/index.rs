//! The index of a checkpoint: what it is of, which files it has with their checksums, and where each piece of each state
//! lies. Its first line holds the checksum of all that follows.
//!
//! ```text
//! {"xxh3":"5c1f0d8e2ab94710",
//! "layout":1,
//! "step":200,
//! ...
//! "files":{
//! "rank-00000.safetensors":{"bytes":41240,"xxh3":"0e6d..."}},
//! "states":{
//! "wte":{"dtype":"f32","shape":[103,32],"cut":[103,4,8],"views":[..],"pieces":[{"file":"rank-00000.safetensors",
//!        "key":"wte[0:26,0:4,0:8]","ranges":[[0,26],[0,4],[0,8]]}, ..]}}}
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use ir::DType;
use ir::state::{Role, State, View};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::CheckpointError;

/// The file of the index in a checkpoint's folder.
pub(super) const FILE: &str = "index.json";

/// The version of the layout.
pub(super) const LAYOUT: u32 = 1;

/// What a checkpoint is of and where its parts are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Of all that follows the first line.
    xxh3: String,
    /// The version of the layout.
    pub layout: u32,
    /// How many steps were done.
    pub step: usize,
    /// How many batches were used; the next step reads this one.
    pub position: usize,
    /// Of initial weights and drawn rows.
    pub seed: u64,
    /// What the model is called.
    pub model: String,
    /// The settings that it was made with, by the names of flags.
    pub settings: BTreeMap<String, String>,
    /// The files beside the index, by name.
    pub files: BTreeMap<String, Listed>,
    /// The states, by global name.
    pub states: BTreeMap<String, Entry>,
}

/// A file that the index lists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Its size.
    pub bytes: u64,
    /// XXH3, 64 bits, in hexadecimal.
    pub xxh3: String,
}

/// A state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its element type, by the name that the text form has.
    pub dtype: String,
    /// Its global shape, as the model has it.
    pub shape: Vec<usize>,
    /// The same elements in the shape that the ranges of the pieces count in: a mesh may cut dimensions.
    pub cut: Vec<usize>,
    /// Where it lies in the model's own files; empty if it is in none.
    pub views: Vec<Viewed>,
    /// Its pieces: every element is in one.
    pub pieces: Vec<Part>,
}

/// A view of a tensor of the model's own files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Viewed {
    file: String,
    shape: Vec<usize>,
    offset: usize,
    dims: Vec<(usize, usize)>,
}

/// A piece of a state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The shard.
    pub file: String,
    /// The tensor in it.
    pub key: String,
    /// Start and end in each dimension of `cut`.
    pub ranges: Vec<(usize, usize)>,
}

impl Part {
    /// What it has of each dimension.
    pub(super) fn region(&self) -> Vec<Range<usize>> {
        self.ranges.iter().map(|(start, end)| *start..*end).collect()
    }
}

/// A state as the model has it: what a checkpoint must hold to be of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// Its global name.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape in the model.
    pub shape: Vec<usize>,
    /// Its shape on the mesh.
    pub cut: Vec<usize>,
    /// Where it lies in the model's own files.
    pub views: Vec<View>,
}

impl Described {
    /// A state on a mesh, and its shape in the model.
    pub fn of(state: &State, shape: Vec<usize>) -> Described {
        let views = match state.role {
            Role::Parameter { .. } | Role::Master(_) => state.views.clone(),
            Role::Moment(_) | Role::Step => Vec::new(),
        };
        let (name, cut) = (state.name.to_string(), state.shape());
        Described { name, dtype: state.dtype, shape, cut, views }
    }
}

impl Entry {
    /// An entry without pieces.
    pub(super) fn of(state: &Described) -> Entry {
        let viewed = |v: &View| Viewed {
            file: v.file.to_string(),
            shape: v.shape.clone(),
            offset: v.offset,
            dims: v.dims.clone(),
        };
        Entry {
            dtype: state.dtype.to_string(),
            shape: state.shape.clone(),
            cut: state.cut.clone(),
            views: state.views.iter().map(viewed).collect(),
            pieces: Vec::new(),
        }
    }

    /// Where it lies in the model's own files.
    pub fn views(&self) -> Vec<View> {
        let view = |v: &Viewed| View {
            file: v.file.as_str().into(),
            shape: v.shape.clone(),
            offset: v.offset,
            dims: v.dims.clone(),
        };
        self.views.iter().map(view).collect()
    }
}

impl Index {
    /// An index without files and pieces.
    pub(super) fn of(about: &super::About) -> Index {
        Index {
            xxh3: String::new(),
            layout: LAYOUT,
            step: about.step,
            position: about.position,
            seed: about.seed,
            model: about.model.clone(),
            settings: about.settings.clone(),
            files: BTreeMap::new(),
            states: about.states.iter().map(|s| (s.name.clone(), Entry::of(s))).collect(),
        }
    }

    /// The text of the file. A line a file and a state, so that it can be read and compared.
    pub(super) fn text(&self) -> String {
        let rest = format!(
            "\"layout\":{},\n\"step\":{},\n\"position\":{},\n\"seed\":{},\n\"model\":{},\n\"settings\":{{\n{}}},\n\"files\":{{\n{}}},\n\"states\":{{\n{}}}}}\n",
            self.layout,
            self.step,
            self.position,
            self.seed,
            serde_json::Value::from(self.model.as_str()),
            lines(&self.settings),
            lines(&self.files),
            lines(&self.states)
        );
        first_line(&rest) + "\n" + &rest
    }

    /// Reads the text of the file at `path`, and checks that what it says can be.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Index, CheckpointError> {
        let damaged = |problem: String| CheckpointError::Damaged { path: path.to_path_buf(), problem };
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        if first != first_line(rest) {
            let problem = "its checksum is not that of what follows: it was cut short or changed";
            return Err(damaged(problem.to_string()));
        }
        let index: Index = serde_json::from_str(text).map_err(|e| damaged(e.to_string()))?;
        if index.layout != LAYOUT {
            let path = path.to_path_buf();
            return Err(CheckpointError::Layout { path, is: index.layout, needed: LAYOUT });
        }
        index.check().map_err(damaged)?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        let plain = |name: &str| {
            let mut parts = Path::new(name).components();
            matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        };
        if let Some(name) = self.files.keys().find(|name| !plain(name)) {
            return Err(format!("{name:?} is no name of a file in its folder"));
        }
        let named = |(name, entry): (&String, &Entry)| {
            self.check_entry(entry).map_err(|e| format!("state {name:?}: {e}"))
        };
        self.states.iter().try_for_each(named)
    }

    fn check_entry(&self, entry: &Entry) -> Result<(), String> {
        entry.dtype.parse::<DType>()?;
        let count = |shape: &[usize]| shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
        let elements = count(&entry.cut).filter(|n| count(&entry.shape) == Some(*n));
        let Some(elements) = elements else {
            return Err(format!("{:?} and {:?} are not the same elements", entry.shape, entry.cut));
        };
        if let Some(view) = entry.views.iter().find(|v| count(&v.shape).is_none()) {
            return Err(format!("{:?} of {:?} is no shape", view.shape, view.file));
        }
        let mut covered = 0usize;
        for (i, part) in entry.pieces.iter().enumerate() {
            if !self.files.contains_key(&part.file) {
                return Err(format!("a piece is in {:?}, which is not listed", part.file));
            }
            let fits = part.ranges.len() == entry.cut.len()
                && part.ranges.iter().zip(&entry.cut).all(|((a, b), n)| a < b && b <= n);
            if !fits {
                return Err(format!("{:?} is no piece of {:?}", part.ranges, entry.cut));
            }
            // Disjoint, and as many elements as the state: nothing is twice, and nothing is missing.
            if entry.pieces[..i].iter().any(|other| overlap(&other.ranges, &part.ranges)) {
                return Err(format!("{:?} overlaps another piece", part.ranges));
            }
            covered += part.ranges.iter().map(|(a, b)| b - a).product::<usize>();
        }
        if covered != elements {
            return Err(format!("its pieces have {covered} of {elements} elements"));
        }
        Ok(())
    }
}

fn overlap(a: &[(usize, usize)], b: &[(usize, usize)]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.0 < b.1 && b.0 < a.1)
}

/// The name of a piece in its shard: global, whatever rank wrote it.
pub(super) fn key(state: &str, ranges: &[Range<usize>]) -> String {
    let ranges: Vec<String> = ranges.iter().map(|r| format!("{}:{}", r.start, r.end)).collect();
    format!("{state}[{}]", ranges.join(","))
}

/// A checksum as it is written.
pub(super) fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

fn first_line(rest: &str) -> String {
    format!("{{\"xxh3\":\"{}\",", hex(xxh3_64(rest.as_bytes())))
}

fn lines<T: Serialize>(map: &BTreeMap<String, T>) -> String {
    let line = |(key, value): (&String, &T)| {
        // A map with keys of text always has a JSON form.
        let value = serde_json::to_string(value).unwrap_or_default();
        format!("{}:{value}", serde_json::Value::from(key.as_str()))
    };
    map.iter().map(line).collect::<Vec<_>>().join(",\n")
}
