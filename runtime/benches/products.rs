//! Matrix products on one thread, in operations a second; the first line is what the core can do.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ir::kernel::{Access, Body, Contract, Kernel, Loop};
use ir::{DType, Mesh};
use meshc_runtime::cpu::compile;
use meshc_runtime::cpu::time::peak;

#[derive(Clone)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A product of `batch` times these rows, summed places and columns; T in the layout is an operand that is transposed.
fn run(c: &mut Criterion, dtype: DType, batch: usize, [m, k, n]: [usize; 3], layout: &str) {
    let sizes = [("b", batch), ("m", m), ("k", k), ("n", n)];
    let loops = sizes.map(|(name, size)| Loop { name: name.into(), size, axes: ir::Axes::new() }).into();
    let of = |order: [usize; 3]| -> Access { order.into_iter().map(|l| [l].as_slice().into()).collect() };
    let a = of(if layout.starts_with('T') { [0, 2, 1] } else { [0, 1, 2] });
    let b = of(if layout.ends_with('T') { [0, 3, 2] } else { [0, 2, 3] });
    let contract = Contract { loops, a, b, out: of([0, 1, 3]), scale: 1.0 };
    let kernel = Kernel { reads: vec![dtype; 2], writes: vec![DType::F32], body: Body::Contract(contract) };
    let compiled = compile(&kernel, &Mesh::default(), &[]).expect("a kernel that the cpu can run");
    let lines = |numbers: usize| vec![Line([0.125; 16]); (batch * numbers).div_ceil(16)];
    let (a, b, mut out) = (lines(m * k), lines(k * n), lines(m * n));
    let mut scratch = vec![0; compiled.scratch_bytes()];
    let mut group = c.benchmark_group("products");
    group.throughput(Throughput::Elements(compiled.flops() as u64));
    group.bench_function(format!("{dtype:?} {batch} x {m}x{k}x{n} {layout}"), |bench| {
        bench.iter(|| {
            // SAFETY: the operands are as large as the kernel's, at f32, the widest type here.
            unsafe {
                compiled.run(
                    &[a.as_ptr().cast(), b.as_ptr().cast()],
                    &[out.as_mut_ptr().cast()],
                    &mut scratch,
                );
            }
        });
    });
    group.finish();
}

fn products(c: &mut Criterion) {
    let mut group = c.benchmark_group("machine");
    group.throughput(Throughput::Elements(4000 * 12 * 2 * 16));
    group.bench_function("multiply-adds of f32 in registers, 16 lanes", |b| b.iter(peak));
    group.finish();
    let f32 = DType::F32;
    for (shape, layout) in [
        ([256; 3], "NN"),
        ([512; 3], "NN"),
        ([512; 3], "NT"),
        ([512; 3], "TN"),
        ([1024; 3], "NN"),
        ([1024; 3], "TN"),
        ([64, 512, 2048], "NN"),
        ([64, 2048, 2048], "NT"),
        ([256, 512, 2048], "NN"),
        ([2048, 512, 2048], "NN"),
        ([2048; 3], "NT"),
        ([1, 2048, 2048], "NN"),
        ([1, 2048, 2048], "NT"),
        ([8, 2048, 2048], "NN"),
        ([8, 2048, 2048], "NT"),
    ] {
        run(c, f32, 1, shape, layout);
    }
    for (k, n) in [(384, 1152), (384, 384), (384, 1536), (1536, 384), (384, 4096)] {
        run(c, f32, 1, [2048, k, n], "NN");
        run(c, f32, 1, [2048, n, k], "NT");
        run(c, f32, 1, [k, 2048, n], "TN");
    }
    run(c, f32, 48, [256, 64, 256], "NT");
    run(c, f32, 48, [256, 256, 64], "NN");
    for (shape, layout) in
        [([512; 3], "NN"), ([1024; 3], "NT"), ([64, 2048, 2048], "NT"), ([384, 2048, 1536], "TN")]
    {
        run(c, DType::BF16, 1, shape, layout);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = products
}
criterion_main!(benches);
