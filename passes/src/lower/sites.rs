//! Where each node runs in a pipeline: in which segments of which stages, and what has to go from one to another.
//!
//! A node of a micro-batch runs in the stage of its mark. What follows from inputs, indices, constants and states alone (masks,
//! rotary tables, parameters in another type or sharding) runs in every stage that uses it: it costs less than sending it.
//! A node of the update runs where what it leads to is needed: where the states live that it changes, and everywhere if every
//! rank must know it. Operands that are not there are brought, or what is made of them, whichever is less; a sum whose
//! operands no row has all is made of the sums of rows.

use std::collections::{BTreeMap, BTreeSet};

use ir::schedule::{Kind, Schedule};
use ir::state::Role;
use ir::{Graph, Name, Node, Op, Part, Scope, Value};
use smallvec::{SmallVec, smallvec};

/// A set of rows of the pipeline.
type Rows = SmallVec<[bool; 16]>;

/// A virtual stage, and the kind of the segment in it. The update of a row is that of its first stage.
pub(super) type Site = (usize, Kind);

/// The sites of a node: nearly always one.
pub(super) type Of = SmallVec<[Site; 1]>;

/// How an operand of the update that a row lacks comes there.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Crossing {
    /// An operand is brought to all rows.
    Bring(Value),
    /// The result is the sum of what each row has of the operands.
    Sum,
}

/// Where everything runs.
pub(super) struct Sites {
    /// By node.
    pub(super) of: Vec<Of>,
    /// By value of a micro-batch the other stages that use it, each with the first kind of segment that does.
    pub(super) sends: BTreeMap<Value, Of>,
    /// What crosses rows right before a node of the update.
    pub(super) crossings: BTreeMap<usize, Vec<Crossing>>,
    /// By row its first virtual stage.
    pub(super) first: Vec<usize>,
    /// By virtual stage its row.
    pub(super) homes: Vec<usize>,
    /// By value the node that makes it.
    pub(super) makers: Vec<usize>,
    /// By virtual stage whether its backward has two halves.
    pub(super) split: Vec<bool>,
}

/// Whether the table has the backward of a stage in two halves.
fn split(schedule: &Schedule) -> Vec<bool> {
    let mut split = vec![false; schedule.stages().max(1)];
    for action in schedule.rows.iter().flatten() {
        split[action.stage] |= matches!(action.kind, Kind::Input | Kind::Weight);
    }
    split
}

/// The kind of segment of each node of a micro-batch, and of the update.
fn kinds(graph: &Graph, split: &[bool]) -> Vec<Kind> {
    let makers = graph.makers();
    let kind = |n: &Node| match n.mark.part {
        Part::Forward => Kind::Forward,
        Part::Input | Part::Weight if !split[graph.stage(n.mark)] => Kind::Backward,
        Part::Input => Kind::Input,
        Part::Weight => Kind::Weight,
        Part::Update => Kind::Optimizer,
    };
    let mut kinds: Vec<Kind> = graph.nodes.iter().map(kind).collect();
    // What a gradient of an input needs comes with it.
    for i in (0..graph.nodes.len()).rev() {
        if kinds[i] == Kind::Input {
            for v in &graph.nodes[i].args {
                let maker = makers[v.index()];
                if kinds[maker] == Kind::Weight {
                    kinds[maker] = Kind::Input;
                }
            }
        }
    }
    kinds
}

/// By node whether it follows from inputs that are no floats, indices, constants and states alone, and computes nothing of
/// a micro-batch from states that are floats.
fn free(graph: &Graph) -> Vec<bool> {
    let given = graph.given();
    let makers = graph.makers();
    let mut free = vec![false; graph.nodes.len()];
    for (i, n) in graph.nodes.iter().enumerate() {
        let of_step = |v: &Value| graph.ty(*v).scope == Scope::Step;
        let source = matches!(n.op, Op::Input(_) | Op::State(_));
        let ends = n.results.is_empty() || n.op == Op::Accumulate || n.mark.part == Part::Update;
        let computed = n.args.iter().all(|v| free[makers[v.index()]])
            && n.results.iter().all(|v| given[v.index()] || of_step(v));
        free[i] = source || !ends && computed;
    }
    free
}

