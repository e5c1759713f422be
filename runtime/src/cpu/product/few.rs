//! A product of few rows: the rows of `b` are read as they lie, a strip of them at a time, and only sums wait. Nothing is
//! asked for ahead: for long stretches the machine does that best by itself.

use super::pack::{Part, pack};
use super::tile::{Ahead, Operands};
use super::vector::Vector;
use super::{Call, Plan};

/// Columns of a strip: long enough for the machine to see a stream, while its sums stay in the second cache.
pub const STRIP: usize = 1024;
/// Rows of `b` that are read together: a stream each.
const TOGETHER: usize = 24;

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`]. The plan has as many rows as one tile, one summed dimension, and
/// the columns of `b` and of the result lie one behind the other.
#[inline(always)]
pub unsafe fn run<V: Vector>(plan: &Plan, call: &Call) {
    // SAFETY: the caller's.
    unsafe {
        let Some([a_k, b_k]) = plan.summed.strides() else {
            unreachable!("few rows have one summed dimension")
        };
        let width = V::WIDTH;
        let (packed, strip) = (call.scratch, call.scratch.add(plan.a_floats));
        let panel = strip.add(plan.m * STRIP);
        let tile = plan.level.tiles[V::WIDE - 1][plan.m - 1];
        for block in plan.summed.blocks() {
            let (start, k) = (block.start, block.len());
            let at = call.a.add(start * a_k);
            let part = Part { at, apart: plan.a_m, along: a_k, count: plan.m, k };
            pack::<V>(&part, packed, plan.m, plan.m);
            let adds = call.adds || start > 0;
            let whole = plan.n / width * width;
            for left in (0..whole).step_by(STRIP) {
                let right = whole.min(left + STRIP);
                for l in (0..k).step_by(TOGETHER) {
                    let rows = TOGETHER.min(k - l);
                    let last = l + rows == k;
                    for j in (left..right).step_by(width) {
                        let sums = strip.add(j - left);
                        let b = call.b.add((start + l) * b_k + j);
                        tile(&Operands {
                            k: rows,
                            a: packed.add(l * plan.m),
                            a_steps: [0; 2],
                            b,
                            b_step: b_k,
                            start: if l == 0 { std::ptr::null() } else { sums },
                            start_step: STRIP,
                            out: if last { call.out.add(j) } else { sums },
                            out_step: if last { plan.out_m } else { STRIP },
                            columns: width,
                            scale: if last { plan.scale } else { 1.0 },
                            adds: last && adds,
                            ahead: Ahead::NONE,
                        });
                    }
                }
            }
            if whole < plan.n {
                let count = plan.n - whole;
                let at = call.b.add(start * b_k + whole);
                let part = Part { at, apart: plan.b_n, along: b_k, count, k };
                pack::<V>(&part, panel, width, width);
                tile(&Operands {
                    k,
                    a: packed,
                    a_steps: [0; 2],
                    b: panel,
                    b_step: width,
                    start: std::ptr::null(),
                    start_step: 0,
                    out: call.out.add(whole),
                    out_step: plan.out_m,
                    columns: count,
                    scale: plan.scale,
                    adds,
                    ahead: Ahead::NONE,
                });
            }
        }
    }
}
