//! The program of every kind of schedule passes, for every size that the kind has. A tenth of them is tried;
//! `MESHC_PIPES=all` tries all.

use std::collections::BTreeMap;

use ir::ShardedGraph;
use meshc_tests::chain::{Build, chain, compiled, knotted, lowered, sharded, table};
use planner::check::check;
use planner::numeric::{all_feeds, program};
use planner::schedules::SCHEDULES;

/// Checks the programs of a model for every `step`-th size; says how many pass, and how many sizes are refused.
fn sweep(model: Build, step: usize) -> (usize, usize) {
    let (mut passed, mut refused, mut at, mut faults) = (0, 0, 0, Vec::new());
    for stages in 1..=8 {
        // What is split does not depend on the order of actions.
        let mut known: BTreeMap<usize, ShardedGraph> = BTreeMap::new();
        for (virtuals, kind, microbatches) in sizes() {
            let Ok(schedule) = table(kind, stages, virtuals, microbatches) else {
                refused += 1;
                continue;
            };
            at += 1;
            if at % step != 0 {
                continue;
            }
            let new = || sharded(model, &format!("pp={stages}"), stages * virtuals, schedule.clone());
            let compiled = lowered(known.entry(virtuals).or_insert_with(new), schedule);
            match check(&compiled.sharded, &compiled.program) {
                Ok(_) => passed += 1,
                Err(e) => {
                    let size = format!("{kind} P={stages} L={virtuals} M={microbatches}");
                    faults.push(format!("{size}: {} faults, first {}", e.len(), e[0]));
                }
            }
        }
    }
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), passed + faults.len(), faults.join("\n"));
    (passed, refused)
}

fn sizes() -> impl Iterator<Item = (usize, &'static str, usize)> {
    let kinds = |l| SCHEDULES.iter().map(move |kind| (l, kind.name));
    (1..=4).flat_map(kinds).flat_map(|(l, kind)| (1..=16).map(move |m| (l, kind, m)))
}

fn step() -> usize {
    if std::env::var("MESHC_PIPES").is_ok_and(|v| v == "all") { 1 } else { 10 }
}

#[test]
fn the_program_of_every_schedule_ends() {
    let (passed, refused) = sweep(chain, step());
    println!("{passed} programs pass, {refused} sizes are refused");
}

#[test]
fn so_does_that_of_a_model_whose_stages_share_more_than_activations() {
    let (passed, _) = sweep(knotted, 3 * step());
    println!("{passed} programs of the knotted model pass");
}

/// Within the tolerance of [`program`]: 2e-4 of a tensor's largest number, and ten times that for parameters.
#[test]
fn every_kind_leaves_what_one_device_leaves() {
    for kind in SCHEDULES {
        for (mesh, stages, microbatches) in [("pp=2", 2, 3), ("pp=3", 3, 4), ("dp=2,pp=2", 2, 2)] {
            let schedule = table(kind.name, stages, kind.virtuals, microbatches).unwrap();
            for model in [chain, knotted] {
                let whole = compiled(model, mesh, stages * kind.virtuals, schedule.clone());
                let feeds = all_feeds(&whole.sharded, 5);
                let compared = program(&whole.sharded, &whole.program, &feeds, 2).unwrap();
                compared.unwrap_or_else(|wrong| panic!("{} on {mesh}: {wrong:?}", kind.name));
            }
        }
    }
}
