//! The cheapest ways to bring a value from one sharding to others, through any shardings between them that combine
//! positions of its axes which its maker or a user knows. A copy once made is free for all.

use ir::{Axis, DType, Mesh, Reduce, Sharding};
use rustc_hash::FxHashMap;

use super::price::sent;
use super::tables::{NEVER, Price, plus, repeated};
use crate::cluster::Cluster;

/// More shardings than this are not looked at between two.
const MOST: usize = 160;

/// More copies than this are not made by the cheapest tree, but one by one.
const TREE: usize = 5;

/// Where a value's pieces may lie, and what leads from one to another.
#[derive(Debug)]
pub struct Routes {
    /// The shardings.
    pub all: Vec<Sharding>,
    /// Whether all that lie between are among them.
    pub whole: bool,
    index: FxHashMap<Sharding, usize>,
    /// The least price from one to another.
    least: Vec<Price>,
    /// The last but one on that way.
    before: Vec<u32>,
}

/// A tensor that is brought from one sharding to another.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Its shape.
    pub shape: &'a [usize],
    /// Its element type.
    pub dtype: DType,
    /// How often it is brought in a step.
    pub times: usize,
    /// What it costs beyond the price to leave a sharding for another.
    pub beyond: &'a dyn Beyond,
}

/// What a reshard costs beyond its price.
pub trait Beyond: std::fmt::Debug {
    /// From one sharding to another.
    fn price(&self, from: &Sharding, to: &Sharding) -> Price;
}

impl Routes {
    /// Between these shardings and all that lie between them.
    pub fn between(tensor: Tensor, ends: &[Sharding], mesh: &Mesh, cluster: &Cluster) -> Routes {
        let mut all: Vec<Sharding> = Vec::new();
        let mut index = FxHashMap::default();
        let between = combined(tensor.shape, ends, mesh);
        let whole = between.is_some();
        for sharding in ends.iter().cloned().chain(between.into_iter().flatten()) {
            if !index.contains_key(&sharding) {
                index.insert(sharding.clone(), all.len());
                all.push(sharding);
            }
        }
        let n = all.len();
        let mut routes = Routes { all, whole, index, least: vec![0; n * n], before: vec![0; n * n] };
        for a in 0..n {
            for b in 0..n {
                let (from, to) = (&routes.all[a], &routes.all[b]);
                let own = sent(tensor.shape, tensor.dtype, from, to, mesh, cluster).price();
                let own = repeated(own, tensor.times);
                routes.least[a * n + b] = plus(own, tensor.beyond.price(from, to));
                routes.before[a * n + b] = a as u32;
            }
        }
        routes.shorten();
        routes
    }

    /// All shortest ways (Floyd, "Algorithm 97", 1962).
    fn shorten(&mut self) {
        let n = self.all.len();
        for via in 0..n {
            for a in 0..n {
                let first = self.least[a * n + via];
                for b in 0..n {
                    let through = plus(first, self.least[via * n + b]);
                    if through < self.least[a * n + b] {
                        self.least[a * n + b] = through;
                        self.before[a * n + b] = self.before[via * n + b];
                    }
                }
            }
        }
    }

    /// A sharding's place.
    pub fn at(&self, sharding: &Sharding) -> usize {
        self.index[sharding]
    }

    /// The least price from one to another.
    pub fn price(&self, from: usize, to: usize) -> Price {
        self.least[from * self.all.len() + to]
    }

    /// The reshards from one to another.
    fn path(&self, from: usize, to: usize, edges: &mut Vec<(usize, usize)>) {
        if from == to {
            return;
        }
        let before = self.before[from * self.all.len() + to] as usize;
        self.path(from, before, edges);
        if !edges.contains(&(before, to)) {
            edges.push((before, to));
        }
    }

    /// The least price from one to several (Dreyfus and Wagner, "The Steiner problem in graphs", 1971), and the reshards,
    /// each behind the one that makes what it starts from.
    pub fn tree(&self, from: usize, to: &[usize]) -> (Price, Vec<(usize, usize)>) {
        let mut to = to.to_vec();
        to.sort_unstable();
        to.dedup();
        to.retain(|t| *t != from);
        let mut edges = Vec::new();
        let price = match to[..] {
            [] => 0,
            [one] => {
                self.path(from, one, &mut edges);
                self.price(from, one)
            }
            _ if to.len() <= TREE => {
                let table = self.steiner(&to);
                self.unfold(&table, from, (1 << to.len()) - 1, &to, &mut edges);
                table[(1 << to.len()) - 1][from].0
            }
            _ => self.one_by_one(from, &to, &mut edges),
        };
        (price, edges)
    }

