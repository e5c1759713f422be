//! What one call of a group does: a collective, or several that are started and waited for as one.

use super::code::Place;
use super::collective::{Collective, Share};

/// A collective of a bucket, and where its tensor lies on every member.
#[derive(Clone, Debug)]
pub struct Moved {
    /// What is done.
    pub collective: Collective,
    /// The piece before: of each member, or one place for all.
    pub from: Vec<Place>,
    /// The piece after.
    pub to: Vec<Place>,
}

/// What one group does in one call.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// At least one; all the same collective of the same members.
    pub moved: Vec<Moved>,
    /// All shares, with the tensor that each is of.
    pub shares: Vec<(usize, Share)>,
    /// The sum of the full tensors' sizes, each padded to equal pieces.
    pub bytes: usize,
}

impl Bucket {
    /// Of these.
    pub fn new(moved: Vec<Moved>) -> Bucket {
        let of =
            |(i, m): (usize, &Moved)| m.collective.shares.iter().map(move |s| (i, *s)).collect::<Vec<_>>();
        let shares = moved.iter().enumerate().flat_map(of).collect();
        let bytes = moved.iter().map(|m| m.collective.bytes).sum();
        Bucket { moved, shares, bytes }
    }

    /// The first collective: what all have in common.
    pub fn first(&self) -> &Collective {
        &self.moved[0].collective
    }

    /// The bytes that each member sends in the call.
    pub fn wire_bytes(&self) -> f64 {
        self.moved.iter().map(|m| m.collective.wire_bytes).fold(0.0, |a, b| a + b)
    }
}
