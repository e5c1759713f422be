//! For which sizes a kind of schedule has no table, with the numbers that are wrong and those that would do.

/// What a table is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// P: ranks of the pipeline.
    pub stages: usize,
    /// L: virtual stages a rank.
    pub virtuals: usize,
    /// M: micro-batches a step.
    pub microbatches: usize,
    /// N: micro-batches that run through one virtual stage of a rank before the next one's turn, where the user named it.
    pub group: Option<usize>,
}

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is nothing to schedule.
    #[error("a pipeline needs at least 1 {what}, not 0")]
    Nothing {
        /// Of what.
        what: &'static str,
    },
    /// The kind fixes L.
    #[error("{kind} {why}, so it needs --virtual {needed}, not {got}{instead}")]
    Virtuals {
        /// The kind.
        kind: &'static str,
        /// What it does with its virtual stages.
        why: &'static str,
        /// The L that it has.
        needed: usize,
        /// The L that was asked for.
        got: usize,
        /// What has that L, if anything.
        instead: &'static str,
    },
    /// A group where the kind has none.
    #[error("{kind} {why}, so it has no --group {got}; interleaved with --virtual 2 or more takes one")]
    NoGroup {
        /// The kind.
        kind: &'static str,
        /// Why not.
        why: &'static str,
        /// The N that was asked for.
        got: usize,
    },
    /// A group smaller than the pipeline, whose loop would come back late every time, or larger than the step.
    #[error(
        "--group {got} does not suit {stages} stages and {microbatches} micro-batches: a group returns to its rank after \
         {stages} slots, so it holds from {least} (depth-first) to {microbatches} (breadth-first)"
    )]
    Group {
        /// The N that was asked for.
        got: usize,
        /// The least N.
        least: usize,
        /// P.
        stages: usize,
        /// M, the largest N.
        microbatches: usize,
    },
}

impl Size {
    /// That there is something to schedule.
    pub(super) fn some(&self) -> Result<(), Refused> {
        let counts = [
            (self.stages, "stage"),
            (self.virtuals, "virtual stage a rank"),
            (self.microbatches, "micro-batch"),
        ];
        counts.into_iter().find(|(n, _)| *n == 0).map_or(Ok(()), |(_, what)| Err(Refused::Nothing { what }))
    }

    /// That it has no group.
    pub(super) fn ungrouped(&self, kind: &'static str, why: &'static str) -> Result<(), Refused> {
        self.group.map_or(Ok(()), |got| Err(Refused::NoGroup { kind, why, got }))
    }

    /// What a kind asks that runs one stage a rank; `instead` says which kind has this order over several.
    pub(super) fn one_stage_a_rank(&self, kind: &'static str, instead: &'static str) -> Result<(), Refused> {
        self.some()?;
        self.ungrouped(kind, "takes one micro-batch after the other")?;
        let why = "runs one stage a rank";
        if self.virtuals == 1 {
            return Ok(());
        }
        Err(Refused::Virtuals { kind, why, needed: 1, got: self.virtuals, instead })
    }

    /// What a kind asks that runs the pipe down and up again.
    pub(super) fn two_stages_in_a_v(&self, kind: &'static str) -> Result<(), Refused> {
        self.some()?;
        self.ungrouped(kind, "takes one micro-batch after the other")?;
        let why = "runs down the ranks and up again, two stages a rank in a V";
        if self.virtuals == 2 {
            return Ok(());
        }
        Err(Refused::Virtuals { kind, why, needed: 2, got: self.virtuals, instead: "" })
    }
}
