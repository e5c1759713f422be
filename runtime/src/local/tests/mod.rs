//! The local backend against lockstep and by hand.

mod moves;
mod programs;

use ir::program::{ALIGN, Buffer, Program, Region};
use ir::{DType, Mesh, Sharding};

/// A buffer that is not placed yet.
fn buffer(dtype: DType, shape: &[usize], sharding: Sharding, region: Region) -> Buffer {
    let shape = shape.to_vec();
    Buffer { state: None, value: None, inside: None, dtype, shape, sharding, region, offset: None }
}

/// Places the buffers that have no place one after the other.
fn place(program: &mut Program) {
    let mesh: &Mesh = &program.mesh;
    for stage in &mut program.stages {
        stage.slots = stage.slots.max(1);
        for buffer in stage.buffers.iter_mut().filter(|b| b.offset.is_none()) {
            let size = &mut stage.sizes[buffer.region as usize];
            buffer.offset = Some(*size);
            *size += buffer.bytes(mesh).next_multiple_of(ALIGN);
        }
    }
}
