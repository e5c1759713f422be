//! States between steps: filled piece by piece, read whole.

use std::ops::Range;

use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use ir::program::{Buffer, BufferId, Region as Life, Stage};
use ir::{Axis, DType, Name};

use super::Local;
use super::blocks::{Block, elements};
use super::error::RunError;
use super::load::{is_first, region, whole};
use super::numbers;
use crate::checkpoint::Piece;
use crate::tensor::Tensor;

/// Writes a piece of a state, row-major, from its global ranges.
pub type Fill<'a, E> = dyn FnMut(&[Range<usize>], &mut [f32]) -> Result<(), E> + 'a;

/// Writes the bytes of a piece of a state, row-major, from its global ranges.
pub type FillBytes<'a, E> = dyn FnMut(&[Range<usize>], &mut [u8]) -> Result<(), E> + 'a;

/// The buffer of a state.
fn find<'a>(stage: &'a Stage, name: &str) -> Result<(BufferId, &'a Buffer), RunError> {
    let holds = |b: &Buffer| b.region == Life::State && b.state.as_deref() == Some(name);
    match stage.buffers.iter().position(holds) {
        Some(i) => Ok((BufferId(i as u32), &stage.buffers[i])),
        None => Err(RunError::UnknownState(name.into())),
    }
}

impl Local {
    /// Fills a state of f32 or bf16 on every rank; bf16 is rounded from f32. `fill` is called once for each different piece, with its global ranges and its
    /// elements, row-major; ranks that hold the same piece get a copy.
    ///
    /// # Errors
    /// An unknown state or one of another type; what `fill` returns.
    pub fn fill_state<E: From<RunError>>(&mut self, name: &str, fill: &mut Fill<E>) -> Result<(), E> {
        let (_, buffer) = find(&self.program.stages[0], name)?;
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
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let (id, buffer) = find(stage, name)?;
        let start = stage.address(id, 0);
        for rank in 0..mesh.ranks() {
            let mut at = mesh.coordinate(rank);
            let ranges = region(&buffer.shape, &buffer.sharding, mesh, &at);
            let n = elements(&ranges) * buffer.dtype.bytes();
            if n == 0 {
                continue;
            }
            // SAFETY: the buffer lies in the arena, and no step runs.
            let piece = unsafe { std::slice::from_raw_parts_mut(self.arenas[rank].start().add(start), n) };
            if is_first(&buffer.sharding, mesh, &at) {
                fill(&ranges, piece)?;
                continue;
            }
            for axis in mesh.all().filter(|a| !buffer.sharding.dims.iter().any(|axes| axes.contains(a))) {
                at[axis.index()] = 0;
            }
            let first = self.arenas[mesh.rank(&at)].start();
            // SAFETY: as above; it is another rank's arena, and its rank is lower, so it is filled.
            piece.copy_from_slice(unsafe { std::slice::from_raw_parts(first.add(start), n) });
        }
        Ok(())
    }

    /// Every different piece of every state, by the first rank that has it: what a checkpoint holds.
    pub fn pieces(&self) -> Vec<Piece<'_>> {
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let mut pieces = Vec::new();
        for (i, buffer) in stage.buffers.iter().enumerate() {
            let Some(state) = buffer.state.as_ref().filter(|_| buffer.region == Life::State) else {
                continue;
            };
            for rank in 0..mesh.ranks() {
                let at = mesh.coordinate(rank);
                let ranges = region(&buffer.shape, &buffer.sharding, mesh, &at);
                if elements(&ranges) > 0 && is_first(&buffer.sharding, mesh, &at) {
                    let (state, bytes) = (state.to_string(), self.piece(BufferId(i as u32), rank));
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
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let (id, buffer) = find(stage, name)?;
        let mut tensor = Tensor::full(&buffer.shape, 0.0);
        for rank in 0..mesh.ranks() {
            let at = mesh.coordinate(rank);
            let piece = region(&buffer.shape, &buffer.sharding, mesh, &at);
            let Some(block) = Block::common(&piece, &whole(&buffer.shape)) else { continue };
            if !is_first(&buffer.sharding, mesh, &at) {
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
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let (id, buffer) = find(stage, name)?;
        if buffer.dtype != DType::I32 {
            return Err(RunError::StateType { name: name.into(), needed: "i32", found: buffer.dtype });
        }
        for (rank, arena) in self.arenas.iter_mut().enumerate() {
            let n = elements(&region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank)));
            // SAFETY: the buffer lies in the arena, is aligned, and no step runs.
            unsafe {
                numbers::fill(DType::I32, arena.start().add(stage.address(id, 0)), n, f64::from(number))
            };
        }
        Ok(())
    }

    /// The first element of a state of i32: the number of the step.
    ///
    /// # Errors
    /// An unknown state, or one that is not i32 or has no elements.
    pub fn integer(&self, name: &str) -> Result<i32, RunError> {
        let (id, buffer) = find(&self.program.stages[0], name)?;
        match self.piece(id, 0).get(..4) {
            Some(bytes) if buffer.dtype == DType::I32 => Ok(bytemuck::pod_read_unaligned(bytes)),
            Some(_) | None => {
                Err(RunError::StateType { name: name.into(), needed: "i32", found: buffer.dtype })
            }
        }
    }

    /// The bytes of every state on every rank are the same in both: the same program after the same steps.
    pub fn same_states(&self, other: &Local) -> bool {
        let states = |l: &Local| {
            let buffers = l.program.stages[0].buffers.iter().enumerate();
            buffers.filter(|(_, b)| b.region == Life::State).map(|(i, _)| BufferId(i as u32)).collect()
        };
        let (mine, theirs): (Vec<BufferId>, Vec<BufferId>) = (states(self), states(other));
        let ranks = 0..self.program.mesh.ranks();
        self.program.mesh == other.program.mesh
            && mine.len() == theirs.len()
            && ranks.into_iter().all(|rank| {
                mine.iter().zip(&theirs).all(|(a, b)| self.piece(*a, rank) == other.piece(*b, rank))
            })
    }

    /// The first state of which two ranks that hold the same piece hold other bits: replicas that drifted apart. One that is not
    /// a number is the same where its bits are.
    pub fn drifted(&self) -> Option<(Name, [usize; 2])> {
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let states = stage.buffers.iter().enumerate().filter(|(_, b)| b.region == Life::State);
        for (i, buffer) in states {
            let split = |axis: &Axis| buffer.sharding.dims.iter().any(|axes| axes.contains(axis));
            let id = BufferId(i as u32);
            for rank in 0..mesh.ranks() {
                let mut at = mesh.coordinate(rank);
                mesh.all().filter(|axis| !split(axis)).for_each(|axis| at[axis.index()] = 0);
                let first = mesh.rank(&at);
                if first != rank && self.piece(id, first) != self.piece(id, rank) {
                    return Some((buffer.state.clone()?, [first, rank]));
                }
            }
        }
        None
    }

    /// The bytes of a rank's piece, in slot 0.
    pub(super) fn piece(&self, id: BufferId, rank: usize) -> &[u8] {
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let buffer = &stage.buffers[id.index()];
        let n = elements(&region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank)));
        let start = stage.address(id, 0);
        &self.arenas[rank].all()[start..start + n * buffer.dtype.bytes()]
    }
}
