//! Planted faults: each breaks one rule, and the check of its kind must find it, else that check is worth nothing.

mod table;

use std::ops::Range;

use ir::rows::{Layout, Row, layout, rows};
use ir::{Graph, Mesh, Move, Node, Op, Part, Reduce, Sharding};
use runtime::eval::eval;
use runtime::lockstep::Kernel;
use runtime::tensor::Tensor;

use crate::{gradients, moves as pairs, optimizer, signatures, whole_steps};

/// What is broken, which says what must find it.
enum Broken {
    /// Rows, what follows from them, or the kernel: every op in pieces.
    Signature(signatures::Rules),
    /// The moves, or what one does: every pair of shardings.
    Move(pairs::Rules),
    /// A backward node that autodiff leaves: the slope of the loss.
    Gradient(fn(&mut Node)),
    /// What the optimizer leaves: plain code.
    Optimizer(fn(&mut Graph)),
    /// The kernel of the ranks: whole steps against one device.
    Kernel(Kernel<f64>),
}

impl Broken {
    /// What the check of this kind says.
    fn check(&self) -> Result<(), String> {
        match self {
            Broken::Signature(rules) => signatures::check(rules, 0..2000),
            Broken::Move(rules) => pairs::check(rules),
            Broken::Gradient(change) => gradients::check(&|graph| {
                gradients::autodiff(graph);
                graph.nodes.iter_mut().filter(|n| n.mark.part != Part::Forward).for_each(change);
            }),
            Broken::Optimizer(change) => optimizer::check(change),
            Broken::Kernel(kernel) => whole_steps::check(*kernel, 0..20),
        }
    }
}

/// An op passes a partial value through operands through which it does not.
fn pass(op: Op, reduce: Reduce, operands: &'static [usize]) -> Broken {
    let wrong = (reduce, operands.to_vec());
    let (of, extra) = (op.clone(), Row::Pass(reduce, operands.to_vec()));
    let with = move |graph: &Graph, node: &Node| {
        let mut all = rows(graph, node);
        let fits = node.op == of && operands.iter().all(|i| *i < node.args.len());
        all.extend(fits.then(|| extra.clone()));
        all
    };
    let follows = move |graph: &Graph, node: &Node, strategy: &ir::rows::Strategy, mesh: &Mesh| {
        let is_wrong = |p: &(ir::Axis, Reduce, Vec<usize>)| node.op == op && (p.1, p.2.clone()) == wrong;
        let mut legal = strategy.clone();
        legal.pass.retain(|p| !is_wrong(p));
        let mut out = layout(graph, node, &legal, mesh)?;
        for (axis, reduce, which) in strategy.pass.iter().filter(|p| is_wrong(p)) {
            which.iter().for_each(|i| out.args[*i].partial.push((*axis, *reduce)));
            out.results.iter_mut().for_each(|r| r.partial.push((*axis, *reduce)));
        }
        Some(out)
    };
    let rules = signatures::Rules::default();
    Broken::Signature(signatures::Rules { rows: Box::new(with), layout: Box::new(follows), ..rules })
}

/// What follows from a strategy of `op` is changed.
fn follows(op: Op, change: fn(&mut Layout)) -> Broken {
    let follows = move |graph: &Graph, node: &Node, strategy: &ir::rows::Strategy, mesh: &Mesh| {
        let mut out = layout(graph, node, strategy, mesh)?;
        if node.op == op {
            change(&mut out);
        }
        Some(out)
    };
    Broken::Signature(signatures::Rules { layout: Box::new(follows), ..signatures::Rules::default() })
}

/// A rank computes otherwise.
fn kernel(kernel: Kernel<f64>) -> Broken {
    Broken::Signature(signatures::Rules { kernel, ..signatures::Rules::default() })
}

/// A move does otherwise.
fn performs(apply: pairs::Performs) -> Broken {
    Broken::Move(pairs::Rules { apply, ..pairs::Rules::default() })
}

/// Other moves lead from one sharding to another.
fn leads(moves: fn(&Sharding, &Sharding, &Mesh) -> Vec<Move>) -> Broken {
    Broken::Move(pairs::Rules { moves: Box::new(moves), ..pairs::Rules::default() })
}

/// The kernel of one op takes every range to start at 0.
fn from_zero(op: &Op, node: &Node, ranges: &[Range<usize>], args: &[&Tensor<f64>]) -> Tensor<f64> {
    let zero: Vec<Range<usize>> = ranges.iter().map(|r| 0..r.len()).collect();
    eval(node, if node.op == *op { &zero } else { ranges }, args)
}

#[test]
fn every_planted_fault_is_found() {
    let mut missed = Vec::new();
    for (name, broken) in table::faults() {
        match broken.check() {
            Ok(()) => missed.push(name),
            Err(found) => println!("{name}\n    {found}"),
        }
    }
    assert_eq!(missed, Vec::<&str>::new(), "faults that no check finds");
}
