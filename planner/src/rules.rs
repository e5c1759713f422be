//! A rules file: which model dimension goes to which axes, over the conventions; per tensor if need be.
//!
//! ```text
//! d = tp                        ; every dimension d of every input and state
//! v = _                         ; no axis splits the vocabulary
//! lm_head.weight: d = tp even   ; of one tensor; its pieces have to be equal
//! model.layers.*: f = tp        ; `*` stands for anything
//! ```
//!
//! A rule for a tensor goes before one for all. What the rules do not name follows the conventions.

use std::collections::BTreeMap;

use ir::{Axis, Graph, Mesh, Name, Sharding};

use crate::conventions::AXES;
use crate::even::uneven;

/// Rules of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    file: String,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    line: usize,
    /// Of tensors whose names are like this; none: of all.
    tensor: Option<String>,
    dim: String,
    axes: Vec<String>,
    even: bool,
}

/// What is wrong in a rules file, with its lines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// A line that is no rule.
    #[error("{at}: `{text}` is no rule: one reads `d = tp` or `tensor: d = dp.tp even`")]
    Line {
        /// File and line.
        at: String,
        /// What stands there.
        text: String,
    },
    /// An axis that neither the mesh nor meshc has.
    #[error("{at}: there is no axis `{axis}`; the mesh is `{mesh}`, and there are {known}")]
    Axis {
        /// File and line.
        at: String,
        /// The name.
        axis: String,
        /// The mesh.
        mesh: String,
        /// The axes that meshc knows.
        known: String,
    },
    /// A dimension that no tensor has.
    #[error("{at}: no {of} has a dimension `{dim}`; there are {known}")]
    Dim {
        /// File and line.
        at: String,
        /// Which tensors.
        of: String,
        /// The name.
        dim: String,
        /// What there is.
        known: String,
    },
    /// A tensor that the model does not have.
    #[error("{at}: the model has no input or parameter like `{tensor}`; there are {known}")]
    Tensor {
        /// File and line.
        at: String,
        /// The name.
        tensor: String,
        /// Some of what there is.
        known: String,
    },
    /// Two rules for the same.
    #[error("{at}: {this}, but {other_at} says {other}")]
    Contradiction {
        /// File and line.
        at: String,
        /// What it says.
        this: String,
        /// File and line of the other.
        other_at: String,
        /// What it says.
        other: String,
    },
    /// An axis that would split two dimensions of a tensor.
    #[error("axis {axis} would split two dimensions of {tensor}: {first}, and {second}")]
    Twice {
        /// The axis.
        axis: String,
        /// The tensor.
        tensor: String,
        /// A dimension, and what says so.
        first: String,
        /// The other dimension, and what says so.
        second: String,
    },
    /// Pieces that would not be equal.
    #[error("{at}: {what}")]
    Uneven {
        /// File and line.
        at: String,
        /// What is, and what would work.
        what: String,
    },
}

/// Reads the text of a rules file called `file`.
///
/// # Errors
/// The first line that is no rule, or two that contradict each other.
pub fn parse(file: &str, text: &str) -> Result<Rules, RuleError> {
    let mut rules = Rules { file: file.to_string(), rules: Vec::new() };
    for (i, line) in text.lines().enumerate() {
        let line = line.split([';', '#']).next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let wrong = || RuleError::Line { at: format!("{file}:{}", i + 1), text: line.to_string() };
        let (left, right) = line.split_once('=').ok_or_else(wrong)?;
        let (tensor, dim) = match left.rsplit_once(':') {
            Some((tensor, dim)) => (Some(tensor.trim().to_string()), dim.trim()),
            None => (None, left.trim()),
        };
        let mut words = right.split_whitespace();
        let axes = words.next().ok_or_else(wrong)?;
        let even = match words.next() {
            None => false,
            Some("even") => true,
            Some(_) => return Err(wrong()),
        };
        let name =
            |n: &str| !n.is_empty() && n.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
        let axes: Vec<String> = axes.split('.').filter(|a| *a != "_").map(str::to_string).collect();
        let tensor_fine = tensor.as_ref().is_none_or(|t| !t.is_empty());
        if !name(dim) || !axes.iter().all(|a| name(a)) || words.next().is_some() || !tensor_fine {
            return Err(wrong());
        }
        let rule = Rule { line: i + 1, tensor, dim: dim.to_string(), axes, even };
        if let Some(other) = rules.rules.iter().find(|r| r.tensor == rule.tensor && r.dim == rule.dim) {
            let (this, says) = (show(&rule), show(other));
            let (at, other_at) = (rules.at(&rule), rules.at(other));
            return Err(RuleError::Contradiction { at, this, other_at, other: says });
        }
        rules.rules.push(rule);
    }
    Ok(rules)
}

fn show(rule: &Rule) -> String {
    let tensor = rule.tensor.as_ref().map_or(String::new(), |t| format!("{t}: "));
    let axes = if rule.axes.is_empty() { "_".to_string() } else { rule.axes.join(".") };
    format!("`{tensor}{} = {axes}`", rule.dim)
}

impl Rules {
    fn at(&self, rule: &Rule) -> String {
        format!("{}:{}", self.file, rule.line)
    }

