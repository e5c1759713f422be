//! The kernel of a node: a matrix product is a contraction, a sum by index a scatter, a top-k itself, everything else a map.

use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use ir::kernel::{Access, Body, Contract, Kernel, Loop, Map, Register, Registers, Scatter, Step, TopK};
use ir::program::Buffer;
use ir::signature::{Dim, plain, unnamed};
use ir::{Axes, Binary, DType, Factor, Node, Op, Reduce, ShardedGraph, Signature, Value};

/// The kernels that are written: what computes the same on operands that are alike has one together.
#[derive(Default)]
pub(super) struct Kernels<'a> {
    nodes: FxHashMap<Does<'a>, Written>,
    plain: FxHashMap<Like, Arc<Kernel>>,
}

/// What is done, and what a buffer is like that it is done to.
type Like = (Plain, DType, Vec<usize>, Vec<Axes>);

/// A kernel, and which operands of its node it reads.
type Written = (Arc<Kernel>, Vec<usize>);

impl<'a> Kernels<'a> {
    /// The kernel of node `i`, and which of the node's operands it reads.
    pub(super) fn of(&mut self, sharded: &'a ShardedGraph, i: usize) -> &Written {
        self.nodes.entry(Does::of(sharded, i)).or_insert_with(|| {
            let (kernel, reads) = kernel(sharded, i);
            (Arc::new(kernel), reads)
        })
    }

    /// A kernel on what is like a buffer.
    pub(super) fn plain(&mut self, plain: Plain, like: &Buffer) -> Arc<Kernel> {
        let key = (plain, like.dtype, like.shape.clone(), like.sharding.dims.clone());
        let write = || match plain {
            Plain::Copy => each(like, 1, |access| vec![Step::Load { read: 0, access }]),
            Plain::Zero => each(like, 0, |_| vec![Step::Const(0.0)]),
            Plain::Add => each(like, 2, |access| {
                let load = |read| Step::Load { read, access: access.clone() };
                vec![load(0), load(1), Step::Add(smallvec![0, 1])]
            }),
        };
        self.plain.entry(key).or_insert_with(|| Arc::new(write())).clone()
    }
}

/// What is done without a node of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Plain {
    /// What is read is written.
    Copy,
    /// What is written is 0.
    Zero,
    /// What is written is the sum of two.
    Add,
}

/// What the kernel of a node depends on.
#[derive(PartialEq)]
struct Does<'a> {
    op: &'a Op,
    /// The op's, since 0 and -0 are equal, but not the same.
    number: u64,
    signature: &'a Arc<Signature>,
    sizes: &'a [usize],
    split: &'a [Axes],
    /// The types of operands and results.
    types: SmallVec<[DType; 8]>,
    /// For each operand the first that is the same value.
    same: SmallVec<[usize; 8]>,
}

impl<'a> Does<'a> {
    fn of(sharded: &'a ShardedGraph, i: usize) -> Does<'a> {
        let node = &sharded.graph.nodes[i];
        let values = node.args.iter().chain(&node.results);
        let first = |v| node.args.iter().position(|w| w == v).unwrap_or(0);
        Does {
            op: &node.op,
            number: node.op.number(),
            signature: &node.signature,
            sizes: &node.sizes,
            split: &sharded.decisions.strategies[i].split,
            types: values.map(|v| sharded.graph.ty(*v).dtype).collect(),
            same: node.args.iter().map(first).collect(),
        }
    }
}

// Only a number that is none differs from itself; such a kernel is written anew.
impl Eq for Does<'_> {}

impl Hash for Does<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (discriminant(self.op), self.number, self.sizes, self.split).hash(state);
        (&self.types, &self.same).hash(state);
    }
}

