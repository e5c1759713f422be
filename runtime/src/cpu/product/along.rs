//! A product of few rows where the places of `b` lie one behind the other: its columns are read from end to end, a
//! register's at a time, and turned into places on the way. Turning and multiplying wait for the same ports of the core,
//! so they take turns in short steps, and nothing is asked for ahead: the machine does that best for long stretches.

use super::pack::{Part, pack};
use super::vector::{STEP, Vector};
use super::{Call, Plan};

/// Places that are turned together.
const SQUARE: usize = 16;
/// From so many rows on, what is turned waits in memory until the next square is begun: registers are full of sums.
const MANY: usize = 8;

/// How many numbers wait.
pub const fn waiting<V: Vector>() -> usize {
    2 * SQUARE * V::LANES
}

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
        let (packed, squares) = (call.scratch, call.scratch.add(M * len.next_multiple_of(16)));
        let part = Part { at: call.a, apart: plan.a_m, along: a_k, count: M, k: len };
        pack::<V>(&part, packed, M, M);
        for j in (0..plan.n).step_by(V::LANES) {
            let count = V::LANES.min(plan.n - j);
            let b = call.b.add(j * plan.b_n);
            let turned = |l: usize| V::places(b.add(l), plan.b_n, count);
            let whole = len / SQUARE * SQUARE;
            let waits = |square: usize| squares.add(square % 2 * SQUARE * V::LANES);
            if M >= MANY && whole > 0 {
                for l in (0..SQUARE).step_by(STEP) {
                    stored(turned(l), waits(0).add(l * V::LANES));
                }
            }
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
                for start in (block.start..end).step_by(SQUARE) {
                    let square = start / SQUARE;
                    // Behind the last square comes it itself again.
                    let next = if start + SQUARE < whole { start + SQUARE } else { start };
                    for l in (0..SQUARE).step_by(STEP) {
                        if M >= MANY {
                            let from = waits(square).add(l * V::LANES);
                            let next = turned(next + l);
                            for p in 0..STEP {
                                place!((start + l + p), V::load(from.add(p * V::LANES)));
                            }
                            stored(next, waits(square + 1).add(l * V::LANES));
                        } else {
                            let now = turned(start + l);
                            for p in 0..STEP {
                                place!((start + l + p), now[p]);
                            }
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

#[inline(always)]
unsafe fn stored<V: Vector>(places: [V; STEP], to: *mut f32) {
    for (p, x) in places.into_iter().enumerate() {
        // SAFETY: the caller's.
        unsafe { x.store(to.add(p * V::LANES)) }
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
