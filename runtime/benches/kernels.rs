//! How fast kernels run on one thread, at the sizes of a small GPT: bytes of operands and results a second for maps,
//! operations a second for contractions. The first lines are what the machine can do.

mod measured;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ir::kernel::{Access, Body, Kernel, Loop, Map, Scatter, Step, TopK};
use ir::{Binary, DType, Reduce, Unary};
use measured::{Case, Memory, access, bench, count, loops, settings};

fn contract(name: &str, space: &str, a: &str, b: &str, out: &str) -> Case {
    measured::contract(name, DType::F32, space, [a, b, out])
}

/// A map that is written step by step.
struct Steps {
    loops: Vec<Loop>,
    looked: usize,
    steps: Vec<Step>,
    reads: Vec<(DType, usize)>,
    writes: Vec<usize>,
    in_place: Vec<(usize, usize)>,
}

impl Steps {
    fn new(space: &str, looked: usize) -> Steps {
        let (steps, reads, writes, in_place) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Steps { loops: loops(space), looked, steps, reads, writes, in_place }
    }

    fn push(&mut self, step: Step) -> usize {
        self.steps.push(step);
        self.steps.len() - 1
    }

    fn read(&mut self, dtype: DType, at: &str) -> (usize, Access) {
        let access = access(&self.loops, at);
        self.reads.push((dtype, count(&self.loops, &access)));
        (self.reads.len() - 1, access)
    }

    fn load(&mut self, at: &str) -> usize {
        let (read, access) = self.read(DType::F32, at);
        self.push(Step::Load { read, access })
    }

    fn load_index(&mut self, at: &str) -> usize {
        let (read, access) = self.read(DType::I32, at);
        self.push(Step::Load { read, access })
    }

    fn load_at(&mut self, at: &str, index: usize) -> usize {
        let (read, access) = self.read(DType::F32, at);
        let looked = self.loops.len() - self.looked;
        self.push(Step::LoadAt { read, access, looked, at: index })
    }

    fn add(&mut self, all: &[usize]) -> usize {
        self.push(Step::Add(all.into()))
    }

    fn mul(&mut self, scale: f64, all: &[usize]) -> usize {
        self.push(Step::Mul(scale, all.into()))
    }

    fn one(&mut self, f: Unary, r: usize) -> usize {
        self.push(Step::Unary(f, r))
    }

    fn two(&mut self, f: Binary, a: usize, b: usize) -> usize {
        self.push(Step::Binary(f, a, b))
    }

    fn constant(&mut self, x: f64) -> usize {
        self.push(Step::Const(x))
    }

    fn row(&mut self, reduce: Reduce, r: usize) -> usize {
        self.push(Step::Row(reduce, r))
    }

    fn store(&mut self, at: &str, of: usize) -> usize {
        let access = access(&self.loops, at);
        self.writes.push(count(&self.loops, &access));
        self.push(Step::Store { write: self.writes.len() - 1, access, of })
    }

    fn total(&mut self, at: &str, of: usize) {
        let access = access(&self.loops, at);
        self.writes.push(count(&self.loops, &access));
        let write = self.writes.len() - 1;
        self.push(Step::Accumulate { write, access, of, reduce: Reduce::Sum });
    }

    fn case(self, name: &str, row: usize) -> Case {
        let mut space = self.loops;
        let looked = space.split_off(space.len() - self.looked);
        let (dtypes, reads) = self.reads.into_iter().unzip();
        let writes = vec![DType::F32; self.writes.len()];
        let body = Body::Map(Map { loops: space, row, looked, steps: self.steps });
        let kernel = Kernel { reads: dtypes, writes, body };
        Case { name: name.into(), kernel, reads, writes: self.writes, in_place: self.in_place }
    }
}

fn gelu(rows: usize, columns: usize) -> Case {
    let mut s = Steps::new(&format!("b={rows} f={columns}"), 0);
    let (x, bias) = (s.load("b f"), s.load("f"));
    let x = s.add(&[x, bias]);
    let cube = s.mul(0.044715, &[x, x, x]);
    let sum = s.add(&[x, cube]);
    let inner = s.mul(0.797_884_560_8, &[sum]);
    let (t, one) = (s.one(Unary::Tanh, inner), s.constant(1.0));
    let t = s.add(&[one, t]);
    let y = s.mul(0.5, &[x, t]);
    s.store("b f", y);
    s.case(&format!("gelu of x + bias, {rows}x{columns}"), 0)
}

fn softmax(rows: usize, columns: usize) -> Case {
    let mut s = Steps::new(&format!("b={rows} t={columns}"), 0);
    let x = s.load("b t");
    let most = s.row(Reduce::Max, x);
    let x = s.two(Binary::Sub, x, most);
    let e = s.one(Unary::Exp, x);
    let sum = s.row(Reduce::Sum, e);
    let y = s.two(Binary::Div, e, sum);
    s.store("b t", y);
    s.case(&format!("softmax, {rows} rows of {columns}"), 1)
}

