//! The rules that every graph keeps, before and after each pass. All that are broken are reported, not the first.
//!
//! - Operands come before their use; each op has the operands and results that it takes; no factor stands twice in one.
//! - Names in the tables are unique; loss, gradients and constraints fit their values.
//! - The shape of every value is the one that its node's signature gives; sizes agree.
//! - Element types fit: comparisons give truth values, indices are integers, the rest is of one type.
//! - A micro-batch's value becomes a step's only through `accumulate`.
//! - Inputs and states are in the tables, states are assigned at most once and in their own type.
//! - A sharding has one entry a dimension and names each axis at most once.
//! - Every strategy is legal, its results are sharded as it says, and, once agreed, its operands too.
//! - Inputs, states and assignments lie where they were placed.

mod sharded;

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::State;
use crate::{Binary, Dim, Factor, Graph, Node, Op, Part, Scope, Signature, SizeError, Unary, Value};

pub use sharded::verify_sharded;

/// A rule that a graph breaks, and where.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{at}: {kind}")]
pub struct VerifyError {
    /// The value at fault, or the op if it has none.
    pub at: String,
    /// The rule.
    pub kind: Fault,
}

/// The rules, in the words of the message.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// An operand is not computed yet.
    #[error("uses {0}, which is not computed before it")]
    UseBeforeDef(Value),
    /// A value that no node or two nodes define.
    #[error("is defined by {0} nodes")]
    Defined(usize),
    /// Another number of operands or results than the op has.
    #[error("`{op}` takes {needed} operands, but has {found}")]
    Arity {
        /// The op.
        op: String,
        /// What it takes.
        needed: usize,
        /// What it has.
        found: usize,
    },
    /// Another number of results.
    #[error("`{op}` has {needed} results, not {found}")]
    Results {
        /// The op.
        op: String,
        /// What it has.
        needed: usize,
        /// What is written.
        found: usize,
    },
    /// A factor that stands twice in one tensor.
    #[error("factor {0} stands twice in one tensor, which no split can follow")]
    FactorTwice(String),
    /// A name that two entries of the tables have.
    #[error("the name `{0}` is given to two inputs or states")]
    NameTwice(String),
    /// A loss, gradient or constraint that does not fit its value.
    #[error("{0}")]
    Claim(String),
    /// Sizes do not fit.
    #[error("{0}")]
    Size(#[from] SizeError),
    /// The sizes of factors are not those of the operands.
    #[error("has factors of sizes {found:?}, but its operands give {needed:?}")]
    Factors {
        /// As noted.
        found: Vec<usize>,
        /// As computed.
        needed: Vec<usize>,
    },
    /// A factor of nothing.
    #[error("factor {0} is in no operand and no result")]
    Unused(String),
    /// An operand of a pointwise op that has a factor the result lacks.
    #[error(
        "operand {operand} of `{op}` has factor {factor}, which the result lacks; only einsum, reduce_max, top_k and gather reduce"
    )]
    NotBroadcast {
        /// The op.
        op: String,
        /// Which operand.
        operand: usize,
        /// The factor.
        factor: String,
    },
    /// The written shape is not the computed one.
    #[error("has shape {found:?}, but its op computes {needed:?}")]
    Shape {
        /// As noted.
        found: Vec<usize>,
        /// As computed.
        needed: Vec<usize>,
    },
    /// Operands or results of the wrong element type.
    #[error("`{op}` {needed}")]
    Type {
        /// The op.
        op: String,
        /// What it needs.
        needed: String,
    },
    /// A step's value that depends on a micro-batch's.
    #[error(
        "is of a {found:?}, but its operands make it one of a {needed:?}: only accumulate leads from a micro-batch to a step"
    )]
    ScopeOf {
        /// As noted.
        found: Scope,
        /// As computed.
        needed: Scope,
    },
    /// No such entry.
    #[error("there is no {0} `{1}`")]
    Missing(&'static str, String),
    /// An entry that does not fit its node.
    #[error("{0} `{1}` is {2}, but here it is {3}")]
    Entry(&'static str, String, String, String),
    /// Assigned twice.
    #[error("state `{0}` is assigned twice")]
    AssignedTwice(String),
    /// The looked-up factor cannot be found.
    #[error("`{0}` has no single factor that is looked up")]
    NoLookup(String),
    /// No signature of a top-k.
    #[error("`{0}` is no top-k: one reads `b v -> b k two`, with a last dimension of size 2")]
    NotTopK(String),
    /// A random op that draws more numbers at one row, position and step than 32 bits count.
    #[error("draws {0} numbers for one position; at most 2^32 are told apart")]
    Counter(usize),
    /// A part of the step uses a later one.
    #[error("is of part {0}, but uses {1} of part {2}")]
    PartOrder(&'static str, Value, &'static str),
    /// A sharding of another number of dimensions.
    #[error("has {dims} dimensions, but its sharding {sharding} has {found}")]
    Dims {
        /// Dimensions.
        dims: usize,
        /// The sharding.
        sharding: String,
        /// Its entries.
        found: usize,
    },
    /// An axis is named twice.
    #[error("its sharding {1} names axis {0} twice")]
    AxisTwice(String, String),
    /// A partial value by merging that has no whole pairs to merge.
    #[error("its sharding {0} merges pairs, but its last two dimensions are no whole blocks of pairs")]
    NoPairs(String),
    /// A strategy that the op does not have.
    #[error("cannot be split as `{0}`")]
    Strategy(String),
    /// A result that is not as its strategy says.
    #[error("is {found}, but its op computes it as {needed}")]
    Result {
        /// As noted.
        found: String,
        /// As computed.
        needed: String,
    },
    /// An operand would first have to be moved.
    #[error("needs operand {0} as {1}, but it is {2}")]
    NeedsReshard(Value, String, String),
    /// Another place than was decided.
    #[error("`{0}` is placed as {1}, but here it is {2}")]
    Place(String, String, String),
}

/// The states of a graph by name.
type States<'a> = FxHashMap<&'a str, &'a State>;

/// All rules that `graph` breaks.
///
/// # Errors
/// The broken rules.
pub fn verify(graph: &Graph) -> Result<(), Vec<VerifyError>> {
    let mut errors = Vec::new();
    let mut defined = vec![0usize; graph.values.len()];
    let mut parts: Vec<Part> = vec![Part::Forward; graph.values.len()];
    let mut assigned: FxHashSet<&str> = FxHashSet::default();
    let states = graph.states_by_name();
    let mut forms: FxHashMap<*const Signature, Form> = FxHashMap::default();
    for node in &graph.nodes {
        let mut report = |kind| errors.push(VerifyError { at: called(node), kind });
        let early = node.args.iter().find(|v| defined.get(v.index()).is_none_or(|n| *n == 0));
        if let Some(v) = early {
            report(Fault::UseBeforeDef(*v));
        } else {
            let form =
                *forms.entry(Arc::as_ptr(&node.signature)).or_insert_with(|| Form::of(&node.signature));
            check_shapes(graph, node, form, &mut report);
            check_types(graph, &states, node, &mut report);
            check_scope(graph, node, &mut report);
            for v in node
                .args
                .iter()
                .filter(|v| parts[v.index()] > node.mark.part && node.mark.part == Part::Forward)
            {
                report(Fault::PartOrder(node.mark.part.name(), *v, parts[v.index()].name()));
            }
        }
        if let Op::Assign(name) = &node.op
            && !assigned.insert(name)
        {
            report(Fault::AssignedTwice(name.to_string()));
        }
        for v in &node.results {
            defined[v.index()] += 1;
            parts[v.index()] = node.mark.part;
        }
    }
    for (i, n) in defined.iter().enumerate().filter(|(_, n)| **n != 1) {
        errors.push(VerifyError { at: Value(i as u32).to_string(), kind: Fault::Defined(*n) });
    }
    check_claims(graph, &states, &mut errors);
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// What a node is called: the value that it makes, or its op.
fn called(node: &Node) -> String {
    node.results.first().map_or_else(|| node.op.to_string(), Value::to_string)
}

/// What the graph says of values besides its nodes.
fn check_claims(graph: &Graph, states: &States, errors: &mut Vec<VerifyError>) {
    let mut claim = |at: String, kind: Fault| errors.push(VerifyError { at, kind });
    let names = graph.inputs.iter().map(|i| &*i.name).chain(graph.states.iter().map(|s| &*s.name));
    let mut seen: FxHashSet<&str> = FxHashSet::default();
    for name in names.filter(|name| !seen.insert(name)) {
        claim("tables".to_string(), Fault::NameTwice(name.to_string()));
    }
    let shape = |v: Value| graph.values.get(v.index()).map(|t| t.shape.clone());
    for v in graph.loss.iter().flat_map(|l| [l.sum, l.count]) {
        if shape(v) != Some(Vec::new()) {
            claim("loss".to_string(), Fault::Claim(format!("{v} is half of the loss, which is two scalars")));
        }
    }
    for (name, v) in &graph.gradients {
        match states.get(&**name) {
            None => claim(format!("gradient {name}"), Fault::Missing("state", name.to_string())),
            Some(s) if shape(*v) != Some(s.shape()) => {
                let found = shape(*v).unwrap_or_default();
                let text = format!("the state has shape {:?}, but {v} has {found:?}", s.shape());
                claim(format!("gradient {name}"), Fault::Claim(text));
            }
            Some(_) => {}
        }
    }
    for (v, name) in &graph.follows {
        match states.get(&**name) {
            None => claim(format!("follow {v}"), Fault::Missing("state", name.to_string())),
            Some(s) if shape(*v) != Some(s.shape()) => {
                let found = shape(*v).unwrap_or_default();
                let text = format!("the state has shape {:?}, but {v} has {found:?}", s.shape());
                claim(format!("follow {v}"), Fault::Claim(text));
            }
            Some(_) => {}
        }
    }
    for c in &graph.constraints {
        let dims = shape(c.value).map_or(0, |s| s.len());
        let axes: Vec<&crate::Name> = c.dims.iter().flatten().collect();
        if c.dims.len() != dims {
            let text = format!("the value has {dims} dimensions, but the constraint has {}", c.dims.len());
            claim(format!("constrain {}", c.value), Fault::Claim(text));
        }
        if let Some(i) = (1..axes.len()).find(|i| axes[..*i].contains(&axes[*i])) {
            claim(format!("constrain {}", c.value), Fault::Claim(format!("names axis {} twice", axes[i])));
        }
    }
}

fn check_shapes(graph: &Graph, node: &Node, form: Form, report: &mut impl FnMut(Fault)) {
    if let Some(needed) = node.op.arity()
        && needed != node.args.len()
    {
        return report(Fault::Arity { op: node.op.to_string(), needed, found: node.args.len() });
    }
    if node.op.results() != node.results.len() || node.op.results() != node.signature.results.len() {
        let (op, needed, found) = (node.op.to_string(), node.op.results(), node.results.len());
        return report(Fault::Results { op, needed, found });
    }
    if let Some(f) = form.twice {
        return report(Fault::FactorTwice(node.signature.factors[f].to_string()));
    }
    if !form.distinct || !is_sized(graph, node) {
        check_sizes(graph, node, report);
    }
    if form.unused || form.reduces && !node.op.reduces() {
        check_factors(node, report);
    }
    if matches!(node.op, Op::Gather | Op::Scatter) && node.op.looked_up(&node.signature).is_none() {
        report(Fault::NoLookup(node.signature.to_string()));
    }
    if let Op::Random(_) = node.op {
        let inner = node.signature.inner().iter().map(|f| node.sizes[*f]).product::<usize>();
        if inner as u64 > 1 << 32 {
            report(Fault::Counter(inner));
        }
    }
    if node.op == Op::TopK {
        let pairs = node.signature.results[0].last().and_then(|d| node.sizes.get(*d.first()?));
        if node.op.searched(&node.signature).is_none() || pairs != Some(&2) {
            report(Fault::NotTopK(node.signature.to_string()));
        }
    }
}

/// What is true of a signature whatever the sizes and the op.
#[derive(Clone, Copy)]
struct Form {
    /// A factor that stands twice in one tensor.
    twice: Option<Factor>,
    /// Each factor has a name of its own.
    distinct: bool,
    /// A factor is in no operand and no result.
    unused: bool,
    /// There is a result, and a factor of an operand that is in none.
    reduces: bool,
}

impl Form {
    fn of(s: &Signature) -> Form {
        let twice = |dims: &Vec<Dim>| {
            let flat = || dims.iter().flatten();
            let before = |(i, f): &(usize, &Factor)| flat().take(*i).any(|g| g == *f);
            flat().enumerate().find(before).map(|(_, f)| *f)
        };
        let in_args = |f: Factor| s.args.iter().any(|a| Signature::has(a, f));
        let mut lost = (0..s.factors.len()).filter(|f| !s.in_results(*f));
        Form {
            twice: s.args.iter().chain(&s.results).find_map(twice),
            distinct: (1..s.factors.len()).all(|i| !s.factors[..i].contains(&s.factors[i])),
            unused: lost.clone().any(|f| !in_args(f)),
            reduces: !s.results.is_empty() && lost.any(in_args),
        }
    }
}

/// Says which factors are where they may not be.
fn check_factors(node: &Node, report: &mut impl FnMut(Fault)) {
    let s = &node.signature;
    for (f, name) in s.factors.iter().enumerate() {
        let holder = (0..s.args.len()).find(|i| Signature::has(&s.args[*i], f));
        if holder.is_none() && !s.in_results(f) {
            report(Fault::Unused(name.to_string()));
        } else if let Some(operand) = holder
            && !s.results.is_empty()
            && !s.in_results(f)
            && !node.op.reduces()
        {
            report(Fault::NotBroadcast { op: node.op.to_string(), operand, factor: name.to_string() });
        }
    }
}

/// Whether the sizes of the factors make up the shapes of all operands and results.
fn is_sized(graph: &Graph, node: &Node) -> bool {
    let s = &node.signature;
    let made = |(v, dims): (&Value, &Vec<Dim>)| {
        let sizes = dims.iter().map(|d| d.iter().map(|f| node.sizes[*f]).product::<usize>());
        sizes.eq(graph.shape(*v).iter().copied())
    };
    s.factors.len() == node.sizes.len()
        && s.args.len() == node.args.len()
        && node.args.iter().zip(&s.args).all(made)
        && node.results.iter().zip(&s.results).all(made)
}

/// Says what is wrong with sizes.
fn check_sizes(graph: &Graph, node: &Node, report: &mut impl FnMut(Fault)) {
    let shapes: Vec<&[usize]> = node.args.iter().map(|v| graph.shape(*v)).collect();
    let known: Vec<_> = node.signature.factors.iter().cloned().zip(node.sizes.iter().copied()).collect();
    match node.signature.sizes(&shapes, &known) {
        Err(error) => report(error.into()),
        Ok(needed) if needed != node.sizes => report(Fault::Factors { found: node.sizes.clone(), needed }),
        Ok(sizes) => {
            for (v, dims) in node.results.iter().zip(&node.signature.results) {
                let needed = Signature::shape(dims, &sizes);
                if graph.shape(*v) != needed {
                    report(Fault::Shape { found: graph.shape(*v).to_vec(), needed });
                }
            }
        }
    }
}

fn check_types(graph: &Graph, states: &States, node: &Node, report: &mut impl FnMut(Fault)) {
    use crate::DType::{self, Bool, F32, I32, I64, U32};
    let arg = |i: usize| node.args.get(i).map(|v| graph.ty(*v).dtype);
    let result = node.results.first().map(|v| graph.ty(*v).dtype);
    let mut needs = |ok: bool, needed: &str| {
        if !ok {
            report(Fault::Type { op: node.op.to_string(), needed: needed.to_string() });
        }
    };
    let same = (0..node.args.len()).all(|i| arg(i) == result);
    let integer = |t| matches!(t, Some(I32 | I64 | U32));
    match &node.op {
        Op::Einsum { .. } | Op::Add => {
            let one = (1..node.args.len()).all(|i| arg(i) == arg(0));
            let float = |t: Option<DType>| t.is_some_and(DType::is_float);
            let fits = arg(0) == result || float(arg(0)) && float(result);
            needs(one && fits, "needs operands of one type, and a result of that or both floats");
        }
        Op::ReduceMax | Op::Accumulate | Op::Reshard => {
            needs(same, "needs operands and result of one type");
        }
        Op::Unary(Unary::Stop) => needs(same, "needs operand and result of one type"),
        Op::Unary(_) => needs(same && result.is_some_and(DType::is_float), "needs floats"),
        Op::Binary(b) if b.is_comparison() => {
            needs(
                arg(0) == arg(1) && result == Some(Bool),
                "needs operands of one type and a bool as result",
            );
        }
        Op::Binary(Binary::Sub | Binary::Div | Binary::Max | Binary::Min | Binary::Eq | Binary::Ge) => {
            needs(same, "needs operands and result of one type");
        }
        Op::Select => {
            needs(
                arg(0) == Some(Bool) && arg(1) == result && arg(2) == result,
                "needs a bool and two operands of the result's type",
            );
        }
        Op::Gather => {
            needs(
                arg(0) == result && integer(arg(1)),
                "needs an index of integers, and operand 0 of the result's type",
            );
        }
        Op::Scatter => {
            let floats = arg(0).zip(result).is_some_and(|(a, r)| a.is_float() && r.is_float());
            needs(
                (arg(0) == result || floats) && integer(arg(1)),
                "needs an index of integers, and operand 0 of the result's type or both floats",
            );
        }
        Op::TopK => {
            let floats = arg(0).is_some_and(DType::is_float);
            needs(floats && result == Some(F32), "needs floats and gives f32");
        }
        Op::Iota => needs(integer(result) || result == Some(F32), "gives integers or f32"),
        Op::Random(_) => {
            let integers = (0..3).all(|i| integer(arg(i)));
            needs(
                integers && result == Some(F32),
                "needs three operands of integers (row, position, step) and gives f32",
            );
        }
        Op::Input(name) => {
            let Some(input) = graph.inputs.iter().find(|i| i.name == *name) else {
                return report(Fault::Missing("input", name.to_string()));
            };
            let shape: Vec<usize> = input.dims.iter().map(|(_, n)| *n).collect();
            entry(graph, "input", name, input.dtype, &shape, node.results.first(), report);
        }
        Op::State(name) | Op::Assign(name) => {
            let Some(state) = states.get(&**name) else {
                return report(Fault::Missing("state", name.to_string()));
            };
            entry(
                graph,
                "state",
                name,
                state.dtype,
                &state.shape(),
                node.results.first().or(node.args.first()),
                report,
            );
        }
        Op::Const(_) | Op::Cast | Op::Tap(_) => {}
    }
}

fn entry(
    graph: &Graph,
    what: &'static str,
    name: &str,
    dtype: crate::DType,
    shape: &[usize],
    value: Option<&Value>,
    report: &mut impl FnMut(Fault),
) {
    let Some(ty) = value.map(|v| graph.ty(*v)) else { return };
    if ty.dtype != dtype || ty.shape != shape {
        let (is, here) = (format!("{dtype} {shape:?}"), format!("{} {:?}", ty.dtype, ty.shape));
        report(Fault::Entry(what, name.to_string(), is, here));
    }
}

fn check_scope(graph: &Graph, node: &Node, report: &mut impl FnMut(Fault)) {
    let micro = node.args.iter().any(|v| graph.ty(*v).scope == Scope::Micro);
    let needed = Scope::of(&node.op, micro);
    for v in &node.results {
        let found = graph.ty(*v).scope;
        if found != needed {
            report(Fault::ScopeOf { found, needed });
        }
    }
    if matches!(node.op, Op::Assign(_)) && micro {
        report(Fault::ScopeOf { found: Scope::Step, needed: Scope::Micro });
    }
}
