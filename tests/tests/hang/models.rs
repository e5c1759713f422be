//! The programs of whole models pass, however their steps are split besides: over the batch, inside layers, with states or
//! parameters in shards, in bf16, with a backward pass that computes again.

use ir::graph::{Precision, Recompute};
use ir::{DType, Mesh, Places};
use meshc_tests::chain::table;
use meshc_tests::oracle::read;
use meshc_tests::whole::here;
use models::{Config, Shape};
use planner::check::check;
use planner::choose::compile;
use planner::conventions::{free, places, refine};
use planner::stages::cut;
use planner::zero::{self, Zero};

/// How a step is split.
struct Way {
    model: &'static str,
    mesh: &'static str,
    /// Kind, L and M.
    schedule: (&'static str, usize, usize),
    zero: Zero,
    bf16: bool,
    recompute: Recompute,
}

const PLAIN: Way = Way {
    model: "gpt2",
    mesh: "pp=2",
    schedule: ("1f1b", 1, 4),
    zero: Zero::Off,
    bf16: false,
    recompute: Recompute::None,
};

const WAYS: &[Way] = &[
    PLAIN,
    Way { mesh: "pp=3", schedule: ("zb-h1", 1, 4), ..PLAIN },
    Way { mesh: "dp=2,pp=2", schedule: ("interleaved", 2, 3), ..PLAIN },
    Way { mesh: "dp=2,pp=2,tp=2", zero: Zero::Moments, ..PLAIN },
    Way { mesh: "dp=2,pp=2", zero: Zero::Gradients, schedule: ("gpipe", 1, 3), ..PLAIN },
    Way { mesh: "pp=2,dp=2", zero: Zero::Parameters, schedule: ("zb-v", 2, 4), ..PLAIN },
    Way { model: "llama", mesh: "pp=2,tp=2", schedule: ("dualpipe-v", 2, 4), ..PLAIN },
    Way { model: "llama", mesh: "dp=2,pp=2", zero: Zero::Parameters, bf16: true, ..PLAIN },
    Way { model: "llama", mesh: "pp=2", recompute: Recompute::Full, ..PLAIN },
    Way { model: "llama", mesh: "dp=3,pp=2", schedule: ("zb-h2", 1, 2), ..PLAIN },
    Way { model: "gemma2", mesh: "pp=4", bf16: true, schedule: ("looping", 2, 3), ..PLAIN },
    Way {
        model: "qwen3",
        mesh: "dp=2,pp=2",
        zero: Zero::Gradients,
        recompute: Recompute::Selective,
        ..PLAIN
    },
];

fn faults(way: &Way) -> Vec<String> {
    let oracle = read(way.model);
    let config = Config::read(&oracle.folder).unwrap();
    let mut graph = models::build(&config, Shape { batch: 6, sequence: 8 }).unwrap();
    graph.seed(7);
    graph.optimizer = Some(oracle.adamw());
    graph.scatters = way.zero >= Zero::Gradients;
    graph.recompute = way.recompute;
    graph.precision = way.bf16.then_some(Precision { gradients: DType::F32, sums: DType::F32 });
    let mesh = refine(&graph, &Mesh::parse(way.mesh).unwrap());
    let (kind, virtuals, microbatches) = way.schedule;
    let schedule = table(kind, mesh.rows(), virtuals, microbatches).unwrap();
    graph.stages = cut(&vec![1; graph.depth()], schedule.stages());
    let mut placed = Places::from(places(&graph, &mesh));
    placed.free = free(&graph, &placed.at, &mesh);
    placed.schedule = schedule;
    zero::split(way.zero, &graph, &mesh, &mut placed);
    let compiled = compile(graph, &mesh, placed, &here(), &mut |_, _| {});
    check(&compiled.sharded, &compiled.program).err().unwrap_or_default()
}

#[test]
fn whole_models_pass_however_they_are_split() {
    let mut wrong = Vec::new();
    for way in WAYS {
        let found =
            std::panic::catch_unwind(|| faults(way)).unwrap_or_else(|_| vec!["it panics".to_string()]);
        let (kind, virtuals, microbatches) = way.schedule;
        let name =
            format!("{} on {} by {kind} L={virtuals} M={microbatches} {:?}", way.model, way.mesh, way.zero);
        wrong.extend(found.first().map(|f| format!("{name}: {} faults, first {f}", found.len())));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
