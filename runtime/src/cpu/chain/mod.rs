//! Chains: each kernel in turn over a block of the shared loops, with what is between them in scratch.
//!
//! ```text
//! for each point of the shared loops but the last      a batch row and a head
//!   for each block of the last                         some queries
//!     which keys count at all                          keys.rs
//!     for each kernel: run it over the block           block.rs
//! ```

mod block;
mod keys;

use std::ops::Range;

use ir::DType;
use ir::kernel::{Access, Body, Chain, Kernel, Link, Loop, Map, Operand, Step};
use smallvec::SmallVec;

use super::convert;
use super::lanes::best;
use super::layout::{Extents, Walk, count, strides};
use keys::Keys;

/// The most rows of a block, and the bytes that what is between kernels should take at most: half of a second cache.
const ROWS: usize = 64;
const BETWEEN: usize = 1 << 20;
/// Rows of a block are a multiple of this, as rows of products are.
const STEP: usize = 16;

/// Keys are counted in at least so many.
const KEYS: usize = 64;
/// There are at most so many plans for different numbers of keys.
const PLANS: usize = 32;

/// A chain, planned for one rank.
pub struct Plan {
    /// How long the shared loops are, but the last, and how many of the first all sums have.
    around: Vec<usize>,
    outer: usize,
    /// How long the last shared loop is, and its blocks.
    cut: usize,
    rows: usize,
    /// Which keys count, and how many there are.
    keys: Option<Keys>,
    all_keys: usize,
    granule: usize,
    links: Vec<Placed>,
    /// By whether the block is the short last one, then by number of granules of keys, then by kernel.
    blocks: [Vec<Vec<block::Block>>; 2],
    sums: Vec<Sum>,
    /// Results in f32 that blocks add to: which, and how many elements they have.
    zeroed: Vec<(usize, usize)>,
    /// Where the scratch of keys and of kernels starts, and how long all of it is.
    keys_at: usize,
    kernels_at: usize,
    bytes: usize,
    flops: f64,
}

/// A kernel of the chain with its operands.
struct Placed {
    reads: Vec<At>,
    writes: Vec<At>,
    /// For each of its loops where it is found.
    loops: Vec<Along>,
    adds: bool,
}

/// What a loop of a kernel is to the chain.
#[derive(Clone, Copy, PartialEq)]
enum Along {
    /// A shared loop.
    Shared(usize),
    /// That of the keys.
    Keys,
    /// A loop of its own.
    Own,
}

/// Where an operand lies.
struct At {
    base: Base,
    /// Bytes from one to the next along each shared loop, and along the keys.
    shared: SmallVec<[usize; 4]>,
    keys: usize,
}

#[derive(Clone, Copy)]
enum Base {
    Outside(usize),
    /// In the scratch, at this byte.
    Scratch(usize),
}

/// A result that is no f32, summed in scratch before it is rounded.
struct Sum {
    write: usize,
    dtype: DType,
    at: usize,
    count: usize,
    /// Bytes from one to the next of the result along each of the outer loops.
    outer: Vec<usize>,
    /// The elements of the result in the order of the sums.
    walk: Walk,
}

/// Where the kernels of one block are.
#[derive(Clone)]
struct Spot {
    /// The index along each shared loop, and the first key.
    shared: SmallVec<[usize; 4]>,
    key: usize,
}

