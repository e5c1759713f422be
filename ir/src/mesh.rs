//! The mesh: named axes with sizes, outermost first, and the coordinates of ranks.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

/// A short name: of a mesh axis, a dimension, a state.
pub type Name = Arc<str>;

/// The name of the axis along which a pipeline's stages lie.
pub const PIPELINE: &str = "pp";

/// A mesh axis, by its place in [`Mesh::axes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Axis(pub u8);

/// Axes that split something, outermost first: few, so that they lie in place.
pub type Axes = SmallVec<[Axis; 16]>;

impl Axis {
    /// Its place in the mesh.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A mesh that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// No `=`.
    #[error("`{0}` is no axis: an axis reads name=size, as in `dp=2,tp=2`")]
    NotAnAxis(String),
    /// Not a positive number.
    #[error("axis {0} has size `{1}`: a size is a whole number of at least 1")]
    BadSize(String, String),
    /// The same name again.
    #[error("axis {0} is named twice")]
    Twice(String),
    /// More axes or ranks than can be numbered.
    #[error("the mesh `{0}` is too large: at most 32 axes and 2^31 ranks")]
    TooLarge(String),
}

/// Devices laid out in a grid. The last axis is innermost: ranks that differ only there are neighbours.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Mesh {
    /// Name and size of each axis, outermost first.
    pub axes: Vec<(Name, usize)>,
    /// Names that stand for several axes, outermost first: what a refined axis was called before.
    pub aliases: Vec<(Name, Vec<Axis>)>,
}

impl Mesh {
    /// Reads `dp=2,tp=2`. A size `2.2` refines an axis: `tp=2.2` has axes `tp0` and `tp1` and the alias `tp`.
    /// Empty text is the mesh of one rank.
    pub fn parse(text: &str) -> Result<Mesh, MeshError> {
        let mut mesh = Mesh::default();
        for word in text.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            let (name, size) = word.split_once('=').ok_or_else(|| MeshError::NotAnAxis(word.to_string()))?;
            let (name, size) = (name.trim(), size.trim());
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(MeshError::NotAnAxis(word.to_string()));
            }
            let bad = || MeshError::BadSize(name.to_string(), size.to_string());
            let sizes: Vec<usize> = size
                .split('.')
                .map(|s| s.parse().ok().filter(|n| *n > 0))
                .collect::<Option<_>>()
                .ok_or_else(bad)?;
            if sizes.len() == 1 {
                mesh.push(name, sizes[0])?;
                continue;
            }
            let mut parts = Vec::new();
            for (i, size) in sizes.into_iter().enumerate() {
                parts.push(mesh.push(&format!("{name}{i}"), size)?);
            }
            if mesh.find(name).is_some() {
                return Err(MeshError::Twice(name.to_string()));
            }
            mesh.aliases.push((name.into(), parts));
        }
        let ranks =
            mesh.axes.iter().try_fold(1usize, |n, (_, s)| n.checked_mul(*s).filter(|n| *n <= 1 << 31));
        if mesh.axes.len() > 32 || ranks.is_none() {
            return Err(MeshError::TooLarge(text.to_string()));
        }
        Ok(mesh)
    }

    fn push(&mut self, name: &str, size: usize) -> Result<Axis, MeshError> {
        if self.find(name).is_some() {
            return Err(MeshError::Twice(name.to_string()));
        }
        if self.axes.len() >= 32 {
            return Err(MeshError::TooLarge(name.to_string()));
        }
        self.axes.push((name.into(), size));
        Ok(Axis((self.axes.len() - 1) as u8))
    }

    /// The axes that `name` stands for: one, or those of an alias.
    pub fn find(&self, name: &str) -> Option<Vec<Axis>> {
        if let Some(i) = self.axes.iter().position(|(n, _)| &**n == name) {
            return Some(vec![Axis(i as u8)]);
        }
        self.aliases.iter().find(|(n, _)| &**n == name).map(|(_, axes)| axes.clone())
    }

    /// All axes, outermost first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = Axis> + use<> {
        (0..self.axes.len()).map(|i| Axis(i as u8))
    }

    /// The axis along which a pipeline's stages lie, if there is one. No tensor is split over it.
    pub fn pipeline(&self) -> Option<Axis> {
        self.axes.iter().position(|(name, _)| &**name == PIPELINE).map(|i| Axis(i as u8))
    }

    /// Whether a tensor can be split over an axis: several ranks lie along it, and not the stages of a pipeline.
    pub fn splits(&self, axis: Axis) -> bool {
        self.size(axis) > 1 && self.pipeline() != Some(axis)
    }

    /// Of how many ranks a pipeline is.
    pub fn rows(&self) -> usize {
        self.pipeline().map_or(1, |axis| self.size(axis))
    }

    /// Which row of the pipeline a rank is in.
    pub fn row(&self, rank: usize) -> usize {
        self.pipeline().map_or(0, |axis| self.coordinate(rank)[axis.index()])
    }

    /// The rank that lies in another row as this one in its own.
    pub fn in_row(&self, rank: usize, row: usize) -> usize {
        let mut at = self.coordinate(rank);
        self.pipeline().into_iter().for_each(|axis| at[axis.index()] = row);
        self.rank(&at)
    }

    /// The name of an axis.
    pub fn name(&self, axis: Axis) -> &str {
        &self.axes[axis.index()].0
    }

    /// How many ranks lie along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.axes[axis.index()].1
    }

    /// How many pieces a dimension has that is split over `axes`; also the size of a group over them.
    pub fn pieces(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|a| self.size(*a)).product()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, n)| n).product()
    }

    /// Where a rank lies: its index along each axis.
    pub fn coordinate(&self, rank: usize) -> Vec<usize> {
        let mut rest = rank;
        let mut at = vec![0; self.axes.len()];
        for (i, (_, size)) in self.axes.iter().enumerate().rev() {
            at[i] = rest % size;
            rest /= size;
        }
        at
    }

    /// The rank at a coordinate.
    pub fn rank(&self, at: &[usize]) -> usize {
        self.axes.iter().zip(at).fold(0, |rank, ((_, size), i)| rank * size + i)
    }

    /// The ranks that differ from `rank` only along `axes`, itself among them, the first axis outermost.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let mut at = self.coordinate(rank);
        axes.iter().for_each(|a| at[a.index()] = 0);
        let mut group = vec![at];
        for axis in axes {
            let grow = |at: &Vec<usize>| {
                (0..self.size(*axis))
                    .map(|i| {
                        let mut next = at.clone();
                        next[axis.index()] = i;
                        next
                    })
                    .collect::<Vec<_>>()
            };
            group = group.iter().flat_map(grow).collect();
        }
        group.iter().map(|at| self.rank(at)).collect()
    }

    /// Axes by name, joined by dots; `_` for none. A whole alias prints as the alias.
    pub fn show(&self, axes: &[Axis]) -> String {
        if axes.is_empty() {
            return "_".to_string();
        }
        let mut words = Vec::new();
        let mut rest = axes;
        while let Some(first) = rest.first() {
            match self.aliases.iter().find(|(_, of)| rest.starts_with(of)) {
                Some((name, of)) => {
                    words.push(&**name);
                    rest = &rest[of.len()..];
                }
                None => {
                    words.push(self.name(*first));
                    rest = &rest[1..];
                }
            }
        }
        words.join(".")
    }
}

