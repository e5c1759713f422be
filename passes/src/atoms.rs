//! After it no dimension is merged where that can be helped: a reshape moves nothing, because both of its sides have the
//! same dimensions, the atoms of what was merged.
//!
//! Every signature cuts dimensions: `(b s) d -> b s d` cuts its operand's first one at the size of `s`. The cuts of all
//! signatures are united over the graph, both ways; then every dimension is one atom, an input `[12]` is `[3, 4]` (the
//! same bytes), and the reshape is a copy that is gone. A dimension whose cuts contradict each other (12 as 3 x 4 and as
//! 4 x 3) stays as it is, and its reshapes may need it whole. A dimension that is looked up or searched is never cut. Where an axis splits a dimension
//! whose first atom is smaller, the mesh is refined: 8 over `x=4`, cut as 2 x 4, is over `x=2.2`.
//!
//! First on the mesh, since it changes what can be placed; nothing is chosen yet.
//!
//! ```text
//! v1 = einsum v0, w : (b s) d, d f -> (b s) f : f32 8x6         v0 is [dp, _]
//!   ->
//! v1 = einsum v0, w : b s d, d f -> b s f : f32 2x4x6           v0 is [dp, _, _]
//! ```

mod cuts;

use std::collections::HashSet;

use smallvec::smallvec;

use ir::graph::{Constraint, NewNode, Rewrite};
use ir::signature::Dim;
use ir::state::View;
use ir::{Axes, Axis, Factor, Mesh, Name, Node, Op, ShardedGraph, Sharding, Signature, Value};

use crate::simplify::asked_of;
use cuts::Atoms;

pub(crate) fn run(sharded: &mut ShardedGraph) {
    let Some(atoms) = cuts::unite(&sharded.graph) else { return };
    place(sharded, &atoms);
    rewrite(sharded, &atoms);
}

/// Splits the places of inputs and states as their dimensions are cut, refining the mesh where an axis is larger than
/// the atom that it meets.
fn place(sharded: &mut ShardedGraph, atoms: &Atoms) {
    let cut = atoms.by_name(&sharded.graph);
    loop {
        let too_large = sharded.decisions.places.iter().find_map(|(name, place)| {
            let cut = cut.get(name)?;
            place.dims.iter().zip(cut).find_map(|(axes, atoms)| spread(axes, atoms, &sharded.mesh).err())
        });
        let Some((axis, outer)) = too_large else { break };
        refine(sharded, axis, outer);
    }
    for (name, place) in &mut sharded.decisions.places {
        if let Some(cut) = cut.get(name) {
            let dims = place.dims.iter().zip(cut);
            place.dims = dims
                .flat_map(|(axes, atoms)| spread(axes, atoms, &sharded.mesh).unwrap_or_default())
                .map(Axes::from)
                .collect();
        }
    }
}

/// The axes of a dimension on its atoms, outermost first. An axis that fits no atom evenly stays on the one that it
/// meets, unevenly.
///
/// # Errors
/// An axis that spans atoms, and how much of it the first takes.
fn spread(axes: &[Axis], atoms: &[usize], mesh: &Mesh) -> Result<Vec<Vec<Axis>>, (Axis, usize)> {
    let mut out = vec![Vec::new(); atoms.len()];
    let mut at = 0;
    let mut left = atoms[0];
    for axis in axes {
        while left == 1 && at + 1 < atoms.len() {
            at += 1;
            left = atoms[at];
        }
        let size = mesh.size(*axis);
        if left > 1 && size > left && size.is_multiple_of(left) && at + 1 < atoms.len() {
            return Err((*axis, left));
        }
        out[at].push(*axis);
        left = if left.is_multiple_of(size) { left / size } else { 1 };
    }
    Ok(out)
}

/// Cuts an axis in two, the outer of size `outer`; whatever named it names both.
fn refine(sharded: &mut ShardedGraph, axis: Axis, outer: usize) {
    let old = sharded.mesh.clone();
    let mut words = Vec::new();
    let mut now: Vec<Vec<Axis>> = Vec::new();
    let mut next = 0u8;
    for (name, of) in old.outer() {
        let mut sizes = Vec::new();
        for a in of {
            let parts = if a == axis { vec![outer, old.size(a) / outer] } else { vec![old.size(a)] };
            now.push(
                parts
                    .iter()
                    .map(|_| {
                        next += 1;
                        Axis(next - 1)
                    })
                    .collect(),
            );
            sizes.extend(parts.iter().map(usize::to_string));
        }
        words.push(format!("{name}={}", sizes.join(".")));
    }
    // Fewer than 32 axes were read, and each is cut at most as often as its size has factors.
    sharded.mesh = Mesh::parse(&words.join(",")).unwrap_or_else(|e| panic!("a refined mesh is a mesh: {e}"));
    let all = |axes: &Axes| axes.iter().flat_map(|a| now[a.index()].clone()).collect();
    for place in sharded.decisions.places.values_mut() {
        *place = Sharding { dims: place.dims.iter().map(all).collect(), partial: Vec::new() };
    }
}

