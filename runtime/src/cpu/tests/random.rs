//! Random kernels of every kind, on random meshes, from a seed.

use std::ops::Range;

use ir::kernel::{Access, Body, Contract, Kernel, Loop, Map, Scatter, Step, TopK};
use ir::{Axes, Axis, Binary, DType, Draw, Mesh, Reduce, Unary};

use smallvec::smallvec;

use crate::cpu::layout::ranges;
use crate::cpu::plain::elements;

/// A kernel, where it runs, and what it reads; `(w, r)` in `in_place`: result w lies in operand r.
#[derive(Debug)]
pub struct Case {
    pub kernel: Kernel,
    pub mesh: Mesh,
    pub at: Vec<usize>,
    pub reads: Vec<Vec<f64>>,
    pub in_place: Vec<(usize, usize)>,
}

/// Draws numbers.
pub struct Dice(pub u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    fn shuffled(&mut self, mut all: Vec<usize>) -> Vec<usize> {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }

    /// An access over these loops: mostly in order, sometimes not, with merged and empty dimensions.
    fn access(&mut self, loops: &[usize]) -> Access {
        let mut loops = loops.to_vec();
        if self.one_in(3) {
            loops = self.shuffled(loops);
        }
        let mut access = Access::new();
        for l in loops {
            if self.one_in(10) {
                access.push(smallvec![]);
            }
            match access.last_mut() {
                Some(dim) if self.one_in(4) => dim.push(l),
                Some(_) | None => access.push(smallvec![l]),
            }
        }
        access
    }

    fn subset(&mut self, loops: &[usize], one_in: usize) -> Vec<usize> {
        loops.iter().copied().filter(|_| !self.one_in(one_in)).collect()
    }
}

struct World {
    dice: Dice,
    mesh: Mesh,
    at: Vec<usize>,
    loops: Vec<Loop>,
    ranges: Vec<Range<usize>>,
}

fn world(seed: u64, dims: usize, most: usize) -> World {
    let mut dice = Dice(seed);
    let mesh = Mesh::parse(dice.of(&["", "a=2", "a=2,b=3", "a=4"])).unwrap();
    let at = mesh.coordinate(dice.below(mesh.ranks()));
    let mut axes: Vec<Axis> = mesh.all().collect();
    let mut loops = Vec::new();
    let mut points = 1;
    for i in 0..dims {
        let mut size = dice.of(&[1, 2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 100, 700, 2500]);
        while size * points > most {
            size = size.div_ceil(3);
        }
        let mut split = Axes::new();
        while !axes.is_empty() && dice.one_in(3) {
            let i = dice.below(axes.len());
            split.push(axes.remove(i));
        }
        points *= size;
        loops.push(Loop { name: format!("l{i}").as_str().into(), size, axes: split });
    }
    let ranges = ranges(&loops.iter().collect::<Vec<_>>(), &mesh, &at);
    World { dice, mesh, at, loops, ranges }
}

impl World {
    /// Numbers that every type but the integers holds exactly.
    fn numbers(&mut self, access: &Access, dtype: DType) -> Vec<f64> {
        let n = elements(access, &self.ranges);
        let whole = matches!(dtype, DType::I64 | DType::I32);
        (0..n)
            .map(|_| {
                let x = self.dice.below(33) as f64 / 8.0 - 2.0;
                match dtype {
                    DType::Bool => f64::from(u8::from(x > 0.0)),
                    DType::U32 => x.abs().floor(),
                    DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::I64 | DType::I32 => {
                        if whole {
                            x.floor()
                        } else {
                            x
                        }
                    }
                }
            })
            .collect()
    }

    /// Indices along a loop, some of them outside of it.
    fn indices(&mut self, access: &Access, looked: usize) -> Vec<f64> {
        let (n, size) = (elements(access, &self.ranges), self.loops[looked].size);
        (0..n).map(|_| self.dice.below(size + 2) as f64 - 1.0).collect()
    }

    fn case(self, kernel: Kernel, reads: Vec<Vec<f64>>, in_place: Vec<(usize, usize)>) -> Case {
        Case { kernel, mesh: self.mesh, at: self.at, reads, in_place }
    }
}

