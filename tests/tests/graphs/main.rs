//! Random graphs of all ops, on random meshes, placed anywhere: each compiles, means what it did, and runs as it means.
//! `MESHC_GRAPHS=2000` tries more of them; `MESHC_SEED=17 MESHC_GRAPHS=1` one again.

mod build;
mod check;
mod dice;
mod faults;
mod nodes;
mod reach;
mod recipe;

use std::collections::BTreeMap;

use meshc_tests::random::seeds_by;

use build::Builder;
use recipe::Recipe;

/// What is wrong with the graph of a recipe.
fn fault(recipe: &Recipe) -> Option<String> {
    check::check(&Builder::build(recipe), recipe.seed).err()
}

/// What a fault is called: its first line up to a number.
fn kind(fault: &str) -> String {
    fault.split(|c: char| c.is_ascii_digit() || c == '\n').next().unwrap_or("").to_string()
}

/// The smallest graph with a fault of the same kind, and where it lies.
fn smallest(recipe: &Recipe, of: &str) -> String {
    let places = |r: &Recipe| Builder::build(r).places.at.keys().map(ToString::to_string).collect();
    let small = recipe.shrunk(&|r| fault(r).is_some_and(|f| kind(&f) == of), &places);
    let case = Builder::build(&small);
    let graph = ir::ShardedGraph::new(case.graph, case.mesh, case.places);
    format!("{}\n{graph}", fault(&small).unwrap_or_default())
}

#[test]
fn every_graph_compiles_and_runs_as_it_means() {
    hold(&Recipe::draw, 100);
}

#[test]
fn every_graph_on_a_pipeline_runs_as_it_means() {
    hold(&Recipe::draw_pipeline, 60);
}

/// The graphs of so many seeds, or as many as were asked for, have no fault.
fn hold(draw: &dyn Fn(u64) -> Recipe, normal: u64) {
    let mut found: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for seed in seeds_by("MESHC_GRAPHS", normal) {
        if let Some(fault) = fault(&draw(seed)) {
            found.entry(kind(&fault)).or_default().push(seed);
        }
    }
    let report = |(kind, seeds): (&String, &Vec<u64>)| {
        let smallest = smallest(&draw(seeds[0]), kind);
        format!("{kind}: seeds {seeds:?}\nthe smallest of its kind: {smallest}")
    };
    let reports: Vec<String> = found.iter().map(report).collect();
    assert!(reports.is_empty(), "\n{}", reports.join("\n"));
}
