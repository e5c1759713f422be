//! Graphs and sharded graphs: a line for each entry of a table and each node.
//!
//! ```text
//! v3 = einsum v1, v2 : b s d, d f -> b s f : f32 8x32x64 micro @ [dp, _, tp] | 0 forward split{b=dp f=tp}
//! ```

use std::fmt;
use std::sync::Arc;

use super::scan::{Scan, parse_shape, show_shape};
use super::{ParseError, code, tables};
use crate::graph::{Constraint, Loss, Mark, Precision, Recompute, Tag};
use crate::rows::Strategy;
use crate::schedule::Schedule;
use crate::sharded::Reshard;
use crate::{
    Decisions, Graph, Mesh, Name, Node, Op, Part, Scope, ShardedGraph, Sharding, Signature, Value, ValueType,
};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "graph")?;
        write_tables(self, f)?;
        for node in &self.nodes {
            writeln!(f, "{}", show_node(self, node, None))?;
        }
        write_ends(self, f)
    }
}

impl fmt::Display for ShardedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let agreed = if self.agreed { " agreed" } else { "" };
        writeln!(f, "sharded mesh {}{agreed}", self.mesh)?;
        for (name, sharding) in &self.decisions.places {
            let free = if self.decisions.free.contains(name) { " free" } else { "" };
            let again = if self.decisions.again.contains(name) { " again" } else { "" };
            writeln!(f, "place {name} {}{again}{free}", sharding.show(&self.mesh))?;
        }
        self.decisions.bucket_bytes.iter().try_for_each(|n| writeln!(f, "buckets {n}"))?;
        for row in &self.decisions.schedule.rows {
            let actions: Vec<String> = row.iter().map(ToString::to_string).collect();
            writeln!(f, "schedule {}", actions.join(" "))?;
        }
        write_tables(&self.graph, f)?;
        for (i, node) in self.graph.nodes.iter().enumerate() {
            writeln!(f, "{}", show_node(&self.graph, node, Some((self, i))))?;
        }
        for (v, copies) in &self.decisions.copies {
            for Reshard { from, to } in copies {
                writeln!(f, "copy {v} {} from {}", to.show(&self.mesh), from.show(&self.mesh))?;
            }
        }
        write_ends(&self.graph, f)
    }
}

fn write_tables(graph: &Graph, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if graph.layers > 0 {
        writeln!(f, "layers {}", graph.layers)?;
    }
    if !graph.stages.is_empty() {
        let stages: Vec<String> = graph.stages.iter().map(ToString::to_string).collect();
        writeln!(f, "stages {}", stages.join(" "))?;
    }
    graph.inputs.iter().try_for_each(|i| writeln!(f, "{}", tables::show_input(i)))?;
    graph.states.iter().try_for_each(|s| writeln!(f, "{}", tables::show_state(s)))?;
    if graph.dump {
        writeln!(f, "dump")?;
    }
    if let Some(Precision { gradients, sums }) = graph.precision {
        writeln!(f, "precision bf16 gradients={gradients} sums={sums}")?;
    }
    if graph.recompute != Recompute::None {
        writeln!(f, "recompute {}", graph.recompute.name())?;
    }
    if graph.scatters {
        writeln!(f, "scatters")?;
    }
    graph.optimizer.iter().try_for_each(|a| writeln!(f, "{}", tables::show_adamw(a)))
}

fn write_ends(graph: &Graph, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for c in &graph.constraints {
        let dim = |names: &Vec<Name>| if names.is_empty() { "_".to_string() } else { names.join(".") };
        let even = if c.even { " even" } else { "" };
        writeln!(
            f,
            "constrain {} [{}]{even}",
            c.value,
            c.dims.iter().map(dim).collect::<Vec<_>>().join(", ")
        )?;
    }
    graph.follows.iter().try_for_each(|(v, name)| writeln!(f, "follow {v} {name}"))?;
    graph.gradients.iter().try_for_each(|(name, v)| writeln!(f, "gradient {name} {v}"))?;
    graph.loss.iter().try_for_each(|l| writeln!(f, "loss {} / {}", l.sum, l.count))
}

