//! Gemma 2: windows in every other layer, soft caps on scores and logits, norms on both sides of each block, whose
//! weights count from 0, scaled embeddings (Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size").

use ir::Graph;

use crate::config::wrong;
use crate::decoder::{self, Biases, DEFAULTS, Decoder, Defaults, Norms};
use crate::{Config, ModelError, Shape, rope, windows};

const FAMILY: &str = "gemma2";

/// `hidden_act`, which some files have too, is not what Transformers uses.
const KEYS: &[&str] = &[
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
];

const GEMMA: Defaults = Defaults {
    kv_heads: Some(4),
    head_size: Some(256),
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    tied: true,
    ..DEFAULTS
};

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let window = windows::window(config, Some(4096), FAMILY)?;
    let layers = config.size("num_hidden_layers", FAMILY)?;
    let windows = windows::by_layer(config, layers, window, |layer| layer.is_multiple_of(2), FAMILY)?;
    let mut model = Decoder::read(config, &windows, &GEMMA, FAMILY)?;
    let bias = config.flag_or("attention_bias", false)?;
    model.biases = Biases { qkv: bias, out: bias, mlp: false };
    model.norms = Norms {
        before: ["input_layernorm", "pre_feedforward_layernorm"],
        behind: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
        zero_centred: true,
    };
    model.embedding_scale = (model.width as f64).sqrt();
    model.softcap = config.positive_or("final_logit_softcapping", 30.0)?;
    let softcap = config.positive_or("attn_logit_softcapping", 50.0)?;
    let scalar = config.positive_or("query_pre_attn_scalar", 256.0)?;
    let scalar = scalar.ok_or_else(|| wrong("query_pre_attn_scalar", &().into(), "a number above 0"))?;
    for layer in &mut model.layers {
        layer.attention.scale = 1.0 / scalar.sqrt();
        layer.attention.softcap = softcap;
    }
    model.build(shape)
}
