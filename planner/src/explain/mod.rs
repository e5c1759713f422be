//! What led from an op that the user wrote to what runs: a chain of named rewrite rows, each an equality, found and proved
//! by an e-graph.

pub mod egraph;
pub mod rows;
pub mod term;

use ir::{Op, Reshard, ShardedGraph, Sharding, Value, moves_of};

use crate::choose::Best;
use crate::choose::price::is_map;
use crate::names::name;
use egraph::{Step, chain};
use rows::Scope;
use term::Term;

/// No tensor is called so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no tensor `{asked}`; there are {known}")]
pub struct NoTensor {
    /// What was asked for.
    pub asked: String,
    /// Some of what there is.
    pub known: String,
}

/// The chains of a tensor: for every way in which it is needed, from what was written to what runs. A parameter has those
/// of what uses it, and of its gradient.
///
/// # Errors
/// There is no such tensor.
pub fn explain(sharded: &ShardedGraph, best: &Best, asked: &str) -> Result<String, NoTensor> {
    let graph = &sharded.graph;
    let makers = graph.makers();
    let named = |v: Value| name(graph, &makers, v);
    let nodes: Vec<usize> = (0..graph.nodes.len()).filter(|i| !graph.nodes[*i].results.is_empty()).collect();
    let is = |i: &&usize| {
        let v = graph.nodes[**i].results[0];
        v.to_string() == asked || named(v) == asked
    };
    let Some(first) = nodes.iter().find(is).copied() else {
        let telling = |i: &&usize| {
            graph.nodes[**i].is_product() || matches!(graph.nodes[**i].op, Op::Input(_) | Op::State(_))
        };
        let mut known: Vec<String> =
            nodes.iter().filter(telling).map(|i| named(graph.nodes[*i].results[0])).collect();
        known.dedup();
        known.truncate(12);
        return Err(NoTensor { asked: asked.to_string(), known: known.join(", ") + ", ..." });
    };
    let given = matches!(graph.nodes[first].op, Op::State(_) | Op::Input(_));
    let it = graph.nodes[first].results[0];
    let uses = |i: &usize| {
        let node = &graph.nodes[*i];
        !is_map(node) && node.args.contains(&it) || node.is_product() && node.like == Some(it)
    };
    let about: Vec<usize> = if given { nodes.iter().copied().filter(uses).collect() } else { vec![first] };
    let mut out = String::new();
    for i in about {
        out += &of_node(sharded, best, i);
    }
    Ok(if out.is_empty() {
        format!("{asked} lies as it was placed, and nothing but elementwise ops use it\n")
    } else {
        out
    })
}

/// What is known where node `i` is explained: of its operands and its result.
pub fn scope<'a>(sharded: &'a ShardedGraph, best: &'a Best, i: usize) -> Scope<'a> {
    let graph = &sharded.graph;
    let mut lies = vec![Sharding::replicated(0); graph.values.len()];
    let mut shardings = vec![Vec::new(); graph.values.len()];
    let makers = graph.makers();
    for v in graph.nodes[i].args.iter().chain(&graph.nodes[i].results) {
        let maker = makers[v.index()];
        lies[v.index()] = best.choice.ways[maker].all[best.picked[maker]].layout.results[0].clone();
        let mut all: Vec<Sharding> = best.choice.shardings(*v).into_iter().cloned().collect();
        all.push(lies[v.index()].clone());
        shardings[v.index()] = all;
    }
    let mut scope = Scope { graph, mesh: &sharded.mesh, ways: &best.choice.ways, lies, shardings };
    scope.close();
    scope
}

/// The term that runs for a value that is needed in a sharding, from the term of what its node makes.
fn routed(scope: &Scope, best: &Best, v: Value, made: Term, from: &Sharding, need: &Sharding) -> Term {
    if from == need {
        return made;
    }
    let copies = best.decisions.copies.get(&v);
    let source =
        copies.and_then(|all| all.iter().find(|c: &&Reshard| c.to == *need)).map_or(from, |c| &c.from);
    let before = routed(scope, best, v, made, from, source);
    let steps = moves_of(scope.graph.shape(v), source, need, scope.mesh);
    steps.into_iter().fold(before, |t, step| Term::Moved(step, Box::new(t)))
}

/// From what was written to what runs, for a value that is needed in a sharding.
pub fn terms(scope: &Scope, best: &Best, i: usize, need: &Sharding) -> (Term, Term) {
    let node = &scope.graph.nodes[i];
    let way = &best.choice.ways[i].all[best.picked[i]];
    let whole = node.args.iter().map(|v| Term::Whole(*v)).collect();
    let from = Term::To(need.clone(), Box::new(Term::Op(i, whole)));
    let operand = |(v, need): (&Value, &Sharding)| {
        let lies = &scope.lies[v.index()];
        routed(scope, best, *v, Term::Lies(*v, lies.clone()), lies, need)
    };
    let args = node.args.iter().zip(&way.layout.args).map(operand).collect();
    let runs = Term::Pieces(i, way.strategy.clone(), args);
    (from, routed(scope, best, node.results[0], runs, &way.layout.results[0], need))
}

/// In which shardings users need the result of node `i`; as it is made if nobody does.
pub fn needs(sharded: &ShardedGraph, best: &Best, i: usize) -> Vec<Sharding> {
    let v = sharded.graph.nodes[i].results[0];
    let mut needs: Vec<Sharding> = Vec::new();
    for (u, k) in best.choice.users(v) {
        let need = &best.choice.ways[*u].all[best.picked[*u]].layout.args[*k];
        if !needs.contains(need) {
            needs.push(need.clone());
        }
    }
    if needs.is_empty() {
        needs.push(best.choice.ways[i].all[best.picked[i]].layout.results[0].clone());
    }
    needs
}

fn of_node(sharded: &ShardedGraph, best: &Best, i: usize) -> String {
    let (graph, mesh) = (&sharded.graph, &sharded.mesh);
    let scope = scope(sharded, best, i);
    let node = &graph.nodes[i];
    let title = name(graph, &graph.makers(), node.results[0]);
    let mut out = format!("{title}, {}: {}\n", node.results[0], node.signature);
    for need in needs(sharded, best, i) {
        let (from, to) = terms(&scope, best, i, &need);
        match chain(&scope, &from, &to) {
            Some(steps) => steps.iter().for_each(|s| out += &line(s, graph, mesh)),
            None => {
                out += &format!("    {}\n", from.show(graph, mesh));
                out += &format!("  = {}    (no chain of rows was found)\n", to.show(graph, mesh));
            }
        }
        out += "\n";
    }
    out
}

fn line(step: &Step, graph: &ir::Graph, mesh: &ir::Mesh) -> String {
    let term = step.term.show(graph, mesh);
    match &step.row {
        None => format!("    {term}\n"),
        Some(row) => {
            let back = if step.backward { ", read backward" } else { "" };
            format!("  = {term}\n        by {row}{back}\n")
        }
    }
}