/// Where the nodes of a graph run.
pub(super) fn sites(graph: &Graph, schedule: &Schedule) -> Sites {
    let homes = if schedule.homes.is_empty() { vec![0] } else { schedule.homes.clone() };
    let rows = schedule.rows.len().max(1);
    let first: Vec<usize> =
        (0..rows).map(|r| homes.iter().position(|home| *home == r).unwrap_or(0)).collect();
    let split = split(schedule);
    let kinds = kinds(graph, &split);
    let free = free(graph);
    let mut placing = Placing {
        graph,
        makers: graph.makers(),
        kinds,
        free,
        homes: &homes,
        first: &first,
        of: vec![Of::new(); graph.nodes.len()],
        rows: vec![smallvec![true; rows]; graph.values.len()],
        held: vec![smallvec![true; rows]; graph.values.len()],
        crossings: BTreeMap::new(),
    };
    placing.micro_batch();
    placing.update();
    placing.needed();
    placing.free_ones();
    let sends = placing.sends();
    let Placing { of, crossings, makers, .. } = placing;
    Sites { of, sends, crossings, first, homes, makers, split }
}

struct Placing<'a> {
    graph: &'a Graph,
    makers: Vec<usize>,
    kinds: Vec<Kind>,
    free: Vec<bool>,
    homes: &'a [usize],
    first: &'a [usize],
    of: Vec<Of>,
    /// By value the rows that have it, by themselves or since it was brought; and the first alone.
    rows: Vec<Rows>,
    held: Vec<Rows>,
    crossings: BTreeMap<usize, Vec<Crossing>>,
}

/// Adds a site: of several in a stage the first kind stays.
fn join(sites: &mut Of, (stage, kind): Site) {
    match sites.iter_mut().find(|(s, _)| *s == stage) {
        Some((_, known)) => *known = (*known).min(kind),
        None => {
            sites.push((stage, kind));
            sites.sort_unstable_by_key(|(stage, _)| *stage);
        }
    }
}

