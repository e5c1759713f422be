//! States between steps: filled piece by piece, read whole.

use std::ops::Range;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use ir::program::{Buffer, BufferId, Region as Life, Stage};
use ir::{DType, Name};

use super::Local;
use super::blocks::{Block, elements};
use super::error::RunError;
use super::load::{is_first, region, whole};
use super::numbers;
use crate::tensor::Tensor;

/// Writes a piece of a state, row-major, from its global ranges.
pub type Fill<'a, E> = dyn FnMut(&[Range<usize>], &mut [f32]) -> Result<(), E> + 'a;

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
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let (id, buffer) = find(stage, name)?;
        if !matches!(buffer.dtype, DType::F32 | DType::BF16) {
            let name = Name::from(name);
            return Err(RunError::StateType { name, needed: "f32 or bf16", found: buffer.dtype }.into());
        }
        let (start, size) = (stage.address(id, 0), buffer.dtype.bytes());
        let mut wide: Vec<f32> = Vec::new();
        for rank in 0..mesh.ranks() {
            let mut at = mesh.coordinate(rank);
            let ranges = region(&buffer.shape, &buffer.sharding, mesh, &at);
            let n = elements(&ranges);
            if n == 0 {
                continue;
            }
            // SAFETY: the buffer lies in the arena, is aligned, and no step runs.
            let piece =
                unsafe { std::slice::from_raw_parts_mut(self.arenas[rank].start().add(start), n * size) };
            if is_first(&buffer.sharding, mesh, &at) {
                if buffer.dtype == DType::F32 {
                    fill(&ranges, bytemuck::cast_slice_mut(piece))?;
                    continue;
                }
                wide.resize(n, 0.0);
                fill(&ranges, &mut wide)?;
                let narrow: &mut [half::bf16] =
                    bytemuck::cast_slice_mut::<u8, u16>(piece).reinterpret_cast_mut();
                narrow.convert_from_f32_slice(&wide);
                continue;
            }
            for axis in mesh.all().filter(|a| !buffer.sharding.dims.iter().any(|axes| axes.contains(a))) {
                at[axis.index()] = 0;
            }
            let first = self.arenas[mesh.rank(&at)].start();
            // SAFETY: as above; it is another rank's arena, and its rank is lower, so it is filled.
            piece.copy_from_slice(unsafe { std::slice::from_raw_parts(first.add(start), n * size) });
        }
        Ok(())
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

    /// The bytes of a rank's piece, in slot 0.
    pub(super) fn piece(&self, id: BufferId, rank: usize) -> &[u8] {
        let (mesh, stage) = (&self.program.mesh, &self.program.stages[0]);
        let buffer = &stage.buffers[id.index()];
        let n = elements(&region(&buffer.shape, &buffer.sharding, mesh, &mesh.coordinate(rank)));
        let start = stage.address(id, 0);
        &self.arenas[rank].all()[start..start + n * buffer.dtype.bytes()]
    }
}
