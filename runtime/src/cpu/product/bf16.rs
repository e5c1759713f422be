//! Matrix products of bf16 numbers on the matrix unit, summed in f32. Rows of `a` are packed for all that is summed, and
//! panels of `b` one after the other, each just before it is used.
//!
//! Sums run over 32 places at a time in their order, so that here too the bits of an element depend on no other row or
//! column. Numbers too small for normal f32 count as 0, as the unit has it.

use std::ops::Range;

use super::Side;
use super::amx::{PLACES, Registers, SIDE, available};
use super::pairs::{Pack, Square, columns, rows};
use super::summed::Summed;
use crate::cpu::math;

/// Places of a panel of `b`: 64 KiB of it.
const BLOCK: usize = 1024;
/// Numbers of the packed rows of `a`: half of a second cache of 2 MiB.
const PACKED: usize = 1 << 19;
/// From so many places on it is worth it: a rule that rows and columns have no part in.
const LEAST: usize = 16;

/// A product `out = scale a b` of bf16 numbers, planned.
pub struct Plan {
    rows: Side,
    columns: Side,
    summed: Summed,
    scale: f32,
    turned: bool,
    /// Whether the result is bf16, or else f32.
    narrow: bool,
    /// Rows that are packed together.
    together: usize,
}

/// Plans a product: rows, columns, and what is summed with its strides in `a` and `b`, outermost first. None if the
/// machine has no matrix unit, or the product is better computed otherwise.
pub fn plan(
    rows: Side,
    columns: Side,
    summed: &[(usize, [usize; 2])],
    scale: f32,
    narrow: bool,
) -> Option<Plan> {
    let turned = columns.out != 1 && columns.len > 1 && (rows.out == 1 || rows.len == 1);
    let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
    let order = |(len, [a, b]): (usize, [usize; 2])| (len, if turned { [b, a] } else { [a, b] });
    let summed = Summed::new(summed.iter().copied().map(order), BLOCK);
    if summed.len() < LEAST || !available() {
        return None;
    }
    let most = (PACKED / summed.len().next_multiple_of(PLACES) / SIDE * SIDE).max(2 * SIDE);
    let parts = rows.len.div_ceil(most).max(1);
    let together = rows.len.div_ceil(parts).next_multiple_of(SIDE);
    // A side of one has no stride.
    let alone = |side: Side| if side.len == 1 { Side { operand: 1, out: 1, ..side } } else { side };
    Some(Plan { rows, columns: alone(columns), summed, scale, turned, narrow, together })
}

impl Plan {
    fn a_numbers(&self) -> usize {
        self.together * self.padded()
    }

    /// All places: blocks are whole numbers of registers, but for the last.
    fn padded(&self) -> usize {
        self.summed.blocks().map(|k| k.len().next_multiple_of(PLACES)).sum()
    }

