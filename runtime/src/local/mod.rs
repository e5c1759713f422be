//! The local backend: all ranks of a program in this process, on CPUs.
//!
//! A rank is no thread but an interpreter: an arena, and a place in a fixed list of ops. A few workers, which stay from
//! step to step, run their ranks in turn until each is blocked at a wait. Collectives are done where the memory is: by
//! the last rank to arrive if small, by all who wait if large. Every sum runs in the order of the group, so the numbers are
//! the same bits on every run and with any number of workers. A step allocates nothing but what taps hand out.
//!
//! ```text
//! load        program -> ops: rules checked, addresses, regions and kernels resolved
//! collective  a move of a group as blocks from members to members, cut into shares; copy does a share
//! meet        where the members of a group find each other
//! message     what goes from a stage of a pipeline to another
//! rank        the interpreter; workers runs many of them
//! host        inputs, taps; states, what is kept; traffic, what was sent; watch, where a NaN began
//! record      when calls ran; profile, how long instructions took
//! ```

mod arena;
mod blocks;
mod bucket;
mod code;
mod collective;
mod copy;
mod error;
mod host;
mod load;
mod meet;
mod message;
mod numbers;
mod profile;
mod rank;
mod record;
mod states;
#[cfg(test)]
mod tests;
mod traffic;
mod watch;
mod workers;

use std::collections::BTreeMap;

use ir::Name;
use ir::program::{Instruction, Program, Stage};

use arena::Arena;
use code::Code;
use meet::Meet;
use rank::Step;
use record::Recorder;
use traffic::Counts;
use workers::Workers;

pub use error::RunError;
pub use host::{HostTensor, Taps};
pub use profile::{Profile, Spent};
pub use record::Mark;
pub use states::{Fill, FillBytes};
pub use traffic::Traffic;
pub use watch::NotFinite;

/// Below this many bytes the last rank to arrive does a collective alone: waking others costs more than they do.
const INLINE: usize = 256 << 10;
/// The same where each worker has a core to itself: who waits there looks every moment.
const INLINE_WITH_ROOM: usize = 4 << 10;

/// A program, loaded.
pub struct Local {
    workers: Workers,
    program: Program,
    code: Code,
    meet: Meet,
    counts: Counts,
    taps: host::TapTargets,
    arenas: Vec<Arena>,
}

impl Local {
    /// Loads a program: checks it, plans its kernels, gets each rank's arena, and starts the workers. As many workers
    /// as cores are fastest; as many as ranks is a thread a rank. More than ranks are not started.
    ///
    /// # Errors
    /// A program that cannot run here; no memory.
    pub fn new(program: &Program, workers: usize) -> Result<Local, RunError> {
        let inline_bytes =
            if workers::have_room(workers.min(program.mesh.ranks())) { INLINE_WITH_ROOM } else { INLINE };
        Local::of(program, load::load(program, collective::SHARE)?, workers, inline_bytes)
    }

    /// With ops that may be other than those of the program, and a limit for what the last rank does alone.
    fn of(program: &Program, code: Code, workers: usize, inline_bytes: usize) -> Result<Local, RunError> {
        let bytes = |rank: usize| program.stages[program.mesh.row(rank)].arena_bytes();
        let ranks = 0..program.mesh.ranks();
        let mut arenas = ranks.map(|rank| Arena::new(bytes(rank))).collect::<Result<Vec<_>, _>>()?;
        let starts: Vec<*mut u8> = arenas.iter_mut().map(Arena::start).collect();
        Ok(Local {
            workers: Workers::start(&starts, &code, workers, code.scratch)?,
            program: program.clone(),
            meet: Meet::new(&code, inline_bytes),
            counts: Counts::new(&code),
            code,
            taps: host::TapTargets::default(),
            arenas,
        })
    }

    /// What a rank does.
    fn stage_of(&self, rank: usize) -> &Stage {
        &self.program.stages[self.program.mesh.row(rank)]
    }

    /// How many bytes the largest arena of a rank has.
    pub fn arena_bytes(&self) -> usize {
        self.arenas.iter().map(Arena::bytes).max().unwrap_or(0)
    }