    /// For each set of goals, as bits, and each start the least price, and what it is made of.
    fn steiner(&self, to: &[usize]) -> Vec<Vec<(Price, Split)>> {
        let n = self.all.len();
        let mut table: Vec<Vec<(Price, Split)>> = vec![vec![(NEVER, Split::Go(0)); n]; 1 << to.len()];
        for set in 1usize..1 << to.len() {
            let mut here: Vec<(Price, Split)> = vec![(NEVER, Split::Go(0)); n];
            if set.is_power_of_two() {
                let goal = to[set.trailing_zeros() as usize];
                here.iter_mut().enumerate().for_each(|(s, e)| *e = (self.price(s, goal), Split::Arrive));
                table[set] = here;
                continue;
            }
            let mut part = (set - 1) & set;
            while part > 0 {
                if part > set ^ part {
                    for s in 0..n {
                        let both = plus(table[part][s].0, table[set ^ part][s].0);
                        if both < here[s].0 {
                            here[s] = (both, Split::Part(part));
                        }
                    }
                }
                part = (part - 1) & set;
            }
            let parted = here.clone();
            for (s, e) in here.iter_mut().enumerate() {
                for (m, there) in parted.iter().enumerate() {
                    let price = plus(self.price(s, m), there.0);
                    if price < e.0 {
                        *e = (price, Split::Go(m));
                    }
                }
            }
            table[set] = here;
        }
        table
    }

    fn unfold(
        &self,
        table: &[Vec<(Price, Split)>],
        from: usize,
        set: usize,
        to: &[usize],
        edges: &mut Vec<(usize, usize)>,
    ) {
        match table[set][from].1 {
            Split::Arrive => self.path(from, to[set.trailing_zeros() as usize], edges),
            Split::Part(part) => {
                self.unfold(table, from, part, to, edges);
                self.unfold(table, from, set ^ part, to, edges);
            }
            Split::Go(m) => {
                self.path(from, m, edges);
                self.unfold(table, m, set, to, edges);
            }
        }
    }

    /// Each goal from the nearest that is there, the nearest goal first.
    fn one_by_one(&self, from: usize, to: &[usize], edges: &mut Vec<(usize, usize)>) -> Price {
        let (mut there, mut left, mut total) = (vec![from], to.to_vec(), 0);
        while !left.is_empty() {
            let pairs = there.iter().flat_map(|a| left.iter().map(|b| (self.price(*a, *b), *a, *b)));
            let Some((price, a, b)) = pairs.min() else { break };
            let old = edges.len();
            self.path(a, b, edges);
            there.extend(edges[old..].iter().map(|(_, t)| *t));
            there.push(b);
            left.retain(|t| !there.contains(t));
            total = plus(total, price);
        }
        total
    }
}

/// How a tree to a set of goals starts.
#[derive(Clone, Copy, Debug)]
enum Split {
    /// Straight to the one goal.
    Arrive,
    /// With a tree to this part of them, and one to the rest.
    Part(usize),
    /// By going to this sharding.
    Go(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Position {
    Nowhere,
    Dim(usize),
    Partial(Reduce),
}

fn position(sharding: &Sharding, axis: Axis) -> Position {
    if let Some((_, reduce)) = sharding.partial.iter().find(|(a, _)| *a == axis) {
        return Position::Partial(*reduce);
    }
    let dim = sharding.dims.iter().position(|axes| axes.contains(&axis));
    dim.map_or(Position::Nowhere, Position::Dim)
}

/// Every combination of the positions that the axes have in some of them, axes of a dimension in the mesh's order; none if
/// there are too many.
fn combined(shape: &[usize], of: &[Sharding], mesh: &Mesh) -> Option<Vec<Sharding>> {
    let mut out = vec![Sharding::replicated(shape.len())];
    for axis in mesh.all().filter(|a| mesh.splits(*a)) {
        let mut positions: Vec<Position> = of.iter().map(|s| position(s, axis)).collect();
        positions.push(Position::Nowhere);
        positions.sort();
        positions.dedup();
        if out.len() * positions.len() > MOST {
            return None;
        }
        let with = |s: &Sharding, p: &Position| {
            let mut s = s.clone();
            match p {
                Position::Nowhere => {}
                Position::Dim(d) => s.dims[*d].push(axis),
                Position::Partial(reduce) => s.partial.push((axis, *reduce)),
            }
            s
        };
        out = out.iter().flat_map(|s| positions.iter().map(|p| with(s, p)).collect::<Vec<_>>()).collect();
    }
    out.retain(|s| !s.merges() || s.has_pairs(shape));
    Some(out)
}
