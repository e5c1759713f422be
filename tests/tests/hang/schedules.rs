//! The program of every kind of schedule passes, for every size that the kind has. A tenth of them is tried;
//! `MESHC_PIPES=all` tries all. So does that of tables made by chance, of which `MESHC_TABLES=2000` tries more.

use std::collections::{BTreeMap, BTreeSet};

use ir::ShardedGraph;
use ir::schedule::{Action, Kind, Schedule, loop_order, v_order};
use meshc_tests::chain::{Build, chain, compiled, knotted, lowered, sharded, table};
use meshc_tests::random::{Random, seeds_by};
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

fn step(normal: usize) -> usize {
    if std::env::var("MESHC_PIPES").is_ok_and(|v| v == "all") { 1 } else { normal }
}

/// A table that runs, in no order that anybody would write: whatever can be done next is, by chance.
fn by_chance(rows: usize, virtuals: usize, microbatches: usize, random: &mut Random) -> Schedule {
    let homes = if random.below(2) == 0 { loop_order(rows, virtuals) } else { v_order(rows, virtuals) };
    let stages = homes.len();
    let split = random.below(2) == 0;
    let kinds: &[Kind] =
        if split { &[Kind::Forward, Kind::Input, Kind::Weight] } else { &[Kind::Forward, Kind::Backward] };
    let mut schedule = Schedule { rows: vec![Vec::new(); rows], homes };
    // How many micro-batches each stage has done of each kind: those of a stage come in their order.
    let mut next: BTreeMap<(usize, Kind), usize> = BTreeMap::new();
    let mut given: BTreeSet<Action> = BTreeSet::new();
    // Some rows would rather go forward, some backward.
    let eager = random.below(3);
    loop {
        let all = (0..stages).flat_map(|k| kinds.iter().map(move |kind| (k, *kind)));
        let ready: Vec<Action> = all
            .map(|(k, kind)| Action::new(k, kind, next.get(&(k, kind)).copied().unwrap_or(0)))
            .filter(|a| a.microbatch < Some(microbatches) && a.needs(stages).all(|n| given.contains(&n)))
            .collect();
        let liked: Vec<Action> =
            ready.iter().copied().filter(|a| eager != 0 || a.kind == Kind::Forward).collect();
        let Some(action) = liked.get(random.below(liked.len().max(1))).or(ready.first()).copied() else {
            break;
        };
        *next.entry((action.stage, action.kind)).or_insert(0) += 1;
        given.insert(action.gives());
        let home = schedule.homes[action.stage];
        schedule.rows[home].push(action);
    }
    for k in 0..stages {
        let home = schedule.homes[k];
        schedule.rows[home].push(Action::optimizer(k));
    }
    schedule
}

#[test]
fn so_does_that_of_a_table_made_by_chance() {
    for seed in seeds_by("MESHC_TABLES", 60) {
        let random = &mut Random::new(seed);
        let [rows, virtuals, microbatches] = [1 + random.below(5), 1 + random.below(3), 1 + random.below(7)];
        let schedule = by_chance(rows, virtuals, microbatches, random);
        assert_eq!(planner::schedules::check::check(&schedule), Ok(()), "seed {seed}\n{schedule}");
        let model = if random.below(2) == 0 { chain } else { knotted };
        let whole = compiled(model, &format!("pp={rows}"), rows * virtuals, schedule.clone());
        if let Err(e) = check(&whole.sharded, &whole.program) {
            panic!("seed {seed}: {} faults, first {}\n{schedule}", e.len(), e[0]);
        }
    }
}

#[test]
fn the_program_of_every_schedule_ends() {
    let (passed, refused) = sweep(chain, step(10));
    println!("{passed} programs pass, {refused} sizes are refused");
}

#[test]
fn so_does_that_of_a_model_whose_stages_share_more_than_activations() {
    let (passed, _) = sweep(knotted, step(30));
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
