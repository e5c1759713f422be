//! How fast maps are on one thread, at the sizes of the benchmark's GPT: bytes of operands and results a second, the best and
//! the median, beside a copy's in the same moments. `cargo run --release -p meshc-runtime --example maps [part of a name]`

use std::time::Instant;

use ir::parse_program;
use measured::{Memory, Ready, case};

#[path = "../benches/measured/mod.rs"]
mod measured;

const TEXT: &str = include_str!("../benches/measured/maps.mesh");
/// What the text's launches are, in order.
const NAMES: [&str; 12] = [
    "bias and split of q, k, v",
    "residual and layer norm",
    "bias and gelu",
    "cross entropy",
    "gradient of cross entropy",
    "gradient of gelu",
    "gradient of layer norm",
    "gradient of the split",
    "sum of squares",
    "adamw",
    "embedding and layer norm",
    "softmax",
];
/// Elements that a copy has.
const COPIED: usize = 1 << 22;

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

fn main() {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let program = parse_program(TEXT).expect("the text is a program");
    let launches = program.stages[0].segments[0].instructions.iter().filter_map(|i| i.kernel());
    let [mut from, mut to] = [0; 2].map(|_| Memory::filled(ir::DType::F32, COPIED));
    println!("{:26} {:>9} {:>12} {:>12} {:>12}", "", "ms", "best, GB/s", "median", "copy's best");
    for (kernel, name) in launches.zip(NAMES).filter(|(_, name)| name.contains(&wanted)) {
        let mut one = case(kernel);
        if name == "adamw" {
            one.in_place = vec![(0, 2), (1, 3), (2, 6)];
        }
        let mut ready = Ready::new(&one);
        // Labels, tokens and positions.
        ready.count_up(256);
        let (mut all, mut copy) = (Vec::new(), f64::INFINITY);
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < 0.7 {
            copy = copy.min(seconds(|| to.bytes().copy_from_slice(from.bytes())));
            all.push(seconds(|| ready.run()));
        }
        all.sort_by(f64::total_cmp);
        let (best, median) = (all[0], all[all.len() / 2]);
        let bytes = ready.bytes() as f64 / 1e9;
        let copied = 8.0 * COPIED as f64 / 1e9;
        println!(
            "{name:26} {:9.3} {:12.1} {:12.1} {:12.1}",
            1e3 * best,
            bytes / best,
            bytes / median,
            copied / copy
        );
    }
}
