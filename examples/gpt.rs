//! A small GPT, written in the DSL, trained on eight plays by Shakespeare.
//!
//! ```text
//! cargo run --release --example gpt                                  trains on dp=2,tp=2
//! cargo run --release --example gpt -- plan --mesh dp=2,tp=2         any command of meshc
//! ```

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use ir::composite::{attention, cross_entropy, gelu_tanh, layer_norm};
use ir::dsl::{BuildError, Model, Tensor};
use ir::state::Init;
use ir::{DType, Graph};
use meshc::Shape;

const LAYERS: usize = 4;

/// One vector for each token `b s`, of width `d`, in `kv` heads of size `e`; vocabulary `v`, positions `p`, inner width `f`.
fn gpt(shape: Shape) -> Result<Graph, Vec<BuildError>> {
    let mut m = Model::new();
    let sizes = [("b", shape.batch), ("s", shape.sequence), ("v", 1024), ("p", 128), ("d", 128), ("f", 512)];
    for (name, size) in sizes.into_iter().chain([("kv", 4), ("e", 32)]) {
        m.dim(name, size);
    }
    let tokens = m.input("inputs", DType::I32, "b s");
    let labels = m.input("labels", DType::I32, "b s");
    let position = m.input("position", DType::I32, "b s");

    let table = m.parameter("wte", "v d", Init::Normal(0.02));
    let places = m.parameter("wpe", "p d", Init::Normal(0.02));
    let token = m.gather("b s d", &table, "v", &tokens);
    let place = m.gather("b s d", &places, "p", &position);
    let mut x = m.add(&[&token, &place]);
    for layer in 0..LAYERS {
        m.layer(layer as u32);
        let h = norm(&mut m, &x, &format!("{layer}.ln1"));
        let y = heads(&mut m, &h, &position, layer);
        x = m.add(&[&x, &y]);
        let h = norm(&mut m, &x, &format!("{layer}.ln2"));
        let up = m.parameter(&format!("{layer}.up"), "d f", Init::Normal(0.02));
        let down = m.parameter(&format!("{layer}.down"), "f d", Init::Normal(0.02));
        let u = m.einsum("b s f", &[&h, &up]);
        let u = gelu_tanh(&mut m, &u);
        let y = m.einsum("b s d", &[&u, &down]);
        x = m.add(&[&x, &y]);
    }
    m.behind_layers();
    let x = norm(&mut m, &x, "ln");
    let logits = m.einsum("b s v", &[&x, &table]);
    let (sum, count) = cross_entropy(&mut m, &logits, &labels);
    m.loss(&sum, &count);
    m.finish()
}

fn norm(m: &mut Model, x: &Tensor, name: &str) -> Tensor {
    let weight = m.parameter(&format!("{name}.weight"), "d", Init::Ones);
    let bias = m.parameter(&format!("{name}.bias"), "d", Init::Zeros);
    layer_norm(m, x, &weight, &bias, 1e-5)
}

/// Attention of all heads. Keys and values of the other positions are called `t`.
fn heads(m: &mut Model, x: &Tensor, position: &Tensor, layer: usize) -> Tensor {
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let weight = m.parameter(&format!("{layer}.{name}"), "d kv e", Init::Normal(0.02));
        m.einsum("b s kv e", &[x, &weight])
    });
    let (k, v) = (m.rename(&k, "s", "t"), m.rename(&v, "s", "t"));
    let o = attention(m, &q, &k, &v, position, 1.0 / 32f64.sqrt());
    let weight = m.parameter(&format!("{layer}.o"), "kv e d", Init::Normal(0.02));
    m.einsum("b s d", &[&o, &weight])
}

fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    if args.len() == 1 {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpt");
        let ids = std::env::temp_dir().join(format!("meshc-gpt-{}.npy", std::process::id()));
        let encode = ["meshc", "data", "encode"].map(OsString::from).into_iter().chain([
            folder.join("text.txt").into(),
            "--tokenizer".into(),
            folder.join("tokenizer.json").into(),
            "-o".into(),
            ids.clone().into(),
        ]);
        if meshc::main(encode) != ExitCode::SUCCESS {
            return ExitCode::from(1);
        }
        args.extend(
            ["train", "--mesh", "dp=2,tp=2", "--global-batch", "16", "--seq", "128"].map(OsString::from),
        );
        args.extend(
            ["--steps", "400", "--lr", "3e-3", "--min-lr", "3e-4", "--warmup", "20"].map(OsString::from),
        );
        args.extend(["--weight-decay", "0.1", "--clip", "1", "--data"].map(OsString::from));
        args.push(ids.clone().into());
        let status = meshc::run("gpt", Shape { batch: 16, sequence: 128 }, gpt, args);
        // The ids are made anew at each run; a file that cannot be removed harms nobody.
        let _ = std::fs::remove_file(ids);
        return status;
    }
    meshc::run("gpt", Shape { batch: 16, sequence: 128 }, gpt, args)
}