fn causal_softmax() -> Case {
    let mut s = Steps::new("b=8 h=6 s=256 t=256", 0);
    let x = s.load("b h s t");
    let x = s.mul(0.125, &[x]);
    let (i, j) = (s.push(Step::Iota(2)), s.push(Step::Iota(3)));
    let (mask, low) = (s.two(Binary::Ge, i, j), s.constant(f64::NEG_INFINITY));
    let x = s.push(Step::Select(mask, x, low));
    let most = s.row(Reduce::Max, x);
    let x = s.two(Binary::Sub, x, most);
    let e = s.one(Unary::Exp, x);
    let sum = s.row(Reduce::Sum, e);
    let y = s.two(Binary::Div, e, sum);
    s.store("b h s t", y);
    s.case("causal softmax, 8x6x256 rows of 256", 1)
}

fn layernorm(rows: usize, columns: usize) -> Case {
    let mut s = Steps::new(&format!("b={rows} d={columns}"), 0);
    let (x, g, b) = (s.load("b d"), s.load("d"), s.load("d"));
    let sum = s.row(Reduce::Sum, x);
    let mean = s.mul(1.0 / columns as f64, &[sum]);
    let x = s.two(Binary::Sub, x, mean);
    let square = s.mul(1.0, &[x, x]);
    let sum = s.row(Reduce::Sum, square);
    let var = s.mul(1.0 / columns as f64, &[sum]);
    let eps = s.constant(1e-5);
    let var = s.add(&[var, eps]);
    let r = s.one(Unary::Rsqrt, var);
    let x = s.mul(1.0, &[x, r, g]);
    let y = s.add(&[x, b]);
    s.store("b d", y);
    s.case(&format!("layer norm, {rows} rows of {columns}"), 1)
}

fn adamw() -> Case {
    let mut s = Steps::new("d=1048576", 0);
    let (w, m, v, g) = (s.load("d"), s.load("d"), s.load("d"), s.load("d"));
    let (lr, c1, c2, clip) = (s.load(""), s.load(""), s.load(""), s.load(""));
    let g = s.mul(1.0, &[g, clip]);
    let (m, g1) = (s.mul(0.9, &[m]), s.mul(0.1, &[g]));
    let m = s.add(&[m, g1]);
    let (v, g2) = (s.mul(0.95, &[v]), s.mul(0.05, &[g, g]));
    let v = s.add(&[v, g2]);
    let (mh, vh) = (s.mul(1.0, &[m, c1]), s.mul(1.0, &[v, c2]));
    let (root, eps) = (s.one(Unary::Sqrt, vh), s.constant(1e-8));
    let root = s.add(&[root, eps]);
    let step = s.two(Binary::Div, mh, root);
    let decay = s.mul(0.1, &[w]);
    let step = s.add(&[step, decay]);
    let step = s.mul(1.0, &[step, lr]);
    let w = s.two(Binary::Sub, w, step);
    s.store("d", w);
    s.store("d", m);
    s.store("d", v);
    s.in_place = vec![(0, 0), (1, 1), (2, 2)];
    s.case("adamw in place, 1048576", 0)
}

fn cross_entropy() -> Case {
    let mut s = Steps::new("b=2048 v=4096 l=4096", 1);
    let x = s.load("b v");
    let most = s.row(Reduce::Max, x);
    let x = s.two(Binary::Sub, x, most);
    let e = s.one(Unary::Exp, x);
    let sum = s.row(Reduce::Sum, e);
    let sum = s.one(Unary::Log, sum);
    let lse = s.add(&[sum, most]);
    let label = s.load_index("b");
    let picked = s.load_at("b l", label);
    // It is the same operand.
    s.reads.pop();
    let Some(Step::LoadAt { read, .. }) = s.steps.last_mut() else { unreachable!("it was just pushed") };
    *read = 0;
    let loss = s.two(Binary::Sub, lse, picked);
    s.store("b", lse);
    s.total("", loss);
    s.case("cross entropy, 2048 rows of 4096", 1)
}

fn cross_entropy_gradient() -> Case {
    let mut s = Steps::new("b=2048 v=4096", 0);
    let (x, lse, label) = (s.load("b v"), s.load("b"), s.load_index("b"));
    let x = s.two(Binary::Sub, x, lse);
    let p = s.one(Unary::Exp, x);
    let i = s.push(Step::Iota(1));
    let hit = s.two(Binary::Eq, i, label);
    let p = s.two(Binary::Sub, p, hit);
    let y = s.mul(0.01, &[p]);
    s.store("b v", y);
    s.case("cross entropy's gradient, 2048 rows of 4096", 1)
}

