//! The binary: the library's commands on the process's arguments.

use std::process::ExitCode;

fn main() -> ExitCode {
    meshc::main(std::env::args_os())
}
