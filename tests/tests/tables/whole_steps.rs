//! A whole training step, its inputs and states placed anywhere on any mesh, and its nodes split in any way: every value
//! is what one device computes. `MESHC_STEPS=1500` tries more.

use std::collections::BTreeMap;

use ir::composite::{attention, cross_entropy, layer_norm, rms_norm, rotary, rotation, silu};
use ir::dsl::Model;
use ir::state::{AdamW, Init};
use ir::{DType, Graph, Mesh, Name, Sharding};
use meshc_tests::meaning::{any_ways, equals_one_device, feeds, step_by};
use meshc_tests::random::{Random, seeds_by};
use runtime::eval::eval;
use runtime::lockstep::Kernel;

/// A small language model: tied embedding, one block with attention and a hidden layer.
fn model() -> Graph {
    let mut m = Model::new();
    for (name, size) in [("b", 2), ("s", 3), ("t", 3), ("d", 4), ("f", 6), ("v", 29), ("kv", 2), ("group", 2)]
    {
        m.dim(name, size);
    }
    m.dim("two", 2);
    m.dim("h", 1);
    let [tokens, labels, position] =
        ["tokens", "labels", "position"].map(|name| m.input(name, DType::I32, "b s"));
    let normal = Init::Normal(1.0);
    let embedding = m.parameter("embedding", "v d", normal);
    let [norm, scale, shift] = ["norm", "scale", "shift"].map(|name| m.parameter(name, "d", Init::Ones));
    let query = m.parameter("query", "d kv group two h", normal);
    let [key, value] = ["key", "value"].map(|name| m.parameter(name, "d kv two h", normal));
    let out = m.parameter("out", "kv group two h d", normal);
    let up = m.parameter("up", "d f", normal);
    let bias = m.parameter("bias", "d", normal);
    let down = m.parameter("down", "f d", normal);
    let x = m.gather("b s d", &embedding, "v", &tokens);
    let n = rms_norm(&mut m, &x, &norm, 1e-3);
    let by = rotation(&mut m, &position, 100.0);
    let q = m.einsum("b s kv group two h", &[&n, &query]);
    let q = rotary(&mut m, &q, &by);
    let k = m.einsum("b s kv two h", &[&n, &key]);
    let k = rotary(&mut m, &k, &by);
    let v = m.einsum("b s kv two h", &[&n, &value]);
    let [k, v] = [k, v].map(|x| m.rename(&x, "s", "t"));
    let a = attention(&mut m, &q, &k, &v, &position, 0.7);
    let a = m.einsum("b s d", &[&a, &out]);
    let x = m.add(&[&x, &a]);
    let n = layer_norm(&mut m, &x, &scale, &shift, 1e-3);
    let h = m.einsum("b s f", &[&n, &up]);
    let h = silu(&mut m, &h);
    let h = m.einsum("b s d", &[&h, &down]);
    let x = m.add(&[&x, &h, &bias]);
    let logits = m.einsum("b s v", &[&x, &embedding]);
    let (sum, count) = cross_entropy(&mut m, &logits, &labels);
    m.loss(&sum, &count);
    let mut graph = m.finish().unwrap_or_else(|e| panic!("{}", e[0]));
    graph.optimizer = Some(AdamW { clip: Some(1.0), weight_decay: 0.1, ..AdamW::default() });
    graph
}

/// Each axis splits some dimension of each input and state, or none.
fn places(graph: &Graph, mesh: &Mesh, random: &mut Random) -> BTreeMap<Name, Sharding> {
    let inputs = graph.inputs.iter().map(|i| (&i.name, i.dims.len()));
    let states = graph.states.iter().map(|s| (&s.name, s.dims.len()));
    let mut place = |dims: usize| {
        let mut sharding = Sharding::replicated(dims);
        for axis in random.shuffled(mesh.all().collect()) {
            let dim = random.below(dims + 1);
            if dim < dims {
                sharding.dims[dim].push(axis);
            }
        }
        sharding
    };
    inputs.chain(states).map(|(name, dims)| (name.clone(), place(dims))).collect()
}

/// A mesh and places for each seed; `kernel` is that of the ranks.
///
/// # Errors
/// The first value that is not what one device computes.
pub fn check(kernel: Kernel<f64>, seeds: std::ops::Range<u64>) -> Result<(), String> {
    let graph = model();
    for seed in seeds {
        let random = &mut Random::new(seed);
        let mesh = *random.pick(&["x=2", "x=3", "x=2,y=2", "x=3,y=2", "x=2,y=2,z=2", "x=1,y=2,z=3"]);
        let mesh = Mesh::parse(mesh).unwrap_or_else(|e| panic!("{e}"));
        let places = places(&graph, &mesh, random);
        let ways = Random::new(seed);
        let sharded = step_by(graph.clone(), &mesh, places, &|s| any_ways(s, &mut ways.clone()));
        let feeds = feeds(&sharded.graph, BTreeMap::new(), seed);
        equals_one_device(&sharded, &feeds, kernel).map_err(|e| format!("seed {seed}: {e}"))?;
    }
    Ok(())
}

#[test]
fn a_step_placed_anywhere_equals_one_device() {
    check(eval, seeds_by("MESHC_STEPS", 40)).unwrap_or_else(|e| panic!("{e}"));
}
