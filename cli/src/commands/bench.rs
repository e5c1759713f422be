//! `meshc bench step`: training steps on random tokens, as a share of what matrix products alone reach on this machine.

use std::collections::BTreeMap;
use std::time::Instant;

use clap::Parser;
use ir::Name;
use ir::state::AdamW;
use passes::Compiled;
use planner::{plan, units};
use runtime::data::random::{below, stream_of};
use runtime::local::{HostTensor, Local, Taps};
use serde::Serialize;

use super::print;
use crate::args::{BesideArgs, Format, SplitArgs, StepArgs};
use crate::failure::Failure;
use crate::loaded::{fill, workers};
use crate::machine::product_rate;
use crate::profile::Watch;
use crate::request::{self, Origin, Request};

/// What was measured. Rates are FLOP/s.
#[derive(Serialize)]
struct Measured {
    cores: usize,
    workers: usize,
    ranks: usize,
    product_flops: f64,
    step_seconds: f64,
    tokens_per_second: f64,
    model_flops: f64,
    share_of_products: f64,
    executed_share_of_products: f64,
    /// The same model split otherwise, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<Beside>,
}

/// Another split of the model, whose steps were run in turn with the first one's.
#[derive(Serialize)]
struct Beside {
    flags: String,
    /// Medians of the first and of this one.
    median_seconds: [f64; 2],
    /// Of the first to this one.
    ratio: f64,
}

/// A model that takes steps.
struct Runner {
    request: Request,
    compiled: Compiled,
    local: Local,
    taps: Taps,
    workers: usize,
    seconds: Vec<f64>,
    watch: Option<Watch>,
}

impl Runner {
    fn new(origin: &Origin, split: &SplitArgs, asked: Option<usize>) -> Result<Runner, Failure> {
        let request = request::read(origin, split, None)?;
        let compiled = request.compile(AdamW::default(), false, &mut |_, _| {});
        let workers = workers(asked, request.mesh.ranks());
        let mut local = Local::new(&compiled.program, workers)?;
        fill(&mut local, &compiled.program.states, None, 0)?;
        let taps = Taps::of(["loss"]).finite("loss");
        Ok(Runner { request, compiled, local, taps, workers, seconds: Vec::new(), watch: None })
    }

    /// One step on random tokens. The first two do not count.
    fn step(&mut self, step: usize) -> Result<(), Failure> {
        let m = self.request.rows.microbatches();
        let feeds: Vec<_> = (0..m).map(|i| random_tokens(&self.request, step * m + i)).collect();
        let start = Instant::now();
        let watch = self.watch.as_mut().filter(|_| step >= 2);
        match &watch {
            Some(watch) => self.local.step_profiled(&feeds, &mut self.taps, &watch.profile)?,
            None => self.local.step(&feeds, &mut self.taps)?,
        }
        let seconds = start.elapsed().as_secs_f64();
        self.seconds.extend((step >= 2).then_some(seconds));
        watch.into_iter().for_each(|watch| watch.stepped(seconds));
        Ok(())
    }

    fn sorted(&self) -> Vec<f64> {
        let mut all = self.seconds.clone();
        all.sort_by(f64::total_cmp);
        all
    }
}

