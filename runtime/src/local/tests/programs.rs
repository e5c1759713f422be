//! Small programs: what goes in and comes out, what is counted, and how a step ends that cannot go on.

use std::collections::BTreeMap;
use std::time::Instant;

use ir::program::{BufferId, Program};
use ir::schedule::Kind;
use ir::{Axis, Name, parse_program};

use super::super::collective::SHARE;
use super::super::load::load;
use super::super::{HostTensor, INLINE, Local, RunError, Taps};

type Feeds = BTreeMap<Name, HostTensor>;

/// `rows = x w`, `loss` their sum; then `w += loss`, `step += 1`. Rows are split unevenly; tp has copies.
const TRAIN: &str = "
program mesh dp=2,tp=2 microbatches 2
input x : f32 [b=5, d=3]
state w : f32 [d=3] parameter(trainable, decays) ones
state step : i32 [] step zeros
stage 0 slots 2 sizes 128 64 320 64
b0 = f32 3 @ [tp] state+0 of w
b1 = i32 () @ [] state+64 of step
b2 = f32 5x3 @ [dp, _] slot+0 for v7
b3 = f32 5 @ [dp] slot+64
b4 = f32 () @ [] partial(dp) slot+128
b5 = f32 () @ [] slot+192
b6 = f32 3 @ [_] slot+256
b7 = f32 () @ [] step+0
segment 0F
  t0 = start all_gather(tp, dim 0) b0 -> b6
  feed x -> b2
  wait t0
  launch b2, b6 -> b3, b4 map [b=5/dp | d=3] (f32, f32) -> (f32, f32) {
    r0 = load 0 [b, d]
    r1 = load 1 [d]
    r2 = mul r0, r1
    r3 = row_sum r2
    store 0 [b] r3
    accumulate(sum) 1 [] r3
  }
  t1 = start all_reduce(dp) b4 -> b5
  wait t1
  tap rows b3
  tap loss b5
  launch b5 -> b7 map [ | ] (f32) -> (f32) {
    r0 = load 0 []
    store 0 [] r0
  }
segment 0O
  launch b0, b7 -> b0 map [ | d=3/tp] (f32, f32) -> (f32) {
    r0 = load 0 [d]
    r1 = load 1 []
    r2 = add r0, r1
    store 0 [d] r2
  }
  launch b1 -> b1 map [ | ] (i32) -> (i32) {
    r0 = load 0 []
    r1 = const 1.0
    r2 = add r0, r1
    store 0 [] r2
  }
call 0F 0 slot 0
call 0F 1 slot 1
call 0O once slot 0
";

fn program(text: &str) -> Program {
    parse_program(text).unwrap()
}

fn feeds(x: impl Fn(usize) -> f32) -> Vec<Feeds> {
    let one = |m: usize| {
        let x = (0..15).map(|i| x(m * 15 + i)).collect();
        Feeds::from([("x".into(), HostTensor::F32(x))])
    };
    vec![one(0), one(1)]
}

fn filled(workers: usize) -> Local {
    let mut local = Local::new(&program(TRAIN), workers).unwrap();
    let mut calls = 0;
    local
        .fill_state("w", &mut |ranges, piece| {
            calls += 1;
            piece.iter_mut().zip(ranges[0].clone()).for_each(|(x, i)| *x = i as f32);
            Ok::<(), RunError>(())
        })
        .unwrap();
    assert_eq!(calls, 2, "each different piece once");
    local.set_integer("step", 41).unwrap();
    local
}

