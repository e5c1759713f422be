//! Rows drawn at random from a long run of token ids.
//!
//! Row `r` of step `t` begins at a position that depends only on the seed, `t` and `r`: it is the same on
//! every mesh, and a run that goes on from a checkpoint reads what it would have read.

use super::DataError;
use super::npy::Npy;
use super::random::below;
use super::source::{Batch, narrow};

/// Token ids, and how rows are drawn from them.
#[derive(Debug)]
pub struct Sample {
    ids: Npy,
    seed: u64,
    rows: usize,
    sequence: usize,
}

impl Sample {
    /// Batches of `rows` (the global batch) by `sequence`. At least `sequence + 1` ids are needed.
    pub fn new(ids: Npy, seed: u64, rows: usize, sequence: usize) -> Result<Sample, DataError> {
        if ids.len() <= sequence {
            let (path, needed) = (ids.path().to_path_buf(), sequence.saturating_add(1));
            return Err(DataError::Few { path, ids: ids.len(), sequence, needed });
        }
        Ok(Sample { ids, seed, rows, sequence })
    }

    /// The batch of a step. The labels are the ids one further on.
    pub fn batch(&self, step: usize) -> Result<Batch, DataError> {
        let starts: Vec<usize> = (0..self.rows).map(|row| self.start(step, row)).collect();
        let read = |tensor, shift: usize| {
            let ids = starts.iter().flat_map(|&start| {
                (start + shift..start + shift + self.sequence).map(|position| self.ids.get(position))
            });
            narrow(self.ids.path(), tensor, step, self.sequence, ids)
        };
        let (inputs, labels) = (read("inputs", 0)?, read("labels", 1)?);
        Ok(Batch { inputs, labels, rows: self.rows, sequence: self.sequence })
    }

    /// Uniform over all positions from which the row and its last label fit.
    fn start(&self, step: usize, row: usize) -> usize {
        let places = self.ids.len() - self.sequence;
        below(self.seed, step as u64, row as u64, places as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::super::npy::{write_npy_u16, write_npy_u32};
    use super::*;

    fn sample(ids: &[u16], seed: u64, rows: usize, sequence: usize) -> Result<Sample, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.npy");
        write_npy_u16(&path, ids).unwrap();
        Sample::new(Npy::open(&path)?, seed, rows, sequence)
    }

    #[test]
    fn rows_and_labels() {
        let ids: Vec<u16> = (0..20).collect();
        let source = sample(&ids, 1, 50, 4).unwrap();
        let mut begins = [false; 20];
        for step in 0..10 {
            let batch = source.batch(step).unwrap();
            assert_eq!(
                (batch.rows, batch.sequence, batch.inputs.len(), batch.labels.len()),
                (50, 4, 200, 200)
            );
            for (input, label) in batch.inputs.chunks(4).zip(batch.labels.chunks(4)) {
                let start = input[0];
                assert_eq!(input, (start..start + 4).collect::<Vec<_>>());
                assert_eq!(label, (start + 1..start + 5).collect::<Vec<_>>());
                begins[start as usize] = true;
            }
        }
        // Each of the 16 places is drawn, and no other.
        assert_eq!(begins.iter().position(|&drawn| !drawn), Some(16));
        assert!(begins[16..].iter().all(|&drawn| !drawn));
    }

    #[test]
    fn the_same_for_the_same_seed() {
        let ids: Vec<u16> = (0..1000).collect();
        let batch = |seed, rows, step| sample(&ids, seed, rows, 8).unwrap().batch(step).unwrap();
        assert_eq!(batch(7, 4, 3), batch(7, 4, 3));
        assert_ne!(batch(7, 4, 3), batch(8, 4, 3));
        assert_ne!(batch(7, 4, 3), batch(7, 4, 4));
        // More rows begin with the same ones.
        assert_eq!(batch(7, 8, 3).inputs[..32], batch(7, 4, 3).inputs);
    }

    #[test]
    fn too_few_and_too_wide() {
        assert_eq!(sample(&[1, 2, 3], 0, 1, 2).unwrap().batch(9).unwrap().labels, [2, 3]);
        for (sequence, needed) in [(3, 4), (4, 5), (usize::MAX, usize::MAX)] {
            let error = sample(&[1, 2, 3], 0, 1, sequence).unwrap_err().to_string();
            assert!(
                error.ends_with(&format!(
                    "has 3 token ids, and a row of {sequence} with its labels needs {needed}"
                )),
                "{error}"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.npy");
        write_npy_u32(&path, &[1, u32::MAX]).unwrap();
        let error =
            Sample::new(Npy::open(&path).unwrap(), 0, 1, 1).unwrap().batch(0).unwrap_err().to_string();
        assert!(
            error.ends_with("labels of step 0, row 0, position 0 is 4294967295, which does not fit 32 bits"),
            "{error}"
        );
    }
}
