//! The rules that no compiler checks: how files look, who knows whom, where each pass has its file and its cases. All
//! findings of a kind are reported at once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ir::{Binary, Op, Unary};

/// Which crates each may depend on; anything that is not here may not be a crate.
const EDGES: &[(&str, &[&str])] = &[
    ("ir", &[]),
    ("passes", &["ir"]),
    ("codegen", &["ir"]),
    ("runtime", &["ir"]),
    ("models", &["ir"]),
    ("planner", &["ir", "passes", "codegen", "runtime", "models"]),
    ("cli", &["ir", "passes", "codegen", "runtime", "models", "planner"]),
    ("examples", &["ir", "meshc"]),
    ("tests", &["ir", "passes", "codegen", "runtime", "models", "planner", "meshc"]),
];

/// The only crates in which the compiler may be told to trust us.
const TRUSTED: &[&str] = &["runtime", "codegen"];

const LONGEST: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every file below a folder, but for what is built and what is hidden.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().to_string();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            out.extend(files(&path));
        } else if path.is_file() {
            out.push(path);
        }
    }
    out.sort();
    out
}

/// The crates of the workspace, by folder, and their Cargo.toml.
fn crates() -> BTreeMap<String, String> {
    let toml = read(&root().join("Cargo.toml"));
    let members = toml.split_once("members = [").and_then(|(_, rest)| rest.split_once(']')).unwrap().0;
    members
        .split('"')
        .skip(1)
        .step_by(2)
        .map(|m| (m.to_string(), read(&root().join(m).join("Cargo.toml"))))
        .collect()
}

/// The Rust files of the crates, by path from the root.
fn sources() -> Vec<(String, String)> {
    let root = root();
    let rust = |p: &PathBuf| p.extension().is_some_and(|e| e == "rs");
    let named = |p: PathBuf| (p.strip_prefix(&root).unwrap().to_string_lossy().to_string(), read(&p));
    crates().keys().flat_map(|c| files(&root.join(c))).filter(rust).map(named).collect()
}

#[track_caller]
fn none(findings: Vec<String>) {
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}

/// Whether a line of code, not of comment, has a word. A word in quotes counts.
fn has_word(line: &str, word: &str) -> bool {
    let code = line.split("//").next().unwrap_or("");
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.split(|c| !part(c)).any(|w| w == word)
}

#[test]
fn every_file_says_what_it_is_and_is_not_too_long() {
    let mut findings = Vec::new();
    for (path, text) in sources() {
        if !text.starts_with("//!") {
            findings.push(format!("{path}: starts with `//!`, saying what is true of the file"));
        }
        let lines = text.lines().count();
        if lines > LONGEST {
            findings.push(format!("{path}: has {lines} lines, at most {LONGEST} are allowed"));
        }
        let stem = Path::new(&path).with_extension("");
        let named = |name: &str| stem.components().any(|c| c.as_os_str() == name);
        if let Some(name) = ["utils", "util", "helpers", "helper", "common"].into_iter().find(|n| named(n)) {
            findings.push(format!("{path}: is called {name}; a name says what is in it"));
        }
    }
    none(findings);
}

#[test]
fn nothing_is_left_to_do_and_nothing_is_trusted_outside_its_crates() {
    // In halves, so that this file does not find itself.
    let unfinished = [["TO", "DO"], ["FIX", "ME"]].map(|halves| halves.concat());
    let macros = [["to", "do!"], ["unimple", "mented!"], ["db", "g!"]].map(|halves| halves.concat());
    let trust = ["un", "safe"].concat();
    let mut findings = Vec::new();
    for (path, text) in sources() {
        let trusted = TRUSTED.iter().any(|t| path.starts_with(&format!("{t}/")));
        for (i, line) in text.lines().enumerate() {
            let at = format!("{path}:{}", i + 1);
            let found = unfinished.iter().chain(&macros).find(|w| line.contains(*w));
            findings.extend(found.map(|w| format!("{at}: {w} is left")));
            if !trusted && has_word(line, &trust) {
                findings.push(format!("{at}: `{trust}` is for {}", TRUSTED.join(" and ")));
            }
        }
    }
    none(findings);
}

/// The names in `[dependencies]` and `[build-dependencies]`.
fn dependencies(toml: &str) -> Vec<String> {
    let mut section = "";
    let mut out = Vec::new();
    for line in toml.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
            let one = section.strip_prefix("dependencies.");
            out.extend(one.map(ToString::to_string));
        } else if ["dependencies", "build-dependencies"].contains(&section) {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            out.extend((!name.is_empty() && !name.starts_with('#')).then(|| name.to_string()));
        }
    }
    out
}

#[test]
fn crates_know_only_whom_they_may() {
    let crates = crates();
    let mut findings = Vec::new();
    let ours: Vec<String> =
        crates.keys().map(|c| if c == "cli" { "meshc".to_string() } else { c.clone() }).collect();
    for (name, toml) in &crates {
        let Some((_, allowed)) = EDGES.iter().find(|(c, _)| c == name) else {
            findings.push(format!("{name}: is a crate that has no place among those of the house"));
            continue;
        };
        let wrong = dependencies(toml).into_iter().filter(|d| {
            let inside = ours.contains(d) || d == "meshc" || d.starts_with("meshc-");
            inside && !allowed.contains(&d.as_str())
        });
        findings.extend(wrong.map(|d| format!("{name}: depends on {d}, but may know only {allowed:?}")));
        let lints =
            toml.split("[lints]").nth(1).is_some_and(|t| t.trim_start().starts_with("workspace = true"));
        if !lints {
            findings.push(format!("{name}: needs `[lints]` with `workspace = true`"));
        }
    }
    none(findings);
}

