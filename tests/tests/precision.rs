//! Mixed precision: what each stage of ZeRO keeps and sends is as the papers say, training follows f32, and sums over ranks
//! are made in f32.

use ir::dsl::Model;
use ir::graph::Precision;
use ir::program::{Instruction, Program};
use ir::schedule::{Kind, Schedule};
use ir::state::{AdamW, Init};
use ir::{DType, Mesh, Places};
use meshc_tests::meaning::places as at;
use meshc_tests::tables::hold;
use models::{Config, Shape};
use passes::Compiled;
use planner::choose::compile;
use planner::cluster::Cluster;
use planner::conventions::{free, places};
use planner::plan::{Plan, plan};
use planner::zero::{self, Zero};
use runtime::local::{HostTensor, Local, Taps};

const ZERO: [Zero; 4] = [Zero::Off, Zero::Moments, Zero::Gradients, Zero::Parameters];

/// A Llama all of whose dimensions divide by 8.
const LLAMA: &str = r#"{
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

/// The training step of a Llama on dp=8 in mixed precision, priced for h100.
fn compiled(
    config: &str,
    shape: Shape,
    zero: Zero,
    gradients: DType,
    microbatches: usize,
) -> (Compiled, Cluster) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), config).expect("a file");
    let config = Config::read(folder.path()).expect("a config");
    let mut graph = models::build(&config, shape).expect("a model");
    graph.optimizer = Some(AdamW::default());
    graph.scatters = zero >= Zero::Gradients;
    let sums = if microbatches > 1 { DType::F32 } else { gradients };
    graph.precision = Some(Precision { gradients, sums });
    let mesh = Mesh::parse("dp=8").expect("a mesh");
    let mut placed = Places::from(places(&graph, &mesh));
    placed.free = free(&graph, &placed.at, &mesh);
    placed.schedule = Schedule::one_stage(microbatches);
    zero::split(zero, &graph, &mesh, &mut placed);
    let h100 = planner::cluster::read("h100").expect("a cluster");
    (compile(graph, &mesh, placed, &h100, &mut |_, _| {}), h100)
}

/// The plan of the small one; the arena of the run is as large as it says.
fn planned(zero: Zero, gradients: DType, microbatches: usize) -> Plan {
    let shape = Shape { batch: 8, sequence: 32 };
    let (compiled, h100) = compiled(LLAMA, shape, zero, gradients, microbatches);
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

/// A Llama of 1.3B, 64 sequences of 2048 on 8 GPUs: what is sent of gradients hides behind the backward pass. Without
/// `overlap` nothing does.
#[test]
fn gradients_are_reduced_beside_the_backward_pass() {
    let config = r#"{
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": false, "hidden_act": "silu"
    }"#;
    let (compiled, h100) = compiled(config, Shape { batch: 64, sequence: 2048 }, Zero::Off, DType::F32, 1);
    let share = |program: &Program| {
        let plan = plan(&compiled.sharded, program, &h100);
        let sum = |of: &dyn Fn(&planner::plan::Comm) -> f64| plan.comm.iter().map(of).sum::<f64>();
        sum(&|c| c.count as f64 * c.exposed_seconds) / sum(&|c| c.count as f64 * c.seconds)
    };
    assert!(share(&compiled.program) < 0.2, "{}", share(&compiled.program));
    let mut at_once = compiled.program.clone();
    for segment in at_once.stages.iter_mut().flat_map(|s| &mut s.segments) {
        let all = std::mem::take(&mut segment.instructions);
        for instruction in all {
            let token = if let Instruction::Start { token, .. } = &instruction { Some(*token) } else { None };
            if !matches!(instruction, Instruction::Wait { .. }) {
                segment.instructions.push(instruction);
            }
            segment.instructions.extend(token.map(|token| Instruction::Wait { token }));
        }
    }
    assert!((share(&at_once) - 1.0).abs() < 1e-9, "{}", share(&at_once));
}

/// At least one launch stands between the start and the wait of each gradient's reduction but the last few that the
/// backward pass ends with.
#[test]
fn a_launch_stands_between_start_and_wait() {
    let (compiled, _) = compiled(LLAMA, Shape { batch: 8, sequence: 32 }, Zero::Off, DType::F32, 1);
    let backward =
        compiled.program.stages[0].segments.iter().find(|s| s.kind == Kind::Backward).expect("one");
    let all = &backward.instructions;
    let last = all.iter().rposition(|i| matches!(i, Instruction::Launch { .. })).expect("a launch");
    let mut beside = 0;
    for (i, instruction) in all.iter().enumerate().filter(|(i, _)| *i < last) {
        let Instruction::Start { token, .. } = instruction else { continue };
        let wait = all.iter().position(|w| matches!(w, Instruction::Wait { token: t } if t == token));
        let between = &all[i..wait.expect("a wait")];
        assert!(between.iter().any(|x| matches!(x, Instruction::Launch { .. })), "t{token}");
        beside += 1;
    }
    assert!(beside > 15, "{beside} of the gradients are reduced beside launches");
}
