//! The choice is the best there is: its price is the least of all combinations of ways. A single way and a single reshard
//! cost what they cost there, but copies are put together and combinations are gone through in another manner.
//! `MESHC_CHOICES=500` tries more graphs.

use std::collections::HashMap;

use ir::{ShardedGraph, Sharding, Value, moves};
use meshc_tests::random::{Random, seeds_by};
use planner::choose::network::Choice;
use planner::choose::price::sent;
use planner::choose::space::Ways;
use planner::cluster::Cluster;

use crate::cases::{Case, case, mlp};

/// How a combination is priced.
#[derive(Clone, Copy)]
struct Pricing {
    /// From one sharding to another.
    hop: fn(&ShardedGraph, &Cluster, Value, &Sharding, &Sharding) -> i64,
    /// What a way computes.
    work: fn(&Ways, usize) -> i64,
    /// Whether users share copies.
    shares: bool,
    /// How many of the ways of a node are legal.
    ways: fn(usize) -> usize,
}

/// What `tp` splits of a matrix parameter is joined only where nothing else is legal.
fn hop(sharded: &ShardedGraph, cluster: &Cluster, v: Value, from: &Sharding, to: &Sharding) -> i64 {
    let ty = sharded.graph.ty(v);
    let maker = sharded.graph.nodes.iter().find(|n| n.results.contains(&v));
    let matrix = maker.is_some_and(|n| matches!(n.op, ir::Op::State(_)));
    let tp = sharded.mesh.find("tp").unwrap_or_default();
    let joined =
        from.dims.iter().zip(&to.dims).any(|(a, b)| a.iter().any(|x| tp.contains(x) && !b.contains(x)));
    let join = if matrix && joined { 1 << 54 } else { 0 };
    sent(&ty.shape, ty.dtype, from, to, &sharded.mesh, cluster).price() + join
}

const RIGHT: Pricing = Pricing { hop, work: |ways, x| ways.all[x].work, shares: true, ways: |n| n };

/// Every combination of ways, priced.
struct Brute<'a> {
    case: &'a Case,
    choice: &'a Choice<'a>,
    pricing: Pricing,
    /// Of each value the least prices between its shardings.
    between: Vec<Vec<Vec<i64>>>,
    index: Vec<HashMap<Sharding, usize>>,
    copies: HashMap<(Value, usize, Vec<usize>), i64>,
    best: i64,
}

impl Brute<'_> {
    fn new<'a>(case: &'a Case, choice: &'a Choice<'a>, pricing: Pricing) -> Brute<'a> {
        let (mut between, mut index) = (Vec::new(), Vec::new());
        for v in (0..case.sharded.graph.values.len()).map(|v| Value(v as u32)) {
            let all: Vec<&Sharding> = choice.shardings(v);
            let price = |a: &&Sharding, b: &&Sharding| (pricing.hop)(&case.sharded, &case.cluster, v, a, b);
            let mut d: Vec<Vec<i64>> =
                all.iter().map(|a| all.iter().map(|b| price(a, b)).collect()).collect();
            for m in 0..all.len() {
                for a in 0..all.len() {
                    for b in 0..all.len() {
                        d[a][b] = d[a][b].min(d[a][m] + d[m][b]);
                    }
                }
            }
            between.push(d);
            index.push(all.into_iter().cloned().enumerate().map(|(i, s)| (s, i)).collect());
        }
        Brute { case, choice, pricing, between, index, copies: HashMap::new(), best: i64::MAX }
    }

    /// The least price of a value in all of these shardings: copies branch at one or two others.
    fn copies(&mut self, v: Value, from: usize, mut needs: Vec<usize>) -> i64 {
        let d = &self.between[v.index()];
        if !self.pricing.shares {
            return needs.iter().map(|n| d[from][*n]).sum();
        }
        needs.sort_unstable();
        needs.dedup();
        needs.retain(|n| *n != from);
        let key = (v, from, needs.clone());
        if let Some(known) = self.copies.get(&key) {
            return *known;
        }
        let all = 0..d.len();
        let price = match needs[..] {
            [] => 0,
            [a] => d[from][a],
            [a, b] => all.map(|m| d[from][m] + d[m][a] + d[m][b]).min().unwrap_or(0),
            [a, b, c] => {
                let pairs = all.clone().flat_map(|m| all.clone().map(move |n| (m, n)));
                let tree = |(m, n): (usize, usize)| {
                    let trunk = d[from][m] + d[m][n];
                    let ends = [(a, b, c), (b, a, c), (c, a, b)];
                    ends.map(|(x, y, z)| trunk + d[m][x] + d[n][y] + d[n][z]).into_iter().min().unwrap_or(0)
                };
                pairs.map(tree).min().unwrap_or(0)
            }
            // More copies than are looked at.
            _ => i64::MAX / 4,
        };
        self.copies.insert(key, price);
        price
    }

    /// Goes through the ways of node `i` and all behind it; gives up where the price is too high already.
    fn search(&mut self, i: usize, picked: &mut Vec<usize>, price: i64) {
        if price >= self.best {
            return;
        }
        let graph = &self.case.sharded.graph;
        if i == graph.nodes.len() {
            self.best = price;
            return;
        }
        let ways = self.choice.ways[i].clone();
        for x in 0..(self.pricing.ways)(ways.all.len()).max(1) {
            picked.push(x);
            // A value is paid for when its last user is there.
            let mut more = (self.pricing.work)(&ways, x);
            let settled: Vec<Value> = (0..graph.values.len() as u32)
                .map(Value)
                .filter(|v| graph.nodes.iter().rposition(|n| n.args.contains(v)) == Some(i))
                .collect();
            for v in settled {
                let maker = graph.nodes.iter().position(|n| n.results.contains(&v)).unwrap_or(0);
                let at = |s: &Sharding| self.index[v.index()][s];
                let from = at(&self.choice.ways[maker].all[picked[maker]].layout.results[0]);
                let mut needs = Vec::new();
                for (u, user) in graph.nodes.iter().enumerate().take(i + 1) {
                    for (k, _) in user.args.iter().enumerate().filter(|(_, a)| **a == v) {
                        needs.push(at(&self.choice.ways[u].all[picked[u]].layout.args[k]));
                    }
                }
                more += self.copies(v, from, needs);
            }
            self.search(i + 1, picked, price + more);
            picked.pop();
        }
    }
}

