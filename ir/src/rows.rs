//! What one mesh axis may do to an op, and what follows for the shardings of operands and results: one generic
//! function that choosing, verifying, pricing and the table tests share.

use std::mem::discriminant;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::signature::{Dim, Factor};
use crate::{Axes, Axis, DType, FactorKind, Graph, Mesh, Node, Op, Reduce, Sharding, Signature};

/// What one mesh axis does to one op.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Row {
    /// Every rank along the axis does the same.
    Nothing,
    /// It splits this factor.
    Factor(Factor),
    /// It passes a partial value through these operands together.
    Pass(Reduce, Vec<usize>),
}

/// How an op is split: one row an axis, and for each factor its axes in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Strategy {
    /// For each factor the axes that split it, outermost first.
    pub split: Vec<Axes>,
    /// Axes along which operands are partial, and so is the result.
    pub pass: Vec<(Axis, Reduce, Vec<usize>)>,
}

impl Strategy {
    /// Every rank does everything.
    pub fn whole(node: &Node) -> Strategy {
        Strategy { split: vec![Axes::new(); node.sizes.len()], pass: Vec::new() }
    }

    /// What an axis does.
    pub fn row(&self, axis: Axis) -> Row {
        if let Some((_, reduce, args)) = self.pass.iter().find(|(a, ..)| *a == axis) {
            return Row::Pass(*reduce, args.clone());
        }
        let factor = self.split.iter().position(|axes| axes.contains(&axis));
        factor.map_or(Row::Nothing, Row::Factor)
    }

    /// The text form: `d=tp b=dp.ep pass(tp: 0 1)`.
    pub fn show(&self, node: &Node, mesh: &Mesh) -> String {
        let mut words = Vec::new();
        for (f, axes) in self.split.iter().enumerate().filter(|(_, axes)| !axes.is_empty()) {
            words.push(format!("{}={}", node.signature.factors[f], mesh.show(axes)));
        }
        for (axis, reduce, args) in &self.pass {
            let args: Vec<String> = args.iter().map(usize::to_string).collect();
            words.push(format!("pass({}{}: {})", reduce.prefix(), mesh.name(*axis), args.join(" ")));
        }
        words.join(" ")
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str, node: &Node, mesh: &Mesh) -> Result<Strategy, String> {
        let mut strategy = Strategy::whole(node);
        let axes =
            |name: &str| mesh.find(name).ok_or_else(|| format!("the mesh `{mesh}` has no axis `{name}`"));
        let mut rest = text.trim();
        while !rest.is_empty() {
            if let Some(inner) = rest.strip_prefix("pass(") {
                let (inner, after) = inner.split_once(')').ok_or("`pass(` without `)`")?;
                let (axis, args) = inner.split_once(':').ok_or("a pass reads `pass(axis: 0 1)`")?;
                let (reduce, axis) = Reduce::of_prefixed(axis.trim());
                let args =
                    args.split_whitespace().map(|a| a.parse().map_err(|_| format!("`{a}` is no operand")));
                let args = args.collect::<Result<Vec<usize>, String>>()?;
                strategy.pass.extend(axes(axis)?.into_iter().map(|a| (a, reduce, args.clone())));
                rest = after.trim();
            } else {
                let (word, after) = rest.split_once(' ').unwrap_or((rest, ""));
                let (factor, names) =
                    word.split_once('=').ok_or_else(|| format!("`{word}` reads factor=axes"))?;
                let signature = &node.signature;
                let f = signature
                    .factor(factor)
                    .ok_or_else(|| format!("`{signature}` has no factor `{factor}`"))?;
                for name in names.split('.') {
                    strategy.split[f].extend(axes(name)?);
                }
                rest = after.trim();
            }
        }
        Ok(strategy)
    }
}

/// Whether a cast from `from` to `to` loses nothing, so that it may act on contributions.
pub fn widens(from: DType, to: DType) -> bool {
    from.is_float() && to.is_float() && from.bytes() < to.bytes() || from == to
}

/// The rows that are legal for each axis taken alone.
pub fn rows(graph: &Graph, node: &Node) -> Vec<Row> {
    let mut rows = vec![Row::Nothing];
    if matches!(node.op, Op::Reshard) {
        return rows;
    }
    rows.extend((0..node.sizes.len()).filter(|f| may_split(node, *f)).map(Row::Factor));
    rows.extend(passes(graph, node).into_iter().map(|(k, args)| Row::Pass(k, args)));
    rows
}

fn may_split(node: &Node, factor: Factor) -> bool {
    node.op.kind(&node.signature, factor) != FactorKind::Whole
}

fn passes(graph: &Graph, node: &Node) -> Vec<(Reduce, Vec<usize>)> {
    let widens = match (node.args.first(), node.results.first()) {
        (Some(a), Some(r)) => widens(graph.ty(*a).dtype, graph.ty(*r).dtype),
        (None, _) | (_, None) => false,
    };
    node.op.passes(node.args.len(), widens)
}

/// The shardings that a strategy needs of the operands and gives the results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// What each operand must be.
    pub args: Vec<Sharding>,
    /// What each result is.
    pub results: Vec<Sharding>,
}

