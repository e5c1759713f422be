//! After it every node has a strategy and every value a sharding; operands may still disagree with their users.
//!
//! Propagation, node by node, by the cheapest of the legal strategies under these rules:
//!
//! - An axis splits only a factor that an operand or a wish already splits by it.
//! - The axis of an activation stays on its factor, and parameters come to it; else a parameter's axis stays on its.
//! - A backward node takes the split of its forward node, and its result is wished as the forward value lies.
//! - Partial values are resolved where they arise, but a sum of several is resolved once, and the update resolves late.
//! - A copy of a value in another sharding, once made, is free for later users.
//! - What the user asked of a value holds: a reshard follows it if it comes out otherwise.
//!
//! A sum of many is regrouped first: what lies alike is summed first, so that partial operands are resolved once; what is
//! partial along fewer axes than another operand becomes so along all of them.
//!
//! ```text
//! v2 = einsum v0, v1 : m k, k n -> m n                 v0 is [dp, _], v1 is [_, tp]
//! v2 = einsum v0, v1 : m k, k n -> m n @ [dp, tp] | split{m=dp n=tp}
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};

use ir::graph::{Mark, NewNode, Rewrite};
use ir::rows::{Row, Strategy, factor_axes, layout, rows};
use ir::{Axis, Dim, Factor, Graph, Mesh, Node, Op, Part, Scope, ShardedGraph, Sharding, Signature, Value};

use crate::price::price;

/// What a partial result costs a node of the update, as a share of its resolution: a little less than resolving it at
/// once, so that ties leave it partial.
const LATE: f64 = 0.98;

/// What an operation costs next to an element on the wire: sharing work breaks ties.
const WORK: f64 = 0.0005;

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let old = std::mem::take(&mut sharded.graph);
    let mut state = Choosing {
        mesh: sharded.mesh.clone(),
        places: sharded.decisions.places.clone(),
        new: Rewrite::of(&old),
        shardings: Vec::new(),
        strategies: Vec::new(),
        copies: HashSet::new(),
        makers: HashMap::new(),
        wishes: wishes(&old, &sharded.decisions.places),
        asked: asked(&old, &sharded.mesh),
        users: users(&old),
    };
    for node in &old.nodes {
        state.visit(&old, node);
    }
    sharded.graph = state.new.finish(&old);
    sharded.shardings = state.shardings;
    sharded.decisions.strategies = state.strategies;
}

/// For each value that a state is assigned, how the state lies.
fn wishes(graph: &Graph, places: &BTreeMap<ir::Name, Sharding>) -> HashMap<Value, Sharding> {
    let assigned = |n: &Node| {
        let Op::Assign(name) = &n.op else { return None };
        Some((n.args[0], places.get(name)?.clone()))
    };
    graph.nodes.iter().filter_map(assigned).collect()
}

/// For each value how many users would each pass a contribution on and leave one of their own: neither sums, nor matrix
/// products, whose results are summed further; a composite is one user.
fn users(graph: &Graph) -> Vec<usize> {
    let mut users = vec![0; graph.values.len()];
    let mut seen: HashSet<(Value, u32)> = HashSet::new();
    for node in graph.nodes.iter().filter(|n| n.op != Op::Add && !n.is_product()) {
        let distinct: HashSet<&Value> = node.args.iter().collect();
        for v in distinct {
            let first = node.tag.as_ref().is_none_or(|t| seen.insert((*v, t.instance)));
            users[v.index()] += usize::from(first);
        }
    }
    users
}

/// What the user asked, as shardings; axes that the mesh lacks have size 1.
fn asked(graph: &Graph, mesh: &Mesh) -> HashMap<Value, Sharding> {
    let axes = |names: &Vec<ir::Name>| names.iter().filter_map(|n| mesh.find(n)).flatten().collect();
    let one = |c: &ir::graph::Constraint| {
        (c.value, Sharding { dims: c.dims.iter().map(axes).collect(), partial: Vec::new() })
    };
    graph.constraints.iter().map(one).collect()
}

struct Choosing {
    mesh: Mesh,
    places: BTreeMap<ir::Name, Sharding>,
    new: Rewrite,
    /// By new value.
    shardings: Vec<Sharding>,
    /// By new node.
    strategies: Vec<Strategy>,
    /// Copies that exist already, by new value.
    copies: HashSet<(Value, Sharding)>,
    /// The node of a new value.
    makers: HashMap<Value, usize>,
    /// By old value.
    wishes: HashMap<Value, Sharding>,
    /// By old value.
    asked: HashMap<Value, Sharding>,
    /// By old value, see [`users`].
    users: Vec<usize>,
}

