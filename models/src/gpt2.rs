//! GPT-2: learned positions, LayerNorm, one matrix for queries, keys and values, a tied head (Radford et al., "Language
//! Models are Unsupervised Multitask Learners"). Its linear layers are stored input first.

use ir::composite::{Attention, attention, dropout, layer_norm};
use ir::dsl::{Model, Tensor};
use ir::state::Init;
use ir::{DType, Graph};

use crate::blocks::{activation, activation_name, head, parameter, tokens};
use crate::{Config, ModelError, Shape, finish};

const FAMILY: &str = "gpt2";

const KEYS: &[&str] = &[
    "activation_function",
    "attn_pdrop",
    "embd_pdrop",
    "layer_norm_epsilon",
    "n_ctx",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "resid_pdrop",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS], FAMILY)?;
    let rate = |key| config.dropout(key, 0.1);
    let (embedding_dropout, residual_dropout, attention_dropout) =
        (rate("embd_pdrop")?, rate("resid_pdrop")?, rate("attn_pdrop")?);
    let size = |key| config.size(key, FAMILY);
    let (width, heads, layers, vocabulary) =
        (size("n_embd")?, size("n_head")?, size("n_layer")?, size("vocab_size")?);
    let positions = config.size_or("n_positions", 1024, FAMILY)?;
    let inner = config.size_or("n_inner", 4 * width, FAMILY)?;
    if !width.is_multiple_of(heads) {
        let needed = format!("a divisor of n_embd, {width}");
        return Err(ModelError::Value { key: "n_head".into(), found: heads.to_string(), needed });
    }
    if shape.sequence > positions {
        return Err(ModelError::Positions { sequence: shape.sequence, positions });
    }
    let eps = config.number_or("layer_norm_epsilon", 1e-5)?;
    let act = activation_name(config, "activation_function", "gelu_new")?;
    let normal = Init::Normal(config.number_or("initializer_range", 0.02)?);
    let by_layer = config.flag_or("scale_attn_by_inverse_layer_idx", false)?;
    let head_size = width / heads;
    let scale =
        if config.flag_or("scale_attn_weights", true)? { 1.0 / (head_size as f64).sqrt() } else { 1.0 };

    let mut m = Model::new();
    for (name, size) in [
        ("v", vocabulary),
        ("d", width),
        ("p", positions),
        ("c", 3),
        ("kv", heads),
        ("e", head_size),
        ("f", inner),
    ] {
        m.dim(name, size);
    }
    let batch = tokens(&mut m, shape);
    let table = m.parameter("transformer.wte.weight", "v d", normal);
    let places = m.parameter("transformer.wpe.weight", "p d", normal);
    let token = m.gather("b s d", &table, "v", &batch.inputs);
    let place = m.gather("b s d", &places, "p", &batch.position);
    let x = m.add(&[&token, &place]);
    let mut x = dropout(&mut m, &x, embedding_dropout, "transformer.drop");
    for layer in 0..layers {
        m.layer(layer as u32);
        let at = format!("transformer.h.{layer}");
        let h = norm(&mut m, &x, &format!("{at}.ln_1"), eps);
        let weight =
            parameter(&mut m, &format!("{at}.attn.c_attn.weight"), "d c kv e", &[width, 3 * width], normal);
        let bias = parameter(&mut m, &format!("{at}.attn.c_attn.bias"), "c kv e", &[3 * width], Init::Zeros);
        let qkv = m.einsum("c b s kv e", &[&h, &weight]);
        let qkv = m.add(&[&qkv, &bias]);
        let pick = |m: &mut Model, i: usize| {
            let index = m.constant(i as f64, DType::I32);
            m.gather("b s kv e", &qkv, "c", &index)
        };
        let (q, k, v) = (pick(&mut m, 0), pick(&mut m, 1), pick(&mut m, 2));
        let (k, v) = (m.rename(&k, "s", "t"), m.rename(&v, "s", "t"));
        let scale = if by_layer { scale / (layer + 1) as f64 } else { scale };
        let dropped = Some((attention_dropout, format!("{at}.attn.attn_dropout").into()));
        let how = Attention { dropout: dropped, ..scale.into() };
        let o = attention(&mut m, &q, &k, &v, &batch.position, how);
        let weight =
            parameter(&mut m, &format!("{at}.attn.c_proj.weight"), "kv e d", &[width, width], normal);
        let bias = m.parameter(&format!("{at}.attn.c_proj.bias"), "d", Init::Zeros);
        let y = m.einsum("b s d", &[&o, &weight]);
        x = residual(&mut m, &x, &y, &bias, residual_dropout, &format!("{at}.attn.resid_dropout"));
        let h = norm(&mut m, &x, &format!("{at}.ln_2"), eps);
        let weight = m.parameter(&format!("{at}.mlp.c_fc.weight"), "d f", normal);
        let bias = m.parameter(&format!("{at}.mlp.c_fc.bias"), "f", Init::Zeros);
        let u = m.einsum("b s f", &[&h, &weight]);
        let u = m.add(&[&u, &bias]);
        let u = activation(&mut m, act, &u).unwrap_or(u);
        let weight = m.parameter(&format!("{at}.mlp.c_proj.weight"), "f d", normal);
        let bias = m.parameter(&format!("{at}.mlp.c_proj.bias"), "d", Init::Zeros);
        let y = m.einsum("b s d", &[&u, &weight]);
        x = residual(&mut m, &x, &y, &bias, residual_dropout, &format!("{at}.mlp.dropout"));
    }
    m.behind_layers();
    let x = norm(&mut m, &x, "transformer.ln_f", eps);
    let table = match config.flag_or("tie_word_embeddings", true)? {
        true => table,
        false => m.parameter("lm_head.weight", "v d", normal),
    };
    head(&mut m, &x, &table, None, &batch.labels);
    finish(m)
}

/// x plus what is left of y and its bias behind dropout: one sum where there is none.
fn residual(m: &mut Model, x: &Tensor, y: &Tensor, bias: &Tensor, rate: f64, name: &str) -> Tensor {
    if rate == 0.0 {
        return m.add(&[x, y, bias]);
    }
    let y = m.add(&[y, bias]);
    let y = dropout(m, &y, rate, name);
    m.add(&[x, &y])
}

fn norm(m: &mut Model, x: &Tensor, name: &str, eps: f64) -> Tensor {
    let weight = m.parameter(&format!("{name}.weight"), "d", Init::Ones);
    let bias = m.parameter(&format!("{name}.bias"), "d", Init::Zeros);
    layer_norm(m, x, &weight, &bias, eps)
}
