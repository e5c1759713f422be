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

/// Where each tap of each call of each row of the pipeline goes. What does not change from step to step is found once.
#[derive(Debug, Default)]
pub struct TapTargets {
    /// What was wanted when the places were found.
    wanted: BTreeSet<Name>,
    places: Vec<Place>,
    rows: Vec<RowTargets>,
}

#[derive(Debug, Default)]
struct RowTargets {
    /// Where each call's targets begin.
    calls: Vec<usize>,
    targets: Vec<Option<*mut f32>>,
}

/// A tap that is handed out: by which row, as which of its targets, and as which tensor of the tap.
#[derive(Debug)]
struct Place {
    row: usize,
    target: usize,
    name: Name,
    tensor: usize,
    shape: Vec<usize>,
}

// SAFETY: each element behind a target is written by one rank, and the host reads after the step.
unsafe impl Send for TapTargets {}
// SAFETY: as above.
unsafe impl Sync for TapTargets {}

impl TapTargets {
    /// Tensors for all wanted taps of a step, of the one program that this is for. Those of the last step are used again.
    pub fn aim(&mut self, stages: &[Stage], taps: &mut Taps) {
        if self.rows.is_empty() || self.wanted != taps.wanted {
            *self = TapTargets::found(stages, &taps.wanted);
        }
        let TapTargets { places, rows, .. } = self;
        let tensors = |name: &Name| places.iter().filter(|p| p.name == *name).map(|p| p.tensor + 1).max();
        taps.found.retain(|name, all| {
            all.truncate(tensors(name).unwrap_or(0));
            !all.is_empty()
        });
        for place in places {
            if !taps.found.contains_key(&place.name) {
                taps.found.insert(place.name.clone(), Vec::new());
            }
            let Some(all) = taps.found.get_mut(&place.name) else { continue };
            while all.len() <= place.tensor {
                all.push(Tensor::full(&place.shape, 0.0));
            }
            let tensor = &mut all[place.tensor];
            if tensor.shape != place.shape {
                *tensor = Tensor::full(&place.shape, 0.0);
            }
            rows[place.row].targets[place.target] = Some(tensor.data.as_mut_ptr());
        }
    }

    /// Finds the places. Of what several rows tap, the first hands it out.
    fn found(stages: &[Stage], wanted: &BTreeSet<Name>) -> TapTargets {
        let mut found = TapTargets { wanted: wanted.clone(), ..TapTargets::default() };
        let mut owners: BTreeMap<&Name, usize> = BTreeMap::new();
        let mut count: BTreeMap<&Name, usize> = BTreeMap::new();
        let mut taken: BTreeSet<(&Name, usize)> = BTreeSet::new();
        for (r, stage) in stages.iter().enumerate() {
            let mut row = RowTargets::default();
            for call in &stage.calls {
                row.calls.push(row.targets.len());
                for instruction in &stage.segments[call.segment].instructions {
                    let Instruction::Tap { name, from } = instruction else { continue };
                    row.targets.push(None);
                    if !wanted.contains(name) || *owners.entry(name).or_insert(r) != r {
                        continue;
                    }
                    let n = count.entry(name).or_default();
                    // Of micro-batches in their order, whatever that of the calls.
                    let tensor = call.microbatch.unwrap_or(*n);
                    // One tensor is written by one tap.
                    if taken.insert((name, tensor)) {
                        *n += 1;
                        let (name, shape) = (name.clone(), stage.buffers[from.index()].shape.clone());
                        let target = row.targets.len() - 1;
                        found.places.push(Place { row: r, target, name, tensor, shape });
                    }
                }
            }
            found.rows.push(row);
        }
        found
    }

    /// Where the tap of a call of a row goes, if it is wanted.
    pub fn of(&self, row: usize, call: usize, tap: usize) -> Option<*mut f32> {
        let row = self.rows.get(row)?;
        row.targets.get(row.calls.get(call)? + tap).copied().flatten()
    }
}
