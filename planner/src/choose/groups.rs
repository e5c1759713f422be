//! Nodes that are split together: those of a composite, and a backward node with its forward node, since a backward op
//! takes the split of factors of its forward op. Along an axis a group splits one factor, by its name, in every node that
//! has it; where it splits none, partial values may pass through it, forward or backward.

use std::rc::Rc;

use ir::graph::Node;
use ir::rows::{Row, Strategy};
use ir::{Axis, Graph, Name, Op, Part};
use rustc_hash::FxHashMap;

use super::space::{Space, Way, Ways};

/// Nodes that are split together.
#[derive(Clone, Debug)]
pub struct Group {
    /// The nodes, in order.
    pub members: Vec<usize>,
    /// The ways of each node; the value of the group's variable is the place in each.
    pub ways: Vec<Ways>,
}

/// What an axis does to a group.
#[derive(Clone, Debug, PartialEq)]
enum Does {
    /// It splits the factors of this name and size.
    Splits(Name, usize),
    /// What was settled for each member.
    Settled,
    /// Nothing; partial values pass through forward nodes, and through backward nodes.
    Passes { forward: bool, backward: bool },
}

/// From where an operand of a member comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    /// Another member.
    Member(usize),
    /// A forward activation.
    Forward,
    /// A gradient.
    Backward,
    /// A state, an input or what is computed from indices.
    Given,
}

/// What the ways of a group depend on: those of the members taken alone, and how they are wired.
type Key = (Vec<usize>, Vec<Vec<Source>>, Vec<Part>);

/// The ways of groups that are known.
#[derive(Debug, Default)]
pub struct Known {
    groups: FxHashMap<Key, Option<Vec<Ways>>>,
    count: usize,
}

/// The groups of a graph: each node is in one.
pub fn all(space: &mut Space, graph: &Graph) -> Vec<Group> {
    let mut known = Known::default();
    let mut groups = Vec::new();
    for members in united(space, graph) {
        let single: Vec<Ways> = members.iter().map(|i| space.ways(*i)).collect();
        let together =
            if members.len() > 1 { joint(space, graph, &members, &single, &mut known) } else { None };
        match together {
            Some(ways) => groups.push(Group { members, ways }),
            None => groups.extend(
                members.into_iter().zip(single).map(|(i, w)| Group { members: vec![i], ways: vec![w] }),
            ),
        }
    }
    groups
}

/// Which nodes are split together.
fn united(space: &Space, graph: &Graph) -> Vec<Vec<usize>> {
    let makers = graph.makers();
    let mut up: Vec<usize> = (0..graph.nodes.len()).collect();
    fn root(up: &[usize], mut i: usize) -> usize {
        while up[i] != i {
            i = up[i];
        }
        i
    }
    let alone = |i: usize| {
        let node = &graph.nodes[i];
        node.mark.part == Part::Update
            || space.is_given(i)
            || matches!(
                node.op,
                Op::Input(_) | Op::State(_) | Op::Assign(_) | Op::Tap(_) | Op::Accumulate | Op::Reshard
            )
    };
    let mut first: FxHashMap<u32, usize> = FxHashMap::default();
    for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| !alone(*i)) {
        let tagged = node.tag.as_ref().map(|t| *first.entry(t.instance).or_insert(i));
        let forward = node.of.map(|v| makers[v.index()]).filter(|f| !alone(*f));
        for other in tagged.into_iter().chain(forward) {
            let (a, b) = (root(&up, i), root(&up, other));
            up[a.max(b)] = a.min(b);
        }
    }
    let mut groups: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    (0..graph.nodes.len()).for_each(|i| groups[root(&up, i)].push(i));
    groups.retain(|g| !g.is_empty());
    groups
}

