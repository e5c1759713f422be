//! The machine: runs a plan's instructions, tile after tile.

use ir::{DType, Reduce};

use super::super::convert;
use super::super::lanes::{Lanes, MOST, best};
use super::super::layout::Walk;
use super::ahead::{Ahead, part};
use super::{Code, Instr, Lookup, NOTHING, Numbers, Place, Plan, Term, Total};
use crate::draw;

/// The memory of a run.
struct Machine<'a> {
    plan: &'a Plan,
    lanes: &'static Lanes,
    reads: &'a [*const u8],
    writes: &'a [*mut u8],
    /// How far behind the planned range this run is, along each loop; none: not at all.
    behind: &'a [usize],
    /// Where each register is now: its place in the scratch, or in an operand.
    at: *mut *const f32,
    /// The scratch's lanes.
    base: *mut f32,
}

impl Plan {
    /// Runs it, so far `behind` the planned range along each loop; none: not at all.
    ///
    /// # Safety
    /// As for `Compiled::run`; `scratch` has [`Plan::scratch_bytes`] and is aligned to 64 bytes.
    pub unsafe fn run(&self, reads: &[*const u8], writes: &[*mut u8], scratch: *mut u8, behind: &[usize]) {
        let machine = Machine {
            plan: self,
            lanes: best(),
            reads,
            writes,
            behind,
            at: scratch.cast(),
            // SAFETY: the lanes lie behind the pointers.
            base: unsafe { scratch.add(self.pointers()) }.cast(),
        };
        // SAFETY: the caller's.
        unsafe { machine.run() }
    }
}

