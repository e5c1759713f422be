//! How a value lies on the mesh: split, replicated or partial along each axis; and the pieces that a split makes.

use std::ops::Range;

use crate::{Axes, Axis, Mesh};

/// How the pieces of a partial value combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduce {
    /// By addition.
    Sum,
    /// By the larger.
    Max,
    /// By merging: the last two dimensions are blocks of pairs (value, index), see [`crate::Op::TopK`], and the best
    /// pairs of all blocks make up one. Such a block is never split.
    Top,
}

impl Reduce {
    /// Every kind.
    pub const ALL: [Reduce; 3] = [Reduce::Sum, Reduce::Max, Reduce::Top];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Max => "max",
            Reduce::Top => "top",
        }
    }

    /// What stands before axes in the text form, as in `max tp`; nothing for a sum.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Reduce::Sum => "",
            Reduce::Max => "max ",
            Reduce::Top => "top ",
        }
    }

    /// Takes the prefix off axes.
    pub(crate) fn of_prefixed(text: &str) -> (Reduce, &str) {
        let others = Reduce::ALL.into_iter().filter(|r| *r != Reduce::Sum);
        let found = others.filter_map(|r| Some((r, text.strip_prefix(r.prefix())?.trim()))).next();
        found.unwrap_or((Reduce::Sum, text))
    }

    /// What leaves the other operand as it is.
    pub fn identity(self) -> f64 {
        match self {
            Reduce::Sum => 0.0,
            // For pairs it is both numbers of one that is absent.
            Reduce::Max | Reduce::Top => f64::NEG_INFINITY,
        }
    }
}

/// Where the elements of a value are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sharding {
    /// For each dimension the axes that split it, outermost first.
    pub dims: Vec<Axes>,
    /// The axes along which each rank holds only a contribution, sorted: equality is equality of meaning.
    pub partial: Vec<(Axis, Reduce)>,
}

impl Sharding {
    /// Every rank has all of it.
    pub fn replicated(dims: usize) -> Sharding {
        Sharding { dims: vec![Axes::new(); dims], partial: Vec::new() }
    }

    /// The same, and pieces along an axis combine, too.
    pub fn with_partial(mut self, axis: Axis, reduce: Reduce) -> Sharding {
        self.partial.push((axis, reduce));
        self.partial.sort();
        self
    }

    /// The same without its partial axes.
    pub fn resolved(&self) -> Sharding {
        Sharding { dims: self.dims.clone(), partial: Vec::new() }
    }

