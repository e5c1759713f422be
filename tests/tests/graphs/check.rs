//! Everything that holds of a graph that is compiled, whatever it is.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ir::{Decisions, Op, ShardedGraph, parse_graph, parse_program, parse_sharded, verify};
use meshc_tests::backend::{F32, as_given_to, equals, feeds_over, flat, furthest, left_by_one_device};
use meshc_tests::meaning::any_ways;
use meshc_tests::random::Random;
use meshc_tests::traffic::disagree;
use meshc_tests::whole::{here, wire};
use passes::{Compiled, compile};
use planner::choose::choose;
use planner::{check, numeric};
use runtime::eval::eval;

use crate::build::Case;

/// How far two graphs of the same numbers may be apart in f64, as a share of 1 and their size.
const F64: f64 = 1e-10;

/// A graph is legal, compiles, and its program does what it says.
///
/// # Errors
/// The first that does not hold.
pub fn check(case: &Case, seed: u64) -> Result<(), String> {
    let compiled = compiled(case, seed)?;
    means_the_same(case, &compiled, seed)?;
    runs_right(&compiled, seed)?;
    asked(&compiled.sharded)
}

/// How the graph of a seed is split, by turns: by the fewest bytes; where calls are dear, which gathers small values; in any
/// way. And how much is reduced in one call: nothing together, two small tensors, all of them.
pub fn decide(seed: u64) -> impl Fn(&ShardedGraph) -> Decisions {
    move |sharded| {
        let mut decisions = match seed % 3 {
            0 => choose(sharded, &wire()),
            1 => choose(sharded, &here()),
            _ => any_ways(sharded, &mut Random::new(seed)),
        };
        decisions.bucket_bytes = [None, Some(128), Some(1 << 20)][(seed / 3 % 3) as usize];
        decisions
    }
}

/// The graph, compiled: legal before and after every pass, and every form reads back to itself.
///
/// # Errors
/// What does not hold.
pub fn compiled(case: &Case, seed: u64) -> Result<Compiled, String> {
    verify::verify(&case.graph).map_err(|e| format!("the graph is not legal: {}", e[0]))?;
    let mut unread = None;
    let compiled = quietly(|| {
        compile(case.graph.clone(), &case.mesh, case.places.clone(), &decide(seed), &mut |name, form| {
            let text = form.to_string();
            let again = match text.split_whitespace().next() {
                Some("graph") => parse_graph(&text).map(|g| g.to_string()),
                Some("sharded") => parse_sharded(&text).map(|g| g.to_string()),
                Some(_) | None => parse_program(&text).map(|p| p.to_string()),
            };
            if again.as_ref() != Ok(&text) {
                unread.get_or_insert(format!("after {name} the text does not read back: {:?}", again.err()));
            }
        })
    })?;
    let (sharded, program) = (compiled.sharded.to_string(), compiled.program.to_string());
    if parse_sharded(&sharded).as_ref() != Ok(&compiled.sharded) {
        unread.get_or_insert(format!("the sharded graph reads back as another one:\n{sharded}"));
    }
    if parse_program(&program).as_ref() != Ok(&compiled.program) {
        unread.get_or_insert(format!("the program reads back as another one:\n{program}"));
    }
    unread.map_or(Ok(compiled), Err)
}

/// The graph, compiled, whatever else is wrong; none if that panics.
pub fn compiled_anyhow(case: &Case, seed: u64) -> Option<Compiled> {
    let run = || compile(case.graph.clone(), &case.mesh, case.places.clone(), &decide(seed), &mut |_, _| {});
    quietly(run).ok()
}

/// The sharded graph leaves behind what the graph does, in f64, and all its ranks what one device does.
fn means_the_same(case: &Case, compiled: &Compiled, seed: u64) -> Result<(), String> {
    let sharded = &compiled.sharded;
    let feeds = feeds_over(&sharded.graph, seed, sharded.decisions.schedule.microbatches());
    let given: Vec<_> = feeds.iter().map(|f| as_given_to(&case.graph, f)).collect();
    let before = flat(left_by_one_device(&case.graph, &given));
    let after = flat(left_by_one_device(&sharded.graph, &feeds));
    let (off, name) = furthest(&after, &before);
    if off > F64 {
        return Err(format!("after the passes on graphs {name} is off by {off:.1e}"));
    }
    let far = after.iter().find(|(_, t)| t.data.iter().any(|x| !x.is_finite()));
    if let Some((name, _)) = far {
        return Err(format!("{name} is not finite: a fault of the generator"));
    }
    quietly(|| numeric::lockstep(sharded, &feeds, eval))?
        .map(drop)
        .map_err(|w| format!("lockstep: {} {:?}: {}", w.name, w.value, w.what))
}

/// Constrained values lie as was asked.
fn asked(sharded: &ShardedGraph) -> Result<(), String> {
    let makers = sharded.graph.makers();
    for c in &sharded.graph.constraints {
        let given = matches!(sharded.graph.nodes[makers[c.value.index()]].op, Op::Input(_) | Op::State(_));
        let axes =
            |names: &Vec<ir::Name>| names.iter().filter_map(|n| sharded.mesh.find(n)).flatten().collect();
        let dims: Vec<ir::Axes> = c.dims.iter().map(axes).collect();
        let found = sharded.sharding(c.value);
        if found.dims != dims || !found.partial.is_empty() {
            let what = if given { "asked of what is given" } else { "asked" };
            let found = found.show(&sharded.mesh);
            return Err(format!("{what}: {} is asked for as {:?}, but it is {found}", c.value, c.dims));
        }
    }
    Ok(())
}

/// The program is proved, runs as the sharded graph means, and sends and needs what its plan says.
///
/// # Errors
/// What does not hold.
pub fn runs_right(compiled: &Compiled, seed: u64) -> Result<(), String> {
    let Compiled { sharded, program } = compiled;
    quietly(|| check::check(sharded, program))?.map_err(|e| format!("check: {}", e[0]))?;
    let cluster = planner::cluster::read("here").map_err(|e| e.to_string())?;
    let plan = planner::plan::plan(sharded, program, &cluster);
    let feeds = feeds_over(&sharded.graph, seed, program.microbatches);
    let [one, two] =
        [1, 2].map(|workers| quietly(|| equals(&sharded.graph, program, &feeds, workers, F32)).flatten());
    let (one, two) = (one?, two?);
    if !one.same_states(&two) {
        return Err("two workers leave other bits than one".to_string());
    }
    if let Some(text) = disagree(&plan, &two.traffic(), &program.mesh) {
        return Err(format!("traffic: {text}"));
    }
    let (found, planned) = (two.arena_bytes(), plan.memory.peak_bytes);
    if found == planned { Ok(()) } else { Err(format!("the arena has {found} bytes, the plan {planned}")) }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What a function returns, or the message of its panic, which is not printed: passes panic where they are wrong.
///
/// # Errors
/// The message.
pub fn quietly<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                loud(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        format!("panics: {}", text.unwrap_or_default())
    })
}
