//! The product for each instruction set, chosen when the program first asks.

use std::sync::OnceLock;

use super::tile::{Operands, Tile, tile};
use super::vector::{Plain, Vector};
use super::{Call, Plan, along, blocks, few, single, streamed};

/// A product for one kind of machine.
pub struct Level {
    /// Numbers of a register.
    pub lanes: usize,
    /// The most columns of a tile.
    pub width: usize,
    /// The most rows of a tile.
    pub rows: usize,
    /// Any product.
    pub blocks: unsafe fn(&Plan, &Call),
    /// One whose rows make one tile, and whose columns lie one behind the other in `b` and the result.
    pub few: unsafe fn(&Plan, &Call),
    /// Some whose rows make one tile, and where the summed dimension lies one behind the other in `b`: by how many rows,
    /// less one.
    pub along: &'static [unsafe fn(&Plan, &Call)],
    /// One that is so small that its elements are computed one by one.
    pub single: unsafe fn(&Plan, &Call),
    /// One whose `b` is small, with one summed dimension.
    pub streamed: unsafe fn(&Plan, &Call),
    /// Tiles of a packed `a` by how many registers and rows, less one of each.
    pub tiles: &'static [&'static [Tile]],
    /// Tiles of an `a` as it lies, likewise. There are fewer rows where there are more registers.
    pub lying: &'static [&'static [Tile]],
}

/// For each number of registers a tile for each number of rows.
macro_rules! tiles {
    ([$($wide:literal)*], $rows:tt) => { &[$(tiles!(@ $wide, $rows, true)),*] };
    ($($wide:literal $rows:tt),*) => { &[$(tiles!(@ $wide, $rows, false)),*] };
    (@ $wide:literal, [$($rows:literal)*], $packed:literal) => { &[$(of::<$rows, $wide, $packed>),*] };
}

/// For each number of rows a product along the summed dimension.
macro_rules! alongs {
    ([$($rows:literal)*]) => { &[$(along::<$rows>),*] };
}

macro_rules! level {
    ($level:ident, $vector:ty, $feature:meta, $wide:tt, $rows:tt, [$($lying:tt)*]) => {
        mod $level {
            use super::*;

            // SAFETY: the caller gives what `tile` needs.
            #[$feature]
            unsafe fn of<const M: usize, const N: usize, const PACKED: bool>(operands: &Operands) {
                // SAFETY: as above.
                unsafe { tile::<$vector, M, N, PACKED>(operands) }
            }

            // SAFETY: the caller gives what `blocks::run` needs.
            #[$feature]
            unsafe fn blocks(plan: &Plan, call: &Call) {
                // SAFETY: as above.
                unsafe { blocks::run::<$vector>(plan, call) }
            }

            // SAFETY: the caller gives what `few::run` needs.
            #[$feature]
            unsafe fn few(plan: &Plan, call: &Call) {
                // SAFETY: as above.
                unsafe { few::run::<$vector>(plan, call) }
            }

            // SAFETY: the caller gives what `along::run` needs.
            #[$feature]
            unsafe fn along<const M: usize>(plan: &Plan, call: &Call) {
                // SAFETY: as above.
                unsafe { along::run::<$vector, M>(plan, call) }
            }

            // SAFETY: the caller gives what `streamed::run` needs.
            #[$feature]
            unsafe fn streamed(plan: &Plan, call: &Call) {
                // SAFETY: as above.
                unsafe { streamed::run::<$vector>(plan, call) }
            }

            // SAFETY: the caller gives what `single::run` needs.
            #[$feature]
            unsafe fn single(plan: &Plan, call: &Call) {
                // SAFETY: as above.
                unsafe { single::run::<$vector>(plan, call) }
            }

            pub(super) static LEVEL: Level = Level {
                lanes: <$vector>::LANES,
                width: <$vector>::WIDTH,
                rows: <$vector>::ROWS,
                blocks,
                few,
                along: alongs!($rows),
                single,
                streamed,
                tiles: tiles!($wide, $rows),
                lying: tiles!($($lying)*),
            };
        }
    };
}

level!(plain, Plain, inline(never), [1 2], [1 2 3 4], [1 [1 2 3 4], 2 [1 2 3 4]]);
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
level!(
    avx2,
    Avx2,
    target_feature(enable = "avx2,fma"),
    [1 2],
    [1 2 3 4 5 6],
    [1 [1 2 3 4 5 6 7 8], 2 [1 2 3 4 5 6]]
);
#[cfg(target_arch = "x86_64")]
level!(
    avx512,
    Avx512,
    target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"),
    [1 2],
    [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    [1 [1 2 3 4 5 6 7 8], 2 [1 2 3 4 5 6 7 8], 3 [1 2 3 4 5 6 7 8], 4 [1 2 3 4 5 6]]
);

/// The levels that this machine has, slowest first.
pub fn all() -> Vec<&'static Level> {
    let mut found = vec![&plain::LEVEL];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx2 {
            found.push(&avx2::LEVEL);
        }
        if avx2 && avx512 {
            found.push(&avx512::LEVEL);
        }
    }
    found
}

/// The fastest level that this machine has.
pub fn best() -> &'static Level {
    static BEST: OnceLock<&'static Level> = OnceLock::new();
    BEST.get_or_init(|| all().last().copied().unwrap_or(&plain::LEVEL))
}
