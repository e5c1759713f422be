//! Which nodes are alike, so that their ways are listed once: by numbers, since they are asked for of every node.

use std::borrow::Borrow;
use std::hash::Hash;
use std::mem::{Discriminant, discriminant};

use ir::{DType, Node, Op};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// What the ways of a node depend on.
pub(super) type Key = (Does, usize, SmallVec<[usize; 4]>, SmallVec<[DType; 8]>, usize, Flags, Option<usize>);

/// Of factors and values.
pub(super) type Flags = SmallVec<[bool; 16]>;

/// What an op does, its number if it has one, and how many results it has. The name of a state matters as little as what
/// is drawn.
type Does = (Discriminant<Op>, u64, usize);

pub(super) fn does(node: &Node) -> Does {
    (discriminant(&node.op), node.op.number(), node.results.len())
}

/// Things with numbers, equal ones with the same.
#[derive(Debug)]
pub(super) struct Numbers<T>(FxHashMap<T, usize>);

impl<T> Default for Numbers<T> {
    fn default() -> Numbers<T> {
        Numbers(FxHashMap::default())
    }
}

impl<T: Eq + Hash> Numbers<T> {
    /// The number of a thing.
    pub(super) fn of<Q: Eq + Hash + ToOwned<Owned = T> + ?Sized>(&mut self, thing: &Q) -> usize
    where
        T: Borrow<Q>,
    {
        match self.0.get(thing) {
            Some(number) => *number,
            None => {
                self.0.insert(thing.to_owned(), self.0.len());
                self.0.len() - 1
            }
        }
    }
}
