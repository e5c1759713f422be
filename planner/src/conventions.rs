//! Which mesh axis splits which dimension when the user says nothing more: the conventions of the command line.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::state::Role;
use ir::{Axes, Axis, Graph, Mesh, Name, Sharding, piece};

/// The axes that meshc knows, outermost by habit first, and what they split.
pub const AXES: &[(&str, &str)] = &[
    ("pp", "layers"),
    ("dpo", "batch, outside the ZeRO group"),
    ("dp", "batch"),
    ("cp", "sequence"),
    ("ep", "experts"),
    ("tp", "heads, hidden and vocabulary"),
];

/// By name of a dimension the axes that split it. KV heads and the queries of each share `tp`, see [`refine`].
const RULES: &[(&str, &[&str])] = &[("b", &["dpo", "dp"]), ("v", &["tp"]), ("f", &["tp"])];

/// The mesh with `tp` cut in two where that spreads heads more evenly: `tp=4` over 2 KV heads with 2 queries each is
/// `tp=2.2`, KV heads over the first part and the queries of each over the second. Keys and values are then replicated
/// over the second part, and their gradients partial.
pub fn refine(graph: &Graph, mesh: &Mesh) -> Mesh {
    let found = mesh.find("tp").unwrap_or_default();
    let ([tp], Some(kv), Some(group)) = (&found[..], size(graph, "kv"), size(graph, "group")) else {
        return mesh.clone();
    };
    let n = mesh.size(*tp);
    let outer = best_split(n, kv, group);
    if outer == 1 || outer == n {
        return mesh.clone();
    }
    let word = |(name, of): (Name, Vec<Axis>)| {
        let sizes = match of.contains(tp) {
            true => format!("{outer}.{}", n / outer),
            false => of.iter().map(|a| mesh.size(*a).to_string()).collect::<Vec<_>>().join("."),
        };
        format!("{name}={sizes}")
    };
    let text: Vec<String> = mesh.outer().into_iter().map(word).collect();
    // The names are those of a mesh that was read already; two more cannot make it too large.
    Mesh::parse(&text.join(",")).unwrap_or_else(|_| mesh.clone())
}

/// Of `n` ranks, over how many the KV heads are split, so that the rank with most heads has as few as can be; of equal
/// ways the one that replicates keys and values least.
fn best_split(n: usize, kv: usize, group: usize) -> usize {
    let most = |outer: usize| kv.div_ceil(outer) * group.div_ceil(n / outer);
    let ways = (1..=n).rev().filter(|outer| n.is_multiple_of(*outer));
    ways.min_by_key(|outer| most(*outer)).unwrap_or(n)
}

fn size(graph: &Graph, dim: &str) -> Option<usize> {
    let states = graph.states.iter().flat_map(|s| &s.dims);
    states.chain(graph.inputs.iter().flat_map(|i| &i.dims)).find(|(name, _)| &**name == dim).map(|(_, n)| *n)
}

/// The axes that split KV heads, and those that split the queries of each.
fn heads(graph: &Graph, mesh: &Mesh) -> (Vec<Axis>, Vec<Axis>) {
    let tp = mesh.find("tp").unwrap_or_default();
    match (&tp[..], size(graph, "kv"), size(graph, "group")) {
        ([outer, rest @ ..], Some(_), Some(_)) if !rest.is_empty() => (vec![*outer], rest.to_vec()),
        ([one], Some(kv), Some(group)) if best_split(mesh.size(*one), kv, group) == 1 => {
            (Vec::new(), vec![*one])
        }
        (all, _, _) => (all.to_vec(), Vec::new()),
    }
}

