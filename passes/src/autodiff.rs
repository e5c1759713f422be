//! After it the graph also computes the gradient of the summed loss by every trainable parameter.
//!
//! Reverse mode on whole tensors, before anything is split, so that backward collectives need no code of their own.
//! A backward node has the layer of the forward node that it comes from, and says which one (`of`) and whose gradient
//! it is (`like`). What is asked of a value is asked of its gradient. Composites that have a gradient body get it instead
//! of the gradients of their primitives.
//!
//! ```text
//! v2 = einsum v0, v1 : m k, k n -> m n     | 0 forward
//! v7 = einsum v6, v1 : m n, k n -> m k     | 0 input of=v2 like=v0
//! v8 = einsum v6, v0 : m n, m k -> k n     | 0 weight of=v2 like=v1
//! ```

use std::collections::{BTreeMap, BTreeSet};

use ir::composite::{GRADIENTS, Gradient, Roles};
use ir::dsl::{Model, Tensor};
use ir::graph::{Constraint, Mark, NewNode};
use ir::signature::Dim;
use ir::state::Role;
use ir::{Binary, DType, Graph, Node, Op, Part, Signature, Unary, Value};

pub(crate) fn run(graph: &mut Graph) {
    let Some(loss) = graph.loss else { return };
    let parameters = parameters(graph);
    let forward = graph.nodes.clone();
    let depends = depends(graph, &parameters);
    let states = forward.iter().filter(|n| matches!(n.op, Op::State(_))).map(|n| n.results[0]).collect();
    let parts = vec![Vec::new(); graph.values.len()];
    let model = Model::resume(std::mem::take(graph), Part::Input);
    let mut back = Back { depends, parts, states, model };
    let one = back.push(Op::Const(1.0), scalar(), Vec::new(), seed_mark(&forward, loss.sum), None);
    let dtype = back.model.graph().ty(loss.sum).dtype;
    back.model.graph_mut().values[one.index()].dtype = dtype;
    back.parts[loss.sum.index()].push(one);
    let composites = composites(&forward);
    for node in forward.iter().rev() {
        let Some(result) = node.results.first().copied() else { continue };
        if !back.depends[result.index()] || back.parts[result.index()].is_empty() {
            continue;
        }
        let dz = back.total(result, node.mark);
        if matches!(node.op, Op::State(_)) {
            continue;
        }
        back.constrain(result, dz);
        match composites.get(&result) {
            Some((gradient, roles)) => back.composite(node, gradient, roles, dz),
            None => back.node(node, dz),
        }
    }
    let parts = std::mem::take(&mut back.parts);
    *graph = back.model.finish().unwrap_or_else(|e| panic!("a gradient body is wrong: {}", e[0]));
    graph.gradients =
        parameters.iter().filter_map(|(name, v)| Some((name.clone(), *parts[v.index()].first()?))).collect();
}

fn scalar() -> Signature {
    Signature { factors: Vec::new(), args: Vec::new(), results: vec![Vec::new()] }
}

fn seed_mark(forward: &[Node], loss: Value) -> Mark {
    let layer = forward.iter().find(|n| n.results.contains(&loss)).map_or(0, |n| n.mark.layer);
    Mark { layer, part: Part::Input }
}

fn parameters(graph: &Graph) -> Vec<(ir::Name, Value)> {
    let states = graph.states_by_name();
    let trainable = |name: &ir::Name| {
        states.get(&**name).is_some_and(|s| matches!(s.role, Role::Parameter { trainable: true, .. }))
    };
    let parameter = |n: &Node| {
        let Op::State(name) = &n.op else { return None };
        trainable(name).then(|| (name.clone(), n.results[0]))
    };
    graph.nodes.iter().filter_map(parameter).collect()
}

/// For each value whether it depends on a parameter through floats, no `stop` and no top-k.
fn depends(graph: &Graph, parameters: &[(ir::Name, Value)]) -> Vec<bool> {
    let mut depends = vec![false; graph.values.len()];
    parameters.iter().for_each(|(_, v)| depends[v.index()] = true);
    for node in &graph.nodes {
        let through = !matches!(node.op, Op::Unary(Unary::Stop) | Op::TopK)
            && node.args.iter().any(|v| depends[v.index()]);
        for v in node.results.iter().filter(|v| graph.ty(**v).dtype.is_float()) {
            depends[v.index()] |= through;
        }
    }
    depends
}