    /// The names of all taps of the program.
    pub fn taps(&self) -> Vec<Name> {
        let instructions = self.program.stages.iter().flat_map(|s| &s.segments).flat_map(|s| &s.instructions);
        let mut names = Vec::new();
        for instruction in instructions {
            if let Instruction::Tap { name, .. } = instruction
                && !names.contains(name)
            {
                names.push(name.clone());
            }
        }
        names
    }

    /// Runs all calls once, with the whole inputs of each micro-batch.
    ///
    /// # Errors
    /// Feeds that do not fit. [`RunError::NotFinite`], and then no instruction behind that tap ran on a rank that saw it;
    /// with a tap that every rank has in full, as a loss, no state changed. After another error the states may be half
    /// written.
    pub fn step(&mut self, feeds: &[BTreeMap<Name, HostTensor>], taps: &mut Taps) -> Result<(), RunError> {
        self.step_by(feeds, taps, None, None)
    }

    /// The same, and tells for each rank when it did what.
    ///
    /// # Errors
    /// As [`Local::step`].
    pub fn step_recorded(
        &mut self,
        feeds: &[BTreeMap<Name, HostTensor>],
        taps: &mut Taps,
    ) -> Result<Vec<Vec<Mark>>, RunError> {
        let recorder = Recorder::new(self.program.mesh.ranks());
        self.step_by(feeds, taps, Some(&recorder), None)?;
        Ok(recorder.finish())
    }

    /// The same, and adds to a profile how long each instruction took.
    ///
    /// # Errors
    /// As [`Local::step`].
    pub fn step_profiled(
        &mut self,
        feeds: &[BTreeMap<Name, HostTensor>],
        taps: &mut Taps,
        profile: &Profile,
    ) -> Result<(), RunError> {
        self.step_by(feeds, taps, None, Some(profile))
    }

    /// A profile of no step yet.
    pub fn profile(&self) -> Profile {
        Profile::of(&self.code)
    }

    /// What a profile of this program says, instruction by instruction.
    pub fn spent(&self, profile: &Profile) -> Vec<Spent> {
        profile.spent(&self.program, &self.code)
    }

    fn step_by(
        &mut self,
        feeds: &[BTreeMap<Name, HostTensor>],
        taps: &mut Taps,
        recorder: Option<&Recorder>,
        profile: Option<&Profile>,
    ) -> Result<(), RunError> {
        self.check_feeds(feeds)?;
        self.meet.reset();
        self.counts.reset();
        self.taps.aim(&self.program.stages, taps);
        let step = Step {
            code: &self.code,
            meet: &self.meet,
            counts: &self.counts,
            feeds,
            taps: &self.taps,
            finite: &taps.finite,
            recorder,
            profile,
        };
        let result = self.workers.step(&step);
        if result.is_err() {
            taps.clear();
        }
        result
    }

    /// The collectives that the last step performed, in the order of the program: of each the largest over ranks.
    pub fn traffic(&self) -> Vec<Traffic> {
        traffic::traffic(&self.code, &self.counts)
    }

    /// Every input is there for every micro-batch, in its type and size.
    fn check_feeds(&self, feeds: &[BTreeMap<Name, HostTensor>]) -> Result<(), RunError> {
        let needed = self.program.microbatches;
        if feeds.len() != needed {
            return Err(RunError::Microbatches { needed, found: feeds.len() });
        }
        for (microbatch, feeds) in feeds.iter().enumerate() {
            for input in &self.program.inputs {
                let n: usize = input.dims.iter().map(|(_, n)| n).product();
                let found = match feeds.get(&input.name) {
                    Some(t) if t.dtype() == input.dtype && t.elements() == n => continue,
                    Some(t) => format!("{} {}", t.elements(), t.dtype()),
                    None => "nothing".to_string(),
                };
                let (name, needed) = (input.name.clone(), format!("{n} {}", input.dtype));
                return Err(RunError::Feed { microbatch, name, needed, found });
            }
        }
        Ok(())
    }
}
