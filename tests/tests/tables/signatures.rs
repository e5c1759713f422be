//! Every op's signature, kinds and rows: computed in pieces and joined, it is what it is as a whole.

use ir::graph::{Graph, Mark, NewNode};
use ir::rows::{Layout, Row, Strategy, layout, rows};
use ir::signature::plain;
use ir::state::Input;
use ir::{
    Axis, Binary, DType, Draw, FactorKind, Mesh, Node, Op, Part, Signature, Unary, Value, extent, verify,
};
use meshc_tests::meaning::expect;
use meshc_tests::random::{Random, seeds};
use runtime::eval::eval;
use runtime::lockstep::Kernel;
use runtime::tensor::Tensor;

use meshc_tests::spread::{spread, whole};

/// The rows of a node.
pub type Rows = dyn Fn(&Graph, &Node) -> Vec<Row>;

/// What follows from a strategy.
pub type Follows = dyn Fn(&Graph, &Node, &Strategy, &Mesh) -> Option<Layout>;

/// What is held against the whole: the rows of ops, what follows from them, and the kernel of a rank.
pub struct Rules {
    /// See [`rows`].
    pub rows: Box<Rows>,
    /// See [`layout`].
    pub layout: Box<Follows>,
    /// See [`eval`].
    pub kernel: Kernel<f64>,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { rows: Box::new(rows), layout: Box::new(layout), kernel: eval }
    }
}

/// Signatures of an op; none where it computes nothing.
fn signatures(op: &Op) -> &'static [&'static str] {
    match op {
        Op::Input(_) | Op::State(_) | Op::Reshard | Op::Assign(_) | Op::Tap(_) => &[],
        Op::Const(_) => &["-> ()", "-> a", "-> a b", "-> (a b)"],
        Op::Iota => &["-> a"],
        Op::Random(_) => &[
            "b, b s, () -> b s d",
            "b, b s, () -> b kv s t",
            "b, (), () -> d b",
            "b, (b s), s -> s d b",
            "b, b s, () -> b (s d)",
            "(), (), () -> (a b)",
            "a, b, c -> c b a",
        ],
        Op::Einsum { .. } => &[
            "m k, k n -> m n",
            "b m k, b k n -> b n m",
            "a b, a b -> ()",
            "a b -> b a",
            "a b -> b",
            "a -> a b",
            "(), a -> a",
            "a, b -> a b",
            "a, a, a -> a",
            "a b, b c, c -> a",
            "a b, a -> b c",
            "(a b) c -> a b c",
            "a b, b c -> (a c)",
            "(a b), b -> a",
            "(a b) -> (b a)",
        ],
        Op::Add => &[
            "a b, a b -> a b",
            "a b, b, () -> a b",
            "a, b -> a b",
            "a, a, a, a -> a",
            "() -> a",
            "(), () -> ()",
            "(a b), a b, b -> a b",
        ],
        Op::ReduceMax => &["a b -> a", "a b c -> b", "a -> ()", "a b -> b a", "(a b) -> a", "a b -> a c"],
        Op::TopK => &[
            "b v -> b k two",
            "v -> k two",
            "v b -> b k two",
            "a v b -> b a k two",
            "(a v) b -> a b k two",
            "a v b -> (b a) k two",
        ],
        Op::Unary(_) => &["a b -> a b", "a b -> b a", "() -> ()", "(a b) -> a b"],
        Op::Binary(_) => &["a, a -> a", "a b, b -> a b", "b, a b -> a b", "(), a -> a", "a, b -> a b"],
        Op::Select => &["a, a, a -> a", "a, (), b -> a b", "a b, a, () -> a b", "(), a, b -> a b"],
        Op::Gather => &[
            "v d, b s -> b s d",
            "b s v, b s -> b s",
            "v d, () -> d",
            "v, b -> b",
            "v d, b s -> b d",
            "v (c d), b -> b c d",
            "(c v) d, b -> b c d",
        ],
        Op::Scatter => &[
            "b s d, b s -> v d",
            "b s, b s -> b s v",
            "d, () -> v d",
            "b, b -> v",
            "b s d, b -> v d",
            "b c, b -> (v c)",
        ],
        Op::Cast => &["a b -> a b", "() -> ()"],
        Op::Accumulate => &["a b -> a b", "() -> ()"],
    }
}

