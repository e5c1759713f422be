//! The choice: for every node of a training step how it is split, for every parameter along which dimension, and for every
//! value which copies of it are made and from which, so that the sum of the prices of all that is computed and sent is the
//! least. Forward, backward and update are chosen together, and the least is proved: by exact elimination, in which what
//! repeats is solved once.
//!
//! Of equal prices fewer collectives win, then less computing, which is part of the price, then the first way.

mod alike;
mod classes;
pub mod eliminate;
pub mod groups;
pub mod network;
mod places;
pub mod price;
pub mod reasons;
pub mod routes;
pub mod space;
pub mod tables;

use ir::{Axis, Decisions, Graph, Mesh, Name, Places, ShardedGraph, Sharding};
use passes::{Compiled, Trace};
use rustc_hash::FxHashMap;

use crate::buckets;
use crate::cluster::Cluster;
use network::Choice;
use space::Settled;

/// Compiles as [`compile`] does, and tells what was chosen.
///
/// # Panics
/// As [`passes::compile`], where meshc is at fault.
pub fn compile_and_tell(
    graph: Graph,
    mesh: &Mesh,
    places: impl Into<Places>,
    cluster: &Cluster,
    tell: &dyn Fn(&ShardedGraph, &Best),
) -> Compiled {
    let choose = |sharded: &ShardedGraph| {
        let best = best(sharded, cluster);
        tell(sharded, &best);
        best.decisions
    };
    passes::compile(graph, mesh, places, &choose, &mut |_, _| {})
}

/// Compiles a graph whose inputs and states lie at `places` by the best decisions at the prices of a cluster.
///
/// # Panics
/// As [`passes::compile`], where meshc is at fault.
pub fn compile(
    graph: Graph,
    mesh: &Mesh,
    places: impl Into<Places>,
    cluster: &Cluster,
    trace: Trace,
) -> Compiled {
    passes::compile(graph, mesh, places, &|sharded| choose(sharded, cluster), trace)
}

/// The best decisions for a graph on a mesh, at the prices of a cluster.
pub fn choose(sharded: &ShardedGraph, cluster: &Cluster) -> Decisions {
    best(sharded, cluster).decisions
}

/// The best decisions, and what is known of them.
#[derive(Debug)]
pub struct Best<'a> {
    /// What was chosen.
    pub decisions: Decisions,
    /// The tables of the last search.
    pub choice: Choice<'a>,
    /// The way of each node.
    pub picked: Vec<usize>,
    /// Whether nothing cheaper is in the space: all axes were chosen together, and no way was left out or given up.
    pub exact: bool,
}

/// Chooses all axes together where that can be done, else one after the other, each twice.
pub fn best<'a>(sharded: &'a ShardedGraph, cluster: &'a Cluster) -> Best<'a> {
    let together = axes(sharded);
    let exact = together.len() == 1;
    let rounds = if exact { 1 } else { 2 };
    let mut settled: Option<Settled> = None;
    let mut last = None;
    for open in together.iter().cycle().take(rounds * together.len()) {
        let now = match settled.take() {
            Some(s) => Some(Settled { open: open.clone(), ..s }),
            None if exact => None,
            None => Some(Settled { open: open.clone(), strategies: Vec::new(), places: given(sharded) }),
        };
        let mut choice = Choice::of(sharded, cluster, now);
        let solution = choice.solve();
        let picked = choice.picked(&solution.pick);
        if rounds > 1 {
            let (strategies, places) = (choice.strategies(&picked), choice.places_at(&picked));
            settled = Some(Settled { open: open.clone(), strategies, places });
        }
        let exact = exact && solution.exact && choice.whole;
        last = Some((choice, picked, exact));
    }
    let (choice, picked, exact) = last.unwrap_or_else(|| unreachable!("there is a round"));
    let mut decisions = Decisions {
        strategies: choice.strategies(&picked),
        copies: choice.all_copies(&picked),
        ..sharded.decisions.clone()
    };
    decisions.places.extend(choice.places_at(&picked));
    decisions.bucket_bytes = decisions.bucket_bytes.or_else(|| buckets::bytes(sharded, cluster));
    Best { decisions, choice, picked, exact }
}

fn given(sharded: &ShardedGraph) -> FxHashMap<Name, Sharding> {
    sharded.graph.states.iter().map(|s| (s.name.clone(), places::given(sharded, &s.name))).collect()
}

/// The sets of axes that are chosen together: all in one, unless several of them may split anything and there are many
/// nodes; then one at a time. Those that stay with the batch are in each.
fn axes(sharded: &ShardedGraph) -> Vec<Vec<Axis>> {
    let mesh = &sharded.mesh;
    let all: Vec<Vec<Axis>> =
        mesh.outer().into_iter().map(|(_, of)| of).filter(|of| of.iter().any(|a| mesh.splits(*a))).collect();
    let (data, free): (Vec<_>, Vec<_>) = all.iter().cloned().partition(|of| space::is_data(mesh, of[0]));
    let most = match free.len() {
        0 | 1 => usize::MAX,
        2 => 64,
        _ => 12,
    };
    if sharded.graph.nodes.len() <= most {
        return vec![all.concat()];
    }
    free.into_iter().map(|of| [of, data.concat()].concat()).collect()
}
