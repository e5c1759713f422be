//! The schedule: which action of which micro-batch each rank of a stage does, in order. A table that prints and parses.

use std::fmt;
use std::str::FromStr;

/// What an action does. The letter is its text form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// What is done once, before the first micro-batch. It is in no table: lowering puts it first.
    Begin,
    /// Forward.
    Forward,
    /// Whole backward.
    Backward,
    /// Backward toward inputs only.
    Input,
    /// Backward toward parameters only.
    Weight,
    /// Gather parameters.
    Unshard,
    /// Drop gathered parameters.
    Drop,
    /// Reduce gradients.
    Reduce,
    /// The optimizer, once a step.
    Optimizer,
}

impl Kind {
    /// Every kind, for parsing.
    pub const ALL: [Kind; 9] = [
        Kind::Begin,
        Kind::Forward,
        Kind::Backward,
        Kind::Input,
        Kind::Weight,
        Kind::Unshard,
        Kind::Drop,
        Kind::Reduce,
        Kind::Optimizer,
    ];

    /// Its letter.
    pub fn letter(self) -> char {
        match self {
            Kind::Begin => 'P',
            Kind::Forward => 'F',
            Kind::Backward => 'B',
            Kind::Input => 'I',
            Kind::Weight => 'W',
            Kind::Unshard => 'U',
            Kind::Drop => 'D',
            Kind::Reduce => 'R',
            Kind::Optimizer => 'O',
        }
    }
}

/// One action: `2F0` is stage 2, forward, micro-batch 0. The optimizer has no micro-batch: `2O`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// Which stage.
    pub stage: usize,
    /// What is done.
    pub kind: Kind,
    /// For which micro-batch; none for what is done once a step.
    pub microbatch: Option<usize>,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.kind.letter())?;
        self.microbatch.map_or(Ok(()), |m| write!(f, "{m}"))
    }
}

impl FromStr for Action {
    type Err = String;

    fn from_str(text: &str) -> Result<Action, String> {
        let wrong = || format!("`{text}` is no action: one reads 2F0 (stage, letter, micro-batch) or 2O");
        let at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
        let letter = text[at..].chars().next();
        let kind = Kind::ALL.into_iter().find(|k| Some(k.letter()) == letter).ok_or_else(wrong)?;
        let stage = text[..at].parse().map_err(|_| wrong())?;
        let microbatch = match &text[at + 1..] {
            "" if kind == Kind::Optimizer => None,
            rest => Some(rest.parse().map_err(|_| wrong())?),
        };
        Ok(Action { stage, kind, microbatch })
    }
}

/// A row of actions for each physical stage.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Schedule {
    /// The rows.
    pub rows: Vec<Vec<Action>>,
}

impl Schedule {
    /// One stage: each micro-batch forward and backward, then the optimizer.
    pub fn one_stage(microbatches: usize) -> Schedule {
        let action = |kind, microbatch| Action { stage: 0, kind, microbatch };
        let mut row: Vec<Action> = (0..microbatches)
            .flat_map(|m| [action(Kind::Forward, Some(m)), action(Kind::Backward, Some(m))])
            .collect();
        row.push(action(Kind::Optimizer, None));
        Schedule { rows: vec![row] }
    }

    /// How many micro-batches a step has.
    pub fn microbatches(&self) -> usize {
        self.rows.iter().flatten().filter_map(|a| a.microbatch).max().map_or(1, |m| m + 1)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            writeln!(f, "{}", row.iter().map(Action::to_string).collect::<Vec<_>>().join(" "))?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Schedule, String> {
        let row = |line: &str| line.split_whitespace().map(str::parse).collect::<Result<Vec<Action>, _>>();
        let lines = text.lines().filter(|l| !l.trim().is_empty());
        Ok(Schedule { rows: lines.map(row).collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_it_reads() {
        let text = "0F0 0B0 0F1 0B1 0O\n";
        assert_eq!(Schedule::one_stage(2).to_string(), text);
        assert_eq!(text.parse(), Ok(Schedule::one_stage(2)));
        for wrong in ["F0", "0F", "0X1", "0F0x"] {
            assert!(wrong.parse::<Action>().is_err(), "{wrong}");
        }
    }
}
