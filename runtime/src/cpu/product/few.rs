//! A product of few rows: the rows of `b` are read as they lie, a strip of them at a time, and only sums wait.

use super::pack::{Part, pack};
use super::tile::{Ahead, Operands};
use super::vector::Vector;
use super::{Call, Plan};

/// Columns of a strip: its sums stay in the first cache.
pub const STRIP: usize = 512;
/// Rows of `b` that are read together: a stream each, which the machine fetches ahead by itself.
const TOGETHER: usize = 16;

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
            pack::<V>(&part, packed, plan.m, plan.m, 0);
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
                pack::<V>(&part, panel, width, width, 0);
                tile(&Operands {
                    k,
                    a: packed,
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

/// Places that are packed together where `b` is read along the summed dimension: they stay in the first cache.
pub const CHUNK: usize = 64;
/// How many numbers ahead a column of `b` is asked for.
const FAR: usize = 96;

/// Runs it for a `b` whose places lie one behind the other: its columns are read from end to end, a tile's at a time.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`]. The plan has as many rows as one tile, one summed dimension that
/// lies one behind the other in `b`, and the columns of the result do.
#[inline(always)]
pub unsafe fn along<V: Vector>(plan: &Plan, call: &Call) {
    // SAFETY: the caller's.
    unsafe {
        let Some([a_k, _]) = plan.summed.strides() else {
            unreachable!("few rows have one summed dimension")
        };
        let packed = call.scratch;
        let panel = packed.add(plan.m * plan.summed.len().next_multiple_of(16));
        let sums = panel.add(CHUNK * V::WIDTH);
        let part = Part { at: call.a, apart: plan.a_m, along: a_k, count: plan.m, k: plan.summed.len() };
        pack::<V>(&part, packed, plan.m, plan.m, 0);
        for j in (0..plan.n).step_by(V::WIDTH) {
            let columns = V::WIDTH.min(plan.n - j);
            let width = columns.next_multiple_of(V::LANES);
            let tile = plan.level.tiles[width / V::LANES - 1][plan.m - 1];
            for block in plan.summed.blocks() {
                for l in block.clone().step_by(CHUNK) {
                    let k = CHUNK.min(block.end - l);
                    let (first, last) = (l == block.start, l + k == block.end);
                    let at = call.b.add(j * plan.b_n + l);
                    let part = Part { at, apart: plan.b_n, along: 1, count: columns, k };
                    pack::<V>(&part, panel, width, width, FAR);
                    tile(&Operands {
                        k,
                        a: packed.add(l * plan.m),
                        b: panel,
                        b_step: width,
                        start: if first { std::ptr::null() } else { sums },
                        start_step: width,
                        out: if last { call.out.add(j) } else { sums },
                        out_step: if last { plan.out_m } else { width },
                        columns: if last { columns } else { width },
                        scale: if last { plan.scale } else { 1.0 },
                        adds: last && (call.adds || block.start > 0),
                        ahead: Ahead::NONE,
                    });
                }
            }
        }
    }
}
