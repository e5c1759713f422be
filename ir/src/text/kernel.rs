//! Kernels: a head with loops and element types, and for a map its steps, one a line.

use smallvec::smallvec;

use super::scan::Scan;
use crate::kernel::{
    Access, Body, Chain, Contract, Kernel, Link, Loop, Map, Operand, Register, Scatter, Step, TopK,
};
use crate::{Axes, Binary, DType, Dim, Mesh, Reduce, Unary};

fn show_loop(l: &Loop, mesh: &Mesh) -> String {
    let split = if l.axes.is_empty() { String::new() } else { format!("/{}", mesh.show(&l.axes)) };
    format!("{}={}{split}", l.name, l.size)
}

fn show_loops(loops: &[Loop], mesh: &Mesh) -> String {
    loops.iter().map(|l| show_loop(l, mesh)).collect::<Vec<_>>().join(", ")
}

fn show_access(access: &Access, names: &[&Loop]) -> String {
    let dim = |d: &Dim| match d[..] {
        [l] => names[l].name.to_string(),
        _ => format!("({})", d.iter().map(|l| &*names[*l].name).collect::<Vec<_>>().join(" ")),
    };
    format!("[{}]", access.iter().map(dim).collect::<Vec<_>>().join(", "))
}

fn show_types(types: &[DType]) -> String {
    format!("({})", types.iter().map(|t| t.name()).collect::<Vec<_>>().join(", "))
}

/// The kernel's text; steps are indented by `indent`.
pub(super) fn show(kernel: &Kernel, mesh: &Mesh, indent: &str) -> String {
    let types = format!("{} -> {}", show_types(&kernel.reads), show_types(&kernel.writes));
    let names = kernel.body.loops();
    match &kernel.body {
        Body::Map(map) => {
            let (outer, row) = map.loops.split_at(map.loops.len() - map.row);
            let mut text = format!("map [{} | {}]", show_loops(outer, mesh), show_loops(row, mesh));
            if !map.looked.is_empty() {
                text += &format!(" looked [{}]", show_loops(&map.looked, mesh));
            }
            text += &format!(" {types} {{\n");
            for (i, step) in map.steps.iter().enumerate() {
                text += &format!("{indent}  {}\n", show_step(i, step, &names));
            }
            text + indent + "}"
        }
        Body::Contract(c) => format!(
            "contract({:?}) [{}] {types} {}, {} -> {}",
            c.scale,
            show_loops(&c.loops, mesh),
            show_access(&c.a, &names),
            show_access(&c.b, &names),
            show_access(&c.out, &names)
        ),
        Body::Scatter(s) => format!(
            "scatter [{}] {types} {}, {} -> {} by {}",
            show_loops(&s.loops, mesh),
            show_access(&s.source, &names),
            show_access(&s.index, &names),
            show_access(&s.out, &names),
            names[s.looked].name
        ),
        Body::TopK(t) => format!(
            "top_k [{}] {types} {} -> {} over {}",
            show_loops(&t.loops, mesh),
            show_access(&t.source, &names),
            show_access(&t.out, &names),
            names[t.searched].name
        ),
        Body::Chain(c) => {
            let mut text = format!("chain [{}] {types} {{\n", show_loops(&c.loops, mesh));
            for link in &c.links {
                let (reads, writes) = (show_operands(&link.reads), show_operands(&link.writes));
                let kernel = show(&link.kernel, mesh, &format!("{indent}  "));
                text += &format!("{indent}  {reads} -> {writes} {kernel}\n");
            }
            text + indent + "}"
        }
    }
}

