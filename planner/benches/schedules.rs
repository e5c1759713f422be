//! The largest table that is asked for, 64 ranks with 4 stages each and 512 micro-batches (262,400 actions), on one core.

use criterion::{Criterion, criterion_group, criterion_main};
use meshc_planner::schedules::check::check;
use meshc_planner::schedules::figures::in_units;
use meshc_planner::schedules::named;
use meshc_planner::schedules::refused::Size;

fn largest(c: &mut Criterion) {
    let size = Size { stages: 64, virtuals: 4, microbatches: 512, group: None };
    let mut group = c.benchmark_group("schedules, P=64 M=512 L=4");
    group.sample_size(10);
    for kind in ["interleaved", "looping"] {
        let make = || (named(kind).expect("a kind").table)(&size).expect("a table");
        let schedule = make();
        assert_eq!(check(&schedule), Ok(()));
        group.bench_function(format!("make {kind}"), |b| b.iter(make));
        group.bench_function(format!("simulate {kind}"), |b| {
            b.iter(|| in_units(&schedule).expect("no deadlock"))
        });
        group
            .bench_function(format!("check {kind}"), |b| b.iter(|| check(&schedule).expect("a right table")));
    }
    group.finish();
}

criterion_group!(benches, largest);
criterion_main!(benches);
