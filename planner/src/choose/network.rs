//! The choice as a network of tables: a variable for each node, whose values are its ways, one for each parameter, whose
//! values are its places, and one for each value that several nodes use, whose values are the sets of copies in which it
//! is there. What a node computes, what the copies of a value cost, and whether a copy is there as a node needs it are
//! tables over one or two of them.

use std::collections::BTreeMap;
use std::rc::Rc;

use ir::rows::Strategy;
use ir::{Axes, Axis, DType, Name, Op, Part, Reshard, ShardedGraph, Sharding, Value};
use rustc_hash::FxHashMap;

use super::eliminate::{Network, Solution, Var};
use super::groups::{self, Group};
use super::routes::{Beyond, Routes, Tensor};
use super::space::{Settled, Space, Ways};
use super::tables::{NEVER, Price, Table, TableId, plus, repeated};
use crate::cluster::Cluster;

/// What it costs to join a matrix parameter that `tp` splits: more than anything else, so that it is done only where
/// nothing else is legal.
const JOIN: Price = 1 << 54;

/// A graph of so many nodes is small.
const SMALL: usize = 64;

/// How many copies of a value there may be, beyond those that some user needs in any case: fewer where there are many
/// shardings and the graph is not small.
fn most_copies(shardings: usize, nodes: usize) -> usize {
    match shardings {
        0..=12 => 3,
        13..=60 if nodes <= SMALL => 3,
        13..=60 => 2,
        _ => 1,
    }
}

/// The choice, ready to be solved.
#[derive(Debug)]
pub struct Choice<'a> {
    sharded: &'a ShardedGraph,
    cluster: &'a Cluster,
    /// The places of each state among which is chosen.
    pub places: FxHashMap<Name, Vec<Sharding>>,
    /// The ways of each node.
    pub ways: Vec<Ways>,
    /// The variable of each node.
    pub vars: Vec<Var>,
    /// The variables and tables.
    pub network: Network,
    /// Whether every way, and all that lies between two shardings, was looked at.
    pub whole: bool,
    /// Of each value, for each user what leads from each sharding to the others.
    routes: Vec<Vec<Rc<Routes>>>,
    users: Vec<Vec<(usize, usize)>>,
    makers: Vec<usize>,
    /// Values of which each user makes its own copy.
    shared: Vec<bool>,
    /// Values whose copies are made anew in each part of a step.
    again: Vec<bool>,
    microbatches: usize,
    known: FxHashMap<Key, Rc<Of>>,
    operands: Operands,
    works: FxHashMap<(Vec<usize>, usize), TableId>,
}

/// What the tables of a value depend on: its maker's ways, its users' and which operand it is, shape, type, whether it is
/// a parameter, how often it is made; and which of the variables are the same.
type Key = (usize, Vec<(usize, usize, usize)>, Vec<usize>, DType, bool, usize);

/// A node with more operands than this has many that are needed alike.
const MANY_OPERANDS: usize = 8;

/// Operands of nodes with many, by the numbers of the nodes' ways.
#[derive(Debug, Default)]
struct Operands {
    /// For each the first that is needed in the same shardings, way by way.
    first: FxHashMap<(usize, usize), usize>,
    /// All that are first.
    all: FxHashMap<usize, Vec<usize>>,
}

impl Operands {
    /// The first operand that is needed as operand `k` is: what follows for both is the same.
    fn like(&mut self, ways: &Ways, k: usize) -> usize {
        let known = self.all.entry(ways.id).or_default();
        *self.first.entry((ways.id, k)).or_insert_with(|| {
            let same = |o: &usize| ways.all.iter().all(|w| w.layout.args[*o] == w.layout.args[k]);
            known.iter().copied().find(same).unwrap_or_else(|| {
                known.push(k);
                k
            })
        })
    }
}

/// The forward pass, the backward pass and the update.
fn phase(part: Part) -> usize {
    match part {
        Part::Forward => 0,
        Part::Input | Part::Weight => 1,
        Part::Update => 2,
    }
}

