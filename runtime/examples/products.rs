//! How fast matrix products are on one thread, beside what the core can do in the same moments and beside `gemm-f32`:
//! `cargo run --release -p meshc-runtime --example products [part of a shape]`.
//!
//! A row is rows x summed x columns, and how both operands lie: T is transposed. All that a row compares is measured in
//! turns, and the best of each is shown.

use std::time::Instant;

use ir::kernel::{Access, Body, Contract, Kernel, Loop};
use ir::{DType, Mesh};
use meshc_runtime::cpu::compile;
use meshc_runtime::cpu::time::peak;

#[derive(Clone)]
#[repr(C, align(64))]
struct Line([u16; 32]);

/// Small numbers of either type: bf16 numbers are read as pairs, and f32 numbers as the upper of two.
fn operand(bytes: usize) -> Vec<Line> {
    let number = |i: usize| half_of((i * 7919 % 1009) as f32 / 1009.0 - 0.3);
    (0..bytes.div_ceil(64)).map(|l| Line(std::array::from_fn(|i| number(l * 32 + i)))).collect()
}

fn half_of(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

struct Shape {
    m: usize,
    k: usize,
    n: usize,
    layout: &'static str,
    batch: usize,
}

fn shapes() -> Vec<Shape> {
    let one = |(m, k, n, layout)| Shape { m, k, n, layout, batch: 1 };
    let mut all: Vec<Shape> = [
        (256, 256, 256, "NN"),
        (512, 512, 512, "NN"),
        (512, 512, 512, "NT"),
        (512, 512, 512, "TN"),
        (1024, 1024, 1024, "NN"),
        (1024, 1024, 1024, "TN"),
        (64, 512, 2048, "NN"),
        (64, 2048, 2048, "NT"),
        (256, 512, 2048, "NN"),
        (2048, 512, 2048, "NN"),
        (2048, 2048, 2048, "NT"),
        (1, 2048, 2048, "NN"),
        (1, 2048, 2048, "NT"),
        (4, 2048, 2048, "NN"),
        (4, 2048, 2048, "NT"),
        (8, 2048, 2048, "NN"),
        (8, 2048, 2048, "NT"),
        (32, 2048, 2048, "NN"),
        (32, 2048, 2048, "NT"),
        (2048, 2048, 8, "NN"),
    ]
    .into_iter()
    .map(one)
    .collect();
    for (k, n) in [(384, 1152), (384, 384), (384, 1536), (1536, 384), (384, 4096)] {
        all.extend([(2048, k, n, "NN"), (2048, n, k, "NT"), (k, 2048, n, "TN")].map(one));
    }
    all.push(Shape { m: 256, k: 64, n: 256, layout: "NT", batch: 48 });
    all.push(Shape { m: 256, k: 256, n: 64, layout: "NN", batch: 48 });
    all.push(Shape { m: 256, k: 256, n: 64, layout: "TN", batch: 48 });
    all
}

fn kernel(shape: &Shape, dtype: DType) -> Kernel {
    let sizes = [("b", shape.batch), ("m", shape.m), ("k", shape.k), ("n", shape.n)];
    let loops = sizes.map(|(name, size)| Loop { name: name.into(), size, axes: ir::Axes::new() }).into();
    let of = |order: [usize; 3]| -> Access { order.into_iter().map(|l| [l].as_slice().into()).collect() };
    let a = of(if shape.layout.starts_with('T') { [0, 2, 1] } else { [0, 1, 2] });
    let b = of(if shape.layout.ends_with('T') { [0, 3, 2] } else { [0, 2, 3] });
    let contract = Contract { loops, a, b, out: of([0, 1, 3]), scale: 1.0 };
    Kernel { reads: vec![dtype; 2], writes: vec![DType::F32], body: Body::Contract(contract) }
}

/// Seconds of `gemm-f32`, for the first of the batch as often as the batch has it.
fn other(shape: &Shape, a: &[Line], b: &[Line], out: &mut [Line]) -> f64 {
    let Shape { m, k, n, layout, batch } = *shape;
    let (a_m, a_k) = if layout.starts_with('T') { (1, m) } else { (k, 1) };
    let (b_k, b_n) = if layout.ends_with('T') { (1, k) } else { (n, 1) };
    let [a_m, a_k, b_k, b_n, row] = [a_m, a_k, b_k, b_n, n].map(|x| x as isize);
    let (gemm, none) = (gemm_f32::gemm::f32::get_gemm_fn(), gemm_common::Parallelism::None);
    let out = out.as_mut_ptr().cast();
    let (a, b) = (a.as_ptr().cast(), b.as_ptr().cast());
    let start = Instant::now();
    for _ in 0..batch {
        // SAFETY: the operands are as large as the shape says. The result is computed transposed, as it is row-major.
        unsafe {
            gemm(n, m, k, out, row, 1, false, b, b_k, b_n, a, a_m, a_k, 1.0, 1.0, false, false, false, none);
        }
    }
    start.elapsed().as_secs_f64()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!("GFLOP/s on one thread; shares are of the peak of f32 multiply-adds in the same moments");
    println!("{:24} {:>8} {:>7} {:>8} {:>9} {:>8}", "", "f32", "share", "peak", "gemm-f32", "bf16");
    for shape in shapes() {
        let Shape { m, k, n, layout, batch } = shape;
        let times = if batch > 1 { format!("{batch} x ") } else { String::new() };
        let name = format!("{times}{m}x{k}x{n} {layout}");
        if !name.contains(&wanted) {
            continue;
        }
        let (a, b) = (operand(batch * m * k * 4), operand(batch * k * n * 4));
        let mut out = operand(batch * m * n * 4);
        let mut kernels = Vec::new();
        for dtype in [DType::F32, DType::BF16] {
            kernels.push(compile(&kernel(&shape, dtype), &Mesh::default(), &[])?);
        }
        let bytes = kernels.iter().map(|k| k.scratch_bytes()).max().unwrap_or(0);
        let mut scratch = vec![0; bytes];
        let mut best = [f64::INFINITY; 3];
        let (mut most, start) = (0f64, Instant::now());
        while start.elapsed().as_secs_f64() < 0.5 {
            most = most.max(peak());
            for (kernel, best) in kernels.iter().zip(&mut best) {
                let start = Instant::now();
                // SAFETY: the operands are as large as the kernel's, with the wider of both types.
                unsafe {
                    kernel.run(
                        &[a.as_ptr().cast(), b.as_ptr().cast()],
                        &[out.as_mut_ptr().cast()],
                        &mut scratch,
                    );
                }
                *best = best.min(start.elapsed().as_secs_f64());
            }
            best[2] = best[2].min(other(&shape, &a, &b, &mut out));
        }
        let rate = |seconds: f64| 2e-9 * (batch * m * k * n) as f64 / seconds;
        let [wide, narrow, other] = best.map(rate);
        println!(
            "{name:24} {wide:8.1} {:6.1}% {:8.1} {other:9.1} {narrow:8.1}",
            100e9 * wide / most,
            most / 1e9
        );
    }
    Ok(())
}