/// Every op that computes something.
pub fn ops() -> Vec<Op> {
    let draw = Draw { name: "x".into(), seed: 3 };
    let mut ops =
        vec![Op::Const(-3.5), Op::Iota, Op::Random(draw), Op::Add, Op::ReduceMax, Op::TopK, Op::Select];
    ops.extend([Op::Gather, Op::Scatter, Op::Cast, Op::Accumulate]);
    ops.extend([1.0, -0.5].map(|scale| Op::Einsum { scale }));
    ops.extend(Unary::ALL.map(Op::Unary));
    ops.extend(Binary::ALL.map(Op::Binary));
    ops
}

/// One op on one mesh, with operands.
struct Case {
    graph: Graph,
    mesh: Mesh,
    operands: Vec<Tensor<f64>>,
}

impl Case {
    fn node(&self) -> &Node {
        &self.graph.nodes[self.graph.nodes.len() - 1]
    }

    /// Random sizes, uneven and smaller than the number of pieces; random operands.
    fn draw(op: &Op, text: &str, random: &mut Random) -> Case {
        let signature = Signature::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let size = |random: &mut Random| *random.pick(&[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7]);
        let pair = |f: usize| op.kind(&signature, f) == FactorKind::Whole && f + 1 == signature.factors.len();
        let of = |f| if pair(f) { 2 } else { size(random) };
        let sizes: Vec<usize> = (0..signature.factors.len()).map(of).collect();
        let mut graph = Graph::default();
        for (i, dims) in signature.args.iter().enumerate() {
            let shape = Signature::shape(dims, &sizes);
            input(&mut graph, &format!("x{i}"), operand_type(op, i), &shape);
        }
        let dtype = result_type(op, random);
        let known = signature.factors.iter().cloned().zip(sizes.iter().copied()).collect();
        let args = (0..signature.args.len()).map(|i| Value(i as u32)).collect();
        push(&mut graph, op.clone(), signature.clone(), args, dtype, known);
        let looked = op.looked_up(&signature).map_or(0, |f| sizes[f]);
        let mut operand = |i: usize, dims: &Vec<_>| {
            Tensor::from_fn(&Signature::shape(dims, &sizes), |_| number(op, i, looked, random))
        };
        let operands = signature.args.iter().enumerate().map(|(i, dims)| operand(i, dims)).collect();
        let axes =
            (0..1 + random.below(3)).map(|i| format!("{}={}", ["x", "y", "z"][i], 1 + random.below(4)));
        let mesh = Mesh::parse(&axes.collect::<Vec<_>>().join(",")).unwrap_or_else(|e| panic!("{e}"));
        Case { graph, mesh, operands }
    }

    /// A row for each axis, and what follows; none if that is not legal.
    fn split(&self, rules: &Rules, random: &mut Random) -> Option<(Strategy, Layout)> {
        let node = self.node();
        let mut strategy = Strategy::whole(node);
        for axis in random.shuffled(self.mesh.all().collect()) {
            match random.pick(&(rules.rows)(&self.graph, node)) {
                Row::Nothing => {}
                Row::Factor(f) => strategy.split[*f].push(axis),
                Row::Pass(reduce, operands) => strategy.pass.push((axis, *reduce, operands.clone())),
            }
        }
        let layout = (rules.layout)(&self.graph, node, &strategy, &self.mesh)?;
        Some((strategy, layout))
    }

    /// Whether the pieces of all ranks make up the whole.
    fn check(
        &self,
        (strategy, layout): &(Strategy, Layout),
        rules: &Rules,
        random: &mut Random,
    ) -> Result<(), String> {
        let (node, mesh) = (self.node(), &self.mesh);
        for sharding in layout.args.iter().chain(&layout.results) {
            let axes: Vec<Axis> = sharding.axes().collect();
            if (1..axes.len()).any(|i| axes[..i].contains(&axes[i])) {
                return Err(format!("{} names an axis twice", sharding.show(mesh)));
            }
        }
        let full: Vec<_> = node.sizes.iter().map(|n| 0..*n).collect();
        let want = eval(node, &full, &self.operands.iter().collect::<Vec<_>>());
        let operands: Vec<Vec<Tensor<f64>>> =
            self.operands.iter().zip(&layout.args).map(|(x, s)| spread(x, s, mesh, random)).collect();
        let one = |rank: usize| {
            let at = mesh.coordinate(rank);
            let ranges: Vec<_> =
                node.sizes.iter().zip(&strategy.split).map(|(n, axes)| extent(*n, axes, mesh, &at)).collect();
            (rules.kernel)(node, &ranges, &operands.iter().map(|x| &x[rank]).collect::<Vec<_>>())
        };
        let pieces: Vec<Tensor<f64>> = (0..mesh.ranks()).map(one).collect();
        let got = whole(&pieces, &want.shape, &layout.results[0], mesh)?;
        let off = got.distance(&want);
        if off <= 1e-10 { Ok(()) } else { Err(format!("off by {off:.1e}")) }
    }
}

