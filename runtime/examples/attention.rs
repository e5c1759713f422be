//! How fast attention is on one thread, at the size of the benchmark's GPT: forward, backward, and the same kernels one by one
//! over everything. `cargo run --release -p meshc-runtime --example attention`

use std::time::Instant;

use ir::kernel::{Body, Kernel, Link};
use ir::parse_program;
use measured::{Ready, case};
use meshc_runtime::cpu::time::peak;

#[path = "../benches/measured/mod.rs"]
mod measured;

const TEXT: &str = include_str!("../benches/measured/attention.mesh");
/// Tokens of a row.
const TOKENS: usize = 256;

/// A kernel with its operands, positions in order.
fn ready(kernel: &Kernel) -> Ready {
    let mut ready = Ready::new(&case(kernel));
    ready.count_up(TOKENS as i32);
    ready
}

/// The best of some runs, in seconds, and operations a second of the machine's best in the same moments.
fn best(all: &mut [Ready]) -> (f64, f64) {
    let (mut best, mut most) = (f64::INFINITY, 0f64);
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < 1.5 {
        most = most.max(peak());
        let start = Instant::now();
        all.iter_mut().for_each(Ready::run);
        best = best.min(start.elapsed().as_secs_f64());
    }
    (best, most)
}

fn main() {
    let program = parse_program(TEXT).expect("the text is a program");
    let mut forward = 0.0;
    println!("{:28} {:>9} {:>13} {:>14}", "", "ms", "share of peak", "of its forward");
    for (instruction, name) in program.stages[0].segments[0].instructions.iter().zip(["forward", "backward"])
    {
        let kernel = instruction.kernel().expect("a launch");
        let Body::Chain(chain) = &kernel.body else { panic!("attention is a chain") };
        let mut whole = [ready(kernel)];
        let flops = whole[0].flops();
        let (seconds, peak) = best(&mut whole);
        forward = if name == "forward" { seconds } else { forward };
        let line = |what: &str, seconds: f64, peak: f64| {
            let share = format!("{:.0} %", 100.0 * flops / seconds / peak);
            let times = if name == "backward" { format!("{:.2}", seconds / forward) } else { String::new() };
            println!("{what:28} {:9.2} {share:>13} {times:>14}", 1e3 * seconds);
        };
        line(name, seconds, peak);
        let mut apart: Vec<Ready> = chain.links.iter().map(|Link { kernel, .. }| ready(kernel)).collect();
        let (seconds, peak) = best(&mut apart);
        line(&format!("  {} kernels one by one", apart.len()), seconds, peak);
    }
    println!("operations are those of all keys, also of those that no query sees");
}
