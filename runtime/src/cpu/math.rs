//! Functions of one number, without branches, so that loops over them become vector code. `FMA` says whether the
//! surrounding function is compiled for a machine that multiplies and adds in one instruction; elsewhere `mul_add`
//! would be a call into the C library.
//!
//! Errors against f64, in units of the last place, over the tests' samples: exp, log and sigmoid 2, expm1 and tanh 3;
//! sin and cos 1e-7 absolute up to |x| = 1e6.

/// `a * b + c`.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adding this and taking it away again rounds to a whole number.
const ROUND: f32 = 12_582_912.0;

/// `x = n ln 2 + r`: the number n, its bits as an integer, and r.
#[inline(always)]
fn reduce<const FMA: bool>(x: f32) -> (i32, f32) {
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with so few digits that its product with n is exact.
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    // Integers, not a conversion: that would be undefined for NaN.
    ((shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32), r)
}

/// `e^r - 1` for |r| <= ln 2 / 2.
#[inline(always)]
fn expm1_near_0<const FMA: bool>(r: f32) -> f32 {
    let p = fma::<FMA>(1.987_569_1e-4, r, 1.398_199_9e-3);
    let p = fma::<FMA>(p, r, 8.333_452e-3);
    let p = fma::<FMA>(p, r, 4.166_579_6e-2);
    let p = fma::<FMA>(p, r, 1.666_666_5e-1);
    let p = fma::<FMA>(p, r, 0.5);
    fma::<FMA>(p, r * r, r)
}

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn power_of_2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Limits x; NaN stays NaN.
#[inline(always)]
fn limited(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// The logarithm of the smallest normal number.
const LEAST: f32 = -87.336_54;

/// Numbers beyond this have no finite exponential.
const MOST: f32 = 88.722_83;

/// e^x; 0 where that is below the normal numbers: masked scores are common, and subnormal numbers slow.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let (n, r) = reduce::<FMA>(x);
    // Between the limits n changes the exponent of a number in [0.7, 1.42) to another of a normal number.
    let bits = (1.0 + expm1_near_0::<FMA>(r)).to_bits();
    let y = f32::from_bits(bits.wrapping_add((n as u32) << 23));
    let y = if x > MOST { f32::INFINITY } else { y };
    let y = if x < LEAST { 0.0 } else { y };
    if x.is_nan() { x } else { y }
}

/// n / d for 1 <= d <= 2, to a unit of the last place: a division takes as long as some fifteen of these steps.
#[inline(always)]
fn divided<const FMA: bool>(n: f32, d: f32) -> f32 {
    if !FMA {
        return n / d;
    }
    // The quadratic that is nearest to 1 / d relative to it: 1 - d q(d) is a multiple of Chebyshev's polynomial
    // T3(2d - 3), at most 1/99 (Muller, Elementary Functions, 3.3). A step of Newton's squares the error.
    let q = fma::<FMA>(fma::<FMA>(32.0 / 99.0, d, -144.0 / 99.0), d, 210.0 / 99.0);
    let q = fma::<FMA>(q, fma::<FMA>(-d, q, 1.0), q);
    // The same step for the quotient: its remainder is exact.
    let y = n * q;
    fma::<FMA>(q, fma::<FMA>(-d, y, n), y)
}

/// n / d, where `r` is 1 / d as nearly as f32 has it: the remainder says how the quotient's last place rounds (Markstein,
/// Computation of elementary functions on the IBM RISC System/6000 processor, 1990, theorem 4.2). Where n
/// or the quotient is below 1e-30 the remainder may have lost digits, and the last place may be another.
#[inline(always)]
pub fn quotient<const FMA: bool>(n: f32, d: f32, r: f32) -> f32 {
    let y = n * r;
    let exact = fma::<FMA>(r, fma::<FMA>(-d, y, n), y);
    if y.abs() < f32::INFINITY { exact } else { y }
}

/// e^x - 1.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    let (n, r) = reduce::<FMA>(limited(x, -20.0, 89.0));
    let scale = power_of_2(n.wrapping_sub(1));
    let y = 2.0 * fma::<FMA>(scale, expm1_near_0::<FMA>(r), scale - 0.5);
    // Keeps the sign of 0.
    if x == 0.0 { x } else { y }
}

