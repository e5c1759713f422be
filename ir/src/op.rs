//! The ops. What each does to dimensions is its node's signature; what it does to numbers is its plain kernel.

use std::fmt;

use crate::signature::{Dim, Factor};
use crate::{Draw, Name, Reduce, Signature};

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unary {
    /// e^x.
    Exp,
    /// e^x - 1, exact near 0.
    Expm1,
    /// Natural logarithm.
    Log,
    /// Hyperbolic tangent.
    Tanh,
    /// Square root.
    Sqrt,
    /// 1 / sqrt(x).
    Rsqrt,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// Absolute value.
    Abs,
    /// -1, 0 or 1.
    Sign,
    /// max(x, 0).
    Relu,
    /// 1 where x > 0, else 0: the gradient of [`Unary::Relu`].
    Step,
    /// The same value, through which no gradient flows.
    Stop,
}

impl Unary {
    /// Every function, for tables and parsing.
    pub const ALL: [Unary; 14] = [
        Unary::Exp,
        Unary::Expm1,
        Unary::Log,
        Unary::Tanh,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Sin,
        Unary::Cos,
        Unary::Sigmoid,
        Unary::Abs,
        Unary::Sign,
        Unary::Relu,
        Unary::Step,
        Unary::Stop,
    ];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Exp => "exp",
            Unary::Expm1 => "expm1",
            Unary::Log => "log",
            Unary::Tanh => "tanh",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Sigmoid => "sigmoid",
            Unary::Abs => "abs",
            Unary::Sign => "sign",
            Unary::Relu => "relu",
            Unary::Step => "step",
            Unary::Stop => "stop",
        }
    }
}

/// A function of two numbers. Products are einsums and sums are [`Op::Add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Binary {
    /// x - y.
    Sub,
    /// x / y.
    Div,
    /// The larger.
    Max,
    /// The smaller.
    Min,
    /// Whether x = y.
    Eq,
    /// Whether x >= y.
    Ge,
}

impl Binary {
    /// Every function, for tables and parsing.
    pub const ALL: [Binary; 6] = [Binary::Sub, Binary::Div, Binary::Max, Binary::Min, Binary::Eq, Binary::Ge];

    /// Its name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Sub => "sub",
            Binary::Div => "div",
            Binary::Max => "max",
            Binary::Min => "min",
            Binary::Eq => "eq",
            Binary::Ge => "ge",
        }
    }

    /// Whether the result is a truth value.
    pub fn is_comparison(self) -> bool {
        match self {
            Binary::Eq | Binary::Ge => true,
            Binary::Sub | Binary::Div | Binary::Max | Binary::Min => false,
        }
    }
}

/// An op. Inputs, states, assignments and taps name an entry of the graph's tables.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// What the batch holds: `-> b s`.
    Input(Name),
    /// What the state holds at the start of the step.
    State(Name),
    /// The same number everywhere.
    Const(f64),
    /// The global index along its one dimension.
    Iota,
    /// `b, b s, () -> b s d`: uniform numbers in [0, 1), multiples of 2^-24. Operands are three integers, the row of the
    /// global batch, the position in the sequence, and the step; with them and the draw a number follows from the global
    /// row-major index over the factors that no operand has ([`Signature::inner`]). Operands are counted modulo 2^32, and
    /// no gradient flows through it.
    Random(Draw),
    /// `scale` times the product of the operands, summed over the factors that the result lacks, broadcast over
    /// those that only the result has. Matrix products, products, sums, transposes and broadcasts are its signatures.
    Einsum {
        /// A constant factor.
        scale: f64,
    },
    /// The sum of its operands, broadcast to the result.
    Add,
    /// The largest over the factors that the result lacks.
    ReduceMax,
    /// `b v -> b k two`: the k largest along `v`, the one factor that the result lacks, in descending order; of equal
    /// ones the lowest index first, and NaN is larger than any number. Each is a pair in a last dimension of size 2: the
    /// value, and its global index as a number, exact below 2^24. Where fewer are there the rest are absent pairs,
    /// (-inf, -inf), which come after all others. No gradient flows through it.
    TopK,
    /// A function of each element.
    Unary(Unary),
    /// A function of two elements, operands broadcast to the result.
    Binary(Binary),
    /// The second operand where the first is true, else the third.
    Select,
    /// `v d, b s -> b s d`: the factor that only operand 0 has is looked up by operand 1. An index outside the
    /// range gives 0.
    Gather,
    /// `b s d, b s -> v d`: the transpose of [`Op::Gather`]; the factor that only the result has is looked up.
    Scatter,
    /// The same number in the result's element type.
    Cast,
    /// The sum over the micro-batches of a step: the only way from a micro-batch's value to a step's.
    Accumulate,
    /// The same value in another sharding.
    Reshard,
    /// What the state holds after the step. No result.
    Assign(Name),
    /// Hands the value to the host. No result, and no communication.
    Tap(Name),
}

