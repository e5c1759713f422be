//! Which mesh axis splits which dimension when the user says nothing more: the conventions of the command line.

use std::collections::BTreeMap;

use ir::{Axis, Graph, Mesh, Name, Sharding};

/// The axes that meshc knows, outermost by habit first, and what they split.
pub const AXES: &[(&str, &str)] = &[
    ("pp", "layers"),
    ("dpo", "batch, outside the ZeRO group"),
    ("dp", "batch"),
    ("cp", "sequence"),
    ("ep", "experts"),
    ("tp", "heads, hidden and vocabulary"),
];

/// By name of a dimension the axes that split it. Of a state the first dimension that an axis may split is split by it.
const RULES: &[(&str, &[&str])] = &[("b", &["dpo", "dp"]), ("v", &["tp"]), ("kv", &["tp"]), ("f", &["tp"])];

/// Where the conventions put each input and state. A moment lies as its parameter does.
pub fn places(graph: &Graph, mesh: &Mesh) -> BTreeMap<Name, Sharding> {
    let inputs = graph.inputs.iter().map(|i| (&i.name, &i.dims));
    let states = graph.states.iter().map(|s| (&s.name, &s.dims));
    inputs.chain(states).map(|(name, dims)| (name.clone(), place(dims, mesh))).collect()
}

/// Where the conventions put a tensor with these dimensions.
pub fn place(dims: &[(Name, usize)], mesh: &Mesh) -> Sharding {
    let mut used: Vec<Axis> = Vec::new();
    let mut split = |(name, _): &(Name, usize)| {
        let rule = RULES.iter().find(|(dim, _)| *dim == &**name);
        let axes = rule.into_iter().flat_map(|(_, axes)| *axes).filter_map(|a| mesh.find(a)).flatten();
        let free: Vec<Axis> = axes.filter(|a| mesh.size(*a) > 1 && !used.contains(a)).collect();
        used.extend(&free);
        free
    };
    Sharding { dims: dims.iter().map(&mut split).collect(), partial: Vec::new() }
}
