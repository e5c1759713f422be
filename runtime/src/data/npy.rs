//! Token ids in a NumPy file: one dimension, little-endian `u1`, `u2`, `u4`, `i4` or `i8`, mapped. Format
//! versions 1, 2 and 3 are read (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>),
//! version 1 is written.

use super::DataError;
use crate::files::FileError;
use crate::files::mapped::map;
use crate::files::save::write_whole;
use memmap2::Mmap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A mapped file of token ids. The file must not be changed while it is mapped.
#[derive(Debug)]
pub struct Npy {
    path: PathBuf,
    map: Mmap,
    data: usize,
    count: usize,
    width: Width,
}

/// How an id is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    U1,
    U2,
    U4,
    I4,
    I8,
}

impl Width {
    fn bytes(self) -> usize {
        match self {
            Width::U1 => 1,
            Width::U2 => 2,
            Width::U4 | Width::I4 => 4,
            Width::I8 => 8,
        }
    }
}

impl Npy {
    /// Maps a file and checks its header.
    pub fn open(path: &Path) -> Result<Npy, DataError> {
        let map = map(path)?;
        let (data, count, width) =
            parse(&map).map_err(|problem| DataError::Npy { path: path.to_path_buf(), problem })?;
        Ok(Npy { path: path.to_path_buf(), map, data, count, width })
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many ids there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The id at a position. Panics, as an index does, from `len()` on.
    pub fn get(&self, i: usize) -> i64 {
        assert!(i < self.count, "id {i} of {}", self.count);
        let data = &self.map[self.data..];
        match self.width {
            Width::U1 => data[i].into(),
            Width::U2 => u16::from_le_bytes(data.as_chunks().0[i]).into(),
            Width::U4 => u32::from_le_bytes(data.as_chunks().0[i]).into(),
            Width::I4 => i32::from_le_bytes(data.as_chunks().0[i]).into(),
            Width::I8 => i64::from_le_bytes(data.as_chunks().0[i]),
        }
    }
}

/// Where the data begins, how many ids there are, and how they are stored; or what is wrong.
fn parse(file: &[u8]) -> Result<(usize, usize, Width), String> {
    let short = || format!("it ends within the header, at byte {}", file.len());
    if !file.starts_with(b"\x93NUMPY") {
        return Err("it does not begin with \\x93NUMPY".to_string());
    }
    let (major, rest) = match file.get(6..) {
        Some([major, _minor, rest @ ..]) => (*major, rest),
        Some(_) | None => return Err(short()),
    };
    let (length, rest) = match major {
        1 => rest.split_first_chunk().map(|(&n, rest)| (u16::from_le_bytes(n).into(), rest)),
        2 | 3 => rest.split_first_chunk().map(|(&n, rest)| (u32::from_le_bytes(n), rest)),
        _ => return Err(format!("its format version is {major}, and 1, 2 or 3 is needed")),
    }
    .ok_or_else(short)?;
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(short());
    };
    let header = std::str::from_utf8(header).map_err(|_| "its header is not UTF-8".to_string())?;
    let Header { descr, fortran, shape } = Reader(header).header().ok_or_else(|| {
        format!("its header must be a dict of descr, fortran_order and shape, but is {:?}", clip(header))
    })?;

    let width = match descr {
        "|u1" | "<u1" | "u1" => Width::U1,
        "<u2" => Width::U2,
        "<u4" => Width::U4,
        "<i4" => Width::I4,
        "<i8" => Width::I8,
        _ => {
            return Err(format!("its dtype is {:?}, and |u1, <u2, <u4, <i4 or <i8 is needed", clip(descr)));
        }
    };
    let [count] = shape[..] else {
        return Err(format!("it has {} dimensions, and 1 is needed", shape.len()));
    };
    // One dimension lies the same in both orders; a writer that says otherwise is not believed in the rest.
    if fortran {
        return Err("it is in Fortran order, and C order is needed".to_string());
    }
    if count.checked_mul(width.bytes()) != Some(data.len()) {
        return Err(format!(
            "it says that it has {count} ids of {} bytes, but {} bytes follow",
            width.bytes(),
            data.len()
        ));
    }
    Ok((file.len() - data.len(), count, width))
}

fn clip(text: &str) -> String {
    text.trim_end().chars().take(120).collect()
}

struct Header<'a> {
    descr: &'a str,
    fortran: bool,
    shape: Vec<usize>,
}

/// Reads the header, a Python dict, from the front; each function takes what it names, or returns `None`.
struct Reader<'a>(&'a str);

