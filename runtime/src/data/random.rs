//! Random numbers that are a function of a counter: no state, no order, the same on every mesh.
//!
//! A number depends on the seed, a stream and an index in the stream, and on nothing else. First weights take
//! the hash of the parameter's name as the stream and the global row-major position of the element as the
//! index. What a random op draws is in `draw`. The bits come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC'11). Normal numbers go through the `ln`, `sin` and `cos` of f64, whose last bit may differ
//! between systems; the f32 that remains hardly ever does.

use crate::files::window::{Runs, Window, WindowError};
use std::f64::consts::TAU;
use std::ops::Range;

/// Philox4x32 with 10 rounds: 128 random bits for each counter and key.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = u64::from(counter[0]) * 0xD251_1F53;
        let right = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (right >> 32) as u32 ^ counter[1] ^ key[0],
            right as u32,
            (left >> 32) as u32 ^ counter[3] ^ key[1],
            left as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The 128 bits of a block of a stream.
pub(crate) fn words(seed: u64, stream: u64, block: u64) -> [u32; 4] {
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let ([a, b], [c, d]) = (halves(block), halves(stream));
    philox([a, b, c, d], halves(seed))
}

/// Uniform in [0, 1): the upper 24 bits of word `index % 4` of block `index / 4`.
pub fn uniform(seed: u64, stream: u64, index: u64) -> f32 {
    let word = words(seed, stream, index / 4)[(index % 4) as usize];
    (word >> 8) as f32 / (1 << 24) as f32
}

/// Uniform in `0..limit`, from 64 bits of block `index`; 0 for a limit of 0.
pub fn below(seed: u64, stream: u64, index: u64, limit: u64) -> u64 {
    let [low, high, ..] = words(seed, stream, index);
    let bits = u64::from(high) << 32 | u64::from(low);
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
}

/// Normal with mean 0 and deviation 1: number `index % 4` of block `index / 4`.
pub fn normal(seed: u64, stream: u64, index: u64) -> f32 {
    normals(seed, stream, index / 4)[(index % 4) as usize]
}

/// The four of a block, by Box and Muller: words 0 and 1 give the radius and the angle of the first two, 2
/// and 3 of the others.
fn normals(seed: u64, stream: u64, block: u64) -> [f32; 4] {
    let [a, b, c, d] = words(seed, stream, block);
    let pair = |radius: u32, angle: u32| {
        // In (0, 1], so that the logarithm is finite.
        let radius = ((f64::from(radius) + 1.0) / 2f64.powi(32)).ln();
        let (sin, cos) = (TAU * f64::from(angle) / 2f64.powi(32)).sin_cos();
        let radius = (-2.0 * radius).sqrt();
        [(radius * cos) as f32, (radius * sin) as f32]
    };
    let ([a, b], [c, d]) = (pair(a, b), pair(c, d));
    [a, b, c, d]
}

