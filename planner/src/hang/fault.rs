//! Why a program may not end, in the words of the message. A rank stands for all of its row.

use std::fmt;

use ir::program::Message;

use super::Transport;

/// A call of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank, the first of its row.
    pub rank: usize,
    /// Which of its calls.
    pub call: usize,
    /// The segment that it runs.
    pub segment: String,
    /// For which micro-batch.
    pub microbatch: Option<usize>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} in {}", self.rank, self.segment)?;
        self.microbatch.map_or(Ok(()), |m| write!(f, " of micro-batch {m}"))?;
        write!(f, " (call {})", self.call)
    }
}

/// A rank that waits for ever.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Where it stands.
    pub place: Place,
    /// What it waits for.
    pub what: String,
    /// The rank that it waits for.
    pub next: usize,
    /// The call of that rank that would end the wait.
    pub later: usize,
}

/// What keeps a program from ending, or ranks from meaning the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The k-th sent is not the k-th received.
    #[error(
        "message {number} of {} from stage {} to stage {} is sent by {sent}, but received by {received}: the micro-batches differ",
        message.value, message.from, message.to
    )]
    Labels {
        /// The channel.
        message: Message,
        /// Which of its messages.
        number: usize,
        /// Who sends it.
        sent: Place,
        /// Who receives it.
        received: Place,
    },
    /// A message without a receive.
    #[error("{} from stage {} to stage {}, sent by {place}, is never received", message.value, message.from, message.to)]
    NotReceived {
        /// The channel.
        message: Message,
        /// Who sends it.
        place: Place,
    },
    /// A receive without a message.
    #[error("{} from stage {} to stage {}, received by {place}, is never sent", message.value, message.from, message.to)]
    NotSent {
        /// The channel.
        message: Message,
        /// Who is ready for it.
        place: Place,
    },
    /// A message of a micro-batch that was there before.
    #[error("{} from stage {} to stage {} is there twice for its micro-batch: again by {place}", message.value, message.from, message.to)]
    Twice {
        /// The channel.
        message: Message,
        /// Who starts it again.
        place: Place,
    },
    /// A wait for nothing.
    #[error("{place} waits for what it did not start for that micro-batch: {what}")]
    NotStarted {
        /// The wait.
        what: String,
        /// Who waits.
        place: Place,
    },
    /// A start without a wait.
    #[error("{place} starts {} from stage {} to stage {} and does not wait for it", message.value, message.from, message.to)]
    NotWaited {
        /// The channel.
        message: Message,
        /// Who starts it.
        place: Place,
    },
    /// Ranks that do not start the same collectives.
    #[error("collective {number} over {axes}: {} does {}, but {} does {}", one.0, one.1, other.0, other.1)]
    Collectives {
        /// The axes along which its members lie.
        axes: String,
        /// Which of those over these axes.
        number: usize,
        /// A rank, and what it does.
        one: (String, String),
        /// Another.
        other: (String, String),
    },
    /// Ranks that wait for each other.
    #[error("with {} sends {still} rows wait for ever: {}", transport.name(), show(waits))]
    Circle {
        /// How messages go.
        transport: Transport,
        /// The shortest circle, each before the one that it waits for.
        waits: Vec<Stuck>,
        /// How many rows stand still.
        still: usize,
    },
}

fn show(waits: &[Stuck]) -> String {
    let one = |w: &Stuck| {
        let microbatch = w.place.microbatch.map_or(String::new(), |m| format!(" of micro-batch {m}"));
        format!(
            "waits in {}{microbatch} (call {}: {}) for call {} of rank {}",
            w.place.segment, w.place.call, w.what, w.later, w.next
        )
    };
    let all: Vec<String> = waits.iter().map(one).collect();
    let first = waits.first().map_or(0, |w| w.place.rank);
    format!("rank {first} {}", all.join(", which "))
}
