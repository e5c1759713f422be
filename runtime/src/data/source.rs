//! A batch, and where batches come from. A batch is that of the whole mesh; every rank takes its rows from
//! it.

use super::DataError;
use super::batches::Batches;
use super::sample::Sample;
use std::path::Path;

/// The label of a position that has no part in the loss.
pub const IGNORED: i32 = -100;

/// Token ids of one step, row-major `[rows, sequence]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// What the model reads.
    pub inputs: Vec<i32>,
    /// What it should say at each position: the next token, or `IGNORED`.
    pub labels: Vec<i32>,
    /// The global batch.
    pub rows: usize,
    /// Positions in a row.
    pub sequence: usize,
}

impl Batch {
    /// Every input is in `0..vocabulary`, every label too or `IGNORED`. The step is only for the message.
    pub fn check_vocabulary(&self, vocabulary: usize, step: usize) -> Result<(), DataError> {
        let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocabulary);
        let wrong = |tensor, at: usize, id, also| {
            let (row, position) = (at / self.sequence.max(1), at % self.sequence.max(1));
            Err(DataError::Vocabulary { tensor, step, row, position, id, vocabulary, also })
        };
        if let Some((at, &id)) = self.inputs.iter().enumerate().find(|&(_, &id)| !known(id)) {
            return wrong("inputs", at, id, "");
        }
        if let Some((at, &id)) = self.labels.iter().enumerate().find(|&(_, &id)| !known(id) && id != IGNORED)
        {
            return wrong("labels", at, id, " and -100 is ignored");
        }
        Ok(())
    }
}

/// Where the batches of a run come from.
#[derive(Debug)]
pub enum Source {
    /// As they stand in a file.
    Batches(Batches),
    /// Drawn from token ids.
    Sample(Sample),
}

impl Source {
    /// The batch of a step, counted from 0.
    pub fn batch(&self, step: usize) -> Result<Batch, DataError> {
        match self {
            Source::Batches(batches) => batches.batch(step),
            Source::Sample(sample) => sample.batch(step),
        }
    }
}

/// Ids as wide as a batch has them.
pub(super) fn narrow(
    path: &Path,
    tensor: &'static str,
    step: usize,
    sequence: usize,
    ids: impl Iterator<Item = i64>,
) -> Result<Vec<i32>, DataError> {
    ids.enumerate()
        .map(|(at, id)| {
            i32::try_from(id).map_err(|_| {
                let (path, row, position) = (path.to_path_buf(), at / sequence.max(1), at % sequence.max(1));
                DataError::Wide { path, tensor, step, row, position, id }
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_outside_the_vocabulary() {
        let table: &[(&[i32], &[i32], Option<&str>)] = &[
            (&[0, 1, 2, 9], &[1, 2, 9, -100], None),
            (&[], &[], None),
            (
                &[0, 1, 2, 10],
                &[0; 4],
                Some("inputs of step 7, row 1, position 1 is 10, but the vocabulary has 10 tokens"),
            ),
            (
                &[0, -100, 2, 3],
                &[0; 4],
                Some("inputs of step 7, row 0, position 1 is -100, but the vocabulary has 10 tokens"),
            ),
            (
                &[0; 4],
                &[-100, -1, 0, 0],
                Some(
                    "labels of step 7, row 0, position 1 is -1, but the vocabulary has 10 tokens and -100 is ignored",
                ),
            ),
            (
                &[0; 4],
                &[0, 0, i32::MAX, 0],
                Some(
                    "labels of step 7, row 1, position 0 is 2147483647, but the vocabulary has 10 tokens and -100 is ignored",
                ),
            ),
        ];
        for &(inputs, labels, message) in table {
            let batch = Batch { inputs: inputs.to_vec(), labels: labels.to_vec(), rows: 2, sequence: 2 };
            let error = batch.check_vocabulary(10, 7).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), message);
        }
    }
}
