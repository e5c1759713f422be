//! What crosses between the host and the ranks: inputs, whole, and what taps hand out, put together.

use std::collections::{BTreeMap, BTreeSet};

use ir::program::{Instruction, Stage};
use ir::{DType, Name};

use crate::tensor::Tensor;

/// A whole input of a micro-batch, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// Token ids, labels, positions.
    I32(Vec<i32>),
    /// Numbers.
    F32(Vec<f32>),
}

impl HostTensor {
    /// Of what type it is.
    pub fn dtype(&self) -> DType {
        match self {
            HostTensor::I32(_) => DType::I32,
            HostTensor::F32(_) => DType::F32,
        }
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        match self {
            HostTensor::I32(data) => data.len(),
            HostTensor::F32(data) => data.len(),
        }
    }

    /// Its elements in memory.
    pub fn bytes(&self) -> &[u8] {
        match self {
            HostTensor::I32(data) => bytemuck::cast_slice(data),
            HostTensor::F32(data) => bytemuck::cast_slice(data),
        }
    }
}

/// What the host wants of a step, and what it got.
#[derive(Clone, Debug, Default)]
pub struct Taps {
    /// The taps whose tensors are put together; the others cost nothing.
    pub wanted: BTreeSet<Name>,
    /// The taps that must be finite for the step to go on, as `loss`.
    pub finite: BTreeSet<Name>,
    found: BTreeMap<Name, Vec<Tensor<f32>>>,
}

impl Taps {
    /// Wants these.
    pub fn of<'a>(wanted: impl IntoIterator<Item = &'a str>) -> Taps {
        Taps { wanted: wanted.into_iter().map(Name::from).collect(), ..Taps::default() }
    }

    /// The same, and this one must be finite.
    pub fn finite(mut self, tap: &str) -> Taps {
        self.finite.insert(tap.into());
        self
    }

    /// What the tap handed out last in the step.
    pub fn get(&self, name: &str) -> Option<&Tensor<f32>> {
        self.found.get(name)?.last()
    }

    /// All that the tap handed out in the step, in order: once for each micro-batch if it is in a micro-batch's segment.
    pub fn all(&self, name: &str) -> &[Tensor<f32>] {
        self.found.get(name).map_or(&[], Vec::as_slice)
    }

    /// The only element of the tap's last tensor.
    pub fn number(&self, name: &str) -> Option<f32> {
        match self.get(name)?.data[..] {
            [number] => Some(number),
            _ => None,
        }
    }

    /// Forgets what was found.
    pub(super) fn clear(&mut self) {
        self.found.clear();
    }
}

/// Where each tap of each call of each row of the pipeline goes.
#[derive(Debug, Default)]
pub struct TapTargets {
    rows: Vec<RowTargets>,
}

#[derive(Debug, Default)]
struct RowTargets {
    /// Where each call's targets begin.
    calls: Vec<usize>,
    targets: Vec<Option<*mut f32>>,
}

// SAFETY: each element behind a target is written by one rank, and the host reads after the step.
unsafe impl Send for TapTargets {}
// SAFETY: as above.
unsafe impl Sync for TapTargets {}

impl TapTargets {
    /// Tensors for all wanted taps of a step. Those of the last step are used again. Of what several rows tap, the first
    /// hands it out.
    pub fn aim(&mut self, stages: &[Stage], taps: &mut Taps) {
        self.rows.resize_with(stages.len(), RowTargets::default);
        let Taps { wanted, found, .. } = taps;
        found.retain(|name, _| wanted.contains(name));
        let mut owners: BTreeMap<&Name, usize> = BTreeMap::new();
        let mut count: BTreeMap<&Name, usize> = BTreeMap::new();
        let mut taken: BTreeSet<(&Name, usize)> = BTreeSet::new();
        for (r, (stage, row)) in stages.iter().zip(&mut self.rows).enumerate() {
            row.calls.clear();
            row.targets.clear();
            for call in &stage.calls {
                row.calls.push(row.targets.len());
                for instruction in &stage.segments[call.segment].instructions {
                    let Instruction::Tap { name, from } = instruction else { continue };
                    if !wanted.contains(name) || *owners.entry(name).or_insert(r) != r {
                        row.targets.push(None);
                        continue;
                    }
                    let shape = &stage.buffers[from.index()].shape;
                    let n = count.entry(name).or_default();
                    // Of micro-batches in their order, whatever that of the calls.
                    let place = call.microbatch.unwrap_or(*n);
                    if !taken.insert((name, place)) {
                        // One tensor is written by one tap.
                        row.targets.push(None);
                        continue;
                    }
                    *n += 1;
                    let all = found.entry(name.clone()).or_default();
                    while all.len() <= place {
                        all.push(Tensor::full(shape, 0.0));
                    }
                    if all[place].shape != *shape {
                        all[place] = Tensor::full(shape, 0.0);
                    }
                    row.targets.push(Some(all[place].data.as_mut_ptr()));
                }
            }
        }
        for (name, all) in found {
            all.truncate(count.get(name).copied().unwrap_or(0));
        }
    }

    /// Where the tap of a call of a row goes, if it is wanted.
    pub fn of(&self, row: usize, call: usize, tap: usize) -> Option<*mut f32> {
        let row = self.rows.get(row)?;
        row.targets.get(row.calls.get(call)? + tap).copied().flatten()
    }
}