/// What operands of a sum have in common that are summed first.
type Alike = (Vec<Dim>, Sharding);

impl Choosing {
    fn visit(&mut self, old: &Graph, node: &Node) {
        if let Op::Input(name) | Op::State(name) | Op::Assign(name) = &node.op {
            let at = self.new.copy(old, node);
            self.placed(at, name);
            return self.keep_asked(node);
        }
        let many = node.op == Op::Add && node.args.len() > 2;
        let at = if many { self.regrouped(old, node) } else { self.new.copy(old, node) };
        let result = node.results.first();
        let wish = result.and_then(|v| self.asked.get(v).or_else(|| self.wishes.get(v))).cloned();
        let shared = node.op == Op::Add || result.is_some_and(|v| self.users[v.index()] > 1);
        self.decide(at, wish.as_ref(), shared);
        self.keep_asked(node);
    }

    /// What is read or assigned lies where it was placed.
    fn placed(&mut self, at: usize, name: &str) {
        let node = self.new.graph.nodes[at].clone();
        let dims =
            node.signature.results.first().or(node.signature.args.first()).cloned().unwrap_or_default();
        let place = self.places.get(name).cloned().unwrap_or_else(|| Sharding::replicated(dims.len()));
        let mut strategy = Strategy::whole(&node);
        for (dim, axes) in dims.iter().zip(&place.dims) {
            for (f, axis) in factor_axes(dim, axes, &node.sizes, &self.mesh) {
                strategy.split[f].push(axis);
            }
        }
        let results = node.results.iter().map(|_| place.clone()).collect();
        self.record(at, strategy, results);
    }

    fn record(&mut self, at: usize, strategy: Strategy, results: Vec<Sharding>) {
        debug_assert_eq!((at, self.strategies.len()), (self.strategies.len(), at));
        for (v, sharding) in self.new.graph.nodes[at].results.clone().into_iter().zip(results) {
            debug_assert_eq!(v.index(), self.shardings.len());
            self.makers.insert(v, at);
            self.shardings.push(sharding);
        }
        self.strategies.push(strategy);
    }

    /// Sums operands that lie alike first. Returns the node that sums what remains.
    fn regrouped(&mut self, old: &Graph, node: &Node) -> usize {
        let mut args: Vec<Value> = node.args.iter().map(|v| self.new.at(*v)).collect();
        self.make_as_partial(&mut args, node);
        let mut groups: Vec<(Alike, Vec<usize>)> = Vec::new();
        for (i, v) in args.iter().enumerate() {
            let key = (node.signature.args[i].clone(), self.shardings[v.index()].clone());
            match groups.iter_mut().find(|(k, _)| *k == key) {
                Some((_, members)) => members.push(i),
                None => groups.push((key, vec![i])),
            }
        }
        if groups.len() == 1 || groups.len() == node.args.len() {
            let at = self.new.copy(old, node);
            self.new.graph.nodes[at].args = args;
            return at;
        }
        let dtype = old.ty(node.results[0]).dtype;
        let mut terms: Vec<(Vec<Dim>, Value)> = Vec::new();
        for ((dims, _), members) in groups {
            if let [i] = members[..] {
                terms.push((dims, args[i]));
                continue;
            }
            let values = members.iter().map(|i| args[*i]).collect();
            let signature = node.signature.turned(vec![dims.clone(); members.len()], vec![dims.clone()]);
            let at = self.push(node, signature, values, dtype);
            self.decide(at, None, true);
            terms.push((dims, self.new.graph.nodes[at].results[0]));
        }
        let (dims, values) = terms.into_iter().unzip();
        let at = self.push(node, node.signature.turned(dims, node.signature.results.clone()), values, dtype);
        self.new.now[node.results[0].index()] = Some(self.new.graph.nodes[at].results[0]);
        at
    }

    fn push(&mut self, node: &Node, signature: Signature, args: Vec<Value>, dtype: ir::DType) -> usize {
        let known = signature.factors.iter().cloned().zip(node.sizes.iter().copied()).collect();
        let like = node.like.and_then(|v| self.new.now[v.index()]);
        let (op, mark, tag) = (node.op.clone(), node.mark, node.tag.clone());
        let new = NewNode { op, signature, args, dtype, known, mark, tag, of: None, like };
        self.new.graph.push(new).unwrap_or_else(|e| panic!("a part of a sum is a sum: {e}"));
        self.new.graph.nodes.len() - 1
    }

