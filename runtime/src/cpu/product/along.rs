//! A product of few rows where the places of `b` lie one behind the other: its columns are read from end to end, whole
//! registers of as many columns as a register has numbers, and turned into places on the way. Turning and multiplying wait
//! for the same ports of the core; of a square, each line is loaded once. Nothing is asked for ahead: the machine does that
//! best for long stretches.

use super::pack::{Part, pack};
use super::vector::{STEP, Vector};
use super::{Call, Plan};

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`]. The plan has `M` rows and one summed dimension, that lies one behind
/// the other in `b`.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "sums become registers only in short loops by index")]
pub unsafe fn run<V: Vector, const M: usize>(plan: &Plan, call: &Call) {
    // SAFETY: the caller's.
    unsafe {
        let Some([a_k, _]) = plan.summed.strides() else {
            unreachable!("few rows have one summed dimension")
        };
        let len = plan.summed.len();
        let packed = call.scratch;
        let part = Part { at: call.a, apart: plan.a_m, along: a_k, count: M, k: len };
        pack::<V>(&part, packed, M, M);
        let whole = len / V::LANES * V::LANES;
        for j in (0..plan.n).step_by(V::LANES) {
            let count = V::LANES.min(plan.n - j);
            let b = call.b.add(j * plan.b_n);
            for block in plan.summed.blocks() {
                let mut sums = [V::zero(); M];
                macro_rules! place {
                    ($l:expr, $b:expr) => {
                        let (a, b) = (packed.add($l * M), $b);
                        for i in 0..M {
                            sums[i] = V::splat(a.add(i)).mul_add(b, sums[i]);
                        }
                    };
                }
                let end = whole.min(block.end);
                for start in (block.start..end).step_by(V::LANES) {
                    let woven = V::woven(b.add(start), plan.b_n, count);
                    for q in 0..V::LANES / STEP {
                        let now = V::unwoven(woven[q]);
                        for p in 0..STEP {
                            place!((start + q * STEP + p), now[p]);
                        }
                    }
                }
                for l in end.max(block.start)..block.end {
                    let mut column = [0.0; 16];
                    for (i, x) in column.iter_mut().enumerate().take(count) {
                        *x = *b.add(i * plan.b_n + l);
                    }
                    place!(l, V::load(column.as_ptr()));
                }
                let out = call.out.add(j * plan.out_n);
                let adds = call.adds || block.start > 0;
                for i in 0..M {
                    put(plan, sums[i], out.add(i * plan.out_m), count, adds);
                }
            }
        }
    }
}

/// Sums of a row to the first of `count` columns of the result at `out`.
#[inline(always)]
unsafe fn put<V: Vector>(plan: &Plan, sums: V, out: *mut f32, count: usize, adds: bool) {
    // SAFETY: the caller's.
    unsafe {
        if plan.out_n == 1 {
            let scale = V::splat(&plan.scale);
            let sums = if adds { sums.mul_add(scale, V::load_first(out, count)) } else { sums.mul(scale) };
            return sums.store_first(out, count);
        }
        let mut all = [0.0; 16];
        sums.store(all.as_mut_ptr());
        for (j, sum) in all.into_iter().enumerate().take(count) {
            let to = out.add(j * plan.out_n);
            *to = if adds { V::add_one(sum, plan.scale, *to) } else { sum * plan.scale };
        }
    }
}
