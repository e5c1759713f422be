//! Programs that were changed: the check finds each, or it runs and leaves the same bits behind. `MESHC_MUTANTS=1000` tries
//! more of them; `MESHC_SEED=17 MESHC_MUTANTS=1` one again.

use std::collections::BTreeMap;

use ir::verify_program::verify_program;
use meshc_tests::chain::{Build, Left, chain, compiled, knotted, left, table};
use meshc_tests::random::{Random, seeds_by};
use passes::Compiled;
use planner::check::check;
use planner::hang::{Fault, Transport, ends};
use planner::numeric::all_feeds;
use runtime::lockstep::Feeds;

use crate::mutations::{MUTATIONS, Mutation};

/// Model, mesh, kind, L and M.
type Way = (Build, &'static str, &'static str, usize, usize);

const BASES: &[Way] = &[
    (chain, "pp=2", "1f1b", 1, 4),
    (chain, "pp=2", "interleaved", 2, 4),
    (knotted, "pp=4", "1f1b", 1, 5),
    (chain, "pp=4", "zb-h1", 1, 4),
    (knotted, "pp=2", "zb-v", 2, 3),
    (chain, "dp=2,pp=2", "gpipe", 1, 3),
    (knotted, "dp=2,pp=2", "interleaved", 2, 2),
];

struct Base {
    whole: Compiled,
    feeds: Vec<Feeds<f64>>,
    left: Left,
}

fn base((model, mesh, kind, virtuals, microbatches): Way) -> Base {
    let rows = ir::Mesh::parse(mesh).unwrap().rows();
    let whole = compiled(model, mesh, rows * virtuals, table(kind, rows, virtuals, microbatches).unwrap());
    check(&whole.sharded, &whole.program).unwrap_or_else(|e| panic!("{e:#?}"));
    let feeds = all_feeds(&whole.sharded, 3);
    let left = left(&whole.program, &whole.sharded.graph, &feeds).unwrap();
    Base { whole, feeds, left }
}

#[derive(Default)]
struct Tally {
    planted: usize,
    found: usize,
    harmless: usize,
    /// Of those found, they wait for ever.
    hang: usize,
}

#[test]
fn changed_programs_are_found_or_harmless() {
    let bases: Vec<Base> = BASES.iter().map(|b| base(*b)).collect();
    let mut tallies: BTreeMap<usize, Tally> = BTreeMap::new();
    let mut wrong = Vec::new();
    for seed in seeds_by("MESHC_MUTANTS", 50) {
        let random = &mut Random::new(seed);
        let kind = seed as usize % MUTATIONS.len();
        let mutation = &MUTATIONS[kind];
        // Not every program has a place for every change.
        let planted = (0..40).find_map(|_| {
            let at = random.below(bases.len());
            let mut program = bases[at].whole.program.clone();
            let changed = (mutation.change)(&mut program, random) && program != bases[at].whole.program;
            changed.then_some((at, program))
        });
        let Some((at, program)) = planted else { continue };
        let base = &bases[at];
        let tally = tallies.entry(kind).or_default();
        tally.planted += 1;
        let run = || left(&program, &base.whole.sharded.graph, &base.feeds);
        let mut fault = |what: String| {
            let (_, mesh, kind, ..) = BASES[at];
            wrong.push(format!("seed {seed}, {} with {kind} on {mesh}: {what}", mutation.name));
        };
        match check(&base.whole.sharded, &program) {
            Err(_) => {
                tally.found += 1;
                // Where nothing but the order is wrong, those who run it do wait for ever.
                let only = verify_program(&program).is_ok()
                    && matches!(
                        ends(&program, Transport::Rendezvous).err().as_deref(),
                        Some([Fault::Circle { .. }])
                    );
                if only {
                    tally.hang += 1;
                    if run().is_ok() {
                        fault("it is said to wait for ever, but it ends".to_string());
                    }
                }
            }
            Ok(_) => match run() {
                Ok(left) if left == base.left => tally.harmless += 1,
                Ok(_) => fault("nothing is found, and it leaves other numbers".to_string()),
                Err(e) => fault(format!("nothing is found, and it does not run: {e}")),
            },
        }
    }
    for (kind, tally) in &tallies {
        let Tally { planted, found, harmless, hang } = tally;
        let Mutation { name, needed, .. } = &MUTATIONS[*kind];
        println!("{name}: {found} of {planted} found, {hang} of them circles; {harmless} harmless");
        if 100 * found < needed * planted {
            wrong.push(format!("{name}: found {found} of {planted}, {needed} of a hundred are needed"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