impl Placing<'_> {
    /// The nodes of a micro-batch: those that are free wherever they are used.
    fn micro_batch(&mut self) {
        let graph = self.graph;
        for i in (0..graph.nodes.len()).rev() {
            let node = &graph.nodes[i];
            if node.mark.part == Part::Update {
                continue;
            }
            let own = (graph.stage(node.mark), self.kinds[i]);
            if !self.free[i] {
                self.of[i] = smallvec![own];
            }
            // In its own stage it runs where it was written.
            self.of[i].iter_mut().filter(|(s, _)| *s == own.0).for_each(|site| site.1 = own.1);
            self.demand(i);
        }
    }

    /// What is free and used by a node runs where the node does.
    fn demand(&mut self, i: usize) {
        for site in self.of[i].clone() {
            for v in &self.graph.nodes[i].args {
                let maker = self.makers[v.index()];
                if self.free[maker] {
                    join(&mut self.of[maker], site);
                }
            }
        }
    }

    fn rows_of(&self, sites: &[Site]) -> Rows {
        let mut rows = smallvec![false; self.first.len()];
        sites.iter().for_each(|(stage, _)| rows[self.homes[*stage]] = true);
        rows
    }

    /// The rows in which each state lives: where its parameter is used; where nothing uses it, all.
    fn states(&self) -> BTreeMap<Name, Rows> {
        let mut rows: BTreeMap<Name, Rows> = BTreeMap::new();
        for (i, node) in self.graph.nodes.iter().enumerate() {
            if let Op::State(name) = &node.op
                && !self.of[i].is_empty()
            {
                rows.insert(name.clone(), self.rows_of(&self.of[i]));
            }
        }
        for state in &self.graph.states {
            if state.role == Role::Step {
                rows.insert(state.name.clone(), smallvec![true; self.first.len()]);
            }
            let parameter = state.role.of().and_then(|of| rows.get(of).cloned());
            if let Some(parameter) = parameter {
                rows.entry(state.name.clone()).or_insert(parameter);
            }
        }
        rows
    }

    /// By value the rows in whose update it is needed in the end: where a state lives that it leads to, and everywhere what
    /// every rank must know.
    fn wanted(&self, states: &BTreeMap<Name, Rows>) -> Vec<Rows> {
        let graph = self.graph;
        let mut wanted = vec![smallvec![false; self.first.len()]; graph.values.len()];
        for node in graph.nodes.iter().rev().filter(|n| n.mark.part == Part::Update) {
            let own = self.wanted_of(node, states, &wanted);
            for v in &node.args {
                wanted[v.index()] = either(&wanted[v.index()], &own);
            }
        }
        wanted
    }

    /// The same of a node; of what is handed out in pieces it is enough where it is.
    fn wanted_of(&self, node: &Node, states: &BTreeMap<Name, Rows>, wanted: &[Rows]) -> Rows {
        let all = |is| smallvec![is; self.first.len()];
        if let Op::Assign(name) = &node.op {
            return states.get(name).cloned().unwrap_or_else(|| all(false));
        }
        if let Op::Tap(_) = node.op {
            return all(self.is_told(node));
        }
        node.results.iter().fold(all(false), |rows, v| either(&rows, &wanted[v.index()]))
    }

    /// Whether every rank must know it before it goes on: a scalar that is handed out.
    fn is_told(&self, node: &Node) -> bool {
        matches!(node.op, Op::Tap(_)) && node.args.iter().all(|v| self.graph.shape(*v).is_empty())
    }

    /// The rows that run each node of the update.
    fn update(&mut self) {
        let graph = self.graph;
        let all = smallvec![true; self.first.len()];
        let states = self.states();
        let wanted = self.wanted(&states);
        for (i, node) in graph.nodes.iter().enumerate() {
            let rows = if let Op::State(name) = &node.op {
                states.get(name).unwrap_or(&all).clone()
            } else if node.mark.part == Part::Update {
                let own = self.wanted_of(node, &states, &wanted);
                self.place(i, &own)
            } else if self.free[i] {
                node.args.iter().fold(all.clone(), |rows, v| both(&rows, &self.rows[v.index()]))
            } else {
                self.rows_of(&self.of[i])
            };
            for v in &node.results {
                self.rows[v.index()].clone_from(&rows);
                self.held[v.index()].clone_from(&rows);
            }
            if node.mark.part == Part::Update {
                self.of[i] = self.sites_of(&rows);
            }
        }
    }

    fn sites_of(&self, rows: &Rows) -> Of {
        (0..rows.len()).filter(|r| rows[*r]).map(|r| (self.first[r], Kind::Optimizer)).collect()
    }

    /// The rows of a node of the update that is wanted in some, and what it has brought there.
    fn place(&mut self, i: usize, wanted: &Rows) -> Rows {
        let node = &self.graph.nodes[i];
        let size = |v: &Value| self.graph.shape(*v).iter().product::<usize>();
        let rows = node
            .args
            .iter()
            .fold(smallvec![true; wanted.len()], |rows, v| both(&rows, &self.rows[v.index()]));
        if within(wanted, &rows) && rows.contains(&true) {
            return rows;
        }
        if node.op == Op::Add && !rows.contains(&true) {
            self.crossings.entry(i).or_default().push(Crossing::Sum);
            return smallvec![true; wanted.len()];
        }
        let somewhere = wanted.contains(&true);
        let mut lacking: Vec<Value> = node
            .args
            .iter()
            .filter(|v| !somewhere || !within(wanted, &self.rows[v.index()]))
            .copied()
            .collect();
        let result: usize = node.results.iter().map(size).sum();
        if rows.contains(&true)
            && !node.results.is_empty()
            && lacking.iter().map(size).sum::<usize>() >= result
        {
            // It is no more to bring what it makes to who uses that.
            return rows;
        }
        // Where nothing says where, it runs where its largest operand is.
        lacking.sort_by_key(|v| std::cmp::Reverse(size(v)));
        let mut rows = smallvec![true; wanted.len()];
        for v in node.args.iter().filter(|v| !lacking.contains(v)) {
            rows = both(&rows, &self.rows[v.index()]);
        }
        for v in lacking {
            let next = both(&rows, &self.rows[v.index()]);
            match next.contains(&true) && !somewhere {
                true => rows = next,
                false => self.bring(i, v),
            }
        }
        rows
    }

    fn bring(&mut self, i: usize, v: Value) {
        let all = smallvec![true; self.first.len()];
        if self.rows[v.index()] != all {
            self.crossings.entry(i).or_default().push(Crossing::Bring(v));
            // From here on every row has it.
            self.rows[v.index()] = all;
        }
    }

    /// Of the rows that could run a node of the update, those where somebody uses it. What crosses runs where its operands
    /// are and is had where it is used.
    fn needed(&mut self) {
        let graph = self.graph;
        let rows = self.first.len();
        let mut used: Vec<Rows> = vec![smallvec![false; rows]; graph.values.len()];
        for i in (0..graph.nodes.len()).rev() {
            let node = &graph.nodes[i];
            if node.mark.part != Part::Update {
                continue;
            }
            let mut own = self.rows_of(&self.of[i]);
            if !node.results.is_empty() {
                let wanted =
                    node.results.iter().fold(smallvec![false; rows], |all, v| either(&all, &used[v.index()]));
                own = both(&own, &wanted);
            } else if let (Op::Tap(_), [v]) = (&node.op, &node.args[..])
                && !graph.shape(*v).is_empty()
            {
                let first = own.iter().position(|r| *r);
                own = (0..rows).map(|r| Some(r) == first).collect();
            }
            self.of[i] = self.sites_of(&own);
            let sums = self.crossings.get(&i).is_some_and(|c| c.contains(&Crossing::Sum));
            for v in node.args.iter().filter(|_| !sums) {
                used[v.index()] = either(&used[v.index()], &own);
            }
            for crossing in self.crossings.get(&i).into_iter().flatten() {
                match crossing {
                    // Where it comes from it is needed, too.
                    Crossing::Bring(v) => {
                        let origin = self.origin(*v);
                        used[v.index()] = either(&used[v.index()], &origin);
                    }
                    Crossing::Sum => {
                        for v in &node.args {
                            let origin = self.origin(*v);
                            used[v.index()] = either(&used[v.index()], &origin);
                        }
                    }
                }
            }
        }
    }

    /// The first row that has a value by itself.
    fn origin(&self, v: Value) -> Rows {
        let maker = self.makers[v.index()];
        let rows = match self.graph.nodes[maker].mark.part {
            Part::Update => self.rows_of(&self.of[maker]),
            Part::Forward | Part::Input | Part::Weight if self.free[maker] => self.rows[v.index()].clone(),
            Part::Forward | Part::Input | Part::Weight => self.rows_of(&self.of[maker]),
        };
        let first = rows.iter().position(|r| *r);
        (0..rows.len()).map(|r| Some(r) == first).collect()
    }

    /// What is free runs wherever it is used by now: also in the update of a row, unless a segment of the row has it.
    fn free_ones(&mut self) {
        for i in (0..self.graph.nodes.len()).rev() {
            let node = &self.graph.nodes[i];
            let update = node.mark.part == Part::Update;
            let written = (self.graph.stage(node.mark), self.kinds[i]);
            if !update && self.of[i].is_empty() {
                // Nobody uses it.
                self.of[i] = smallvec![written];
            }
            if !update {
                self.of[i].iter_mut().filter(|(s, _)| *s == written.0).for_each(|site| *site = written);
            }
            if !update && !self.free[i] {
                continue;
            }
            for site in self.of[i].clone() {
                for v in &self.graph.nodes[i].args {
                    let maker = self.makers[v.index()];
                    let row = self.homes[site.0];
                    let once = site.1 == Kind::Optimizer;
                    let there = |(stage, _): &Site| {
                        if once { self.homes[*stage] == row } else { *stage == site.0 }
                    };
                    let held = !once || self.held[v.index()][row];
                    if self.free[maker] && held && !self.of[maker].iter().any(there) {
                        join(&mut self.of[maker], site);
                    }
                }
            }
        }
    }

    /// What stages use of others.
    fn sends(&self) -> BTreeMap<Value, Of> {
        let mut sends: BTreeMap<Value, Of> = BTreeMap::new();
        for (i, node) in self.graph.nodes.iter().enumerate() {
            if node.mark.part == Part::Update {
                continue;
            }
            for site in &self.of[i] {
                for v in node.args.iter().collect::<BTreeSet<_>>() {
                    let maker = self.makers[v.index()];
                    if !self.free[maker] && self.of[maker].iter().all(|(stage, _)| *stage != site.0) {
                        join(sends.entry(*v).or_default(), received(self.of[maker][0], *site));
                    }
                }
            }
        }
        sends
    }
}

/// In which segment a stage receives what it uses in another: what a forward before it made, in its forward, and no
/// gradient as late as the half toward weights, so that nobody has to keep long what is sent.
fn received((from, made): Site, (to, used): Site) -> Site {
    let kind = if made == Kind::Forward && from < to {
        Kind::Forward
    } else if used == Kind::Weight && made != Kind::Weight {
        Kind::Input
    } else {
        used
    };
    (to, kind)
}

fn within(a: &Rows, b: &Rows) -> bool {
    a.iter().zip(b).all(|(a, b)| !*a || *b)
}

fn both(a: &Rows, b: &Rows) -> Rows {
    let mut rows = Rows::from_slice(a);
    rows.iter_mut().zip(b).for_each(|(a, b)| *a &= *b);
    rows
}

fn either(a: &Rows, b: &Rows) -> Rows {
    let mut rows = Rows::from_slice(a);
    rows.iter_mut().zip(b).for_each(|(a, b)| *a |= *b);
    rows
}
