//! What is said where equal pieces are asked for and a dimension does not divide: what is, and what would work.

use ir::{Axis, Mesh, extent};

/// The sizes of the pieces of a dimension, in the order of ranks.
fn pieces(size: usize, axes: &[Axis], mesh: &Mesh) -> String {
    let ranks = mesh.group(0, axes);
    let all = ranks.iter().map(|r| extent(size, axes, mesh, &mesh.coordinate(*r)).len().to_string());
    all.collect::<Vec<_>>().join(", ")
}

/// Why `what`, a dimension of `size`, does not split over `axes` into equal pieces; none if it does.
pub fn uneven(what: &str, size: usize, axes: &[Axis], mesh: &Mesh) -> Option<String> {
    let n = mesh.pieces(axes);
    if size.is_multiple_of(n) {
        return None;
    }
    let others: Vec<String> = mesh
        .all()
        .filter(|a| !axes.contains(a) && mesh.size(*a) > 1)
        .map(|a| format!("{}={} ({})", mesh.name(a), mesh.size(a), pieces(size, &[a], mesh)))
        .collect();
    let others =
        if others.is_empty() { String::new() } else { format!(", or split it over {}", others.join(" or ")) };
    Some(format!(
        "{what} has size {size}, which does not divide over {}={n} into equal pieces; leave out `even` for uneven \
         pieces ({}), replicate it with `_`{others}",
        mesh.show(axes),
        pieces(size, axes, mesh)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_over_four() {
        let mesh = Mesh::parse("x=4,y=2").unwrap();
        assert_eq!(
            uneven("dimension 0 of v1", 5, &[Axis(0)], &mesh).as_deref(),
            Some(
                "dimension 0 of v1 has size 5, which does not divide over x=4 into equal pieces; leave out `even` for \
                 uneven pieces (2, 2, 1, 0), replicate it with `_`, or split it over y=2 (3, 2)"
            )
        );
        assert_eq!(uneven("", 8, &[Axis(0), Axis(1)], &mesh), None);
    }
}