/// What follows from a strategy; none if it cannot be written down or is not legal.
pub fn layout(graph: &Graph, node: &Node, strategy: &Strategy, mesh: &Mesh) -> Option<Layout> {
    if strategy.split.len() != node.sizes.len() {
        return None;
    }
    let used: Axes =
        strategy.split.iter().flatten().copied().chain(strategy.pass.iter().map(|(a, ..)| *a)).collect();
    if (1..used.len()).any(|i| used[..i].contains(&used[i])) {
        return None;
    }
    if (0..node.sizes.len()).any(|f| !strategy.split[f].is_empty() && !may_split(node, f)) {
        return None;
    }
    let tensor = |dims: &Vec<Dim>| -> Option<Sharding> {
        let dims = dims.iter().map(|d| dim_axes(d, strategy, node, mesh)).collect::<Option<_>>()?;
        Some(Sharding { dims, partial: Vec::new() })
    };
    let mut args: Vec<Sharding> = node.signature.args.iter().map(tensor).collect::<Option<_>>()?;
    let mut results: Vec<Sharding> = node.signature.results.iter().map(tensor).collect::<Option<_>>()?;
    for (factor, axes) in strategy.split.iter().enumerate() {
        for (dims, result) in node.signature.results.iter().zip(&mut results) {
            if !Signature::has(dims, factor) {
                result.partial.extend(axes.iter().map(|a| (*a, node.op.reduce())));
            }
        }
    }
    let legal = if strategy.pass.is_empty() { Vec::new() } else { passes(graph, node) };
    for (axis, reduce, which) in &strategy.pass {
        if !legal.contains(&(*reduce, which.clone())) {
            return None;
        }
        which.iter().for_each(|i| args[*i].partial.push((*axis, *reduce)));
        results.iter_mut().for_each(|r| r.partial.push((*axis, *reduce)));
    }
    args.iter_mut().chain(&mut results).for_each(|s| s.partial.sort());
    Some(Layout { args, results })
}

/// The layouts of the nodes of a graph: those of nodes that are alike are worked out once.
#[derive(Debug)]
pub struct Layouts<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    known: FxHashMap<*const Signature, Vec<LaidOut<'a>>>,
}

type LaidOut<'a> = (&'a Node, &'a Strategy, Option<Rc<Layout>>);

/// With so many different nodes of one signature each is compared; what is like none of them is worked out by itself.
const MOST_KNOWN: usize = 16;

impl<'a> Layouts<'a> {
    /// Of a graph on a mesh.
    pub fn new(graph: &'a Graph, mesh: &'a Mesh) -> Layouts<'a> {
        Layouts { graph, mesh, known: FxHashMap::default() }
    }

    /// What [`layout`] gives.
    pub fn of(&mut self, node: &'a Node, strategy: &'a Strategy) -> Option<Rc<Layout>> {
        let graph = self.graph;
        let dtype = |v: Option<&crate::Value>| v.map(|v| graph.ty(*v).dtype);
        let alike = |(other, split, _): &&LaidOut| {
            discriminant(&node.op) == discriminant(&other.op)
                && node.op.number() == other.op.number()
                && node.args.len() == other.args.len()
                && dtype(node.args.first()) == dtype(other.args.first())
                && dtype(node.results.first()) == dtype(other.results.first())
                && node.sizes == other.sizes
                && strategy == *split
        };
        let known = self.known.entry(Arc::as_ptr(&node.signature)).or_default();
        if let Some((.., found)) = known.iter().find(alike) {
            return found.clone();
        }
        let new = layout(graph, node, strategy, self.mesh).map(Rc::new);
        if known.len() < MOST_KNOWN {
            known.push((node, strategy, new.clone()));
        }
        new
    }
}

/// A dimension's axes from its factors': for a merged one, every factor but the last that is split must be split
/// into single elements, else the pieces are not contiguous; and evenly.
fn dim_axes(dim: &Dim, strategy: &Strategy, node: &Node, mesh: &Mesh) -> Option<Axes> {
    if let [f] = dim[..] {
        return Some(strategy.split[f].clone());
    }
    let mut axes = Axes::new();
    let mut open = true;
    for f in dim {
        let pieces = mesh.pieces(&strategy.split[*f]);
        if pieces > 1 && (!open || !node.sizes[*f].is_multiple_of(pieces)) {
            return None;
        }
        axes.extend_from_slice(&strategy.split[*f]);
        open &= pieces == node.sizes[*f];
    }
    Some(axes)
}

/// The factors that a dimension's axes split: the outermost axes go to the outermost factor while they divide it.
pub fn factor_axes(dim: &Dim, axes: &[Axis], sizes: &[usize], mesh: &Mesh) -> Vec<(Factor, Axis)> {
    if let [f] = dim[..] {
        return axes.iter().map(|a| (f, *a)).collect();
    }
    let mut out = Vec::new();
    let mut at = 0;
    let mut left = dim.first().map_or(1, |f| sizes[*f]);
    for axis in axes {
        while left == 1 && at + 1 < dim.len() {
            at += 1;
            left = sizes[dim[at]];
        }
        if at >= dim.len() || !left.is_multiple_of(mesh.size(*axis)) {
            break;
        }
        left /= mesh.size(*axis);
        out.push((dim[at], *axis));
    }
    out
}
