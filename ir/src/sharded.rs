//! Decisions, and the graph in which every value has a sharding.

use std::collections::{BTreeMap, BTreeSet};

use crate::rows::{Strategy, layout};
use crate::schedule::Schedule;
use crate::{Graph, Mesh, Name, Sharding, Value};

/// A value in one more sharding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reshard {
    /// What it is made from.
    pub from: Sharding,
    /// How it lies.
    pub to: Sharding,
}

/// Where inputs and states lie before anything is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Places {
    /// By name.
    pub at: BTreeMap<Name, Sharding>,
    /// By parameter where its moments and its master lie, if not as it does.
    pub moments: BTreeMap<Name, Sharding>,
    /// See [`Decisions::free`].
    pub free: BTreeSet<Name>,
    /// See [`Decisions::again`].
    pub again: BTreeSet<Name>,
    /// See [`Decisions::bucket_bytes`].
    pub bucket_bytes: Option<usize>,
    /// The order of actions.
    pub schedule: Schedule,
}

impl Default for Places {
    /// Nothing has a place, and a step has one micro-batch.
    fn default() -> Places {
        Places {
            at: BTreeMap::new(),
            moments: BTreeMap::new(),
            free: BTreeSet::new(),
            again: BTreeSet::new(),
            bucket_bytes: None,
            schedule: Schedule::one_stage(1),
        }
    }
}

impl From<BTreeMap<Name, Sharding>> for Places {
    fn from(at: BTreeMap<Name, Sharding>) -> Places {
        Places { at, ..Places::default() }
    }
}

/// Everything that was chosen and not computed: passes read it, it prints and parses, a user can edit it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Decisions {
    /// How each input and state lies, by name.
    pub places: BTreeMap<Name, Sharding>,
    /// Parameters that the choice may split over `tp` along another dimension.
    pub free: BTreeSet<Name>,
    /// Parameters whose copies in other shardings are dropped after the forward pass and made again in the backward pass.
    pub again: BTreeSet<Name>,
    /// How each node is split, by its place; empty until `choose` ran.
    pub strategies: Vec<Strategy>,
    /// In which other shardings a value is needed, and from which each is made, which stands before it. What has no
    /// entry is made from the value itself.
    pub copies: BTreeMap<Value, Vec<Reshard>>,
    /// Gradients are reduced in calls of up to so many bytes; none, or 0: each by itself.
    pub bucket_bytes: Option<usize>,
    /// The order of actions.
    pub schedule: Schedule,
}

/// A graph on a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardedGraph {
    /// The devices.
    pub mesh: Mesh,
    /// The ops.
    pub graph: Graph,
    /// What was chosen.
    pub decisions: Decisions,
    /// For each value its sharding; empty until `choose` ran.
    pub shardings: Vec<Sharding>,
    /// Whether reshards stand wherever an operand is not as its node needs it.
    pub agreed: bool,
}

impl ShardedGraph {
    /// A graph whose inputs and states have a place, and nothing else is chosen yet. A moment without a place lies as
    /// its parameter does, anything else without one is replicated.
    pub fn new(graph: Graph, mesh: Mesh, places: impl Into<Places>) -> ShardedGraph {
        let Places { at: mut places, moments, free, again, bucket_bytes, schedule } = places.into();
        for state in &graph.states {
            let like = state.role.of().and_then(|of| moments.get(of).or(places.get(of))).cloned();
            let place = like.unwrap_or_else(|| Sharding::replicated(state.dims.len()));
            places.entry(state.name.clone()).or_insert(place);
        }
        for input in &graph.inputs {
            places.entry(input.name.clone()).or_insert_with(|| Sharding::replicated(input.dims.len()));
        }
        let decisions = Decisions { places, free, again, bucket_bytes, schedule, ..Decisions::default() };
        ShardedGraph { mesh, graph, decisions, shardings: Vec::new(), agreed: false }
    }

    /// A value's sharding.
    pub fn sharding(&self, value: Value) -> &Sharding {
        &self.shardings[value.index()]
    }

    /// What node `i` needs of its operands and gives its results.
    pub fn layout(&self, i: usize) -> Option<crate::rows::Layout> {
        layout(&self.graph, &self.graph.nodes[i], &self.decisions.strategies[i], &self.mesh)
    }

    /// The largest local shape of a value.
    pub fn local_shape(&self, value: Value) -> Vec<usize> {
        crate::local_shape(self.graph.shape(value), self.sharding(value), &self.mesh)
    }
}
