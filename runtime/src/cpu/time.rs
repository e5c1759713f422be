//! How long a kernel takes alone: for benchmarks.

use std::ops::Range;
use std::time::Instant;

use ir::kernel::{Access, Body, Kernel};
use ir::{Mesh, extent};

use super::plain::elements;
use super::{KernelError, compile};

/// Seconds of a kernel on operands of small numbers, the best of `runs`, for the rank at coordinate `at`.
///
/// # Errors
/// The kernel cannot run on the CPU.
pub fn seconds(kernel: &Kernel, mesh: &Mesh, at: &[usize], runs: usize) -> Result<f64, KernelError> {
    let compiled = compile(kernel, mesh, at)?;
    let ranges: Vec<Range<usize>> =
        kernel.body.loops().iter().map(|l| extent(l.size, &l.axes, mesh, at)).collect();
    let (reads, writes) = accesses(kernel);
    let bytes = |accesses: &[Option<Access>], types: &[ir::DType]| -> Vec<usize> {
        let one = |(a, t): (&Option<Access>, &ir::DType)| {
            a.as_ref().map_or(0, |a| elements(a, &ranges)) * t.bytes()
        };
        accesses.iter().zip(types).map(one).collect()
    };
    let mut inputs = buffers(&bytes(&reads, &kernel.reads));
    let mut outputs = buffers(&bytes(&writes, &kernel.writes));
    let mut scratch = vec![0u8; compiled.scratch_bytes()];
    let inputs: Vec<*const u8> = inputs.iter_mut().map(|b| aligned(b).cast_const()).collect();
    let outputs: Vec<*mut u8> = outputs.iter_mut().map(aligned).collect();
    let mut best = f64::INFINITY;
    for _ in 0..runs.max(1) {
        let start = Instant::now();
        // SAFETY: each operand has its own buffer, aligned, with as many zeroed elements as its access reaches on this
        // rank; they outlive the call.
        unsafe { compiled.run(&inputs, &outputs, &mut scratch) };
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Zeroed memory, with room to align.
fn buffers(bytes: &[usize]) -> Vec<Vec<u8>> {
    bytes.iter().map(|n| vec![0u8; n + 64]).collect()
}

fn aligned(buffer: &mut Vec<u8>) -> *mut u8 {
    let start = buffer.as_mut_ptr();
    start.wrapping_add(start.align_offset(64))
}

/// How each operand is indexed.
fn accesses(kernel: &Kernel) -> (Vec<Option<Access>>, Vec<Option<Access>>) {
    match &kernel.body {
        Body::Contract(c) => (vec![Some(c.a.clone()), Some(c.b.clone())], vec![Some(c.out.clone())]),
        Body::Scatter(s) => (vec![Some(s.source.clone()), Some(s.index.clone())], vec![Some(s.out.clone())]),
        Body::TopK(t) => (vec![Some(t.source.clone())], vec![Some(t.out.clone())]),
        Body::Map(map) => {
            let mut reads = vec![None; kernel.reads.len()];
            let mut writes = vec![None; kernel.writes.len()];
            for step in &map.steps {
                if let Some((read, access)) = step.read() {
                    reads[read] = Some(access.clone());
                }
                if let Some((write, access, _)) = step.write() {
                    writes[write] = Some(access.clone());
                }
            }
            (reads, writes)
        }
    }
}
