//! One safetensors file, mapped into memory: its header is read and checked, its tensors are left where they
//! are.
//!
//! After `open` every tensor lies in the file, has as many bytes as its shape and dtype need, and the tensors
//! cover the data without overlap or hole. Memory in use grows with the header, and the header is no longer
//! than the file and `HEADER_LIMIT`.

use super::FileError;
use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The longest header that is read, in bytes; the limit of the format's own library.
const HEADER_LIMIT: usize = 100_000_000;

/// A tensor in a mapped file.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its size in every dimension.
    pub shape: &'a [usize],
    /// Its elements, row-major and little-endian; need not be aligned.
    pub bytes: &'a [u8],
}

/// A mapped safetensors file. The file must not be changed while it is mapped.
#[derive(Debug)]
pub struct Mapped {
    path: PathBuf,
    map: Mmap,
    data: usize,
    header: Header,
}

impl Mapped {
    /// Maps a file and checks its header.
    pub fn open(path: &Path) -> Result<Mapped, FileError> {
        let map = map(path)?;
        let (header, data) = parse(path, &map)?;
        check(path, &header, map.len() - data)?;
        Ok(Mapped { path: path.to_path_buf(), map, data, header })
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let info = self.header.tensors.get(name)?;
        let (start, end) = info.data_offsets;
        let bytes = self.map.get(self.data + start..self.data + end)?;
        Some(Tensor { dtype: info.dtype, shape: &info.shape, bytes })
    }

    /// What the file says about itself.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }
}

/// Maps a regular file for reading.
pub(crate) fn map(path: &Path) -> Result<Mmap, FileError> {
    let failed = |action| move |source| FileError::Io { path: path.to_path_buf(), action, source };
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(failed("open"))?.is_file() {
        return Err(FileError::NotAFile { path: path.to_path_buf() });
    }
    let file = File::open(path).map_err(failed("open"))?;
    // SAFETY: the mapping is private and only read. A file that another program cuts short meanwhile ends the
    // process, as with every mapped file; `files::save` never writes into a file in place.
    unsafe { Mmap::map(&file) }.map_err(failed("map into memory"))
}

/// The header and the place where the data begins.
fn parse(path: &Path, file: &[u8]) -> Result<(Header, usize), FileError> {
    let path = path.to_path_buf();
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(FileError::Short { path, bytes: file.len() });
    };
    let header = u64::from_le_bytes(*length);
    let Some(text) = usize::try_from(header).ok().and_then(|length| rest.get(..length)) else {
        return Err(FileError::HeaderLength { path, header, rest: rest.len() });
    };
    if text.len() > HEADER_LIMIT {
        return Err(FileError::HeaderLimit { path, header, limit: HEADER_LIMIT });
    }
    match serde_json::from_slice(text) {
        Ok(header) => Ok((header, 8 + text.len())),
        Err(error) => Err(FileError::Header { path, problem: error.to_string() }),
    }
}

/// Every tensor has the bytes that it needs, one after the other, and no other bytes are there.
fn check(path: &Path, header: &Header, bytes: usize) -> Result<(), FileError> {
    let mut tensors: Vec<_> = header.tensors.iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut needed = 0;
    for (name, info) in tensors {
        let (path, tensor) = (path.to_path_buf(), name.clone());
        let (start, end) = info.data_offsets;
        let size = size(info);
        if size.is_none() || end.checked_sub(start) != size {
            let needed = size.map_or_else(|| "more than 2^64".to_string(), |size| size.to_string());
            let (dtype, shape) = (info.dtype, info.shape.clone());
            return Err(FileError::Bytes { path, tensor, start, end, dtype, shape, needed });
        }
        if start != needed {
            return Err(FileError::Gap { path, tensor, start, needed });
        }
        if end > bytes {
            return Err(FileError::Beyond { path, tensor, end, bytes });
        }
        needed = end;
    }
    if needed != bytes {
        return Err(FileError::Tail { path: path.to_path_buf(), end: needed, bytes });
    }
    Ok(())
}

/// Bytes of a tensor, rounded up to whole bytes; `None` if they are more than can be counted.
fn size(info: &TensorInfo) -> Option<usize> {
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &size| bits.checked_mul(size))?;
    Some(bits.div_ceil(8))
}

