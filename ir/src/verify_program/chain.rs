//! The rules of chains.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::{Check, ProgramFault};
use crate::kernel::{Body, Chain, Kernel, Link, Loop, Operand, Step, Use};
use crate::program::BufferId;
use crate::{Axes, DType};

/// The size and axes of a dimension.
type Extent = (usize, Axes);

fn extent(dim: &[&Loop]) -> Extent {
    (dim.iter().map(|l| l.size).product(), dim.iter().flat_map(|l| &l.axes).copied().collect())
}

impl Check<'_, '_> {
    pub(super) fn chain(
        &mut self,
        at: &dyn Display,
        chain: &Chain,
        kernel: &Kernel,
        reads: &[BufferId],
        writes: &[BufferId],
    ) {
        for link in &chain.links {
            if let Body::Map(map) = &link.kernel.body {
                self.steps(at, map, &link.kernel.body.loops());
            }
        }
        if let Some(fault) = fault(chain, kernel) {
            return self.report(at, fault);
        }
        for of in kernel.uses() {
            let Some(id) = (if of.written { writes } else { reads }).get(of.operand) else {
                return self
                    .report(at, ProgramFault::Operands { kernel: of.operand + 1, launch: reads.len() });
            };
            let buffer = &self.stage.buffers[id.index()];
            if of.dims.len() != buffer.shape.len() {
                return self.report(at, ProgramFault::Dims(*id, buffer.shape.len(), of.dims.len()));
            }
            for (dim, over) in of.dims.iter().enumerate() {
                let (size, axes) = extent(over);
                let (n, split) = (buffer.shape[dim], &buffer.sharding.dims[dim]);
                if n != size || *split != axes {
                    let found = format!("{n} over {}", self.mesh.show(split));
                    let needed = format!("{size} over {}", self.mesh.show(&axes));
                    self.report(at, ProgramFault::Extent { buffer: *id, dim, found, needed });
                }
            }
        }
    }
}

/// The first rule that a chain breaks.
fn fault(chain: &Chain, kernel: &Kernel) -> Option<ProgramFault> {
    let mut between: BTreeMap<usize, (DType, Vec<Extent>)> = BTreeMap::new();
    let mut written: Vec<usize> = Vec::new();
    let mut known: Vec<&Loop> = Vec::new();
    for (i, link) in chain.links.iter().enumerate() {
        let wrong = |text: String| Some(ProgramFault::Chain(i, text));
        let loops = match &link.kernel.body {
            Body::Map(map) if Chain::takes(map) => &map.loops,
            Body::Contract(c) => &c.loops,
            Body::Map(_) | Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => {
                return wrong("is no map that only loads and stores, and no contraction".to_string());
            }
        };
        if let Some(l) = chain.loops.iter().find(|l| !loops.iter().any(|k| k.name == l.name)) {
            return wrong(format!("lacks the shared loop {}", l.name));
        }
        for l in loops {
            let like = chain.loops.iter().chain(known.iter().copied()).find(|k| k.name == l.name);
            if like.is_some_and(|k| k != l) {
                return wrong(format!("has another loop {}", l.name));
            }
        }
        known.extend(loops);
        if let Some(l) = reduced(chain, link) {
            return wrong(format!("combines over the shared loop {l}"));
        }
        for u in link.kernel.uses() {
            let (list, types, outside) = match u.written {
                true => (&link.writes, &link.kernel.writes, &kernel.writes),
                false => (&link.reads, &link.kernel.reads, &kernel.reads),
            };
            let (Some(operand), Some(dtype)) = (list.get(u.operand), types.get(u.operand)) else {
                return wrong(format!("has no operand {}", u.operand));
            };
            let dims: Vec<Extent> = u.dims.iter().map(|d| extent(d)).collect();
            match *operand {
                Operand::Outside(o) if outside.get(o) != Some(dtype) => {
                    return wrong(format!("uses operand {o} of the chain as {dtype}"));
                }
                Operand::Outside(o) if u.written && written.contains(&o) => {
                    return wrong(format!("writes result {o} of the chain again"));
                }
                Operand::Outside(o) if u.written => written.push(o),
                Operand::Outside(_) => {}
                Operand::Between(b) => {
                    if let Some(l) = lacks(chain, &u) {
                        return wrong(format!("has i{b} without the shared loop {l}"));
                    }
                    match between.get(&b) {
                        // So that none is left out.
                        None if u.written && b == between.len() => {
                            between.insert(b, (*dtype, dims));
                        }
                        None if u.written => return wrong(format!("writes i{b} before i{}", between.len())),
                        None => return wrong(format!("reads i{b}, which none before it writes")),
                        Some(_) if u.written => return wrong(format!("writes i{b} again")),
                        Some(was) if *was != (*dtype, dims) => {
                            return wrong(format!("reads i{b} as something else"));
                        }
                        Some(_) => {}
                    }
                }
            }
        }
    }
    let missing = (0..kernel.writes.len()).find(|o| !written.contains(o));
    missing.map(|o| ProgramFault::Chain(chain.links.len(), format!("would have to write result {o}")))
}

/// A shared loop that an access lacks.
fn lacks(chain: &Chain, of: &Use) -> Option<String> {
    let has = |l: &Loop| of.dims.iter().flatten().any(|k| k.name == l.name);
    chain.loops.iter().find(|l| !has(l)).map(|l| l.name.to_string())
}

/// A shared loop that a map combines over.
fn reduced(chain: &Chain, link: &Link) -> Option<String> {
    let Body::Map(map) = &link.kernel.body else { return None };
    let (_, row) = map.loops.split_at(map.loops.len() - map.row);
    let rows = map.steps.iter().any(|s| matches!(s, Step::Row(..)));
    let in_row = row.iter().find(|l| rows && chain.shares(l)).map(|l| l.name.to_string());
    in_row.or_else(|| link.kernel.uses().iter().filter(|u| u.written).find_map(|u| lacks(chain, u)))
}
