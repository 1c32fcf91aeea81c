//! The encoder of T5: a bias in attention by how far tokens are from each other, no factor on products, RMS normalisations (Raffel et al., 2020).

use super::parts::{activate, linear_with, rms_norm, text_inputs};
use super::resize::Sizes;
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Attention, Embedding, MergeHeads, Mul, RelativeBias, RmsNorm, SplitHeads};
use crate::ir::{Builder, ValueId};

pub(super) const KEYS: Keys = Keys {
    harmless: &[
        "classifier_dropout",
        "dropout_rate",
        "initializer_factor",
        // Of the decoder.
        "is_encoder_decoder",
        "num_decoder_layers",
        "scale_decoder_outputs",
        "n_positions",
    ],
    // Other names of keys, which count before those.
    neutral: &[("head_dim", "null"), ("hidden_size", "null"), ("is_decoder", "false"), ("num_attention_heads", "null"), ("num_hidden_layers", "null")],
};

pub(super) const SIZES: Sizes = Sizes {
    prefixes: &[""],
    hidden: ("d_model", "encoder.final_layer_norm.weight", 0),
    heads: ("num_heads", "encoder.block.0.layer.0.SelfAttention.q.weight", 0),
    groups: None,
    head_dim: Some("d_kv"),
    own_head_dim: true,
    heads_divide: false,
    others: &[("d_ff", "encoder.block.0.layer.1.DenseReluDense.wo.weight", 1)],
    layers: "num_layers",
};

/// The only class whose whole computation is known.
const CLASSES: [&str; 2] = ["T5EncoderModel", "MT5EncoderModel"];

/// What all layers share.
struct Encoder<'s> {
    function: &'s str,
    gated: bool,
    epsilon: f64,
    heads: usize,
    head_dim: usize,
    neurons: usize,
    bias: RelativeBias,
    table: ValueId,
    tokens: ValueId,
    mask: ValueId,
}

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    encoder(s, b, "relu")
}

pub(super) fn build_multilingual(s: &Settings, b: &mut Builder) -> Result<()> {
    encoder(s, b, "gated-gelu")
}

fn encoder(s: &Settings, b: &mut Builder, usual: &str) -> Result<()> {
    if !CLASSES.contains(&s.class()) {
        return Err(Error::Unsupported {
            what: format!("config.json: `architectures` of \"{}\"", s.class()),
            hint:
                "of T5 the encoder alone is run: with [\"T5EncoderModel\"] as `architectures` the encoder of a whole model is; passes over weights need neither"
                    .into(),
        });
    }
    let said = s.text_or("feed_forward_proj", usual)?;
    let (gated, function) = said.strip_prefix("gated-").map_or((false, said), |function| (true, function));
    // As the paper of the gate approximates it. What is said of the parts counts before what is said of both.
    let function = s.text_or("dense_act_fn", if (gated, function) == (true, "gelu") { "gelu_new" } else { function })?;
    let rows = s.size_or("relative_attention_num_buckets", 32)?;
    let (width, heads) = (s.size("d_model")?, s.size("num_heads")?);
    let (tokens, mask) = text_inputs(b)?;
    let name = ["shared.weight", "encoder.embed_tokens.weight"].into_iter().find(|name| b.has(name)).unwrap_or("shared.weight");
    let words = b.param(name, &[s.size("vocab_size")?, width])?;
    let table = b.param("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", &[rows, heads])?;
    let encoder = Encoder {
        function,
        gated: s.flag_or("is_gated_act", gated)?,
        epsilon: s.number_or("layer_norm_epsilon", 1e-6)?,
        heads,
        head_dim: s.size_or("d_kv", 64)?,
        neurons: s.size("d_ff")?,
        bias: RelativeBias { buckets: rows, max_distance: s.size_or("relative_attention_max_distance", 128)?, both_ways: true },
        table,
        tokens,
        mask,
    };
    let mut x = b.node("encoder.embed_tokens", Embedding {}, &[tokens, words])?;
    for index in 0..s.size("num_layers")? {
        x = encoder.layer(b, &format!("encoder.block.{index}"), x)?;
    }
    let x = encoder.norm(b, "encoder.final_layer_norm", x)?;
    b.output("last_hidden_state", x);
    Ok(())
}

impl Encoder<'_> {
    fn norm(&self, b: &mut Builder, name: &str, x: ValueId) -> Result<ValueId> {
        rms_norm(b, name, name, x, RmsNorm { epsilon: self.epsilon, offset: 0.0 })
    }

    fn layer(&self, b: &mut Builder, name: &str, x: ValueId) -> Result<ValueId> {
        let half = |at: usize, part: &str| format!("{name}.layer.{at}.{part}");
        let linear = |b: &mut Builder, at: usize, part: &str, x: ValueId, out: usize| {
            let module = half(at, part);
            linear_with(b, &module, &module, x, out, false)
        };
        let width = b.width(x)?;
        let normed = self.norm(b, &half(0, "layer_norm"), x)?;
        let mut inputs = Vec::with_capacity(5);
        for part in ["q", "k", "v"] {
            let flat = linear(b, 0, &format!("SelfAttention.{part}"), normed, self.heads.saturating_mul(self.head_dim))?;
            inputs.push(b.node(&half(0, &format!("SelfAttention.{part}_heads")), SplitHeads { head_dim: self.head_dim }, &[flat])?);
        }
        let bias = b.node(&half(0, "SelfAttention.bias"), self.bias, &[self.tokens, self.table])?;
        inputs.extend([self.mask, bias]);
        let context = b.node(&half(0, "SelfAttention.context_heads"), Attention::default(), &inputs)?;
        let context = b.node(&half(0, "SelfAttention.context"), MergeHeads {}, &[context])?;
        let given = linear(b, 0, "SelfAttention.o", context, width)?;
        let x = b.node(&half(0, "sum"), Add {}, &[x, given])?;
        let normed = self.norm(b, &half(1, "layer_norm"), x)?;
        let first = |b: &mut Builder, part: &str| linear(b, 1, &format!("DenseReluDense.{part}"), normed, self.neurons);
        let function = |b: &mut Builder, x: ValueId| activate(b, &half(1, "DenseReluDense.act"), self.function, x);
        let active = if self.gated {
            let (gate, up) = (first(b, "wi_0")?, first(b, "wi_1")?);
            let gate = function(b, gate)?;
            b.node(&half(1, "DenseReluDense.gated"), Mul {}, &[gate, up])?
        } else {
            let wide = first(b, "wi")?;
            function(b, wide)?
        };
        let given = linear(b, 1, "DenseReluDense.wo", active, width)?;
        b.node(&half(1, "sum"), Add {}, &[x, given])
    }
}
