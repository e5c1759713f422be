//! The fast kernels against the plain ones.

mod chain;
mod maps;
mod math;
mod random;

use half::{bf16, f16};
use ir::kernel::{Access, Body, Contract, Kernel, Loop, Map, Scatter, Step};
use ir::{Axes, Binary, DType, Mesh, Reduce, Unary};
use proptest::prelude::*;
use smallvec::smallvec;

use super::layout::ranges;
use super::plain::interpret;
use super::{KernelError, compile};

/// Memory of an operand, aligned as the arena's.
#[derive(Clone)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// An operand in memory, with a line behind it that must stay as it is.
struct Buffer {
    lines: Vec<Line>,
    dtype: DType,
    count: usize,
}

impl Buffer {
    fn new(dtype: DType, count: usize) -> Buffer {
        let lines = (count * dtype.bytes()).div_ceil(64) + 1;
        Buffer { lines: vec![Line([0xff; 64]); lines], dtype, count }
    }

    fn of(dtype: DType, numbers: &[f64]) -> Buffer {
        let mut buffer = Buffer::new(dtype, numbers.len());
        let size = dtype.bytes();
        for (i, x) in numbers.iter().enumerate() {
            let bytes: Vec<u8> = match dtype {
                DType::F64 => x.to_le_bytes().into(),
                DType::F32 => (*x as f32).to_le_bytes().into(),
                DType::F16 => f16::from_f64(*x).to_le_bytes().into(),
                DType::BF16 => bf16::from_f64(*x).to_le_bytes().into(),
                DType::I64 => (*x as i64).to_le_bytes().into(),
                DType::I32 => (*x as i32).to_le_bytes().into(),
                DType::U32 => (*x as u32).to_le_bytes().into(),
                DType::Bool => vec![u8::from(*x != 0.0)],
            };
            buffer.bytes_mut()[i * size..(i + 1) * size].copy_from_slice(&bytes);
        }
        buffer
    }

    fn bytes(&self) -> Vec<u8> {
        self.lines.iter().flat_map(|l| l.0).collect()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let n = self.lines.len() * 64;
        // SAFETY: lines are bytes without gaps.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), n) }
    }

    fn numbers(&self) -> Vec<f64> {
        let (bytes, size) = (self.bytes(), self.dtype.bytes());
        assert!(bytes[self.count * size..].iter().all(|b| *b == 0xff), "written beyond the end");
        let read = |b: &[u8]| match self.dtype {
            DType::F64 => f64::from_le_bytes(b.try_into().unwrap()),
            DType::F32 => f64::from(f32::from_le_bytes(b.try_into().unwrap())),
            DType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f64(),
            DType::BF16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f64(),
            DType::I64 => i64::from_le_bytes(b.try_into().unwrap()) as f64,
            DType::I32 => f64::from(i32::from_le_bytes(b.try_into().unwrap())),
            DType::U32 => f64::from(u32::from_le_bytes(b.try_into().unwrap())),
            DType::Bool => f64::from(b[0]),
        };
        bytes.chunks(size).take(self.count).map(read).collect()
    }
}

/// Runs a kernel; `sizes` are those of the results, and result `w` lies in operand `r` for `(w, r)` in `in_place`.
fn execute(
    kernel: &Kernel,
    mesh: &Mesh,
    at: &[usize],
    reads: &[Vec<f64>],
    sizes: &[usize],
    in_place: &[(usize, usize)],
) -> Vec<Vec<f64>> {
    let compiled = compile(kernel, mesh, at).unwrap();
    let mut reads: Vec<Buffer> = reads.iter().zip(&kernel.reads).map(|(x, t)| Buffer::of(*t, x)).collect();
    let mut writes: Vec<Buffer> =
        sizes.iter().zip(&kernel.writes).map(|(n, t)| Buffer::new(*t, *n)).collect();
    let from: Vec<*mut u8> = reads.iter_mut().map(|b| b.lines.as_mut_ptr().cast()).collect();
    let mut to: Vec<*mut u8> = writes.iter_mut().map(|b| b.lines.as_mut_ptr().cast()).collect();
    in_place.iter().for_each(|(w, r)| to[*w] = from[*r]);
    let from: Vec<*const u8> = from.into_iter().map(<*mut u8>::cast_const).collect();
    let mut scratch = vec![0xff; compiled.scratch_bytes()];
    // SAFETY: the buffers are as large as the kernel's operands, and apart or the same.
    unsafe { compiled.run(&from, &to, &mut scratch) };
    let found = |w: usize| match in_place.iter().find(|(of, _)| *of == w) {
        Some((_, r)) => reads[*r].numbers(),
        None => writes[w].numbers(),
    };
    (0..writes.len()).map(found).collect()
}

/// How many elements each result has.
fn sizes(kernel: &Kernel, mesh: &Mesh, at: &[usize]) -> Vec<usize> {
    let mut sizes = vec![0; kernel.writes.len()];
    for u in kernel.uses().into_iter().filter(|u| u.written) {
        let lens = u.dims.iter().flatten().map(|l| ir::extent(l.size, &l.axes, mesh, at).len());
        sizes[u.operand] = lens.product();
    }
    sizes
}

