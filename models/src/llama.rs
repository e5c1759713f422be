//! Llama 2 and 3: RMSNorm, rotary positions, grouped KV heads, a gated MLP (Touvron et al., "Llama 2"; Grattafiori et
//! al., "The Llama 3 Herd of Models"). Its linear layers are stored output first.

use ir::Graph;
use ir::composite::{attention, rms_norm, rotary, rotation};
use ir::dsl::{Model, Tensor};
use ir::state::Init;

use crate::blocks::{activation, activation_name, head, parameter, tokens};
use crate::{Config, ModelError, Shape, finish};

const FAMILY: &str = "llama";

const KEYS: &[&str] = &[
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(KEYS, FAMILY)?;
    config.dropout("attention_dropout", FAMILY)?;
    let size = |key| config.size(key, FAMILY);
    let (width, layers, vocabulary) = (size("hidden_size")?, size("num_hidden_layers")?, size("vocab_size")?);
    let (heads, inner) = (size("num_attention_heads")?, size("intermediate_size")?);
    let kv = config.size_or("num_key_value_heads", heads, FAMILY)?;
    let divides = |key: &str, found: usize, ok: bool, needed: String| match ok {
        true => Ok(()),
        false => Err(ModelError::Value { key: key.to_string(), found: found.to_string(), needed }),
    };
    divides(
        "num_key_value_heads",
        kv,
        heads.is_multiple_of(kv),
        format!("a divisor of num_attention_heads, {heads}"),
    )?;
    let head_size = config.size_or("head_dim", width / heads, FAMILY)?;
    divides(
        "head_dim",
        head_size,
        head_size.is_multiple_of(2) && head_size > 0,
        "an even number".to_string(),
    )?;
    let eps = config.number_or("rms_norm_eps", 1e-6)?;
    let act = activation_name(config, "hidden_act", "silu")?;
    let normal = Init::Normal(config.number_or("initializer_range", 0.02)?);
    let theta = config.rope_theta(10_000.0, FAMILY)?;
    let (attention_bias, mlp_bias) =
        (config.flag_or("attention_bias", false)?, config.flag_or("mlp_bias", false)?);

    let mut m = Model::new();
    for (name, size) in [
        ("v", vocabulary),
        ("d", width),
        ("kv", kv),
        ("group", heads / kv),
        ("two", 2),
        ("h", head_size / 2),
        ("f", inner),
    ] {
        m.dim(name, size);
    }
    let batch = tokens(&mut m, shape);
    let table = m.parameter("model.embed_tokens.weight", "v d", normal);
    let angles = rotation(&mut m, &batch.position, theta);
    let mut x = m.gather("b s d", &table, "v", &batch.inputs);
    for layer in 0..layers {
        m.layer(layer as u32);
        let at = format!("model.layers.{layer}");
        let h = norm(&mut m, &x, &format!("{at}.input_layernorm.weight"), eps);
        let heads_of = |m: &mut Model, name: &str, dims: &str, heads: usize| {
            let name = format!("{at}.self_attn.{name}");
            let rows = heads * head_size;
            let weight =
                parameter(m, &format!("{name}.weight"), &format!("{dims} d"), &[rows, width], normal);
            let y = m.einsum(&format!("b s {dims}"), &[&h, &weight]);
            if !attention_bias {
                return y;
            }
            let bias = parameter(m, &format!("{name}.bias"), dims, &[rows], Init::Zeros);
            m.add(&[&y, &bias])
        };
        let q = heads_of(&mut m, "q_proj", "kv group two h", heads);
        let k = heads_of(&mut m, "k_proj", "kv two h", kv);
        let v = heads_of(&mut m, "v_proj", "kv two h", kv);
        let (q, k) = (rotary(&mut m, &q, &angles), rotary(&mut m, &k, &angles));
        let (k, v) = (m.rename(&k, "s", "t"), m.rename(&v, "s", "t"));
        let o = attention(&mut m, &q, &k, &v, &batch.position, 1.0 / (head_size as f64).sqrt());
        let name = format!("{at}.self_attn.o_proj");
        let weight = parameter(
            &mut m,
            &format!("{name}.weight"),
            "d kv group two h",
            &[width, heads * head_size],
            normal,
        );
        let y = m.einsum("b s d", &[&o, &weight]);
        let bias = attention_bias.then(|| m.parameter(&format!("{name}.bias"), "d", Init::Zeros));
        x = residual(&mut m, &x, &y, bias.as_ref());
        let h = norm(&mut m, &x, &format!("{at}.post_attention_layernorm.weight"), eps);
        let wide = |m: &mut Model, name: &str| {
            let name = format!("{at}.mlp.{name}");
            let weight = m.parameter(&format!("{name}.weight"), "f d", normal);
            let y = m.einsum("b s f", &[&h, &weight]);
            if !mlp_bias {
                return y;
            }
            let bias = m.parameter(&format!("{name}.bias"), "f", Init::Zeros);
            m.add(&[&y, &bias])
        };
        let (gate, up) = (wide(&mut m, "gate_proj"), wide(&mut m, "up_proj"));
        let gate = activation(&mut m, act, &gate).unwrap_or(gate);
        let u = m.mul(&[&gate, &up]);
        let name = format!("{at}.mlp.down_proj");
        let weight = m.parameter(&format!("{name}.weight"), "d f", normal);
        let y = m.einsum("b s d", &[&u, &weight]);
        let bias = mlp_bias.then(|| m.parameter(&format!("{name}.bias"), "d", Init::Zeros));
        x = residual(&mut m, &x, &y, bias.as_ref());
    }
    let x = norm(&mut m, &x, "model.norm.weight", eps);
    let table = match config.flag_or("tie_word_embeddings", false)? {
        true => table,
        false => m.parameter("lm_head.weight", "v d", normal),
    };
    head(&mut m, &x, &table, &batch.labels);
    finish(m)
}

fn norm(m: &mut Model, x: &Tensor, name: &str, eps: f64) -> Tensor {
    let weight = m.parameter(name, "d", Init::Ones);
    rms_norm(m, x, &weight, eps)
}

fn residual(m: &mut Model, x: &Tensor, y: &Tensor, bias: Option<&Tensor>) -> Tensor {
    match bias {
        Some(bias) => m.add(&[x, y, bias]),
        None => m.add(&[x, y]),
    }
}
