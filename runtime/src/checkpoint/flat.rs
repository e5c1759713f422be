//! Boxes of one row-major tensor as runs of its flat positions, so that a piece under one cut of the dimensions can be
//! copied into a piece under another.
//!
//! ```text
//! 2x3, columns 1..3      runs 1..3 and 4..6
//! 6, elements 2..5       run  2..5             common: 2 and 4
//! ```

use std::ops::Range;

use crate::files::window::{Runs, Window, WindowError};

/// A box of a tensor of that shape.
#[derive(Clone, Copy, Debug)]
pub struct Box<'a> {
    /// The size of every dimension of the tensor.
    pub shape: &'a [usize],
    /// What the box takes of each.
    pub ranges: &'a [Range<usize>],
}

/// The flat positions of a box as ranges, ascending: the order in which a dense piece holds its elements.
pub fn runs(of: Box<'_>) -> Result<Vec<Range<usize>>, WindowError> {
    let all = of.shape.iter().product();
    let runs =
        Runs::of(&Window::whole(of.shape), of.ranges, all, of.ranges.iter().map(Range::len).product())?;
    let mut out = Vec::new();
    runs.for_each(|at| match runs.stride {
        1 => out.push(at..at + runs.len),
        stride => out.extend((0..runs.len).map(|i| at + i * stride..at + i * stride + 1)),
    });
    out.retain(|run| !run.is_empty());
    Ok(out)
}

/// Copies what two pieces have in common, elements of `size` bytes; both have the ranges of their runs, dense. Returns
/// how many elements that were.
pub fn copy(
    from: &[Range<usize>],
    source: &[u8],
    to: &[Range<usize>],
    target: &mut [u8],
    size: usize,
) -> usize {
    let (mut i, mut j) = (0, 0);
    // Elements of the piece before the run.
    let (mut before_from, mut before_to) = (0, 0);
    let mut copied = 0;
    while let (Some(a), Some(b)) = (from.get(i), to.get(j)) {
        let (start, end) = (a.start.max(b.start), a.end.min(b.end));
        if start < end {
            let (at, there) = (before_from + start - a.start, before_to + start - b.start);
            let n = end - start;
            target[there * size..(there + n) * size].copy_from_slice(&source[at * size..(at + n) * size]);
            copied += n;
        }
        if a.end <= b.end {
            before_from += a.len();
            i += 1;
        } else {
            before_to += b.len();
            j += 1;
        }
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn boxes_as_runs() {
        type Case<'a> = (&'a [usize], &'a [Range<usize>], &'a [Range<usize>]);
        let table: &[Case<'_>] = &[
            (&[2, 3], &[0..2, 1..3], &[1..3, 4..6]),
            (&[2, 3], &[0..2, 2..3], &[2..3, 5..6]),
            (&[2, 3], &[1..2, 0..3], std::slice::from_ref(&(3..6))),
            (&[2, 3], &[2..2, 0..3], &[]),
            (&[], &[], std::slice::from_ref(&(0..1))),
            (&[2, 2, 2], &[0..2, 0..1, 0..2], &[0..2, 4..6]),
        ];
        for (shape, ranges, expected) in table {
            assert_eq!(runs(Box { shape, ranges }).unwrap(), *expected, "{shape:?} {ranges:?}");
        }
        assert!(runs(Box { shape: &[2], ranges: std::slice::from_ref(&(1..3)) }).is_err());
    }

    proptest! {
        /// Cut as [a b, c] and split in the first dimension, read as [a, b c] and split in the second.
        #[test]
        fn another_cut_has_the_same_elements(a in 1usize..4, b in 1usize..4, c in 1usize..4, x in 0usize..9, y in 0usize..9) {
            let n = a * b * c;
            let data: Vec<u16> = (0..n as u16).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&data);
            let (mine, theirs) = ([a * b, c], [a, b * c]);
            let (x, y) = (x.min(a * b), y.min(b * c));
            for part in [0..y, y..b * c] {
                let to = runs(Box { shape: &theirs, ranges: &[0..a, part.clone()] }).unwrap();
                let expected: Vec<u16> = to.iter().flat_map(|r| data[r.clone()].to_vec()).collect();
                let mut out = vec![u8::MAX; expected.len() * 2];
                let mut copied = 0;
                for half in [0..x, x..a * b] {
                    let from = runs(Box { shape: &mine, ranges: &[half.clone(), 0..c] }).unwrap();
                    copied += copy(&from, &bytes[half.start * c * 2..half.end * c * 2], &to, &mut out, 2);
                }
                prop_assert_eq!(copied, expected.len());
                prop_assert_eq!(out, bytemuck::cast_slice::<u16, u8>(&expected));
            }
        }
    }
}
