//! Qwen 2 and 2.5: llama with biases on queries, keys and values, and windows in the upper layers if they are turned on
//! (Yang et al., "Qwen2 Technical Report").

use ir::Graph;

use crate::decoder::{self, Biases, DEFAULTS, Decoder, Defaults};
use crate::{Config, ModelError, Shape, rope, windows};

const FAMILY: &str = "qwen2";

/// The keys of [`qwen_windows`].
pub(crate) const KEYS: &[&str] =
    &["layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];

pub(crate) fn build(config: &Config, shape: Shape) -> Result<Graph, ModelError> {
    config.nothing_else(&[KEYS, decoder::KEYS, rope::KEYS], FAMILY)?;
    let windows = qwen_windows(config, FAMILY)?;
    let defaults = Defaults { kv_heads: Some(32), ..DEFAULTS };
    let mut model = Decoder::read(config, &windows, &defaults, FAMILY)?;
    model.biases = Biases { qkv: true, ..Biases::default() };
    model.build(shape)
}

/// The window of each layer: none unless `use_sliding_window`, and then without `layer_types` those from
/// `max_window_layers` on.
pub(crate) fn qwen_windows(config: &Config, family: &'static str) -> Result<Vec<Option<usize>>, ModelError> {
    let window = match config.flag_or("use_sliding_window", false)? {
        true => windows::window(config, Some(4096), family)?,
        false => None,
    };
    let first = config.count_or("max_window_layers", 28)?;
    let layers = config.size("num_hidden_layers", family)?;
    windows::by_layer(config, layers, window, |layer| layer >= first, family)
}
