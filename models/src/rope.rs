//! Rotary frequencies, as configs of Transformers 4 (`rope_theta` and `rope_scaling`) and 5 (`rope_parameters`, for all
//! layers or by the type of a layer) give them.

use ir::composite::{Frequencies, Scaling};
use serde_json::{Map, Value};

use crate::config::{is_off, unsupported, wrong};
use crate::{Config, ModelError};

/// The keys of a config that this file reads.
pub(crate) const KEYS: &[&str] = &["partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"];

/// What the kinds of rotary embeddings are given beside their base.
const KINDS: &[(&str, &[&str])] = &[
    ("default", &[]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
];

/// What every kind may be given.
const ALWAYS: &[&str] = &["partial_rotary_factor", "rope_theta", "rope_type", "type"];

/// The frequencies of layers of a type, as in `full_attention`.
pub(crate) fn frequencies(
    config: &Config,
    layer_type: &str,
    family: &'static str,
) -> Result<Frequencies, ModelError> {
    whole(&config.keys, "partial_rotary_factor", family)?;
    let theta = config.number_or("rope_theta", 10_000.0)?;
    let Some(rope) = Rope::find(config, layer_type, family)? else {
        return Ok(Frequencies { theta: positive("rope_theta", theta)?, scaling: None });
    };
    whole(rope.keys, &rope.name("partial_rotary_factor"), family)?;
    let theta = if rope.keys.contains_key("rope_theta") { rope.number("rope_theta")? } else { theta };
    let theta = positive(&rope.name("rope_theta"), theta)?;
    Ok(Frequencies { theta, scaling: rope.scaling()? })
}

/// Only whole heads are rotated.
fn whole(keys: &Map<String, Value>, name: &str, family: &'static str) -> Result<(), ModelError> {
    match keys.get("partial_rotary_factor").filter(|v| !v.is_null() && v.as_f64() != Some(1.0)) {
        None => Ok(()),
        Some(v) => Err(unsupported(name, v, family, "")),
    }
}

fn positive(name: &str, number: f64) -> Result<f64, ModelError> {
    if number > 0.0 { Ok(number) } else { Err(wrong(name, &number.into(), "a number above 0")) }
}

/// An object that describes rotary frequencies.
struct Rope<'a> {
    /// Where it stands, for errors.
    at: String,
    keys: &'a Map<String, Value>,
    family: &'static str,
}

impl<'a> Rope<'a> {
    fn find(
        config: &'a Config,
        layer_type: &str,
        family: &'static str,
    ) -> Result<Option<Rope<'a>>, ModelError> {
        let given = |key: &'static str| config.keys.get(key).filter(|v| !is_off(v)).map(|v| (key, v));
        let (at, value) = match (given("rope_scaling"), given("rope_parameters")) {
            (None, None) => return Ok(None),
            (Some(one), None) | (None, Some(one)) => one,
            (Some((key, v)), Some(_)) => {
                return Err(wrong(key, v, "absent where `rope_parameters` is there"));
            }
        };
        let object = |at: &str, v: &'a Value| v.as_object().ok_or_else(|| wrong(at, v, "an object"));
        let keys = object(at, value)?;
        if !keys.values().any(Value::is_object) {
            return Ok(Some(Rope { at: at.to_string(), keys, family }));
        }
        let at = format!("{at}.{layer_type}");
        let inner = keys.get(layer_type).ok_or_else(|| ModelError::Missing(at.clone(), family))?;
        Ok(Some(Rope { keys: object(&at, inner)?, at, family }))
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.at)
    }

    fn number(&self, key: &str) -> Result<f64, ModelError> {
        let value = self.keys.get(key).ok_or_else(|| ModelError::Missing(self.name(key), self.family))?;
        value.as_f64().filter(|n| n.is_finite()).ok_or_else(|| wrong(&self.name(key), value, "a number"))
    }

    fn scaling(&self) -> Result<Option<Scaling>, ModelError> {
        let key = if self.keys.contains_key("rope_type") { "rope_type" } else { "type" };
        let found = self.keys.get(key).filter(|v| !v.is_null());
        let kind = found.map_or(Some("default"), Value::as_str);
        let Some((kind, own)) = KINDS.iter().find(|(k, _)| Some(*k) == kind) else {
            let known: Vec<String> = KINDS.iter().map(|(k, _)| format!("`{k}`")).collect();
            let hint = format!("; supported are {}", known.join(" and "));
            return Err(unsupported(&self.name(key), found.unwrap_or(&Value::Null), self.family, &hint));
        };
        let known = |k: &str| ALWAYS.contains(&k) || own.contains(&k);
        if let Some((k, v)) = self.keys.iter().find(|(k, v)| !known(k) && !is_off(v)) {
            return Err(unsupported(&self.name(k), v, self.family, ""));
        }
        if *kind == "default" {
            return Ok(None);
        }
        let above = |key: &str| positive(&self.name(key), self.number(key)?);
        let (low, high) = (above("low_freq_factor")?, above("high_freq_factor")?);
        if high <= low {
            let needed = format!("above low_freq_factor, {low}");
            return Err(wrong(&self.name("high_freq_factor"), &high.into(), &needed));
        }
        let (factor, positions) = (above("factor")?, above("original_max_position_embeddings")?);
        Ok(Some(Scaling { factor, low, high, positions }))
    }
}
