//! Why each matrix product is split as it is, and each reshard goes the way it goes: what was chosen and what else could
//! be, with the bytes and seconds of each, all else as it was chosen.

use ir::{Node, Op, ShardedGraph, Sharding, Signature, Value, moves_of};

use super::Best;
use super::network::{Choice as Search, joins};
use super::price::{Sent, sent};
use super::space::{Way, is_data};
use crate::cluster::Cluster;
use crate::names::name;
use crate::plan::{Alternative, Choice};

/// So many other ways of a reshard are listed, if they take no more than so many times as long.
const DETOURS: usize = 3;
const FAR: f64 = 4.0;

/// A choice for each matrix product and each reshard.
pub fn reasons(sharded: &ShardedGraph, best: &Best, cluster: &Cluster) -> Vec<Choice> {
    let graph = &sharded.graph;
    let makers = graph.makers();
    let why = Why { sharded, search: &best.choice, picked: &best.picked, cluster, makers: &makers };
    let mut out = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if node.is_product() {
            out.push(why.product(i, node));
        }
        for v in &node.results {
            out.extend(
                best.decisions.copies.get(v).into_iter().flatten().map(|c| why.reshard(*v, &c.from, &c.to)),
            );
        }
    }
    out
}

struct Why<'a> {
    sharded: &'a ShardedGraph,
    search: &'a Search<'a>,
    picked: &'a [usize],
    cluster: &'a Cluster,
    makers: &'a [usize],
}