    fn b_numbers(&self) -> usize {
        SIDE * self.summed.longest().next_multiple_of(PLACES)
    }

    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        2 * (self.a_numbers() + self.b_numbers()) + 4 * self.together * SIDE
    }

    /// Runs it; if it `adds`, the product is added to what is there.
    ///
    /// # Safety
    /// The operands and the result are as planned, the result overlaps no operand; the scratch is as large as planned and
    /// aligned to 64 bytes.
    pub unsafe fn run(&self, a: *const u16, b: *const u16, out: *mut u8, scratch: *mut u8, adds: bool) {
        let (a, b) = if self.turned { (b, a) } else { (a, b) };
        // SAFETY: the caller's; there is a matrix unit and AVX-512, or there would be no plan.
        unsafe {
            let registers = Registers::new();
            for start in (0..self.rows.len).step_by(self.together) {
                let range = start..self.rows.len.min(start + self.together);
                self.part(&registers, range, a, b, out, scratch.cast(), adds);
            }
        }
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    #[expect(clippy::too_many_arguments, reason = "operands, result and scratch of one call")]
    unsafe fn part(
        &self,
        registers: &Registers,
        range: Range<usize>,
        a: *const u16,
        b: *const u16,
        out: *mut u8,
        scratch: *mut u16,
        adds: bool,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let panel = scratch.add(self.a_numbers());
            let sums = panel.add(self.b_numbers()).cast::<f32>();
            let tiles = range.len().div_ceil(SIDE);
            let padded = self.padded();
            for i in 0..tiles {
                let start = range.start + i * SIDE;
                let count = SIDE.min(range.end - start);
                let mut to = scratch.add(i * SIDE * padded);
                for k in self.summed.blocks() {
                    self.packed::<0>(a, start, count, self.rows.operand, k.clone(), to);
                    to = to.add(SIDE * k.len().next_multiple_of(PLACES));
                }
            }
            for j in (0..self.columns.len).step_by(SIDE) {
                let count = SIDE.min(self.columns.len - j);
                let mut done = 0;
                for k in self.summed.blocks() {
                    self.packed::<1>(b, j, count, self.columns.operand, k.clone(), panel);
                    let places = k.len().next_multiple_of(PLACES);
                    for i in 0..tiles {
                        let a = scratch.add(SIDE * (i * padded + done));
                        let sums = sums.add(i * SIDE * SIDE);
                        registers.add(places / PLACES, a, panel, sums, k.start == 0);
                    }
                    done += places;
                }
                for i in 0..tiles {
                    let start = range.start + i * SIDE;
                    let rows = start..range.end.min(start + SIDE);
                    self.stored(sums.add(i * SIDE * SIDE), rows, j..j + count, out, adds);
                }
            }
        }
    }

    /// Packs rows of `a` (`OF` 0) or columns of `b` (1) over a block.
    #[inline(always)]
    unsafe fn packed<const OF: usize>(
        &self,
        from: *const u16,
        start: usize,
        count: usize,
        apart: usize,
        block: Range<usize>,
        to: *mut u16,
    ) {
        for k in block.clone().step_by(PLACES) {
            let places = PLACES.min(block.end - k);
            // SAFETY: the caller's.
            let to = unsafe { to.add(SIDE * (k - block.start)) };
            let pack = |square: &Square| {
                // SAFETY: the caller's.
                unsafe { if OF == 0 { rows(square, to) } else { columns(square, to) } }
            };
            let mut gathered = Pack([0; SIDE * PLACES]);
            self.summed.runs(k..k + places, |run| {
                let at = from.wrapping_add(start * apart + run.offsets[OF]);
                let along = run.strides[OF];
                if run.len == places {
                    return pack(&Square { at, apart, along, count, k: places });
                }
                for i in 0..count {
                    for l in 0..run.len {
                        // SAFETY: the caller's.
                        gathered.0[i * PLACES + run.at + l] = unsafe { *at.add(i * apart + l * along) };
                    }
                }
                if run.at + run.len == places {
                    let at = gathered.0.as_ptr();
                    pack(&Square { at, apart: PLACES, along: 1, count, k: places });
                }
            });
        }
    }

    /// A tile of sums to the result.
    #[inline(always)]
    unsafe fn stored(
        &self,
        sums: *const f32,
        rows: Range<usize>,
        columns: Range<usize>,
        out: *mut u8,
        adds: bool,
    ) {
        let (apart, along) = (self.rows.out, self.columns.out);
        for (r, row) in rows.enumerate() {
            for half in 0..columns.len().div_ceil(16) {
                let count = 16.min(columns.len() - 16 * half);
                let at = row * apart + (columns.start + 16 * half) * along;
                // SAFETY: the caller's.
                unsafe {
                    let sums =
                        std::slice::from_raw_parts(sums.add((r / 16 * 2 + half) * 256 + r % 16 * 16), count);
                    if self.narrow {
                        let old = |x: &u16| if adds { math::from_bf16(*x) } else { 0.0 };
                        let one = |to: &mut u16, sum: &f32| *to = math::to_bf16(sum * self.scale + old(to));
                        each(sums, out.cast::<u16>().add(at), along, one);
                    } else {
                        let old = |x: &f32| if adds { *x } else { 0.0 };
                        each(sums, out.cast::<f32>().add(at), along, |to, sum| {
                            *to = sum * self.scale + old(to)
                        });
                    }
                }
            }
        }
    }
}

/// Calls `one` for each sum and its place in the result.
///
/// # Safety
/// The places, `along` apart, can be written.
#[inline(always)]
unsafe fn each<T>(sums: &[f32], out: *mut T, along: usize, one: impl Fn(&mut T, &f32)) {
    if along == 1 {
        // SAFETY: the caller's.
        let out = unsafe { std::slice::from_raw_parts_mut(out, sums.len()) };
        return out.iter_mut().zip(sums).for_each(|(to, sum)| one(to, sum));
    }
    for (c, sum) in sums.iter().enumerate() {
        // SAFETY: the caller's.
        unsafe { one(&mut *out.add(c * along), sum) }
    }
}
