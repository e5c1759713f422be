//! The weights of a Hugging Face folder: its safetensors files, mapped, read a slice at a time.
//!
//! With a `model.safetensors.index.json` in the folder its `weight_map` says which tensor is in which file,
//! and nothing else counts. Without one, all `*.safetensors` of the folder count, in the order of their
//! names, and no tensor may be in two.

use super::mapped::{Mapped, Tensor};
use super::window::{Element, Window, copy_out};
use super::{FileError, mapped};
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";

/// The safetensors files of a folder.
#[derive(Debug)]
pub struct Weights {
    folder: PathBuf,
    files: Vec<Mapped>,
    /// The number of the file that holds the tensor.
    place: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Maps the files of a folder; `None` if there are none.
    pub fn open(folder: &Path) -> Result<Option<Weights>, FileError> {
        let index = folder.join(INDEX);
        if index.exists() {
            return open_indexed(folder, &index).map(Some);
        }
        let paths = safetensors_of(folder)?;
        if paths.is_empty() {
            return Ok(None);
        }
        open_all(folder, &paths).map(Some)
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.place.keys().map(String::as_str)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.place.get(name)?].get(name)
    }

    /// Reads the piece `ranges` of `window` in the tensor `name`, as f32, dense and row-major, into `out`.
    /// The tensor must have the shape `shape` and be F32, BF16, F16 or F64. Only the pages on which the piece
    /// lies are read.
    pub fn read(
        &self,
        name: &str,
        shape: &[usize],
        window: &Window,
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<(), FileError> {
        let tensor = name.to_string();
        let Some((place, found)) = self.place.get(name).and_then(|&place| Some((place, self.get(name)?)))
        else {
            let (path, count, similar) = (self.folder.clone(), self.place.len(), similar(name, self.names()));
            return Err(FileError::Missing { path, tensor, count, similar });
        };
        let path = self.files[place].path().to_path_buf();
        if found.shape != shape {
            return Err(FileError::Shape { path, tensor, is: found.shape.to_vec(), needed: shape.to_vec() });
        }
        let Some(element) = element(found.dtype) else {
            return Err(FileError::Dtype { path, tensor, is: found.dtype, needed: "F32, BF16, F16 or F64" });
        };
        copy_out(window, ranges, found.bytes, element, out).map_err(|source| FileError::Window {
            path,
            tensor,
            source,
        })
    }
}

/// What a weight of that dtype is read from; `None` for one that is no weight.
fn element(dtype: Dtype) -> Option<Element> {
    [
        (Dtype::F32, Element::F32),
        (Dtype::BF16, Element::Bf16),
        (Dtype::F16, Element::F16),
        (Dtype::F64, Element::F64),
    ]
    .into_iter()
    .find_map(|(file, element)| (file == dtype).then_some(element))
}

