//! The tensor-parallel MLP: what is gathered and what is scattered, read off the program, and the bytes of the other way.

use ir::ShardedGraph;
use meshc_tests::whole::{here, wire};
use planner::choose::best;
use planner::choose::reasons::reasons;
use planner::cost::call;

use crate::cases::read;

/// Wire bytes of a rank, read off the program, by kind of collective.
fn wire_bytes(sharded: &ShardedGraph) -> Vec<(&'static str, f64)> {
    let program = passes::lower(sharded);
    let stage = &program.stages[0];
    let all = stage.segments.iter().flat_map(|s| &s.instructions).filter(|i| !i.transfers().is_empty());
    all.map(|i| {
        let parts = i.transfers();
        (parts[0].step.name(), call(parts, stage, &program.mesh).wire_bytes)
    })
    .collect()
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
