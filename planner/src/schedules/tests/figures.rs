//! Textbook figures, and ideal steps that an independent simulator gave. All are exact: times are whole numbers of a virtual
//! stage's units, divided once.

use super::{made, size, table};
use crate::schedules::figures::{figures, ideal};
use crate::schedules::refused::Size;

#[test]
fn textbook_figures() {
    for (kind, stages, microbatches, virtuals, slots, used, transfers) in [
        ("gpipe", 4, 8, 1, Some(11), 8, 3),
        ("1f1b", 4, 8, 1, Some(11), 8, 3),
        ("zb-h1", 4, 8, 1, Some(11), 8, 3),
        ("looping", 4, 8, 2, Some(19), 16, 7),
        ("interleaved", 4, 8, 2, Some(19), 16, 7),
        ("looping", 2, 4, 2, Some(9), 8, 3),
        ("interleaved", 2, 4, 2, Some(9), 8, 3),
        ("gpipe", 4, 2, 1, Some(5), 2, 3),
        ("1f1b", 4, 2, 1, Some(5), 2, 3),
        // The loop waits: 2 more slots than L M + P - 1.
        ("looping", 4, 2, 2, None, 0, 7),
        ("zb-v", 4, 8, 2, None, 0, 6),
        ("dualpipe-v", 4, 8, 2, None, 0, 6),
    ] {
        let got = figures(kind, &table(kind, stages, microbatches, virtuals)).unwrap();
        let at = format!("{kind} P={stages} M={microbatches} L={virtuals}");
        assert_eq!(got.forward_slots, slots, "{at}");
        assert_eq!(got.forward_utilization, slots.map(|s| f64::from(used) / s as f64), "{at}");
        assert_eq!(got.boundary_transfers_per_microbatch, transfers, "{at}");
        assert_eq!((got.stages, got.virtuals, got.microbatches), (stages, virtuals, microbatches), "{at}");
    }
}

