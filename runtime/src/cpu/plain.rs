//! What a kernel means: point by point and in f64, as [`ir::kernel`] says it. Slow, and the definition that every
//! other way of running a kernel is held against.
//!
//! f32 and f64 are both exact numbers here; the other types round, when cast and when written.

use std::ops::Range;

use ir::kernel::{Access, Body, Chain, Contract, Kernel, Map, Operand, Scatter, Step, TopK};
use ir::{Binary, DType, Reduce};

use super::convert::cast;
use super::layout::ranges;
use crate::draw;
use crate::eval::{binary, unary};

/// Runs a kernel on the rank at `at`: what it writes, from what it reads.
pub fn interpret(kernel: &Kernel, mesh: &ir::Mesh, at: &[usize], reads: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let ranges = ranges(&kernel.body.loops(), mesh, at);
    let mut writes = match &kernel.body {
        Body::Map(map) => map_of(map, &ranges, reads, kernel.writes.len()),
        Body::Contract(contract) => vec![contract_of(contract, &ranges, reads)],
        Body::Scatter(scatter) => vec![scatter_of(scatter, &ranges, reads)],
        Body::TopK(top) => vec![top_of(top, &ranges, reads)],
        Body::Chain(chain) => return chain_of(chain, kernel.writes.len(), mesh, at, reads),
    };
    for (write, dtype) in writes.iter_mut().zip(&kernel.writes) {
        write.iter_mut().for_each(|x| *x = rounded(*dtype, *x));
    }
    writes
}

/// Each kernel in turn.
fn chain_of(
    chain: &Chain,
    writes: usize,
    mesh: &ir::Mesh,
    at: &[usize],
    reads: &[Vec<f64>],
) -> Vec<Vec<f64>> {
    let (mut out, mut between) = (vec![Vec::new(); writes], vec![Vec::new(); chain.between()]);
    for link in &chain.links {
        let from = |operand: &Operand| match operand {
            Operand::Outside(i) => reads[*i].clone(),
            Operand::Between(i) => between[*i].clone(),
        };
        let from: Vec<Vec<f64>> = link.reads.iter().map(from).collect();
        for (operand, numbers) in link.writes.iter().zip(interpret(&link.kernel, mesh, at, &from)) {
            match operand {
                Operand::Outside(i) => out[*i] = numbers,
                Operand::Between(i) => between[*i] = numbers,
            }
        }
    }
    out
}

/// How many elements an operand has, when its loops have these ranges.
pub fn elements(access: &Access, ranges: &[Range<usize>]) -> usize {
    access.iter().flatten().map(|l| ranges[*l].len()).product()
}

/// The place of the element at `index`, which counts from the start of each range.
fn offset(access: &Access, ranges: &[Range<usize>], index: &[usize]) -> usize {
    access.iter().flatten().fold(0, |at, l| at * ranges[*l].len() + index[*l])
}

/// All points of the loops, in row-major order.
fn space(ranges: &[Range<usize>]) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for range in ranges {
        all = all
            .iter()
            .flat_map(|at: &Vec<usize>| {
                (0..range.len()).map(move |i| at.iter().copied().chain([i]).collect())
            })
            .collect();
    }
    all
}

/// A number in an element type.
fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 | DType::F64 => x,
        DType::F16 | DType::BF16 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => cast(dtype, x),
    }
}

fn reduce(how: Reduce, x: f64, y: f64) -> f64 {
    match how {
        Reduce::Sum => x + y,
        Reduce::Max => binary(Binary::Max, x, y),
        Reduce::Top => panic!("a map combines no pairs"),
    }
}