/// The instances that have a gradient body, by the value that it differentiates.
fn composites(forward: &[Node]) -> BTreeMap<Value, (&'static Gradient, Roles)> {
    let mut instances: BTreeMap<u32, (Option<&Gradient>, Roles)> = BTreeMap::new();
    for node in forward {
        if let Some(tag) = &node.tag {
            let gradient = || GRADIENTS.iter().find(|g| *tag.composite == *g.composite);
            let instance = instances.entry(tag.instance).or_insert_with(|| (gradient(), Roles::default()));
            instance.1.insert(tag.role.clone(), node.clone());
        }
    }
    let mut out = BTreeMap::new();
    for (gradient, roles) in instances.into_values() {
        if let Some(gradient) = gradient
            && let Some(output) = roles.get(gradient.output)
        {
            out.insert(output.results[0], (gradient, roles));
        }
    }
    out
}

struct Back {
    model: Model,
    depends: Vec<bool>,
    /// For each forward value the contributions to its gradient so far.
    parts: Vec<Vec<Value>>,
    /// What states hold.
    states: BTreeSet<Value>,
}

impl Back {
    fn push(
        &mut self,
        op: Op,
        signature: Signature,
        args: Vec<Value>,
        mark: Mark,
        of: Option<&Node>,
    ) -> Value {
        let operand = usize::from(op == Op::Select);
        let truth = matches!(&op, Op::Binary(b) if b.is_comparison());
        let dtype = args.get(operand).map_or(DType::F32, |v| self.model.graph().ty(*v).dtype);
        let dtype = if truth { DType::Bool } else { dtype };
        let known = of.map_or(Vec::new(), |n| {
            n.signature.factors.iter().cloned().zip(n.sizes.iter().copied()).collect()
        });
        let of = of.map(|n| n.results[0]);
        let new = NewNode { op, signature, args, dtype, known, mark, tag: None, of, like: None };
        let value = self.model.write(new).unwrap_or_else(|e| panic!("a gradient's signature is wrong: {e}"));
        value.unwrap_or_else(|| panic!("a gradient's op has a result"))
    }

    fn part(&self, of: Value) -> Part {
        if self.states.contains(&of) { Part::Weight } else { Part::Input }
    }

    /// The sum of the contributions to a value's gradient; afterwards they are one.
    fn total(&mut self, value: Value, mark: Mark) -> Value {
        let parts = std::mem::take(&mut self.parts[value.index()]);
        let part = self.part(value);
        // What several stages contribute is summed in each of them first: less is sent, or kept for the update.
        let mut stages: BTreeMap<usize, (Mark, Vec<Value>)> = BTreeMap::new();
        for v in parts {
            let own = self.mark_of(v).unwrap_or(mark);
            stages.entry(self.model.graph().stage(own)).or_insert((own, Vec::new())).1.push(v);
        }
        let here = self.model.graph().stage(mark);
        let mut sums = Vec::new();
        for (stage, (own, parts)) in stages {
            let at = if stage == here { mark } else { own };
            sums.push(self.sum(value, Mark { part, ..at }, parts));
        }
        let total = self.sum(value, Mark { part, ..mark }, sums);
        self.parts[value.index()] = vec![total];
        total
    }

    /// The mark of the node that makes a value of the backward pass.
    fn mark_of(&self, v: Value) -> Option<Mark> {
        self.model.graph().nodes.iter().rev().find(|n| n.results.contains(&v)).map(|n| n.mark)
    }

    /// The sum of contributions to the gradient of a value; of one, that.
    fn sum(&mut self, value: Value, mark: Mark, parts: Vec<Value>) -> Value {
        if let [one] = parts[..] {
            return one;
        }
        let signature = Signature::pointwise(self.model.graph().shape(value).len(), parts.len());
        let total = self.push(Op::Add, signature, parts, mark, None);
        self.like(total, value);
        total
    }

    /// What the user asked of a value is asked of its gradient, unless that is the gradient of another, too.
    fn constrain(&mut self, value: Value, gradient: Value) {
        let constraints = &mut self.model.graph_mut().constraints;
        let asked = constraints.iter().find(|c| c.value == value).cloned();
        if !constraints.iter().any(|c| c.value == gradient) {
            constraints.extend(asked.map(|c| Constraint { value: gradient, ..c }));
        }
    }

    fn like(&mut self, gradient: Value, value: Value) {
        let maker = self.model.graph_mut().nodes.iter_mut().rev().find(|n| n.results.contains(&gradient));
        maker.into_iter().for_each(|n| n.like = Some(value));
    }

