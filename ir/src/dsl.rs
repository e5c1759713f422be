//! The DSL: a model is written with named dimensions, forward pass of one micro-batch, and reads like its paper.
//!
//! ```
//! use meshc_ir::dsl::Model;
//! use meshc_ir::state::Init;
//! use meshc_ir::{DType, Unary};
//!
//! let mut m = Model::new();
//! for (name, size) in [("b", 512), ("d", 1024), ("f", 4096)] {
//!     m.dim(name, size);
//! }
//! let x = m.input("x", DType::F32, "b d");
//! let up = m.parameter("up", "d f", Init::Normal(0.02));
//! let down = m.parameter("down", "f d", Init::Normal(0.02));
//! let h = m.einsum("b f", &[&x, &up]);
//! let h = m.unary(Unary::Relu, &h);
//! let y = m.einsum("b d", &[&h, &down]);
//! m.tap("y", &y);
//! let graph = m.finish().unwrap();
//! assert_eq!(graph.nodes.len(), 7);
//! ```
//!
//! What is wrong is collected, each with the place in the model's source, and reported by [`Model::finish`].

mod random;
mod top;

use std::collections::BTreeMap;
use std::panic::Location;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::smallvec;

use crate::graph::{Constraint, Loss, Mark, NewNode, Tag};
use crate::state::{Init, Input, Role, State, View};
use crate::{Binary, DType, Dim, Graph, Name, Node, Op, Part, Reduce, Signature, Signatures, Unary, Value};

/// A value with names for its dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The value.
    pub value: Value,
    /// A name for each dimension.
    pub dims: Vec<Name>,
}

/// What is wrong in a model's source, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct BuildError {
    /// The source file.
    pub file: &'static str,
    /// The line in it.
    pub line: u32,
    /// What is and what was needed.
    pub message: String,
}

/// A model being written.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub(crate) graph: Graph,
    sizes: BTreeMap<Name, usize>,
    /// The names of inputs and states.
    taken: FxHashSet<Name>,
    /// The nodes of the values that were there when it was resumed.
    makers: Vec<usize>,
    layer: u32,
    part: Option<Part>,
    of: Option<Value>,
    open: Option<(Name, u32)>,
    instances: u32,
    errors: Vec<BuildError>,
    signatures: Signatures,
    /// Where each constraint of the graph stands in the source.
    constrained: Vec<&'static Location<'static>>,
}

fn names(dims: &str) -> Vec<Name> {
    dims.split_whitespace().map(Name::from).collect()
}

impl Model {
    /// An empty model.
    pub fn new() -> Model {
        Model::default()
    }

    /// Goes on with a graph: what a pass does that writes nodes of `part`. Dimensions are known from the signatures.
    pub fn resume(graph: Graph, part: Part) -> Model {
        let mut sizes: FxHashMap<&Name, usize> = FxHashMap::default();
        for node in &graph.nodes {
            sizes.extend(node.signature.factors.iter().zip(node.sizes.iter().copied()));
        }
        let sizes = sizes.into_iter().map(|(name, size)| (name.clone(), size)).collect();
        let inputs = graph.inputs.iter().map(|i| &i.name);
        let taken = inputs.chain(graph.states.iter().map(|s| &s.name)).cloned().collect();
        let makers = graph.makers();
        let tags = graph.nodes.iter().filter_map(|n| n.tag.as_ref()).map(|t| t.instance + 1);
        let instances = tags.max().unwrap_or(0);
        Model { graph, sizes, taken, makers, part: Some(part), instances, ..Model::default() }
    }

    /// The graph as it is now.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The graph, for a pass that writes nodes of its own between those of the DSL.
    pub fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// A tensor for a value, its dimensions named as in the signature of the node that defines it.
    pub fn tensor(&self, value: Value) -> Tensor {
        let dims = |n: &Node| {
            let i = n.results.iter().position(|v| *v == value)?;
            Some(n.signature.results[i].iter().map(|d| n.signature.factors[d[0]].clone()).collect())
        };
        let known = self.makers.get(value.index()).and_then(|i| self.graph.nodes.get(*i));
        let maker = match known {
            Some(node) => dims(node),
            None => self.graph.nodes.iter().rev().find_map(dims),
        };
        Tensor { value, dims: maker.unwrap_or_default() }
    }

