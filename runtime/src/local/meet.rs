//! Where the ranks of a group meet: for each collective of a step a cell, in which members arrive, and from which
//! anybody takes shares of the work once all are there.
//!
//! A cell is used once a step, so nothing can be mistaken for its predecessor. A rank that arrives leaves its addresses
//! in its post; the last one does a small collective on the spot, and opens a large one to all who wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use super::bucket::{Bucket, Moved};
use super::code::{Code, Op, Place};
use super::copy::{Pieces, Tile, share};
use super::error::RunError;

/// One collective of a step.
#[derive(Default)]
struct Cell {
    arrived: AtomicUsize,
    /// All are there, and shares can be taken.
    open: AtomicBool,
    /// The next share that nobody took.
    next: AtomicUsize,
    finished: AtomicUsize,
    done: AtomicBool,
}

/// What an arriving member brings: its arena, in which slot it runs, and what it came for.
struct Post {
    arena: AtomicPtr<u8>,
    slot: AtomicUsize,
    bucket: AtomicPtr<Bucket>,
}

struct Group {
    members: Vec<usize>,
    /// Where its cells start, and its posts.
    cells: usize,
    posts: usize,
}

/// All cells of a step.
pub struct Meet {
    groups: Vec<Group>,
    cells: Vec<Cell>,
    posts: Vec<Post>,
    inline_bytes: usize,
}

/// A cell as a rank remembers it between start and wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Which group.
    pub group: usize,
    /// Which of its collectives in this step, from 0.
    pub number: usize,
}

/// How far a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Some members are missing.
    Missing,
    /// All shares are taken, but not all done.
    Taken,
    /// It is done.
    Done,
}

/// The pieces of one tensor in the arenas that the members of a group left.
struct Posted<'a> {
    posts: &'a [Post],
    moved: &'a Moved,
}

impl Posted<'_> {
    fn address(&self, member: usize, places: &[Place]) -> *mut u8 {
        let place = places.get(member).unwrap_or(&places[0]);
        let post = &self.posts[member];
        let at = place.in_slot(post.slot.load(Ordering::Relaxed));
        // SAFETY: who arrived promised that its arena has every piece of what it came for, in its slot.
        unsafe { post.arena.load(Ordering::Relaxed).add(at) }
    }
}

impl Pieces for Posted<'_> {
    fn from(&self, member: usize) -> *const u8 {
        self.address(member, &self.moved.from).cast_const()
    }
    fn to(&self, member: usize) -> *mut u8 {
        self.address(member, &self.moved.to)
    }
}

impl Meet {
    /// Cells for all that a step starts. Collectives below `inline_bytes` are done by the last to arrive.
    pub fn new(code: &Code, inline_bytes: usize) -> Meet {
        let mut counts = vec![0; code.groups.len()];
        for (rank, rank_code) in code.ranks.iter().enumerate() {
            let mut mine = vec![0; code.groups.len()];
            for call in &rank_code.calls {
                for op in &rank_code.segments[call.segment].ops {
                    match op {
                        Op::Start { group, .. } => mine[*group] += 1,
                        // A message has the cell of its micro-batch.
                        Op::Post { group, .. } => {
                            mine[*group] = mine[*group].max(call.microbatch.unwrap_or(0) + 1);
                        }
                        Op::Feed { .. }
                        | Op::Launch { .. }
                        | Op::Copy { .. }
                        | Op::Fill { .. }
                        | Op::Wait { .. }
                        | Op::Done { .. }
                        | Op::Tap { .. } => {}
                    }
                }
            }
            debug_assert!(mine.iter().zip(&code.groups).all(|(n, g)| *n == 0 || g.contains(&rank)));
            counts.iter_mut().zip(mine).for_each(|(count, n): (&mut usize, usize)| *count = n.max(*count));
        }
        let (mut cells, mut posts) = (0, 0);
        let group = |(members, count): (&Vec<usize>, usize)| {
            let group = Group { members: members.clone(), cells, posts };
            cells += count;
            posts += count * members.len();
            group
        };
        let groups = code.groups.iter().zip(counts).map(group).collect();
        let post = || Post {
            arena: AtomicPtr::default(),
            slot: AtomicUsize::default(),
            bucket: AtomicPtr::default(),
        };
        Meet {
            groups,
            cells: std::iter::repeat_with(Cell::default).take(cells).collect(),
            posts: std::iter::repeat_with(post).take(posts).collect(),
            inline_bytes,
        }
    }

    /// Makes all cells new. Only while no rank runs.
    pub fn reset(&self) {
        for cell in &self.cells {
            cell.arrived.store(0, Ordering::Relaxed);
            cell.open.store(false, Ordering::Relaxed);
            cell.next.store(0, Ordering::Relaxed);
            cell.finished.store(0, Ordering::Relaxed);
            cell.done.store(false, Ordering::Relaxed);
        }
    }

