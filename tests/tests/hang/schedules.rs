//! The program of every kind of schedule passes, for every size that the kind has. A tenth of them is tried;
//! `MESHC_PIPES=all` tries all.

use std::collections::BTreeMap;

use ir::ShardedGraph;
use meshc_tests::chain::{lowered, sharded, table};
use planner::check::check;
use planner::schedules::SCHEDULES;

#[test]
fn the_program_of_every_schedule_ends() {
    let all = std::env::var("MESHC_PIPES").is_ok_and(|v| v == "all");
    let (mut passed, mut refused, mut faults) = (0, 0, Vec::new());
    let mut at = 0;
    for stages in 1..=8 {
        // What is split does not depend on the order of actions.
        let mut known: BTreeMap<usize, ShardedGraph> = BTreeMap::new();
        for virtuals in 1..=4 {
            for kind in SCHEDULES {
                for microbatches in 1..=16 {
                    let Ok(schedule) = table(kind.name, stages, virtuals, microbatches) else {
                        refused += 1;
                        continue;
                    };
                    at += 1;
                    if !all && at % 10 != 0 {
                        continue;
                    }
                    let whole = known.entry(virtuals).or_insert_with(|| {
                        sharded(&format!("pp={stages}"), stages * virtuals, schedule.clone())
                    });
                    let compiled = lowered(whole, schedule);
                    match check(&compiled.sharded, &compiled.program) {
                        Ok(_) => passed += 1,
                        Err(e) => faults.push(format!(
                            "{} P={stages} L={virtuals} M={microbatches}: {} faults, first {}",
                            kind.name,
                            e.len(),
                            e[0]
                        )),
                    }
                }
            }
        }
    }
    println!("{passed} programs pass, {refused} sizes are refused");
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), passed + faults.len(), faults.join("\n"));
}
