//! Doing a share: elements copied, or combined in the order of the group, strip by strip; what is streamed goes through a
//! tile.
//!
//! A strip or tile is read from every member before it is written to any, so that an all_reduce may work in place. Each element
//! is combined in f32 (f64 for f64) from the first member to the last and rounded once: the same bits whoever does it.

use std::ops::Range;

use half::{bf16, f16};
use ir::{DType, Reduce};

use crate::pairs;

use super::collective::{Collective, Share, Who};

/// The most bytes that a tile takes.
const TILE: usize = 32 << 10;
/// Up to so many members results go straight from registers to all of them, unless they are streamed.
const MOST: usize = 32;

/// Where a tile is combined.
#[repr(C, align(64))]
pub struct Tile([u8; TILE]);

impl Tile {
    /// An empty one.
    pub fn new() -> Box<Tile> {
        Box::new(Tile([0; TILE]))
    }
}

/// Where the pieces of a group's members are: by place in the group, what is read and what is written.
pub trait Pieces {
    /// Where a member's piece before the move starts.
    fn from(&self, member: usize) -> *const u8;
    /// Where its piece after the move starts.
    fn to(&self, member: usize) -> *mut u8;
}

/// Does one share.
///
/// # Safety
/// The pieces have the elements that the collective was planned for; nobody else touches those of this share. What is
/// read and what is written are apart, but for an all_reduce, and a group of one, where they may be the same.
pub unsafe fn share(collective: &Collective, share: Share, pieces: &impl Pieces, tile: &mut Tile) {
    let part = &collective.parts[share.part];
    let (size, n) = (collective.dtype.bytes(), collective.members.len());
    let targets = match part.to {
        Who::All => 0..n,
        Who::One(r) => r..r + 1,
    };
    let range = share.start..share.end;
    match part.from {
        Who::One(source) => part.block.runs(range, TILE / size, |from, to, count| {
            for target in targets.clone() {
                // SAFETY: the caller's: the run lies in both pieces.
                unsafe {
                    let source = pieces.from(source).add(from * size);
                    put(source, pieces.to(target).add(to * size), count * size, collective.stream);
                }
            }
        }),
        Who::All if collective.reduce == Some(Reduce::Top) => {
            part.block.runs(range, collective.unit, |from, to, count| {
                // SAFETY: the caller's: a block lies in the pieces of all members, since no share cuts it.
                unsafe { merge(collective, pieces, [from, to], count, targets.clone(), tile) }
            });
        }
        Who::All if n <= MOST && !collective.stream => {
            part.block.runs(range, usize::MAX, |from, to, count| {
                let mut ends = [std::ptr::null_mut(); MOST];
                for (end, target) in ends.iter_mut().zip(targets.clone()) {
                    // SAFETY: the caller's: the run lies in the pieces of all members.
                    *end = unsafe { pieces.to(target).add(to * size) };
                }
                // SAFETY: the caller's; what is written of a piece was read before, if it is the same.
                unsafe { combine(collective, pieces, from, count, &ends[..targets.len()]) };
            })
        }
        Who::All => part.block.runs(range, TILE / size, |from, to, count| {
            // SAFETY: the caller's: the run lies in the pieces of all members; it is no longer than the tile, which is
            // aligned for every element type.
            unsafe {
                combine(collective, pieces, from, count, &[tile.0.as_mut_ptr()]);
                for target in targets.clone() {
                    put(tile.0.as_ptr(), pieces.to(target).add(to * size), count * size, collective.stream);
                }
            }
        }),
    }
    if collective.stream {
        fence();
    }
}

/// Merges one block of pairs of all members, of `count` numbers.
///
/// # Safety
/// Every member's piece has them at `at[0]` as f32, and every target's at `at[1]`.
unsafe fn merge(
    collective: &Collective,
    pieces: &impl Pieces,
    at: [usize; 2],
    count: usize,
    targets: Range<usize>,
    tile: &mut Tile,
) {
    let size = DType::F32.bytes();
    let mut large;
    let best: &mut [f32] = if count * size <= TILE {
        // SAFETY: the tile is aligned, large enough, and any bytes are numbers.
        unsafe { std::slice::from_raw_parts_mut(tile.0.as_mut_ptr().cast(), count) }
    } else {
        large = vec![0.0; count];
        &mut large
    };
    pairs::clear(best);
    for member in 0..collective.members.len() {
        // SAFETY: the caller's.
        let block =
            unsafe { std::slice::from_raw_parts(pieces.from(member).cast::<f32>().add(at[0]), count) };
        pairs::merge(best, block);
    }
    for target in targets {
        // SAFETY: the caller's.
        unsafe {
            let to = pieces.to(target).add(at[1] * size);
            put(best.as_ptr().cast(), to, count * size, collective.stream);
        }
    }
}

