//! Tables with planted faults: each is found, and the finding names stage, micro-batch and action.

use ir::schedule::{Action, Kind, Schedule};

use super::table;
use crate::schedules::SCHEDULES;
use crate::schedules::check::check;
use crate::schedules::figures::in_units;
use crate::schedules::read::read;

#[test]
fn planted_faults_are_named() {
    for (text, found) in [
        (
            "0F0 0B0 0F1 0O / 1F0 1B0 1F1 1B1 1O",
            "stage 0, micro-batch 1: 0B1 is missing, and belongs to rank 0",
        ),
        (
            "0F0 0B0 0B1 0O / 1F0 1B0 1F1 1B1 1O",
            "stage 0, micro-batch 1: 0F1 is missing, and belongs to rank 0",
        ),
        ("0F0 0I0 0O", "stage 0, micro-batch 0: 0W0 is missing, and belongs to rank 0"),
        ("0F0 0F0 0B0 0O", "stage 0, micro-batch 0: 0F0 is done 2 times"),
        ("0F0 0B0 0O 0O", "stage 0: 0O is done 2 times"),
        ("0F0 0B0 0W0 0O", "stage 0, micro-batch 0: 0W0 is part of 0B0, which is done too"),
        (
            "0F0 0B0 0F1 0B1 0O 1F1 / 1F0 1B0 1B1 1O",
            "stage 1, micro-batch 1: 1F1 is on rank 0, but its stage lives on rank 1",
        ),
        ("0F0 0W0 0I0 0O", "stage 0, micro-batch 0: 0W0 comes before 0I0, which it needs"),
        ("0B0 0F0 0O", "stage 0, micro-batch 0: 0B0 comes before 0F0, which it needs"),
        ("0F0 0B0 0O 0F1 0B1", "stage 0, micro-batch 1: 0F1 comes after 0O, and the optimizer is last"),
        ("0P0 0F0 0B0 0O", "0P0 on rank 0 stands in no table: it is done once, before everything"),
        (
            "0F0 0B0 0O 2F0 2B0 2O / 1F0 1B0 1O",
            "rank 1 has 1 stages, but rank 0 has 2; every rank needs as many",
        ),
        (
            "0F0 0B0 0F7 0B7 0O",
            "micro-batch 7 is the last, but the table has no more than 5 actions; the first is 0",
        ),
        (
            "0F0 0B0 0F1 0B1 0O / 1F1 1F0 1B0 1B1 1O",
            "ranks wait for each other: rank 0 stands at 0B0, which needs 1B0, after 1F1 of rank 1; rank 1 stands at 1F1, \
             which needs 0F1, after 0B0 of rank 0",
        ),
        (
            "0F0 3F0 3B0 0B0 0O 3O / 1F0 1B0 2F0 2B0 1O 2O",
            "stage 1, micro-batch 0: 1B0 comes before 2B0, which it needs",
        ),
    ] {
        let schedule: Schedule = text.replace(" / ", "\n").parse().unwrap();
        let faults: Vec<String> = check(&schedule).unwrap_err().iter().map(ToString::to_string).collect();
        assert!(faults.contains(&found.to_string()), "{text}:\n{}", faults.join("\n"));
    }
}

#[test]
fn the_cycle_is_the_shortest() {
    // Ranks 0 and 1 wait for each other; ranks 2 and 3 wait for them.
    let text = "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3B0 3F1 3B1\n";
    let found = read(text, "pipe.txt").unwrap_err().to_string();
    assert_eq!(
        found,
        "pipe.txt: the schedule is not right:\n  ranks wait for each other: rank 0 stands at 0B0, which needs 1B0, after \
         1F1 of rank 1; rank 1 stands at 1F1, which needs 0F1, after 0B0 of rank 0"
    );
}

#[test]
fn what_is_in_no_row_is_not_waited_for() {
    let schedule: Schedule = "0F0 0B0 0O\n1F0 1O".parse().unwrap();
    let found = in_units(&schedule).unwrap_err().to_string();
    assert_eq!(found, "rank 0 stands at 0B0, which needs 1I0, and no row has it");
}