/// The `*.safetensors` of a folder, sorted.
fn safetensors_of(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let failed = |source| FileError::Io { path: folder.to_path_buf(), action: "list the folder", source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|extension| extension == "safetensors") && !hidden {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn open_all(folder: &Path, paths: &[PathBuf]) -> Result<Weights, FileError> {
    let files = paths.iter().map(|path| Mapped::open(path)).collect::<Result<Vec<_>, _>>()?;
    let mut place: BTreeMap<String, usize> = BTreeMap::new();
    for (number, file) in files.iter().enumerate() {
        for name in file.names() {
            if let Some(first) = place.insert(name.to_string(), number) {
                return Err(FileError::Twice {
                    tensor: name.to_string(),
                    first: paths[first].clone(),
                    second: paths[number].clone(),
                });
            }
        }
    }
    Ok(Weights { folder: folder.to_path_buf(), files, place })
}

fn open_indexed(folder: &Path, index: &Path) -> Result<Weights, FileError> {
    let text = mapped::map(index)?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| FileError::Index { path: index.to_path_buf(), problem: error.to_string() })?;

    let mut files: Vec<Mapped> = Vec::new();
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut place = BTreeMap::new();
    for (tensor, file) in weight_map {
        let wrong = |problem| FileError::IndexFile {
            path: index.to_path_buf(),
            tensor: tensor.clone(),
            file: file.clone(),
            problem,
        };
        let number = match numbers.get(&file) {
            Some(&number) => number,
            None => {
                // A downloaded index must not lead out of its folder.
                if !matches!(Path::new(&file).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
                    return Err(wrong("that is no name of a file in the same folder"));
                }
                let path = folder.join(&file);
                if !path.exists() {
                    return Err(wrong("there is no such file in the folder"));
                }
                files.push(Mapped::open(&path)?);
                numbers.insert(file.clone(), files.len() - 1);
                files.len() - 1
            }
        };
        if files[number].get(&tensor).is_none() {
            return Err(wrong("that file has no such tensor"));
        }
        place.insert(tensor, number);
    }
    Ok(Weights { folder: folder.to_path_buf(), files, place })
}

/// The names that may have been meant, as the end of a sentence: those that differ by a prefix, then those a
/// few letters off.
fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    let within = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|rest| rest.ends_with('.'));
    let limit = 1 + name.len() / 8;
    let mut near: Vec<(usize, &str)> = names
        .filter(|other| !other.is_empty())
        .filter_map(|other| {
            let prefix = within(name, other) || within(other, name);
            let distance = if prefix { 0 } else { distance(name.as_bytes(), other.as_bytes(), limit)? };
            Some((distance, other))
        })
        .collect();
    near.sort();
    let near: Vec<_> = near.iter().take(3).map(|(_, name)| format!("{name:?}")).collect();
    if near.is_empty() { String::new() } else { format!(", but {}", near.join(", ")) }
}

/// Insertions, deletions and changes between two names; `None` above `limit`.
fn distance(a: &[u8], b: &[u8], limit: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    Some(row[b.len()]).filter(|&distance| distance <= limit)
}

#[cfg(test)]
mod tests {
    use super::super::save::{Data, write_tensors};
    use super::*;
    use half::bf16;

