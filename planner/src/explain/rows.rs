//! The rewrite rows: each says, by name, to what a term is equal. All are equalities of values in shardings, so what they
//! lead to may run instead.

use ir::rows::{Strategy, layout};
use ir::{FactorKind, Graph, Mesh, Move, Sharding, moves_of};

use super::term::Term;
use crate::choose::space::Ways;

/// What is known of the values of a graph.
#[derive(Debug)]
pub struct Scope<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The ways of each node.
    pub ways: &'a [Ways],
    /// How each value lies that is there already, by its number.
    pub lies: Vec<Sharding>,
    /// The shardings in which each value may be, by its number.
    pub shardings: Vec<Vec<Sharding>>,
}

/// A row: its name, and what a term is equal to by it, each with what is said of it.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// The terms that are equal to a term, and how the row is called there.
    pub apply: fn(&Scope, &Term) -> Vec<(String, Term)>,
}

/// So many rows, the first, meet demands; the others turn moves into other moves.
pub const DEMANDS: usize = 10;

/// Every row.
pub const ROWS: &[Row] = &[
    Row { name: "there", apply: there },
    Row { name: "split", apply: split },
    Row { name: "all_gather", apply: |s, t| moved(s, t, "all_gather") },
    Row { name: "reduce_scatter", apply: |s, t| moved(s, t, "reduce_scatter") },
    Row { name: "all_reduce", apply: |s, t| moved(s, t, "all_reduce") },
    Row { name: "broadcast", apply: |s, t| moved(s, t, "broadcast") },
    Row { name: "all_to_all", apply: |s, t| moved(s, t, "all_to_all") },
    Row { name: "permute", apply: |s, t| moved(s, t, "permute") },
    Row { name: "slice", apply: |s, t| moved(s, t, "slice") },
    Row { name: "to_partial", apply: |s, t| moved(s, t, "to_partial") },
    Row { name: "all_reduce = reduce_scatter ; all_gather", apply: reduce_in_two },
    Row { name: "all_gather through", apply: |s, t| through(s, t, "all_gather") },
    Row { name: "slice through", apply: |s, t| through(s, t, "slice") },
    Row { name: "all_to_all through", apply: |s, t| through(s, t, "all_to_all") },
    Row { name: "all_reduce through", apply: |s, t| through(s, t, "all_reduce") },
    Row { name: "reduce_scatter through", apply: |s, t| through(s, t, "reduce_scatter") },
];

/// `v as s` is `v @ s` if `v` lies so.
fn there(scope: &Scope, term: &Term) -> Vec<(String, Term)> {
    let Term::To(sharding, of) = term else { return Vec::new() };
    let Term::Whole(v) = **of else { return Vec::new() };
    let lies = &scope.lies[v.index()];
    if lies == sharding { vec![("there".to_string(), Term::Lies(v, sharding.clone()))] } else { Vec::new() }
}

/// `op(x) as s` is `op{strategy}(x as it needs)` if the strategy leaves `s`.
fn split(scope: &Scope, term: &Term) -> Vec<(String, Term)> {
    let Term::To(sharding, of) = term else { return Vec::new() };
    let Term::Op(i, args) = &**of else { return Vec::new() };
    let node = &scope.graph.nodes[*i];
    let fits = scope.ways[*i].all.iter().filter(|w| w.layout.results.first() == Some(sharding));
    let each = fits.map(|way| {
        let needs = args.iter().zip(&way.layout.args);
        let args = needs.map(|(a, need)| Term::To(need.clone(), Box::new(a.clone()))).collect();
        let text = way.strategy.show(node, scope.mesh);
        let name = if text.is_empty() { "do it everywhere".to_string() } else { format!("split {text}") };
        (name, Term::Pieces(*i, way.strategy.clone(), args))
    });
    each.collect()
}

/// `v as s` is a move of `v as s'` if it leads from `s'` to `s`.
fn moved(scope: &Scope, term: &Term, name: &str) -> Vec<(String, Term)> {
    let Term::To(sharding, of) = term else { return Vec::new() };
    let value = of.value(scope.graph);
    let mut out = Vec::new();
    for from in &scope.shardings[value.index()] {
        if let [step] = &moves_of(scope.graph.shape(value), from, sharding, scope.mesh)[..]
            && step.name() == name
        {
            let before = Term::To(from.clone(), of.clone());
            out.push((step.show(scope.mesh), Term::Moved(step.clone(), Box::new(before))));
        }
    }
    out
}

/// An all_reduce is a reduce_scatter along some dimension, and an all_gather.
fn reduce_in_two(scope: &Scope, term: &Term) -> Vec<(String, Term)> {
    let Term::Moved(Move::AllReduce { axes, reduce }, of) = term else { return Vec::new() };
    let shape = scope.graph.shape(of.value(scope.graph));
    let blocks = if *reduce == ir::Reduce::Top { 2 } else { 0 };
    let two = |dim: usize| {
        let scatter = Move::ReduceScatter { axes: axes.clone(), reduce: *reduce, dim };
        let gather = Move::AllGather { axes: axes.clone(), dim };
        let name = "all_reduce = reduce_scatter ; all_gather".to_string();
        (name, Term::Moved(gather, Box::new(Term::Moved(scatter, of.clone()))))
    };
    (0..shape.len().saturating_sub(blocks)).map(two).collect()
}

