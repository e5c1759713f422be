//! The filetests: a folder a pass, a file a rule. `INSTA_UPDATE=always cargo test` writes the snapshots anew.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ir::program::Program;
use ir::verify::{Fault, VerifyError, verify, verify_sharded};
use ir::verify_program::verify_program;
use ir::{Graph, Name, ShardedGraph, Value, parse_graph, parse_program, parse_sharded};
use meshc_tests::meaning::expect;

/// One test for each folder of a pass, by its name.
macro_rules! passes {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                insta::glob!(concat!("../filetests/", stringify!($name)), "*.mesh", |path| {
                    insta::assert_snapshot!(after(stringify!($name), &read(path)));
                });
            }
        )*
    };
}

passes! { autodiff optimizer untap precision simplify recompute atoms constrain choose reshard lower fuse chain assign last bucket overlap place }

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What the pass makes of a graph or a sharded graph. A pass on programs is shown what all passes before it make of a
/// sharded graph, since programs are long.
fn after(name: &str, text: &str) -> String {
    if let Some(pass) = passes::GRAPH.iter().find(|p| p.name == name) {
        let mut graph = graph(text);
        (pass.run)(&mut graph);
        expect(name, verify(&graph));
        return graph.to_string();
    }
    let mut sharded = sharded(text);
    if let Some(pass) = passes::PLACED.iter().chain(passes::CHOSEN).find(|p| p.name == name) {
        if name == "choose" || name == "reshard" && sharded.shardings.is_empty() {
            passes::PLACED.iter().for_each(|pass| (pass.run)(&mut sharded));
            sharded.decisions = planner::choose::choose(&sharded, &meshc_tests::whole::wire());
            if name == "reshard" {
                (passes::CHOSEN[0].run)(&mut sharded);
            }
        }
        (pass.run)(&mut sharded);
        expect(name, verify_sharded(&sharded));
        return sharded.to_string();
    }
    let mut program = passes::lower(&meshc_tests::meaning::sharded(sharded));
    let place = passes::PROGRAM.iter().position(|p| p.name == name);
    assert!(place.is_some() || name == "lower", "there is no pass {name}");
    for pass in &passes::PROGRAM[..place.map_or(0, |i| i + 1)] {
        (pass.run)(&mut program);
        expect(pass.name, verify_program(&program));
    }
    let text = program.to_string();
    assert_eq!(parse_program(&text).as_ref(), Ok(&program), "what is printed reads back");
    text
}

