//! Proves that a program ends: that no ranks wait for each other for ever, whatever the order in which they run.
//!
//! A rank starts messages and collectives without waiting, and waits for them later. All ranks of a row of the pipeline do
//! the same, so in a collective within a row every member starts the same ones in the same order, and none is waited for
//! in vain; a rank's message goes to the rank that lies as it does in another row. So one list of events a row is enough,
//! however many ranks a row has.
//!
//! First the lists are held against each other (`events`): the k-th that is sent over a channel and the k-th that is
//! received must be of one micro-batch, and what rows do together must be the same in all of them. Then the events happen
//! by their rules alone (`progress`), in time linear in their number. Which of them happen does not depend on the order
//! in which rows are looked at, since an event never undoes what another waits for. If some row does not come to its end,
//! the shortest circle of rows that wait for each other is named (`circle`).

mod circle;
mod events;
mod fault;
mod progress;

use ir::program::Program;

pub use fault::{Fault, Place, Stuck};

/// When a wait for something that was sent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Once the other side is ready to receive it. Whatever ends so ends over the others, too.
    Rendezvous,
    /// At once: it is copied.
    Eager,
    /// As with rendezvous, but starts and waits of messages that follow each other, with nothing between, are one call, as
    /// in NCCL's groups: everything in it has started before anything is waited for.
    Grouped,
}

impl Transport {
    /// Its name, in the words of a fault.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Rendezvous => "rendezvous",
            Transport::Eager => "eager",
            Transport::Grouped => "grouped",
        }
    }
}

/// What happens in a step of a program that ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Collectives, each counted once for all its members.
    pub collectives: usize,
    /// Messages from a rank to a rank.
    pub messages: usize,
    /// The ranks.
    pub ranks: usize,
}

/// Proves that a program ends.
///
/// # Errors
/// All that does not match between ranks; if everything does, the ranks that wait for each other.
pub fn ends(program: &Program, transport: Transport) -> Result<Ends, Vec<Fault>> {
    let mut events = events::Events::of(program);
    let faults = events.faults();
    if !faults.is_empty() {
        return Err(faults);
    }
    match transport {
        Transport::Rendezvous | Transport::Eager => {}
        Transport::Grouped => events.group(),
    }
    let reached = progress::run(&events, transport);
    if events.rows.iter().zip(&reached).any(|(row, at)| *at < row.len()) {
        return Err(vec![circle::shortest(&events, &reached, transport)]);
    }
    Ok(events.ends())
}
