//! Files written whole or not at all: aside in the same folder, made durable, then given their name.

use super::FileError;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

const _: () = assert!(
    cfg!(target_endian = "little"),
    "the files hold little-endian numbers, which are written as they lie"
);

/// The size of a tensor in every dimension.
pub type Shape = Vec<usize>;

/// The elements of a tensor to be written, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// Written as F32.
    F32(&'a [f32]),
    /// Written as BF16.
    Bf16(&'a [bf16]),
    /// Written as I64.
    I64(&'a [i64]),
}

impl Data<'_> {
    fn dtype(&self) -> &'static str {
        match self {
            Data::F32(_) => "F32",
            Data::Bf16(_) => "BF16",
            Data::I64(_) => "I64",
        }
    }

    /// The number of elements and the bytes of one.
    fn extent(&self) -> (usize, usize) {
        match self {
            Data::F32(data) => (data.len(), 4),
            Data::Bf16(data) => (data.len(), 2),
            Data::I64(data) => (data.len(), 8),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Data::F32(data) => bytemuck::cast_slice(data),
            Data::Bf16(data) => bytemuck::cast_slice(data.reinterpret_cast()),
            Data::I64(data) => bytemuck::cast_slice(data),
        }
    }
}

/// Writes a safetensors file with pairs of `metadata`. The bytes of the file depend on nothing but the
/// arguments.
pub fn write_tensors(
    path: &Path,
    tensors: &[(String, Shape, Data<'_>)],
    metadata: &[(String, String)],
) -> Result<(), FileError> {
    check(path, tensors)?;
    // Wide elements first, so that every tensor is aligned to its own.
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, _, data)| std::cmp::Reverse(data.extent().1));

    let entries = order.iter().map(|(name, shape, data)| Header {
        name,
        dtype: data.dtype(),
        shape,
        bytes: data.bytes().len(),
    });
    let header = header(entries, metadata);

    write_whole(path, |file| {
        file.write_all(&header)?;
        order.iter().try_for_each(|(_, _, data)| file.write_all(data.bytes()))
    })
}

/// What the head of a safetensors file says of a tensor.
pub(crate) struct Header<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: &'static str,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: usize,
}

/// The head of a safetensors file whose tensors follow in that order, with its length; a multiple of 8 bytes.
pub(crate) fn header<'a>(
    tensors: impl Iterator<Item = Header<'a>>,
    metadata: &[(String, String)],
) -> Vec<u8> {
    let mut header = Map::new();
    if !metadata.is_empty() {
        let pairs: Map<_, _> = metadata.iter().map(|(k, v)| (k.clone(), Value::from(v.clone()))).collect();
        header.insert("__metadata__".to_string(), Value::Object(pairs));
    }
    let mut offset = 0;
    for Header { name, dtype, shape, bytes } in tensors {
        let end = offset + bytes;
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [offset, end] });
        header.insert(name.to_string(), entry);
        offset = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut all = (text.len() as u64).to_le_bytes().to_vec();
    all.extend(text);
    all
}

fn check(path: &Path, tensors: &[(String, Shape, Data<'_>)]) -> Result<(), FileError> {
    let mut names = BTreeSet::new();
    for (name, shape, data) in tensors {
        let unwritable =
            |problem| FileError::Unwritable { path: path.to_path_buf(), tensor: name.clone(), problem };
        let (elements, _) = data.extent();
        if shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size)) != Some(elements) {
            return Err(unwritable(format!("its shape is {shape:?}, but it has {elements} elements")));
        }
        if name == "__metadata__" {
            return Err(unwritable("the format uses that name itself".to_string()));
        }
        if !names.insert(name) {
            return Err(unwritable("it is given twice".to_string()));
        }
    }
    Ok(())
}

/// Writes a text file.
pub fn write_text(path: &Path, text: &str) -> Result<(), FileError> {
    write_whole(path, |file| file.write_all(text.as_bytes()))
}

/// Makes a folder and those above it, unless they exist.
pub fn create_dir_all(path: &Path) -> Result<(), FileError> {
    fs::create_dir_all(path).map_err(|source| FileError::Io {
        path: path.to_path_buf(),
        action: "make the folder",
        source,
    })
}

/// What `write` writes is the file at `path` afterwards, or an error is returned and nothing has changed. A
/// file that was there is replaced; who has it mapped keeps the old one.
pub(crate) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), FileError> {
    let failed = |source| FileError::Io { path: path.to_path_buf(), action: "write", source };
    let (aside, file) = aside(path).map_err(failed)?;
    let written = || -> io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        write(&mut file)?;
        file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
        fs::rename(&aside.0, path)
    };
    written().map_err(failed)?;
    // The name is durable only when the folder is; some file systems cannot do it, and the file is there all
    // the same.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}

