//! The decoder of llama and its relatives: RMS norms, rotary positions, grouped KV heads, a gated MLP. What tells
//! one family from another is data, which a family's file fills in; one function builds them all. Their linear layers
//! are stored output first.

use ir::Graph;
use ir::composite::{Attention, Frequencies, Rotation, attention, dropout, rms_norm, rotary, rotation};
use ir::dsl::{Model, Tensor};
use ir::state::Init;

use crate::blocks::{Rows, activation, activation_name, head, parameter, tokens};
use crate::config::must;
use crate::{Config, ModelError, Shape, finish, rope, windows};

/// The keys of a config that [`Decoder::read`] reads, beside those of [`rope`].
pub(crate) const KEYS: &[&str] = &[
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
];

/// What keys are in a family if they are not there.
pub(crate) struct Defaults {
    /// Of `num_key_value_heads`; none: as many as there are heads.
    pub(crate) kv_heads: Option<usize>,
    /// Of `head_dim`; none: the hidden size over the heads.
    pub(crate) head_size: Option<usize>,
    /// Of `rms_norm_eps`.
    pub(crate) eps: f64,
    /// The key of the activation, and what it is.
    pub(crate) activation: (&'static str, &'static str),
    /// Of `tie_word_embeddings`.
    pub(crate) tied: bool,
}

/// Those of llama.
pub(crate) const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_size: None, eps: 1e-6, activation: ("hidden_act", "silu"), tied: false };

/// Names of the norms of a block of attention or an MLP, and what their weights mean.
pub(crate) struct Norms {
    /// Before attention, and before the MLP.
    pub(crate) before: [&'static str; 2],
    /// Behind them, before the residual sum.
    pub(crate) behind: Option<[&'static str; 2]>,
    /// Whether weights count from 0, so that a norm multiplies by 1 + weight.
    pub(crate) zero_centred: bool,
}

/// Which linear layers have a bias.
#[derive(Default)]
pub(crate) struct Biases {
    /// Of queries, keys and values.
    pub(crate) qkv: bool,
    /// Behind attention.
    pub(crate) out: bool,
    /// Of the MLP.
    pub(crate) mlp: bool,
}

/// What may differ from layer to layer.
pub(crate) struct Layer {
    pub(crate) attention: Attention,
    pub(crate) frequencies: Frequencies,
}

/// A model: its sizes, and what its family is like.
pub(crate) struct Decoder<'a> {
    pub(crate) width: usize,
    pub(crate) inner: usize,
    pub(crate) vocabulary: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) layers: Vec<Layer>,
    pub(crate) eps: f64,
    pub(crate) activation: &'a str,
    pub(crate) init: Init,
    /// Whether the head's table is that of the embedding.
    pub(crate) tied: bool,
    pub(crate) biases: Biases,
    pub(crate) norms: Norms,
    /// Whether each head's queries and keys have a norm.
    pub(crate) head_norms: bool,
    /// What embeddings are multiplied by.
    pub(crate) embedding_scale: f64,
    /// The soft cap of the logits.
    pub(crate) softcap: Option<f64>,
    /// Rates of dropout: of what is added to the residual, and of attention's weights.
    pub(crate) residual_dropout: f64,
    pub(crate) attention_dropout: f64,
    /// Whether files hold queries, keys and values in one tensor, and gate and up.
    pub(crate) fused: bool,
}

