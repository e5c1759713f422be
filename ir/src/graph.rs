//! The graph: whole tensors, before anything is split. Nodes stand in an order in which they can run.

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::state::{AdamW, Input, State};
use crate::{DType, Name, Op, Signature, Signatures};

/// A value, by its place in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

impl Value {
    /// Its place.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// How often a value is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Once a step.
    Step,
    /// For each micro-batch.
    Micro,
}

impl Scope {
    /// How often the results of an op are computed; `micro` says whether an operand is of a micro-batch.
    pub fn of(op: &Op, micro: bool) -> Scope {
        if matches!(op, Op::Input(_)) || micro && !matches!(op, Op::Accumulate) {
            Scope::Micro
        } else {
            Scope::Step
        }
    }
}

/// What every value has.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueType {
    /// Element type.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// How often it is computed.
    pub scope: Scope,
}

/// Which part of a step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The forward pass.
    Forward,
    /// The backward pass toward inputs.
    Input,
    /// The backward pass toward a parameter.
    Weight,
    /// Once, after all micro-batches.
    Update,
}

impl Part {
    /// Every part, for parsing.
    pub const ALL: [Part; 4] = [Part::Forward, Part::Input, Part::Weight, Part::Update];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Part::Forward => "forward",
            Part::Input => "input",
            Part::Weight => "weight",
            Part::Update => "update",
        }
    }
}

/// Where a node stands in the model and in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Where in the depth of the model, see [`Graph::layers`]; stages are made of these.
    pub layer: u32,
    /// The part of the step.
    pub part: Part,
}

/// Says which composite a primitive node belongs to, and as what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The composite's name: `softmax`, `attention`, ...
    pub composite: Name,
    /// Which of that graph's composites.
    pub instance: u32,
    /// What the node is in it.
    pub role: Name,
}

/// An op applied to values.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it does to numbers.
    pub op: Op,
    /// What it does to dimensions.
    pub signature: Arc<Signature>,
    /// The global size of each factor.
    pub sizes: Vec<usize>,
    /// Operands.
    pub args: Vec<Value>,
    /// What it defines.
    pub results: Vec<Value>,
    /// Where it stands.
    pub mark: Mark,
    /// The composite that it is part of.
    pub tag: Option<Tag>,
    /// For a backward node: a result of the forward node whose factors, letter by letter, it shares.
    pub of: Option<Value>,
    /// For a backward node: the forward value whose gradient it is, or whose shape it has.
    pub like: Option<Value>,
}

impl Node {
    /// Whether it is a matrix product: an einsum of two operands with a factor of each alone, and one of both that is
    /// summed.
    pub fn is_product(&self) -> bool {
        let s = &self.signature;
        let (Op::Einsum { .. }, [a, b]) = (&self.op, &s.args[..]) else { return false };
        let any = |test: &dyn Fn(usize) -> bool| (0..self.sizes.len()).any(test);
        let (in_a, in_b) = (|f| Signature::has(a, f), |f| Signature::has(b, f));
        any(&|f| in_a(f) && in_b(f) && !s.in_results(f))
            && any(&|f| in_a(f) && !in_b(f) && s.in_results(f))
            && any(&|f| in_b(f) && !in_a(f) && s.in_results(f))
    }
}

/// The loss of a micro-batch: the sum over the labels that count, and how many count. What is minimised is the sum of
/// the sums over the sum of the counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// A scalar.
    pub sum: Value,
    /// A scalar.
    pub count: Value,
}

/// A sharding that the user asks of a value, by names of axes; an axis that the mesh lacks has size 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    /// The value.
    pub value: Value,
    /// For each dimension the axes, outermost first.
    pub dims: Vec<Vec<Name>>,
    /// Whether pieces of unequal sizes are refused.
    pub even: bool,
}

/// Mixed precision: products and activations are bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The type in which gradients of parameters are kept and sent: f32 or bf16.
    pub gradients: DType,
    /// The type in which they are summed over micro-batches.
    pub sums: DType,
}

/// What the backward pass computes again, instead of having it kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// What is inside attention.
    Selective,
    /// All but what goes from layer to layer.
    Full,
}

impl Recompute {
    /// Each, for parsing.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
    }
}

