//! Products of all shapes and strides, at every level, beside the definition; and the bits that must not change.

use super::level::{Level, all};
use super::{Side, plan};

/// Numbers by chance, from a seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Strides of two dimensions in some order, with gaps; what they reach.
    pub fn strides(&mut self, lens: [usize; 2]) -> ([usize; 2], usize) {
        let inner = self.of(&[1, 1, 1, 2, 3]);
        let gap = self.of(&[0, 0, 5]);
        let order = self.below(2);
        let mut strides = [0; 2];
        strides[order] = inner;
        strides[1 - order] = inner * lens[order].max(1) + gap;
        (strides, lens.iter().zip(strides).map(|(n, s)| n.saturating_sub(1) * s).sum::<usize>() + 1)
    }

    pub fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.below(2001) as f32 / 1000.0 - 1.0).collect()
    }
}

struct Product {
    m: usize,
    n: usize,
    /// Outermost first: length, strides in a and b.
    k: Vec<(usize, [usize; 2])>,
    a_m: usize,
    b_n: usize,
    out: [usize; 2],
    scale: f32,
    adds: bool,
}

/// Memory that is aligned as an arena is.
#[repr(C, align(64))]
#[derive(Clone)]
struct Line([f32; 16]);

impl Product {
    fn places(&self) -> Vec<[usize; 2]> {
        let mut all = vec![[0; 2]];
        for (len, by) in &self.k {
            all = all
                .iter()
                .flat_map(|[a, b]| (0..*len).map(move |i| [a + i * by[0], b + i * by[1]]))
                .collect();
        }
        all
    }

    fn defined(&self, a: &[f32], b: &[f32], out: &[f32]) -> Vec<f64> {
        let mut all: Vec<f64> = out.iter().map(|x| f64::from(*x)).collect();
        let places = self.places();
        for i in 0..self.m {
            for j in 0..self.n {
                let one =
                    |[x, y]: &[usize; 2]| f64::from(a[i * self.a_m + x]) * f64::from(b[j * self.b_n + y]);
                let at = i * self.out[0] + j * self.out[1];
                let old = if self.adds { all[at] } else { 0.0 };
                all[at] = old + f64::from(self.scale) * places.iter().map(one).sum::<f64>();
            }
        }
        all
    }

    fn found(&self, level: &'static Level, a: &[f32], b: &[f32], out: &[f32]) -> Vec<f32> {
        let rows = Side { len: self.m, operand: self.a_m, out: self.out[0] };
        let columns = Side { len: self.n, operand: self.b_n, out: self.out[1] };
        let plan = plan(level, rows, columns, &self.k, self.scale);
        let mut scratch = vec![Line([f32::NAN; 16]); plan.scratch_bytes().div_ceil(64) + 1];
        let mut out = out.to_vec();
        let (used, start) = (plan.scratch_bytes() / 4, scratch.as_mut_ptr().cast::<f32>());
        // SAFETY: operands reach as far as the strides do, and the scratch is as large as planned.
        unsafe { plan.run(a.as_ptr(), b.as_ptr(), out.as_mut_ptr(), start, self.adds) };
        let after = scratch.iter().flat_map(|l| l.0).skip(used);
        assert!(after.into_iter().all(f32::is_nan), "written beyond the scratch");
        out
    }
}

/// A product by chance, its operands and what is in the result.
fn by_chance(seed: u64) -> (Product, [Vec<f32>; 3]) {
    let mut dice = Dice(seed);
    let sizes = [1, 1, 2, 3, 5, 7, 8, 9, 13, 14, 15, 16, 17, 29, 31, 32, 33, 48, 63, 65, 100, 129];
    // Sometimes so many columns that rows are read as they lie only if there are many, and `b` is packed in parts.
    let (m, n) = match dice.below(16) {
        0 => (513, 391),
        1 => (dice.of(&sizes), 391),
        _ => (dice.of(&sizes), dice.of(&sizes)),
    };
    let k = dice.of(&[0, 1, 2, 3, 15, 16, 17, 31, 40, 64, 100, 255, 256, 257, 300, 511, 513, 768, 1030]);
    let ([a_m, a_k], a) = dice.strides([m, k]);
    let ([b_n, b_k], b) = dice.strides([n, k]);
    let (out, reach) = dice.strides([m, n]);
    // Sometimes in two dimensions: every second number is left out and taken later, or each half is a dimension.
    let half = k / 2;
    let k = match dice.below(6) {
        0 | 1 if k > 1 && k.is_multiple_of(2) => vec![(2, [a_k, b_k]), (half, [2 * a_k, 2 * b_k])],
        2 if k > 1 && k.is_multiple_of(2) => vec![(2, [half * a_k, half * b_k]), (half, [a_k, b_k])],
        _ => vec![(k, [a_k, b_k])],
    };
    let (scale, adds) = (dice.of(&[1.0, 1.0, 0.125, -2.5]), dice.below(3) == 0);
    let numbers = [dice.numbers(a), dice.numbers(b), dice.numbers(reach)];
    (Product { m, n, k, a_m, b_n, out, scale, adds }, numbers)
}

