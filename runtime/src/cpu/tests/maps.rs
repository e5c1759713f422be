//! Maps in which steps are joined, or that have what is the same all over a tile: against their meaning, and with the same bits
//! as one step at a time.

use std::iter;

use ir::kernel::{Access, Body, Kernel, Step, Use};
use ir::{DType, Mesh};
use smallvec::smallvec;

use super::chain::kernel;
use super::random::{Case, Dice};
use super::{check, execute, sizes};

/// Maps, and which results may lie in which operands. Operands of integers have labels.
const MAPS: &[(&str, &[(usize, usize)])] = &[
    // Three operands, one behind the other: what is chosen is the same all over a tile.
    (
        "map [c=3, b=2, s=32, kv=4 | e=64] (f32, f32, f32) -> (f32, f32) {
            r0 = iota c
            r1 = const 1.0
            r2 = eq r0, r1
            r3 = load 0 [b, s, kv, e]
            r4 = const 0.0
            r5 = select r2, r3, r4
            r6 = const 2.0
            r7 = eq r0, r6
            r8 = load 1 [b, s, kv, e]
            r9 = select r7, r8, r4
            r10 = eq r0, r4
            r11 = load 2 [b, s, kv, e]
            r12 = select r10, r11, r4
            r13 = add r9, r5, r12
            store 0 [c, b, s, kv, e] r13
            accumulate(sum) 1 [c, kv, e] r13
        }",
        &[],
    ),
    // What is chosen is stored as it is, after the operand that it is has changed.
    (
        "map [c=2 | a=2048] (f32, f32) -> (f32, f32) {
            r0 = iota c
            r1 = load 0 [c, a]
            r2 = load 1 [c, a]
            r3 = mul r1, r2
            store 1 [c, a] r3
            r5 = select r0, r1, r2
            store 0 [c, a] r5
        }",
        &[(0, 1), (1, 0)],
    ),
    // What is chosen was computed, and is kept while more is.
    (
        "map [c=2 | a=2048] (f32, f32) -> (f32, f32) {
            r0 = iota c
            r1 = load 0 [c, a]
            r2 = load 1 [c, a]
            r3 = exp r1
            r4 = exp r2
            r5 = select r0, r3, r4
            r6 = sqrt r3
            r7 = sin r6
            r8 = cos r7
            r9 = mul r8, r6, r7, r5
            store 0 [c, a] r9
            store 1 [c, a] r5
        }",
        &[],
    ),
    // Labels and numbers of rows that are as long as some tiles.
    (
        "map [b=3 | v=4096] (f32, i32, f32, f32) -> (f32) {
            r0 = const 0.25
            r1 = load 0 [b]
            r2 = mul r0, r1
            r3 = iota v
            r4 = load 1 [b]
            r5 = eq r3, r4
            r6 = const 0.0
            r7 = select r5, r2, r6
            r8 = load 2 [b, v]
            r9 = load 3 [b]
            r10 = sub r8, r9
            r11 = exp r10
            r12 = mul r11, r2
            r13 = sub r12, r7
            store 0 [b, v] r13
        }",
        &[(0, 2)],
    ),
    // The same where a tile has parts of two rows.
    (
        "map [b=3 | v=1500] (f32, i32, f32) -> (f32) {
            r0 = load 0 [b]
            r1 = iota v
            r2 = load 1 [b]
            r3 = eq r1, r2
            r4 = load 2 [b, v]
            r5 = select r3, r0, r4
            r6 = mul r5, r0
            store 0 [b, v] r6
        }",
        &[(0, 2)],
    ),
    // Indices that are the same everywhere, one of them outside.
    (
        "map [b=2, s=9 | e=20] looked [c=3, d=3, f=3] (f32) -> (f32, f32, f32) {
            r0 = const 2.0
            r1 = load_at 0 [c, b, s, e] c=r0
            store 0 [b, s, e] r1
            r3 = const 0.0
            r4 = load_at 0 [d, b, s, e] d=r3
            r5 = add r4, r1
            store 1 [b, s, e] r5
            r7 = const 3.0
            r8 = load_at 0 [f, b, s, e] f=r7
            store 2 [b, s, e] r8
        }",
        &[],
    ),
    // Norms: numbers of rows with lanes, in rows that are long, and short.
    (LAYER_NORM, &[(0, 0), (3, 1)]),
    (LAYER_NORM_OF_8, &[]),
    (
        "map [b=5 | d=96] (f32, f32, f32, f32, f32) -> (f32, f32, f32, f32) {
            r0 = load 0 [b, d]
            accumulate(sum) 0 [d] r0
            r2 = load 1 [b]
            r3 = load 2 [d]
            r4 = mul r0, r2, r3
            r5 = load 3 [b, d]
            r6 = mul r0, r5, r3
            r7 = row_sum r6
            r8 = mul(-0.5) r7, r2, r2, r2
            r9 = mul(0.0026041666666666665) r8, r5
            r10 = add r4, r9, r9
            r11 = mul(-1.0) r10
            r12 = row_sum r11
            r13 = mul(0.0026041666666666665) r12
            r14 = load 4 [b, d]
            r15 = add r14, r10, r13
            store 1 [b, d] r15
            accumulate(sum) 2 [d] r15
            r18 = mul r0, r5, r2
            accumulate(sum) 3 [d] r18
        }",
        &[(1, 4)],
    ),
    (
        "map [b=3 | f=700] (f32, f32) -> (f32, f32) {
            r0 = load 0 [b, f]
            r1 = mul r0, r0
            r2 = mul(0.035677408136300125) r1
            r3 = const 0.7978845608028654
            r4 = add r2, r3
            r5 = mul r0, r4
            r6 = tanh r5
            r7 = mul(0.10703222440890038) r1
            r8 = add r7, r3
            r9 = mul(-1.0) r6, r6
            r10 = const 1.0
            r11 = add r9, r10
            r12 = mul r0, r8, r11
            r13 = add r6, r12
            r14 = add r13, r10
            r15 = load 1 [b, f]
            r16 = mul(0.5) r15, r14
            store 0 [b, f] r16
            accumulate(sum) 1 [f] r16
        }",
        &[(0, 1)],
    ),
    (
        "map [ | d=1500] (f32, f32, f32, f32, f32) -> (f32, f32, f32) {
            r0 = load 0 [d]
            r1 = load 1 []
            r2 = mul r0, r1
            r3 = mul(0.1) r2
            r4 = load 2 [d]
            r5 = mul(0.9) r4
            r6 = add r5, r3
            store 0 [d] r6
            r8 = mul(0.05) r2, r2
            r9 = load 3 [d]
            r10 = mul(0.95) r9
            r11 = add r10, r8
            store 1 [d] r11
            r13 = abs r11
            r14 = sqrt r13
            r15 = const 0.5
            r16 = add r14, r15
            r17 = mul(-1.0) r6, r1
            r18 = div r17, r16
            r19 = load 4 [d]
            r20 = add r19, r18
            store 2 [d] r20
        }",
        &[(0, 2), (1, 3), (2, 4)],
    ),
    // More operands than are joined, of all classes.
    (
        "map [b=7 | d=40] (f32, f32, f32, f32) -> (f32, f32, f32, f32, f32, f32) {
            r0 = load 0 [b, d]
            r1 = load 1 [b]
            r2 = load 2 [d]
            r3 = load 3 []
            r4 = mul(0.5) r0, r2, r1, r0, r3, r2, r0, r1
            r5 = row_sum r4
            store 0 [b] r5
            r7 = add r0, r1, r2, r0, r3, r2, r2, r1
            store 1 [b, d] r7
            r9 = mul r1, r3
            r10 = add r9, r1
            store 2 [b] r10
            r12 = mul r2, r0, r0, r2
            r13 = add r12, r9
            r14 = mul r2, r3
            r15 = add r13, r14
            store 3 [b, d] r15
            r17 = mul r1, r0
            r18 = add r17, r3
            store 4 [b, d] r18
            r20 = mul r3, r0
            r21 = add r1, r20
            store 5 [b, d] r21
        }",
        &[(1, 0)],
    ),
];

