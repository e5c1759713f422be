//! Situations of pipelines in which others hung or mixed up messages.

use std::fmt::Write;

use ir::parse_program;
use ir::program::{Duty, Instruction, Program};
use ir::schedule::{Action, Kind, Schedule};
use meshc_tests::chain::{chain, compiled, table};
use passes::Compiled;
use planner::check::check;
use planner::hang::{Fault, Transport, ends};
use planner::numeric::{all_feeds, program};

/// A table's actions as a stream of calls that receive just before use and wait for each send at once.
fn naive(schedule: &Schedule) -> Program {
    let (stages, microbatches) = (schedule.stages(), schedule.microbatches());
    let homes: Vec<String> = schedule.homes.iter().map(ToString::to_string).collect();
    let rows = schedule.rows.len();
    let mut text = format!("program mesh pp={rows} microbatches {microbatches}\nhomes {}\n", homes.join(" "));
    for (row, actions) in schedule.rows.iter().enumerate() {
        writeln!(text, "stage {row} slots {microbatches} sizes 0 0 {} 0", 256 * stages).unwrap();
        (0..4 * stages).for_each(|b| writeln!(text, "b{b} = f32 4 @ [_] slot+{}", 64 * b).unwrap());
        for k in schedule.stages_of(row) {
            for (kind, comes_from, goes_to) in
                [('F', k.checked_sub(1), Some(k + 1)), ('B', Some(k + 1), k.checked_sub(1))]
            {
                let there = |s: Option<usize>| s.filter(|s| *s < stages);
                let (value, b) = if kind == 'F' { (0, 4 * k) } else { (1, 4 * k + 2) };
                writeln!(text, "segment {k}{kind}").unwrap();
                if let Some(from) = there(comes_from) {
                    writeln!(text, "t{b} = receive v{value} {from} -> {k} b{b}\nreceived t{b} b{b}").unwrap();
                }
                if let Some(to) = there(goes_to) {
                    let t = b + 1;
                    writeln!(text, "t{t} = send v{value} {k} -> {to} b{t}\nsent t{t} b{t}").unwrap();
                }
            }
        }
        for Action { stage, kind, microbatch } in actions.iter().filter(|a| a.kind != Kind::Optimizer) {
            let m = microbatch.unwrap();
            writeln!(text, "call {stage}{} {m} slot {m}", kind.letter()).unwrap();
        }
    }
    parse_program(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn receives_just_before_use_hang_in_interleaved_and_what_is_emitted_does_not() {
    let schedule = table("interleaved", 2, 2, 4).unwrap();
    let naive = naive(&schedule);
    let faults = ends(&naive, Transport::Rendezvous).unwrap_err();
    let [Fault::Circle { waits, .. }] = &faults[..] else { panic!("{faults:?}") };
    // Each rank is in a send to the other.
    assert_eq!(waits.iter().map(|w| w.place.rank).collect::<Vec<_>>(), [0, 1]);
    assert!(waits.iter().all(|w| w.what.starts_with("sent v")), "{}", faults[0]);
    let needed = "with rendezvous sends 2 rows wait for ever: rank 0 waits in 0F of micro-batch 1 (call 1: sent v0 to stage \
                  1) for call 1 of rank 1, which waits in 1F of micro-batch 0 (call 0: sent v0 to stage 2) for call 2 of \
                  rank 0";
    assert_eq!(faults[0].to_string(), needed);
    assert!(ends(&naive, Transport::Eager).is_ok());
    let emitted = compiled(chain, "pp=2", 4, schedule);
    for transport in [Transport::Rendezvous, Transport::Eager, Transport::Grouped] {
        ends(&emitted.program, transport).unwrap();
    }
}

/// The faults of a program after a change.
fn faults(whole: &Compiled, change: impl Fn(&mut Program)) -> Vec<String> {
    let mut program = whole.program.clone();
    change(&mut program);
    check(&whole.sharded, &program).err().unwrap_or_default()
}

fn equals_one_device(whole: &Compiled) {
    let feeds = all_feeds(&whole.sharded, 5);
    program(&whole.sharded, &whole.program, &feeds, 2).unwrap().unwrap_or_else(|wrong| panic!("{wrong:?}"));
}

#[test]
fn messages_of_one_size_between_the_same_ranks_are_told_apart() {
    let whole = compiled(chain, "pp=2", 4, table("interleaved", 2, 2, 2).unwrap());
    check(&whole.sharded, &whole.program).unwrap();
    equals_one_device(&whole);
    let sends = |p: &Program| {
        let mut all = Vec::new();
        for (s, segment) in p.stages[1].segments.iter().enumerate() {
            for (k, instruction) in segment.instructions.iter().enumerate() {
                if let Instruction::Send { message, from, .. } = instruction {
                    all.push((s, k, *message, *from, segment.kind));
                }
            }
        }
        all
    };
    let all = sends(&whole.program);
    let bytes =
        |b: ir::program::BufferId| whole.program.stages[1].buffers[b.index()].bytes(&whole.program.mesh);
    let forward = all.iter().find(|s| s.4 == Kind::Forward && s.2.to == 2).unwrap();
    let backward = all.iter().find(|s| s.4 == Kind::Backward && s.2.to == 0).unwrap();
    assert_eq!(bytes(forward.3), bytes(backward.3));
    // An activation goes as the gradient, and the other way round.
    let swapped = faults(&whole, |p| {
        for (at, other) in [(forward, backward), (backward, forward)] {
            let (s, k, ..) = *at;
            if let Instruction::Send { message, .. } = &mut p.stages[1].segments[s].instructions[k] {
                *message = other.2;
            }
        }
    });
    let found = |text: &str| swapped.iter().any(|f| f.contains(text));
    assert!(found(&format!("sends {} from stage 1 to stage 0, but", backward.2.value)), "{swapped:?}");
    // Two micro-batches change places: the k-th sent is not the k-th received.
    let crossed = faults(&whole, |p| {
        let calls = &mut p.stages[1].calls;
        let at = |m| calls.iter().position(|c| c.segment == forward.0 && c.microbatch == Some(m)).unwrap();
        let (a, b) = (at(0), at(1));
        calls.swap(a, b);
    });
    assert!(crossed.iter().any(|f| f.ends_with("the micro-batches differ")), "{crossed:?}");
}

#[test]
fn labels_of_another_micro_batch_are_found() {
    let whole = compiled(chain, "pp=2", 2, table("1f1b", 2, 1, 4).unwrap());
    check(&whole.sharded, &whole.program).unwrap();
    equals_one_device(&whole);
    let last = &whole.program.stages[1];
    let feeds = |s: usize| {
        let labels = |i: &Instruction| matches!(i, Instruction::Feed { input, .. } if &**input == "labels");
        last.segments[s].duty == Duty::Work && last.segments[s].instructions.iter().any(labels)
    };
    let calls: Vec<usize> = (0..last.calls.len()).filter(|c| feeds(last.calls[*c].segment)).collect();
    assert_eq!(calls.len(), 4);
    for (c, m) in [(0, 1), (3, 2)] {
        let wrong = faults(&whole, |p| p.stages[1].calls[calls[c]].microbatch = Some(m));
        assert!(wrong.iter().any(|f| f.contains("which is not in flight")), "{wrong:?}");
    }
    // Even if they change places they do not read what lies in their slots.
    let crossed = faults(&whole, |p| {
        let of = |c: usize| p.stages[1].calls[calls[c]].microbatch;
        let (a, b) = (of(2), of(3));
        p.stages[1].calls[calls[2]].microbatch = b;
        p.stages[1].calls[calls[3]].microbatch = a;
    });
    assert!(!crossed.is_empty());
    let slots = faults(&whole, |p| {
        let slots = p.stages[1].slots;
        p.stages[1].slots = slots.max(2);
        let call = &mut p.stages[1].calls[calls[1]];
        call.slot = (call.slot + 1) % slots.max(2);
    });
    assert!(!slots.is_empty());
}
