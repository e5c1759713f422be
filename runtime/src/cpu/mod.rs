//! Kernels on one CPU thread. A kernel is planned once for its rank, and then runs without allocating.
//!
//! Numbers are computed in f32, whatever the element types: integers are exact up to 2^24. The same plan gives the
//! same bits on every run; another kind of machine may round otherwise.

mod chain;
mod contract;
mod convert;
mod lanes;
mod layout;
mod map;
mod math;
pub mod plain;
mod product;
mod scatter;
#[cfg(test)]
mod tests;
pub mod time;
mod top_k;
mod widened;

pub use convert::cast;

use ir::kernel::{Body, Kernel};
use ir::{DType, Reduce};

use layout::Extents;

/// A kernel that the CPU cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// An element type that the body has no code for.
    #[error("a {body} needs {needed} as its {operand} on the cpu, but has {found}")]
    DType {
        /// Which kind of kernel.
        body: &'static str,
        /// Which operand.
        operand: &'static str,
        /// What it can be.
        needed: &'static str,
        /// What it is.
        found: DType,
    },
    /// A map that combines pairs.
    #[error("a map combines numbers, and no pairs: those are merged by top_k and by moves")]
    Pairs,
    /// Too many loops to walk over.
    #[error("a kernel can have {most} loops on the cpu, but has {found}")]
    Loops {
        /// How many it can have.
        most: usize,
        /// How many it has.
        found: usize,
    },
}

/// A kernel, planned for one rank.
pub struct Compiled {
    plan: Plan,
}

enum Plan {
    Map(map::Plan),
    Chain(chain::Plan),
    Contract(contract::Plan, widened::Plan),
    Scatter(scatter::Plan, widened::Plan),
    TopK(top_k::Plan),
}

/// Whether the CPU has code for a kernel.
fn check(kernel: &Kernel) -> Result<(), KernelError> {
    if let Body::Chain(chain) = &kernel.body {
        return chain.links.iter().try_for_each(|link| check(&link.kernel));
    }
    let loops = kernel.body.loops().len();
    if loops > layout::MAX_DIMS {
        return Err(KernelError::Loops { most: layout::MAX_DIMS, found: loops });
    }
    let f32_only = |body, operand, found| match found {
        DType::F32 => Ok(()),
        DType::F64 | DType::F16 | DType::BF16 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => {
            Err(KernelError::DType { body, operand, needed: "f32", found })
        }
    };
    let float = |body, operand, found| match found {
        DType::F32 | DType::BF16 => Ok(()),
        DType::F64 | DType::F16 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => {
            Err(KernelError::DType { body, operand, needed: "f32 or bf16", found })
        }
    };
    match &kernel.body {
        Body::Map(map) if map.steps.iter().any(|s| s.reduce() == Some(Reduce::Top)) => {
            Err(KernelError::Pairs)
        }
        Body::Map(_) | Body::Chain(_) => Ok(()),
        Body::Contract(_) => {
            float("contraction", "first operand", kernel.reads[0])?;
            float("contraction", "second operand", kernel.reads[1])?;
            float("contraction", "result", kernel.writes[0])
        }
        Body::Scatter(_) => {
            f32_only("scatter", "source", kernel.reads[0])?;
            float("scatter", "result", kernel.writes[0])?;
            match kernel.reads[1] {
                DType::I64 | DType::I32 => Ok(()),
                found @ (DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::U32 | DType::Bool) => {
                    let (body, operand, needed) = ("scatter", "index", "i32 or i64");
                    Err(KernelError::DType { body, operand, needed, found })
                }
            }
        }
        Body::TopK(_) => f32_only("top-k", "result", kernel.writes[0]),
    }
}

