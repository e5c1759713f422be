//! `meshc plan`: compile and print what it will do, before anything runs.

use ir::state::AdamW;
use planner::{plan, planfile, render};
use runtime::files::save::write_text;

use super::print;
use crate::args::{Format, PlanArgs};
use crate::failure::Failure;
use crate::request::{self, Origin};

pub(crate) fn run(origin: &Origin, args: &PlanArgs) -> Result<(), Failure> {
    if args.explain.is_some() {
        return Err(Failure::NotBuilt("--explain".to_string()));
    }
    let request = request::read(origin, &args.split, None)?;
    let compiled = request.compile(AdamW::default(), false, &mut |_, _| {});
    let plan = plan::plan(&compiled.sharded, &compiled.program, &request.cluster);
    if let Some(path) = &args.output {
        write_text(path, &planfile::write(&compiled.sharded, &compiled.program))
            .map_err(|e| Failure::Write(e.to_string()))?;
    }
    match args.format {
        Format::Text => print(&render::text(&plan, &request.title, &request.cluster))?,
        Format::Json => {
            let text = serde_json::to_string_pretty(&plan).map_err(|e| Failure::Run(e.to_string()))?;
            print(&(text + "\n"))?;
        }
    }
    if args.require_fit && !plan.memory.fits {
        return Err(Failure::Request("the plan does not fit the memory of a rank".to_string()));
    }
    Ok(())
}