    fn decide(&mut self, at: usize, wish: Option<&Sharding>, shared: bool) {
        let node = self.new.graph.nodes[at].clone();
        let hint = node.like.map(|v| self.shardings[v.index()].resolved());
        let (strategy, needs, results) = self.cheapest(&node, wish, hint.as_ref());
        for (v, needed) in node.args.iter().zip(needs) {
            self.copies.insert((*v, needed));
        }
        // What is used twice, and a sum, is resolved once, and its node has paid for that: no user passes it on.
        if shared && node.mark.part != Part::Update {
            let sums = node.results.iter().copied().zip(results.iter().map(Sharding::resolved));
            self.copies.extend(sums);
        }
        self.record(at, strategy, results);
    }

    /// A reshard behind a result that does not lie as the user asked; later uses start from it.
    fn keep_asked(&mut self, node: &Node) {
        let Some(old) = node.results.first() else { return };
        let Some(asked) = self.asked.get(old).cloned() else { return };
        let value = self.new.at(*old);
        if self.shardings[value.index()] != asked {
            self.new.now[old.index()] = Some(self.reshard(value, asked, node.mark));
        }
    }

    /// The same value in another sharding.
    fn reshard(&mut self, value: Value, to: Sharding, mark: Mark) -> Value {
        let dims: Vec<Dim> = (0..to.dims.len()).map(|i| vec![i]).collect();
        let factors = (0..dims.len()).map(|i| format!("i{i}").into()).collect();
        let signature = Signature { factors, args: vec![dims.clone()], results: vec![dims] };
        let dtype = self.new.graph.ty(value).dtype;
        let (op, args) = (Op::Reshard, vec![value]);
        let new =
            NewNode { op, signature, args, dtype, known: vec![], mark, tag: None, of: None, like: None };
        self.new.graph.push(new).unwrap_or_else(|e| panic!("a reshard keeps the shape: {e}"));
        let at = self.new.graph.nodes.len() - 1;
        let strategy = Strategy::whole(&self.new.graph.nodes[at]);
        self.record(at, strategy, vec![to]);
        self.new.graph.nodes[at].results[0]
    }

    /// Operands of a sum that are partial along some axes of the most partial one become so along all of them, which
    /// costs no communication: the sum is then resolved once and not axis by axis.
    fn make_as_partial(&mut self, args: &mut [Value], node: &Node) {
        let widest = args.iter().map(|v| self.shardings[v.index()].clone()).max_by_key(|s| s.partial.len());
        let Some(widest) = widest else { return };
        for v in args {
            let mine = &self.shardings[v.index()];
            let some = !mine.partial.is_empty() && mine.partial.len() < widest.partial.len();
            if some && mine.dims == widest.dims && mine.partial.iter().all(|p| widest.partial.contains(p)) {
                *v = self.reshard(*v, widest.clone(), node.mark);
            }
        }
    }

    /// The cheapest legal strategy, what it needs of operands, and how its results lie.
    fn cheapest(
        &self,
        node: &Node,
        wish: Option<&Sharding>,
        hint: Option<&Sharding>,
    ) -> (Strategy, Vec<Sharding>, Vec<Sharding>) {
        let named = self.named(node, wish.or(hint));
        let forced = self.forced(node);
        let mut named_or_forced = named.clone();
        named_or_forced.extend(forced.iter().enumerate().filter_map(|(a, f)| Some(((*f)?, Axis(a as u8)))));
        for keep_forced in [true, false] {
            let per_axis: Vec<Vec<Row>> = self
                .mesh
                .all()
                .map(|axis| {
                    let allowed = |row: &Row| match row {
                        Row::Nothing | Row::Pass(..) => forced[axis.index()].is_none() || !keep_forced,
                        Row::Factor(f) => {
                            named_or_forced.contains(&(*f, axis))
                                && (!keep_forced || forced[axis.index()].is_none_or(|g| g == *f))
                        }
                    };
                    rows(&self.new.graph, node).into_iter().filter(allowed).collect()
                })
                .collect();
            let mut best: Option<(f64, Strategy, ir::rows::Layout)> = None;
            for pick in product(&per_axis) {
                let strategy = self.strategy(node, &pick, &named_or_forced);
                let Some(layout) = layout(&self.new.graph, node, &strategy, &self.mesh) else { continue };
                let price = self.price(node, &strategy, &layout, wish, hint);
                if best.as_ref().is_none_or(|(least, ..)| price < least - 1e-9) {
                    best = Some((price, strategy, layout));
                }
            }
            if let Some((_, strategy, layout)) = best {
                return (strategy, layout.args, layout.results);
            }
        }
        unreachable!("doing everything everywhere is always legal")
    }

