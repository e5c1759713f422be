//! After it every operand is as its node needs it: a reshard stands wherever one was not. Equal needs share a reshard,
//! whose mark is that of its first user, so that a gradient is reduced in the update that uses it. A copy is made from
//! the one that the decisions name, else from the value itself.
//!
//! With one micro-batch a whole gradient is reduced where it is made, so that this goes on beside the rest of the backward
//! pass.
//!
//! Needs the strategies of all nodes, so it comes after `choose`.
//!
//! ```text
//! v2 = einsum v0, v1 : ... @ [dp, _] partial(tp)
//! v3 = exp v2 : ...                              needs v2 as [dp, _]
//!   ->
//! v3 = reshard v2 : ... @ [dp, _]
//! v4 = exp v3
//! ```

use std::collections::BTreeMap;
use std::rc::Rc;

use ir::graph::{Mark, NewNode, Rewrite};
use ir::rows::{Layout, Layouts, Strategy};
use ir::{Axes, Graph, Node, Op, Part, Reshard, ShardedGraph, Sharding, Signature, Value};
use rustc_hash::{FxHashMap, FxHashSet};

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let mut old = std::mem::take(&mut sharded.graph);
    let strategies = std::mem::take(&mut sharded.decisions.strategies);
    let copies = std::mem::take(&mut sharded.decisions.copies);
    let old_shardings = std::mem::take(&mut sharded.shardings);
    let mut layouts = Layouts::new(&old, &sharded.mesh);
    let needs: Vec<Rc<Layout>> = old
        .nodes
        .iter()
        .zip(&strategies)
        .map(|(node, strategy)| match node.op == Op::Reshard {
            true => Rc::new(Layout {
                args: vec![old_shardings[node.results[0].index()].clone()],
                ..Layout::default()
            }),
            false => layouts.of(node, strategy).unwrap_or_default(),
        })
        .collect();
    let first = first_parts(&old, &old_shardings, &needs, &copies);
    let dropped = |n: &Node| matches!(&n.op, Op::State(name) if sharded.decisions.again.contains(name));
    let again = old.nodes.iter().filter(|n| dropped(n)).flat_map(|n| n.results.iter().copied()).collect();
    let once = sharded.decisions.schedule.microbatches() == 1;
    let sum = |n: &&Node| once && n.op == Op::Accumulate;
    let sums = old.nodes.iter().filter(sum).flat_map(|n| n.results.iter().map(|v| (*v, n.mark))).collect();
    let mut making = Making {
        new: Rewrite::of(&old),
        shardings: Vec::new(),
        kept: Vec::new(),
        copies,
        made: FxHashMap::default(),
        again,
        sums,
        first,
    };
    for ((node, strategy), needs) in std::mem::take(&mut old.nodes).into_iter().zip(strategies).zip(&needs) {
        let needed = needs.args.iter().zip(&node.args);
        let args: Vec<Value> = needed.map(|(s, v)| making.copy(*v, s, node.mark)).collect();
        // What the user asked for is such a copy.
        if let (Op::Reshard, [copy], [result]) = (&node.op, &args[..], &node.results[..]) {
            making.new.now[result.index()] = Some(*copy);
            continue;
        }
        making.shardings.extend(node.results.iter().map(|v| old_shardings[v.index()].clone()));
        let at = making.new.put(&old.values, node);
        making.new.graph.nodes[at].args = args;
        making.kept.push(strategy);
    }
    sharded.graph = making.new.finish(&old);
    sharded.shardings = making.shardings;
    sharded.decisions.strategies = making.kept;
    sharded.agreed = true;
}

struct Making {
    new: Rewrite,
    /// By new value.
    shardings: Vec<Sharding>,
    /// By new node.
    kept: Vec<Strategy>,
    /// From what each copy is made, by old value.
    copies: BTreeMap<Value, Vec<Reshard>>,
    /// The copies that are made, by old value; of those that are made again by the part of the step.
    made: FxHashMap<(Value, Sharding, Option<Part>), Value>,
    /// Old values whose copies are made again in each part of a step.
    again: FxHashSet<Value>,
    /// Old values that are sums over one micro-batch, and where they are made.
    sums: FxHashMap<Value, Mark>,
    first: FxHashMap<(Value, Sharding), Part>,
}

impl Making {
    /// The new value that is the old one in this sharding.
    fn copy(&mut self, old: Value, needed: &Sharding, mark: Mark) -> Value {
        let given = self.new.at(old);
        if self.shardings[given.index()] == *needed {
            return given;
        }
        let again = self.again.contains(&old).then_some(match mark.part {
            Part::Input | Part::Weight => Part::Input,
            part @ (Part::Forward | Part::Update) => part,
        });
        let key = (old, needed.clone(), again);
        if let Some(made) = self.made.get(&key) {
            return *made;
        }
        let source = match from(&self.copies, old, needed) {
            Some(from) => self.copy(old, &from, mark),
            None => given,
        };
        let first = self.first.get(&(old, needed.clone())).copied();
        let part = again.or(first).unwrap_or(mark.part);
        // What is only reduced takes no other room.
        let whole = self.shardings[source.index()].dims == needed.dims;
        let mark = self.sums.get(&old).filter(|_| whole).copied().unwrap_or(Mark { part, ..mark });
        let value = push_reshard(&mut self.new, source, mark);
        self.shardings.push(needed.clone());
        self.kept.push(Strategy { split: vec![Axes::new(); needed.dims.len()], pass: Vec::new() });
        self.made.insert(key, value);
        value
    }
}

/// What the copy of a value in this sharding is made from; none if from the value itself.
fn from(copies: &BTreeMap<Value, Vec<Reshard>>, of: Value, to: &Sharding) -> Option<Sharding> {
    copies.get(&of)?.iter().find(|c| c.to == *to).map(|c| c.from.clone())
}

/// For each value as it is needed, the first part of a step that needs it so: nodes of a later part may stand before
/// those of an earlier one, but run behind them.
fn first_parts(
    graph: &Graph,
    given: &[Sharding],
    needs: &[Rc<Layout>],
    copies: &BTreeMap<Value, Vec<Reshard>>,
) -> FxHashMap<(Value, Sharding), Part> {
    let mut first = FxHashMap::default();
    for (node, needs) in graph.nodes.iter().zip(needs) {
        for (v, needed) in node.args.iter().zip(&needs.args) {
            if *needed == given[v.index()] && !copies.contains_key(v) {
                continue;
            }
            // A copy is needed where what is made from it is.
            let mut at = Some(needed.clone());
            while let Some(sharding) = at {
                at = from(copies, *v, &sharding);
                let part = first.entry((*v, sharding)).or_insert(node.mark.part);
                *part = node.mark.part.min(*part);
            }
        }
    }
    first
}

/// The same value; how it is to lie is for the caller to note.
pub(crate) fn push_reshard(new: &mut Rewrite, source: Value, mark: Mark) -> Value {
    let signature = Signature::pointwise(new.graph.shape(source).len(), 1);
    let dtype = new.graph.ty(source).dtype;
    let (op, args) = (Op::Reshard, vec![source]);
    let node =
        NewNode { op, signature, args, dtype, known: Vec::new(), mark, tag: None, of: None, like: None };
    let value = new.push(node).unwrap_or_else(|e| panic!("a reshard keeps the shape: {e}"));
    value.unwrap_or_else(|| panic!("a reshard has a result"))
}
