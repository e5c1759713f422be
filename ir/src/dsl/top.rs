//! The largest along a dimension, and where they are: pairs, and the values and indices of pairs.

use super::{Model, Tensor};
use crate::{DType, Op};

/// The dimension of a pair: the value at 0, the index at 1.
const PAIR: &str = "two";

/// The dimension of the one pair of [`Model::argmax`].
const BEST: &str = "best";

impl Model {
    /// The largest along `over`, in descending order along the declared dimension `k`, as pairs of a value and its index:
    /// `b v` gives `b k two`, in f32. See [`Op::TopK`] for ties and what is absent. No gradient flows through it.
    #[track_caller]
    pub fn top_k(&mut self, x: &Tensor, over: &str, k: &str) -> Tensor {
        if !x.dims.iter().any(|d| &**d == over) {
            self.wrong(format!("the tensor [{}] has no dimension {over} to search", x.dims.join(" ")));
        }
        self.dim(PAIR, 2);
        let mut dims: Vec<&str> = x.dims.iter().map(|d| &**d).filter(|d| *d != over).collect();
        dims.extend([k, PAIR]);
        self.push(Op::TopK, DType::F32, &[x], &dims.join(" "))
    }

    /// The values of pairs: `b k two` gives `b k`.
    #[track_caller]
    pub fn top_values(&mut self, pairs: &Tensor) -> Tensor {
        self.half(pairs, 0.0)
    }

    /// The indices of pairs: `b k two` gives `b k`, in i32. The index of an absent pair is the least i32.
    #[track_caller]
    pub fn top_indices(&mut self, pairs: &Tensor) -> Tensor {
        let indices = self.half(pairs, 1.0);
        self.cast(&indices, DType::I32)
    }

    /// The index of the largest along `over`, of equal ones the lowest, in i32: `b v` gives `b`.
    #[track_caller]
    pub fn argmax(&mut self, x: &Tensor, over: &str) -> Tensor {
        self.dim(BEST, 1);
        let pairs = self.top_k(x, over, BEST);
        let indices = self.half(&pairs, 1.0);
        let rest: Vec<&str> = indices.dims.iter().map(|d| &**d).filter(|d| *d != BEST).collect();
        let rest = rest.join(" ");
        let index = self.einsum(&rest, &[&indices]);
        self.cast(&index, DType::I32)
    }

    #[track_caller]
    fn half(&mut self, pairs: &Tensor, which: f64) -> Tensor {
        let dims: Vec<&str> = pairs.dims.iter().map(|d| &**d).filter(|d| *d != PAIR).collect();
        let dims = dims.join(" ");
        let which = self.constant(which, DType::I32);
        self.gather(&dims, pairs, PAIR, &which)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::verify;

    #[test]
    fn pairs_are_taken_apart() {
        let mut m = Model::new();
        for (name, size) in [("b", 2), ("v", 100), ("k", 4)] {
            m.dim(name, size);
        }
        let x = m.input("x", DType::F32, "b v");
        let pairs = m.top_k(&x, "v", "k");
        assert_eq!(pairs.dims.join(" "), "b k two");
        let values = m.top_values(&pairs);
        let indices = m.top_indices(&pairs);
        let best = m.argmax(&x, "v");
        assert_eq!((values.dims.join(" "), indices.dims.join(" ")), ("b k".into(), "b k".into()));
        assert_eq!(best.dims.join(" "), "b");
        let graph = m.finish().unwrap();
        assert_eq!(verify(&graph), Ok(()));
        assert_eq!(graph.ty(best.value).dtype, DType::I32);
    }

    #[test]
    fn only_what_is_there_is_searched() {
        let mut m = Model::new();
        m.dim("b", 2);
        m.dim("k", 1);
        let x = m.input("x", DType::F32, "b");
        m.top_k(&x, "v", "k");
        let errors = m.finish().unwrap_err();
        assert_eq!(errors[0].message, "the tensor [b] has no dimension v to search");
    }
}
