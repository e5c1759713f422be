//! States between steps: filled piece by piece, read whole.

use std::ops::Range;

use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use ir::program::{Buffer, BufferId, Region as Life, Stage};
use ir::{Axis, DType, Name};

use super::Local;
use super::blocks::{Block, elements};
use super::error::RunError;
use super::load::{region, whole};
use super::numbers;
use crate::checkpoint::Piece;
use crate::tensor::Tensor;

/// Writes a piece of a state, row-major, from its global ranges.
pub type Fill<'a, E> = dyn FnMut(&[Range<usize>], &mut [f32]) -> Result<(), E> + 'a;

/// Writes the bytes of a piece of a state, row-major, from its global ranges.
pub type FillBytes<'a, E> = dyn FnMut(&[Range<usize>], &mut [u8]) -> Result<(), E> + 'a;

/// The buffer of a state in a stage, if it has it.
fn find<'a>(stage: &'a Stage, name: &str) -> Option<(BufferId, &'a Buffer)> {
    let holds = |b: &Buffer| b.region == Life::State && b.state.as_deref() == Some(name);
    let i = stage.buffers.iter().position(holds)?;
    Some((BufferId(i as u32), &stage.buffers[i]))
}

impl Local {
    /// A state's buffer in the first row of the pipeline that has it, and that row.
    fn first_buffer(&self, name: &str) -> Result<(usize, &Buffer), RunError> {
        let mut rows = self.program.stages.iter().enumerate();
        let found = rows.find_map(|(row, stage)| Some((row, find(stage, name)?.1)));
        found.ok_or_else(|| RunError::UnknownState(name.into()))
    }

    /// The ranks that have a state, each with its buffer and the first rank that has the same piece.
    fn holders(&self, name: &str) -> Result<Vec<(usize, BufferId, usize)>, RunError> {
        let mesh = &self.program.mesh;
        let (row, first) = self.first_buffer(name)?;
        let split = |axis: &Axis| first.sharding.dims.iter().any(|axes| axes.contains(axis));
        let holder = |rank: usize| {
            let (id, _) = find(self.stage_of(rank), name)?;
            let mut at = mesh.coordinate(rank);
            mesh.all().filter(|axis| !split(axis)).for_each(|axis| at[axis.index()] = 0);
            Some((rank, id, mesh.in_row(mesh.rank(&at), row)))
        };
        Ok((0..mesh.ranks()).filter_map(holder).collect())
    }