    /// Marks what follows as of this layer, counted from 0. What comes before the first is before all layers.
    pub fn layer(&mut self, layer: u32) {
        self.layer = layer + 1;
        self.graph.layers = self.graph.layers.max(self.layer);
    }

    /// Marks what follows as behind all layers: the head. A pipeline may cut there.
    pub fn behind_layers(&mut self) {
        self.layer = self.graph.layers + 1;
    }

    /// Marks what follows as a node with this mark is, see [`Graph::layers`].
    pub fn at_mark(&mut self, layer: u32) {
        self.layer = layer;
    }

    /// Marks what follows as sharing its factors with the forward node that defines `value`.
    pub fn of(&mut self, value: Option<Value>) {
        self.of = value;
    }

    /// Declares a dimension.
    #[track_caller]
    pub fn dim(&mut self, name: &str, size: usize) {
        match self.sizes.insert(name.into(), size) {
            Some(old) if old != size => {
                self.wrong(format!("dimension {name} has size {old} already, not {size}"))
            }
            Some(_) | None => {}
        }
    }

    /// A dimension's size; 1 if it is not declared.
    #[track_caller]
    pub fn size(&mut self, name: &str) -> usize {
        match self.sizes.get(name) {
            Some(size) => *size,
            None => {
                let known: Vec<&str> = self.sizes.keys().map(|n| &**n).collect();
                self.wrong(format!("there is no dimension `{name}`; declared are {}", known.join(", ")));
                1
            }
        }
    }

    #[track_caller]
    pub(crate) fn wrong(&mut self, message: String) {
        let at = Location::caller();
        self.errors.push(BuildError { file: at.file(), line: at.line(), message });
    }

    #[track_caller]
    fn sized(&mut self, dims: &str) -> Vec<(Name, usize)> {
        let mut out: Vec<(Name, usize)> = Vec::new();
        for name in names(dims) {
            if out.iter().any(|(n, _)| *n == name) {
                self.wrong(format!("dimension {name} stands twice in `{dims}`"));
            }
            let size = self.size(&name);
            out.push((name, size));
        }
        out
    }

    /// A tensor of the batch.
    #[track_caller]
    pub fn input(&mut self, name: &str, dtype: DType, dims: &str) -> Tensor {
        let sized = self.sized(dims);
        self.check_name(name);
        self.graph.inputs.push(Input { name: name.into(), dtype, dims: sized });
        self.push(Op::Input(name.into()), dtype, &[], dims)
    }

    /// A parameter that lies in a file under its own name and shape, decays if it has two dimensions or more.
    #[track_caller]
    pub fn parameter(&mut self, name: &str, dims: &str, init: Init) -> Tensor {
        let shape: Vec<usize> = self.sized(dims).iter().map(|(_, n)| *n).collect();
        let views = vec![View::whole(name, &shape)];
        self.parameter_from(name, dims, init, views)
    }

    /// A parameter that is a window of a file tensor, or several windows stacked along its first dimension. It decays
    /// if the file tensor has two dimensions or more.
    #[track_caller]
    pub fn parameter_from(&mut self, name: &str, dims: &str, init: Init, views: Vec<View>) -> Tensor {
        let sized = self.sized(dims);
        let shape: Vec<usize> = sized.iter().map(|(_, n)| *n).collect();
        let window: Vec<usize> =
            views.first().map_or(Vec::new(), |v| v.dims.iter().map(|(n, _)| *n).collect());
        let fits = match views.len() {
            0 => true,
            1 => window == shape,
            n => shape.first() == Some(&n) && window == shape[1..],
        };
        if !fits {
            self.wrong(format!("parameter {name} is {shape:?}, but its windows in files are {window:?}"));
        }
        let decays = views.first().map_or(shape.len(), |v| v.shape.len()) >= 2;
        let role = Role::Parameter { trainable: true, decays };
        self.state(State { name: name.into(), dtype: DType::F32, dims: sized, role, init, views })
    }

