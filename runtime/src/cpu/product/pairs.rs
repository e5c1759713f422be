//! Operands of bf16 as the matrix unit reads them: registers of 16 lines of 16 pairs of neighbouring places of the summed
//! dimension. For `a` a line is a row, with pairs along it; for `b` a line is a pair, with columns along it. An operand that
//! lies the other way is transposed, a pair being one number of 32 bits.

use std::arch::x86_64::*;

use super::amx::{PLACES, SIDE};
use super::vector::{STEP, Vector};
use super::x86::Avx512;

/// Up to 32 rows of `a` or columns of `b`, and up to 32 places.
#[derive(Clone, Copy)]
pub struct Square {
    /// The first number.
    pub at: *const u16,
    /// From row to row, or column to column.
    pub apart: usize,
    /// From place to place.
    pub along: usize,
    /// Rows or columns.
    pub count: usize,
    /// Places.
    pub k: usize,
}

/// Two registers.
#[repr(C, align(64))]
pub struct Pack(pub [u16; SIDE * PLACES]);

/// The first `n` numbers of 32.
fn first(n: usize) -> __mmask32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// Rows of `a` to two registers; what is missing is 0.
///
/// # Safety
/// AVX-512 is there, the square can be read and 2048 bytes at `to` be written.
#[inline(always)]
pub unsafe fn rows(square: &Square, to: *mut u16) {
    // SAFETY: the caller's.
    unsafe {
        if square.apart == 1 && square.along != 1 {
            let mut pack = Pack([0; SIDE * PLACES]);
            by_place(square, pack.0.as_mut_ptr());
            return transposed(&pack, to);
        }
        by_line(square, to);
    }
}

/// Columns of `b` to two registers; what is missing is 0.
///
/// # Safety
/// As for [`rows`].
#[inline(always)]
pub unsafe fn columns(square: &Square, to: *mut u16) {
    // SAFETY: the caller's.
    unsafe {
        if square.apart == 1 && square.along != 1 {
            return by_place(square, to);
        }
        let mut pack = Pack([0; SIDE * PLACES]);
        by_line(square, pack.0.as_mut_ptr());
        transposed(&pack, to);
    }
}

/// Both registers, lines and pairs exchanged.
#[inline(always)]
unsafe fn transposed(from: &Pack, to: *mut u16) {
    for half in [0, 512] {
        // SAFETY: the caller's; numbers are only moved, so any bits are fine.
        unsafe {
            let (from, to) = (from.0.as_ptr().add(half).cast::<f32>(), to.add(half).cast::<f32>());
            for l in (0..16).step_by(STEP) {
                for (p, x) in Avx512::places(from.add(l), 16, 16).into_iter().enumerate() {
                    x.store(to.add((l + p) * 16));
                }
            }
        }
    }
}

/// A line for each row or column.
#[inline(always)]
unsafe fn by_line(square: &Square, to: *mut u16) {
    // SAFETY: the caller's.
    unsafe {
        for i in 0..SIDE {
            let to = to.add(i * PLACES);
            let from = square.at.wrapping_add(i * square.apart);
            if i >= square.count {
                _mm512_storeu_si512(to.cast(), _mm512_setzero_si512());
            } else if square.along == 1 {
                let line = _mm512_maskz_loadu_epi16(first(square.k), from.cast());
                _mm512_storeu_si512(to.cast(), line);
            } else {
                for l in 0..PLACES {
                    *to.add(l) = if l < square.k { *from.add(l * square.along) } else { 0 };
                }
            }
        }
    }
}

/// A line for each pair of places, of an operand whose rows or columns lie one behind the other.
#[inline(always)]
unsafe fn by_place(square: &Square, to: *mut u16) {
    // SAFETY: the caller's.
    unsafe {
        let mut order = [[0u16; 32]; 2];
        for i in 0..16 {
            for (half, order) in order.iter_mut().enumerate() {
                order[2 * i] = (16 * half + i) as u16;
                order[2 * i + 1] = (32 + 16 * half + i) as u16;
            }
        }
        let order = [0, 1].map(|half: usize| _mm512_loadu_si512(order[half].as_ptr().cast()));
        let place = |l: usize| {
            let mask = if l < square.k { first(square.count) } else { 0 };
            _mm512_maskz_loadu_epi16(mask, square.at.wrapping_add(l * square.along).cast())
        };
        for pair in 0..PLACES / 2 {
            let (even, odd) = (place(2 * pair), place(2 * pair + 1));
            let to = to.add(pair * 32);
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(even, order[0], odd));
            _mm512_storeu_si512(to.add(512).cast(), _mm512_permutex2var_epi16(even, order[1], odd));
        }
    }
}
