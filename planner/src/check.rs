//! What is proved of a plan before it runs: it is well-formed, its collectives and messages match over ranks and no rank
//! waits for ever, what is read was written and not overwritten, and sums over micro-batches are whole.

mod contents;
mod sums;

use ir::ShardedGraph;
use ir::program::Program;
use ir::verify::verify_sharded;
use ir::verify_program::verify_program;

use crate::hang::{self, Transport};

/// What was proved, or all that is wrong.
pub type Checked = Result<Vec<String>, Vec<String>>;

/// Where a program is not one of this sharded graph: another mesh, table or cut.
fn halves(sharded: &ShardedGraph, program: &Program) -> Vec<String> {
    let schedule = &sharded.decisions.schedule;
    let homes = if schedule.homes.is_empty() { &[0][..] } else { &schedule.homes };
    let mut faults = Vec::new();
    if sharded.mesh != program.mesh {
        faults.push(format!("the graph is on mesh {}, the program on {}", sharded.mesh, program.mesh));
    }
    if homes != program.homes {
        let what = format!("the table has stages in rows {homes:?}, the program in {:?}", program.homes);
        faults.push(what);
    }
    if !schedule.rows.is_empty() && schedule.microbatches() != program.microbatches {
        let (a, b) = (schedule.microbatches(), program.microbatches);
        faults.push(format!("the table has {a} micro-batches, the program {b}"));
    }
    if let Some(stage) = sharded.graph.stages.iter().find(|stage| **stage >= homes.len()) {
        faults.push(format!("the graph is cut into a stage {stage}, but there are {}", homes.len()));
    }
    faults
}

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
    faults.extend(halves(sharded, program));
    if !faults.is_empty() {
        return Err(faults);
    }
    let ends = hang::ends(program, Transport::Rendezvous);
    faults.extend(ends.as_ref().err().into_iter().flatten().map(ToString::to_string));
    let sums = sums::sums(program, &mut faults);
    contents::contents(&sharded.graph, sharded, program, &mut faults);
    let ends = ends.unwrap_or_default();
    if !faults.is_empty() {
        return Err(faults);
    }
    let buffers: usize = program.stages.iter().map(|s| s.buffers.len()).sum();
    let instructions: usize =
        program.stages.iter().flat_map(|s| &s.segments).map(|s| s.instructions.len()).sum();
    let mut proved = vec![
        format!("well-formed: {} nodes agree with their shardings", sharded.graph.nodes.len()),
        format!("well-formed: {instructions} instructions agree with their {buffers} buffers"),
        matched(&ends),
        "memory-safe: all that is read was written, and not overwritten since".to_string(),
    ];
    if program.microbatches > 1 {
        let n = program.microbatches;
        let each = format!("each of {n} micro-batches goes once through every segment");
        let into =
            if sums > 0 { format!(", and into {sums} sums before they are read") } else { String::new() };
        proved.push(format!("complete: {each}{into}"));
    }
    Ok(proved)
}

fn matched(ends: &hang::Ends) -> String {
    let hang::Ends { collectives, messages, ranks } = ends;
    match messages {
        0 => format!("matched: {collectives} collectives on {ranks} ranks, none waits for ever"),
        n => format!(
            "matched: {collectives} collectives and {n} messages on {ranks} ranks, none waits for ever, even if no send \
             ends before its receive is there (rendezvous)"
        ),
    }
}
