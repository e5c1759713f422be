//! Orders in which a rank runs its L virtual stages over groups of N micro-batches (arXiv 2407.21783, section 3.3.2: N = P
//! is depth-first, N = M breadth-first, and anything between trades activations for overlap).
//!
//! A group runs through a rank's stages one after the other, forward in their order and backward against it.
//!
//! The remainder rule: where M is no multiple of N, there are floor(M / N) groups of as equal sizes as can be, the larger
//! ones first; so no group is smaller than N, and a group's loop is back in time. With M < N there is one group of M, and
//! each turn of the loop waits P - M slots for its values.

use ir::schedule::{Action, Kind, Schedule, loop_order};

use super::finished;
use super::refused::{Refused, Size};

/// One virtual stage of a rank at one micro-batch.
#[derive(Clone, Copy)]
struct Item {
    turn: usize,
    microbatch: usize,
}

/// The sizes of the groups.
fn groups(microbatches: usize, group: usize) -> Vec<usize> {
    let n = (microbatches / group).max(1);
    (0..n).map(|g| microbatches / n + usize::from(g < microbatches % n)).collect()
}

/// Every item in the order of forwards, and in that of backwards.
fn orders(size: &Size, groups: &[usize]) -> [Vec<Item>; 2] {
    let mut orders = [const { Vec::new() }; 2];
    let mut first = 0;
    for n in groups {
        for turn in 0..size.virtuals {
            for microbatch in first..first + n {
                orders[0].push(Item { turn, microbatch });
                orders[1].push(Item { turn: size.virtuals - 1 - turn, microbatch });
            }
        }
        first += n;
    }
    orders
}

/// That a named group is between depth-first and breadth-first.
pub(super) fn fits(size: &Size) -> Result<(), Refused> {
    let least = size.stages.min(size.microbatches);
    match size.group {
        Some(got) if got < least || got > size.microbatches => {
            let Size { stages, microbatches, .. } = *size;
            Err(Refused::Group { got, least, stages, microbatches })
        }
        Some(_) | None => Ok(()),
    }
}

/// The table for groups of N. Rank s warms up with (L - 1) N + 2 (P - 1 - s) forwards, then does one forward and one
/// backward by turns (Narayanan et al., arXiv 2104.04473, section 2.2.2, where N = P). A group of all micro-batches leaves
/// nothing to take turns with: all forwards come first.
pub(super) fn table(size: &Size, group: usize) -> Schedule {
    let groups = groups(size.microbatches, group);
    let [forwards, backwards] = orders(size, &groups);
    let row = |rank: usize| {
        let warm = match groups.as_slice() {
            [largest, _, ..] => (size.virtuals - 1) * largest + 2 * (size.stages - 1 - rank),
            [] | [_] => forwards.len(),
        };
        let action = |kind, item: &Item| Action::new(item.turn * size.stages + rank, kind, item.microbatch);
        let mut ahead = forwards.iter();
        let mut row: Vec<Action> = ahead.by_ref().take(warm).map(|i| action(Kind::Forward, i)).collect();
        for item in &backwards {
            row.extend(ahead.next().map(|i| action(Kind::Forward, i)));
            row.push(action(Kind::Backward, item));
        }
        row
    };
    finished((0..size.stages).map(row).collect(), loop_order(size.stages, size.virtuals))
}

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn groups_are_as_equal_as_can_be_and_none_is_too_small() {
        for (microbatches, group, sizes) in [
            (8, 4, &[4, 4][..]),
            (9, 4, &[5, 4]),
            (11, 4, &[6, 5]),
            (7, 4, &[7]),
            (3, 4, &[3]),
            (16, 5, &[6, 5, 5]),
        ] {
            assert_eq!(groups(microbatches, group), sizes, "{microbatches} by {group}");
        }
    }
}
