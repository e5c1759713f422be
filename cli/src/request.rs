//! From what the user asks to a graph with places on a mesh: everything that can make no sense is found here.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use ir::composite::{has_dropout, set_dropout};
use ir::graph::{Mark, NewNode, Precision, Recompute};
use ir::state::AdamW;
use ir::{DType, Graph, Mesh, Name, Op, PIPELINE, Places, ShardedGraph, Signature, verify};
use models::{Config, Dropout, Shape};
use passes::{Compiled, Trace};
use planner::choose::{Best, compile, compile_and_tell};
use planner::cluster::Cluster;
use planner::conventions::{AXES, free, pieces, places, refine};
use planner::even::uneven;
use planner::plan::{self, Plan};
use planner::rules::{self, Rules};
use planner::zero::{self, Zero};
use runtime::data::rows::Rows;

use crate::args::{Again, Float, Mode, SplitArgs, Sync};
use crate::failure::Failure;
use crate::pipeline::{self, Pipeline};

/// A model of the user's own: its name, the usual size of a step, and how it is built.
pub struct Own {
    /// What the plan is titled with.
    pub name: String,
    /// The size of a step unless asked otherwise.
    pub shape: Shape,
    /// Builds the forward pass of a micro-batch.
    pub build: Box<dyn Fn(Shape) -> Result<Graph, Vec<ir::dsl::BuildError>>>,
}

/// Where models come from.
pub enum Origin {
    /// From a Hugging Face config or a graph file.
    Files,
    /// From the user's own program.
    Own(Own),
}

/// A request that makes sense.
#[derive(Clone)]
pub struct Request {
    /// What the plan is titled with.
    pub title: String,
    /// The text of the config, to be saved beside weights.
    pub config: Option<Config>,
    /// The forward pass.
    pub graph: Graph,
    /// The size of a step.
    pub shape: Shape,
    /// Which rows each micro-batch has.
    pub rows: Rows,
    /// The devices.
    pub mesh: Mesh,
    /// Where inputs and states lie.
    pub places: Places,
    /// The kind of its schedule, or the file.
    pub schedule: String,
    /// What it is priced for.
    pub cluster: Cluster,
}

/// Rows and tokens of a step unless the user says otherwise; a row is no longer than the model's positions.
const USUAL: Shape = Shape { batch: 8, sequence: 128 };

/// Reads a request. `fed` is the size of a step that the training data has.
///
/// # Errors
/// What in it makes no sense, or is not built yet.
pub fn read(origin: &Origin, args: &SplitArgs, fed: Option<Shape>) -> Result<Request, Failure> {
    not_built(args)?;
    let mesh = mesh(&args.mesh)?;
    let mut cluster = planner::cluster::read(&args.cluster)?;
    cluster.holds(mesh.ranks())?;
    if cluster.name == "here" && cluster.memory.is_none() {
        cluster.memory = machine_memory().map(|m| m / mesh.ranks() as f64);
    }
    let rules = args.rules.as_deref().map(read_rules).transpose()?;
    let microbatches = pipeline::microbatches(args, &mesh);
    let Model { title, config, mut graph, shape, rows } = model(origin, args, fed, microbatches, &|graph| {
        let mesh = refine(graph, &mesh);
        let places = places(graph, &mesh);
        let places = rules.as_ref().map_or(Ok(places.clone()), |r| r.apply(graph, &mesh, places))?;
        Ok(pieces(graph, &mesh, &places))
    })?;
    if args.mode == Mode::Forward {
        keep_outputs(&mut graph);
    }
    check_constraints(&graph, &mesh, &constraint_lines(args))?;
    let mesh = refine(&graph, &mesh);
    let mut places = Places::from(places(&graph, &mesh));
    let tables = pipeline::pipelines(args, &graph, &mesh, rows.microbatches())?;
    places.bucket_bytes = buckets(args, &mesh)?;
    places.free = free(&graph, &places.at, &mesh);
    if let Some(rules) = &rules {
        places.at = rules.apply(&graph, &mesh, places.at)?;
        let ruled = |s: &&ir::state::State| rules.name(&s.name, &s.dims);
        graph.states.iter().filter(ruled).for_each(|s| {
            let parameter = s.role.of().unwrap_or(&s.name);
            places.free.remove(parameter);
        });
    }
    let zero = Zero::of(args.zero).unwrap_or(Zero::Off);
    zero::split(zero, &graph, &mesh, &mut places);
    graph.scatters = match args.sync {
        Some(Sync::Each) => true,
        // With one micro-batch each is once.
        Some(Sync::Once) if rows.microbatches() > 1 => false,
        Some(Sync::Once) | None => zero >= Zero::Gradients,
    };
    graph.precision = precision(args, rows.microbatches())?;
    graph.recompute = match args.recompute {
        Again::None => Recompute::None,
        Again::Selective => Recompute::Selective,
        Again::Full => Recompute::Full,
    };
    let request =
        Request { title, config, graph, shape, rows, mesh, places, schedule: String::new(), cluster };
    let mut requests = Vec::new();
    for Pipeline { kind, schedule } in tables {
        let mut request = request.clone();
        request.graph.stages =
            pipeline::stages(args, &request.graph, &request.mesh, &schedule, &request.cluster)?;
        (request.places.schedule, request.schedule) = (schedule, kind);
        requests.push(request);
    }
    best(requests)
        .ok_or_else(|| Failure::Request("--schedule auto: no kind has a table of this size".to_string()))
}