/// Plans a chain for the rank at `at`.
pub fn plan(chain: &Chain, kernel: &Kernel, mesh: &ir::Mesh, at: &[usize]) -> Plan {
    let links: Vec<Link> = chain.links.iter().map(separated).collect();
    let local = |l: &Loop| ir::extent(l.size, &l.axes, mesh, at);
    let lens: Vec<usize> = chain.loops.iter().map(|l| local(l).len()).collect();
    let (around, cut) = match lens.split_last() {
        Some((cut, around)) => (around.to_vec(), *cut),
        None => (Vec::new(), 1),
    };
    let keys = keys::find(chain, &links);
    let all_keys = keys.as_ref().map_or(0, |k| local(&k.along).len());
    let granule = KEYS.max(all_keys.div_ceil(PLANS).next_multiple_of(KEYS));
    let outer = outer(chain, &links);
    let builder = Builder { chain, links: &links, keys: keys.as_ref(), outer, local: &local, mesh, at };
    let rows = builder.rows(cut);
    let mut bytes = 0;
    let mut take = |n: usize| {
        let offset = bytes;
        bytes += n.next_multiple_of(64);
        offset
    };
    let between: Vec<usize> =
        builder.between_bytes(rows.min(cut), all_keys).into_iter().map(&mut take).collect();
    let (sums, zeroed) = builder.sums(kernel, &mut take);
    let keys_at = take(4 * (rows + all_keys));
    let kernels_at = take(0);
    let placed = builder.placed(&between, &sums);
    let each = |rows: usize| -> Vec<Vec<block::Block>> {
        let counts: Vec<usize> = match all_keys {
            0 => vec![0],
            n => (1..=n.div_ceil(granule)).map(|i| (i * granule).min(n)).collect(),
        };
        let one = |keys: usize| -> Vec<block::Block> {
            (0..links.len()).map(|i| builder.block(i, rows, keys)).collect()
        };
        if rows == 0 { Vec::new() } else { counts.into_iter().map(one).collect() }
    };
    let blocks = [each(rows.min(cut)), each(cut % rows)];
    let scratch = blocks.iter().flatten().flatten().map(block::Block::scratch_bytes).max().unwrap_or(0);
    take(scratch);
    let whole = |blocks: &[Vec<block::Block>]| {
        blocks.last().map_or(0.0, |all| all.iter().map(block::Block::flops).sum())
    };
    let points: f64 = around.iter().map(|n| *n as f64).product();
    let flops = points * ((cut / rows) as f64 * whole(&blocks[0]) + whole(&blocks[1]));
    Plan {
        around,
        outer,
        cut,
        rows,
        keys,
        all_keys,
        granule,
        links: placed,
        blocks,
        sums,
        zeroed,
        keys_at,
        kernels_at,
        bytes,
        flops,
    }
}

/// How many of the first shared loops index all results that blocks add to.
fn outer(chain: &Chain, links: &[Link]) -> usize {
    let around = chain.loops.len().saturating_sub(1);
    let indexed = |l: &Loop| {
        let adding = links.iter().filter(|link| chain.adds(link));
        adding.flat_map(|link| link.kernel.uses()).filter(|u| u.written).all(|u| has(&u.dims, l))
    };
    chain.loops[..around].iter().take_while(|l| indexed(l)).count()
}

fn has(dims: &[Vec<&Loop>], l: &Loop) -> bool {
    dims.iter().flatten().any(|k| k.name == l.name)
}

/// The link with an operand for each way in which it reads one.
fn separated(link: &Link) -> Link {
    let Body::Map(map) = &link.kernel.body else { return link.clone() };
    let mut ways: Vec<(usize, &Access)> = Vec::new();
    let mut steps = map.steps.clone();
    for (step, new) in map.steps.iter().zip(&mut steps) {
        if let (Some(way), Step::Load { read, .. }) = (step.load(), new) {
            *read = ways.iter().position(|w| *w == way).unwrap_or_else(|| {
                ways.push(way);
                ways.len() - 1
            });
        }
    }
    let reads = ways.iter().map(|(read, _)| link.reads[*read]).collect();
    let types = ways.iter().map(|(read, _)| link.kernel.reads[*read]).collect();
    let body = Body::Map(Map { steps, ..map.clone() });
    Link { kernel: Kernel { reads: types, writes: link.kernel.writes.clone(), body }, reads, ..link.clone() }
}

/// The loop of which keys may be left out, and by how many rules.
#[cfg(test)]
pub fn left_out(chain: &Chain) -> Option<(String, usize)> {
    let links: Vec<Link> = chain.links.iter().map(separated).collect();
    keys::find(chain, &links).map(|keys| (keys.along.name.to_string(), keys.rules()))
}

struct Builder<'a> {
    chain: &'a Chain,
    links: &'a [Link],
    keys: Option<&'a Keys>,
    outer: usize,
    local: &'a dyn Fn(&Loop) -> Range<usize>,
    mesh: &'a ir::Mesh,
    at: &'a [usize],
}

