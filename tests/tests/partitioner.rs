//! What is sent, against XLA's partitioner on the same programs, in wire bytes: 2 (n - 1) / n of an all_reduce's output,
//! (n - 1) / n of an all_gather's and an all_to_all's. `MESHC_UPDATE=1` writes docs/partitioner.md anew.

use std::collections::BTreeMap;

use meshc_tests::peers::{CASES, Case, Sent, sharded};
use meshc_tests::tables::hold;
use meshc_tests::whole::{here, wire};
use planner::cluster::Cluster;
use planner::cost::call;

fn xla_wire_bytes(case: &Case) -> f64 {
    let one = |(op, bytes, n): &Sent| {
        let times = if *op == "all_reduce" { 2.0 } else { 1.0 };
        times * (n - 1.0) / n * bytes
    };
    case.xla.iter().fold(0.0, |sum, s| sum + one(s))
}

/// Wire bytes of a rank by kind of collective, read off the program.
fn sent(case: &Case, prices: &Cluster) -> BTreeMap<&'static str, (usize, f64)> {
    let sharded = sharded(case, prices);
    let program = passes::lower(&sharded);
    let stage = &program.stages[0];
    let mut out = BTreeMap::new();
    for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
        let [first, ..] = instruction.transfers() else { continue };
        let total: &mut (usize, f64) = out.entry(first.step.name()).or_default();
        total.0 += 1;
        total.1 += call(instruction.transfers(), stage, &program.mesh).wire_bytes;
    }
    out
}

fn total(sent: &BTreeMap<&'static str, (usize, f64)>) -> f64 {
    sent.values().fold(0.0, |sum, (_, b)| sum + b)
}

#[test]
fn never_more_is_sent_than_by_xla() {
    let mut rows = String::new();
    for case in CASES {
        let by_wire = sent(case, &wire());
        let (ours, theirs) = (total(&by_wire), xla_wire_bytes(case));
        assert!(ours <= theirs, "{}: {ours} and {theirs} wire bytes: {by_wire:?}", case.name);
        let h100 = total(&sent(case, &planner::cluster::read("h100").expect("a cluster")));
        let here = total(&sent(case, &here()));
        let calls = by_wire.iter().map(|(op, (n, _))| format!("{n} {op}")).collect::<Vec<_>>().join(", ");
        let calls = if calls.is_empty() { "none".to_string() } else { calls };
        rows += &format!("| {} | {theirs:.0} | {ours:.0} | {calls} | {here:.0} | {h100:.0} |\n", case.name);
    }
    let fsdp = sent(&CASES[5], &wire());
    assert_eq!(CASES[5].name, "mlp train fsdp8");
    assert!(total(&fsdp) <= 14_680_071.0, "{fsdp:?}");
    let block = sent(&CASES[12], &wire());
    assert_eq!(CASES[12].name, "block train fsdp8");
    // Gradients are scattered; the only all_reduce is that of the loss.
    assert!(block["reduce_scatter"].0 >= 8 && block["all_reduce"].1 < 16.0, "{block:?}");
    let head = "| program | XLA | meshc, fewest bytes | its calls | meshc, `here` | meshc, `h100` |";
    hold("partitioner.md", head, &rows);
}