/// The ways of nodes that are split together; none if there is none.
fn joint(
    space: &Space,
    graph: &Graph,
    members: &[usize],
    single: &[Ways],
    known: &mut Known,
) -> Option<Vec<Ways>> {
    let makers: FxHashMap<_, usize> = members
        .iter()
        .enumerate()
        .flat_map(|(m, i)| graph.nodes[*i].results.iter().map(move |v| (*v, m)))
        .collect();
    let source = |v: &ir::Value| match makers.get(v) {
        Some(m) => Source::Member(*m),
        None => match space.maker(*v) {
            i if space.is_given(i) || matches!(graph.nodes[i].op, Op::State(_) | Op::Input(_)) => {
                Source::Given
            }
            i if graph.nodes[i].mark.part == Part::Forward => Source::Forward,
            _ => Source::Backward,
        },
    };
    let sources: Vec<Vec<Source>> =
        members.iter().map(|i| graph.nodes[*i].args.iter().map(source).collect()).collect();
    let parts: Vec<Part> = members.iter().map(|i| graph.nodes[*i].mark.part).collect();
    let key: Key = (single.iter().map(|w| w.id).collect(), sources, parts);
    if let Some(found) = known.groups.get(&key) {
        return found.clone();
    }
    let nodes: Vec<&Node> = members.iter().map(|i| &graph.nodes[*i]).collect();
    let allowed: Vec<&[Vec<Row>]> = members.iter().map(|i| space.allowed(*i)).collect();
    let picks = picks(space, members, &nodes, &allowed);
    let mut all: Vec<Vec<Way>> = vec![Vec::new(); members.len()];
    for pick in picks {
        for turned in [false, true] {
            let strategies = strategies(space, &nodes, &allowed, &key, &pick, turned);
            let ways: Option<Vec<Way>> =
                strategies.and_then(|all| members.iter().zip(all).map(|(i, s)| space.way(*i, s)).collect());
            let Some(ways) = ways else { continue };
            let again =
                (0..all[0].len()).any(|x| all.iter().zip(&ways).all(|(a, w)| a[x].strategy == w.strategy));
            if !again {
                all.iter_mut().zip(ways).for_each(|(a, w)| a.push(w));
            }
        }
    }
    let found = (!all[0].is_empty()).then(|| {
        all.into_iter()
            .map(|ways| {
                known.count += 1;
                // Numbers of single nodes are small, so these are others.
                Ways { id: (1 << 40) + known.count, all: Rc::new(ways) }
            })
            .collect::<Vec<_>>()
    });
    known.groups.insert(key, found.clone());
    found
}

/// What each axis may do to the group, in all combinations.
fn picks(
    space: &Space,
    members: &[usize],
    nodes: &[&Node],
    allowed: &[&[Vec<Row>]],
) -> Vec<Vec<(Axis, Does)>> {
    let mut picks: Vec<Vec<(Axis, Does)>> = vec![Vec::new()];
    for (_, parts) in space.mesh().outer() {
        let mut next = of_parts(space, members, nodes, allowed, &parts);
        space.limit(picks.len(), &mut next);
        picks = picks
            .iter()
            .flat_map(|p| next.iter().map(|n| [&p[..], n].concat()).collect::<Vec<_>>())
            .collect();
    }
    picks
}

/// What the parts of an axis may do: all the same, or the first a factor on which it was placed alone.
fn of_parts(
    space: &Space,
    members: &[usize],
    nodes: &[&Node],
    allowed: &[&[Vec<Row>]],
    parts: &[Axis],
) -> Vec<Vec<(Axis, Does)>> {
    let Some((first, rest)) = parts.split_first() else { return vec![Vec::new()] };
    if space.is_settled(*first) {
        return vec![parts.iter().map(|a| (*a, Does::Settled)).collect()];
    }
    let mut out = Vec::new();
    for does in of_axis(nodes, allowed, *first) {
        if rest.iter().all(|a| of_axis(nodes, allowed, *a).contains(&does)) {
            out.push(parts.iter().map(|a| (*a, does.clone())).collect());
        }
        let Does::Splits(name, size) = &does else { continue };
        let alone = members
            .iter()
            .zip(nodes)
            .any(|(i, node)| factor(node, name, *size).is_some_and(|f| space.lies_alone(*i, f, *first)));
        if !rest.is_empty() && alone {
            for others in of_parts(space, members, nodes, allowed, rest) {
                if others.iter().any(|(_, other)| *other != does) {
                    out.push([vec![(*first, does.clone())], others].concat());
                }
            }
        }
    }
    out
}

