//! Programs.
//!
//! ```text
//! program mesh dp=2,tp=2 microbatches 1
//! stage 0 slots 1 sizes 1024 64 512 0
//! b0 = f32 101x32 @ [tp, _] state+0 of wte
//! b3 = f32 8x32x32 @ [dp, _, _] scratch+64 for v7
//! segment 0F
//!   feed inputs -> b1
//!   launch b0, b1 -> b3 map [b=8/dp, s=32 | d=32] looked [v=101/tp] (f32, i32) -> (f32) {
//!     r0 = load 1 [b, s]
//!     ...
//!   }
//!   t0 = start all_reduce(tp) b3 -> b4
//!   wait t0
//! call 0F 0 slot 0
//! ```

use std::fmt;
use std::sync::Arc;

use super::scan::{Scan, parse_shape, show_shape};
use super::{ParseError, code, kernel, tables};
use crate::program::{
    Buffer, BufferId, Buffers, Call, Duty, Instruction, Message, Program, Region, Segment, Stage, Transfer,
};
use crate::schedule::Kind;
use crate::{Mesh, Move, Sharding, Value};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let buckets = self.bucket_bytes.map_or(String::new(), |n| format!(" buckets {n}"));
        writeln!(f, "program mesh {} microbatches {}{buckets}", self.mesh, self.microbatches)?;
        if self.homes.len() > 1 {
            let homes: Vec<String> = self.homes.iter().map(ToString::to_string).collect();
            writeln!(f, "homes {}", homes.join(" "))?;
        }
        self.inputs.iter().try_for_each(|i| writeln!(f, "{}", tables::show_input(i)))?;
        self.states.iter().try_for_each(|s| writeln!(f, "{}", tables::show_state(s)))?;
        for (i, stage) in self.stages.iter().enumerate() {
            let [a, b, c, d] = stage.sizes;
            writeln!(f, "stage {i} slots {} sizes {a} {b} {c} {d}", stage.slots)?;
            for (i, buffer) in stage.buffers.iter().enumerate() {
                writeln!(f, "b{i} = {}", show_buffer(buffer, &self.mesh))?;
            }
            for (s, segment) in stage.segments.iter().enumerate() {
                writeln!(f, "segment {}", stage.name_of(s))?;
                for instruction in &segment.instructions {
                    writeln!(f, "  {}", show_instruction(instruction, &self.mesh))?;
                }
            }
            for call in &stage.calls {
                let segment = stage.name_of(call.segment);
                let microbatch = call.microbatch.map_or("once".to_string(), |m| m.to_string());
                writeln!(f, "call {segment} {microbatch} slot {}", call.slot)?;
            }
        }
        Ok(())
    }
}

fn show_buffer(b: &Buffer, mesh: &Mesh) -> String {
    let offset = b.offset.map_or("?".to_string(), |o| o.to_string());
    let mut text = format!(
        "{} {} @ {} {}+{offset}",
        b.dtype,
        show_shape(&b.shape),
        b.sharding.show(mesh),
        b.region.name()
    );
    b.state.iter().for_each(|name| text += &format!(" of {name}"));
    b.value.iter().for_each(|v| text += &format!(" for {v}"));
    b.inside.iter().for_each(|n| text += &format!(" inside {n}"));
    text
}

