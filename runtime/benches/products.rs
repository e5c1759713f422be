//! Matrix products on one thread, in operations a second; the first line is what the core can do.

mod measured;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ir::DType;
use measured::{bench, product, settings};
use meshc_runtime::cpu::time::peak;

fn products(c: &mut Criterion) {
    let mut group = c.benchmark_group("machine");
    group.throughput(Throughput::Elements(4000 * 12 * 2 * 16));
    group.bench_function("multiply-adds of f32 in registers, 16 lanes", |b| b.iter(peak));
    group.finish();
    let mut run = |dtype: DType, batch: usize, shape: [usize; 3], layout: &str| {
        bench(c, &format!("products of {dtype:?}"), &product(dtype, batch, shape, layout));
    };
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
        run(DType::F32, 1, shape, layout);
    }
    for (k, n) in [(384, 1152), (384, 384), (384, 1536), (1536, 384), (384, 4096)] {
        run(DType::F32, 1, [2048, k, n], "NN");
        run(DType::F32, 1, [2048, n, k], "NT");
        run(DType::F32, 1, [k, 2048, n], "TN");
    }
    run(DType::F32, 48, [256, 64, 256], "NT");
    run(DType::F32, 48, [256, 256, 64], "NN");
    run(DType::F32, 48, [256, 256, 64], "TN");
    for (shape, layout) in
        [([512; 3], "NN"), ([1024; 3], "NT"), ([64, 2048, 2048], "NT"), ([384, 2048, 1536], "TN")]
    {
        run(DType::BF16, 1, shape, layout);
    }
}

criterion_group! {
    name = benches;
    config = settings();
    targets = products
}
criterion_main!(benches);
