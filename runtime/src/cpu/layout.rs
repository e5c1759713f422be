//! Where a rank's elements lie: each loop's range on the rank, the strides of an access, and walks over a space.

use std::ops::Range;

use ir::kernel::{Access, Kernel, Loop};

/// The most dimensions that a walk can have after neighbours are merged.
pub const MAX_DIMS: usize = 12;

/// What a kernel runs over, and how its operands lie there: for each loop how long they are along it in memory, where that
/// is longer than what is run over if it is a block of them.
#[derive(Clone, Debug)]
pub struct Extents {
    /// The range of each loop.
    pub ranges: Vec<Range<usize>>,
    /// For each operand and loop the length in memory.
    pub reads: Vec<Vec<usize>>,
    /// For each result and loop the length in memory.
    pub writes: Vec<Vec<usize>>,
}

impl Extents {
    /// All of the rank at `at`.
    pub fn whole(kernel: &Kernel, mesh: &ir::Mesh, at: &[usize]) -> Extents {
        let ranges = ranges(&kernel.body.loops(), mesh, at);
        let lens: Vec<usize> = ranges.iter().map(Range::len).collect();
        let (reads, writes) = (kernel.reads.len(), kernel.writes.len());
        Extents { ranges, reads: vec![lens.clone(); reads], writes: vec![lens; writes] }
    }

    /// How long each loop is.
    pub fn lens(&self) -> Vec<usize> {
        self.ranges.iter().map(Range::len).collect()
    }
}

/// The range of each loop on the rank at `at`.
pub fn ranges(loops: &[&Loop], mesh: &ir::Mesh, at: &[usize]) -> Vec<Range<usize>> {
    loops.iter().map(|l| ir::extent(l.size, &l.axes, mesh, at)).collect()
}

/// For each loop, how far apart neighbours along it lie in a dense row-major operand with this access.
/// 0 for a loop that the access lacks.
pub fn strides(access: &Access, lens: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; lens.len()];
    let mut step = 1;
    for l in access.iter().rev().flat_map(|dim| dim.iter().rev()) {
        strides[*l] += step;
        step *= lens[*l];
    }
    strides
}

/// How many elements an operand has on the rank.
pub fn count(access: &Access, lens: &[usize]) -> usize {
    access.iter().flatten().map(|l| lens[*l]).product()
}

/// Merges neighbours, outermost first, where all `N` strides allow it, and leaves out dimensions of size 1.
pub fn merged<const N: usize>(
    dims: impl IntoIterator<Item = (usize, [usize; N])>,
) -> Vec<(usize, [usize; N])> {
    let mut out: Vec<(usize, [usize; N])> = Vec::new();
    for (len, strides) in dims {
        if len == 1 {
            continue;
        }
        match out.last_mut() {
            Some((outer, far)) if (0..N).all(|i| far[i] == strides[i] * len) => {
                *outer *= len;
                *far = strides;
            }
            Some(_) | None => out.push((len, strides)),
        }
    }
    out
}

/// The offsets of an operand's elements in the row-major order of a space.
#[derive(Clone, Debug, PartialEq)]
pub struct Walk {
    /// Length and stride, innermost first; at least one.
    dims: Vec<(usize, usize)>,
}

impl Walk {
    /// Over loops of these lengths, outermost first.
    pub fn new(lens: &[usize], strides: &[usize]) -> Walk {
        let mut dims: Vec<_> = merged(lens.iter().zip(strides).map(|(n, s)| (*n, [*s])))
            .into_iter()
            .map(|(n, [s])| (n, s))
            .collect();
        dims.reverse();
        if dims.is_empty() {
            dims.push((1, 0));
        }
        Walk { dims }
    }

    /// The stride of the innermost dimension.
    pub fn inner_stride(&self) -> usize {
        self.dims[0].1
    }

    /// After how many points the offsets begin again; none if they never do.
    pub fn period(&self) -> Option<usize> {
        let (last, inner) = self.dims.split_last()?;
        (last.1 == 0).then(|| inner.iter().map(|(n, _)| n).product())
    }

    /// Whether all points of each `n` that follow each other, counted from the first, have one offset.
    pub fn is_same_in_each(&self, n: usize) -> bool {
        let (len, stride) = self.dims[0];
        stride == 0 && len % n.max(1) == 0
    }

