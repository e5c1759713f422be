//! What a random graph is drawn as: a list from which a legal graph, its mesh and places follow, whatever is taken
//! away. So a failure shrinks by taking away.

use std::collections::BTreeSet;

use ir::{Binary, Unary};
use meshc_tests::random::Random;

/// What a node is; operands, dimensions and attributes follow from its number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// An input of floats.
    Input,
    /// A state of floats, mostly a parameter.
    State,
    /// An input of indices.
    Index,
    Const,
    Iota,
    /// `a, a b, () -> a b c`.
    Random,
    /// Of one to three operands.
    Einsum,
    /// An einsum with a factor of each operand alone, one that is summed, and maybe batches: a contraction.
    Product,
    /// Two dimensions become one.
    Merge,
    /// And two again.
    Split,
    Add,
    ReduceMax,
    Unary(Unary),
    Binary(Binary),
    Select,
    /// `v d, b s -> b s d`.
    Gather,
    /// `b s v, b s -> b s`.
    Pick,
    Scatter,
    Cast,
}

/// The dimensions that there are.
pub const DIMS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// The axes that there are.
const AXES: [&str; 3] = ["x", "y", "z"];

const MOST_RANKS: usize = 30;

/// A description of a graph.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// What everything that is not said here follows from.
    pub seed: u64,
    /// The size of each of [`DIMS`].
    pub sizes: [usize; DIMS.len()],
    /// Name and size of each axis.
    pub mesh: Vec<(&'static str, usize)>,
    /// Each with the number that it keeps when others are taken away.
    pub nodes: Vec<(usize, Kind)>,
    /// Whether there is a loss, and so a backward pass and an update.
    pub loss: bool,
    /// How many micro-batches a step has; one without a loss, which alone is summed over them.
    pub microbatches: usize,
    /// The numbers of nodes whose results are constrained.
    pub asked: BTreeSet<usize>,
    /// Inputs and states that an axis does not split.
    pub whole: BTreeSet<(String, &'static str)>,
    /// The pipeline that the graph is cut for, if it is cut.
    pub pipeline: Option<Pipeline>,
}

/// A pipeline: how many ranks it has, and its kind of schedule and virtual stages a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pipeline {
    pub rows: usize,
    pub kind: &'static str,
    pub virtuals: usize,
}

/// Kinds, each with a number of virtual stages.
const KINDS: [(&str, usize); 8] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("looping", 3),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
];

impl Recipe {
    /// The recipe of a seed; every second one has a loss.
    pub fn draw(seed: u64) -> Recipe {
        let random = &mut Random::new(seed);
        let sizes = DIMS.map(|_| 1 + random.below(7));
        let mut mesh: Vec<(&str, usize)> = Vec::new();
        for name in &AXES[..*random.pick(&[0, 1, 2, 2, 3, 3])] {
            let ranks: usize = mesh.iter().map(|(_, n)| n).product();
            mesh.push((name, 1 + random.below(5.min(MOST_RANKS / ranks))));
        }
        let mut kinds = vec![Kind::State, Kind::Input];
        kinds.extend((0..2 + random.below(11)).map(|_| kind(random)));
        let nodes: Vec<(usize, Kind)> = kinds.into_iter().enumerate().collect();
        let asked = nodes.iter().map(|(n, _)| *n).filter(|_| random.below(6) == 0).collect();
        let loss = seed.is_multiple_of(2);
        let microbatches = if loss { *random.pick(&[1, 1, 2, 3]) } else { 1 };
        Recipe { seed, sizes, mesh, nodes, loss, microbatches, asked, whole: BTreeSet::new(), pipeline: None }
    }

    /// The recipe of a seed on a pipeline. All have a loss; the mesh beside it has few ranks.
    pub fn draw_pipeline(seed: u64) -> Recipe {
        let random = &mut Random::new(seed ^ 0x5eed);
        let mut recipe = Recipe::draw(2 * seed);
        recipe.microbatches = 1 + random.below(4);
        recipe.mesh.truncate(1);
        recipe.mesh.iter_mut().for_each(|(_, size)| *size = (*size).min(3));
        let (kind, virtuals) = *random.pick(&KINDS);
        recipe.pipeline = Some(Pipeline { rows: 1 + random.below(4), kind, virtuals });
        recipe
    }

