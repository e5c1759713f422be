//! What a table promises, read off the table: slots of a forward pass, transfers, and the ideal step, in which a whole
//! rank's F, I and W each take 1, and a hop none.

use ir::schedule::{Action, Kind, Schedule, loop_order};
use serde::Serialize;

use ir::schedule::simulate::{Durations, Times, Work, simulate};
use ir::schedule::stuck::Stuck;

/// The figures of a schedule, and its table, as `plan --format json` has them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// The kind, or the file.
    pub kind: String,
    /// P: ranks of the pipeline.
    pub stages: usize,
    /// L: virtual stages a rank.
    #[serde(rename = "virtual")]
    pub virtuals: usize,
    /// M.
    pub microbatches: usize,
    /// How many slots of one virtual stage's forward the forwards take by themselves, where that is L M + P - 1: in loop
    /// order, if no turn of the loop has to wait.
    pub forward_slots: Option<usize>,
    /// The part of them in which a rank works: L M of the slots.
    pub forward_utilization: Option<f64>,
    /// Transfers from rank to rank of one micro-batch in its forward: P - 1, in loop order P L - 1, in V order L (P - 1).
    pub boundary_transfers_per_microbatch: usize,
    /// The step where computing is even and communication free.
    pub ideal: Ideal,
    /// The rows.
    pub table: Vec<Vec<String>>,
}

/// The step in units of a whole rank's F, I or W (B is both).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ideal {
    /// From the start to the end of the last rank.
    pub makespan: f64,
    /// Idle time of all ranks, as a part of the whole step.
    pub bubble_fraction: f64,
    /// For each rank the largest number of micro-batches whose activations live at once, in whole ranks' activations.
    pub in_flight: Vec<f64>,
}

/// The figures of a table.
///
/// # Errors
/// Where the table cannot be run.
pub fn figures(kind: &str, schedule: &Schedule) -> Result<Figures, Stuck> {
    let stages = schedule.rows.len();
    let virtuals = schedule.stages() / stages.max(1);
    let microbatches = schedule.microbatches();
    let forward_slots = forward_slots(schedule)?;
    let used = (virtuals * microbatches) as f64;
    Ok(Figures {
        kind: kind.to_string(),
        stages,
        virtuals,
        microbatches,
        forward_slots,
        forward_utilization: forward_slots.map(|slots| used / slots as f64),
        boundary_transfers_per_microbatch: schedule.homes.windows(2).filter(|w| w[0] != w[1]).count(),
        ideal: ideal(schedule)?,
        table: schedule.rows.iter().map(|row| row.iter().map(Action::to_string).collect()).collect(),
    })
}

/// The step where computing is even and communication free.
///
/// # Errors
/// Where the table cannot be run.
pub fn ideal(schedule: &Schedule) -> Result<Ideal, Stuck> {
    let times = in_units(schedule)?;
    // A stage's action is counted as 1 and divided at the end, so that thirds stay exact.
    let virtuals = (schedule.stages() / schedule.rows.len().max(1)).max(1) as f64;
    Ok(Ideal {
        makespan: times.makespan() / virtuals,
        bubble_fraction: times.bubble_fraction(),
        in_flight: in_flight(schedule),
    })
}

/// When what happens where F, I and W of a virtual stage each take 1 and nothing else takes any time.
///
/// # Errors
/// Where the table cannot be run.
pub fn in_units(schedule: &Schedule) -> Result<Times, Stuck> {
    let work = Work { forward: 1.0, input: 1.0, weight: 1.0, optimizer: 0.0 };
    simulate(schedule, &Durations::even(work, schedule.stages(), 0.0))
}

fn forward_slots(schedule: &Schedule) -> Result<Option<usize>, Stuck> {
    let stages = schedule.rows.len();
    let virtuals = schedule.stages() / stages.max(1);
    if schedule.homes != loop_order(stages, virtuals) {
        return Ok(None);
    }
    let forwards = |row: &Vec<Action>| row.iter().filter(|a| a.kind == Kind::Forward).copied().collect();
    let alone =
        Schedule { rows: schedule.rows.iter().map(forwards).collect(), homes: schedule.homes.clone() };
    let slots = virtuals * schedule.microbatches() + stages - 1;
    Ok((in_units(&alone)?.makespan() == slots as f64).then_some(slots))
}

/// For each rank the largest number of micro-batches whose activations live at once, from a forward to the whole backward,
/// or to the weight gradient where it is split. Each virtual stage counts for its part of the rank.
pub fn in_flight(schedule: &Schedule) -> Vec<f64> {
    let peak = |(rank, row): (usize, &Vec<Action>)| {
        let (mut alive, mut peak) = (0_usize, 0);
        for action in row {
            match action.kind {
                Kind::Forward => alive += 1,
                Kind::Backward | Kind::Weight => alive = alive.saturating_sub(1),
                Kind::Begin | Kind::Input | Kind::Unshard | Kind::Drop | Kind::Reduce | Kind::Optimizer => {}
            }
            peak = peak.max(alive);
        }
        peak as f64 / schedule.stages_of(rank).count().max(1) as f64
    };
    schedule.rows.iter().enumerate().map(peak).collect()
}
