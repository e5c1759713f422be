//! What is proved of a plan before it runs: it is well-formed, its collectives match over ranks and cannot wait for
//! each other for ever, and what is read was written and not overwritten.

use std::collections::BTreeSet;

use ir::program::{Program, Stage, Transfer};
use ir::verify::verify_sharded;
use ir::verify_program::verify_program;
use ir::{Mesh, ShardedGraph};

/// What was proved, or all that is wrong.
pub type Checked = Result<Vec<String>, Vec<String>>;

/// Proves a plan.
///
/// # Errors
/// Every fault found, a line each.
pub fn check(sharded: &ShardedGraph, program: &Program) -> Checked {
    let mut faults: Vec<String> = Vec::new();
    let texts = |e: Vec<ir::verify::VerifyError>| e.iter().map(ToString::to_string).collect::<Vec<_>>();
    faults.extend(verify_sharded(sharded).err().map(texts).unwrap_or_default());
    let texts =
        |e: Vec<ir::verify_program::ProgramError>| e.iter().map(ToString::to_string).collect::<Vec<_>>();
    faults.extend(verify_program(program).err().map(texts).unwrap_or_default());
    if !faults.is_empty() {
        return Err(faults);
    }
    let (collectives, ranks) = matched(program)?;
    let buffers: usize = program.stages.iter().map(|s| s.buffers.len()).sum();
    let instructions: usize =
        program.stages.iter().flat_map(|s| &s.segments).map(|s| s.instructions.len()).sum();
    Ok(vec![
        format!("well-formed: {} nodes agree with their shardings", sharded.graph.nodes.len()),
        format!("well-formed: {instructions} instructions agree with their {buffers} buffers"),
        format!("matched: {collectives} collectives on {ranks} ranks, none waits for ever"),
        "memory-safe: all that is read was written, and not overwritten since".to_string(),
    ])
}

/// A collective as one rank sees it: with whom, and what.
type Meeting = (Vec<usize>, String);

/// Runs the collectives of all ranks by their rules alone: one happens when every member is at it. Returns how many
/// happened, and the ranks.
///
/// # Errors
/// For each rank that cannot go on, what it waits for.
pub fn matched(program: &Program) -> Result<(usize, usize), Vec<String>> {
    let ranks = program.mesh.ranks();
    let stage = |_rank: usize| program.stages.first();
    let lists: Vec<Vec<Meeting>> =
        (0..ranks).map(|r| stage(r).map_or(Vec::new(), |s| meetings(s, &program.mesh, r))).collect();
    meet(&lists).map(|n| (n, ranks))
}

/// The same for lists of meetings.
///
/// # Errors
/// For each rank that cannot go on, what it waits for.
pub fn meet(lists: &[Vec<Meeting>]) -> Result<usize, Vec<String>> {
    let mut at = vec![0; lists.len()];
    let mut done = 0;
    let mut ready: BTreeSet<usize> = (0..lists.len()).collect();
    while let Some(rank) = ready.pop_first() {
        let Some(next) = lists[rank].get(at[rank]) else { continue };
        let all = next.0.iter().all(|r| lists.get(*r).and_then(|l| l.get(at[*r])) == Some(next));
        if all {
            for r in &next.0 {
                at[*r] += 1;
                ready.insert(*r);
            }
            done += 1;
        }
    }
    let stuck = |r: &usize| at[*r] < lists[*r].len();
    let faults: Vec<String> = (0..lists.len())
        .filter(stuck)
        .map(|r| {
            format!("rank {r} waits in {} with ranks {:?} for ever", lists[r][at[r]].1, lists[r][at[r]].0)
        })
        .collect();
    if faults.is_empty() { Ok(done) } else { Err(faults) }
}

fn meetings(stage: &Stage, mesh: &Mesh, rank: usize) -> Vec<Meeting> {
    let mut out = Vec::new();
    for call in &stage.calls {
        for instruction in &stage.segments[call.segment].instructions {
            let parts = instruction.transfers();
            let part = |p: &Transfer| {
                let buffer = &stage.buffers[p.from.index()];
                format!("{} of {} {:?}", p.step.show(mesh), buffer.dtype, buffer.shape)
            };
            if let Some(first) = parts.first() {
                let all: Vec<String> = parts.iter().map(part).collect();
                let text = format!("{}, micro-batch {:?}", all.join(" + "), call.microbatch);
                out.push((mesh.group(rank, first.step.axes()), text));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meetings_match_or_the_ranks_are_named() {
        let a = |text: &str| (vec![0, 1], text.to_string());
        assert_eq!(meet(&[vec![a("x"), a("y")], vec![a("x"), a("y")]]), Ok(2));
        let crossed = meet(&[vec![a("x"), a("y")], vec![a("y"), a("x")]]).unwrap_err();
        assert_eq!(crossed.len(), 2);
        assert!(crossed[0].starts_with("rank 0 waits in x"));
        let missing = meet(&[vec![a("x")], vec![]]).unwrap_err();
        assert_eq!(missing, ["rank 0 waits in x with ranks [0, 1] for ever"]);
        let pair = |a: usize, b: usize| (vec![a, b], format!("{a}{b}"));
        let lists =
            [vec![pair(0, 1), pair(0, 2)], vec![pair(1, 2), pair(0, 1)], vec![pair(0, 2), pair(1, 2)]];
        assert_eq!(meet(&lists).unwrap_err().len(), 3);
    }
}
