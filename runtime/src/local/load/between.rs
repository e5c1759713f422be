//! What a rank does together with ranks of other stages, resolved: both ends lie at places of their own.

use std::sync::Arc;

use ir::program::{BufferId, Instruction, Message, Transfer};

use super::{Loader, Spot, region};
use crate::local::blocks::Region;
use crate::local::bucket::{Bucket, Moved};
use crate::local::code::{Op, Place};
use crate::local::collective::Collective;
use crate::local::error::RunError;
use crate::local::message::Channel;

impl Loader<'_> {
    /// The channel of a message, at one end of which a rank is.
    pub(super) fn channel(
        &mut self,
        spot: Spot,
        rank: usize,
        message: Message,
        side: usize,
        id: BufferId,
    ) -> Result<Channel, RunError> {
        let ends = self.channels.ends(message);
        let ends = ends.ok_or_else(|| spot.wrong(format!("{} has no other end", message.value)))?;
        if ends[side] != (self.row, id) {
            return Err(spot.wrong(format!("{id} is not what {} is sent from or received in", message.value)));
        }
        let mesh = &self.program.mesh;
        let members = ends.map(|(row, _)| mesh.in_row(rank, row)).to_vec();
        let key = (message, members[0]);
        if let Some(known) = self.messages.get(&key) {
            return Ok(known.clone());
        }
        let piece = self.region(id, rank);
        let dtype = self.buffer(id).dtype;
        let collective = Collective::message(mesh.pipeline(), &members, dtype, &piece, self.share_bytes);
        let [from, to] = ends.map(|(row, id)| vec![self.place_in(row, id)]);
        let bucket = Arc::new(Bucket::new(vec![Moved { collective, from, to }]));
        self.code.groups.push(members);
        let new = Channel { group: self.code.groups.len() - 1, bucket };
        self.messages.insert(key, new.clone());
        Ok(new)
    }

    /// The wait for a message.
    pub(super) fn waited(
        &mut self,
        spot: Spot,
        rank: usize,
        side: usize,
        token: u32,
        id: BufferId,
    ) -> Result<Op, RunError> {
        let mut ends =
            self.stage.segments.iter().flat_map(|s| &s.instructions).filter_map(Instruction::posted);
        let Some(end) = ends.find(|end| end.token == token && end.sends == (side == 0)) else {
            return Err(spot.wrong(format!("waits for the message t{token}, which is not started")));
        };
        let Channel { group, bucket } = self.channel(spot, rank, end.message, side, id)?;
        Ok(Op::Done { group, bucket })
    }

    /// One tensor of a collective of several rows, whose members have it at places of their own.
    pub(super) fn moved_together(&self, place: usize, part: usize, members: &[usize]) -> Moved {
        let mesh = &self.program.mesh;
        let rows = self.channels.joint(place);
        let of = |rank: usize| (mesh.row(rank), &rows[mesh.row(rank)][part]);
        let regions = |pick: fn(&Transfer) -> BufferId| -> Vec<Region> {
            let one = |rank: &usize| {
                let (row, transfer) = of(*rank);
                let buffer = &self.program.stages[row].buffers[pick(transfer).index()];
                region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(*rank))
            };
            members.iter().map(one).collect()
        };
        let places = |pick: fn(&Transfer) -> BufferId| -> Vec<Place> {
            let one = |rank: &usize| {
                let (row, transfer) = of(*rank);
                self.place_in(row, pick(transfer))
            };
            members.iter().map(one).collect()
        };
        let (before, after) = (regions(|t| t.from), regions(|t| t.to));
        let transfer = of(members[0]).1;
        let dtype = self.program.stages[of(members[0]).0].buffers[transfer.from.index()].dtype;
        let collective =
            Collective::new(&transfer.step, mesh, members, dtype, &before, &after, self.share_bytes);
        Moved { collective, from: places(|t| t.from), to: places(|t| t.to) }
    }
}
