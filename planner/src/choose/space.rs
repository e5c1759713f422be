//! The ways in which each node may be split: one row an axis, within what the conventions of the axes' names allow.
//!
//! - An axis that splits a batch (`dp`, `dpo`, `ep`) or a sequence (`cp`) stays on the dimension of the inputs where it was
//!   placed, in every node that has it; elsewhere it splits only what it was placed on.
//! - `tp` splits anything but the batch, in the update only what a state is split by, and the vocabulary wherever it is
//!   not looked up.
//! - Any other axis splits anything.
//! - The parts of a refined axis go together, unless something is placed on the first of them alone.

use std::borrow::Cow;
use std::cell::Cell;
use std::rc::Rc;

use ir::rows::{Layout, Row, Strategy, factor_axes, layout, rows};
use ir::{Axis, Graph, Mesh, Name, Node, Op, Part, ShardedGraph, Sharding, Signature, Value};
use passes::asked;
use rustc_hash::{FxHashMap, FxHashSet};

use super::alike::{Flags, Key, Numbers, does};
use super::classes::{Classes, Placed};
use super::price::{computing, is_map, work};
use super::tables::Price;
use crate::cluster::Cluster;

/// A way to split a node.
#[derive(Clone, Debug)]
pub struct Way {
    /// How.
    pub strategy: Strategy,
    /// What it needs and gives.
    pub layout: Layout,
    /// The price of computing it so.
    pub work: Price,
}

/// The ways of a node; equal nodes share them.
#[derive(Clone, Debug)]
pub struct Ways {
    /// The same for the same ways.
    pub id: usize,
    /// In order of preference.
    pub all: Rc<Vec<Way>>,
}

/// More ways than this are not looked at for one node.
const MOST_WAYS: usize = 1500;

/// A value of indices that more nodes than this use lies as its inputs do, and each makes its own copy.
const MANY_USERS: usize = 2;

/// A sum of more than this passes partial values on where it can.
const MANY_TERMS: usize = 8;

/// Axes that split a batch or a sequence.
const DATA: [&str; 4] = ["dpo", "dp", "ep", "cp"];
/// The axis that splits a model.
const TENSOR: &str = "tp";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Tensor,
    Any,
}

fn kind(mesh: &Mesh, axis: Axis) -> Kind {
    let name = mesh.name(axis);
    let base = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let is = |known: &str| known == base || known == name;
    match DATA.iter().any(|d| is(d)) {
        true => Kind::Data,
        false if is(TENSOR) => Kind::Tensor,
        false => Kind::Any,
    }
}

/// Whether an axis stays with the batch or the sequence.
pub fn is_data(mesh: &Mesh, axis: Axis) -> bool {
    kind(mesh, axis) == Kind::Data
}

/// What is settled already, while the rest is chosen.
#[derive(Clone, Debug)]
pub struct Settled {
    /// The axes that are chosen now.
    pub open: Vec<Axis>,
    /// By node how it is split by the other axes.
    pub strategies: Vec<Strategy>,
    /// Where states lie, unless `tp` is open.
    pub places: FxHashMap<Name, Sharding>,
}

/// What may be chosen.
#[derive(Debug)]
pub struct Space<'a> {
    sharded: &'a ShardedGraph,
    cluster: &'a Cluster,
    kinds: Vec<Kind>,
    classes: Classes,
    update: Classes,
    /// Where inputs have data axes.
    bound: Placed,
    /// Where inputs have any axis.
    of_inputs: Placed,
    /// Where anything has an axis.
    placed: Placed,
    /// Where states have an axis, by the classes of the update.
    placed_update: Placed,
    batch: FxHashSet<u32>,
    vocabulary: FxHashSet<u32>,
    /// Classes on which the outer part of a refined axis lies alone.
    alone: Placed,
    /// Pairs of axes that some place has in this order, which is not the mesh's.
    turned: FxHashSet<(Axis, Axis)>,
    /// The places of each state among which is chosen.
    pub places: FxHashMap<Name, Vec<Sharding>>,
    /// Whether each value is written to memory.
    stored: Vec<bool>,
    /// Nodes that compute from indices and constants alone.
    given: Vec<bool>,
    /// Those of them whose results many use.
    shared: Vec<bool>,
    makers: Vec<usize>,
    /// By node the rows that each axis may have.
    allowed: Vec<Vec<Vec<Row>>>,
    rows: Numbers<Vec<Vec<Row>>>,
    signatures: Numbers<Signature>,
    lists: Numbers<Vec<Sharding>>,
    asked: FxHashMap<Value, Sharding>,
    /// The state as which a value lies.
    follows: FxHashMap<Value, Name>,
    known: FxHashMap<Key, Ways>,
    settled: Option<Settled>,
    whole: Cell<bool>,
}