/// A random contraction.
pub fn contract(seed: u64) -> Case {
    let dims = 1 + (seed % 5) as usize;
    let mut w = world(seed, dims, 20_000);
    let mut has: [Vec<usize>; 3] = Default::default();
    for l in 0..dims {
        // Mostly loops of two operands, sometimes of one or none.
        let kind = w.dice.of(&[3, 5, 6, 7, 3, 5, 6, 7, 1, 2, 4, 0]);
        (0..3).filter(|i| kind >> i & 1 == 1).for_each(|i| has[i].push(l));
    }
    let [a, b, out] = has.map(|loops| w.dice.access(&loops));
    let reads = vec![w.numbers(&a, DType::F32), w.numbers(&b, DType::F32)];
    let (f32, bf16) = (DType::F32, DType::BF16);
    let [of_a, of_b, of_out] =
        w.dice.of(&[[f32; 3], [f32; 3], [bf16, bf16, f32], [bf16; 3], [bf16, f32, f32], [f32, bf16, bf16]]);
    let contract = Contract { loops: w.loops.clone(), a, b, out, scale: w.dice.of(&[1.0, 1.0, -0.5, 0.125]) };
    let kernel = Kernel { reads: vec![of_a, of_b], writes: vec![of_out], body: Body::Contract(contract) };
    w.case(kernel, reads, Vec::new())
}

/// A random scatter.
pub fn scatter(seed: u64) -> Case {
    let dims = 2 + (seed % 3) as usize;
    let mut w = world(seed, dims, 5_000);
    let looked = w.dice.below(dims);
    let others: Vec<usize> = (0..dims).filter(|l| *l != looked).collect();
    let (index, source, out) =
        (w.dice.subset(&others, 2), w.dice.subset(&others, 6), w.dice.subset(&others, 2));
    let (index, source) = (w.dice.access(&index), w.dice.access(&source));
    let out: Vec<usize> = std::iter::once(looked).chain(out).collect();
    let out = w.dice.access(&out);
    let reads = vec![w.numbers(&source, DType::F32), w.indices(&index, looked)];
    let scatter = Scatter { loops: w.loops.clone(), source, index, out, looked };
    let wide = w.dice.of(&[DType::I32, DType::I64]);
    let kernel =
        Kernel { reads: vec![DType::F32, wide], writes: vec![DType::F32], body: Body::Scatter(scatter) };
    w.case(kernel, reads, Vec::new())
}

/// A random search, along any loop.
pub fn top_k(seed: u64) -> Case {
    let dims = 1 + (seed % 4) as usize;
    let mut w = world(seed, dims, 5_000);
    let searched = w.dice.below(dims);
    let source = w.dice.access(&(0..dims).collect::<Vec<_>>());
    let kept: Vec<usize> = (0..dims).filter(|l| *l != searched).collect();
    let mut out = w.dice.access(&kept);
    out.extend([smallvec![dims], smallvec![dims + 1]]);
    let k = w.dice.of(&[1, 1, 2, 3, 8, 40]);
    for (name, size) in [("k", k), ("two", 2)] {
        w.loops.push(Loop { name: name.into(), size, axes: Axes::new() });
        w.ranges.push(0..size);
    }
    let dtype = if w.dice.one_in(2) { DType::F32 } else { w.dice.of(&[DType::F64, DType::F16, DType::BF16]) };
    let mut numbers = w.numbers(&source, dtype);
    for x in numbers.iter_mut() {
        if w.dice.one_in(50) {
            *x = w.dice.of(&[f64::NAN, f64::NEG_INFINITY, f64::INFINITY, -0.0]);
        }
    }
    let body = Body::TopK(TopK { loops: w.loops.clone(), source, out, searched });
    let kernel = Kernel { reads: vec![dtype], writes: vec![DType::F32], body };
    w.case(kernel, vec![numbers], Vec::new())
}

/// What is known of a register: the largest it can be, and whether f32 holds it exactly.
#[derive(Clone, Copy)]
struct Known {
    bound: f64,
    exact: bool,
}

/// A map that grows step by step.
struct Growing {
    w: World,
    map: Map,
    known: Vec<Known>,
    kernel: Kernel,
    reads: Vec<Vec<f64>>,
}

impl Growing {
    fn push(&mut self, step: Step, bound: f64, exact: bool) -> usize {
        self.map.steps.push(step);
        self.known.push(Known { bound, exact });
        self.known.len() - 1
    }

    /// A register that is defined.
    fn any(&mut self, fits: impl Fn(&Known) -> bool) -> Option<usize> {
        let defined = |i: &usize| self.map.steps[*i].defines() && fits(&self.known[*i]);
        let all: Vec<usize> = (0..self.known.len()).filter(defined).collect();
        (!all.is_empty()).then(|| self.w.dice.of(&all))
    }

    fn space(&self) -> Vec<usize> {
        (0..self.map.loops.len()).collect()
    }

    fn load(&mut self, access: Access, dtype: DType, numbers: Vec<f64>, bound: f64) -> usize {
        self.kernel.reads.push(dtype);
        self.reads.push(numbers);
        self.push(Step::Load { read: self.reads.len() - 1, access }, bound, true)
    }

