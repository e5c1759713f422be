//! Where dimensions are cut: the strides at which some signature splits or merges them, united over a graph.

use std::collections::{BTreeMap, BTreeSet};

use ir::{FactorKind, Graph, Name, Node, Op, Value};

/// Strides, above 1 and below the size. They form a chain: each divides the next.
type Cuts = BTreeSet<usize>;

/// The atoms of every dimension of every value, and of every factor of every node; outermost first.
pub(super) struct Atoms {
    values: Vec<Vec<Vec<usize>>>,
    factors: Vec<Vec<Vec<usize>>>,
}

impl Atoms {
    /// Of each dimension of a value.
    pub(super) fn of_value(&self, value: Value) -> &[Vec<usize>] {
        &self.values[value.index()]
    }

    /// Of a factor of a node.
    pub(super) fn of_factor(&self, node: usize, factor: usize) -> &[usize] {
        &self.factors[node][factor]
    }

    /// Of each dimension of inputs and states that the graph reads or assigns.
    pub(super) fn by_name(&self, graph: &Graph) -> BTreeMap<Name, Vec<Vec<usize>>> {
        let named = |n: &Node| {
            let (Op::Input(name) | Op::State(name) | Op::Assign(name)) = &n.op else { return None };
            let value = n.results.first().or(n.args.first())?;
            Some((name.clone(), self.of_value(*value).to_vec()))
        };
        graph.nodes.iter().filter_map(named).collect()
    }
}

/// The atoms of a graph; none if nothing is merged, or nothing of it can be cut.
pub(super) fn unite(graph: &Graph) -> Option<Atoms> {
    let merged =
        |n: &Node| n.signature.args.iter().chain(&n.signature.results).flatten().any(|d| d.len() > 1);
    if !graph.nodes.iter().any(merged) {
        return None;
    }
    let mut whole: BTreeSet<(Value, usize)> = stacked(graph);
    loop {
        let cuts = fixpoint(graph, &whole);
        match conflict(graph, &cuts, &whole) {
            Some(at) => {
                whole.insert(at);
            }
            None => {
                let atoms = cuts.atoms(graph);
                let any = atoms.values.iter().flatten().any(|a| a.len() > 1);
                return any.then_some(atoms);
            }
        }
    }
}

/// The dimension along which a state's windows are stacked is never cut.
fn stacked(graph: &Graph) -> BTreeSet<(Value, usize)> {
    let states = graph.states_by_name();
    let of = |n: &Node| {
        let Op::State(name) = &n.op else { return None };
        (states.get(&**name)?.views.len() > 1).then_some((n.results[0], 0))
    };
    graph.nodes.iter().filter_map(of).collect()
}

struct United {
    values: Vec<Vec<Cuts>>,
    factors: Vec<Vec<Cuts>>,
}

/// Adds those of `more` that keep the chain.
fn join(cuts: &mut Cuts, more: impl IntoIterator<Item = usize>, size: usize) {
    for cut in more {
        if cut > 1 && cut < size && cuts.insert(cut) && !is_chain(cuts, size) {
            cuts.remove(&cut);
        }
    }
}

fn is_chain(cuts: &Cuts, size: usize) -> bool {
    let all: Vec<usize> = cuts.iter().copied().chain([size]).collect();
    all.windows(2).all(|w| w[1].is_multiple_of(w[0]))
}

/// Whether a factor is an index, or of the pairs of a top-k, which have no atoms.
fn is_index(node: &Node, factor: usize) -> bool {
    let s = &node.signature;
    let found = [node.op.looked_up(s), node.op.searched(s)].contains(&Some(factor));
    found || node.op == Op::Iota || node.op.kind(s, factor) == FactorKind::Whole
}

fn fixpoint(graph: &Graph, whole: &BTreeSet<(Value, usize)>) -> United {
    let mut cuts = United {
        values: graph.values.iter().map(|t| vec![Cuts::new(); t.shape.len()]).collect(),
        factors: graph.nodes.iter().map(|n| vec![Cuts::new(); n.sizes.len()]).collect(),
    };
    let states: BTreeMap<&Name, Value> = graph
        .nodes
        .iter()
        .filter_map(|n| if let Op::State(s) = &n.op { Some((s, n.results[0])) } else { None })
        .collect();
    loop {
        let before = (cuts.values.clone(), cuts.factors.clone());
        for (i, node) in graph.nodes.iter().enumerate() {
            cuts.visit(graph, i, node, whole);
            // What a state is assigned is cut as the state is.
            if let Op::Assign(name) = &node.op
                && let Some(state) = states.get(name)
            {
                let (a, b) = (state.index(), node.args[0].index());
                for dim in 0..cuts.values[a].len() {
                    let size = graph.values[a].shape[dim];
                    let both = cuts.values[a][dim].union(&cuts.values[b][dim]).copied().collect::<Vec<_>>();
                    join(&mut cuts.values[a][dim], both.iter().copied(), size);
                    join(&mut cuts.values[b][dim], both, size);
                }
            }
        }
        if before == (cuts.values.clone(), cuts.factors.clone()) {
            return cuts;
        }
    }
}

