//! Random numbers, and the data that they follow from: the row of the global batch, the position in the sequence, and the
//! number of the step.

use super::{Model, Tensor};
use crate::state::{Init, Role, State};
use crate::{DType, Draw, Name, Op, Value};

/// The dimensions of a batch and of a sequence.
const ROWS: &str = "b";
const SEQUENCE: &str = "s";

impl Model {
    /// Uniform numbers in [0, 1) in f32, the same on every mesh and for every number of micro-batches: see [`Op::Random`].
    /// `dims` has the dimension `b` of the batch; without `s` all numbers of a row are at position 0. They follow from the
    /// inputs `row` (`b`) and `position` (`b s`) and the state `step`, which are declared if they are not there.
    ///
    /// Two calls with one name and the same dimensions give the same numbers.
    #[track_caller]
    pub fn random(&mut self, dims: &str, name: &str) -> Tensor {
        let has = |dim: &str| dims.split_whitespace().any(|d| d == dim);
        if !has(ROWS) {
            self.wrong(format!(
                "random numbers `{name}` [{dims}] lack dimension {ROWS}: they follow from the row of the batch"
            ));
        }
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
            self.wrong(format!("`{name}` is no name: letters, digits, `_`, `.` and `-` make one"));
        }
        let row = self.row();
        let position = if has(SEQUENCE) { self.position() } else { self.constant(0.0, DType::I32) };
        let step = self.step();
        let draw = Draw { name: name.into(), seed: 0 };
        self.push(Op::Random(draw), DType::F32, &[&row, &position, &step], dims)
    }

    /// The input `row` (`b`): which row of the global batch each is.
    #[track_caller]
    pub fn row(&mut self) -> Tensor {
        self.input_once("row", ROWS)
    }

    /// The input `position` (`b s`): where in its sequence each token stands.
    #[track_caller]
    pub fn position(&mut self) -> Tensor {
        self.input_once("position", "b s")
    }

    /// The state `step`: how many steps are done.
    #[track_caller]
    pub fn step(&mut self) -> Tensor {
        if let Some(value) = self.value_of(&Op::State("step".into())) {
            return Tensor { value, dims: Vec::new() };
        }
        let (name, dtype, role, init) = ("step".into(), DType::I32, Role::Step, Init::Zeros);
        self.outside(|m| m.state(State { name, dtype, dims: Vec::new(), role, init, views: Vec::new() }))
    }

    /// An input of integers, declared if it is not there.
    #[track_caller]
    fn input_once(&mut self, name: &str, dims: &str) -> Tensor {
        let Some(value) = self.value_of(&Op::Input(name.into())) else {
            return self.outside(|m| m.input(name, DType::I32, dims));
        };
        let found = self.tensor(value);
        let wanted: Vec<Name> = dims.split_whitespace().map(Name::from).collect();
        if found.dims != wanted || self.dtype(&found) != DType::I32 {
            self.wrong(format!("input {name} is i32 [{dims}], which random numbers follow from"));
        }
        found
    }

    fn value_of(&self, op: &Op) -> Option<Value> {
        self.graph.nodes.iter().find(|n| n.op == *op).and_then(|n| n.results.first().copied())
    }

    /// What `declare` writes is of no composite.
    #[track_caller]
    fn outside<T>(&mut self, declare: impl FnOnce(&mut Model) -> T) -> T {
        let open = self.open.take();
        let out = declare(self);
        self.open = open;
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::verify;

    fn model() -> Model {
        let mut m = Model::new();
        [("b", 2), ("s", 3), ("d", 4)].iter().for_each(|(name, size)| m.dim(name, *size));
        m
    }

    #[test]
    fn what_numbers_follow_from_is_declared_once() {
        let mut m = model();
        let position = m.input("position", DType::I32, "b s");
        let x = m.random("b s d", "x");
        let y = m.random("b d", "y");
        assert_eq!(m.position(), position);
        assert_eq!((x.dims.join(" "), y.dims.join(" ")), ("b s d".to_string(), "b d".to_string()));
        let graph = m.finish().unwrap();
        assert_eq!(verify(&graph), Ok(()));
        let names: Vec<&str> = graph.inputs.iter().map(|i| &*i.name).collect();
        assert_eq!((names, graph.states.len()), (vec!["position", "row"], 1));
        let inner: Vec<usize> = graph.nodes.iter().map(|n| n.signature.inner().len()).collect();
        assert_eq!(inner.last(), Some(&1));
    }

    #[test]
    fn numbers_of_no_row_are_refused() {
        let mut m = model();
        m.input("position", DType::F32, "b s");
        m.random("s d", "x");
        m.random("b", "a name");
        let errors = m.finish().unwrap_err();
        let messages: Vec<&str> = errors.iter().map(|e| e.message.as_str()).collect();
        assert_eq!(messages.len(), 3, "{messages:?}");
        assert!(messages[0].contains("lack dimension b"), "{messages:?}");
        assert!(messages[1].contains("input position is i32 [b s]"), "{messages:?}");
        assert!(messages[2].contains("is no name"), "{messages:?}");
    }
}