/// The name of every pass, and of the conversion between them.
fn passes() -> Vec<&'static str> {
    let graph = passes::GRAPH.iter().map(|p| p.name);
    let sharded = passes::PLACED.iter().chain(passes::CHOSEN).map(|p| p.name);
    let program = passes::PROGRAM.iter().map(|p| p.name);
    graph.chain(sharded).chain(["lower"]).chain(program).collect()
}

#[test]
fn every_pass_has_its_file_and_two_cases() {
    let mut findings = Vec::new();
    for pass in passes() {
        let source = root().join("passes/src").join(pass);
        if !source.with_extension("rs").is_file() && !source.is_dir() {
            findings.push(format!("passes/src/{pass}.rs: is missing"));
        }
        let folder = root().join("tests/filetests").join(pass);
        let cases = if folder.is_dir() { files(&folder).len() } else { 0 };
        if cases < 2 {
            findings.push(format!("tests/filetests/{pass}: has {cases} cases, and needs two"));
        }
        let run = format!(" {pass} ");
        if !read(&root().join("tests/tests/filetests.rs")).contains(&run) {
            findings.push(format!("tests/filetests/{pass}: is not among the folders of filetests.rs"));
        }
    }
    none(findings);
}

/// Every op, by its name in the text form; the compiler asks for a new one in the match, which stands beside the list.
fn ops() -> BTreeSet<String> {
    let name = || "x".into();
    let mut ops = vec![Op::Input(name()), Op::State(name()), Op::Assign(name()), Op::Tap(name())];
    ops.extend([
        Op::Const(1.0),
        Op::Iota,
        Op::Random(ir::Draw { name: name(), seed: 0 }),
        Op::Einsum { scale: 1.0 },
        Op::Add,
        Op::ReduceMax,
        Op::TopK,
        Op::Select,
    ]);
    ops.extend([Op::Gather, Op::Scatter, Op::Cast, Op::Accumulate, Op::Reshard]);
    ops.extend(Unary::ALL.map(Op::Unary));
    ops.extend(Binary::ALL.map(Op::Binary));
    let text = |op: Op| match op {
        Op::Input(_) | Op::State(_) | Op::Const(_) | Op::Random(_) | Op::Assign(_) | Op::Tap(_) => {
            op.to_string().split('(').next().unwrap_or("").to_string()
        }
        Op::Iota
        | Op::Einsum { .. }
        | Op::Add
        | Op::ReduceMax
        | Op::TopK
        | Op::Unary(_)
        | Op::Binary(_)
        | Op::Select
        | Op::Gather
        | Op::Scatter
        | Op::Cast
        | Op::Accumulate
        | Op::Reshard => op.to_string(),
    };
    ops.into_iter().map(text).collect()
}

#[test]
fn every_op_is_run_by_every_backend() {
    let mut run = BTreeSet::new();
    for path in files(&root().join("tests/filetests/run")) {
        for line in read(&path).lines().filter(|l| l.contains(" | ")) {
            let call = line.split_once(" = ").map_or(line, |(_, call)| call);
            run.extend(call.split([' ', '(']).next().map(str::to_string));
        }
    }
    let missing = ops().into_iter().filter(|op| !run.contains(op));
    none(missing.map(|op| format!("tests/filetests/run: no case has the op {op}")).collect());
}

#[test]
fn every_case_says_its_rule_and_is_short() {
    let mut findings = Vec::new();
    for path in files(&root().join("tests/filetests")) {
        let (text, at) = (read(&path), path.strip_prefix(root()).unwrap().display().to_string());
        if path.extension().is_none_or(|e| e != "mesh") {
            findings.push(format!("{at}: is no case: those end in .mesh"));
            continue;
        }
        let first = text.lines().next().unwrap_or("");
        if !first.starts_with("; ") || !first.ends_with('.') {
            findings.push(format!("{at}: its first line says the rule: `; A sentence.`"));
        }
        let nodes = text.lines().filter(|l| l.contains(" | ")).count();
        if nodes > 15 {
            findings.push(format!("{at}: has {nodes} nodes, at most 15 are allowed"));
        }
    }
    none(findings);
}

#[test]
fn every_snapshot_has_its_case() {
    let mut findings = Vec::new();
    for path in files(&root().join("tests/tests/snapshots")) {
        let name = path.file_name().unwrap().to_string_lossy().to_string();
        let case = name.strip_prefix("filetests__").and_then(|n| n.strip_suffix(".snap"));
        let exists = case
            .and_then(|c| c.split_once('@'))
            .is_some_and(|(pass, file)| root().join("tests/filetests").join(pass).join(file).is_file());
        if !exists {
            findings.push(format!("tests/tests/snapshots/{name}: belongs to no case"));
        }
    }
    none(findings);
}