impl<'a> Reader<'a> {
    fn header(&mut self) -> Option<Header<'a>> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.token("{")?;
        while self.token("}").is_none() {
            let key = self.string()?;
            self.token(":")?;
            let twice = match key {
                "descr" => descr.replace(self.string()?).is_some(),
                "fortran_order" => fortran.replace(self.bool()?).is_some(),
                "shape" => shape.replace(self.tuple()?).is_some(),
                _ => return None,
            };
            if twice {
                return None;
            }
            if self.token(",").is_none() {
                self.token("}")?;
                break;
            }
        }
        let end = self.0.trim_ascii().is_empty();
        end.then_some(Header { descr: descr?, fortran: fortran?, shape: shape? })
    }

    fn token(&mut self, token: &str) -> Option<()> {
        self.0 = self.0.trim_ascii_start().strip_prefix(token)?;
        Some(())
    }

    fn string(&mut self) -> Option<&'a str> {
        let quote = if self.token("'").is_some() { '\'' } else { self.token("\"").map(|()| '"')? };
        let (text, rest) = self.0.split_once(quote)?;
        self.0 = rest;
        Some(text)
    }

    fn bool(&mut self) -> Option<bool> {
        if self.token("True").is_some() { Some(true) } else { self.token("False").map(|()| false) }
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        let mut sizes = Vec::new();
        self.token("(")?;
        while self.token(")").is_none() {
            let text = self.0.trim_ascii_start();
            let digits = text.bytes().take_while(u8::is_ascii_digit).count();
            sizes.push(text[..digits].parse().ok()?);
            self.0 = &text[digits..];
            if self.token(",").is_none() {
                self.token(")")?;
                break;
            }
        }
        Some(sizes)
    }
}

/// Writes ids of a vocabulary of at most 65,536.
pub fn write_npy_u16(path: &Path, ids: &[u16]) -> Result<(), FileError> {
    write(path, "<u2", ids.len(), bytemuck::cast_slice(ids))
}

/// Writes ids of a larger vocabulary.
pub fn write_npy_u32(path: &Path, ids: &[u32]) -> Result<(), FileError> {
    write(path, "<u4", ids.len(), bytemuck::cast_slice(ids))
}

