//! The lists of rows say what the lists of all ranks say: a slow walk of each rank by itself, with the members of each group
//! by number, ends for the same programs, and counts the same.

use std::collections::BTreeMap;

use ir::program::{Instruction, Program};
use meshc_tests::chain::{chain, compiled, knotted, table};
use meshc_tests::random::{Random, seeds_by};
use planner::hang::{Ends, Transport, ends};

use crate::mutations::MUTATIONS;

/// What a rank does with others.
#[derive(Clone, Debug)]
enum Does {
    /// By channel and side, for a micro-batch.
    Post(String, usize, Option<usize>),
    Done(String, usize, Option<usize>),
    /// With the members of a group.
    Start(Vec<usize>, String),
    /// For which of those that the rank started with the group.
    Wait(Vec<usize>, usize),
}

/// What a rank does; none if it waits for what it did not start, or does not wait for a message.
fn list(program: &Program, rank: usize) -> Option<Vec<Does>> {
    let mesh = &program.mesh;
    let stage = &program.stages[mesh.row(rank)];
    let channel = |m: &ir::program::Message| {
        let [from, to] = [m.from, m.to].map(|k| mesh.in_row(rank, program.homes[k]));
        format!("{} {} {} by {from} to {to}", m.value, m.from, m.to)
    };
    let mut tokens = BTreeMap::new();
    for instruction in stage.segments.iter().flat_map(|s| &s.instructions) {
        if let Instruction::Send { token, message, .. } = instruction {
            tokens.insert((*token, 0), channel(message));
        } else if let Instruction::Receive { token, message, .. } = instruction {
            tokens.insert((*token, 1), channel(message));
        }
    }
    let (mut all, mut open, mut counts) = (Vec::new(), Vec::new(), BTreeMap::new());
    for call in &stage.calls {
        let mut started = BTreeMap::new();
        let m = call.microbatch;
        for instruction in &stage.segments[call.segment].instructions {
            match instruction {
                Instruction::Send { message, .. } | Instruction::Receive { message, .. } => {
                    let side = usize::from(matches!(instruction, Instruction::Receive { .. }));
                    if open.contains(&(channel(message), side, m)) {
                        return None;
                    }
                    open.push((channel(message), side, m));
                    all.push(Does::Post(channel(message), side, m));
                }
                Instruction::Sent { token, .. } | Instruction::Received { token, .. } => {
                    let side = usize::from(matches!(instruction, Instruction::Received { .. }));
                    let of = (tokens.get(&(*token, side))?.clone(), side, m);
                    open.remove(open.iter().position(|o| *o == of)?);
                    all.push(Does::Done(of.0, side, m));
                }
                Instruction::Start { token, parts } => {
                    let mut members = mesh.group(rank, parts[0].step.axes());
                    members.sort_unstable();
                    let text = parts.iter().map(|p| {
                        let [a, b] = [p.from, p.to].map(|id| &stage.buffers[id.index()]);
                        let show =
                            |x: &ir::program::Buffer| format!("{:?}", (x.dtype, &x.shape, &x.sharding));
                        format!("{:?} {} {}", p.step, show(a), show(b))
                    });
                    let text = format!("{:?} {m:?}", text.collect::<Vec<_>>());
                    let count = counts.entry(members.clone()).or_insert(0);
                    started.insert(*token, (members.clone(), *count));
                    *count += 1;
                    all.push(Does::Start(members, text));
                }
                Instruction::Wait { token } => match started.get(token) {
                    Some((members, number)) => all.push(Does::Wait(members.clone(), *number)),
                    // A segment that waits for what it did not start is the verifier's to find.
                    None => continue,
                },
                Instruction::Feed { .. }
                | Instruction::Launch { .. }
                | Instruction::Local { .. }
                | Instruction::Assign { .. }
                | Instruction::Tap { .. } => {}
            }
        }
    }
    open.is_empty().then_some(all)
}

