//! Llama 2 and 3 (Touvron et al., "Llama 2"; Grattafiori et al., "The Llama 3 Herd of Models").

use ir::Graph;

use crate::decoder::{self, Biases, DEFAULTS, Decoder};
use crate::{Config, ModelError, Shape, rope};

const FAMILY: &str = "llama";

const KEYS: &[&str] = &["attention_bias", "mlp_bias"];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let windows = vec![None; config.size("num_hidden_layers", FAMILY)?];
    let mut model = Decoder::read(config, &windows, &DEFAULTS, FAMILY)?;
    let attention = config.flag_or("attention_bias", false)?;
    model.biases = Biases { qkv: attention, out: attention, mlp: config.flag_or("mlp_bias", false)? };
    model.build(shape)
}
