//! Terms that mean values in shardings: what the user wrote, demands that a value lie somewhere, and what runs.

use ir::rows::Strategy;
use ir::{Graph, Mesh, Move, Sharding, Value};

use crate::names::name;

/// A term.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Term {
    /// A value as a whole, as the user wrote it.
    Whole(Value),
    /// Node `.0` on whole values, as the user wrote it.
    Op(usize, Vec<Term>),
    /// A whole value, lying so.
    To(Sharding, Box<Term>),
    /// A value as it lies already.
    Lies(Value, Sharding),
    /// Node `.0` on pieces, split so.
    Pieces(usize, Strategy, Vec<Term>),
    /// What lies somewhere, moved.
    Moved(Move, Box<Term>),
    /// Some term of this value, by its number.
    Some(usize, Value),
}

impl Term {
    /// The value that it means.
    pub fn value(&self, graph: &Graph) -> Value {
        match self {
            Term::Whole(v) | Term::Lies(v, _) | Term::Some(_, v) => *v,
            Term::Op(i, _) | Term::Pieces(i, ..) => graph.nodes[*i].results[0],
            Term::To(_, of) | Term::Moved(_, of) => of.value(graph),
        }
    }

    /// The text form: `all_gather(tp, dim 1) x @ [_, tp]`, `einsum{f=tp} (x @ [_, _], w @ [_, tp])`.
    pub fn show(&self, graph: &Graph, mesh: &Mesh) -> String {
        let all = |terms: &[Term]| terms.iter().map(|t| t.show(graph, mesh)).collect::<Vec<_>>().join(", ");
        let named = |v: Value| name(graph, &graph.makers(), v);
        match self {
            Term::Whole(v) => named(*v),
            Term::Op(i, args) => format!("{}({})", graph.nodes[*i].op, all(args)),
            Term::To(sharding, of) => format!("{} as {}", of.show(graph, mesh), sharding.show(mesh)),
            Term::Lies(v, sharding) => format!("{} @ {}", named(*v), sharding.show(mesh)),
            Term::Pieces(i, strategy, args) => {
                let node = &graph.nodes[*i];
                format!("{}{{{}}}({})", node.op, strategy.show(node, mesh), all(args))
            }
            Term::Moved(step, of) => format!("{} [{}]", step.show(mesh), of.show(graph, mesh)),
            Term::Some(n, _) => format!("#{n}"),
        }
    }
}
