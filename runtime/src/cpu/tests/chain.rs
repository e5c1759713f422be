//! Chains against their meaning, and which of them may leave keys out.

use ir::kernel::{Body, Kernel};
use ir::{DType, Mesh, parse_program};
use proptest::prelude::*;

use super::random::{Case, Dice};
use super::{check, execute, sizes};
use crate::cpu::chain;

/// What attention is drawn from.
struct Shape {
    mesh: &'static str,
    /// b, kv, g, s, t, e, f.
    sizes: [usize; 7],
    /// Of operands and weights.
    dtype: DType,
    window: bool,
    drops: bool,
}

impl Shape {
    fn draw(dice: &mut Dice) -> Shape {
        let long = dice.of(&[(40, 70), (70, 40), (130, 150), (5, 200), (150, 9), (1, 65), (64, 64)]);
        Shape {
            mesh: dice.of(&["", "dp=2", "tp=2", "dp=2,tp=2"]),
            sizes: [1 + dice.below(3), 1 + dice.below(3), 1 + dice.below(2), long.0, long.1, 3, 2],
            dtype: dice.of(&[DType::F32, DType::F32, DType::BF16]),
            window: dice.one_in(2),
            drops: dice.one_in(3),
        }
    }

    /// The loops of these letters, as text.
    fn loops(&self, letters: &str) -> String {
        let has = |axis: &str| self.mesh.contains(axis);
        let one = |letter: char| {
            let i = "bkgstef".find(letter).unwrap();
            let (name, axis) = match letter {
                'b' => ("b".to_string(), if has("dp") { "/dp" } else { "" }),
                'k' => ("kv".to_string(), if has("tp") { "/tp" } else { "" }),
                other => (other.to_string(), ""),
            };
            format!("{name}={}{axis}", self.sizes[i])
        };
        letters.chars().map(one).collect::<Vec<_>>().join(", ")
    }

    /// What is done to scores before the mask, and the mask: register `r5` of step 5 on, from scores in `r0` at step 0.
    fn masked(&self, scores: usize) -> String {
        let mut text = format!(
            "r0 = load 0 [b, s]\nr1 = load 1 [b, t]\nr2 = ge r0, r1\nr3 = load {scores} [b, kv, g, s, t]\n\
             r4 = iota s\nr5 = iota t\nr6 = mul(0.01) r4\nr7 = mul(-0.01) r5\nr8 = add r3, r6, r7\n\
             r9 = const -1e30\nr10 = select r2, r8, r9\n"
        );
        text += match self.window {
            true => "r11 = load 2 [b, t]\nr12 = ge r11, r0\nr13 = select r12, r10, r9\n",
            false => "r11 = const 0.0\nr12 = const 0.0\nr13 = cast(f32) r10\n",
        };
        text
    }

    fn product(&self, scale: f64, letters: &str, accesses: &str, types: [DType; 3]) -> String {
        let [a, b, out] = types;
        format!("contract({scale:?}) [{}] ({a}, {b}) -> ({out}) {accesses}\n", self.loops(letters))
    }

    /// What multiplies weights: 0 or 2, drawn at random.
    fn kept(&self, from: usize) -> String {
        match self.drops {
            true => format!(
                "r{from} = random(x seed=7) r0, r0, r0 [kv, g, t]\nr{} = const 0.5\nr{} = ge r{from}, r{}\nr{} = mul(2.0) r{}\n",
                from + 1,
                from + 2,
                from + 1,
                from + 3,
                from + 2
            ),
            false => format!(
                "r{from} = const 1.0\nr{} = const 1.0\nr{} = const 1.0\nr{} = const 1.0\n",
                from + 1,
                from + 2,
                from + 3
            ),
        }
    }

    /// Queries, keys, values, positions of both and how far keys are seen, to outputs and log-sum-exps.
    fn forward(&self) -> String {
        let (x, f32) = (self.dtype, DType::F32);
        let scores = "[b, s, kv, g, e], [b, t, kv, e] -> [b, kv, g, s, t]";
        let out = "[b, kv, g, s, t], [b, t, kv, f] -> [b, s, kv, g, f]";
        format!(
            "launch b0, b1, b2, b3, b4, b5 -> b6, b7 chain [{}] ({x}, {x}, {x}, i32, i32, i32) -> ({x}, f32) {{\n\
             0, 1 -> i0 {}3, 4, 5, i0 -> i1, 1 map [{} | {}] (i32, i32, i32, f32) -> ({x}, f32) {{\n{}\
             r14 = row_max r13\nr15 = sub r13, r14\nr16 = exp r15\nr17 = row_sum r16\nr18 = div r16, r17\n\
             {}r23 = mul r18, r22\nstore 0 [b, kv, g, s, t] r23\nr25 = log r17\nr26 = add r14, r25\n\
             store 1 [b, kv, g, s] r26\n}}\ni1, 2 -> 0 {}}}\n",
            self.loops("bkgs"),
            self.product(0.5, "bskget", scores, [x, x, f32]),
            self.loops("bkgs"),
            self.loops("t"),
            self.masked(3),
            self.kept(19),
            self.product(1.0, "bkgstf", out, [x; 3]),
        )
    }

