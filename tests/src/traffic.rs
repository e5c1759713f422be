//! The plan's calls against those that the transport performed.

use std::collections::BTreeMap;

use ir::Mesh;
use planner::plan::{Plan, phase};
use runtime::local::Traffic;

/// Calls and what each sends, by everything that tells kinds apart.
type Rows = BTreeMap<String, u64>;

fn key(op: &str, axes: &[String], group: usize, phase: &str, bytes: usize, wire: f64) -> String {
    format!("{op} {} of {group} {phase}: {bytes} B, {wire} B on the wire", axes.join("."))
}

/// What is wrong between a plan and the traffic of a step.
pub fn disagree(plan: &Plan, traffic: &[Traffic], mesh: &Mesh) -> Option<String> {
    let (mut planned, mut found) = (Rows::new(), Rows::new());
    for c in &plan.comm {
        *planned.entry(key(c.op, &c.axes, c.group_size, c.phase, c.bytes, c.wire_bytes)).or_default() +=
            c.count as u64;
    }
    for t in traffic.iter().filter(|t| t.group_size > 1) {
        let axes: Vec<String> = mesh.show(&t.axes).split('.').map(str::to_string).collect();
        *found.entry(key(t.op, &axes, t.group_size, phase(t.segment), t.bytes, t.wire_bytes)).or_default() +=
            t.count;
    }
    (planned != found).then(|| format!("planned {planned:#?}\nfound {found:#?}"))
}
