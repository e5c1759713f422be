//! Elements of every type in memory, to and from lanes of f32. Integers are exact up to 2^24.

use half::f16;
use ir::DType;

use super::lanes::Lanes;
use super::math;

/// A number rounded to an element type: to the nearest for floats, toward 0 for integers.
pub fn cast(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::I64 => x as i64 as f64,
        DType::I32 => f64::from(x as i32),
        DType::U32 => f64::from(x as u32),
        // The largest of no truth values, -inf, is false.
        DType::Bool => f64::from(u8::from(x != 0.0 && x != f64::NEG_INFINITY)),
    }
}

/// Lanes from `n` elements that lie `stride` apart.
///
/// # Safety
/// `d` has `n` lanes, and the elements `a + i * stride` of type `dtype` can be read; the two do not overlap.
#[inline(always)]
pub unsafe fn load(lanes: &Lanes, dtype: DType, d: *mut f32, a: *const u8, n: usize, stride: usize) {
    macro_rules! each {
        ($t:ty, $f:expr) => {{
            let a = a.cast::<$t>();
            if stride == 0 {
                // SAFETY: the caller's.
                unsafe { (lanes.fill)(d, $f(*a), n) }
            } else {
                for i in 0..n {
                    // SAFETY: the caller's.
                    unsafe { *d.add(i) = $f(*a.add(i * stride)) }
                }
            }
        }};
    }
    match dtype {
        DType::F32 if stride == 1 => {
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(a.cast::<f32>(), d, n) }
        }
        // SAFETY: the caller's.
        DType::BF16 if stride == 1 => unsafe { (lanes.load_bf16)(d, a.cast(), n) },
        DType::F32 => each!(f32, |x| x),
        DType::F64 => each!(f64, |x| x as f32),
        DType::F16 => each!(u16, |x| f16::from_bits(x).to_f32()),
        DType::BF16 => each!(u16, math::from_bf16),
        DType::I64 => each!(i64, |x| x as f32),
        DType::I32 => each!(i32, |x| x as f32),
        DType::U32 => each!(u32, |x| x as f32),
        DType::Bool => each!(u8, |x| if x != 0 { 1.0f32 } else { 0.0 }),
    }
}

/// `n` elements that lie `stride` apart, from lanes.
///
/// # Safety
/// `a` has `n` lanes, and the elements `d + i * stride` of type `dtype` can be written; the two do not overlap.
#[inline(always)]
pub unsafe fn store(lanes: &Lanes, dtype: DType, d: *mut u8, a: *const f32, n: usize, stride: usize) {
    macro_rules! each {
        ($t:ty, $f:expr) => {{
            let d = d.cast::<$t>();
            for i in 0..n {
                // SAFETY: the caller's.
                unsafe { *d.add(i * stride) = $f(*a.add(i)) }
            }
        }};
    }
    match dtype {
        DType::F32 if stride == 1 => {
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(a, d.cast::<f32>(), n) }
        }
        // SAFETY: the caller's.
        DType::BF16 if stride == 1 => unsafe { (lanes.store_bf16)(d.cast(), a, n) },
        DType::F32 => each!(f32, |x: f32| x),
        DType::F64 => each!(f64, |x: f32| f64::from(x)),
        DType::F16 => each!(u16, |x: f32| f16::from_f32(x).to_bits()),
        DType::BF16 => each!(u16, math::to_bf16),
        DType::I64 => each!(i64, |x: f32| x as i64),
        DType::I32 => each!(i32, |x: f32| x as i32),
        DType::U32 => each!(u32, |x: f32| x as u32),
        DType::Bool => each!(u8, |x: f32| u8::from(x != 0.0 && x != f32::NEG_INFINITY)),
    }
}
