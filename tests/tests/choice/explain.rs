//! What runs is proved equal to what was written, by a chain of rows, for every product of every model.

use ir::{Mesh, Places, ShardedGraph};
use meshc_tests::oracle::read;
use meshc_tests::random::Random;
use meshc_tests::whole::{MODELS, here};
use planner::choose::best;
use planner::conventions::{free, places, refine};
use planner::explain::egraph::chain;
use planner::explain::{explain, needs, scope, terms};

use crate::cases::{case, mlp};

/// The nodes of a graph that no chain explains.
fn unexplained(
    sharded: &ShardedGraph,
    prices: &planner::cluster::Cluster,
    only_products: bool,
) -> Vec<String> {
    let best = best(sharded, prices);
    let mut missing = Vec::new();
    for (i, node) in sharded.graph.nodes.iter().enumerate() {
        let skipped = node.args.is_empty() || node.results.is_empty() || node.op == ir::Op::Reshard;
        if skipped || only_products && !node.is_product() {
            continue;
        }
        let scope = scope(sharded, &best, i);
        for need in needs(sharded, &best, i) {
            let (from, to) = terms(&scope, &best, i, &need);
            match chain(&scope, &from, &to) {
                Some(steps) => {
                    assert_eq!((&steps[0].term, &steps[steps.len() - 1].term), (&from, &to));
                    assert!(steps[1..].iter().all(|s| s.row.is_some()));
                }
                None => missing.push(format!("{} {}", node.op, node.signature)),
            }
        }
    }
    missing
}

#[test]
fn every_node_of_a_random_graph_is_explained() {
    for seed in 0..60 {
        let case = case(seed);
        assert_eq!(
            unexplained(&case.sharded, &case.cluster, false),
            Vec::<String>::new(),
            "{}",
            case.sharded
        );
    }
    for seed in 0..20 {
        let case = mlp(&mut Random::new(seed));
        assert_eq!(
            unexplained(&case.sharded, &case.cluster, false),
            Vec::<String>::new(),
            "{}",
            case.sharded
        );
    }
}

#[test]
fn every_product_of_every_model_is_explained() {
    for (model, mesh) in
        MODELS.iter().zip(["dp=2,tp=2", "tp=4", "tp=2", "dp=4", "tp=3", "tp=8", "dp=2,tp=4", "tp=5,dp=2"])
    {
        let oracle = read(model);
        let config = models::Config::read(&oracle.folder).unwrap();
        let mut graph = models::build(&config, models::Shape { batch: 4, sequence: 16 }).unwrap();
        graph.optimizer = Some(oracle.adamw());
        let mesh = refine(&graph, &Mesh::parse(mesh).unwrap());
        let mut at = Places::from(places(&graph, &mesh));
        at.free = free(&graph, &at.at, &mesh);
        passes::GRAPH.iter().for_each(|pass| (pass.run)(&mut graph));
        let mut sharded = ShardedGraph::new(graph, mesh, at);
        passes::PLACED.iter().for_each(|pass| (pass.run)(&mut sharded));
        assert_eq!(unexplained(&sharded, &here(), true), Vec::<String>::new(), "{model}");
        let prices = here();
        let best = best(&sharded, &prices);
        let parameter = sharded.graph.states.iter().find(|s| s.dims.len() > 1).unwrap().name.to_string();
        let text = explain(&sharded, &best, &parameter).unwrap();
        assert!(text.contains("by split "), "{model} {parameter}: {text}");
        let unknown = explain(&sharded, &best, "nothing").unwrap_err().to_string();
        assert!(unknown.starts_with("there is no tensor `nothing`; there are "), "{unknown}");
    }
}
