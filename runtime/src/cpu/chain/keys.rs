//! Which keys a block of queries sees. Weights of others are 0 and so is all that comes of them: they are left out.
//!
//! A map says it itself: `select c, x, -1e30` with `c = ge(a, b)`, where one of a and b is of the query and the other of the
//! key. What is so low where c fails has an exponential of 0 and no part in a maximum; what is multiplied by 0 is 0; and a
//! sum over keys of 0 needs them not. Other than so, infinities and NaN among keys that are not seen have no part in it.

use std::ops::Range;

use ir::kernel::{Access, Body, Chain, Contract, Link, Loop, Map, Operand, Step};
use ir::{Binary, DType, Reduce, Unary};

use super::super::convert;
use super::super::lanes::best;
use super::{Base, Placed, Spot};

/// From here down a score is low: above its sum with any score that a model has, its exponential is 0.
const LOW: f64 = -1e29;

/// The loop of the keys, and what says which are seen: all of the rules.
pub struct Keys {
    /// The loop.
    pub along: Loop,
    rules: Vec<Rule>,
}

/// Where a key is seen.
#[derive(Clone, Debug, PartialEq)]
struct Rule {
    /// The kernel that reads both.
    link: usize,
    /// Its operand of the query, with its type.
    query: (usize, DType),
    /// Its operand of the key.
    key: (usize, DType),
    /// The query's number is at least the key's, or else the key's is at least the query's.
    query_first: bool,
}

/// What a number is at the keys where some of the rules fail: a bit a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Any,
    Low(u64),
    Zero(u64),
}

/// The loop whose keys may be left out, and by what; none if there is none.
pub fn find(chain: &Chain, links: &[Link]) -> Option<Keys> {
    let cut = chain.loops.last()?;
    for (along, rules) in candidates(chain, links, cut) {
        let mut finding = Finding {
            chain,
            along: &along,
            rules: &rules,
            between: vec![Number::Any; chain.between()],
            held: u64::MAX >> (64 - rules.len().min(64)),
        };
        for (i, link) in links.iter().enumerate() {
            match &link.kernel.body {
                Body::Map(map) => finding.map(i, link, map),
                Body::Contract(contract) => finding.contract(link, contract),
                Body::Scatter(_) | Body::TopK(_) | Body::Chain(_) => return None,
            }
        }
        let held = finding.held;
        let kept: Vec<Rule> =
            rules.iter().enumerate().filter(|(i, _)| held >> i & 1 == 1).map(|(_, r)| r.clone()).collect();
        if !kept.is_empty() {
            return Some(Keys { along, rules: kept });
        }
    }
    None
}

/// Each loop that a comparison of query and key is about, with these comparisons.
fn candidates(chain: &Chain, links: &[Link], cut: &Loop) -> Vec<(Loop, Vec<Rule>)> {
    let mut all: Vec<(Loop, Vec<Rule>)> = Vec::new();
    for (i, link) in links.iter().enumerate() {
        let Body::Map(map) = &link.kernel.body else { continue };
        for step in &map.steps {
            let Some((along, rule)) = rule(chain, i, link, map, step, cut) else { continue };
            match all.iter_mut().find(|(l, _)| l.name == along.name) {
                Some((_, rules)) if rules.len() < 64 => rules.push(rule),
                Some(_) => {}
                None => all.push((along.clone(), vec![rule])),
            }
        }
    }
    all
}