#[test]
fn a_step_reads_feeds_changes_states_and_fills_taps() {
    for workers in [1, 2, 4, 9] {
        let mut local = filled(workers);
        assert_eq!(local.arena_bytes(), 128 + 64 + 2 * 320 + 64);
        assert_eq!(local.taps(), ["rows".into(), "loss".into()]);
        let mut taps = Taps::of(["rows", "loss"]).finite("loss");
        for _ in 0..2 {
            local.step(&feeds(|i| i as f32), &mut taps).unwrap();
            local.set_integer("step", local.integer("step").unwrap() - 1).unwrap();
            local
                .fill_state("w", &mut |ranges, piece| {
                    piece.iter_mut().zip(ranges[0].clone()).for_each(|(x, i)| *x = i as f32);
                    Ok::<(), RunError>(())
                })
                .unwrap();
        }
        local.step(&feeds(|i| i as f32), &mut taps).unwrap();
        // Row i is 3i, 3i+1, 3i+2, and w is 0, 1, 2.
        let row = |i: usize| (9 * i + 5) as f32;
        assert_eq!(taps.all("rows").len(), 2);
        assert_eq!(taps.all("rows")[0].data, (0..5).map(row).collect::<Vec<_>>());
        assert_eq!(taps.get("rows").unwrap().data, (5..10).map(row).collect::<Vec<_>>());
        let loss: f32 = (5..10).map(row).sum();
        assert_eq!(taps.number("loss"), Some(loss));
        assert_eq!(local.read_state("w").unwrap().data, [loss, 1.0 + loss, 2.0 + loss]);
        assert_eq!(local.integer("step").unwrap(), 42);
        assert_eq!(local.read_state("step").unwrap().data, [42.0]);
    }
}

#[test]
fn a_profile_counts_runs_and_work_and_changes_nothing() {
    for workers in [1, 3] {
        let (mut watched, mut plain) = (filled(workers), filled(workers));
        let profile = watched.profile();
        let began = Instant::now();
        for _ in 0..3 {
            watched.step_profiled(&feeds(|i| i as f32), &mut Taps::default(), &profile).unwrap();
        }
        let all = began.elapsed().as_secs_f64() * workers as f64;
        let spent = watched.spent(&profile);
        (0..3).for_each(|_| plain.step(&feeds(|i| i as f32), &mut Taps::default()).unwrap());
        assert!(watched.same_states(&plain));
        let program = program(TRAIN);
        let instructions = program.stages[0].segments.iter().map(|s| s.instructions.len());
        assert_eq!(spent.len(), instructions.sum::<usize>());
        // 3 steps on 4 ranks, the forward for both micro-batches.
        assert!(spent.iter().all(|s| s.runs == if s.segment == 0 { 24 } else { 12 }), "{spent:?}");
        let of = |segment, at| spent.iter().find(|s| (s.segment, s.instruction) == (segment, at)).unwrap();
        // A product, a sum along the row and one over all rows: 7 for each of the 5 rows of both copies of tp.
        assert_eq!(of(0, 3).flops, 3.0 * 2.0 * 2.0 * 5.0 * 7.0);
        // An all_gather reads the larger piece of w and writes all of it; its wait moves nothing more.
        assert_eq!((of(0, 0).bytes, of(0, 2).bytes), (24.0 * (8.0 + 12.0), 0.0));
        let seconds: f64 = spent.iter().map(|s| s.seconds).sum();
        assert!(0.0 < seconds && seconds <= all, "{seconds} of {all}");
    }
}

#[test]
fn the_same_bits_with_any_number_of_workers() {
    let run = |workers| {
        let mut local = filled(workers);
        for s in 0..50 {
            local.step(&feeds(|i| (i * s) as f32 * 0.0137 - 0.3), &mut Taps::default()).unwrap();
        }
        local
    };
    let one = run(1);
    assert!([1, 2, 3, 4].into_iter().all(|workers| one.same_states(&run(workers))));
    assert!(!one.same_states(&filled(1)));
}

#[test]
fn a_step_stops_where_a_number_is_not_finite() {
    let bad = || feeds(|i| if i == 28 { f32::NAN } else { 1.0 });
    for workers in [1, 2, 4] {
        let mut local = filled(workers);
        let mut taps = Taps::of(["loss"]).finite("loss");
        let error = local.step(&bad(), &mut taps).unwrap_err();
        assert_eq!(error.to_string(), "`loss` is not finite");
        assert!(local.same_states(&filled(1)), "the states are as before");
        let found = local.first_not_finite(&bad()).unwrap().unwrap();
        // Of the second micro-batch element 13: row 4, which the second rank of dp has.
        assert_eq!((found.rank, found.segment, found.instruction), (2, Kind::Forward, 1));
        assert_eq!((found.buffer, found.value.map(|v| v.index())), (BufferId(2), Some(7)));
        assert!(found.index == [4, 1] && found.number.is_nan());
        assert_eq!(local.first_not_finite(&feeds(|_| 1.0)).unwrap(), None);
        assert!(local.same_states(&filled(1)), "looking changes nothing");
        local.step(&feeds(|_| 1.0), &mut taps).unwrap();
        assert_eq!(taps.number("loss"), Some(15.0));
    }
}

