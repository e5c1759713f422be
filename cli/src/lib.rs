//! The command line, as a library: a program that builds its model with the DSL gets the same commands by handing the
//! model to [`run`].

mod args;
mod checkpoints;
mod commands;
mod failure;
mod loaded;
mod machine;
mod pipeline;
mod planned;
mod profile;
mod progress;
mod request;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use ir::Graph;
use ir::dsl::BuildError;

use args::{BenchCommand, Cli, Command};
use failure::Failure;
use request::{Origin, Own};

pub use models::Shape;

/// The commands on Hugging Face configs and graph files.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    finish(args, &Origin::Files)
}

/// The commands on a model of the caller's own: its name, the usual size of a step, and a function that builds the
/// forward pass of a micro-batch of a size. Dimension `b` is split over dp; `v`, `kv` and `f` over tp.
pub fn run(
    name: &str,
    usual: Shape,
    build: impl Fn(Shape) -> Result<Graph, Vec<BuildError>> + 'static,
    args: impl IntoIterator<Item = OsString>,
) -> ExitCode {
    finish(args, &Origin::Own(Own { name: name.to_string(), shape: usual, build: Box::new(build) }))
}

fn finish(args: impl IntoIterator<Item = OsString>, origin: &Origin) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            let status = if error.use_stderr() { 2 } else { 0 };
            // Nothing is left to be done about a closed pipe.
            let _ = error.print();
            return ExitCode::from(status);
        }
    };
    match dispatch(origin, &cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            ExitCode::from(failure.status())
        }
    }
}

fn dispatch(origin: &Origin, command: &Command) -> Result<(), Failure> {
    let later = |what: &str| Err(Failure::NotBuilt(format!("`meshc {what}`")));
    match command {
        Command::Plan(args) => commands::plan::run(origin, args),
        Command::Trace(args) => commands::trace::run(origin, args),
        Command::Show(args) => commands::show::run(args),
        Command::Check(args) => commands::check::run(origin, args),
        Command::Train(args) => commands::train::run(origin, args),
        Command::Export(args) => commands::export::run(args),
        Command::Data(args) => commands::data::run(&args.command),
        Command::Bench(args) => match &args.command {
            BenchCommand::Step(args) => commands::bench::run(origin, args),
            BenchCommand::Checkpoint(args) => commands::bench_checkpoint::run(args),
            BenchCommand::Collectives(args) => commands::bench_collectives::run(args),
            BenchCommand::Kernels(_) => later("bench kernels"),
        },
        Command::Search(_) => later("search"),
        Command::Predict(_) => later("predict"),
        Command::Diff(_) => later("diff"),
        Command::Run(_) => later("run"),
        Command::Eval(_) => later("eval"),
        Command::Generate(_) => later("generate"),
        Command::Kernels(_) => later("kernels"),
    }
}

#[cfg(doctest)]
#[doc = include_str!("../../docs/write-your-model.md")]
struct WriteYourModel;
