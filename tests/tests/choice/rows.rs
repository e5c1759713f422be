//! Every rewrite row is an equality: both sides, computed in pieces on numbers of both signs, are the same whole.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::rows::layout;
use ir::{Graph, Mesh, Move, ShardedGraph, Sharding, Value, extent};
use meshc_tests::random::Random;
use meshc_tests::spread::{spread, whole};
use meshc_tests::whole::wire;
use planner::choose::{Best, best};
use planner::explain::rows::{ROWS, Row, Scope};
use planner::explain::term::Term;
use planner::explain::{needs, scope};
use runtime::eval::eval;
use runtime::lockstep::{apply, one_device};
use runtime::tensor::Tensor;

use crate::cases::{case, read};

/// What the rows are tried on beside random graphs: reductions by the largest, casts, biases, differences.
const MORE: [&str; 3] = [
    "sharded mesh x=4
    place x [x, _]
    input x : f32 [a=1, b=6]
    v0 = input(x) : -> a b : f32 1x6 micro | 0 forward
    v1 = exp v0 : a b -> a b : f32 1x6 micro | 0 forward
    tap(y) v1 : a b -> | 0 forward
    constrain v1 [_, _]",
    "sharded mesh x=2,y=2
    place x [x, y]
    place w [y, _]
    input x : f32 [a=4, b=6]
    input w : f32 [b=6, c=4]
    v0 = input(x) : -> a b : f32 4x6 micro | 0 forward
    v1 = input(w) : -> b c : f32 6x4 micro | 0 forward
    v2 = einsum(0.5) v0, v1 : a b, b c -> a c : f32 4x4 micro | 0 forward
    v3 = einsum(-2.0) v2 : a c -> c a : f32 4x4 micro | 0 forward
    v4 = reduce_max v3 : c a -> c : f32 4 micro | 0 forward
    v5 = stop v4 : c -> c : f32 4 micro | 0 forward
    v6 = sub v3, v5 : c a, c -> c a : f32 4x4 micro | 0 forward
    v7 = add v6, v3 : c a, c a -> c a : f32 4x4 micro | 0 forward
    tap(y) v7 : c a -> | 0 forward",
    "sharded mesh x=2
    place x [x, _]
    input x : f32 [a=4, b=4]
    v0 = input(x) : -> a b : f32 4x4 micro | 0 forward
    v1 = einsum v0 : a b -> b : f32 4 micro | 0 forward
    v2 = cast v1 : b -> b : f64 4 micro | 0 forward
    v3 = exp v0 : a b -> b a : f32 4x4 micro | 0 forward
    v4 = einsum v0, v0 : a b, b c -> a c : f32 4x4 micro | 0 forward
    tap(y) v2 : b -> | 0 forward
    tap(z) v3 : b a -> | 0 forward",
];

/// The pieces that a term means, and how they lie.
struct Meaning<'a> {
    graph: &'a Graph,
    mesh: &'a Mesh,
    /// What every value is on one device.
    values: Vec<Tensor<f64>>,
    random: Random,
}