fn others() -> Vec<Case> {
    let mut bias = Steps::new("b=2048 f=1536", 0);
    let x = bias.load("b f");
    bias.total("f", x);
    let mut norm = Steps::new("d=4194304", 0);
    let x = norm.load("d");
    let x = norm.mul(1.0, &[x, x]);
    norm.total("", x);
    let mut add = Steps::new("b=2048 d=384", 0);
    let (x, y) = (add.load("b d"), add.load("b d"));
    let x = add.add(&[x, y]);
    add.store("b d", x);
    let mut copy = Steps::new("b=8 s=256 h=6 e=64", 0);
    let x = copy.load("b s h e");
    copy.store("b h s e", x);
    let mut embed = Steps::new("b=8 s=256 d=384 v=4096", 1);
    let index = embed.load_index("b s");
    let x = embed.load_at("v d", index);
    embed.store("b s d", x);
    let space = loops("b=8 s=256 d=384 v=4096");
    let [source, index, out] = ["b s d", "b s", "v d"].map(|t| access(&space, t));
    let (reads, writes) = (vec![2048 * 384, 2048], vec![4096 * 384]);
    let body = Body::Scatter(Scatter { loops: space, source, index, out, looked: 3 });
    let kernel = Kernel { reads: vec![DType::F32, DType::I32], writes: vec![DType::F32], body };
    let space = loops("b=8 s=256 v=4096 k=8 two=2");
    let [source, out] = ["b s v", "b s k two"].map(|t| access(&space, t));
    let body = Body::TopK(TopK { loops: space, source, out, searched: 2 });
    let top = Kernel { reads: vec![DType::F32], writes: vec![DType::F32], body };
    let (logits, pairs) = (vec![2048 * 4096], vec![2048 * 16]);
    vec![
        bias.case("bias gradient, 2048x1536", 0),
        norm.case("sum of squares, 4194304", 0),
        add.case("residual, 2048x384", 0),
        copy.case("transpose, 8x256x6x64", 0),
        embed.case("embedding, 2048x384", 1),
        Case { name: "embedding's gradient, 2048x384".into(), kernel, reads, writes, in_place: Vec::new() },
        Case {
            name: "top 8, 2048x4096".into(),
            kernel: top,
            reads: logits,
            writes: pairs,
            in_place: Vec::new(),
        },
    ]
}

fn kernels(c: &mut Criterion) {
    let [mut x, mut y] = [0; 2].map(|_| Memory::filled(DType::F32, 2048 * 2048));
    let mut group = c.benchmark_group("machine");
    for (name, n) in
        [("memcpy, 16.8 MB to 16.8 MB", 4 * 2048 * 2048), ("memcpy, 0.5 MB to 0.5 MB", 4 * 256 * 512)]
    {
        group.throughput(Throughput::BytesDecimal(2 * n as u64));
        group.bench_function(name, |b| {
            b.iter(|| black_box(&mut y.bytes()[..n]).copy_from_slice(black_box(&x.bytes()[..n])));
        });
    }
    group.finish();
    for case in [
        contract("matmul 1024^3", "m=1024 k=1024 n=1024", "m k", "k n", "m n"),
        contract("x w, 1024 x 384 x 1536", "b=4 s=256 d=384 f=1536", "b s d", "d f", "b s f"),
        contract("x w, 1024 x 1536 x 384", "b=4 s=256 f=1536 d=384", "b s f", "f d", "b s d"),
        contract("dy w^T, 1024 x 1536 x 384", "b=4 s=256 d=384 f=1536", "b s f", "d f", "b s d"),
        contract("x^T dy, 384 x 1024 x 1536", "b=4 s=256 d=384 f=1536", "b s d", "b s f", "d f"),
        contract("x w^T to logits, 1024 x 384 x 4096", "b=4 s=256 d=384 v=4096", "b s d", "v d", "b s v"),
        contract("dlogits w, 1024 x 4096 x 384", "b=4 s=256 d=384 v=4096", "b s v", "v d", "b s d"),
        contract("dlogits^T x, 4096 x 1024 x 384", "b=4 s=256 d=384 v=4096", "b s v", "b s d", "v d"),
        contract("q k^T", "b=4 s=256 t=256 h=6 e=64", "b s h e", "b t h e", "b h s t"),
        contract("p v", "b=4 s=256 t=256 h=6 e=64", "b h s t", "b t h e", "b s h e"),
        contract("dp^T q", "b=4 s=256 t=256 h=6 e=64", "b h s t", "b s h e", "b t h e"),
        contract("x w to heads", "b=4 s=256 d=384 h=6 e=64", "b s d", "d h e", "b s h e"),
        contract("vector matrix, 2048 x 2048", "k=2048 n=2048", "k", "k n", "n"),
        contract("matrix vector, 2048 x 2048", "k=2048 n=2048", "k", "n k", "n"),
        contract("product of elements, 65536", "a=65536", "a", "a", "a"),
    ] {
        bench(c, "cpu", &case);
    }
    for case in [
        gelu(2048, 2048),
        gelu(256, 512),
        softmax(2048, 2048),
        layernorm(2048, 2048),
        gelu(2048, 1536),
        causal_softmax(),
        layernorm(2048, 384),
        adamw(),
        cross_entropy(),
        cross_entropy_gradient(),
    ] {
        bench(c, "cpu", &case);
    }
    others().iter().for_each(|case| bench(c, "cpu", case));
}

criterion_group! {
    name = benches;
    config = settings();
    targets = kernels
}
criterion_main!(benches);
