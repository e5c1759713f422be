//! Kernels: loops over an index space, and what is done at each point. Read by the CPU runtime and by code
//! generation alike, so nothing here is a device's.
//!
//! ```text
//! map [b=8/dp, s=32 | d=64] (f32, f32) -> (f32) {
//!   r0 = load 0 [b, s, d]
//!   r1 = load 1 [d]
//!   r2 = mul r0, r1
//!   r3 = row_sum r2
//!   store 0 [b, s] r3
//! }
//! ```

mod chain;

use smallvec::{SmallVec, smallvec};

pub use chain::{Chain, Link, Operand, Use};

use crate::{Axes, Binary, DType, Dim, Draw, Name, Reduce, Unary};

/// A loop: the name and global size of the factor that it runs over, and the axes that split it.
/// A rank runs over its own piece.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Loop {
    /// The factor's name, for the text form.
    pub name: Name,
    /// Global size.
    pub size: usize,
    /// What splits it, outermost first.
    pub axes: Axes,
}

/// Which loops index each dimension of an operand, outermost first: affine with the operand's own dense,
/// row-major local strides. An empty list is a dimension of size 1.
pub type Access = Vec<Dim>;

/// A step of a map, by its place: the register that it defines.
pub type Register = usize;

/// A few registers.
pub type Registers = SmallVec<[Register; 2]>;

/// One step of a map at one point of its space. A step that yields a number defines the register of its own place.
///
/// A register is *of the row* if it is the same for all points of a row (its loads and iotas use no loop of the row),
/// else *of the point*.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// An element of operand `read`.
    Load {
        /// Which operand.
        read: usize,
        /// Where.
        access: Access,
    },
    /// An element of operand `read`, where the loop `looked` of the access takes the global index in register `at`;
    /// 0 if that index is outside this rank's range.
    LoadAt {
        /// Which operand.
        read: usize,
        /// Where. It contains `looked`, which is no loop of the space.
        access: Access,
        /// A loop of [`Map::looked`], numbered behind those of the space.
        looked: usize,
        /// The global index.
        at: Register,
    },
    /// A number.
    Const(f64),
    /// The global index along a loop of the space, or of the row.
    Iota(usize),
    /// A uniform number in [0, 1), as [`crate::Op::Random`] says.
    Random {
        /// Which numbers.
        draw: Draw,
        /// The row, the position and the step.
        counter: [Register; 3],
        /// Loops of the space, or of the row: the rest of the counter is the row-major global index over them.
        inner: Dim,
    },
    /// A function.
    Unary(Unary, Register),
    /// A function.
    Binary(Binary, Register, Register),
    /// The sum.
    Add(Registers),
    /// `scale` times the product; of nothing it is `scale`.
    Mul(f64, Registers),
    /// The second where the first is not 0, else the third.
    Select(Register, Register, Register),
    /// The number rounded to an element type.
    Cast(DType, Register),
    /// Combines a register of the point over the row, in the order of the row; the result is of the row.
    Row(Reduce, Register),
    /// Writes operand `write`. Every loop of the space (or, for a register of the row, every loop outside the row) is
    /// in the access. Defines no register.
    Store {
        /// Which operand.
        write: usize,
        /// Where.
        access: Access,
        /// What.
        of: Register,
    },
    /// Writes operand `write`, combining over the loops that the access lacks, in the order of the space. A register
    /// of the row counts once a row if the access has no loop of the row, else at each point. Defines no register.
    Accumulate {
        /// Which operand.
        write: usize,
        /// Where.
        access: Access,
        /// What.
        of: Register,
        /// How. An element that no point reaches is [`Reduce::identity`].
        reduce: Reduce,
    },
}

/// A fused chain of pointwise steps and row reductions: all steps at each point of the space, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// The space, outermost first.
    pub loops: Vec<Loop>,
    /// How many of the last loops form the row.
    pub row: usize,
    /// Loops that are only looked up, numbered behind `loops`.
    pub looked: Vec<Loop>,
    /// The steps.
    pub steps: Vec<Step>,
}

