//! Every rule of programs is reported where it is broken: a case for each, with `; error:` behind the line at fault; and
//! what the text cannot say, as a change.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ir::kernel::{Body, Step};
use ir::program::{Instruction, Program};
use ir::signature::plain;
use ir::verify_program::{ProgramFault, verify_program};
use ir::{Reduce, parse_program};

/// The rule's name; a new rule needs a line here, in [`RULES`], and a case.
fn rule(fault: &ProgramFault) -> &'static str {
    match fault {
        ProgramFault::Operands { .. } => "operands",
        ProgramFault::Type(..) => "type",
        ProgramFault::Extent { .. } => "extent",
        ProgramFault::Dims(..) => "dims",
        ProgramFault::Undefined(..) => "undefined",
        ProgramFault::RowOfRow(_) => "row of row",
        ProgramFault::StoreLacks(..) => "store lacks",
        ProgramFault::Move { .. } => "move",
        ProgramFault::NoMove { .. } => "no move",
        ProgramFault::NoPairs { .. } => "no pairs",
        ProgramFault::PairsOfMap(_) => "pairs of map",
        ProgramFault::Chain(..) => "chain",
        ProgramFault::TopK(..) => "top-k",
        ProgramFault::Unlike(..) => "unlike",
        ProgramFault::Mixed(_) => "mixed",
        ProgramFault::NotWaited(_) => "not waited",
        ProgramFault::NotStarted(_) => "not started",
        ProgramFault::InFlight(..) => "in flight",
        ProgramFault::NotWritten(_) => "not written",
        ProgramFault::InPlace(_) => "in place",
        ProgramFault::Overwritten(..) => "overwritten",
        ProgramFault::Outside(..) => "outside",
        ProgramFault::Partial(..) => "partial",
        ProgramFault::Missing(..) => "missing",
        ProgramFault::Call(..) => "call",
        ProgramFault::BeingSent(_) => "being sent",
        ProgramFault::OtherMicrobatch { .. } => "other micro-batch",
        ProgramFault::NoPeer(_) => "no peer",
        ProgramFault::Elsewhere(..) => "elsewhere",
        ProgramFault::OtherEnd(_) => "other end",
        ProgramFault::Rows(..) => "rows",
        ProgramFault::Drifts(..) => "drifts",
    }
}

const RULES: [&str; 32] = [
    "operands",
    "type",
    "extent",
    "dims",
    "undefined",
    "row of row",
    "store lacks",
    "move",
    "no move",
    "no pairs",
    "pairs of map",
    "chain",
    "top-k",
    "unlike",
    "mixed",
    "not waited",
    "not started",
    "in flight",
    "not written",
    "in place",
    "overwritten",
    "outside",
    "partial",
    "missing",
    "call",
    "being sent",
    "other micro-batch",
    "no peer",
    "elsewhere",
    "other end",
    "rows",
    "drifts",
];

/// What the comments `; error: ...` of a text say, each at the place of its line: the stage for a buffer, the segment
/// for its head, the instruction for all its lines, the call.
fn expected(text: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let (mut segment, mut instruction, mut calls, mut open) = (String::new(), 0, 0, 0);
    let mut stage = String::new();
    for line in text.lines() {
        let mut parts = line.split("; error: ");
        let head = parts.next().unwrap_or("").trim();
        let mut at = stage.clone();
        if head.starts_with("program ") {
            at = "program".to_string();
        } else if let Some(number) = head.strip_prefix("stage ").and_then(|rest| rest.split(' ').next()) {
            stage = format!("stage {number}");
            (segment, calls) = (String::new(), 0);
            at.clone_from(&stage);
        } else if let Some(letter) = head.strip_prefix("segment ") {
            segment = format!("{stage}, segment {letter}");
            instruction = 0;
            at.clone_from(&segment);
        } else if head.starts_with("call ") {
            at = format!("{stage}, call {calls}");
            calls += 1;
        } else if !segment.is_empty() && !head.is_empty() {
            at = format!("{segment}, instruction {instruction}");
            open += usize::from(head.ends_with('{'));
            open -= usize::from(head == "}");
            instruction += usize::from(open == 0);
        }
        all.extend(parts.map(|message| format!("{at}: {}", message.trim())));
    }
    all
}