/// A kind, its L, makespan and largest in-flight.
type Step = (&'static str, usize, f64, f64);

/// For P and M the steps where F, I and W take 1, a fused backward 2, and hops nothing.
#[rustfmt::skip]
const UNIT: [(usize, usize, [Step; 8]); 6] = [
    (2, 4, [("gpipe", 1, 15., 4.), ("1f1b", 1, 15., 2.), ("zb-h1", 1, 13., 2.), ("zb-h2", 1, 13., 3.), ("interleaved", 2, 13.5, 2.5),
        ("interleaved", 4, 12.75, 2.25), ("looping", 2, 13.5, 4.), ("looping", 4, 12.75, 4.)]),
    (4, 4, [("gpipe", 1, 21., 4.), ("1f1b", 1, 21., 4.), ("zb-h1", 1, 15., 4.), ("zb-h2", 1, 16., 4.), ("interleaved", 2, 16.5, 4.),
        ("interleaved", 4, 14.25, 4.), ("looping", 2, 16.5, 4.), ("looping", 4, 14.25, 4.)]),
    (4, 8, [("gpipe", 1, 33., 8.), ("1f1b", 1, 33., 4.), ("zb-h1", 1, 27., 4.), ("zb-h2", 1, 27., 7.), ("interleaved", 2, 28.5, 5.5),
        ("interleaved", 4, 26.25, 4.75), ("looping", 2, 28.5, 8.), ("looping", 4, 26.25, 8.)]),
    (4, 16, [("gpipe", 1, 57., 16.), ("1f1b", 1, 57., 4.), ("zb-h1", 1, 51., 4.), ("zb-h2", 1, 51., 7.), ("interleaved", 2, 52.5, 5.5),
        ("interleaved", 4, 50.25, 4.75), ("looping", 2, 52.5, 16.), ("looping", 4, 50.25, 16.)]),
    (8, 16, [("gpipe", 1, 69., 16.), ("1f1b", 1, 69., 8.), ("zb-h1", 1, 55., 8.), ("zb-h2", 1, 55., 15.), ("interleaved", 2, 58.5, 11.5),
        ("interleaved", 4, 53.25, 9.75), ("looping", 2, 58.5, 16.), ("looping", 4, 53.25, 16.)]),
    (8, 32, [("gpipe", 1, 117., 32.), ("1f1b", 1, 117., 8.), ("zb-h1", 1, 103., 8.), ("zb-h2", 1, 103., 15.), ("interleaved", 2, 106.5, 11.5),
        ("interleaved", 4, 101.25, 9.75), ("looping", 2, 106.5, 32.), ("looping", 4, 101.25, 32.)]),
];

#[test]
fn ideal_steps() {
    for (stages, microbatches, kinds) in UNIT {
        for (kind, virtuals, makespan, in_flight) in kinds {
            let at = format!("{kind} P={stages} M={microbatches} L={virtuals}");
            let got = ideal(&table(kind, stages, microbatches, virtuals)).unwrap();
            let most = got.in_flight.iter().copied().fold(0.0, f64::max);
            if kind == "zb-h2" {
                assert!(got.makespan <= makespan && most <= in_flight, "{at}: {} {most}", got.makespan);
            } else {
                assert_eq!((got.makespan, most), (makespan, in_flight), "{at}");
            }
            let busy = 3.0 * microbatches as f64;
            assert!((got.bubble_fraction - (1.0 - busy / got.makespan)).abs() < 1e-12, "{at}");
        }
    }
}

#[test]
fn in_flight_by_rank() {
    let chunks = |halves: [f64; 4]| halves.map(|h| h / 2.0);
    for (kind, microbatches, virtuals, in_flight) in [
        ("gpipe", 8, 1, [8.0; 4]),
        ("1f1b", 8, 1, [4.0, 3.0, 2.0, 1.0]),
        ("1f1b", 2, 1, [2.0, 2.0, 2.0, 1.0]),
        ("interleaved", 8, 2, chunks([11.0, 9.0, 7.0, 5.0])),
        ("looping", 8, 2, [8.0; 4]),
        ("zb-h1", 8, 1, [4.0; 4]),
        ("zb-h2", 8, 1, [7.0; 4]),
        ("zb-v", 8, 2, [4.0; 4]),
        ("dualpipe-v", 8, 2, [4.5; 4]),
    ] {
        let got = ideal(&table(kind, 4, microbatches, virtuals)).unwrap();
        assert_eq!(got.in_flight, in_flight, "{kind} M={microbatches}");
    }
}

#[test]
fn a_v_leaves_half_a_slot_a_rank_idle() {
    for kind in ["zb-v", "dualpipe-v"] {
        let got = ideal(&table(kind, 4, 8, 2)).unwrap();
        assert!(got.makespan <= 25.5, "{kind}: {}", got.makespan);
    }
}

/// Fewer micro-batches than ranks, P = 4: straight (M + P - 1) slots of F and B; in a loop of L = 2 turns each turn takes as
/// many slots as the way round, P, so that it is a straight pipe of P L stages: (M + P L - 1) slots of half the length.
#[test]
fn fewer_microbatches_than_ranks() {
    for (m, straight, looped) in [(1, 12.0, 12.0), (2, 15.0, 13.5), (3, 18.0, 15.0), (4, 21.0, 16.5)] {
        for kind in ["gpipe", "1f1b"] {
            assert_eq!(ideal(&table(kind, 4, m, 1)).unwrap().makespan, straight, "{kind} M={m}");
        }
        for kind in ["interleaved", "looping"] {
            assert_eq!(ideal(&table(kind, 4, m, 2)).unwrap().makespan, looped, "{kind} M={m}");
        }
    }
}

#[test]
fn zero_bubble_with_few_microbatches() {
    // (M + P - 1)(F + I) + W, in units of 1.
    assert_eq!(ideal(&table("zb-h1", 8, 4, 1)).unwrap().makespan, 23.0);
    assert_eq!(ideal(&table("1f1b", 8, 4, 1)).unwrap().makespan, 33.0);
}

#[test]
fn groups_lie_between_depth_and_breadth_first() {
    let grouped = |group| made("interleaved", &Size { group: Some(group), ..size(4, 16, 2) }).unwrap();
    assert_eq!(grouped(4), table("interleaved", 4, 16, 2));
    assert_eq!(grouped(16), table("looping", 4, 16, 2));
    let mut before = 0.0;
    for group in 4..=16 {
        let got = ideal(&grouped(group)).unwrap();
        assert_eq!(got.makespan, 52.5, "N={group}");
        assert!(got.in_flight[0] >= before, "N={group}");
        before = got.in_flight[0];
    }
}

#[test]
fn what_is_refused() {
    let grouped = |size: Size, group| Size { group: Some(group), ..size };
    for (kind, size, why) in [
        ("gpipe", size(0, 8, 1), "a pipeline needs at least 1 stage, not 0"),
        ("zb-v", size(4, 0, 2), "a pipeline needs at least 1 micro-batch, not 0"),
        ("looping", size(4, 8, 0), "a pipeline needs at least 1 virtual stage a rank, not 0"),
        (
            "gpipe",
            size(4, 8, 2),
            "gpipe runs one stage a rank, so it needs --virtual 1, not 2; looping is its order over several",
        ),
        ("zb-h1", size(4, 8, 3), "zb-h1 runs one stage a rank, so it needs --virtual 1, not 3"),
        (
            "zb-v",
            size(4, 8, 1),
            "zb-v runs down the ranks and up again, two stages a rank in a V, so it needs --virtual 2, not 1",
        ),
        (
            "1f1b",
            grouped(size(4, 8, 1), 4),
            "1f1b takes one micro-batch after the other, so it has no --group 4; interleaved with --virtual 2 or more \
             takes one",
        ),
        (
            "interleaved",
            grouped(size(4, 8, 2), 3),
            "--group 3 does not suit 4 stages and 8 micro-batches: a group returns to its rank after 4 slots, so it \
             holds from 4 (depth-first) to 8 (breadth-first)",
        ),
    ] {
        assert_eq!(made(kind, &size).unwrap_err().to_string(), why);
    }
}

#[test]
fn figures_are_written_as_the_plan_has_them() {
    let figures = figures("zb-v", &table("zb-v", 1, 1, 2)).unwrap();
    assert_eq!(
        serde_json::to_string(&figures).unwrap(),
        "{\"kind\":\"zb-v\",\"stages\":1,\"virtual\":2,\"microbatches\":1,\"forward_slots\":2,\
         \"forward_utilization\":1.0,\"boundary_transfers_per_microbatch\":0,\
         \"ideal\":{\"makespan\":3.0,\"bubble_fraction\":0.0,\"in_flight\":[1.0]},\
         \"table\":[[\"0F0\",\"1F0\",\"1I0\",\"1W0\",\"0I0\",\"0W0\",\"0O\",\"1O\"]]}"
    );
}