fn list<T: ToString>(of: &[T]) -> String {
    of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn show_node(graph: &Graph, node: &Node, sharded: Option<(&ShardedGraph, usize)>) -> String {
    let mut text = String::new();
    if !node.results.is_empty() {
        text += &format!("{} = ", list(&node.results));
    }
    text += &node.op.to_string();
    if !node.args.is_empty() {
        text += &format!(" {}", list(&node.args));
    }
    text += &format!(" : {}", node.signature);
    let types: Vec<String> =
        node.results.iter().map(|v| show_type(graph, *v, sharded.map(|s| s.0))).collect();
    if !types.is_empty() {
        text += &format!(" : {}", types.join(" & "));
    }
    text += &format!(" | {} {}", node.mark.layer, node.mark.part.name());
    if let Some(tag) = &node.tag {
        text += &format!(" tag={}.{}.{}", tag.composite, tag.instance, tag.role);
    }
    node.of.iter().for_each(|v| text += &format!(" of={v}"));
    node.like.iter().for_each(|v| text += &format!(" like={v}"));
    if let Some((s, i)) = sharded
        && let Some(strategy) = s.decisions.strategies.get(i)
    {
        let split = strategy.show(node, &s.mesh);
        if !split.is_empty() {
            text += &format!(" split{{{split}}}");
        }
    }
    text
}

fn show_type(graph: &Graph, value: Value, sharded: Option<&ShardedGraph>) -> String {
    let ty = graph.ty(value);
    let scope = match ty.scope {
        Scope::Micro => " micro",
        Scope::Step => "",
    };
    let mut text = format!("{} {}{scope}", ty.dtype, show_shape(&ty.shape));
    if let Some(s) = sharded
        && let Some(sharding) = s.shardings.get(value.index())
    {
        text += &format!(" @ {}", sharding.show(&s.mesh));
    }
    text
}

/// Reads a graph.
///
/// # Errors
/// The first line that cannot be read.
pub fn parse_graph(text: &str) -> Result<Graph, ParseError> {
    let parsed = read(text)?;
    match parsed.mesh {
        None => Ok(parsed.graph),
        Some(_) => {
            Err(ParseError { line: 1, message: "expected a graph, but this is a sharded graph".to_string() })
        }
    }
}

/// Reads a sharded graph.
///
/// # Errors
/// The first line that cannot be read.
pub fn parse_sharded(text: &str) -> Result<ShardedGraph, ParseError> {
    let Read { graph, mesh, agreed, decisions, shardings } = read(text)?;
    let mesh = mesh.ok_or(ParseError {
        line: 1,
        message: "expected `sharded mesh dp=2,...` at the head of a sharded graph".to_string(),
    })?;
    Ok(ShardedGraph { mesh, graph, decisions, shardings, agreed })
}

/// What stands behind ` | `.
struct Attributes {
    mark: Mark,
    tag: Option<Tag>,
    of: Option<Value>,
    like: Option<Value>,
}

#[derive(Default)]
struct Read {
    graph: Graph,
    mesh: Option<Mesh>,
    agreed: bool,
    decisions: Decisions,
    shardings: Vec<Sharding>,
}

/// Either every value has a sharding or none.
fn all_or_none(read: &Read) -> Result<(), String> {
    match read.shardings.len() {
        0 => Ok(()),
        n if n == read.graph.values.len() => Ok(()),
        n => Err(format!("{n} of {} values have a sharding: all have one, or none", read.graph.values.len())),
    }
}

fn read(text: &str) -> Result<Read, ParseError> {
    let mut read = Read::default();
    for (i, line) in text.lines().enumerate() {
        let line = code(line).trim();
        if !line.is_empty() {
            read.line(line).map_err(|message| ParseError { line: i + 1, message })?;
        }
    }
    let at_end = |message| ParseError { line: text.lines().count(), message };
    all_or_none(&read).map_err(at_end)?;
    let rows = std::mem::take(&mut read.decisions.schedule.rows);
    read.decisions.schedule = Schedule::of_rows(rows).map_err(at_end)?;
    Ok(read)
}

impl Read {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "graph" if rest.is_empty() => {}
            "sharded" => {
                let rest = rest
                    .strip_prefix("mesh")
                    .ok_or("a sharded graph starts with `sharded mesh dp=2`")?
                    .trim();
                let (mesh, agreed) = match rest.strip_suffix("agreed") {
                    Some(mesh) => (mesh.trim(), true),
                    None => (rest, false),
                };
                self.mesh = Some(Mesh::parse(mesh).map_err(|e| e.to_string())?);
                self.agreed = agreed;
            }
            "place" => {
                let (name, sharding) = rest.split_once(' ').ok_or("a place reads `place name [axes]`")?;
                let (sharding, free) =
                    sharding.strip_suffix(" free").map_or((sharding, false), |s| (s, true));
                if free {
                    self.decisions.free.insert(name.into());
                }
                let (sharding, again) =
                    sharding.strip_suffix(" again").map_or((sharding, false), |s| (s, true));
                if again {
                    self.decisions.again.insert(name.into());
                }
                let sharding =
                    Sharding::parse(sharding, self.mesh.as_ref().ok_or("`place` before `sharded mesh`")?)?;
                self.decisions.places.insert(name.into(), sharding);
            }
            "buckets" => {
                let bytes = rest.parse().map_err(|_| format!("buckets of `{rest}` bytes"))?;
                self.decisions.bucket_bytes = Some(bytes);
            }
            "schedule" => {
                let row = rest.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
                self.decisions.schedule.rows.push(row);
            }
            "layers" => {
                self.graph.layers = rest.parse().map_err(|_| format!("`{rest}` is no number of layers"))?;
            }
            "stages" => {
                let stage = |s: &str| s.parse().map_err(|_| format!("`{s}` is no stage"));
                self.graph.stages = rest.split_whitespace().map(stage).collect::<Result<_, _>>()?;
                if !self.graph.stages.is_sorted() {
                    return Err("stages ascend with the depth of the model".to_string());
                }
            }
            "input" => self.graph.inputs.push(tables::parse_input(rest)?),
            "state" => self.graph.states.push(tables::parse_state(rest)?),
            "adamw" => self.graph.optimizer = Some(tables::parse_adamw(rest)?),
            "dump" if rest.is_empty() => self.graph.dump = true,
            "precision" => {
                let wrong = "precision reads `precision bf16 gradients=f32 sums=f32`";
                let types = rest.strip_prefix("bf16 gradients=").and_then(|r| r.split_once(" sums="));
                let (gradients, sums) = types.ok_or(wrong)?;
                let (gradients, sums) = (gradients.parse()?, sums.parse()?);
                self.graph.precision = Some(Precision { gradients, sums });
            }
            "recompute" => {
                let kind = Recompute::ALL.into_iter().find(|r| r.name() == rest);
                self.graph.recompute =
                    kind.ok_or_else(|| format!("`{rest}` is not none, selective or full"))?;
            }
            "scatters" if rest.is_empty() => self.graph.scatters = true,
            "constrain" => self.constrain(rest)?,
            "copy" => self.copy(rest)?,
            "follow" => {
                let (v, name) = rest.split_once(' ').ok_or("what follows a state reads `follow v7 name`")?;
                self.graph.follows.push((value(v, &self.graph)?, name.into()));
            }
            "gradient" => {
                let (name, v) = rest.split_once(' ').ok_or("a gradient reads `gradient name v7`")?;
                self.graph.gradients.push((name.into(), value(v, &self.graph)?));
            }
            "loss" => {
                let (sum, count) = rest.split_once('/').ok_or("a loss reads `loss v7 / v8`")?;
                self.graph.loss =
                    Some(Loss { sum: value(sum, &self.graph)?, count: value(count, &self.graph)? });
            }
            _ => self.node(line)?,
        }
        Ok(())
    }

    fn constrain(&mut self, text: &str) -> Result<(), String> {
        let (v, dims) = text.split_once(' ').ok_or("a constraint reads `constrain v7 [dp, _]`")?;
        let (dims, even) = dims.trim().strip_suffix(" even").map_or((dims, false), |d| (d, true));
        let inner =
            dims.trim().strip_prefix('[').and_then(|d| d.strip_suffix(']')).ok_or("expected `[dp, _]`")?;
        let dim =
            |d: &str| d.trim().split('.').filter(|n| *n != "_" && !n.is_empty()).map(Name::from).collect();
        let dims = if inner.trim().is_empty() { Vec::new() } else { inner.split(',').map(dim).collect() };
        self.graph.constraints.push(Constraint { value: value(v, &self.graph)?, dims, even });
        Ok(())
    }

    fn copy(&mut self, text: &str) -> Result<(), String> {
        let wrong = "a copy reads `copy v7 [dp, _] from [_, dp]`";
        let (v, shardings) = text.split_once(' ').ok_or(wrong)?;
        let (to, from) = shardings.split_once(" from ").ok_or(wrong)?;
        let mesh = self.mesh.as_ref().ok_or("`copy` before `sharded mesh`")?;
        let copy = Reshard { from: Sharding::parse(from, mesh)?, to: Sharding::parse(to, mesh)? };
        self.decisions.copies.entry(value(v, &self.graph)?).or_default().push(copy);
        Ok(())
    }

    fn node(&mut self, line: &str) -> Result<(), String> {
        let (body, attributes) = line.split_once(" | ").ok_or_else(|| {
            format!("`{line}` is no line of a graph: a node reads `v1 = exp v0 : a -> a : f32 4 | 0 forward`")
        })?;
        let mut parts = body.split(" : ").map(str::trim);
        let head = parts.next().unwrap_or("");
        let signature = Signature::parse(parts.next().ok_or("a node needs ` : ` and its signature")?)?;
        let types = parts.next();
        if let Some(more) = parts.next() {
            return Err(format!("unexpected ` : {more}`: a node has an op, a signature and types"));
        }
        let (results, call) = head.split_once(" = ").map_or((None, head), |(r, c)| (Some(r), c));
        let mut scan = Scan::new(call);
        let name = scan.word()?;
        let attribute = if scan.eat("(") { Some(scan.until(")")?) } else { None };
        let op = Op::parse(name, attribute)?;
        let args: Vec<Value> = match scan.done() {
            true => Vec::new(),
            false => scan.rest().split(',').map(|v| value(v, &self.graph)).collect::<Result<_, _>>()?,
        };
        let mut results_now = Vec::new();
        if let Some(results) = results {
            let types = types.ok_or("a node with a result needs ` : ` and its type")?;
            for (v, ty) in results.split(',').zip(types.split(" & ")) {
                let expected = Value(self.graph.values.len() as u32);
                if v.trim() != expected.to_string() {
                    return Err(format!("expected {expected} here, found {}", v.trim()));
                }
                self.value_type(ty)?;
                results_now.push(expected);
            }
            if results.split(',').count() != results_now.len()
                || types.split(" & ").count() != results_now.len()
            {
                return Err("as many types as results are needed".to_string());
            }
        }
        let mut known: Vec<(Name, usize)> = Vec::new();
        let of_results = signature.results.iter().zip(&results_now);
        for (dims, v) in of_results {
            for (dim, size) in dims.iter().zip(self.graph.shape(*v)) {
                if let [f] = dim[..] {
                    known.push((signature.factors[f].clone(), *size));
                }
            }
        }
        let shapes: Vec<&[usize]> = args.iter().map(|v| self.graph.shape(*v)).collect();
        let from_args = signature.sizes(&shapes, &[]).or_else(|_| signature.sizes(&shapes, &known));
        let sizes = from_args.map_err(|e| e.to_string())?;
        let (attributes, split) = match attributes.split_once("split{") {
            Some((a, s)) => (a, s.trim().strip_suffix('}').ok_or("`split{` without `}`")?),
            None => (attributes, ""),
        };
        let Attributes { mark, tag, of, like } = self.attributes(attributes)?;
        let signature = Arc::new(signature);
        let node = Node { op, signature, sizes, args, results: results_now, mark, tag, of, like };
        if let Some(mesh) = &self.mesh {
            self.decisions.strategies.push(Strategy::parse(split, &node, mesh)?);
        }
        self.graph.nodes.push(node);
        Ok(())
    }

    fn value_type(&mut self, text: &str) -> Result<(), String> {
        let (ty, sharding) = text.split_once(" @ ").map_or((text, None), |(t, s)| (t, Some(s)));
        let mut words = ty.split_whitespace();
        let dtype = words.next().ok_or("a type reads `f32 8x32 micro`")?.parse()?;
        let shape = parse_shape(words.next().ok_or("a type needs a shape, as in `f32 8x32`")?)?;
        let scope = match words.next() {
            None => Scope::Step,
            Some("micro") => Scope::Micro,
            Some(other) => return Err(format!("`{other}` is no scope: a micro-batch's value says `micro`")),
        };
        if let Some(more) = words.next() {
            return Err(format!("unexpected `{more}` behind a type"));
        }
        self.graph.values.push(ValueType { dtype, shape, scope });
        if let Some(text) = sharding {
            let mesh =
                self.mesh.as_ref().ok_or("a sharding, but the file does not start with `sharded mesh`")?;
            self.shardings.push(Sharding::parse(text, mesh)?);
        }
        Ok(())
    }

    fn attributes(&self, text: &str) -> Result<Attributes, String> {
        let mut words = text.split_whitespace();
        let layer = words
            .next()
            .and_then(|w| w.parse().ok())
            .ok_or("after ` | ` stand layer and part, as in `0 forward`")?;
        let part = words.next().unwrap_or("");
        let part = Part::ALL
            .into_iter()
            .find(|p| p.name() == part)
            .ok_or_else(|| format!("`{part}` is no part: forward, input, weight or update"))?;
        let (mut tag, mut of, mut like) = (None, None, None);
        for word in words {
            let (key, text) = word.split_once('=').ok_or_else(|| format!("`{word}` reads key=value"))?;
            match key {
                "tag" => {
                    let mut parts = text.splitn(3, '.');
                    let mut next =
                        || parts.next().ok_or_else(|| format!("`{text}` reads composite.instance.role"));
                    let composite = next()?.into();
                    let instance =
                        next()?.parse().map_err(|_| format!("`{text}` reads composite.instance.role"))?;
                    tag = Some(Tag { composite, instance, role: next()?.into() });
                }
                "of" => of = Some(value(text, &self.graph)?),
                "like" => like = Some(value(text, &self.graph)?),
                _ => return Err(format!("a node has no `{key}`")),
            }
        }
        Ok(Attributes { mark: Mark { layer, part }, tag, of, like })
    }
}

fn value(text: &str, graph: &Graph) -> Result<Value, String> {
    let number = text.trim().strip_prefix('v').and_then(|n| n.parse::<u32>().ok());
    let v = number.ok_or_else(|| format!("`{}` is no value: one reads v7", text.trim()))?;
    if (v as usize) < graph.values.len() {
        Ok(Value(v))
    } else {
        Err(format!("v{v} is not defined above this line"))
    }
}
