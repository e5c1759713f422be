//! Where a model is cut into the stages of a pipeline: at layers, so that the slowest stage is as fast as can be. What stands
//! before the layers (an embedding) and behind them (a head) weighs, too.
//!
//! Of cuts with an equally slow slowest stage, the most even, and of those the one whose early stages are larger.

use ir::{DType, Graph, Part};

use crate::cluster::Cluster;
use crate::cost::{Work, launch_seconds};

/// Numbers of layers that make no stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StagesError {
    /// Something that is no number.
    #[error("--stages {0}: `{1}` is no number of layers; `_` lets meshc choose, as in _,_,_,6")]
    NotANumber(String, String),
    /// Another number of stages.
    #[error(
        "--stages {text}: {found} stages, but there are {needed}: --mesh has pp={rows}, with {virtuals} virtual stages a rank"
    )]
    Count {
        /// As it was given.
        text: String,
        /// How many it has.
        found: usize,
        /// How many there are.
        needed: usize,
        /// P.
        rows: usize,
        /// L.
        virtuals: usize,
    },
    /// Layers that are left over or missing.
    #[error("--stages {text}: {found} layers, but the model has {layers}; every layer is in one stage")]
    Layers {
        /// As it was given.
        text: String,
        /// Their sum.
        found: usize,
        /// Those of the model.
        layers: usize,
    },
}

/// How long each place of the model's depth takes a rank, forward and backward, in picoseconds: whole numbers, so that equal
/// layers are equal.
pub fn costs(graph: &Graph, ranks: usize, mixed: bool, cluster: &Cluster) -> Vec<u64> {
    let mut seconds = vec![0.0; graph.depth()];
    for node in graph.nodes.iter().filter(|n| n.mark.part == Part::Forward) {
        let bytes = |v: &ir::Value| {
            let ty = graph.ty(*v);
            let narrow = if mixed && ty.dtype == DType::F32 { DType::BF16 } else { ty.dtype };
            (ty.shape.iter().product::<usize>() * narrow.bytes()) as f64
        };
        // The backward pass has two products for each of the forward pass.
        let flops = match node.is_product() {
            true => 6.0 * node.sizes.iter().map(|n| *n as f64).product::<f64>(),
            false => 0.0,
        };
        let moved: f64 = node.results.iter().map(bytes).sum();
        let work = Work {
            flops: flops / ranks as f64,
            bytes: 3.0 * moved / ranks as f64,
            bf16: mixed && node.is_product(),
        };
        let free = Cluster { launch: 0.0, ..cluster.clone() };
        seconds[node.mark.layer as usize] += launch_seconds(work, &free);
    }
    seconds.into_iter().map(|s| (s * 1e12).round() as u64).collect()
}

/// The best cut of places that cost so much into so many stages: for each place its stage.
pub fn cut(costs: &[u64], stages: usize) -> Vec<usize> {
    stages_of(&sizes(costs, &vec![None; stages]).unwrap_or_default())
}

/// The stages that a user asked for: how many layers each has, `_` for as many as is best. What stands before the layers is in
/// the first, what stands behind them in the last.
///
/// # Errors
/// Numbers that do not fit the model or the mesh.
pub fn asked(
    text: &str,
    graph: &Graph,
    costs: &[u64],
    rows: usize,
    virtuals: usize,
) -> Result<Vec<usize>, StagesError> {
    let number = |word: &str| match word.trim() {
        "_" => Ok(None),
        word => {
            let wrong = || StagesError::NotANumber(text.to_string(), word.to_string());
            word.parse::<usize>().map(Some).map_err(|_| wrong())
        }
    };
    let asked: Vec<Option<usize>> = text.split(',').map(number).collect::<Result<_, _>>()?;
    let needed = rows * virtuals;
    if asked.len() != needed {
        let (text, found) = (text.to_string(), asked.len());
        return Err(StagesError::Count { text, found, needed, rows, virtuals });
    }
    let before = usize::from(graph.layers > 0);
    let layers = if graph.layers > 0 { graph.layers as usize } else { graph.depth() };
    let Some(sizes) = sizes(&costs[before..before + layers], &asked) else {
        let found = asked.iter().flatten().fold(0, |sum: usize, n| sum.saturating_add(*n));
        return Err(StagesError::Layers { text: text.to_string(), found, layers });
    };
    let mut stages = vec![0; before];
    stages.extend(stages_of(&sizes));
    stages.resize(graph.depth(), needed - 1);
    Ok(stages)
}

fn stages_of(sizes: &[usize]) -> Vec<usize> {
    sizes.iter().enumerate().flat_map(|(stage, n)| std::iter::repeat_n(stage, *n)).collect()
}

