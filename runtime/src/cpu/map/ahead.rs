//! What the next tile reads and writes is asked for while a tile is computed: a few lines at a time, for a core keeps only
//! some on their way, and what follows waits for more.

use super::{Class, Code, Instr, Plan};

/// Bytes of a line.
const LINE: usize = 64;
/// The most operands that are asked for.
const MOST: usize = 8;
/// A function of one number takes about as long as so many other instructions: it is computed in parts, between which
/// lines are asked for.
const PARTS: usize = 8;
/// Lanes of a part are a multiple of this: several registers, and whole ones.
const LANES: usize = 64;

/// Stretches of memory that are yet to be asked for.
pub struct Ahead {
    /// Where each begins, and its lines.
    stretches: [(*const u8, usize); MOST],
    count: usize,
    /// The first that has lines left.
    at: usize,
    /// How many lines are asked for at a time.
    share: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NOTHING: Ahead = Ahead { stretches: [(std::ptr::null(), 0); MOST], count: 0, at: 0, share: 0 };

    /// What a plan's tile from row `first` on reads and writes, if it lies together there. Nothing where no instruction takes
    /// long: such a plan waits for memory anyway, and the machine asks ahead by itself.
    pub fn of(plan: &Plan, reads: &[*const u8], writes: &[*mut u8], first: usize) -> Ahead {
        let mut ahead = Ahead::NOTHING;
        let rows = plan.tile.min(plan.rows - first);
        if rows == 0 || plan.parts == plan.each.len() {
            return ahead;
        }
        let mut lines = 0;
        let each = plan.each.iter().filter(|i| matches!(i.class, Class::Row | Class::Point));
        for instr in each {
            let (operand, dtype, walk, offset) = match &instr.code {
                Code::Load { read, dtype, walk, offset, .. } => (reads[*read], dtype, walk, *offset),
                Code::Store { write, dtype, walk, .. } => (writes[*write].cast_const(), dtype, walk, 0),
                Code::Fill(_)
                | Code::Iota { .. }
                | Code::LoadAt(_)
                | Code::Random(_)
                | Code::One(..)
                | Code::Two(..)
                | Code::Numbered { .. }
                | Code::Term(_)
                | Code::Sums(_)
                | Code::Three(..)
                | Code::Pick(..)
                | Code::Cast(..)
                | Code::Reduce(..)
                | Code::ReduceSame(..)
                | Code::Expand(_)
                | Code::Spread(_)
                | Code::Accumulate { .. } => continue,
            };
            let (first, n) = plan.span(instr.class, first, rows);
            if let Some(at) = walk.together(first, n)
                && ahead.count < MOST
            {
                let of = (n * dtype.bytes()).div_ceil(LINE);
                ahead.stretches[ahead.count] = (operand.wrapping_add((offset + at) * dtype.bytes()), of);
                ahead.count += 1;
                lines += of;
            }
        }
        ahead.share = lines.div_ceil(plan.parts.max(1));
        ahead
    }

    /// Asks for the next share.
    pub fn ask(&mut self) {
        let mut lines = self.share;
        while lines > 0 && self.at < self.count {
            let (from, left) = &mut self.stretches[self.at];
            let now = lines.min(*left);
            for _ in 0..now {
                prefetch(*from);
                *from = from.wrapping_add(LINE);
            }
            *left -= now;
            lines -= now;
            self.at += usize::from(*left == 0);
        }
    }
}

/// Lanes of a part of an instruction over `n`: all, if it is short.
pub fn part(instr: &Instr, n: usize) -> usize {
    if matches!(instr.code, Code::One(..)) { n.div_ceil(PARTS).next_multiple_of(LANES) } else { n }
}

/// How many times a share is asked for in a tile.
pub fn parts(plan: &Plan) -> usize {
    let one = |i: &Instr| {
        let (_, n) = plan.span(i.class, 0, plan.tile);
        n.div_ceil(part(i, n).max(1)).max(1)
    };
    plan.each.iter().map(one).sum()
}

/// Asks for a line. No address is wrong.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing, and all machines of this kind have it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
