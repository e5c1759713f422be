//! The choice is the best there is: on random graphs, meshes and links its price is the least of all combinations of ways,
//! priced here again in another manner. `MESHC_CHOICES=500` tries more of them.

use std::collections::HashMap;

use ir::program::Instruction;
use ir::{ShardedGraph, Sharding, Value, moves, parse_sharded};
use meshc_tests::random::{Random, seeds_by};
use meshc_tests::whole::{here, wire};
use planner::choose::best;
use planner::choose::network::Choice;
use planner::choose::price::sent;
use planner::choose::reasons::reasons;
use planner::choose::space::Ways;
use planner::cluster::Cluster;
use planner::cost::{Lies, message};

/// A graph on a mesh, and links.
struct Case {
    sharded: ShardedGraph,
    cluster: Cluster,
}

fn read(text: &str) -> ShardedGraph {
    let mut sharded = parse_sharded(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    passes::PLACED.iter().for_each(|pass| (pass.run)(&mut sharded));
    sharded
}

/// Links and devices of any speed.
fn cluster(random: &mut Random) -> Cluster {
    let mut any = |low: f64, high: f64| {
        let share = random.below(1000) as f64 / 1000.0;
        low * (high / low).powf(share)
    };
    Cluster {
        name: "random".to_string(),
        devices: None,
        flops: any(1e9, 1e15),
        memory_bandwidth: any(1e9, 1e13),
        memory: None,
        launch: any(1e-9, 1e-5),
        latency: any(1e-9, 1e-4),
        bandwidth: any(1e7, 1e12),
    }
}

const DIMS: [&str; 4] = ["b", "c", "d", "e"];

/// A graph of up to 8 ops over up to 3 dimensions each, placed anywhere on a mesh of one or two axes.
fn case(seed: u64) -> Case {
    let random = &mut Random::new(seed);
    let mesh = *random.pick(&["x=2", "x=4", "tp=3", "tp=8", "x=2,y=2", "dp=2,tp=4", "x=2,y=3"]);
    let axes: Vec<&str> = mesh.split(',').map(|a| a.split('=').next().unwrap_or("")).collect();
    let sizes: Vec<usize> = DIMS.iter().map(|_| *random.pick(&[2, 3, 8, 24, 64, 100])).collect();
    let two = |random: &mut Random| {
        let all = random.shuffled((0..DIMS.len()).collect());
        all[..2].to_vec()
    };
    let names = |dims: &[usize]| dims.iter().map(|d| DIMS[*d]).collect::<Vec<_>>().join(" ");
    let shape = |dims: &[usize]| match dims {
        [] => "()".to_string(),
        _ => dims.iter().map(|d| sizes[*d].to_string()).collect::<Vec<_>>().join("x"),
    };
    let (mut tables, mut nodes, mut places) = (String::new(), String::new(), String::new());
    let mut values: Vec<Vec<usize>> = Vec::new();
    for i in 0..1 + random.below(3) {
        let dims = two(random);
        let state = random.below(2) == 0;
        let table = dims.iter().map(|d| format!("{}={}", DIMS[*d], sizes[*d])).collect::<Vec<_>>().join(", ");
        let mut place = vec!["_".to_string(); dims.len()];
        for axis in &axes {
            let at = random.below(dims.len() + 1);
            if at < dims.len() && place[at] == "_" {
                place[at] = (*axis).to_string();
            }
        }
        places += &format!("place n{i} [{}]\n", place.join(", "));
        let (kind, flags) = if state { ("state", " parameter() ones") } else { ("input", "") };
        tables += &format!("{kind} n{i} : f32 [{table}]{flags}\n");
        let scope = if state { "" } else { " micro" };
        nodes +=
            &format!("v{i} = {kind}(n{i}) : -> {} : f32 {}{scope} | 0 forward\n", names(&dims), shape(&dims));
        values.push(dims);
    }
    let micro = |i: usize, nodes: &str| nodes.lines().nth(i).is_some_and(|l| l.contains(" micro"));
    for _ in 0..1 + random.below(8) {
        let at = values.len();
        let a = random.below(at);
        let b = random.below(at);
        let (op, args, result): (&str, Vec<usize>, Vec<usize>) = match random.below(5) {
            0 => ("exp", vec![a], values[a].clone()),
            1 => ("relu", vec![a], values[a].iter().rev().copied().collect()),
            2 if values[b].iter().all(|d| values[a].contains(d)) => ("add", vec![a, b], values[a].clone()),
            2 => ("sin", vec![b], values[b].clone()),
            _ => {
                let mut all: Vec<usize> = values[a].iter().chain(&values[b]).copied().collect();
                all.sort_unstable();
                all.dedup();
                let kept = random.shuffled(all);
                let n = random.below(3).min(kept.len());
                ("einsum", vec![a, b], kept[..n].to_vec())
            }
        };
        let scope = if args.iter().any(|v| micro(*v, &nodes)) { " micro" } else { "" };
        let operands = args.iter().map(|v| format!("v{v}")).collect::<Vec<_>>().join(", ");
        let dims = |d: &[usize]| if d.is_empty() { "()".to_string() } else { names(d) };
        let of = args.iter().map(|v| dims(&values[*v])).collect::<Vec<_>>().join(", ");
        nodes += &format!(
            "v{at} = {op} {operands} : {of} -> {} : f32 {}{scope} | 0 forward\n",
            dims(&result),
            shape(&result)
        );
        values.push(result);
    }
    let mut ends = String::new();
    if random.below(2) == 0 {
        let last = values.len() - 1;
        ends = format!("constrain v{last} [{}]\n", vec!["_"; values[last].len()].join(", "));
    }
    Case {
        sharded: read(&format!("sharded mesh {mesh}\n{places}{tables}{nodes}{ends}")),
        cluster: cluster(random),
    }
}

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
    let join = if matrix && joined { 1 << 50 } else { 0 };
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

/// D1 to D2 to D1, for any tokens, widths and mesh.
fn mlp(random: &mut Random) -> Case {
    let [t, d, f] = [(); 3].map(|()| 8 * (1 + random.below(200)));
    let tp = 2 + random.below(7);
    let ends = ["_, _", "_, tp", "tp, _"];
    let (x, y) = (*random.pick(&ends), *random.pick(&ends));
    let [w1, w2] = [(); 2].map(|()| *random.pick(&["_, _", "_, tp", "tp, _"]));
    let text = format!(
        "sharded mesh tp={tp}
        place w1 [{w1}] free
        place w2 [{w2}] free
        place x [{x}]
        input x : f32 [t={t}, d={d}]
        state w1 : f32 [d={d}, f={f}] parameter(trainable) ones
        state w2 : f32 [f={f}, d={d}] parameter(trainable) ones
        v0 = input(x) : -> t d : f32 {t}x{d} micro | 0 forward
        v1 = state(w1) : -> d f : f32 {d}x{f} | 0 forward
        v2 = einsum v0, v1 : t d, d f -> t f : f32 {t}x{f} micro | 0 forward
        v3 = relu v2 : t f -> t f : f32 {t}x{f} micro | 0 forward
        v4 = state(w2) : -> f d : f32 {f}x{d} | 0 forward
        v5 = einsum v3, v4 : t f, f d -> t d : f32 {t}x{d} micro | 0 forward
        tap(y) v5 : t d -> | 0 forward
        constrain v5 [{y}]"
    );
    Case { sharded: read(&text), cluster: cluster(random) }
}

#[test]
fn the_choice_for_an_mlp_is_the_best_of_all() {
    for seed in 0..100 {
        let case = mlp(&mut Random::new(seed));
        let (found, least) = both(&case, RIGHT).expect("few combinations");
        assert_eq!(found, least, "seed {seed}:\n{}", case.sharded);
    }
}

/// Wire bytes of a rank, read off the program, by kind of collective.
fn wire_bytes(sharded: &ShardedGraph) -> Vec<(&'static str, f64)> {
    let program = passes::lower(sharded);
    let stage = &program.stages[0];
    let each = stage.segments.iter().flat_map(|s| &s.instructions).filter_map(|i| {
        let Instruction::Start { step, from, to, .. } = i else { return None };
        let [from, to] = [from, to].map(|b| Lies::of(&stage.buffers[b.index()]));
        Some((step.name(), message(step, from, to, &program.mesh).wire_bytes))
    });
    each.collect()
}

/// An MLP of 512 tokens over tp=4: what is sent, how each product is split, and the bytes of the other way.
#[test]
fn the_wide_activation_of_an_mlp_stays_in_its_pieces() {
    let half = 1_572_864.0;
    let other = 6_291_456.0;
    let [gather, scatter] = ["all_gather", "reduce_scatter"].map(|name| (name, half));
    let cases = [
        (
            "split_ends",
            vec![gather, scatter],
            ["gather f=tp", "scatter f=tp"],
            ["scatter d=tp", "gather d=tp"],
        ),
        (
            "whole_ends",
            vec![("all_reduce", 2.0 * half)],
            ["gather f=tp", "scatter f=tp"],
            ["scatter d=tp", "gather d=tp"],
        ),
        ("reversed", vec![scatter, gather], ["scatter d=tp", "gather d=tp"], ["gather f=tp", "scatter f=tp"]),
        (
            "whole_weights",
            vec![("all_to_all", half / 4.0); 2],
            ["local t=tp", "local t=tp"],
            ["gather f=tp", "scatter f=tp"],
        ),
    ];
    for (name, sends, chosen, others) in cases {
        let path = format!("{}/filetests/choose/mlp_{name}.mesh", env!("CARGO_MANIFEST_DIR"));
        let placed = read(&std::fs::read_to_string(path).unwrap());
        for prices in [here(), planner::cluster::read("h100").unwrap(), wire()] {
            let best = best(&placed, &prices);
            assert!(best.exact);
            let products: Vec<_> = reasons(&placed, &best, &prices)
                .into_iter()
                .filter(|c| !c.op.starts_with("reshard"))
                .collect();
            let ways: Vec<&str> = products.iter().map(|c| &*c.chosen).collect();
            assert_eq!(ways, chosen, "{name} on {}", prices.name);
            for (product, other_way) in products.iter().zip(others).filter(|_| name != "whole_weights") {
                let found = product.alternatives.iter().find(|a| a.strategy == other_way);
                let bytes = found.map_or(0.0, |a| a.wire_bytes);
                assert!(bytes >= other && (name != "split_ends" || bytes == other), "{name}: {product:?}");
            }
            let mut sharded = placed.clone();
            sharded.decisions = best.decisions;
            passes::CHOSEN.iter().for_each(|pass| (pass.run)(&mut sharded));
            let sent = wire_bytes(&sharded);
            let total: f64 = sent.iter().map(|(_, b)| b).sum();
            assert_eq!(total, sends.iter().map(|(_, b)| b).sum::<f64>(), "{name} on {}", prices.name);
            // Whole ends and a narrow middle may be scattered and gathered for the bytes of an all_reduce.
            assert!(["whole_ends", "reversed"].contains(&name) || sent == sends, "{name}: {sent:?}");
        }
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
