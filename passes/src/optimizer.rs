//! After it the graph also makes the step: the loss, the gradients' global norm, clipping, the rate, and AdamW for every
//! trainable parameter, all in the update, once a step. Taps: `loss`, `grad_norm`, `lr`, and
//! `grad.NAME` of each parameter.
//!
//! Division by the number of labels that count stands here, on sums over all micro-batches and ranks: a mean inside a
//! micro-batch would become a mean of means.
//!
//! ```text
//! adamw lr=0.001 ...                gradient w v8            loss v5 / v6
//!   ->
//! v9 = accumulate v8                    the sum over micro-batches
//! v12 = einsum v9, v11                  over the count
//! ...
//! assign(w) v30    assign(w.m) v20    assign(w.v) v25
//! ```

use std::collections::HashMap;

use ir::dsl::{Model, Tensor};
use ir::graph::Rewrite;
use ir::state::{AdamW, Init, Role, State};
use ir::{Binary, DType, Graph, Name, Node, Op, Part, Unary, Value};

pub(crate) fn run(graph: &mut Graph) {
    let Some(loss) = graph.loss.take() else { return };
    let gradients = std::mem::take(&mut graph.gradients);
    let adamw = graph.optimizer.take();
    let scatters = std::mem::take(&mut graph.scatters);
    let layers = layers(graph);
    let makers = graph.makers();
    let gradients: Vec<(Name, Vec<Value>)> =
        gradients.into_iter().map(|(name, v)| (name, by_stage(graph, &makers, v))).collect();
    let mut m = Model::resume(std::mem::take(graph), Part::Update);
    let sum = m.accumulate(&Tensor { value: loss.sum, dims: Vec::new() });
    let count = m.accumulate(&Tensor { value: loss.count, dims: Vec::new() });
    // If no label counts, the sums are 0 and so are loss and gradient.
    let one = m.constant(1.0, DType::F32);
    let at_least_one = m.binary(Binary::Max, &count, &one);
    let mean = m.div(&sum, &at_least_one);
    m.tap("loss", &mean);
    if let Some(adamw) = adamw.filter(|_| !gradients.is_empty()) {
        let inverse = m.div(&one, &at_least_one);
        update(&mut m, &adamw, &gradients, &inverse, &layers);
    }
    *graph = m.finish().unwrap_or_else(|e| panic!("the optimizer's graph is wrong: {}", e[0]));
    if scatters {
        let parts = gradients.iter().flat_map(|(name, parts)| parts.iter().map(move |v| (name, *v)));
        let states = graph.states_by_name();
        let first = |name: &Name| Some(states.get(&*moment(name, FIRST))?.name.clone());
        let follow = |(name, v): (&Name, Value)| Some((v, first(name)?));
        graph.follows = parts.filter_map(follow).collect();
    }
    sum_at_once(graph);
}

/// The suffixes of the moments' names.
const FIRST: &str = "m";
const SECOND: &str = "v";

fn moment(parameter: &Name, suffix: &str) -> Name {
    format!("{parameter}.{suffix}").into()
}

/// What the stages of a pipeline contribute to a gradient, in their order: the gradient itself, if one stage has it all.
fn by_stage(graph: &Graph, makers: &[usize], gradient: Value) -> Vec<Value> {
    let maker = |v: Value| graph.nodes.get(makers[v.index()]);
    let stage = |v: &Value| maker(*v).map_or(0, |n| graph.stage(n.mark));
    match maker(gradient) {
        Some(sum)
            if sum.op == Op::Add
                && sum.mark.part == Part::Weight
                && sum.args.iter().any(|v| stage(v) != stage(&sum.args[0])) =>
        {
            sum.args.clone()
        }
        Some(_) | None => vec![gradient],
    }
}

/// By value the layer of the node that makes it.
fn layers(graph: &Graph) -> Vec<u32> {
    let makers = graph.makers();
    makers.iter().map(|i| graph.nodes.get(*i).map_or(0, |n| n.mark.layer)).collect()
}