#[test]
fn minus_infinity_counts_last() {
    let mut local = filled(1);
    let minus = |i| if i == 4 { f32::NEG_INFINITY } else { 1.0 };
    let found = local.first_not_finite(&feeds(minus)).unwrap().unwrap();
    assert_eq!((found.index, found.number), (vec![1, 1], f64::NEG_INFINITY));
    let both = |i| if i == 20 { f32::INFINITY } else { minus(i) };
    let found = local.first_not_finite(&feeds(both)).unwrap().unwrap();
    assert_eq!((found.instruction, found.index, found.number), (1, vec![1, 2], f64::INFINITY));
}

#[test]
fn traffic_is_what_was_done() {
    let mut local = filled(2);
    local.step(&feeds(|_| 1.0), &mut Taps::default()).unwrap();
    let rows: Vec<_> = local
        .traffic()
        .into_iter()
        .map(|t| (t.op, t.axes, t.group_size, t.segment, t.count, t.bytes, t.wire_bytes))
        .collect();
    let f = Kind::Forward;
    // 3 elements over 2 are 2 and 1, padded 4.
    let expected =
        [("all_gather", vec![Axis(1)], 2, f, 2, 16, 8.0), ("all_reduce", vec![Axis(0)], 2, f, 2, 4, 4.0)];
    assert_eq!(rows, expected);
}

#[test]
fn a_program_that_cannot_go_on_says_who_waits() {
    for workers in [1, 2, 4] {
        let program = program(TRAIN);
        let mut code = load(&program, SHARE).unwrap();
        code.ranks[2].calls.truncate(1);
        code.ranks[3].calls.clear();
        let mut local = Local::of(&program, code, workers, INLINE).unwrap();
        let error = local.step(&feeds(|_| 1.0), &mut Taps::default()).unwrap_err();
        let RunError::Stuck { ranks } = &error else { panic!("{error}") };
        // Rank 2 waits for rank 3 in its first call, so rank 0 waits for rank 2, and rank 1 for rank 3.
        assert_eq!(
            ranks[..],
            [
                "rank 0: collective 0 of ranks [0, 2], where 1 arrived",
                "rank 1: collective 0 of ranks [1, 3], where 1 arrived",
                "rank 2: collective 0 of ranks [2, 3], where 1 arrived"
            ]
        );
    }
}

#[test]
fn ranks_that_meet_for_different_things_are_told() {
    let text = "
        program mesh a=2 microbatches 1
        stage 0 slots 1 sizes 0 0 0 256
        b0 = f32 4 @ [_] partial(a) scratch+0
        b1 = f32 8 @ [_] partial(a) scratch+64
        b2 = f32 4 @ [_] scratch+128
        b3 = f32 8 @ [_] scratch+192
        segment 0O
          t0 = start all_reduce(a) b0 -> b2
          t1 = start all_reduce(a) b1 -> b3
          wait t1
          wait t0
        call 0O once slot 0";
    let program = program(text);
    let mut code = load(&program, SHARE).unwrap();
    code.ranks[1].segments[0].ops.swap(0, 1);
    let mut local = Local::of(&program, code, 2, INLINE).unwrap();
    let error = local.step(&[Feeds::new()], &mut Taps::default()).unwrap_err();
    let found =
        "ranks [0, 1] met, but for different collectives: all_reduce of 16 bytes, all_reduce of 32 bytes";
    assert_eq!(error.to_string(), found);
    let mut local = Local::new(&program, 2).unwrap();
    local.step(&[Feeds::new()], &mut Taps::default()).unwrap();
}

