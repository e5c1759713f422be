//! What collectives a step really performed, counted where they are done and measured by the pieces they were done on:
//! independent of what anybody planned.

use std::sync::atomic::{AtomicU64, Ordering};

use ir::schedule::Kind;
use ir::{Axis, DType};

use super::code::{Code, Op};

/// Collectives of one kind and size in a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// The field's name for it.
    pub op: &'static str,
    /// Over which axes.
    pub axes: Vec<Axis>,
    /// How many ranks take part.
    pub group_size: usize,
    /// Of what type the elements are.
    pub dtype: DType,
    /// In which segment.
    pub segment: Kind,
    /// How often a rank did it in the step.
    pub count: u64,
    /// The size of one call's full tensor, padded to equal pieces: what an all_reduce is given; for all_gather n times the
    /// largest piece of the group; for reduce_scatter n times the largest piece afterwards; for all_to_all one rank's
    /// padded buffer; for permute the largest piece. Of a bucket the sum over its tensors.
    pub bytes: usize,
    /// What each member sends in one call, at the least: (n-1)/n of the bytes, twice for an all_reduce, all of them for
    /// permute.
    pub wire_bytes: f64,
}

/// The largest over the ranks of a row of the pipeline, position by position: groups at an edge of the mesh have smaller
/// pieces, or none. What rows do alike is added up.
pub fn traffic(code: &Code, counts: &Counts) -> Vec<Traffic> {
    let mut rows: Vec<Traffic> = Vec::new();
    for row in 0..code.ranks.iter().map(|r| r.row + 1).max().unwrap_or(0) {
        let ranks: Vec<usize> = (0..code.ranks.len()).filter(|r| code.ranks[*r].row == row).collect();
        let segments = ranks.iter().map(|r| code.ranks[*r].segments.len()).max().unwrap_or(0);
        for s in 0..segments {
            let segment = |r: &usize| code.ranks[*r].segments.get(s);
            let tokens = ranks.iter().filter_map(segment).map(|s| s.tokens).max().unwrap_or(0);
            for t in 0..tokens {
                let Some(next) = largest(code, counts, &ranks, s, t) else { continue };
                let count = next.count;
                match rows.iter_mut().find(|row| Traffic { count, ..(*row).clone() } == next) {
                    Some(row) => row.count += count,
                    None => rows.push(next),
                }
            }
        }
    }
    rows
}

/// Of some ranks the one that sent most by what a segment starts under a number.
fn largest(code: &Code, counts: &Counts, ranks: &[usize], s: usize, t: usize) -> Option<Traffic> {
    let mut largest: Option<Traffic> = None;
    for rank in ranks {
        let Some(segment) = code.ranks[*rank].segments.get(s) else { continue };
        let start = segment.ops.iter().find_map(|op| match op {
            // Who receives a message sends nothing.
            Op::Start { token, bucket, .. } | Op::Post { token, member: 0, bucket, .. } => {
                (*token == t).then_some(bucket)
            }
            Op::Feed { .. }
            | Op::Launch { .. }
            | Op::Copy { .. }
            | Op::Fill { .. }
            | Op::Wait { .. }
            | Op::Post { .. }
            | Op::Done { .. }
            | Op::Tap { .. } => None,
        });
        let Some(bucket) = start else { continue };
        let c = bucket.first();
        let count = counts.get(*rank, s, t);
        if count > 0 && largest.as_ref().is_none_or(|l| (l.bytes, l.count) < (bucket.bytes, count)) {
            // Both ends of a message may be one rank.
            let itself = c.members.iter().all(|m| *m == c.members[0]);
            largest = Some(Traffic {
                op: c.op,
                axes: c.axes.clone(),
                group_size: if itself { 1 } else { c.members.len() },
                dtype: c.dtype,
                segment: segment.kind,
                count,
                bytes: bucket.bytes,
                wire_bytes: bucket.wire_bytes(),
            });
        }
    }
    largest
}

/// How often a rank performed each collective of its code.
pub struct Counts {
    /// Where each segment's starts begin, by rank and segment.
    starts: Vec<Vec<usize>>,
    counts: Vec<Vec<AtomicU64>>,
}

impl Counts {
    /// All at 0.
    pub fn new(code: &Code) -> Counts {
        let mut all = Counts { starts: Vec::new(), counts: Vec::new() };
        for rank in &code.ranks {
            let mut n = 0;
            let mut starts = Vec::new();
            for segment in &rank.segments {
                starts.push(n);
                n += segment.tokens;
            }
            all.starts.push(starts);
            all.counts.push(std::iter::repeat_with(AtomicU64::default).take(n).collect());
        }
        all
    }

    fn of(&self, rank: usize, segment: usize, token: usize) -> &AtomicU64 {
        &self.counts[rank][self.starts[rank][segment] + token]
    }

    /// One more.
    pub fn add(&self, rank: usize, segment: usize, token: usize) {
        self.of(rank, segment, token).fetch_add(1, Ordering::Relaxed);
    }

    /// How often.
    pub fn get(&self, rank: usize, segment: usize, token: usize) -> u64 {
        self.of(rank, segment, token).load(Ordering::Relaxed)
    }

    /// All at 0 again.
    pub fn reset(&self) {
        self.counts.iter().flatten().for_each(|c| c.store(0, Ordering::Relaxed));
    }
}