    /// The places that the conventions give, changed as the rules say. A moment lies as its parameter does.
    ///
    /// # Errors
    /// What in the rules does not fit the model or the mesh.
    pub fn apply(
        &self,
        graph: &Graph,
        mesh: &Mesh,
        mut places: BTreeMap<Name, Sharding>,
    ) -> Result<BTreeMap<Name, Sharding>, RuleError> {
        let tensors: Vec<(&Name, &Vec<(Name, usize)>)> = graph
            .inputs
            .iter()
            .map(|i| (&i.name, &i.dims))
            .chain(graph.states.iter().map(|s| (&s.name, &s.dims)))
            .collect();
        for rule in &self.rules {
            self.check(rule, &tensors, mesh)?;
        }
        for (name, dims) in tensors {
            let Some(place) = places.get_mut(name) else { continue };
            // What put an axis on each dimension.
            let mut by: Vec<(Axis, String, String)> = Vec::new();
            for ((dim, size), axes) in dims.iter().zip(&mut place.dims) {
                let rule = self.rule_for(name, dim);
                if let Some(rule) = rule {
                    *axes = rule.axes.iter().filter_map(|a| mesh.find(a)).flatten().collect();
                    axes.retain(|a| mesh.size(*a) > 1);
                    self.check_even(rule, name, (dim, *size), axes, mesh)?;
                }
                let source = rule.map_or("by convention".to_string(), |r| format!("by {}", self.at(r)));
                for axis in axes.iter() {
                    if let Some((_, first, first_at)) = by.iter().find(|(a, ..)| a == axis) {
                        return Err(RuleError::Twice {
                            axis: mesh.name(*axis).to_string(),
                            tensor: name.to_string(),
                            first: format!("{first} {first_at}"),
                            second: format!("{dim} {source}"),
                        });
                    }
                    by.push((*axis, dim.to_string(), source.clone()));
                }
            }
        }
        Ok(places)
    }

    /// Whether a rule says something of a tensor.
    pub fn name(&self, tensor: &str, dims: &[(Name, usize)]) -> bool {
        dims.iter().any(|(dim, _)| self.rule_for(tensor, dim).is_some())
    }

    /// The rule for a dimension of a tensor: one that names the tensor before one for all.
    fn rule_for(&self, tensor: &str, dim: &str) -> Option<&Rule> {
        let of = |named: bool| {
            self.rules.iter().rev().find(move |r| {
                r.dim == dim
                    && r.tensor.is_some() == named
                    && r.tensor.as_ref().is_none_or(|t| like(t, tensor))
            })
        };
        of(true).or_else(|| of(false))
    }

    fn check(
        &self,
        rule: &Rule,
        tensors: &[(&Name, &Vec<(Name, usize)>)],
        mesh: &Mesh,
    ) -> Result<(), RuleError> {
        let unknown = |a: &&String| mesh.find(a).is_none() && !AXES.iter().any(|(n, _)| n == a);
        if let Some(axis) = rule.axes.iter().find(unknown) {
            let known = AXES.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
            return Err(RuleError::Axis {
                at: self.at(rule),
                axis: axis.clone(),
                mesh: mesh.to_string(),
                known,
            });
        }
        let named: Vec<_> =
            tensors.iter().filter(|(name, _)| rule.tensor.as_ref().is_none_or(|t| like(t, name))).collect();
        if let (Some(tensor), true) = (&rule.tensor, named.is_empty()) {
            let some: Vec<&str> = tensors.iter().take(6).map(|(n, _)| &***n).collect();
            let known = format!("{}, ...", some.join(", "));
            return Err(RuleError::Tensor { at: self.at(rule), tensor: tensor.clone(), known });
        }
        if !named.iter().any(|(_, dims)| dims.iter().any(|(d, _)| **d == *rule.dim)) {
            let mut known: Vec<&str> =
                named.iter().flat_map(|(_, dims)| dims.iter()).map(|(d, _)| &**d).collect();
            known.sort_unstable();
            known.dedup();
            let of = rule
                .tensor
                .as_ref()
                .map_or("input or parameter".to_string(), |t| format!("tensor like `{t}`"));
            let (at, dim) = (self.at(rule), rule.dim.clone());
            return Err(RuleError::Dim { at, of, dim, known: known.join(", ") });
        }
        Ok(())
    }

    fn check_even(
        &self,
        rule: &Rule,
        tensor: &str,
        (dim, size): (&str, usize),
        axes: &[Axis],
        mesh: &Mesh,
    ) -> Result<(), RuleError> {
        let what = uneven(&format!("dimension {dim} of {tensor}"), size, axes, mesh);
        match what.filter(|_| rule.even) {
            Some(what) => Err(RuleError::Uneven { at: self.at(rule), what }),
            None => Ok(()),
        }
    }
}

/// Whether a name is like a pattern, in which `*` stands for anything.
fn like(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or("")) else { return false };
    let mut last = None;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
        last = Some(part);
    }
    match last {
        None => rest.is_empty(),
        Some(part) => name.ends_with(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names() {
        for (pattern, name, fits) in [
            ("wte", "wte", true),
            ("wte", "wte.m", false),
            ("model.layers.*.up", "model.layers.3.up", true),
            ("model.layers.*.up", "model.layers.3.down", false),
            ("*.weight", "a.b.weight", true),
            ("model.layers.*", "model.layers.0.up", true),
            ("*", "anything", true),
        ] {
            assert_eq!(like(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn a_line_that_is_no_rule_is_named() {
        for text in ["d", "d tp", "= tp", "d =", "d = tp uneven", "d = tp even more", ": d = tp"] {
            let error = parse("r", &format!("; comment\n{text}\n")).unwrap_err();
            assert_eq!(error, RuleError::Line { at: "r:2".into(), text: text.into() });
        }
        let error = parse("r", "d = tp\n\nd = dp").unwrap_err().to_string();
        assert_eq!(error, "r:3: `d = dp`, but r:1 says `d = tp`");
    }
}
