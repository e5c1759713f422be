//! The places among which is chosen for a parameter and its moments: a matrix is split over `tp` along one dimension, and
//! which one is for the choice.

use ir::state::{Role, State};
use ir::{Axis, Name, ShardedGraph, Sharding};

/// Where an input or a state was placed; whole on every rank unless something says so.
pub fn given(sharded: &ShardedGraph, name: &Name) -> Sharding {
    let graph = &sharded.graph;
    let input = graph.inputs.iter().find(|i| i.name == *name).map(|i| i.dims.len());
    let dims = input.or(graph.state(name).map(|s| s.dims.len())).unwrap_or(0);
    sharded.decisions.places.get(name).cloned().unwrap_or_else(|| Sharding::replicated(dims))
}

/// The places of a state, the one that the conventions give first.
pub fn of(sharded: &ShardedGraph, state: &State) -> Vec<Sharding> {
    let mesh = &sharded.mesh;
    let given = given(sharded, &state.name);
    let parameter = match &state.role {
        Role::Parameter { .. } => &state.name,
        Role::Moment(of) => of,
        Role::Step => return vec![given],
    };
    let tensor: Vec<Axis> = mesh.find("tp").unwrap_or_default();
    let tensor: Vec<Axis> = tensor.into_iter().filter(|a| mesh.size(*a) > 1).collect();
    if !sharded.decisions.free.contains(parameter) || !given.axes().any(|a| tensor.contains(&a)) {
        return vec![given];
    }
    let mut bare = given.clone();
    bare.dims.iter_mut().for_each(|axes| axes.retain(|a| !tensor.contains(a)));
    let mut all = vec![given];
    let large: Vec<usize> = (0..state.dims.len()).filter(|d| state.dims[*d].1 > 1).collect();
    if large.len() < 2 {
        all.push(bare.clone());
    }
    for d in large.into_iter().filter(|d| state.dims[*d].1 >= mesh.pieces(&tensor)) {
        let mut place = bare.clone();
        place.dims[d].splice(0..0, tensor.iter().copied());
        if !all.contains(&place) {
            all.push(place);
        }
    }
    all
}
