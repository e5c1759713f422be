//! `meshc show`: a plan file as text.

use ir::program::{Program, Stage};
use ir::{Mesh, extent};

use super::print;
use crate::args::ShowArgs;
use crate::failure::Failure;
use crate::loaded::read_plan;

pub(crate) fn run(args: &ShowArgs) -> Result<(), Failure> {
    let (sharded, mut program) = read_plan(&args.plan)?;
    if let Some(stage) = args.stage {
        let stages = program.stages.len();
        if stage >= stages {
            return Err(Failure::Request(format!(
                "--stage {stage}: the plan has {stages} stages, counted from 0"
            )));
        }
        program.stages = vec![program.stages.swap_remove(stage)];
    }
    let mut text = String::new();
    for row in &sharded.decisions.schedule.rows {
        text += &format!("schedule {}\n", row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
    }
    if let Some(rank) = args.rank {
        text += &of_rank(&program, rank)?;
    }
    print(&(text + &program.to_string()))
}

/// A rank's coordinate and the ranges of its own pieces.
fn of_rank(program: &Program, rank: usize) -> Result<String, Failure> {
    let mesh = &program.mesh;
    if rank >= mesh.ranks() {
        return Err(Failure::Request(format!(
            "--rank {rank}: the plan has {} ranks, counted from 0",
            mesh.ranks()
        )));
    }
    let at = mesh.coordinate(rank);
    let axes: Vec<String> = mesh.axes.iter().zip(&at).map(|((name, _), i)| format!("{name}={i}")).collect();
    let mut text = format!("rank {rank} at {}\n", axes.join(","));
    for stage in &program.stages {
        text += &pieces(stage, mesh, &at);
    }
    Ok(text)
}

fn pieces(stage: &Stage, mesh: &Mesh, at: &[usize]) -> String {
    let mut text = String::new();
    for (i, buffer) in stage.buffers.iter().enumerate() {
        let ranges = buffer.shape.iter().zip(&buffer.sharding.dims).map(|(n, axes)| {
            let r = extent(*n, axes, mesh, at);
            format!("{}..{}", r.start, r.end)
        });
        let start = stage.address(ir::program::BufferId(i as u32), 0);
        text += &format!("  b{i} at {start}: [{}]\n", ranges.collect::<Vec<_>>().join(", "));
    }
    text
}
