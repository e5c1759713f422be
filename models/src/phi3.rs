//! Phi 3: llama whose queries, keys and values lie in one file tensor, gate and up in another, and with a sliding window
//! in all layers (Abdin et al., "Phi-3 Technical Report").

use ir::Graph;

use crate::decoder::{self, DEFAULTS, Decoder, Defaults};
use crate::{Config, ModelError, Shape, rope, windows};

const FAMILY: &str = "phi3";

/// `original_max_position_embeddings` matters only to kinds of rotary embeddings that are refused; `embd_pdrop` to nothing:
/// Transformers reads it and drops no embeddings.
const KEYS: &[&str] = &["embd_pdrop", "original_max_position_embeddings", "resid_pdrop", "sliding_window"];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let window = windows::window(config, None, FAMILY)?;
    let windows = vec![window; config.size("num_hidden_layers", FAMILY)?];
    let defaults = Defaults { eps: 1e-5, ..DEFAULTS };
    let mut model = Decoder::read(config, &windows, &defaults, FAMILY)?;
    model.fused = true;
    model.residual_dropout = config.dropout("resid_pdrop", 0.0)?;
    model.build(shape)
}