fn show_operands(of: &[Operand]) -> String {
    let one = |o: &Operand| match o {
        Operand::Outside(i) => i.to_string(),
        Operand::Between(i) => format!("i{i}"),
    };
    of.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn show_step(i: usize, step: &Step, names: &[&Loop]) -> String {
    let list = |all: &[Register]| all.iter().map(|r| format!("r{r}")).collect::<Vec<_>>().join(", ");
    let right = match step {
        Step::Load { read, access } => format!("load {read} {}", show_access(access, names)),
        Step::LoadAt { read, access, looked, at } => {
            format!("load_at {read} {} {}=r{at}", show_access(access, names), names[*looked].name)
        }
        Step::Const(c) => format!("const {c:?}"),
        Step::Iota(l) => format!("iota {}", names[*l].name),
        Step::Random { draw, counter, inner } => {
            let inner = inner.iter().map(|l| smallvec![*l]).collect();
            format!("random({draw}) {} {}", list(counter), show_access(&inner, names))
        }
        Step::Unary(u, r) => format!("{} r{r}", u.name()),
        Step::Binary(b, x, y) => format!("{} r{x}, r{y}", b.name()),
        Step::Add(all) => format!("add {}", list(all)),
        Step::Mul(scale, all) if *scale == 1.0 => format!("mul {}", list(all)),
        Step::Mul(scale, all) => format!("mul({scale:?}) {}", list(all)),
        Step::Select(c, a, b) => format!("select r{c}, r{a}, r{b}"),
        Step::Cast(t, r) => format!("cast({t}) r{r}"),
        Step::Row(k, r) => format!("row_{} r{r}", k.name()),
        Step::Store { write, access, of } => {
            return format!("store {write} {} r{of}", show_access(access, names));
        }
        Step::Accumulate { write, access, of, reduce } => {
            return format!("accumulate({}) {write} {} r{of}", reduce.name(), show_access(access, names));
        }
    };
    format!("r{i} = {}", right.trim_end())
}

/// A kernel's head has been read.
#[derive(Debug)]
pub(super) enum Head {
    /// Nothing follows.
    Done(Kernel),
    /// More lines follow.
    Open(Box<Open>),
}

/// A kernel of which lines follow, up to a line `}`: the steps of a map, or the kernels of a chain.
#[derive(Debug)]
pub(super) struct Open {
    /// What was read so far.
    pub kernel: Kernel,
    /// A map of a chain that is not read to its end.
    link: Option<Link>,
}

impl Open {
    fn new(reads: Vec<DType>, writes: Vec<DType>, body: Body) -> Open {
        Open { kernel: Kernel { reads, writes, body }, link: None }
    }

    /// Reads a line: whether it was the last.
    pub fn line(&mut self, line: &str, mesh: &Mesh) -> Result<bool, String> {
        let ends = line == "}";
        match &mut self.kernel.body {
            Body::Map(_) if ends => Ok(true),
            Body::Map(map) => {
                let step = parse_step(line, map)?;
                map.steps.push(step);
                Ok(false)
            }
            Body::Chain(chain) => {
                match &mut self.link {
                    Some(link) if ends => chain.links.push(link.clone()),
                    Some(Link { kernel: Kernel { body: Body::Map(map), .. }, .. }) => {
                        let step = parse_step(line, map)?;
                        map.steps.push(step);
                        return Ok(false);
                    }
                    Some(_) => return Err("a chain is of maps and contractions".to_string()),
                    None if ends => return Ok(true),
                    None => {
                        let (link, open) = parse_link(line, mesh)?;
                        match open {
                            true => self.link = Some(link),
                            false => chain.links.push(link),
                        }
                        return Ok(false);
                    }
                }
                self.link = None;
                Ok(false)
            }
            Body::Contract(_) | Body::Scatter(_) | Body::TopK(_) => Err(format!("unexpected `{line}`")),
        }
    }
}

/// Reads a kernel of a chain, or the head of a map: then it is open.
fn parse_link(line: &str, mesh: &Mesh) -> Result<(Link, bool), String> {
    let wrong = || "a kernel of a chain reads `0, i0 -> i1 map ...`".to_string();
    let (reads, rest) = line.split_once("->").ok_or_else(wrong)?;
    let split = rest.find(['m', 'c', 's', 't']).ok_or_else(wrong)?;
    let (kernel, open) = match parse_head(&mut Scan::new(&rest[split..]), mesh)? {
        Head::Done(kernel) => (kernel, false),
        Head::Open(open) => (open.kernel, true),
    };
    Ok((Link { kernel, reads: parse_operands(reads)?, writes: parse_operands(&rest[..split])? }, open))
}

fn parse_operands(text: &str) -> Result<Vec<Operand>, String> {
    let words = text.split(',').map(str::trim).filter(|t| !t.is_empty());
    let one = |t: &str| match t.strip_prefix('i') {
        Some(number) => number.parse().map(Operand::Between),
        None => t.parse().map(Operand::Outside),
    };
    words.map(|t| one(t).map_err(|_| format!("`{t}` is no operand of a chain"))).collect()
}

pub(super) fn parse_head(scan: &mut Scan, mesh: &Mesh) -> Result<Head, String> {
    if scan.eat("map ") {
        scan.expect("[")?;
        let outer = parse_loops(scan, "|", mesh)?;
        let inner = parse_loops(scan, "]", mesh)?;
        let row = inner.len();
        let loops: Vec<Loop> = outer.into_iter().chain(inner).collect();
        let looked = match scan.eat("looked ") {
            true => {
                scan.expect("[")?;
                parse_loops(scan, "]", mesh)?
            }
            false => Vec::new(),
        };
        let (reads, writes) = parse_types(scan)?;
        scan.expect("{")?;
        let body = Body::Map(Map { loops, row, looked, steps: Vec::new() });
        return Ok(Head::Open(Box::new(Open::new(reads, writes, body))));
    }
    if scan.eat("contract(") {
        let scale = scan.number()?;
        scan.expect(")")?;
        scan.expect("[")?;
        let loops = parse_loops(scan, "]", mesh)?;
        let (reads, writes) = parse_types(scan)?;
        let names: Vec<&Loop> = loops.iter().collect();
        let a = parse_access(scan, &names)?;
        scan.expect(",")?;
        let b = parse_access(scan, &names)?;
        scan.expect("->")?;
        let out = parse_access(scan, &names)?;
        return Ok(Head::Done(Kernel {
            reads,
            writes,
            body: Body::Contract(Contract { loops, a, b, out, scale }),
        }));
    }
    if scan.eat("top_k ") {
        scan.expect("[")?;
        let loops = parse_loops(scan, "]", mesh)?;
        let (reads, writes) = parse_types(scan)?;
        let names: Vec<&Loop> = loops.iter().collect();
        let source = parse_access(scan, &names)?;
        scan.expect("->")?;
        let out = parse_access(scan, &names)?;
        scan.expect("over ")?;
        let searched = loop_named(scan.word()?, &names)?;
        let body = Body::TopK(TopK { loops, source, out, searched });
        return Ok(Head::Done(Kernel { reads, writes, body }));
    }
    if scan.eat("chain ") {
        scan.expect("[")?;
        let loops = parse_loops(scan, "]", mesh)?;
        let (reads, writes) = parse_types(scan)?;
        scan.expect("{")?;
        let body = Body::Chain(Chain { loops, links: Vec::new() });
        return Ok(Head::Open(Box::new(Open::new(reads, writes, body))));
    }
    scan.expect("scatter ")?;
    scan.expect("[")?;
    let loops = parse_loops(scan, "]", mesh)?;
    let (reads, writes) = parse_types(scan)?;
    let names: Vec<&Loop> = loops.iter().collect();
    let source = parse_access(scan, &names)?;
    scan.expect(",")?;
    let index = parse_access(scan, &names)?;
    scan.expect("->")?;
    let out = parse_access(scan, &names)?;
    scan.expect("by ")?;
    let looked = loop_named(scan.word()?, &names)?;
    Ok(Head::Done(Kernel {
        reads,
        writes,
        body: Body::Scatter(Scatter { loops, source, index, out, looked }),
    }))
}

fn parse_loops(scan: &mut Scan, close: &str, mesh: &Mesh) -> Result<Vec<Loop>, String> {
    scan.list(close, |scan| {
        let name = scan.word()?.into();
        scan.expect("=")?;
        let size = scan.number_before_slash()?;
        let mut axes = Axes::new();
        if scan.eat("/") {
            for axis in scan.word()?.split('.') {
                axes.extend(
                    mesh.find(axis).ok_or_else(|| format!("the mesh `{mesh}` has no axis `{axis}`"))?,
                );
            }
        }
        Ok(Loop { name, size, axes })
    })
}

fn parse_types(scan: &mut Scan) -> Result<(Vec<DType>, Vec<DType>), String> {
    scan.expect("(")?;
    let reads = scan.list(")", |s| s.word()?.parse())?;
    scan.expect("->")?;
    scan.expect("(")?;
    Ok((reads, scan.list(")", |s| s.word()?.parse())?))
}

fn loop_named(name: &str, names: &[&Loop]) -> Result<usize, String> {
    names.iter().position(|l| &*l.name == name).ok_or_else(|| format!("there is no loop `{name}`"))
}

fn parse_access(scan: &mut Scan, names: &[&Loop]) -> Result<Access, String> {
    scan.expect("[")?;
    scan.list("]", |scan| {
        if !scan.eat("(") {
            return Ok(smallvec![loop_named(scan.word()?, names)?]);
        }
        let mut dim = Dim::new();
        while !scan.eat(")") {
            dim.push(loop_named(scan.word()?, names)?);
        }
        Ok(dim)
    })
}

/// Reads a step of `map`.
pub(super) fn parse_step(line: &str, map: &Map) -> Result<Step, String> {
    let names: Vec<&Loop> = map.loops.iter().chain(&map.looked).collect();
    let mut scan = Scan::new(line);
    let defined = line.trim_start().starts_with('r');
    if defined {
        let r = scan.id("r")?;
        if r != map.steps.len() {
            return Err(format!("expected r{} here, found r{r}", map.steps.len()));
        }
        scan.expect("=")?;
    }
    let name = scan.word()?;
    let attribute = if scan.eat("(") { Some(scan.until(")")?) } else { None };
    let reg = |scan: &mut Scan| -> Result<Register, String> {
        let r = scan.id("r")?;
        if r < map.steps.len() { Ok(r) } else { Err(format!("r{r} is not defined above this line")) }
    };
    let step = match name {
        "load" => Step::Load { read: scan.number()?, access: parse_access(&mut scan, &names)? },
        "load_at" => {
            let read = scan.number()?;
            let access = parse_access(&mut scan, &names)?;
            let looked = loop_named(scan.word()?, &names)?;
            scan.expect("=")?;
            Step::LoadAt { read, access, looked, at: reg(&mut scan)? }
        }
        "const" => Step::Const(scan.number()?),
        "iota" => Step::Iota(loop_named(scan.word()?, &names)?),
        "random" => {
            let draw = attribute.ok_or("a random number reads `random(name) r0, r1, r2 [d]`")?.parse()?;
            let all = registers(&mut scan, reg)?;
            let [row, position, step] = all[..] else {
                return Err("random takes three registers: row, position, step".to_string());
            };
            let inner = parse_access(&mut scan, &names)?.into_iter().flatten().collect();
            Step::Random { draw, counter: [row, position, step], inner }
        }
        "add" | "mul" => {
            let all = if scan.done() { Vec::new() } else { registers(&mut scan, reg)? };
            let scale =
                attribute.map_or(Ok(1.0), |a| a.parse().map_err(|_| format!("`{a}` is no number")))?;
            let all = all.into();
            if name == "add" { Step::Add(all) } else { Step::Mul(scale, all) }
        }
        "select" => {
            let all = registers(&mut scan, reg)?;
            let [c, a, b] = all[..] else { return Err("select takes three registers".to_string()) };
            Step::Select(c, a, b)
        }
        "cast" => Step::Cast(attribute.ok_or("a cast reads `cast(f32) r1`")?.parse()?, reg(&mut scan)?),
        "row_sum" => Step::Row(Reduce::Sum, reg(&mut scan)?),
        "row_max" => Step::Row(Reduce::Max, reg(&mut scan)?),
        "store" => Step::Store {
            write: scan.number()?,
            access: parse_access(&mut scan, &names)?,
            of: reg(&mut scan)?,
        },
        "accumulate" => {
            let reduce = match attribute {
                Some("sum") => Reduce::Sum,
                Some("max") => Reduce::Max,
                Some(_) | None => return Err("an accumulate reads `accumulate(sum) 0 [a] r1`".to_string()),
            };
            let (write, access) = (scan.number()?, parse_access(&mut scan, &names)?);
            Step::Accumulate { write, access, of: reg(&mut scan)?, reduce }
        }
        other => {
            let unary = Unary::ALL.into_iter().find(|u| u.name() == other);
            let binary = Binary::ALL.into_iter().find(|b| b.name() == other);
            match (unary, binary) {
                (Some(u), _) => Step::Unary(u, reg(&mut scan)?),
                (None, Some(b)) => {
                    let all = registers(&mut scan, reg)?;
                    let [x, y] = all[..] else { return Err(format!("{other} takes two registers")) };
                    Step::Binary(b, x, y)
                }
                (None, None) => return Err(format!("there is no step `{other}`")),
            }
        }
    };
    if defined != step.defines() {
        return Err(format!("`{name}` defines {} register", if step.defines() { "a" } else { "no" }));
    }
    if scan.done() { Ok(step) } else { Err(format!("unexpected `{}`", scan.rest())) }
}

fn registers<'a>(
    scan: &mut Scan<'a>,
    reg: impl Fn(&mut Scan<'a>) -> Result<Register, String>,
) -> Result<Vec<Register>, String> {
    let mut all = vec![reg(scan)?];
    while scan.eat(",") {
        all.push(reg(scan)?);
    }
    Ok(all)
}