    /// All axes that it names.
    pub fn axes(&self) -> impl Iterator<Item = Axis> + '_ {
        self.dims.iter().flatten().copied().chain(self.partial.iter().map(|(a, _)| *a))
    }

    /// Whether its contributions combine by merging pairs.
    pub fn merges(&self) -> bool {
        self.partial.iter().any(|(_, r)| *r == Reduce::Top)
    }

    /// Whether a tensor of this shape has whole blocks of pairs in its last two dimensions, as [`Reduce::Top`] needs.
    pub fn has_pairs(&self, shape: &[usize]) -> bool {
        let whole = |dims: &[Axes]| dims.iter().rev().take(2).all(|axes| axes.is_empty());
        shape.len() >= 2 && shape.last() == Some(&2) && shape.len() == self.dims.len() && whole(&self.dims)
    }

    /// The text form, `[dp, _] partial(tp, max ep)`.
    pub fn show(&self, mesh: &Mesh) -> String {
        let dims: Vec<String> = self.dims.iter().map(|axes| mesh.show(axes)).collect();
        let mut text = format!("[{}]", dims.join(", "));
        if !self.partial.is_empty() {
            let one = |(axis, reduce): &(Axis, Reduce)| format!("{}{}", reduce.prefix(), mesh.name(*axis));
            text += &format!(" partial({})", self.partial.iter().map(one).collect::<Vec<_>>().join(", "));
        }
        text
    }

    /// Reads the text form; the error says which part is wrong.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Sharding, String> {
        let axis =
            |name: &str| mesh.find(name).ok_or_else(|| format!("the mesh `{mesh}` has no axis `{name}`"));
        let (dims, rest) = text
            .trim()
            .strip_prefix('[')
            .and_then(|t| t.split_once(']'))
            .ok_or_else(|| format!("a sharding reads `[axis, _]`, not `{text}`"))?;
        let mut sharding = Sharding { dims: Vec::new(), partial: Vec::new() };
        if !dims.trim().is_empty() {
            for dim in dims.split(',').map(str::trim) {
                let mut axes = Axes::new();
                for name in dim.split('.').filter(|n| *n != "_") {
                    axes.extend(axis(name)?);
                }
                sharding.dims.push(axes);
            }
        }
        let rest = rest.trim();
        if !rest.is_empty() {
            let inner = rest
                .strip_prefix("partial(")
                .and_then(|t| t.strip_suffix(')'))
                .ok_or_else(|| format!("expected `partial(axis)`, not `{rest}`"))?;
            for word in inner.split(',').map(str::trim) {
                let (reduce, name) = Reduce::of_prefixed(word);
                sharding.partial.extend(axis(name.trim())?.into_iter().map(|a| (a, reduce)));
            }
            sharding.partial.sort();
        }
        Ok(sharding)
    }
}

/// Piece `i` of `parts` by the ceil rule: the first pieces are the larger ones, the last may be short or empty.
/// 6 over 4 is 2, 2, 2, 0.
pub fn piece(range: Range<usize>, parts: usize, i: usize) -> Range<usize> {
    let size = range.len().div_ceil(parts);
    let at = |i: usize| range.start + (i * size).min(range.len());
    at(i)..at(i + 1)
}

/// The global range of a dimension of `size` that the rank at `at` has when `axes` split it, outermost first.
pub fn extent(size: usize, axes: &[Axis], mesh: &Mesh, at: &[usize]) -> Range<usize> {
    axes.iter().fold(0..size, |range, a| piece(range, mesh.size(*a), at[a.index()]))
}

/// The largest piece, which the first rank has: what memory is planned at.
pub fn bound(size: usize, axes: &[Axis], mesh: &Mesh) -> usize {
    axes.iter().fold(size, |n, a| n.div_ceil(mesh.size(*a)))
}

/// The largest local shape of a value.
pub fn local_shape(shape: &[usize], sharding: &Sharding, mesh: &Mesh) -> Vec<usize> {
    shape.iter().zip(&sharding.dims).map(|(n, axes)| bound(*n, axes, mesh)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_pieces_are_nested_ceil_pieces() {
        let mesh = Mesh::parse("a=4,b=2,c=3").unwrap();
        let lens = |n, axes: &[Axis]| -> Vec<usize> {
            mesh.group(0, axes).iter().map(|r| extent(n, axes, &mesh, &mesh.coordinate(*r)).len()).collect()
        };
        assert_eq!(lens(6, &[Axis(0)]), [2, 2, 2, 0]);
        assert_eq!(lens(7, &[Axis(1), Axis(2)]), [2, 2, 0, 1, 1, 1]);
        assert_eq!(bound(7, &[Axis(1), Axis(2)], &mesh), 2);
    }

    #[test]
    fn prints_what_it_reads() {
        let mesh = Mesh::parse("dp=2,tp=2.2").unwrap();
        for text in [
            "[]",
            "[_, dp]",
            "[dp.tp, _] partial(dp)",
            "[tp0] partial(dp, max tp1)",
            "[_, _] partial(top tp0)",
        ] {
            assert_eq!(Sharding::parse(text, &mesh).map(|s| s.show(&mesh)), Ok(text.to_string()));
        }
        assert!(Sharding::parse("[xp]", &mesh).is_err());
    }
}
