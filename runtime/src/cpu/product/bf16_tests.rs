//! Products on the matrix unit beside the definition, where there is one.

use half::bf16;

use super::Side;
use super::amx::available;
use super::bf16::plan;
use super::tests::Dice;

/// Memory that is aligned as an arena is.
#[repr(C, align(64))]
#[derive(Clone)]
struct Line([u8; 64]);

struct Product {
    m: usize,
    n: usize,
    k: usize,
    a: [usize; 2],
    b: [usize; 2],
    out: [usize; 2],
    scale: f32,
    adds: bool,
    narrow: bool,
    /// Whether the summed dimension is given in two parts that cannot be merged.
    apart: bool,
}

impl Product {
    fn found(&self, a: &[bf16], b: &[bf16], out: &[f32]) -> Vec<f32> {
        let rows = Side { len: self.m, operand: self.a[0], out: self.out[0] };
        let columns = Side { len: self.n, operand: self.b[0], out: self.out[1] };
        let (a_k, b_k) = (self.a[1], self.b[1]);
        let k = if self.apart && self.k.is_multiple_of(2) {
            vec![(2, [a_k, b_k]), (self.k / 2, [2 * a_k, 2 * b_k])]
        } else {
            vec![(self.k, [a_k, b_k])]
        };
        let plan = plan(rows, columns, &k, self.scale, self.narrow).expect("enough places");
        let mut scratch = vec![Line([0xff; 64]); plan.scratch_bytes().div_ceil(64) + 1];
        let mut out = out.to_vec();
        let mut short: Vec<bf16> = out.iter().map(|x| bf16::from_f32(*x)).collect();
        let to: *mut u8 = if self.narrow { short.as_mut_ptr().cast() } else { out.as_mut_ptr().cast() };
        // SAFETY: operands reach as far as the strides do, and the scratch is as large as planned.
        unsafe {
            plan.run(a.as_ptr().cast(), b.as_ptr().cast(), to, scratch.as_mut_ptr().cast(), self.adds);
        }
        let mut after = scratch.iter().flat_map(|l| l.0).skip(plan.scratch_bytes());
        assert!(after.all(|b| b == 0xff), "written beyond the scratch");
        if self.narrow { short.iter().map(|x| x.to_f32()).collect() } else { out }
    }

    fn defined(&self, a: &[bf16], b: &[bf16], out: &[f32]) -> Vec<f64> {
        let mut all: Vec<f64> = out.iter().map(|x| f64::from(*x)).collect();
        for i in 0..self.m {
            for j in 0..self.n {
                let sum: f64 = (0..self.k)
                    .map(|l| {
                        let x = a[i * self.a[0] + l * self.a[1]].to_f64();
                        x * b[j * self.b[0] + l * self.b[1]].to_f64()
                    })
                    .sum();
                let at = i * self.out[0] + j * self.out[1];
                all[at] = f64::from(self.scale) * sum + if self.adds { all[at] } else { 0.0 };
            }
        }
        all
    }
}

fn numbers(dice: &mut Dice, n: usize) -> Vec<bf16> {
    dice.numbers(n).into_iter().map(bf16::from_f32).collect()
}

#[test]
fn the_unit_gives_what_is_defined() {
    if !available() {
        return;
    }
    for seed in 0..400 {
        let mut dice = Dice(seed);
        let sizes = [1, 2, 8, 15, 16, 17, 31, 32, 33, 50, 64, 70];
        let (m, n) = (dice.of(&sizes), dice.of(&sizes));
        let k = dice.of(&[16, 17, 31, 32, 33, 64, 100, 1023, 1024, 1030, 2100]);
        let (a, a_reach) = dice.strides([m, k]);
        let (b, b_reach) = dice.strides([n, k]);
        let (out, reach) = dice.strides([m, n]);
        let (scale, adds) = (dice.of(&[1.0, 0.125, -2.5]), dice.below(3) == 0);
        let (narrow, apart) = (dice.below(2) == 0, dice.below(4) == 0);
        let product = Product { m, n, k, a, b, out, scale, adds, narrow, apart };
        let (a, b) = (numbers(&mut dice, a_reach), numbers(&mut dice, b_reach));
        let mut old = dice.numbers(reach);
        old.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        let expected = product.defined(&a, &b, &old);
        let found = product.found(&a, &b, &old);
        assert_eq!(found, product.found(&a, &b, &old), "seed {seed}: another run differs");
        for (at, (x, y)) in expected.iter().zip(&found).enumerate() {
            let digits = if narrow { 4e-3 * x.abs() } else { 0.0 };
            let close = (x - f64::from(*y)).abs() <= 3e-4 + digits;
            assert!(close, "seed {seed}, place {at}: {y}, not {x}");
        }
    }
}

#[test]
fn bits_on_the_unit_depend_on_no_other_row_or_column_nor_thread() {
    if !available() {
        return;
    }
    let mut dice = Dice(7);
    for k in [16, 40, 300, 1030, 2100] {
        let (m, n) = (70, 90);
        let (a, b) = (numbers(&mut dice, m * k), numbers(&mut dice, k * n));
        let product = |m: usize, n: usize, out: [usize; 2]| Product {
            m,
            n,
            k,
            a: [k, 1],
            b: [1, 90],
            out,
            scale: 0.3,
            adds: false,
            narrow: false,
            apart: false,
        };
        let whole = product(m, n, [n, 1]).found(&a, &b, &vec![0.0; m * n]);
        let parts = [(1, n), (m, 1), (3, 5), (33, 17), (1, 1)];
        std::thread::scope(|scope| {
            for (rows, columns) in parts {
                let (i, j) = (dice.below(m - rows + 1), dice.below(n - columns + 1));
                let (a, b, whole, product) = (&a[i * k..], &b[j..], &whole, &product);
                scope.spawn(move || {
                    for out in [[columns, 1], [1, rows]] {
                        let part = product(rows, columns, out).found(a, b, &vec![0.0; rows * columns]);
                        for r in 0..rows {
                            for c in 0..columns {
                                let (x, y) = (whole[(i + r) * n + j + c], part[r * out[0] + c * out[1]]);
                                assert_eq!(x.to_bits(), y.to_bits(), "{rows} rows, {columns} columns, k {k}");
                            }
                        }
                    }
                });
            }
        });
    }
}