impl United {
    fn visit(&mut self, graph: &Graph, i: usize, node: &Node, whole: &BTreeSet<(Value, usize)>) {
        let tensors = node
            .args
            .iter()
            .zip(&node.signature.args)
            .chain(node.results.iter().zip(&node.signature.results));
        for (value, dims) in tensors {
            for (d, dim) in dims.iter().enumerate().filter(|(d, _)| !whole.contains(&(*value, *d))) {
                let size = graph.shape(*value)[d];
                let mut stride = 1;
                for f in dim.iter().rev() {
                    let n = node.sizes[*f];
                    let of_value = &self.values[value.index()][d];
                    // Down: the dimension's cuts inside the factor. Up: the factor's cuts, and its ends.
                    let inside: Vec<usize> =
                        of_value.iter().filter(|c| c.is_multiple_of(stride)).map(|c| c / stride).collect();
                    if !is_index(node, *f) {
                        join(&mut self.factors[i][*f], inside, n);
                    }
                    let up: Vec<usize> =
                        self.factors[i][*f].iter().map(|c| c * stride).chain([stride, stride * n]).collect();
                    join(&mut self.values[value.index()][d], up, size);
                    stride *= n;
                }
            }
        }
    }

    fn atoms(&self, graph: &Graph) -> Atoms {
        let values = graph.values.iter().zip(&self.values);
        let factors = graph.nodes.iter().zip(&self.factors);
        Atoms {
            values: values.map(|(t, c)| t.shape.iter().zip(c).map(|(n, c)| atoms(c, *n)).collect()).collect(),
            factors: factors
                .map(|(n, c)| n.sizes.iter().zip(c).map(|(n, c)| atoms(c, *n)).collect())
                .collect(),
        }
    }
}

/// The sizes between cuts, outermost first.
fn atoms(cuts: &Cuts, size: usize) -> Vec<usize> {
    let ends: Vec<usize> = [size].into_iter().chain(cuts.iter().rev().copied()).chain([1]).collect();
    ends.windows(2).map(|w| w[0] / w[1]).collect()
}

/// A dimension whose atoms are not those of its factors: it has to stay whole.
fn conflict(graph: &Graph, cuts: &United, whole: &BTreeSet<(Value, usize)>) -> Option<(Value, usize)> {
    let all = cuts.atoms(graph);
    for (i, node) in graph.nodes.iter().enumerate() {
        let tensors = node
            .args
            .iter()
            .zip(&node.signature.args)
            .chain(node.results.iter().zip(&node.signature.results));
        for (value, dims) in tensors {
            for (d, dim) in dims.iter().enumerate().filter(|(d, _)| !whole.contains(&(*value, *d))) {
                let real = |list: Vec<usize>| list.into_iter().filter(|n| *n != 1).collect::<Vec<_>>();
                let of_factors = real(dim.iter().flat_map(|f| all.factors[i][*f].clone()).collect());
                if of_factors != real(all.values[value.index()][d].clone()) {
                    return Some((*value, d));
                }
            }
        }
        if let Op::Assign(name) = &node.op
            && let Some(state) =
                graph.nodes.iter().find(|n| n.op == Op::State(name.clone())).map(|n| n.results[0])
            && let Some(d) = (0..dims_of(graph, state)).find(|d| differ(&all, state, node.args[0], *d))
        {
            let other = if whole.contains(&(state, d)) { node.args[0] } else { state };
            return Some((other, d));
        }
    }
    None
}

fn dims_of(graph: &Graph, value: Value) -> usize {
    graph.shape(value).len()
}

fn differ(all: &Atoms, a: Value, b: Value, dim: usize) -> bool {
    all.of_value(a)[dim] != all.of_value(b)[dim]
}