/// What the verifier says, without the call in which it happens.
fn found(program: &Program, seen: &mut BTreeSet<&'static str>) -> BTreeSet<String> {
    let errors = verify_program(program).err().unwrap_or_default();
    seen.extend(errors.iter().map(|e| rule(&e.kind)));
    let place =
        |at: &str| match at.split_once(", call ").and_then(|(s, rest)| Some((s, rest.split_once(", ")?.1))) {
            Some((stage, rest)) => format!("{stage}, {rest}"),
            None => at.to_string(),
        };
    errors.iter().map(|e| format!("{}: {}", place(&e.at), e.kind)).collect()
}

/// Breaks a rule of a legal program.
type Change = fn(&mut Program);

/// What the text form cannot say, since reading it keeps these rules: a change of [`LEGAL`], and what is reported.
const UNWRITABLE: &[(Change, &str)] = &[
    (
        |p| step(p, 1, Step::Row(Reduce::Top, 0)),
        "stage 0, segment 0F, instruction 1: step 1 combines single numbers by merging pairs",
    ),
    (
        |p| step(p, 1, Step::Iota(7)),
        "stage 0, segment 0F, instruction 1: step 1 names loop 7, which is not defined before it",
    ),
    (
        |p| step(p, 1, Step::Load { read: 0, access: vec![[7].into_iter().collect()] }),
        "stage 0, segment 0F, instruction 1: step 0 names loop 7, which is not defined before it",
    ),
    (
        |p| step(p, 1, Step::Load { read: 3, access: plain(1) }),
        "stage 0, segment 0F, instruction 1: the kernel has 1 operands, the launch gives 0",
    ),
    (
        |p| p.stages[0].calls[0].segment = 4,
        "stage 0, call 0: calls segment 4 in slot 0, of 1 segments and 1 slots",
    ),
    (
        |p| {
            p.stages[0].calls.clear();
            p.stages[0].sizes[3] = 64;
        },
        "stage 0: b1 of 16 bytes at 64 does not lie in its region of 64 bytes, or is not aligned",
    ),
];

/// One launch.
const LEGAL: &str = "program mesh x=2 microbatches 1
input a : f32 [a=4]
stage 0 slots 1 sizes 0 0 0 128
b0 = f32 4 @ [_] scratch+0
b1 = f32 4 @ [_] scratch+64
segment 0F
  feed a -> b0
  launch b0 -> b1 map [ | a=4] (f32) -> (f32) {
    r0 = load 0 [a]
    r1 = exp r0
    store 0 [a] r0
  }
call 0F 0 slot 0
";

/// Another step in the place of one of the map.
fn step(program: &mut Program, at: usize, new: Step) {
    if let Instruction::Launch { kernel, .. } = &mut program.stages[0].segments[0].instructions[1]
        && let Body::Map(map) = &mut Arc::make_mut(kernel).body
    {
        map.steps[at] = new;
    }
}

fn read(text: &str) -> Program {
    parse_program(text).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_broken_rule_is_reported_where_it_is_broken() {
    let mut seen = BTreeSet::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/verify_program");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(found(&read(&text), &mut seen), expected(&text), "{}", path.display());
    }
    for (change, needed) in UNWRITABLE {
        let mut program = read(LEGAL);
        assert_eq!(found(&program, &mut seen), BTreeSet::new());
        change(&mut program);
        assert_eq!(found(&program, &mut seen), BTreeSet::from([needed.to_string()]));
    }
    assert_eq!(seen, RULES.into_iter().collect(), "a rule that no case breaks");
}