    /// The axes that operands, or what is wished of the result, put on factors, in their order.
    fn named(&self, node: &Node, goal: Option<&Sharding>) -> Vec<(Factor, Axis)> {
        let mut named = Vec::new();
        let operands =
            node.signature.args.iter().zip(&node.args).map(|(d, v)| (d, &self.shardings[v.index()]));
        let results = node.signature.results.first().into_iter().zip(goal);
        for (dims, sharding) in operands.chain(results) {
            for (dim, axes) in dims.iter().zip(&sharding.dims) {
                for pair in factor_axes(dim, axes, &node.sizes, &self.mesh) {
                    if !named.contains(&pair) {
                        named.push(pair);
                    }
                }
            }
        }
        named
    }

    /// For each axis the factor that it must split: that of the forward node, of an activation, of a parameter.
    fn forced(&self, node: &Node) -> Vec<Option<Factor>> {
        let mut forced = vec![None; self.mesh.axes.len()];
        if node.mark.part == Part::Update {
            return forced;
        }
        for (f, axis) in self.forward_split(node) {
            forced[axis.index()] = Some(f);
        }
        for scope in [Scope::Micro, Scope::Step] {
            for (dims, v) in node.signature.args.iter().zip(&node.args) {
                if self.new.graph.ty(*v).scope != scope {
                    continue;
                }
                for (dim, axes) in dims.iter().zip(&self.shardings[v.index()].dims) {
                    for (f, axis) in factor_axes(dim, axes, &node.sizes, &self.mesh) {
                        forced[axis.index()].get_or_insert(f);
                    }
                }
            }
        }
        forced
    }

    /// The split of the forward node that a backward node comes from, by the names of factors.
    fn forward_split(&self, node: &Node) -> Vec<(Factor, Axis)> {
        let Some(&at) = node.of.and_then(|v| self.makers.get(&v)) else { return Vec::new() };
        let forward = &self.new.graph.nodes[at];
        let mut split = Vec::new();
        for (f, axes) in self.strategies[at].split.iter().enumerate() {
            if let Some(mine) = node.signature.factor(&forward.signature.factors[f])
                && node.sizes[mine] == forward.sizes[f]
            {
                split.extend(axes.iter().map(|a| (mine, *a)));
            }
        }
        split
    }

    fn strategy(&self, node: &Node, pick: &[Row], order: &[(Factor, Axis)]) -> Strategy {
        let mut strategy = Strategy::whole(node);
        for (f, axis) in order {
            if pick[axis.index()] == Row::Factor(*f) && !strategy.split[*f].contains(axis) {
                strategy.split[*f].push(*axis);
            }
        }
        for (axis, row) in self.mesh.all().zip(pick) {
            if let Row::Pass(reduce, operands) = row {
                strategy.pass.push((axis, *reduce, operands.clone()));
            }
        }
        strategy
    }

    fn price(
        &self,
        node: &Node,
        strategy: &Strategy,
        layout: &ir::rows::Layout,
        wish: Option<&Sharding>,
        hint: Option<&Sharding>,
    ) -> f64 {
        let needs: Vec<(&Value, &Sharding)> = node.args.iter().zip(&layout.args).collect();
        let mut total = 0.0;
        for (i, (v, needed)) in needs.iter().enumerate() {
            // A value that is needed twice in one sharding is moved once.
            if !needs[..i].contains(&(*v, *needed)) && !self.copies.contains(&(**v, (*needed).clone())) {
                total += price(&self.shardings[v.index()], needed, self.new.graph.shape(**v), &self.mesh);
            }
        }
        let work: f64 = node.sizes.iter().map(|n| *n as f64).product();
        let shared = self.mesh.pieces(&strategy.split.concat());
        total += WORK * work / shared as f64;
        let late = if node.mark.part == Part::Update { LATE } else { 1.0 };
        for (v, result) in node.results.iter().zip(&layout.results) {
            let to = |goal: &Sharding| price(result, goal, self.new.graph.shape(*v), &self.mesh);
            total += match (wish, hint) {
                (Some(wish), _) => late * to(wish),
                (None, Some(hint)) => {
                    // Partial along an axis that the hint does not split is no worse than resolved.
                    let mut goal = hint.clone();
                    let free = |(a, _): &&(Axis, ir::Reduce)| !hint.dims.iter().flatten().any(|b| a == b);
                    goal.partial = result.partial.iter().filter(free).copied().collect();
                    to(&goal) + late * to(&result.resolved())
                }
                (None, None) => late * to(&result.resolved()),
            };
        }
        total
    }
}

/// Every way to take one row for each axis.
fn product(per_axis: &[Vec<Row>]) -> Vec<Vec<Row>> {
    per_axis.iter().fold(vec![Vec::new()], |picks, rows| {
        picks
            .iter()
            .flat_map(|pick| {
                rows.iter().map(move |row| pick.iter().cloned().chain([row.clone()]).collect::<Vec<Row>>())
            })
            .collect()
    })
}
