//! The terms in an e-graph: a class is one value in one sharding, the rows are applied until nothing new is found, and the
//! proof that two terms are equal is a chain of rows (Willsey et al., "egg: fast and extensible equality saturation",
//! 2021; Flatt et al., "Small proofs from congruence closure", 2022).

use std::collections::HashMap;
use std::hash::Hash;

use egg::{Analysis, DidMerge, EGraph, FlatTerm, Id, Language, RecExpr};
use ir::rows::Strategy;
use ir::{Graph, Move, Sharding, Value};

use super::rows::{DEMANDS, ROWS, Row, Scope};
use super::term::Term;

/// More nodes than this are not looked at.
const MOST_NODES: usize = 4000;

/// Rounds of rewriting: a chain through two nodes and their operands needs fewer.
const ROUNDS: usize = 8;

/// What stands at the root of a term; shardings, strategies and moves by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Head {
    /// See [`Term::Whole`].
    Whole(Value),
    /// See [`Term::Op`].
    Op(usize),
    /// See [`Term::To`].
    To(usize),
    /// See [`Term::Lies`].
    Lies(Value, usize),
    /// See [`Term::Pieces`].
    Pieces(usize, usize),
    /// See [`Term::Moved`].
    Moved(usize),
}

/// A node of the e-graph.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ENode {
    head: Head,
    children: Vec<Id>,
}

impl Language for ENode {
    type Discriminant = Head;

    fn discriminant(&self) -> Head {
        self.head
    }

    fn matches(&self, other: &ENode) -> bool {
        self.head == other.head && self.children.len() == other.children.len()
    }

    fn children(&self) -> &[Id] {
        &self.children
    }

    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

/// The value of each class.
#[derive(Clone, Debug)]
struct Values {
    /// The result of each node.
    of_node: Vec<Option<Value>>,
}

impl Analysis<ENode> for Values {
    type Data = Value;

    fn make(egraph: &mut EGraph<ENode, Values>, node: &ENode, _: Id) -> Value {
        let child = || node.children.first().map_or(Value(0), |c| egraph[*c].data);
        match node.head {
            Head::Whole(v) | Head::Lies(v, _) => v,
            Head::Op(i) | Head::Pieces(i, _) => egraph.analysis.of_node[i].unwrap_or(Value(0)),
            Head::To(_) | Head::Moved(_) => child(),
        }
    }

    fn merge(&mut self, a: &mut Value, b: Value) -> DidMerge {
        debug_assert_eq!(*a, b, "a class is one value");
        DidMerge(false, false)
    }
}

/// Things by number, each once.
#[derive(Debug)]
struct Numbers<T>(Vec<T>, HashMap<T, usize>);

impl<T: Clone + Eq + Hash> Numbers<T> {
    fn new() -> Numbers<T> {
        Numbers(Vec::new(), HashMap::new())
    }

    fn number(&mut self, of: &T) -> usize {
        if let Some(n) = self.1.get(of) {
            return *n;
        }
        self.0.push(of.clone());
        self.1.insert(of.clone(), self.0.len() - 1);
        self.0.len() - 1
    }
}

/// A step of a proof: the row, and the term after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// How the row is called there; none for the first term.
    pub row: Option<String>,
    /// Whether it was used from right to left.
    pub backward: bool,
    /// The term.
    pub term: Term,
}

struct Proving<'a> {
    scope: &'a Scope<'a>,
    egraph: EGraph<ENode, Values>,
    shardings: Numbers<Sharding>,
    strategies: Numbers<Strategy>,
    moves: Numbers<Move>,
}

/// The chain of rows that leads from one term to an equal one; none if the rows do not. Rows that turn moves into other
/// moves are used only where the others do not do.
pub fn chain(scope: &Scope, from: &Term, to: &Term) -> Option<Vec<Step>> {
    let (demands, _) = ROWS.split_at(DEMANDS);
    chain_by(demands, scope, from, to).or_else(|| chain_by(ROWS, scope, from, to))
}

fn chain_by(rows: &[Row], scope: &Scope, from: &Term, to: &Term) -> Option<Vec<Step>> {
    let mut proving = Proving::new(scope);
    let (start, end) = (proving.add(from), proving.add(to));
    for _ in 0..ROUNDS {
        if proving.egraph.find(start) == proving.egraph.find(end) || !proving.round(rows) {
            break;
        }
    }
    if proving.egraph.find(start) != proving.egraph.find(end) {
        return None;
    }
    let (from, to) = (proving.expression(from), proving.expression(to));
    let mut explanation = proving.egraph.explain_equivalence(&from, &to);
    let flat: Vec<FlatTerm<ENode>> = explanation.make_flat_explanation().clone();
    let step = |flat: &FlatTerm<ENode>| {
        let (row, backward) = match rule(flat) {
            Some((row, backward)) => (Some(row), backward),
            None => (None, false),
        };
        Step { row, backward, term: proving.term(flat) }
    };
    Some(flat.iter().map(step).collect())
}

/// The row of a step, which stands at the place where it was used.
fn rule(flat: &FlatTerm<ENode>) -> Option<(String, bool)> {
    let forward = flat.forward_rule.map(|r| (r.to_string(), false));
    let backward = flat.backward_rule.map(|r| (r.to_string(), true));
    forward.or(backward).or_else(|| flat.children.iter().find_map(rule))
}

