//! The matrix unit of x86 (AMX): whether there is one, and a tile of 32 rows and columns of bf16 numbers on it.
//!
//! A register has 16 rows of 64 bytes. One of `a` has 16 rows of 32 places of the summed dimension; one of `b` has 16
//! pairs of places, each with 16 columns; one of sums 16 rows of 16 f32 numbers.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Rows and columns of a tile.
pub const SIDE: usize = 32;
/// Places of the summed dimension of a register.
pub const PLACES: usize = 32;

/// How the registers are laid out.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight registers, all of them whole.
static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether this machine has it and this process may use it, which is asked for once for all threads.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_unit() && allowed())
}

fn has_unit() -> bool {
    let packing = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let (tile, bf16) = (1 << 24, 1 << 22);
    packing && __cpuid_count(7, 0).edx & (tile | bf16) == tile | bf16
}

/// Linux keeps the registers of a process only after it has asked for them.
#[cfg(target_os = "linux")]
fn allowed() -> bool {
    let (arch_prctl, request, tile_data) = (158usize, 0x1023usize, 18usize);
    let result: isize;
    // SAFETY: the call touches no memory of ours; the kernel writes rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inout("rax") arch_prctl as isize => result,
            in("rdi") request,
            in("rsi") tile_data,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn allowed() -> bool {
    false
}

/// The registers of this thread, laid out; given back at the end.
pub struct Registers(());

impl Registers {
    /// Lays them out.
    ///
    /// # Safety
    /// [`available`] is true.
    pub unsafe fn new() -> Registers {
        // SAFETY: the shapes are those of palette 1; the caller has the unit.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, readonly)) }
        Registers(())
    }

    /// Adds a tile: `steps` times two registers of `a` and two of `b`, which lie one behind the other. The four of sums lie
    /// one behind the other too; they begin with zeros if it is the `first`.
    ///
    /// # Safety
    /// `a` and `b` have 2048 bytes a step, `sums` 1024 numbers.
    #[inline(always)]
    pub unsafe fn add(&self, steps: usize, a: *const u16, b: *const u16, sums: *mut f32, first: bool) {
        // SAFETY: the caller's; registers are laid out while `self` lives.
        unsafe {
            asm!(
                "test {first:e}, {first:e}",
                "jz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{sums} + {row}*1]",
                "tileloadd tmm1, [{sums} + {row}*1 + 1024]",
                "tileloadd tmm2, [{sums} + {row}*1 + 2048]",
                "tileloadd tmm3, [{sums} + {row}*1 + 3072]",
                "2:",
                "tileloadd tmm4, [{a} + {row}*1]",
                "tileloadd tmm6, [{b} + {row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {row}*1], tmm0",
                "tilestored [{sums} + {row}*1 + 1024], tmm1",
                "tilestored [{sums} + {row}*1 + 2048], tmm2",
                "tilestored [{sums} + {row}*1 + 3072], tmm3",
                first = in(reg) i32::from(first),
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                sums = in(reg) sums,
                row = in(reg) 64usize,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the unit is there, as `new` needed it.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}
