//! The plan of a map: its tile, and its steps as instructions on registers.

use std::iter;

use ir::kernel::{Access, Kernel, Map, Step};
use ir::{DType, Draw, Reduce, Unary};

use super::super::lanes::{Lanes, Pair, best};
use super::super::layout::{Extents, Walk, count, strides};
use super::ahead;
use super::terms::Pending;
use super::{Class, Code, Instr, Lookup, NOTHING, Numbers, Place, Plan, Register, Total};
use crate::draw;

/// Rows from here on are long enough for a loop each.
const LONG: usize = 16;
/// About how many lanes a register has: a handful of them fit into the first cache.
const LANES: usize = 1024;
/// From so many steps that compute on there are more registers, and each has half.
const MANY: usize = 12;
/// Up to here an operand that sums along the innermost dimension is summed in f64.
const F64_TOTALS: usize = 1 << 16;

/// Plans a map over these extents.
pub fn plan(kernel: &Kernel, map: &Map, extents: &Extents) -> Plan {
    let mut builder = Builder::new(kernel, map, extents);
    for place in 0..map.steps.len() {
        if builder.live[place] {
            builder.step(place);
        }
    }
    builder.finish()
}

pub(super) struct Builder<'a> {
    kernel: &'a Kernel,
    pub(super) map: &'a Map,
    pub(super) lanes: &'static Lanes,
    pub(super) live: Vec<bool>,
    of_point: Vec<bool>,
    extents: &'a Extents,
    lens: Vec<usize>,
    /// The outer loops.
    outer: usize,
    rows: usize,
    row: usize,
    tile: usize,
    /// For each step, its register.
    pub(super) register: Vec<usize>,
    /// For each step, the product that is left to the step that uses it.
    pub(super) pending: Vec<Option<Pending>>,
    /// For each register.
    pub(super) class: Vec<Class>,
    /// For each register, whether it is the same in every tile.
    pub(super) fixed: Vec<bool>,
    before: Vec<Instr>,
    each: Vec<Instr>,
    stores: Vec<Instr>,
    totals: Vec<Total>,
    /// Registers of one class made from a register of another.
    widened: Vec<(usize, Class, usize)>,
    ones: Vec<(f32, usize)>,
}

fn live(steps: &[Step]) -> Vec<bool> {
    let mut live = vec![false; steps.len()];
    for (i, step) in steps.iter().enumerate().rev() {
        live[i] |= !step.defines();
        if live[i] {
            step.uses().iter().for_each(|r| live[*r] = true);
        }
    }
    live
}