/// A graph of ops on whole tensors.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Graph {
    /// How many layers the model says it has: what has mark 0 stands before them, layer i has mark i + 1, and what stands
    /// behind them the mark after the last. With 0, marks are layers counted from 0.
    pub layers: u32,
    /// For each mark the virtual stage of a pipeline that it belongs to, ascending; empty: there is one.
    pub stages: Vec<usize>,
    /// What each micro-batch is fed.
    pub inputs: Vec<Input>,
    /// What is kept from step to step.
    pub states: Vec<State>,
    /// The ops, in an order in which they can run.
    pub nodes: Vec<Node>,
    /// The values, by their number.
    pub values: Vec<ValueType>,
    /// What is minimised; taken by `autodiff`.
    pub loss: Option<Loss>,
    /// The gradient of the summed loss by each parameter; from `autodiff` to `optimizer`.
    pub gradients: Vec<(Name, Value)>,
    /// How parameters change; taken by `optimizer`.
    pub optimizer: Option<AdamW>,
    /// What the user asks of values in the middle.
    pub constraints: Vec<Constraint>,
    /// Values that lie as a state does: what the choice decides for the state, it decides for them.
    pub follows: Vec<(Value, Name)>,
    /// Whether each micro-batch's gradients are brought to where their moments lie, and only then summed (ZeRO-2).
    pub scatters: bool,
    /// In which types values are kept, if not all in f32; taken by `precision`.
    pub precision: Option<Precision>,
    /// What the backward pass computes again; taken by `recompute`.
    pub recompute: Recompute,
    /// Whether the host wants logits and gradients after each step, not only loss, norm and rate.
    pub dump: bool,
}

impl Graph {
    /// What a value has.
    pub fn ty(&self, value: Value) -> &ValueType {
        &self.values[value.index()]
    }

    /// The virtual stage of what has this mark.
    pub fn stage(&self, mark: Mark) -> usize {
        self.stages.get(mark.layer as usize).or(self.stages.last()).copied().unwrap_or(0)
    }

    /// How many places of the model's depth stages are made of: before the layers, each layer, and behind them.
    pub fn depth(&self) -> usize {
        let marks = self.nodes.iter().map(|n| n.mark.layer as usize + 1).max().unwrap_or(1);
        if self.layers == 0 { marks } else { marks.max(self.layers as usize + 1) }
    }

    /// A value's shape.
    pub fn shape(&self, value: Value) -> &[usize] {
        &self.values[value.index()].shape
    }

    /// All states by name; of those with one name, which no graph has, the first.
    pub fn states_by_name(&self) -> FxHashMap<&str, &State> {
        self.states.iter().rev().map(|s| (&*s.name, s)).collect()
    }

    /// A state by its name.
    pub fn state(&self, name: &str) -> Option<&State> {
        self.states.iter().find(|s| &*s.name == name)
    }

    /// Gives random ops that have no seed this one.
    pub fn seed(&mut self, seed: u64) {
        for node in &mut self.nodes {
            if let Op::Random(draw) = &mut node.op
                && draw.seed == 0
            {
                draw.seed = seed;
            }
        }
    }

    /// By value whether it comes from random numbers, indices and constants alone: it costs no memory to have it again.
    pub fn drawn(&self) -> Vec<bool> {
        let given = self.given();
        let mut drawn = vec![false; self.values.len()];
        for node in &self.nodes {
            let random = matches!(node.op, Op::Random(_)) || node.args.iter().any(|v| drawn[v.index()]);
            node.results.iter().for_each(|v| drawn[v.index()] = random && given[v.index()]);
        }
        drawn
    }

    /// By value whether it comes from indices and constants alone.
    pub fn given(&self) -> Vec<bool> {
        let mut given = vec![false; self.values.len()];
        for node in &self.nodes {
            let this = match matches!(node.op, Op::Input(_) | Op::State(_)) {
                true => node.results.iter().all(|v| !self.ty(*v).dtype.is_float()),
                false => node.args.iter().all(|v| given[v.index()]),
            };
            node.results.iter().for_each(|v| given[v.index()] = this);
        }
        given
    }

    /// For each value, the node that defines it.
    pub fn makers(&self) -> Vec<usize> {
        let mut makers = vec![usize::MAX; self.values.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            node.results.iter().for_each(|v| makers[v.index()] = i);
        }
        makers
    }

    /// Appends a node whose results have `dtype`; sizes that no operand gives are in `known`.
    ///
    /// # Errors
    /// How the signature does not fit.
    pub fn push(&mut self, new: NewNode) -> Result<Option<Value>, crate::SizeError> {
        self.push_with(new, &mut Arc::new)
    }

    /// The same, its signature among those that are kept once.
    ///
    /// # Errors
    /// How the signature does not fit.
    pub fn push_among(
        &mut self,
        new: NewNode,
        signatures: &mut Signatures,
    ) -> Result<Option<Value>, crate::SizeError> {
        self.push_with(new, &mut |signature| signatures.share(signature))
    }

