//! Gradients summed over micro-batches are whole when they are reduced, and reduced once.

use ir::program::{Buffer, BufferId, Instruction, Program, Region};
use ir::schedule::Kind;
use meshc_tests::chain::{chain, compiled, table};
use passes::Compiled;
use planner::check::check;

/// Without offsets: where buffers share memory, that it was taken is found before what is tried here.
fn unplaced(mesh: &str, kind: &str, rows: usize) -> Compiled {
    let mut whole = compiled(chain, mesh, 4, table(kind, rows, 1, 2).unwrap());
    whole.program = passes::lower(&whole.sharded);
    let early = passes::PROGRAM.iter().filter(|pass| pass.name != "place");
    early.for_each(|pass| (pass.run)(&mut whole.program));
    check(&whole.sharded, &whole.program).unwrap();
    whole
}

fn faults(whole: &Compiled, change: impl Fn(&mut Program)) -> Vec<String> {
    let mut program = whole.program.clone();
    change(&mut program);
    check(&whole.sharded, &program).err().unwrap_or_default()
}

fn has(faults: &[String], text: &str) {
    assert!(faults.iter().any(|f| f.contains(text)), "`{text}` is not in {faults:#?}");
}

/// The place of the last call of each backward segment of row 0 that reduces sums, and of the call before of its family.
fn reducing(program: &Program) -> (usize, usize) {
    let stage = &program.stages[0];
    let reduces = |s: usize| {
        let of = &stage.segments[s];
        let sums = of.instructions.iter().flat_map(Instruction::transfers).any(|p| p.step.reduce().is_some());
        matches!(of.kind, Kind::Backward | Kind::Weight) && sums
    };
    let last = stage.calls.iter().rposition(|c| reduces(c.segment)).expect("the last backward reduces");
    let key = |c: usize| {
        let of = &stage.segments[stage.calls[c].segment];
        (of.stage, of.kind, of.duty)
    };
    let before = (0..last).rev().find(|c| key(*c) == key(last)).expect("a backward before it");
    (last, before)
}

#[test]
fn a_sum_is_reduced_once_and_only_when_it_is_whole() {
    for kind in ["1f1b", "zb-h1"] {
        let whole = unplaced("dp=2,pp=2", kind, 2);
        let (last, before) = reducing(&whole.program);
        // Every backward but the last one's reduces nothing; here all do.
        let all = faults(&whole, |p| p.stages[0].calls[before].segment = p.stages[0].calls[last].segment);
        has(&all, "reads, with 1 of 2 micro-batches, the sum");
        // None does: what the update reads was never made.
        let none = faults(&whole, |p| p.stages[0].calls[last].segment = p.stages[0].calls[before].segment);
        has(&none, "which nothing has written");
        // The sum starts anew in the middle of the step.
        let again = faults(&whole, |p| {
            let calls = &mut p.stages[0].calls;
            let begin = calls.remove(0);
            calls.insert(last - 1, begin);
        });
        assert!(!again.is_empty());
    }
}

#[test]
fn every_micro_batch_goes_once_through_every_segment() {
    let whole = unplaced("dp=2", "1f1b", 1);
    let (_, before) = reducing(&whole.program);
    let twice = faults(&whole, |p| {
        let calls = &mut p.stages[0].calls;
        let call = calls[before];
        calls.insert(before + 1, call);
    });
    has(&twice, "adds a micro-batch twice to the sum");
    has(&twice, "0B is called 2 times for micro-batch 0");
    let never = faults(&whole, |p| {
        p.stages[0].calls.remove(before);
    });
    has(&never, "reads, with 1 of 2 micro-batches, the sum");
    has(&never, "0B is called 0 times for micro-batch 0");
    let none = faults(&whole, |p| {
        let end = p.stages[0].calls.len() - 1;
        p.stages[0].calls[end].microbatch = Some(1);
    });
    has(&none, "0O is called for micro-batch 1");
}

#[test]
fn a_state_that_is_not_written_is_found() {
    let whole = unplaced("pp=2", "1f1b", 2);
    let lost = faults(&whole, |p| {
        let stage = &mut p.stages[1];
        let kept = stage.buffers.iter().position(|b| b.state.as_deref() == Some("w3")).unwrap();
        let other = BufferId(stage.buffers.len() as u32);
        let like = stage.buffers[kept].clone();
        stage.buffers.push(Buffer { state: None, region: Region::Scratch, ..like });
        for instruction in stage.segments.iter_mut().flat_map(|s| &mut s.instructions) {
            if let Instruction::Launch { writes, .. } = instruction {
                writes.iter_mut().filter(|b| b.index() == kept).for_each(|b| *b = other);
            }
        }
    });
    assert_eq!(lost, ["stage 1: nothing writes `w3`, which the step assigns"]);
}
