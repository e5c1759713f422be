//! What a program keeps from step to step, what it is fed, and how a parameter lies in files.

use crate::{DType, Name};

/// A tensor of the batch: of a micro-batch, fed anew at each.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Its name.
    pub name: Name,
    /// Its element type.
    pub dtype: DType,
    /// Name and size of each dimension.
    pub dims: Vec<(Name, usize)>,
}

/// A tensor that is read at the start of a step and assigned in place.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Its name, unique in the graph.
    pub name: Name,
    /// Its element type.
    pub dtype: DType,
    /// Name and size of each dimension.
    pub dims: Vec<(Name, usize)>,
    /// What it is for.
    pub role: Role,
    /// What it holds before the first step, unless read from a file.
    pub init: Init,
    /// Where it lies in files: one window, or several stacked along dimension 0. Empty if it is in no file.
    pub views: Vec<View>,
}

impl Role {
    /// The parameter that the optimizer keeps this for.
    pub fn of(&self) -> Option<&Name> {
        match self {
            Role::Moment(of) | Role::Master(of) => Some(of),
            Role::Parameter { .. } | Role::Step => None,
        }
    }
}

impl State {
    /// The size of each dimension.
    pub fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(|(_, n)| *n).collect()
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.dims.iter().map(|(_, n)| n).product()
    }
}

/// What a state is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// A parameter of the model.
    Parameter {
        /// Whether the optimizer changes it.
        trainable: bool,
        /// Whether weight decay shrinks it.
        decays: bool,
    },
    /// The f32 parameter of which a bf16 parameter is what is left.
    Master(Name),
    /// A running mean that the optimizer keeps of a parameter's gradient.
    Moment(Name),
    /// The number of the step, counted from 0.
    Step,
}

/// What a state holds at first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// 0.
    Zeros,
    /// 1.
    Ones,
    /// Normal with mean 0 and this standard deviation, by counter: seed, name, global index of the element.
    Normal(f64),
}

/// A window into a row-major tensor of a file: what reshapes, transposes and slices of it come to.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// The tensor's name in the file.
    pub file: Name,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// Where the window starts, in elements.
    pub offset: usize,
    /// Size and stride, in elements, of each dimension of the window.
    pub dims: Vec<(usize, usize)>,
}

impl View {
    /// The whole tensor, in its own shape.
    pub fn whole(file: &str, shape: &[usize]) -> View {
        View { file: file.into(), shape: shape.to_vec(), offset: 0, dims: row_major(shape) }
    }

    /// The same elements in another shape. Only of a window that is still dense.
    pub fn reshape(self, shape: &[usize]) -> Result<View, String> {
        let sizes: Vec<usize> = self.dims.iter().map(|(n, _)| *n).collect();
        if self.dims != row_major(&sizes) || sizes.iter().product::<usize>() != shape.iter().product() {
            return Err(format!("`{}` as {sizes:?} cannot be reshaped to {shape:?}", self.file));
        }
        Ok(View { dims: row_major(shape), ..self })
    }

    /// The dimensions in another order.
    pub fn transpose(self, order: &[usize]) -> View {
        let dims = order.iter().map(|i| self.dims[*i]).collect();
        View { dims, ..self }
    }

    /// Only `start..end` of a dimension.
    pub fn slice(mut self, dim: usize, start: usize, end: usize) -> View {
        self.offset += start * self.dims[dim].1;
        self.dims[dim].0 = end - start;
        self
    }
}

fn row_major(shape: &[usize]) -> Vec<(usize, usize)> {
    let mut dims: Vec<(usize, usize)> = shape.iter().map(|n| (*n, 1)).collect();
    for i in (1..dims.len()).rev() {
        dims[i - 1].1 = dims[i].0 * dims[i].1;
    }
    dims
}

/// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization") with clipping by the global norm, and a rate
/// that warms up linearly and then falls as a cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The largest rate.
    pub lr: f64,
    /// The rate at the end.
    pub min_lr: f64,
    /// Steps of warm-up.
    pub warmup: usize,
    /// Steps in all.
    pub steps: usize,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the mean of squares.
    pub eps: f64,
    /// Weight decay, of states that decay.
    pub weight_decay: f64,
    /// The largest global norm of the gradient; none: no clipping.
    pub clip: Option<f64>,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            lr: 1e-3,
            min_lr: 0.0,
            warmup: 0,
            steps: 1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            clip: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_is_a_strided_window() {
        let v =
            View::whole("c_attn", &[4, 6]).reshape(&[4, 3, 2]).unwrap().slice(1, 1, 2).transpose(&[1, 2, 0]);
        assert_eq!((v.offset, v.dims.clone()), (2, vec![(1, 2), (2, 1), (4, 6)]));
        assert!(v.reshape(&[8]).is_err());
        assert!(View::whole("x", &[4]).reshape(&[5]).is_err());
    }
}
