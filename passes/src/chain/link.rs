//! Kernels as the links of a chain: which loops are the same, and which all of them share.

use std::sync::Arc;

use ir::kernel::{Access, Body, Chain, Contract, Kernel, Link, Loop, Map, Operand, Step};
use ir::program::{BufferId, Buffers, Instruction};
use ir::{DType, Name};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Flow;

/// A chain that is possible, with its buffers.
pub(super) struct Chained {
    chain: Chain,
    reads: Vec<(BufferId, DType)>,
    writes: Vec<(BufferId, DType)>,
}

impl Chained {
    /// The loops that its kernels share.
    pub fn shared(&self) -> &[Loop] {
        &self.chain.loops
    }

    /// A launch of it, by one of the kernels that are known, if one is the same.
    pub fn launch(self, known: &mut Vec<Arc<Kernel>>) -> Instruction {
        let (reads, read_types): (Buffers, Vec<DType>) = self.reads.into_iter().unzip();
        let (writes, write_types): (Buffers, Vec<DType>) = self.writes.into_iter().unzip();
        let kernel = Kernel { reads: read_types, writes: write_types, body: Body::Chain(self.chain) };
        let like = known.iter().find(|k| ***k == kernel).map(Arc::clone);
        let kernel = like.unwrap_or_else(|| {
            known.push(Arc::new(kernel));
            Arc::clone(&known[known.len() - 1])
        });
        Instruction::Launch { kernel, reads, writes }
    }
}

/// A launch that may be a link.
struct Member<'a> {
    kernel: &'a Kernel,
    reads: &'a [BufferId],
    writes: &'a [BufferId],
    /// Its loops, as far as they are its own.
    loops: &'a [Loop],
    /// The number of its first loop among those of all members.
    first: usize,
}

impl Member<'_> {
    /// The accesses of a buffer, by loops among those of all members.
    fn accesses(&self, buffer: BufferId) -> Vec<Vec<Vec<usize>>> {
        let own = |access: &Access| -> Vec<Vec<usize>> {
            access.iter().map(|dim| dim.iter().map(|l| self.first + l).collect()).collect()
        };
        let read = |i: usize| self.reads.get(i) == Some(&buffer);
        let written = |i: usize| self.writes.get(i) == Some(&buffer);
        match &self.kernel.body {
            Body::Map(map) => {
                let reads = map.steps.iter().filter_map(Step::read).filter(|(i, _)| read(*i));
                let writes = map.steps.iter().filter_map(Step::write).filter(|(i, ..)| written(*i));
                reads.map(|(_, a)| own(a)).chain(writes.map(|(_, a, _)| own(a))).collect()
            }
            Body::Contract(c) => {
                let reads =
                    [&c.a, &c.b].into_iter().enumerate().filter(|(i, _)| read(*i)).map(|(_, a)| own(a));
                reads.chain(written(0).then(|| own(&c.out))).collect()
            }
            Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => Vec::new(),
        }
    }
}

