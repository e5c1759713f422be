//! The optimizer's graph against a few lines of plain code, over several steps: AdamW, clipping, the rate.

use std::collections::BTreeMap;

use ir::dsl::Model;
use ir::state::{AdamW, Init};
use ir::{Binary, DType, Graph, Op};
use meshc_tests::meaning::{feeds, taps, tensor};
use runtime::lockstep::{Feeds, one_device};
use runtime::tensor::Tensor;

const ROWS: usize = 4;
const INPUTS: usize = 3;
const OUTPUTS: usize = 2;
const STEPS: usize = 5;

/// The sum over rows that count of (x w + bias)^2; `w` decays, `bias` does not.
fn model(adamw: AdamW) -> Graph {
    let mut m = Model::new();
    for (name, size) in [("b", ROWS), ("a", INPUTS), ("c", OUTPUTS)] {
        m.dim(name, size);
    }
    let x = m.input("x", DType::F32, "b a");
    let label = m.input("label", DType::I32, "b");
    let w = m.parameter("w", "a c", Init::Normal(1.0));
    let bias = m.parameter("bias", "c", Init::Zeros);
    let y = m.einsum("b c", &[&x, &w]);
    let y = m.add(&[&y, &bias]);
    let zero = m.constant(0.0, DType::I32);
    let counts = m.binary(Binary::Ge, &label, &zero);
    let counts = m.cast(&counts, DType::F32);
    let sum = m.einsum("", &[&y, &y, &counts]);
    let count = m.einsum("", &[&counts]);
    m.loss(&sum, &count);
    let mut graph = m.finish().unwrap_or_else(|e| panic!("{}", e[0]));
    graph.optimizer = Some(adamw);
    graph.dump = true;
    graph
}

/// What each step must give, in order: loss, norm, rate, and the parameters after it.
struct Expected {
    numbers: [f64; 3],
    w: Vec<f64>,
    bias: Vec<f64>,
}

/// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, in plain code.
fn plain(a: &AdamW, x: &[Vec<f64>], labels: &[Vec<f64>], w: Vec<f64>, bias: Vec<f64>) -> Vec<Expected> {
    let mut p: Vec<f64> = [w, bias].concat();
    let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
    let mut out = Vec::new();
    for step in 0..STEPS {
        let mut gradient = vec![0.0; p.len()];
        let (mut loss, mut count) = (0.0, 0.0);
        for b in (0..ROWS).filter(|b| labels[step][*b] >= 0.0) {
            count += 1.0;
            for c in 0..OUTPUTS {
                let row = &x[step][b * INPUTS..(b + 1) * INPUTS];
                let last = INPUTS * OUTPUTS + c;
                let y = (0..INPUTS).map(|i| row[i] * p[i * OUTPUTS + c]).sum::<f64>() + p[last];
                loss += y * y;
                (0..INPUTS).for_each(|i| gradient[i * OUTPUTS + c] += 2.0 * y * row[i]);
                gradient[last] += 2.0 * y;
            }
        }
        let count = f64::max(count, 1.0);
        gradient.iter_mut().for_each(|g| *g /= count);
        let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        let clip = a.clip.map_or(1.0, |c| f64::min(1.0, c / (norm + 1e-6)));
        let t = step as f64 + 1.0;
        let rate = if step < a.warmup {
            a.lr * t / a.warmup as f64
        } else {
            let done = (step - a.warmup) as f64 / (a.steps - a.warmup) as f64;
            a.min_lr + (a.lr - a.min_lr) * (1.0 + (std::f64::consts::PI * done).cos()) / 2.0
        };
        for i in 0..p.len() {
            let g = gradient[i] * clip;
            let decay = if i < INPUTS * OUTPUTS { a.weight_decay } else { 0.0 };
            m[i] = a.beta1 * m[i] + (1.0 - a.beta1) * g;
            v[i] = a.beta2 * v[i] + (1.0 - a.beta2) * g * g;
            let mean = m[i] / (1.0 - a.beta1.powf(t));
            let root = (v[i] / (1.0 - a.beta2.powf(t))).sqrt() + a.eps;
            p[i] = p[i] * (1.0 - rate * decay) - rate * mean / root;
        }
        let (w, bias) = p.split_at(INPUTS * OUTPUTS);
        out.push(Expected { numbers: [loss / count, norm, rate], w: w.to_vec(), bias: bias.to_vec() });
    }
    out
}