/// The request whose step is fastest by price, of those that fit; if none does, the one that needs least.
fn best(mut requests: Vec<Request>) -> Option<Request> {
    if requests.len() == 1 {
        return requests.pop();
    }
    let of = |request: Request| {
        let plan = request.plan(&request.compile_and_tell(&|_, _| {}));
        let least = if plan.memory.fits { plan.time.step_seconds } else { plan.memory.peak_bytes as f64 };
        ((!plan.memory.fits, least), request)
    };
    let less = |(a, _): &((bool, f64), Request), (b, _): &((bool, f64), Request)| {
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    };
    requests.into_iter().map(of).min_by(less).map(|(_, request)| request)
}

/// In which types values are kept; none: all in f32.
fn precision(args: &SplitArgs, microbatches: usize) -> Result<Option<Precision>, Failure> {
    let of = |float: Float| if float == Float::F32 { DType::F32 } else { DType::BF16 };
    match (args.dtype, of(args.grad_dtype)) {
        (Float::F32, DType::BF16) => Err(Failure::Request(
            "--grad-dtype bf16 needs --dtype bf16: gradients are no narrower than what they are computed from"
                .to_string(),
        )),
        (Float::F32, _) => Ok(None),
        (Float::Bf16, gradients) => {
            let sums = if microbatches > 1 { DType::F32 } else { gradients };
            Ok(Some(Precision { gradients, sums }))
        }
    }
}

fn read_rules(path: &Path) -> Result<Rules, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::Request(format!("cannot read {}: {e}", path.display())))?;
    Ok(rules::parse(&path.display().to_string(), &text)?)
}

impl Request {
    /// Compiles it as a plan needs it, and tells what was chosen.
    pub fn compile_and_tell(&self, tell: &dyn Fn(&ShardedGraph, &Best)) -> Compiled {
        let mut graph = self.graph.clone();
        graph.optimizer = Some(AdamW::default());
        compile_and_tell(graph, &self.mesh, self.places.clone(), &self.cluster, tell)
    }

    /// The plan of what was compiled of it.
    pub fn plan(&self, compiled: &Compiled) -> Plan {
        let mut plan = plan::plan(&compiled.sharded, &compiled.program, &self.cluster);
        plan.schedule.kind.clone_from(&self.schedule);
        plan.counting(self.rows.counted(), self.rows.each() * self.rows.microbatches())
    }

    /// Compiles it, with an optimizer if a loss is to be minimised.
    pub fn compile(&self, adamw: AdamW, dump: bool, trace: Trace) -> Compiled {
        let mut graph = self.graph.clone();
        graph.optimizer = Some(adamw);
        graph.dump |= dump;
        compile(graph, &self.mesh, self.places.clone(), &self.cluster, trace)
    }
}