impl Builder<'_> {
    fn along(&self, l: &Loop) -> Along {
        match self.chain.loops.iter().position(|shared| shared.name == l.name) {
            Some(i) => Along::Shared(i),
            None if self.keys.is_some_and(|k| k.along.name == l.name) => Along::Keys,
            None => Along::Own,
        }
    }

    /// How long a loop is in a block.
    fn len(&self, l: &Loop, rows: usize, keys: usize) -> usize {
        match self.along(l) {
            Along::Shared(i) if i + 1 == self.chain.loops.len() => rows,
            Along::Shared(_) => 1,
            Along::Keys => keys,
            Along::Own => (self.local)(l).len(),
        }
    }

    /// The bytes of what is between kernels in a block, by its number.
    fn between_bytes(&self, rows: usize, keys: usize) -> Vec<usize> {
        let mut bytes = vec![0; self.chain.between()];
        for link in self.links {
            for u in link.kernel.uses().into_iter().filter(|u| u.written) {
                if let Some(i) = link.writes[u.operand].between() {
                    let n: usize = u.dims.iter().flatten().map(|l| self.len(l, rows, keys)).product();
                    bytes[i] = n * link.kernel.writes[u.operand].bytes();
                }
            }
        }
        bytes
    }

    /// Rows of a block.
    fn rows(&self, cut: usize) -> usize {
        let keys = self.keys.map_or(0, |k| (self.local)(&k.along).len());
        let row: usize = self.between_bytes(1, keys).into_iter().sum();
        let most = (BETWEEN / row.max(1) / STEP * STEP).clamp(STEP, ROWS);
        // All blocks about alike.
        let blocks = cut.div_ceil(most).max(1);
        cut.div_ceil(blocks).next_multiple_of(STEP).min(cut.max(1))
    }

    /// How long results that are summed are in memory along the loops of a link.
    fn sum_lens(&self, loops: &[&Loop]) -> Vec<usize> {
        let one = |l: &&Loop| match self.along(l) {
            Along::Shared(i) if i < self.outer => 1,
            Along::Shared(_) | Along::Keys | Along::Own => (self.local)(l).len(),
        };
        loops.iter().map(one).collect()
    }

    /// Results that blocks add to: those that are summed in scratch, and those in f32 with how many elements they have.
    fn sums(&self, kernel: &Kernel, take: &mut dyn FnMut(usize) -> usize) -> (Vec<Sum>, Vec<(usize, usize)>) {
        let (mut sums, mut zeroed) = (Vec::new(), Vec::new());
        for link in self.links.iter().filter(|link| self.chain.adds(link)) {
            let (Body::Contract(c), Some(write)) = (&link.kernel.body, link.writes[0].outside()) else {
                continue;
            };
            let loops: Vec<&Loop> = c.loops.iter().collect();
            let lens: Vec<usize> = loops.iter().map(|l| (self.local)(l).len()).collect();
            let dtype = kernel.writes[write];
            if dtype == DType::F32 {
                zeroed.push((write, count(&c.out, &lens)));
                continue;
            }
            let summed = self.sum_lens(&loops);
            let order: Vec<usize> = c.out.iter().flatten().copied().collect();
            let far = strides(&c.out, &lens);
            let pick = |of: &[usize]| -> Vec<usize> { order.iter().map(|l| of[*l]).collect() };
            let outer = self.chain.loops[..self.outer].iter().map(|shared| {
                let own = loops.iter().position(|l| l.name == shared.name);
                own.map_or(0, |l| far[l] * dtype.bytes())
            });
            let count = count(&c.out, &summed);
            sums.push(Sum {
                write,
                dtype,
                at: take(4 * count),
                count,
                outer: outer.collect(),
                walk: Walk::new(&pick(&summed), &pick(&far)),
            });
        }
        (sums, zeroed)
    }

    /// Where the operands of each kernel lie.
    fn placed(&self, between: &[usize], sums: &[Sum]) -> Vec<Placed> {
        let one = |link: &Link| {
            let loops = link.kernel.body.loops();
            let lens: Vec<usize> = loops.iter().map(|l| (self.local)(l).len()).collect();
            let adds = self.chain.adds(link);
            let at = |operand: Operand, dtype: DType, dims: Option<&Vec<Vec<&Loop>>>, written: bool| {
                let access: Access = dims.map_or(Vec::new(), |dims| by_place(dims, &loops));
                let sum = sums.iter().find(|s| written && adds && operand.outside() == Some(s.write));
                let (base, far, size) = match (operand, sum) {
                    (_, Some(sum)) => (Base::Scratch(sum.at), strides(&access, &self.sum_lens(&loops)), 4),
                    (Operand::Outside(i), None) => (Base::Outside(i), strides(&access, &lens), dtype.bytes()),
                    // A block starts where it starts.
                    (Operand::Between(i), None) => (Base::Scratch(between[i]), vec![0; loops.len()], 0),
                };
                let along = |which: Along| {
                    let own = (0..loops.len()).find(|l| self.along(loops[*l]) == which);
                    own.map_or(0, |l| far[l] * size)
                };
                // In scratch the outer loops have one place.
                let shared = (0..self.chain.loops.len())
                    .map(|i| if sum.is_some() && i < self.outer { 0 } else { along(Along::Shared(i)) });
                At { base, shared: shared.collect(), keys: along(Along::Keys) }
            };
            let uses = link.kernel.uses();
            let dims =
                |i: usize, w: bool| uses.iter().find(|u| u.written == w && u.operand == i).map(|u| &u.dims);
            let reads = link.reads.iter().zip(&link.kernel.reads).enumerate();
            let writes = link.writes.iter().zip(&link.kernel.writes).enumerate();
            Placed {
                reads: reads.map(|(i, (o, t))| at(*o, *t, dims(i, false), false)).collect(),
                writes: writes.map(|(i, (o, t))| at(*o, *t, dims(i, true), true)).collect(),
                loops: loops.iter().map(|l| self.along(l)).collect(),
                adds,
            }
        };
        self.links.iter().map(one).collect()
    }

    /// A kernel over a block of so many rows and keys.
    fn block(&self, i: usize, rows: usize, keys: usize) -> block::Block {
        let link = &self.links[i];
        let mut extents = Extents::whole(&link.kernel, self.mesh, self.at);
        let loops = link.kernel.body.loops();
        let block: Vec<usize> = loops.iter().map(|l| self.len(l, rows, keys)).collect();
        for (range, len) in extents.ranges.iter_mut().zip(&block) {
            range.end = range.start + len;
        }
        let mut types = link.kernel.writes.clone();
        for (operand, lies) in link.reads.iter().zip(&mut extents.reads) {
            if operand.between().is_some() {
                lies.clone_from(&block);
            }
        }
        for ((operand, lies), dtype) in link.writes.iter().zip(&mut extents.writes).zip(&mut types) {
            if operand.between().is_some() {
                lies.clone_from(&block);
            } else if self.chain.adds(link) {
                if *dtype != DType::F32 {
                    *lies = self.sum_lens(&loops);
                }
                *dtype = DType::F32;
            }
        }
        let kernel = Kernel { writes: types, ..link.kernel.clone() };
        block::plan(&kernel, &extents)
    }
}

