//! The numbers of a random op: uniform in [0, 1), a function of seed, name of the op, step, row, position and inner index.
//!
//! The seed and the name give a key; the counter is (inner / 4, position, row, step), each of 32 bits, and word
//! `inner % 4` of what Philox makes of both gives the number. Every way of running an op draws from here.

use ir::Draw;

use crate::data::random::{philox, stream_of, words};

/// How many blocks are computed side by side.
const WIDE: usize = 16;

/// The key of a draw.
///
/// It is of the last block of the stream of the name, which no parameter's first weights are so large as to reach.
pub fn key(draw: &Draw) -> [u32; 2] {
    let [a, b, ..] = words(draw.seed, stream_of(&draw.name), u64::MAX);
    [a, b]
}

/// A counter from the operands of the op, in their order: row, position, step. They count modulo 2^32.
pub fn counter(operands: [f64; 3]) -> [u32; 3] {
    operands.map(|x| x as i64 as u32)
}

/// The number at a counter and an inner index.
pub fn number(key: [u32; 2], [row, position, step]: [u32; 3], inner: u32) -> f32 {
    unit(philox([inner / 4, position, row, step], key)[(inner % 4) as usize])
}

/// The upper 24 bits, as a multiple of 2^-24.
#[inline(always)]
fn unit(word: u32) -> f32 {
    // As a signed number it is one instruction for all lanes.
    (word >> 8) as i32 as f32 * (1.0 / (1 << 24) as f32)
}

/// The numbers at a counter and the inner indices `first ..`, one a lane.
#[inline(always)]
pub fn lanes(to: &mut [f32], key: [u32; 2], counter: [u32; 3], first: u32) {
    let mut first = first;
    let mut to = to;
    while to.len() > 4 {
        let mut four = [[0.0; 4]; WIDE];
        blocks(&mut four, key, counter, first / 4);
        let skip = (first % 4) as usize;
        let n = to.len().min(4 * WIDE - skip);
        let (these, rest) = to.split_at_mut(n);
        these.copy_from_slice(&four.as_flattened()[skip..skip + n]);
        first = first.wrapping_add(n as u32);
        to = rest;
    }
    for (i, x) in to.iter_mut().enumerate() {
        *x = number(key, counter, first.wrapping_add(i as u32));
    }
}

/// Philox as in [`philox`], on many blocks at once.
#[inline(always)]
fn blocks(to: &mut [[f32; 4]; WIDE], mut key: [u32; 2], [row, position, step]: [u32; 3], first: u32) {
    let mut c0: [u32; WIDE] = std::array::from_fn(|i| first.wrapping_add(i as u32));
    let (mut c1, mut c2, mut c3) = ([position; WIDE], [row; WIDE], [step; WIDE]);
    for _ in 0..10 {
        for i in 0..WIDE {
            let left = u64::from(c0[i]) * 0xD251_1F53;
            let right = u64::from(c2[i]) * 0xCD9E_8D57;
            c0[i] = (right >> 32) as u32 ^ c1[i] ^ key[0];
            c1[i] = right as u32;
            c2[i] = (left >> 32) as u32 ^ c3[i] ^ key[1];
            c3[i] = left as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    for (i, four) in to.iter_mut().enumerate() {
        *four = [unit(c0[i]), unit(c1[i]), unit(c2[i]), unit(c3[i])];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(name: &str, seed: u64) -> Draw {
        Draw { name: name.into(), seed }
    }

    /// So that nobody changes them unawares: a run that goes on from a checkpoint draws what it would have drawn. The
    /// bits are Philox's, which has known answers of its own.
    #[test]
    fn the_numbers_are_fixed() {
        let key = key(&draw("embd", 7));
        let block =
            philox([u32::MAX, u32::MAX, stream_of("embd") as u32, (stream_of("embd") >> 32) as u32], [7, 0]);
        assert_eq!(key, [block[0], block[1]]);
        let words = philox([3, 5, 11, 2], key);
        for (i, word) in words.into_iter().enumerate() {
            let want = f64::from(word >> 8) / f64::from(1 << 24);
            assert_eq!(f64::from(number(key, [11, 5, 2], 12 + i as u32)), want);
        }
        let first: Vec<u32> = (0..4).map(|i| (number(key, [0, 0, 0], i) * 16777216.0) as u32).collect();
        assert_eq!(first, FIRST);
    }

    /// The first of seed 7 and `embd`, in units of 2^-24.
    const FIRST: [u32; 4] = [1236080, 1412204, 2274243, 8668220];

    #[test]
    fn lanes_are_the_numbers_one_by_one() {
        let key = key(&draw("x", 1));
        for first in [0, 1, 2, 3, 4, 63, 64, 1_000_001, u32::MAX - 70] {
            for n in [0, 1, 3, 4, 5, 60, 61, 64, 65, 130] {
                if first as u64 + n as u64 > u64::from(u32::MAX) {
                    continue;
                }
                let mut found = vec![0.0; n];
                lanes(&mut found, key, [9, 8, 7], first);
                let want: Vec<f32> = (0..n as u32).map(|i| number(key, [9, 8, 7], first + i)).collect();
                assert_eq!(found, want, "{n} from {first}");
            }
        }
    }

    #[test]
    fn each_part_of_the_counter_counts() {
        let base = (draw("x", 1), [1.0, 2.0, 3.0], 4);
        let number = |(draw, at, inner): (Draw, [f64; 3], u32)| number(key(&draw), counter(at), inner);
        let others = [
            (draw("y", 1), base.1, 4),
            (draw("x", 2), base.1, 4),
            (draw("x", 1 << 32), base.1, 4),
            (draw("x", 1), [2.0, 2.0, 3.0], 4),
            (draw("x", 1), [1.0, 3.0, 3.0], 4),
            (draw("x", 1), [1.0, 2.0, 4.0], 4),
            (draw("x", 1), [1.0, 2.0, 4294967295.0], 4),
            (draw("x", 1), [-1.0, 2.0, 3.0], 4),
            (draw("x", 1), base.1, 5),
            (draw("x", 1), base.1, 4 + (1 << 31)),
        ];
        let mut all: Vec<f32> = others.into_iter().chain([base]).map(number).collect();
        all.sort_by(f32::total_cmp);
        all.dedup();
        assert_eq!(all.len(), 11);
    }

    #[test]
    fn moments() {
        let key = key(&draw("x", 3));
        let n = 100_000;
        let all: Vec<f64> =
            (0..n).map(|i| f64::from(number(key, [i % 7, i / 7 % 11, i / 77], i % 5))).collect();
        assert!(all.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = |f: &dyn Fn(f64) -> f64| all.iter().map(|x| f(*x)).sum::<f64>() / f64::from(n);
        for (what, is, expected) in [("mean", mean(&|x| x), 0.5), ("square", mean(&|x| x * x), 1.0 / 3.0)] {
            assert!((is - expected).abs() < 0.005, "{what}: {is}, not {expected}");
        }
    }
}
