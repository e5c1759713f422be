//! How long an all_reduce over 8 ranks in one process takes, small and large, by the number of workers.

use std::collections::BTreeMap;
use std::time::Instant;

use ir::parse_program;
use meshc_runtime::local::{Local, Taps};

/// `times` all_reduces of `elements`, one after the other.
fn program(elements: usize, times: usize) -> String {
    let bytes = (elements * 4).next_multiple_of(64);
    let calls = "call 0O once slot 0\n".repeat(times);
    format!(
        "program mesh dp=8 microbatches 1
         stage 0 slots 1 sizes 0 0 0 {}
         b0 = f32 {elements} @ [_] partial(dp) scratch+0
         b1 = f32 {elements} @ [_] scratch+{bytes}
         segment 0O
           t0 = start all_reduce(dp) b0 -> b1
           wait t0
         {calls}",
        2 * bytes
    )
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for (name, elements, times) in
        [("4 B", 1, 1000), ("64 KB", 1 << 14, 1000), ("1 MB", 1 << 18, 100), ("100 MB", 25_000_000, 1)]
    {
        for workers in [1, cores, 8] {
            let mut local = Local::new(&parse_program(&program(elements, times))?, workers)?;
            let mut all = Vec::new();
            for _ in 0..12 {
                let start = Instant::now();
                local.step(&[BTreeMap::new()], &mut Taps::default())?;
                all.push(start.elapsed().as_secs_f64() / times as f64 * 1e6);
            }
            all.sort_by(f64::total_cmp);
            println!("{name:>6} x 8 ranks, {workers} workers: {:9.1} us, best {:9.1}", all[6], all[0]);
        }
    }
    Ok(())
}