/// A legal graph whose text form reads back.
fn graph(text: &str) -> Graph {
    let graph = parse_graph(text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(parse_graph(&graph.to_string()).as_ref(), Ok(&graph), "what is printed reads back");
    expect("the reader", verify(&graph));
    graph
}

/// A legal sharded graph whose text form reads back.
fn sharded(text: &str) -> ShardedGraph {
    let sharded = parse_sharded(text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(parse_sharded(&sharded.to_string()).as_ref(), Ok(&sharded), "what is printed reads back");
    expect("the reader", verify_sharded(&sharded));
    sharded
}

#[test]
fn text() {
    insta::glob!("../filetests/text", "*.mesh", |path| {
        let text = read(path);
        let lines = text.lines().map(|l| l.split(';').next().unwrap_or("").trim_end());
        let code: String = lines.filter(|l| !l.is_empty()).map(|l| format!("{l}\n")).collect();
        let printed = match code.split_whitespace().next() {
            Some("sharded") => parse_sharded(&text).map(|s| s.to_string()),
            Some("program") => parse_program(&text).map(|p: Program| p.to_string()),
            Some(_) | None => parse_graph(&text).map(|g| g.to_string()),
        };
        assert_eq!(printed.unwrap_or_else(|e| panic!("{}: {e}", path.display())), code, "{}", path.display());
    });
}

/// What the verifier says of a text, in no order.
fn found(text: &str) -> Vec<VerifyError> {
    let errors = if text.contains("sharded mesh") {
        verify_sharded(&parse_sharded(text).unwrap_or_else(|e| panic!("{e}")))
    } else {
        verify(&parse_graph(text).unwrap_or_else(|e| panic!("{e}")))
    };
    errors.err().unwrap_or_default()
}

/// What the comments `; error: ...` of a text say, each at the value or op of its line.
fn expected(text: &str) -> Vec<String> {
    let mut all = Vec::new();
    for line in text.lines() {
        let mut parts = line.split("; error: ");
        let head = parts.next().unwrap_or("");
        let call = head.split(" : ").next().unwrap_or("");
        let words: Vec<&str> = call.split_whitespace().collect();
        let at = match words.first() {
            Some(&"place" | &"gradient" | &"constrain") => words[..2].join(" "),
            Some(&"input" | &"state") => "tables".to_string(),
            Some(first) => head.split_once(" = ").map_or(first.to_string(), |(result, _)| result.to_string()),
            None => String::new(),
        };
        all.extend(parts.map(|message| format!("{at}: {}", message.trim())));
    }
    all
}

/// The rule's name; a new rule needs a line here, in [`RULES`], and a case.
fn rule(fault: &Fault) -> &'static str {
    match fault {
        Fault::UseBeforeDef(_) => "use before def",
        Fault::Defined(_) => "defined",
        Fault::Arity { .. } => "arity",
        Fault::Results { .. } => "results",
        Fault::FactorTwice(_) => "factor twice",
        Fault::NameTwice(_) => "name twice",
        Fault::Claim(_) => "claim",
        Fault::Size(_) => "size",
        Fault::Factors { .. } => "factors",
        Fault::Unused(_) => "unused",
        Fault::NotBroadcast { .. } => "not broadcast",
        Fault::Shape { .. } => "shape",
        Fault::Type { .. } => "type",
        Fault::ScopeOf { .. } => "scope",
        Fault::Missing(..) => "missing",
        Fault::Entry(..) => "entry",
        Fault::AssignedTwice(_) => "assigned twice",
        Fault::NoLookup(_) => "no lookup",
        Fault::NotTopK(_) => "not top-k",
        Fault::Counter(_) => "counter",
        Fault::NoPairs(_) => "no pairs",
        Fault::PartOrder(..) => "part order",
        Fault::Dims { .. } => "dims",
        Fault::AxisTwice(..) => "axis twice",
        Fault::Strategy(_) => "strategy",
        Fault::Result { .. } => "result",
        Fault::NeedsReshard(..) => "needs reshard",
        Fault::Place(..) => "place",
    }
}

const RULES: [&str; 28] = [
    "use before def",
    "defined",
    "arity",
    "results",
    "factor twice",
    "name twice",
    "claim",
    "size",
    "factors",
    "unused",
    "not broadcast",
    "shape",
    "type",
    "scope",
    "missing",
    "entry",
    "assigned twice",
    "no lookup",
    "not top-k",
    "counter",
    "no pairs",
    "part order",
    "dims",
    "axis twice",
    "strategy",
    "result",
    "needs reshard",
    "place",
];

/// Breaks a rule of a legal graph.
type Change = fn(&mut Graph);

/// What the text form cannot say, since reading it keeps these rules: a change of a legal graph, and what is reported.
const UNWRITABLE: &[(Change, &str)] = &[
    (|g| g.nodes.swap(1, 2), "v2: uses v1, which is not computed before it"),
    (|g| g.nodes.truncate(2), "v2: is defined by 0 nodes"),
    (
        |g| g.nodes[2].results = vec![Value(2), Value(2)],
        "v2: `einsum` has 1 results, not 2 | v2: is defined by 2 nodes",
    ),
    (
        |g| g.values[1].shape = vec![5, 4],
        "v1: has shape [5, 4], but its op computes [3, 4] | v1: state `w` is f32 [3, 4], but here it is f32 [5, 4] | \
         v2: factor d is 3 in one operand and 5 in another",
    ),
    (|g| g.nodes[2].sizes[0] = 7, "v2: factor b is 7 in one operand and 2 in another"),
    (|g| g.nodes[2].sizes.push(9), "v2: has factors of sizes [2, 3, 4, 9], but its operands give [2, 3, 4]"),
    (
        |g| {
            Arc::make_mut(&mut g.nodes[2].signature).factors.push(Name::from("q"));
            g.nodes[2].sizes.push(9);
        },
        "v2: factor q is in no operand and no result",
    ),
];

/// A product of an input and a parameter.
const PRODUCT: &str = "graph
input x : f32 [b=2, d=3]
state w : f32 [d=3, f=4] parameter(trainable, decays) ones
v0 = input(x) : -> b d : f32 2x3 micro | 0 forward
v1 = state(w) : -> d f : f32 3x4 | 0 forward
v2 = einsum v0, v1 : b d, d f -> b f : f32 2x4 micro | 0 forward
";

#[test]
fn verify_reports_every_broken_rule() {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/verify");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let text = read(&path);
        let errors = found(&text);
        let messages: BTreeSet<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(messages, expected(&text).into_iter().collect(), "{}", path.display());
        seen.extend(errors.iter().map(|e| rule(&e.kind)));
    }
    for (change, needed) in UNWRITABLE {
        let mut graph = graph(PRODUCT);
        change(&mut graph);
        let errors = verify(&graph).unwrap_err();
        let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(messages.join(" | "), *needed);
        seen.extend(errors.iter().map(|e| rule(&e.kind)));
    }
    assert_eq!(seen, RULES.into_iter().collect(), "a rule that no case breaks");
}

