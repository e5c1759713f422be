//! Single elements of every type in memory, as f64: for taps, checks and fills, where speed does not matter.

use half::{bf16, f16};
use ir::DType;

/// Element `i`. Integers beyond 2^53 are rounded.
///
/// # Safety
/// There is such an element, aligned.
pub unsafe fn get(dtype: DType, at: *const u8, i: usize) -> f64 {
    // SAFETY: the caller's.
    unsafe {
        match dtype {
            DType::F64 => *at.cast::<f64>().add(i),
            DType::F32 => f64::from(*at.cast::<f32>().add(i)),
            DType::F16 => (*at.cast::<f16>().add(i)).to_f64(),
            DType::BF16 => (*at.cast::<bf16>().add(i)).to_f64(),
            DType::I64 => *at.cast::<i64>().add(i) as f64,
            DType::I32 => f64::from(*at.cast::<i32>().add(i)),
            DType::U32 => f64::from(*at.cast::<u32>().add(i)),
            DType::Bool => f64::from(u8::from(*at.add(i) != 0)),
        }
    }
}

/// Writes a number everywhere; an integer type gets the nearest that it has.
///
/// # Safety
/// There are so many elements, aligned.
pub unsafe fn fill(dtype: DType, at: *mut u8, elements: usize, number: f64) {
    macro_rules! each {
        ($type:ty, $number:expr) => {
            // SAFETY: the caller's.
            unsafe { std::slice::from_raw_parts_mut(at.cast::<$type>(), elements).fill($number) }
        };
    }
    match dtype {
        DType::F64 => each!(f64, number),
        DType::F32 => each!(f32, number as f32),
        DType::F16 => each!(f16, f16::from_f64(number)),
        DType::BF16 => each!(bf16, bf16::from_f64(number)),
        DType::I64 => each!(i64, number as i64),
        DType::I32 => each!(i32, number as i32),
        DType::U32 => each!(u32, number as u32),
        DType::Bool => each!(u8, u8::from(number > 0.0)),
    }
}