fn input(graph: &mut Graph, name: &str, dtype: DType, shape: &[usize]) {
    let name: ir::Name = name.into();
    let dims: Vec<(ir::Name, usize)> =
        shape.iter().enumerate().map(|(i, n)| (format!("d{i}").into(), *n)).collect();
    graph.inputs.push(Input { name: name.clone(), dtype, dims: dims.clone() });
    let factors = dims.iter().map(|(n, _)| n.clone()).collect();
    let results = vec![plain(dims.len())];
    push(graph, Op::Input(name), Signature { factors, args: Vec::new(), results }, Vec::new(), dtype, dims);
}

fn push(
    graph: &mut Graph,
    op: Op,
    signature: Signature,
    args: Vec<Value>,
    dtype: DType,
    known: Vec<(ir::Name, usize)>,
) {
    let mark = Mark { layer: 0, part: Part::Forward };
    let new = NewNode { op, signature, args, dtype, known, mark, tag: None, of: None, like: None };
    graph.push(new).unwrap_or_else(|e| panic!("{e}"));
}

fn operand_type(op: &Op, i: usize) -> DType {
    match i {
        0 if *op == Op::Select => DType::Bool,
        1 if matches!(op, Op::Gather | Op::Scatter) => DType::I32,
        _ if matches!(op, Op::Random(_)) => DType::I32,
        _ => DType::F32,
    }
}

/// Some casts widen and some do not.
fn result_type(op: &Op, random: &mut Random) -> DType {
    if *op == Op::Cast {
        *random.pick(&[DType::F32, DType::F64, DType::BF16])
    } else if matches!(op, Op::Binary(b) if b.is_comparison()) {
        DType::Bool
    } else {
        DType::F32
    }
}

/// An element of operand `i`: in the range of the function, of both signs where that has them.
fn number(op: &Op, i: usize, looked_up: usize, random: &mut Random) -> f64 {
    let few = matches!(
        op,
        Op::Binary(Binary::Eq | Binary::Ge | Binary::Max | Binary::Min) | Op::ReduceMax | Op::TopK
    );
    match operand_type(op, i) {
        DType::Bool => random.below(2) as f64,
        // Some are outside the range: they look up nothing.
        DType::I32 => random.below(looked_up + 3) as f64 - 1.0,
        // So that some are equal.
        DType::F32 if few => random.below(5) as f64 - 2.0,
        DType::F32 if matches!(op, Op::Unary(Unary::Log | Unary::Sqrt | Unary::Rsqrt)) => {
            random.between(0.1, 2.0)
        }
        DType::F32 if *op == Op::Binary(Binary::Div) && i == 1 => {
            random.between(0.2, 2.0) * random.pick(&[-1.0, 1.0])
        }
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::I64 | DType::U32 => random.number(),
    }
}

/// Every op, a seed each, over and over.
///
/// # Errors
/// The first case that is not what it is as a whole.
pub fn check(rules: &Rules, seeds: std::ops::Range<u64>) -> Result<(), String> {
    let table: Vec<(Op, &str)> =
        ops().iter().flat_map(|op| signatures(op).iter().map(|s| (op.clone(), *s))).collect();
    for seed in seeds {
        let random = &mut Random::new(seed);
        // By turns, so that few cases still reach every row of the table.
        let (op, signature) = &table[seed as usize % table.len()];
        let case = Case::draw(op, signature, random);
        let Some(split) = (0..20).find_map(|_| case.split(rules, random)) else { continue };
        case.check(&split, rules, random).map_err(|e| {
            let (node, mesh) = (case.node(), &case.mesh);
            let split = split.0.show(node, mesh);
            format!("seed {seed}: {op} : {signature}, sizes {:?}, mesh {mesh}, {split}: {e}", node.sizes)
        })?;
    }
    Ok(())
}

#[test]
fn every_op_in_pieces_is_the_whole() {
    check(&Rules::default(), seeds(2000)).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn every_signature_of_the_table_is_legal() {
    let random = &mut Random::new(3);
    for op in ops() {
        assert!(!signatures(&op).is_empty(), "{op} has no signature in the table");
        for text in signatures(&op) {
            expect(text, verify::verify(&Case::draw(&op, text, random).graph));
        }
    }
}
