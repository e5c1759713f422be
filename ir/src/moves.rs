//! The moves that change a sharding, one collective call each, and the sequence that leads from one to another.

use crate::{Axes, Axis, DType, Mesh, Reduce, Sharding, bound};

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
    /// Joins the pieces of a dimension of which the first rank along the axes has all there is: it sends them to the
    /// others.
    Broadcast {
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
    /// Renames axes: every piece goes whole to the rank that needs it, whose coordinate along `to[i]` is the piece's
    /// along `axes[i]`. `to` is `axes` in another order, each in the place of one of its size.
    Permute {
        /// These axes.
        axes: Vec<Axis>,
        /// What each becomes.
        to: Vec<Axis>,
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
            | Move::Broadcast { axes, .. }
            | Move::AllToAll { axes, .. }
            | Move::Permute { axes, .. }
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
            | Move::Broadcast { .. }
            | Move::AllToAll { .. }
            | Move::Permute { .. } => true,
            Move::Slice { .. } | Move::ToPartial { .. } => false,
        }
    }

    /// How contributions combine, if they do, or shall.
    pub fn reduce(&self) -> Option<Reduce> {
        match self {
            Move::AllReduce { reduce, .. }
            | Move::ReduceScatter { reduce, .. }
            | Move::ToPartial { reduce, .. } => Some(*reduce),
            Move::AllGather { .. }
            | Move::Broadcast { .. }
            | Move::AllToAll { .. }
            | Move::Permute { .. }
            | Move::Slice { .. } => None,
        }
    }

    /// Whether a tensor that lies like this has whole pairs for [`Reduce::Top`], and the move leaves them so.
    pub fn has_pairs(&self, shape: &[usize], sharding: &Sharding, dtype: DType) -> bool {
        let splits = match self {
            Move::ReduceScatter { dim, .. } => *dim + 2 >= shape.len(),
            Move::AllReduce { .. }
            | Move::ToPartial { .. }
            | Move::AllGather { .. }
            | Move::Broadcast { .. }
            | Move::AllToAll { .. }
            | Move::Permute { .. }
            | Move::Slice { .. } => false,
        };
        dtype == DType::F32 && !splits && sharding.has_pairs(shape)
    }

    /// The rank whose piece goes to `rank` in a permutation; else itself.
    pub fn source(&self, mesh: &Mesh, rank: usize) -> usize {
        let at = mesh.coordinate(rank);
        let mut source = at.clone();
        if let Move::Permute { axes, to } = self {
            axes.iter().zip(to).for_each(|(a, b)| source[a.index()] = at[b.index()]);
        }
        mesh.rank(&source)
    }

    /// The field's name for it.
    pub fn name(&self) -> &'static str {
        match self {
            Move::AllReduce { .. } => "all_reduce",
            Move::ReduceScatter { .. } => "reduce_scatter",
            Move::AllGather { .. } => "all_gather",
            Move::Broadcast { .. } => "broadcast",
            Move::AllToAll { .. } => "all_to_all",
            Move::Permute { .. } => "permute",
            Move::Slice { .. } => "slice",
            Move::ToPartial { .. } => "to_partial",
        }
    }

    /// Whether it is a move of a value that lies so: what is joined is split by just these axes at its inner end, what is
    /// combined is partial along them, and no axis comes to stand twice.
    pub fn fits(&self, before: &Sharding) -> bool {
        let axes = self.axes();
        let distinct = (1..axes.len()).all(|i| !axes[..i].contains(&axes[i]));
        let has = |dim: &usize| *dim < before.dims.len();
        let inner = |dim: &usize| has(dim) && before.dims[*dim].ends_with(axes);
        let partial = |reduce: &Reduce| axes.iter().all(|a| before.partial.contains(&(*a, *reduce)));
        let free = || axes.iter().all(|a| before.axes().all(|b| b != *a));
        let legal = match self {
            Move::AllReduce { reduce, .. } => partial(reduce),
            Move::ReduceScatter { reduce, dim, .. } => partial(reduce) && has(dim),
            Move::AllGather { dim, .. } | Move::Broadcast { dim, .. } => inner(dim),
            Move::AllToAll { from, to, .. } => inner(from) && has(to) && from != to,
            Move::Permute { to, .. } => to.len() == axes.len() && to.iter().all(|a| axes.contains(a)),
            Move::Slice { dim, .. } => has(dim) && free(),
            Move::ToPartial { .. } => free(),
        };
        distinct && !axes.is_empty() && legal
    }

    /// The sharding after it.
    pub fn after(&self, before: &Sharding) -> Sharding {
        let mut at = before.clone();
        let drop_inner =
            |dims: &mut Axes, axes: &[Axis]| dims.truncate(dims.len().saturating_sub(axes.len()));
        match self {
            Move::AllReduce { axes, .. } => at.partial.retain(|(a, _)| !axes.contains(a)),
            Move::ReduceScatter { axes, dim, .. } => {
                at.partial.retain(|(a, _)| !axes.contains(a));
                at.dims[*dim].extend_from_slice(axes);
            }
            Move::AllGather { axes, dim } | Move::Broadcast { axes, dim } => {
                drop_inner(&mut at.dims[*dim], axes);
            }
            Move::AllToAll { axes, from, to } => {
                drop_inner(&mut at.dims[*from], axes);
                at.dims[*to].extend_from_slice(axes);
            }
            Move::Permute { axes, to } => {
                let renamed = |a: &mut Axis| *a = axes.iter().position(|b| b == a).map_or(*a, |i| to[i]);
                at.dims.iter_mut().flatten().for_each(renamed);
                at.partial.iter_mut().for_each(|(a, _)| renamed(a));
                at.partial.sort();
            }
            Move::Slice { axes, dim } => at.dims[*dim].extend_from_slice(axes),
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
        let inner = match self {
            Move::AllReduce { reduce, .. } | Move::ToPartial { reduce, .. } => {
                format!("{}{axes}", reduce.prefix())
            }
            Move::ReduceScatter { reduce, dim, .. } => format!("{}{axes}, dim {dim}", reduce.prefix()),
            Move::AllGather { dim, .. } | Move::Broadcast { dim, .. } | Move::Slice { dim, .. } => {
                format!("{axes}, dim {dim}")
            }
            Move::AllToAll { from, to, .. } => format!("{axes}, dim {from} to {to}"),
            Move::Permute { to, .. } => format!("{axes} to {}", mesh.show(to)),
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
        let find = |names: &str| -> Result<Vec<Axis>, String> {
            let mut axes = Vec::new();
            for name in names.split('.') {
                let found = mesh.find(name);
                axes.extend(found.ok_or_else(|| format!("the mesh `{mesh}` has no axis `{name}`"))?);
            }
            Ok(axes)
        };
        if name == "permute" {
            let (axes, to) = inner.split_once(" to ").ok_or_else(wrong)?;
            let (axes, to) = (find(axes)?, find(to)?);
            let like = |(a, b): (&Axis, &Axis)| mesh.size(*a) == mesh.size(*b) && to.contains(a);
            if axes.len() != to.len() || !axes.iter().zip(&to).all(like) {
                return Err(format!("`{text}` does not put each axis in the place of one of its size"));
            }
            return Ok(Move::Permute { axes, to });
        }
        let (axes, dim) = match inner.split_once(", dim ") {
            Some((axes, dim)) => (axes, Some(dim)),
            None => (inner, None),
        };
        let (reduce, names) = Reduce::of_prefixed(axes);
        let axes = find(names)?;
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        Ok(match (name, dim) {
            ("all_reduce", None) => Move::AllReduce { axes, reduce },
            ("to_partial", None) if axes.len() == 1 => Move::ToPartial { axis: axes[0], reduce },
            ("reduce_scatter", Some(dim)) => Move::ReduceScatter { axes, reduce, dim: number(dim)? },
            ("all_gather", Some(dim)) => Move::AllGather { axes, dim: number(dim)? },
            ("broadcast", Some(dim)) => Move::Broadcast { axes, dim: number(dim)? },
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
pub fn moves(from: &Sharding, to: &Sharding, mesh: &Mesh) -> Vec<Move> {
    let mut at = from.clone();
    let mut out = Vec::new();
    while let Some(next) = next(&at, to, mesh) {
        at = next.after(&at);
        out.push(next);
    }
    debug_assert_eq!(&at, to, "the moves must arrive");
    out
}

/// The moves of a tensor of this shape: as [`moves`], but where one rank has all there is, it is broadcast and nothing
/// is gathered that would be mostly padding.
pub fn moves_of(shape: &[usize], from: &Sharding, to: &Sharding, mesh: &Mesh) -> Vec<Move> {
    let mut at = from.clone();
    let mut out = moves(from, to, mesh);
    for step in &mut out {
        let next = step.after(&at);
        if let Move::AllGather { axes, dim } = step
            && bound(shape[*dim], &at.dims[*dim], mesh) == bound(shape[*dim], &next.dims[*dim], mesh)
        {
            *step = Move::Broadcast { axes: axes.clone(), dim: *dim };
        }
        at = next;
    }
    out
}

/// Pieces are contiguous only at the inner end of a dimension, so moves happen there.
fn next(at: &Sharding, to: &Sharding, mesh: &Mesh) -> Option<Move> {
    // The axes that `dim` lacks in front of `axis` being the next one, if what it has is a beginning of its goal.
    let wanted =
        |dim: usize| to.dims[dim].starts_with(&at.dims[dim]).then(|| &to.dims[dim][at.dims[dim].len()..]);
    let leaving: Vec<(Axis, Reduce)> =
        at.partial.iter().filter(|p| !to.partial.contains(p)).copied().collect();
    if let Some(&(_, reduce)) = leaving.first() {
        let mine = |a: &Axis| leaving.contains(&(*a, reduce));
        // A block of pairs is not split.
        let blocks = if reduce == Reduce::Top { 2 } else { 0 };
        for dim in 0..at.dims.len().saturating_sub(blocks) {
            let run: Vec<Axis> = wanted(dim).unwrap_or(&[]).iter().copied().take_while(mine).collect();
            if !run.is_empty() {
                return Some(Move::ReduceScatter { axes: run, reduce, dim });
            }
        }
        let axes = leaving.iter().filter(|(_, r)| *r == reduce).map(|(a, _)| *a).collect();
        return Some(Move::AllReduce { axes, reduce });
    }
    if let Some(step) = permute(at, to, mesh) {
        return Some(step);
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

/// Every dimension is in as many pieces as its goal, or as the outer axes of its goal give, but over other axes.
fn permute(at: &Sharding, to: &Sharding, mesh: &Mesh) -> Option<Move> {
    let mut pairs: Vec<(Axis, Axis)> = Vec::new();
    for (have, want) in at.dims.iter().zip(&to.dims) {
        if have.len() > want.len() || have.iter().zip(want).any(|(a, b)| mesh.size(*a) != mesh.size(*b)) {
            return None;
        }
        pairs.extend(have.iter().copied().zip(want.iter().copied()));
    }
    // An axis that is only gained takes the place of the one at the other end of its chain, which is only lost.
    let gained: Vec<Axis> =
        pairs.iter().map(|(_, b)| *b).filter(|b| !pairs.iter().any(|(a, _)| a == b)).collect();
    for end in gained {
        let mut start = end;
        while let Some((a, _)) = pairs.iter().find(|(_, b)| *b == start) {
            start = *a;
        }
        pairs.push((end, start));
    }
    pairs.retain(|(a, b)| a != b);
    pairs.sort();
    let (axes, to) = pairs.into_iter().unzip();
    let step = Move::Permute { axes, to };
    (!step.axes().is_empty()).then_some(step)
}
