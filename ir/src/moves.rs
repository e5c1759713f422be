//! The moves that change a sharding, one collective call each, and the sequence that leads from one to another.

use crate::{Axis, Mesh, Reduce, Sharding};

/// One step from a sharding to another. Axes are outermost first; a move over several axes is one call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// Combines contributions; every rank gets the result.
    AllReduce {
        /// Over these axes.
        axes: Vec<Axis>,
        /// How.
        reduce: Reduce,
    },
    /// Combines contributions; each rank gets its piece of a dimension.
    ReduceScatter {
        /// Over these axes.
        axes: Vec<Axis>,
        /// How.
        reduce: Reduce,
        /// The dimension that is split.
        dim: usize,
    },
    /// Joins the pieces of a dimension on every rank.
    AllGather {
        /// Over these axes, the innermost of the dimension.
        axes: Vec<Axis>,
        /// The dimension.
        dim: usize,
    },
    /// Moves an axis from the inner end of one dimension to that of another.
    AllToAll {
        /// Over these axes.
        axes: Vec<Axis>,
        /// The dimension that is joined.
        from: usize,
        /// The dimension that is split.
        to: usize,
    },
    /// Keeps only this rank's piece; no communication.
    Slice {
        /// Over these axes.
        axes: Vec<Axis>,
        /// The dimension.
        dim: usize,
    },
    /// Makes the first rank's copy the only contribution; no communication.
    ToPartial {
        /// Along this axis.
        axis: Axis,
        /// How contributions combine.
        reduce: Reduce,
    },
}

impl Move {
    /// The axes along which ranks talk, or would.
    pub fn axes(&self) -> &[Axis] {
        match self {
            Move::AllReduce { axes, .. }
            | Move::ReduceScatter { axes, .. }
            | Move::AllGather { axes, .. }
            | Move::AllToAll { axes, .. }
            | Move::Slice { axes, .. } => axes,
            Move::ToPartial { axis, .. } => std::slice::from_ref(axis),
        }
    }

    /// Whether ranks talk.
    pub fn is_collective(&self) -> bool {
        match self {
            Move::AllReduce { .. }
            | Move::ReduceScatter { .. }
            | Move::AllGather { .. }
            | Move::AllToAll { .. } => true,
            Move::Slice { .. } | Move::ToPartial { .. } => false,
        }
    }

    /// The field's name for it.
    pub fn name(&self) -> &'static str {
        match self {
            Move::AllReduce { .. } => "all_reduce",
            Move::ReduceScatter { .. } => "reduce_scatter",
            Move::AllGather { .. } => "all_gather",
            Move::AllToAll { .. } => "all_to_all",
            Move::Slice { .. } => "slice",
            Move::ToPartial { .. } => "to_partial",
        }
    }

    /// The sharding after it.
    pub fn after(&self, before: &Sharding) -> Sharding {
        let mut at = before.clone();
        let drop_inner =
            |dims: &mut Vec<Axis>, axes: &[Axis]| dims.truncate(dims.len().saturating_sub(axes.len()));
        match self {
            Move::AllReduce { axes, .. } => at.partial.retain(|(a, _)| !axes.contains(a)),
            Move::ReduceScatter { axes, dim, .. } => {
                at.partial.retain(|(a, _)| !axes.contains(a));
                at.dims[*dim].extend(axes);
            }
            Move::AllGather { axes, dim } => drop_inner(&mut at.dims[*dim], axes),
            Move::AllToAll { axes, from, to } => {
                drop_inner(&mut at.dims[*from], axes);
                at.dims[*to].extend(axes);
            }
            Move::Slice { axes, dim } => at.dims[*dim].extend(axes),
            Move::ToPartial { axis, reduce } => {
                at.partial.push((*axis, *reduce));
                at.partial.sort();
            }
        }
        at
    }

    /// The text form, as in `all_gather(tp, dim 1)`.
    pub fn show(&self, mesh: &Mesh) -> String {
        let axes = mesh.show(self.axes());
        let how = |reduce: &Reduce| if *reduce == Reduce::Max { "max " } else { "" };
        let inner = match self {
            Move::AllReduce { reduce, .. } | Move::ToPartial { reduce, .. } => {
                format!("{}{axes}", how(reduce))
            }
            Move::ReduceScatter { reduce, dim, .. } => format!("{}{axes}, dim {dim}", how(reduce)),
            Move::AllGather { dim, .. } | Move::Slice { dim, .. } => format!("{axes}, dim {dim}"),
            Move::AllToAll { from, to, .. } => format!("{axes}, dim {from} to {to}"),
        };
        format!("{}({inner})", self.name())
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Move, String> {
        let wrong = || format!("`{text}` is no move: one reads `all_reduce(tp)` or `all_gather(tp, dim 1)`");
        let (name, inner) =
            text.trim().strip_suffix(')').and_then(|t| t.split_once('(')).ok_or_else(wrong)?;
        let (axes, dim) = match inner.split_once(", dim ") {
            Some((axes, dim)) => (axes, Some(dim)),
            None => (inner, None),
        };
        let (reduce, names) = match axes.strip_prefix("max ") {
            Some(names) => (Reduce::Max, names),
            None => (Reduce::Sum, axes),
        };
        let mut axes = Vec::new();
        for name in names.split('.') {
            axes.extend(mesh.find(name).ok_or_else(|| format!("the mesh `{mesh}` has no axis `{name}`"))?);
        }
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        Ok(match (name, dim) {
            ("all_reduce", None) => Move::AllReduce { axes, reduce },
            ("to_partial", None) if axes.len() == 1 => Move::ToPartial { axis: axes[0], reduce },
            ("reduce_scatter", Some(dim)) => Move::ReduceScatter { axes, reduce, dim: number(dim)? },
            ("all_gather", Some(dim)) => Move::AllGather { axes, dim: number(dim)? },
            ("slice", Some(dim)) => Move::Slice { axes, dim: number(dim)? },
            ("all_to_all", Some(dims)) => {
                let (from, to) = dims.split_once(" to ").ok_or_else(wrong)?;
                Move::AllToAll { axes, from: number(from)?, to: number(to)? }
            }
            _ => return Err(wrong()),
        })
    }
}

