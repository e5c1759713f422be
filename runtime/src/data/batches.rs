//! Batches as they stand in a safetensors file: `inputs` and `labels`, both I64 `[steps, global batch,
//! sequence]`. The labels are shifted already: the label at a position is what should be said there, and -100
//! is ignored.

use super::DataError;
use super::source::{Batch, narrow};
use crate::files::FileError;
use crate::files::mapped::{Mapped, Tensor};
use safetensors::Dtype;
use std::path::Path;

/// A file of batches, mapped.
#[derive(Debug)]
pub struct Batches {
    file: Mapped,
    steps: usize,
    rows: usize,
    sequence: usize,
}

impl Batches {
    /// Maps the file and checks dtypes and shapes; ids are looked at step by step.
    pub fn open(path: &Path) -> Result<Batches, DataError> {
        let file = Mapped::open(path)?;
        let inputs = ids(&file, "inputs")?.shape;
        let &[steps, rows, sequence] = inputs else {
            return Err(no_batches(path, inputs));
        };
        if steps == 0 || rows == 0 || sequence == 0 {
            return Err(no_batches(path, inputs));
        }
        let labels = ids(&file, "labels")?.shape;
        if labels != inputs {
            let (path, tensor) = (path.to_path_buf(), "labels".to_string());
            return Err(
                FileError::Shape { path, tensor, is: labels.to_vec(), needed: inputs.to_vec() }.into()
            );
        }
        Ok(Batches { file, steps, rows, sequence })
    }

    /// How many batches there are.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Rows of a batch.
    pub fn global_batch(&self) -> usize {
        self.rows
    }

    /// Positions of a row.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// The batch of a step, counted from 0; a step past the end is an error.
    pub fn batch(&self, step: usize) -> Result<Batch, DataError> {
        let path = self.file.path();
        if step >= self.steps {
            return Err(DataError::Step { path: path.to_path_buf(), steps: self.steps, step });
        }
        let read = |tensor| {
            let (all, _) = ids(&self.file, tensor)?.bytes.as_chunks::<8>();
            let size = self.rows * self.sequence;
            let these = all[step * size..][..size].iter().map(|&bytes| i64::from_le_bytes(bytes));
            narrow(path, tensor, step, self.sequence, these)
        };
        let (inputs, labels) = (read("inputs")?, read("labels")?);
        Ok(Batch { inputs, labels, rows: self.rows, sequence: self.sequence })
    }
}

fn no_batches(path: &Path, is: &[usize]) -> DataError {
    DataError::Batches { path: path.to_path_buf(), tensor: "inputs", is: is.to_vec() }
}

fn ids<'a>(file: &'a Mapped, name: &str) -> Result<Tensor<'a>, FileError> {
    let (path, tensor) = (file.path().to_path_buf(), name.to_string());
    let Some(found) = file.get(name) else {
        let similar = format!(": {}", file.names().take(8).collect::<Vec<_>>().join(", "));
        return Err(FileError::Missing { path, tensor, count: file.names().len(), similar });
    };
    if found.dtype != Dtype::I64 {
        return Err(FileError::Dtype { path, tensor, is: found.dtype, needed: "I64" });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::save::{Data, write_tensors};
    use std::path::PathBuf;

    type Written<'a> = (&'a str, &'a [usize], Data<'a>);

    fn write(dir: &tempfile::TempDir, tensors: &[Written<'_>]) -> PathBuf {
        let path = dir.path().join("b.safetensors");
        let tensors: Vec<_> = tensors.iter().map(|&(n, s, d)| (n.to_string(), s.to_vec(), d)).collect();
        write_tensors(&path, &tensors, &[]).unwrap();
        path
    }

    #[test]
    fn steps_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let inputs: Vec<i64> = (0..12).collect();
        let mut labels: Vec<i64> = (1..13).collect();
        labels[8] = -100;
        let shape = [3, 2, 2];
        let path =
            write(&dir, &[("inputs", &shape, Data::I64(&inputs)), ("labels", &shape, Data::I64(&labels))]);
        let batches = Batches::open(&path).unwrap();
        assert_eq!((batches.steps(), batches.global_batch(), batches.sequence()), (3, 2, 2));
        let batch = batches.batch(2).unwrap();
        assert_eq!((batch.rows, batch.sequence), (2, 2));
        assert_eq!(batch.inputs, [8, 9, 10, 11]);
        assert_eq!(batch.labels, [-100, 10, 11, 12]);
        let end = batches.batch(3).unwrap_err().to_string();
        assert_eq!(end, format!("{}: has 3 steps, counted from 0, and step 3 is needed", path.display()));

        labels[5] = 1 << 40;
        write(&dir, &[("inputs", &shape, Data::I64(&inputs)), ("labels", &shape, Data::I64(&labels))]);
        let wide = Batches::open(&path).unwrap();
        wide.batch(0).unwrap();
        let error = wide.batch(1).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{}: labels of step 1, row 0, position 1 is 1099511627776, which does not fit 32 bits",
                path.display()
            )
        );
    }

    #[test]
    fn what_are_no_batches() {
        let dir = tempfile::tempdir().unwrap();
        let four = Data::I64(&[1, 2, 3, 4]);
        let table: &[(&[Written<'_>], &str)] = &[
            (&[("input", &[4], four)], "has no tensor \"inputs\" among its 1: input"),
            (&[("inputs", &[1, 2, 2], four)], "has no tensor \"labels\" among its 1: inputs"),
            (
                &[("inputs", &[2, 2], four)],
                "tensor \"inputs\" is [2, 2], and [steps, global batch, sequence] is needed, none of them 0",
            ),
            (
                &[("inputs", &[1, 0, 2], Data::I64(&[]))],
                "tensor \"inputs\" is [1, 0, 2], and [steps, global batch, sequence] is needed, none of them 0",
            ),
            (
                &[("inputs", &[1, 1, 2], Data::F32(&[0.0, 1.0]))],
                "tensor \"inputs\" is F32, and I64 is needed",
            ),
            (
                &[("inputs", &[1, 2, 2], four), ("labels", &[2, 1, 2], four)],
                "tensor \"labels\" is [2, 1, 2], and [1, 2, 2] is needed",
            ),
        ];
        for (tensors, message) in table {
            let path = write(&dir, tensors);
            assert_eq!(
                Batches::open(&path).unwrap_err().to_string(),
                format!("{}: {message}", path.display())
            );
        }
    }
}