/// The rule that a step is, and the loop of its keys.
fn rule<'a>(
    chain: &Chain,
    link: usize,
    of: &Link,
    map: &'a Map,
    step: &Step,
    cut: &Loop,
) -> Option<(&'a Loop, Rule)> {
    let Step::Binary(Binary::Ge, a, b) = step else { return None };
    let load = |r: usize| {
        let (read, access) = map.steps[r].load()?;
        of.reads[read].outside()?;
        Some((read, access))
    };
    let ((a, at_a), (b, at_b)) = (load(*a)?, load(*b)?);
    let is_query = |access: &Access| access.iter().flatten().any(|l| map.loops[*l].name == cut.name);
    let own = |access: &Access| -> Vec<&'a Loop> {
        access.iter().flatten().map(|l| &map.loops[*l]).filter(|l| !chain.shares(l)).collect()
    };
    let typed = |read: usize| (read, of.kernel.reads[read]);
    let (query, along, key, query_first) =
        match (is_query(at_a), is_query(at_b), &own(at_a)[..], &own(at_b)[..]) {
            (true, false, [], [along]) => (a, *along, b, true),
            (false, true, [along], []) => (b, *along, a, false),
            (true | false, true | false, _, _) => return None,
        };
    Some((along, Rule { link, query: typed(query), key: typed(key), query_first }))
}

struct Finding<'a> {
    chain: &'a Chain,
    along: &'a Loop,
    rules: &'a [Rule],
    between: Vec<Number>,
    /// The rules that may be used, of all that was looked at so far.
    held: u64,
}

impl Finding<'_> {
    fn read(&self, operand: Operand) -> Number {
        operand.between().map_or(Number::Any, |i| self.between[i])
    }

    fn has(&self, access: &Access, loops: &[Loop]) -> bool {
        access.iter().flatten().any(|l| loops[*l].name == self.along.name)
    }

    /// Keys may be left out only where this is 0.
    fn needs_zero(&mut self, number: Number) {
        self.held &= if let Number::Zero(rules) = number { rules } else { 0 };
    }

    fn map(&mut self, i: usize, link: &Link, map: &Map) {
        let (_, row) = map.loops.split_at(map.loops.len() - map.row);
        let in_row = row.iter().any(|l| l.name == self.along.name);
        let mut registers: Vec<Number> = Vec::with_capacity(map.steps.len());
        for step in &map.steps {
            let of = |r: &usize| registers[*r];
            let low = |r: &usize| matches!(map.steps[*r], Step::Const(c) if c <= LOW);
            let number = match step {
                Step::Load { read, .. } => self.read(link.reads[*read]),
                Step::Select(c, x, y) if low(y) => {
                    let known = rule(
                        self.chain,
                        i,
                        link,
                        map,
                        &map.steps[*c],
                        &self.chain.loops[self.chain.loops.len() - 1],
                    );
                    let place = known.and_then(|(_, rule)| self.rules.iter().position(|r| *r == rule));
                    let before = if let Number::Low(rules) = of(x) { rules } else { 0 };
                    match place.map_or(0, |p| 1u64 << p) | before {
                        0 => Number::Any,
                        rules => Number::Low(rules),
                    }
                }
                Step::Unary(Unary::Exp, r) => match of(r) {
                    Number::Low(rules) => Number::Zero(rules),
                    Number::Any | Number::Zero(_) => Number::Any,
                },
                Step::Unary(Unary::Stop, r) | Step::Cast(_, r) => of(r),
                // A low number less any other is low.
                Step::Binary(Binary::Sub, a, _) => match of(a) {
                    Number::Low(rules) => Number::Low(rules),
                    Number::Any | Number::Zero(_) => Number::Any,
                },
                Step::Binary(Binary::Div, a, _) => match of(a) {
                    Number::Zero(rules) => Number::Zero(rules),
                    Number::Any | Number::Low(_) => Number::Any,
                },
                Step::Mul(_, all) => {
                    let zero = |r: &usize| if let Number::Zero(rules) = of(r) { rules } else { 0 };
                    match all.iter().map(zero).fold(0, |a, b| a | b) {
                        0 => Number::Any,
                        rules => Number::Zero(rules),
                    }
                }
                Step::Row(reduce, r) => {
                    if in_row {
                        match (reduce, of(r)) {
                            (Reduce::Max, Number::Low(rules)) | (Reduce::Sum, Number::Zero(rules)) => {
                                self.held &= rules;
                            }
                            (
                                Reduce::Max | Reduce::Sum | Reduce::Top,
                                Number::Any | Number::Low(_) | Number::Zero(_),
                            ) => self.held = 0,
                        }
                    }
                    Number::Any
                }
                Step::Store { write, access, of: r } => {
                    match link.writes[*write] {
                        Operand::Between(b) => self.between[b] = of(r),
                        // What is not seen would not be written.
                        Operand::Outside(_) if self.has(access, &map.loops) => self.held = 0,
                        Operand::Outside(_) => {}
                    }
                    Number::Any
                }
                Step::Accumulate { .. } => {
                    self.held = 0;
                    Number::Any
                }
                Step::LoadAt { .. }
                | Step::Const(_)
                | Step::Iota(_)
                | Step::Random { .. }
                | Step::Unary(..)
                | Step::Binary(..)
                | Step::Add(_)
                | Step::Select(..) => Number::Any,
            };
            registers.push(number);
        }
    }

    fn contract(&mut self, link: &Link, c: &Contract) {
        let (a, b) = (self.read(link.reads[0]), self.read(link.reads[1]));
        // An operand that has no keys is as it is at all of them.
        let zero = |number: Number, access: &Access| match number {
            Number::Zero(rules) if self.has(access, &c.loops) => rules,
            Number::Zero(_) | Number::Any | Number::Low(_) => 0,
        };
        let zero = zero(a, &c.a) | zero(b, &c.b);
        let summed = c.loops.iter().any(|l| l.name == self.along.name) && !self.has(&c.out, &c.loops);
        if summed {
            self.needs_zero(Number::Zero(zero));
        }
        match link.writes[0] {
            Operand::Between(i) if summed => self.between[i] = Number::Any,
            Operand::Between(i) => self.between[i] = Number::Zero(zero),
            Operand::Outside(_) if self.has(&c.out, &c.loops) => {
                // What blocks add to is 0 before; other results would not be written.
                let adds = self.chain.adds(link);
                self.needs_zero(if adds { Number::Zero(zero) } else { Number::Any });
            }
            Operand::Outside(_) => {}
        }
    }
}

