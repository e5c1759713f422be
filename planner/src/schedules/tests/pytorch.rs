//! Tables of PyTorch for 4 ranks and 8 micro-batches, in `pytorch/`: they run here, and ours are no longer.

use super::table;
use crate::schedules::figures::ideal;
use crate::schedules::read::read;

/// The kind, PyTorch's table, our L; its makespan and in-flight on rank 0 in a whole rank's units, both exact.
const TABLES: [(&str, &str, usize, f64, f64); 6] = [
    ("gpipe", include_str!("pytorch/gpipe.txt"), 1, 33.0, 8.0),
    ("1f1b", include_str!("pytorch/1f1b.txt"), 1, 33.0, 4.0),
    ("interleaved", include_str!("pytorch/interleaved.txt"), 2, 28.5, 5.5),
    ("looping", include_str!("pytorch/looping.txt"), 2, 28.5, 8.0),
    ("zb-v", include_str!("pytorch/zb-v.txt"), 2, 25.5, 4.0),
    ("dualpipe-v", include_str!("pytorch/dualpipe-v.txt"), 2, 25.5, 4.5),
];

#[test]
fn ours_are_no_longer_than_pytorchs() {
    for (kind, text, virtuals, makespan, in_flight) in TABLES {
        let theirs = read(text, kind).unwrap_or_else(|e| panic!("{e}"));
        let (ours, theirs) = (table(kind, 4, 8, virtuals), theirs);
        assert_eq!(ours.homes, theirs.homes, "{kind}");
        let (ours, theirs) = (ideal(&ours).unwrap(), ideal(&theirs).unwrap());
        assert_eq!((theirs.makespan, theirs.in_flight[0]), (makespan, in_flight), "{kind}");
        assert!(ours.makespan <= theirs.makespan, "{kind}: {} > {makespan}", ours.makespan);
        let most = |ideal: Vec<f64>| ideal.into_iter().fold(0.0, f64::max);
        assert!(most(ours.in_flight) <= most(theirs.in_flight), "{kind}");
    }
}