/// A move of a result is the op on moved operands.
fn through(scope: &Scope, term: &Term, name: &str) -> Vec<(String, Term)> {
    let Term::Moved(step, of) = term else { return Vec::new() };
    let Term::Pieces(i, strategy, args) = &**of else { return Vec::new() };
    if step.name() != name {
        return Vec::new();
    }
    let Some((strategy, steps)) = passed(scope, *i, strategy, step) else { return Vec::new() };
    let each = args.iter().zip(steps).map(|(arg, step)| match step {
        Some(step) => Term::Moved(step, Box::new(arg.clone())),
        None => arg.clone(),
    });
    let called = format!("{name} through {}", scope.graph.nodes[*i].op);
    vec![(called, Term::Pieces(*i, strategy, each.collect()))]
}

/// The strategy of a node before whose operands a move is made that stood behind it, and the move of each operand; none
/// if the move does not pass.
fn passed(
    scope: &Scope,
    i: usize,
    strategy: &Strategy,
    step: &Move,
) -> Option<(Strategy, Vec<Option<Move>>)> {
    let node = &scope.graph.nodes[i];
    let [result] = &node.signature.results[..] else { return None };
    // The factor of a dimension of the result, if splitting it splits the result alone.
    let factor = |dim: usize| {
        let [f] = result.get(dim)?[..] else { return None };
        let map = node.op.kind(&node.signature, f) == FactorKind::Map;
        map.then_some(f)
    };
    let place = |k: usize, f: usize| {
        let dims = &node.signature.args[k];
        dims.iter().position(|d| d[..] == [f])
    };
    let merged = node.signature.args.iter().flatten().any(|d| d.len() != 1);
    if merged {
        return None;
    }
    let mut after = strategy.clone();
    let axes = step.axes().to_vec();
    let drop_inner = |split: &mut ir::Axes| {
        let ends = split.ends_with(&axes);
        split.truncate(split.len().saturating_sub(axes.len()));
        ends.then_some(())
    };
    let operands = 0..node.args.len();
    let steps: Vec<Option<Move>> = match step {
        Move::AllGather { dim, .. } => {
            let f = factor(*dim)?;
            drop_inner(&mut after.split[f])?;
            operands.map(|k| place(k, f).map(|dim| Move::AllGather { axes: axes.clone(), dim })).collect()
        }
        Move::Slice { dim, .. } => {
            let f = factor(*dim)?;
            after.split[f].extend_from_slice(&axes);
            operands.map(|k| place(k, f).map(|dim| Move::Slice { axes: axes.clone(), dim })).collect()
        }
        Move::AllToAll { from, to, .. } => {
            let (f, g) = (factor(*from)?, factor(*to)?);
            drop_inner(&mut after.split[f])?;
            after.split[g].extend_from_slice(&axes);
            let of = |k: usize| match (place(k, f), place(k, g)) {
                (Some(from), Some(to)) => Some(Move::AllToAll { axes: axes.clone(), from, to }),
                (Some(dim), None) => Some(Move::AllGather { axes: axes.clone(), dim }),
                (None, Some(dim)) => Some(Move::Slice { axes: axes.clone(), dim }),
                (None, None) => None,
            };
            operands.map(of).collect()
        }
        Move::AllReduce { reduce, .. } => {
            let which = passing(&mut after, &axes, *reduce)?;
            let of = |k: usize| {
                which.contains(&k).then(|| Move::AllReduce { axes: axes.clone(), reduce: *reduce })
            };
            operands.map(of).collect()
        }
        Move::ReduceScatter { reduce, dim, .. } => {
            let f = factor(*dim)?;
            let which = passing(&mut after, &axes, *reduce)?;
            // An operand that is partial and lacks the dimension would be reduced, but not scattered.
            if which.iter().any(|k| place(*k, f).is_none()) {
                return None;
            }
            after.split[f].extend_from_slice(&axes);
            let of = |k: usize| {
                let dim = place(k, f)?;
                Some(match which.contains(&k) {
                    true => Move::ReduceScatter { axes: axes.clone(), reduce: *reduce, dim },
                    false => Move::Slice { axes: axes.clone(), dim },
                })
            };
            operands.map(of).collect()
        }
        Move::Broadcast { .. } | Move::Permute { .. } | Move::ToPartial { .. } => return None,
    };
    layout(scope.graph, node, &after, scope.mesh)?;
    Some((after, steps))
}

/// Takes the axes off what passes, and tells through which operands; none unless all pass through the same.
fn passing(strategy: &mut Strategy, axes: &[ir::Axis], reduce: ir::Reduce) -> Option<Vec<usize>> {
    let of = |axis: &ir::Axis| {
        let mut found = strategy.pass.iter().filter(|(a, r, _)| a == axis && *r == reduce);
        found.next().map(|(_, _, args)| args.clone())
    };
    let first = of(axes.first()?)?;
    if axes.iter().any(|a| of(a).as_ref() != Some(&first)) {
        return None;
    }
    strategy.pass.retain(|(a, ..)| !axes.contains(a));
    Some(first)
}

impl Scope<'_> {
    /// The shardings of a value that the rows may use: those given, and what lies on the way between any two.
    pub fn close(&mut self) {
        for (of, value) in self.shardings.iter_mut().zip(&self.graph.values) {
            let given = of.clone();
            for (from, to) in given.iter().flat_map(|a| given.iter().map(move |b| (a, b))) {
                let mut at = from.clone();
                for step in moves_of(&value.shape, from, to, self.mesh) {
                    at = step.after(&at);
                    if !of.contains(&at) {
                        of.push(at.clone());
                    }
                }
            }
        }
    }
}