    fn write(path: &Path, tensors: &[(&str, &[f32])]) {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|&(name, data)| (name.to_string(), vec![data.len()], Data::F32(data)))
            .collect();
        write_tensors(path, &tensors, &[]).unwrap();
    }

    fn error(folder: &Path) -> String {
        Weights::open(folder).unwrap_err().to_string().replace(&format!("{}/", folder.display()), "")
    }

    #[test]
    fn a_folder_without_weights() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        assert!(Weights::open(dir.path()).unwrap().is_none());
        let none = Weights::open(&dir.path().join("none")).unwrap_err().to_string();
        assert!(none.contains("none: cannot list the folder: No such file"), "{none}");
    }

    #[test]
    fn files_without_an_index() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("b.safetensors"), &[("x", &[1.0]), ("y", &[2.0])]);
        write(&dir.path().join("a.safetensors"), &[("z", &[3.0])]);
        let weights = Weights::open(dir.path()).unwrap().unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["x", "y", "z"]);
        assert_eq!(weights.get("z").unwrap().bytes, 3f32.to_le_bytes());

        write(&dir.path().join("c.safetensors"), &[("y", &[2.0])]);
        assert_eq!(
            error(dir.path()),
            "tensor \"y\" is in two files, b.safetensors and c.safetensors, and no index says which one counts"
        );
        fs::write(dir.path().join("c.safetensors"), "short").unwrap();
        assert_eq!(error(dir.path()), "c.safetensors: has 5 bytes, and a safetensors file needs at least 8");
    }

    #[test]
    fn an_index_is_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("1.safetensors"), &[("x", &[1.0]), ("y", &[2.0])]);
        write(&dir.path().join("2.safetensors"), &[("y", &[3.0]), ("z", &[4.0])]);
        let index = |text: &str| fs::write(dir.path().join(INDEX), text).unwrap();

        index(r#"{"metadata":{"total_size":8},"weight_map":{"x":"1.safetensors","y":"2.safetensors"}}"#);
        let weights = Weights::open(dir.path()).unwrap().unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(weights.get("y").unwrap().bytes, 3f32.to_le_bytes());
        assert!(weights.get("z").is_none());

        let table = [
            (
                "{",
                "is not an index with a weight_map from tensors to files: EOF while parsing an object at line 1 column 1",
            ),
            (
                "{}",
                "is not an index with a weight_map from tensors to files: missing field `weight_map` at line 1 column 2",
            ),
            (
                r#"{"weight_map":{"x":"3.safetensors"}}"#,
                r#"says that tensor "x" is in "3.safetensors", and there is no such file in the folder"#,
            ),
            (
                r#"{"weight_map":{"z":"1.safetensors"}}"#,
                r#"says that tensor "z" is in "1.safetensors", and that file has no such tensor"#,
            ),
            (
                r#"{"weight_map":{"z":"../1.safetensors"}}"#,
                r#"says that tensor "z" is in "../1.safetensors", and that is no name of a file in the same folder"#,
            ),
            (
                r#"{"weight_map":{"z":""}}"#,
                r#"says that tensor "z" is in "", and that is no name of a file in the same folder"#,
            ),
        ];
        for (text, message) in table {
            index(text);
            assert_eq!(error(dir.path()), format!("{INDEX}: {message}"));
        }
    }

    #[test]
    fn slices_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let halves: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
        let ids = [1i64, 2];
        let tensors = [
            ("h.0.attn.weight".to_string(), vec![4, 6], Data::F32(&values)),
            ("h.1.attn.weight".to_string(), vec![4, 6], Data::Bf16(&halves)),
            ("h.0.ids".to_string(), vec![2], Data::I64(&ids)),
        ];
        write_tensors(&dir.path().join("model.safetensors"), &tensors, &[]).unwrap();
        let weights = Weights::open(dir.path()).unwrap().unwrap();
        let middle = Window { offset: 2, dims: vec![(2, 1), (4, 6)] };
        for name in ["h.0.attn.weight", "h.1.attn.weight"] {
            let mut out = [0.0; 4];
            weights.read(name, &[4, 6], &middle, &[0..2, 1..3], &mut out).unwrap();
            assert_eq!(out, [8.0, 14.0, 9.0, 15.0]);
        }

        let path = dir.path().display().to_string();
        let whole = Window::whole(&[4, 6]);
        let table: &[(&str, &[usize], &Window, &str)] = &[
            (
                "transformer.h.0.attn.weight",
                &[4, 6],
                &whole,
                ": has no tensor \"transformer.h.0.attn.weight\" among its 3, but \"h.0.attn.weight\"",
            ),
            ("h.2.ids", &[2], &whole, ": has no tensor \"h.2.ids\" among its 3, but \"h.0.ids\""),
            ("lm_head.weight", &[2], &whole, ": has no tensor \"lm_head.weight\" among its 3"),
            (
                "h.0.attn.weight",
                &[6, 4],
                &whole,
                "/model.safetensors: tensor \"h.0.attn.weight\" is [4, 6], and [6, 4] is needed",
            ),
            (
                "h.0.ids",
                &[2],
                &whole,
                "/model.safetensors: tensor \"h.0.ids\" is I64, and F32, BF16, F16 or F64 is needed",
            ),
            (
                "h.0.attn.weight",
                &[4, 6],
                &Window { offset: 1, dims: whole.dims.clone() },
                "/model.safetensors: tensor \"h.0.attn.weight\": the window reaches element 24, but the tensor has 24 elements",
            ),
        ];
        for &(name, shape, window, message) in table {
            let error =
                weights.read(name, shape, window, &window.all(), &mut [0.0; 24]).unwrap_err().to_string();
            assert_eq!(error.strip_prefix(&path).unwrap(), message);
        }
    }
}
