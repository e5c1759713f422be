//! The binary: the library's commands on the process's arguments.

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// A plan of a large model is made of millions of small vectors, for which the system's allocator takes half of all time.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    meshc::main(std::env::args_os())
}
