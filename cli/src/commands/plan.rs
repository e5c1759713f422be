//! `meshc plan`: compile and print what it will do, before anything runs.

use planner::choose::Chosen;
use planner::{plan, planfile, render};
use runtime::files::save::write_text;

use super::print;
use crate::args::{Format, PlanArgs};
use crate::failure::Failure;
use crate::request::{self, Origin};

pub(crate) fn run(origin: &Origin, args: &PlanArgs) -> Result<(), Failure> {
    let request = request::read(origin, &args.split, None)?;
    let Chosen { compiled, reasons, exact } = request.compile_with_reasons();
    let mut plan = plan::plan(&compiled.sharded, &compiled.program, &request.cluster);
    plan.choices = reasons;
    if let Some(path) = &args.output {
        write_text(path, &planfile::write(&compiled.sharded, &compiled.program))
            .map_err(|e| Failure::Write(e.to_string()))?;
    }
    match args.format {
        Format::Text => {
            print(&render::text(&plan, &request.title, &request.cluster))?;
            if args.explain.is_some() {
                print(&format!("\n{}", render::choices(&plan, exact)))?;
            }
        }
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