/// What splitting a factor does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactorKind {
    /// The result is split by it too.
    Map,
    /// Each piece gives a contribution to the result.
    Reduce(Reduce),
    /// An index: another piece's entries contribute nothing, so the result is a sum of contributions (or is split,
    /// where the looked-up factor is in the result).
    Lookup,
    /// It cannot be split.
    Whole,
}

impl Op {
    /// How pieces combine when a factor that the result lacks is split.
    pub fn reduce(&self) -> Reduce {
        match self {
            Op::ReduceMax => Reduce::Max,
            Op::TopK => Reduce::Top,
            Op::Input(_)
            | Op::State(_)
            | Op::Const(_)
            | Op::Iota
            | Op::Random(_)
            | Op::Einsum { .. }
            | Op::Add
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Select
            | Op::Gather
            | Op::Scatter
            | Op::Cast
            | Op::Accumulate
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => Reduce::Sum,
        }
    }

    /// The looked-up factor of a gather or scatter.
    pub fn looked_up(&self, signature: &Signature) -> Option<Factor> {
        let lacks = |dims: Option<&Vec<_>>, f| dims.is_some_and(|d: &Vec<_>| !Signature::has(d, f));
        let (source, index, result) =
            (signature.args.first(), signature.args.get(1), signature.results.first());
        let found = |other| (0..signature.factors.len()).find(|f| lacks(index, *f) && lacks(other, *f));
        match self {
            Op::Gather => found(result),
            Op::Scatter => found(source),
            Op::Input(_)
            | Op::State(_)
            | Op::Const(_)
            | Op::Iota
            | Op::Random(_)
            | Op::Einsum { .. }
            | Op::Add
            | Op::ReduceMax
            | Op::TopK
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Select
            | Op::Cast
            | Op::Accumulate
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => None,
        }
    }

    /// The factor along which a top-k searches, if the signature is one of a top-k: the operand has exactly one that the
    /// result lacks, and the result ends in two dimensions of its own.
    pub fn searched(&self, signature: &Signature) -> Option<Factor> {
        let ([source], [result]) = (&signature.args[..], &signature.results[..]) else { return None };
        let (kept, [k, pair]) = result.split_last_chunk::<2>()?;
        let own = |dim: &Dim| dim.len() == 1 && !Signature::has(source, dim[0]);
        let shared = kept.iter().flatten().all(|f| Signature::has(source, *f));
        let mut lacking = source.iter().flatten().filter(|f| !Signature::has(result, **f));
        let (searched, more) = (lacking.next().copied(), lacking.next());
        let fits = *self == Op::TopK && own(k) && own(pair) && k != pair && shared && more.is_none();
        searched.filter(|_| fits)
    }

    /// What splitting `factor` does.
    pub fn kind(&self, signature: &Signature, factor: Factor) -> FactorKind {
        if self.looked_up(signature) == Some(factor) {
            FactorKind::Lookup
        } else if *self == Op::TopK && !signature.args.iter().any(|a| Signature::has(a, factor)) {
            FactorKind::Whole
        } else if signature.results.is_empty() || signature.in_results(factor) {
            FactorKind::Map
        } else {
            FactorKind::Reduce(self.reduce())
        }
    }

    /// The rows of linearity: which operands may be partial *together*, everything else whole, so that the result
    /// is partial in the same way. `widens` says whether a cast loses nothing.
    pub fn passes(&self, operands: usize, widens: bool) -> Vec<(Reduce, Vec<usize>)> {
        match self {
            Op::Einsum { .. } => (0..operands).map(|i| (Reduce::Sum, vec![i])).collect(),
            Op::Add => vec![(Reduce::Sum, (0..operands).collect())],
            Op::Binary(Binary::Sub) => vec![(Reduce::Sum, vec![0, 1])],
            Op::Binary(Binary::Max) => vec![(Reduce::Max, vec![0, 1])],
            Op::Binary(Binary::Div) | Op::Gather | Op::Scatter | Op::Accumulate => {
                vec![(Reduce::Sum, vec![0])]
            }
            Op::Select => vec![(Reduce::Sum, vec![1, 2])],
            Op::ReduceMax => vec![(Reduce::Max, vec![0])],
            Op::Unary(Unary::Stop) => vec![(Reduce::Sum, vec![0]), (Reduce::Max, vec![0])],
            Op::Cast if widens => vec![(Reduce::Sum, vec![0])],
            Op::Cast
            | Op::Input(_)
            | Op::State(_)
            | Op::Const(_)
            | Op::Iota
            | Op::Random(_)
            | Op::TopK
            | Op::Unary(
                Unary::Exp
                | Unary::Expm1
                | Unary::Log
                | Unary::Tanh
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Sin
                | Unary::Cos
                | Unary::Sigmoid
                | Unary::Abs
                | Unary::Sign
                | Unary::Relu
                | Unary::Step,
            )
            | Op::Binary(Binary::Min | Binary::Eq | Binary::Ge)
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => Vec::new(),
        }
    }