/// The price of the search, and the least of all combinations.
fn both(case: &Case, pricing: Pricing) -> Option<(i128, i128)> {
    let mut choice = Choice::of(&case.sharded, &case.cluster, None);
    let combinations: f64 = choice.ways.iter().map(|w| w.all.len() as f64).product();
    if combinations > 3e6 {
        return None;
    }
    let solution = choice.solve();
    assert!(solution.exact);
    let picked = choice.picked(&solution.pick);
    assert_eq!(i128::from(choice.price(&picked)), solution.price, "what was picked has another price");
    let mut brute = Brute::new(case, &choice, pricing);
    brute.search(0, &mut Vec::new(), 0);
    Some((solution.price, i128::from(brute.best)))
}

#[test]
fn the_choice_is_the_best_of_all() {
    let mut tried = 0;
    let seeds = seeds_by("MESHC_CHOICES", 100);
    let wanted = seeds.end - seeds.start;
    for seed in seeds.start.. {
        let Some((found, least)) = both(&case(seed), RIGHT) else { continue };
        assert_eq!(found, least, "seed {seed}:\n{}", case(seed).sharded);
        tried += 1;
        if tried == wanted {
            break;
        }
    }
}

#[test]
fn the_choice_for_an_mlp_is_the_best_of_all() {
    for seed in 0..100 {
        let case = mlp(&mut Random::new(seed));
        let (found, least) = both(&case, RIGHT).expect("few combinations");
        assert_eq!(found, least, "seed {seed}:\n{}", case.sharded);
    }
}

/// Each is seen on some graph: prices, rows and rules that are wrong.
#[test]
fn every_planted_fault_is_seen() {
    let rounds: Pricing = Pricing {
        // An all_reduce that waits once.
        hop: |s, c, v, from, to| {
            let reduces = moves(from, to, &s.mesh).iter().filter(|m| m.name() == "all_reduce").count();
            hop(s, c, v, from, to) - reduces as i64 * (c.latency * 1e12).round() as i64
        },
        ..RIGHT
    };
    let bytes = Pricing {
        hop: |s, c, v, from, to| {
            let slow = Cluster { bandwidth: c.bandwidth / 2.0, ..c.clone() };
            hop(s, &slow, v, from, to)
        },
        ..RIGHT
    };
    let turned = Pricing {
        // An axis that changes its dimension is gathered first.
        hop: |s, c, v, from, to| {
            let turns = moves(from, to, &s.mesh).iter().any(|m| m.name() == "all_to_all");
            let whole = Sharding::replicated(from.dims.len());
            match turns {
                true => hop(s, c, v, from, &whole) + hop(s, c, v, &whole, to),
                false => hop(s, c, v, from, to),
            }
        },
        ..RIGHT
    };
    let faults = [
        ("an all_reduce waits once", rounds),
        ("half the bandwidth", bytes),
        ("an all_to_all is a gather and a slice", turned),
        ("computing is free", Pricing { work: |_, _| 0, ..RIGHT }),
        ("a copy is made for each user", Pricing { shares: false, ..RIGHT }),
        ("the last way of a node is not legal", Pricing { ways: |n| n - 1, ..RIGHT }),
    ];
    for (name, pricing) in faults {
        let seen =
            (0..400).filter_map(|seed| both(&case(seed), pricing)).any(|(found, least)| found != least);
        assert!(seen, "{name}: no graph shows it");
    }
}