impl Meaning<'_> {
    fn whole(&self, term: &Term) -> Tensor<f64> {
        match term {
            Term::Op(i, args) => {
                let node = &self.graph.nodes[*i];
                let args: Vec<Tensor<f64>> = args.iter().map(|t| self.whole(t)).collect();
                let ranges: Vec<Range<usize>> = node.sizes.iter().map(|n| 0..*n).collect();
                eval(node, &ranges, &args.iter().collect::<Vec<_>>())
            }
            Term::Whole(v) | Term::Lies(v, _) | Term::Some(_, v) => self.values[v.index()].clone(),
            Term::To(_, of) | Term::Moved(_, of) => self.whole(of),
            Term::Pieces(i, _, args) => self.whole(&Term::Op(*i, args.clone())),
        }
    }

    fn pieces(&mut self, term: &Term) -> Result<(Vec<Tensor<f64>>, Sharding), String> {
        Ok(match term {
            Term::Whole(_) | Term::Op(..) | Term::Some(..) => panic!("a whole value lies nowhere: {term:?}"),
            Term::To(sharding, _) | Term::Lies(_, sharding) => {
                let whole = self.whole(term);
                (spread(&whole, sharding, self.mesh, &mut self.random), sharding.clone())
            }
            Term::Moved(step, of) => {
                let (pieces, sharding) = self.pieces(of)?;
                if !step.fits(&sharding) {
                    return Err(format!("{step:?} is no move of {sharding:?}"));
                }
                (apply(step, &pieces, self.mesh), step.after(&sharding))
            }
            Term::Pieces(i, strategy, args) => {
                let node = &self.graph.nodes[*i];
                let needs = layout(self.graph, node, strategy, self.mesh).ok_or("no legal strategy")?;
                let args = args.iter().map(|t| self.pieces(t)).collect::<Result<Vec<_>, _>>()?;
                if args.iter().zip(&needs.args).any(|((_, lies), need)| lies != need) {
                    return Err(format!("an operand of {} does not lie as it needs", node.op));
                }
                let one = |rank: usize| {
                    let at = self.mesh.coordinate(rank);
                    let sizes = node.sizes.iter().zip(&strategy.split);
                    let ranges: Vec<_> = sizes.map(|(n, axes)| extent(*n, axes, self.mesh, &at)).collect();
                    eval(node, &ranges, &args.iter().map(|(p, _)| &p[rank]).collect::<Vec<_>>())
                };
                ((0..self.mesh.ranks()).map(one).collect(), needs.results[0].clone())
            }
        })
    }

    /// The whole that a term's pieces make up, and how they lie.
    fn assembled(&mut self, term: &Term) -> Result<(Tensor<f64>, Sharding), String> {
        let (pieces, sharding) = self.pieces(term)?;
        let shape = self.graph.shape(term.value(self.graph)).to_vec();
        Ok((whole(&pieces, &shape, &sharding, self.mesh)?, sharding))
    }
}

/// The terms on which rows are tried: demands of each value in each sharding, and moves of what each node makes.
fn terms(scope: &Scope, best: &Best, sharded: &ShardedGraph, i: usize) -> Vec<Term> {
    let node = &scope.graph.nodes[i];
    let Some(v) = node.results.first() else { return Vec::new() };
    let whole: Vec<Term> = node.args.iter().map(|v| Term::Whole(*v)).collect();
    let mut all = Vec::new();
    for sharding in scope.shardings[v.index()].iter().chain(&needs(sharded, best, i)) {
        if !whole.is_empty() {
            all.push(Term::To(sharding.clone(), Box::new(Term::Op(i, whole.clone()))));
        }
        all.push(Term::To(sharding.clone(), Box::new(Term::Whole(*v))));
    }
    for way in best.choice.ways[i].all.iter().filter(|_| !node.args.is_empty()) {
        let needs = node.args.iter().zip(&way.layout.args);
        let args: Vec<Term> = needs.map(|(v, s)| Term::To(s.clone(), Box::new(Term::Whole(*v)))).collect();
        let made = Term::Pieces(i, way.strategy.clone(), args);
        for to in &scope.shardings[v.index()] {
            if let [step] = &ir::moves(&way.layout.results[0], to, scope.mesh)[..] {
                all.push(Term::Moved(step.clone(), Box::new(made.clone())));
            }
        }
    }
    all
}

