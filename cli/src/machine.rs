//! What one core of this machine can do: the roofs that measured times are held against.

use std::time::Instant;

use ir::kernel::{Body, Contract, Kernel, Loop};
use ir::signature::plain;
use ir::{Axes, DType, Mesh};
use runtime::cpu;

use crate::failure::Failure;

/// FLOP/s of a 1024 cubed f32 product on one thread, the best of twenty.
pub(crate) fn product_rate() -> Result<f64, Failure> {
    const N: usize = 1024;
    let of = |name: &str| Loop { name: name.into(), size: N, axes: Axes::new() };
    let dims = plain(3);
    let access = |a: usize, b: usize| vec![dims[a].clone(), dims[b].clone()];
    let (a, b, out) = (access(0, 1), access(1, 2), access(0, 2));
    let contract = Contract { loops: vec![of("m"), of("k"), of("n")], a, b, out, scale: 1.0 };
    let kernel =
        Kernel { reads: vec![DType::F32; 2], writes: vec![DType::F32], body: Body::Contract(contract) };
    let seconds =
        cpu::time::seconds(&kernel, &Mesh::default(), &[], 20).map_err(|e| Failure::Run(e.to_string()))?;
    Ok(2.0 * (N as f64).powi(3) / seconds)
}

/// Bytes read and written a second by a copy of 64 MiB on one thread, the best of ten.
pub(crate) fn copy_rate() -> f64 {
    const BYTES: usize = 64 << 20;
    let from = vec![1u8; BYTES];
    let mut to = vec![0u8; BYTES];
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * BYTES as f64 / best
}
