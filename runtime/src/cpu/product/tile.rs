//! The innermost loop: a tile of the result in registers, over a stretch of the summed dimension. Every element is one
//! chain of multiply-adds in the order of the summed dimension, so its bits depend on no other row or column.

use super::vector::Vector;

/// Where the lines lie that the next panel is made of: asked for a row of a panel at a time, in `per` rows that
/// are `step` numbers apart, and then from a start that is `jump` numbers after the last.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// The next row of lines.
    pub at: *const f32,
    /// From row to row.
    pub step: usize,
    /// Rows before the next jump.
    pub left: usize,
    /// Rows from jump to jump.
    pub per: usize,
    /// From the start of one run of rows to that of the next.
    pub jump: usize,
    /// Rows to ask for.
    pub count: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NONE: Ahead =
        Ahead { at: std::ptr::null(), step: 0, left: usize::MAX, per: usize::MAX, jump: 0, count: 0 };

    /// The lines of a part of an operand, length and stride of its rows or columns and of its places, if one of them lie one
    /// behind the other.
    #[inline(always)]
    pub fn of<V: Vector>(at: *const f32, side: [usize; 2], places: [usize; 2]) -> Ahead {
        let (inner, outer) = if places[1] == 1 { (places, side) } else { (side, places) };
        if at.is_null() || inner[1] != 1 || inner[0] == 0 {
            return Ahead::NONE;
        }
        let step = 16 * V::LINES;
        let per = inner[0].div_ceil(step);
        Ahead { at, step, left: per, per, jump: outer[1], count: per * outer[0] }
    }

    /// Share `i` of `n` of the rows.
    #[inline(always)]
    pub fn share(&self, i: usize, n: usize) -> Ahead {
        self.part(self.count * i / n, self.count * (i + 1) / n)
    }

    /// The rows `from .. to`.
    pub fn part(&self, from: usize, to: usize) -> Ahead {
        let (runs, rows) = (from / self.per, from % self.per);
        let at = self.at.wrapping_add(runs * self.jump + rows * self.step);
        Ahead { at, left: self.per - rows, count: to - from, ..*self }
    }

    /// Asks for the next row of lines.
    #[inline(always)]
    pub unsafe fn next<V: Vector>(&mut self) {
        // SAFETY: the caller has the instruction set.
        unsafe {
            for line in 0..V::LINES {
                V::prefetch(self.at.wrapping_add(16 * line), false);
            }
        }
        self.at = self.at.wrapping_add(self.step);
        self.left -= 1;
        if self.left == 0 {
            self.at = self.at.wrapping_sub(self.step * self.per).wrapping_add(self.jump);
            self.left = self.per;
        }
    }
}

/// A tile, and what it is made of.
pub struct Operands {
    /// How long the stretch is.
    pub k: usize,
    /// For each of its places a number of each row.
    pub a: *const f32,
    /// From row to row and from place to place in `a`, if it lies as it does in the operand.
    pub a_steps: [usize; 2],
    /// For each of its places the columns.
    pub b: *const f32,
    /// From place to place in `b`.
    pub b_step: usize,
    /// What the sums begin with, whole rows of registers; zeros if null.
    pub start: *const f32,
    /// From row to row of it.
    pub start_step: usize,
    /// The result.
    pub out: *mut f32,
    /// From row to row of it.
    pub out_step: usize,
    /// How many columns are written.
    pub columns: usize,
    /// What the sums are multiplied by.
    pub scale: f32,
    /// Whether the result is added to what is there.
    pub adds: bool,
    /// What to ask for meanwhile: a row of lines every second place.
    pub ahead: Ahead,
}

/// A tile of some number of rows and registers.
pub type Tile = unsafe fn(&Operands);

/// A tile of `M` rows and `N` registers. If `a` is `PACKED` its rows lie one behind the other, and places one behind the
/// other. All loops over sums are short and by index: only then do they become registers.
///
/// # Safety
/// The instruction set is there, and operands are as described.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
pub unsafe fn tile<V: Vector, const M: usize, const N: usize, const PACKED: bool>(t: &Operands) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[V::zero(); N]; M];
        if !t.start.is_null() {
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = V::load(t.start.add(i * t.start_step + j * V::LANES));
                }
            }
        }
        let mut b = t.b;
        let [row_step, place_step] = if PACKED { [1, M] } else { t.a_steps };
        // One offset for all rows leaves them a register each.
        let rows: [*const f32; M] = std::array::from_fn(|i| t.a.wrapping_add(i * row_step));
        let mut at = 0;
        // A closure might not be inlined, and the sums would go through memory.
        macro_rules! place {
            () => {
                let mut row = [V::zero(); N];
                for j in 0..N {
                    row[j] = V::load(b.add(j * V::LANES));
                }
                for i in 0..M {
                    let x = V::splat(rows[i].wrapping_add(at));
                    for j in 0..N {
                        sums[i][j] = x.mul_add(row[j], sums[i][j]);
                    }
                }
                at += place_step;
                b = b.wrapping_add(t.b_step);
            };
        }
        let mut ahead = t.ahead;
        let mut asked = ahead.count;
        if t.k % 2 == 1 {
            place!();
        }
        // The lines of the result are asked for a row at a time: all at once would keep the operands' waiting.
        let asks = PACKED && t.start.is_null();
        let rows_of_out = if asks { M } else { 1 };
        let mut left = t.k / 2;
        for i in 0..rows_of_out {
            if asks {
                let row = t.out.cast_const().wrapping_add(i * t.out_step);
                for line in 0..V::LINES {
                    V::prefetch(row.wrapping_add(16 * line), true);
                }
            }
            let mut pairs = left / (rows_of_out - i);
            left -= pairs;
            while pairs > 0 && asked > 0 {
                ahead.next::<V>();
                asked -= 1;
                place!();
                place!();
                pairs -= 1;
            }
            while pairs > 0 {
                place!();
                place!();
                pairs -= 1;
            }
        }
        let scale = V::splat(&t.scale);
        let to = |i: usize, j: usize| t.out.wrapping_add(i * t.out_step + j * V::LANES);
        let columns = |j: usize| t.columns.saturating_sub(j * V::LANES);
        if t.adds {
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = sums[i][j].mul_add(scale, V::load_first(to(i, j), columns(j)));
                }
            }
        } else {
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = sums[i][j].mul(scale);
                }
            }
        }
        for i in 0..M {
            for j in 0..N {
                sums[i][j].store_first(to(i, j), columns(j));
            }
        }
    }
}