/// An access by the places of its loops.
fn by_place(dims: &[Vec<&Loop>], loops: &[&Loop]) -> Access {
    let place = |l: &&Loop| loops.iter().position(|k| k.name == l.name);
    dims.iter().map(|dim| dim.iter().filter_map(place).collect()).collect()
}

impl At {
    /// How many bytes behind its base it is.
    fn offset(&self, spot: &Spot) -> usize {
        self.shared.iter().zip(&spot.shared).map(|(s, i)| s * i).sum::<usize>() + self.keys * spot.key
    }
}

impl Plan {
    /// How many bytes of scratch a run needs.
    pub fn scratch_bytes(&self) -> usize {
        self.bytes
    }

    /// Operations on numbers, of all keys.
    pub fn flops(&self) -> f64 {
        self.flops
    }

    /// Runs it.
    ///
    /// # Safety
    /// As for `Compiled::run`; the scratch has [`Plan::scratch_bytes`] and is aligned to 64 bytes.
    pub unsafe fn run(&self, reads: &[*const u8], writes: &[*mut u8], scratch: *mut u8) {
        let (outer, inner) = self.around.split_at(self.outer);
        let mut spot = Spot { shared: SmallVec::from_elem(0, self.around.len() + 1), key: 0 };
        // SAFETY: the caller's; offsets are of elements on this rank, or in the scratch as it was taken.
        unsafe {
            for (write, count) in &self.zeroed {
                std::slice::from_raw_parts_mut(writes[*write].cast::<f32>(), *count).fill(0.0);
            }
            for o in 0..outer.iter().product::<usize>() {
                at_point(o, outer, &mut spot.shared);
                for sum in &self.sums {
                    let at = scratch.add(sum.at).cast::<f32>();
                    std::slice::from_raw_parts_mut(at, sum.count).fill(0.0);
                }
                for i in 0..inner.iter().product::<usize>() {
                    at_point(i, inner, &mut spot.shared[self.outer..]);
                    for start in (0..self.cut).step_by(self.rows) {
                        spot.shared[self.around.len()] = start;
                        self.block(&mut spot, reads, writes, scratch);
                    }
                }
                for sum in &self.sums {
                    let offset: usize = sum.outer.iter().zip(&spot.shared).map(|(s, i)| s * i).sum();
                    let (to, from) = (writes[sum.write].add(offset), scratch.add(sum.at).cast::<f32>());
                    sum.walk.runs(0, sum.count, |done, points, offset, stride| {
                        let to = to.add(offset * sum.dtype.bytes());
                        convert::store(best(), sum.dtype, to, from.add(done), points, stride);
                    });
                }
            }
        }
    }

