//! Random graphs on random meshes, with random links.

use ir::{ShardedGraph, parse_sharded};
use meshc_tests::random::Random;
use planner::cluster::Cluster;

/// A graph on a mesh, and links.
pub struct Case {
    pub sharded: ShardedGraph,
    pub cluster: Cluster,
}

/// Reads a graph on a mesh, ready for the choice.
pub fn read(text: &str) -> ShardedGraph {
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
        flops_bf16: None,
        memory_bandwidth: any(1e9, 1e13),
        memory: None,
        launch: any(1e-9, 1e-5),
        latency: any(1e-9, 1e-4),
        bandwidth: any(1e7, 1e12),
    }
}

const DIMS: [&str; 4] = ["b", "c", "d", "e"];

/// A graph of up to 8 ops over up to 3 dimensions each, placed anywhere on a mesh of one or two axes.
pub fn case(seed: u64) -> Case {
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

/// D1 to D2 to D1, for any tokens, widths and mesh.
pub fn mlp(random: &mut Random) -> Case {
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