    /// Whether the result may lack a factor that an operand has.
    pub fn reduces(&self) -> bool {
        matches!(self, Op::Einsum { .. } | Op::ReduceMax | Op::TopK | Op::Gather | Op::Scatter)
    }

    /// Whether it must stay though nothing uses it.
    pub fn has_effect(&self) -> bool {
        matches!(self, Op::Assign(_) | Op::Tap(_))
    }

    /// The bits of its number, or which function it is: what tells it from others of its kind, if no name does.
    pub fn number(&self) -> u64 {
        match self {
            Op::Const(number) | Op::Einsum { scale: number } => number.to_bits(),
            Op::Unary(unary) => *unary as u64,
            Op::Binary(binary) => *binary as u64,
            Op::Input(_)
            | Op::State(_)
            | Op::Iota
            | Op::Random(_)
            | Op::Add
            | Op::ReduceMax
            | Op::TopK
            | Op::Select
            | Op::Gather
            | Op::Scatter
            | Op::Cast
            | Op::Accumulate
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => 0,
        }
    }

    /// How many results it has.
    pub fn results(&self) -> usize {
        usize::from(!self.has_effect())
    }

    /// How many operands it takes; none if any number.
    pub fn arity(&self) -> Option<usize> {
        match self {
            Op::Input(_) | Op::State(_) | Op::Const(_) | Op::Iota => Some(0),
            Op::Unary(_)
            | Op::ReduceMax
            | Op::TopK
            | Op::Cast
            | Op::Accumulate
            | Op::Reshard
            | Op::Assign(_)
            | Op::Tap(_) => Some(1),
            Op::Binary(_) | Op::Gather | Op::Scatter => Some(2),
            Op::Select | Op::Random(_) => Some(3),
            Op::Einsum { .. } | Op::Add => None,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Input(name) => write!(f, "input({name})"),
            Op::State(name) => write!(f, "state({name})"),
            Op::Const(c) => write!(f, "const({c:?})"),
            Op::Iota => f.write_str("iota"),
            Op::Random(draw) => write!(f, "random({draw})"),
            Op::Einsum { scale } if *scale == 1.0 => f.write_str("einsum"),
            Op::Einsum { scale } => write!(f, "einsum({scale:?})"),
            Op::Add => f.write_str("add"),
            Op::ReduceMax => f.write_str("reduce_max"),
            Op::TopK => f.write_str("top_k"),
            Op::Unary(u) => f.write_str(u.name()),
            Op::Binary(b) => f.write_str(b.name()),
            Op::Select => f.write_str("select"),
            Op::Gather => f.write_str("gather"),
            Op::Scatter => f.write_str("scatter"),
            Op::Cast => f.write_str("cast"),
            Op::Accumulate => f.write_str("accumulate"),
            Op::Reshard => f.write_str("reshard"),
            Op::Assign(name) => write!(f, "assign({name})"),
            Op::Tap(name) => write!(f, "tap({name})"),
        }
    }
}

impl Op {
    /// Reads what `Display` writes: a name and, in parentheses, an attribute.
    pub fn parse(name: &str, attribute: Option<&str>) -> Result<Op, String> {
        let number = |text: &str| text.parse::<f64>().map_err(|_| format!("`{text}` is no number"));
        let plain = |op: Op| match attribute {
            None => Ok(op),
            Some(a) => Err(format!("`{name}` takes no attribute, but has `{a}`")),
        };
        let needs = || attribute.ok_or_else(|| format!("`{name}` needs an attribute, as in `{name}(x)`"));
        match name {
            "input" => Ok(Op::Input(needs()?.into())),
            "state" => Ok(Op::State(needs()?.into())),
            "const" => Ok(Op::Const(number(needs()?)?)),
            "iota" => plain(Op::Iota),
            "random" => Ok(Op::Random(needs()?.parse()?)),
            "einsum" => Ok(Op::Einsum { scale: attribute.map_or(Ok(1.0), number)? }),
            "add" => plain(Op::Add),
            "reduce_max" => plain(Op::ReduceMax),
            "top_k" => plain(Op::TopK),
            "select" => plain(Op::Select),
            "gather" => plain(Op::Gather),
            "scatter" => plain(Op::Scatter),
            "cast" => plain(Op::Cast),
            "accumulate" => plain(Op::Accumulate),
            "reshard" => plain(Op::Reshard),
            "assign" => Ok(Op::Assign(needs()?.into())),
            "tap" => Ok(Op::Tap(needs()?.into())),
            _ => {
                if let Some(u) = Unary::ALL.into_iter().find(|u| u.name() == name) {
                    plain(Op::Unary(u))
                } else if let Some(b) = Binary::ALL.into_iter().find(|b| b.name() == name) {
                    plain(Op::Binary(b))
                } else {
                    Err(format!("there is no op `{name}`"))
                }
            }
        }
    }
}