/// The natural logarithm.
#[inline(always)]
pub fn log<const FMA: bool>(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 33_554_432.0 } else { x };
    // Cuts at sqrt(1/2), so that the mantissa lies in [0.707, 1.414).
    let shifted = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (shifted as i32 >> 23) as f32 - if tiny { 25.0 } else { 0.0 };
    let m = f32::from_bits((shifted & 0x007f_ffff).wrapping_add(0x3f35_04f3)) - 1.0;
    let p = fma::<FMA>(7.037_683_6e-2, m, -1.151_461e-1);
    let p = fma::<FMA>(p, m, 1.167_699_9e-1);
    let p = fma::<FMA>(p, m, -1.242_014_1e-1);
    let p = fma::<FMA>(p, m, 1.424_932_3e-1);
    let p = fma::<FMA>(p, m, -1.666_805_8e-1);
    let p = fma::<FMA>(p, m, 2.000_071_5e-1);
    let p = fma::<FMA>(p, m, -2.499_999_4e-1);
    let p = fma::<FMA>(p, m, 3.333_333e-1);
    let square = m * m;
    let y = fma::<FMA>(p * m, square, -2.121_944_4e-4 * e);
    let y = fma::<FMA>(-0.5, square, y) + m;
    let y = fma::<FMA>(0.693_359_4, e, y);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// The hyperbolic tangent: (1 - e^-2|x|) / (1 + e^-2|x|).
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let far = x.abs();
    let far = if far > 10.0 { 10.0 } else { far };
    // -2|x| = n ln 2 + 2r. Where n is large, so that its product with the constant has few digits, e^-2|x| is small.
    let shifted = fma::<FMA>(far, -2.0 * std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = -fma::<FMA>(n, 0.5 * std::f32::consts::LN_2, far);
    let scale = power_of_2((shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32));
    let less = fma::<FMA>(-scale, expm1_near_0::<FMA>(2.0 * r), 1.0 - scale);
    divided::<FMA>(less, 2.0 - less).copysign(x)
}

/// 1 / (1 + e^-x), or e^x / (1 + e^x).
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let e = exp::<FMA>(-x.abs());
    divided::<FMA>(if x < 0.0 { e } else { 1.0 }, 1.0 + e)
}

/// Up to here sine and cosine are exact to the digits of f32; the caller takes the C library's beyond.
pub const TURNS: f32 = 1e6;

/// The sine of x, or with `quarter = 1` its cosine.
#[inline(always)]
fn wave<const FMA: bool>(x: f32, quarter: u64) -> f32 {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(x);
    let shifted = x * std::f64::consts::FRAC_2_PI + ROUND;
    let n = shifted - ROUND;
    // pi / 2 in two parts; 33 bits times n is exact.
    let r = ((x - n * 1.570_796_326_734_125_6) - n * 6.077_100_506_506_192e-11) as f32;
    let n = shifted.to_bits().wrapping_add(quarter) as u32;
    let square = r * r;
    let s = fma::<FMA>(-1.951_529_6e-4, square, 8.332_161e-3);
    let s = fma::<FMA>(s, square, -1.666_665_5e-1);
    let s = fma::<FMA>(s * square, r, r);
    let c = fma::<FMA>(2.443_315_7e-5, square, -1.388_731_6e-3);
    let c = fma::<FMA>(c, square, 4.166_664_6e-2);
    let c = fma::<FMA>(c * square, square, fma::<FMA>(-0.5, square, 1.0));
    let y = if n & 1 == 0 { s } else { c };
    f32::from_bits(y.to_bits() ^ ((n & 2) << 30))
}

/// The sine, for |x| <= [`TURNS`].
#[inline(always)]
pub fn sin<const FMA: bool>(x: f32) -> f32 {
    wave::<FMA>(x, 0)
}

/// The cosine, for |x| <= [`TURNS`].
#[inline(always)]
pub fn cos<const FMA: bool>(x: f32) -> f32 {
    wave::<FMA>(x, 1)
}

/// -1, 0 or 1; NaN stays NaN.
#[inline(always)]
pub fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}

/// The larger; NaN if either is.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    let larger = if a > b { a } else { b };
    if a.is_nan() { a } else { larger }
}

/// The smaller; NaN if either is.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    let smaller = if a < b { a } else { b };
    if a.is_nan() { a } else { smaller }
}

/// The nearest bfloat16, ties to even.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

/// A bfloat16's number.
#[inline(always)]
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}
