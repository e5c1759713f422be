//! A group of maps that run as one: how another joins it, and the one map that comes of it.

use std::ops::Range;
use std::sync::Arc;

use ir::DType;
use ir::kernel::{Access, Body, Kernel, Loop, Map, Register, Step};
use ir::program::{BufferId, Buffers, Instruction};

/// How two maps agree on what a row is.
#[derive(Clone, Copy)]
struct Rows {
    /// How many of the last loops form it.
    row: usize,
    /// Whether a step reduces it.
    reduced: bool,
    /// Whether the second map runs once a row.
    once: bool,
}

/// A map with the buffers of its operands; a buffer that it makes may be loaded from a register.
#[derive(Clone)]
pub(super) struct Group {
    map: Map,
    reads: Vec<(BufferId, DType)>,
    writes: Vec<(BufferId, DType)>,
    /// Some step reduces a row, so that what the row is cannot change.
    rows: bool,
    /// Accumulating steps of a map that ran once a row: what they add is the same all over it, and counts once.
    once: Vec<usize>,
}

impl Group {
    /// The group of one launch.
    pub(super) fn of(
        map: Map,
        (reads, read_types): (&[BufferId], &[DType]),
        (writes, write_types): (&[BufferId], &[DType]),
    ) -> Group {
        let reads = reads.iter().copied().zip(read_types.iter().copied()).collect();
        let writes = writes.iter().copied().zip(write_types.iter().copied()).collect();
        let rows = map.steps.iter().any(|s| matches!(s, Step::Row(..)));
        Group { map, reads, writes, rows, once: Vec::new() }
    }

    pub(super) fn steps(&self) -> usize {
        self.map.steps.len()
    }

    /// The buffers that it loads from memory or from its own registers.
    pub(super) fn loads(&self) -> Buffers {
        self.reads.iter().map(|(b, _)| *b).collect()
    }

    /// The buffers that are worth loading once with others that load them: all that have elements along some loop. Single
    /// numbers cost nothing, but for a map that has nothing else.
    pub(super) fn large_loads(&self) -> Buffers {
        let reads = self.map.steps.iter().filter_map(Step::read);
        let large = reads.filter(|(_, access)| !access.is_empty() || self.map.loops.is_empty());
        large.map(|(read, _)| self.reads[read].0).collect()
    }

    /// The buffers that it stores.
    pub(super) fn stores(&self) -> Buffers {
        self.writes.iter().map(|(b, _)| *b).collect()
    }

    /// Where it stores a buffer, and what.
    fn stored(&self, buffer: BufferId) -> Option<(&Access, Register)> {
        let write = self.writes.iter().position(|(b, _)| *b == buffer)?;
        let stores = self.map.steps.iter().filter_map(Step::store);
        stores.filter(|(w, ..)| *w == write).map(|(_, access, of)| (access, of)).next()
    }

    fn makes(&self, buffer: BufferId) -> bool {
        self.writes.iter().any(|(b, _)| *b == buffer)
    }

    /// This group with another map behind it; none if they do not fit.
    pub(super) fn with(&self, other: &Group) -> Option<Group> {
        let loops = self.loops_of(other)?;
        let rows = self.rows_with(other, &loops)?;
        self.clone().joined(other, &loops, rows)
    }

    /// This group, run for each row of the other's wider space, with the other behind it.
    pub(super) fn widened_with(&self, other: &Group) -> Option<Group> {
        self.widened(other)?.with(other)
    }