/// The forward pass hands out what nothing in it uses, logits among it, but has no loss.
fn keep_outputs(graph: &mut Graph) {
    graph.dump = true;
    let mut used: HashSet<ir::Value> = graph.nodes.iter().flat_map(|n| n.args.iter().copied()).collect();
    used.extend(graph.loss.take().into_iter().flat_map(|l| [l.sum, l.count]));
    let last = graph.nodes.iter().filter(|n| !matches!(n.op, Op::Input(_) | Op::State(_) | Op::Const(_)));
    let outputs: Vec<(ir::Value, Mark)> = last
        .flat_map(|n| n.results.iter().map(|v| (*v, n.mark)))
        .filter(|(v, _)| !used.contains(v))
        .collect();
    for (v, mark) in outputs {
        let signature = Signature { results: Vec::new(), ..Signature::pointwise(graph.shape(v).len(), 1) };
        let (op, dtype) = (Op::Tap(v.to_string().into()), graph.ty(v).dtype);
        let args = vec![v];
        let tap =
            NewNode { op, signature, args, dtype, known: vec![], mark, tag: None, of: None, like: None };
        graph.push(tap).unwrap_or_else(|e| unreachable!("a tap takes any value: {e}"));
    }
}

fn not_built(args: &SplitArgs) -> Result<(), Failure> {
    let unless =
        |fine: bool, what: &str| if fine { Ok(()) } else { Err(Failure::NotBuilt(what.to_string())) };
    unless(matches!(args.mode, Mode::Train | Mode::Forward), "--mode prefill and decode")?;
    if let Some(p) = args.dropout.filter(|p| !(0.0..1.0).contains(p)) {
        return Err(Failure::Request(format!("--dropout {p}: a rate from 0 to below 1 is needed")));
    }
    match args.microbatches {
        Some(0) => Err(Failure::Request("--microbatches 0: a step has at least 1 micro-batch".to_string())),
        Some(_) | None => Ok(()),
    }
}

/// The size of buckets that was asked for, where there is something to put into them.
fn buckets(args: &SplitArgs, mesh: &Mesh) -> Result<Option<usize>, Failure> {
    let Some(bytes) = args.bucket_bytes else { return Ok(None) };
    let idle = if mesh.ranks() == mesh.rows() {
        Some("on one device, or one a stage, nothing is reduced or gathered")
    } else if args.mode == Mode::Forward && args.zero < 3 {
        Some("a forward pass reduces no gradient, and gathers parameters only with --zero 3")
    } else {
        None
    };
    match idle {
        Some(why) => Err(Failure::Request(format!("--bucket-bytes {bytes}: {why}"))),
        None => Ok(Some(bytes)),
    }
}

/// Reads a mesh whose axes meshc knows; those that are not built yet have size 1.
fn mesh(text: &str) -> Result<Mesh, Failure> {
    let mesh = Mesh::parse(text).map_err(|e| Failure::Request(format!("--mesh {text}: {e}")))?;
    for (name, size) in &mesh.axes {
        let base = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let Some((axis, what)) = AXES.iter().find(|(a, _)| *a == base || *a == &**name) else {
            let known: Vec<String> = AXES.iter().map(|(a, what)| format!("{a} ({what})")).collect();
            return Err(Failure::Request(format!(
                "--mesh {text}: there is no axis `{name}`; there are {}",
                known.join(", ")
            )));
        };
        if *axis == PIPELINE && &**name != PIPELINE {
            let what = "a pipeline is one axis, called pp";
            return Err(Failure::Request(format!("--mesh {text}: there is an axis {name}, but {what}")));
        }
        if ["cp", "ep"].contains(axis) && *size > 1 {
            return Err(Failure::NotBuilt(format!("--mesh {text}: axis {name} ({what})")));
        }
    }
    Ok(mesh)
}

