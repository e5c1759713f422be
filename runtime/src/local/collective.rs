//! A collective of one group, planned: blocks from members to members, cut into shares that any worker can do.
//!
//! Every move is the same: for each member's piece afterwards, which elements of which pieces before go there; of all
//! members' where contributions combine. Pieces are uneven and may be empty.

use std::ops::Range;

use ir::{Axis, DType, Mesh, Move, Reduce};

use super::blocks::{Block, Region, elements};

/// Which members of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// All of them; their pieces are the same there.
    All,
    /// One, by its place in the group.
    One(usize),
}

/// A block, and between whom. From all: combined in the order of the group.
#[derive(Clone, Debug)]
pub struct Part {
    /// Whose elements.
    pub from: Who,
    /// Where to.
    pub to: Who,
    /// Which.
    pub block: Block,
}

/// Some elements of a part: what one worker does at a time.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Which part.
    pub part: usize,
    /// The first element.
    pub start: usize,
    /// Behind the last.
    pub end: usize,
}

/// What one group does.
#[derive(Clone, Debug)]
pub struct Collective {
    /// The field's name for it.
    pub op: &'static str,
    /// Over which axes.
    pub axes: Vec<Axis>,
    /// The bytes that each member sends, and receives, by the least that any algorithm needs: of a ring. A permutation
    /// sends a whole piece, but for members whose piece stays.
    pub wire_bytes: f64,
    /// The ranks, in order.
    pub members: Vec<usize>,
    /// Of the elements.
    pub dtype: DType,
    /// How contributions combine, if they do.
    pub reduce: Option<Reduce>,
    /// How many elements belong together, so that no share cuts them: those of a block of pairs, else one.
    pub unit: usize,
    /// What goes where.
    pub parts: Vec<Part>,
    /// The same, cut.
    pub shares: Vec<Share>,
    /// The full tensor's size, padded to equal pieces.
    pub bytes: usize,
    /// Whether it is better written past the caches.
    pub stream: bool,
}

/// The bytes that a share reads from one member, at the most.
pub const SHARE: usize = 128 << 10;
/// The least that are worth a share, and in how many what is small is cut.
const LEAST: usize = 4 << 10;
const SHARES: usize = 4;
/// From this many bytes written on, the caches would not hold them until they are read.
const STREAM: usize = 16 << 20;

impl Collective {
    /// Plans a move of a group whose members hold these regions before and after it, in shares of so many bytes.
    pub fn new(
        step: &Move,
        mesh: &Mesh,
        members: &[usize],
        dtype: DType,
        before: &[Region],
        after: &[Region],
        share_bytes: usize,
    ) -> Collective {
        let one = |from, to, block: Option<Block>| block.map(|block| Part { from, to, block });
        let n = members.len();
        let (reduce, parts): (Option<Reduce>, Vec<Part>) = match step {
            Move::AllReduce { reduce, .. } => {
                let part = one(Who::All, Who::All, Block::common(&before[0], &after[0]));
                (Some(*reduce), part.into_iter().collect())
            }
            Move::ReduceScatter { reduce, .. } => {
                let part = |r: usize| one(Who::All, Who::One(r), Block::common(&before[0], &after[r]));
                (Some(*reduce), (0..n).filter_map(part).collect())
            }
            Move::AllGather { .. } => {
                let part = |s: usize| one(Who::One(s), Who::All, Block::common(&before[s], &after[0]));
                (None, (0..n).filter_map(part).collect())
            }
            Move::Broadcast { .. } => {
                let part = one(Who::One(0), Who::All, Block::common(&before[0], &after[0]));
                (None, part.into_iter().collect())
            }
            Move::Permute { .. } => {
                let part = |r: usize| {
                    let source = step.source(mesh, members[r]);
                    let s = members.iter().position(|m| *m == source)?;
                    one(Who::One(s), Who::One(r), Block::common(&before[s], &after[r]))
                };
                (None, (0..n).filter_map(part).collect())
            }
            Move::AllToAll { .. } => {
                let part = |i: usize| {
                    let (s, r) = (i / n, i % n);
                    one(Who::One(s), Who::One(r), Block::common(&before[s], &after[r]))
                };
                (None, (0..n * n).filter_map(part).collect())
            }
            // A rank's own affair: a group of one.
            Move::Slice { .. } | Move::ToPartial { .. } => (
                None,
                one(Who::One(0), Who::One(0), Block::common(&before[0], &after[0])).into_iter().collect(),
            ),
        };
        let unit = match reduce {
            Some(Reduce::Top) => before[0].iter().rev().take(2).map(Range::len).product::<usize>().max(1),
            Some(Reduce::Sum | Reduce::Max) | None => 1,
        };
        let bytes = padded(step, before, after) * dtype.bytes();
        let share_bytes = share_bytes.min(LEAST.max(bytes / SHARES));
        let shares = cut(&parts, share_bytes / dtype.bytes() / unit * unit, unit);
        let written: usize = after.iter().map(|r| elements(r)).sum::<usize>() * dtype.bytes();
        let stream = written >= STREAM && n > 1;
        let (op, axes, members) = (step.name(), step.axes().to_vec(), members.to_vec());
        let wire_bytes = wire_bytes(step, n, bytes);
        Collective { op, axes, wire_bytes, members, dtype, reduce, unit, parts, shares, bytes, stream }
    }

