//! The element types that a value can have.

use std::fmt;
use std::str::FromStr;

/// The type of a value's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 64-bit float; what `lockstep` computes in, and a few scalars.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer: token ids, labels, positions, the step.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// A truth value, one byte.
    Bool,
}

impl DType {
    /// Every type, for tables and messages.
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U32, DType::Bool];

    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Bool => 1,
        }
    }

    /// Whether it holds real numbers: only those have gradients.
    pub fn is_float(self) -> bool {
        match self {
            DType::F64 | DType::F32 | DType::F16 | DType::BF16 => true,
            DType::I64 | DType::I32 | DType::U32 | DType::Bool => false,
        }
    }

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<DType, String> {
        DType::ALL
            .into_iter()
            .find(|t| t.name() == text)
            .ok_or_else(|| format!("`{text}` is no element type"))
    }
}
