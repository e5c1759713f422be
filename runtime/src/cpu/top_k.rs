//! The best along a loop: a row at a time, in strips, most of which hold nothing better than what is found already.

use ir::DType;
use ir::kernel::TopK;

use super::convert::load;
use super::lanes::best;
use super::layout::{count, merged, points, ranges, strides};
use crate::pairs::{clear, insert};

/// How many elements are looked at together.
const STRIP: usize = 64;

/// A search, planned for one rank.
pub struct Plan {
    /// The loops of the rows: the strides of source and result.
    outer: Vec<(usize, [usize; 2])>,
    dtype: DType,
    /// How many elements a row has, how far apart they lie, and the global index of the first.
    len: usize,
    stride: usize,
    start: usize,
    /// How many pairs.
    k: usize,
    count: usize,
}

/// Plans a search in elements of type `dtype` for the rank at `at`.
pub fn plan(top: &TopK, dtype: DType, mesh: &ir::Mesh, at: &[usize]) -> Plan {
    let loops: Vec<_> = top.loops.iter().collect();
    let ranges = ranges(&loops, mesh, at);
    let lens: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
    let of = [&top.source, &top.out].map(|access| strides(access, &lens));
    let kept = top.out.len().saturating_sub(2);
    // In the order of the result: its blocks are written one after the other.
    let rows = top.out[..kept].iter().flatten().map(|l| (lens[*l], [of[0][*l], of[1][*l]]));
    let range = &ranges[top.searched];
    Plan {
        outer: merged(rows),
        dtype,
        len: range.len(),
        stride: of[0][top.searched],
        start: range.start,
        k: top.out[kept..].first().map_or(0, |d| d.iter().map(|l| lens[*l]).product()),
        count: count(&top.out, &lens),
    }
}

impl Plan {
    /// Operations on numbers: a comparison each.
    pub fn flops(&self) -> f64 {
        (self.outer.iter().map(|(n, _)| n).product::<usize>() * self.len) as f64
    }

    /// Runs it.
    ///
    /// # Safety
    /// The operand and the result are as large as planned, and do not overlap.
    pub unsafe fn run(&self, source: *const u8, out: *mut f32) {
        if self.count == 0 {
            return;
        }
        let size = self.dtype.bytes();
        points(&self.outer, |_, [from, to]| {
            // SAFETY: the caller's; a row of the result is a block of `k` pairs, which lie together.
            unsafe {
                let block = std::slice::from_raw_parts_mut(out.add(to), 2 * self.k);
                self.row(source.add(from * size), block);
            }
        });
    }

    /// # Safety
    /// The source has a row of elements.
    unsafe fn row(&self, source: *const u8, block: &mut [f32]) {
        clear(block);
        let lanes = best();
        let mut strip = [0f32; STRIP];
        let last = block.len() - 2;
        for first in (0..self.len).step_by(STRIP) {
            let n = STRIP.min(self.len - first);
            // SAFETY: the caller's; the strip has that many lanes.
            unsafe {
                let from = source.add(first * self.stride * self.dtype.bytes());
                load(lanes, self.dtype, strip.as_mut_ptr(), from, n, self.stride);
            }
            strip[n..].fill(f32::NEG_INFINITY);
            // Later ones have higher indices: an equal one is not better, but where pairs are absent.
            let full = |block: &[f32]| block[last + 1] != f32::NEG_INFINITY;
            let better = |x: f32, worst: f32| x > worst || x.is_nan();
            let worst = block[last];
            if full(block) && !strip.iter().fold(false, |any, x| any | better(*x, worst)) {
                continue;
            }
            for (i, x) in strip[..n].iter().enumerate() {
                if !full(block) || better(*x, block[last]) {
                    insert(block, [*x, (self.start + first + i) as f32]);
                }
            }
        }
    }
}
