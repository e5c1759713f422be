//! Which elements of one dense piece are which of another: the form that every copy and every move comes to.
//!
//! A block says that a box of elements of a source lies as the same box in a target, as loops over contiguous runs.

use std::ops::Range;

/// A box of global indices: a range for each dimension.
pub type Region = Vec<Range<usize>>;

/// How many elements a region has.
pub fn elements(region: &[Range<usize>]) -> usize {
    region.iter().map(Range::len).product()
}

/// A loop over runs, with the distance between two of them in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop {
    len: usize,
    from: usize,
    to: usize,
}

/// The common elements of two dense row-major pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Innermost first.
    loops: Vec<Loop>,
    run: usize,
    from: usize,
    to: usize,
    elements: usize,
}

impl Block {
    /// The common elements of the pieces that hold the regions `from` and `to`; none if there are none.
    pub fn common(from: &[Range<usize>], to: &[Range<usize>]) -> Option<Block> {
        let common: Region =
            from.iter().zip(to).map(|(a, b)| a.start.max(b.start)..a.end.min(b.end)).collect();
        if common.iter().any(Range::is_empty) {
            return None;
        }
        let mut block = Block { loops: Vec::new(), run: 1, from: 0, to: 0, elements: elements(&common) };
        let (mut stride_from, mut stride_to) = (1, 1);
        for d in (0..common.len()).rev() {
            block.from += (common[d].start - from[d].start) * stride_from;
            block.to += (common[d].start - to[d].start) * stride_to;
            block.push(Loop { len: common[d].len(), from: stride_from, to: stride_to });
            stride_from *= from[d].len();
            stride_to *= to[d].len();
        }
        Some(block)
    }

    /// Adds the next outer dimension, united with what is there where it can be.
    fn push(&mut self, next: Loop) {
        if next.len == 1 {
            return;
        }
        match self.loops.last_mut() {
            None if next.from == self.run && next.to == self.run => self.run *= next.len,
            Some(inner) if next.from == inner.from * inner.len && next.to == inner.to * inner.len => {
                inner.len *= next.len;
            }
            None | Some(_) => self.loops.push(next),
        }
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Visits the elements `range`, counted in the order of the runs, as (place in the source, place in the target, how
    /// many), at most `most` at a time, in ascending order.
    pub fn runs(&self, range: Range<usize>, most: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let mut at = range.start;
        while at < range.end {
            let (mut index, inner) = (at / self.run, at % self.run);
            let (mut from, mut to) = (self.from + inner, self.to + inner);
            for l in &self.loops {
                from += index % l.len * l.from;
                to += index % l.len * l.to;
                index /= l.len;
            }
            // Along the innermost loop a run follows from the last one without divisions.
            let (step_from, step_to, mut runs) = match self.loops.first() {
                Some(l) => (l.from, l.to, l.len - at / self.run % l.len),
                None => (0, 0, 1),
            };
            let mut skipped = inner;
            while runs > 0 && at < range.end {
                let n = (self.run - skipped).min(range.end - at);
                let mut done = 0;
                while done < n {
                    let part = most.min(n - done);
                    visit(from + done, to + done, part);
                    done += part;
                }
                at += n;
                from = from + step_from - skipped;
                to = to + step_to - skipped;
                skipped = 0;
                runs -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(from: &[Range<usize>], to: &[Range<usize>], part: Range<usize>, most: usize) -> Vec<[usize; 3]> {
        let mut all = Vec::new();
        if let Some(block) = Block::common(from, to) {
            block.runs(part, most, |a, b, n| all.push([a, b, n]));
        }
        all
    }

    #[test]
    fn whole_inner_dimensions_are_one_run() {
        assert_eq!(runs(&[0..4, 0..3], &[1..3, 0..3], 0..6, 99), [[3, 0, 6]]);
        assert_eq!(
            runs(&[0..4, 0..3], &[0..4, 1..3], 0..8, 99),
            [[1, 0, 2], [4, 2, 2], [7, 4, 2], [10, 6, 2]]
        );
        assert_eq!(runs(&[0..2, 0..1], &[2..4, 0..1], 0..0, 99), Vec::<[usize; 3]>::new());
        assert_eq!(runs(&[], &[], 0..1, 99), [[0, 0, 1]]);
    }

    #[test]
    fn parts_are_the_whole() {
        let (from, to) = ([0..4, 1..6, 0..3, 2..9], [1..4, 0..5, 0..3, 0..7]);
        let block = Block::common(&from, &to).unwrap();
        let list = |parts: &[Range<usize>], most| {
            let mut all = Vec::new();
            for part in parts {
                block.runs(part.clone(), most, |a, b, n| all.extend((0..n).map(|i| (a + i, b + i))));
            }
            all
        };
        let n = block.elements();
        assert_eq!(n, 3 * 4 * 3 * 5);
        let whole = list(std::slice::from_ref(&(0..n)), 1000);
        assert_eq!(whole.len(), n);
        assert_eq!(list(&[0..7, 7..8, 8..61, 61..n], 3), whole);
        let mut expected = Vec::new();
        for a in 1..4 {
            for b in 1..5 {
                for c in 0..3 {
                    for d in 2..7 {
                        let from = ((a * 5 + b - 1) * 3 + c) * 7 + d - 2;
                        expected.push((from, (((a - 1) * 5 + b) * 3 + c) * 7 + d));
                    }
                }
            }
        }
        assert_eq!(whole, expected);
    }
}