fn list(of: &[BufferId]) -> String {
    of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn show_message(m: &Message) -> String {
    format!("{} {} -> {}", m.value, m.from, m.to)
}

/// An instruction as text; the steps of a launch are further lines.
pub(crate) fn show_instruction(instruction: &Instruction, mesh: &Mesh) -> String {
    match instruction {
        Instruction::Feed { input, to } => format!("feed {input} -> {to}"),
        Instruction::Launch { kernel, reads, writes } => {
            let kernel = kernel::show(kernel, mesh, "  ");
            format!("launch {} -> {} {kernel}", list(reads), list(writes))
        }
        Instruction::Local { step, from, to } => format!("local {} {from} -> {to}", step.show(mesh)),
        Instruction::Start { token, parts } => {
            let part = |p: &Transfer| format!("{} {} -> {}", p.step.show(mesh), p.from, p.to);
            format!("t{token} = start {}", parts.iter().map(part).collect::<Vec<_>>().join(" + "))
        }
        Instruction::Wait { token } => format!("wait t{token}"),
        Instruction::Send { token, message, from } => {
            format!("t{token} = send {} {from}", show_message(message))
        }
        Instruction::Sent { token, from } => format!("sent t{token} {from}"),
        Instruction::Receive { token, message, to } => {
            format!("t{token} = receive {} {to}", show_message(message))
        }
        Instruction::Received { token, to } => format!("received t{token} {to}"),
        Instruction::Assign { from, to } => format!("assign {from} -> {to}"),
        Instruction::Tap { name, from } => format!("tap {name} {from}"),
    }
}

/// Reads a program.
///
/// # Errors
/// The first line that cannot be read.
pub fn parse_program(text: &str) -> Result<Program, ParseError> {
    let mut program = Program::default();
    let mut open: Option<Launch> = None;
    for (i, line) in text.lines().enumerate() {
        let line = code(line).trim();
        if !line.is_empty() {
            read_line(&mut program, &mut open, line)
                .map_err(|message| ParseError { line: i + 1, message })?;
        }
    }
    match open {
        None => Ok(program),
        Some(_) => {
            Err(ParseError { line: text.lines().count(), message: "a kernel without `}`".to_string() })
        }
    }
}

/// A launch of which lines follow.
struct Launch {
    reads: Buffers,
    writes: Buffers,
    open: Box<kernel::Open>,
}

fn read_line(program: &mut Program, open: &mut Option<Launch>, line: &str) -> Result<(), String> {
    if let Some(mut launch) = open.take() {
        if launch.open.line(line, &program.mesh)? {
            let Launch { reads, writes, open } = launch;
            return push(program, Instruction::Launch { kernel: Arc::new(open.kernel), reads, writes });
        }
        *open = Some(launch);
        return Ok(());
    }
    let mesh = program.mesh.clone();
    let mut scan = Scan::new(line);
    if scan.eat("program mesh") {
        program.mesh = Mesh::parse(scan.until("microbatches")?).map_err(|e| e.to_string())?;
        program.microbatches = scan.number()?;
        program.bucket_bytes = if scan.eat("buckets") { Some(scan.number()?) } else { None };
        program.homes = vec![0];
    } else if scan.eat("homes ") {
        let home = |s: &str| s.parse().map_err(|_| format!("`{s}` is no row"));
        program.homes = scan.rest().split_whitespace().map(home).collect::<Result<_, _>>()?;
    } else if scan.eat("input ") {
        program.inputs.push(tables::parse_input(scan.rest())?);
    } else if scan.eat("state ") {
        program.states.push(tables::parse_state(scan.rest())?);
    } else if scan.eat("stage ") {
        let _: usize = scan.number()?;
        scan.expect("slots")?;
        let slots = scan.number()?;
        scan.expect("sizes")?;
        let mut size = || scan.number::<usize>();
        let sizes = [size()?, size()?, size()?, size()?];
        program.stages.push(Stage { slots, sizes, ..Stage::default() });
    } else if scan.eat("segment ") {
        let name = scan.rest().trim();
        let (of, kind, duty) = parse_segment(name.trim_end_matches('\''))?;
        let stage = stage(program)?;
        stage.segments.push(Segment { stage: of, kind, duty, instructions: Vec::new() });
        let own = stage.name_of(stage.segments.len() - 1);
        if own != name {
            return Err(format!("segment `{name}` stands where `{own}` is next"));
        }
    } else if scan.eat("call ") {
        let (name, rest) = scan.rest().split_once(' ').ok_or("a call reads `call 0F 0 slot 0`")?;
        scan = Scan::new(rest);
        let stage = stage(program)?;
        let segment = (0..stage.segments.len()).find(|s| stage.name_of(*s) == name);
        let segment = segment.ok_or_else(|| format!("there is no segment `{name}`"))?;
        let microbatch = if scan.eat("once") { None } else { Some(scan.number()?) };
        scan.expect("slot")?;
        stage.calls.push(Call { segment, microbatch, slot: scan.number()? });
    } else if line.starts_with('b') && line.contains(" = ") {
        let buffer = parse_buffer(&mut scan, program.stages.last().map_or(0, |s| s.buffers.len()), &mesh)?;
        stage(program)?.buffers.push(buffer);
    } else if scan.eat("launch ") {
        let (reads, rest) = ids_before_arrow(scan.rest())?;
        let split = rest.find(['m', 'c', 's', 't']).ok_or("a launch needs a kernel")?;
        let writes = ids(&rest[..split])?;
        let mut scan = Scan::new(&rest[split..]);
        match kernel::parse_head(&mut scan, &mesh)? {
            kernel::Head::Done(kernel) => {
                return push(program, Instruction::Launch { kernel: Arc::new(kernel), reads, writes });
            }
            kernel::Head::Open(kernel) => *open = Some(Launch { reads, writes, open: kernel }),
        }
    } else {
        let instruction = parse_short(&mut scan, &mesh)?;
        return push(program, instruction);
    }
    Ok(())
}

/// Reads `1F.post`: virtual stage, kind and duty.
fn parse_segment(name: &str) -> Result<(usize, Kind, Duty), String> {
    let wrong = || format!("`{name}` is no segment: one is called 0F, 1B.post or 1F.clear");
    let duty = Duty::ALL.into_iter().rev().find(|d| name.ends_with(d.suffix())).ok_or_else(wrong)?;
    let action = name.strip_suffix(duty.suffix()).unwrap_or(name);
    let (stage, letter) = action.split_at(action.len().saturating_sub(1));
    let kind = Kind::ALL.into_iter().find(|k| k.letter().to_string() == letter).ok_or_else(wrong)?;
    Ok((stage.parse().map_err(|_| wrong())?, kind, duty))
}

fn stage(program: &mut Program) -> Result<&mut Stage, String> {
    program.stages.last_mut().ok_or_else(|| "expected `stage 0 ...` first".to_string())
}

fn push(program: &mut Program, instruction: Instruction) -> Result<(), String> {
    let stage = stage(program)?;
    let known = stage.buffers.len();
    if let Some(b) = instruction.reads().iter().chain(&instruction.writes()).find(|b| b.index() >= known) {
        return Err(format!("there is no buffer {b}"));
    }
    let segment = stage.segments.last_mut().ok_or("expected `segment 0F` first")?;
    segment.instructions.push(instruction);
    Ok(())
}

fn parse_buffer(scan: &mut Scan, place: usize, mesh: &Mesh) -> Result<Buffer, String> {
    let id: usize = scan.id("b")?;
    if id != place {
        return Err(format!("expected b{place} here, found b{id}"));
    }
    scan.expect("=")?;
    let dtype = scan.word()?.parse()?;
    let shape = parse_shape(scan.until("@")?)?;
    let (sharding, rest) = scan.rest().split_once('+').ok_or("a buffer reads `... scratch+64`")?;
    let (sharding, region) = sharding.rsplit_once(' ').ok_or("a buffer reads `... scratch+64`")?;
    let region = Region::ALL.into_iter().find(|r| r.name() == region);
    let region = region.ok_or("a buffer is in state, step, slot or scratch")?;
    let mut words = rest.split_whitespace();
    let offset = match words.next() {
        Some("?") => None,
        Some(n) => Some(n.parse().map_err(|_| format!("`{n}` is no offset"))?),
        None => return Err("a buffer needs an offset, or `?`".to_string()),
    };
    let sharding = Sharding::parse(sharding, mesh)?;
    let mut buffer =
        Buffer { state: None, value: None, inside: None, dtype, shape, sharding, region, offset };
    while let Some(word) = words.next() {
        match (word, words.next()) {
            ("of", Some(name)) => buffer.state = Some(name.into()),
            ("for", Some(v)) => {
                let number = v.strip_prefix('v').and_then(|n| n.parse().ok());
                buffer.value = Some(Value(number.ok_or_else(|| format!("`{v}` is no value"))?));
            }
            ("inside", Some(n)) => {
                buffer.inside = Some(n.parse().map_err(|_| format!("`{n}` is no composite"))?);
            }
            (other, _) => return Err(format!("unexpected `{other}`")),
        }
    }
    Ok(buffer)
}

fn ids(text: &str) -> Result<Buffers, String> {
    let id = |t: &str| t.trim().strip_prefix('b').and_then(|n| n.parse().ok()).map(BufferId);
    let words = text.split(',').map(str::trim).filter(|t| !t.is_empty());
    words.map(|t| id(t).ok_or_else(|| format!("`{t}` is no buffer"))).collect()
}

fn ids_before_arrow(text: &str) -> Result<(Buffers, &str), String> {
    let (reads, rest) = text.split_once("->").ok_or("expected `->`")?;
    Ok((ids(reads)?, rest.trim_start()))
}

fn one(ids: Buffers) -> Result<BufferId, String> {
    match ids[..] {
        [id] => Ok(id),
        _ => Err("expected one buffer".to_string()),
    }
}

fn parse_short(scan: &mut Scan, mesh: &Mesh) -> Result<Instruction, String> {
    if scan.eat("feed ") {
        let input = scan.word_before_arrow()?.into();
        return Ok(Instruction::Feed { input, to: one(ids(scan.rest())?)? });
    }
    if scan.eat("wait ") {
        return Ok(Instruction::Wait { token: scan.id("t")? as u32 });
    }
    for (word, arrives) in [("sent ", false), ("received ", true)] {
        if scan.eat(word) {
            let token = scan.id("t")? as u32;
            let buffer = one(ids(scan.rest())?)?;
            return Ok(match arrives {
                false => Instruction::Sent { token, from: buffer },
                true => Instruction::Received { token, to: buffer },
            });
        }
    }
    if scan.eat("assign ") {
        let (from, to) = ids_before_arrow(scan.rest())?;
        return Ok(Instruction::Assign { from: one(from)?, to: one(ids(to)?)? });
    }
    if scan.eat("tap ") {
        let (name, from) = scan.rest().rsplit_once(' ').ok_or("a tap reads `tap name b1`")?;
        return Ok(Instruction::Tap { name: name.trim().into(), from: one(ids(from)?)? });
    }
    let token = if scan.eat("local ") {
        None
    } else {
        let token: usize = scan.id("t").map_err(|_| format!("`{}` is no instruction", scan.rest()))?;
        scan.expect("=")?;
        if scan.eat("send ") {
            let (message, from) = parse_message(scan)?;
            return Ok(Instruction::Send { token: token as u32, message, from });
        }
        if scan.eat("receive ") {
            let (message, to) = parse_message(scan)?;
            return Ok(Instruction::Receive { token: token as u32, message, to });
        }
        scan.expect("start ")?;
        Some(token as u32)
    };
    match token {
        None => {
            part(scan.rest(), mesh).map(|Transfer { step, from, to }| Instruction::Local { step, from, to })
        }
        Some(token) => {
            let parts = scan.rest().split(" + ").map(|text| part(text, mesh)).collect::<Result<_, _>>()?;
            Ok(Instruction::Start { token, parts })
        }
    }
}

/// Reads `v3 0 -> 1 b5`.
fn parse_message(scan: &mut Scan) -> Result<(Message, BufferId), String> {
    let value = Value(scan.id("v")? as u32);
    let from = scan.number()?;
    scan.expect("->")?;
    let to = scan.number()?;
    Ok((Message { value, from, to }, one(ids(scan.rest())?)?))
}

/// Reads `all_reduce(dp) b1 -> b2`.
fn part(text: &str, mesh: &Mesh) -> Result<Transfer, String> {
    let end = text.find(')').ok_or_else(|| format!("expected `)` in `{text}`"))? + 1;
    let step = Move::parse(text[..end].trim(), mesh)?;
    let (from, to) = ids_before_arrow(&text[end..])?;
    Ok(Transfer { step, from: one(from)?, to: one(ids(to)?)? })
}
