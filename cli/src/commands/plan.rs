//! `meshc plan`: compile and print what it will do, before anything runs.

use std::cell::RefCell;

use ir::ShardedGraph;
use planner::choose::Best;
use planner::choose::reasons::reasons;
use planner::explain::explain;
use planner::timeline::timeline;
use planner::timeline::trace::trace;
use planner::{planfile, render};
use runtime::files::save::write_text;

use super::{print, write_trace};
use crate::args::{Format, PlanArgs};
use crate::failure::Failure;
use crate::request::{self, Origin};

pub(crate) fn run(origin: &Origin, args: &PlanArgs) -> Result<(), Failure> {
    let request = request::read(origin, &args.split, None)?;
    let asked = args.explain.as_deref().filter(|tensor| !tensor.is_empty());
    let told = RefCell::new((Vec::new(), false, None));
    let tell = |sharded: &ShardedGraph, best: &Best| {
        let chain = asked.map(|tensor| explain(sharded, best, tensor));
        let listed = args.format == Format::Json || args.explain.is_some() && asked.is_none();
        let choices = if listed { reasons(sharded, best, &request.cluster) } else { Vec::new() };
        *told.borrow_mut() = (choices, best.exact, chain);
    };
    let compiled = request.compile_and_tell(&tell);
    let (choices, exact, chain) = told.into_inner();
    let chain = chain.transpose().map_err(|e| Failure::Request(format!("--explain {e}")))?;
    let mut plan = request.plan(&compiled);
    plan.choices = choices;
    if let Some(path) = &args.output {
        let write = if request.rows.is_filled() { planfile::write_filled } else { planfile::write };
        write_text(path, &write(&compiled.sharded, &compiled.program))
            .map_err(|e| Failure::Write(e.to_string()))?;
    }
    if let Some(path) = &args.trace {
        let timeline = timeline(&compiled.program, &request.cluster);
        write_trace(path, &trace(&compiled.program, &timeline))?;
    }
    match (args.format, chain) {
        (Format::Text, None) => {
            print(&render::text(&plan, &request.title, &request.cluster))?;
            if args.explain.is_some() {
                print(&format!("\n{}", render::choices(&plan, exact)))?;
            }
        }
        (Format::Text, Some(chain)) => print(&chain)?,
        (Format::Json, _) => {
            let text = serde_json::to_string_pretty(&plan).map_err(|e| Failure::Run(e.to_string()))?;
            print(&(text + "\n"))?;
        }
    }
    if args.require_fit && !plan.memory.fits {
        return Err(Failure::Request("the plan does not fit the memory of a rank".to_string()));
    }
    Ok(())
}