/// What is placed on a dimension together with an axis behind it.
fn alone(axes: &[Axis], axis: Axis, mesh: &Mesh) -> bool {
    let Some((_, parts)) = mesh.aliases.iter().find(|(_, of)| of.first() == Some(&axis)) else {
        return false;
    };
    let at = axes.iter().position(|a| *a == axis);
    at.is_some_and(|i| !axes[i..].starts_with(parts))
}

impl<'a> Space<'a> {
    /// Of a graph on a mesh.
    pub fn of(sharded: &'a ShardedGraph, cluster: &'a Cluster, settled: Option<Settled>) -> Space<'a> {
        let (graph, mesh) = (&sharded.graph, &sharded.mesh);
        let classes = Classes::of(graph, |_| true);
        let (given, shared) = indices(graph);
        let mut space = Space {
            sharded,
            cluster,
            kinds: mesh.all().map(|a| kind(mesh, a)).collect(),
            update: Classes::of_update(graph),
            classes,
            bound: FxHashSet::default(),
            of_inputs: FxHashSet::default(),
            placed: FxHashSet::default(),
            placed_update: FxHashSet::default(),
            batch: FxHashSet::default(),
            vocabulary: FxHashSet::default(),
            alone: FxHashSet::default(),
            turned: FxHashSet::default(),
            places: super::places::all(sharded),
            stored: stored(graph),
            given,
            shared,
            makers: graph.makers(),
            allowed: Vec::new(),
            rows: Numbers::default(),
            signatures: Numbers::default(),
            lists: Numbers::default(),
            asked: graph.constraints.iter().map(|c| (c.value, asked(c, mesh))).collect(),
            follows: graph.follows.iter().cloned().collect(),
            known: FxHashMap::default(),
            settled,
            whole: Cell::new(true),
        };
        if let Some(settled) = &space.settled
            && !settled.open.iter().any(|a| space.kinds[a.index()] == Kind::Tensor)
        {
            space.places = settled.places.iter().map(|(n, p)| (n.clone(), vec![p.clone()])).collect();
        }
        space.note_places();
        space.note_rows();
        space
    }

    /// The rows that each node may have. A partial value passes only where an operand can be one: what has to be made
    /// partial first gains nothing.
    fn note_rows(&mut self) {
        let graph = &self.sharded.graph;
        // By value a bit an axis: whether it may be partial along it, and whether it is in any case.
        let mut partial: Vec<u32> = vec![0; graph.values.len()];
        let mut surely = partial.clone();
        for (i, node) in graph.nodes.iter().enumerate() {
            let mut allowed = self.rows_of(i);
            let repeats = (1..node.args.len()).any(|k| node.args[..k].contains(&node.args[k]));
            for (axis, rows) in allowed.iter_mut().enumerate() {
                let bit = 1 << axis;
                // A value that is also another operand is resolved for that one anyway.
                let again = |k: &usize, args: &[usize]| {
                    repeats
                        && (0..node.args.len()).any(|o| !args.contains(&o) && node.args[o] == node.args[*k])
                };
                let comes = |args: &[usize]| {
                    args.iter().any(|k| partial[node.args[*k].index()] & bit != 0)
                        && !args.iter().any(|k| again(k, args))
                };
                rows.retain(|row| !matches!(row, Row::Pass(_, args) if !comes(args)));
                // A sum of many is resolved once, and not its operands one by one.
                if node.op == Op::Add
                    && node.args.len() > MANY_TERMS
                    && rows.iter().any(|r| matches!(r, Row::Pass(..)))
                {
                    rows.retain(|row| *row != Row::Nothing);
                }
                // What is partial over the ranks that share a batch stays so until the update, and is reduced once.
                let stays = |row: &Row| matches!(row, Row::Pass(_, args) if args.iter().all(|k| surely[node.args[*k].index()] & bit != 0));
                let once = node.mark.part != Part::Update || node.op == Op::Accumulate;
                let data = self.kinds[axis] == Kind::Data && once;
                if data && rows.iter().any(stays) {
                    rows.retain(stays);
                }
                if let Some(row) = self.settled_row(i, Axis(axis as u8), rows) {
                    *rows = vec![row];
                }
                let leaves = |row: &Row| match row {
                    Row::Nothing => false,
                    Row::Pass(..) => true,
                    Row::Factor(f) => !node.signature.in_results(*f),
                };
                let (any, all) = (rows.iter().any(leaves), rows.iter().all(leaves));
                for v in &node.results {
                    partial[v.index()] |= if any { bit } else { 0 };
                    surely[v.index()] |= if all { bit } else { 0 };
                }
            }
            self.allowed.push(allowed);
        }
    }

    fn note_places(&mut self) {
        let (graph, mesh) = (&self.sharded.graph, &self.sharded.mesh);
        let whole = Vec::new();
        let states = graph.states_by_name();
        for node in &graph.nodes {
            let mut given = None;
            let placed;
            let (value, places): (Value, Vec<&Sharding>) = if let Op::Input(name) = &node.op {
                given = Some(name);
                placed = super::places::given(self.sharded, name);
                (node.results[0], vec![&placed])
            } else if let Op::State(name) = &node.op {
                (node.results[0], self.places.get(name).unwrap_or(&whole).iter().collect())
            } else if let Op::Assign(name) = &node.op {
                (node.args[0], self.places.get(name).unwrap_or(&whole).iter().collect())
            } else if node.op == Op::Reshard {
                let followed = self.follows.get(&node.results[0]).and_then(|name| self.places.get(name));
                let places = self.asked.get(&node.results[0]).into_iter();
                (node.results[0], places.chain(followed.into_iter().flatten()).collect())
            } else {
                continue;
            };
            if let Some(input) = given.and_then(|name| graph.inputs.iter().find(|i| i.name == *name)) {
                for (d, (name, _)) in input.dims.iter().enumerate() {
                    if **name == *"b" || name.starts_with("b.") {
                        self.batch.insert(self.classes.of_value(value, d));
                    }
                }
            }
            if let Op::State(name) = &node.op
                && let Some(state) = states.get(&**name)
            {
                for (d, _) in state.dims.iter().enumerate().filter(|(_, (name, _))| **name == *"v") {
                    self.vocabulary.insert(self.classes.of_value(value, d));
                }
            }
            for (d, axes) in places.iter().flat_map(|p| p.dims.iter().enumerate()) {
                let (class, update) = (self.classes.of_value(value, d), self.update.of_value(value, d));
                for (i, axis) in axes.iter().enumerate() {
                    self.placed.insert((class, *axis));
                    if given.is_none() {
                        self.placed_update.insert((update, *axis));
                    } else {
                        self.of_inputs.insert((class, *axis));
                    }
                    if given.is_some() && self.kinds[axis.index()] == Kind::Data {
                        self.bound.insert((class, *axis));
                        self.batch.insert(class);
                    }
                    if alone(axes, *axis, mesh) {
                        self.alone.insert((class, *axis));
                    }
                    self.turned.extend(axes[..i].iter().filter(|b| *b > axis).map(|b| (*b, *axis)));
                }
            }
        }
    }

    /// The ways of node `i`. Those of a state and of what is assigned to it are its places, in order.
    pub fn ways(&mut self, i: usize) -> Ways {
        let (graph, mesh) = (&self.sharded.graph, &self.sharded.mesh);
        let node = &graph.nodes[i];
        let given: Option<Cow<[Sharding]>> = if let Op::Input(name) = &node.op {
            Some(Cow::Owned(vec![super::places::given(self.sharded, name)]))
        } else if let Op::State(name) | Op::Assign(name) = &node.op {
            self.places.get(name).map(|p| Cow::Borrowed(&p[..]))
        } else if let (Op::Reshard, Some(name)) =
            (&node.op, node.results.first().and_then(|v| self.follows.get(v)))
        {
            self.places.get(name).map(|p| Cow::Borrowed(&p[..]))
        } else if node.op == Op::Reshard {
            let whole = || Sharding::replicated(graph.shape(node.results[0]).len());
            Some(Cow::Owned(vec![self.asked.get(&node.results[0]).cloned().unwrap_or_else(whole)]))
        } else {
            None
        };
        let allowed = if given.is_some() { 0 } else { 1 + self.rows.of(&self.allowed[i]) };
        let signature = self.signatures.of(&*node.signature);
        let dtypes = node.args.iter().chain(&node.results).map(|v| graph.ty(*v).dtype).collect();
        // Factors on which the outer part of a refined axis may lie alone.
        let alone = (0..node.sizes.len())
            .flat_map(|f| mesh.all().map(move |a| (f, a)))
            .map(|(f, a)| self.alone.contains(&(self.classes.of_factor(i, f), a)));
        let mut flags = Flags::new();
        if !mesh.aliases.is_empty() {
            flags.extend(alone);
        }
        flags.extend(node.results.iter().chain(&node.args).map(|v| self.stored[v.index()]));
        let places = given.as_deref().map(|g| self.lists.of(g));
        let key: Key = (does(node), signature, node.sizes[..].into(), dtypes, allowed, flags, places);
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let all = match &given {
            Some(places) => places.iter().map(|p| placed(node, p, mesh)).collect(),
            None => self.enumerate(i, &self.allowed[i]),
        };
        let ways = Ways { id: self.known.len(), all: Rc::new(all) };
        self.known.insert(key, ways.clone());
        ways
    }

    /// Whether a value is a parameter whose every place has an axis, but not on the vocabulary.
    fn lies_elsewhere(&self, value: Value, axis: Axis) -> bool {
        let Op::State(name) = &self.sharded.graph.nodes[self.maker(value)].op else { return false };
        let off = |p: &Sharding| {
            let dim = p.dims.iter().position(|axes| axes.contains(&axis));
            dim.is_some_and(|d| !self.vocabulary.contains(&self.classes.of_value(value, d)))
        };
        self.places.get(name).is_some_and(|places| places.iter().all(off))
    }

    /// The row of an axis that is settled: as it was chosen, or nothing where it was not yet.
    fn settled_row(&self, i: usize, axis: Axis, rows: &[Row]) -> Option<Row> {
        let settled = self.settled.as_ref().filter(|s| !s.open.contains(&axis))?;
        let chosen = settled.strategies.get(i).map_or(Row::Nothing, |s| s.row(axis));
        let fallback = || rows.iter().find(|r| **r == Row::Nothing).or(rows.first()).cloned();
        rows.contains(&chosen).then_some(chosen).or_else(fallback)
    }

    /// Whether an axis is settled.
    pub(super) fn is_settled(&self, axis: Axis) -> bool {
        self.settled.as_ref().is_some_and(|s| !s.open.contains(&axis))
    }

    /// For each axis the rows that node `i` may have.
    pub(super) fn allowed(&self, i: usize) -> &[Vec<Row>] {
        &self.allowed[i]
    }

    fn rows_of(&self, i: usize) -> Vec<Vec<Row>> {
        let (graph, mesh) = (&self.sharded.graph, &self.sharded.mesh);
        let node = &graph.nodes[i];
        let all = rows(graph, node);
        // A sum over micro-batches lies as what uses it does.
        let update = node.mark.part == Part::Update || node.op == Op::Accumulate;
        let of_axis = |axis: Axis| -> Vec<Row> {
            if !mesh.splits(axis) {
                return vec![Row::Nothing];
            }
            let class = |f: usize| self.classes.of_factor(i, f);
            let placed = |f: usize| match update {
                true => self.placed_update.contains(&(self.update.of_factor(i, f), axis)),
                false => self.placed.contains(&(class(f), axis)),
            };
            let kind = self.kinds[axis.index()];
            let bound = |row: &Row| match row {
                Row::Factor(f) => self.bound.contains(&(class(*f), axis)),
                Row::Nothing | Row::Pass(..) => false,
            };
            if kind == Kind::Data && all.iter().any(bound) {
                return all.iter().filter(|row| bound(row)).cloned().collect();
            }
            let large = |f: usize| node.sizes[f] >= mesh.size(axis);
            // Nothing gathers the columns of the vocabulary.
            let looked = node.op.looked_up(&node.signature);
            let columns = |row: &Row| match row {
                Row::Factor(f) => self.vocabulary.contains(&class(*f)) && large(*f) && looked != Some(*f),
                Row::Nothing | Row::Pass(..) => false,
            };
            let elsewhere = || node.args.iter().any(|v| self.lies_elsewhere(*v, axis));
            if kind == Kind::Tensor && !update && all.iter().any(columns) && !elsewhere() {
                return all.iter().filter(|row| columns(row)).cloned().collect();
            }
            let may = |f: usize| match kind {
                Kind::Data => placed(f),
                Kind::Tensor if self.batch.contains(&class(f)) => placed(f),
                Kind::Tensor | Kind::Any if self.shared[i] => self.of_inputs.contains(&(class(f), axis)),
                Kind::Tensor | Kind::Any if update => placed(f),
                Kind::Tensor | Kind::Any => large(f) || placed(f),
            };
            let allowed = |row: &&Row| match row {
                Row::Factor(f) => may(*f),
                Row::Nothing | Row::Pass(..) => true,
            };
            all.iter().filter(allowed).cloned().collect()
        };
        mesh.all().map(of_axis).collect()
    }

    fn enumerate(&self, i: usize, allowed: &[Vec<Row>]) -> Vec<Way> {
        let (graph, mesh) = (&self.sharded.graph, &self.sharded.mesh);
        let node = &graph.nodes[i];
        let mut picks: Vec<Vec<(Axis, Row)>> = vec![Vec::new()];
        for (_, parts) in mesh.outer() {
            let mut next = self.joint(i, &parts, allowed);
            self.limit(picks.len(), &mut next);
            picks = picks
                .iter()
                .flat_map(|p| next.iter().map(|n| [&p[..], n].concat()).collect::<Vec<_>>())
                .collect();
        }
        let strategies = picks.iter().flat_map(|pick| self.ordered(node, pick));
        let mut ways: Vec<Way> = strategies.filter_map(|s| self.way(i, s)).collect();
        if ways.is_empty() {
            ways.extend(self.way(i, Strategy::whole(node)));
        }
        ways
    }

    /// The way of node `i` by a strategy; none if it is not legal.
    pub(super) fn way(&self, i: usize, strategy: Strategy) -> Option<Way> {
        let (graph, mesh) = (&self.sharded.graph, &self.sharded.mesh);
        let node = &graph.nodes[i];
        let layout = layout(graph, node, &strategy, mesh)?;
        let work = work(graph, node, &strategy, &layout, &|v| self.stored[v.index()], mesh);
        Some(Way { work: computing(work, self.cluster), strategy, layout })
    }

    /// Beyond what can be looked at, an axis does the first that it may.
    pub(super) fn limit<T>(&self, picks: usize, next: &mut Vec<T>) {
        if picks * next.len() > MOST_WAYS {
            next.truncate(1);
            self.whole.set(false);
        }
    }

    /// Whether every way was looked at.
    pub fn is_whole(&self) -> bool {
        self.whole.get()
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.sharded.mesh
    }

    /// The node that defines a value.
    pub(super) fn maker(&self, value: Value) -> usize {
        self.makers[value.index()]
    }

    /// Whether node `i` computes from indices and constants alone.
    pub(super) fn is_given(&self, i: usize) -> bool {
        self.given[i]
    }

    /// Whether node `i` computes so, and many use its result: each user then makes its own copy.
    pub fn is_shared(&self, i: usize) -> bool {
        self.shared[i]
    }

    /// Whether the outer part of a refined axis lies alone where this factor of node `i` is.
    pub(super) fn lies_alone(&self, i: usize, factor: usize, axis: Axis) -> bool {
        self.alone.contains(&(self.classes.of_factor(i, factor), axis))
    }

    /// The rows of axes that are parts of one: the same for all, or the first alone where it was placed so.
    fn joint(&self, i: usize, parts: &[Axis], allowed: &[Vec<Row>]) -> Vec<Vec<(Axis, Row)>> {
        let Some((first, rest)) = parts.split_first() else { return vec![Vec::new()] };
        let mut out = Vec::new();
        for row in &allowed[first.index()] {
            if rest.iter().all(|a| allowed[a.index()].contains(row)) {
                out.push(parts.iter().map(|a| (*a, row.clone())).collect());
            }
            let alone = |f: usize| self.alone.contains(&(self.classes.of_factor(i, f), *first));
            if !rest.is_empty() && matches!(row, Row::Factor(f) if alone(*f)) {
                let inner = self.joint(i, rest, allowed);
                let others = inner.into_iter().filter(|r| r.iter().any(|(_, other)| other != row));
                out.extend(others.map(|r| [vec![(*first, row.clone())], r].concat()));
            }
        }
        if out.is_empty() {
            out.push(parts.iter().map(|a| (*a, Row::Nothing)).collect());
        }
        out
    }

    /// The strategies of these rows: the axes of a factor in the mesh's order, and in that of a place.
    pub(super) fn ordered(&self, node: &Node, pick: &[(Axis, Row)]) -> Vec<Strategy> {
        let mut strategy = Strategy::whole(node);
        for (axis, row) in pick {
            match row {
                Row::Nothing => {}
                Row::Factor(f) => strategy.split[*f].push(*axis),
                Row::Pass(reduce, args) => strategy.pass.push((*axis, *reduce, args.clone())),
            }
        }
        let mut turned = strategy.clone();
        for axes in &mut turned.split {
            axes.sort_by(|a, b| match self.turned.contains(&(*a.max(b), *a.min(b))) {
                true => b.cmp(a),
                false => a.cmp(b),
            });
        }
        if turned == strategy { vec![strategy] } else { vec![strategy, turned] }
    }
}

