//! A product whose `b` is small: all of it is packed into the second cache, and each row of `a` is read once, as it lies.
//! Meanwhile what the next product will read is asked for.

use super::level::Level;
use super::pack::{Part, pack};
use super::tile::{Ahead, Operands};
use super::vector::{STEP, Vector};
use super::{Call, Plan, Side};

/// Numbers of a packed `b`: half of a second cache of 2 MiB.
const PACKED: usize = 1 << 18;
/// From so many columns on it is worth it to pack `a` too.
const COLUMNS: usize = 384;
/// Numbers of an `a` whose rows lie one behind the other: its lines stay in the second cache for the next tiles.
const KEPT: usize = 1 << 17;

/// Numbers of an `a` that is read again for each panel of `b`, from the second cache.
const NEAR: usize = 1 << 16;

/// Whether a product is better computed so, if rows and columns are as they are here. `strides` are those of what is
/// summed, and `len` its length.
pub fn suits(rows: Side, columns: Side, len: usize, strides: Option<[usize; 2]>) -> bool {
    let small = columns.len < COLUMNS && columns.len * len <= PACKED;
    small && strides.is_some_and(|[a, _]| a == 1 || rows.operand == 1 && a * len <= KEPT)
}

/// How many numbers of scratch it needs.
pub fn scratch(level: &Level, columns: usize, len: usize) -> usize {
    let (lanes, registers) = (level.lanes, level.lying.len());
    columns.next_multiple_of(lanes) * len.next_multiple_of(16) + 8 * registers * lanes
}

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`]. The plan has one summed dimension.
#[inline(always)]
pub unsafe fn run<V: Vector>(plan: &Plan, call: &Call) {
    // SAFETY: the caller's.
    unsafe {
        let Some([a_k, b_k]) = plan.summed.strides() else {
            unreachable!("what is streamed has one summed dimension")
        };
        let len = plan.summed.len();
        let registers = plan.level.lying.len();
        let (packed, all) = (call.scratch, registers * V::LANES);
        let odd = packed.add(plan.n.next_multiple_of(V::LANES) * len.next_multiple_of(16));
        let wide = |j: usize| all.min(plan.n - j).next_multiple_of(V::LANES);
        for j in (0..plan.n).step_by(all) {
            let (at, count) = (call.b.add(j * plan.b_n), all.min(plan.n - j));
            let part = Part { at, apart: plan.b_n, along: b_k, count, k: len };
            pack::<V>(&part, packed.add(j * len), wide(j), wide(j));
        }
        let most = plan.level.lying[plan.n.div_ceil(V::LANES).min(registers) - 1].len();
        let tiles = plan.m.div_ceil(most);
        let nexts = [
            Ahead::of::<V>(call.next[0], [plan.m, plan.a_m], [len, a_k]),
            Ahead::of::<V>(call.next[1], [plan.n, plan.b_n], [len, b_k]),
        ];
        let lines = nexts[0].count + nexts[1].count;
        let panels = plan.n.div_ceil(all);
        // A panel of a small `a` is used by all its rows while it is near.
        let across = plan.m * len > NEAR;
        for number in 0..tiles * panels {
            let (i, panel) =
                if across { (number / panels, number % panels) } else { (number % tiles, number / tiles) };
            let (start, end) = (plan.m * i / tiles, plan.m * (i + 1) / tiles);
            let j = panel * all;
            let (columns, width) = (all.min(plan.n - j), wide(j));
            let tile = plan.level.lying[width / V::LANES - 1][end - start - 1];
            let out = call.out.add(start * plan.out_m + j * plan.out_n);
            for k in plan.summed.blocks() {
                let asks = panel + 1 == panels && k.start == 0;
                let adds = call.adds || k.start > 0;
                let operands = Operands {
                    k: k.len(),
                    a: call.a.add(start * plan.a_m + k.start * a_k),
                    a_steps: [plan.a_m, a_k],
                    b: packed.add(j * len + k.start * width),
                    b_step: width,
                    start: std::ptr::null(),
                    start_step: 0,
                    out,
                    out_step: plan.out_m,
                    columns,
                    scale: plan.scale,
                    adds,
                    ahead: if asks {
                        share(&nexts, lines * i / tiles, lines * (i + 1) / tiles)
                    } else {
                        Ahead::NONE
                    },
                };
                if plan.out_n == 1 {
                    tile(&operands);
                } else {
                    let scale = 1.0;
                    tile(&Operands {
                        out: odd,
                        out_step: width,
                        columns: width,
                        scale,
                        adds: false,
                        ..operands
                    });
                    turned::<V>(plan, odd, width, out, [end - start, columns], adds);
                }
            }
        }
    }
}

/// The rows of lines `from .. to` of both operands, as many as are of the same.
#[inline(always)]
fn share([a, b]: &[Ahead; 2], from: usize, to: usize) -> Ahead {
    if from < a.count { a.part(from, to.min(a.count)) } else { b.part(from - a.count, to - a.count) }
}

/// A tile to a result whose rows lie one behind the other: rows and columns are exchanged.
#[inline(always)]
unsafe fn turned<V: Vector>(
    plan: &Plan,
    tile: *const f32,
    width: usize,
    out: *mut f32,
    [rows, columns]: [usize; 2],
    adds: bool,
) {
    // SAFETY: the caller's.
    unsafe {
        let scale = V::splat(&plan.scale);
        for j in (0..columns).step_by(STEP) {
            let each = V::places(tile.add(j), width, rows);
            for (l, sums) in each.into_iter().enumerate().take(columns - j) {
                let to = out.add((j + l) * plan.out_n);
                if plan.out_m != 1 {
                    let mut all = [0.0; 16];
                    sums.store(all.as_mut_ptr());
                    for (i, sum) in all.into_iter().enumerate().take(rows) {
                        let to = to.add(i * plan.out_m);
                        *to = if adds { V::add_one(sum, plan.scale, *to) } else { sum * plan.scale };
                    }
                } else if adds {
                    sums.mul_add(scale, V::load_first(to, rows)).store_first(to, rows);
                } else {
                    sums.mul(scale).store_first(to, rows);
                }
            }
        }
    }
}