/// Little-endian machines only, as `files::save` makes sure.
fn write(path: &Path, descr: &str, count: usize, data: &[u8]) -> Result<(), FileError> {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({count},), }}");
    // The data begins at a multiple of 64 bytes and the header ends with a line end.
    let length = (10 + header.len() + 1).next_multiple_of(64) - 10;
    header.extend(std::iter::repeat_n(' ', length - 1 - header.len()));
    header.push('\n');
    write_whole(path, |file| {
        file.write_all(b"\x93NUMPY\x01\x00")?;
        file.write_all(&(length as u16).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        file.write_all(data)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A file of that version and header; the length is that of the header plus `more`.
    fn npy(version: u8, header: &str, more: usize, data: &[u8]) -> Vec<u8> {
        let length = header.len() + more;
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        if version == 1 {
            bytes.extend((length as u16).to_le_bytes());
        } else {
            bytes.extend((length as u32).to_le_bytes());
        }
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Vec<i64>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.npy");
        fs::write(&path, bytes).unwrap();
        let npy = Npy::open(&path).map_err(|error| {
            let start = format!("{}: is not a .npy file of token ids: ", path.display());
            error.to_string().strip_prefix(&start).unwrap().to_string()
        })?;
        let ids: Vec<i64> = (0..npy.len()).map(|i| npy.get(i)).collect();
        assert_eq!(npy.is_empty(), ids.is_empty());
        Ok(ids)
    }

    #[test]
    fn good_files() {
        let table: &[(u8, &str, &[u8], &[i64])] = &[
            (
                1,
                "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }          \n",
                &[1, 2, 255, 255],
                &[513, 65535],
            ),
            (2, "{'descr':'<u4','fortran_order':False,'shape':(1,)}", &[255; 4], &[(1 << 32) - 1]),
            (3, "{\"shape\": (1, ), \"descr\": \"<i4\", \"fortran_order\": False}", &[255; 4], &[-1]),
            (
                1,
                "{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }",
                &[254, 255, 255, 255, 255, 255, 255, 255],
                &[-2],
            ),
            (
                1,
                "{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }\n",
                &[0, 128, 255],
                &[0, 128, 255],
            ),
            (1, "{'descr': '|u1', 'fortran_order': False, 'shape': (0,), }\n", &[], &[]),
        ];
        for &(version, header, data, ids) in table {
            assert_eq!(open(&npy(version, header, 0, data)).unwrap(), ids, "{header}");
        }
    }

    #[test]
    fn bad_files() {
        let good = "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }";
        let dict = |header: &str| {
            format!("its header must be a dict of descr, fortran_order and shape, but is {header:?}")
        };
        let dtype = |is: &str| format!("its dtype is {is:?}, and |u1, <u2, <u4, <i4 or <i8 is needed");
        let mut table: Vec<(Vec<u8>, String)> = vec![
            (vec![], "it does not begin with \\x93NUMPY".into()),
            (b"PK\x03\x04 a zip".to_vec(), "it does not begin with \\x93NUMPY".into()),
            (b"\x93NUMPY".to_vec(), "it ends within the header, at byte 6".into()),
            (b"\x93NUMPY\x01\x00\x40".to_vec(), "it ends within the header, at byte 9".into()),
            (b"\x93NUMPY\x02\x00\x40\x00\x00".to_vec(), "it ends within the header, at byte 11".into()),
            (npy(4, good, 0, &[0; 4]), "its format version is 4, and 1, 2 or 3 is needed".into()),
            (npy(1, good, 5, &[0; 4]), "it ends within the header, at byte 71".into()),
            (npy(2, good, 0xffff_0000, &[0; 4]), "it ends within the header, at byte 73".into()),
            (npy(1, good, 0, &[0; 3]), "it says that it has 2 ids of 2 bytes, but 3 bytes follow".into()),
            (npy(1, good, 0, &[0; 6]), "it says that it has 2 ids of 2 bytes, but 6 bytes follow".into()),
            (
                npy(1, &good.replace("(2,)", "(18446744073709551615,)"), 0, &[0; 4]),
                "it says that it has 18446744073709551615 ids of 2 bytes, but 4 bytes follow".into(),
            ),
            (
                npy(1, &good.replace("(2,)", "(1, 2)"), 0, &[0; 4]),
                "it has 2 dimensions, and 1 is needed".into(),
            ),
            (npy(1, &good.replace("(2,)", "()"), 0, &[0; 2]), "it has 0 dimensions, and 1 is needed".into()),
            (
                npy(1, &good.replace("False", "True"), 0, &[0; 4]),
                "it is in Fortran order, and C order is needed".into(),
            ),
        ];
        for is in [">u2", "<f4", "<u8", "|b1", "<U4"] {
            table.push((npy(1, &good.replace("<u2", is), 0, &[0; 4]), dtype(is)));
        }
        for header in [
            "",
            "{",
            "{}",
            "{'descr': '<u2'",
            "{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (2,), }",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (-2,), }",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), 'more': 1}",
            "{'descr': '<u2', 'descr': '<u2', 'fortran_order': False, 'shape': (2,)}",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), } x",
            "{'descr': 'é",
        ] {
            table.push((npy(1, header, 0, &[0; 4]), dict(header)));
        }
        let mut latin = npy(1, good, 0, &[0; 4]);
        latin[20] = 0xe9;
        table.push((latin, "its header is not UTF-8".into()));
        for (bytes, message) in table {
            assert_eq!(open(&bytes).unwrap_err(), message);
        }
    }

    #[test]
    fn written_and_read() {
        let dir = tempfile::tempdir().unwrap();
        for count in [0, 1, 9, 9_000] {
            let path = dir.path().join("ids.npy");
            let small: Vec<u16> = (0..count).map(|i| i * 7).collect();
            let large: Vec<u32> = (0..u32::from(count)).map(|i| i * 70_001).collect();
            write_npy_u16(&path, &small).unwrap();
            assert_eq!(Npy::open(&path).unwrap().data % 64, 0);
            assert_eq!(
                open(&fs::read(&path).unwrap()).unwrap(),
                small.iter().map(|&i| i.into()).collect::<Vec<i64>>()
            );
            write_npy_u32(&path, &large).unwrap();
            assert_eq!(
                open(&fs::read(&path).unwrap()).unwrap(),
                large.iter().map(|&i| i.into()).collect::<Vec<i64>>()
            );
        }
        let error = write_npy_u16(&dir.path().join("ids.npy/ids.npy"), &[1]).unwrap_err().to_string();
        assert!(error.contains("ids.npy/ids.npy: cannot write: Not a directory"), "{error}");
    }
}
