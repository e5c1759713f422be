//! Several kernels as one, run block by block: attention, of which no more than a block of the scores is ever there (Dao et
//! al., "FlashAttention", section 3.1).
//!
//! ```text
//! chain [b=8, kv=2, s=64] (f32, f32, f32) -> (f32) {
//!   0, 1 -> i0 contract(0.5) [b=8, s=64, kv=2, e=4, t=64] (f32, f32) -> (f32) [b, s, kv, e], [b, t, kv, e] -> [b, kv, s, t]
//!   i0 -> i1 map [b=8, kv=2, s=64 | t=64] (f32) -> (f32) {
//!     ...
//!   }
//!   i1, 2 -> 0 contract(1.0) [b=8, kv=2, s=64, t=64, e'=4] (f32, f32) -> (f32) [b, kv, s, t], [b, t, kv, e'] -> [b, s, kv, e']
//! }
//! ```

use super::{Access, Body, Kernel, Loop, Map, Step};

/// Maps and contractions one after the other. It means what they mean; but what is between them is nobody else's, and each
/// may run over a block of the shared loops before the next one does.
///
/// Loops of the same name are the same in all of its kernels. Every kernel has the shared loops. What is between has them
/// too, and so has what is written outside, unless a contraction sums over them.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    /// The loops that all kernels share, outermost first. Blocks are of the last; the others run a point at a time.
    pub loops: Vec<Loop>,
    /// The kernels, in order.
    pub links: Vec<Link>,
}

/// A kernel of a chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// A map or a contraction.
    pub kernel: Kernel,
    /// What it reads.
    pub reads: Vec<Operand>,
    /// What it writes.
    pub writes: Vec<Operand>,
}

/// What a kernel of a chain reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// An operand or a result of the chain, by its place.
    Outside(usize),
    /// What one kernel writes and later ones read.
    Between(usize),
}

impl Operand {
    /// Its place outside.
    pub fn outside(self) -> Option<usize> {
        match self {
            Operand::Outside(i) => Some(i),
            Operand::Between(_) => None,
        }
    }

    /// Its number between kernels.
    pub fn between(self) -> Option<usize> {
        match self {
            Operand::Outside(_) => None,
            Operand::Between(i) => Some(i),
        }
    }
}

impl Chain {
    /// How many tensors are between its kernels.
    pub fn between(&self) -> usize {
        self.links
            .iter()
            .flat_map(|l| &l.writes)
            .filter_map(|w| w.between())
            .map(|i| i + 1)
            .max()
            .unwrap_or(0)
    }

    /// All loops: the shared ones, and then those of each kernel that no kernel before it has.
    pub fn all_loops(&self) -> Vec<&Loop> {
        let mut all: Vec<&Loop> = self.loops.iter().collect();
        for l in self.links.iter().flat_map(|link| link.kernel.body.loops()) {
            if !all.iter().any(|known| known.name == l.name) {
                all.push(l);
            }
        }
        all
    }

    /// Whether a map may be in a chain: it loads and stores, and looks nothing up. What it combines over points, it combines
    /// over rows.
    pub fn takes(map: &Map) -> bool {
        map.looked.is_empty() && !map.steps.iter().any(|s| matches!(s, Step::Accumulate { .. }))
    }

    /// Whether one of the shared loops has this name.
    pub fn shares(&self, of: &Loop) -> bool {
        self.loops.iter().any(|l| l.name == of.name)
    }

    /// Whether a contraction sums what it writes over a shared loop, so that each block adds to it.
    pub fn adds(&self, link: &Link) -> bool {
        match &link.kernel.body {
            Body::Contract(c) => {
                let has = |access: &Access, l: usize| access.iter().flatten().any(|x| *x == l);
                (0..c.loops.len()).any(|l| self.shares(&c.loops[l]) && !has(&c.out, l))
            }
            Body::Map(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => false,
        }
    }
}

/// How a kernel indexes one of its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Use<'a> {
    /// Whether it writes it.
    pub written: bool,
    /// Which one.
    pub operand: usize,
    /// For each of its dimensions the loops, outermost first.
    pub dims: Vec<Vec<&'a Loop>>,
}

impl Kernel {
    /// Every use of an operand.
    pub fn uses(&self) -> Vec<Use<'_>> {
        let loops = self.body.loops();
        let one = |(written, operand, access): (bool, usize, &Access)| {
            let dims = access.iter().map(|dim| dim.iter().map(|l| loops[*l]).collect()).collect();
            Use { written, operand, dims }
        };
        match &self.body {
            Body::Map(map) => {
                let reads =
                    map.steps.iter().filter_map(Step::read).map(|(read, access)| (false, read, access));
                let writes =
                    map.steps.iter().filter_map(Step::write).map(|(write, access, _)| (true, write, access));
                reads.chain(writes).map(one).collect()
            }
            Body::Contract(c) => [(false, 0, &c.a), (false, 1, &c.b), (true, 0, &c.out)].map(one).to_vec(),
            Body::Scatter(s) => {
                [(false, 0, &s.source), (false, 1, &s.index), (true, 0, &s.out)].map(one).to_vec()
            }
            Body::TopK(t) => [(false, 0, &t.source), (true, 0, &t.out)].map(one).to_vec(),
            Body::Chain(chain) => chain.links.iter().flat_map(outside).collect(),
        }
    }
}

/// The uses of what is outside of the chain.
fn outside(link: &Link) -> Vec<Use<'_>> {
    let of = |u: Use<'_>| (if u.written { &link.writes } else { &link.reads }).get(u.operand).copied();
    let uses = link.kernel.uses().into_iter();
    uses.filter_map(|u| of(u.clone())?.outside().map(|operand| Use { operand, ..u })).collect()
}
