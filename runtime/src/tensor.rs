//! A dense row-major tensor, and cutting and joining it: what the slow programs work on.

use std::ops::Range;

use ir::{Mesh, Reduce, Sharding, extent};

use crate::pairs;

/// A number that the slow programs compute in.
pub trait Real: Copy + PartialEq + PartialOrd + std::fmt::Debug + Send + Sync + 'static {
    /// From the nearest f64.
    fn of(x: f64) -> Self;
    /// As f64; exact.
    fn get(self) -> f64;
}

impl Real for f64 {
    fn of(x: f64) -> f64 {
        x
    }
    fn get(self) -> f64 {
        self
    }
}

impl Real for f32 {
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn get(self) -> f64 {
        f64::from(self)
    }
}

/// A dense row-major tensor. Integers and truth values are numbers in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    /// The size of each dimension.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<T>,
}

impl<T: Real> Tensor<T> {
    /// The same number everywhere.
    pub fn full(shape: &[usize], value: f64) -> Tensor<T> {
        Tensor { shape: shape.to_vec(), data: vec![T::of(value); shape.iter().product()] }
    }

    /// Each element from its row-major index.
    pub fn from_fn(shape: &[usize], f: impl FnMut(usize) -> f64) -> Tensor<T> {
        Tensor { shape: shape.to_vec(), data: (0..shape.iter().product()).map(f).map(T::of).collect() }
    }

    /// A range of one dimension.
    pub fn slice(&self, dim: usize, range: Range<usize>) -> Tensor<T> {
        let outer: usize = self.shape[..dim].iter().product();
        let inner: usize = self.shape[dim + 1..].iter().product();
        let n = self.shape[dim];
        let mut data = Vec::with_capacity(outer * inner * range.len());
        for o in 0..outer {
            data.extend_from_slice(&self.data[(o * n + range.start) * inner..(o * n + range.end) * inner]);
        }
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Tensor { shape, data }
    }

    /// Pieces joined along a dimension.
    pub fn join(parts: &[&Tensor<T>], dim: usize) -> Tensor<T> {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|p| p.shape[dim]).sum();
        let outer: usize = shape[..dim].iter().product();
        let mut data = Vec::with_capacity(shape.iter().product());
        for o in 0..outer {
            for part in parts {
                let n: usize = part.shape[dim..].iter().product();
                data.extend_from_slice(&part.data[o * n..(o + 1) * n]);
            }
        }
        Tensor { shape, data }
    }

    /// Tensors of one shape combined, in order: element by element, or block by block of pairs.
    pub fn combine(parts: &[&Tensor<T>], reduce: Reduce) -> Tensor<T> {
        let block: usize = match reduce {
            Reduce::Top => parts[0].shape.iter().rev().take(2).product(),
            Reduce::Sum | Reduce::Max => 1,
        };
        if block == 0 {
            return parts[0].clone();
        }
        let mut out = parts[0].clone();
        for part in &parts[1..] {
            for (a, b) in out.data.chunks_mut(block).zip(part.data.chunks(block)) {
                match reduce {
                    Reduce::Sum => a[0] = T::of(a[0].get() + b[0].get()),
                    Reduce::Max => a[0] = T::of(larger(a[0].get(), b[0].get())),
                    Reduce::Top => pairs::merge(a, b),
                }
            }
        }
        out
    }

    /// The piece of a whole tensor that the rank at `at` holds. Along a partial axis the first rank holds all of it
    /// and the others hold what changes nothing.
    pub fn piece(&self, sharding: &Sharding, mesh: &Mesh, at: &[usize]) -> Tensor<T> {
        let mut out = self.clone();
        for (dim, axes) in sharding.dims.iter().enumerate() {
            out = out.slice(dim, extent(self.shape[dim], axes, mesh, at));
        }
        if let Some((_, reduce)) = sharding.partial.iter().find(|(a, _)| at[a.index()] != 0) {
            out.data.fill(T::of(reduce.identity()));
        }
        out
    }

    /// The largest absolute difference, relative to 1 + the other's size; infinite if shapes differ or one is NaN.
    pub fn distance(&self, other: &Tensor<T>) -> f64 {
        if self.shape != other.shape {
            return f64::INFINITY;
        }
        self.data.iter().zip(&other.data).fold(0.0, |worst: f64, (a, b)| {
            let (a, b) = (a.get(), b.get());
            let d = if a == b { 0.0 } else { (a - b).abs() / (1.0 + b.abs()) };
            if d.is_nan() { f64::INFINITY } else { worst.max(d) }
        })
    }
}

/// The larger of two, NaN if one is.
pub fn larger(x: f64, y: f64) -> f64 {
    if x.is_nan() || x > y { x } else { y }
}