    /// The same with the gradient and a mean behind, to the gradients of queries, keys and values.
    fn backward(&self) -> String {
        let (x, f32) = (self.dtype, DType::F32);
        let (scores, weights) = ("[b, kv, g, s, t]", "[b, kv, g, s, t]");
        let q = "[b, s, kv, g, e]";
        let (k, v, out) = ("[b, t, kv, e]", "[b, t, kv, f]", "[b, s, kv, g, f]");
        format!(
            "launch b0, b1, b2, b3, b4, b5, b6, b7, b8 -> b9, b10, b11 chain [{rows}] \
             ({x}, {x}, {x}, i32, i32, i32, {x}, f32, f32) -> ({x}, {x}, {x}) {{\n\
             0, 1 -> i0 {}3, 4, 5, i0, 7 -> i1, i2 map [{rows} | {}] (i32, i32, i32, f32, f32) -> (f32, {x}) {{\n{}\
             r14 = load 4 [b, kv, g, s]\nr15 = sub r13, r14\nr16 = exp r15\n{}store 0 [b, kv, g, s, t] r16\n\
             r22 = mul r16, r20\nstore 1 [b, kv, g, s, t] r22\n}}\ni2, 6 -> 2 {}6, 2 -> i3 {}\
             i3, 8, i1 -> i4 map [{rows} | {}] (f32, f32, f32) -> ({x}) {{\nr0 = load 0 [b, kv, g, s, t]\n\
             r1 = load 1 [b, kv, g, s]\nr2 = sub r0, r1\nr3 = load 2 [b, kv, g, s, t]\nr4 = mul r3, r2\n\
             store 0 [b, kv, g, s, t] r4\n}}\ni4, 1 -> 0 {}i4, 0 -> 1 {}}}\n",
            self.product(0.5, "bskget", &format!("{q}, {k} -> {scores}"), [x, x, f32]),
            self.loops("t"),
            self.masked(3),
            self.kept(17),
            self.product(1.0, "bkgstf", &format!("{weights}, {out} -> {v}"), [x; 3]),
            self.product(1.0, "bkgstf", &format!("{out}, {v} -> {scores}"), [x, x, f32]),
            self.loops("t"),
            self.product(0.5, "bkgste", &format!("{scores}, {k} -> {q}"), [x; 3]),
            self.product(0.5, "bkgste", &format!("{scores}, {q} -> {k}"), [x; 3]),
            rows = self.loops("bkgs"),
        )
    }
}