/// Where the conventions put each input and state. A moment lies as its parameter does.
pub fn places(graph: &Graph, mesh: &Mesh) -> BTreeMap<Name, Sharding> {
    let (kv, group) = heads(graph, mesh);
    let axes = |dim: &str| match dim {
        "kv" => kv.clone(),
        "group" => group.clone(),
        _ => {
            let rule = RULES.iter().find(|(name, _)| *name == dim);
            rule.into_iter().flat_map(|(_, axes)| *axes).filter_map(|a| mesh.find(a)).flatten().collect()
        }
    };
    let inputs = graph.inputs.iter().map(|i| (&i.name, &i.dims));
    let states = graph.states.iter().map(|s| (&s.name, &s.dims));
    let mut places: BTreeMap<Name, Sharding> =
        inputs.chain(states).map(|(name, dims)| (name.clone(), place(dims, mesh, &axes))).collect();
    for state in graph.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. })) {
        if let Some(place) = places.get_mut(&state.name) {
            split_matrix(&state.dims, place, mesh);
        }
    }
    places
}

/// A matrix that no rule splits over `tp` is split along its largest dimension.
fn split_matrix(dims: &[(Name, usize)], place: &mut Sharding, mesh: &Mesh) {
    let tp: Vec<Axis> = mesh.find("tp").into_iter().flatten().filter(|a| mesh.size(*a) > 1).collect();
    let matrix = dims.iter().filter(|(_, n)| *n > 1).count() > 1;
    if tp.is_empty() || !matrix || place.axes().any(|a| tp.contains(&a)) {
        return;
    }
    let large = (0..dims.len()).filter(|d| dims[*d].1 >= mesh.pieces(&tp)).rev();
    if let Some(d) = large.max_by_key(|d| dims[*d].1) {
        place.dims[d].insert_many(0, tp);
    }
}

/// The parameters that `tp` splits: along which dimension is for the choice, unless the user says so.
pub fn free(graph: &Graph, places: &BTreeMap<Name, Sharding>, mesh: &Mesh) -> BTreeSet<Name> {
    let tp = mesh.find("tp").unwrap_or_default();
    let split = |name: &Name| places.get(name).is_some_and(|p| p.axes().any(|a| tp.contains(&a)));
    let parameters = graph.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. }));
    parameters.map(|s| s.name.clone()).filter(split).collect()
}

/// The pieces of the batch, in the order of the ranks that have them.
pub fn pieces(graph: &Graph, mesh: &Mesh, places: &BTreeMap<Name, Sharding>) -> Vec<Range<usize>> {
    let batch = graph.inputs.iter().find_map(|i| {
        let d = i.dims.iter().position(|(name, _)| &**name == "b")?;
        Some((i.dims[d].1, places.get(&i.name)?.dims[d].clone()))
    });
    let Some((n, axes)) = batch else { return Vec::new() };
    let whole: Range<usize> = 0..n;
    let mut pieces = vec![whole];
    for axis in axes {
        let size = mesh.size(axis);
        pieces = pieces.into_iter().flat_map(|p| (0..size).map(move |i| piece(p.clone(), size, i))).collect();
    }
    pieces
}

/// A tensor's dimensions over their axes, none of size 1 and none twice.
fn place(dims: &[(Name, usize)], mesh: &Mesh, axes: &dyn Fn(&str) -> Vec<Axis>) -> Sharding {
    let mut used: Vec<Axis> = Vec::new();
    let mut split = |(name, _): &(Name, usize)| {
        let free: Axes = axes(name).into_iter().filter(|a| mesh.size(*a) > 1 && !used.contains(a)).collect();
        used.extend_from_slice(&free);
        free
    };
    Sharding { dims: dims.iter().map(&mut split).collect(), partial: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_spread_evenly() {
        for (n, kv, group, outer) in [
            (4, 2, 2, 2),  // one query head each
            (2, 2, 2, 2),  // a KV head each, nothing replicated
            (2, 3, 2, 1),  // three of six heads each; KV heads alone would give four
            (4, 1, 8, 1),  // one KV head, replicated
            (8, 2, 2, 4),  // four ranks have a head, whatever is done: replicate least
            (3, 2, 2, 3),  // two ranks have two heads
            (4, 2, 7, 2),  // a KV head and four or three of its queries
            (8, 8, 16, 8), // as usual
        ] {
            assert_eq!(best_split(n, kv, group), outer, "{n} ranks, {kv} KV heads of {group}");
        }
    }
}