    unsafe fn block(&self, spot: &mut Spot, reads: &[*const u8], writes: &[*mut u8], scratch: *mut u8) {
        let start = spot.shared[self.around.len()];
        let rows = self.rows.min(self.cut - start);
        let plans = &self.blocks[usize::from(rows < self.rows)];
        spot.key = 0;
        // SAFETY: the caller's.
        unsafe {
            let mut count = plans.len();
            if let Some(keys) = &self.keys {
                let seen =
                    keys.seen(&self.links, spot, rows, self.all_keys, reads, scratch.add(self.keys_at));
                let first = seen.start / self.granule;
                count = (seen.end.div_ceil(self.granule) - first).max(1);
                // Only the last granule may be short: a plan of so many is of whole ones unless it ends there.
                if first + count == plans.len() {
                    spot.key = self.all_keys - self.all_keys.min(count * self.granule);
                } else {
                    spot.key = first * self.granule;
                }
            }
            for (link, block) in self.links.iter().zip(&plans[count - 1]) {
                let base = |at: &At, outside: &dyn Fn(usize) -> *mut u8| match at.base {
                    Base::Outside(i) => outside(i).wrapping_add(at.offset(spot)),
                    Base::Scratch(offset) => scratch.add(offset + at.offset(spot)),
                };
                let from = link.reads.iter().map(|at| base(at, &|i| reads[i].cast_mut()).cast_const());
                let to = link.writes.iter().map(|at| base(at, &|i| writes[i]));
                let (from, to): (SmallVec<[*const u8; 8]>, SmallVec<[*mut u8; 4]>) =
                    (from.collect(), to.collect());
                let behind: SmallVec<[usize; 8]> = link
                    .loops
                    .iter()
                    .map(|along| match along {
                        Along::Shared(i) => spot.shared[*i],
                        Along::Keys => spot.key,
                        Along::Own => 0,
                    })
                    .collect();
                block.run(&from, &to, scratch.add(self.kernels_at), &behind, link.adds);
            }
        }
    }
}

/// The index of a point along loops of these lengths.
fn at_point(point: usize, lens: &[usize], index: &mut [usize]) {
    let mut rest = point;
    for (i, len) in index[..lens.len()].iter_mut().zip(lens).rev() {
        *i = rest % len;
        rest /= len;
    }
}
