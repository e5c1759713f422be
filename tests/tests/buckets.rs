//! Gradients in buckets: fewer calls of the same bytes, beside the backward pass, and the same numbers.

use std::collections::{BTreeMap, BTreeSet};

use ir::dsl::Model;
use ir::program::{BufferId, Instruction, Program, Segment};
use ir::schedule::Kind;
use ir::state::{AdamW, Init};
use ir::{DType, Mesh, Places};
use meshc_tests::llama::{FEW, How, LARGE, MANY, PLAIN, SMALL, compiled, planned};
use meshc_tests::meaning::places as at;
use meshc_tests::tables::hold;
use meshc_tests::whole::here;
use models::Shape;
use planner::choose::compile;
use planner::plan::{Comm, Plan, plan};
use planner::units::{bytes, seconds};
use planner::zero::Zero;
use runtime::local::{HostTensor, Local, RunError, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

fn sum(plan: &Plan, of: &dyn Fn(&Comm) -> f64) -> f64 {
    plan.comm.iter().map(|c| c.count as f64 * of(c)).sum()
}

/// Calls of the reductions, and their bytes on the wire.
fn reductions(plan: &Plan) -> (usize, f64) {
    let of = |op: &str| plan.comm_total.by_op.get(op).map_or((0, 0.0), |t| (t.count, t.wire_bytes));
    let [a, b] = ["all_reduce", "reduce_scatter"].map(of);
    (a.0 + b.0, a.1 + b.1)
}

/// Whatever is split, and however often gradients are reduced: larger buckets are fewer calls of the same bytes, from one
/// a tensor to one for all that is reduced alike.
#[test]
fn fewer_calls_send_the_same_bytes() {
    for mesh in ["dp=8", "dpo=2,dp=4"] {
        for zero in ZERO {
            for microbatches in [1, 2] {
                let how = |bytes| How { mesh, zero, microbatches, bucket_bytes: Some(bytes), ..PLAIN };
                let sizes = [0, 1 << 16, 1 << 20, 1 << 23, 1 << 30];
                let found = sizes.map(|bytes| reductions(&planned(SMALL, FEW, how(bytes))));
                let what = format!("{mesh}, {zero:?}, {microbatches} micro-batches: {found:?}");
                assert!(found.windows(2).all(|w| w[1].0 <= w[0].0), "{what}");
                assert!(found.iter().all(|(_, bytes)| (bytes - found[0].1).abs() < 1.0), "{what}");
                let all = found[sizes.len() - 1].0;
                assert!(found[0].0 > 20 && found[2].0 < found[0].0 && all * 2 <= found[2].0.max(8), "{what}");
            }
        }
    }
}

/// What one rank would send is what it keeps in arenas: nothing is added for buckets, and a bucket's plan is that of the
/// run.
#[test]
fn a_plan_with_buckets_is_that_of_the_run() {
    for zero in ZERO {
        let (compiled, h100) = compiled(SMALL, FEW, How { zero, bucket_bytes: Some(1 << 20), ..PLAIN });
        let plan = plan(&compiled.sharded, &compiled.program, &h100);
        let local = Local::new(&compiled.program, 2).expect("a program that runs");
        assert_eq!(local.arena_bytes(), plan.memory.peak_bytes, "{zero:?}");
    }
}

fn backward(program: &Program) -> &Segment {
    program.stages[0].segments.iter().find(|s| s.kind == Kind::Backward).expect("a backward pass")
}

/// At least one launch stands between the start and the wait of each collective of the backward pass for which there is
/// one: behind a gradient's reduction any that does not need its result, so that only the last have none; behind a gather
/// of a parameter the use of the one before.
#[test]
fn a_launch_stands_between_start_and_wait() {
    for mesh in ["dp=2", "dp=8", "dpo=2,dp=4"] {
        for zero in ZERO {
            for microbatches in [1, 2] {
                for bucket_bytes in [Some(0), Some(1 << 19), None] {
                    let how = How { mesh, zero, microbatches, bucket_bytes, ..PLAIN };
                    let (compiled, _) = compiled(SMALL, FEW, how);
                    let all = &backward(&compiled.program).instructions;
                    let alone = alone(all);
                    assert!(alone.is_empty(), "{how:?}: {alone:#?}");
                }
            }
        }
    }
}

/// The collectives beside which nothing runs, though something could.
fn alone(all: &[Instruction]) -> Vec<String> {
    let launch = |i: &Instruction| matches!(i, Instruction::Launch { .. });
    let mut out = Vec::new();
    let mut gathers = 0;
    for (i, instruction) in all.iter().enumerate() {
        let Some((token, parts)) = instruction.started() else { continue };
        let wait = all.iter().position(|w| *w == Instruction::Wait { token }).expect("a wait");
        let gather = parts[0].step.name() == "all_gather";
        gathers += usize::from(gather);
        let could = if gather { gathers > 1 } else { independent(&all[i..]) };
        if could && !all[i..wait].iter().any(launch) {
            out.push(format!("t{token}: {} of {} tensors", parts[0].step.name(), parts.len()));
        }
    }
    out
}

/// Whether some launch needs nothing that is started here.
fn independent(all: &[Instruction]) -> bool {
    let mut made: BTreeSet<BufferId> = BTreeSet::new();
    all.iter().any(|i| {
        let needs = i.reads().iter().any(|b| made.contains(b));
        if needs || i.started().is_some() {
            made.extend(i.writes());
        }
        !needs && matches!(i, Instruction::Launch { .. })
    })
}

/// A Llama of 1.3B, 64 sequences of 2048 on 8 GPUs: what is sent of gradients hides behind the backward pass. Where waits
/// follow starts nothing does.
#[test]
fn gradients_are_reduced_beside_the_backward_pass() {
    let (compiled, h100) = compiled(LARGE, MANY, PLAIN);
    let share = |program: &Program| {
        let plan = plan(&compiled.sharded, program, &h100);
        sum(&plan, &|c| c.exposed_seconds) / sum(&plan, &|c| c.seconds)
    };
    assert!(share(&compiled.program) < 0.2, "{}", share(&compiled.program));
    let mut at_once = compiled.program.clone();
    for segment in at_once.stages.iter_mut().flat_map(|s| &mut s.segments) {
        let all = std::mem::take(&mut segment.instructions);
        for instruction in all {
            let wait = instruction.started().map(|(token, _)| Instruction::Wait { token });
            if !matches!(instruction, Instruction::Wait { .. }) {
                segment.instructions.push(instruction);
            }
            segment.instructions.extend(wait);
        }
    }
    assert!((share(&at_once) - 1.0).abs() < 1e-9, "{}", share(&at_once));
}

/// The table of the docs: what a Llama of 1.3B sends and exposes, by the size of buckets. Larger ones are fewer calls.
#[test]
fn what_a_large_model_exposes() {
    let mut rows = String::new();
    for (stage, zero) in ZERO.into_iter().enumerate() {
        let mut calls = usize::MAX;
        for (microbatches, bucket_bytes) in [(1, Some(0)), (1, Some(25 << 20)), (1, None), (4, None)] {
            let shape = Shape { batch: MANY.batch / microbatches, ..MANY };
            let plan = planned(LARGE, shape, How { zero, microbatches, bucket_bytes, ..PLAIN });
            let count: usize = plan.comm.iter().map(|c| c.count).sum();
            assert!(microbatches > 1 || count <= calls, "zero {stage}: {count} calls, not {calls}");
            calls = count;
            let (all, exposed) = (sum(&plan, &|c| c.seconds), plan.time.exposed_comm_seconds);
            // Zero 1 reduces in the update.
            assert!(stage == 1 || exposed < 0.35 * all, "zero {stage}: {exposed} s of {all} s");
            let size = bucket_bytes.or(plan.bucket_bytes).unwrap_or(0);
            let chosen = if bucket_bytes.is_none() { ", chosen" } else { "" };
            rows += &format!(
                "| {stage} | {microbatches} | {}{chosen} | {count} | {} | {} | {} |\n",
                bytes(size as f64),
                bytes(plan.comm_total.wire_bytes_per_rank),
                seconds(all),
                seconds(exposed),
            );
        }
    }
    hold(
        "overlap.md",
        "| zero | micro-batches | bucket | calls | wire bytes a rank | communicating | exposed |",
        &rows,
    );
}

/// The size that is chosen is as good as any: within a hundredth of the step of the best of many.
#[test]
fn the_chosen_size_is_as_good_as_any() {
    for (config, shape) in [(SMALL, FEW), (LARGE, MANY)] {
        let step = |bucket_bytes| planned(config, shape, How { bucket_bytes, ..PLAIN }).time.step_seconds;
        let chosen = step(None);
        let all: Vec<f64> = (0..8).map(|i| step(Some(if i == 0 { 0 } else { 1 << (14 + 2 * i) }))).collect();
        let best = all.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(chosen <= 1.01 * best, "{chosen} of {all:?}");
    }
}

/// B08: y = x W^T with a W that every rank has and a batch that is split; the gradient of W is reduced as it comes, by one
/// collective, together with another parameter's. The sum of losses and the count are one more, of two numbers.
#[test]
fn a_bucket_is_one_collective() {
    let mut m = Model::new();
    for (name, n) in [("b", 4), ("d", 3), ("f", 5)] {
        m.dim(name, n);
    }
    let x = m.input("x", DType::F32, "b d");
    let w = m.parameter("w", "f d", Init::Normal(1.0));
    let u = m.parameter("u", "f", Init::Ones);
    let y = m.einsum("b f", &[&x, &w]);
    let y = m.add(&[&y, &u]);
    let loss = m.einsum("", &[&y, &y]);
    let count = m.constant(4.0, DType::F32);
    m.loss(&loss, &count);
    let mut graph = m.finish().expect("a graph");
    graph.optimizer = Some(AdamW::default());
    graph.dump = true;
    let mesh = Mesh::parse("dp=2").expect("a mesh");
    let x: [f32; 12] = std::array::from_fn(|i| i as f32 / 8.0 - 0.5);
    let run = |bucket_bytes| {
        let mut places = Places::from(at(&[("x", "[dp, _]")], &mesh));
        places.bucket_bytes = bucket_bytes;
        let compiled = compile(graph.clone(), &mesh, places, &here(), &mut |_, _| {});
        let plan = plan(&compiled.sharded, &compiled.program, &here());
        let mut local = Local::new(&compiled.program, 2).expect("a program that runs");
        let mut taps = Taps::of(["grad.w", "grad.u"]);
        for (name, number) in [("w", 0.5), ("u", 0.25)] {
            let all = local.fill_state::<RunError>(name, &mut |_, out| {
                out.fill(number);
                Ok(())
            });
            all.expect("a state");
        }
        local.step(&[[("x".into(), HostTensor::F32(x.to_vec()))].into()], &mut taps).expect("a step");
        let numbers: BTreeMap<&str, Vec<f32>> =
            ["grad.w", "grad.u"].into_iter().map(|t| (t, taps.get(t).expect("a tap").data.clone())).collect();
        (plan, numbers)
    };
    let (one, numbers) = run(None);
    let large = |c: &&Comm| c.bytes > 8;
    let all: Vec<&Comm> = one.comm.iter().filter(large).collect();
    assert!(matches!(all[..], [bucket] if bucket.count == 1 && bucket.op == "all_reduce"), "{:#?}", one.comm);
    let both: BTreeSet<&str> = all[0].tensors.iter().map(String::as_str).collect();
    assert_eq!(both, BTreeSet::from(["gradient of u", "gradient of w"]));
    assert_eq!(all[0].bytes, (5 * 3 + 5) * 4);
    let (apart, same) = run(Some(0));
    assert_eq!(apart.comm.iter().filter(large).count(), 2);
    assert_eq!(numbers, same);
    // The mean over 4 rows of the sum of squares of y, all of whose 5 elements are the same in a row. Powers of two: exact.
    let y: Vec<f32> = x.chunks(3).map(|row| row.iter().sum::<f32>() * 0.5 + 0.25).collect();
    let of_u = y.iter().sum::<f32>() * 2.0 / 4.0;
    let of_w = |d: usize| (0..4).map(|b| y[b] * x[3 * b + d]).sum::<f32>() * 2.0 / 4.0;
    assert_eq!(numbers["grad.u"], vec![of_u; 5]);
    assert_eq!(numbers["grad.w"], (0..15).map(|i| of_w(i % 3)).collect::<Vec<f32>>());
}
