//! Which random numbers: what sets the numbers of one random op apart from those of every other.
//!
//! A number is a function of its draw and of a counter, and of nothing else, so it is the same on every mesh, in whatever
//! order, and however often it is computed.

use std::fmt;
use std::str::FromStr;

use crate::Name;

/// The name and the seed of a random op.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// Ops of one name draw the same numbers: so one that is computed again repeats them.
    pub name: Name,
    /// The seed; 0: that of the run, see [`crate::Graph::seed`].
    pub seed: u64,
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            0 => write!(f, "{}", self.name),
            seed => write!(f, "{} seed={seed}", self.name),
        }
    }
}

impl FromStr for Draw {
    type Err = String;

    fn from_str(text: &str) -> Result<Draw, String> {
        let wrong = || format!("`{text}` is no draw: one reads `name` or `name seed=7`");
        let mut words = text.split_whitespace();
        let name = words.next().ok_or_else(wrong)?.into();
        let seed = match words.next() {
            None => 0,
            Some(word) => word.strip_prefix("seed=").and_then(|seed| seed.parse().ok()).ok_or_else(wrong)?,
        };
        if words.next().is_some() { Err(wrong()) } else { Ok(Draw { name, seed }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for (name, seed, text) in
            [("embd", 0, "embd"), ("h.0.attn", u64::MAX, "h.0.attn seed=18446744073709551615")]
        {
            let draw = Draw { name: name.into(), seed };
            assert_eq!(draw.to_string(), text);
            assert_eq!(text.parse(), Ok(draw));
        }
        for text in ["", "embd 7", "embd seed=-1", "embd seed=7 more"] {
            assert!(text.parse::<Draw>().is_err(), "{text}");
        }
    }
}
