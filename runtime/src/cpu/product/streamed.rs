//! A product whose `b` is small or has few columns: as much of it as the second cache takes is packed at a time, and all rows
//! of `a` are read as they lie. Meanwhile what comes next is asked for.

use std::ops::Range;

use super::level::Level;
use super::pack::{Part, pack};
use super::summed::Summed;
use super::tile::{Ahead, Operands};
use super::vector::{STEP, Vector};
use super::{Call, Plan, Side};

/// Numbers of a packed part of `b`: half of a second cache of 2 MiB.
const PACKED: usize = 1 << 18;
/// From so many columns on it is worth it to pack `a` too.
const COLUMNS: usize = 384;
/// With so many rows from so many columns on.
const MANY: [usize; 2] = [512, 768];
/// Numbers of an `a` whose rows lie one behind the other: its lines stay in the second cache for the next tiles.
const KEPT: usize = 1 << 17;

/// Numbers of an `a` that is read again for each panel of `b`, from the second cache.
const NEAR: usize = 1 << 16;

/// Whether a product is better computed so, if rows and columns are as they are here.
pub fn suits(rows: Side, columns: Side, summed: &Summed) -> bool {
    let Some([a, _]) = summed.strides_of_blocks() else { return false };
    let small = summed.strides().is_some() && columns.len < COLUMNS && columns.len * summed.len() <= PACKED;
    let kept = rows.operand == 1 && a * summed.len() <= KEPT;
    a == 1 && (small || rows.len >= MANY[0] && columns.len < MANY[1]) || small && kept
}

/// How much of `b` is packed at a time.
#[derive(Clone, Copy)]
pub struct Cut {
    /// Columns.
    pub columns: usize,
    /// Places: whole blocks.
    pub places: usize,
}

impl Cut {
    /// For so many columns.
    pub fn of(level: &Level, columns: usize, summed: &Summed) -> Cut {
        let len = summed.len();
        if columns * len <= PACKED {
            return Cut { columns, places: len };
        }
        let block = summed.longest();
        let panel = level.lying.len() * level.lanes;
        let most = (PACKED / block / panel * panel).max(panel);
        let columns = columns.min(columns.div_ceil(columns.div_ceil(most)).next_multiple_of(panel));
        Cut { columns, places: (PACKED / columns / block * block).clamp(block, len) }
    }

    /// How many numbers of scratch it needs.
    pub fn scratch(self, level: &Level) -> usize {
        let (lanes, registers) = (level.lanes, level.lying.len());
        self.columns.next_multiple_of(lanes) * self.places.next_multiple_of(16) + 8 * registers * lanes
    }
}

/// Runs it.
///
/// # Safety
/// The instruction set is there; as for [`Plan::run`]. No block of what is summed has a change of strides.
#[inline(always)]
pub unsafe fn run<V: Vector>(plan: &Plan, call: &Call) {
    let Cut { columns, places } = plan.cut;
    let (n, len) = (plan.n, plan.summed.len());
    for j in (0..n).step_by(columns) {
        for l in (0..len).step_by(places) {
            let here = (j..n.min(j + columns), l..len.min(l + places));
            let next = match (l + places < len, j + columns < n) {
                (true, _) => Some((here.0.clone(), l + places..len.min(l + 2 * places))),
                (false, true) => Some((j + columns..n.min(j + 2 * columns), 0..places)),
                (false, false) => None,
            };
            // SAFETY: the caller's.
            unsafe { part::<V>(plan, call, here, next) };
        }
    }
}

/// What of the operands is asked for while a part is computed: of the next one's `b`, or of the next product's operands.
#[inline(always)]
fn asked<V: Vector>(plan: &Plan, call: &Call, next: Option<(Range<usize>, Range<usize>)>) -> [Ahead; 2] {
    let Some((columns, places)) = next else {
        let lines = |which: usize, side: [usize; 2]| {
            plan.summed.strides().map_or(Ahead::NONE, |s| {
                Ahead::of::<V>(call.next[which], side, [plan.summed.len(), s[which]])
            })
        };
        return [lines(0, [plan.m, plan.a_m]), lines(1, [plan.n, plan.b_n])];
    };
    let Some([_, along]) = plan.summed.strides() else { return [Ahead::NONE; 2] };
    let at = call.b.wrapping_add(columns.start * plan.b_n + places.start * along);
    [Ahead::of::<V>(at, [columns.len(), plan.b_n], [places.len(), along]), Ahead::NONE]
}

/// A part of the columns and of what is summed: packs these, and reads all rows.
#[inline(always)]
unsafe fn part<V: Vector>(
    plan: &Plan,
    call: &Call,
    (columns, places): (Range<usize>, Range<usize>),
    next: Option<(Range<usize>, Range<usize>)>,
) {
    // SAFETY: the caller's.
    unsafe {
        let Some([a_k, b_k]) = plan.summed.strides_of_blocks() else {
            unreachable!("the blocks of what is streamed have one stride")
        };
        let (n, len) = (columns.len(), places.len());
        let registers = plan.level.lying.len();
        let (packed, all) = (call.scratch, registers * V::LANES);
        let odd =
            packed.add(plan.cut.columns.next_multiple_of(V::LANES) * plan.cut.places.next_multiple_of(16));
        let wide = |j: usize| all.min(n - j).next_multiple_of(V::LANES);
        for j in (0..n).step_by(all) {
            let count = all.min(n - j);
            for k in plan.summed.blocks_of(places.clone()) {
                let at = (columns.start + j) * plan.b_n + plan.summed.offsets(k.start)[1];
                let part = Part { at: call.b.add(at), apart: plan.b_n, along: b_k, count, k: k.len() };
                let to = packed.add(j * len + (k.start - places.start) * wide(j));
                pack::<V>(&part, to, wide(j), wide(j));
            }
        }
        let most = plan.level.lying[n.div_ceil(V::LANES).min(registers) - 1].len();
        let tiles = plan.m.div_ceil(most);
        let nexts = asked::<V>(plan, call, next);
        let lines = nexts[0].count + nexts[1].count;
        let panels = n.div_ceil(all);
        // A panel of a small `a` is used by all its rows while it is near.
        let across = plan.m * len > NEAR;
        for number in 0..tiles * panels {
            let (i, panel) =
                if across { (number / panels, number % panels) } else { (number % tiles, number / tiles) };
            let (start, end) = (plan.m * i / tiles, plan.m * (i + 1) / tiles);
            let j = panel * all;
            let (count, width) = (all.min(n - j), wide(j));
            let tile = plan.level.lying[width / V::LANES - 1][end - start - 1];
            let out = call.out.add(start * plan.out_m + (columns.start + j) * plan.out_n);
            for k in plan.summed.blocks_of(places.clone()) {
                let asks = panel + 1 == panels && k.start == places.start;
                let adds = call.adds || k.start > 0;
                let operands = Operands {
                    k: k.len(),
                    a: call.a.add(start * plan.a_m + plan.summed.offsets(k.start)[0]),
                    a_steps: [plan.a_m, a_k],
                    b: packed.add(j * len + (k.start - places.start) * width),
                    b_step: width,
                    start: std::ptr::null(),
                    start_step: 0,
                    out,
                    out_step: plan.out_m,
                    columns: count,
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
                    turned::<V>(plan, odd, width, out, [end - start, count], adds);
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
