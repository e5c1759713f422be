//! A whole tensor as the pieces of all ranks, and back: directly from the definition of a sharding, without moves.

use std::collections::BTreeMap;

use crate::random::Random;
use ir::{Axis, Mesh, Reduce, Sharding, extent};
use runtime::tensor::{Tensor, larger};

/// The pieces of all ranks. Along partial axes each rank holds a contribution of its own, of either sign.
pub fn spread(
    whole: &Tensor<f64>,
    sharding: &Sharding,
    mesh: &Mesh,
    random: &mut Random,
) -> Vec<Tensor<f64>> {
    if sharding.merges() {
        return spread_pairs(whole, sharding, mesh, random);
    }
    let (sums, maxes) = (partial(sharding, Reduce::Sum), partial(sharding, Reduce::Max));
    // By coordinate along the partial axes. Where both kinds occur one coordinate along the maxes is the largest for
    // every coordinate along the sums, so that the order in which they are combined does not matter.
    let (n, m) = (mesh.pieces(&sums), mesh.pieces(&maxes));
    let mut parts = vec![whole.clone(); n * m];
    for i in 0..whole.data.len() {
        let largest = random.below(m);
        let mut rest = whole.data[i];
        for s in 0..n {
            let mine = if s + 1 == n { rest } else { random.number() };
            rest -= mine;
            for l in 0..m {
                let less = if l == largest { 0.0 } else { random.between(0.0, 3.0) };
                parts[s * m + l].data[i] = mine - less;
            }
        }
    }
    let part = |at: &[usize]| &parts[place(&sums, mesh, at) * m + place(&maxes, mesh, at)];
    (0..mesh.ranks())
        .map(|rank| mesh.coordinate(rank))
        .map(|at| cut(part(&at), sharding, mesh, &at))
        .collect()
}

/// The piece of a contribution that the rank at `at` holds.
fn cut(part: &Tensor<f64>, sharding: &Sharding, mesh: &Mesh, at: &[usize]) -> Tensor<f64> {
    let dims = sharding.dims.iter().enumerate();
    dims.fold(part.clone(), |t, (dim, axes)| t.slice(dim, extent(part.shape[dim], axes, mesh, at)))
}

/// Blocks of pairs: each coordinate along the partial axes has some of the pairs of the whole, behind each block some
/// that are worse than all of the whole's, and the rest absent.
fn spread_pairs(
    whole: &Tensor<f64>,
    sharding: &Sharding,
    mesh: &Mesh,
    random: &mut Random,
) -> Vec<Tensor<f64>> {
    let axes = partial(sharding, Reduce::Top);
    let block: usize = whole.shape.iter().rev().take(2).product();
    let n = mesh.pieces(&axes);
    let mut parts = vec![Tensor::full(&whole.shape, Reduce::Top.identity()); n];
    for start in (0..whole.data.len()).step_by(block.max(1)) {
        let mut ends = vec![start; n];
        for pair in whole.data[start..start + block].chunks(2) {
            let r = random.below(n);
            parts[r].data[ends[r]..ends[r] + 2].copy_from_slice(pair);
            ends[r] += 2;
        }
        let full = whole.data[start + block - 1] != Reduce::Top.identity();
        for (part, end) in parts.iter_mut().zip(ends) {
            if full && end < start + block && random.below(2) == 0 {
                part.data[end..end + 2].copy_from_slice(&[-9.0, 900.0 + random.below(99) as f64]);
            }
        }
    }
    let at = (0..mesh.ranks()).map(|rank| mesh.coordinate(rank));
    at.map(|at| cut(&parts[place(&axes, mesh, &at)], sharding, mesh, &at)).collect()
}

/// A tensor of blocks of `k` pairs, in order: few values, some equal, and some of the last pairs absent.
pub fn pairs(outer: &[usize], k: usize, random: &mut Random) -> Tensor<f64> {
    let shape: Vec<usize> = outer.iter().copied().chain([k, 2]).collect();
    let mut whole = Tensor::full(&shape, Reduce::Top.identity());
    for block in whole.data.chunks_mut((2 * k).max(1)) {
        let mut all: Vec<(i64, usize)> = (0..k).map(|i| (-(random.below(3) as i64), i * 7 % 11)).collect();
        all.sort_unstable();
        all.truncate(k - random.below(2).min(k));
        for (to, (less, index)) in block.chunks_mut(2).zip(all) {
            to.copy_from_slice(&[-less as f64, index as f64]);
        }
    }
    whole
}