    fn composite(&mut self, node: &Node, gradient: &Gradient, roles: &Roles, dz: Value) {
        let from = self.model.graph().nodes.len();
        self.model.at_mark(node.mark.layer);
        let dims = node.signature.results[0].iter().map(|d| node.signature.factors[d[0]].clone()).collect();
        let out = (gradient.body)(&mut self.model, roles, &Tensor { value: dz, dims });
        for (value, d) in out {
            let maker =
                self.model.graph_mut().nodes[from..].iter_mut().find(|n| n.results.contains(&d.value));
            maker.into_iter().for_each(|n| n.like = Some(value));
            if self.depends[value.index()] {
                self.parts[value.index()].push(d.value);
            }
        }
    }

    fn node(&mut self, node: &Node, dz: Value) {
        for (i, arg) in node.args.iter().enumerate() {
            if !self.depends[arg.index()] {
                continue;
            }
            let part = self.part(*arg);
            let from = self.model.graph().nodes.len();
            if let Some(d) = self.vjp(node, i, dz, Mark { layer: node.mark.layer, part }) {
                let result = node.results[0];
                for k in from..self.model.graph().nodes.len() {
                    let shape = self.model.graph().shape(self.model.graph().nodes[k].results[0]);
                    if shape == self.model.graph().shape(result) {
                        self.model.graph_mut().nodes[k].like = Some(result);
                    }
                }
                if self.model.graph().nodes.len() > from {
                    self.like(d, *arg);
                }
                self.parts[arg.index()].push(d);
            }
        }
    }