#[test]
fn a_panic_ends_the_step_and_not_the_process() {
    for workers in [1, 2, 4] {
        let program = program(TRAIN);
        let mut code = load(&program, SHARE).unwrap();
        // Kernels panic when they get less scratch than they need.
        code.scratch = 0;
        let mut local = Local::of(&program, code, workers, INLINE).unwrap();
        for _ in 0..2 {
            let error = local.step(&feeds(|_| 1.0), &mut Taps::default()).unwrap_err();
            assert_eq!(error.to_string(), "a worker panicked: the scratch is too small");
        }
    }
}

#[test]
fn replicas_that_drift_apart_are_found() {
    let mut local = filled(2);
    local.step(&feeds(|i| i as f32), &mut Taps::default()).unwrap();
    assert_eq!(local.drifted(), None);
    // Ranks 0 and 2 hold the same piece of `w`, the first state of the arena.
    // SAFETY: no step runs, and the arena is larger than a number.
    unsafe { *local.arenas[2].start().cast::<f32>() += 1.0 };
    assert_eq!(local.drifted(), Some(("w".into(), [0, 2])));
}

#[test]
fn broken_programs_are_refused() {
    let refused = |from: &str, to: &str| {
        assert!(TRAIN.contains(from), "{from}");
        Local::new(&program(&TRAIN.replacen(from, to, 1)), 1).map(|_| ()).unwrap_err().to_string()
    };
    for (from, to, message) in [
        ("b5 = f32 () @ [] slot+192", "b5 = f32 () @ [] slot+?", "b5 has no offset"),
        ("b5 = f32 () @ [] slot+192", "b5 = f32 () @ [] slot+196", "must start at a multiple of 64"),
        ("b5 = f32 () @ [] slot+192", "b5 = f32 () @ [] slot+320", "lie in its region"),
        ("  wait t1\n", "", "segment F, instruction 4: t1 has no wait"),
        ("  wait t1\n", "  wait t1\n  wait t1\n", "instruction 6: waits for t1, which is not started"),
        ("b5 = f32 () @ []", "b5 = f32 () @ [] partial(dp)", "needs b5 to be f32 [] @ [], but it is"),
        ("feed x", "feed y", "feeds `y`, which is no input"),
        ("tap loss b5", "tap loss b4", "taps b4, which is partial"),
        ("b=5/dp |", "b=5 |", "on rank 0 the kernel uses 15 elements of b2, which has 9"),
        (
            "all_reduce(dp) b4 -> b5",
            "all_reduce(dp) b4 -> b5 + all_reduce(dp) b4 -> b5",
            "one call moves b4 -> b5 and b4 -> b5, which overlap",
        ),
        ("partial(dp) slot+128", "partial(dp) slot+64", "writes b4, which overlaps b3"),
        ("call 0F 1 slot 1", "call 0F 1 slot 2", "call 1: uses slot 2, but there are 2"),
        ("call 0F 1 slot 1", "call 0F 2 slot 1", "call 1: runs Some(2), but there are 2"),
        ("call 0F 1 slot 1", "call 0F once slot 1", "call 1: feeds an input, but has no micro-batch"),
    ] {
        let error = refused(from, to);
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn feeds_and_names_that_do_not_fit_are_refused() {
    let mut local = filled(1);
    let mut step = |feeds: &[Feeds]| local.step(feeds, &mut Taps::default()).unwrap_err().to_string();
    assert_eq!(step(&[]), "a step takes 2 micro-batches, but was fed 0");
    let mut some = feeds(|_| 1.0);
    some[1].clear();
    assert_eq!(step(&some), "micro-batch 1: input `x` needs 15 f32, but has nothing");
    some[1].insert("x".into(), HostTensor::I32(vec![0; 15]));
    assert_eq!(step(&some), "micro-batch 1: input `x` needs 15 f32, but has 15 i32");
    assert_eq!(local.read_state("v").unwrap_err().to_string(), "the program keeps no state `v`");
    assert_eq!(local.set_integer("w", 1).unwrap_err().to_string(), "state `w` is f32, and i32 is asked for");
}