#[test]
fn a_line_that_cannot_be_read_says_what_was_expected() {
    for (line, message) in WRONG_LINES {
        let error = parse_graph(&format!("{PRODUCT}{line}\n")).expect_err(line);
        assert_eq!(error.to_string(), format!("line 7: {message}"), "{line}");
    }
    for (text, message) in WRONG_SHARDED {
        let error = parse_sharded(text).expect_err(text);
        assert_eq!(error.to_string(), *message, "{text}");
    }
}

/// A line after [`PRODUCT`], and what is said of it.
const WRONG_LINES: &[(&str, &str)] = &[
    ("nonsense", "`nonsense` is no line of a graph: a node reads `v1 = exp v0 : a -> a : f32 4 | 0 forward`"),
    (
        "v3 = exp v2",
        "`v3 = exp v2` is no line of a graph: a node reads `v1 = exp v0 : a -> a : f32 4 | 0 forward`",
    ),
    ("v3 = exp v2 | 0 forward", "a node needs ` : ` and its signature"),
    ("v3 = exp v2 : a b -> a b | 0 forward", "a node with a result needs ` : ` and its type"),
    (
        "v3 = exp v2 : a b : f32 2x4 micro | 0 forward",
        "a signature needs `->`, as in `m k, k n -> m n`: `a b`",
    ),
    ("v3 = expo v2 : a b -> a b : f32 2x4 micro | 0 forward", "there is no op `expo`"),
    ("v3 = exp(2) v2 : a b -> a b : f32 2x4 micro | 0 forward", "`exp` takes no attribute, but has `2`"),
    ("v3 = const : -> () : f32 () | 0 forward", "`const` needs an attribute, as in `const(x)`"),
    ("v3 = const(x) : -> () : f32 () | 0 forward", "`x` is no number"),
    ("v4 = exp v2 : a b -> a b : f32 2x4 micro | 0 forward", "expected v3 here, found v4"),
    ("v3 = exp v9 : a b -> a b : f32 2x4 micro | 0 forward", "v9 is not defined above this line"),
    ("v3 = exp x : a b -> a b : f32 2x4 micro | 0 forward", "`x` is no value: one reads v7"),
    (
        "v3 = exp v2 : a b c -> a b c : f32 2x4 micro | 0 forward",
        "operand 0 has 2 dimensions, but `a b c -> a b c` gives it 3",
    ),
    ("v3 = exp v2 : a a -> a a : f32 2x4 micro | 0 forward", "factor a is 2 in one operand and 4 in another"),
    (
        "v3 = einsum v2, v1 : a b, b c -> a c : f32 2x4 micro | 0 forward",
        "factor b is 4 in one operand and 3 in another",
    ),
    ("v3 = exp v2 : a b -> a b : g32 2x4 micro | 0 forward", "`g32` is no element type"),
    ("v3 = exp v2 : a b -> a b : f32 2by4 micro | 0 forward", "`2by4` is no shape: one reads 8x32, or ()"),
    (
        "v3 = exp v2 : a b -> a b : f32 2x4 mini | 0 forward",
        "`mini` is no scope: a micro-batch's value says `micro`",
    ),
    (
        "v3 = exp v2 : a b -> a b : f32 2x4 micro @ [dp, _] | 0 forward",
        "a sharding, but the file does not start with `sharded mesh`",
    ),
    (
        "v3 = exp v2 : a b -> a b : f32 2x4 micro | forward",
        "after ` | ` stand layer and part, as in `0 forward`",
    ),
    (
        "v3 = exp v2 : a b -> a b : f32 2x4 micro | 0 backward",
        "`backward` is no part: forward, input, weight or update",
    ),
    ("v3 = exp v2 : a b -> a b : f32 2x4 micro | 0 forward colour=red", "a node has no `colour`"),
    (
        "v3 = exp v2 : a b -> a b : f32 2x4 micro | 0 forward tag=softmax.out",
        "`softmax.out` reads composite.instance.role",
    ),
    ("input y f32 [a=4]", "expected `:` before `f32 [a=4]`"),
    ("input y : f32 [a]", "expected `=` before `]`"),
    (
        "state u : f32 [a=4] buffer zeros",
        "a state is a parameter, a master, a moment or the step, not `buffer`",
    ),
    ("state u : f32 [a=4] parameter(trained) zeros", "a parameter is trainable or decays, not `trained`"),
    ("state u : f32 [a=4] parameter() random", "a state starts as zeros, ones or normal(s), not `random`"),
    ("state u : f32 [a=4] step zeros of u", "unexpected `of u`"),
    ("adamw lr", "`lr` reads key=value"),
    ("adamw speed=1", "adamw has no `speed`"),
    ("adamw lr=fast", "`fast` is no number"),
    ("constrain v2 dp", "expected `[dp, _]`"),
    ("gradient w", "a gradient reads `gradient name v7`"),
    ("follow v2", "what follows a state reads `follow v7 name`"),
    ("loss v2", "a loss reads `loss v7 / v8`"),
    ("place x [dp, _]", "`place` before `sharded mesh`"),
    ("schedule 0Q0", "`0Q0` is no action: one reads 2F0 (stage, letter, micro-batch) or 2O"),
];

