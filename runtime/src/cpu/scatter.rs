//! Scatters: rows added to the places that an index says, in the order of the loops that the index has.

use ir::DType;
use ir::kernel::Scatter;

use super::lanes::best;
use super::layout::{count, merged, points, ranges, strides};

/// A scatter, planned for one rank.
pub struct Plan {
    /// Loops of the index: the strides of index, source and result.
    outer: Vec<(usize, [usize; 3])>,
    /// The other loops but the last: the strides of source and result.
    inner: Vec<(usize, [usize; 2])>,
    /// The last.
    run: (usize, [usize; 2]),
    wide: bool,
    start: i64,
    len: i64,
    /// How far apart the rows of the result lie.
    stride: usize,
    count: usize,
    empty: bool,
}

/// Plans a scatter whose index has type `index` for the rank at `at`.
pub fn plan(scatter: &Scatter, index: DType, mesh: &ir::Mesh, at: &[usize]) -> Plan {
    let loops: Vec<_> = scatter.loops.iter().collect();
    let ranges = ranges(&loops, mesh, at);
    let lens: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
    let of = [&scatter.index, &scatter.source, &scatter.out].map(|access| strides(access, &lens));
    let space = || (0..lens.len()).filter(|l| *l != scatter.looked);
    let indexed = |l: usize| scatter.index.iter().flatten().any(|f| *f == l);
    let outer = merged(space().filter(|l| indexed(*l)).map(|l| (lens[l], [of[0][l], of[1][l], of[2][l]])));
    let mut inner = merged(space().filter(|l| !indexed(*l)).map(|l| (lens[l], [of[1][l], of[2][l]])));
    let run = inner.pop().unwrap_or((1, [0, 0]));
    let looked = &ranges[scatter.looked];
    Plan {
        outer,
        inner,
        run,
        wide: index == DType::I64,
        start: looked.start as i64,
        len: looked.len() as i64,
        stride: of[2][scatter.looked],
        count: count(&scatter.out, &lens),
        empty: space().any(|l| lens[l] == 0),
    }
}

impl Plan {
    /// Operations on numbers.
    pub fn flops(&self) -> f64 {
        let outer: usize = self.outer.iter().map(|(n, _)| n).product();
        let inner: usize = self.inner.iter().map(|(n, _)| n).product();
        (outer * inner * self.run.0) as f64
    }

    /// Runs it.
    ///
    /// # Safety
    /// The operands and the result are as large as planned; the result overlaps no operand.
    pub unsafe fn run(&self, source: *const f32, index: *const u8, out: *mut f32) {
        let add = (best().into)(ir::Reduce::Sum);
        let (n, [from_stride, to_stride]) = self.run;
        // SAFETY: the caller's; offsets are of elements on this rank.
        unsafe {
            std::slice::from_raw_parts_mut(out, self.count).fill(0.0);
            if self.empty {
                return;
            }
            points(&self.outer, |_, [i, from, to]| {
                let index = if self.wide {
                    *index.cast::<i64>().add(i)
                } else {
                    i64::from(*index.cast::<i32>().add(i))
                };
                let row = index.wrapping_sub(self.start);
                if row < 0 || row >= self.len {
                    return;
                }
                let (source, out) = (source.add(from), out.add(to + row as usize * self.stride));
                points(&self.inner, |_, [from, to]| {
                    let (source, out) = (source.add(from), out.add(to));
                    if (from_stride, to_stride) == (1, 1) {
                        return add(out, source, n);
                    }
                    for i in 0..n {
                        *out.add(i * to_stride) += *source.add(i * from_stride);
                    }
                });
            });
        }
    }
}
