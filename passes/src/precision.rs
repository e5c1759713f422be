//! After it matrix products read bf16 and sum in f32, activations and what is sent of them are kept in bf16, and everything
//! else is computed in f32 (Micikevicius et al., "Mixed Precision Training", section 3): norms, softmax, loss and update.
//! Parameters are bf16, and each has a master in f32, which the update changes.
//!
//! Behind the optimizer, so that forward, backward and update are cast by one rule; before `simplify`, which merges equal
//! casts. A gradient of a value is kept in the type of the value; those of parameters as was asked.
//!
//! ```text
//! v2 = einsum v0, v1 : f32     ->     v2 = cast v0 : bf16      v3 = einsum v2, v1 : bf16
//! v3 = exp v2 : f32                   v4 = cast v3 : f32       v5 = exp v4 : f32     v6 = cast v5 : bf16
//! ```

use ir::graph::{Mark, NewNode, Precision, Rewrite};
use ir::state::{Role, State};
use ir::{DType, Graph, Name, Node, Op, Part, Signature, Value};
use rustc_hash::{FxHashMap, FxHashSet};

pub(crate) fn run(graph: &mut Graph) {
    let Some(precision) = graph.precision.take() else { return };
    let kept = Kept::of(graph, precision);
    let parameter = |s: &&State| matches!(s.role, Role::Parameter { .. });
    let parameters: FxHashSet<Name> = graph.states.iter().filter(parameter).map(|s| s.name.clone()).collect();
    let n = graph.values.len();
    let mut states = vec![None; n];
    for node in &graph.nodes {
        if let (Op::State(name), Some(v)) = (&node.op, node.results.first()) {
            states[v.index()] = parameters.get(name).cloned();
        }
    }
    let mut casting = Casting {
        old: graph,
        kept,
        parameters,
        states,
        new: Rewrite::of(graph),
        high: vec![None; n],
        low: vec![None; n],
        made: vec![None; n],
        widened: FxHashMap::default(),
        masters: FxHashMap::default(),
    };
    casting.states();
    for node in &graph.nodes {
        casting.node(node);
    }
    let (dump, new) = (graph.dump, casting.new);
    *graph = Graph { dump, ..new.finish(graph) };
}

/// What is asked of values: in which types they are kept.
struct Kept {
    precision: Precision,
    /// By value whether it is kept in bf16.
    narrow: Vec<bool>,
}

impl Kept {
    fn of(graph: &Graph, precision: Precision) -> Kept {
        let makers = graph.makers();
        let (given, late) = (graph.given(), late(graph));
        let outside = used_outside(graph, &makers);
        let gradient: FxHashSet<Value> =
            graph.nodes.iter().filter(|n| n.op == Op::Accumulate).map(|n| n.args[0]).collect();
        let is_state = |v: Value| matches!(graph.nodes[makers[v.index()]].op, Op::State(_));
        let mut narrow = vec![false; graph.values.len()];
        for node in &graph.nodes {
            let Some(v) = node.results.first().copied() else { continue };
            let float = graph.ty(v).dtype == DType::F32 && !graph.shape(v).is_empty();
            narrow[v.index()] = float
                && match node.mark.part {
                    Part::Update => false,
                    Part::Forward if given[v.index()] || late[v.index()] => false,
                    Part::Forward => match &node.tag {
                        None => node.op != Op::Accumulate,
                        Some(tag) => match &*tag.composite {
                            "cross_entropy" => false,
                            "attention" | "softmax" | "rms_norm" | "layer_norm" => &*tag.role == "out",
                            _ => outside[v.index()],
                        },
                    },
                    Part::Input | Part::Weight if node.op == Op::Accumulate => false,
                    Part::Input | Part::Weight => match node.like {
                        Some(of) if is_state(of) => {
                            gradient.contains(&v) && precision.gradients == DType::BF16
                        }
                        Some(of) => narrow[of.index()],
                        None => false,
                    },
                };
        }
        Kept { precision, narrow }
    }
}

/// By value whether it comes from the loss of single tokens.
fn late(graph: &Graph) -> Vec<bool> {
    let mut late = vec![false; graph.values.len()];
    for node in graph.nodes.iter().filter(|n| n.mark.part == Part::Forward) {
        let loss = node.tag.as_ref().is_some_and(|t| &*t.composite == "cross_entropy");
        let this = loss || node.args.iter().any(|v| late[v.index()]);
        node.results.iter().for_each(|v| late[v.index()] = this);
    }
    late
}

/// By value whether a node of another composite, or of none, uses it.
fn used_outside(graph: &Graph, makers: &[usize]) -> Vec<bool> {
    let mut outside = vec![false; graph.values.len()];
    let instance = |n: &Node| n.tag.as_ref().map(|t| t.instance);
    for node in &graph.nodes {
        for v in &node.args {
            outside[v.index()] |= instance(&graph.nodes[makers[v.index()]]) != instance(node);
        }
    }
    outside
}

struct Casting<'a> {
    old: &'a Graph,
    kept: Kept,
    parameters: FxHashSet<Name>,
    /// By old value the parameter that it is.
    states: Vec<Option<Name>>,
    new: Rewrite,
    /// By old value the new one in f32, or in its own type if that is no float.
    high: Vec<Option<Value>>,
    /// By old value the new one in bf16.
    low: Vec<Option<Value>>,
    /// By old value what its own node makes now.
    made: Vec<Option<Value>>,
    /// What is read in f32 and kept in bf16, by old value and whether in the forward pass: the backward pass casts anew.
    widened: FxHashMap<(Value, Part), Value>,
    /// The value of each parameter's master.
    masters: FxHashMap<Name, Value>,
}

fn master(parameter: &Name) -> Name {
    format!("{parameter}.master").into()
}

