//! Contractions by matrix products: the loops are sorted by the operands that have them, neighbours are merged, the
//! longest of each kind goes to the product, and the others run around it.

use ir::kernel::Contract;

use super::layout::{MAX_DIMS, count, merged, points, ranges, strides};

/// Up to this many multiplications a call of the matrix product costs more than it saves.
const SMALL: usize = 32;

/// A length, and the strides in the operands and the result: a, b, out.
type Dim = (usize, [usize; 3]);

const NONE: Dim = (1, [0; 3]);

/// A contraction, planned for one rank.
pub struct Plan {
    /// Loops around the product: first those of the result, then those that are summed.
    around: Vec<Dim>,
    /// How many of them are the result's.
    kept: usize,
    /// Rows, columns and summed dimension of the product; none for a walk over single elements.
    product: Option<[Dim; 3]>,
    /// How many elements the result has.
    count: usize,
    /// Whether nothing is summed at all.
    empty: bool,
    scale: f32,
    multiplications: f64,
}

/// Plans a contraction for the rank at `at`.
pub fn plan(contract: &Contract, mesh: &ir::Mesh, at: &[usize]) -> Plan {
    let loops: Vec<_> = contract.loops.iter().collect();
    let lens: Vec<usize> = ranges(&loops, mesh, at).iter().map(ExactSizeIterator::len).collect();
    let of = [&contract.a, &contract.b, &contract.out].map(|access| strides(access, &lens));
    let mut kinds: [Vec<Dim>; 8] = Default::default();
    let mut scale = contract.scale;
    for (l, len) in lens.iter().enumerate().filter(|(_, len)| **len != 1) {
        let dim = (*len, [of[0][l], of[1][l], of[2][l]]);
        let has = |i: usize, access: &ir::kernel::Access| {
            usize::from(access.iter().flatten().any(|f| *f == l)) << i
        };
        match has(0, &contract.a) | has(1, &contract.b) | has(2, &contract.out) {
            // A loop that nothing has repeats the sum.
            0 => scale *= *len as f64,
            kind => kinds[kind].push(dim),
        }
    }
    for (kind, dims) in kinds.iter_mut().enumerate() {
        let by = if kind & 4 != 0 { 2 } else { usize::from(kind & 1 == 0) };
        dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[by]));
        *dims = merged(std::mem::take(dims));
    }
    let mut longest = |kind: usize| -> Dim {
        let found = (0..kinds[kind].len()).max_by_key(|i| kinds[kind][*i].0);
        found.map_or(NONE, |i| kinds[kind].remove(i))
    };
    let [m, n, mut k] = [longest(0b101), longest(0b110), longest(0b011)];
    if k == NONE {
        k = longest(0b001);
    }
    if k == NONE {
        k = longest(0b010);
    }
    let small = m.0 * n.0 * k.0 <= SMALL;
    let mut take = |kinds_of: &[usize]| -> Vec<Dim> {
        kinds_of.iter().flat_map(|kind| std::mem::take(&mut kinds[*kind])).collect()
    };
    let mut around = take(&[0b111, 0b100, 0b101, 0b110]);
    let mut summed = take(&[0b011, 0b001, 0b010]);
    if small {
        around.extend([m, n].into_iter().filter(|d| *d != NONE));
        summed.extend(Some(k).filter(|d| *d != NONE));
    }
    around.sort_by_key(|(_, s)| std::cmp::Reverse(s[2]));
    let kept = around.len();
    around.append(&mut summed);
    let size = |l: &usize, access: &ir::kernel::Access| access.iter().flatten().any(|f| f == l);
    let empty = (0..lens.len()).any(|l| lens[l] == 0 && !size(&l, &contract.out));
    Plan {
        around,
        kept,
        product: (!small).then_some([m, n, k]),
        count: count(&contract.out, &lens),
        empty,
        scale: scale as f32,
        multiplications: lens.iter().map(|n| *n as f64).product(),
    }
}

impl Plan {
    /// Operations on numbers.
    pub fn flops(&self) -> f64 {
        2.0 * self.multiplications
    }

    /// Runs it.
    ///
    /// # Safety
    /// The operands and the result are f32 and as large as planned; the result overlaps no operand.
    pub unsafe fn run(&self, a: *const f32, b: *const f32, out: *mut f32) {
        // SAFETY: the caller's; offsets are of elements on this rank.
        unsafe {
            if self.count == 0 {
                return;
            }
            if self.empty {
                return std::slice::from_raw_parts_mut(out, self.count).fill(0.0);
            }
            match &self.product {
                None => self.singly(a, b, out),
                Some(dims) => points(&self.around, |at: &[usize; MAX_DIMS], [oa, ob, oc]| {
                    let first = at[self.kept..self.around.len()].iter().all(|i| *i == 0);
                    product(dims, a.add(oa), b.add(ob), out.add(oc), self.scale, !first);
                }),
            }
        }
    }

    unsafe fn singly(&self, a: *const f32, b: *const f32, out: *mut f32) {
        let (kept, summed) = self.around.split_at(self.kept);
        points(kept, |_, [oa, ob, oc]| {
            let mut sum = 0.0;
            // SAFETY: as for `run`.
            points(summed, |_, [ia, ib, _]| unsafe { sum += *a.add(oa + ia) * *b.add(ob + ib) });
            // SAFETY: as for `run`.
            unsafe { *out.add(oc) = sum * self.scale };
        });
    }
}

/// `out = scale a b`, or `out += scale a b` if it `adds`.
unsafe fn product([m, n, k]: &[Dim; 3], a: *const f32, b: *const f32, out: *mut f32, scale: f32, adds: bool) {
    let side = |dim: &Dim, i: usize| dim.1[i] as isize;
    let gemm = gemm_f32::gemm::f32::get_gemm_fn();
    let none = gemm_common::Parallelism::None;
    // Column stride before row stride; the first factor is the result's, the second the product's. The product wants
    // the result's columns contiguous: a row-major result is computed transposed.
    // SAFETY: the caller's.
    unsafe {
        if side(n, 2) <= side(m, 2) || m.0 == 1 {
            gemm(
                n.0,
                m.0,
                k.0,
                out,
                side(m, 2),
                side(n, 2),
                adds,
                b,
                side(k, 1),
                side(n, 1),
                a,
                side(m, 0),
                side(k, 0),
                1.0,
                scale,
                false,
                false,
                false,
                none,
            );
        } else {
            gemm(
                m.0,
                n.0,
                k.0,
                out,
                side(n, 2),
                side(m, 2),
                adds,
                a,
                side(k, 0),
                side(m, 0),
                b,
                side(n, 1),
                side(k, 1),
                1.0,
                scale,
                false,
                false,
                false,
                none,
            );
        }
    }
}
