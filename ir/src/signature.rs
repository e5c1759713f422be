//! What an op does to dimensions, as one line: `b s d, d f -> b s f`. The words are its factors.

use std::fmt;
use std::sync::{Arc, LazyLock};

use rustc_hash::FxHashSet;
use smallvec::{SmallVec, smallvec};

use crate::Name;

/// A factor, by its place in [`Signature::factors`].
pub type Factor = usize;

/// A dimension of an operand: its factors, outermost first. Nearly always one, so that it lies in place; `(b s)` merges two.
pub type Dim = SmallVec<[Factor; 2]>;

/// The factors that the dimensions of operands and results consist of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Signature {
    /// The names, in order of first appearance.
    pub factors: Vec<Name>,
    /// The dimensions of each operand.
    pub args: Vec<Vec<Dim>>,
    /// The dimensions of each result.
    pub results: Vec<Vec<Dim>>,
}

/// The signatures of nodes that are written one after the other: equal ones are kept once.
#[derive(Clone, Debug, Default)]
pub struct Signatures(FxHashSet<Arc<Signature>>);

impl Signatures {
    /// The one that is kept.
    pub fn share(&mut self, signature: Signature) -> Arc<Signature> {
        match self.0.get(&signature) {
            Some(known) => known.clone(),
            None => {
                let new = Arc::new(signature);
                self.0.insert(new.clone());
                new
            }
        }
    }
}

/// A signature that does not fit its operands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Another number of operands.
    #[error("`{signature}` takes {needed} operands, but there are {found}")]
    Operands {
        /// The signature.
        signature: String,
        /// How many it takes.
        needed: usize,
        /// How many there are.
        found: usize,
    },
    /// Another number of dimensions.
    #[error("operand {operand} has {found} dimensions, but `{signature}` gives it {needed}")]
    Dims {
        /// Which operand.
        operand: usize,
        /// The signature.
        signature: String,
        /// Its dimensions there.
        needed: usize,
        /// Its dimensions.
        found: usize,
    },
    /// Two sizes for one factor.
    #[error("factor {factor} is {first} in one operand and {second} in another")]
    Mismatch {
        /// The factor.
        factor: Name,
        /// One size.
        first: usize,
        /// The other.
        second: usize,
    },
    /// No operand says how large a factor is.
    #[error("the size of factor {0} follows from no operand")]
    Unknown(Name),
    /// A merged dimension that its factors do not give.
    #[error("dimension {dim} of operand {operand} is {size}, which its factors {factors} cannot make up")]
    Merged {
        /// Which operand.
        operand: usize,
        /// Which dimension.
        dim: usize,
        /// Its size.
        size: usize,
        /// What it is made of.
        factors: String,
    },
}

/// The dimensions of a tensor that has `n` factors, one a dimension, in order.
pub fn plain(n: usize) -> Vec<Dim> {
    (0..n).map(|f| smallvec![f]).collect()
}

/// The names of factors that have no better: `i0`, `i1`, ...
pub fn unnamed(n: usize) -> Vec<Name> {
    static FIRST: LazyLock<Vec<Name>> = LazyLock::new(|| (0..8).map(name).collect());
    fn name(i: usize) -> Name {
        format!("i{i}").into()
    }
    (0..n).map(|i| FIRST.get(i).cloned().unwrap_or_else(|| name(i))).collect()
}

impl Signature {
    /// Operands and a result that all have the same `n` dimensions.
    pub fn pointwise(n: usize, operands: usize) -> Signature {
        Signature { factors: unnamed(n), args: vec![plain(n); operands], results: vec![plain(n)] }
    }