/// The kernel of a launch in text.
pub fn kernel(mesh: &str, launch: &str) -> Kernel {
    let buffers: String = (0..12).map(|i| format!("b{i} = f32 1 @ [_] scratch+?\n")).collect();
    let text = format!(
        "program mesh {mesh} microbatches 1\nstage 0 slots 1 sizes 0 0 0 0\n{buffers}segment 0F\n{launch}"
    );
    let program = parse_program(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    program.stages[0].segments[0].instructions[0].kernel().expect("a launch").clone()
}

fn case(shape: &Shape, launch: &str, dice: &mut Dice) -> Case {
    let mesh = Mesh::parse(shape.mesh).unwrap();
    let at = mesh.coordinate(dice.below(mesh.ranks()));
    let kernel = kernel(shape.mesh, launch);
    let mut reads = vec![Vec::new(); kernel.reads.len()];
    for u in kernel.uses().into_iter().filter(|u| !u.written) {
        let lens: Vec<usize> =
            u.dims.iter().flatten().map(|l| ir::extent(l.size, &l.axes, &mesh, &at).len()).collect();
        let n: usize = lens.iter().product();
        let along = |i: usize| i % lens.last().copied().unwrap_or(1);
        let (s, t) = (shape.sizes[3], shape.sizes[4]);
        reads[u.operand] = match u.operand {
            // Queries at the end of the keys; every one sees itself, or the last key.
            3 => (0..n).map(|i| (along(i) + t.saturating_sub(s)) as f64).collect(),
            4 => (0..n).map(|i| along(i) as f64).collect(),
            // Queries behind the keys see the last of them, whatever the window.
            5 => (0..n).map(|i| if along(i) + 1 == t { 1e6 } else { (along(i) + 20) as f64 }).collect(),
            // Log-sum-exps and means of rows.
            7 | 8 => (0..n).map(|_| dice.below(9) as f64 / 4.0 + 3.0).collect(),
            _ => (0..n).map(|_| dice.below(33) as f64 / 16.0 - 1.0).collect(),
        };
    }
    Case { kernel, mesh, at, reads, in_place: Vec::new() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chains_are_as_they_are_defined(seed: u64) {
        let mut dice = Dice(seed);
        let shape = Shape::draw(&mut dice);
        check(&case(&shape, &shape.forward(), &mut dice));
        check(&case(&shape, &shape.backward(), &mut dice));
    }
}

/// The loop of which keys may be left out, and by how many rules.
fn left_out(kernel: &Kernel) -> Option<(String, usize)> {
    let Body::Chain(chain) = &kernel.body else { panic!("no chain") };
    chain::left_out(chain)
}

fn plain() -> Shape {
    Shape { mesh: "", sizes: [1, 1, 1, 8, 8, 3, 2], dtype: DType::F32, window: false, drops: false }
}

#[test]
fn keys_that_no_query_sees_are_left_out() {
    for (window, rules) in [(false, 1), (true, 2)] {
        for drops in [false, true] {
            let shape = Shape { window, drops, ..plain() };
            for text in [shape.forward(), shape.backward()] {
                assert_eq!(left_out(&kernel("", &text)), Some(("t".to_string(), rules)), "{text}");
            }
        }
    }
}

/// Changes of the text after which keys that are not seen have a part in the result.
const NEEDED: &[(bool, &str, &str)] = &[
    (true, "const -1e30", "const -50.0"),
    (true, "select r2, r8, r9", "select r2, r9, r8"),
    (true, "r2 = ge r0, r1", "r2 = eq r0, r1"),
    (true, "r17 = row_sum r16", "r17 = row_sum r13"),
    (true, "r14 = row_max r13", "r14 = row_max r8"),
    (true, "r16 = exp r15", "r16 = sigmoid r15"),
    (true, "r23 = mul r18, r22", "r23 = add r18, r22"),
    (true, "r1 = load 1 [b, t]", "r1 = load 0 [b, s]"),
    (false, "r4 = mul r3, r2", "r4 = add r3, r2"),
    (false, "r22 = mul r16, r20", "r22 = mul r8, r20"),
    (false, "r15 = sub r13, r14", "r15 = sub r14, r13"),
];

#[test]
fn keys_that_are_needed_are_not_left_out() {
    let shape = plain();
    for (forward, from, to) in NEEDED {
        let text = if *forward { shape.forward() } else { shape.backward() };
        let changed = text.replacen(from, to, 1);
        assert_ne!(text, changed, "there is no `{from}`");
        assert_eq!(left_out(&kernel("", &changed)), None, "`{from}` -> `{to}`");
        let mut dice = Dice(3);
        let shape = Shape { sizes: [1, 2, 1, 70, 130, 3, 2], ..plain() };
        let text = if *forward { shape.forward() } else { shape.backward() };
        check(&case(&shape, &text.replacen(from, to, 1), &mut dice));
    }
    // What is not seen, but written.
    let text = shape.forward().replace("-> b6, b7 chain", "-> b6, b7, b8 chain");
    let text = text.replace("(f32, f32) {\n0, 1 -> i0", "(f32, f32, f32) {\n0, 1 -> i0");
    let text = text
        .replace("-> i1, 1 map [", "-> i1, 1, 2 map [")
        .replace("i32, f32) -> (f32, f32) {", "i32, f32) -> (f32, f32, f32) {");
    let text = text.replace(
        "r25 = log r17\nr26 = add r14, r25",
        "store 2 [b, kv, g, s, t] r16\nr26 = log r17\nr27 = add r14, r26",
    );
    let text = text.replace("[b, kv, g, s] r26", "[b, kv, g, s] r27");
    assert_eq!(left_out(&kernel("", &text)), None);
}

#[test]
fn what_a_key_holds_that_is_not_seen_has_no_part() {
    let shape = Shape { sizes: [1, 1, 1, 64, 256, 3, 2], ..plain() };
    let mut dice = Dice(5);
    let mut case = case(&shape, &shape.forward(), &mut dice);
    // The first 64 of the keys are all that the queries see.
    case.reads[3] = (0..64).map(f64::from).collect();
    let run = |case: &Case| {
        let sizes = sizes(&case.kernel, &case.mesh, &case.at);
        execute(&case.kernel, &case.mesh, &case.at, &case.reads, &sizes, &[])
    };
    let before = run(&case);
    case.reads[1][64 * 3..].fill(f64::NAN);
    case.reads[2][64 * 2..].fill(f64::NAN);
    assert_eq!(before, run(&case));
}
