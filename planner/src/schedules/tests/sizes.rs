//! Every kind over many sizes: right, runnable, within its memory, or refused with a reason.

use ir::schedule::{Kind, Schedule};

use super::{made, size};
use crate::schedules::SCHEDULES;
use crate::schedules::check::check;
use crate::schedules::figures::{figures, ideal};
use crate::schedules::refused::Size;

/// Whether every stage does the actions of a kind in the order of micro-batches.
fn in_order(schedule: &Schedule, kinds: &[Kind]) -> bool {
    (0..schedule.stages()).all(|stage| {
        let of = |a: &&ir::schedule::Action| a.stage == stage && kinds.contains(&a.kind);
        schedule.rows[schedule.homes[stage]].iter().filter(of).is_sorted_by_key(|a| a.microbatch)
    })
}

#[test]
fn every_kind_and_size_is_right_or_refused() {
    let mut refused = 0;
    for kind in SCHEDULES {
        for (stages, microbatches, virtuals) in sizes() {
            let at = format!("{} P={stages} M={microbatches} L={virtuals}", kind.name);
            let Ok(schedule) = made(kind.name, &size(stages, microbatches, virtuals)) else {
                refused += 1;
                assert_ne!(kind.virtuals, virtuals, "{at}");
                continue;
            };
            assert_eq!(check(&schedule), Ok(()), "{at}\n{schedule}");
            assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()), "{at}");
            assert!(in_order(&schedule, &[Kind::Forward]), "{at}");
            assert!(in_order(&schedule, &[Kind::Backward, Kind::Input]), "{at}");
            assert!(in_order(&schedule, &[Kind::Backward, Kind::Weight]), "{at}");
            let figures = figures(kind.name, &schedule).unwrap();
            let looped = virtuals == 1 || microbatches >= stages;
            let v = ["zb-v", "dualpipe-v"].contains(&kind.name) && stages > 1;
            assert_eq!(figures.forward_slots.is_some(), looped && !v, "{at}");
        }
    }
    // Of L 1 to 4 six kinds have one.
    assert_eq!(refused, 6 * 3 * 8 * 16);
}

fn sizes() -> impl Iterator<Item = (usize, usize, usize)> {
    let of = |p| (1..=16).flat_map(move |m| (1..=4).map(move |l| (p, m, l)));
    (1..=8).flat_map(of)
}

#[test]
fn every_group_is_right() {
    for (stages, microbatches, virtuals) in sizes().filter(|(_, _, l)| *l > 1) {
        for group in stages.min(microbatches)..=microbatches {
            let size = Size { group: Some(group), ..size(stages, microbatches, virtuals) };
            let at = format!("{size:?}");
            let schedule = made("interleaved", &size).unwrap();
            assert_eq!(check(&schedule), Ok(()), "{at}");
            let makespan = ideal(&schedule).unwrap().makespan;
            let (p, m, l) = (stages as f64, microbatches as f64, virtuals as f64);
            // No group is smaller than the pipeline, so no loop is late: nothing idles but the pipe's ends.
            let least = 3.0 * (m + (p - 1.0) / l);
            assert!(m < p || makespan <= least + 1e-9, "{at}: {makespan} {least}");
        }
    }
}

#[test]
fn activations_stay_within_their_bounds() {
    for (stages, microbatches, _) in sizes() {
        let in_flight = |kind, virtuals| {
            ideal(&made(kind, &size(stages, microbatches, virtuals)).unwrap()).unwrap().in_flight
        };
        let at = format!("P={stages} M={microbatches}");
        let left = |s: usize| (stages - s).min(microbatches) as f64;
        assert_eq!(in_flight("1f1b", 1), (0..stages).map(left).collect::<Vec<_>>(), "{at}");
        for (kind, virtuals, most) in [
            ("gpipe", 1, microbatches as f64),
            ("looping", 2, microbatches as f64),
            ("zb-h1", 1, stages as f64),
            ("zb-h2", 1, (2 * stages - 1) as f64),
            ("zb-v", 2, stages as f64),
            ("dualpipe-v", 2, stages as f64 + 0.5),
        ] {
            let got = in_flight(kind, virtuals);
            assert!(got.iter().all(|x| *x <= most.min(microbatches as f64)), "{kind} {at}: {got:?}");
        }
    }
}