    fn cell(&self, at: Meeting) -> &Cell {
        &self.cells[self.groups[at.group].cells + at.number]
    }

    fn posts(&self, at: Meeting) -> &[Post] {
        let group = &self.groups[at.group];
        let n = group.members.len();
        &self.posts[group.posts + at.number * n..][..n]
    }

    /// A member arrives with its arena and the slot that it runs in; the last one does what is small, and opens what is large.
    ///
    /// # Errors
    /// If the members came for different collectives.
    ///
    /// # Safety
    /// The pieces in the arena are what the collectives were planned for, and until they are done nobody else touches them.
    pub unsafe fn arrive(
        &self,
        at: Meeting,
        member: usize,
        bucket: &Arc<Bucket>,
        (arena, slot): (*mut u8, usize),
        tile: &mut Tile,
    ) -> Result<(), RunError> {
        let (cell, posts) = (self.cell(at), self.posts(at));
        posts[member].arena.store(arena, Ordering::Relaxed);
        posts[member].slot.store(slot, Ordering::Relaxed);
        posts[member].bucket.store(Arc::as_ptr(bucket).cast_mut(), Ordering::Relaxed);
        // The release shows this member's piece to the last to arrive, the acquire all pieces to that one.
        if cell.arrived.fetch_add(1, Ordering::AcqRel) + 1 < posts.len() {
            return Ok(());
        }
        let known = Arc::as_ptr(bucket).cast_mut();
        if posts.iter().any(|p| p.bucket.load(Ordering::Relaxed) != known) {
            return Err(self.mismatch(at));
        }
        if bucket.bytes >= self.inline_bytes && !bucket.shares.is_empty() {
            cell.open.store(true, Ordering::Release);
            return Ok(());
        }
        for (i, part) in &bucket.shares {
            let moved = &bucket.moved[*i];
            // SAFETY: all members are there, so all pieces are in our hands until the cell is done.
            unsafe { share(&moved.collective, *part, &Posted { posts, moved }, tile) };
        }
        cell.done.store(true, Ordering::Release);
        Ok(())
    }

    fn mismatch(&self, at: Meeting) -> RunError {
        let one = |post: &Post| {
            // SAFETY: every member left the address of a bucket that its rank's code keeps alive.
            let bucket = unsafe { &*post.bucket.load(Ordering::Relaxed) };
            format!("{} of {} bytes", bucket.first().op, bucket.bytes)
        };
        let found: Vec<String> = self.posts(at).iter().map(one).collect();
        RunError::Mismatched { members: self.groups[at.group].members.clone(), found: found.join(", ") }
    }

    /// Does shares of a collective while there are some, and says how far it is then.
    ///
    /// # Safety
    /// The caller's rank arrived there with this collective.
    pub unsafe fn help(&self, at: Meeting, bucket: &Bucket, tile: &mut Tile) -> Progress {
        let cell = self.cell(at);
        if cell.done.load(Ordering::Acquire) {
            return Progress::Done;
        }
        if !cell.open.load(Ordering::Acquire) {
            // Between the last arrival and the end of what is done inline.
            let all = cell.arrived.load(Ordering::Acquire) == self.groups[at.group].members.len();
            return if all { Progress::Taken } else { Progress::Missing };
        }
        loop {
            let taken = cell.next.fetch_add(1, Ordering::Relaxed);
            let Some((i, part)) = bucket.shares.get(taken) else {
                // Kept from growing without end while others finish theirs.
                cell.next.store(bucket.shares.len(), Ordering::Relaxed);
                break;
            };
            let moved = &bucket.moved[*i];
            // SAFETY: all members are there, and this share is ours alone.
            unsafe { share(&moved.collective, *part, &Posted { posts: self.posts(at), moved }, tile) };
            // Each one that finishes releases what it wrote; the last acquires it all and passes it on.
            if cell.finished.fetch_add(1, Ordering::AcqRel) + 1 == bucket.shares.len() {
                cell.done.store(true, Ordering::Release);
            }
        }
        if cell.done.load(Ordering::Acquire) { Progress::Done } else { Progress::Taken }
    }

    /// Whether members are missing.
    pub fn is_missing(&self, at: Meeting) -> bool {
        self.cell(at).arrived.load(Ordering::Acquire) < self.groups[at.group].members.len()
    }

    /// Which ranks meet there, and how many are there.
    pub fn show(&self, at: Meeting) -> String {
        let arrived = self.cell(at).arrived.load(Ordering::Acquire);
        format!(
            "collective {} of ranks {:?}, where {arrived} arrived",
            at.number, self.groups[at.group].members
        )
    }
}