/// Plans a kernel for the rank at coordinate `at`.
///
/// # Errors
/// An element type that a contraction or scatter has no code for; more loops than can be walked.
pub fn compile(kernel: &Kernel, mesh: &ir::Mesh, at: &[usize]) -> Result<Compiled, KernelError> {
    check(kernel)?;
    let extents = Extents::whole(kernel, mesh, at);
    let plan = match &kernel.body {
        Body::Map(map) => Plan::Map(map::plan(kernel, map, &extents)),
        Body::Chain(chain) => Plan::Chain(chain::plan(chain, kernel, mesh, at)),
        Body::Contract(contract) => {
            let types = [kernel.reads[0], kernel.reads[1], kernel.writes[0]];
            let plan = contract::plan(contract, types, &extents);
            // What is read and written as it is needs no widening.
            let types = if plan.direct() { [DType::F32; 3] } else { types };
            let accesses = [&contract.a, &contract.b, &contract.out];
            let widened = widened::plan(&contract.loops, accesses, types, mesh, at);
            Plan::Contract(plan, widened)
        }
        Body::Scatter(scatter) => {
            let types = [DType::F32, DType::F32, kernel.writes[0]];
            let widened = widened::plan(
                &scatter.loops,
                [&scatter.source, &scatter.index, &scatter.out],
                types,
                mesh,
                at,
            );
            Plan::Scatter(scatter::plan(scatter, kernel.reads[1], mesh, at), widened)
        }
        Body::TopK(top) => Plan::TopK(top_k::plan(top, kernel.reads[0], mesh, at)),
    };
    Ok(Compiled { plan })
}

impl Compiled {
    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        match &self.plan {
            // The start of the scratch may have to be rounded up.
            Plan::Map(plan) => plan.scratch_bytes() + 63,
            Plan::Chain(plan) => plan.scratch_bytes() + 63,
            Plan::Contract(plan, widened) => widened.scratch_bytes() + plan.scratch_bytes() + 63,
            Plan::Scatter(_, widened) => widened.scratch_bytes() + 63,
            Plan::TopK(_) => 0,
        }
    }

    /// Operations on numbers: each function of one number counts as one.
    pub fn flops(&self) -> f64 {
        match &self.plan {
            Plan::Map(plan) => plan.flops(),
            Plan::Chain(plan) => plan.flops(),
            Plan::Contract(plan, _) => plan.flops(),
            Plan::Scatter(plan, _) => plan.flops(),
            Plan::TopK(plan) => plan.flops(),
        }
    }

    /// Runs it. What is in the scratch before does not matter.
    ///
    /// # Panics
    /// If the scratch is smaller than [`Compiled::scratch_bytes`].
    ///
    /// # Safety
    /// * `reads` and `writes` have a pointer for each operand of the kernel, aligned to 64 bytes, to as many elements
    ///   as the operand has on this rank: reads initialised, writes writable, and nobody else uses them meanwhile.
    /// * Operands that are written overlap nothing, but that what a map stores may be exactly a read operand: the
    ///   same address, element type and access.
    pub unsafe fn run(&self, reads: &[*const u8], writes: &[*mut u8], scratch: &mut [u8]) {
        assert!(scratch.len() >= self.scratch_bytes(), "the scratch is too small");
        // SAFETY: the caller's; the scratch is long enough to be rounded up to 64 bytes.
        unsafe {
            match &self.plan {
                Plan::Map(plan) => {
                    let start = scratch.as_mut_ptr();
                    plan.run(reads, writes, start.add(start.align_offset(64)), &[]);
                }
                Plan::Chain(plan) => {
                    let start = scratch.as_mut_ptr();
                    plan.run(reads, writes, start.add(start.align_offset(64)));
                }
                Plan::Contract(plan, widened) => {
                    let start = scratch.as_mut_ptr();
                    let start = start.add(start.align_offset(64));
                    let packed = start.add(widened.scratch_bytes()).cast();
                    widened.run([reads[0], reads[1]], writes[0], start, |a, b, out| {
                        plan.run(a.cast(), b.cast(), out.cast(), packed, false);
                    });
                }
                Plan::Scatter(plan, widened) => {
                    let start = scratch.as_mut_ptr();
                    let start = start.add(start.align_offset(64));
                    widened.run([reads[0], reads[1]], writes[0], start, |source, index, out| {
                        plan.run(source, index.cast(), out);
                    });
                }
                Plan::TopK(plan) => plan.run(reads[0], writes[0].cast()),
            }
        }
    }
}