    fn push_with(
        &mut self,
        new: NewNode,
        share: &mut dyn FnMut(Signature) -> Arc<Signature>,
    ) -> Result<Option<Value>, crate::SizeError> {
        let shapes: Vec<&[usize]> = new.args.iter().map(|v| self.shape(*v)).collect();
        let signature = share(new.signature.normal());
        let sizes = signature.sizes(&shapes, &new.known)?;
        let micro = new.args.iter().any(|v| self.ty(*v).scope == Scope::Micro);
        let scope = Scope::of(&new.op, micro);
        let mut results = Vec::new();
        for dims in &signature.results {
            results.push(Value(self.values.len() as u32));
            self.values.push(ValueType { dtype: new.dtype, shape: Signature::shape(dims, &sizes), scope });
        }
        let first = results.first().copied();
        let NewNode { op, args, mark, tag, of, like, .. } = new;
        self.nodes.push(Node { op, signature, sizes, args, results, mark, tag, of, like });
        Ok(first)
    }
}

/// What [`Graph::push`] needs.
#[derive(Clone, Debug)]
pub struct NewNode {
    /// What it does to numbers.
    pub op: Op,
    /// What it does to dimensions.
    pub signature: Signature,
    /// Operands.
    pub args: Vec<Value>,
    /// The element type of the results.
    pub dtype: DType,
    /// Sizes of factors that no operand has.
    pub known: Vec<(Name, usize)>,
    /// Where it stands.
    pub mark: Mark,
    /// The composite that it is part of.
    pub tag: Option<Tag>,
    /// See [`Node::of`].
    pub of: Option<Value>,
    /// See [`Node::like`].
    pub like: Option<Value>,
}

/// Builds a graph anew from another, node by node: what a pass that adds or drops nodes does.
#[derive(Debug)]
pub struct Rewrite {
    /// What is built.
    pub graph: Graph,
    /// For each value of the old graph, what it is now.
    pub now: Vec<Option<Value>>,
    /// The signatures of nodes that are new.
    pub signatures: Signatures,
}

impl Rewrite {
    /// Starts with the tables of `old` and no nodes.
    pub fn of(old: &Graph) -> Rewrite {
        let graph = Graph {
            layers: old.layers,
            stages: old.stages.clone(),
            inputs: old.inputs.clone(),
            states: old.states.clone(),
            optimizer: old.optimizer,
            precision: old.precision,
            recompute: old.recompute,
            ..Graph::default()
        };
        Rewrite { graph, now: vec![None; old.values.len()], signatures: Signatures::default() }
    }

    /// What an old value is now.
    ///
    /// # Panics
    /// If the node that defines it was dropped but is used: a fault of the pass.
    pub fn at(&self, old: Value) -> Value {
        self.now[old.index()].unwrap_or_else(|| panic!("{old} was dropped but is used"))
    }

    /// Copies a node, its operands renamed. Returns its place.
    pub fn copy(&mut self, old: &Graph, node: &Node) -> usize {
        self.put(&old.values, node.clone())
    }

    /// Takes over a node of a graph with these values, its operands renamed. Returns its place.
    pub fn put(&mut self, values: &[ValueType], mut new: Node) -> usize {
        new.args.iter_mut().for_each(|v| *v = self.at(*v));
        new.of = new.of.and_then(|v| self.now[v.index()]);
        new.like = new.like.and_then(|v| self.now[v.index()]);
        for v in &mut new.results {
            self.graph.values.push(values[v.index()].clone());
            let fresh = Value((self.graph.values.len() - 1) as u32);
            self.now[v.index()] = Some(fresh);
            *v = fresh;
        }
        self.graph.nodes.push(new);
        self.graph.nodes.len() - 1
    }

    /// Appends a node.
    ///
    /// # Errors
    /// How its signature does not fit.
    pub fn push(&mut self, new: NewNode) -> Result<Option<Value>, crate::SizeError> {
        self.graph.push_among(new, &mut self.signatures)
    }

    /// The finished graph: loss, gradients and constraints renamed.
    pub fn finish(mut self, old: &Graph) -> Graph {
        self.graph.loss = old.loss.map(|l| Loss { sum: self.at(l.sum), count: self.at(l.count) });
        self.graph.gradients = old.gradients.iter().map(|(n, v)| (n.clone(), self.at(*v))).collect();
        let constraints = old.constraints.iter();
        self.graph.constraints = constraints
            .filter_map(|c| Some(Constraint { value: self.now[c.value.index()]?, ..c.clone() }))
            .collect();
        let follows = old.follows.iter();
        self.graph.follows =
            follows.filter_map(|(v, name)| Some((self.now[v.index()]?, name.clone()))).collect();
        self.graph
    }
}
