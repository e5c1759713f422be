//! Panels: a few rows or columns of an operand, place by place of the summed dimension, as tiles read them.

use super::vector::{STEP, Vector};

/// A part of an operand: `count` rows (or columns) and `k` places of the summed dimension.
#[derive(Clone, Copy)]
pub struct Part {
    /// Its first number.
    pub at: *const f32,
    /// From row to row, or column to column.
    pub apart: usize,
    /// From place to place.
    pub along: usize,
    /// Rows or columns.
    pub count: usize,
    /// Places.
    pub k: usize,
}

/// Writes a part as a panel: number `i` of place `l` goes to `to + l * step + i`, and zeros behind the last up to `width`.
///
/// # Safety
/// The instruction set is there, the part can be read, and the panel written.
#[inline(always)]
pub unsafe fn pack<V: Vector>(part: &Part, to: *mut f32, step: usize, width: usize) {
    // SAFETY: the caller's.
    unsafe {
        if part.apart == 1 {
            return copied::<V>(part, to, step, width);
        }
        if part.along != 1 {
            return singly(part, to, step, width, 0);
        }
        // Whole lines at a time: of many rows the first cache might not keep them for another visit.
        let square = 4 * STEP;
        let whole = part.k / STEP * STEP;
        for left in (0..whole).step_by(square) {
            let right = whole.min(left + square);
            for i in (0..width).step_by(V::LANES) {
                let rows = part.count.saturating_sub(i).min(V::LANES);
                for l in (left..right).step_by(STEP) {
                    let places = V::places(part.at.wrapping_add(i * part.apart + l), part.apart, rows);
                    for (p, x) in places.into_iter().enumerate() {
                        x.store_first(to.add((l + p) * step + i), width - i);
                    }
                }
            }
        }
        singly(part, to, step, width, whole);
    }
}

#[inline(always)]
unsafe fn copied<V: Vector>(part: &Part, to: *mut f32, step: usize, width: usize) {
    // SAFETY: the caller's.
    unsafe {
        if part.count == width && width == V::WIDTH {
            for l in 0..part.k {
                let (from, to) = (part.at.add(l * part.along), to.add(l * step));
                for i in 0..V::WIDE {
                    V::load(from.add(i * V::LANES)).store(to.add(i * V::LANES));
                }
            }
            return;
        }
        for l in 0..part.k {
            let (from, to) = (part.at.add(l * part.along), to.add(l * step));
            for i in (0..width).step_by(V::LANES) {
                let count = part.count.saturating_sub(i);
                V::load_first(from.wrapping_add(i), count).store_first(to.add(i), width - i);
            }
        }
    }
}

#[inline(always)]
unsafe fn singly(part: &Part, to: *mut f32, step: usize, width: usize, from: usize) {
    for l in from..part.k {
        for i in 0..width {
            // SAFETY: the caller's.
            unsafe {
                let x = if i < part.count { *part.at.add(i * part.apart + l * part.along) } else { 0.0 };
                *to.add(l * step + i) = x;
            }
        }
    }
}