impl Casting<'_> {
    /// Parameters become bf16 and get a master, if the update changes them.
    fn states(&mut self) {
        let mut masters = Vec::new();
        let assigned = |n: &Node| if let Op::Assign(name) = &n.op { Some(name.clone()) } else { None };
        let assigned: FxHashSet<Name> = self.old.nodes.iter().filter_map(assigned).collect();
        for state in &mut self.new.graph.states {
            if !self.parameters.contains(&state.name) {
                continue;
            }
            if assigned.contains(&state.name) {
                let (name, role) = (master(&state.name), Role::Master(state.name.clone()));
                masters.push(State { name, role, ..state.clone() });
            }
            state.dtype = DType::BF16;
        }
        self.new.graph.states.extend(masters);
    }

    fn node(&mut self, node: &Node) {
        if let Op::Assign(name) = &node.op
            && self.parameters.contains(name)
        {
            return self.assign(node, name);
        }
        let low = node.is_product() && node.mark.part != Part::Update
            || node.op == Op::Gather && self.low[node.args[0].index()].is_some()
            || node.op == Op::Accumulate && self.kept.precision.sums == DType::BF16;
        let args: Vec<Value> = node
            .args
            .iter()
            .enumerate()
            .map(|(k, v)| {
                let narrow = low && !(node.op == Op::Gather && k == 1);
                let accumulates = node.op == Op::Accumulate;
                match narrow && (!accumulates || self.low[v.index()].is_some()) {
                    true => self.low(*v, node.mark),
                    false => self.high(*v, node.mark),
                }
            })
            .collect();
        let operand = args.first().map(|v| self.new.graph.ty(*v).dtype);
        let at = self.new.copy(self.old, node);
        let new = &mut self.new.graph.nodes[at];
        new.args = args;
        new.of = node.of.and_then(|v| self.made[v.index()]);
        let (results, mark) = (new.results.clone(), new.mark);
        for (old, v) in node.results.iter().zip(results) {
            self.made[old.index()] = Some(v);
            let state = matches!(&node.op, Op::State(name) if self.parameters.contains(name));
            let narrow = self.kept.narrow[old.index()];
            let kept = matches!(node.op, Op::Gather | Op::Accumulate) && operand == Some(DType::BF16);
            // What is summed is rounded once, where it is stored.
            let sums = node.is_product()
                || node.mark.part == Part::Weight
                    && matches!(node.op, Op::Einsum { .. } | Op::Add | Op::Scatter);
            if state || kept || narrow && sums {
                self.new.graph.values[v.index()].dtype = DType::BF16;
                self.low[old.index()] = Some(v);
            } else if narrow {
                self.low[old.index()] = Some(self.cast(v, DType::BF16, mark));
            } else {
                self.high[old.index()] = Some(v);
            }
            self.new.now[old.index()] = self.low[old.index()].or(Some(v));
        }
    }

    /// A parameter's master is assigned what the parameter was, and the parameter what is left of that in bf16.
    fn assign(&mut self, node: &Node, name: &Name) {
        let value = self.high(node.args[0], node.mark);
        let rounded = self.cast(value, DType::BF16, node.mark);
        for (op, v) in [(Op::Assign(master(name)), value), (node.op.clone(), rounded)] {
            let at = self.new.copy(self.old, node);
            self.new.graph.nodes[at].op = op;
            self.new.graph.nodes[at].args = vec![v];
        }
    }

    /// The new value in f32; in the update that of a parameter is its master.
    fn high(&mut self, old: Value, mark: Mark) -> Value {
        if mark.part == Part::Update
            && let Some(name) = self.states[old.index()].clone()
        {
            return self.master(&name, old, mark);
        }
        if let Some(high) = self.high[old.index()] {
            return high;
        }
        let part = if mark.part == Part::Weight { Part::Input } else { mark.part };
        if let Some(wide) = self.widened.get(&(old, part)) {
            return *wide;
        }
        let low = self.new.at(old);
        let wide = self.cast(low, DType::F32, mark);
        self.widened.insert((old, part), wide);
        wide
    }

    fn low(&mut self, old: Value, mark: Mark) -> Value {
        if let Some(low) = self.low[old.index()] {
            return low;
        }
        let low = self.cast(self.new.at(old), DType::BF16, mark);
        // Behind it both are there: what reads f32 is not to read what was rounded.
        self.low[old.index()] = Some(low);
        low
    }

    fn master(&mut self, name: &Name, old: Value, mark: Mark) -> Value {
        if let Some(value) = self.masters.get(name) {
            return *value;
        }
        let rank = self.old.shape(old).len();
        let signature = Signature::pointwise(rank, 0);
        let known = signature.factors.iter().cloned().zip(self.old.shape(old).iter().copied()).collect();
        let value = self.push(Op::State(master(name)), signature, Vec::new(), DType::F32, known, mark);
        self.masters.insert(name.clone(), value);
        value
    }

    fn cast(&mut self, value: Value, dtype: DType, mark: Mark) -> Value {
        if self.new.graph.ty(value).dtype == dtype {
            return value;
        }
        let signature = Signature::pointwise(self.new.graph.shape(value).len(), 1);
        self.push(Op::Cast, signature, vec![value], dtype, Vec::new(), mark)
    }

    fn push(
        &mut self,
        op: Op,
        signature: Signature,
        args: Vec<Value>,
        dtype: DType,
        known: Vec<(Name, usize)>,
        mark: Mark,
    ) -> Value {
        let node = NewNode { op, signature, args, dtype, known, mark, tag: None, of: None, like: None };
        let value = self.new.push(node).unwrap_or_else(|e| panic!("a cast keeps the shape: {e}"));
        value.unwrap_or_else(|| panic!("a cast has a result"))
    }
}