/// The kernel of node `i`, and which of the node's operands it reads.
fn kernel(sharded: &ShardedGraph, i: usize) -> (Kernel, Vec<usize>) {
    let node = &sharded.graph.nodes[i];
    let split = &sharded.decisions.strategies[i].split;
    let one = |f: Factor| Loop {
        name: node.signature.factors[f].clone(),
        size: node.sizes[f],
        axes: split[f].clone(),
    };
    let dtype = |v: &Value| sharded.graph.ty(*v).dtype;
    let writes = vec![dtype(&node.results[0])];
    if let Some(scale) = contraction(node) {
        let loops = (0..node.sizes.len()).map(one).collect();
        let (a, b) = (node.signature.args[0].clone(), node.signature.args[1].clone());
        let out = node.signature.results[0].clone();
        let reads = node.args.iter().map(dtype).collect();
        let body = Body::Contract(Contract { loops, a, b, out, scale });
        return (Kernel { reads, writes, body }, (0..node.args.len()).collect());
    }
    if let Some(looked) = summed_by_index(node) {
        let loops = (0..node.sizes.len()).map(one).collect();
        let (source, index) = (node.signature.args[0].clone(), node.signature.args[1].clone());
        let out = node.signature.results[0].clone();
        let reads = node.args.iter().map(dtype).collect();
        let body = Body::Scatter(Scatter { loops, source, index, out, looked });
        return (Kernel { reads, writes, body }, (0..node.args.len()).collect());
    }
    if let Some(searched) = node.op.searched(&node.signature) {
        let loops = (0..node.sizes.len()).map(one).collect();
        let (source, out) = (node.signature.args[0].clone(), node.signature.results[0].clone());
        let reads = node.args.iter().map(dtype).collect();
        let body = Body::TopK(TopK { loops, source, out, searched });
        return (Kernel { reads, writes, body }, (0..node.args.len()).collect());
    }
    let mut writer = Writer::new(node, writes[0], &one);
    writer.steps();
    let reads = writer.reads.iter().map(|k| dtype(&node.args[*k])).collect();
    (Kernel { reads, writes, body: Body::Map(writer.map) }, writer.reads)
}

/// The kernel that stores the last of some steps at each element of what is like a buffer.
fn each(buffer: &Buffer, reads: usize, steps: impl Fn(Access) -> Vec<Step>) -> Kernel {
    let dims = buffer.shape.iter().zip(&buffer.sharding.dims).zip(unnamed(buffer.shape.len()));
    let loops: Vec<Loop> =
        dims.map(|((size, axes), name)| Loop { name, size: *size, axes: axes.clone() }).collect();
    let access: Access = plain(loops.len());
    let mut steps = steps(access.clone());
    let of = steps.len() - 1;
    steps.push(Step::Store { write: 0, access, of });
    let body = Body::Map(Map { row: usize::from(!loops.is_empty()), loops, looked: Vec::new(), steps });
    Kernel { reads: vec![buffer.dtype; reads], writes: vec![buffer.dtype], body }
}

/// The scale of an einsum that is a matrix product, and in which no operand is summed alone.
fn contraction(node: &Node) -> Option<f64> {
    let Op::Einsum { scale } = node.op else { return None };
    let s = &node.signature;
    let [a, b] = &s.args[..] else { return None };
    let alone = |f: Factor| Signature::has(a, f) != Signature::has(b, f) && !s.in_results(f);
    (node.is_product() && !(0..node.sizes.len()).any(alone)).then_some(scale)
}

/// The looked-up factor of a scatter that sums over some factor of its index or source.
fn summed_by_index(node: &Node) -> Option<Factor> {
    if node.op != Op::Scatter {
        return None;
    }
    let s = &node.signature;
    let sums = (0..node.sizes.len()).any(|f| !s.in_results(f));
    if sums { node.op.looked_up(s) } else { None }
}

/// Writes the map of a node.
struct Writer<'a> {
    node: &'a Node,
    map: Map,
    /// The operands that it reads, each value once.
    reads: Vec<usize>,
    /// For each factor its loop.
    of_factor: Vec<usize>,
    /// The loops that the result lacks are the row, and not all loops.
    by_row: bool,
    /// The element type of the result.
    dtype: DType,
}