#[test]
fn every_level_gives_what_is_defined() {
    for seed in 0..1500 {
        let (product, [a, b, out]) = by_chance(seed);
        let expected = product.defined(&a, &b, &out);
        for (level, of) in all().into_iter().enumerate() {
            let found = product.found(of, &a, &b, &out);
            assert_eq!(
                found,
                product.found(of, &a, &b, &out),
                "seed {seed}, level {level}: another run differs"
            );
            for (at, (x, y)) in expected.iter().zip(&found).enumerate() {
                let close = (x - f64::from(*y)).abs() <= 2e-4;
                assert!(close, "seed {seed}, level {level}, place {at}: {y}, not {x}");
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_other_rows_and_columns_nor_on_the_layout() {
    for seed in 0..80 {
        let mut dice = Dice(seed);
        let (m, n) = dice.of(&[(17, 130), (40, 33), (70, 70), (40, 130), (33, 450), (450, 40)]);
        let k = dice.of(&[1, 7, 64, 300, 513, 1100]);
        let (a, b) = (dice.numbers(m * k), dice.numbers(k * n));
        let turned = |x: &[f32], rows: usize, columns: usize| -> Vec<f32> {
            (0..columns).flat_map(|j| (0..rows).map(move |i| x[i * columns + j])).collect()
        };
        let (at, bt) = (turned(&a, m, k), turned(&b, k, n));
        for level in all() {
            let product = |m, n, a_by: [usize; 2], b_by: [usize; 2], out| Product {
                m,
                n,
                k: vec![(k, [a_by[1], b_by[0]])],
                a_m: a_by[0],
                b_n: b_by[1],
                out,
                scale: 0.3,
                adds: false,
            };
            let zeros = vec![0.0; m * n];
            let whole = product(m, n, [k, 1], [n, 1], [n, 1]).found(level, &a, &b, &zeros);
            for (a, a_by) in [(&a, [k, 1]), (&at, [1, m])] {
                for (b, b_by) in [(&b, [n, 1]), (&bt, [1, k])] {
                    for (rows, columns) in
                        [(m, n), (1, n), (3, n), (8, n), (15, n), (m, 1), (m, 5), (m, 33), (2, 2), (1, 1)]
                    {
                        let (i, j) = (dice.below(m - rows + 1), dice.below(n - columns + 1));
                        let (a, b) = (&a[i * a_by[0]..], &b[j * b_by[1]..]);
                        for out in [[columns, 1], [1, rows]] {
                            let part = product(rows, columns, a_by, b_by, out).found(level, a, b, &zeros);
                            for r in 0..rows {
                                for c in 0..columns {
                                    let (x, y) = (whole[(i + r) * n + j + c], part[r * out[0] + c * out[1]]);
                                    let what = "seed, rows, columns, k";
                                    let case = (seed, rows, columns, k);
                                    assert_eq!(x.to_bits(), y.to_bits(), "{what}: {case:?}");
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_missing_is_not_read() {
    // A number that is not one, behind the end of every row, would spread.
    for level in all() {
        for (m, n, k) in [(1, 40, 20), (9, 33, 17), (5, 7, 3), (20, 50, 300), (8, 8, 65)] {
            let mut a = vec![f32::NAN; m * (k + 1)];
            let mut b = vec![f32::NAN; k.max(n) * (k.max(n) + 1)];
            for i in 0..m {
                a[i * (k + 1)..][..k].fill(1.0);
            }
            for l in 0..k {
                b[l * (n + 1)..][..n].fill(2.0);
            }
            let mut product = Product {
                m,
                n,
                k: vec![(k, [1, n + 1])],
                a_m: k + 1,
                b_n: 1,
                out: [n, 1],
                scale: 1.0,
                adds: false,
            };
            let zeros = vec![0.0; m * n];
            assert!(product.found(level, &a, &b, &zeros).iter().all(|x| *x == 2.0 * k as f32));
            b.fill(f32::NAN);
            for j in 0..n {
                b[j * (k + 1)..][..k].fill(2.0);
            }
            (product.k, product.b_n) = (vec![(k, [1, 1])], k + 1);
            assert!(product.found(level, &a, &b, &zeros).iter().all(|x| *x == 2.0 * k as f32));
        }
    }
}
