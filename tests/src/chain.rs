//! A chain of small layers, cut into the stages of a pipeline: as little of a model as has activations, gradients, labels
//! and parameters everywhere.

use std::collections::BTreeMap;

use ir::composite::cross_entropy;
use ir::dsl::Model;
use ir::program::Program;
use ir::schedule::Schedule;
use ir::state::{AdamW, Init, Input};
use ir::{DType, Graph, Mesh, Name, Places, ShardedGraph, Unary};
use passes::Compiled;
use planner::choose::choose;
use planner::conventions::{free, places};
use planner::schedules::named;
use planner::schedules::refused::{Refused, Size};
use planner::stages::cut;
use runtime::local::{HostTensor, Local, RunError, Taps};
use runtime::lockstep::Feeds;

use crate::whole::here;

/// A model of so many layers.
pub type Build = fn(usize) -> Graph;

/// The forward pass of so many layers, whose activations and gradients all have one size.
pub fn chain(layers: usize) -> Graph {
    build(layers, false)
}

/// The same, where what the first layer makes is also used behind the last, and the head is the first layer's parameter: some
/// messages pass stages by, and a gradient is the sum of those of two stages.
pub fn knotted(layers: usize) -> Graph {
    build(layers, true)
}

fn build(layers: usize, knotted: bool) -> Graph {
    let mut m = Model::new();
    for (name, size) in [("b", 4), ("s", 2), ("d", 6), ("e", 6), ("v", 6)] {
        m.dim(name, size);
    }
    let mut x = m.input("x", DType::F32, "b s d");
    let mut first = None;
    let labels = m.input("labels", DType::I32, "b s");
    for layer in 0..layers {
        m.layer(layer as u32);
        let weight = m.parameter(&format!("w{layer}"), "d e", Init::Normal(0.4));
        let y = m.einsum("b s e", &[&x, &weight]);
        let y = m.rename(&y, "e", "d");
        x = m.unary(Unary::Tanh, &y);
        first.get_or_insert((weight, x.clone()));
    }
    m.behind_layers();
    let head = match first.filter(|_| knotted) {
        Some((weight, y)) => {
            x = m.add(&[&x, &y]);
            m.rename(&weight, "e", "v")
        }
        None => m.parameter("head", "d v", Init::Normal(0.4)),
    };
    let logits = m.einsum("b s v", &[&x, &head]);
    let (sum, count) = cross_entropy(&mut m, &logits, &labels);
    m.loss(&sum, &count);
    m.finish().expect("a chain is a model")
}

/// The table of a kind.
///
/// # Errors
/// A size for which the kind has none.
pub fn table(kind: &str, stages: usize, virtuals: usize, microbatches: usize) -> Result<Schedule, Refused> {
    let size = Size { stages, virtuals, microbatches, group: None };
    (named(kind).expect("a kind").table)(&size)
}

/// The training step of a model, cut into the stages of a table, on a mesh, as far as it does not depend on the order of
/// the table's actions.
pub fn sharded(model: Build, mesh: &str, layers: usize, schedule: Schedule) -> ShardedGraph {
    let mut graph = model(layers);
    graph.optimizer = Some(AdamW::default());
    graph.stages = cut(&vec![1; graph.depth()], schedule.stages());
    let mesh = Mesh::parse(mesh).expect("a mesh");
    let mut placed = Places::from(places(&graph, &mesh));
    placed.free = free(&graph, &placed.at, &mesh);
    placed.schedule = schedule;
    passes::GRAPH.iter().for_each(|pass| (pass.run)(&mut graph));
    let mut sharded = ShardedGraph::new(graph, mesh, placed);
    let cluster = here();
    passes::shard(&mut sharded, &|sharded| choose(sharded, &cluster), &mut |_, _| {});
    sharded
}

/// The program of a training step whose table is another.
pub fn lowered(sharded: &ShardedGraph, schedule: Schedule) -> Compiled {
    let mut sharded = sharded.clone();
    sharded.decisions.schedule = schedule;
    let mut program = passes::lower(&sharded);
    passes::PROGRAM.iter().for_each(|pass| (pass.run)(&mut program));
    Compiled { sharded, program }
}

/// The training step of a model on a mesh.
pub fn compiled(model: Build, mesh: &str, layers: usize, schedule: Schedule) -> Compiled {
    let sharded = sharded(model, mesh, layers, schedule.clone());
    lowered(&sharded, schedule)
}

/// What a step leaves behind, as bits: every state, and what is tapped.
pub type Left = BTreeMap<Name, Vec<u32>>;

/// Runs a step of a program on CPUs.
///
/// # Errors
/// What the backend says of it.
pub fn left(program: &Program, graph: &Graph, feeds: &[Feeds<f64>]) -> Result<Left, RunError> {
    let mut local = Local::new(program, 1)?;
    for state in &graph.states {
        let whole = &feeds[0][&state.name];
        if state.dtype.is_float() {
            local.fill_state::<RunError>(&state.name, &mut |ranges, out| {
                let piece =
                    ranges.iter().enumerate().fold(whole.clone(), |t, (dim, r)| t.slice(dim, r.clone()));
                out.iter_mut().zip(&piece.data).for_each(|(o, x)| *o = *x as f32);
                Ok(())
            })?;
        } else {
            local.set_integer(&state.name, whole.data[0] as i32)?;
        }
    }
    let host = |feeds: &Feeds<f64>| {
        let one = |i: &Input| {
            let data = &feeds[&i.name].data;
            let tensor = match i.dtype.is_float() {
                true => HostTensor::F32(data.iter().map(|x| *x as f32).collect()),
                false => HostTensor::I32(data.iter().map(|x| *x as i32).collect()),
            };
            (i.name.clone(), tensor)
        };
        graph.inputs.iter().map(one).collect::<BTreeMap<Name, HostTensor>>()
    };
    let host: Vec<_> = feeds.iter().map(host).collect();
    let names = local.taps();
    let mut taps = Taps::of(names.iter().map(|t| &**t));
    local.step(&host, &mut taps)?;
    let mut left = Left::new();
    let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect();
    for name in &names {
        left.insert(format!("tap {name}").into(), taps.get(name).map_or(Vec::new(), |t| bits(&t.data)));
    }
    for state in graph.states.iter().filter(|s| s.dtype.is_float()) {
        left.insert(state.name.clone(), bits(&local.read_state(&state.name)?.data));
    }
    Ok(left)
}