fn factor(node: &Node, name: &Name, size: usize) -> Option<usize> {
    node.signature.factor(name).filter(|f| node.sizes[*f] == size)
}

fn of_axis(nodes: &[&Node], allowed: &[&[Vec<Row>]], axis: Axis) -> Vec<Does> {
    let mut out: Vec<Does> = Vec::new();
    let nothing = allowed.iter().all(|rows| rows[axis.index()].contains(&Row::Nothing));
    if nothing {
        out.push(Does::Passes { forward: false, backward: false });
    }
    for (node, rows) in nodes.iter().zip(allowed) {
        for row in &rows[axis.index()] {
            let Row::Factor(f) = row else { continue };
            let does = Does::Splits(node.signature.factors[*f].clone(), node.sizes[*f]);
            if out.contains(&does) {
                continue;
            }
            let (name, size) = (&node.signature.factors[*f], node.sizes[*f]);
            let legal = nodes.iter().zip(allowed).all(|(node, rows)| {
                let row = factor(node, name, size).map_or(Row::Nothing, Row::Factor);
                rows[axis.index()].contains(&row)
            });
            if legal {
                out.push(does);
            }
        }
    }
    if nothing {
        out.push(Does::Passes { forward: false, backward: true });
        out.push(Does::Passes { forward: true, backward: false });
        out.push(Does::Passes { forward: true, backward: true });
    }
    out
}

/// The strategies of the members; none if a partial value would have to pass where it cannot.
fn strategies(
    space: &Space,
    nodes: &[&Node],
    allowed: &[&[Vec<Row>]],
    (_, sources, parts): &Key,
    pick: &[(Axis, Does)],
    turned: bool,
) -> Option<Vec<Strategy>> {
    let mut rows: Vec<Vec<(Axis, Row)>> = vec![Vec::new(); nodes.len()];
    for (axis, does) in pick {
        match does {
            Does::Settled => {
                for (allowed, rows) in allowed.iter().zip(&mut rows) {
                    rows.push((*axis, allowed[axis.index()].first().cloned().unwrap_or(Row::Nothing)));
                }
            }
            Does::Splits(name, size) => {
                for (node, rows) in nodes.iter().zip(&mut rows) {
                    rows.push((*axis, factor(node, name, *size).map_or(Row::Nothing, Row::Factor)));
                }
            }
            Does::Passes { forward, backward } => {
                let mut partial = vec![false; nodes.len()];
                let mut passed = !(*forward || *backward);
                for (m, node) in nodes.iter().enumerate() {
                    let comes = |s: &Source| match s {
                        Source::Member(other) => partial[*other],
                        Source::Forward => *forward && parts[m] == Part::Forward,
                        Source::Backward => *backward && parts[m] != Part::Forward,
                        Source::Given => false,
                    };
                    let which: Vec<usize> = (0..node.args.len()).filter(|k| comes(&sources[m][*k])).collect();
                    let row = if which.is_empty() {
                        Row::Nothing
                    } else {
                        let fits = |row: &&Row| matches!(row, Row::Pass(_, args) if *args == which);
                        let row = allowed[m][axis.index()].iter().find(fits)?.clone();
                        partial[m] = true;
                        passed = true;
                        row
                    };
                    rows[m].push((*axis, row));
                }
                if !passed {
                    return None;
                }
            }
        }
    }
    let each = nodes.iter().zip(&rows).map(|(node, rows)| {
        let mut all = space.ordered(node, rows);
        if turned && all.len() > 1 { all.swap_remove(1) } else { all.swap_remove(0) }
    });
    Some(each.collect())
}
