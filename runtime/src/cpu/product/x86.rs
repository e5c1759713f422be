//! Vector registers of AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::vector::{STEP, Vector};

#[inline(always)]
unsafe fn prefetch(p: *const f32, near: bool) {
    // SAFETY: a prefetch reads nothing.
    unsafe {
        if near {
            _mm_prefetch::<_MM_HINT_T0>(p.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T1>(p.cast());
        }
    }
}

/// 16 lanes, with AVX-512.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

/// The first `n` lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

/// Four places of rows, of which register `r` has those of the rows `r`, `r + 4`, `r + 8` and `r + 12`.
#[inline(always)]
unsafe fn places_of_16([a, b, c, d]: [__m512; 4]) -> [Avx512; STEP] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        let (pd, ps) = (|x| _mm512_castps_pd(x), |x| _mm512_castpd_ps(x));
        let (ab, cd) = (pd(_mm512_unpacklo_ps(a, b)), pd(_mm512_unpacklo_ps(c, d)));
        let (ab2, cd2) = (pd(_mm512_unpackhi_ps(a, b)), pd(_mm512_unpackhi_ps(c, d)));
        [
            Avx512(ps(_mm512_unpacklo_pd(ab, cd))),
            Avx512(ps(_mm512_unpackhi_pd(ab, cd))),
            Avx512(ps(_mm512_unpacklo_pd(ab2, cd2))),
            Avx512(ps(_mm512_unpackhi_pd(ab2, cd2))),
        ]
    }
}

