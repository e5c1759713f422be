//! A kernel of a chain over one block.

use ir::DType;
use ir::kernel::{Access, Body, Kernel};

use super::super::convert;
use super::super::lanes::best;
use super::super::layout::{Extents, Walk, strides};
use super::super::{contract, map};

/// A map or a contraction, planned for blocks of one size.
pub enum Block {
    /// A map.
    Map(map::Plan),
    /// A contraction, and what of it is converted: both operands, and the result.
    Contract(Box<contract::Plan>, [Option<Wide>; 3]),
}

/// An operand of a contraction that is not f32: it is f32 in scratch, one element behind the other.
pub struct Wide {
    dtype: DType,
    count: usize,
    /// Its elements.
    walk: Walk,
    /// Where it is in the scratch.
    at: usize,
}

/// Plans a map or a contraction over these extents.
pub fn plan(kernel: &Kernel, extents: &Extents) -> Block {
    match &kernel.body {
        Body::Map(of) => Block::Map(map::plan(kernel, of, extents)),
        Body::Contract(c) => {
            let types = [kernel.reads[0], kernel.reads[1], kernel.writes[0]];
            let plan = contract::plan(c, types, extents);
            if plan.direct() || types == [DType::F32; 3] {
                return Block::Contract(Box::new(plan), [None, None, None]);
            }
            let lens = extents.lens();
            let mut dense = extents.clone();
            let mut bytes = 0;
            let mut wide = |access: &Access, dtype: DType, lies: &mut Vec<usize>| {
                if dtype == DType::F32 {
                    return None;
                }
                let order: Vec<usize> = access.iter().flatten().copied().collect();
                let pick = |of: &[usize]| -> Vec<usize> { order.iter().map(|l| of[*l]).collect() };
                let walk = Walk::new(&pick(&lens), &pick(&strides(access, lies)));
                lies.clone_from(&lens);
                let count: usize = order.iter().map(|l| lens[*l]).product();
                let at = bytes;
                bytes += (4 * count).next_multiple_of(64);
                Some(Wide { dtype, count, walk, at })
            };
            let [a, b] = &mut dense.reads[..] else { unreachable!("a contraction has two operands") };
            let all = [
                wide(&c.a, types[0], a),
                wide(&c.b, types[1], b),
                wide(&c.out, types[2], &mut dense.writes[0]),
            ];
            let plan = contract::plan(c, [DType::F32; 3], &dense);
            // They lie behind the scratch of the product.
            let first = plan.scratch_bytes().next_multiple_of(64);
            let moved = |w: Option<Wide>| w.map(|w| Wide { at: first + w.at, ..w });
            Block::Contract(Box::new(plan), all.map(moved))
        }
        Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => {
            unreachable!("a chain is of maps and contractions, as the verifier holds")
        }
    }
}

impl Block {
    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Block::Map(plan) => plan.scratch_bytes(),
            Block::Contract(plan, wide) => {
                let end = wide.iter().flatten().map(|w| w.at + (4 * w.count).next_multiple_of(64)).max();
                end.unwrap_or(0).max(plan.scratch_bytes())
            }
        }
    }

    /// Operations on numbers.
    pub fn flops(&self) -> f64 {
        match self {
            Block::Map(plan) => plan.flops(),
            Block::Contract(plan, _) => plan.flops(),
        }
    }

    /// Runs it, so far `behind` the planned range along each loop; a contraction that `adds`, to what is there.
    ///
    /// # Safety
    /// The operands are as planned, the scratch is as large and aligned to 64 bytes.
    pub unsafe fn run(
        &self,
        reads: &[*const u8],
        writes: &[*mut u8],
        scratch: *mut u8,
        behind: &[usize],
        adds: bool,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Block::Map(plan) => plan.run(reads, writes, scratch, behind),
                Block::Contract(plan, [a, b, out]) => {
                    let read = |wide: &Option<Wide>, from: *const u8| match wide {
                        None => from,
                        Some(wide) => wide.load(from, scratch).cast(),
                    };
                    let (a, b) = (read(a, reads[0]), read(b, reads[1]));
                    match out {
                        None => plan.run(a, b, writes[0], scratch, adds),
                        Some(wide) => {
                            plan.run(a, b, scratch.add(wide.at), scratch, false);
                            wide.store(writes[0], scratch);
                        }
                    }
                }
            }
        }
    }
}

impl Wide {
    unsafe fn load(&self, from: *const u8, scratch: *mut u8) -> *const f32 {
        // SAFETY: the caller's.
        unsafe {
            let to = scratch.add(self.at).cast::<f32>();
            self.walk.runs(0, self.count, |done, points, offset, stride| {
                let from = from.add(offset * self.dtype.bytes());
                convert::load(best(), self.dtype, to.add(done), from, points, stride);
            });
            to
        }
    }

    unsafe fn store(&self, to: *mut u8, scratch: *mut u8) {
        // SAFETY: the caller's.
        unsafe {
            let from = scratch.add(self.at).cast::<f32>();
            self.walk.runs(0, self.count, |done, points, offset, stride| {
                let to = to.add(offset * self.dtype.bytes());
                convert::store(best(), self.dtype, to, from.add(done), points, stride);
            });
        }
    }
}