impl<'a> Builder<'a> {
    fn new(kernel: &'a Kernel, map: &'a Map, extents: &'a Extents) -> Builder<'a> {
        let lens = extents.lens();
        let live = live(&map.steps);
        let of_point = map.of_point();
        let n = map.loops.len();
        let mut outer = n - map.row;
        let has_row = |access: &Access| access.iter().flatten().any(|l| (outer..n).contains(l));
        let needs_rows = map.steps.iter().enumerate().filter(|(i, _)| live[*i]).any(|(i, step)| match step {
            Step::Row(..) => true,
            Step::LoadAt { at, .. } => {
                of_point[i] && !of_point[*at] && !matches!(map.steps[*at], Step::Const(_))
            }
            Step::Store { access, of, .. } | Step::Accumulate { access, of, .. } => {
                !of_point[*of] && !has_row(access)
            }
            Step::Load { .. }
            | Step::Const(_)
            | Step::Iota(_)
            | Step::Random { .. }
            | Step::Unary(..)
            | Step::Binary(..)
            | Step::Add(_)
            | Step::Mul(..)
            | Step::Select(..)
            | Step::Cast(..) => false,
        });
        if !needs_rows {
            outer = n;
        }
        let mut builder = Builder {
            kernel,
            map,
            lanes: best(),
            of_point: if needs_rows { of_point } else { vec![false; map.steps.len()] },
            live,
            rows: lens[..outer].iter().product(),
            row: lens[outer..n].iter().product(),
            tile: 1,
            outer,
            extents,
            lens,
            register: vec![usize::MAX; map.steps.len()],
            pending: vec![None; map.steps.len()],
            class: Vec::new(),
            fixed: Vec::new(),
            before: Vec::new(),
            each: Vec::new(),
            stores: Vec::new(),
            totals: Vec::new(),
            widened: Vec::new(),
            ones: Vec::new(),
        };
        builder.tile = builder.tile_rows().clamp(1, builder.rows.max(1));
        builder
    }

    /// Rows of a tile. Where operands repeat along the outer dimensions, a tile is best a whole number of periods or
    /// a whole part of one, so that the repeated operand lies in one piece.
    fn tile_rows(&self) -> usize {
        if (0..self.map.steps.len()).any(|i| self.live[i] && self.of_point[i]) {
            return LANES / self.row.max(1);
        }
        let period = self
            .map
            .steps
            .iter()
            .filter_map(|step| match step {
                Step::Load { read, access } => {
                    self.walk(access, &self.extents.reads[*read], Class::Row).period()
                }
                Step::Accumulate { write, access, .. } => {
                    self.walk(access, &self.extents.writes[*write], Class::Row).period()
                }
                Step::LoadAt { .. }
                | Step::Const(_)
                | Step::Iota(_)
                | Step::Random { .. }
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Mul(..)
                | Step::Select(..)
                | Step::Cast(..)
                | Step::Row(..)
                | Step::Store { .. } => None,
            })
            .filter(|p| *p > 1)
            .max();
        let computes = |step: &Step| matches!(step, Step::Unary(..) | Step::Add(_) | Step::Mul(..));
        let steps = self.map.steps.iter().zip(&self.live).filter(|(step, live)| **live && computes(step));
        let lanes = if steps.count() < MANY { LANES } else { LANES / 2 };
        match period {
            Some(p) if p <= 2 * lanes => p * (lanes / p).max(1),
            Some(p) => (p / lanes..p / lanes + 64).find(|k| p % k == 0).map_or(lanes, |k| p / k),
            None => lanes,
        }
    }

    fn space(&self, class: Class) -> usize {
        match class {
            Class::Once => 0,
            Class::Tile | Class::Row => self.outer,
            Class::Point => self.map.loops.len(),
        }
    }

    /// A walk over an operand that is so long in memory along each loop.
    fn walk(&self, access: &Access, lies: &[usize], class: Class) -> Walk {
        let n = self.space(class);
        Walk::new(&self.lens[..n], &strides(access, lies)[..n])
    }

    /// The class of what lies at `access`, and whether it is the same in every tile.
    fn place(&self, place: usize, access: &Access, lies: &[usize]) -> (Class, bool) {
        let class = match self.of_point[place] {
            true => Class::Point,
            false if access.iter().flatten().any(|l| *l < self.outer) => Class::Row,
            false => Class::Once,
        };
        let walk = self.walk(access, lies, class);
        if class == Class::Row && self.outer == self.map.loops.len() && walk.is_same_in_each(self.tile) {
            return (Class::Tile, self.tile >= self.rows);
        }
        (class, self.is_fixed(&walk, class))
    }

    fn is_fixed(&self, walk: &Walk, class: Class) -> bool {
        let lanes = match class {
            Class::Once => return true,
            Class::Tile => return self.tile >= self.rows,
            Class::Row => self.tile,
            Class::Point => self.tile * self.row,
        };
        self.tile >= self.rows || walk.period().is_some_and(|p| lanes % p.max(1) == 0)
    }

    pub(super) fn emit(&mut self, code: Code, class: Class, fixed: bool) -> usize {
        let to = self.class.len();
        self.class.push(class);
        self.fixed.push(fixed);
        let list = if fixed { &mut self.before } else { &mut self.each };
        list.push(Instr { code, to, class, straight: None });
        to
    }

    pub(super) fn constant(&mut self, x: f64) -> usize {
        let x = x as f32;
        if let Some((_, r)) = self.ones.iter().find(|(y, _)| y.to_bits() == x.to_bits()) {
            return *r;
        }
        let r = self.emit(Code::Fill(x), Class::Once, true);
        self.ones.push((x, r));
        r
    }

    /// The same numbers with the lanes of a wider class.
    pub(super) fn widen(&mut self, r: usize, class: Class) -> usize {
        if self.class[r] == class {
            return r;
        }
        if let Some((_, _, wide)) = self.widened.iter().find(|(of, c, _)| *of == r && *c == class) {
            return *wide;
        }
        let code = if self.class[r] <= Class::Tile { Code::Spread(r) } else { Code::Expand(r) };
        let wide = self.emit(code, class, self.fixed[r]);
        self.widened.push((r, class, wide));
        wide
    }

    /// Whether a register is one number to an instruction of this class, or one a row.
    pub(super) fn is_number(&self, r: usize, class: Class) -> bool {
        match self.class[r] {
            Class::Once | Class::Tile => self.class[r] < class,
            Class::Row => class == Class::Point && (self.tile == 1 || self.row >= LONG),
            Class::Point => false,
        }
    }

    pub(super) fn two(&mut self, f: Pair, a: usize, b: usize) -> usize {
        let class = self.class[a].max(self.class[b]);
        let ways = (self.lanes.pair)(f);
        let by_row = |r: usize| self.class[r] == Class::Row;
        let code = if self.is_number(b, class) {
            Code::Numbered { f: ways.vs, a, b, by_row: by_row(b) }
        } else if self.is_number(a, class) {
            Code::Numbered { f: ways.sv, a, b, by_row: by_row(a) }
        } else {
            Code::Two(ways.vv, self.widen(a, class), self.widen(b, class))
        };
        let fixed = self.fixed[a] && self.fixed[b];
        self.emit(code, class, fixed)
    }

    fn step(&mut self, place: usize) {
        let map = self.map;
        let to = match &map.steps[place] {
            Step::Load { read, access } => self.load(place, *read, access, 0),
            Step::LoadAt { read, access, looked, at } if let Step::Const(c) = map.steps[*at] => {
                self.load_constant(place, *read, access, *looked, c)
            }
            Step::LoadAt { read, access, looked, at } => {
                let at = self.value(*at);
                self.load_at(place, *read, access, *looked, at)
            }
            Step::Const(c) => self.constant(*c),
            Step::Iota(l) => {
                let access = vec![iter::once(*l).collect()];
                let (class, fixed) = self.place(place, &access, &self.lens);
                let walk = self.walk(&access, &self.lens, class);
                let code = Code::Iota { start: self.extents.ranges[*l].start, along: *l, walk };
                self.emit(code, class, fixed)
            }
            Step::Random { draw, counter, inner } => {
                let counter = counter.map(|r| self.value(r));
                self.random(place, draw, counter, inner)
            }
            Step::Unary(Unary::Stop, r) => self.value(*r),
            Step::Unary(f, r) => {
                let r = self.value(*r);
                self.emit(Code::One((self.lanes.unary)(*f), r), self.class[r], self.fixed[r])
            }
            Step::Binary(f, a, b) => {
                let (a, b) = (self.value(*a), self.value(*b));
                self.two(Pair::Of(*f), a, b)
            }
            Step::Add(all) => self.sum(all),
            Step::Mul(scale, all) => match self.product(place, *scale, all) {
                Some(r) => r,
                None => return,
            },
            Step::Select(c, a, b) => {
                let all = [c, a, b].map(|r| self.value(*r));
                let class = all.map(|r| self.class[r]).into_iter().max().unwrap_or(Class::Once);
                let [c, a, b] = all;
                let (a, b) = (self.widen(a, class), self.widen(b, class));
                let fixed = self.fixed[c] && self.fixed[a] && self.fixed[b];
                let code = if self.class[c] <= Class::Tile {
                    Code::Pick(c, a, b)
                } else {
                    Code::Three(self.lanes.select, self.widen(c, class), a, b)
                };
                self.emit(code, class, fixed)
            }
            Step::Cast(dtype, r) => {
                let r = self.value(*r);
                let code = match dtype {
                    DType::F32 | DType::F64 => None,
                    DType::BF16 => Some(Code::One(self.lanes.round_bf16, r)),
                    DType::F16 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => {
                        Some(Code::Cast(*dtype, r))
                    }
                };
                code.map_or(r, |code| self.emit(code, self.class[r], self.fixed[r]))
            }
            Step::Row(Reduce::Sum, r) if let Some(sums) = self.row_sum(*r) => sums,
            Step::Row(reduce, r) => {
                let r = self.value(*r);
                let code = match self.class[r] {
                    Class::Point => Code::Reduce((self.lanes.rows)(*reduce), r),
                    Class::Once | Class::Tile | Class::Row => {
                        Code::ReduceSame(*reduce, self.widen(r, Class::Row))
                    }
                };
                self.emit(code, Class::Row, self.fixed[r])
            }
            Step::Store { write, access, of } => {
                let of = self.value(*of);
                let (class, of) = self.written(access, of);
                let (lies, dtype) = (&self.extents.writes[*write], self.kernel.writes[*write]);
                let walk = self.walk(access, lies, class);
                let code = Code::Store { write: *write, dtype, walk, of };
                return self.stores.push(Instr { code, to: usize::MAX, class, straight: None });
            }
            Step::Accumulate { write, access, of, reduce } => {
                let of = self.value(*of);
                let (class, of) = self.written(access, of);
                let lies = &self.extents.writes[*write];
                let walk = self.walk(access, lies, class);
                let (dtype, count) = (self.kernel.writes[*write], count(access, lies));
                let place = if walk.inner_stride() == 0 && count <= F64_TOTALS {
                    Place::F64(0)
                } else if dtype == DType::F32 {
                    Place::Operand
                } else {
                    Place::F32(0)
                };
                self.totals.push(Total { write: *write, dtype, count, reduce: *reduce, place });
                let code = Code::Accumulate { total: self.totals.len() - 1, walk, of };
                return self.each.push(Instr { code, to: usize::MAX, class, straight: None });
            }
        };
        self.register[place] = to;
    }

    /// A register to be written at `access`, with a lane for each element or contribution.
    fn written(&mut self, access: &Access, of: usize) -> (Class, usize) {
        let row = self.outer..self.map.loops.len();
        let class = if self.class[of] == Class::Point || access.iter().flatten().any(|l| row.contains(l)) {
            Class::Point
        } else {
            Class::Row
        };
        (class, self.widen(of, class))
    }

    /// Whether a step's lanes may be stored as they are.
    fn is_stored(&self, place: usize) -> bool {
        let same = |step: &Step| match step {
            Step::Unary(Unary::Stop, _) | Step::Cast(DType::F32 | DType::F64, _) => true,
            Step::Add(all) => all.len() == 1,
            Step::Mul(scale, all) => *scale == 1.0 && all.len() == 1,
            Step::Select(..) => true,
            Step::Load { .. }
            | Step::LoadAt { .. }
            | Step::Const(_)
            | Step::Iota(_)
            | Step::Random { .. }
            | Step::Unary(..)
            | Step::Binary(..)
            | Step::Cast(..)
            | Step::Row(..)
            | Step::Store { .. }
            | Step::Accumulate { .. } => false,
        };
        let mut aliases = vec![false; self.map.steps.len()];
        aliases[place] = true;
        for (i, step) in self.map.steps.iter().enumerate().skip(place + 1) {
            let uses = step.uses().iter().any(|r| aliases[*r]);
            if uses && matches!(step, Step::Store { .. }) {
                return true;
            }
            aliases[i] = uses && same(step);
        }
        false
    }

    /// A load at an index that is the same everywhere.
    fn load_constant(&mut self, place: usize, read: usize, access: &Access, looked: usize, at: f64) -> usize {
        let lies = &self.extents.reads[read];
        let index = at as f32 - self.extents.ranges[looked].start as f32;
        if !(0.0..self.lens[looked] as f32).contains(&index) {
            return self.constant(0.0);
        }
        self.load(place, read, access, index as usize * strides(access, lies)[looked])
    }

    /// A load of what lies at `access`, from the operand's element `offset` on.
    fn load(&mut self, place: usize, read: usize, access: &Access, offset: usize) -> usize {
        let lies = &self.extents.reads[read];
        let (class, fixed) = self.place(place, access, lies);
        let (dtype, walk) = (self.kernel.reads[read], self.walk(access, lies, class));
        let stored = self.is_stored(place);
        self.emit(Code::Load { read, dtype, walk, offset, stored }, class, fixed)
    }

    fn load_at(&mut self, place: usize, read: usize, access: &Access, looked: usize, at: usize) -> usize {
        let lies = &self.extents.reads[read];
        let (class, _) = self.place(place, access, lies);
        let class = class.max(self.class[at]);
        let by_row = class == Class::Point && self.class[at] < Class::Point;
        let at = self.widen(at, if by_row { Class::Row } else { class });
        let all = strides(access, lies);
        let (outer, n) = (self.outer, self.map.loops.len());
        let lookup = Lookup {
            read,
            dtype: self.kernel.reads[read],
            walk: self.walk(access, lies, if by_row { Class::Row } else { class }),
            inner: by_row.then(|| Walk::new(&self.lens[outer..n], &all[outer..n])),
            at,
            start: self.extents.ranges[looked].start,
            len: self.lens[looked],
            stride: all[looked],
        };
        let fixed =
            self.fixed[at] && (class == Class::Once || self.is_fixed(&self.walk(access, lies, class), class));
        self.emit(Code::LoadAt(lookup), class, fixed)
    }

    fn random(&mut self, place: usize, draw: &Draw, counter: [usize; 3], inner: &[usize]) -> usize {
        let access: Access = inner.iter().map(|l| iter::once(*l).collect()).collect();
        let (class, _) = self.place(place, &access, &self.lens);
        let class = counter.iter().map(|r| self.class[*r]).fold(class, Ord::max);
        let counter = counter.map(|r| self.widen(r, class));
        // Global strides: what a rank's neighbours along a loop are apart in the whole.
        let (mut strides, mut stride, mut start) = (vec![0; self.lens.len()], 1, 0);
        for l in inner.iter().rev() {
            strides[*l] = stride;
            start += self.extents.ranges[*l].start * stride;
            stride *= self.map.loops[*l].size;
        }
        let n = self.space(class);
        let walk = Walk::new(&self.lens[..n], &strides[..n]);
        let fixed = counter.iter().all(|r| self.fixed[*r]) && self.is_fixed(&walk, class);
        self.emit(Code::Random(Numbers { key: draw::key(draw), counter, start, strides, walk }), class, fixed)
    }

    /// Has what is stored as f32 computed where it is stored, the first time it is.
    fn straighten(&mut self) {
        for store in &self.stores {
            let Code::Store { write, dtype: DType::F32, walk, of } = &store.code else { continue };
            let writer = self.each.iter_mut().find(|i| i.to == *of && i.class == store.class);
            if let Some(instr) = writer {
                instr.straight.get_or_insert_with(|| (*write, walk.clone()));
            }
        }
    }

    fn finish(mut self) -> Plan {
        self.straighten();
        self.each.append(&mut self.stores);
        let mut lanes = 0;
        let mut take = |n: usize| {
            let offset = lanes;
            lanes += n.next_multiple_of(16);
            offset
        };
        for total in &mut self.totals {
            total.place = match total.place {
                Place::Operand => Place::Operand,
                Place::F32(_) => Place::F32(take(total.count)),
                Place::F64(_) => Place::F64(take(2 * total.count)),
            };
        }
        let (tile, row) = (self.tile, self.row);
        let size = |class| match class {
            Class::Once | Class::Tile => 1,
            Class::Row => tile,
            Class::Point => tile * row,
        };
        let mut last = vec![0; self.class.len()];
        for (i, instr) in self.each.iter().enumerate() {
            uses(&instr.code).into_iter().for_each(|r| last[r] = i);
        }
        // A register that may be another lasts as long as that.
        for instr in self.each.iter().rev() {
            if let Code::Pick(_, a, b) = instr.code {
                last[a] = last[a].max(last[instr.to]);
                last[b] = last[b].max(last[instr.to]);
            }
        }
        let mut registers: Vec<Register> =
            self.class.iter().map(|class| Register { class: *class, offset: 0 }).collect();
        for instr in &self.before {
            registers[instr.to].offset = take(size(instr.class));
        }
        // The destination is taken before operands are given back: instructions never work in place.
        let mut free: Vec<(Class, usize)> = Vec::new();
        for (i, instr) in self.each.iter().enumerate() {
            if instr.to != usize::MAX {
                let found = free.iter().rposition(|(class, _)| *class == instr.class);
                registers[instr.to].offset =
                    found.map_or_else(|| take(size(instr.class)), |f| free.remove(f).1);
            }
            let mut used = uses(&instr.code);
            used.sort_unstable();
            used.dedup();
            for r in used.into_iter().filter(|r| last[*r] == i && !self.fixed[*r]) {
                free.push((registers[r].class, registers[r].offset));
            }
        }
        let mut plan = Plan {
            registers,
            before: self.before,
            each: self.each,
            totals: self.totals,
            rows: self.rows,
            row,
            tile,
            parts: 0,
            lanes,
        };
        plan.parts = ahead::parts(&plan);
        plan
    }
}

/// The registers that an instruction reads.
fn uses(code: &Code) -> Vec<usize> {
    match code {
        Code::Fill(_) | Code::Load { .. } | Code::Iota { .. } => Vec::new(),
        Code::LoadAt(lookup) => vec![lookup.at],
        Code::Random(numbers) => numbers.counter.to_vec(),
        Code::One(_, r)
        | Code::Cast(_, r)
        | Code::Reduce(_, r)
        | Code::ReduceSame(_, r)
        | Code::Expand(r)
        | Code::Spread(r)
        | Code::Store { of: r, .. }
        | Code::Accumulate { of: r, .. } => vec![*r],
        Code::Two(_, a, b) | Code::Numbered { a, b, .. } => vec![*a, *b],
        Code::Three(_, a, b, c) | Code::Pick(a, b, c) => vec![*a, *b, *c],
        Code::Term(term) | Code::Sums(term) => term.operands.into_iter().filter(|r| *r != NOTHING).collect(),
    }
}