impl Keys {
    /// How many rules say it.
    #[cfg(test)]
    pub fn rules(&self) -> usize {
        self.rules.len()
    }

    /// The keys that some query of a block sees; all, if none does.
    ///
    /// # Safety
    /// As for the run of a chain; the scratch has a number for each row and each key.
    pub unsafe fn seen(
        &self,
        links: &[Placed],
        spot: &Spot,
        rows: usize,
        all: usize,
        reads: &[*const u8],
        scratch: *mut u8,
    ) -> Range<usize> {
        let mut seen = 0..all;
        for rule in &self.rules {
            let of = &links[rule.link];
            let last = spot.shared.len() - 1;
            let load = |(read, dtype): (usize, DType), n: usize, stride: &dyn Fn(&super::At) -> usize| {
                let at = &of.reads[read];
                let Base::Outside(operand) = at.base else { return &[][..] };
                // SAFETY: the caller's.
                unsafe {
                    let from = reads[operand].add(at.offset(spot));
                    let to = scratch.cast::<f32>();
                    convert::load(best(), dtype, to, from, n, stride(at) / dtype.bytes());
                    std::slice::from_raw_parts(to.cast_const(), n)
                }
            };
            let query = load(rule.query, rows, &|at| at.shared[last]).iter().copied();
            let bound = if rule.query_first {
                query.fold(f32::NEG_INFINITY, f32::max)
            } else {
                query.fold(f32::INFINITY, f32::min)
            };
            let keys = load(rule.key, all, &|at| at.keys);
            let is = |key: &f32| if rule.query_first { bound >= *key } else { *key >= bound };
            let first = keys.iter().position(is).unwrap_or(all);
            let end = keys.iter().rposition(is).map_or(0, |i| i + 1);
            seen = seen.start.max(first)..seen.end.min(end);
        }
        if seen.is_empty() { 0..all } else { seen }
    }
}