    /// A state.
    #[track_caller]
    pub fn state(&mut self, state: State) -> Tensor {
        self.check_name(&state.name);
        let (name, dtype) = (state.name.clone(), state.dtype);
        let dims: Vec<&str> = state.dims.iter().map(|(n, _)| &**n).collect();
        let dims = dims.join(" ");
        self.graph.states.push(state);
        self.push(Op::State(name), dtype, &[], &dims)
    }

    #[track_caller]
    fn check_name(&mut self, name: &str) {
        if !self.taken.insert(name.into()) {
            self.wrong(format!("the name `{name}` is taken"));
        }
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
            self.wrong(format!("`{name}` is no name: letters, digits, `_`, `.` and `-` make one"));
        }
    }

    /// The nodes that `body` writes are a composite: its kernel may replace them, its gradient may have a body.
    pub fn composite<T>(&mut self, name: &str, body: impl FnOnce(&mut Model) -> T) -> T {
        let outer = self.open.replace((name.into(), self.instances));
        self.instances += 1;
        let out = body(self);
        self.open = outer;
        out
    }

    /// Names what a tensor is in the open composite.
    pub fn role(&mut self, tensor: &Tensor, role: &str) {
        let node = self.graph.nodes.iter_mut().rev().find(|n| n.results.contains(&tensor.value));
        if let Some(tag) = node.and_then(|n| n.tag.as_mut()) {
            tag.role = role.into();
        }
    }

    #[track_caller]
    fn push(&mut self, op: Op, dtype: DType, args: &[&Tensor], result: &str) -> Tensor {
        let operands: Vec<Vec<Name>> = args.iter().map(|t| t.dims.clone()).collect();
        self.push_as(op, dtype, args, &operands, Some(names(result)))
    }

    /// `operands`: the names of the operands' dimensions in the signature.
    #[track_caller]
    fn push_as(
        &mut self,
        op: Op,
        dtype: DType,
        args: &[&Tensor],
        operands: &[Vec<Name>],
        result: Option<Vec<Name>>,
    ) -> Tensor {
        let mut signature = Signature { factors: Vec::new(), args: Vec::new(), results: Vec::new() };
        let mut tensor = |dims: &[Name]| {
            let factor = |name: &Name| match signature.factors.iter().position(|f| f == name) {
                Some(f) => smallvec![f],
                None => {
                    signature.factors.push(name.clone());
                    smallvec![signature.factors.len() - 1]
                }
            };
            dims.iter().map(factor).collect::<Vec<Dim>>()
        };
        let arg_dims: Vec<_> = operands.iter().map(|d| tensor(d)).collect();
        let result_dims: Vec<_> = result.iter().map(|d| tensor(d)).collect();
        (signature.args, signature.results) = (arg_dims, result_dims);
        let factors = signature.factors.clone();
        let known: Vec<(Name, usize)> = factors
            .iter()
            .filter(|f| !operands.iter().any(|o| o.contains(f)))
            .map(|f| (f.clone(), self.size(f)))
            .collect();
        let mark = Mark { layer: self.layer, part: self.part.unwrap_or(Part::Forward) };
        let role = "inner".into();
        let tag = self.open.clone().map(|(composite, instance)| Tag { composite, instance, role });
        let values = args.iter().map(|t| t.value).collect();
        let new = NewNode { op, signature, args: values, dtype, known, mark, tag, of: self.of, like: None };
        let dims = result.unwrap_or_default();
        match self.write(new) {
            Ok(value) => Tensor { value: value.unwrap_or(Value(u32::MAX)), dims },
            Err(error) => {
                self.wrong(error.to_string());
                self.placeholder(dims)
            }
        }
    }

    /// Appends a node as it is: what a pass does that has the node's signature.
    ///
    /// # Errors
    /// How that does not fit.
    pub fn write(&mut self, new: NewNode) -> Result<Option<Value>, crate::SizeError> {
        self.graph.push_among(new, &mut self.signatures)
    }

    /// Stands for what could not be built, so that the rest of the model can be read.
    fn placeholder(&mut self, dims: Vec<Name>) -> Tensor {
        let shape = dims.iter().map(|d| self.sizes.get(d).copied().unwrap_or(1)).collect();
        self.graph.values.push(crate::ValueType { dtype: DType::F32, shape, scope: crate::Scope::Step });
        Tensor { value: Value((self.graph.values.len() - 1) as u32), dims }
    }

    fn dtype(&self, t: &Tensor) -> DType {
        self.graph.values.get(t.value.index()).map_or(DType::F32, |v| v.dtype)
    }

    /// The product of tensors, summed over the dimensions that `dims` lacks.
    #[track_caller]
    pub fn einsum(&mut self, dims: &str, args: &[&Tensor]) -> Tensor {
        self.einsum_scaled(1.0, dims, args)
    }

    /// `scale` times the product of tensors, summed over the dimensions that `dims` lacks.
    #[track_caller]
    pub fn einsum_scaled(&mut self, scale: f64, dims: &str, args: &[&Tensor]) -> Tensor {
        let dtype = args.first().map_or(DType::F32, |t| self.dtype(t));
        self.push(Op::Einsum { scale }, dtype, args, dims)
    }

    /// `scale` times a tensor.
    #[track_caller]
    pub fn scale(&mut self, scale: f64, x: &Tensor) -> Tensor {
        self.einsum_scaled(scale, &x.dims.join(" "), &[x])
    }

    /// The product, broadcast to all dimensions of the operands.
    #[track_caller]
    pub fn mul(&mut self, args: &[&Tensor]) -> Tensor {
        let dims = union(args);
        self.einsum(&dims.join(" "), args)
    }

    /// The sum, broadcast to all dimensions of the operands.
    #[track_caller]
    pub fn add(&mut self, args: &[&Tensor]) -> Tensor {
        let dims = union(args);
        let dtype = args.first().map_or(DType::F32, |t| self.dtype(t));
        self.push(Op::Add, dtype, args, &dims.join(" "))
    }

    /// A tensor plus a number.
    #[track_caller]
    pub fn offset(&mut self, x: &Tensor, by: f64) -> Tensor {
        let by = self.constant(by, self.dtype(x));
        self.add(&[x, &by])
    }

    /// A function of each element.
    #[track_caller]
    pub fn unary(&mut self, f: Unary, x: &Tensor) -> Tensor {
        let dtype = self.dtype(x);
        self.push(Op::Unary(f), dtype, &[x], &x.dims.join(" "))
    }

    /// A function of two tensors, broadcast to all their dimensions.
    #[track_caller]
    pub fn binary(&mut self, f: Binary, x: &Tensor, y: &Tensor) -> Tensor {
        let dims = union(&[x, y]);
        let dtype = if f.is_comparison() { DType::Bool } else { self.dtype(x) };
        self.push(Op::Binary(f), dtype, &[x, y], &dims.join(" "))
    }

    /// x - y.
    #[track_caller]
    pub fn sub(&mut self, x: &Tensor, y: &Tensor) -> Tensor {
        self.binary(Binary::Sub, x, y)
    }

    /// x / y.
    #[track_caller]
    pub fn div(&mut self, x: &Tensor, y: &Tensor) -> Tensor {
        self.binary(Binary::Div, x, y)
    }

    /// `x` where `condition`, else `y`.
    #[track_caller]
    pub fn select(&mut self, condition: &Tensor, x: &Tensor, y: &Tensor) -> Tensor {
        let args = [condition, x, y];
        let dims = union(&args);
        let dtype = self.dtype(x);
        self.push(Op::Select, dtype, &args, &dims.join(" "))
    }

    /// The same number everywhere.
    #[track_caller]
    pub fn constant(&mut self, value: f64, dtype: DType) -> Tensor {
        self.push(Op::Const(value), dtype, &[], "")
    }

    /// The index along a dimension.
    #[track_caller]
    pub fn iota(&mut self, dim: &str, dtype: DType) -> Tensor {
        self.push(Op::Iota, dtype, &[], dim)
    }

    /// Sums or takes the largest over a dimension.
    #[track_caller]
    pub fn reduce(&mut self, reduce: Reduce, x: &Tensor, over: &str) -> Tensor {
        if !x.dims.iter().any(|d| &**d == over) {
            self.wrong(format!("the tensor [{}] has no dimension {over} to reduce", x.dims.join(" ")));
        }
        let rest: Vec<&str> = x.dims.iter().map(|d| &**d).filter(|d| *d != over).collect();
        let dtype = self.dtype(x);
        let op = match reduce {
            Reduce::Sum => Op::Einsum { scale: 1.0 },
            Reduce::Max => Op::ReduceMax,
            Reduce::Top => {
                self.wrong("pairs are not reduced: `top_k` makes them".to_string());
                Op::ReduceMax
            }
        };
        self.push(op, dtype, &[x], &rest.join(" "))
    }

    /// The entries of `table` along `dim` at the places that `index` says: `v d`, `b s` gives `b s d` for the
    /// result dimensions `b s d`.
    #[track_caller]
    pub fn gather(&mut self, dims: &str, table: &Tensor, dim: &str, index: &Tensor) -> Tensor {
        if !table.dims.iter().any(|d| &**d == dim) || dims.split_whitespace().any(|d| d == dim) {
            self.wrong(format!(
                "[{}] is looked up along {dim}, which it must have and `{dims}` not",
                table.dims.join(" ")
            ));
        }
        let dtype = self.dtype(table);
        self.push(Op::Gather, dtype, &[table, index], dims)
    }

    /// The transpose of [`Model::gather`]: `b s d`, `b s` gives `v d`.
    #[track_caller]
    pub fn scatter(&mut self, dims: &str, source: &Tensor, index: &Tensor) -> Tensor {
        let dtype = self.dtype(source);
        self.push(Op::Scatter, dtype, &[source, index], dims)
    }

    /// Another element type.
    #[track_caller]
    pub fn cast(&mut self, x: &Tensor, dtype: DType) -> Tensor {
        if self.dtype(x) == dtype {
            return x.clone();
        }
        self.push(Op::Cast, dtype, &[x], &x.dims.join(" "))
    }

    /// The same tensor with another name for a dimension. No op.
    #[track_caller]
    pub fn rename(&mut self, x: &Tensor, from: &str, to: &str) -> Tensor {
        let size = self.size(from);
        self.dim(to, size);
        let dims = x.dims.iter().map(|d| if &**d == from { to.into() } else { d.clone() }).collect();
        Tensor { value: x.value, dims }
    }

    /// Asks for a sharding, as in `[dp, _, tp]`: it holds for the value, and for its gradient. `[dp, _, tp] even` refuses
    /// pieces of unequal sizes.
    #[track_caller]
    pub fn constrain(&mut self, x: &Tensor, dims: &str) {
        let (axes, even) =
            dims.trim().strip_suffix(" even").map_or((dims.trim(), false), |d| (d.trim(), true));
        let inner = axes.strip_prefix('[').and_then(|d| d.strip_suffix(']'));
        let entries: Vec<Vec<Name>> = inner
            .unwrap_or("")
            .split(',')
            .take(if x.dims.is_empty() { 0 } else { usize::MAX })
            .map(|d| d.trim().split('.').filter(|n| *n != "_" && !n.is_empty()).map(Name::from).collect())
            .collect();
        if inner.is_none() || entries.len() != x.dims.len() {
            let example = vec!["_"; x.dims.len()].join(", ");
            self.wrong(format!(
                "[{}] is constrained by one entry a dimension, as in `[{example}]`, not `{dims}`",
                x.dims.join(" ")
            ));
            return;
        }
        let axes: Vec<&Name> = entries.iter().flatten().collect();
        if let Some(i) = (1..axes.len()).find(|i| axes[..*i].contains(&axes[*i])) {
            self.wrong(format!("`{dims}` names axis {} twice", axes[i]));
            return;
        }
        let earlier = self.graph.constraints.iter().position(|c| c.value == x.value && c.dims != entries);
        if let Some(earlier) = earlier.map(|i| self.constrained[i]) {
            let place = format!("{}:{}", earlier.file(), earlier.line());
            self.wrong(format!("`{dims}` contradicts what {place} asks of the same value"));
            return;
        }
        self.constrained.push(Location::caller());
        self.graph.constraints.push(Constraint { value: x.value, dims: entries, even });
    }

    /// Hands a value to the host after each step.
    #[track_caller]
    pub fn tap(&mut self, name: &str, x: &Tensor) {
        let operands = [x.dims.clone()];
        let dtype = self.dtype(x);
        self.push_as(Op::Tap(name.into()), dtype, &[x], &operands, None);
    }

    /// Replaces what a state holds.
    #[track_caller]
    pub fn assign(&mut self, name: &str, x: &Tensor) {
        let operands = [x.dims.clone()];
        let dtype = self.dtype(x);
        self.push_as(Op::Assign(name.into()), dtype, &[x], &operands, None);
    }

    /// The sum over the micro-batches of a step.
    #[track_caller]
    pub fn accumulate(&mut self, x: &Tensor) -> Tensor {
        let dtype = self.dtype(x);
        self.push(Op::Accumulate, dtype, &[x], &x.dims.join(" "))
    }

    /// What is minimised: `sum` over `count`, each a scalar, over all micro-batches.
    #[track_caller]
    pub fn loss(&mut self, sum: &Tensor, count: &Tensor) {
        if !sum.dims.is_empty() || !count.dims.is_empty() {
            self.wrong(format!(
                "a loss is two scalars, not [{}] and [{}]",
                sum.dims.join(" "),
                count.dims.join(" ")
            ));
        }
        self.graph.loss = Some(Loss { sum: sum.value, count: count.value });
    }

    /// The finished graph.
    ///
    /// # Errors
    /// Everything that is wrong in the model, with its place in the source.
    pub fn finish(self) -> Result<Graph, Vec<BuildError>> {
        if self.errors.is_empty() { Ok(self.graph) } else { Err(self.errors) }
    }
}

/// All dimensions of the operands, those of the operand with most first.
fn union(args: &[&Tensor]) -> Vec<Name> {
    let widest = args.iter().fold(None::<&&Tensor>, |best, t| match best {
        Some(b) if b.dims.len() >= t.dims.len() => Some(b),
        Some(_) | None => Some(t),
    });
    let mut out: Vec<Name> = widest.map_or(Vec::new(), |t| t.dims.clone());
    for dim in args.iter().flat_map(|t| &t.dims) {
        if !out.contains(dim) {
            out.push(dim.clone());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_wrong_is_reported_with_its_line() {
        let mut m = Model::new();
        m.dim("b", 4);
        m.dim("d", 8);
        m.dim("d", 9);
        let x = m.input("x", DType::F32, "b d");
        let y = m.einsum("b q", &[&x]);
        m.constrain(&x, "[dp]");
        m.loss(&y, &y);
        let messages: Vec<String> = m.finish().unwrap_err().iter().map(|e| e.message.clone()).collect();
        assert_eq!(messages.len(), 4, "{messages:?}");
        assert!(messages[0].contains("dimension d has size 8 already"));
        assert!(messages[1].contains("no dimension `q`"));
    }
}