/// What is read or assigned lies where it was placed.
fn placed(node: &Node, place: &Sharding, mesh: &Mesh) -> Way {
    let mut strategy = Strategy::whole(node);
    let dims = node.signature.results.first().or(node.signature.args.first());
    let dims = if node.op == Op::Reshard { None } else { dims };
    for (dim, axes) in dims.into_iter().flatten().zip(&place.dims) {
        for (f, axis) in factor_axes(dim, axes, &node.sizes, mesh) {
            strategy.split[f].push(axis);
        }
    }
    let args = node.args.iter().map(|_| place.clone()).collect();
    let results = node.results.iter().map(|_| place.clone()).collect();
    Way { strategy, layout: Layout { args, results }, work: 0 }
}

/// Values that are written to memory: all but those which one node uses that computes element by element.
fn stored(graph: &Graph) -> Vec<bool> {
    let mut users = vec![0; graph.values.len()];
    let mut joined = vec![true; graph.values.len()];
    for node in &graph.nodes {
        for v in &node.args {
            users[v.index()] += 1;
            joined[v.index()] &= is_map(node);
        }
    }
    users.iter().zip(joined).map(|(n, joined)| *n != 1 || !joined).collect()
}

/// Nodes that compute from indices and constants alone, and those of them whose results many nodes use.
fn indices(graph: &Graph) -> (Vec<bool>, Vec<bool>) {
    let mut users = vec![0; graph.values.len()];
    graph.nodes.iter().flat_map(|n| &n.args).for_each(|v| users[v.index()] += 1);
    let only = graph.given();
    let of = |node: &Node| {
        node.results.iter().any(|v| only[v.index()])
            || node.results.is_empty() && node.args.iter().all(|v| only[v.index()])
    };
    let given: Vec<bool> = graph.nodes.iter().map(of).collect();
    let many = |node: &Node| node.results.iter().any(|v| users[v.index()] > MANY_USERS);
    let shared = graph.nodes.iter().zip(&given).map(|(node, given)| *given && many(node)).collect();
    (given, shared)
}