/// The whole tensor that pieces make up.
///
/// # Errors
/// If a piece has not the shape that the sharding gives it, or copies differ.
pub fn whole(
    pieces: &[Tensor<f64>],
    shape: &[usize],
    sharding: &Sharding,
    mesh: &Mesh,
) -> Result<Tensor<f64>, String> {
    // Pairs are merged as numbers are summed: whole tensors, one for each coordinate.
    let how = if sharding.merges() { Reduce::Top } else { Reduce::Sum };
    let sums = partial(sharding, how);
    let copied: Vec<Axis> = mesh.all().filter(|a| !sharding.axes().any(|b| *a == b)).collect();
    let mut copies: BTreeMap<usize, BTreeMap<usize, Tensor<f64>>> = BTreeMap::new();
    for (rank, piece) in pieces.iter().enumerate() {
        let at = mesh.coordinate(rank);
        let ranges: Vec<_> =
            shape.iter().zip(&sharding.dims).map(|(n, axes)| extent(*n, axes, mesh, &at)).collect();
        let needed: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
        if piece.shape != needed {
            let show = sharding.show(mesh);
            return Err(format!("rank {rank} holds {:?} where {show} gives {needed:?}", piece.shape));
        }
        let sums_of = copies.entry(place(&copied, mesh, &at)).or_default();
        let into = sums_of
            .entry(place(&sums, mesh, &at))
            .or_insert_with(|| Tensor::full(shape, Reduce::Max.identity()));
        for (i, x) in piece.data.iter().enumerate() {
            let mut rest = i;
            let (mut global, mut stride) = (0, 1);
            for (range, n) in ranges.iter().zip(shape).rev() {
                global += stride * (range.start + rest % range.len());
                rest /= range.len();
                stride *= n;
            }
            into.data[global] = larger(into.data[global], *x);
        }
    }
    let summed = copies.into_values().map(|parts| {
        let parts: Vec<&Tensor<f64>> = parts.values().collect();
        Tensor::combine(&parts, how)
    });
    let copies: Vec<Tensor<f64>> = summed.collect();
    match copies.iter().find(|c| c.distance(&copies[0]) > 1e-12) {
        None => Ok(copies[0].clone()),
        Some(_) => Err(format!("copies of {} differ", sharding.show(mesh))),
    }
}

fn partial(sharding: &Sharding, reduce: Reduce) -> Vec<Axis> {
    sharding.partial.iter().filter(|(_, r)| *r == reduce).map(|(a, _)| *a).collect()
}

/// The number of a coordinate along some axes.
fn place(axes: &[Axis], mesh: &Mesh, at: &[usize]) -> usize {
    axes.iter().fold(0, |n, a| n * mesh.size(*a) + at[a.index()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_are_spread_are_whole_again() {
        let mesh = Mesh::parse("a=2,b=3,c=2").unwrap();
        let mut random = Random::new(2);
        let tensor = pairs(&[4, 3], 3, &mut random);
        for text in ["[_, _, _, _] partial(top a)", "[c, _, _, _] partial(top a, top b)", "[a, b, _, c]"] {
            let sharding = Sharding::parse(text, &mesh).unwrap();
            let pieces = spread(&tensor, &sharding, &mesh, &mut random);
            let back = whole(&pieces, &tensor.shape, &sharding, &mesh).unwrap();
            assert_eq!(back, tensor, "{text}");
        }
    }

    #[test]
    fn what_is_spread_is_whole_again() {
        let mesh = Mesh::parse("a=2,b=3,c=2").unwrap();
        let mut random = Random::new(1);
        let tensor = Tensor::from_fn(&[4, 5], |_| random.number());
        for text in
            ["[_, _]", "[a.b, c]", "[b, _] partial(c)", "[_, a] partial(b, max c)", "[_, _] partial(a, b, c)"]
        {
            let sharding = Sharding::parse(text, &mesh).unwrap();
            let pieces = spread(&tensor, &sharding, &mesh, &mut random);
            let back = whole(&pieces, &tensor.shape, &sharding, &mesh).unwrap();
            assert!(back.distance(&tensor) < 1e-12, "{text}");
        }
    }
}