impl<'a> Decoder<'a> {
    /// A llama of the config's sizes, its layers with these windows; a family changes what it has otherwise.
    pub(crate) fn read(
        config: &'a Config,
        windows: &[Option<usize>],
        defaults: &Defaults,
        family: &'static str,
    ) -> Result<Decoder<'a>, ModelError> {
        let size = |key| config.size(key, family);
        let (width, heads) = (size("hidden_size")?, size("num_attention_heads")?);
        let default = |key, default: Option<usize>, else_: usize| {
            let default = default.filter(|_| !config.has(key)).unwrap_or(else_);
            config.size_or(key, default, family)
        };
        let kv_heads = default("num_key_value_heads", defaults.kv_heads, heads)?;
        let needed = format!("a divisor of num_attention_heads, {heads}");
        must("num_key_value_heads", kv_heads, heads.is_multiple_of(kv_heads), &needed)?;
        if defaults.head_size.is_none() && !config.has("head_dim") {
            let needed = format!("a divisor of hidden_size, {width}, where there is no head_dim");
            must("num_attention_heads", heads, width.is_multiple_of(heads), &needed)?;
        }
        let head_size = default("head_dim", defaults.head_size, width / heads)?;
        let even = head_size.is_multiple_of(2) && head_size > 0;
        must("head_dim", head_size, even, "an even number above 0")?;
        let layer = |window: &Option<usize>| -> Result<Layer, ModelError> {
            let scale = 1.0 / (head_size as f64).sqrt();
            let frequencies = rope::frequencies(config, windows::layer_type(*window), family)?;
            Ok(Layer { attention: Attention { window: *window, ..scale.into() }, frequencies })
        };
        let (key, name) = defaults.activation;
        Ok(Decoder {
            width,
            inner: size("intermediate_size")?,
            vocabulary: size("vocab_size")?,
            heads,
            kv_heads,
            head_size,
            layers: windows.iter().map(layer).collect::<Result<_, _>>()?,
            eps: config.number_or("rms_norm_eps", defaults.eps)?,
            activation: activation_name(config, key, name)?,
            init: Init::Normal(config.number_or("initializer_range", 0.02)?),
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
            biases: Biases::default(),
            norms: Norms {
                before: ["input_layernorm", "post_attention_layernorm"],
                behind: None,
                zero_centred: false,
            },
            head_norms: false,
            embedding_scale: 1.0,
            softcap: None,
            residual_dropout: 0.0,
            attention_dropout: config.dropout("attention_dropout", 0.0)?,
            fused: false,
        })
    }

    /// The forward pass of a micro-batch.
    pub(crate) fn build(&self, shape: Shape) -> Result<Graph, ModelError> {
        let mut model = Model::new();
        let m = &mut model;
        for (name, size) in [
            ("v", self.vocabulary),
            ("d", self.width),
            ("kv", self.kv_heads),
            ("group", self.heads / self.kv_heads),
            ("two", 2),
            ("h", self.head_size / 2),
            ("f", self.inner),
        ] {
            m.dim(name, size);
        }
        let batch = tokens(m, shape);
        let table = m.parameter("model.embed_tokens.weight", "v d", self.init);
        let rotations = self.rotations(m, &batch.position);
        let mut x = m.gather("b s d", &table, "v", &batch.inputs);
        if self.embedding_scale != 1.0 {
            x = m.scale(self.embedding_scale, &x);
        }
        for (i, (layer, by)) in self.layers.iter().zip(&rotations).enumerate() {
            m.layer(i as u32);
            let at = format!("model.layers.{i}");
            x = self.block(m, &at, 0, &x, |m, h| {
                let at = format!("{at}.self_attn");
                let dropped = Some((self.attention_dropout, format!("{at}.attention_dropout").into()));
                let how = Attention { dropout: dropped, ..layer.attention.clone() };
                self.attention(m, &at, h, &batch.position, how, by)
            });
            x = self.block(m, &at, 1, &x, |m, h| self.mlp(m, &format!("{at}.mlp"), h));
        }
        m.behind_layers();
        let x = self.norm(m, "model.norm", "d", &x);
        let table = if self.tied { table } else { m.parameter("lm_head.weight", "v d", self.init) };
        head(m, &x, &table, self.softcap, &batch.labels);
        finish(model)
    }

    /// That of each layer; layers that turn alike share one.
    fn rotations(&self, m: &mut Model, position: &Tensor) -> Vec<Rotation> {
        let mut made: Vec<(Frequencies, Rotation)> = Vec::new();
        let mut of = |layer: &Layer| match made.iter().find(|(f, _)| *f == layer.frequencies) {
            Some((_, same)) => same.clone(),
            None => {
                let new = rotation(m, position, layer.frequencies);
                made.push((layer.frequencies, new.clone()));
                new
            }
        };
        self.layers.iter().map(&mut of).collect()
    }

    /// x plus what `inner` makes of its norm, a tensor and perhaps a bias.
    fn block(
        &self,
        m: &mut Model,
        at: &str,
        which: usize,
        x: &Tensor,
        inner: impl FnOnce(&mut Model, &Tensor) -> (Tensor, Option<Tensor>),
    ) -> Tensor {
        let h = self.norm(m, &format!("{at}.{}", self.norms.before[which]), "d", x);
        let (mut y, mut bias) = inner(m, &h);
        if self.residual_dropout > 0.0 {
            y = bias.take().map_or(y.clone(), |bias| m.add(&[&y, &bias]));
            let name = ["resid_attn_dropout", "resid_mlp_dropout"][which];
            y = dropout(m, &y, self.residual_dropout, &format!("{at}.{name}"));
        }
        match (self.norms.behind, bias) {
            (None, None) => m.add(&[x, &y]),
            (None, Some(bias)) => m.add(&[x, &y, &bias]),
            (Some(behind), bias) => {
                let y = bias.map_or(y.clone(), |bias| m.add(&[&y, &bias]));
                let y = self.norm(m, &format!("{at}.{}", behind[which]), "d", &y);
                m.add(&[x, &y])
            }
        }
    }

    fn norm(&self, m: &mut Model, name: &str, dims: &str, x: &Tensor) -> Tensor {
        let init = if self.norms.zero_centred { Init::Zeros } else { Init::Ones };
        let size: usize = dims.split_whitespace().map(|d| m.size(d)).product();
        let mut weight = parameter(m, &format!("{name}.weight"), dims, &[size], init);
        if self.norms.zero_centred {
            weight = m.offset(&weight, 1.0);
        }
        rms_norm(m, x, &weight, self.eps)
    }

    fn attention(
        &self,
        m: &mut Model,
        at: &str,
        x: &Tensor,
        position: &Tensor,
        how: Attention,
        by: &Rotation,
    ) -> (Tensor, Option<Tensor>) {
        let [q, k, v] = self.qkv(at);
        let q = self.linear(m, &q, "kv group two h", x, self.biases.qkv);
        let k = self.linear(m, &k, "kv two h", x, self.biases.qkv);
        let v = self.linear(m, &v, "kv two h", x, self.biases.qkv);
        let normed = |m: &mut Model, name: &str, x: Tensor| match self.head_norms {
            true => self.norm(m, &format!("{at}.{name}"), "two h", &x),
            false => x,
        };
        let (q, k) = (normed(m, "q_norm", q), normed(m, "k_norm", k));
        let (q, k) = (rotary(m, &q, by), rotary(m, &k, by));
        let (k, v) = (m.rename(&k, "s", "t"), m.rename(&v, "s", "t"));
        let o = attention(m, &q, &k, &v, position, how);
        self.back(m, &format!("{at}.o_proj"), "kv group two h", &o, self.biases.out)
    }

    fn mlp(&self, m: &mut Model, at: &str, x: &Tensor) -> (Tensor, Option<Tensor>) {
        let [gate, up] = self.gate_up(at);
        let gate = self.linear(m, &gate, "f", x, self.biases.mlp);
        let up = self.linear(m, &up, "f", x, self.biases.mlp);
        let gate = activation(m, self.activation, &gate).unwrap_or(gate);
        let u = m.mul(&[&gate, &up]);
        self.back(m, &format!("{at}.down_proj"), "f", &u, self.biases.mlp)
    }

    fn qkv(&self, at: &str) -> [Rows; 3] {
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let parts = [("q", q), ("k", kv), ("v", kv)];
        match self.fused {
            true => Rows::fused(&format!("{at}.qkv_proj"), parts),
            false => parts.map(|(name, rows)| Rows::whole(format!("{at}.{name}_proj"), rows)),
        }
    }

    fn gate_up(&self, at: &str) -> [Rows; 2] {
        let parts = [("gate", self.inner), ("up", self.inner)];
        match self.fused {
            true => Rows::fused(&format!("{at}.gate_up_proj"), parts),
            false => parts.map(|(name, rows)| Rows::whole(format!("{at}.{name}_proj"), rows)),
        }
    }

    /// From the hidden size to `dims`.
    fn linear(&self, m: &mut Model, rows: &Rows, dims: &str, x: &Tensor, bias: bool) -> Tensor {
        let weight = rows.matrix(m, &format!("{dims} d"), self.width, self.init);
        let y = m.einsum(&format!("b s {dims}"), &[x, &weight]);
        if !bias {
            return y;
        }
        let bias = rows.bias(m, dims);
        m.add(&[&y, &bias])
    }

    /// From `dims` back to the hidden size, and the bias, which is not yet added so that the sum with the residual is
    /// one.
    fn back(
        &self,
        m: &mut Model,
        name: &str,
        dims: &str,
        x: &Tensor,
        bias: bool,
    ) -> (Tensor, Option<Tensor>) {
        let columns = dims.split_whitespace().map(|d| m.size(d)).product();
        let rows = Rows::whole(name.to_string(), self.width);
        let weight = rows.matrix(m, &format!("d {dims}"), columns, self.init);
        let y = m.einsum("b s d", &[x, &weight]);
        (y, bias.then(|| rows.bias(m, "d")))
    }
}