    /// For each loop of `other` (those looked up last), the loop of this group that it is; those looked up are new.
    fn loops_of(&self, other: &Group) -> Option<Vec<usize>> {
        let (n, m) = (self.map.loops.len(), other.map.loops.len());
        let mut loops: Vec<Option<usize>> = vec![None; m];
        for (theirs, ours) in self.shared(other) {
            for (l, k) in theirs.into_iter().zip(ours) {
                if l >= m || k >= n || loops[l].is_some_and(|x| x != k) {
                    return None;
                }
                loops[l] = Some(k);
            }
        }
        for l in 0..m {
            if loops[l].is_none() {
                let free =
                    |k: &usize| !loops.contains(&Some(*k)) && same(&self.map.loops[*k], &other.map.loops[l]);
                loops[l] = Some((0..n).find(free)?);
            }
        }
        let loops: Vec<usize> = loops.into_iter().flatten().collect();
        let distinct = (0..m).all(|i| !loops[..i].contains(&loops[i]));
        let equal = loops.iter().enumerate().all(|(l, k)| same(&self.map.loops[*k], &other.map.loops[l]));
        let looked = (0..other.map.looked.len()).map(|i| n + self.map.looked.len() + i);
        (distinct && equal).then(|| loops.into_iter().chain(looked).collect())
    }

    /// The loops by which both index a buffer that this group makes or loads: pairs of flat lists.
    fn shared(&self, other: &Group) -> Vec<(Vec<usize>, Vec<usize>)> {
        let mut out = Vec::new();
        for (buffer, theirs) in other.accesses() {
            let ours = match self.stored(buffer) {
                Some((access, _)) => Some(access),
                None => self.accesses().find(|(b, _)| *b == buffer).map(|(_, a)| a),
            };
            if let Some(ours) = ours {
                let single = |a: &Access| a.iter().all(|d| d.len() == 1) && a.len() == ours.len();
                if self.makes(buffer) && !(single(theirs) && single(ours)) {
                    // Never equal, so that the two do not join.
                    out.push((vec![0, 0], vec![0, 1]));
                } else if single(theirs) && single(ours) && (self.makes(buffer) || out.is_empty()) {
                    let flat = |a: &Access| a.iter().flatten().copied().collect();
                    out.push((flat(theirs), flat(ours)));
                }
            }
        }
        out
    }

    fn accesses(&self) -> impl Iterator<Item = (BufferId, &Access)> {
        let loads = self.map.steps.iter().filter_map(Step::load);
        loads.map(|(read, access)| (self.reads[read].0, access))
    }

    /// This group run for each row of a wider space: the loops that `other` has more become its row.
    fn widened(&self, other: &Group) -> Option<Group> {
        let (n, m) = (self.map.loops.len(), other.map.loops.len());
        let accumulates = self.map.steps.iter().any(|s| matches!(s, Step::Accumulate { .. }));
        if self.rows || n >= m || n == 0 || accumulates {
            return None;
        }
        // The wider map's first loops must be this group's, in order; the rest is the row.
        let prefix = self.map.loops.iter().zip(&other.map.loops).all(|(a, b)| same(a, b));
        let row = m - n;
        if !prefix || other.rows && other.map.row != row {
            return None;
        }
        let mut wide = self.clone();
        let mut names: Vec<ir::Name> =
            self.map.loops.iter().chain(&self.map.looked).map(|l| l.name.clone()).collect();
        for l in &other.map.loops[n..] {
            let name = unused(&l.name, &names);
            names.push(name.clone());
            wide.map.loops.push(Loop { name, ..l.clone() });
        }
        wide.map.row = row;
        wide.rows = true;
        for step in &mut wide.map.steps {
            shift_looked(step, n, row);
        }
        Some(wide)
    }

    /// What is a row of both together; none if they do not agree on it.
    fn rows_with(&self, other: &Group, loops: &[usize]) -> Option<Rows> {
        let n = self.map.loops.len();
        let m = other.map.loops.len();
        let missing = || (0..n).filter(|k| !loops[..m].contains(k));
        let lacks = missing().next().is_some();
        // Their row in our loops must be ours, where one of the two reduces rows.
        let theirs = &loops[m - other.map.row..m];
        let ours = n - self.map.row..n;
        if lacks {
            // It runs once a row: what it lacks is exactly the row.
            let once = missing().eq(ours) && !other.rows && n != missing().count();
            return once.then_some(Rows { row: self.map.row, reduced: true, once });
        }
        if !other.rows {
            return Some(Rows { row: self.map.row, reduced: self.rows, once: false });
        }
        let row = theirs.len();
        let is = |range: Range<usize>| theirs.iter().copied().eq(range);
        let agree = (!self.rows || is(ours)) && is(n - row..n);
        agree.then_some(Rows { row, reduced: true, once: false })
    }