impl Machine<'_> {
    unsafe fn run(&self) {
        let plan = self.plan;
        // SAFETY: the plan keeps registers and totals apart and inside of the scratch, and walks inside of operands.
        unsafe {
            plan.totals.iter().for_each(|t| self.begin(t));
            if plan.rows > 0 {
                for (i, r) in plan.registers.iter().enumerate() {
                    *self.at.add(i) = self.base.add(r.offset);
                }
                let mut nothing = Ahead::NOTHING;
                plan.before.iter().for_each(|i| self.step(i, 0, plan.tile, &mut nothing));
                for first in (0..plan.rows).step_by(plan.tile) {
                    let rows = plan.tile.min(plan.rows - first);
                    let mut ahead = Ahead::of(plan, self.reads, self.writes, first + rows);
                    for instr in &plan.each {
                        self.step(instr, first, rows, &mut ahead);
                        ahead.ask();
                    }
                }
            }
            plan.totals.iter().for_each(|t| self.end(t));
        }
    }

    /// Where a total's operand or its place in the scratch is.
    unsafe fn total(&self, total: &Total) -> *mut u8 {
        match total.place {
            Place::Operand => self.writes[total.write],
            // SAFETY: it lies in the scratch.
            Place::F32(offset) | Place::F64(offset) => unsafe { self.base.add(offset) }.cast(),
        }
    }

    unsafe fn begin(&self, total: &Total) {
        // SAFETY: `count` elements of that type lie there.
        unsafe {
            let at = self.total(total);
            let identity = total.reduce.identity();
            match total.place {
                Place::Operand | Place::F32(_) => {
                    std::slice::from_raw_parts_mut(at.cast::<f32>(), total.count).fill(identity as f32);
                }
                Place::F64(_) => std::slice::from_raw_parts_mut(at.cast::<f64>(), total.count).fill(identity),
            }
        }
    }

    unsafe fn end(&self, total: &Total) {
        // SAFETY: `count` elements lie in the scratch and in the operand.
        unsafe {
            let (from, to) = (self.total(total), self.writes[total.write]);
            match total.place {
                Place::Operand => {}
                Place::F32(_) => convert::store(self.lanes, total.dtype, to, from.cast(), total.count, 1),
                Place::F64(_) if total.dtype == DType::F64 => {
                    std::ptr::copy_nonoverlapping(from.cast::<f64>(), to.cast(), total.count);
                }
                Place::F64(_) => {
                    for i in 0..total.count {
                        let x = *from.cast::<f64>().add(i) as f32;
                        convert::store(self.lanes, total.dtype, to.add(i * total.dtype.bytes()), &x, 1, 1);
                    }
                }
            }
        }
    }

    /// The register's own lanes.
    unsafe fn own(&self, r: usize) -> *mut f32 {
        // SAFETY: a register's lanes lie in the scratch.
        unsafe { self.base.add(self.plan.registers[r].offset) }
    }

    /// The register's lanes, its own or borrowed.
    unsafe fn get(&self, r: usize) -> *const f32 {
        // SAFETY: every register has a pointer.
        unsafe { *self.at.add(r) }
    }

    unsafe fn operands(&self, term: &Term) -> [*const f32; MOST + 2] {
        // SAFETY: every register has a pointer.
        term.operands.map(|r| if r == NOTHING { std::ptr::null() } else { unsafe { self.get(r) } })
    }

    /// Where an instruction puts its lanes: into the operand that they are stored in, or the register's own place.
    unsafe fn to(&self, instr: &Instr, first: usize, n: usize) -> *mut f32 {
        // SAFETY: a register's lanes lie in the scratch, and a walk inside of its operand.
        unsafe {
            let mut to = self.own(instr.to);
            if let Some((write, walk)) = &instr.straight
                && !self.reads.contains(&self.writes[*write].cast_const())
                && let Some(offset) = walk.together(first, n)
            {
                to = self.writes[*write].cast::<f32>().add(offset);
            }
            *self.at.add(instr.to) = to;
            to
        }
    }

    unsafe fn step(&self, instr: &Instr, first: usize, rows: usize, ahead: &mut Ahead) {
        let row = self.plan.row;
        let (first, n) = self.plan.span(instr.class, first, rows);
        // SAFETY: registers have `n` lanes or, for an instruction that says so, one; operands are as the walks say.
        unsafe {
            match &instr.code {
                Code::Store { write, dtype, walk, of } => {
                    let (to, of) = (self.writes[*write], self.get(*of));
                    walk.runs(first, n, |done, points, offset, stride| {
                        let to = to.add(offset * dtype.bytes());
                        if to.cast_const() == of.cast() {
                            return;
                        }
                        convert::store(self.lanes, *dtype, to, of.add(done), points, stride);
                    });
                }
                Code::Accumulate { total, walk, of } => {
                    self.accumulate(&self.plan.totals[*total], walk, self.get(*of), first, n);
                }
                Code::Load { read, dtype, walk, offset, stored } => {
                    let (operand, size) = (self.reads[*read], dtype.bytes());
                    let from = operand.add(offset * size);
                    if *dtype == DType::F32
                        && let Some(offset) = walk.together(first, n)
                        && !(*stored && self.writes.contains(&operand.cast_mut()))
                    {
                        *self.at.add(instr.to) = from.cast::<f32>().add(offset);
                        return;
                    }
                    let own = self.own(instr.to);
                    walk.runs(first, n, |done, points, offset, stride| {
                        convert::load(
                            self.lanes,
                            *dtype,
                            own.add(done),
                            from.add(offset * size),
                            points,
                            stride,
                        );
                    });
                    *self.at.add(instr.to) = own;
                }
                Code::Random(numbers) => self.random(numbers, self.own(instr.to), first, n),
                Code::LoadAt(lookup) => self.load_at(lookup, self.own(instr.to), first, n),
                Code::Fill(x) => (self.lanes.fill)(self.own(instr.to), *x, n),
                Code::Iota { start, along, walk } => {
                    let to = self.own(instr.to);
                    let start = start + self.behind.get(*along).unwrap_or(&0);
                    walk.runs(first, n, |done, points, offset, stride| {
                        (self.lanes.count)(to.add(done), start + offset, stride, points);
                    });
                }
                Code::One(f, a) => {
                    let (to, a, part) = (self.to(instr, first, n), self.get(*a), part(instr, n));
                    let mut done = 0;
                    while done + part < n {
                        f(to.add(done), a.add(done), part);
                        ahead.ask();
                        done += part;
                    }
                    f(to.add(done), a.add(done), n - done);
                }
                Code::Two(f, a, b) => f(self.to(instr, first, n), self.get(*a), self.get(*b), n),
                Code::Numbered { f, a, b, by_row } => {
                    let (rows, row) = if *by_row { (rows, row) } else { (1, n) };
                    f(self.to(instr, first, n), self.get(*a), self.get(*b), rows, row);
                }
                Code::Term(term) => {
                    let (rows, row) = if term.by_row { (rows, row) } else { (1, n) };
                    (term.f)(self.to(instr, first, n), &self.operands(term), rows, row);
                }
                Code::Sums(term) => (term.f)(self.to(instr, first, n), &self.operands(term), rows, row),
                Code::Pick(c, a, b) => {
                    *self.at.add(instr.to) = self.get(if *self.get(*c) != 0.0 { *a } else { *b });
                }
                Code::Three(f, a, b, c) => {
                    f(self.to(instr, first, n), self.get(*a), self.get(*b), self.get(*c), n);
                }
                Code::Cast(dtype, a) => {
                    let (to, a) = (self.own(instr.to), self.get(*a));
                    for i in 0..n {
                        *to.add(i) = convert::cast(*dtype, f64::from(*a.add(i))) as f32;
                    }
                }
                Code::Reduce(f, a) => f(self.own(instr.to), self.get(*a), n, row),
                Code::ReduceSame(reduce, a) => {
                    let (to, a) = (self.own(instr.to), self.get(*a));
                    for i in 0..n {
                        *to.add(i) = match reduce {
                            Reduce::Sum => *a.add(i) * row as f32,
                            Reduce::Max if row == 0 => f32::NEG_INFINITY,
                            Reduce::Max => *a.add(i),
                            Reduce::Top => unreachable!("compile refuses a map that combines pairs"),
                        };
                    }
                }
                Code::Expand(a) => (self.lanes.expand)(self.own(instr.to), self.get(*a), rows, row),
                Code::Spread(a) => (self.lanes.fill)(self.own(instr.to), *self.get(*a), n),
            }
        }
    }

    /// Lanes of one counter, and neighbours in the inner index, are drawn together.
    unsafe fn random(&self, of: &Numbers, to: *mut f32, first: usize, n: usize) {
        // SAFETY: registers have `n` lanes.
        let (to, counter) = unsafe {
            let lanes = |r: usize| std::slice::from_raw_parts(self.get(r), n);
            (std::slice::from_raw_parts_mut(to, n), of.counter.map(lanes))
        };
        let at = |i: usize| counter.map(|lanes| lanes[i].to_bits());
        let start = of.start + self.behind.iter().zip(&of.strides).map(|(n, s)| n * s).sum::<usize>();
        of.walk.runs(first, n, |done, points, offset, stride| {
            let mut i = done;
            while i < done + points {
                let end = (i + 1..done + points).find(|j| at(*j) != at(i)).unwrap_or(done + points);
                let counter = draw::counter(counter.map(|lanes| f64::from(lanes[i])));
                let inner = start + offset + (i - done) * stride;
                match stride {
                    // SAFETY: the machine can run its own lanes.
                    1 => unsafe { (self.lanes.draw)(&mut to[i..end], of.key, counter, inner as u32) },
                    0 => to[i..end].fill(draw::number(of.key, counter, inner as u32)),
                    _ => to[i..end].iter_mut().enumerate().for_each(|(k, x)| {
                        *x = draw::number(of.key, counter, (inner + k * stride) as u32);
                    }),
                }
                i = end;
            }
        });
    }

    unsafe fn load_at(&self, l: &Lookup, to: *mut f32, first: usize, n: usize) {
        let (from, size) = (self.reads[l.read], l.dtype.bytes());
        // SAFETY: an index inside of the range gives an element of the operand; there is one for each lane or row.
        unsafe {
            let at = self.get(l.at);
            let found = |i: usize| {
                let index = *at.add(i) - l.start as f32;
                (index >= 0.0 && index < l.len as f32).then_some(index as usize * l.stride)
            };
            let Some(inner) = &l.inner else {
                return l.walk.runs(first, n, |done, points, offset, stride| {
                    for i in done..done + points {
                        match found(i) {
                            Some(index) => {
                                let from = from.add((offset + (i - done) * stride + index) * size);
                                convert::load(self.lanes, l.dtype, to.add(i), from, 1, 1);
                            }
                            None => *to.add(i) = 0.0,
                        }
                    }
                });
            };
            let row = self.plan.row;
            if row == 0 {
                return;
            }
            l.walk.runs(first / row, n / row, |done, rows, offset, stride| {
                for i in done..done + rows {
                    let to = to.add(i * row);
                    match found(i) {
                        Some(index) => {
                            let from = from.add((offset + (i - done) * stride + index) * size);
                            inner.runs(0, row, |done, points, offset, stride| {
                                let from = from.add(offset * size);
                                convert::load(self.lanes, l.dtype, to.add(done), from, points, stride);
                            });
                        }
                        None => std::slice::from_raw_parts_mut(to, row).fill(0.0),
                    }
                }
            });
        }
    }

    unsafe fn accumulate(&self, total: &Total, walk: &Walk, of: *const f32, first: usize, n: usize) {
        let combine = |a: f64, b: f64| match total.reduce {
            Reduce::Sum => a + b,
            Reduce::Max if a.is_nan() || a > b => a,
            Reduce::Max => b,
            Reduce::Top => unreachable!("compile refuses a map that combines pairs"),
        };
        let (fold, whole) = ((self.lanes.rows)(total.reduce), (self.lanes.total)(total.reduce));
        let into = (self.lanes.into)(total.reduce);
        // SAFETY: the walk stays inside of the total's elements.
        unsafe {
            let at = self.total(total);
            walk.runs(first, n, |done, points, offset, stride| {
                let of = of.add(done);
                match (total.place, stride) {
                    (Place::F64(_), _) => {
                        let at = at.cast::<f64>().add(offset);
                        if stride == 0 {
                            *at = combine(*at, whole(of, points));
                        } else {
                            for i in 0..points {
                                let at = at.add(i * stride);
                                *at = combine(*at, f64::from(*of.add(i)));
                            }
                        }
                    }
                    (Place::Operand | Place::F32(_), 1) => into(at.cast::<f32>().add(offset), of, points),
                    (Place::Operand | Place::F32(_), 0) => {
                        let mut x = 0.0;
                        fold(&mut x, of, 1, points);
                        into(at.cast::<f32>().add(offset), &x, 1);
                    }
                    (Place::Operand | Place::F32(_), _) => {
                        for i in 0..points {
                            let at = at.cast::<f32>().add(offset + i * stride);
                            *at = combine(f64::from(*at), f64::from(*of.add(i))) as f32;
                        }
                    }
                }
            });
        }
    }
}
