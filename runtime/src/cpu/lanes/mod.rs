//! Loops over lanes of f32, compiled once for every machine, once with AVX2 and once with AVX-512, and chosen when
//! the program first asks. A sum has the same order of lanes in all three.

mod many;

pub use many::{Addend, Form, MOST, Many};

use std::sync::OnceLock;

use ir::{Binary, Reduce, Unary};

use super::math;
use crate::draw;

/// `d[i] = f(a[i])`: destination, operand, lanes. The two do not overlap.
pub type Map1 = unsafe fn(*mut f32, *const f32, usize);
/// `d[i] = f(a[i], b[i])`: destination, operands, lanes. The destination overlaps no operand.
pub type Map2 = unsafe fn(*mut f32, *const f32, *const f32, usize);
/// `d[i] = f(a[i], b[i], c[i])`. The destination overlaps no operand.
pub type Map3 = unsafe fn(*mut f32, *const f32, *const f32, *const f32, usize);
/// `d[i] = f(a[i], b)` with one number a row in the place of an operand: destination, operands, rows, lanes of a row. The
/// destination overlaps no operand.
pub type Rows2 = unsafe fn(*mut f32, *const f32, *const f32, usize, usize);
/// One number for each row of lanes, or lanes from one number a row: destination, operand, rows, lanes of a row.
pub type Rows = unsafe fn(*mut f32, *const f32, usize, usize);

/// Random numbers of neighbouring inner indices: destination, key, counter, first index.
pub type Drawn = unsafe fn(&mut [f32], [u32; 2], [u32; 3], u32);

/// One number from lanes.
pub type Total = unsafe fn(*const f32, usize) -> f64;

/// Functions of two numbers that a map has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pair {
    /// The sum.
    Add,
    /// The product.
    Mul,
    /// One of the graph's.
    Of(Binary),
}

/// A function of two numbers for each way that operands come.
#[derive(Clone, Copy)]
pub struct Ways {
    /// Lanes and lanes.
    pub vv: Map2,
    /// Lanes and one number a row.
    pub vs: Rows2,
    /// One number a row and lanes.
    pub sv: Rows2,
}

/// The loops for one kind of machine.
pub struct Lanes {
    /// By [`Unary`].
    pub unary: fn(Unary) -> Map1,
    /// By [`Pair`].
    pub pair: fn(Pair) -> Ways,
    /// The product of several, and what is added.
    pub product: fn(Form) -> Many,
    /// The sum of several, without an addend.
    pub sum: fn(Form) -> Many,
    /// The sum of each row's products, without an addend.
    pub sums: fn(Form) -> Many,
    /// The second where the first is not 0, else the third.
    pub select: Map3,
    /// `d += a`, by kind.
    pub into: fn(Reduce) -> Map1,
    /// Combines each row.
    pub rows: fn(Reduce) -> Rows,
    /// Combines lanes in f64, so that a total over many tiles keeps its digits.
    pub total: fn(Reduce) -> Total,
    /// Repeats a row's number over the row.
    pub expand: Rows,
    /// One number in all lanes.
    pub fill: unsafe fn(*mut f32, f32, usize),
    /// Whole numbers, each so far from the last: destination, first, step, lanes.
    pub count: unsafe fn(*mut f32, usize, usize, usize),
    /// Random numbers.
    pub draw: Drawn,
    /// Rounded to bfloat16.
    pub round_bf16: Map1,
    /// bfloat16 to f32.
    pub load_bf16: unsafe fn(*mut f32, *const u16, usize),
    /// f32 to bfloat16.
    pub store_bf16: unsafe fn(*mut u16, *const f32, usize),
}

/// The lanes of row `r` of the destination and an operand, and another's number.
#[inline(always)]
unsafe fn lanes_and_number<'a>(
    d: *mut f32,
    a: *const f32,
    b: *const f32,
    r: usize,
    row: usize,
) -> (&'a mut [f32], &'a [f32], f32) {
    let at = r * row;
    // SAFETY: the caller's.
    unsafe {
        (
            std::slice::from_raw_parts_mut(d.add(at), row),
            std::slice::from_raw_parts(a.add(at), row),
            *b.add(r),
        )
    }
}