/// Several optimizers, and labels of which few or none count in a step, against plain code. `change` is done to each
/// graph before it runs.
///
/// # Errors
/// The first number that differs.
pub fn check(change: &dyn Fn(&mut Graph)) -> Result<(), String> {
    let usual = AdamW { lr: 0.1, steps: 6, beta1: 0.8, beta2: 0.9, ..AdamW::default() };
    for (name, adamw) in [
        ("plain", usual),
        ("weight decay", AdamW { weight_decay: 0.3, ..usual }),
        ("clip", AdamW { clip: Some(0.5), ..usual }),
        ("clip that is never reached", AdamW { clip: Some(1e9), ..usual }),
        ("warm-up", AdamW { warmup: 3, min_lr: 0.02, ..usual }),
        ("all", AdamW { weight_decay: 0.1, clip: Some(1.0), warmup: 2, min_lr: 0.01, eps: 1e-3, ..usual }),
    ] {
        let graph = meshc_tests::meaning::step(model(adamw), &ir::Mesh::default(), BTreeMap::new()).graph;
        let mut graph = graph;
        change(&mut graph);
        run(&adamw, &graph).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn run(adamw: &AdamW, graph: &Graph) -> Result<(), String> {
    let batches: Vec<Feeds<f64>> = (0..STEPS as u64).map(|s| feeds(graph, BTreeMap::new(), s)).collect();
    let x: Vec<Vec<f64>> = batches.iter().map(|f| f["x"].data.clone()).collect();
    let none = -100.0;
    let labels = [[1.0, 0.0, 2.0, 3.0], [none, 0.0, none, none], [none; 4], [1.0, none, 1.0, none], [0.0; 4]];
    let labels: Vec<Vec<f64>> = labels.map(Vec::from).into();
    let mut state: Feeds<f64> = batches[0].clone();
    for zero in ["w.m", "w.v", "bias.m", "bias.v", "step"] {
        state.entry(zero.into()).and_modify(|t| t.data.fill(0.0));
    }
    let expected = plain(adamw, &x, &labels, state["w"].data.clone(), state["bias"].data.clone());
    for (step, want) in expected.iter().enumerate() {
        state.insert("x".into(), tensor(&[ROWS, INPUTS], &x[step]));
        state.insert("label".into(), tensor(&[ROWS], &labels[step]));
        let values = one_device(graph, &state);
        let taps = taps(graph);
        let numbers = ["loss", "grad_norm", "lr"].map(|name| values[taps[name].index()].data[0]);
        for node in &graph.nodes {
            if let Op::Assign(name) = &node.op {
                state.insert(name.clone(), values[node.args[0].index()].clone());
            }
        }
        let near = |what: &str, got: &[f64], want: &[f64]| {
            let off =
                tensor(&[got.len()], got).distance(&Tensor { shape: vec![want.len()], data: want.to_vec() });
            if off < 1e-12 { Ok(()) } else { Err(format!("step {step}: {what} is off by {off:.1e}")) }
        };
        near("loss, norm or rate", &numbers, &want.numbers)?;
        near("w", &state["w"].data, &want.w)?;
        near("bias", &state["bias"].data, &want.bias)?;
        near("step", &state["step"].data, &[step as f64 + 1.0])?;
    }
    Ok(())
}

#[test]
fn the_optimizer_is_what_plain_code_computes() {
    check(&|_| {}).unwrap_or_else(|e| panic!("{e}"));
}
