//! Milliseconds of the programs that XLA runs too, on 8 ranks of this machine's CPUs, as JSON: a median of steps for each.
//! `tests/peers/peers.py` runs it beside JAX.

use std::collections::BTreeMap;
use std::time::Instant;

use meshc_tests::peers::{CASES, program, sharded};
use meshc_tests::whole::here;
use runtime::local::{HostTensor, Local, RunError, Taps};

const STEPS: usize = 20;

/// Small numbers, the same on every run.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

fn main() -> Result<(), RunError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all = BTreeMap::new();
    for case in CASES {
        let program = program(&sharded(case, &here()));
        let mut local = Local::new(&program, cores)?;
        for state in &program.states {
            local.fill_state(&state.name, &mut |ranges, piece| {
                let seed = ranges.iter().map(|r| r.start).sum();
                let all = numbers(piece.len(), seed);
                piece.iter_mut().zip(all).for_each(|(x, y)| *x = 0.02 * y);
                Ok::<(), RunError>(())
            })?;
        }
        let feed = |input: &ir::state::Input| {
            let n = input.dims.iter().map(|(_, n)| n).product();
            (input.name.clone(), HostTensor::F32(numbers(n, input.name.len())))
        };
        let feeds = [program.inputs.iter().map(feed).collect()];
        let mut taps = Taps::of(["result", "loss"]);
        let mut seconds = Vec::new();
        for step in 0..STEPS + 3 {
            let start = Instant::now();
            local.step(&feeds, &mut taps)?;
            seconds.extend((step >= 3).then(|| start.elapsed().as_secs_f64()));
        }
        seconds.sort_by(f64::total_cmp);
        all.insert(case.name, 1e3 * seconds[STEPS / 2]);
    }
    println!("{}", serde_json::to_string_pretty(&all).unwrap_or_default());
    Ok(())
}
