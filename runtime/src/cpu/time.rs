//! How long a kernel takes alone: for benchmarks.

use std::time::Instant;

use ir::kernel::Kernel;
use ir::{Mesh, extent};

use super::{KernelError, compile};

/// Seconds of a kernel on operands of small numbers, the best of `runs`, for the rank at coordinate `at`.
///
/// # Errors
/// The kernel cannot run on the CPU.
pub fn seconds(kernel: &Kernel, mesh: &Mesh, at: &[usize], runs: usize) -> Result<f64, KernelError> {
    let compiled = compile(kernel, mesh, at)?;
    let mut bytes = [vec![0; kernel.reads.len()], vec![0; kernel.writes.len()]];
    for u in kernel.uses() {
        let types = if u.written { &kernel.writes } else { &kernel.reads };
        let count: usize = u.dims.iter().flatten().map(|l| extent(l.size, &l.axes, mesh, at).len()).product();
        bytes[usize::from(u.written)][u.operand] = count * types[u.operand].bytes();
    }
    let [reads, writes] = bytes;
    let mut inputs = buffers(&reads);
    let mut outputs = buffers(&writes);
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

/// Multiply-adds of f32 a second, each counted as two operations, that this thread does with all operands in registers:
/// what a matrix product could reach in the same moment. Takes some ten microseconds; 0 if the machine has no fused ones.
pub fn peak() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the instruction set is there.
            return unsafe { wide() };
        }
        if is_x86_feature_detected!("fma") {
            // SAFETY: the instruction set is there.
            return unsafe { narrow() };
        }
    }
    0.0
}

/// Twelve sums, more than the machine has multiply-adds in flight, in a loop that nothing else delays.
#[cfg(target_arch = "x86_64")]
macro_rules! sums {
    ($name:ident, $lanes:literal, $feature:literal, $class:ident, [$($sum:tt)*]) => {
        #[target_feature(enable = $feature)]
        unsafe fn $name() -> f64 {
            const ROUNDS: u64 = 4000;
            let start = Instant::now();
            // SAFETY: registers alone, all of which are named.
            unsafe {
                std::arch::asm!(
                    "2:",
                    $(concat!("vfmadd231ps ", $sum, ", ", $sum, ", ", $sum),)*
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) ROUNDS => _,
                    $(inout($sum) std::arch::x86_64::$class() => _,)*
                    options(nostack, nomem)
                );
            }
            (ROUNDS * 12 * 2 * $lanes) as f64 / start.elapsed().as_secs_f64()
        }
    };
}
#[cfg(target_arch = "x86_64")]
sums!(
    wide,
    16,
    "avx512f",
    _mm512_setzero_ps,
    ["zmm0" "zmm1" "zmm2" "zmm3" "zmm4" "zmm5" "zmm6" "zmm7" "zmm8" "zmm9" "zmm10" "zmm11"]
);
#[cfg(target_arch = "x86_64")]
sums!(
    narrow,
    8,
    "avx,fma",
    _mm256_setzero_ps,
    ["ymm0" "ymm1" "ymm2" "ymm3" "ymm4" "ymm5" "ymm6" "ymm7" "ymm8" "ymm9" "ymm10" "ymm11"]
);