/// The stream of a parameter: the 64-bit FNV-1a hash of its name.
pub fn stream_of(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The piece `ranges` of a tensor of that shape, dense and row-major: normal numbers with mean 0 and
/// deviation `std`. Pieces of one tensor, however cut, join to the same whole.
pub fn fill_normal(
    seed: u64,
    name: &str,
    std: f32,
    shape: &[usize],
    ranges: &[Range<usize>],
    out: &mut [f32],
) -> Result<(), WindowError> {
    let stream = stream_of(name);
    let runs = Runs::of(&Window::whole(shape), ranges, usize::MAX, out.len())?;
    let mut rows = out.chunks_exact_mut(runs.len.max(1));
    runs.for_each(|at| {
        let mut last = None;
        for (i, value) in rows.next().unwrap_or_default().iter_mut().enumerate() {
            let index = (at + i * runs.stride) as u64;
            let block = match last {
                Some((number, block)) if number == index / 4 => block,
                Some(_) | None => normals(seed, stream, index / 4),
            };
            last = Some((index / 4, block));
            *value = std * block[(index % 4) as usize];
        }
    });
    Ok(())
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a piece of one dimension has one range
mod tests {
    use super::*;

    /// The known answers that the authors publish (`kat_vectors` of Random123).
    #[test]
    fn philox_known_answers() {
        let table = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ];
        for (counter, key, answer) in table {
            assert_eq!(philox(counter, key), answer);
        }
    }

    #[test]
    fn fnv_known_answers() {
        let table = [("", 0xcbf29ce484222325), ("a", 0xaf63dc4c8601ec8c), ("foobar", 0x85944171f73967e8)];
        for (name, hash) in table {
            assert_eq!(stream_of(name), hash);
        }
    }

    /// The first numbers, so that nobody changes them unawares: a checkpoint can be made again from its seed.
    #[test]
    fn the_recipe_is_fixed() {
        let bits = |index| philox([index, 0, 0, 0], [0, 0]).map(|word| (word >> 8) as f32 / 16777216.0);
        let expected: Vec<f32> = [bits(0), bits(1)].concat();
        assert_eq!((0..8).map(|i| uniform(0, 0, i)).collect::<Vec<_>>(), expected);
        assert_eq!(uniform(0, 0, 0), 0x6627e8 as f32 / 16777216.0);
        let radius = (-2.0 * ((0x6627e8d5u32 as f64 + 1.0) / 4294967296.0).ln()).sqrt();
        let angle = TAU * 0xe169c58du32 as f64 / 4294967296.0;
        assert_eq!(
            [normal(0, 0, 0), normal(0, 0, 1)],
            [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
        );
        assert_eq!(below(0, 0, 0, 1 << 32), 0xe169c58d);
        assert_eq!([below(0, 0, 0, 0), below(0, 0, 0, 1)], [0, 0]);
    }

    #[test]
    fn moments() {
        let n = 100_000;
        let mean = |f: &dyn Fn(u64) -> f64| (0..n).map(f).sum::<f64>() / n as f64;
        let table: [(&str, f64, f64); 6] = [
            ("uniform", mean(&|i| uniform(3, 5, i).into()), 0.5),
            ("its square", mean(&|i| f64::from(uniform(3, 5, i)).powi(2)), 1.0 / 3.0),
            ("normal", mean(&|i| normal(3, 5, i).into()), 0.0),
            ("its square", mean(&|i| f64::from(normal(3, 5, i)).powi(2)), 1.0),
            ("neighbours", mean(&|i| f64::from(normal(3, 5, i) * normal(3, 5, i + 1))), 0.0),
            ("streams", mean(&|i| f64::from(normal(3, 5, i) * normal(3, 6, i))), 0.0),
        ];
        for (what, is, expected) in table {
            assert!((is - expected).abs() < 0.015, "{what}: {is}, not {expected}");
        }
        assert!((0..n).all(|i| (0.0..1.0).contains(&uniform(3, 5, i))));
        assert!((0..n).all(|i| below(3, 5, i, 7) < 7));
    }

    #[test]
    fn pieces_join_to_the_whole() {
        let shape = [3, 5, 6];
        let mut whole = vec![0.0; 90];
        fill_normal(9, "wte", 0.02, &shape, &[0..3, 0..5, 0..6], &mut whole).unwrap();
        for (i, &value) in whole.iter().enumerate() {
            assert_eq!(value, 0.02 * normal(9, stream_of("wte"), i as u64));
        }
        for (cut, dim) in [(1, 0), (2, 1), (4, 1), (1, 2), (5, 2)] {
            for half in 0..2 {
                let mut ranges = [0..3, 0..5, 0..6];
                ranges[dim] = if half == 0 { 0..cut } else { cut..shape[dim] };
                let mut piece = vec![0.0; ranges.iter().map(Range::len).product()];
                fill_normal(9, "wte", 0.02, &shape, &ranges, &mut piece).unwrap();
                let mut values = piece.iter();
                for i in ranges[0].clone() {
                    for j in ranges[1].clone() {
                        for k in ranges[2].clone() {
                            assert_eq!(values.next(), Some(&whole[(i * 5 + j) * 6 + k]));
                        }
                    }
                }
            }
        }
        let short = fill_normal(9, "wte", 0.02, &[4], &[0..4], &mut [0.0; 3]).unwrap_err();
        assert_eq!(short.to_string(), "the piece is 3 elements, but 4 are needed");
    }
}
