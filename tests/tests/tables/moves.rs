//! Every pair of shardings of a small tensor: the moves from one to the other give every rank what cutting the whole
//! tensor gives, with no detour.

use ir::{Axis, Mesh, Move, Reduce, Sharding, moves};
use meshc_tests::random::Random;
use runtime::lockstep::apply;
use runtime::tensor::Tensor;

use meshc_tests::spread::{pairs, spread, whole};

/// What a move does to the pieces of all ranks.
pub type Performs = fn(&Move, &[Tensor<f64>], &Mesh) -> Vec<Tensor<f64>>;

/// What leads from one sharding to another.
pub type Leads = dyn Fn(&Sharding, &Sharding, &Mesh) -> Vec<Move>;

/// What is held against cutting: the moves, and what one does to the pieces of all ranks.
pub struct Rules {
    /// See [`moves`].
    pub moves: Box<Leads>,
    /// See [`apply`].
    pub apply: Performs,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { moves: Box::new(moves), apply }
    }
}

/// Meshes, and the shapes on them: even and uneven, with fewer elements than ranks, and with axes of size 1.
const TABLE: &[(&str, &[usize])] = &[
    ("x=2", &[3]),
    ("x=3", &[2, 4]),
    ("x=2,y=2", &[4, 4]),
    ("x=3,y=2", &[5, 4]),
    ("x=2,y=2", &[3, 2, 2]),
    ("x=2,y=3,z=2", &[7]),
    ("x=2,y=2,z=2", &[5, 4]),
    ("x=2,y=1,z=3", &[5, 2]),
    ("x=2,y=2,z=2", &[2, 3, 2]),
];

/// The same for blocks of pairs: what lies outside of a block, and how many pairs it has.
const PAIRS: &[(&str, &[usize], usize)] =
    &[("x=3", &[], 2), ("x=2,y=2", &[3], 1), ("x=3,y=2", &[4], 3), ("x=2,y=1,z=2", &[3, 2], 2)];

/// Every sharding of a tensor with so many dimensions, partial in these ways.
fn shardings(dims: usize, mesh: &Mesh, ways: &[Reduce]) -> Vec<Sharding> {
    let mut all = vec![Sharding::replicated(dims)];
    for axis in mesh.all() {
        all = all.iter().flat_map(|s| with(s, axis, ways)).collect();
    }
    all
}

/// The ways in which a sharding that does not name `axis` can name it or not.
fn with(sharding: &Sharding, axis: Axis, ways: &[Reduce]) -> Vec<Sharding> {
    let mut out = vec![sharding.clone()];
    for (dim, axes) in sharding.dims.iter().enumerate() {
        for place in 0..=axes.len() {
            let mut next = sharding.clone();
            next.dims[dim].insert(place, axis);
            out.push(next);
        }
    }
    for reduce in ways {
        let mut next = sharding.clone();
        next.partial.push((axis, *reduce));
        next.partial.sort();
        out.push(next);
    }
    out
}

/// Whether the moves from one sharding to the other are right, given the pieces in the first.
fn check_pair(
    (from, pieces): (&Sharding, &[Tensor<f64>]),
    (to, goal): (&Sharding, &[Tensor<f64>]),
    tensor: &Tensor<f64>,
    mesh: &Mesh,
    rules: &Rules,
) -> Result<(), String> {
    let steps = (rules.moves)(from, to, mesh);
    let shown: Vec<String> = steps.iter().map(|m| m.show(mesh)).collect();
    let pair = || format!("{} to {} on {mesh}: {}", from.show(mesh), to.show(mesh), shown.join(" "));
    let at = steps.iter().fold(from.clone(), |at, step| step.after(&at));
    if at != *to {
        return Err(format!("{}: arrives at {}", pair(), at.show(mesh)));
    }
    if from == to && !steps.is_empty() {
        return Err(format!("{}: moves what lies there already", pair()));
    }
    for step in &steps {
        if let Move::ToPartial { axis, reduce } = step
            && !to.partial.contains(&(*axis, *reduce))
        {
            return Err(format!("{}: goes through a partial value", pair()));
        }
    }
    let unwanted = |step: &Move| step.axes().iter().all(|a| !to.dims.concat().contains(a));
    let split = |two: &[Move]| match &two[0] {
        // An axis that another dimension wants waits for its own move.
        Move::AllGather { .. } => same_but_axes(&two[0], &two[1]) && two.iter().all(unwanted),
        Move::AllReduce { .. }
        | Move::ReduceScatter { .. }
        | Move::Broadcast { .. }
        | Move::AllToAll { .. }
        | Move::Permute { .. }
        | Move::Slice { .. }
        | Move::ToPartial { .. } => same_but_axes(&two[0], &two[1]),
    };
    if let Some(two) = steps.windows(2).find(|two| split(two)) {
        return Err(format!("{}: {} stands twice where one call would do", pair(), two[0].name()));
    }
    let got = steps.iter().fold(pieces.to_vec(), |pieces, step| (rules.apply)(step, &pieces, mesh));
    if to.partial.is_empty() {
        let off = got.iter().zip(goal).map(|(a, b)| a.distance(b)).fold(0.0, f64::max);
        return if off <= 1e-12 { Ok(()) } else { Err(format!("{}: off by {off:.1e}", pair())) };
    }
    let back = whole(&got, &tensor.shape, to, mesh).map_err(|e| format!("{}: {e}", pair()))?;
    let off = back.distance(tensor);
    if off <= 1e-12 { Ok(()) } else { Err(format!("{}: off by {off:.1e}", pair())) }
}

