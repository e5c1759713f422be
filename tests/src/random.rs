//! Random numbers for tests: a seed gives the same ones everywhere, so a failure names its seed and can be run again,
//! as in `MESHC_SEED=17 MESHC_CASES=1 cargo test`.

/// A stream of random numbers (Steele et al., "Fast splittable pseudorandom number generators": splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0xd134_2543_de82_ef95));
        random.bits();
        random
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// From `low` to `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Of both signs, from -2 to 2: what holds for numbers of one sign only must not pass.
    pub fn number(&mut self) -> f64 {
        self.between(-2.0, 2.0)
    }

    /// In another order.
    pub fn shuffled<T>(&mut self, mut of: Vec<T>) -> Vec<T> {
        for i in (1..of.len()).rev() {
            of.swap(i, self.below(i + 1));
        }
        of
    }
}

/// The seeds of a test: as many as `MESHC_CASES` says, else `normal`, from `MESHC_SEED` or 0 on.
pub fn seeds(normal: u64) -> std::ops::Range<u64> {
    seeds_by("MESHC_CASES", normal)
}

/// The same, as many as another variable says.
pub fn seeds_by(variable: &str, normal: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let first = number("MESHC_SEED").unwrap_or(0);
    first..first + number(variable).unwrap_or(normal)
}
