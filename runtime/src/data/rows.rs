//! Which rows of the global batch each micro-batch has: a rank's rows stay on it, and each micro-batch has as many of them
//! as any other, one more or less. All micro-batches have one size, so some end with rows that do not count.

use std::ops::Range;

use super::source::{Batch, IGNORED};
use crate::tensor::Tensor;

/// For each micro-batch, for each of its rows, the row of the global batch; none: one that does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    global: usize,
    all: Vec<Vec<Option<usize>>>,
}

impl Rows {
    /// Of ranks that have these pieces of the global batch, in order. One micro-batch is the batch itself.
    pub fn of(pieces: &[Range<usize>], microbatches: usize) -> Rows {
        let global = pieces.last().map_or(0, |p| p.end);
        if microbatches <= 1 {
            return Rows { global, all: vec![(0..global).map(Some).collect()] };
        }
        let most = pieces.iter().map(|p| p.len().div_ceil(microbatches)).max().unwrap_or(0).max(1);
        let one = |m: usize| {
            pieces.iter().flat_map(move |piece| {
                let (each, more) = (piece.len() / microbatches, piece.len() % microbatches);
                let start = piece.start + m * each + m.min(more);
                let here = each + usize::from(m < more);
                (0..most).map(move |i| (i < here).then_some(start + i))
            })
        };
        Rows { global, all: (0..microbatches).map(|m| one(m).collect()).collect() }
    }

    /// Of micro-batches that each have so many rows in a row.
    pub fn chunks(each: usize, microbatches: usize) -> Rows {
        let all = (0..microbatches).map(|m| (m * each..(m + 1) * each).map(Some).collect()).collect();
        Rows { global: each * microbatches, all }
    }

    /// Rows of a micro-batch.
    pub fn each(&self) -> usize {
        self.all.first().map_or(0, Vec::len)
    }

    /// Rows of the global batch: those that count.
    pub fn counted(&self) -> usize {
        self.global
    }

    /// Whether micro-batches have rows that do not count.
    pub fn is_filled(&self) -> bool {
        self.all.iter().flatten().any(Option::is_none)
    }

    /// How many micro-batches there are.
    pub fn microbatches(&self) -> usize {
        self.all.len()
    }

    /// For each micro-batch the numbers of its rows in the global batch, as random numbers need them; what does not count is
    /// called row 0.
    pub fn numbers(&self) -> Vec<Vec<i32>> {
        let number = |row: &Option<usize>| row.map_or(0, |row| row as i32);
        self.all.iter().map(|rows| rows.iter().map(number).collect()).collect()
    }

    /// The micro-batches of a batch. What does not count has token 0 and no label.
    pub fn split(&self, batch: &Batch) -> Vec<Batch> {
        let n = batch.sequence;
        let of = |ids: &[i32], rows: &[Option<usize>], none: i32| -> Vec<i32> {
            rows.iter()
                .flat_map(|row| match row {
                    Some(row) => ids[row * n..(row + 1) * n].to_vec(),
                    None => vec![none; n],
                })
                .collect()
        };
        let one = |rows: &Vec<Option<usize>>| Batch {
            inputs: of(&batch.inputs, rows, 0),
            labels: of(&batch.labels, rows, IGNORED),
            rows: rows.len(),
            sequence: n,
        };
        self.all.iter().map(one).collect()
    }

    /// The rows of all micro-batches as those of the global batch: of each a tensor whose first dimension is its rows.
    /// None if they are not.
    pub fn join(&self, parts: &[Tensor<f32>]) -> Option<Tensor<f32>> {
        let (first, each) = (parts.first()?, self.each());
        let fits = |t: &Tensor<f32>| t.shape.first() == Some(&each) && t.shape == first.shape;
        if parts.len() != self.all.len() || !parts.iter().all(fits) {
            return None;
        }
        let n: usize = first.shape[1..].iter().product();
        let shape: Vec<usize> = [&[self.global], &first.shape[1..]].concat();
        let mut whole = Tensor::full(&shape, 0.0);
        for (rows, part) in self.all.iter().zip(parts) {
            for (i, row) in rows.iter().enumerate() {
                let Some(row) = row else { continue };
                whole.data[row * n..(row + 1) * n].copy_from_slice(&part.data[i * n..(i + 1) * n]);
            }
        }
        Some(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batch, ranks and micro-batches: uneven ones, ranks without rows, micro-batches without rows.
    const CASES: [(usize, usize, usize); 8] =
        [(8, 2, 2), (4, 3, 2), (5, 2, 3), (4, 4, 3), (7, 1, 3), (2, 4, 2), (6, 2, 1), (1, 1, 2)];

    fn pieces(rows: usize, ranks: usize) -> Vec<Range<usize>> {
        let each = rows.div_ceil(ranks);
        (0..ranks).map(|r| (r * each).min(rows)..((r + 1) * each).min(rows)).collect()
    }

    #[test]
    fn every_row_is_in_one_micro_batch_on_its_own_rank() {
        for (n, ranks, m) in CASES {
            let pieces = pieces(n, ranks);
            let rows = Rows::of(&pieces, m);
            let mut seen: Vec<usize> = rows.all.iter().flatten().flatten().copied().collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..n).collect::<Vec<_>>(), "{n} rows, {ranks} ranks, {m} micro-batches");
            if m == 1 {
                continue;
            }
            let each = rows.each() / ranks;
            for (rank, piece) in pieces.iter().enumerate() {
                let here = |micro: &Vec<Option<usize>>| -> Vec<usize> {
                    micro[rank * each..(rank + 1) * each].iter().flatten().copied().collect()
                };
                let counts: Vec<usize> = rows.all.iter().map(|micro| here(micro).len()).collect();
                assert!(rows.all.iter().flat_map(here).all(|row| piece.contains(&row)));
                assert!(counts.iter().max() <= counts.iter().min().map(|n| n + 1).as_ref());
            }
        }
    }

    #[test]
    fn what_is_split_is_joined_again() {
        for (n, ranks, m) in CASES {
            let rows = Rows::of(&pieces(n, ranks), m);
            let ids: Vec<i32> = (1..=2 * n as i32).collect();
            let parts = rows.split(&Batch { inputs: ids.clone(), labels: ids.clone(), rows: n, sequence: 2 });
            let numbers = rows.numbers().into_iter().flatten().zip(rows.all.iter().flatten());
            assert!(numbers.clone().all(|(number, row)| number == row.unwrap_or(0) as i32));
            assert_eq!(numbers.count(), rows.each() * rows.microbatches());
            let padded = parts.iter().flat_map(|b| b.labels.iter().zip(&b.inputs));
            assert!(padded.clone().all(|(label, input)| (*label == IGNORED) == (*input == 0)));
            let tensor = |b: &Batch| Tensor {
                shape: vec![b.rows, 2],
                data: b.inputs.iter().map(|i| *i as f32).collect(),
            };
            let joined = rows.join(&parts.iter().map(tensor).collect::<Vec<_>>()).unwrap();
            assert_eq!(joined.shape, [n, 2]);
            assert!(joined.data.iter().zip(&ids).all(|(a, b)| *a == *b as f32));
        }
    }
}
