//! `meshc check`: proves a plan; with --numeric holds it against one device.

use ir::ShardedGraph;
use ir::program::Program;
use ir::state::AdamW;
use planner::{check, numeric};

use super::print;
use crate::args::CheckArgs;
use crate::failure::Failure;
use crate::loaded::{read_plan, workers};
use crate::planned::plan_file;
use crate::request::{self, Origin};

pub(crate) fn run(origin: &Origin, args: &CheckArgs) -> Result<(), Failure> {
    let (sharded, program) = subject(origin, args)?;
    let proved = check::check(&sharded, &program).map_err(Failure::Check)?;
    print(&proved.iter().map(|line| format!("ok  {line}\n")).collect::<String>())?;
    if args.numeric {
        held(&sharded, &program, args.seed)?;
    }
    Ok(())
}

fn subject(origin: &Origin, args: &CheckArgs) -> Result<(ShardedGraph, Program), Failure> {
    if let Some(path) = plan_file(&args.split) {
        return read_plan(path);
    }
    let mut request = request::read(origin, &args.split, None)?;
    request.graph.seed(args.seed);
    let compiled = request.compile(AdamW { steps: 10, ..AdamW::default() }, true, &mut |_, _| {});
    Ok((compiled.sharded, compiled.program))
}

fn held(sharded: &ShardedGraph, program: &Program, seed: u64) -> Result<(), Failure> {
    let wrong = |w: numeric::Wrong| {
        let value = w.value.map_or(String::new(), |v| format!("{v}, "));
        Failure::Check(vec![format!("{value}{}: {}", w.name, w.what)])
    };
    let feeds = numeric::all_feeds(sharded, seed);
    let values = numeric::lockstep(sharded, &feeds, runtime::eval::eval).map_err(wrong)?;
    let ranks = program.mesh.ranks();
    print(&format!(
        "ok  numeric: {values} values on {ranks} ranks in lockstep equal one device (f64, 1e-10)\n"
    ))?;
    let tensors = numeric::program(sharded, program, &feeds, workers(None, ranks))?.map_err(wrong)?;
    print(&format!("ok  numeric: {tensors} tensors that a step leaves equal one device (f32)\n"))
}
