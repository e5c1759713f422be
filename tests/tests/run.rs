//! Small graphs on a mesh, run by every backend: lockstep in f64, the local backend with one, two and a worker for each
//! rank. All equal one device; that is the whole assertion, so there are no snapshots.

use std::path::{Path, PathBuf};

use ir::verify_program::verify_program;
use ir::{ShardedGraph, parse_sharded};
use meshc_tests::backend::{F32, equals, feeds};
use meshc_tests::meaning::{expect, sharded};
use planner::numeric::lockstep;
use runtime::eval::eval;

/// The cases, by name.
fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/run");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

/// What is wrong with a case on some backend.
fn fault(graph: &ShardedGraph) -> Result<(), String> {
    let mut program = passes::lower(graph);
    expect("lower", verify_program(&program));
    for pass in passes::PROGRAM {
        (pass.run)(&mut program);
        expect(pass.name, verify_program(&program));
    }
    for seed in 0..3 {
        let feeds = feeds(&graph.graph, seed);
        lockstep(graph, std::slice::from_ref(&feeds), eval).map_err(|w| format!("{}: {}", w.name, w.what))?;
        let ranks = graph.mesh.ranks();
        let runs = [1, 2, ranks]
            .map(|workers| equals(&graph.graph, &program, std::slice::from_ref(&feeds), workers, F32));
        let [one, two, each] = runs;
        let (one, two, each) = (one?, two?, each?);
        if !one.same_states(&two) || !one.same_states(&each) {
            return Err("another number of workers leaves other bits".to_string());
        }
    }
    Ok(())
}

#[test]
fn every_backend_equals_one_device() {
    let mut faults = Vec::new();
    for path in cases() {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let read = parse_sharded(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
        faults.extend(fault(&sharded(read)).err().map(|e| format!("{name}: {e}")));
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}