    /// The gradient by operand `i`, from that of the result.
    fn vjp(&mut self, node: &Node, i: usize, dz: Value, mark: Mark) -> Option<Value> {
        let s = &node.signature;
        let arg = |k: usize| s.args[k].clone();
        let z = s.results[0].clone();
        let result = node.results[0];
        let einsum = |scale: f64| Op::Einsum { scale };
        let mut op = |op: Op, args: Vec<Vec<Dim>>, to: Vec<Dim>, values: Vec<Value>| {
            let same = args.len() == 1 && args[0] == to && op == einsum(1.0);
            if same {
                values[0]
            } else if matches!(op, Op::Const(_)) {
                let value = self.push(op, scalar(), values, mark, None);
                let dtype = self.model.graph().ty(result).dtype;
                self.model.graph_mut().values[value.index()].dtype = dtype;
                value
            } else {
                self.push(op, s.turned(args, vec![to]), values, mark, Some(node))
            }
        };
        Some(match &node.op {
            Op::Einsum { scale } => {
                let others: Vec<usize> = (0..node.args.len()).filter(|k| *k != i).collect();
                let dims = std::iter::once(z).chain(others.iter().map(|k| arg(*k))).collect();
                let values = std::iter::once(dz).chain(others.iter().map(|k| node.args[*k])).collect();
                op(einsum(*scale), dims, arg(i), values)
            }
            Op::Add => op(einsum(1.0), vec![z], arg(i), vec![dz]),
            Op::Binary(Binary::Sub) => op(einsum(if i == 0 { 1.0 } else { -1.0 }), vec![z], arg(i), vec![dz]),
            Op::Binary(Binary::Div) => {
                let q =
                    op(Op::Binary(Binary::Div), vec![z.clone(), arg(1)], z.clone(), vec![dz, node.args[1]]);
                match i {
                    0 => op(einsum(1.0), vec![z], arg(0), vec![q]),
                    _ => op(einsum(-1.0), vec![z.clone(), z], arg(1), vec![q, result]),
                }
            }
            Op::Binary(Binary::Max | Binary::Min) => {
                // The operand that was taken gets it; of equal ones the first.
                let (x, y) = match (&node.op, i) {
                    (Op::Binary(Binary::Max), 0) => (0, 1),
                    (Op::Binary(Binary::Min), 0) => (1, 0),
                    (Op::Binary(Binary::Max), _) => (0, 1),
                    _ => (1, 0),
                };
                let first = op(
                    Op::Binary(Binary::Ge),
                    vec![arg(x), arg(y)],
                    z.clone(),
                    vec![node.args[x], node.args[y]],
                );
                let zero = op(Op::Const(0.0), vec![], vec![], vec![]);
                let args = vec![
                    z.clone(),
                    if i == 0 { z.clone() } else { vec![] },
                    if i == 0 { vec![] } else { z.clone() },
                ];
                let values = if i == 0 { vec![first, dz, zero] } else { vec![first, zero, dz] };
                let taken = op(Op::Select, args, z.clone(), values);
                op(einsum(1.0), vec![z], arg(i), vec![taken])
            }
            Op::Select => {
                let zero = op(Op::Const(0.0), vec![], vec![], vec![]);
                let (args, values) = match i {
                    1 => (vec![arg(0), z.clone(), vec![]], vec![node.args[0], dz, zero]),
                    _ => (vec![arg(0), vec![], z.clone()], vec![node.args[0], zero, dz]),
                };
                let taken = op(Op::Select, args, z.clone(), values);
                op(einsum(1.0), vec![z], arg(i), vec![taken])
            }
            Op::ReduceMax => {
                let top =
                    op(Op::Binary(Binary::Eq), vec![arg(0), z.clone()], arg(0), vec![node.args[0], result]);
                let zero = op(Op::Const(0.0), vec![], vec![], vec![]);
                op(Op::Select, vec![arg(0), z, vec![]], arg(0), vec![top, dz, zero])
            }
            Op::Gather if i == 0 => op(Op::Scatter, vec![z, arg(1)], arg(0), vec![dz, node.args[1]]),
            Op::Scatter if i == 0 => op(Op::Gather, vec![z, arg(1)], arg(0), vec![dz, node.args[1]]),
            Op::Cast => {
                let d = self.push(Op::Cast, s.turned(vec![z], vec![arg(0)]), vec![dz], mark, Some(node));
                let dtype = self.model.graph().ty(node.args[0]).dtype;
                self.model.graph_mut().values[d.index()].dtype = dtype;
                d
            }
            Op::Unary(u) => {
                // What the result depends on locally, with the dimensions of the operand or of the result.
                let (a, both) = (arg(0), vec![z.clone(), z.clone()]);
                let x = node.args[0];
                let (local, dims) = match u {
                    Unary::Exp => (result, z.clone()),
                    Unary::Expm1 => {
                        let one = op(Op::Const(1.0), vec![], vec![], vec![]);
                        (op(Op::Add, vec![z.clone(), vec![]], z.clone(), vec![result, one]), z.clone())
                    }
                    Unary::Log => {
                        let q =
                            op(Op::Binary(Binary::Div), vec![z.clone(), a.clone()], z.clone(), vec![dz, x]);
                        return Some(op(einsum(1.0), vec![z], a, vec![q]));
                    }
                    Unary::Tanh => {
                        let one = op(Op::Const(1.0), vec![], vec![], vec![]);
                        let square = op(einsum(1.0), both, z.clone(), vec![result, result]);
                        let args = vec![vec![], z.clone()];
                        (op(Op::Binary(Binary::Sub), args, z.clone(), vec![one, square]), z.clone())
                    }
                    Unary::Sqrt => {
                        let half = op(einsum(0.5), vec![z.clone()], z.clone(), vec![dz]);
                        let q = op(Op::Binary(Binary::Div), both, z.clone(), vec![half, result]);
                        return Some(op(einsum(1.0), vec![z], a, vec![q]));
                    }
                    Unary::Rsqrt => {
                        let args = vec![z.clone(); 4];
                        return Some(op(einsum(-0.5), args, a, vec![dz, result, result, result]));
                    }
                    Unary::Sin => (op(Op::Unary(Unary::Cos), vec![a.clone()], a.clone(), vec![x]), a.clone()),
                    Unary::Cos => {
                        let sin = op(Op::Unary(Unary::Sin), vec![a.clone()], a.clone(), vec![x]);
                        (op(einsum(-1.0), vec![a.clone()], a.clone(), vec![sin]), a.clone())
                    }
                    Unary::Sigmoid => {
                        let one = op(Op::Const(1.0), vec![], vec![], vec![]);
                        let args = vec![vec![], z.clone()];
                        let rest = op(Op::Binary(Binary::Sub), args, z.clone(), vec![one, result]);
                        (op(einsum(1.0), both, z.clone(), vec![result, rest]), z.clone())
                    }
                    Unary::Abs => {
                        (op(Op::Unary(Unary::Sign), vec![a.clone()], a.clone(), vec![x]), a.clone())
                    }
                    Unary::Relu => {
                        (op(Op::Unary(Unary::Step), vec![a.clone()], a.clone(), vec![x]), a.clone())
                    }
                    Unary::Sign | Unary::Step | Unary::Stop => return None,
                };
                op(einsum(1.0), vec![z, dims], a, vec![dz, local])
            }
            Op::Binary(Binary::Eq | Binary::Ge)
            | Op::Gather
            | Op::Scatter
            | Op::Const(_)
            | Op::Iota
            | Op::Random(_)
            | Op::TopK
            | Op::Input(_)
            | Op::State(_)
            | Op::Reshard
            | Op::Accumulate
            | Op::Assign(_)
            | Op::Tap(_) => return None,
        })
    }
}