/// The chain of these launches; none if one of them does not fit, or they share no loop that blocks can be of.
pub(super) fn chain(flow: &Flow, members: &FxHashSet<usize>) -> Option<Chained> {
    let mut order: Vec<usize> = members.iter().copied().collect();
    order.sort_unstable();
    let mut first = 0;
    let members_of: Option<Vec<Member>> = order
        .iter()
        .map(|i| {
            let Instruction::Launch { kernel, reads, writes } = &flow.instructions[*i] else { return None };
            let loops = plain(kernel)?;
            first += loops.len();
            Some(Member { kernel, reads, writes, loops, first: first - loops.len() })
        })
        .collect();
    let all = members_of?;
    let written: FxHashSet<BufferId> = all.iter().flat_map(|m| m.writes).copied().collect();
    let inside = |b: &BufferId| written.contains(b) && flow.private(*b, members);
    // What one member makes and another reads is between them alone.
    if all.iter().flat_map(|m| m.reads).any(|b| written.contains(b) && !inside(b)) {
        return None;
    }
    let same = Same::of(&all, &inside)?;
    let shared = shared(&all, &same, &inside)?;
    let names = same.names(&all);
    let named = |m: &Member| {
        let mut kernel = m.kernel.clone();
        let loops = match &mut kernel.body {
            Body::Map(Map { loops, .. }) | Body::Contract(Contract { loops, .. }) => loops,
            Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => return kernel,
        };
        loops.iter_mut().enumerate().for_each(|(l, of)| of.name = names[&same.class(m.first + l)].clone());
        kernel
    };
    let mut out = Chained {
        chain: Chain { loops: Vec::new(), links: Vec::new() },
        reads: Vec::new(),
        writes: Vec::new(),
    };
    for class in shared {
        let (m, l) = all.iter().find_map(|m| Some((m, same.own(m, class)?)))?;
        out.chain.loops.push(Loop { name: names[&class].clone(), ..m.loops[l].clone() });
    }
    let mut between: Vec<BufferId> = Vec::new();
    for m in &all {
        let mut operand = |b: &BufferId, dtype: &DType, outside: &mut Vec<(BufferId, DType)>| {
            let (list, is) = match inside(b) {
                true => (between.iter().position(|x| x == b), true),
                false => (outside.iter().position(|(x, _)| x == b), false),
            };
            match (list, is) {
                (Some(i), true) => Operand::Between(i),
                (Some(i), false) => Operand::Outside(i),
                (None, true) => {
                    between.push(*b);
                    Operand::Between(between.len() - 1)
                }
                (None, false) => {
                    outside.push((*b, *dtype));
                    Operand::Outside(outside.len() - 1)
                }
            }
        };
        let reads = m.reads.iter().zip(&m.kernel.reads).map(|(b, t)| operand(b, t, &mut out.reads)).collect();
        let writes =
            m.writes.iter().zip(&m.kernel.writes).map(|(b, t)| operand(b, t, &mut out.writes)).collect();
        out.chain.links.push(Link { kernel: named(m), reads, writes });
    }
    Some(out)
}

/// The loops of a kernel that may be a link.
fn plain(kernel: &Kernel) -> Option<&[Loop]> {
    match &kernel.body {
        Body::Map(map) => Chain::takes(map).then_some(&map.loops),
        Body::Contract(c) => Some(&c.loops),
        Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => None,
    }
}

/// Which loops of all members are the same: those that index the same dimension of what is between them.
struct Same {
    class: Vec<usize>,
}

impl Same {
    /// None if two loops of one member were the same, or two that are differ.
    fn of(all: &[Member], inside: &dyn Fn(&BufferId) -> bool) -> Option<Same> {
        let loops: Vec<&Loop> = all.iter().flat_map(|m| m.loops).collect();
        let mut same = Same { class: (0..loops.len()).collect() };
        let buffers: FxHashSet<BufferId> =
            all.iter().flat_map(|m| m.writes).copied().filter(|b| inside(b)).collect();
        let mut buffers: Vec<BufferId> = buffers.into_iter().collect();
        buffers.sort_unstable();
        for b in buffers {
            let mut accesses = all.iter().flat_map(|m| m.accesses(b));
            let one = accesses.next()?;
            for other in accesses {
                for (x, y) in one.iter().zip(&other) {
                    let ([x], [y]) = (&x[..], &y[..]) else { return None };
                    same.join(*x, *y);
                }
            }
        }
        if !same.holds(all, &loops) {
            return None;
        }
        // So are those of what contractions read of others, as far as that works: names are then as one wrote them.
        let contraction = |m: &&Member| matches!(m.kernel.body, Body::Contract(_));
        let mut read: Vec<BufferId> = all.iter().filter(contraction).flat_map(|m| m.reads).copied().collect();
        read.sort_unstable();
        read.dedup();
        for b in read.into_iter().filter(|b| !inside(b)) {
            let mut accesses = all.iter().filter(contraction).flat_map(|m| m.accesses(b));
            let Some(one) = accesses.next() else { continue };
            for other in accesses {
                let mut joined = Same { class: same.class.clone() };
                one.iter().flatten().zip(other.iter().flatten()).for_each(|(x, y)| joined.join(*x, *y));
                if joined.holds(all, &loops) {
                    same = joined;
                }
            }
        }
        Some(same)
    }