/// What is summed over micro-batches is added to its sum where it is computed, and in that part of the step: then none
/// waits for the others.
fn sum_at_once(graph: &mut Graph) {
    let makers = graph.makers();
    let mut sums: Vec<Vec<Node>> = vec![Vec::new(); graph.nodes.len()];
    for node in graph.nodes.iter().filter(|n| n.op == Op::Accumulate) {
        let of = makers[node.args[0].index()];
        sums[of].push(Node { mark: graph.nodes[of].mark, ..node.clone() });
    }
    let dump = graph.dump;
    let mut new = Rewrite::of(graph);
    for (node, sums) in std::mem::take(&mut graph.nodes).into_iter().zip(sums) {
        if node.op != Op::Accumulate {
            new.put(&graph.values, node);
        }
        for sum in sums {
            new.put(&graph.values, sum);
        }
    }
    *graph = Graph { dump, ..new.finish(graph) };
}

/// What the update of every parameter shares.
struct Shared {
    /// What a summed gradient is multiplied with: one over the count, and less where the global norm is above what was
    /// asked.
    factor: Tensor,
    /// The negative rate over 1 - beta1^t.
    rate: Tensor,
    /// 1 / sqrt(1 - beta2^t).
    root: Tensor,
    /// 1 - rate times weight decay.
    keep: Tensor,
}

fn update(m: &mut Model, a: &AdamW, gradients: &[(Name, Vec<Value>)], inverse: &Tensor, layers: &[u32]) {
    let step = m.step();
    let states = states(m.graph());
    let grads: Vec<(Name, Tensor)> = gradients
        .iter()
        .map(|(name, parts)| {
            let dims = states.get(name).map_or(Vec::new(), |(state, _)| dims(state));
            let sums: Vec<Tensor> = parts
                .iter()
                .map(|v| {
                    m.at_mark(layers[v.index()]);
                    m.accumulate(&Tensor { value: *v, dims: dims.clone() })
                })
                .collect();
            let sum = match &sums[..] {
                [one] => one.clone(),
                [] | [_, ..] => m.add(&sums.iter().collect::<Vec<_>>()),
            };
            // Only for the tap: norm and update take the sum, so that nothing as large is kept.
            let mean = m.mul(&[&sum, inverse]);
            m.tap(&format!("grad.{name}"), &mean);
            (name.clone(), sum)
        })
        .collect();
    m.at_mark(0);
    let squares: Vec<Tensor> = grads.iter().map(|(_, g)| m.einsum("", &[g, g])).collect();
    let square = m.add(&squares.iter().collect::<Vec<_>>());
    let norm = m.unary(Unary::Sqrt, &square);
    let norm = m.mul(&[&norm, inverse]);
    m.tap("grad_norm", &norm);
    let factor = a.clip.map_or(inverse.clone(), |clip| {
        let norm = m.offset(&norm, 1e-6);
        let limit = m.constant(clip, DType::F32);
        let ratio = m.div(&limit, &norm);
        let one = m.constant(1.0, DType::F32);
        let clip = m.binary(Binary::Min, &ratio, &one);
        m.mul(&[&clip, inverse])
    });
    let shared = shared(m, a, &step, factor);
    for ((name, gradient), (_, parts)) in grads.iter().zip(gradients) {
        m.at_mark(parts.first().map_or(0, |v| layers[v.index()]));
        if let Some((state, Some(parameter))) = states.get(name) {
            adamw(m, a, (state, *parameter), gradient, &shared);
        }
    }
    m.at_mark(0);
    let one = m.constant(1.0, DType::I32);
    let next = m.add(&[&step, &one]);
    m.assign("step", &next);
}

/// The states by name, and the value of each that is used.
fn states(graph: &Graph) -> HashMap<Name, (State, Option<Value>)> {
    let mut values: HashMap<&Name, Value> = HashMap::new();
    for node in &graph.nodes {
        if let Op::State(name) = &node.op {
            values.entry(name).or_insert(node.results[0]);
        }
    }
    let state = |s: &State| (s.name.clone(), (s.clone(), values.get(&s.name).copied()));
    graph.states.iter().map(state).collect()
}