    fn joined(mut self, other: &Group, loops: &[usize], rows: Rows) -> Option<Group> {
        (self.map.row, self.rows) = (rows.row, rows.reduced);
        let mut names: Vec<ir::Name> =
            self.map.loops.iter().chain(&self.map.looked).map(|l| l.name.clone()).collect();
        for l in &other.map.looked {
            let name = unused(&l.name, &names);
            names.push(name.clone());
            self.map.looked.push(Loop { name, ..l.clone() });
        }
        let mut registers: Vec<Register> = Vec::new();
        let rename = |access: &Access| -> Access {
            access.iter().map(|d| d.iter().map(|l| loops[*l]).collect()).collect()
        };
        for step in &other.map.steps {
            let new = match step {
                Step::Load { read, access } => {
                    let (buffer, dtype) = other.reads[*read];
                    let access = rename(access);
                    if self.makes(buffer) {
                        let (stored, of) = self.stored(buffer)?;
                        // What was cast before it was stored is the same when it is loaded.
                        let exact = matches!(self.map.steps[of], Step::Cast(to, _) if to == dtype);
                        if *stored != access || rounds(dtype) && !exact {
                            return None;
                        }
                        registers.push(of);
                        continue;
                    }
                    Step::Load { read: self.read(buffer, dtype), access }
                }
                Step::LoadAt { read, access, looked, at } => {
                    let (buffer, dtype) = other.reads[*read];
                    if self.makes(buffer) {
                        return None;
                    }
                    Step::LoadAt {
                        read: self.read(buffer, dtype),
                        access: rename(access),
                        looked: loops[*looked],
                        at: registers[*at],
                    }
                }
                Step::Iota(l) => Step::Iota(loops[*l]),
                Step::Random { draw, counter, inner } => Step::Random {
                    draw: draw.clone(),
                    counter: counter.map(|r| registers[r]),
                    inner: inner.iter().map(|l| loops[*l]).collect(),
                },
                Step::Store { write, access, of } => {
                    let write = self.write(other.writes[*write]);
                    Step::Store { write, access: rename(access), of: registers[*of] }
                }
                Step::Accumulate { write, access, of, reduce } => {
                    let write = self.write(other.writes[*write]);
                    if rows.once {
                        self.once.push(self.map.steps.len());
                    }
                    Step::Accumulate { write, access: rename(access), of: registers[*of], reduce: *reduce }
                }
                Step::Const(_)
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Mul(..)
                | Step::Select(..)
                | Step::Cast(..)
                | Step::Row(..) => step.renamed(|r| registers[r]),
            };
            let known = if new.defines() { self.map.steps.iter().position(|s| *s == new) } else { None };
            registers.push(known.unwrap_or_else(|| {
                self.map.steps.push(new);
                self.map.steps.len() - 1
            }));
        }
        self.legal().then_some(self)
    }

