//! Which layers of a model see a sliding window only.

use serde_json::Value;

use crate::config::{unsupported, wrong};
use crate::{Config, ModelError};

/// The type of a layer with this window, as configs name it.
pub(crate) fn layer_type(window: Option<usize>) -> &'static str {
    if window.is_some() { "sliding_attention" } else { "full_attention" }
}

/// `sliding_window`: none if it is null, `default` if it is not there.
pub(crate) fn window(
    config: &Config,
    default: Option<usize>,
    family: &'static str,
) -> Result<Option<usize>, ModelError> {
    match config.keys.get("sliding_window") {
        None => Ok(default),
        Some(Value::Null) => Ok(None),
        Some(_) => config.size("sliding_window", family).map(Some),
    }
}

/// The window of each layer: `window` where `layer_types` says that the layer slides or, without `layer_types`,
/// where `slides` does.
pub(crate) fn by_layer(
    config: &Config,
    layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
    family: &'static str,
) -> Result<Vec<Option<usize>>, ModelError> {
    let key = "layer_types";
    let Some(types) = config.keys.get(key).filter(|v| !v.is_null()) else {
        return Ok((0..layers).map(|i| window.filter(|_| slides(i))).collect());
    };
    let needed = || format!("a list of {layers} strings, one a layer");
    let list = types.as_array().filter(|l| l.len() == layers).ok_or_else(|| wrong(key, types, &needed()))?;
    let one = |(i, found): (usize, &Value)| match found.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(ModelError::Missing("sliding_window".to_string(), family)),
        Some(_) => Err(unsupported(&format!("{key}[{i}]"), found, family, "")),
        None => Err(wrong(key, types, &needed())),
    };
    list.iter().enumerate().map(one).collect()
}
