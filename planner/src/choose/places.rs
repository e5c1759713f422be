//! The places among which is chosen for a parameter and its moments: a matrix is split over `tp` along one dimension, and
//! which one is for the choice.

use ir::state::{Role, State};
use ir::{Axes, Axis, Name, ShardedGraph, Sharding};
use rustc_hash::FxHashMap;

/// Where an input or a state was placed; whole on every rank unless something says so.
pub fn given(sharded: &ShardedGraph, name: &Name) -> Sharding {
    let graph = &sharded.graph;
    let whole = || {
        let input = graph.inputs.iter().find(|i| i.name == *name).map(|i| i.dims.len());
        let dims = input.or(graph.state(name).map(|s| s.dims.len())).unwrap_or(0);
        Sharding::replicated(dims)
    };
    sharded.decisions.places.get(name).cloned().unwrap_or_else(whole)
}

/// The places of each state, the one that the conventions give first.
pub fn all(sharded: &ShardedGraph) -> FxHashMap<Name, Vec<Sharding>> {
    let states = sharded.graph.states_by_name();
    sharded.graph.states.iter().map(|s| (s.name.clone(), of(sharded, &states, s))).collect()
}

/// The places of a state. A moment is split over `tp` as its parameter is.
fn of(sharded: &ShardedGraph, states: &FxHashMap<&str, &State>, state: &State) -> Vec<Sharding> {
    let mine = given(sharded, &state.name);
    let parameter = match &state.role {
        Role::Parameter { .. } => state,
        Role::Moment(of) | Role::Master(of) => match states.get(&**of) {
            Some(parameter) if parameter.shape() == state.shape() => parameter,
            Some(_) | None => return vec![mine],
        },
        Role::Step => return vec![mine],
    };
    let tensor: Vec<Axis> = sharded.mesh.find("tp").unwrap_or_default();
    let tensor: Vec<Axis> = tensor.into_iter().filter(|a| sharded.mesh.splits(*a)).collect();
    let first = given(sharded, &parameter.name);
    if !sharded.decisions.free.contains(&parameter.name) || !first.axes().any(|a| tensor.contains(&a)) {
        return vec![mine];
    }
    // For each dimension the axes of `tp` that split it.
    let split = |axes: &Axes| axes.iter().copied().filter(|a| tensor.contains(a)).collect::<Vec<Axis>>();
    let mut ways: Vec<Vec<Vec<Axis>>> = vec![first.dims.iter().map(split).collect()];
    let dims = &parameter.dims;
    let large: Vec<usize> = (0..dims.len()).filter(|d| dims[*d].1 > 1).collect();
    if large.len() < 2 {
        ways.push(vec![Vec::new(); dims.len()]);
    }
    for d in large.into_iter().filter(|d| dims[*d].1 >= sharded.mesh.pieces(&tensor)) {
        let mut way = vec![Vec::new(); dims.len()];
        way[d].clone_from(&tensor);
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    let place = |way: Vec<Vec<Axis>>| {
        let mut place = mine.clone();
        for (axes, split) in place.dims.iter_mut().zip(way) {
            if axes.iter().copied().filter(|a| tensor.contains(a)).collect::<Vec<_>>() != split {
                axes.retain(|a| !tensor.contains(a));
                axes.insert_many(0, split);
            }
        }
        place
    };
    ways.into_iter().map(place).collect()
}