/// What happens if every rank is walked by itself; none if not everything does.
fn walk(program: &Program, transport: Transport) -> Option<Ends> {
    let ranks = program.mesh.ranks();
    let lists: Vec<Vec<Does>> = (0..ranks).map(|r| list(program, r)).collect::<Option<_>>()?;
    let mut posts: BTreeMap<(String, usize), Vec<Option<usize>>> = BTreeMap::new();
    let mut starts: BTreeMap<(Vec<usize>, usize), Vec<String>> = BTreeMap::new();
    let mut at = vec![0; ranks];
    let mut moved = true;
    while std::mem::replace(&mut moved, false) {
        for rank in 0..ranks {
            while let Some(does) = lists[rank].get(at[rank]) {
                let there =
                    |c: &String, side: usize| posts.get(&(c.clone(), side)).map_or(&[][..], Vec::as_slice);
                match does {
                    Does::Post(c, side, m) => posts.entry((c.clone(), *side)).or_default().push(*m),
                    Does::Start(members, text) => {
                        starts.entry((members.clone(), rank)).or_default().push(text.clone());
                    }
                    Does::Done(c, side, m) => {
                        let own = there(c, *side).iter().rposition(|x| x == m)?;
                        let eager = *side == 0 && transport == Transport::Eager;
                        if !eager && there(c, 1 - side).len() <= own {
                            break;
                        }
                    }
                    Does::Wait(members, number) => {
                        let has =
                            |r: &usize| starts.get(&(members.clone(), *r)).is_some_and(|s| s.len() > *number);
                        if !members.iter().all(has) {
                            break;
                        }
                    }
                }
                at[rank] += 1;
                moved = true;
            }
        }
    }
    let mut counted = Ends { ranks, ..Ends::default() };
    for ((channel, side), own) in &posts {
        let mut each = own.clone();
        each.sort_unstable();
        each.dedup();
        if posts.get(&(channel.clone(), 1 - side)) != Some(own) || each.len() != own.len() {
            return None;
        }
        counted.messages += if *side == 0 { own.len() } else { 0 };
    }
    for ((members, rank), texts) in &starts {
        if members.iter().any(|r| starts.get(&(members.clone(), *r)) != Some(texts)) {
            return None;
        }
        counted.collectives += if members[0] == *rank { texts.len() } else { 0 };
    }
    (0..ranks).all(|r| at[r] == lists[r].len()).then_some(counted)
}

#[test]
fn rows_end_where_all_their_ranks_end() {
    let bases = [
        (chain as fn(usize) -> ir::Graph, "dp=2,pp=2", "1f1b", 1, 3),
        (knotted, "pp=2,dp=2", "interleaved", 2, 3),
        (knotted, "pp=3", "zb-h1", 1, 3),
        (knotted, "dp=2,tp=2,pp=2", "zb-v", 2, 2),
        (chain, "dp=2,tp=2", "gpipe", 1, 2),
    ];
    let bases = bases.map(|(model, mesh, kind, virtuals, microbatches)| {
        let rows = ir::Mesh::parse(mesh).unwrap().rows();
        let schedule = table(kind, rows, virtuals, microbatches).unwrap();
        compiled(model, mesh, rows * virtuals, schedule).program
    });
    for program in &bases {
        for transport in [Transport::Rendezvous, Transport::Eager] {
            assert_eq!(ends(program, transport).ok(), walk(program, transport));
        }
    }
    let (mut end, mut stuck) = (0, 0);
    for seed in seeds_by("MESHC_MUTANTS", 200) {
        let random = &mut Random::new(seed);
        let mut program = random.pick(&bases).clone();
        if !(MUTATIONS[seed as usize % MUTATIONS.len()].change)(&mut program, random) {
            continue;
        }
        for transport in [Transport::Rendezvous, Transport::Eager] {
            let (rows, ranks) = (ends(&program, transport), walk(&program, transport));
            assert_eq!(rows.as_ref().ok(), ranks.as_ref(), "seed {seed}: {:?}", rows.as_ref().err());
            if rows.is_ok() { end += 1 } else { stuck += 1 }
        }
    }
    println!("{end} end, {stuck} do not");
    assert!(end > 10 && stuck > 10);
}