impl<'a> Proving<'a> {
    fn new(scope: &'a Scope<'a>) -> Proving<'a> {
        let graph: &Graph = scope.graph;
        let values = Values { of_node: graph.nodes.iter().map(|n| n.results.first().copied()).collect() };
        Proving {
            scope,
            egraph: EGraph::new(values).with_explanations_enabled(),
            shardings: Numbers::new(),
            strategies: Numbers::new(),
            moves: Numbers::new(),
        }
    }

    /// A term's head and what stands below it; none for a term that is there by number.
    fn head<'t>(&mut self, term: &'t Term) -> Result<(Head, Vec<&'t Term>), Id> {
        Ok(match term {
            Term::Whole(v) => (Head::Whole(*v), Vec::new()),
            Term::Op(i, args) => (Head::Op(*i), args.iter().collect()),
            Term::To(sharding, of) => (Head::To(self.shardings.number(sharding)), vec![of]),
            Term::Lies(v, sharding) => (Head::Lies(*v, self.shardings.number(sharding)), Vec::new()),
            Term::Pieces(i, strategy, args) => {
                (Head::Pieces(*i, self.strategies.number(strategy)), args.iter().collect())
            }
            Term::Moved(step, of) => (Head::Moved(self.moves.number(step)), vec![of]),
            Term::Some(id, _) => return Err(Id::from(*id)),
        })
    }

    fn add(&mut self, term: &Term) -> Id {
        match self.head(term) {
            Err(id) => id,
            Ok((head, below)) => {
                let children = below.into_iter().map(|t| self.add(t)).collect();
                self.egraph.add_uncanonical(ENode { head, children })
            }
        }
    }

    fn expression(&mut self, term: &Term) -> RecExpr<ENode> {
        let mut out = RecExpr::default();
        self.append(term, &mut out);
        out
    }

    fn append(&mut self, term: &Term, out: &mut RecExpr<ENode>) -> Id {
        match self.head(term) {
            Err(id) => id,
            Ok((head, below)) => {
                let children = below.into_iter().map(|t| self.append(t, out)).collect();
                out.add(ENode { head, children })
            }
        }
    }

    /// A node as a term, what is below it by number.
    fn shallow(&self, node: &ENode) -> Term {
        let mut some = node.children.iter().map(|c| Term::Some(usize::from(*c), self.egraph[*c].data));
        let mut one = || Box::new(some.next().unwrap_or(Term::Whole(Value(0))));
        match node.head {
            Head::Whole(v) => Term::Whole(v),
            Head::Lies(v, s) => Term::Lies(v, self.shardings.0[s].clone()),
            Head::To(s) => Term::To(self.shardings.0[s].clone(), one()),
            Head::Moved(m) => Term::Moved(self.moves.0[m].clone(), one()),
            Head::Op(i) => Term::Op(i, some.collect()),
            Head::Pieces(i, s) => Term::Pieces(i, self.strategies.0[s].clone(), some.collect()),
        }
    }

    /// Applies the rows once, everywhere; whether anything new was found.
    fn round(&mut self, rows: &[Row]) -> bool {
        let mut seen: Vec<Term> = Vec::new();
        for class in self.egraph.classes() {
            for node in &class.nodes {
                let term = self.shallow(node);
                // Rows look at a node and the one below it.
                let below =
                    node.children.first().filter(|_| matches!(node.head, Head::To(_) | Head::Moved(_)));
                for under in below.into_iter().flat_map(|c| &self.egraph[*c].nodes) {
                    let inner = Box::new(self.shallow(under));
                    match &term {
                        Term::To(s, _) => seen.push(Term::To(s.clone(), inner)),
                        Term::Moved(m, _) => seen.push(Term::Moved(m.clone(), inner)),
                        Term::Whole(_)
                        | Term::Op(..)
                        | Term::Lies(..)
                        | Term::Pieces(..)
                        | Term::Some(..) => {}
                    }
                }
            }
        }
        let mut new = false;
        for term in seen {
            for row in rows {
                for (name, equal) in (row.apply)(self.scope, &term) {
                    if self.egraph.total_number_of_nodes() > MOST_NODES {
                        break;
                    }
                    let (a, b) = (self.add(&term), self.add(&equal));
                    new |= self.egraph.union_trusted(a, b, name);
                }
            }
        }
        self.egraph.rebuild();
        new
    }

    /// A term of a proof.
    fn term(&self, flat: &FlatTerm<ENode>) -> Term {
        let mut below = flat.children.iter().map(|c| self.term(c));
        let mut one = || Box::new(below.next().unwrap_or(Term::Whole(Value(0))));
        match flat.node.head {
            Head::Whole(v) => Term::Whole(v),
            Head::Lies(v, s) => Term::Lies(v, self.shardings.0[s].clone()),
            Head::To(s) => Term::To(self.shardings.0[s].clone(), one()),
            Head::Moved(m) => Term::Moved(self.moves.0[m].clone(), one()),
            Head::Op(i) => Term::Op(i, below.collect()),
            Head::Pieces(i, s) => Term::Pieces(i, self.strategies.0[s].clone(), below.collect()),
        }
    }
}