/// How many places each stage has, where some are fixed; none if those cannot be.
fn sizes(costs: &[u64], fixed: &[Option<usize>]) -> Option<Vec<usize>> {
    let n = costs.len();
    let mut sums = vec![0u128; n + 1];
    for (i, cost) in costs.iter().enumerate() {
        sums[i + 1] = sums[i] + u128::from(*cost);
    }
    let cost = |from: usize, to: usize| sums[to] - sums[from];
    let ends = |stage: usize, from: usize| match fixed[stage] {
        Some(size) => from.checked_add(size).filter(|to| *to <= n).into_iter().collect::<Vec<_>>(),
        None => (from..=n).collect(),
    };
    // From the last stage to the first: the least that the slowest of the rest can take.
    let mut slowest = vec![None; n + 1];
    slowest[n] = Some(0u128);
    for stage in (0..fixed.len()).rev() {
        let rest = std::mem::replace(&mut slowest, vec![None; n + 1]);
        for (from, best) in slowest.iter_mut().enumerate() {
            let of = |to: usize| Some(rest[to]?.max(cost(from, to)));
            *best = ends(stage, from).into_iter().filter_map(of).min();
        }
    }
    let limit = slowest[0]?;
    // Within that, the least sum of squares, and which size of each stage leads there: the largest.
    let mut squares: Vec<Option<u128>> = vec![None; n + 1];
    squares[n] = Some(0);
    let mut sizes: Vec<Vec<usize>> = Vec::new();
    for stage in (0..fixed.len()).rev() {
        let rest = std::mem::replace(&mut squares, vec![None; n + 1]);
        let mut chosen = vec![0; n + 1];
        for from in 0..=n {
            for to in ends(stage, from) {
                let here = cost(from, to);
                let Some(sum) = rest[to].filter(|_| here <= limit).map(|rest| rest + here * here) else {
                    continue;
                };
                if squares[from].is_none_or(|best| sum <= best) {
                    (squares[from], chosen[from]) = (Some(sum), to - from);
                }
            }
        }
        sizes.push(chosen);
    }
    let mut at = 0;
    let walk = sizes.into_iter().rev().map(|chosen| {
        let size = chosen[at];
        at += size;
        size
    });
    Some(walk.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes_of(costs: &[u64], stages: usize) -> Vec<usize> {
        sizes(costs, &vec![None; stages]).unwrap()
    }

    #[test]
    fn equal_layers_are_spread_evenly() {
        // A publicly known case: 30 layers on 4 ranks, alone and with two virtual stages, and with a last stage of 6.
        assert_eq!(sizes_of(&[7; 30], 4), [8, 8, 7, 7]);
        assert_eq!(sizes_of(&[7; 30], 8), [4, 4, 4, 4, 4, 4, 3, 3]);
        assert_eq!(sizes(&[7; 30], &[None, None, None, Some(6)]), Some(vec![8, 8, 8, 6]));
        assert_eq!(sizes(&[7; 30], &[Some(8), Some(8), Some(7), Some(6)]), None);
        assert_eq!(sizes_of(&[5; 2], 4), [1, 1, 0, 0]);
        assert_eq!(cut(&[7; 5], 2), [0, 0, 0, 1, 1]);
    }

    #[test]
    fn what_is_heavy_weighs() {
        // A head of three layers' weight is better alone.
        assert_eq!(sizes_of(&[0, 1, 1, 1, 1, 1, 1, 3], 3), [4, 3, 1]);
        assert_eq!(sizes_of(&[1, 10, 10, 30], 4), [1, 1, 1, 1]);
    }

    #[test]
    fn no_cut_has_a_faster_slowest_stage() {
        for seed in 0..200u64 {
            let n = 1 + (seed % 7) as usize;
            let stages = 1 + (seed / 7 % 4) as usize;
            let costs: Vec<u64> =
                (0..n as u64).map(|i| 1 + (seed * 7919 + i * i * 31 + i * seed) % 13).collect();
            let found = sizes_of(&costs, stages);
            assert_eq!(found.iter().sum::<usize>(), n);
            let slowest = |sizes: &[usize]| {
                let mut at = 0;
                let one = |size: &usize| {
                    at += size;
                    costs[at - size..at].iter().sum::<u64>()
                };
                sizes.iter().map(one).max()
            };
            let mut all = vec![vec![]];
            for _ in 0..stages {
                let longer = |s: &Vec<usize>| {
                    let left = n - s.iter().sum::<usize>();
                    let s = s.clone();
                    (0..=left).map(move |k| [s.clone(), vec![k]].concat())
                };
                all = all.iter().flat_map(longer).collect();
            }
            let best = all.iter().filter(|s| s.iter().sum::<usize>() == n).map(|s| slowest(s)).min();
            assert_eq!(Some(slowest(&found)), best, "{costs:?} in {stages}");
        }
    }
}