    /// The offset of the points `start .. start + n` if they lie next to each other.
    pub fn together(&self, start: usize, n: usize) -> Option<usize> {
        let (len, stride) = self.dims[0];
        if self.dims.len() == 1 {
            return (stride == 1 || n == 1).then_some(start * stride);
        }
        // Without points a dimension may have no length.
        if n == 0 || (stride != 1 && n != 1) {
            return None;
        }
        let (mut rest, first) = (start / len, start % len);
        if first + n > len {
            return None;
        }
        let mut offset = first * stride;
        for (len, stride) in &self.dims[1..] {
            offset += rest % len * stride;
            rest /= len;
        }
        Some(offset)
    }

    /// Calls `visit(first point - start, points, offset, stride)` for each run of the points `start .. start + n`.
    #[inline(always)]
    pub fn runs(&self, start: usize, n: usize, mut visit: impl FnMut(usize, usize, usize, usize)) {
        if n == 0 {
            return;
        }
        let (len, stride) = self.dims[0];
        if self.dims.len() == 1 {
            return visit(0, n, start * stride, stride);
        }
        let mut at = [0usize; MAX_DIMS];
        let (mut rest, mut offset) = (start, 0);
        for (at, (len, stride)) in at.iter_mut().zip(&self.dims) {
            *at = rest % len;
            rest /= len;
            offset += *at * stride;
        }
        let mut done = 0;
        loop {
            let points = (len - at[0]).min(n - done);
            visit(done, points, offset, stride);
            done += points;
            if done == n {
                return;
            }
            offset -= at[0] * stride;
            at[0] = 0;
            for (at, (len, stride)) in at.iter_mut().zip(&self.dims).skip(1) {
                *at += 1;
                offset += stride;
                if *at < *len {
                    break;
                }
                offset -= stride * len;
                *at = 0;
            }
        }
    }
}

/// Calls `visit` with the offsets of `N` operands at each point, in row-major order; dimensions are outermost first.
#[inline(always)]
pub fn points<const N: usize>(
    dims: &[(usize, [usize; N])],
    mut visit: impl FnMut(&[usize; MAX_DIMS], [usize; N]),
) {
    let mut at = [0usize; MAX_DIMS];
    let mut offsets = [0usize; N];
    loop {
        visit(&at, offsets);
        let mut d = dims.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            let (len, strides) = &dims[d];
            at[d] += 1;
            for i in 0..N {
                offsets[i] += strides[i];
            }
            if at[d] < *len {
                break;
            }
            for i in 0..N {
                offsets[i] -= strides[i] * len;
            }
            at[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn a_walk_merges_what_is_contiguous_and_visits_every_point() {
        assert_eq!(Walk::new(&[2, 3, 4], &[12, 4, 1]).dims, [(24, 1)]);
        assert_eq!(Walk::new(&[2, 3, 4], &[0, 4, 1]).period(), Some(12));
        let walk = Walk::new(&[2, 3, 4], &[1, 0, 2]);
        let all: Vec<usize> =
            (0..2).flat_map(|a| (0..3).flat_map(move |_| (0..4).map(move |c| a + 2 * c))).collect();
        for start in 0..24 {
            for n in 0..=24 - start {
                let mut seen = Vec::new();
                walk.runs(start, n, |done, points, offset, stride| {
                    assert_eq!(done, seen.len());
                    seen.extend((0..points).map(|i| offset + i * stride));
                });
                assert_eq!(seen, all[start..start + n]);
            }
        }
    }

    #[test]
    fn points_are_together_where_a_run_has_them_all_a_stride_of_one_apart() {
        for (lens, strides) in
            [([2, 3, 4], [12, 4, 1]), ([2, 3, 4], [0, 4, 1]), ([2, 3, 4], [1, 0, 2]), ([2, 3, 4], [40, 8, 1])]
        {
            let walk = Walk::new(&lens, &strides);
            for (start, n) in (0..24).flat_map(|start| (1..=24 - start).map(move |n| (start, n))) {
                let mut runs = Vec::new();
                walk.runs(start, n, |_, points, offset, stride| runs.push((points, offset, stride)));
                let whole = runs[0].0 == n && (runs[0].2 == 1 || n == 1);
                assert_eq!(walk.together(start, n), whole.then_some(runs[0].1), "{lens:?} {strides:?}");
            }
        }
    }

    #[test]
    fn a_merged_dimension_has_its_inner_loops_next_to_each_other() {
        assert_eq!(strides(&vec![smallvec![1, 0], smallvec![2]], &[2, 3, 4]), [4, 8, 1]);
        assert_eq!(strides(&vec![smallvec![], smallvec![2]], &[2, 3, 4]), [0, 0, 1]);
    }
}