const LAYER_NORM: &str = "map [b=5 | d=96] (f32, f32, f32, f32, f32) -> (f32, f32, f32, f32) {
    r0 = load 0 [b, d]
    r1 = load 1 [b, d]
    r2 = load 2 [d]
    r3 = add r0, r1, r2
    store 0 [b, d] r3
    r5 = mul(0.010416666666666666) r3
    r6 = row_sum r5
    r7 = sub r3, r6
    store 1 [b, d] r7
    r9 = mul(0.010416666666666666) r7, r7
    r10 = row_sum r9
    r11 = const 1e-5
    r12 = add r10, r11
    r13 = rsqrt r12
    store 2 [b] r13
    r15 = load 3 [d]
    r16 = mul r7, r13, r15
    r17 = load 4 [d]
    r18 = add r16, r17
    store 3 [b, d] r18
}";

/// As [`LAYER_NORM`], with rows for which a loop each is not worth it, and some tiles.
const LAYER_NORM_OF_8: &str = "map [b=300 | d=8] (f32, f32, f32) -> (f32) {
    r0 = load 0 [b, d]
    r1 = mul(0.125) r0
    r2 = row_sum r1
    r3 = sub r0, r2
    r4 = mul(0.125) r3, r3
    r5 = row_sum r4
    r6 = const 1e-5
    r7 = add r5, r6
    r8 = rsqrt r7
    r9 = load 1 [d]
    r10 = mul r3, r8, r9
    r11 = load 2 [d]
    r12 = add r10, r11
    store 0 [b, d] r12
}";