/// The JSON at the head of a file.
#[derive(Debug, Default)]
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Written by hand because an error must name the tensor, and a name that stands twice must be one.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        while let Some(name) = map.next_key::<String>()? {
            let named = |error: A::Error| A::Error::custom(format!("{name:?}: {error}"));
            if name == "__metadata__" {
                header.metadata = map.next_value().map_err(named)?;
            } else {
                let info = map.next_value().map_err(named)?;
                if header.tensors.contains_key(&name) {
                    return Err(A::Error::custom(format!("{name:?} stands in it twice")));
                }
                header.tensors.insert(name, info);
            }
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of that header with that many bytes of data.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Mapped, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        fs::write(&path, bytes).unwrap();
        Mapped::open(&path).map_err(|error| {
            let text = error.to_string();
            text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&text).to_string()
        })
    }

    #[test]
    fn a_good_file() {
        let header = r#"{"__metadata__":{"step":"3"},"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"none":{"dtype":"F32","shape":[0,5],"data_offsets":[10,10]}}  "#;
        let mapped = open(&file(header, 10)).unwrap();
        assert_eq!(mapped.names().collect::<Vec<_>>(), ["a", "b", "none"]);
        assert_eq!(mapped.metadata()["step"], "3");
        let b = mapped.get("b").unwrap();
        assert_eq!((b.dtype, b.shape, b.bytes), (Dtype::F32, &[2][..], &[7; 8][..]));
        assert_eq!(mapped.get("none").unwrap().bytes.len(), 0);
        assert!(mapped.get("c").is_none());
        assert_eq!(open(&file("{}", 0)).unwrap().names().len(), 0);
    }

    #[test]
    fn hostile_files() {
        let one = |dtype: &str, shape: &str, start: usize, end: usize| {
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
        };
        let two = |s: usize, e: usize| {
            format!(
                r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},"b":{{"dtype":"F32","shape":[1],"data_offsets":[{s},{e}]}}}}"#
            )
        };
        let top = usize::MAX;
        let mut long = file("{}", 0);
        long[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        let mut cut = file("{}", 0);
        cut[0] = 3;
        let table: Vec<(Vec<u8>, String)> = vec![
            (vec![], "has 0 bytes, and a safetensors file needs at least 8".into()),
            (vec![1; 7], "has 7 bytes, and a safetensors file needs at least 8".into()),
            (long, "says that its header is 1152921504606846976 bytes, but 2 bytes follow".into()),
            (cut, "says that its header is 3 bytes, but 2 bytes follow".into()),
            (
                file("", 0),
                "its header is not that of a safetensors file: EOF while parsing a value at line 1 column 0".into(),
            ),
            (
                file("{\"a\": oh}", 0),
                "its header is not that of a safetensors file: \"a\": expected value at line 1 column 7".into(),
            ),
            (
                file("[1]", 0),
                "its header is not that of a safetensors file: invalid type: sequence, expected a map from names to tensors at line 1 column 0".into(),
            ),
            (
                file(&"[".repeat(100_000), 0),
                "its header is not that of a safetensors file: invalid type: sequence, expected a map from names to tensors at line 1 column 0".into(),
            ),
            (
                file(&one("F32", "[-1]", 0, 4), 4),
                "its header is not that of a safetensors file: \"w\": invalid value: integer `-1`, expected usize at line 1 column 31".into(),
            ),
            (
                file(&one("F32", "[2,2]", 0, 12), 12),
                "tensor \"w\" has the offsets 0 to 12, but F32 [2, 2] needs 16 bytes".into(),
            ),
            (file(&one("F32", "[1]", 4, 0), 4), "tensor \"w\" has the offsets 4 to 0, but F32 [1] needs 4 bytes".into()),
            (
                file(&one("F32", "[4294967296,4294967296]", 0, 0), 0),
                "tensor \"w\" has the offsets 0 to 0, but F32 [4294967296, 4294967296] needs more than 2^64 bytes".into(),
            ),
            (
                file(&one("U8", &format!("[{}]", top / 16), 0, top / 16), 4),
                format!("tensor \"w\" ends at byte {} of the data, but the file has 4 bytes of it", top / 16),
            ),
            (
                file(&one("F32", "[1]", top - 4, top), 4),
                format!("tensor \"w\" begins at byte {} of the data, but must begin at 0", top - 4),
            ),
            (file(&two(4, 8), 7), "tensor \"b\" ends at byte 8 of the data, but the file has 7 bytes of it".into()),
            (file(&two(4, 8), 9), "its tensors end at byte 8 of the data, but the file has 9 bytes of it".into()),
            (file(&two(2, 6), 8), "tensor \"b\" begins at byte 2 of the data, but must begin at 4".into()),
            (file(&two(5, 9), 9), "tensor \"b\" begins at byte 5 of the data, but must begin at 4".into()),
            (
                file(&two(4, 8).replace("\"b\"", "\"a\""), 8),
                "its header is not that of a safetensors file: \"a\" stands in it twice at line 1 column 107".into(),
            ),
        ];
        for (bytes, message) in table {
            assert_eq!(open(&bytes).unwrap_err(), message);
        }
        let unknown = open(&file(&one("F99", "[1]", 0, 4), 4)).unwrap_err();
        assert!(unknown.contains("\"w\": unknown variant `F99`, expected one of"), "{unknown}");
    }

    #[test]
    fn only_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Mapped::open(dir.path()).unwrap_err().to_string();
        assert_eq!(folder, format!("{}: is not a regular file", dir.path().display()));
        let none = Mapped::open(&dir.path().join("none")).unwrap_err().to_string();
        assert!(none.contains("none: cannot open: No such file"), "{none}");
    }
}
