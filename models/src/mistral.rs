//! Mistral: llama with a sliding window in all layers (Jiang et al., "Mistral 7B").

use ir::Graph;

use crate::decoder::{self, DEFAULTS, Decoder, Defaults};
use crate::{Config, ModelError, Shape, rope, windows};

const FAMILY: &str = "mistral";

const KEYS: &[&str] = &["sliding_window"];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let window = windows::window(config, Some(4096), FAMILY)?;
    let windows = vec![window; config.size("num_hidden_layers", FAMILY)?];
    let defaults = Defaults { kv_heads: Some(8), ..DEFAULTS };
    Decoder::read(config, &windows, &defaults, FAMILY)?.build(shape)
}
