//! A step takes no memory but what was planned: after the first one nothing is allocated. One test, since what other tests
//! allocate meanwhile would count.

use std::alloc::System;

use meshc_tests::oracle::read;
use meshc_tests::whole::{PLAIN, Split, all_feeds, fill, split_step};
use planner::zero::Zero;
use runtime::local::{Local, Taps};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[test]
fn a_step_allocates_nothing_after_the_first() {
    let each = |kind, virtuals| Split { microbatches: 2, schedule: Some((kind, virtuals)), ..PLAIN };
    let cases = [
        ("gpt2", "", PLAIN),
        ("gpt2", "dp=2,tp=2", Split { zero: Zero::Gradients, microbatches: 2, ..PLAIN }),
        ("llama", "dp=4", Split { zero: Zero::Parameters, microbatches: 2, ..PLAIN }),
        ("llama_deep", "pp=2,tp=2", each("1f1b", 1)),
        ("llama_deep", "pp=2", each("looping", 2)),
    ];
    for (model, mesh, split) in cases {
        let oracle = read(model);
        let (compiled, rows) = split_step(&oracle, mesh, split, false, &mut |_, _| {});
        for workers in [1, 2] {
            let mut local = Local::new(&compiled.program, workers).unwrap();
            fill(&mut local, &compiled.program, &oracle);
            let mut taps = Taps::of(["loss", "grad_norm", "lr"]).finite("loss").finite("grad_norm");
            let feeds = all_feeds(&oracle, &rows, 0);
            local.step(&feeds, &mut taps).unwrap();
            let counted = Region::new(ALLOCATOR);
            (0..3).for_each(|_| local.step(&feeds, &mut taps).unwrap());
            let found = counted.change();
            assert_eq!(
                (found.allocations, found.reallocations),
                (0, 0),
                "{model} on {mesh}, {workers} workers: {found:?}"
            );
        }
    }
}