/// A sharded graph, and what is said of it.
const WRONG_SHARDED: &[(&str, &str)] = &[
    ("graph", "line 1: expected `sharded mesh dp=2,...` at the head of a sharded graph"),
    ("sharded dp=2", "line 1: a sharded graph starts with `sharded mesh dp=2`"),
    ("sharded mesh dp", "line 1: `dp` is no axis: an axis reads name=size, as in `dp=2,tp=2`"),
    ("sharded mesh dp=2\nplace x [tp]", "line 2: the mesh `dp=2` has no axis `tp`"),
    ("sharded mesh dp=2\nplace x dp", "line 2: a sharding reads `[axis, _]`, not `dp`"),
    ("sharded mesh dp=2\nplace x", "line 2: a place reads `place name [axes]`"),
    ("sharded mesh dp=2\nplace x [dp] part(dp)", "line 2: expected `partial(axis)`, not `part(dp)`"),
    (
        "sharded mesh dp=2\nv0 = iota : -> a : f32 4 @ [dp] | 0 forward split{b=dp}",
        "line 2: `-> a` has no factor `b`",
    ),
    (
        "sharded mesh dp=2\nv0 = iota : -> a : f32 4 @ [dp] | 0 forward split{a}",
        "line 2: `a` reads factor=axes",
    ),
    (
        "sharded mesh dp=2\nv0 = iota : -> a : f32 4 @ [dp] | 0 forward split{a=dp",
        "line 2: `split{` without `}`",
    ),
    (
        "sharded mesh dp=2\nv0 = iota : -> a : f32 4 @ [dp] | 0 forward split{pass(dp)}",
        "line 2: a pass reads `pass(axis: 0 1)`",
    ),
];
