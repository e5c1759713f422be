//! Any product: a block of `a` is packed into the second cache, and panels of `b` one after the other, each just before
//! it is used by all rows of the block. Meanwhile the lines of the next panel and of the next block are asked for.

use std::ops::Range;

use super::pack::{Part, pack};
use super::tile::{Ahead, Operands};
use super::vector::Vector;
use super::{Call, Plan};

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`].
#[inline(always)]
pub unsafe fn run<V: Vector>(plan: &Plan, call: &Call) {
    let blocks = plan.m.div_ceil(plan.rows);
    let rows = |i: usize| plan.m * i / blocks..plan.m * (i + 1) / blocks;
    for i in 0..blocks {
        let mut summed = plan.summed.blocks().peekable();
        while let Some(k) = summed.next() {
            let next = match summed.peek() {
                Some(k) => Some((rows(i), k.clone())),
                None => plan.summed.blocks().next().filter(|_| i + 1 < blocks).map(|k| (rows(i + 1), k)),
            };
            // SAFETY: the caller's.
            unsafe { block::<V>(plan, call, (rows(i), k), next) };
        }
    }
}

/// The rows of panel `i` of `panels` that `rows` are cut into.
#[inline(always)]
fn cut(rows: usize, panels: usize, i: usize) -> Range<usize> {
    let (each, more) = (rows / panels, rows % panels);
    let start = i * each + i.min(more);
    start..start + each + usize::from(i < more)
}

#[inline(always)]
unsafe fn block<V: Vector>(
    plan: &Plan,
    call: &Call,
    (rows, k): (Range<usize>, Range<usize>),
    next: Option<(Range<usize>, Range<usize>)>,
) {
    // SAFETY: the caller's.
    unsafe {
        let width = V::WIDTH;
        let len = k.len();
        let panels = rows.len().div_ceil(V::ROWS);
        let packed = call.scratch;
        let panel = packed.add(plan.a_floats);
        let odd = panel.add(plan.b_floats);
        plan.summed.runs(k.clone(), |run| {
            // Rows that lie next to each other in memory are read along all panels.
            let chunk = if plan.a_m == 1 { 8 } else { run.len };
            for l in (0..run.len).step_by(chunk) {
                for i in 0..panels {
                    let of = cut(rows.len(), panels, i);
                    let at = (rows.start + of.start) * plan.a_m + run.offsets[0] + l * run.strides[0];
                    let part = Part {
                        at: call.a.add(at),
                        apart: plan.a_m,
                        along: run.strides[0],
                        count: of.len(),
                        k: chunk.min(run.len - l),
                    };
                    let to = packed.add(of.start * len + (run.at + l) * of.len());
                    pack::<V>(&part, to, of.len(), of.len());
                }
            }
        });
        let adds = call.adds || k.start > 0;
        let lines = |at: *const f32, [side, apart]: [usize; 2], k: &Range<usize>, which: usize| {
            plan.summed.strides().map_or(Ahead::NONE, |along| {
                let at = at.wrapping_add(k.start * along[which]);
                Ahead::of::<V>(at, [side, apart], [k.len(), along[which]])
            })
        };
        let next_a = next.map_or(Ahead::NONE, |(rows, k)| {
            lines(call.a.wrapping_add(rows.start * plan.a_m), [rows.len(), plan.a_m], &k, 0)
        });
        // The first panels of rows ask for the next panel of `b`, the others for the next block of `a`.
        let early = if next_a.count == 0 { panels } else { panels.div_ceil(2) };
        for j in (0..plan.n).step_by(width) {
            let columns = width.min(plan.n - j);
            let next = (j + width).min(plan.n);
            let next_b =
                lines(call.b.wrapping_add(next * plan.b_n), [width.min(plan.n - next), plan.b_n], &k, 1);
            let share = next_a.share(j / width, plan.n.div_ceil(width));
            let width = columns.next_multiple_of(V::LANES);
            plan.summed.runs(k.clone(), |run| {
                let at = j * plan.b_n + run.offsets[1];
                let (apart, along) = (plan.b_n, run.strides[1]);
                let part = Part { at: call.b.add(at), apart, along, count: columns, k: run.len };
                pack::<V>(&part, panel.add(run.at * width), width, width);
            });
            let tiles = plan.level.tiles[width / V::LANES - 1];
            for i in 0..panels {
                let of = cut(rows.len(), panels, i);
                let out = call.out.add((rows.start + of.start) * plan.out_m + j * plan.out_n);
                let operands = Operands {
                    k: len,
                    a: packed.add(of.start * len),
                    a_steps: [0; 2],
                    b: panel,
                    b_step: width,
                    start: std::ptr::null(),
                    start_step: 0,
                    out,
                    out_step: plan.out_m,
                    columns,
                    scale: plan.scale,
                    adds,
                    ahead: if i < early {
                        next_b.share(i, early)
                    } else {
                        share.share(i - early, panels - early)
                    },
                };
                let tile = tiles[of.len() - 1];
                if plan.out_n == 1 {
                    tile(&operands);
                } else {
                    tile(&Operands {
                        out: odd,
                        out_step: width,
                        columns: width,
                        scale: 1.0,
                        adds: false,
                        ..operands
                    });
                    scattered::<V>(plan, odd, width, out, of.len(), columns, adds);
                }
            }
        }
    }
}

/// A tile to a result whose columns are apart.
#[inline(always)]
unsafe fn scattered<V: Vector>(
    plan: &Plan,
    tile: *const f32,
    width: usize,
    out: *mut f32,
    rows: usize,
    columns: usize,
    adds: bool,
) {
    for i in 0..rows {
        for j in 0..columns {
            // SAFETY: the caller's.
            unsafe {
                let (x, to) = (*tile.add(i * width + j), out.add(i * plan.out_m + j * plan.out_n));
                *to = if adds { V::add_one(x, plan.scale, *to) } else { x * plan.scale };
            }
        }
    }
}