    /// Everything that has one thing less; `places` are the names of inputs and states.
    fn smaller(&self, places: &[String]) -> Vec<Recipe> {
        let mut all = Vec::new();
        let mut with = |change: &dyn Fn(&mut Recipe)| {
            let mut less = self.clone();
            change(&mut less);
            all.push(less);
        };
        let n = self.nodes.len();
        for size in [n / 2, n / 4] {
            let starts = (0..n).step_by(size.max(1)).filter(|_| size > 1);
            starts.for_each(|i| with(&|r| drop(r.nodes.drain(i..(i + size).min(n)))));
        }
        (0..n).rev().for_each(|i| with(&|r| r.nodes.retain(|node| *node != self.nodes[i])));
        if self.loss {
            with(&|r| (r.loss, r.microbatches) = (false, 1));
        }
        if self.pipeline.is_some() {
            with(&|r| r.pipeline = None);
            with(&|r| r.pipeline = r.pipeline.map(|p| Pipeline { kind: "1f1b", virtuals: 1, ..p }));
            with(&|r| r.pipeline = r.pipeline.map(|p| Pipeline { rows: (p.rows - 1).max(1), ..p }));
        }
        (1..self.microbatches).for_each(|n| with(&|r| r.microbatches = n));
        self.asked.iter().for_each(|n| with(&|r| r.asked.retain(|m| m != n)));
        for i in 0..self.mesh.len() {
            with(&|r| r.mesh.retain(|axis| *axis != self.mesh[i]));
            (2..self.mesh[i].1).for_each(|size| with(&|r| r.mesh[i].1 = size));
        }
        for (name, (axis, _)) in places.iter().flat_map(|p| self.mesh.iter().map(move |a| (p, a))) {
            if !self.whole.contains(&(name.clone(), *axis)) {
                with(&|r| r.whole.extend([(name.clone(), *axis)]));
            }
        }
        for i in 0..self.sizes.len() {
            [1, 2, self.sizes[i] - 1].into_iter().filter(|n| (1..self.sizes[i]).contains(n)).for_each(|n| {
                with(&|r| r.sizes[i] = n);
            });
        }
        all
    }

    /// The smallest that still fails, as far as taking away one thing after the other leads.
    pub fn shrunk(&self, fails: &dyn Fn(&Recipe) -> bool, places: &dyn Fn(&Recipe) -> Vec<String>) -> Recipe {
        let mut smallest = self.clone();
        let mut tries = 0;
        while let Some(next) = smallest.smaller(&places(&smallest)).into_iter().find(|r| {
            tries += 1;
            tries < 3000 && fails(r)
        }) {
            smallest = next;
        }
        smallest
    }
}

fn kind(random: &mut Random) -> Kind {
    let plain = [
        Kind::Input,
        Kind::State,
        Kind::State,
        Kind::Index,
        Kind::Const,
        Kind::Iota,
        Kind::Random,
        Kind::Random,
        Kind::Einsum,
        Kind::Einsum,
        Kind::Einsum,
        Kind::Product,
        Kind::Product,
        Kind::Product,
        Kind::Merge,
        Kind::Split,
        Kind::Add,
        Kind::Add,
        Kind::ReduceMax,
        Kind::Select,
        Kind::Gather,
        Kind::Gather,
        Kind::Pick,
        Kind::Scatter,
        Kind::Scatter,
        Kind::Cast,
        Kind::Cast,
    ];
    match random.below(plain.len() + 12) {
        i if i < plain.len() => plain[i],
        i if i < plain.len() + 6 => Kind::Unary(*random.pick(&Unary::ALL)),
        _ => Kind::Binary(*random.pick(&Binary::ALL)),
    }
}
