//! What a matrix product needs of vector registers, for plain code. The instruction sets have a file each.

/// Places that are turned together.
pub const STEP: usize = 4;

/// A register of `LANES` numbers.
///
/// # Safety
/// Every function needs the instruction set of its type, and memory for as many numbers as it says.
pub trait Vector: Copy {
    /// How many numbers it has.
    const LANES: usize;
    /// The most rows of a tile: as many as leave registers for a row of `b` and a number of `a`.
    const ROWS: usize;
    /// The most registers of a row of a tile.
    const WIDE: usize;
    /// Columns of a tile.
    const WIDTH: usize = Self::WIDE * Self::LANES;
    /// Lines of a row of a tile.
    const LINES: usize = Self::WIDTH.div_ceil(16);

    /// Zeros.
    unsafe fn zero() -> Self;
    /// The number at `p` in every lane.
    unsafe fn splat(p: *const f32) -> Self;
    /// The numbers at `p`.
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n` numbers at `p`, and zeros; all if `n` is more than there are lanes. None is read beyond.
    unsafe fn load_first(p: *const f32, n: usize) -> Self;
    /// All numbers to `p`.
    unsafe fn store(self, p: *mut f32);
    /// The first `n` numbers to `p`; all if `n` is more than there are lanes.
    unsafe fn store_first(self, p: *mut f32, n: usize);
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self * b + c`, rounded as [`Vector::add_one`] rounds.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// `a * b + c` of single numbers.
    unsafe fn add_one(a: f32, b: f32, c: f32) -> f32;
    /// `STEP` places of up to `LANES` rows, row `r` of which lies at `from + r * apart`: a register for each place, with
    /// any numbers behind the rows.
    unsafe fn places(from: *const f32, apart: usize, rows: usize) -> [Self; STEP];
    /// The first half of turning `LANES` places of up to `LANES` rows: for every `STEP` places `STEP` registers, of which
    /// register `r` has those of the rows `r`, `r + STEP` and so on, with any numbers behind the last row.
    unsafe fn woven(from: *const f32, apart: usize, rows: usize) -> [[Self; STEP]; 4];
    /// The second half: the places of such registers.
    unsafe fn unwoven(woven: [Self; STEP]) -> [Self; STEP];
    /// Asks for the line at `p`, near or only in the second cache. No address is wrong.
    unsafe fn prefetch(p: *const f32, near: bool);
}

/// Numbers that the compiler puts into what registers there are. Products are rounded before they are added.
#[derive(Clone, Copy)]
pub struct Plain([f32; 8]);

impl Vector for Plain {
    const LANES: usize = 8;
    const ROWS: usize = 4;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Plain {
        Plain([0.0; 8])
    }

    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Plain {
        // SAFETY: the caller's.
        Plain([unsafe { *p }; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Plain {
        // SAFETY: the caller's.
        Plain(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Plain {
        // SAFETY: the caller's.
        Plain(std::array::from_fn(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 }))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, n: usize) {
        for (i, x) in self.0.iter().enumerate().take(n) {
            // SAFETY: the caller's.
            unsafe { *p.add(i) = *x }
        }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i] * b.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Plain, c: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i] * b.0[i] + c.0[i]))
    }

    #[inline(always)]
    unsafe fn add_one(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    unsafe fn places(from: *const f32, apart: usize, rows: usize) -> [Plain; STEP] {
        std::array::from_fn(|l| {
            // SAFETY: the caller's.
            Plain(std::array::from_fn(|r| if r < rows { unsafe { *from.add(r * apart + l) } } else { 0.0 }))
        })
    }

    #[inline(always)]
    unsafe fn woven(from: *const f32, apart: usize, rows: usize) -> [[Plain; STEP]; 4] {
        let mut all = [[Plain([0.0; 8]); STEP]; 4];
        for row in 0..rows {
            for l in 0..Plain::LANES {
                // SAFETY: the caller's.
                all[l / STEP][row % STEP].0[row / STEP * STEP + l % STEP] =
                    unsafe { *from.add(row * apart + l) };
            }
        }
        all
    }

    #[inline(always)]
    unsafe fn unwoven(woven: [Plain; STEP]) -> [Plain; STEP] {
        std::array::from_fn(|l| Plain(std::array::from_fn(|r| woven[r % STEP].0[r / STEP * STEP + l])))
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const f32, _: bool) {}
}
