//! Qwen 3: llama with norms on queries and keys of each head (Yang et al., "Qwen3 Technical Report").

use ir::Graph;

use crate::decoder::{self, Biases, DEFAULTS, Decoder, Defaults};
use crate::{Config, ModelError, Shape, qwen2, rope};

const FAMILY: &str = "qwen3";

const KEYS: &[&str] = &["attention_bias"];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, qwen2::KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let windows = qwen2::qwen_windows(config, FAMILY)?;
    let defaults = Defaults { kv_heads: Some(32), head_size: Some(128), ..DEFAULTS };
    let mut model = Decoder::read(config, &windows, &defaults, FAMILY)?;
    let bias = config.flag_or("attention_bias", false)?;
    model.biases = Biases { qkv: bias, out: bias, mlp: false };
    model.head_norms = true;
    model.build(shape)
}
