//! The summed dimensions as one: walked in their order, in blocks whose sizes depend on nothing but their length.

use std::ops::Range;

/// A stretch of the summed dimension along which both operands have one stride.
pub struct Run {
    /// Where it begins in its block.
    pub at: usize,
    /// Its length.
    pub len: usize,
    /// Where it begins in both operands.
    pub offsets: [usize; 2],
    /// Its strides in both.
    pub strides: [usize; 2],
}

/// The summed dimensions: length and strides in both operands, innermost first; at least one.
pub struct Summed {
    dims: Vec<(usize, [usize; 2])>,
    len: usize,
    block: usize,
}

impl Summed {
    /// From the dimensions, outermost first, in blocks of at most `most` places, a multiple of 32. They have one length if
    /// some that is not much shorter divides all places.
    pub fn new(dims: impl DoubleEndedIterator<Item = (usize, [usize; 2])>, most: usize) -> Summed {
        let mut dims: Vec<_> = dims.rev().collect();
        if dims.is_empty() {
            dims.push((1, [0; 2]));
        }
        let len: usize = dims.iter().map(|(n, _)| n).product();
        let blocks = len.div_ceil(most).max(1);
        let divides = (most / 2..=most).rev().step_by(16).find(|n| len > most && len.is_multiple_of(*n));
        let block = divides.unwrap_or_else(|| len.div_ceil(blocks).next_multiple_of(16));
        Summed { dims, len, block }
    }

    /// How many places it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its strides in both operands, if there are such.
    pub fn strides(&self) -> Option<[usize; 2]> {
        (self.dims.len() == 1).then(|| self.dims[0].1)
    }

    /// The longest block.
    pub fn longest(&self) -> usize {
        self.block.min(self.len)
    }

    /// The blocks, one after the other.
    pub fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.blocks_of(0..self.len)
    }

    /// The blocks of a range that begins and ends with one.
    pub fn blocks_of(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let block = self.block;
        range.clone().step_by(block).map(move |start| start..range.end.min(start + block))
    }

    /// The strides in both operands that each block has all along, if there are such.
    pub fn strides_of_blocks(&self) -> Option<[usize; 2]> {
        let (inner, strides) = self.dims[0];
        (self.dims.len() == 1 || inner.is_multiple_of(self.block)).then_some(strides)
    }

    /// Where a place lies in both operands.
    #[inline(always)]
    pub fn offsets(&self, place: usize) -> [usize; 2] {
        let (mut rest, mut offsets) = (place, [0; 2]);
        for (i, (len, [a, b])) in self.dims.iter().enumerate() {
            // The outermost needs no division.
            let last = i + 1 == self.dims.len();
            let at = if last { rest } else { rest % len };
            rest = if last { 0 } else { rest / len };
            offsets = [offsets[0] + at * a, offsets[1] + at * b];
        }
        offsets
    }

    /// Calls `visit` for each run of a block, in order.
    #[inline(always)]
    pub fn runs(&self, block: Range<usize>, mut visit: impl FnMut(Run)) {
        let (inner, strides) = self.dims[0];
        let mut start = block.start;
        while start < block.end {
            let len = (inner - start % inner).min(block.end - start);
            visit(Run { at: start - block.start, len, offsets: self.offsets(start), strides });
            start += len;
        }
    }
}
