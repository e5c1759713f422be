//! ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5) as places:
//! what is replicated over `dp` and changes once a step is split over it instead.
//!
//! | stage | split over `dp` |
//! |---|---|
//! | 1 | moments |
//! | 2 | and gradients, which lie as moments do |
//! | 3 | and parameters |
//!
//! `dpo` stays outside: over it everything is replicated (hybrid sharding).

use ir::state::Role;
use ir::{Axis, Graph, Mesh, Name, Places, Sharding};

/// How much is split over `dp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Nothing.
    Off,
    /// Optimizer state.
    Moments,
    /// And gradients.
    Gradients,
    /// And parameters.
    Parameters,
}

impl Zero {
    /// By its number, 0 to 3.
    pub fn of(stage: u8) -> Option<Zero> {
        [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters].get(usize::from(stage)).copied()
    }
}

/// Splits states over `dp` as a stage of ZeRO says.
pub fn split(zero: Zero, graph: &Graph, mesh: &Mesh, places: &mut Places) {
    let dp: Vec<Axis> = mesh.find("dp").into_iter().flatten().filter(|a| mesh.size(*a) > 1).collect();
    if zero == Zero::Off || dp.is_empty() {
        return;
    }
    for state in graph.states.iter().filter(|s| matches!(s.role, Role::Parameter { trainable: true, .. })) {
        let Some(place) = places.at.get(&state.name) else { continue };
        let Some(split) = over(&state.dims, place, &dp, mesh) else { continue };
        if zero == Zero::Parameters {
            places.at.insert(state.name.clone(), split);
            places.again.insert(state.name.clone());
        } else {
            places.moments.insert(state.name.clone(), split);
        }
    }
}

/// The place with `dp` behind whatever splits one dimension: one that leaves equal pieces, rather one that nothing splits
/// yet, and of these the first; if there is none, the one with the largest pieces. None for a scalar, and for what the
/// axis splits already.
fn over(dims: &[(Name, usize)], place: &Sharding, dp: &[Axis], mesh: &Mesh) -> Option<Sharding> {
    if place.axes().any(|a| dp.contains(&a)) {
        return None;
    }
    let pieces = mesh.pieces(dp);
    let local = |d: usize| ir::bound(dims[d].1, &place.dims[d], mesh);
    let even = |d: &usize| dims[*d].1.is_multiple_of(mesh.pieces(&place.dims[*d]) * pieces);
    let large = (0..dims.len()).filter(|d| dims[*d].1 > 1);
    let first = large.clone().filter(even).min_by_key(|d| (!place.dims[*d].is_empty(), *d));
    let d = first.or_else(|| large.rev().max_by_key(|d| local(*d)))?;
    let mut split = place.clone();
    split.dims[d].extend_from_slice(dp);
    Some(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dimension_with_equal_pieces_is_split() {
        let mesh = Mesh::parse("dp=4,tp=2").unwrap();
        for (sizes, place, split) in [
            (vec![64, 256], "[_, tp]", Some("[dp, tp]")),
            (vec![6, 256], "[_, tp]", Some("[_, tp.dp]")),
            (vec![6, 10], "[_, _]", Some("[_, dp]")),
            (vec![64], "[tp]", Some("[tp.dp]")),
            (vec![1, 3], "[_, _]", Some("[_, dp]")),
            (vec![1], "[_]", None),
            (vec![], "[]", None),
            (vec![8], "[dp]", None),
        ] {
            let dims: Vec<(Name, usize)> = sizes.iter().map(|n| ("d".into(), *n)).collect();
            let place = Sharding::parse(place, &mesh).unwrap();
            let dp = mesh.find("dp").unwrap();
            let found = over(&dims, &place, &dp, &mesh);
            assert_eq!(found.map(|s| s.show(&mesh)).as_deref(), split, "{sizes:?}");
        }
    }
}
