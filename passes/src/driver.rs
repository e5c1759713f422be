//! Runs all passes in order, and verifies after each.

use ir::program::Program;
use ir::verify_program::verify_program;
use ir::{Decisions, Graph, Mesh, Places, ShardedGraph, verify};

use crate::{CHOSEN, GRAPH, PLACED, PROGRAM, Pass, lower};

/// What compiling gives.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The training step on the mesh.
    pub sharded: ShardedGraph,
    /// What runs.
    pub program: Program,
}

/// Is told the name and the text of every form.
pub type Trace<'a> = &'a mut dyn FnMut(&'static str, &dyn std::fmt::Display);

/// Writes the decisions of a graph on a mesh.
pub type Choose<'a> = &'a dyn Fn(&ShardedGraph) -> Decisions;

/// Compiles a graph whose inputs and states lie at `places`.
///
/// # Panics
/// If a pass leaves what the verifier refuses: a fault of meshc, never of the user. What the user gives is verified
/// before.
pub fn compile(
    graph: Graph,
    mesh: &Mesh,
    places: impl Into<Places>,
    choose: Choose,
    trace: Trace,
) -> Compiled {
    let mut graph = graph;
    trace("graph", &graph);
    for pass in GRAPH {
        (pass.run)(&mut graph);
        expect(pass.name, verify::verify(&graph));
        trace(pass.name, &graph);
    }
    let mut sharded = ShardedGraph::new(graph, mesh.clone(), places);
    shard(&mut sharded, choose, trace);
    let mut program = lower(&sharded);
    expect("lower", verify_program(&program));
    trace("lower", &program);
    for pass in PROGRAM {
        (pass.run)(&mut program);
        expect(pass.name, verify_program(&program));
        trace(pass.name, &program);
    }
    Compiled { sharded, program }
}

/// Splits everything in a graph on a mesh.
///
/// # Panics
/// As [`compile`].
pub fn shard(sharded: &mut ShardedGraph, choose: Choose, trace: Trace) {
    let mut each = |passes: &[Pass<ShardedGraph>], sharded: &mut ShardedGraph| {
        for pass in passes {
            (pass.run)(sharded);
            expect(pass.name, verify::verify_sharded(sharded));
            trace(pass.name, sharded);
        }
    };
    each(PLACED, sharded);
    sharded.decisions = choose(sharded);
    each(CHOSEN, sharded);
}

fn expect<E: std::fmt::Display>(pass: &str, verified: Result<(), Vec<E>>) {
    if let Err(errors) = verified {
        let all: Vec<String> = errors.iter().take(20).map(ToString::to_string).collect();
        panic!(
            "after {pass}, {} rules are broken; this is a fault of meshc:\n{}",
            errors.len(),
            all.join("\n")
        );
    }
}