fn rewrite(sharded: &mut ShardedGraph, atoms: &Atoms) {
    let old = std::mem::take(&mut sharded.graph);
    let mut new = Rewrite::of(&old);
    let by_name = atoms.by_name(&old);
    let asked: HashSet<Value> = asked_of(&old).collect();
    for (name, dims, views) in tables(&mut new) {
        if let Some(cut) = by_name.get(&name) {
            cut_table(dims, views, cut);
        }
    }
    for (i, node) in old.nodes.iter().enumerate() {
        let (signature, known) = signature(node, i, atoms);
        let args: Vec<_> = node.args.iter().map(|v| new.at(*v)).collect();
        let copies = node.op == Op::Einsum { scale: 1.0 } && signature.args.len() == 1;
        // What the user asked of the copy is not asked of its operand.
        let kept = node.results.iter().any(|v| asked.contains(v));
        if copies && !kept && signature.args[0] == signature.results[0] {
            new.now[node.results[0].index()] = Some(args[0]);
            continue;
        }
        let dtype = node.results.first().map_or(ir::DType::F32, |v| old.ty(*v).dtype);
        let (op, mark, tag) = (node.op.clone(), node.mark, node.tag.clone());
        let renamed = |v: Option<Value>| v.and_then(|v| new.now[v.index()]);
        let (of, like) = (renamed(node.of), renamed(node.like));
        let made = NewNode { op, signature, args, dtype, known, mark, tag, of, like };
        let value =
            new.push(made).unwrap_or_else(|e| panic!("the atoms of {} do not fit: {e}", node.signature));
        for (old, now) in node.results.iter().zip(value) {
            new.now[old.index()] = Some(now);
        }
    }
    let mut graph = new.finish(&old);
    for (c, was) in graph.constraints.iter_mut().zip(&old.constraints) {
        let dims = was.dims.iter().zip(atoms.of_value(was.value));
        let first = |(axes, atoms): (&Vec<Name>, &Vec<usize>)| {
            (0..atoms.len()).map(|i| if i == 0 { axes.clone() } else { Vec::new() }).collect::<Vec<_>>()
        };
        *c = Constraint { value: c.value, dims: dims.flat_map(first).collect(), even: c.even };
    }
    sharded.graph = graph;
}

type Table<'a> = (Name, &'a mut Vec<(Name, usize)>, Option<&'a mut Vec<View>>);

fn tables(new: &mut Rewrite) -> Vec<Table<'_>> {
    let inputs = new.graph.inputs.iter_mut().map(|i| (i.name.clone(), &mut i.dims, None));
    let states = new.graph.states.iter_mut().map(|s| (s.name.clone(), &mut s.dims, Some(&mut s.views)));
    inputs.chain(states).collect()
}

fn cut_table(dims: &mut Vec<(Name, usize)>, views: Option<&mut Vec<View>>, cut: &[Vec<usize>]) {
    let named = dims.iter().zip(cut);
    *dims = named
        .flat_map(|((name, _), atoms)| parts(name, atoms).into_iter().zip(atoms.iter().copied()))
        .collect();
    // Several windows are stacked along a first dimension that none of them has.
    let skip = views.as_ref().map_or(0, |v| usize::from(v.len() > 1));
    for view in views.into_iter().flatten() {
        let windows = view.dims.iter().zip(&cut[skip..]);
        let cut_window = |((_, stride), atoms): (&(usize, usize), &Vec<usize>)| {
            let inner = |i: usize| atoms[i + 1..].iter().product::<usize>();
            (0..atoms.len()).map(|i| (atoms[i], stride * inner(i))).collect::<Vec<_>>()
        };
        view.dims = windows.flat_map(cut_window).collect();
    }
}

/// Names for the atoms of a factor or dimension.
fn parts(name: &Name, atoms: &[usize]) -> Vec<Name> {
    match atoms.len() {
        1 => vec![name.clone()],
        n => (0..n).map(|i| format!("{name}.{i}").into()).collect(),
    }
}

/// A node's signature in atoms, and their sizes.
fn signature(node: &Node, i: usize, atoms: &Atoms) -> (Signature, Vec<(Name, usize)>) {
    let mut factors: Vec<Name> = Vec::new();
    let mut sizes: Vec<usize> = Vec::new();
    let mut of_factor: Vec<Vec<Factor>> = Vec::new();
    for (f, name) in node.signature.factors.iter().enumerate() {
        let of = atoms.of_factor(i, f);
        of_factor.push((factors.len()..factors.len() + of.len()).collect());
        factors.extend(parts(name, of));
        sizes.extend(of);
    }
    let tensor = |(value, dims): (&Value, &Vec<Dim>)| -> Vec<Dim> {
        let cut = atoms.of_value(*value);
        let mut out = Vec::new();
        for (dim, atoms) in dims.iter().zip(cut) {
            let all: Dim = dim.iter().flat_map(|f| of_factor[*f].clone()).collect();
            let mut real: Dim = all.iter().copied().filter(|f| sizes[*f] != 1).collect();
            if real.is_empty() {
                real = all[..1].into();
            }
            match atoms.len() {
                1 if dim.len() == 1 => out.push(all),
                1 => out.push(real),
                _ => out.extend(real.into_iter().map(|f| smallvec![f])),
            }
        }
        out
    };
    let args = node.args.iter().zip(&node.signature.args).map(tensor).collect();
    let results = node.results.iter().zip(&node.signature.results).map(tensor).collect();
    let known = factors.iter().cloned().zip(sizes.iter().copied()).collect();
    (Signature { factors, args, results }, known)
}
