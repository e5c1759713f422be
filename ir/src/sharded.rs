//! Decisions, and the graph in which every value has a sharding.

use std::collections::BTreeMap;

use crate::rows::{Strategy, layout};
use crate::schedule::Schedule;
use crate::state::Role;
use crate::{Graph, Mesh, Name, Sharding, Value};

/// Everything that was chosen and not computed: passes read it, it prints and parses, a user can edit it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Decisions {
    /// How each input and state lies, by name.
    pub places: BTreeMap<Name, Sharding>,
    /// How each node is split, by its place; empty until `choose` ran.
    pub strategies: Vec<Strategy>,
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
    pub fn new(graph: Graph, mesh: Mesh, mut places: BTreeMap<Name, Sharding>) -> ShardedGraph {
        for state in &graph.states {
            let like = if let Role::Moment(of) = &state.role { places.get(of).cloned() } else { None };
            let place = like.unwrap_or_else(|| Sharding::replicated(state.dims.len()));
            places.entry(state.name.clone()).or_insert(place);
        }
        for input in &graph.inputs {
            places.entry(input.name.clone()).or_insert_with(|| Sharding::replicated(input.dims.len()));
        }
        let decisions = Decisions { places, schedule: Schedule::one_stage(1), ..Decisions::default() };
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