fn shape(args: &SplitArgs, usual: Shape, fed: Option<Shape>) -> Result<Shape, Failure> {
    let one = |flag: &str, asked: Option<usize>, fed: Option<usize>, usual: usize| match (asked, fed) {
        (Some(0), _) => Err(Failure::Request(format!("{flag} 0: at least 1 is needed"))),
        (Some(n), Some(m)) if n != m => {
            Err(Failure::Request(format!("{flag} {n}, but the batches have {m}")))
        }
        (asked, fed) => Ok(asked.or(fed).unwrap_or(usual)),
    };
    Ok(Shape {
        batch: one("--global-batch", args.global_batch, fed.map(|f| f.batch), usual.batch)?,
        sequence: one("--seq", args.seq, fed.map(|f| f.sequence), usual.sequence)?,
    })
}

/// A model, and which rows its micro-batches have.
struct Model {
    title: String,
    config: Option<Config>,
    graph: Graph,
    shape: Shape,
    rows: Rows,
}

/// The pieces of the batch that ranks have, from a graph of the whole batch.
type Pieces<'a> = &'a dyn Fn(&Graph) -> Result<Vec<Range<usize>>, Failure>;

fn model(
    origin: &Origin,
    args: &SplitArgs,
    fed: Option<Shape>,
    microbatches: usize,
    pieces: Pieces,
) -> Result<Model, Failure> {
    let own = match origin {
        Origin::Own(own) => own,
        Origin::Files => {
            let path = args.model.as_deref().ok_or_else(|| {
                let message = "MODEL is missing: a folder with a Hugging Face config.json, such a file, or a graph file";
                Failure::Request(message.to_string())
            })?;
            return from_files(path, args, fed, microbatches, pieces);
        }
    };
    if let Some(path) = &args.model {
        let message = format!(
            "this program has a model of its own, {}; it takes no MODEL ({})",
            own.name,
            path.display()
        );
        return Err(Failure::Request(message));
    }
    let shape = shape(args, own.shape, fed)?;
    let build = |shape: Shape| {
        let mut graph = (own.build)(shape).map_err(Failure::Build)?;
        drop_at(&mut graph, args, &own.name)?;
        Ok(graph)
    };
    let (graph, rows) = by_rows(&build, shape, microbatches, pieces)?;
    Ok(Model { title: own.name.clone(), config: None, graph, shape, rows })
}

/// The graph of a micro-batch, and which rows of the batch each has.
fn by_rows(
    build: &dyn Fn(Shape) -> Result<Graph, Failure>,
    shape: Shape,
    microbatches: usize,
    pieces: Pieces,
) -> Result<(Graph, Rows), Failure> {
    let whole = build(shape)?;
    if microbatches == 1 {
        return Ok((whole, Rows::chunks(shape.batch, 1)));
    }
    let rows = Rows::of(&pieces(&whole)?, microbatches);
    Ok((build(Shape { batch: rows.each(), ..shape })?, rows))
}