/// Whether two moves could be one over the axes of both. Two all_to_alls turn the order of their axes, one keeps it.
fn same_but_axes(a: &Move, b: &Move) -> bool {
    match (a, b) {
        (Move::AllReduce { reduce: x, .. }, Move::AllReduce { reduce: y, .. }) => x == y,
        (Move::ReduceScatter { reduce: x, dim: d, .. }, Move::ReduceScatter { reduce: y, dim: e, .. }) => {
            x == y && d == e
        }
        (Move::AllGather { dim: d, .. }, Move::AllGather { dim: e, .. }) => d == e,
        (Move::Slice { dim: d, .. }, Move::Slice { dim: e, .. }) => d == e,
        (Move::Permute { .. }, Move::Permute { .. }) => true,
        (
            Move::AllReduce { .. }
            | Move::ReduceScatter { .. }
            | Move::AllGather { .. }
            | Move::Broadcast { .. }
            | Move::AllToAll { .. }
            | Move::Permute { .. }
            | Move::Slice { .. }
            | Move::ToPartial { .. },
            _,
        ) => false,
    }
}

/// Every pair of shardings in the table.
///
/// # Errors
/// The first pair that is wrong.
pub fn check(rules: &Rules) -> Result<(), String> {
    for (mesh, shape) in TABLE {
        let random = &mut Random::new(shape.len() as u64);
        let tensor = Tensor::from_fn(shape, |_| random.number());
        check_all(mesh, &tensor, &[Reduce::Sum, Reduce::Max], rules, random)?;
    }
    for (mesh, outer, k) in PAIRS {
        let random = &mut Random::new(outer.len() as u64);
        let tensor = pairs(outer, *k, random);
        check_all(mesh, &tensor, &[Reduce::Top], rules, random)?;
    }
    Ok(())
}

fn check_all(
    mesh: &str,
    tensor: &Tensor<f64>,
    ways: &[Reduce],
    rules: &Rules,
    random: &mut Random,
) -> Result<(), String> {
    let mesh = Mesh::parse(mesh).unwrap_or_else(|e| panic!("{e}"));
    let mut all: Vec<(Sharding, Vec<Tensor<f64>>)> = Vec::new();
    for sharding in shardings(tensor.shape.len(), &mesh, ways) {
        if !sharding.merges() || sharding.has_pairs(&tensor.shape) {
            let pieces = spread(tensor, &sharding, &mesh, random);
            all.push((sharding, pieces));
        }
    }
    for (from, pieces) in &all {
        for (to, goal) in &all {
            check_pair((from, pieces), (to, goal), tensor, &mesh, rules)?;
        }
    }
    Ok(())
}

#[test]
fn every_pair_of_shardings_is_reached() {
    check(&Rules::default()).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_tensor_has_so_many_shardings() {
    let mesh = Mesh::parse("x=2,y=2").unwrap();
    // Each axis nowhere, in one of two dimensions or partial in two ways, and both in one dimension in two orders.
    assert_eq!(shardings(2, &mesh, &[Reduce::Sum, Reduce::Max]).len(), 5 * 5 + 2);
}

#[test]
fn several_axes_are_one_call() {
    let mesh = Mesh::parse("x=2,y=2").unwrap();
    for (from, to, needed) in [
        ("[x.y, _]", "[_, _]", "all_gather(x.y, dim 0)"),
        ("[x.y, _]", "[x, _]", "all_gather(y, dim 0)"),
        ("[_, _]", "[x.y, _]", "slice(x.y, dim 0)"),
        ("[_, _] partial(x, y)", "[_, _]", "all_reduce(x.y)"),
        ("[_, _] partial(x, y)", "[x.y, _]", "reduce_scatter(x.y, dim 0)"),
        ("[_, _] partial(x, y)", "[y.x, _]", "reduce_scatter(y.x, dim 0)"),
        ("[x, _] partial(y)", "[x.y, _]", "reduce_scatter(y, dim 0)"),
        ("[x, _]", "[_, x]", "all_to_all(x, dim 0 to 1)"),
        ("[x, y]", "[_, y.x]", "all_to_all(x, dim 0 to 1)"),
        ("[x.y, _]", "[_, x.y]", "all_to_all(x.y, dim 0 to 1)"),
        ("[y, _]", "[_, x.y]", "slice(x, dim 1) all_to_all(y, dim 0 to 1)"),
        ("[x, y]", "[_, x]", "all_gather(y, dim 1) all_to_all(x, dim 0 to 1)"),
        ("[_, _] partial(x, max y)", "[_, _]", "all_reduce(x) all_reduce(max y)"),
        ("[_, _]", "[_, _] partial(x)", "to_partial(x)"),
        ("[x, y]", "[y, x]", "permute(x.y to y.x)"),
        ("[x.y, _]", "[y.x, _]", "permute(x.y to y.x)"),
        ("[x, _]", "[y, _]", "permute(x.y to y.x)"),
        ("[x, _]", "[y.x, _]", "permute(x.y to y.x) slice(x, dim 0)"),
        ("[_, _, _] partial(top x)", "[x, _, _]", "reduce_scatter(top x, dim 0)"),
        ("[_, _, _] partial(top x)", "[_, x, _]", "all_reduce(top x) slice(x, dim 1)"),
    ] {
        let read = |text| Sharding::parse(text, &mesh).unwrap();
        let shown: Vec<String> = moves(&read(from), &read(to), &mesh).iter().map(|m| m.show(&mesh)).collect();
        assert_eq!(shown.join(" "), needed, "{from} to {to}");
    }
}
