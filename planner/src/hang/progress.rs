//! Lets events happen by their rules alone. A row goes on until it waits for what has not happened, and is looked at again
//! when that has: each event is looked at once or twice.

use super::Transport;
use super::events::{Events, What};

/// What has happened so far.
struct Happened {
    /// By channel, how many were sent, and how many are or were ready to be received.
    sends: Vec<usize>,
    receives: Vec<usize>,
    /// By communicator and number, how many rows are there.
    rows: Vec<Vec<usize>>,
}

/// How far each row comes, in events.
pub(super) fn run(events: &Events, transport: Transport) -> Vec<usize> {
    let count = events.rows.len();
    let mut happened = Happened {
        sends: vec![0; events.channels.len()],
        receives: vec![0; events.channels.len()],
        rows: vec![Vec::new(); events.communicators.len()],
    };
    let mut at = vec![0; count];
    let mut ready: Vec<usize> = (0..count).rev().collect();
    let mut listed = vec![true; count];
    while let Some(row) = ready.pop() {
        listed[row] = false;
        while let Some(event) = events.rows[row].get(at[row]) {
            if !happened.ends(event.what, count, transport) {
                break;
            }
            at[row] += 1;
            let mut look = |other: usize| {
                if !std::mem::replace(&mut listed[other], true) {
                    ready.push(other);
                }
            };
            match event.what {
                What::Send { channel, number } => {
                    happened.sends[channel] = number + 1;
                    events.channels[channel].receives.get(number).into_iter().for_each(|e| look(e.row));
                }
                What::Receive { channel, number } => {
                    happened.receives[channel] = number + 1;
                    events.channels[channel].sends.get(number).into_iter().for_each(|e| look(e.row));
                }
                What::Start { communicator, number } => {
                    let rows = &mut happened.rows[communicator];
                    rows.resize(rows.len().max(number + 1), 0);
                    rows[number] += 1;
                    if rows[number] == count {
                        (0..count).for_each(look);
                    }
                }
                What::Sent { .. } | What::Received { .. } | What::Wait { .. } => {}
            }
        }
    }
    at
}

impl Happened {
    /// Whether an event can happen now. Starts always can.
    fn ends(&self, what: What, rows: usize, transport: Transport) -> bool {
        match what {
            What::Send { .. } | What::Receive { .. } | What::Start { .. } => true,
            What::Sent { channel, number } => match transport {
                Transport::Eager => true,
                Transport::Rendezvous | Transport::Grouped => self.receives[channel] > number,
            },
            What::Received { channel, number } => self.sends[channel] > number,
            What::Wait { communicator, number } => self.rows[communicator].get(number) == Some(&rows),
        }
    }
}