#[inline(always)]
fn map1(d: &mut [f32], a: &[f32], f: impl Fn(f32) -> f32) {
    for (d, a) in d.iter_mut().zip(a) {
        *d = f(*a);
    }
}

#[inline(always)]
fn map2(d: &mut [f32], a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) {
    for ((d, a), b) in d.iter_mut().zip(a).zip(b) {
        *d = f(*a, *b);
    }
}

/// By masks: a choice between two loads would become a branch.
#[inline(always)]
fn choose(d: &mut [f32], c: &[f32], a: &[f32], b: &[f32]) {
    for (((d, c), a), b) in d.iter_mut().zip(c).zip(a).zip(b) {
        let mask = u32::from(*c != 0.0).wrapping_neg();
        *d = f32::from_bits((a.to_bits() & mask) | (b.to_bits() & !mask));
    }
}

#[inline(always)]
fn into(d: &mut [f32], a: &[f32], f: impl Fn(f32, f32) -> f32) {
    for (d, a) in d.iter_mut().zip(a) {
        *d = f(*d, *a);
    }
}

/// Combines `L` lanes of `n` at a time and then the lanes as a tree. The order depends on nothing but how many there are.
#[inline(always)]
fn tree<const L: usize, T: Copy + From<f32>>(
    n: usize,
    at: impl Fn(usize) -> f32,
    identity: T,
    f: impl Fn(T, T) -> T,
) -> T {
    let mut lanes = [identity; L];
    let whole = n / L * L;
    for first in (0..whole).step_by(L) {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = f(*lane, T::from(at(first + i)));
        }
    }
    for (i, lane) in lanes.iter_mut().enumerate().take(n - whole) {
        *lane = f(*lane, T::from(at(whole + i)));
    }
    let mut width = L;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// Combines `n` lanes.
#[inline(always)]
fn fold<T: Copy + From<f32>>(n: usize, at: impl Fn(usize) -> f32, identity: T, f: impl Fn(T, T) -> T) -> T {
    if n >= 64 { tree::<64, T>(n, at, identity, f) } else { tree::<8, T>(n, at, identity, f) }
}

#[inline(always)]
fn fold_rows(d: &mut [f32], a: &[f32], row: usize, identity: f32, f: impl Fn(f32, f32) -> f32 + Copy) {
    for (i, d) in d.iter_mut().enumerate() {
        let a = &a[i * row..(i + 1) * row];
        // SAFETY: `fold` asks for lanes below the row's.
        *d = fold(row, |i| unsafe { *a.get_unchecked(i) }, identity, f);
    }
}

#[inline(always)]
fn far_sin<const FMA: bool>(d: &mut [f32], a: &[f32], near: impl Fn(f32) -> f32, far: impl Fn(f64) -> f64) {
    map1(d, a, near);
    if a.iter().fold(false, |any, x| any | (x.abs() > math::TURNS)) {
        for (d, a) in d.iter_mut().zip(a).filter(|(_, a)| a.abs() > math::TURNS) {
            *d = far(f64::from(*a)) as f32;
        }
    }
}