fn from_files(
    path: &Path,
    args: &SplitArgs,
    fed: Option<Shape>,
    microbatches: usize,
    pieces: Pieces,
) -> Result<Model, Failure> {
    if let Some(text) = graph_text(path) {
        let wrong = |message: String| Failure::Request(format!("{}: {message}", path.display()));
        let mut graph = ir::parse_graph(&text).map_err(|e| wrong(e.to_string()))?;
        verify::verify(&graph)
            .map_err(|errors| wrong(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
        if args.global_batch.is_some() || args.seq.is_some() {
            return Err(wrong(
                "a graph file has its sizes in it; --global-batch and --seq do not apply".to_string(),
            ));
        }
        drop_at(&mut graph, args, &name_of(path))?;
        // It is the graph of a micro-batch.
        let size = |d: usize| graph.inputs.iter().filter_map(|i| i.dims.get(d)).map(|(_, n)| *n).max();
        let rows = Rows::chunks(size(0).unwrap_or(1), microbatches);
        let own = Shape { batch: rows.each() * rows.microbatches(), sequence: size(1).unwrap_or(1) };
        let shape = shape(args, own, fed)?;
        return Ok(Model { title: name_of(path), config: None, graph, shape, rows });
    }
    let mut config = Config::read(path)?;
    config.dropout = rate(args).map_or(Dropout::Config, Dropout::Everywhere);
    let longest = models::positions(&config).unwrap_or(usize::MAX).max(1);
    let usual = Shape { sequence: USUAL.sequence.min(longest), ..USUAL };
    let shape = shape(args, usual, fed)?;
    let build = |shape: Shape| models::build(&config, shape).map_err(Failure::from);
    let (graph, rows) = by_rows(&build, shape, microbatches, pieces)?;
    Ok(Model { title: name_of(path), config: Some(config), graph, shape, rows })
}

/// The one rate of dropout, if the model's own do not hold.
fn rate(args: &SplitArgs) -> Option<f64> {
    if args.mode == Mode::Train { args.dropout } else { Some(0.0) }
}

/// The same for a graph that has its own.
fn drop_at(graph: &mut Graph, args: &SplitArgs, title: &str) -> Result<(), Failure> {
    let Some(p) = rate(args) else { return Ok(()) };
    if p > 0.0 && !has_dropout(graph) {
        let message = format!("--dropout {p}: {title} has no dropout; its source says where there is some");
        return Err(Failure::Request(message));
    }
    set_dropout(graph, p);
    Ok(())
}

/// The text of a graph file, if it is one.
fn graph_text(path: &Path) -> Option<String> {
    let file = path.is_file() && path.extension().is_none_or(|e| e != "json");
    let text = std::fs::read_to_string(path).ok().filter(|_| file)?;
    let first = text.lines().map(|l| l.split(';').next().unwrap_or("").trim()).find(|l| !l.is_empty())?;
    (first == "graph").then_some(text)
}

/// The lines on which the constraints of a graph file stand.
fn constraint_lines(args: &SplitArgs) -> Vec<usize> {
    let text = args.model.as_deref().and_then(graph_text).unwrap_or_default();
    let lines = text.lines().enumerate().filter(|(_, l)| l.trim_start().starts_with("constrain "));
    lines.map(|(i, _)| i + 1).collect()
}

fn name_of(path: &Path) -> String {
    let path = if path.ends_with("config.json") { path.parent().unwrap_or(path) } else { path };
    path.file_stem().map_or_else(|| "model".to_string(), |n| n.to_string_lossy().into_owned())
}

/// Constraints name axes that there are, and do not contradict each other. `lines` says where in a file each stands.
fn check_constraints(graph: &Graph, mesh: &Mesh, lines: &[usize]) -> Result<(), Failure> {
    let show = |i: usize| {
        let c = &graph.constraints[i];
        let dim = |d: &Vec<Name>| if d.is_empty() { "_".to_string() } else { d.join(".") };
        let line = lines.get(i).map_or(String::new(), |l| format!("line {l}: "));
        let even = if c.even { " even" } else { "" };
        format!(
            "{line}`constrain {} [{}]{even}`",
            c.value,
            c.dims.iter().map(dim).collect::<Vec<_>>().join(", ")
        )
    };
    for (i, c) in graph.constraints.iter().enumerate() {
        let known = |a: &&Name| mesh.find(a).is_some() || AXES.iter().any(|(n, _)| *n == &***a);
        if let Some(axis) = c.dims.iter().flatten().find(|a| !known(a)) {
            let message = format!("{}: neither the mesh `{mesh}` nor meshc has an axis {axis}", show(i));
            return Err(Failure::Request(message));
        }
        for (dim, axes) in c.dims.iter().enumerate().filter(|_| c.even) {
            let axes: Vec<_> = axes.iter().filter_map(|a| mesh.find(a)).flatten().collect();
            let what = format!("dimension {dim} of {}", c.value);
            if let Some(wrong) = uneven(&what, graph.shape(c.value)[dim], &axes, mesh) {
                return Err(Failure::Request(format!("{}: {wrong}", show(i))));
            }
        }
        let other =
            (0..i).find(|o| graph.constraints[*o].value == c.value && graph.constraints[*o].dims != c.dims);
        if let Some(other) = other {
            return Err(Failure::Request(format!("{} contradicts {}", show(i), show(other))));
        }
    }
    Ok(())
}

/// Bytes of this machine's memory.
fn machine_memory() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024.0)
}
