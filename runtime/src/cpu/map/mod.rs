//! Maps: a small machine whose registers are tiles of lanes that stay in the first cache.
//!
//! The space is the points of all loops, or the rows of the outer loops. A tile is some whole rows. A map without row
//! reductions has no need of rows: its rows are its points, and a tile is cut anywhere.
//!
//! ```text
//! once      constants, scalars and what follows from them        1 lane
//! of tiles  what is the same all over a tile, but not in the next 1 lane
//! of rows   a lane a row of the tile
//! of points a lane a point of the tile
//! ```
//! What is the same in every tile (a norm's weight, a mask's column index) is computed before the first.

mod ahead;
mod plan;
mod run;
mod terms;

pub use plan::plan;

use ir::{DType, Reduce};

use super::lanes::{MOST, Many, Map1, Map2, Map3, Rows, Rows2};
use super::layout::Walk;

/// How many lanes a register has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Once,
    Tile,
    Row,
    Point,
}

/// A register: where its lanes lie in the scratch, counted in lanes.
#[derive(Clone, Copy, Debug)]
struct Register {
    class: Class,
    offset: usize,
}

/// What an instruction does. Registers are numbers in [`Plan::registers`].
enum Code {
    /// The same number in each lane.
    Fill(f32),
    /// Elements of an operand. Where they lie together as f32, the register is the operand itself. If they are also
    /// `stored` as they are, only where no write is in place of the operand: stores come last.
    Load {
        read: usize,
        dtype: DType,
        walk: Walk,
        /// Where the first lies.
        offset: usize,
        stored: bool,
    },
    /// Global indices.
    Iota {
        start: usize,
        along: usize,
        walk: Walk,
    },
    /// Elements that an index says.
    LoadAt(Lookup),
    /// Random numbers.
    Random(Numbers),
    One(Map1, usize),
    Two(Map2, usize, usize),
    /// Lanes and one number, in either order, or (`by_row`) a number a row.
    Numbered {
        f: Rows2,
        a: usize,
        b: usize,
        by_row: bool,
    },
    Term(Term),
    /// One number a row from registers of points.
    Sums(Term),
    Three(Map3, usize, usize, usize),
    /// The second register where the first's number is not 0, else the third: no lanes are computed.
    Pick(usize, usize, usize),
    /// Lanes that `half` or an integer type rounds.
    Cast(DType, usize),
    /// One number a row from a register of points.
    Reduce(Rows, usize),
    /// One number a row, of a register that is the same all along the row.
    ReduceSame(Reduce, usize),
    /// A register of rows, to points.
    Expand(usize),
    /// A register of one lane, to rows or points.
    Spread(usize),
    /// Writes an operand.
    Store {
        write: usize,
        dtype: DType,
        walk: Walk,
        of: usize,
    },
    /// Combines into an operand or its place in the scratch.
    Accumulate {
        total: usize,
        walk: Walk,
        of: usize,
    },
}

/// No register.
const NOTHING: usize = usize::MAX;

/// Several registers combined.
struct Term {
    f: Many,
    /// As [`super::lanes::Form`] has them, or [`NOTHING`].
    operands: [usize; MOST + 2],
    /// Numbers are of rows.
    by_row: bool,
    /// Operations on a lane.
    operations: usize,
}

/// A load at an index.
struct Lookup {
    read: usize,
    dtype: DType,
    /// The offset of each lane, or (`inner`) of each row, without the index.
    walk: Walk,
    /// The offsets along a row, where the index is of the row and the result of the points.
    inner: Option<Walk>,
    /// The register with the index.
    at: usize,
    /// This rank's first index, how many it has, and how far apart their elements lie.
    start: usize,
    len: usize,
    stride: usize,
}

/// What is drawn.
struct Numbers {
    key: [u32; 2],
    /// The registers of row, position and step.
    counter: [usize; 3],
    /// The inner index of the first lane, how far apart neighbours are along each loop, and each lane's from the first.
    start: usize,
    strides: Vec<usize>,
    walk: Walk,
}

/// A step of the machine.
struct Instr {
    code: Code,
    /// The register that it defines.
    to: usize,
    /// What its lanes are.
    class: Class,
    /// The operand that its lanes are stored in. Where they lie together there, and it is in place of no read, they are
    /// computed there.
    straight: Option<(usize, Walk)>,
}

/// Where an accumulated operand is summed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// In the operand itself.
    Operand,
    /// As f32 at this place of the scratch, counted in lanes.
    F32(usize),
    /// As f64.
    F64(usize),
}

/// An accumulated operand.
struct Total {
    write: usize,
    dtype: DType,
    count: usize,
    reduce: Reduce,
    place: Place,
}

/// A map, planned for one rank.
pub struct Plan {
    registers: Vec<Register>,
    /// Before the first tile.
    before: Vec<Instr>,
    /// For each tile.
    each: Vec<Instr>,
    totals: Vec<Total>,
    /// How many rows there are, how many points a row has, and how many rows a tile has.
    rows: usize,
    row: usize,
    tile: usize,
    /// How many times in a tile some of the next one's operands are asked for.
    parts: usize,
    /// How many lanes of scratch the registers and totals take.
    lanes: usize,
}

impl Plan {
    /// Bytes of scratch: a pointer a register, and the lanes.
    pub fn scratch_bytes(&self) -> usize {
        self.pointers() + self.lanes * 4
    }

    /// The first lane of an instruction for a tile of `rows` rows from `first` on, and how many it has.
    fn span(&self, class: Class, first: usize, rows: usize) -> (usize, usize) {
        match class {
            Class::Once => (0, 1),
            Class::Tile => (first, 1),
            Class::Row => (first, rows),
            Class::Point => (first * self.row, rows * self.row),
        }
    }

    fn pointers(&self) -> usize {
        (self.registers.len() * size_of::<*const f32>()).next_multiple_of(64)
    }

    /// Operations on numbers.
    pub fn flops(&self) -> f64 {
        let one = |i: &Instr| match i.code {
            Code::One(..)
            | Code::Two(..)
            | Code::Numbered { .. }
            | Code::Three(..)
            | Code::Reduce(..)
            | Code::Accumulate { .. } => 1.0,
            Code::Term(Term { operations, .. }) => operations as f64,
            Code::Sums(Term { operations, .. }) => (operations + 1) as f64,
            Code::Fill(_)
            | Code::Load { .. }
            | Code::Iota { .. }
            | Code::LoadAt(_)
            | Code::Random(_)
            | Code::Cast(..)
            | Code::ReduceSame(..)
            | Code::Expand(_)
            | Code::Spread(_)
            | Code::Pick(..)
            | Code::Store { .. } => 0.0,
        };
        let lanes = |i: &Instr, rows: usize| match i.class {
            Class::Once | Class::Tile => 1.0,
            Class::Row if !matches!(i.code, Code::Reduce(..) | Code::Sums(_)) => rows as f64,
            Class::Row | Class::Point => (rows * self.row) as f64,
        };
        let all = |instrs: &[Instr], rows| instrs.iter().map(|i| one(i) * lanes(i, rows)).sum::<f64>();
        all(&self.before, self.tile.min(self.rows)) + all(&self.each, self.rows)
    }
}
