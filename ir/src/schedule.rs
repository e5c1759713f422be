//! The schedule: which action of which micro-batch each rank of the pipeline does, in order. A table that prints and parses.
//!
//! A row is a physical stage's; the stage of an action is the virtual one, k, of L a row. Where it lives is data: loop
//! order (k = l P + s), V order, or what a person wrote.

pub mod simulate;
pub mod stuck;

use std::collections::BTreeMap;
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

/// One action: `2F0` is virtual stage 2, forward, micro-batch 0. The optimizer has no micro-batch: `2O`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// Which virtual stage.
    pub stage: usize,
    /// What is done.
    pub kind: Kind,
    /// For which micro-batch; none for what is done once a step.
    pub microbatch: Option<usize>,
}

impl Action {
    /// What is done for a micro-batch.
    pub fn new(stage: usize, kind: Kind, microbatch: usize) -> Action {
        Action { stage, kind, microbatch: Some(microbatch) }
    }

    /// The optimizer of a stage.
    pub fn optimizer(stage: usize) -> Action {
        Action { stage, kind: Kind::Optimizer, microbatch: None }
    }

    /// Under which name others wait for it: a whole backward gives the gradient of the input, as `I` does.
    pub fn gives(self) -> Action {
        match self.kind {
            Kind::Backward => Action { kind: Kind::Input, ..self },
            Kind::Begin
            | Kind::Forward
            | Kind::Input
            | Kind::Weight
            | Kind::Unshard
            | Kind::Drop
            | Kind::Reduce
            | Kind::Optimizer => self,
        }
    }

    /// What must be done before it, by the names of [`Action::gives`], in a pipeline of so many virtual stages. What
    /// only the order of its row says (the optimizer comes last) is not here.
    pub fn needs(self, stages: usize) -> impl Iterator<Item = Action> {
        let of = |stage, kind| Some(Action { stage, kind, ..self });
        let needs = match self.kind {
            Kind::Forward => [self.stage.checked_sub(1).and_then(|before| of(before, Kind::Forward)), None],
            Kind::Backward | Kind::Input => {
                let after = self.stage + 1;
                let downstream = if after < stages { of(after, Kind::Input) } else { None };
                [of(self.stage, Kind::Forward), downstream]
            }
            Kind::Weight => [of(self.stage, Kind::Input), None],
            Kind::Begin | Kind::Unshard | Kind::Drop | Kind::Reduce | Kind::Optimizer => [None, None],
        };
        needs.into_iter().flatten()
    }
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
        let number = |digits: &str| digits.parse::<u32>().map(|n| n as usize).map_err(|_| wrong());
        let stage = number(&text[..at])?;
        let microbatch = match &text[at + 1..] {
            "" if kind == Kind::Optimizer => None,
            rest => Some(number(rest)?),
        };
        Ok(Action { stage, kind, microbatch })
    }
}

/// Where virtual stages live in loop order: stage k = l P + s on rank s, so that the pipe is run through L times.
pub fn loop_order(stages: usize, virtuals: usize) -> Vec<usize> {
    (0..stages * virtuals).map(|k| k % stages).collect()
}

/// Where virtual stages live in V order: every other time the pipe is run through backward, so that neighbours at a turn
/// share a rank.
pub fn v_order(stages: usize, virtuals: usize) -> Vec<usize> {
    let place = |k: usize| if (k / stages).is_multiple_of(2) { k % stages } else { stages - 1 - k % stages };
    (0..stages * virtuals).map(place).collect()
}

/// A row of actions for each physical stage.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Schedule {
    /// The rows.
    pub rows: Vec<Vec<Action>>,
    /// For each virtual stage the row that it lives on. Every stage that an action names has one.
    pub homes: Vec<usize>,
}

impl Schedule {
    /// One stage: each micro-batch forward and backward, then the optimizer.
    pub fn one_stage(microbatches: usize) -> Schedule {
        let both = |m| [Action::new(0, Kind::Forward, m), Action::new(0, Kind::Backward, m)];
        let row = (0..microbatches).flat_map(both).chain([Action::optimizer(0)]).collect();
        Schedule { rows: vec![row], homes: vec![0] }
    }

    /// A table whose stages live where most of their actions stand (the first such row), so that what stands elsewhere
    /// can be named as misplaced.
    ///
    /// # Errors
    /// A stage that no action names, where a later one is named.
    pub fn of_rows(rows: Vec<Vec<Action>>) -> Result<Schedule, String> {
        let mut counts: BTreeMap<usize, BTreeMap<usize, usize>> = BTreeMap::new();
        for (row, actions) in rows.iter().enumerate() {
            for action in actions {
                *counts.entry(action.stage).or_default().entry(row).or_default() += 1;
            }
        }
        let mut homes = Vec::new();
        for (stage, rows) in &counts {
            if *stage != homes.len() {
                let (missing, last) = (homes.len(), counts.keys().max().unwrap_or(stage));
                return Err(format!("stage {missing} has no action, and there are stages up to {last}"));
            }
            let most = rows.values().max();
            homes.extend(rows.iter().find(|(_, n)| Some(*n) == most).map(|(row, _)| *row));
        }
        Ok(Schedule { rows, homes })
    }

    /// How many virtual stages there are, over all rows.
    pub fn stages(&self) -> usize {
        self.homes.len()
    }

    /// The virtual stages of a row, in order.
    pub fn stages_of(&self, row: usize) -> impl Iterator<Item = usize> {
        self.homes.iter().enumerate().filter(move |(_, home)| **home == row).map(|(stage, _)| stage)
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
        Schedule::of_rows(lines.map(row).collect::<Result<_, _>>()?)
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
        for wrong in ["F0", "0F", "0X1", "0F0x", "0F-1", "0F4294967296"] {
            assert!(wrong.parse::<Action>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn stages_live_where_their_actions_stand() {
        let v = "0F0 3F0 3I0 3W0 0B0 0O 3O\n1F0 2F0 2B0 1B0 1O 2O\n";
        let schedule: Schedule = v.parse().unwrap();
        assert_eq!((schedule.to_string().as_str(), schedule.stages()), (v, 4));
        assert_eq!(schedule.homes, v_order(2, 2));
        assert_eq!(schedule.stages_of(1).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(loop_order(3, 2), [0, 1, 2, 0, 1, 2]);
        let gap = "0F0 0B0\n2F0 2B0".parse::<Schedule>().unwrap_err();
        assert_eq!(gap, "stage 1 has no action, and there are stages up to 2");
    }

    #[test]
    fn what_an_action_needs() {
        for (action, needs) in [
            ("0F2", ""),
            ("1F2", "0F2"),
            ("1B2", "1F2 2I2"),
            ("2I2", "2F2"),
            ("2B2", "2F2"),
            ("1W2", "1I2"),
            ("1O", ""),
        ] {
            let action: Action = action.parse().unwrap();
            let got: Vec<String> = action.needs(3).map(|a| a.to_string()).collect();
            assert_eq!(got.join(" "), needs, "{action}");
        }
    }
}
