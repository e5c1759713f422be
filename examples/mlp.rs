//! The tensor-parallel MLP, D -> 4D -> D, with the whole command line around it.
//!
//! ```text
//! cargo run --release --example mlp -- plan --mesh tp=4
//! cargo run --release --example mlp -- check --mesh dp=2,tp=2 --numeric --global-batch 8
//! ```

use std::process::ExitCode;

use ir::composite::gelu_tanh;
use ir::dsl::{BuildError, Model};
use ir::state::Init;
use ir::{DType, Graph};
use meshc::Shape;

const WIDTH: usize = 1024;

/// Rows `b` of width `d`; the wide dimension is called `f`, so that `tp` splits it.
fn mlp(shape: Shape) -> Result<Graph, Vec<BuildError>> {
    let mut m = Model::new();
    m.dim("b", shape.batch);
    m.dim("d", WIDTH);
    m.dim("f", 4 * WIDTH);
    let x = m.input("x", DType::F32, "b d");
    let wanted = m.input("wanted", DType::F32, "b d");
    let up = m.parameter("up", "d f", Init::Normal(0.02));
    let down = m.parameter("down", "f d", Init::Normal(0.02));

    let h = m.einsum("b f", &[&x, &up]);
    let h = gelu_tanh(&mut m, &h);
    let y = m.einsum("b d", &[&h, &down]);
    m.tap("y", &y);

    let error = m.sub(&y, &wanted);
    let sum = m.einsum("", &[&error, &error]);
    let rows = m.constant((shape.batch * WIDTH) as f64, DType::F32);
    m.loss(&sum, &rows);
    m.finish()
}

fn main() -> ExitCode {
    meshc::run("mlp", Shape { batch: 512, sequence: 1 }, mlp, std::env::args_os())
}