fn case(text: &str, in_place: &[(usize, usize)], seed: u64) -> Case {
    let mut dice = Dice(seed);
    let count = |text: &str| text.matches("32").count();
    let types = text.split_once('(').and_then(|(_, rest)| rest.split_once(") {")).expect("types").0;
    let (reads, writes) = types.split_once(" -> ").expect("operands and results");
    let operands = vec!["b0"; count(reads)].join(", ");
    let results = vec!["b1"; count(writes)].join(", ");
    let kernel = kernel("", &format!("  launch {operands} -> {results} {text}\n"));
    let mut reads = vec![Vec::new(); kernel.reads.len()];
    for Use { operand, dims, .. } in kernel.uses().iter().filter(|u| !u.written) {
        let n = dims.iter().flatten().map(|l| l.size).product();
        let labels = kernel.reads[*operand] == DType::I32;
        let mut number = || {
            if labels {
                dice.below(4098) as f64 - 1.0
            } else {
                f64::from((dice.below(4001) as f32 - 2000.0) / 1000.0)
            }
        };
        reads[*operand] = iter::repeat_with(&mut number).take(n).collect();
    }
    Case { kernel, mesh: Mesh::default(), at: Vec::new(), reads, in_place: in_place.to_vec() }
}

#[test]
fn joined_steps_are_as_they_are_defined() {
    for (i, (text, in_place)) in MAPS.iter().enumerate() {
        for chosen in [&[][..], in_place] {
            check(&case(text, chosen, i as u64));
        }
    }
}

/// The kernel with the result of each step that computes stored too: then none can be joined with its user.
fn apart(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    let Body::Map(map) = &mut kernel.body else { panic!("a map") };
    let of_point = map.of_point();
    for (place, of_point) in of_point.into_iter().enumerate() {
        if matches!(map.steps[place], Step::Mul(..) | Step::Add(_)) {
            let loops = if of_point { 0..map.loops.len() } else { 0..map.loops.len() - map.row };
            let access: Access = loops.map(|l| smallvec![l]).collect();
            map.steps.push(Step::Store { write: kernel.writes.len(), access, of: place });
            kernel.writes.push(DType::F32);
        }
    }
    kernel
}

#[test]
fn joined_steps_have_the_bits_of_steps_one_by_one() {
    for (i, (text, _)) in MAPS.iter().enumerate() {
        let Case { kernel, mesh, at, reads, .. } = case(text, &[], i as u64);
        let results = |kernel: &Kernel| execute(kernel, &mesh, &at, &reads, &sizes(kernel, &mesh, &at), &[]);
        let (joined, alone) = (results(&kernel), results(&apart(&kernel)));
        for (w, (joined, alone)) in joined.iter().zip(&alone).enumerate() {
            let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(joined), bits(alone), "result {w} of {text}");
        }
    }
}