/// The tables of a value.
#[derive(Debug)]
struct Of {
    routes: Rc<Routes>,
    /// How many sets of copies there are, if several variables need it.
    sets: Option<usize>,
    /// Over maker and copies, or maker and the one user's variable.
    source: TableId,
    /// For each user over copies and user.
    uses: Vec<TableId>,
}

/// Joins of `tp` are dear.
#[derive(Debug)]
struct Joins(Vec<Axis>);

impl Beyond for Joins {
    fn price(&self, from: &Sharding, to: &Sharding) -> Price {
        if joins(&self.0, from, to) { JOIN } else { 0 }
    }
}

/// Whether some of these axes leave the dimension that they split.
pub fn joins(axes: &[Axis], from: &Sharding, to: &Sharding) -> bool {
    let leaves = |(d, split): (usize, &Axes)| {
        split.iter().filter(|a| axes.contains(a)).any(|a| !to.dims[d].contains(a))
    };
    from.dims.iter().enumerate().any(leaves)
}

impl<'a> Choice<'a> {
    /// Of a graph on a mesh.
    pub fn of(sharded: &'a ShardedGraph, cluster: &'a Cluster, settled: Option<Settled>) -> Choice<'a> {
        let graph = &sharded.graph;
        let mut space = Space::of(sharded, cluster, settled);
        let groups = groups::all(&mut space, graph);
        let mut users = vec![Vec::new(); graph.values.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            node.args.iter().enumerate().for_each(|(k, v)| users[v.index()].push((i, k)));
        }
        let again = again(sharded);
        for (of, _) in users.iter_mut().zip(&again).filter(|(_, again)| **again) {
            of.sort_by_key(|(u, _): &(usize, usize)| phase(graph.nodes[*u].mark.part));
        }
        let mut choice = Choice {
            again,
            microbatches: sharded.decisions.schedule.microbatches(),
            sharded,
            cluster,
            places: std::mem::take(&mut space.places),
            vars: Vec::new(),
            network: Network::default(),
            whole: space.is_whole(),
            routes: vec![Vec::new(); graph.values.len()],
            users,
            makers: graph.makers(),
            shared: graph.makers().iter().map(|i| *i < graph.nodes.len() && space.is_shared(*i)).collect(),
            known: FxHashMap::default(),
            operands: Operands::default(),
            works: FxHashMap::default(),
            ways: Vec::new(),
        };
        choice.variables(groups);
        (0..graph.values.len()).for_each(|v| choice.value(Value(v as u32)));
        choice
    }

    fn variables(&mut self, groups: Vec<Group>) {
        let graph = &self.sharded.graph;
        let states = graph.states_by_name();
        let mut of_parameter: FxHashMap<&Name, Var> = FxHashMap::default();
        let mut of_node: Vec<Option<(Var, Ways)>> = vec![None; graph.nodes.len()];
        let reshard = |(v, _): &&(Value, Name)| graph.nodes[self.makers[v.index()]].op == Op::Reshard;
        let follows: FxHashMap<Value, &Name> =
            graph.follows.iter().filter(reshard).map(|(v, name)| (*v, name)).collect();
        for group in groups {
            let values = group.ways[0].all.len();
            let first = &graph.nodes[group.members[0]];
            let follows = first.results.first().and_then(|v| follows.get(v).copied());
            let state = if let Op::State(name) | Op::Assign(name) = &first.op { Some(name) } else { follows };
            let var = if let Some(name) = state {
                let role = states.get(&**name).map(|s| &s.role);
                let parameter = role.and_then(|r| r.of()).unwrap_or(name);
                *of_parameter.entry(parameter).or_insert_with(|| self.network.variable(values))
            } else {
                self.network.variable(values)
            };
            let work = self.work(&group);
            self.network.add(&[var], work);
            for (i, ways) in group.members.into_iter().zip(group.ways) {
                of_node[i] = Some((var, ways));
            }
        }
        (self.vars, self.ways) = of_node.into_iter().flatten().unzip();
    }

    /// What the nodes of a group compute, for each of its ways.
    fn work(&mut self, group: &Group) -> TableId {
        let ids = group.ways.iter().map(|w| w.id).collect();
        let times = self.times(group.members.iter().copied());
        *self.works.entry((ids, times)).or_insert_with(|| {
            let work = |sum, w: &Ways, at: usize| plus(sum, repeated(w.all[at].work, times));
            let of = |at: &[usize]| group.ways.iter().fold(0, |sum, w| work(sum, w, at[0]));
            self.network.tables.intern(Table::of(vec![group.ways[0].all.len()], of))
        })
    }

    /// How often in a step one of these nodes computes.
    fn times(&self, mut nodes: impl Iterator<Item = usize>) -> usize {
        let graph = &self.sharded.graph;
        if nodes.any(|i| graph.nodes[i].mark.part != Part::Update) { self.microbatches } else { 1 }
    }

    /// The users of a value by what shares copies.
    fn sharing<'b>(&self, value: Value, users: &'b [(usize, usize)]) -> Vec<&'b [(usize, usize)]> {
        let part = |u: usize| phase(self.sharded.graph.nodes[u].mark.part);
        if self.shared[value.index()] {
            users.chunks(1).collect()
        } else if self.again[value.index()] {
            users.chunk_by(|(a, _), (b, _)| part(*a) == part(*b)).collect()
        } else {
            vec![users]
        }
    }

    /// The tables of a value.
    fn value(&mut self, value: Value) {
        let users = self.users[value.index()].clone();
        for together in self.sharing(value, &users) {
            self.value_for(value, together);
        }
    }

    /// The tables of a value for some of its users.
    fn value_for(&mut self, value: Value, users: &[(usize, usize)]) {
        if users.is_empty() {
            return;
        }
        let maker = self.makers[value.index()];
        let ty = self.sharded.graph.ty(value);
        let mut open: Vec<Var> =
            users.iter().map(|(u, _)| self.vars[*u]).filter(|v| self.network.domains[*v] > 1).collect();
        open.sort_unstable();
        open.dedup();
        let number = |u: usize| open.binary_search(&self.vars[u]).map_or(usize::MAX, |n| n.min(1));
        let alone = open.len() <= 1;
        let mut each = Vec::with_capacity(users.len());
        for (u, k) in users {
            let many = self.sharded.graph.nodes[*u].args.len() > MANY_OPERANDS;
            let k = if many { self.operands.like(&self.ways[*u], *k) } else { *k };
            each.push((self.ways[*u].id, k, if alone { number(*u) } else { 2 }));
        }
        let times = self.times(users.iter().map(|(u, _)| *u));
        let key = (self.ways[maker].id, each, ty.shape.clone(), ty.dtype, self.is_matrix(value), times);
        let of = match self.known.get(&key) {
            Some(of) => of.clone(),
            None => {
                let of = Rc::new(self.tables_of(value, users, alone));
                self.known.insert(key, of.clone());
                of
            }
        };
        self.routes[value.index()].extend(users.iter().map(|_| of.routes.clone()));
        let source = self.vars[maker];
        match of.sets {
            None => {
                let user = open.first().copied();
                let vars: Vec<Var> = [source].into_iter().chain(user).collect();
                self.network.add(&vars, of.source);
            }
            Some(sets) => {
                let copies = self.network.variable(sets);
                self.network.add(&[source, copies], of.source);
                for ((u, _), table) in users.iter().zip(&of.uses) {
                    self.network.add(&[copies, self.vars[*u]], *table);
                }
            }
        }
    }

    /// Whether a value is a parameter of two dimensions or more, which stays as `tp` splits it.
    pub fn is_matrix(&self, value: Value) -> bool {
        let node = &self.sharded.graph.nodes[self.makers[value.index()]];
        let large = self.sharded.graph.shape(value).iter().filter(|n| **n > 1).count();
        matches!(node.op, Op::State(_)) && large > 1
    }

    fn tables_of(&mut self, value: Value, users: &[(usize, usize)], alone: bool) -> Of {
        let graph = &self.sharded.graph;
        let maker = self.makers[value.index()];
        let sources: Vec<Sharding> =
            self.ways[maker].all.iter().map(|w| w.layout.results[0].clone()).collect();
        let needs: Vec<Vec<Sharding>> = users
            .iter()
            .map(|(u, k)| self.ways[*u].all.iter().map(|w| w.layout.args[*k].clone()).collect())
            .collect();
        let tensor = self.sharded.mesh.find("tp").filter(|_| self.is_matrix(value)).unwrap_or_default();
        let beyond = Joins(tensor);
        let ty = graph.ty(value);
        let ends: Vec<Sharding> = sources.iter().chain(needs.iter().flatten()).cloned().collect();
        let times = self.times(users.iter().map(|(u, _)| *u));
        let given = Tensor { shape: &ty.shape, dtype: ty.dtype, times, beyond: &beyond };
        let routes = Rc::new(Routes::between(given, &ends, &self.sharded.mesh, self.cluster));
        self.whole &= routes.whole;
        let sources: Vec<usize> = sources.iter().map(|s| routes.at(s)).collect();
        let needs: Vec<Vec<usize>> =
            needs.iter().map(|of| of.iter().map(|s| routes.at(s)).collect()).collect();
        let tables = &mut self.network.tables;
        if alone {
            // All users that have a choice have the same one.
            let values = needs.iter().map(Vec::len).max().unwrap_or(1);
            let price = |p: usize, x: usize| {
                let set: Vec<usize> = needs.iter().map(|of| of[x.min(of.len() - 1)]).collect();
                routes.tree(sources[p], &set).0
            };
            let table = match values {
                1 => Table::of(vec![sources.len()], |at| price(at[0], 0)),
                _ => Table::of(vec![sources.len(), values], |at| price(at[0], at[1])),
            };
            let source = tables.intern(table);
            return Of { source, routes, sets: None, uses: Vec::new() };
        }
        let sets = sets(&needs, graph.nodes.len());
        let source = tables.intern(Table::of(vec![sources.len(), sets.len()], |at| {
            routes.tree(sources[at[0]], &sets[at[1]]).0
        }));
        let uses = needs
            .iter()
            .map(|of| {
                let there = |at: &[usize]| if sets[at[0]].contains(&of[at[1]]) { 0 } else { NEVER };
                tables.intern(Table::of(vec![sets.len(), of.len()], there))
            })
            .collect();
        Of { routes, sets: Some(sets.len()), source, uses }
    }

    /// The best choice.
    pub fn solve(&mut self) -> Solution {
        self.network.solve()
    }

    /// The way of each node.
    pub fn picked(&self, pick: &[usize]) -> Vec<usize> {
        self.vars.iter().map(|v| pick[*v]).collect()
    }

    /// The strategies of the nodes at these ways.
    pub fn strategies(&self, picked: &[usize]) -> Vec<Strategy> {
        self.ways.iter().zip(picked).map(|(w, p)| w.all[*p].strategy.clone()).collect()
    }

    /// Where each state lies, at these ways.
    pub fn places_at(&self, picked: &[usize]) -> FxHashMap<Name, Sharding> {
        let each = self.sharded.graph.nodes.iter().zip(picked).filter_map(|(node, p)| {
            let (Op::State(name) | Op::Assign(name)) = &node.op else { return None };
            Some((name.clone(), self.places.get(name)?.get(*p)?.clone()))
        });
        each.collect()
    }

    /// The nodes that use a value, each with the place of the operand.
    pub fn users(&self, value: Value) -> &[(usize, usize)] {
        &self.users[value.index()]
    }

    /// The shardings that lie between those in which a value is made and needed.
    pub fn shardings(&self, value: Value) -> Vec<&Sharding> {
        let mut all: Vec<&Sharding> = Vec::new();
        for sharding in self.routes[value.index()].iter().flat_map(|r| &r.all) {
            if !all.contains(&sharding) {
                all.push(sharding);
            }
        }
        all
    }

    /// The reshards that bring a value to where its users need it, at these ways of the nodes, and their price.
    pub fn copies(&self, value: Value, picked: &[usize]) -> (Price, Vec<Reshard>) {
        let maker = self.makers[value.index()];
        let from = &self.ways[maker].all[picked[maker]].layout.results[0];
        let (mut price, mut copies) = (0, Vec::new());
        let mut routes = self.routes[value.index()].iter();
        for together in self.sharing(value, &self.users[value.index()]) {
            let Some(routes) = routes.by_ref().take(together.len()).last() else { continue };
            let need = |(u, k): &(usize, usize)| routes.at(&self.ways[*u].all[picked[*u]].layout.args[*k]);
            let needs: Vec<usize> = together.iter().map(need).collect();
            let (all, edges) = routes.tree(routes.at(from), &needs);
            price = plus(price, all);
            for (a, b) in edges {
                let reshard = Reshard { from: routes.all[a].clone(), to: routes.all[b].clone() };
                // Two ways to one sharding would be one too many.
                if !copies.iter().any(|c: &Reshard| c.to == reshard.to) {
                    copies.push(reshard);
                }
            }
        }
        (price, copies)
    }

    /// The price of these ways of the nodes: what they compute, and all copies.
    pub fn price(&self, picked: &[usize]) -> Price {
        let work = self.ways.iter().zip(picked).enumerate();
        let work = work.map(|(i, (w, p))| repeated(w.all[*p].work, self.times(std::iter::once(i))));
        let copies = (0..self.routes.len()).map(|v| self.copies(Value(v as u32), picked).0);
        work.chain(copies).fold(0, plus)
    }

    /// All copies that are made.
    pub fn all_copies(&self, picked: &[usize]) -> BTreeMap<Value, Vec<Reshard>> {
        let each = (0..self.routes.len()).map(|v| Value(v as u32));
        each.map(|v| (v, self.copies(v, picked).1)).filter(|(_, copies)| !copies.is_empty()).collect()
    }
}

