//! Operands and results of a matrix product or of a sum by index that are bf16: operands are widened in scratch, and the
//! result is rounded once.

use ir::kernel::{Access, Loop};
use ir::{DType, Mesh};

use super::convert::{load, store};
use super::lanes::{Lanes, best};
use super::layout::{count, ranges};

/// Numbers that are converted at once.
const RUN: usize = 1 << 12;

/// What is converted around a product.
pub struct Plan {
    lanes: &'static Lanes,
    /// Of both operands and the result: the type, and how many elements.
    each: [(DType, usize); 3],
}

/// Plans it for the rank at `at`, with these accesses and types of both operands and the result.
pub fn plan(loops: &[Loop], accesses: [&Access; 3], types: [DType; 3], mesh: &Mesh, at: &[usize]) -> Plan {
    let loops: Vec<_> = loops.iter().collect();
    let lens: Vec<usize> = ranges(&loops, mesh, at).iter().map(ExactSizeIterator::len).collect();
    let counts = accesses.map(|access| count(access, &lens));
    let [a, b, out] = types;
    Plan { lanes: best(), each: [(a, counts[0]), (b, counts[1]), (out, counts[2])] }
}

/// Bytes of the f32 numbers, up to a cache line.
fn bytes((dtype, n): (DType, usize)) -> usize {
    if dtype == DType::F32 { 0 } else { (n * 4).next_multiple_of(64) }
}

impl Plan {
    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        self.each.into_iter().map(bytes).sum()
    }

    /// Runs the product on f32.
    ///
    /// # Safety
    /// Operands and result are of the planned types and sizes, the scratch is large enough and aligned to 64 bytes, and
    /// `product` is safe on f32 operands of these sizes.
    pub unsafe fn run(
        &self,
        operands: [*const u8; 2],
        out: *mut u8,
        scratch: *mut u8,
        product: impl FnOnce(*const f32, *const f32, *mut f32),
    ) {
        let mut at = scratch;
        let mut wide = [std::ptr::null::<f32>(); 2];
        for (i, from) in operands.into_iter().enumerate() {
            let (dtype, n) = self.each[i];
            if dtype == DType::F32 {
                wide[i] = from.cast();
                continue;
            }
            let to = at.cast::<f32>();
            for start in (0..n).step_by(RUN) {
                let len = RUN.min(n - start);
                // SAFETY: the caller's.
                unsafe { load(self.lanes, dtype, to.add(start), from.add(start * dtype.bytes()), len, 1) };
            }
            wide[i] = to;
            // SAFETY: the caller's: the scratch has this many bytes.
            at = unsafe { at.add(bytes(self.each[i])) };
        }
        let (dtype, n) = self.each[2];
        if dtype == DType::F32 {
            return product(wide[0], wide[1], out.cast());
        }
        let sums = at.cast::<f32>();
        product(wide[0], wide[1], sums);
        for start in (0..n).step_by(RUN) {
            let len = RUN.min(n - start);
            // SAFETY: the caller's.
            unsafe { store(self.lanes, dtype, out.add(start * dtype.bytes()), sums.add(start), len, 1) };
        }
    }
}