    fn random_load(&mut self) {
        let loops = if self.w.dice.one_in(2) { self.space() } else { self.w.dice.subset(&self.space(), 2) };
        let access = self.w.dice.access(&loops);
        let dtype = if self.w.dice.one_in(2) { DType::F32 } else { self.w.dice.of(&DType::ALL) };
        let numbers = self.w.numbers(&access, dtype);
        self.load(access, dtype, numbers, 2.0);
    }

    fn load_at(&mut self) {
        let looked = self.map.loops.len();
        let loops = self.w.dice.subset(&self.space(), 3);
        let access = self.w.dice.access(&loops);
        let numbers = self.w.indices(&access, looked);
        let whole = self.w.dice.of(&[DType::I32, DType::I64]);
        let at = self.load(access, whole, numbers, 3000.0);
        let loops: Vec<usize> = self.w.dice.subset(&self.space(), 2).into_iter().chain([looked]).collect();
        let access = self.w.dice.access(&loops);
        let dtype = self.w.dice.of(&[DType::F32, DType::F32, DType::BF16, DType::F16]);
        self.reads.push(self.w.numbers(&access, dtype));
        self.kernel.reads.push(dtype);
        self.push(Step::LoadAt { read: self.reads.len() - 1, access, looked, at }, 2.0, true);
    }

    fn grow(&mut self) {
        let fits = |k: &Known| k.bound < 50.0;
        let Some(a) = self.any(fits) else { return };
        let b = self.any(fits).unwrap_or(a);
        let [ka, kb] = [self.known[a], self.known[b]];
        let sum = ka.bound + kb.bound;
        match self.w.dice.below(15) {
            0 => self.random_load(),
            1 => self.load_at(),
            2 => {
                let l = self.w.dice.below(self.map.loops.len());
                self.push(Step::Iota(l), self.w.loops[l].size as f64, true);
            }
            3 => {
                let c = self.w.dice.of(&[0.5, -1.0, 2.0]);
                self.push(Step::Const(c), 2.0, true);
            }
            4 => {
                let f = self.w.dice.of(&[Unary::Tanh, Unary::Sigmoid, Unary::Sin, Unary::Cos]);
                self.push(Step::Unary(f, a), 1.0, false);
            }
            5 => {
                let Some(r) = self.any(|k| k.bound <= 3.0) else { return };
                let f = self.w.dice.of(&[Unary::Exp, Unary::Expm1]);
                self.push(Step::Unary(f, r), 21.0, false);
            }
            6 => {
                let f = self.w.dice.of(&[Unary::Relu, Unary::Abs, Unary::Stop]);
                self.push(Step::Unary(f, a), ka.bound, ka.exact);
            }
            7 => {
                let Some(r) = self.any(|k| k.exact) else { return };
                let f = self.w.dice.of(&[Unary::Sign, Unary::Step]);
                self.push(Step::Unary(f, r), 1.0, true);
            }
            8 => {
                // Something positive, for what needs it.
                let r = self.push(Step::Unary(Unary::Abs, a), ka.bound, ka.exact);
                let half = self.push(Step::Const(0.5), 0.5, true);
                let r = self.push(Step::Add(smallvec![r, half]), ka.bound + 0.5, false);
                match self.w.dice.below(4) {
                    0 => self.push(Step::Unary(Unary::Log, r), ka.bound + 1.0, false),
                    1 => self.push(Step::Unary(Unary::Sqrt, r), ka.bound + 1.0, false),
                    2 => self.push(Step::Unary(Unary::Rsqrt, r), 1.5, false),
                    _ => self.push(Step::Binary(Binary::Div, b, r), 2.0 * kb.bound, false),
                };
            }
            9 => {
                let f = self.w.dice.of(&[Binary::Max, Binary::Min]);
                self.push(Step::Binary(f, a, b), ka.bound.max(kb.bound), ka.exact && kb.exact);
                self.push(Step::Binary(Binary::Sub, a, b), sum, false);
            }
            10 => {
                let (Some(a), Some(b)) = (self.any(|k| k.exact), self.any(|k| k.exact)) else { return };
                let f = self.w.dice.of(&[Binary::Eq, Binary::Ge]);
                let c = self.push(Step::Binary(f, a, b), 1.0, true);
                if let (Some(a), Some(b)) = (self.any(fits), self.any(fits)) {
                    let exact = self.known[a].exact && self.known[b].exact;
                    self.push(Step::Select(c, a, b), self.known[a].bound.max(self.known[b].bound), exact);
                }
            }
            11 => {
                let c = self.any(fits).unwrap_or(a);
                let more = sum + self.known[c].bound;
                let all = self.w.dice.of(&[vec![], vec![a], vec![a, b], vec![a, b, c]]);
                self.push(Step::Add(all.into()), more, false);
            }
            12 => {
                let all = self.w.dice.of(&[vec![], vec![a], vec![a, b]]);
                let scale = self.w.dice.of(&[1.0, 0.25, -0.5]);
                let bound = ka.bound.max(1.0) * kb.bound.max(1.0);
                self.push(Step::Mul(scale, all.into()), bound, false);
            }
            13 => {
                let counter = [(); 3].map(|()| self.any(|k| k.exact && k.bound < 1e6).unwrap_or(a));
                if counter.iter().any(|r| !self.known[*r].exact || !self.known[*r].bound.is_finite()) {
                    return;
                }
                let inner = self.w.dice.subset(&self.space(), 2);
                let inner = if self.w.dice.one_in(2) { inner } else { self.w.dice.shuffled(inner) };
                let draw = Draw { name: "x".into(), seed: self.w.dice.below(3) as u64 };
                self.push(Step::Random { draw, counter, inner: inner.into() }, 1.0, true);
            }
            _ => {
                if self.w.dice.one_in(3) {
                    let Some(r) = self.any(|k| k.exact) else { return };
                    let dtype = self.w.dice.of(&DType::ALL);
                    let exact = dtype != DType::U32;
                    self.push(Step::Cast(dtype, r), self.known[r].bound + 1.0, exact);
                    return;
                }
                let points =
                    self.map.loops.iter().rev().take(self.map.row).map(|l| l.size).product::<usize>();
                if self.w.dice.one_in(2) {
                    self.push(Step::Row(Reduce::Max, a), f64::INFINITY, ka.exact);
                } else {
                    self.push(Step::Row(Reduce::Sum, a), ka.bound * points as f64, false);
                }
            }
        }
    }