fn check(case: &random::Case) {
    let random::Case { kernel, mesh, at, reads, in_place } = case;
    let sizes = sizes(kernel, mesh, at);
    let expected = interpret(kernel, mesh, at, reads);
    let found = execute(kernel, mesh, at, reads, &sizes, in_place);
    let again = execute(kernel, mesh, at, reads, &sizes, in_place);
    for (w, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let largest = expected.iter().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
        let digits = match kernel.writes[w] {
            DType::BF16 => 1e-2,
            DType::F16 => 2e-3,
            DType::F64 | DType::F32 | DType::I64 | DType::I32 | DType::U32 | DType::Bool => 1e-4,
        };
        assert_eq!(expected.len(), found.len());
        // What is summed one by one may cancel: of n numbers of about 1, roundings leave some n sqrt(n) units.
        let points: usize = ranges(&kernel.body.loops(), mesh, at).iter().map(|r| r.len()).product();
        let summed = (points / expected.len().max(1)) as f64;
        let largest = largest + f64::from(f32::EPSILON) / digits * summed.powf(1.5);
        for (i, (x, y)) in expected.iter().zip(found).enumerate() {
            let close = (x - y).abs() <= digits * largest;
            assert!(close || x == y || (x.is_nan() && y.is_nan()), "result {w}, element {i}: {y}, not {x}");
        }
        let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(found), bits(&again[w]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn maps_are_as_they_are_defined(seed: u64) {
        check(&random::map(seed));
    }

    #[test]
    fn contractions_are_as_they_are_defined(seed: u64) {
        check(&random::contract(seed));
    }

    #[test]
    fn scatters_are_as_they_are_defined(seed: u64) {
        check(&random::scatter(seed));
    }

    #[test]
    fn searches_are_as_they_are_defined(seed: u64) {
        check(&random::top_k(seed));
    }
}

fn loops(sizes: &[usize]) -> Vec<Loop> {
    let names = ["a", "b", "c", "d"];
    sizes.iter().zip(names).map(|(n, name)| Loop { name: name.into(), size: *n, axes: Axes::new() }).collect()
}

fn of(loops: &[usize]) -> Access {
    loops.iter().map(|l| smallvec![*l]).collect()
}

#[test]
fn a_total_of_millions_keeps_its_digits() {
    let n = 1 << 22;
    let steps = vec![
        Step::Load { read: 0, access: of(&[0]) },
        Step::Accumulate { write: 0, access: vec![], of: 0, reduce: Reduce::Sum },
    ];
    let map = Map { loops: loops(&[n]), row: 0, looked: vec![], steps };
    let kernel = Kernel { reads: vec![DType::F32], writes: vec![DType::F32], body: Body::Map(map) };
    let x: Vec<f64> = (0..n).map(|i| f64::from(0.1f32 + (i % 7) as f32)).collect();
    let total = execute(&kernel, &Mesh::default(), &[], std::slice::from_ref(&x), &[1], &[])[0][0];
    assert_eq!(total as f32, x.iter().sum::<f64>() as f32);
}

#[test]
fn nan_goes_through() {
    let nan = |step: fn(usize) -> Step| {
        let steps = vec![
            Step::Load { read: 0, access: of(&[0, 1]) },
            step(0),
            Step::Row(Reduce::Max, 1),
            Step::Row(Reduce::Sum, 1),
            Step::Store { write: 0, access: of(&[0, 1]), of: 1 },
            Step::Store { write: 1, access: of(&[0]), of: 2 },
            Step::Store { write: 2, access: of(&[0]), of: 3 },
            Step::Accumulate { write: 3, access: vec![], of: 1, reduce: Reduce::Max },
        ];
        let map = Map { loops: loops(&[2, 70]), row: 1, looked: vec![], steps };
        let kernel = Kernel { reads: vec![DType::F32], writes: vec![DType::F32; 4], body: Body::Map(map) };
        for place in [0, 3, 69] {
            let mut x = vec![0.5; 140];
            x[place] = f64::NAN;
            let y = execute(&kernel, &Mesh::default(), &[], &[x], &[140, 2, 2, 1], &[]);
            assert!(y[0][place].is_nan() && y[1][0].is_nan() && y[2][0].is_nan() && y[3][0].is_nan());
            assert_eq!(y.iter().flatten().filter(|x| x.is_nan()).count(), 4);
        }
    };
    nan(|r| Step::Unary(Unary::Relu, r));
    nan(|r| Step::Unary(Unary::Exp, r));
    nan(|r| Step::Unary(Unary::Tanh, r));
    nan(|r| Step::Unary(Unary::Log, r));
    nan(|r| Step::Unary(Unary::Sin, r));
    nan(|r| Step::Unary(Unary::Sign, r));
    nan(|r| Step::Unary(Unary::Sigmoid, r));
    nan(|r| Step::Binary(Binary::Max, r, r));
    nan(|r| Step::Binary(Binary::Min, r, r));
}

#[test]
fn an_element_type_without_code_is_an_error() {
    let contract = Contract { loops: loops(&[2]), a: of(&[0]), b: of(&[0]), out: of(&[0]), scale: 1.0 };
    let body = Body::Contract(contract);
    let kernel = Kernel { reads: vec![DType::F32, DType::F16], writes: vec![DType::F32], body };
    let error = compile(&kernel, &Mesh::default(), &[]).map(|_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a contraction needs f32 or bf16 as its second operand on the cpu, but has f16"
    );
    let steps = vec![Step::Load { read: 0, access: of(&[0]) }, Step::Row(Reduce::Top, 0)];
    let map = Map { loops: loops(&[2]), row: 1, looked: vec![], steps };
    let kernel = Kernel { reads: vec![DType::F32], writes: vec![], body: Body::Map(map) };
    assert!(matches!(compile(&kernel, &Mesh::default(), &[]), Err(KernelError::Pairs)));
    let scatter =
        Scatter { loops: loops(&[2, 3]), source: of(&[0]), index: of(&[0]), out: of(&[1]), looked: 1 };
    let reads = vec![DType::F32, DType::F32];
    let kernel = Kernel { reads, writes: vec![DType::F32], body: Body::Scatter(scatter) };
    assert!(matches!(
        compile(&kernel, &Mesh::default(), &[]),
        Err(KernelError::DType { operand: "index", .. })
    ));
}
