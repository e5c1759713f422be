//! What the benchmarks of kernels share: operands as a rank has them, kernels ready to run, and how long is measured.

#![allow(dead_code, reason = "each program uses a part")]

use std::time::Duration;

use criterion::{Criterion, Throughput};
use ir::kernel::{Access, Body, Contract, Kernel, Loop, Use};
use ir::{Axes, DType, Mesh};
use memmap2::{Advice, MmapMut};
use meshc_runtime::cpu::{Compiled, compile};

/// A kernel, how many elements its operands have, and which results take the place of an operand.
pub struct Case {
    pub name: String,
    pub kernel: Kernel,
    pub reads: Vec<usize>,
    pub writes: Vec<usize>,
    pub in_place: Vec<(usize, usize)>,
}

/// A kernel with as many elements as its loops say.
pub fn case(kernel: &Kernel) -> Case {
    let (mut reads, mut writes) = (vec![0; kernel.reads.len()], vec![0; kernel.writes.len()]);
    for Use { written, operand, dims } in kernel.uses() {
        let count = dims.iter().flatten().map(|l| l.size).product();
        (if written { &mut writes } else { &mut reads })[operand] = count;
    }
    Case { name: String::new(), kernel: kernel.clone(), reads, writes, in_place: Vec::new() }
}

/// Loops from text: `name=size`, one after the other.
pub fn loops(text: &str) -> Vec<Loop> {
    let one = |word: &str| {
        let (name, size) = word.split_once('=').expect("name=size");
        Loop { name: name.into(), size: size.parse().expect("a size"), axes: Axes::new() }
    };
    text.split_whitespace().map(one).collect()
}

/// An access from the names of its loops.
pub fn access(loops: &[Loop], text: &str) -> Access {
    let find = |word: &str| {
        let at = loops.iter().position(|l| &*l.name == word).expect("a loop");
        [at].as_slice().into()
    };
    text.split_whitespace().map(find).collect()
}

/// How many elements an access reaches.
pub fn count(loops: &[Loop], access: &Access) -> usize {
    access.iter().flatten().map(|l| loops[*l].size).product()
}

/// A contraction of operands of a type, to f32.
pub fn contract(name: &str, dtype: DType, space: &str, [a, b, out]: [&str; 3]) -> Case {
    let loops = loops(space);
    let [a, b, out] = [a, b, out].map(|t| access(&loops, t));
    let (reads, writes) = (vec![count(&loops, &a), count(&loops, &b)], vec![count(&loops, &out)]);
    let body = Body::Contract(Contract { loops, a, b, out, scale: 1.0 });
    let kernel = Kernel { reads: vec![dtype; 2], writes: vec![DType::F32], body };
    Case { name: name.into(), kernel, reads, writes, in_place: Vec::new() }
}

/// Products of `batch` pairs of matrices: rows, summed places and columns; T in the layout is an operand that is transposed.
pub fn product(dtype: DType, batch: usize, [m, k, n]: [usize; 3], layout: &str) -> Case {
    let times = if batch > 1 { format!("{batch} x ") } else { String::new() };
    let a = if layout.starts_with('T') { "b k m" } else { "b m k" };
    let b = if layout.ends_with('T') { "b n k" } else { "b k n" };
    let space = format!("b={batch} m={m} k={k} n={n}");
    contract(&format!("{times}{m}x{k}x{n} {layout}"), dtype, &space, [a, b, "b m n"])
}

/// Memory as an arena has it: of large pages.
pub struct Memory(MmapMut);