fn dims(state: &State) -> Vec<Name> {
    state.dims.iter().map(|(name, _)| name.clone()).collect()
}

/// The rate, and the bias corrections (Kingma and Ba, "Adam", section 3): 1 - beta^t is -expm1(t log beta), exact for
/// beta near 1.
fn shared(m: &mut Model, a: &AdamW, step: &Tensor, factor: Tensor) -> Shared {
    let step = m.cast(step, DType::F32);
    let t = m.offset(&step, 1.0);
    let lr = rate(m, a, &step, &t);
    m.tap("lr", &lr);
    let correction = |m: &mut Model, beta: f64| {
        let exponent = m.scale(beta.ln(), &t);
        let less = m.unary(Unary::Expm1, &exponent);
        m.scale(-1.0, &less)
    };
    let first = correction(m, a.beta1);
    let second = correction(m, a.beta2);
    let rate = m.div(&lr, &first);
    let rate = m.scale(-1.0, &rate);
    let root = m.unary(Unary::Rsqrt, &second);
    let decay = m.scale(-a.weight_decay, &lr);
    let keep = m.offset(&decay, 1.0);
    Shared { factor, rate, root, keep }
}

/// lr (step + 1) / warmup while warming up, then min + (lr - min) (1 + cos(pi (step - warmup) / (steps - warmup))) / 2.
fn rate(m: &mut Model, a: &AdamW, step: &Tensor, t: &Tensor) -> Tensor {
    let rest = a.steps.saturating_sub(a.warmup).max(1) as f64;
    let done = m.offset(step, -(a.warmup as f64));
    let angle = m.scale(std::f64::consts::PI / rest, &done);
    let cosine = m.unary(Unary::Cos, &angle);
    let above = m.offset(&cosine, 1.0);
    let above = m.scale((a.lr - a.min_lr) / 2.0, &above);
    let falling = m.offset(&above, a.min_lr);
    if a.warmup == 0 {
        return falling;
    }
    let rising = m.scale(a.lr / a.warmup as f64, t);
    let warm = m.constant(a.warmup as f64, DType::F32);
    let after = m.binary(Binary::Ge, step, &warm);
    m.select(&after, &falling, &rising)
}

fn adamw(m: &mut Model, a: &AdamW, (state, parameter): (&State, Value), gradient: &Tensor, shared: &Shared) {
    let name = &state.name;
    let p = Tensor { value: parameter, dims: dims(state) };
    let mut kept = |suffix: &str| {
        let role = Role::Moment(name.clone());
        let name = moment(name, suffix);
        m.state(State {
            name,
            dtype: DType::F32,
            dims: state.dims.clone(),
            role,
            init: Init::Zeros,
            views: vec![],
        })
    };
    let (first, second) = (kept(FIRST), kept(SECOND));
    let decays = matches!(state.role, Role::Parameter { decays: true, .. }) && a.weight_decay != 0.0;
    m.composite("adamw", |m| {
        let g = m.mul(&[gradient, &shared.factor]);
        let dims = g.dims.join(" ");
        let mean = |m: &mut Model, old: &Tensor, new: &[&Tensor], beta: f64| {
            let old = m.scale(beta, old);
            let new = m.einsum_scaled(1.0 - beta, &dims, new);
            m.add(&[&old, &new])
        };
        let first = mean(m, &first, &[&g], a.beta1);
        let second = mean(m, &second, &[&g, &g], a.beta2);
        let root = m.unary(Unary::Sqrt, &second);
        let root = m.mul(&[&root, &shared.root]);
        let root = m.offset(&root, a.eps);
        let change = m.mul(&[&first, &shared.rate]);
        let change = m.div(&change, &root);
        let kept = if decays { m.mul(&[&p, &shared.keep]) } else { p };
        let new = m.add(&[&kept, &change]);
        m.assign(name, &new);
        m.assign(&moment(name, FIRST), &first);
        m.assign(&moment(name, SECOND), &second);
    });
}