/// A new file in the same folder, under a name that no other writer uses, in this process or another.
fn aside(path: &Path) -> io::Result<(Aside, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not the name of a file"));
    };
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut aside = OsString::from(".");
        aside.push(name);
        aside.push(format!(".{}.{count}.part", process::id()));
        let aside = path.with_file_name(aside);
        match OpenOptions::new().write(true).create_new(true).open(&aside) {
            Ok(file) => return Ok((Aside(aside), file)),
            // Left by a process that was killed and had the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes the file when it is dropped, if it still has its first name.
struct Aside(PathBuf);

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::mapped::Mapped;
    use super::*;
    use safetensors::SafeTensors;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn written_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let halves = [bf16::from_f32(1.5), bf16::from_f32(-2.0), bf16::from_f32(0.25)];
        let tensors = [
            ("half".to_string(), vec![3], Data::Bf16(&halves)),
            ("none".to_string(), vec![2, 0], Data::F32(&[])),
            ("scalar \"é\"".to_string(), vec![], Data::F32(&[7.5])),
            ("ids".to_string(), vec![1, 2], Data::I64(&[-100, 1 << 40])),
        ];
        let metadata = [("format".to_string(), "pt".to_string()), ("step".to_string(), "12".to_string())];
        write_tensors(&path, &tensors, &metadata).unwrap();

        // The library that everybody reads them with agrees.
        let bytes = fs::read(&path).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        let ours = Mapped::open(&path).unwrap();
        assert_eq!(ours.metadata()["step"], "12");
        assert_eq!(theirs.len(), 4);
        for (name, shape, data) in &tensors {
            assert_eq!(theirs.tensor(name).unwrap().data(), data.bytes());
            let tensor = ours.get(name).unwrap();
            assert_eq!((tensor.shape, tensor.bytes), (&shape[..], data.bytes()));
            assert_eq!(tensor.bytes.as_ptr() as usize % data.extent().1, 0);
        }

        write_tensors(&path, &tensors, &metadata).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes);
        write_tensors(&path, &[], &[]).unwrap();
        assert_eq!(Mapped::open(&path).unwrap().names().len(), 0);
        assert_eq!(ours.get("half").unwrap().bytes, tensors[0].2.bytes());
        assert_eq!(names(dir.path()), ["w.safetensors"]);
    }

    #[test]
    fn what_is_no_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let t = |name: &str, shape: &[usize]| (name.to_string(), shape.to_vec(), Data::F32(&[1.0, 2.0]));
        let table = [
            (vec![t("a", &[3])], "\"a\": its shape is [3], but it has 2 elements"),
            (
                vec![t("a", &[usize::MAX, 4])],
                "\"a\": its shape is [18446744073709551615, 4], but it has 2 elements",
            ),
            (vec![t("a", &[2]), t("a", &[1, 2])], "\"a\": it is given twice"),
            (vec![t("__metadata__", &[2])], "\"__metadata__\": the format uses that name itself"),
        ];
        for (tensors, message) in table {
            let error = write_tensors(&path, &tensors, &[]).unwrap_err().to_string();
            assert_eq!(error, format!("{}: cannot write tensor {message}", path.display()));
        }
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        write_text(&plain, "text").unwrap();
        assert_eq!(fs::read_to_string(&plain).unwrap(), "text");
        fs::create_dir(dir.path().join("folder")).unwrap();
        fs::write(dir.path().join("folder/file"), "").unwrap();

        let table = [
            (plain.join("config.json"), "Not a directory"),
            (dir.path().join("none/config.json"), "No such file or directory"),
            (dir.path().join("folder"), "Is a directory"),
            (dir.path().join("folder/.."), "it is not the name of a file"),
        ];
        for (path, message) in table {
            let error = write_text(&path, "{}").unwrap_err().to_string();
            assert!(error.starts_with(&format!("{}: cannot write: {message}", path.display())), "{error}");
        }
        let error = write_whole(&plain, |file| {
            file.write_all(b"half")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(
            error.unwrap_err().to_string(),
            format!("{}: cannot write: the disk is full", plain.display())
        );
        assert_eq!(fs::read_to_string(&plain).unwrap(), "text");
        assert_eq!(names(dir.path()), ["folder", "plain"]);

        let error = create_dir_all(&plain.join("a/b")).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{}: cannot make the folder: Not a dir", plain.join("a/b").display()))
        );
        create_dir_all(&dir.path().join("a/b")).unwrap();
        create_dir_all(&dir.path().join("a/b")).unwrap();
    }
}