/// Tries rows on a graph: which were used, and the first whose sides differ.
fn try_on(
    sharded: &ShardedGraph,
    rows: &[Row],
    seed: u64,
    used: &mut BTreeSet<&'static str>,
) -> Result<(), String> {
    let graph = &sharded.graph;
    let prices = wire();
    let best = best(sharded, &prices);
    let mut random = Random::new(seed);
    let given = |name: &ir::Name, shape: Vec<usize>, random: &mut Random| {
        (name.clone(), Tensor::from_fn(&shape, |_| random.number()))
    };
    let inputs = graph.inputs.iter().map(|i| (&i.name, i.dims.iter().map(|(_, n)| *n).collect::<Vec<_>>()));
    let states = graph.states.iter().map(|s| (&s.name, s.shape()));
    let feeds = inputs.chain(states).map(|(n, shape)| given(n, shape, &mut random)).collect();
    let values = one_device(graph, &feeds);
    let mut meaning = Meaning { graph, mesh: &sharded.mesh, values, random };
    for i in 0..graph.nodes.len() {
        if graph.nodes[i].results.is_empty() || graph.nodes[i].op == ir::Op::Reshard {
            continue;
        }
        let scope = scope(sharded, &best, i);
        for term in terms(&scope, &best, sharded, i) {
            for row in rows {
                for (called, equal) in (row.apply)(&scope, &term) {
                    used.insert(row.name);
                    let (left, lies) = meaning.assembled(&term)?;
                    let (right, other) = meaning.assembled(&equal)?;
                    if lies != other {
                        return Err(format!("{called}: {lies:?} becomes {other:?}"));
                    }
                    let off = left.distance(&right);
                    if off > 1e-9 * (1.0 + left.data.iter().fold(0.0, |m: f64, x| m.max(x.abs()))) {
                        let show = |t: &Term| t.show(graph, &sharded.mesh);
                        return Err(format!(
                            "{called}: {} is not {}: off by {off:.1e}",
                            show(&term),
                            show(&equal)
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

fn graphs() -> Vec<ShardedGraph> {
    let random = (0..60).map(|seed| case(seed).sharded);
    MORE.iter().map(|text| read(text)).chain(random).collect()
}

#[test]
fn both_sides_of_every_row_are_the_same() {
    let mut used = BTreeSet::new();
    for (seed, sharded) in graphs().iter().enumerate() {
        try_on(sharded, ROWS, seed as u64, &mut used).unwrap_or_else(|e| panic!("{e}\n{sharded}"));
    }
    let unused: Vec<&str> = ROWS.iter().map(|r| r.name).filter(|n| !used.contains(n)).collect();
    assert_eq!(unused, Vec::<&str>::new(), "rows that no graph uses");
}

/// Rows that are wrong.
const FAULTS: [Row; 4] = [
    Row {
        name: "an all_reduce is its first half",
        apply: |_, term| match term {
            Term::Moved(Move::AllReduce { axes, reduce }, of) => {
                let scatter = Move::ReduceScatter { axes: axes.clone(), reduce: *reduce, dim: 0 };
                vec![(String::new(), Term::Moved(scatter, of.clone()))]
            }
            Term::Moved(..)
            | Term::Whole(_)
            | Term::Op(..)
            | Term::To(..)
            | Term::Lies(..)
            | Term::Pieces(..)
            | Term::Some(..) => Vec::new(),
        },
    },
    Row {
        name: "what is partial is whole",
        apply: |_, term| {
            let Term::To(sharding, of) = term else { return Vec::new() };
            match sharding.partial.is_empty() {
                true => Vec::new(),
                false => vec![(String::new(), Term::To(sharding.resolved(), of.clone()))],
            }
        },
    },
    Row {
        name: "an op of one operand changes no number",
        apply: |scope, term| {
            let Term::To(sharding, of) = term else { return Vec::new() };
            let Term::Op(i, args) = &**of else { return Vec::new() };
            let signature = &scope.graph.nodes[*i].signature;
            match args.len() == 1 && signature.args[0] == signature.results[0] {
                true => vec![(String::new(), Term::To(sharding.clone(), Box::new(args[0].clone())))],
                false => Vec::new(),
            }
        },
    },
    Row {
        name: "a slice is of any other dimension",
        apply: |scope, term| match term {
            Term::Moved(Move::AllGather { axes, dim }, of)
                if scope.graph.shape(of.value(scope.graph)).len() > 1 =>
            {
                let other = Move::AllGather { axes: axes.iter().rev().copied().collect(), dim: *dim };
                let slice = Move::Slice { axes: axes.clone(), dim: (*dim + 1) % 2 };
                let gathered = Term::Moved(other, of.clone());
                vec![(String::new(), Term::Moved(slice, Box::new(gathered)))]
            }
            Term::Moved(..)
            | Term::Whole(_)
            | Term::Op(..)
            | Term::To(..)
            | Term::Lies(..)
            | Term::Pieces(..)
            | Term::Some(..) => Vec::new(),
        },
    },
];

#[test]
fn wrong_rows_are_found() {
    for fault in FAULTS {
        let mut graphs = graphs().into_iter().enumerate();
        let found = graphs
            .any(|(seed, sharded)| try_on(&sharded, &[fault], seed as u64, &mut BTreeSet::new()).is_err());
        assert!(found, "{}: no graph shows it", fault.name);
    }
}

/// The value is used by nothing but the last line of a term: `show` of it is what a person reads.
#[test]
fn a_term_reads_as_it_runs() {
    let sharded = read(MORE[2]);
    let prices = wire();
    let best = best(&sharded, &prices);
    let scope = scope(&sharded, &best, 1);
    let (from, to) = planner::explain::terms(&scope, &best, 1, &Sharding::replicated(1));
    let show = |t: &Term| t.show(&sharded.graph, &sharded.mesh);
    assert_eq!(show(&from), "einsum(x) as [_]");
    assert_eq!(show(&to).matches("x @ [x, _]").count(), 1, "{}", show(&to));
    assert_eq!(from.value(&sharded.graph), Value(1));
}