/// The values whose copies are made anew in each part of a step.
fn again(sharded: &ShardedGraph) -> Vec<bool> {
    let mut again = vec![false; sharded.graph.values.len()];
    for node in &sharded.graph.nodes {
        let Op::State(name) = &node.op else { continue };
        let made = sharded.decisions.again.contains(name);
        node.results.iter().for_each(|v| again[v.index()] = made);
    }
    again
}

/// The sets of copies, by their places, of which one is there: what users need that have no choice, and up to a few more,
/// so that every user finds what it needs.
fn sets(needs: &[Vec<usize>], nodes: usize) -> Vec<Vec<usize>> {
    let mut base: Vec<usize> = needs.iter().filter(|of| of.len() == 1).map(|of| of[0]).collect();
    base.sort_unstable();
    base.dedup();
    let mut others: Vec<usize> = needs.iter().flatten().copied().filter(|n| !base.contains(n)).collect();
    others.sort_unstable();
    others.dedup();
    let choosing = needs.iter().filter(|of| of.len() > 1).count();
    let most = most_copies(others.len() + base.len(), nodes);
    let suffices = |set: &Vec<usize>| needs.iter().all(|of| of.iter().any(|n| set.contains(n)));
    let (mut sets, mut last) = (Vec::new(), vec![(base, 0)]);
    for more in 0..=choosing {
        sets.extend(last.iter().map(|(set, _)| set).filter(|set| suffices(set)).cloned());
        if more >= most && !sets.is_empty() {
            break;
        }
        let with = |(set, from): &(Vec<usize>, usize)| {
            let rest = others.iter().enumerate().skip(*from);
            rest.map(|(i, n)| ([&set[..], &[*n]].concat(), i + 1)).collect::<Vec<_>>()
        };
        last = last.iter().flat_map(with).collect();
    }
    sets
}
