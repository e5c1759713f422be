//! A product without packing, an element at a time: the same numbers for what is too small to be worth more.

use super::vector::Vector;
use super::{Call, Plan};

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`].
#[inline(always)]
pub unsafe fn run<V: Vector>(plan: &Plan, call: &Call) {
    for i in 0..plan.m {
        for j in 0..plan.n {
            let (a, b) = (call.a.wrapping_add(i * plan.a_m), call.b.wrapping_add(j * plan.b_n));
            let out = call.out.wrapping_add(i * plan.out_m + j * plan.out_n);
            for (number, block) in plan.summed.blocks().enumerate() {
                let mut sum = 0.0;
                plan.summed.runs(block, |run| {
                    let ([a_at, b_at], [a_step, b_step]) = (run.offsets, run.strides);
                    for l in 0..run.len {
                        // SAFETY: the caller's.
                        let (x, y) = unsafe { (*a.add(a_at + l * a_step), *b.add(b_at + l * b_step)) };
                        // SAFETY: the caller has the instruction set.
                        sum = unsafe { V::add_one(x, y, sum) };
                    }
                });
                // SAFETY: the caller's.
                unsafe {
                    *out = if call.adds || number > 0 {
                        V::add_one(sum, plan.scale, *out)
                    } else {
                        sum * plan.scale
                    };
                }
            }
        }
    }
}