/// Copies bytes. They may overlap, unless streamed.
///
/// # Safety
/// Both places have that many bytes.
unsafe fn put(from: *const u8, to: *mut u8, bytes: usize, stream: bool) {
    #[cfg(target_arch = "x86_64")]
    if stream && bytes >= 256 {
        // SAFETY: the caller's; every x86-64 has SSE2.
        return unsafe { streamed(from, to, bytes) };
    }
    let _ = stream;
    // SAFETY: the caller's.
    unsafe { std::ptr::copy(from, to, bytes) }
}

/// Copies bytes past the caches. They do not overlap.
///
/// # Safety
/// Both places have that many bytes, at least 64.
#[cfg(target_arch = "x86_64")]
unsafe fn streamed(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let head = to.align_offset(64);
    let lines = (bytes - head) / 64;
    // SAFETY: the caller's; `head` is at most 63, and from there the target is aligned.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let (source, target) = (from.add(head).cast::<__m128i>(), to.add(head).cast::<__m128i>());
        for i in 0..lines {
            let (a, b) = (source.add(4 * i), target.add(4 * i));
            let (w, x) = (_mm_loadu_si128(a), _mm_loadu_si128(a.add(1)));
            let (y, z) = (_mm_loadu_si128(a.add(2)), _mm_loadu_si128(a.add(3)));
            _mm_stream_si128(b, w);
            _mm_stream_si128(b.add(1), x);
            _mm_stream_si128(b.add(2), y);
            _mm_stream_si128(b.add(3), z);
        }
        let done = head + 64 * lines;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
    }
}

