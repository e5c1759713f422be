//! How exact the functions are, in each of the versions that this machine can run.

use ir::{Binary, Unary};

use crate::cpu::lanes::{self, Pair};

/// The largest error in units of the last place of the true value, over `x`.
fn ulps(f: Unary, truth: fn(f64) -> f64, x: &[f32]) -> f64 {
    let mut worst = 0.0f64;
    for lanes in lanes::all() {
        let mut y = vec![0.0; x.len()];
        // SAFETY: as many lanes of both.
        unsafe { (lanes.unary)(f)(y.as_mut_ptr(), x.as_ptr(), x.len()) };
        for (x, y) in x.iter().zip(y) {
            let exact = truth(f64::from(*x));
            if exact as f32 == y || (exact.is_nan() && y.is_nan()) {
                continue;
            }
            let unit = f64::from((exact.abs() as f32).max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
            let error = (f64::from(y) - exact).abs() / unit;
            assert!(error < 10.0, "{f:?}({x}) is {y}, not {exact}");
            worst = worst.max(error);
        }
    }
    worst
}

/// About a million numbers between two, and the same of both signs near 0 by their bits.
fn samples(from: f32, to: f32) -> Vec<f32> {
    let n = 1_000_003;
    let even = (0..n).map(|i| from + (to - from) * (i as f32 / n as f32));
    let bits = (0..f32::MAX.to_bits()).step_by(4001).map(f32::from_bits);
    let both = bits.flat_map(|x| [x, -x]).filter(move |x| *x >= from && *x <= to);
    even.chain(both).collect()
}

#[test]
fn functions_are_exact_to_a_few_units() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (f, truth, from, to, most) in [
        (Unary::Exp, f64::exp as fn(f64) -> f64, -87.336, 95.0, 1.0),
        (Unary::Expm1, f64::exp_m1, -110.0, 95.0, 2.0),
        (Unary::Log, f64::ln, 0.0, f32::MAX, 1.0),
        (Unary::Log, f64::ln, 0.5, 2.0, 1.0),
        (Unary::Tanh, f64::tanh, -12.0, 12.0, 2.0),
        (Unary::Sigmoid, sigmoid, -87.0, 87.0, 2.0),
        (Unary::Sqrt, f64::sqrt, 0.0, f32::MAX, 0.5),
        (Unary::Rsqrt, |x: f64| 1.0 / x.sqrt(), 1e-30, f32::MAX, 1.5),
    ] {
        let worst = ulps(f, truth, &samples(from, to));
        println!("{f:?} on [{from}, {to}]: {worst:.2}");
        assert!(worst <= most, "{f:?}: {worst}");
    }
}

#[test]
fn a_division_by_one_number_has_the_bits_of_a_division() {
    let x: Vec<f32> = samples(-3.0, 3.0).into_iter().chain([f32::INFINITY, f32::NAN, 1e38, -0.0]).collect();
    for by in [3.0, -7.25, 1e-3, 0.1, 1.0, 1e29, 2e-30, 1e-31, 1e-45, 0.0, f32::INFINITY, f32::NAN, f32::MAX]
    {
        for lanes in lanes::all() {
            let mut y = vec![0.0; x.len()];
            let divide = (lanes.pair)(Pair::Of(Binary::Div)).vs;
            // SAFETY: as many lanes of both, and one number for the one row.
            unsafe { divide(y.as_mut_ptr(), x.as_ptr(), &by, 1, x.len()) };
            for (x, y) in x.iter().zip(y) {
                let exact = x / by;
                // Where the remainder is subnormal, the last place may be another.
                let same = exact == y || (exact.is_nan() && y.is_nan());
                let unit = (exact.abs() * f32::EPSILON).max(f32::from_bits(1));
                let small = exact.abs().min(x.abs()) < 1e-30 && (exact - y).abs() <= unit;
                assert!(same || small, "{x} / {by} is {y}, not {exact}");
            }
        }
    }
}

#[test]
fn waves_are_exact_far_out() {
    let x: Vec<f32> =
        samples(-1e6, 1e6).into_iter().chain(samples(-10.0, 10.0)).chain([3e7, -1e12]).collect();
    for (f, truth) in [(Unary::Sin, f64::sin as fn(f64) -> f64), (Unary::Cos, f64::cos)] {
        for lanes in lanes::all() {
            let mut y = vec![0.0; x.len()];
            // SAFETY: as many lanes of both.
            unsafe { (lanes.unary)(f)(y.as_mut_ptr(), x.as_ptr(), x.len()) };
            let error = |(x, y): (&f32, f32)| (truth(f64::from(*x)) - f64::from(y)).abs();
            let worst = x.iter().zip(y).map(error).fold(0.0, f64::max);
            println!("{f:?}: {worst:e}");
            assert!(worst < 1.2e-7);
        }
    }
}

#[test]
fn limits_are_as_they_should_be() {
    let inf = f32::INFINITY;
    for (f, x, y) in [
        (Unary::Exp, 89.0, inf),
        (Unary::Exp, inf, inf),
        (Unary::Exp, -inf, 0.0),
        (Unary::Exp, -87.34, 0.0),
        (Unary::Exp, -200.0, 0.0),
        (Unary::Exp, 0.0, 1.0),
        (Unary::Expm1, inf, inf),
        (Unary::Expm1, -inf, -1.0),
        (Unary::Expm1, 0.0, 0.0),
        (Unary::Log, 0.0, -inf),
        (Unary::Log, -1.0, f32::NAN),
        (Unary::Log, inf, inf),
        (Unary::Log, 1.0, 0.0),
        (Unary::Tanh, inf, 1.0),
        (Unary::Tanh, -inf, -1.0),
        (Unary::Sigmoid, inf, 1.0),
        (Unary::Sigmoid, -inf, 0.0),
        (Unary::Sin, inf, f32::NAN),
        (Unary::Cos, 0.0, 1.0),
        (Unary::Rsqrt, 0.0, inf),
        (Unary::Sqrt, -1.0, f32::NAN),
    ] {
        for lanes in lanes::all() {
            let (a, mut d) = ([x; 37], [0.0; 37]);
            // SAFETY: as many lanes of both.
            unsafe { (lanes.unary)(f)(d.as_mut_ptr(), a.as_ptr(), 37) };
            for d in d {
                assert!(d == y || (d.is_nan() && y.is_nan()), "{f:?}({x}) is {d}, not {y}");
            }
        }
    }
}