fn map_of(map: &Map, ranges: &[Range<usize>], reads: &[Vec<f64>], writes: usize) -> Vec<Vec<f64>> {
    let n = map.loops.len();
    let (outer, inner) = ranges[..n].split_at(n - map.row);
    let of_point = map.of_point();
    let mut out = vec![Vec::new(); writes];
    for step in &map.steps {
        if let Some((write, access, _)) = step.write() {
            let start = step.reduce().map_or(0.0, Reduce::identity);
            out[write] = vec![start; elements(access, ranges)];
        }
    }
    let row = space(inner);
    for outer in space(outer) {
        // A register of the row has one number, one of the points has one for each.
        let mut registers: Vec<Vec<f64>> = Vec::new();
        for (place, step) in map.steps.iter().enumerate() {
            let along = |access: &Access| access.iter().flatten().any(|l| (n - map.row..n).contains(l));
            let each = of_point[place] || step.write().is_some_and(|(_, access, _)| along(access));
            let mut numbers = Vec::new();
            for point in 0..if each { row.len() } else { 1 } {
                let here = |r: usize| registers[r][if of_point[r] { point } else { 0 }];
                let mut index = outer.clone();
                if each {
                    index.extend(&row[point]);
                }
                index.resize(ranges.len(), 0);
                let number = match step {
                    Step::Load { read, access } => reads[*read][offset(access, ranges, &index)],
                    Step::LoadAt { read, access, looked, at } => {
                        let (range, global) = (&ranges[*looked], here(*at));
                        if global >= range.start as f64 && global < range.end as f64 {
                            index[*looked] = global as usize - range.start;
                            reads[*read][offset(access, ranges, &index)]
                        } else {
                            0.0
                        }
                    }
                    Step::Const(c) => *c,
                    Step::Iota(l) => (ranges[*l].start + index[*l]) as f64,
                    Step::Random { draw, counter, inner } => {
                        let global = |i, l: &usize| i * map.loops[*l].size + ranges[*l].start + index[*l];
                        let counter = draw::counter(counter.map(here));
                        f64::from(draw::number(draw::key(draw), counter, inner.iter().fold(0, global) as u32))
                    }
                    Step::Unary(f, r) => unary(*f, here(*r)),
                    Step::Binary(f, x, y) => binary(*f, here(*x), here(*y)),
                    Step::Add(all) => all.iter().map(|r| here(*r)).sum(),
                    Step::Mul(scale, all) => scale * all.iter().map(|r| here(*r)).product::<f64>(),
                    Step::Select(c, x, y) => here(if here(*c) != 0.0 { *x } else { *y }),
                    Step::Cast(dtype, r) => rounded(*dtype, here(*r)),
                    Step::Row(how, r) => {
                        let all = 0..row.len();
                        all.map(|p| registers[*r][if of_point[*r] { p } else { 0 }])
                            .fold(how.identity(), |x, y| reduce(*how, x, y))
                    }
                    Step::Store { write, access, of } => {
                        out[*write][offset(access, ranges, &index)] = here(*of);
                        continue;
                    }
                    Step::Accumulate { write, access, of, reduce: how } => {
                        let to = &mut out[*write][offset(access, ranges, &index)];
                        *to = reduce(*how, *to, here(*of));
                        continue;
                    }
                };
                numbers.push(number);
            }
            registers.push(numbers);
        }
    }
    out
}

fn contract_of(contract: &Contract, ranges: &[Range<usize>], reads: &[Vec<f64>]) -> Vec<f64> {
    let mut out = vec![0.0; elements(&contract.out, ranges)];
    for index in space(ranges) {
        let a = reads[0][offset(&contract.a, ranges, &index)];
        let b = reads[1][offset(&contract.b, ranges, &index)];
        out[offset(&contract.out, ranges, &index)] += contract.scale * a * b;
    }
    out
}

fn scatter_of(scatter: &Scatter, ranges: &[Range<usize>], reads: &[Vec<f64>]) -> Vec<f64> {
    let mut out = vec![0.0; elements(&scatter.out, ranges)];
    let looked = &ranges[scatter.looked];
    let mut without = ranges.to_vec();
    without[scatter.looked] = 0..1;
    for mut index in space(&without) {
        let global = reads[1][offset(&scatter.index, ranges, &index)];
        if global >= looked.start as f64 && global < looked.end as f64 {
            let x = reads[0][offset(&scatter.source, ranges, &index)];
            index[scatter.looked] = global as usize - looked.start;
            out[offset(&scatter.out, ranges, &index)] += x;
        }
    }
    out
}

fn top_of(top: &TopK, ranges: &[Range<usize>], reads: &[Vec<f64>]) -> Vec<f64> {
    let mut out = vec![f64::NEG_INFINITY; elements(&top.out, ranges)];
    let (kept, pairs) = top.out.split_at(top.out.len() - 2);
    let k = elements(&pairs.to_vec(), ranges) / 2;
    // One row at a time: all that is there, sorted.
    let rows: Access = kept.to_vec();
    let mut row = ranges.to_vec();
    (0..row.len()).filter(|l| !rows.iter().flatten().any(|x| x == l)).for_each(|l| row[l] = 0..1);
    for mut index in space(&row) {
        let mut all: Vec<(f64, usize)> = Vec::new();
        for (i, global) in ranges[top.searched].clone().enumerate() {
            index[top.searched] = i;
            all.push((reads[0][offset(&top.source, ranges, &index)], global));
        }
        let first = |x: f64, y: f64| match (x.is_nan(), y.is_nan()) {
            (false, false) => y.partial_cmp(&x).unwrap_or(std::cmp::Ordering::Equal),
            (x, y) => y.cmp(&x),
        };
        all.sort_by(|a, b| first(a.0, b.0).then(a.1.cmp(&b.1)));
        index[top.searched] = 0;
        let start = offset(&rows, ranges, &index) * 2 * k;
        for (place, (value, global)) in all.into_iter().take(k).enumerate() {
            out[start + 2 * place..start + 2 * place + 2].copy_from_slice(&[value, global as f64]);
        }
    }
    out
}