    fn write(&mut self) {
        let Some(of) = self.any(|_| true) else { return };
        let (space, outer) = (self.space(), self.map.loops.len() - self.map.row);
        let point = self.map.of_point()[of];
        let known = self.known[of];
        let dtype = match self.w.dice.below(8) {
            0 => DType::F64,
            1 => DType::BF16,
            2 if known.exact => DType::I32,
            3 if known.exact => DType::Bool,
            4 if known.exact && known.bound < 1e4 => DType::F16,
            _ => DType::F32,
        };
        self.kernel.writes.push(dtype);
        let write = self.kernel.writes.len() - 1;
        let whole = known.bound.is_finite() || dtype == DType::F32;
        if self.w.dice.one_in(2) && whole && matches!(dtype, DType::F32 | DType::F64) {
            let loops = self.w.dice.subset(&space, 2);
            let access = self.w.dice.access(&loops);
            let reduce = self.w.dice.of(&[Reduce::Sum, Reduce::Max]);
            self.push(Step::Accumulate { write, access, of, reduce }, 0.0, false);
        } else {
            let row = !point && self.w.dice.one_in(2);
            let access = self.w.dice.access(&space[..if row { outer } else { space.len() }]);
            self.push(Step::Store { write, access, of }, 0.0, false);
        }
    }
}

/// A random map.
pub fn map(seed: u64) -> Case {
    let dims = 1 + (seed % 4) as usize;
    // The last loop is only looked up.
    let mut w = world(seed, dims + 1, 6_000);
    let row = w.dice.below(dims + 1);
    let (loops, looked) = (w.loops[..dims].to_vec(), w.loops[dims..].to_vec());
    let map = Map { loops, row, looked, steps: Vec::new() };
    let kernel = Kernel { reads: Vec::new(), writes: Vec::new(), body: Body::Map(map.clone()) };
    let mut g = Growing { w, map, known: Vec::new(), kernel, reads: Vec::new() };
    g.random_load();
    for _ in 0..2 + g.w.dice.below(14) {
        g.grow();
        if g.w.dice.one_in(6) {
            g.write();
        }
    }
    g.write();
    g.write();
    let in_place = in_place(&g);
    let Growing { w, map, mut kernel, reads, .. } = g;
    kernel.body = Body::Map(map);
    w.case(kernel, reads, in_place)
}

/// Results that can lie in operands: of the same type and access.
fn in_place(g: &Growing) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for step in &g.map.steps {
        let Step::Store { write, access, .. } = step else { continue };
        let covers = (0..g.map.loops.len()).all(|l| access.iter().flatten().any(|f| *f == l));
        for other in &g.map.steps {
            let Step::Load { read, access: from } = other else { continue };
            let same = from == access && g.kernel.reads[*read] == g.kernel.writes[*write];
            if covers && same && !found.iter().any(|(w, r)| w == write || r == read) {
                found.push((*write, *read));
            }
        }
    }
    found
}