impl Mesh {
    /// The axes as they are called outside: a refined axis by its alias, with the axes that it stands for.
    pub fn outer(&self) -> Vec<(Name, Vec<Axis>)> {
        let mut out = Vec::new();
        let mut i = 0;
        while i < self.axes.len() {
            let axis = Axis(i as u8);
            let alias = self.aliases.iter().find(|(_, of)| of.first() == Some(&axis)).cloned();
            let next = alias.unwrap_or_else(|| (self.axes[i].0.clone(), vec![axis]));
            i += next.1.len();
            out.push(next);
        }
        out
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |(name, of): (Name, Vec<Axis>)| {
            let sizes: Vec<String> = of.iter().map(|a| self.size(*a).to_string()).collect();
            format!("{name}={}", sizes.join("."))
        };
        f.write_str(&self.outer().into_iter().map(word).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_it_reads() {
        for text in ["", "dp=2", "dp=2,tp=3", "dp=2,tp=2.3,ep=1"] {
            assert_eq!(Mesh::parse(text).map(|m| m.to_string()), Ok(text.to_string()));
        }
    }

    #[test]
    fn refuses_what_is_no_mesh() {
        for (text, error) in [
            ("dp", MeshError::NotAnAxis("dp".into())),
            ("dp=0", MeshError::BadSize("dp".into(), "0".into())),
            ("dp=two", MeshError::BadSize("dp".into(), "two".into())),
            ("dp=2,dp=2", MeshError::Twice("dp".into())),
            ("a=4294967296,b=4294967296", MeshError::TooLarge("a=4294967296,b=4294967296".into())),
        ] {
            assert_eq!(Mesh::parse(text), Err(error));
        }
    }

    #[test]
    fn the_last_axis_is_innermost() {
        let mesh = Mesh::parse("dp=2,tp=3").unwrap();
        assert_eq!(mesh.coordinate(4), [1, 1]);
        assert_eq!(mesh.group(4, &[Axis(1)]), [3, 4, 5]);
        assert_eq!(mesh.group(4, &[Axis(0)]), [1, 4]);
        assert_eq!(mesh.group(4, &[Axis(1), Axis(0)]), [0, 3, 1, 4, 2, 5]);
        assert!((0..6).all(|r| mesh.rank(&mesh.coordinate(r)) == r));
    }
}