pub(crate) fn run(origin: &Origin, args: &StepArgs) -> Result<(), Failure> {
    let mut one = Runner::new(origin, &args.split, args.workers)?;
    let other = args.beside.as_ref().map(|flags| other(flags, &args.split)).transpose()?;
    let mut other = other.map(|split| Runner::new(origin, &split, args.workers)).transpose()?;
    let products = product_rate()?;
    if args.profile {
        one.watch = Some(Watch::new(&one.local)?);
    }
    for step in 0..args.steps.max(1) + 2 {
        one.step(step)?;
        other.as_mut().map_or(Ok(()), |o| o.step(step))?;
    }
    let planned = one.request.plan(&one.compiled);
    let (ranks, all) = (one.request.mesh.ranks(), one.sorted());
    let best = all[0];
    let beside = other.map(|other| {
        let median_seconds = [&all, &other.sorted()].map(|all| all[all.len() / 2]);
        let flags = args.beside.clone().unwrap_or_default();
        Beside { flags, median_seconds, ratio: median_seconds[0] / median_seconds[1] }
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let executed = plan::contract_flops(&one.compiled.program) * ranks as f64;
    let rate = planned.model.flops_full / best;
    let measured = Measured {
        cores,
        workers: one.workers,
        ranks,
        product_flops: products,
        step_seconds: best,
        tokens_per_second: planned.model.tokens_per_step as f64 / best,
        model_flops: rate,
        share_of_products: rate / (products * cores as f64),
        executed_share_of_products: executed / best / (products * cores as f64),
        beside,
    };
    report(&measured, args.format)?;
    one.watch.map_or(Ok(()), |watch| {
        print(&("\n".to_string() + &watch.text(&one.local, &one.compiled, one.workers)))
    })
}

/// The other way to split the model.
fn other(flags: &str, split: &SplitArgs) -> Result<SplitArgs, Failure> {
    let parsed = BesideArgs::try_parse_from(std::iter::once("--beside").chain(flags.split_whitespace()));
    let wrong = |e: clap::Error| {
        let text = e.to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        Failure::Request(format!("--beside \"{flags}\": {first}"))
    };
    let parsed = parsed.map_err(wrong)?.split;
    Ok(SplitArgs { model: parsed.model.or_else(|| split.model.clone()), ..parsed })
}

fn report(m: &Measured, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        let text = serde_json::to_string_pretty(m).map_err(|e| Failure::Run(e.to_string()))?;
        return print(&(text + "\n"));
    }
    let mut text = format!(
        "products, 1024 cubed, 1 thread: {}/s; times {} cores: {}/s\n\
         step (best): {}, {} tokens/s, {} ranks on {} workers\n\
         model FLOPs, attention whole: {}/s, {:.1} % of products on all cores\n\
         products executed: {:.1} % of that\n",
        units::count(m.product_flops, "FLOP"),
        m.cores,
        units::count(m.product_flops * m.cores as f64, "FLOP"),
        units::seconds(m.step_seconds),
        units::grouped(m.tokens_per_second.round() as u64),
        m.ranks,
        m.workers,
        units::count(m.model_flops, "FLOP"),
        100.0 * m.share_of_products,
        100.0 * m.executed_share_of_products
    );
    if let Some(b) = &m.beside {
        let [this, other] = b.median_seconds.map(units::seconds);
        text += &format!("medians, in turn: {this}, and {other} with {}: ratio {:.3}\n", b.flags, b.ratio);
    }
    print(&text)
}

fn random_tokens(request: &Request, step: usize) -> BTreeMap<Name, HostTensor> {
    let limits = planner::numeric::limits(&request.graph);
    let make = |input: &ir::state::Input| {
        let n: usize = input.dims.iter().map(|(_, n)| n).product();
        let last = input.dims.last().map_or(1, |(_, n)| *n).max(1);
        let stream = stream_of(&input.name);
        let limit = limits.get(&input.name).copied().unwrap_or(last) as u64;
        // Each micro-batch of a step has rows of its own.
        let first = step % request.rows.microbatches().max(1) * n;
        if input.dtype.is_float() {
            return HostTensor::F32(
                (0..n).map(|i| below(step as u64, stream, i as u64, 2000) as f32 / 1000.0 - 1.0).collect(),
            );
        }
        HostTensor::I32(
            (0..n)
                .map(|i| match &*input.name {
                    "position" => (i % last) as i32,
                    "row" if !limits.contains_key(&input.name) => (first + i) as i32,
                    _ => below(step as u64, stream, i as u64, limit) as i32,
                })
                .collect(),
        )
    };
    request.graph.inputs.iter().map(|i| (i.name.clone(), make(i))).collect()
}