    /// Reads `b s d, d f -> b s f`. No operands: nothing before the arrow; a scalar: `()`; a merged
    /// dimension: `(b s)`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Signature, String> {
        let (args, results) = text
            .split_once("->")
            .ok_or_else(|| format!("a signature needs `->`, as in `m k, k n -> m n`: `{text}`"))?;
        let mut signature = Signature { factors: Vec::new(), args: Vec::new(), results: Vec::new() };
        signature.args = signature.tensors(args)?;
        signature.results = signature.tensors(results)?;
        Ok(signature)
    }

    fn tensors(&mut self, text: &str) -> Result<Vec<Vec<Dim>>, String> {
        if text.trim().is_empty() {
            return Ok(Vec::new());
        }
        text.split(',').map(|t| self.tensor(t)).collect()
    }

    fn tensor(&mut self, text: &str) -> Result<Vec<Dim>, String> {
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut dims = Vec::new();
        let mut open: Option<Dim> = None;
        if spaced.split_whitespace().eq(["(", ")"]) {
            return Ok(dims);
        }
        for word in spaced.split_whitespace() {
            match word {
                "(" if open.is_none() => open = Some(Dim::new()),
                "(" => return Err(format!("a merged dimension inside another in `{}`", text.trim())),
                ")" => match open.take() {
                    Some(dim) if !dim.is_empty() => dims.push(dim),
                    Some(_) => {
                        return Err(format!("an empty dimension in `{}`; a scalar is `()`", text.trim()));
                    }
                    None => return Err(format!("`)` without `(` in `{}`", text.trim())),
                },
                name => {
                    let factor = self.factor_or_new(name);
                    match &mut open {
                        Some(dim) => dim.push(factor),
                        None => dims.push(smallvec![factor]),
                    }
                }
            }
        }
        if open.is_some() { Err(format!("`(` without `)` in `{}`", text.trim())) } else { Ok(dims) }
    }

    fn factor_or_new(&mut self, name: &str) -> Factor {
        self.factor(name).unwrap_or_else(|| {
            self.factors.push(name.into());
            self.factors.len() - 1
        })
    }

    /// A factor by its name.
    pub fn factor(&self, name: &str) -> Option<Factor> {
        self.factors.iter().position(|f| &**f == name)
    }

    /// The same letters in other roles: what a gradient has.
    pub fn turned(&self, args: Vec<Vec<Dim>>, results: Vec<Vec<Dim>>) -> Signature {
        Signature { factors: self.factors.clone(), args, results }
    }

    /// The same with factors numbered in the order in which they appear, as [`Signature::parse`] numbers them.
    pub fn normal(self) -> Signature {
        let mut order: SmallVec<[Factor; 8]> = SmallVec::new();
        for f in self.args.iter().chain(&self.results).flatten().flatten() {
            if !order.contains(f) {
                order.push(*f);
            }
        }
        if order.iter().copied().eq(0..self.factors.len()) {
            return self;
        }
        let place = |f: &Factor| order.iter().position(|g| g == f).unwrap_or(0);
        let tensors = |of: &[Vec<Dim>]| -> Vec<Vec<Dim>> {
            of.iter().map(|t| t.iter().map(|d| d.iter().map(place).collect()).collect()).collect()
        };
        let (args, results) = (tensors(&self.args), tensors(&self.results));
        Signature { factors: order.iter().map(|f| self.factors[*f].clone()).collect(), args, results }
    }

    /// Whether a factor is in an operand or result.
    pub fn has(dims: &[Dim], factor: Factor) -> bool {
        dims.iter().any(|d| d.contains(&factor))
    }

    /// The factors of the result that no operand has, in its order: over them a random op counts.
    pub fn inner(&self) -> Vec<Factor> {
        let result = self.results.iter().flatten().flatten();
        result.copied().filter(|f| !self.args.iter().any(|a| Signature::has(a, *f))).collect()
    }

    /// Whether some result has the factor.
    pub fn in_results(&self, factor: Factor) -> bool {
        self.results.iter().any(|dims| Signature::has(dims, factor))
    }

    /// The size of each factor, from the shapes of the operands and what is `known` by name.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn sizes(&self, shapes: &[&[usize]], known: &[(Name, usize)]) -> Result<Vec<usize>, SizeError> {
        if shapes.len() != self.args.len() {
            let (needed, found) = (self.args.len(), shapes.len());
            return Err(SizeError::Operands { signature: self.to_string(), needed, found });
        }
        let mut sizes: Vec<Option<usize>> =
            self.factors.iter().map(|f| known.iter().find(|(n, _)| n == f).map(|(_, s)| *s)).collect();
        let set = |sizes: &mut Vec<Option<usize>>, f: Factor, size: usize| match sizes[f].replace(size) {
            Some(first) if first != size => {
                Err(SizeError::Mismatch { factor: self.factors[f].clone(), first, second: size })
            }
            Some(_) | None => Ok(()),
        };
        let mut merged = Vec::new();
        for (operand, (dims, shape)) in self.args.iter().zip(shapes).enumerate() {
            if dims.len() != shape.len() {
                let (needed, found) = (dims.len(), shape.len());
                return Err(SizeError::Dims { operand, signature: self.to_string(), needed, found });
            }
            for (i, (dim, size)) in dims.iter().zip(*shape).enumerate() {
                match dim[..] {
                    [f] => set(&mut sizes, f, *size)?,
                    _ => merged.push((operand, i, dim, *size)),
                }
            }
        }
        for (operand, i, dim, size) in merged {
            let open: Vec<Factor> = dim.iter().copied().filter(|f| sizes[*f].is_none()).collect();
            let rest: usize = dim.iter().filter_map(|f| sizes[*f]).product();
            let wrong = || SizeError::Merged { operand, dim: i, size, factors: self.show_dim(dim) };
            match open[..] {
                [] if rest == size => {}
                [f] if rest > 0 && size % rest == 0 => sizes[f] = Some(size / rest),
                _ => return Err(wrong()),
            }
        }
        let all = sizes.iter().zip(&self.factors);
        all.map(|(s, f)| s.ok_or_else(|| SizeError::Unknown(f.clone()))).collect()
    }

    /// The shape of an operand or result, from the sizes of the factors.
    pub fn shape(dims: &[Dim], sizes: &[usize]) -> Vec<usize> {
        dims.iter().map(|d| d.iter().map(|f| sizes[*f]).product()).collect()
    }

    fn show_dim(&self, dim: &Dim) -> String {
        let names: Vec<&str> = dim.iter().map(|f| &*self.factors[*f]).collect();
        if names.len() == 1 { names[0].to_string() } else { format!("({})", names.join(" ")) }
    }

    /// The text of one operand or result.
    pub fn show(&self, dims: &[Dim]) -> String {
        if dims.is_empty() {
            return "()".to_string();
        }
        dims.iter().map(|d| self.show_dim(d)).collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |of: &[Vec<Dim>]| of.iter().map(|t| self.show(t)).collect::<Vec<_>>().join(", ");
        let text = format!("{} -> {}", list(&self.args), list(&self.results));
        f.write_str(text.trim())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_it_reads() {
        for text in ["m k, k n -> m n", "-> ()", "() -> ()", "(b s) d -> b s d", "a, () -> a, a", "a b ->"] {
            assert_eq!(Signature::parse(text).map(|s| s.to_string()), Ok(text.to_string()));
        }
        for text in ["m k", "(a (b) -> a", "a) -> a", "(a -> a"] {
            assert!(Signature::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_follow_from_operands() {
        let s = Signature::parse("(b s) d, d -> b s d").unwrap();
        assert_eq!(s.sizes(&[&[6, 4], &[4]], &[("b".into(), 2)]), Ok(vec![2, 3, 4]));
        let mismatch = SizeError::Mismatch { factor: "d".into(), first: 4, second: 5 };
        assert_eq!(s.sizes(&[&[6, 4], &[5]], &[("b".into(), 2)]), Err(mismatch));
        assert!(matches!(s.sizes(&[&[6, 4], &[4]], &[("b".into(), 4)]), Err(SizeError::Merged { .. })));
        let r = Signature::parse("a -> a b").unwrap();
        assert_eq!(r.sizes(&[&[6]], &[]), Err(SizeError::Unknown("b".into())));
    }
}
