//! Random choices by name: what one says does not depend on how many were made before, nor on candidates that were not
//! chosen. So a graph changes little when a node is taken away.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The choices of one node.
#[derive(Clone, Debug)]
pub struct Dice {
    seed: u64,
}

impl Dice {
    /// The choices of what `name` says in the graph of a seed.
    pub fn new(seed: u64, name: &str) -> Dice {
        Dice { seed: hash(&(seed, name)) }
    }

    /// In `0..n`.
    pub fn below(&self, what: &str, n: usize) -> usize {
        (hash(&(self.seed, what)) % n as u64) as usize
    }

    /// True in so many of a hundred cases.
    pub fn chance(&self, what: &str, percent: usize) -> bool {
        self.below(what, 100) < percent
    }

    /// One of several, each with a name of its own.
    pub fn pick<T: Clone>(&self, what: &str, of: &[T], name: impl Fn(&T) -> String) -> Option<T> {
        self.order(what, of.to_vec(), name).into_iter().next()
    }

    /// In another order.
    pub fn order<T>(&self, what: &str, mut of: Vec<T>, name: impl Fn(&T) -> String) -> Vec<T> {
        of.sort_by_key(|x| hash(&(self.seed, what, name(x))));
        of
    }

    /// Names in another order.
    pub fn names(&self, what: &str, of: Vec<String>) -> Vec<String> {
        self.order(what, of, String::clone)
    }

    /// Those names that chance keeps.
    pub fn some(&self, what: &str, of: &[String], percent: usize) -> Vec<String> {
        of.iter().filter(|n| self.chance(&format!("{what} {n}"), percent)).cloned().collect()
    }
}

/// The same on every run and machine: the hasher has fixed keys.
fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}