#[test]
fn a_file_of_nonsense_is_refused_at_once() {
    let row: Vec<String> = (0..20_000).map(|i| format!("{i}F{i}")).collect();
    let found = read(&row.join(" "), "x").unwrap_err().to_string();
    assert_eq!(found.lines().count(), 22, "{found}");
}

/// The table with one action taken out, done twice, or moved to the next rank, for every action.
fn spoiled(schedule: &Schedule) -> Vec<(String, Schedule)> {
    let mut spoiled = Vec::new();
    for (rank, row) in schedule.rows.iter().enumerate() {
        for (at, action) in row.iter().enumerate() {
            let mut with = |what: &str, change: &dyn Fn(&mut Vec<Vec<Action>>)| {
                let mut changed = schedule.clone();
                change(&mut changed.rows);
                spoiled.push((format!("{action} {what}"), changed));
            };
            with("dropped", &|rows| rows[rank].retain(|a| a != action));
            with("doubled", &|rows| rows[rank].insert(at, *action));
            with("elsewhere", &|rows| {
                let next = (rank + 1) % rows.len();
                rows[rank].remove(at);
                let to = at.min(rows[next].len());
                rows[next].insert(to, *action);
            });
        }
    }
    spoiled
}

#[test]
fn every_dropped_doubled_or_moved_action_is_found() {
    for kind in SCHEDULES {
        let schedule = table(kind.name, 4, 8, kind.virtuals);
        for (what, spoiled) in spoiled(&schedule) {
            assert!(check(&spoiled).is_err(), "{}: {what}", kind.name);
        }
    }
}

#[test]
fn swapped_neighbours_are_found_where_they_do_not_run() {
    let mut found = 0;
    for kind in SCHEDULES {
        let schedule = table(kind.name, 4, 8, kind.virtuals);
        for rank in 0..4 {
            for at in 1..schedule.rows[rank].len() {
                let mut swapped = schedule.clone();
                swapped.rows[rank].swap(at - 1, at);
                let late = swapped.rows[rank][at].kind != Kind::Optimizer
                    && swapped.rows[rank][at - 1].kind == Kind::Optimizer;
                assert_eq!(check(&swapped).is_err(), late || in_units(&swapped).is_err(), "{}", kind.name);
                found += usize::from(check(&swapped).is_err());
            }
        }
    }
    assert!(found > 100, "{found}");
}

#[test]
fn files_are_read_with_their_lines() {
    let text =
        "; by hand\n\nrank 0 | 0F0 0F1 ... 0B0 0B1\nrank 1 | 1F0 1B0 ; the rest below\nrank 1 | 1F1 1B1 1O\n";
    let schedule = read(text, "x").unwrap();
    assert_eq!(schedule.to_string(), "0F0 0F1 0B0 0B1 0O\n1F0 1B0 1F1 1B1 1O\n");
    for (text, found) in [
        ("", "x: there is no row: a line for each rank, such as `0F0 0B0 0O`"),
        ("0F0 0B0\n1F0 1C0", "x:2: `1C0` is no action: one reads 2F0 (stage, letter, micro-batch) or 2O"),
        ("rank 1 | 0F0", "x:1: rank 1 comes before rank 0: ranks stand in order"),
        ("stage 0 | 0F0", "x:1: `stage 0` names no rank: before `|` one reads `rank 0`"),
        ("0F0 0B0\n2F0 2B0", "x: stage 1 has no action, and there are stages up to 2"),
        (
            "0F0 0B0 0F1\n1F0 1B0 1F1 1B1",
            "x: the schedule is not right:\n  stage 0, micro-batch 1: 0B1 is missing, and belongs to rank 0",
        ),
    ] {
        assert_eq!(read(text, "x").unwrap_err().to_string(), found);
    }
}