macro_rules! stamp {
    ($level:ident, $fma:literal, $feature:meta) => {
        mod $level {
            use std::slice::{from_raw_parts as read, from_raw_parts_mut as write};

            use super::*;

            macro_rules! one {
                ($name:ident, $f:expr) => {
                    // SAFETY: the caller gives `n` lanes of each, which do not overlap (`Map1`).
                    #[$feature]
                    unsafe fn $name(d: *mut f32, a: *const f32, n: usize) {
                        // SAFETY: as above.
                        let (d, a) = unsafe { (write(d, n), read(a, n)) };
                        map1(d, a, $f);
                    }
                };
            }
            one!(exp, math::exp::<$fma>);
            one!(expm1, math::expm1::<$fma>);
            one!(log, math::log::<$fma>);
            one!(tanh, math::tanh::<$fma>);
            one!(sqrt, f32::sqrt);
            one!(rsqrt, |x| 1.0 / x.sqrt());
            one!(sigmoid, math::sigmoid::<$fma>);
            one!(abs, f32::abs);
            one!(sign, math::sign);
            one!(relu, |x| if x < 0.0 { 0.0 } else { x });
            one!(step, |x| if x > 0.0 { 1.0 } else { 0.0 });
            one!(stop, |x| x);
            one!(round_bf16, |x| math::from_bf16(math::to_bf16(x)));

            #[$feature]
            unsafe fn sin(d: *mut f32, a: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                far_sin::<$fma>(d, a, math::sin::<$fma>, f64::sin);
            }

            #[$feature]
            unsafe fn cos(d: *mut f32, a: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                far_sin::<$fma>(d, a, math::cos::<$fma>, f64::cos);
            }

            macro_rules! two {
                ($name:ident, $f:expr) => {
                    mod $name {
                        use super::*;

                        #[$feature]
                        unsafe fn vv(d: *mut f32, a: *const f32, b: *const f32, n: usize) {
                            // SAFETY: the caller gives `n` lanes of each, and `d` overlaps none.
                            let (d, a, b) = unsafe { (write(d, n), read(a, n), read(b, n)) };
                            map2(d, a, b, $f);
                        }

                        #[$feature]
                        unsafe fn vs(d: *mut f32, a: *const f32, b: *const f32, rows: usize, row: usize) {
                            for r in 0..rows {
                                // SAFETY: the caller gives `rows` rows of `d` and `a` and numbers of `b`.
                                let (d, a, b) = unsafe { lanes_and_number(d, a, b, r, row) };
                                map1(d, a, |a| ($f)(a, b));
                            }
                        }

                        #[$feature]
                        unsafe fn sv(d: *mut f32, a: *const f32, b: *const f32, rows: usize, row: usize) {
                            for r in 0..rows {
                                // SAFETY: the caller gives `rows` rows of `d` and `b` and numbers of `a`.
                                let (d, b, a) = unsafe { lanes_and_number(d, b, a, r, row) };
                                map1(d, b, |b| ($f)(a, b));
                            }
                        }

                        pub(super) const WAYS: Ways = Ways { vv, vs, sv };
                    }
                };
            }
            macro_rules! many {
                ($name:ident, $by:ident, $f:expr) => {
                    #[$feature]
                    unsafe fn $name<const ONE: bool, const N: usize, const ADDEND: u8>(
                        d: *mut f32,
                        of: &many::Operands,
                        rows: usize,
                        row: usize,
                    ) {
                        // SAFETY: the caller's.
                        unsafe { many::each::<ONE, N, ADDEND>(d, of, (rows, row), $f) }
                    }

                    fn $by(form: Form) -> Many {
                        fn with<const ONE: bool, const N: usize>(addend: Addend) -> Many {
                            match addend {
                                Addend::None => $name::<ONE, N, { many::NONE }>,
                                Addend::Number => $name::<ONE, N, { many::NUMBER }>,
                                Addend::Lanes => $name::<ONE, N, { many::LANES }>,
                            }
                        }
                        match (form.number, form.lanes) {
                            (true, 1) => with::<true, 1>(form.addend),
                            (true, 2) => with::<true, 2>(form.addend),
                            (true, _) => with::<true, MOST>(form.addend),
                            (false, 1) => with::<false, 1>(form.addend),
                            (false, 2) => with::<false, 2>(form.addend),
                            (false, _) => with::<false, MOST>(form.addend),
                        }
                    }
                };
            }
            many!(product, product_by, |x, y| x * y);
            many!(sum, sum_by, |x, y| x + y);

            #[$feature]
            unsafe fn sums<const ONE: bool, const N: usize>(
                d: *mut f32,
                of: &many::Operands,
                rows: usize,
                row: usize,
            ) {
                // SAFETY: the caller's.
                unsafe { many::sums::<ONE, N>(d, of, rows, row) }
            }

            fn sums_by(form: Form) -> Many {
                match (form.number, form.lanes) {
                    (true, 1) => sums::<true, 1>,
                    (true, 2) => sums::<true, 2>,
                    (true, _) => sums::<true, MOST>,
                    (false, 1) => sums::<false, 1>,
                    (false, 2) => sums::<false, 2>,
                    (false, _) => sums::<false, MOST>,
                }
            }

            two!(add, |a: f32, b: f32| a + b);
            two!(mul, |a: f32, b: f32| a * b);
            two!(sub, |a: f32, b: f32| a - b);
            mod div {
                use super::*;

                two!(each, |a: f32, b: f32| a / b);

                #[$feature]
                unsafe fn vs(d: *mut f32, a: *const f32, b: *const f32, rows: usize, row: usize) {
                    for r in 0..rows {
                        // SAFETY: the caller gives `rows` rows of `d` and `a` and numbers of `b`.
                        let (d, a, b) = unsafe { lanes_and_number(d, a, b, r, row) };
                        let x = 1.0 / b;
                        // Elsewhere the reciprocal or a remainder has not all digits.
                        if $fma && (1e-30..1e30).contains(&b.abs()) {
                            map1(d, a, |a| math::quotient::<$fma>(a, b, x));
                        } else {
                            map1(d, a, |a| a / b);
                        }
                    }
                }

                pub(super) const WAYS: Ways = Ways { vs, ..each::WAYS };
            }
            two!(max, math::max);
            two!(min, math::min);
            two!(eq, |a: f32, b: f32| if a == b { 1.0 } else { 0.0 });
            two!(ge, |a: f32, b: f32| if a >= b { 1.0 } else { 0.0 });

            #[$feature]
            unsafe fn select(d: *mut f32, c: *const f32, a: *const f32, b: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, and `d` overlaps none.
                let (d, c, a, b) = unsafe { (write(d, n), read(c, n), read(a, n), read(b, n)) };
                choose(d, c, a, b);
            }

            #[$feature]
            unsafe fn sum_into(d: *mut f32, a: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                into(d, a, |d, a| d + a);
            }

            #[$feature]
            unsafe fn max_into(d: *mut f32, a: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                into(d, a, math::max);
            }

            #[$feature]
            unsafe fn sum_rows(d: *mut f32, a: *const f32, rows: usize, row: usize) {
                // SAFETY: the caller gives `rows` numbers and as many rows, which do not overlap.
                let (d, a) = unsafe { (write(d, rows), read(a, rows * row)) };
                fold_rows(d, a, row, 0.0, |x, y| x + y);
            }

            #[$feature]
            unsafe fn max_rows(d: *mut f32, a: *const f32, rows: usize, row: usize) {
                // SAFETY: the caller gives `rows` numbers and as many rows, which do not overlap.
                let (d, a) = unsafe { (write(d, rows), read(a, rows * row)) };
                fold_rows(d, a, row, f32::NEG_INFINITY, math::max);
            }

            #[$feature]
            unsafe fn sum_total(a: *const f32, n: usize) -> f64 {
                // SAFETY: the caller gives `n` lanes.
                fold(n, |i| unsafe { *a.add(i) }, 0.0, |x, y| x + y)
            }

            #[$feature]
            unsafe fn max_total(a: *const f32, n: usize) -> f64 {
                // SAFETY: the caller gives `n` lanes.
                f64::from(fold(n, |i| unsafe { *a.add(i) }, f32::NEG_INFINITY, math::max))
            }

            #[$feature]
            unsafe fn expand(d: *mut f32, a: *const f32, rows: usize, row: usize) {
                // SAFETY: the caller gives `rows` numbers and as many rows, which do not overlap.
                let (d, a) = unsafe { (write(d, rows * row), read(a, rows)) };
                for (i, x) in a.iter().enumerate() {
                    d[i * row..(i + 1) * row].fill(*x);
                }
            }

            #[$feature]
            unsafe fn fill(d: *mut f32, x: f32, n: usize) {
                // SAFETY: the caller gives `n` lanes.
                unsafe { write(d, n) }.fill(x);
            }

            #[$feature]
            unsafe fn counted(d: *mut f32, first: usize, step: usize, n: usize) {
                // SAFETY: the caller gives `n` lanes.
                let d = unsafe { write(d, n) };
                // Conversions of 32 bits are vector code on every machine.
                if first + step * n <= i32::MAX as usize {
                    let (first, step) = (first as i32, step as i32);
                    d.iter_mut().zip(0i32..).for_each(|(d, i)| *d = (first + i * step) as f32);
                } else {
                    d.iter_mut().enumerate().for_each(|(i, d)| *d = (first + i * step) as f32);
                }
            }

            #[$feature]
            unsafe fn drawn(d: &mut [f32], key: [u32; 2], counter: [u32; 3], first: u32) {
                draw::lanes(d, key, counter, first);
            }

            #[$feature]
            unsafe fn load_bf16(d: *mut f32, a: *const u16, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                for (d, a) in d.iter_mut().zip(a) {
                    *d = math::from_bf16(*a);
                }
            }

            #[$feature]
            unsafe fn store_bf16(d: *mut u16, a: *const f32, n: usize) {
                // SAFETY: the caller gives `n` lanes of each, which do not overlap.
                let (d, a) = unsafe { (write(d, n), read(a, n)) };
                for (d, a) in d.iter_mut().zip(a) {
                    *d = math::to_bf16(*a);
                }
            }

            fn unary(f: Unary) -> Map1 {
                match f {
                    Unary::Exp => exp,
                    Unary::Expm1 => expm1,
                    Unary::Log => log,
                    Unary::Tanh => tanh,
                    Unary::Sqrt => sqrt,
                    Unary::Rsqrt => rsqrt,
                    Unary::Sin => sin,
                    Unary::Cos => cos,
                    Unary::Sigmoid => sigmoid,
                    Unary::Abs => abs,
                    Unary::Sign => sign,
                    Unary::Relu => relu,
                    Unary::Step => step,
                    Unary::Stop => stop,
                }
            }

            fn pair(f: Pair) -> Ways {
                match f {
                    Pair::Add => add::WAYS,
                    Pair::Mul => mul::WAYS,
                    Pair::Of(Binary::Sub) => sub::WAYS,
                    Pair::Of(Binary::Div) => div::WAYS,
                    Pair::Of(Binary::Max) => max::WAYS,
                    Pair::Of(Binary::Min) => min::WAYS,
                    Pair::Of(Binary::Eq) => eq::WAYS,
                    Pair::Of(Binary::Ge) => ge::WAYS,
                }
            }

            fn into_by(reduce: Reduce) -> Map1 {
                match reduce {
                    Reduce::Sum => sum_into,
                    Reduce::Max => max_into,
                    Reduce::Top => unreachable!("compile refuses a map that combines pairs"),
                }
            }

            fn rows_by(reduce: Reduce) -> Rows {
                match reduce {
                    Reduce::Sum => sum_rows,
                    Reduce::Max => max_rows,
                    Reduce::Top => unreachable!("compile refuses a map that combines pairs"),
                }
            }

            fn total_by(reduce: Reduce) -> Total {
                match reduce {
                    Reduce::Sum => sum_total,
                    Reduce::Max => max_total,
                    Reduce::Top => unreachable!("compile refuses a map that combines pairs"),
                }
            }

            pub(super) static LANES: Lanes = Lanes {
                unary,
                pair,
                product: product_by,
                sum: sum_by,
                sums: sums_by,
                select,
                into: into_by,
                rows: rows_by,
                total: total_by,
                expand,
                fill,
                count: counted,
                draw: drawn,
                round_bf16,
                load_bf16,
                store_bf16,
            };
        }
    };
}

stamp!(base, false, inline(never));
#[cfg(target_arch = "x86_64")]
stamp!(avx2, true, target_feature(enable = "avx2,fma,f16c,bmi1,bmi2"));
#[cfg(target_arch = "x86_64")]
stamp!(
    avx512,
    true,
    target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512cd")
);

/// The loops that this machine can run, slowest first.
pub fn all() -> Vec<&'static Lanes> {
    let mut found = vec![&base::LANES];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512cd");
        if avx2 {
            found.push(&avx2::LANES);
        }
        if avx2 && avx512 {
            found.push(&avx512::LANES);
        }
    }
    found
}

/// The fastest loops that this machine can run.
pub fn best() -> &'static Lanes {
    static BEST: OnceLock<&'static Lanes> = OnceLock::new();
    BEST.get_or_init(|| all().last().copied().unwrap_or(&base::LANES))
}