    /// Whether loops that are the same are alike, and no two of one member are.
    fn holds(&self, all: &[Member], loops: &[&Loop]) -> bool {
        let alike = |l: usize| {
            let like = loops[self.class(l)];
            (loops[l].size, &loops[l].axes) == (like.size, &like.axes)
        };
        let apart = |m: &Member| {
            let own: FxHashSet<usize> = (0..m.loops.len()).map(|l| self.class(m.first + l)).collect();
            own.len() == m.loops.len()
        };
        (0..loops.len()).all(alike) && all.iter().all(apart)
    }

    fn class(&self, mut l: usize) -> usize {
        while self.class[l] != l {
            l = self.class[l];
        }
        l
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.class(a), self.class(b));
        self.class[a.max(b)] = a.min(b);
    }

    /// A member's own loop of a class.
    fn own(&self, m: &Member, class: usize) -> Option<usize> {
        (0..m.loops.len()).find(|l| self.class(m.first + l) == class)
    }

    /// A name for each class, all different.
    fn names(&self, all: &[Member]) -> FxHashMap<usize, Name> {
        let mut names: FxHashMap<usize, Name> = FxHashMap::default();
        for m in all {
            for (l, of) in m.loops.iter().enumerate() {
                let class = self.class(m.first + l);
                if names.contains_key(&class) {
                    continue;
                }
                let mut name = of.name.to_string();
                while names.values().any(|n| **n == name) {
                    name.push('\'');
                }
                names.insert(class, name.into());
            }
        }
        names
    }
}

/// The classes that all members share and that none of them reduces into what is between them, outermost first; the last is
/// the longest that some contraction lacks an operand of, but for the innermost of what is between them: it is read in
/// whole rows.
fn shared(all: &[Member], same: &Same, inside: &dyn Fn(&BufferId) -> bool) -> Option<Vec<usize>> {
    let between: Vec<BufferId> = all.iter().flat_map(|m| m.writes).copied().filter(inside).collect();
    let access = |b: BufferId| all.iter().flat_map(|m| m.accesses(b)).next();
    // The first of those with the most dimensions: the scores.
    let all_accesses: Vec<Vec<Vec<usize>>> = between.iter().filter_map(|b| access(*b)).collect();
    let most = all_accesses.iter().map(Vec::len).max()?;
    let scores = all_accesses.iter().find(|a| a.len() == most)?;
    let classes: Vec<usize> = scores.iter().flatten().map(|l| same.class(*l)).collect();
    let (innermost, outer) = classes.split_last()?;
    let everywhere = |class: &usize| {
        let has = |dims: &Vec<Vec<usize>>| dims.iter().flatten().any(|l| same.class(*l) == *class);
        all.iter().all(|m| same.own(m, *class).is_some_and(|l| !reduces(m, l)))
            && all_accesses.iter().all(has)
    };
    let mut shared: Vec<usize> =
        outer.iter().filter(|c| *c != innermost).filter(|c| everywhere(c)).copied().collect();
    // A loop of all operands is a batch of products: blocks of it would be whole products.
    let batch = |class: usize| {
        all.iter().all(|m| match &m.kernel.body {
            Body::Contract(c) => same.own(m, class).is_some_and(|own| {
                [&c.a, &c.b, &c.out].iter().all(|access| access.iter().flatten().any(|l| *l == own))
            }),
            Body::Map(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => true,
        })
    };
    let size = |class: usize| all.iter().find_map(|m| Some(m.loops[same.own(m, class)?].size)).unwrap_or(0);
    let cut = (0..shared.len()).filter(|i| !batch(shared[*i])).max_by_key(|i| size(shared[*i]))?;
    let cut = shared.remove(cut);
    shared.push(cut);
    Some(shared)
}

/// Whether a map combines over a loop.
fn reduces(m: &Member, l: usize) -> bool {
    match &m.kernel.body {
        Body::Map(map) => {
            let in_row = l >= map.loops.len() - map.row;
            let lacks = |access: &Access| !access.iter().flatten().any(|x| *x == l);
            map.steps.iter().any(|step| {
                matches!(step, Step::Row(..)) && in_row
                    || step.write().is_some_and(|(_, access, _)| lacks(access))
            })
        }
        Body::Contract(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => false,
    }
}