    /// Plans a message of a tensor's piece from the first member to the second, over the axis of a pipeline.
    pub fn message(
        axis: Option<Axis>,
        members: &[usize],
        dtype: DType,
        piece: &Region,
        share_bytes: usize,
    ) -> Collective {
        let block = Block::common(piece, piece);
        let part = |block| Part { from: Who::One(0), to: Who::One(1), block };
        let parts: Vec<Part> = block.map(part).into_iter().collect();
        let shares = cut(&parts, share_bytes / dtype.bytes(), 1);
        let bytes = elements(piece) * dtype.bytes();
        let apart = members.first() != members.last();
        Collective {
            op: "send",
            axes: axis.into_iter().collect(),
            wire_bytes: if apart { bytes as f64 } else { 0.0 },
            members: members.to_vec(),
            dtype,
            reduce: None,
            unit: 1,
            parts,
            shares,
            bytes,
            stream: bytes >= STREAM,
        }
    }
}

/// Parts in shares of so many elements, of which as many as `unit` belong together.
fn cut(parts: &[Part], size: usize, unit: usize) -> Vec<Share> {
    let size = size.max(unit);
    let of = |(part, p): (usize, &Part)| {
        let n = p.block.elements();
        let share = move |start| Share { part, start, end: n.min(start + size) };
        (0..n).step_by(size).map(share).collect::<Vec<_>>()
    };
    parts.iter().enumerate().flat_map(of).collect()
}

/// See [`Collective::wire_bytes`].
fn wire_bytes(step: &Move, members: usize, bytes: usize) -> f64 {
    let n = members as f64;
    let once = (n - 1.0) / n * bytes as f64;
    match step {
        Move::AllReduce { .. } => 2.0 * once,
        Move::AllGather { .. } | Move::ReduceScatter { .. } | Move::AllToAll { .. } => once,
        Move::Permute { .. } | Move::Broadcast { .. } if members > 1 => bytes as f64,
        Move::Permute { .. } | Move::Broadcast { .. } => 0.0,
        Move::Slice { .. } | Move::ToPartial { .. } => 0.0,
    }
}

/// The elements of the call's full tensor when every piece is as large as the largest: what a library of collectives,
/// which knows only equal pieces, would be given.
fn padded(step: &Move, before: &[Region], after: &[Region]) -> usize {
    let n = before.len();
    let largest = |pieces: &[Region]| pieces.iter().map(|r| elements(r)).max().unwrap_or(0);
    match step {
        Move::AllReduce { .. } | Move::Slice { .. } | Move::ToPartial { .. } => elements(&before[0]),
        Move::AllGather { .. } => n * largest(before),
        Move::Permute { .. } | Move::Broadcast { .. } => largest(before),
        Move::ReduceScatter { .. } => n * largest(after),
        Move::AllToAll { from, to, .. } => {
            let most = |pieces: &[Region], dim: usize| pieces.iter().map(|r| r[dim].len()).max().unwrap_or(0);
            let others = before[0].iter().enumerate().filter(|(d, _)| d != from && d != to);
            others.map(|(_, r)| r.len()).product::<usize>() * most(before, *from) * n * most(after, *to)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::{Axes, Sharding, extent};

    fn call(mesh: &str, step: &str, shape: &[usize], sharding: &str) -> (usize, f64, usize) {
        let mesh = Mesh::parse(mesh).unwrap();
        let step = Move::parse(step, &mesh).unwrap();
        let from = Sharding::parse(sharding, &mesh).unwrap();
        let to = step.after(&from);
        let members = mesh.group(0, step.axes());
        let regions = |sharding: &Sharding| -> Vec<Region> {
            let region = |r: &usize| {
                let cut = |(n, axes): (&usize, &Axes)| extent(*n, axes, &mesh, &mesh.coordinate(*r));
                shape.iter().zip(&sharding.dims).map(cut).collect()
            };
            members.iter().map(region).collect()
        };
        let c = Collective::new(&step, &mesh, &members, DType::F32, &regions(&from), &regions(&to), SHARE);
        (c.bytes, c.wire_bytes, c.shares.len())
    }

    #[test]
    fn bytes_are_those_of_equal_pieces() {
        assert_eq!(call("a=4", "all_reduce(a)", &[100], "[_] partial(a)"), (400, 600.0, 1));
        assert_eq!(call("a=2", "all_gather(a, dim 0)", &[101, 3], "[a, _]"), (102 * 12, 51.0 * 12.0, 2));
        assert_eq!(call("a=2", "reduce_scatter(a, dim 0)", &[101], "[_] partial(a)"), (408, 204.0, 2));
        // Pieces 2, 2, 1 of 5 rows, and 3, 3, 1 of 7 columns: a buffer of 2 rows and 3 times 3 columns.
        assert_eq!(call("a=3", "all_to_all(a, dim 0 to 1)", &[5, 7], "[a, _]"), (72, 48.0, 9));
        // A share has whole blocks of 3 pairs: 13,500 numbers, though a quarter is 13,501.
        assert_eq!(call("a=2", "all_reduce(top a)", &[9001, 3, 2], "[_, _, _] partial(top a)").2, 5);
        // The piece of each of four ranks; two of them swap theirs.
        assert_eq!(call("a=2,b=2", "permute(a.b to b.a)", &[8, 8], "[a, b]"), (64, 64.0, 4));
        // One rank has the one row, which all get.
        assert_eq!(call("a=4", "broadcast(a, dim 0)", &[1, 5], "[a, _]"), (20, 20.0, 1));
        assert_eq!(call("a=1", "all_reduce(a)", &[8], "[_] partial(a)"), (32, 0.0, 1));
        assert_eq!(call("a=2", "all_reduce(a)", &[0], "[_] partial(a)"), (0, 0.0, 0));
    }
}