/// `scale` times the product of two operands, summed over the loops that the result lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct Contract {
    /// All loops.
    pub loops: Vec<Loop>,
    /// Operand 0.
    pub a: Access,
    /// Operand 1.
    pub b: Access,
    /// The result.
    pub out: Access,
    /// A constant factor.
    pub scale: f64,
}

/// Adds each row of operand 0 to the place of the result that operand 1, an index, says; the rest is 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Scatter {
    /// All loops.
    pub loops: Vec<Loop>,
    /// Operand 0.
    pub source: Access,
    /// Operand 1: global indices along `looked`.
    pub index: Access,
    /// The result.
    pub out: Access,
    /// The loop that the index says.
    pub looked: usize,
}

/// The best of operand 0 along a loop: pairs of a value and its global index, in the order of [`crate::Op::TopK`].
#[derive(Clone, Debug, PartialEq)]
pub struct TopK {
    /// All loops: also those of the pairs, which nothing splits.
    pub loops: Vec<Loop>,
    /// Operand 0.
    pub source: Access,
    /// The result. Its last dimensions are the loops of how many pairs, and of the two numbers of one.
    pub out: Access,
    /// The loop that is searched, which the result lacks.
    pub searched: usize,
}

/// What a launch computes.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Pointwise steps and row reductions.
    Map(Map),
    /// A matrix product, maybe in batches.
    Contract(Contract),
    /// A sum by index.
    Scatter(Scatter),
    /// The best along a loop.
    TopK(TopK),
    /// Several kernels, block by block.
    Chain(Chain),
}

/// A kernel: a body, and the element types of its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// What it reads.
    pub reads: Vec<DType>,
    /// What it writes.
    pub writes: Vec<DType>,
    /// What it does.
    pub body: Body,
}

impl Step {
    /// The registers that it uses.
    pub fn uses(&self) -> Registers {
        match self {
            Step::Load { .. } | Step::Const(_) | Step::Iota(_) => Registers::new(),
            Step::LoadAt { at: r, .. }
            | Step::Unary(_, r)
            | Step::Cast(_, r)
            | Step::Row(_, r)
            | Step::Store { of: r, .. }
            | Step::Accumulate { of: r, .. } => smallvec![*r],
            Step::Binary(_, a, b) => smallvec![*a, *b],
            Step::Add(all) | Step::Mul(_, all) => all.clone(),
            Step::Select(c, a, b) => smallvec![*c, *a, *b],
            Step::Random { counter, .. } => counter.as_slice().into(),
        }
    }

    /// The same with other registers.
    pub fn renamed(&self, to: impl Fn(Register) -> Register) -> Step {
        let mut step = self.clone();
        step.rename(to);
        step
    }

    /// Uses other registers.
    pub fn rename(&mut self, to: impl Fn(Register) -> Register) {
        match self {
            Step::Load { .. } | Step::Const(_) | Step::Iota(_) => {}
            Step::LoadAt { at: r, .. }
            | Step::Unary(_, r)
            | Step::Cast(_, r)
            | Step::Row(_, r)
            | Step::Store { of: r, .. }
            | Step::Accumulate { of: r, .. } => *r = to(*r),
            Step::Binary(_, a, b) => (*a, *b) = (to(*a), to(*b)),
            Step::Add(all) | Step::Mul(_, all) => all.iter_mut().for_each(|r| *r = to(*r)),
            Step::Select(c, a, b) => (*c, *a, *b) = (to(*c), to(*a), to(*b)),
            Step::Random { counter, .. } => *counter = counter.map(to),
        }
    }

    /// How it combines, if it does.
    pub fn reduce(&self) -> Option<Reduce> {
        match self {
            Step::Row(reduce, _) | Step::Accumulate { reduce, .. } => Some(*reduce),
            Step::Load { .. }
            | Step::LoadAt { .. }
            | Step::Const(_)
            | Step::Iota(_)
            | Step::Random { .. }
            | Step::Unary(..)
            | Step::Binary(..)
            | Step::Add(_)
            | Step::Mul(..)
            | Step::Select(..)
            | Step::Cast(..)
            | Step::Store { .. } => None,
        }
    }

