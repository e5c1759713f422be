//! A config.json: typed access to its keys, and the rule that no key which changes the mathematics is passed over.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::ModelError;

/// A config.json that was read.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its keys.
    pub keys: Map<String, Value>,
    /// Which rates of dropout a model of it has.
    pub dropout: Dropout,
}

/// Rates of dropout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Dropout {
    /// Those of the config.
    #[default]
    Config,
    /// This one wherever the family has dropout, from 0 to below 1; 0 is none.
    Everywhere(f64),
}

/// Keys that say how a model is stored, generated from or described, and not what it computes.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "_attn_implementation",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_position_embeddings",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "reorder_and_upcast_attn",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "vocab_size",
];

impl Config {
    /// Reads a config.json, or that of a folder.
    ///
    /// # Errors
    /// There is none, or it is no JSON object.
    pub fn read(path: &Path) -> Result<Config, ModelError> {
        let file: PathBuf = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        if !file.is_file() {
            return Err(ModelError::NoConfig(path.to_path_buf()));
        }
        let text = std::fs::read_to_string(&file).map_err(|e| ModelError::Read(file.clone(), e))?;
        let value: Value =
            serde_json::from_str(&text).map_err(|e| ModelError::Json(file.clone(), e.to_string()))?;
        match value {
            Value::Object(keys) => Ok(Config { keys, dropout: Dropout::Config }),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(ModelError::Json(file, "it holds no object".to_string()))
            }
        }
    }

    /// The model type.
    pub fn model_type(&self) -> &str {
        self.keys.get("model_type").and_then(Value::as_str).unwrap_or("(none)")
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|v| !v.is_null())
    }

    /// Whether a key is there, were it null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// A size: a whole number of at least 1.
    pub(crate) fn size(&self, key: &str, family: &'static str) -> Result<usize, ModelError> {
        let value = self.value(key).ok_or_else(|| ModelError::Missing(key.to_string(), family))?;
        let size = value.as_u64().filter(|n| (1..=1 << 40).contains(n));
        size.map(|n| n as usize).ok_or_else(|| wrong(key, value, "a whole number of at least 1"))
    }

    /// A size, or what it is if the key is not there.
    pub(crate) fn size_or(
        &self,
        key: &str,
        default: usize,
        family: &'static str,
    ) -> Result<usize, ModelError> {
        if self.value(key).is_none() { Ok(default) } else { self.size(key, family) }
    }

    /// A whole number, 0 too.
    pub(crate) fn count_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(v) => v.as_u64().map(|n| n as usize).ok_or_else(|| wrong(key, v, "a whole number")),
        }
    }

    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(v) => v.as_f64().filter(|n| n.is_finite()).ok_or_else(|| wrong(key, v, "a number")),
        }
    }

    /// A number above 0: `default` if the key is not there, none if it is null.
    pub(crate) fn positive_or(&self, key: &str, default: f64) -> Result<Option<f64>, ModelError> {
        match self.keys.get(key) {
            None => Ok(Some(default)),
            Some(Value::Null) => Ok(None),
            Some(v) => {
                let number = v.as_f64().filter(|n| n.is_finite() && *n > 0.0);
                number.map(Some).ok_or_else(|| wrong(key, v, "a number above 0, or null"))
            }
        }
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| wrong(key, v, "true or false")),
        }
    }

    pub(crate) fn text_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str, ModelError> {
        match self.value(key) {
            None => Ok(default),
            Some(v) => v.as_str().ok_or_else(|| wrong(key, v, "a string")),
        }
    }

    /// A rate of dropout; that of the key, or `default` without it, unless it is the same everywhere.
    pub(crate) fn dropout(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        if let Dropout::Everywhere(p) = self.dropout {
            return Ok(p);
        }
        let Some(value) = self.value(key) else { return Ok(default) };
        let rate = value.as_f64().filter(|p| (0.0..1.0).contains(p));
        rate.ok_or_else(|| wrong(key, value, "a number from 0 to below 1"))
    }

    /// Every key is one that the family reads, one that is harmless, or off: no other is passed over.
    pub(crate) fn nothing_else(&self, read: &[&[&str]], family: &'static str) -> Result<(), ModelError> {
        let known: BTreeSet<&str> = HARMLESS.iter().chain(read.iter().copied().flatten()).copied().collect();
        match self.keys.iter().find(|(k, v)| !known.contains(k.as_str()) && !is_off(v)) {
            None => Ok(()),
            Some((k, v)) => {
                let hint = "; if the key does not matter, remove it from config.json";
                Err(unsupported(k, v, family, hint))
            }
        }
    }
}

pub(crate) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
    }
}

pub(crate) fn wrong(key: &str, found: &Value, needed: &str) -> ModelError {
    ModelError::Value { key: key.to_string(), found: found.to_string(), needed: needed.to_string() }
}

/// What must be so of a size that was read or follows from others.
pub(crate) fn must(key: &str, found: usize, so: bool, needed: &str) -> Result<(), ModelError> {
    if so { Ok(()) } else { Err(wrong(key, &found.into(), needed)) }
}

pub(crate) fn unsupported(key: &str, found: &Value, family: &'static str, hint: &str) -> ModelError {
    ModelError::Unsupported { key: key.to_string(), found: found.to_string(), family, hint: hint.to_string() }
}