/// The moves that lead from one sharding to another, in order.
pub fn moves(from: &Sharding, to: &Sharding) -> Vec<Move> {
    let mut at = from.clone();
    let mut out = Vec::new();
    while let Some(next) = next(&at, to) {
        at = next.after(&at);
        out.push(next);
    }
    debug_assert_eq!(&at, to, "the moves must arrive");
    out
}

/// Pieces are contiguous only at the inner end of a dimension, so moves happen there.
fn next(at: &Sharding, to: &Sharding) -> Option<Move> {
    // The axes that `dim` lacks in front of `axis` being the next one, if what it has is a beginning of its goal.
    let wanted =
        |dim: usize| to.dims[dim].starts_with(&at.dims[dim]).then(|| &to.dims[dim][at.dims[dim].len()..]);
    let leaving: Vec<(Axis, Reduce)> =
        at.partial.iter().filter(|p| !to.partial.contains(p)).copied().collect();
    if let Some(&(_, reduce)) = leaving.first() {
        let mine = |a: &Axis| leaving.contains(&(*a, reduce));
        for dim in 0..at.dims.len() {
            let run: Vec<Axis> = wanted(dim).unwrap_or(&[]).iter().copied().take_while(mine).collect();
            if !run.is_empty() {
                return Some(Move::ReduceScatter { axes: run, reduce, dim });
            }
        }
        let axes = leaving.iter().filter(|(_, r)| *r == reduce).map(|(a, _)| *a).collect();
        return Some(Move::AllReduce { axes, reduce });
    }
    // The inner axes of each dimension that its goal does not have there.
    let extra: Vec<&[Axis]> = (0..at.dims.len())
        .map(|d| {
            let keep = at.dims[d].iter().zip(&to.dims[d]).take_while(|(a, b)| a == b).count();
            &at.dims[d][keep..]
        })
        .collect();
    if let Some(step) = all_to_all(at, &extra, &wanted) {
        return Some(step);
    }
    // An axis that is wanted elsewhere waits for its own move; only what no dimension wants is joined, unless all wait
    // for each other.
    let elsewhere =
        |from: usize, a: &Axis| to.dims.iter().enumerate().any(|(d, axes)| d != from && axes.contains(a));
    let idle = |from: usize| extra[from].iter().rev().take_while(|a| !elsewhere(from, a)).count();
    let gather = |from: usize, n: usize| Move::AllGather {
        axes: extra[from][extra[from].len() - n..].to_vec(),
        dim: from,
    };
    if let Some(from) = (0..extra.len()).find(|d| idle(*d) > 0) {
        return Some(gather(from, idle(from)));
    }
    if let Some(from) = (0..extra.len()).find(|d| !extra[*d].is_empty()) {
        return Some(gather(from, 1));
    }
    for dim in 0..at.dims.len() {
        let axes = &to.dims[dim][at.dims[dim].len()..];
        if !axes.is_empty() {
            return Some(Move::Slice { axes: axes.to_vec(), dim });
        }
    }
    let missing = to.partial.iter().find(|p| !at.partial.contains(p));
    missing.map(|&(axis, reduce)| Move::ToPartial { axis, reduce })
}

/// The inner axes of a dimension, as many as can go at once, to a dimension whose next axes they are; or first the
/// slice that makes them the next.
fn all_to_all<'a>(
    at: &Sharding,
    extra: &[&[Axis]],
    wanted: &dyn Fn(usize) -> Option<&'a [Axis]>,
) -> Option<Move> {
    for (from, extra) in extra.iter().enumerate() {
        for n in (1..=extra.len()).rev() {
            let run = &extra[extra.len() - n..];
            for dim in (0..at.dims.len()).filter(|d| *d != from) {
                let next = wanted(dim).unwrap_or(&[]);
                let Some(before) = (0..next.len()).find(|i| next[*i..].starts_with(run)) else { continue };
                if before == 0 {
                    return Some(Move::AllToAll { axes: run.to_vec(), from, to: dim });
                }
                if next[..before].iter().all(|a| !at.axes().any(|b| b == *a)) {
                    return Some(Move::Slice { axes: next[..before].to_vec(), dim });
                }
            }
        }
    }
    None
}
