//! Mixed precision: what each stage of ZeRO keeps and sends is as the papers say, training follows f32, and sums over ranks
//! are made in f32.

use std::collections::BTreeMap;

use ir::dsl::Model;
use ir::graph::Precision;
use ir::program::{BufferId, Instruction};
use ir::state::{AdamW, Init, Role};
use ir::{DType, Mesh};
use meshc_tests::llama::{FEW, How, PLAIN, SMALL, compiled};
use meshc_tests::meaning::places as at;
use meshc_tests::tables::hold;
use passes::Compiled;
use planner::choose::compile;
use planner::cost::call;
use planner::names;
use planner::plan::{Plan, plan};
use planner::zero::Zero;
use runtime::local::{HostTensor, Local, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

/// The plan of the small one; the arena of the run is as large as it says.
fn planned(zero: Zero, gradients: DType, microbatches: usize) -> Plan {
    let how = How { zero, gradients, microbatches, ..PLAIN };
    let (compiled, h100) = compiled(SMALL, FEW, how);
    let plan = plan(&compiled.sharded, &compiled.program, &h100);
    let local = Local::new(&compiled.program, 1).expect("a program that runs");
    assert_eq!(local.arena_bytes(), plan.memory.peak_bytes);
    plan
}

/// Bytes a parameter of parameters, gradients and optimizer state; with one micro-batch and gradients in bf16 they are
/// those of Rajbhandari et al., section 5, for N = 8.
#[test]
fn zero_keeps_and_sends_what_it_must() {
    let mut rows = String::new();
    for (gradients, microbatches) in [(DType::BF16, 1), (DType::F32, 1), (DType::BF16, 2), (DType::F32, 2)] {
        for (stage, zero) in ZERO.into_iter().enumerate() {
            let plan = planned(zero, gradients, microbatches);
            let memory = &plan.memory.stages[0];
            let parameters = plan.model.parameters as f64;
            let each = [memory.parameters, memory.gradients, memory.optimizer].map(|n| n as f64 / parameters);
            let all: f64 = each.iter().sum();
            let sent =
                |op: &str| plan.comm_total.by_op.get(op).map_or(0.0, |t| t.wire_bytes) / (2.0 * parameters);
            if gradients == DType::BF16 && microbatches == 1 {
                let needed = [16.0, 5.5, 3.75, 2.0][stage];
                // The norm, the loss, the count and the step: a few numbers, each a cache line.
                assert!((all - needed).abs() < 1e-2, "zero {stage}: {all} bytes a parameter, not {needed}");
                let (reduced, scattered, gathered) =
                    (sent("all_reduce"), sent("reduce_scatter"), sent("all_gather"));
                let near = |x: f64, y: f64| (x - y).abs() < 1e-3;
                let fits = match zero {
                    Zero::Off => near(reduced, 1.75) && scattered + gathered == 0.0,
                    Zero::Moments | Zero::Gradients => {
                        near(scattered, 0.875) && near(gathered, 0.875) && near(reduced, 0.0)
                    }
                    // The table of tokens is not read in the backward pass.
                    Zero::Parameters => {
                        near(scattered, 0.875) && gathered < 1.75 && gathered > 1.5 && near(reduced, 0.0)
                    }
                };
                assert!(fits, "zero {stage}: {:?}", plan.comm_total.by_op);
            }
            let wire: f64 = ["all_reduce", "reduce_scatter", "all_gather"].iter().map(|op| sent(op)).sum();
            rows += &format!(
                "| {gradients} | {microbatches} | {stage} | {:.2} | {:.2} | {:.2} | {all:.2} | {wire:.2} |\n",
                each[0], each[1], each[2]
            );
        }
    }
    let head = "| gradients | micro-batches | zero | parameters | gradients | optimizer | all | wire / S |";
    hold("state.md", head, &rows);
}

/// What zero 3 sends of each parameter: a gather for the forward pass, another for the backward pass, and a scatter of its
/// gradient, 3 (n-1)/n of its bytes; the table of the docs names each that needs less.
#[test]
fn what_needs_less_is_named() {
    let how = How { zero: Zero::Parameters, gradients: DType::BF16, ..PLAIN };
    let (Compiled { sharded, program }, _) = compiled(SMALL, FEW, how);
    let makers = sharded.graph.makers();
    // Gathers, scatters and wire bytes of each parameter.
    let mut sent: BTreeMap<String, ([usize; 2], f64)> = BTreeMap::new();
    let stage = &program.stages[0];
    for t in stage.segments.iter().flat_map(|s| &s.instructions).flat_map(Instruction::transfers) {
        let of = |b: BufferId| stage.buffers[b.index()].value;
        let name = of(t.from).or(of(t.to)).map_or(String::new(), |v| names::name(&sharded.graph, &makers, v));
        let (calls, wire) = sent.entry(name.trim_start_matches("gradient of ").to_string()).or_default();
        calls[usize::from(t.step.name() == "reduce_scatter")] += 1;
        *wire += call(std::slice::from_ref(t), stage, &program.mesh).wire_bytes;
    }
    let mut rows = String::new();
    for state in program.states.iter().filter(|s| matches!(s.role, Role::Parameter { .. })) {
        let bytes = state.shape().iter().product::<usize>() as f64 * 2.0;
        let ([gathers, scatters], wire) = sent[&*state.name];
        let share = wire / bytes;
        assert!(share <= 3.0 * 7.0 / 8.0 + 1e-9, "{}: {share}", state.name);
        if share < 3.0 * 7.0 / 8.0 - 1e-9 {
            rows += &format!("| {} | {gathers} | {scatters} | {share:.2} |\n", state.name);
        }
    }
    hold("state.md", "| tensor | gathers | scatters | wire / S |", &rows);
}

/// B43: what ranks add is added in f32. 512 ones are 512 even if they are sent as bf16, where a running sum stops at 256;
/// 256 and 1 are 257, or what bf16 has for that if the sum is kept so.
#[test]
fn sums_over_ranks_are_made_in_f32() {
    for (numbers, want) in [(vec![1.0f32; 512], 512.0), (vec![256.0, 1.0], 257.0)] {
        for gradients in [DType::F32, DType::BF16] {
            let n = numbers.len();
            let mut m = Model::new();
            m.dim("b", n);
            m.dim("d", 2);
            let x = m.input("x", DType::F32, "b");
            let w = m.parameter("w", "d", Init::Ones);
            let sum = m.einsum("", &[&x, &w]);
            let one = m.constant(1.0, DType::F32);
            m.loss(&sum, &one);
            let mut graph = m.finish().expect("a graph");
            graph.optimizer = Some(AdamW::default());
            graph.dump = true;
            graph.precision = Some(Precision { gradients, sums: gradients });
            let mesh = Mesh::parse(&format!("dp={n}")).expect("a mesh");
            let here = meshc_tests::whole::here();
            let compiled = compile(graph, &mesh, at(&[("x", "[dp]")], &mesh), &here, &mut |_, _| {});
            let mut local = Local::new(&compiled.program, 1).expect("a program that runs");
            let mut taps = Taps::of(["grad.w"]);
            let feeds = [("x".into(), HostTensor::F32(numbers.clone()))].into();
            local.step(&[feeds], &mut taps).expect("a step");
            let kept = if gradients == DType::BF16 { runtime::cpu::cast(DType::BF16, want) } else { want };
            let found = &taps.get("grad.w").expect("a tap").data;
            assert!(found.iter().all(|x| f64::from(*x) == kept), "{n} ranks, {gradients}: {found:?}");
        }
    }
}