impl Why<'_> {
    fn product(&self, i: usize, node: &Node) -> Choice {
        let ways = &self.search.ways[i].all;
        let chosen = &ways[self.picked[i]];
        let others = ways.iter().filter(|w| w.strategy != chosen.strategy);
        let mut others: Vec<(Sent, &Way)> = others.map(|w| (self.around(node, w), w)).collect();
        others.sort_by(|(a, _), (b, _)| a.seconds.total_cmp(&b.seconds));
        // Of ways against the convention that parameters stay split over `tp` the best tells enough.
        let mut joined = 0;
        others.retain(|(_, way)| {
            let joins = self.joins(node, way);
            joined += usize::from(joins);
            !joins || joined == 1
        });
        let alternative = |(cost, way): (Sent, &Way)| Alternative {
            strategy: self.describe(node, way),
            wire_bytes: cost.wire_bytes,
            seconds: cost.seconds,
        };
        let alternatives = others.into_iter().map(alternative).collect();
        let cost = self.around(node, chosen);
        Choice {
            op: node.signature.to_string(),
            tensor: name(&self.sharded.graph, self.makers, node.results[0]),
            chosen: self.describe(node, chosen),
            wire_bytes: cost.wire_bytes,
            seconds: cost.seconds,
            alternatives,
        }
    }

    /// What is sent to bring operands to where a way needs them and the result to where its users need it, and what it
    /// computes. A parameter whose place is for the choice lies as the way needs it, if it can.
    fn around(&self, node: &Node, way: &Way) -> Sent {
        let mut total = Sent { seconds: way.work as f64 * 1e-12, ..Sent::default() };
        for (k, v) in node.args.iter().enumerate() {
            let maker = self.makers[v.index()];
            let given = &self.sharded.graph.nodes[maker];
            let from = &self.search.ways[maker].all;
            let places = if matches!(given.op, Op::State(_)) {
                &from[..]
            } else {
                &from[self.picked[maker]..=self.picked[maker]]
            };
            let each = places.iter().map(|p| self.sent(*v, &p.layout.results[0], &way.layout.args[k]));
            total = total.and(each.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default());
        }
        let result = node.results[0];
        let mut needs: Vec<&Sharding> = Vec::new();
        for (u, k) in self.search.users(result) {
            let need = &self.search.ways[*u].all[self.picked[*u]].layout.args[*k];
            if !needs.contains(&need) {
                needs.push(need);
            }
        }
        needs
            .into_iter()
            .fold(total, |total, need| total.and(self.sent(result, &way.layout.results[0], need)))
    }

    fn sent(&self, v: Value, from: &Sharding, to: &Sharding) -> Sent {
        let ty = self.sharded.graph.ty(v);
        sent(&ty.shape, ty.dtype, from, to, &self.sharded.mesh, self.cluster)
    }

    /// A way in words: `gather` where it splits what the other operand and the result have, so that the activation is
    /// gathered first; `scatter` where it splits what is summed, so that the result is scattered behind it.
    fn describe(&self, node: &Node, way: &Way) -> String {
        let mesh = &self.sharded.mesh;
        let parameter =
            |k: usize| matches!(self.sharded.graph.nodes[self.makers[node.args[k].index()]].op, Op::State(_));
        let mut kinds: Vec<&str> = Vec::new();
        for (f, axes) in way.strategy.split.iter().enumerate() {
            if axes.iter().all(|a| is_data(mesh, *a)) {
                continue;
            }
            let has = |k: usize| Signature::has(&node.signature.args[k], f);
            kinds.push(match node.signature.in_results(f) {
                false => "scatter",
                true if (0..node.args.len()).any(|k| has(k) && !parameter(k)) => "local",
                true => "gather",
            });
        }
        kinds.dedup();
        if !way.strategy.pass.is_empty() {
            kinds.push("partial");
        }
        let others = mesh.all().any(|a| mesh.splits(a) && !is_data(mesh, a));
        if kinds.is_empty() {
            kinds.push(if others || way.strategy.split.iter().all(|axes| axes.is_empty()) {
                "whole"
            } else {
                "local"
            });
        }
        let split = way.strategy.show(node, mesh);
        let text = format!("{} {split}", kinds.join("+"));
        let text = text.trim_end();
        match self.joins(node, way) {
            true => format!("{text} (would gather a parameter over tp)"),
            false => text.to_string(),
        }
    }

    /// Whether a way needs a matrix parameter whole that `tp` splits wherever it may lie.
    fn joins(&self, node: &Node, way: &Way) -> bool {
        let tp = self.sharded.mesh.find("tp").unwrap_or_default();
        let each = node.args.iter().zip(&way.layout.args);
        each.into_iter().any(|(v, need)| {
            let ways = &self.search.ways[self.makers[v.index()]].all;
            self.search.is_matrix(*v) && ways.iter().all(|p| joins(&tp, &p.layout.results[0], need))
        })
    }

    fn reshard(&self, v: Value, from: &Sharding, to: &Sharding) -> Choice {
        let mesh = &self.sharded.mesh;
        let steps = |stops: &[&Sharding]| {
            let shape = self.sharded.graph.shape(v);
            let legs = stops.windows(2).flat_map(|w| moves_of(shape, w[0], w[1], mesh));
            legs.map(|m| m.show(mesh)).collect::<Vec<_>>().join(", ")
        };
        let straight = self.sent(v, from, to);
        let chosen = steps(&[from, to]);
        let mut alternatives: Vec<Alternative> = Vec::new();
        for via in self.search.shardings(v).into_iter().filter(|s| *s != from && *s != to) {
            let cost = self.sent(v, from, via).and(self.sent(v, via, to));
            let strategy = steps(&[from, via, to]);
            let far = cost.seconds > FAR * straight.seconds;
            let other = strategy != chosen && !strategy.contains("to_partial") && !far;
            if other && !alternatives.iter().any(|a| a.strategy == strategy) {
                alternatives.push(Alternative {
                    strategy,
                    wire_bytes: cost.wire_bytes,
                    seconds: cost.seconds,
                });
            }
        }
        alternatives.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        alternatives.truncate(DETOURS);
        Choice {
            op: format!("reshard {} to {}", from.show(mesh), to.show(mesh)),
            tensor: name(&self.sharded.graph, self.makers, v),
            chosen,
            wire_bytes: straight.wire_bytes,
            seconds: straight.seconds,
            alternatives,
        }
    }
}