/// Makes streamed writes visible before what follows.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// An element type that can be combined.
trait Number: Copy {
    /// What it is combined in.
    type Wide: Copy;
    fn wide(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn larger(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($type:ty, $wide:ty, $up:expr, $down:expr) => {
        impl Number for $type {
            type Wide = $wide;
            #[inline(always)]
            fn wide(self) -> $wide {
                $up(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $type {
                $down(wide)
            }
            #[inline(always)]
            fn sum(a: $wide, b: $wide) -> $wide {
                a + b
            }
            #[inline(always)]
            fn larger(a: $wide, b: $wide) -> $wide {
                if a.is_nan() || a > b { a } else { b }
            }
        }
    };
}

macro_rules! integer {
    ($type:ty, $sum:expr) => {
        impl Number for $type {
            type Wide = $type;
            #[inline(always)]
            fn wide(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(wide: $type) -> $type {
                wide
            }
            #[inline(always)]
            fn sum(a: $type, b: $type) -> $type {
                $sum(a, b)
            }
            #[inline(always)]
            fn larger(a: $type, b: $type) -> $type {
                a.max(b)
            }
        }
    };
}

float!(f64, f64, |x| x, |x| x);
float!(f32, f32, |x| x, |x| x);
float!(f16, f32, f16::to_f32, f16::from_f32);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);
integer!(i64, i64::wrapping_add);
integer!(i32, i32::wrapping_add);
integer!(u32, u32::wrapping_add);
// A truth value: of several, whether one is true.
integer!(u8, |a: u8, b: u8| a | b);

/// How many elements are held in registers at a time.
const STRIP: usize = 128;

/// Combines `count` elements of all members from `at` on, to each of these places.
///
/// # Safety
/// Every member's piece has them, and every place has room for them, aligned. A place may be where a member's are.
unsafe fn combine(
    collective: &Collective,
    pieces: &impl Pieces,
    at: usize,
    count: usize,
    places: &[*mut u8],
) {
    let n = collective.members.len();
    let max = collective.reduce == Some(Reduce::Max);
    macro_rules! each {
        ($type:ty) => {
            // SAFETY: the caller's.
            unsafe { dispatched::<$type>(pieces, n, at, count, places, max) }
        };
    }
    match collective.dtype {
        DType::F64 => each!(f64),
        DType::F32 => each!(f32),
        DType::F16 => each!(f16),
        DType::BF16 => each!(bf16),
        DType::I64 => each!(i64),
        DType::I32 => each!(i32),
        DType::U32 => each!(u32),
        DType::Bool => each!(u8),
    }
}

/// [`strips`] with the widest vectors that the machine has.
///
/// # Safety
/// As of [`combine`].
unsafe fn dispatched<T: Number>(
    pieces: &impl Pieces,
    n: usize,
    at: usize,
    count: usize,
    places: &[*mut u8],
    max: bool,
) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            // SAFETY: the caller's; the machine has AVX-512.
            return unsafe { with_avx512::<T>(pieces, n, at, count, places, max) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the caller's; the machine has AVX2.
            return unsafe { with_avx2::<T>(pieces, n, at, count, places, max) };
        }
    }
    // SAFETY: the caller's.
    unsafe { strips::<T>(pieces, n, at, count, places, max) }
}

/// [`strips`], compiled for the machines that have some features.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $features:literal) => {
        /// # Safety
        /// As of [`combine`]; the machine has the features.
        #[target_feature(enable = $features)]
        unsafe fn $name<T: Number>(
            pieces: &impl Pieces,
            n: usize,
            at: usize,
            count: usize,
            places: &[*mut u8],
            max: bool,
        ) {
            // SAFETY: the caller's.
            unsafe { strips::<T>(pieces, n, at, count, places, max) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
compiled_for!(with_avx512, "avx512f,avx512bw,avx512vl,avx512dq");
#[cfg(target_arch = "x86_64")]
compiled_for!(with_avx2, "avx2");

/// # Safety
/// As of [`combine`].
#[inline(always)]
unsafe fn strips<T: Number>(
    pieces: &impl Pieces,
    n: usize,
    at: usize,
    count: usize,
    places: &[*mut u8],
    max: bool,
) {
    let source = |member: usize| {
        // SAFETY: the caller's: inside the member's piece.
        unsafe { pieces.from(member).cast::<T>().add(at) }
    };
    let whole = count / STRIP * STRIP;
    for i in (0..whole).step_by(STRIP) {
        // SAFETY: the caller's: `i + STRIP` is at most `count`.
        unsafe {
            let first = source(0).add(i);
            let mut strip: [T::Wide; STRIP] = std::array::from_fn(|j| (*first.add(j)).wide());
            for member in 1..n {
                let next = source(member).add(i);
                if max {
                    strip = std::array::from_fn(|j| T::larger(strip[j], (*next.add(j)).wide()));
                } else {
                    strip = std::array::from_fn(|j| T::sum(strip[j], (*next.add(j)).wide()));
                }
            }
            let strip: [T; STRIP] = strip.map(T::narrow);
            for place in places {
                place.cast::<T>().add(i).cast::<[T; STRIP]>().write(strip);
            }
        }
    }
    for i in whole..count {
        // SAFETY: the caller's: `i` is below `count`.
        unsafe {
            let mut x = (*source(0).add(i)).wide();
            for member in 1..n {
                let next = (*source(member).add(i)).wide();
                x = if max { T::larger(x, next) } else { T::sum(x, next) };
            }
            for place in places {
                *place.cast::<T>().add(i) = T::narrow(x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::{Axis, Mesh, Move};

    struct Vectors<T>(Vec<Vec<T>>);

    impl<T> Pieces for Vectors<T> {
        fn from(&self, member: usize) -> *const u8 {
            self.0[member].as_ptr().cast()
        }
        fn to(&self, member: usize) -> *mut u8 {
            self.0[member].as_ptr().cast_mut().cast()
        }
    }

    fn all_reduce<T: Clone>(dtype: DType, reduce: Reduce, pieces: Vec<Vec<T>>) -> Vec<T> {
        let region = 0..pieces[0].len();
        all_reduce_of(dtype, reduce, std::slice::from_ref(&region), pieces)
    }

    fn all_reduce_of<T: Clone>(
        dtype: DType,
        reduce: Reduce,
        region: &[Range<usize>],
        pieces: Vec<Vec<T>>,
    ) -> Vec<T> {
        let step = Move::AllReduce { axes: vec![Axis(0)], reduce };
        let regions = vec![region.to_vec(); pieces.len()];
        let members: Vec<usize> = (0..pieces.len()).collect();
        let mesh = Mesh::parse(&format!("a={}", pieces.len())).unwrap();
        let mut c = Collective::new(&step, &mesh, &members, dtype, &regions, &regions, 1000);
        // What is streamed goes through the tile, other results straight to all members: the same bits.
        let all = [true, false].map(|stream| {
            c.stream = stream;
            let mut pieces = Vectors(pieces.clone());
            for part in c.shares.clone() {
                // SAFETY: the vectors are as long as the regions, and nobody else has them.
                unsafe { share(&c, part, &pieces, &mut Tile::new()) };
            }
            assert!(pieces.0.iter().all(|p| bits(p) == bits(&pieces.0[0])));
            pieces.0.swap_remove(pieces.0.len() - 1)
        });
        assert_eq!(bits(&all[0]), bits(&all[1]));
        let [_, straight] = all;
        straight
    }

    fn bits<T>(of: &[T]) -> &[u8] {
        // SAFETY: numbers are bytes without gaps.
        unsafe { std::slice::from_raw_parts(of.as_ptr().cast(), size_of_val(of)) }
    }

    #[test]
    fn every_type_is_combined_in_order() {
        let n = 70_001;
        let mixed = |r: usize| move |i: usize| ((i * 31 + r * 17) % 1009) as f32 * 0.37 - 180.0;
        let pieces: Vec<Vec<f32>> = (0..5).map(|r| (0..n).map(mixed(r)).collect()).collect();
        let sum = |i: usize| pieces[1..].iter().fold(pieces[0][i], |x, p| x + p[i]);
        let max = |i: usize| pieces.iter().fold(f32::NEG_INFINITY, |x, p| x.max(p[i]));
        assert_eq!(all_reduce(DType::F32, Reduce::Sum, pieces.clone()), (0..n).map(sum).collect::<Vec<_>>());
        assert_eq!(all_reduce(DType::F32, Reduce::Max, pieces.clone()), (0..n).map(max).collect::<Vec<_>>());
        let short: Vec<Vec<bf16>> =
            pieces.iter().map(|p| p.iter().map(|x| bf16::from_f32(*x)).collect()).collect();
        let once =
            |i: usize| bf16::from_f32(short[1..].iter().fold(short[0][i].to_f32(), |x, p| x + p[i].to_f32()));
        assert_eq!(all_reduce(DType::BF16, Reduce::Sum, short.clone()), (0..n).map(once).collect::<Vec<_>>());
        assert_eq!(
            all_reduce(DType::I32, Reduce::Sum, vec![vec![7i32, i32::MAX], vec![-9, 1]]),
            [-2, i32::MIN]
        );
        assert_eq!(all_reduce(DType::I64, Reduce::Max, vec![vec![7i64], vec![-9]]), [7]);
        assert_eq!(all_reduce(DType::Bool, Reduce::Sum, vec![vec![0u8, 0, 1], vec![0, 1, 1]]), [0, 1, 1]);
        assert_eq!(all_reduce(DType::F64, Reduce::Sum, vec![vec![1e-9f64], vec![1.0]]), [1.000000001]);
    }

    #[test]
    fn blocks_of_pairs_are_merged_whole() {
        // More than a share has, and a block that is larger than a tile.
        for (rows, k) in [(400, 3), (2, TILE / 8 + 5), (5, 1)] {
            let value = |r: usize, row: usize, i: usize| ((2 * k - i) / 2 + (row + r) % 2) as f32;
            let piece = |r: usize| -> Vec<f32> {
                let pair = |row: usize, i: usize| [value(r, row, i), (i * 3 + r) as f32];
                (0..rows).flat_map(|row| (0..k).flat_map(move |i| pair(row, i))).collect()
            };
            let pieces: Vec<Vec<f32>> = (0..3).map(piece).collect();
            let found = all_reduce_of(DType::F32, Reduce::Top, &[0..rows, 0..k, 0..2], pieces.clone());
            for row in 0..rows {
                let block = |p: &Vec<f32>| p[row * 2 * k..(row + 1) * 2 * k].to_vec();
                let all: Vec<f32> = pieces.iter().flat_map(block).collect();
                let mut all: Vec<[f32; 2]> = all.chunks(2).map(|p| [p[0], p[1]]).collect();
                all.sort_by(|a, b| b[0].total_cmp(&a[0]).then(a[1].total_cmp(&b[1])));
                assert_eq!(block(&found), all[..k].concat(), "row {row}");
            }
        }
    }

    #[test]
    fn not_a_number_wins() {
        let nan = f32::NAN;
        let out = all_reduce(DType::F32, Reduce::Max, vec![vec![nan, 1.0], vec![1.0, nan]]);
        assert!(out[0].is_nan() && out[1].is_nan());
    }
}