    /// The operand and place that it loads plainly.
    pub fn load(&self) -> Option<(usize, &Access)> {
        if let Step::Load { read, access } = self { Some((*read, access)) } else { None }
    }

    /// The operand that it looks up in.
    pub fn load_at(&self) -> Option<usize> {
        if let Step::LoadAt { read, .. } = self { Some(*read) } else { None }
    }

    /// The operand and place that it stores, and what.
    pub fn store(&self) -> Option<(usize, &Access, Register)> {
        if let Step::Store { write, access, of } = self { Some((*write, access, *of)) } else { None }
    }

    /// The operand and place that it writes, stored or combined, and what.
    pub fn write(&self) -> Option<(usize, &Access, Register)> {
        match self {
            Step::Store { write, access, of } | Step::Accumulate { write, access, of, .. } => {
                Some((*write, access, *of))
            }
            Step::Load { .. }
            | Step::LoadAt { .. }
            | Step::Const(_)
            | Step::Iota(_)
            | Step::Random { .. }
            | Step::Unary(..)
            | Step::Binary(..)
            | Step::Add(_)
            | Step::Mul(..)
            | Step::Select(..)
            | Step::Cast(..)
            | Step::Row(..) => None,
        }
    }

    /// The operand and place that it reads, plainly or by an index.
    pub fn read(&self) -> Option<(usize, &Access)> {
        if let Step::Load { read, access } | Step::LoadAt { read, access, .. } = self {
            Some((*read, access))
        } else {
            None
        }
    }

    /// Whether it combines over points.
    pub fn reduces(&self) -> bool {
        matches!(self, Step::Row(..) | Step::Accumulate { .. })
    }

    /// Whether it defines a register.
    pub fn defines(&self) -> bool {
        self.write().is_none()
    }
}

impl Map {
    /// For each step, whether its register is of the point (else it is of the row).
    pub fn of_point(&self) -> Vec<bool> {
        let first = self.loops.len() - self.row;
        let inner = |access: &Access| access.iter().flatten().any(|l| *l >= first && *l < self.loops.len());
        let mut point: Vec<bool> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let used = step.uses().iter().any(|r| point[*r]);
            point.push(match step {
                Step::Load { access, .. } => inner(access),
                Step::LoadAt { access, .. } => inner(access) || used,
                Step::Iota(l) => *l >= first,
                Step::Random { inner, .. } => inner.iter().any(|l| *l >= first) || used,
                Step::Row(..) => false,
                Step::Const(_)
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Mul(..)
                | Step::Select(..)
                | Step::Cast(..)
                | Step::Store { .. }
                | Step::Accumulate { .. } => used,
            });
        }
        point
    }
}

impl Map {
    /// Whether operand `write` may lie where operand `read` does: every load of it is of the very element that is
    /// stored, and comes before the store.
    pub fn in_place(&self, read: usize, write: usize) -> bool {
        let stored = self
            .steps
            .iter()
            .enumerate()
            .find_map(|(i, s)| Some((i, s.store()?)).filter(|(_, s)| s.0 == write));
        let Some((at, (_, stored, _))) = stored else { return false };
        let every = stored.iter().flatten().count() == self.loops.len();
        let loads = self.steps.iter().enumerate().filter_map(|(i, s)| Some((i, s.load()?)));
        let fits = loads.filter(|(_, (r, _))| *r == read).all(|(i, (_, access))| i < at && access == stored);
        every && fits && self.steps.iter().filter_map(Step::load_at).all(|r| r != read)
    }
}

impl Body {
    /// All loops, those only looked up last; of a chain those that its kernels share, and then all others.
    pub fn loops(&self) -> Vec<&Loop> {
        match self {
            Body::Map(m) => m.loops.iter().chain(&m.looked).collect(),
            Body::Contract(c) => c.loops.iter().collect(),
            Body::Scatter(s) => s.loops.iter().collect(),
            Body::TopK(t) => t.loops.iter().collect(),
            Body::Chain(c) => c.all_loops(),
        }
    }
}