impl<'a> Writer<'a> {
    fn new(node: &'a Node, dtype: DType, one: &dyn Fn(Factor) -> Loop) -> Writer<'a> {
        let s = &node.signature;
        let looked = if node.op == Op::Gather { node.op.looked_up(s) } else { None };
        let mut order = order(node);
        order.retain(|f| Some(*f) != looked);
        let reduced = order.iter().filter(|f| !s.in_results(**f)).count();
        let kept = order.len() - reduced;
        let suffix = order[kept..].iter().all(|f| !s.in_results(*f));
        let by_row = reduced > 0 && kept > 0 && suffix;
        let row = if by_row { reduced } else { usize::from(!order.is_empty()) };
        let mut of_factor = vec![usize::MAX; node.sizes.len()];
        order.iter().chain(&looked).enumerate().for_each(|(l, f)| of_factor[*f] = l);
        let loops = order.iter().map(|f| one(*f)).collect();
        let looked = looked.into_iter().map(one).collect();
        Writer {
            node,
            map: Map { loops, row, looked, steps: Vec::new() },
            reads: Vec::new(),
            of_factor,
            by_row,
            dtype,
        }
    }

    fn access(&self, dims: &[Dim]) -> Access {
        dims.iter().map(|d| d.iter().map(|f| self.of_factor[*f]).collect()).collect()
    }

    fn push(&mut self, step: Step) -> Register {
        self.map.steps.push(step);
        self.map.steps.len() - 1
    }

    fn read(&mut self, i: usize) -> usize {
        let args = &self.node.args;
        self.reads.iter().position(|k| args[*k] == args[i]).unwrap_or_else(|| {
            self.reads.push(i);
            self.reads.len() - 1
        })
    }

    fn load(&mut self, i: usize) -> Register {
        let access = self.access(&self.node.signature.args[i]);
        let step = Step::Load { read: self.read(i), access };
        match self.map.steps.iter().position(|s| *s == step) {
            Some(r) => r,
            None => self.push(step),
        }
    }

    fn loads(&mut self) -> Registers {
        (0..self.node.args.len()).map(|i| self.load(i)).collect()
    }

    fn steps(&mut self) {
        let node = self.node;
        let result = match &node.op {
            Op::Const(c) => self.push(Step::Const(*c)),
            Op::Iota => self.push(Step::Iota(0)),
            Op::Random(draw) => {
                let counter = [0, 1, 2].map(|i| self.load(i));
                let inner = node.signature.inner().into_iter().map(|f| self.of_factor[f]).collect();
                self.push(Step::Random { draw: draw.clone(), counter, inner })
            }
            Op::Gather => {
                let at = self.load(1);
                let access = self.access(&node.signature.args[0]);
                let (read, looked) = (self.read(0), self.map.loops.len());
                self.push(Step::LoadAt { read, access, looked, at })
            }
            Op::Scatter => {
                let looked = node.op.looked_up(&node.signature).map_or(0, |f| self.of_factor[f]);
                let place = self.push(Step::Iota(looked));
                let index = self.load(1);
                let here = self.push(Step::Binary(Binary::Eq, place, index));
                let source = self.load(0);
                let zero = self.push(Step::Const(0.0));
                self.push(Step::Select(here, source, zero))
            }
            Op::Einsum { scale } => {
                let args = self.loads();
                if *scale == 1.0 && args.len() == 1 { args[0] } else { self.push(Step::Mul(*scale, args)) }
            }
            Op::Add => {
                let args = self.loads();
                self.push(Step::Add(args))
            }
            Op::Unary(u) => {
                let x = self.load(0);
                self.push(Step::Unary(*u, x))
            }
            Op::Binary(b) => {
                let (x, y) = (self.load(0), self.load(1));
                self.push(Step::Binary(*b, x, y))
            }
            Op::Select => {
                let (c, x, y) = (self.load(0), self.load(1), self.load(2));
                self.push(Step::Select(c, x, y))
            }
            Op::Cast => {
                let x = self.load(0);
                self.push(Step::Cast(self.dtype, x))
            }
            Op::ReduceMax
            | Op::TopK
            | Op::Accumulate
            | Op::Input(_)
            | Op::State(_)
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => self.load(0),
        };
        self.store(result);
    }

    fn store(&mut self, result: Register) {
        let reduce = if self.node.op == Op::ReduceMax { Reduce::Max } else { Reduce::Sum };
        let access = self.access(&self.node.signature.results[0]);
        let kept = self.map.loops.len() - self.map.row;
        let reduces = (0..self.map.loops.len()).any(|l| !access.iter().flatten().any(|x| *x == l));
        let step = if self.by_row {
            debug_assert!(access.iter().flatten().all(|l| *l < kept));
            let of = self.push(Step::Row(reduce, result));
            Step::Store { write: 0, access, of }
        } else if reduces {
            Step::Accumulate { write: 0, access, of: result, reduce }
        } else {
            Step::Store { write: 0, access, of: result }
        };
        self.push(step);
    }
}

/// The order of the loops: that of the result, or of an operand that has all factors, so that memory is walked in order.
fn order(node: &Node) -> Vec<Factor> {
    let s = &node.signature;
    let flat = |dims: &[Dim]| -> Vec<Factor> { dims.iter().flatten().copied().collect() };
    let n = node.sizes.len();
    let result = flat(&s.results[0]);
    if result.len() == n {
        return result;
    }
    if let Some(all) = s.args.iter().map(|a| flat(a)).find(|a| a.len() == n) {
        return all;
    }
    let rest = (0..n).filter(|f| !result.contains(f));
    result.iter().copied().chain(rest).collect()
}