impl Memory {
    /// Elements filled with small numbers, or for an integer type with small indices.
    pub fn filled(dtype: DType, n: usize) -> Memory {
        let mut map = MmapMut::map_anon((n * dtype.bytes()).next_multiple_of(64).max(64)).expect("memory");
        // Only a wish: where there are no large pages, small ones do.
        let _ = map.advise(Advice::HugePage);
        for (i, bytes) in map.chunks_exact_mut(dtype.bytes()).enumerate() {
            let x = (i * 7919 % 1009) as f32 / 1009.0 - 0.3;
            let index = (i % 61) as u64;
            match dtype {
                DType::F32 => bytes.copy_from_slice(&x.to_le_bytes()),
                DType::F64 => bytes.copy_from_slice(&f64::from(x).to_le_bytes()),
                DType::BF16 => bytes.copy_from_slice(&x.to_le_bytes()[2..]),
                DType::F16 => bytes.copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
                DType::I64 | DType::I32 | DType::U32 | DType::Bool => {
                    bytes.copy_from_slice(&index.to_le_bytes()[..dtype.bytes()]);
                }
            }
        }
        Memory(map)
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// A kernel with its operands.
pub struct Ready {
    compiled: Compiled,
    reads: Vec<Memory>,
    writes: Vec<Memory>,
    /// Which operands are i32.
    integers: Vec<bool>,
    from: Vec<*const u8>,
    to: Vec<*mut u8>,
    scratch: Memory,
}

impl Ready {
    /// Compiles it, with all of its operands on this rank.
    pub fn new(case: &Case) -> Ready {
        let compiled = compile(&case.kernel, &Mesh::default(), &[]).expect("a kernel that the cpu can run");
        let filled = |counts: &[usize], types: &[DType]| -> Vec<Memory> {
            counts.iter().zip(types).map(|(n, t)| Memory::filled(*t, *n)).collect()
        };
        let mut reads = filled(&case.reads, &case.kernel.reads);
        let mut writes = filled(&case.writes, &case.kernel.writes);
        let at = |memory: &mut Memory| memory.bytes().as_mut_ptr();
        let from: Vec<*mut u8> = reads.iter_mut().map(at).collect();
        let mut to: Vec<*mut u8> = writes.iter_mut().map(at).collect();
        case.in_place.iter().for_each(|(w, r)| to[*w] = from[*r]);
        let from = from.into_iter().map(<*mut u8>::cast_const).collect();
        let scratch = Memory::filled(DType::Bool, compiled.scratch_bytes());
        let integers = case.kernel.reads.iter().map(|t| *t == DType::I32).collect();
        Ready { compiled, reads, writes, integers, from, to, scratch }
    }

    /// Has all operands of integers count up, from 0 again after so many.
    pub fn count_up(&mut self, many: i32) {
        for (memory, integers) in self.reads.iter_mut().zip(&self.integers) {
            if *integers {
                for (i, bytes) in memory.bytes().chunks_exact_mut(4).enumerate() {
                    bytes.copy_from_slice(&(i as i32 % many).to_le_bytes());
                }
            }
        }
    }

    /// Operations on numbers of a run.
    pub fn flops(&self) -> f64 {
        self.compiled.flops()
    }

    /// The operands and the results.
    pub fn operands(&self) -> (&[*const u8], &[*mut u8]) {
        (&self.from, &self.to)
    }

    /// Bytes of all operands and results.
    pub fn bytes(&self) -> usize {
        self.reads.iter().chain(&self.writes).map(|m| m.0.len()).sum()
    }

    /// Runs it.
    pub fn run(&mut self) {
        // SAFETY: the operands are as large as the kernel's, and live as long as this.
        unsafe { self.compiled.run(&self.from, &self.to, self.scratch.bytes()) }
    }
}

/// Measures a kernel: operations a second of a contraction, or else bytes of operands and results.
pub fn bench(c: &mut Criterion, group: &str, case: &Case) {
    let mut ready = Ready::new(case);
    let bytes = |counts: &[usize], types: &[DType]| -> usize {
        counts.iter().zip(types).map(|(n, t)| n * t.bytes()).sum()
    };
    let moved = bytes(&case.reads, &case.kernel.reads) + bytes(&case.writes, &case.kernel.writes);
    let mut group = c.benchmark_group(group);
    group.throughput(match case.kernel.body {
        Body::Contract(_) | Body::Chain(_) => Throughput::Elements(ready.flops() as u64),
        Body::Map(_) | Body::Scatter(_) | Body::TopK(_) => Throughput::BytesDecimal(moved as u64),
    });
    group.bench_function(&*case.name, |b| b.iter(|| ready.run()));
    group.finish();
}

/// How long each is measured.
pub fn settings() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
}