// SAFETY of all blocks: the trait's; the caller has AVX-512.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx512 {
    const LANES: usize = 16;
    const ROWS: usize = 14;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Avx512 {
        Avx512(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Avx512 {
        Avx512(unsafe { _mm512_set1_ps(*p) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Avx512 {
        Avx512(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Avx512 {
        Avx512(unsafe { _mm512_maskz_loadu_ps(first(n), p) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        unsafe { _mm512_mask_storeu_ps(p, first(n), self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Avx512) -> Avx512 {
        Avx512(unsafe { _mm512_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Avx512, c: Avx512) -> Avx512 {
        Avx512(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn add_one(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    /// Rows are put together while they are loaded, which leaves half of the shuffles.
    #[inline(always)]
    unsafe fn places(from: *const f32, apart: usize, rows: usize) -> [Avx512; STEP] {
        unsafe {
            // Of rows r, r + 4, r + 8 and r + 12 four numbers each.
            let mut four = [_mm512_setzero_ps(); 4];
            if rows >= 16 {
                for (r, four) in four.iter_mut().enumerate() {
                    let row = |i: usize| _mm_loadu_ps(from.add((r + 4 * i) * apart));
                    let x = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(row(0)), row(1));
                    *four = _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(x, row(2)), row(3));
                }
            } else if rows > 0 {
                for (r, four) in four.iter_mut().enumerate() {
                    // The last row stands for those that are missing.
                    let row = |i: usize| _mm_loadu_ps(from.add((r + 4 * i).min(rows - 1) * apart));
                    let x = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(row(0)), row(1));
                    *four = _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(x, row(2)), row(3));
                }
            }
            places_of_16(four)
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "a row of registers each")]
    unsafe fn woven(from: *const f32, apart: usize, rows: usize) -> [[Avx512; STEP]; 4] {
        unsafe {
            let row = |i: usize| _mm512_loadu_ps(from.add(i * apart));
            let last = |i: usize| row(i.min(rows - 1));
            let mut all = [[Avx512::zero(); STEP]; 4];
            for r in 0..STEP {
                let [a, b, c, d] = if rows >= 16 {
                    [row(r), row(r + 4), row(r + 8), row(r + 12)]
                } else {
                    [last(r), last(r + 4), last(r + 8), last(r + 12)]
                };
                // Of each pair of rows the first two fours, and the last two.
                let (ab, ab2) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let (cd, cd2) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                all[0][r] = Avx512(_mm512_shuffle_f32x4::<0x88>(ab, cd));
                all[1][r] = Avx512(_mm512_shuffle_f32x4::<0xdd>(ab, cd));
                all[2][r] = Avx512(_mm512_shuffle_f32x4::<0x88>(ab2, cd2));
                all[3][r] = Avx512(_mm512_shuffle_f32x4::<0xdd>(ab2, cd2));
            }
            all
        }
    }

    #[inline(always)]
    unsafe fn unwoven(all: [Avx512; STEP]) -> [Avx512; STEP] {
        unsafe { places_of_16(all.map(|x| x.0)) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const f32, near: bool) {
        unsafe { prefetch(p, near) }
    }
}

/// 8 lanes, with AVX2 and FMA.
#[derive(Clone, Copy)]
pub struct Avx2(__m256);

/// The first `n` lanes.
#[inline(always)]
unsafe fn first_of_8(n: usize) -> __m256i {
    const LANES: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: 8 numbers behind the start, which is at most 8, are there.
    unsafe { _mm256_loadu_si256(LANES.as_ptr().add(8 - n.min(8)).cast()) }
}

/// Four places of rows, of which register `r` has those of the rows `r` and `r + 4`.
#[inline(always)]
unsafe fn places_of_8([a, b, c, d]: [__m256; 4]) -> [Avx2; STEP] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (pd, ps) = (|x| _mm256_castps_pd(x), |x| _mm256_castpd_ps(x));
        let (ab, cd) = (pd(_mm256_unpacklo_ps(a, b)), pd(_mm256_unpacklo_ps(c, d)));
        let (ab2, cd2) = (pd(_mm256_unpackhi_ps(a, b)), pd(_mm256_unpackhi_ps(c, d)));
        [
            Avx2(ps(_mm256_unpacklo_pd(ab, cd))),
            Avx2(ps(_mm256_unpackhi_pd(ab, cd))),
            Avx2(ps(_mm256_unpacklo_pd(ab2, cd2))),
            Avx2(ps(_mm256_unpackhi_pd(ab2, cd2))),
        ]
    }
}

// SAFETY of all blocks: the trait's; the caller has AVX2 and FMA.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx2 {
    const LANES: usize = 8;
    const ROWS: usize = 6;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Avx2 {
        Avx2(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Avx2 {
        Avx2(unsafe { _mm256_set1_ps(*p) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Avx2 {
        Avx2(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Avx2 {
        Avx2(unsafe { _mm256_maskload_ps(p, first_of_8(n)) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm256_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        unsafe { _mm256_maskstore_ps(p, first_of_8(n), self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Avx2) -> Avx2 {
        Avx2(unsafe { _mm256_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Avx2, c: Avx2) -> Avx2 {
        Avx2(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn add_one(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn places(from: *const f32, apart: usize, rows: usize) -> [Avx2; STEP] {
        unsafe {
            // Of rows r and r + 4 four numbers each.
            let mut four = [_mm256_setzero_ps(); 4];
            for (r, four) in four.iter_mut().enumerate() {
                let row = |r: usize| {
                    if r < rows { _mm_loadu_ps(from.add(r * apart)) } else { _mm_setzero_ps() }
                };
                *four = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(row(r)), row(r + 4));
            }
            places_of_8(four)
        }
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "a row of registers each")]
    unsafe fn woven(from: *const f32, apart: usize, rows: usize) -> [[Avx2; STEP]; 4] {
        unsafe {
            // The last row stands for those that are missing.
            let row = |i: usize| _mm256_loadu_ps(from.add(i.min(rows - 1) * apart));
            let mut all = [[Avx2::zero(); STEP]; 4];
            for r in 0..STEP {
                let [a, b] = [row(r), row(r + 4)];
                all[0][r] = Avx2(_mm256_permute2f128_ps::<0x20>(a, b));
                all[1][r] = Avx2(_mm256_permute2f128_ps::<0x31>(a, b));
            }
            all
        }
    }

    #[inline(always)]
    unsafe fn unwoven(all: [Avx2; STEP]) -> [Avx2; STEP] {
        unsafe { places_of_8(all.map(|x| x.0)) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const f32, near: bool) {
        unsafe { prefetch(p, near) }
    }
}