    /// Every register of the row that is reduced or stored is so as a kernel needs it.
    fn legal(&self) -> bool {
        let point = self.map.of_point();
        let n = self.map.loops.len();
        let outer = n - self.map.row;
        // What is added to where it lies must not be read again behind it.
        let read = |b: BufferId| self.reads.iter().position(|(r, _)| *r == b);
        let sums = self.writes.iter().enumerate().filter_map(|(w, (b, _))| Some((read(*b)?, w)));
        let apart = sums.clone().all(|(r, w)| self.map.in_place(r, w));
        apart
            && self.map.steps.iter().enumerate().all(|(i, s)| match s {
                Step::Row(_, r) => point[*r],
                // What counted at each point must not come to count once a row.
                Step::Accumulate { access, of, .. } => {
                    point[*of] || self.once.contains(&i) || access.iter().flatten().any(|l| *l >= outer)
                }
                Step::Store { access, of, .. } => {
                    let has = |l: usize| access.iter().flatten().any(|x| *x == l);
                    let needed = if point[*of] { 0..n } else { 0..outer };
                    needed.into_iter().all(has) || (0..n).all(has)
                }
                Step::Load { .. }
                | Step::LoadAt { .. }
                | Step::Const(_)
                | Step::Iota(_)
                | Step::Random { .. }
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Mul(..)
                | Step::Select(..)
                | Step::Cast(..) => true,
            })
    }

    fn read(&mut self, buffer: BufferId, dtype: DType) -> usize {
        self.reads.iter().position(|(b, _)| *b == buffer).unwrap_or_else(|| {
            self.reads.push((buffer, dtype));
            self.reads.len() - 1
        })
    }

    fn write(&mut self, write: (BufferId, DType)) -> usize {
        self.writes.push(write);
        self.writes.len() - 1
    }

    /// The launch, without what nobody needs; none if nothing is left.
    pub(super) fn finish(self, keep: &dyn Fn(BufferId) -> bool) -> Option<Instruction> {
        let Group { map, reads, writes, rows, once } = self;
        let Map { loops, row, looked, steps } = map;
        let mut live = vec![false; steps.len()];
        for (i, step) in steps.iter().enumerate().rev() {
            if let Some((write, ..)) = step.write() {
                live[i] = keep(writes[write].0);
            }
            if live[i] {
                step.uses().into_iter().for_each(|r| live[r] = true);
            }
        }
        let mut registers: Vec<Register> = vec![usize::MAX; steps.len()];
        let empty = Map { loops, row, looked, steps: Vec::with_capacity(steps.len()) };
        let mut out = Group { map: empty, reads: Vec::new(), writes: Vec::new(), rows, once };
        for (i, mut step) in steps.into_iter().enumerate().filter(|(i, _)| live[*i]) {
            step.rename(|r| registers[r]);
            if let Step::Load { read, .. } | Step::LoadAt { read, .. } = &mut step {
                let (buffer, dtype) = reads[*read];
                *read = out.read(buffer, dtype);
            }
            if let Step::Store { write, .. } | Step::Accumulate { write, .. } = &mut step {
                *write = out.write(writes[*write]);
            }
            out.map.steps.push(step);
            registers[i] = out.map.steps.len() - 1;
        }
        if out.writes.is_empty() {
            return None;
        }
        let (reads, read_types): (Buffers, _) = out.reads.into_iter().unzip();
        let (writes, write_types): (Buffers, _) = out.writes.into_iter().unzip();
        let kernel = Kernel { reads: read_types, writes: write_types, body: Body::Map(out.map) };
        Some(Instruction::Launch { kernel: Arc::new(kernel), reads, writes })
    }
}

/// Whether a number changes when it is stored and loaded again.
fn rounds(dtype: DType) -> bool {
    match dtype {
        DType::F16 | DType::BF16 => true,
        DType::F64 | DType::F32 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => false,
    }
}

/// Whether two loops run over the same ranges on every rank.
fn same(a: &Loop, b: &Loop) -> bool {
    a.size == b.size && a.axes == b.axes
}

fn unused(name: &ir::Name, taken: &[ir::Name]) -> ir::Name {
    let mut name = name.to_string();
    while taken.iter().any(|t| **t == name) {
        name.push('\'');
    }
    name.into()
}

/// The numbers of looked-up loops stand behind those of the space: they move when the space gets `by` loops more.
fn shift_looked(step: &mut Step, from: usize, by: usize) {
    if let Step::LoadAt { access, looked, .. } = step {
        access.iter_mut().flatten().filter(|l| **l >= from).for_each(|l| *l += by);
        *looked += by;
    }
}
