//! Pairs of a value and its index, as [`ir::Op::TopK`] makes them: their order, and the best of many.
//!
//! The larger value is first, NaN before any number, of equal ones the lower index; an absent pair, (-inf, -inf), is
//! last.

use crate::tensor::Real;

/// An absent pair, twice.
const ABSENT: f64 = f64::NEG_INFINITY;

/// Whether pair `a` comes before pair `b`.
#[inline]
pub fn before<T: Real>(a: [T; 2], b: [T; 2]) -> bool {
    let (value, index) = ([a[0].get(), b[0].get()], [a[1].get(), b[1].get()]);
    if index[0] == ABSENT || index[1] == ABSENT {
        return index[0] != ABSENT;
    }
    match (value[0].is_nan(), value[1].is_nan()) {
        (true, false) => true,
        (false, true) => false,
        (true, true) => index[0] < index[1],
        (false, false) => value[0] > value[1] || value[0] == value[1] && index[0] < index[1],
    }
}

/// Makes all pairs absent.
pub fn clear<T: Real>(best: &mut [T]) {
    best.fill(T::of(ABSENT));
}

/// Takes a pair into a block of the best so far, which is in order; the last one goes. Whether it was taken.
#[inline]
pub fn insert<T: Real>(best: &mut [T], pair: [T; 2]) -> bool {
    let n = best.len() / 2;
    let last = n.checked_sub(1).map(|i| [best[2 * i], best[2 * i + 1]]);
    if last.is_none_or(|last| !before(pair, last)) {
        return false;
    }
    let mut at = n - 1;
    while at > 0 && before(pair, [best[2 * at - 2], best[2 * at - 1]]) {
        at -= 1;
    }
    best.copy_within(2 * at..2 * n - 2, 2 * at + 2);
    best[2 * at..2 * at + 2].copy_from_slice(&pair);
    true
}

/// Takes all pairs of a block into the best so far.
pub fn merge<T: Real>(best: &mut [T], block: &[T]) {
    for pair in block.chunks_exact(2) {
        insert(best, [pair[0], pair[1]]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(k: usize, pairs: &[[f64; 2]]) -> Vec<f64> {
        let mut best = vec![0.0; 2 * k];
        clear(&mut best);
        pairs.iter().for_each(|p| _ = insert(&mut best, *p));
        best
    }

    #[test]
    fn of_equal_values_the_lower_index_is_first() {
        let found = best(3, &[[1.0, 5.0], [2.0, 9.0], [1.0, 3.0], [2.0, 4.0], [0.0, 0.0]]);
        assert_eq!(found, [2.0, 4.0, 2.0, 9.0, 1.0, 3.0]);
        assert_eq!(best(2, &[[-0.0, 0.0], [0.0, 1.0]]), [-0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn absent_pairs_lose_to_the_least_value() {
        let none = f64::NEG_INFINITY;
        assert_eq!(best(2, &[[none, none], [none, 7.0]]), [none, 7.0, none, none]);
        assert!(best(0, &[[1.0, 1.0]]).is_empty());
    }

    #[test]
    fn not_a_number_is_the_largest() {
        let found = best(3, &[[f64::INFINITY, 0.0], [f64::NAN, 8.0], [f64::NAN, 2.0]]);
        assert!(found[0].is_nan() && found[2].is_nan());
        assert_eq!([found[1], found[3], found[4]], [2.0, 8.0, f64::INFINITY]);
    }
}
