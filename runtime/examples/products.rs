//! How fast matrix products are on one thread, beside what the core can do in the same moments and beside `gemm-f32`:
//! `cargo run --release -p meshc-runtime --example products [part of a shape]`.
//!
//! A row is rows x summed x columns, and how both operands lie: T is transposed. All of f32 that a row compares is
//! measured in turns, and the best of each is shown; `ratio` is the median of f32's rate to that of `gemm-f32` right after it,
//! which noise of a shared machine hardly moves.

use std::time::Instant;

use ir::DType;
use measured::{Ready, product};
use meshc_runtime::cpu::time::peak;

#[path = "../benches/measured/mod.rs"]
mod measured;

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

/// Seconds of `gemm-f32`, for the first of the batch as often as the batch has it.
fn other(shape: &Shape, ready: &Ready) -> f64 {
    let Shape { m, k, n, layout, batch } = *shape;
    let (a_m, a_k) = if layout.starts_with('T') { (1, m) } else { (k, 1) };
    let (b_k, b_n) = if layout.ends_with('T') { (1, k) } else { (n, 1) };
    let [a_m, a_k, b_k, b_n, row] = [a_m, a_k, b_k, b_n, n].map(|x| x as isize);
    let (gemm, none) = (gemm_f32::gemm::f32::get_gemm_fn(), gemm_common::Parallelism::None);
    let (reads, writes) = ready.operands();
    let (a, b, out) = (reads[0].cast(), reads[1].cast(), writes[0].cast());
    let start = Instant::now();
    for _ in 0..batch {
        // SAFETY: the operands are as large as the shape says. The result is computed transposed, as it is row-major.
        unsafe {
            gemm(n, m, k, out, row, 1, false, b, b_k, b_n, a, a_m, a_k, 1.0, 1.0, false, false, false, none);
        }
    }
    start.elapsed().as_secs_f64()
}

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!("GFLOP/s on one thread; shares are of the peak of f32 multiply-adds in the same moments");
    println!(
        "{:24} {:>8} {:>7} {:>8} {:>9} {:>6} {:>8}",
        "", "f32", "share", "peak", "gemm-f32", "ratio", "bf16"
    );
    for shape in shapes() {
        let Shape { m, k, n, layout, batch } = shape;
        let cases = [DType::F32, DType::BF16].map(|dtype| product(dtype, batch, [m, k, n], layout));
        let name = &cases[0].name;
        if !name.contains(&wanted) {
            continue;
        }
        let [mut wide, mut narrow] = [0, 1].map(|i| Ready::new(&cases[i]));
        let timed = |ready: &mut Ready| {
            let start = Instant::now();
            ready.run();
            start.elapsed().as_secs_f64()
        };
        let mut best = [f64::INFINITY; 3];
        let (mut most, mut ratios, start) = (0f64, Vec::new(), Instant::now());
        while start.elapsed().as_secs_f64() < 0.6 {
            most = most.max(peak());
            let ours = timed(&mut wide);
            most = most.max(peak());
            let theirs = other(&shape, &wide);
            best = [best[0].min(ours), best[1].min(theirs), best[2]];
            ratios.push(theirs / ours);
        }
        ratios.sort_by(f64::total_cmp);
        // The matrix unit slows the core down for a while, so it comes after.
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < 0.2 {
            best[2] = best[2].min(timed(&mut narrow));
        }
        let [wide, other, narrow] = best.map(|seconds| 2e-9 * (batch * m * k * n) as f64 / seconds);
        println!(
            "{name:24} {wide:8.1} {:6.1}% {:8.1} {other:9.1} {:6.3} {narrow:8.1}",
            100e9 * wide / most,
            most / 1e9,
            ratios[ratios.len() / 2],
        );
    }
}
