//! Which dimensions are the same one: the dimensions of all values that one factor of a node stands for, united over the
//! graph. An axis that a convention puts on a dimension of an input is known by this wherever that dimension goes.

use ir::{Axis, Graph, Op, Part, Value};

/// The classes of the dimensions of values and of the factors of nodes.
#[derive(Debug)]
pub struct Classes {
    up: Vec<u32>,
    /// The first dimension of each value.
    value: Vec<u32>,
    /// The first factor of each node.
    node: Vec<u32>,
}

impl Classes {
    /// Those of a graph; `through` says which nodes unite what they use and define.
    pub fn of(graph: &Graph, through: impl Fn(usize) -> bool) -> Classes {
        let mut count = 0u32;
        let mut next = |n: usize| {
            count += n as u32;
            count - n as u32
        };
        let value = graph.values.iter().map(|v| next(v.shape.len())).collect();
        let node = graph.nodes.iter().map(|n| next(n.sizes.len())).collect();
        let mut classes = Classes { up: (0..count).collect(), value, node };
        for (i, node) in graph.nodes.iter().enumerate() {
            let reads = node.args.iter().zip(&node.signature.args).filter(|_| through(i));
            for (v, dims) in reads.chain(node.results.iter().zip(&node.signature.results)) {
                for (d, dim) in dims.iter().enumerate() {
                    if let [f] = dim[..] {
                        classes.unite(classes.value[v.index()] + d as u32, classes.node[i] + f as u32);
                    }
                }
            }
        }
        // No class lies above what it was united with, so that one pass leaves each at its root.
        (0..classes.up.len()).for_each(|at| classes.up[at] = classes.up[classes.up[at] as usize]);
        classes
    }

    /// Of the update alone: what a parameter has in common with its moments and its gradient, but with no other.
    pub fn of_update(graph: &Graph) -> Classes {
        let inside = |i: usize| {
            let node = &graph.nodes[i];
            node.mark.part == Part::Update || matches!(node.op, Op::Assign(_))
        };
        Classes::of(graph, inside)
    }

    fn root(&self, mut at: u32) -> u32 {
        while self.up[at as usize] != at {
            at = self.up[at as usize];
        }
        at
    }

    fn unite(&mut self, a: u32, b: u32) {
        let (a, b) = (self.root(a), self.root(b));
        let (low, high) = (a.min(b), a.max(b));
        self.up[high as usize] = low;
    }

    /// The class of a dimension.
    pub fn of_value(&self, value: Value, dim: usize) -> u32 {
        self.root(self.value[value.index()] + dim as u32)
    }

    /// The class of a factor of node `i`.
    pub fn of_factor(&self, i: usize, factor: usize) -> u32 {
        self.root(self.node[i] + factor as u32)
    }
}

/// Classes on which an axis lies somewhere.
pub type Placed = rustc_hash::FxHashSet<(u32, Axis)>;
