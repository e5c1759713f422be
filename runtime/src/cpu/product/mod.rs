//! Matrix products of f32 on one thread, for any strides. What is packed lies in the scratch of the caller.
//!
//! An element of the result is a chain of multiply-adds for each block of the summed dimensions, and the blocks' sums are
//! scaled and added one after the other. Every way to compute it keeps to that: its bits depend neither on the numbers of
//! rows and columns nor on where it stands among them.

mod along;
#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod bf16;
#[cfg(all(test, target_arch = "x86_64"))]
mod bf16_tests;
mod blocks;
mod few;
pub mod level;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod single;
mod streamed;
pub mod summed;
#[cfg(test)]
mod tests;
mod tile;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use level::Level;
use summed::Summed;

/// The longest block of the summed dimensions.
const BLOCK: usize = 384;
/// Numbers of a packed block of `a`: a quarter of a second cache of 2 MiB.
const PACKED: usize = 1 << 17;
/// Up to this many multiplications an element at a time is faster.
const SINGLE: usize = 64;

/// Rows or columns: how many, from one to the next in the operand, and in the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Side {
    /// How many there are.
    pub len: usize,
    /// From one to the next in the operand.
    pub operand: usize,
    /// From one to the next in the result.
    pub out: usize,
}

/// A product `out = scale a b`, planned.
pub struct Plan {
    level: &'static Level,
    m: usize,
    n: usize,
    a_m: usize,
    b_n: usize,
    out_m: usize,
    out_n: usize,
    summed: Summed,
    scale: f32,
    /// Whether `a` and `b` change their places: rows become columns.
    turned: bool,
    way: Way,
    /// Rows of a block.
    rows: usize,
    /// Numbers of a packed block of `a`.
    a_floats: usize,
    /// Numbers of a packed panel of `b`.
    b_floats: usize,
    /// What is packed at a time of a `b` that is packed by itself.
    cut: streamed::Cut,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Single,
    Few,
    Along,
    Streamed,
    Blocks,
}

/// What a product is called with.
pub struct Call {
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    scratch: *mut f32,
    adds: bool,
    /// The operands of the next product; null if there is none.
    next: [*const f32; 2],
}

/// Plans a product for a level: rows, columns, and what is summed with its strides in `a` and `b`, outermost first.
pub fn plan(
    level: &'static Level,
    rows: Side,
    columns: Side,
    summed: &[(usize, [usize; 2])],
    scale: f32,
) -> Plan {
    let turned = turns(level, rows, columns, summed);
    let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
    let summed = in_blocks(summed, turned);
    let (m, n) = (rows.len, columns.len);
    let flat = summed.strides().is_some();
    // A side of one has no stride.
    let stride = |len: usize, stride: usize| if len == 1 { 1 } else { stride };
    let (b_n, out_n) = (stride(n, columns.operand), stride(n, columns.out));
    let way = if m * n * summed.len() <= SINGLE {
        Way::Single
    } else if m <= level.rows && flat && b_n == 1 && out_n == 1 && n >= level.width {
        Way::Few
    } else if m <= level.rows && summed.strides().is_some_and(|[_, b]| b == 1) {
        Way::Along
    } else if streamed::suits(rows, columns, &summed) {
        Way::Streamed
    } else {
        Way::Blocks
    };
    let k = summed.longest();
    let most = (PACKED / k.max(1) / level.rows * level.rows).max(level.rows);
    let rows_of_block = m.min(m.div_ceil(m.div_ceil(most).max(1)).next_multiple_of(level.rows));
    let lines = |floats: usize| floats.next_multiple_of(16);
    Plan {
        level,
        m,
        n,
        a_m: stride(m, rows.operand),
        b_n,
        out_m: rows.out,
        out_n,
        scale,
        turned,
        way,
        rows: rows_of_block,
        a_floats: lines(rows_of_block * k),
        b_floats: lines(k * level.width),
        cut: streamed::Cut::of(level, n, &summed),
        summed,
    }
}

/// What is summed, with the operands in their places or exchanged.
fn in_blocks(summed: &[(usize, [usize; 2])], turned: bool) -> Summed {
    let order = |(len, [a, b]): (usize, [usize; 2])| (len, if turned { [b, a] } else { [a, b] });
    Summed::new(summed.iter().copied().map(order), BLOCK)
}

/// Whether rows are better turned into columns: columns fill registers, and are best one behind the other in the result.
fn turns(level: &Level, rows: Side, columns: Side, summed: &[(usize, [usize; 2])]) -> bool {
    let narrow = |side: Side| side.len <= level.lanes / 2;
    if narrow(columns) != narrow(rows) {
        return narrow(columns);
    }
    let turned = columns.out != 1 && rows.out == 1;
    let suits = [false, true].map(|turned| {
        let (rows, columns) = if turned { (columns, rows) } else { (rows, columns) };
        streamed::suits(rows, columns, &in_blocks(summed, turned))
    });
    // More rows than fill two registers are better packed as they are than written crosswise.
    if suits[0] == suits[1] { turned } else { suits[1] && (rows.out == 1 || rows.len <= 2 * level.lanes) }
}

impl Plan {
    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        let tile = self.level.rows * self.level.width;
        4 * match self.way {
            Way::Single => 0,
            Way::Few => self.a_floats + self.b_floats + self.m * few::STRIP,
            Way::Along => self.m * self.summed.len().next_multiple_of(16),
            Way::Streamed => self.cut.scratch(self.level),
            Way::Blocks => self.a_floats + self.b_floats + tile,
        }
    }

    /// Runs it; if it `adds`, the product is added to what is there.
    ///
    /// # Safety
    /// The operands and the result are as planned, the result overlaps no operand; the scratch is as large as planned and
    /// aligned to 64 bytes.
    pub unsafe fn run(&self, a: *const f32, b: *const f32, out: *mut f32, scratch: *mut f32, adds: bool) {
        // SAFETY: the caller's.
        unsafe { self.run_before([std::ptr::null(); 2], a, b, out, scratch, adds) }
    }

    /// Runs it, as [`Plan::run`] does, where the same plan will next run with the operands `next`: they are asked for
    /// meanwhile, and not used; null if it will not.
    ///
    /// # Safety
    /// As for [`Plan::run`].
    pub unsafe fn run_before(
        &self,
        next: [*const f32; 2],
        a: *const f32,
        b: *const f32,
        out: *mut f32,
        scratch: *mut f32,
        adds: bool,
    ) {
        if self.summed.len() == 0 {
            if !adds {
                for i in 0..self.m * self.n {
                    // SAFETY: the caller's.
                    unsafe { *out.add(i / self.n * self.out_m + i % self.n * self.out_n) = 0.0 }
                }
            }
            return;
        }
        let (a, b) = if self.turned { (b, a) } else { (a, b) };
        let next = if self.turned { [next[1], next[0]] } else { next };
        let call = Call { a, b, out, scratch, adds, next };
        // SAFETY: the caller's; the level's instruction set is there.
        unsafe {
            match self.way {
                Way::Single => (self.level.single)(self, &call),
                Way::Few => (self.level.few)(self, &call),
                Way::Along => (self.level.along[self.m - 1])(self, &call),
                Way::Streamed => (self.level.streamed)(self, &call),
                Way::Blocks => (self.level.blocks)(self, &call),
            }
        }
    }
}