    /// The names of all states, in the order in which rows have them.
    fn state_names(&self) -> Vec<Name> {
        let mut names: Vec<Name> = Vec::new();
        let buffers = self.program.stages.iter().flat_map(|s| &s.buffers);
        for name in buffers.filter(|b| b.region == Life::State).filter_map(|b| b.state.as_ref()) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// Fills a state of f32 or bf16 on every rank; bf16 is rounded from f32. `fill` is called once for each different piece, with its global ranges and its
    /// elements, row-major; ranks that hold the same piece get a copy.
    ///
    /// # Errors
    /// An unknown state or one of another type; what `fill` returns.
    pub fn fill_state<E: From<RunError>>(&mut self, name: &str, fill: &mut Fill<E>) -> Result<(), E> {
        let (_, buffer) = self.first_buffer(name)?;
        let mut wide: Vec<f32> = Vec::new();
        match buffer.dtype {
            // The buffer is aligned to more than an element.
            DType::F32 => {
                self.fill_bytes(name, &mut |ranges, bytes| fill(ranges, bytemuck::cast_slice_mut(bytes)))
            }
            DType::BF16 => self.fill_bytes(name, &mut |ranges, bytes| {
                let narrow: &mut [bf16] = bytemuck::cast_slice_mut::<u8, u16>(bytes).reinterpret_cast_mut();
                wide.resize(narrow.len(), 0.0);
                fill(ranges, &mut wide)?;
                narrow.convert_from_f32_slice(&wide);
                Ok(())
            }),
            found @ (DType::F64 | DType::F16 | DType::I64 | DType::I32 | DType::U32 | DType::Bool) => {
                let name = Name::from(name);
                Err(RunError::StateType { name, needed: "f32 or bf16", found }.into())
            }
        }
    }

    /// Fills a state of any type on every rank, as `fill_state` does: `fill` gets the bytes of a piece.
    ///
    /// # Errors
    /// An unknown state; what `fill` returns.
    pub fn fill_bytes<E: From<RunError>>(&mut self, name: &str, fill: &mut FillBytes<E>) -> Result<(), E> {
        for (rank, id, first) in self.holders(name)? {
            let stage = self.stage_of(rank);
            let buffer = &stage.buffers[id.index()];
            let mesh = &self.program.mesh;
            let ranges = region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank));
            let n = elements(&ranges) * buffer.dtype.bytes();
            if n == 0 {
                continue;
            }
            let start = stage.address(id, 0);
            let there =
                find(self.stage_of(first), name).map_or(0, |(id, _)| self.stage_of(first).address(id, 0));
            // SAFETY: the buffer lies in the arena, and no step runs.
            let piece = unsafe { std::slice::from_raw_parts_mut(self.arenas[rank].start().add(start), n) };
            if first == rank {
                fill(&ranges, piece)?;
                continue;
            }
            // SAFETY: as above; it is another rank's arena, and its rank is lower, so it is filled.
            let source = unsafe { std::slice::from_raw_parts(self.arenas[first].start().add(there), n) };
            piece.copy_from_slice(source);
        }
        Ok(())
    }

    /// Every different piece of every state, by the first rank that has it: what a checkpoint holds.
    pub fn pieces(&self) -> Vec<Piece<'_>> {
        let mesh = &self.program.mesh;
        let mut pieces = Vec::new();
        for name in self.state_names() {
            for (rank, id, first) in self.holders(&name).unwrap_or_default() {
                let buffer = &self.stage_of(rank).buffers[id.index()];
                let ranges = region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank));
                if elements(&ranges) > 0 && first == rank {
                    let (state, bytes) = (name.to_string(), self.piece(id, rank));
                    pieces.push(Piece { state, dtype: buffer.dtype, rank, ranges, bytes });
                }
            }
        }
        pieces
    }

    /// A state, whole, from the first rank that has each piece. Other element types come as f32.
    ///
    /// # Errors
    /// An unknown state.
    pub fn read_state(&self, name: &str) -> Result<Tensor<f32>, RunError> {
        let mesh = &self.program.mesh;
        let (_, buffer) = self.first_buffer(name)?;
        let mut tensor = Tensor::full(&buffer.shape, 0.0);
        for (rank, id, first) in self.holders(name)? {
            let piece = region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank));
            let Some(block) = Block::common(&piece, &whole(&buffer.shape)) else { continue };
            if first != rank {
                continue;
            }
            let bytes = self.piece(id, rank);
            block.runs(0..block.elements(), usize::MAX, |from, to, n| {
                for i in 0..n {
                    // SAFETY: the piece has the elements of its region, aligned.
                    tensor.data[to + i] =
                        unsafe { numbers::get(buffer.dtype, bytes.as_ptr(), from + i) as f32 };
                }
            });
        }
        Ok(tensor)
    }

    /// Sets a state of i32 to a number everywhere: the number of the step.
    ///
    /// # Errors
    /// An unknown state or one that is not i32.
    pub fn set_integer(&mut self, name: &str, number: i32) -> Result<(), RunError> {
        let (_, buffer) = self.first_buffer(name)?;
        if buffer.dtype != DType::I32 {
            return Err(RunError::StateType { name: name.into(), needed: "i32", found: buffer.dtype });
        }
        for (rank, id, _) in self.holders(name)? {
            let n = self.piece(id, rank).len() / DType::I32.bytes();
            let start = self.stage_of(rank).address(id, 0);
            // SAFETY: the buffer lies in the arena, is aligned, and no step runs.
            unsafe { numbers::fill(DType::I32, self.arenas[rank].start().add(start), n, f64::from(number)) };
        }
        Ok(())
    }

    /// The first element of a state of i32: the number of the step.
    ///
    /// # Errors
    /// An unknown state, or one that is not i32 or has no elements.
    pub fn integer(&self, name: &str) -> Result<i32, RunError> {
        let (_, buffer) = self.first_buffer(name)?;
        let first = self.holders(name)?.first().map(|(rank, id, _)| self.piece(*id, *rank));
        match first.and_then(|bytes| bytes.get(..4)) {
            Some(bytes) if buffer.dtype == DType::I32 => Ok(bytemuck::pod_read_unaligned(bytes)),
            Some(_) | None => {
                Err(RunError::StateType { name: name.into(), needed: "i32", found: buffer.dtype })
            }
        }
    }

    /// The bytes of every state on every rank are the same in both: the same program after the same steps.
    pub fn same_states(&self, other: &Local) -> bool {
        let states = |l: &Local| {
            let of = |rank: usize| {
                let buffers = l.stage_of(rank).buffers.iter().enumerate();
                let states = buffers.filter(|(_, b)| b.region == Life::State);
                states.map(|(i, _)| (rank, BufferId(i as u32))).collect::<Vec<_>>()
            };
            (0..l.program.mesh.ranks()).flat_map(of).collect::<Vec<_>>()
        };
        let (mine, theirs) = (states(self), states(other));
        self.program.mesh == other.program.mesh
            && mine.len() == theirs.len()
            && mine.iter().zip(&theirs).all(|(a, b)| self.piece(a.1, a.0) == other.piece(b.1, b.0))
    }

    /// The first state of which two ranks that hold the same piece hold other bits: replicas that drifted apart. One that is not
    /// a number is the same where its bits are.
    pub fn drifted(&self) -> Option<(Name, [usize; 2])> {
        for name in self.state_names() {
            let holders = self.holders(&name).unwrap_or_default();
            for (rank, id, first) in &holders {
                let at_first =
                    holders.iter().find(|(r, ..)| r == first).map(|(r, id, _)| self.piece(*id, *r));
                if at_first.is_some_and(|piece| piece != self.piece(*id, *rank)) {
                    return Some((name, [*first, *rank]));
                }
            }
        }
        None
    }

    /// The bytes of a rank's piece, in slot 0.
    pub(super) fn piece(&self, id: BufferId, rank: usize) -> &[u8] {
        let (mesh, stage) = (&self.program.mesh, self.stage_of(rank));
        let buffer = &stage.buffers[id.index()];
        let n = elements(&region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank)));
        let start = stage.address(id, 0);
        &self.arenas[rank].all()[start..start + n * buffer.dtype.bytes()]
    }
}
