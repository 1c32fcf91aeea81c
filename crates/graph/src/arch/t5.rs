//! T5: relative position bias, unscaled attention, RMS normalization; an encoder, alone or with a decoder
//! (Raffel et al., 2020).

use super::{EMPTY, Family, Keys, ModelKind, Positions, Sizes};
use crate::store::Role;

pub(super) const T5: Family = Family {
    model_type: "t5",
    kind: ModelKind::EncoderDecoder,
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["classifier_dropout", "dropout_rate", "initializer_factor", "n_positions"],
        // The first four are aliases that take precedence over the usual keys.
        neutral: &[
            ("head_dim", "null"),
            ("hidden_size", "null"),
            ("num_attention_heads", "null"),
            ("num_hidden_layers", "null"),
            ("is_causal", "true"),
            ("is_decoder", "false"),
            ("tie_encoder_decoder", "false"),
        ],
    },
    sizes: Some(&Sizes {
        prefixes: &[""],
        hidden: ("d_model", "encoder.final_layer_norm.weight", 0),
        heads: ("num_heads", "encoder.block.0.layer.0.SelfAttention.q.weight", 0),
        decoder_heads: None,
        groups: None,
        head_dim: Some("d_kv"),
        custom_head_dim_default: true,
        heads_must_divide: false,
        other_sizes: &[("d_ff", "encoder.block.0.layer.1.DenseReluDense.wo.weight", 1)],
        layers: "num_layers",
        unread: &[],
    }),
    tied: &[("lm_head.weight", "shared.weight")],
    shared_tables: &[("encoder.embed_tokens.weight", "shared.weight"), ("decoder.embed_tokens.weight", "shared.weight")],
    fused: &[&["SelfAttention.q", "SelfAttention.k", "SelfAttention.v"], &["EncDecAttention.k", "EncDecAttention.v"], &["wi_0", "wi_1"]],
    embeddings: &["shared", "embed_tokens"],
    heads: &["lm_head"],
    exempt: &[("relative_attention_bias", Role::Other)],
    // Positions are relative: `n_positions` is the training length, not a limit.
    positions: Positions { keys: &["max_position_embeddings"], ..Positions::DEFAULT },
    ..EMPTY
};

pub(super) const MT5: Family = Family { model_type: "mt5", graph: graph!(running::build_multilingual), ..T5 };

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{activate, linear_of, linear_with, rms_norm, text_inputs};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Embedding, MergeHeads, Mul, RelativeBias, RmsNorm, Scale, SplitHeads};
    use crate::ir::{Builder, Dim, TensorType, ValueId};

    /// The part of a model that a class computes.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Part {
        Encoder,
        /// Encoder and decoder, without a head.
        EncoderDecoder,
        LanguageModel,
    }

    /// Supported classes, without the prefixes `T5` and `MT5`.
    const CLASSES: [(&str, Part); 4] = [
        ("EncoderModel", Part::Encoder),
        ("Model", Part::EncoderDecoder),
        ("ForConditionalGeneration", Part::LanguageModel),
        ("WithLMHeadModel", Part::LanguageModel),
    ];

    /// Differences between T5 and mT5.
    struct Family {
        prefix: &'static str,
        /// Default of `feed_forward_proj`.
        usual: &'static str,
        /// Whether the input of the head may be scaled.
        scales: bool,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        model(s, b, &Family { prefix: "T5", usual: "relu", scales: true })
    }

    pub fn build_multilingual(s: &Settings, b: &mut Builder) -> Result<()> {
        model(s, b, &Family { prefix: "MT5", usual: "gated-gelu", scales: false })
    }

    fn model(s: &Settings, b: &mut Builder, family: &Family) -> Result<()> {
        let end = s.class().strip_prefix(family.prefix);
        let Some((_, part)) = CLASSES.into_iter().find(|(class, _)| end == Some(class)) else {
            let known = CLASSES.map(|(class, _)| format!("{}{class}", family.prefix)).join(", ");
            return Err(Error::Unsupported {
                what: format!("config.json: `architectures` of \"{}\"", s.class()),
                hint: format!("supported classes: {known}; passes that only read weights support any class"),
            });
        };
        let projection = s.text_or("feed_forward_proj", family.usual)?;
        let (gated, function) = projection.strip_prefix("gated-").map_or((false, projection), |function| (true, function));
        // Gated networks use the tanh approximation of GELU. The separate keys take precedence over the
        // combined one.
        let function = s.text_or("dense_act_fn", if (gated, function) == (true, "gelu") { "gelu_new" } else { function })?;
        let rows = s.size_or("relative_attention_num_buckets", 32)?;
        let (tokens, mask) = text_inputs(b)?;
        let name = ["shared.weight", "encoder.embed_tokens.weight"].into_iter().find(|name| b.has(name)).unwrap_or("shared.weight");
        let words = b.param(name, &[s.size("vocab_size")?, s.size("d_model")?])?;
        let encoder = Stack {
            side: "encoder",
            function,
            gated: s.flag_or("is_gated_act", gated)?,
            epsilon: s.number_or("layer_norm_epsilon", 1e-6)?,
            heads: s.size("num_heads")?,
            head_dim: s.size_or("d_kv", 64)?,
            neurons: s.size("d_ff")?,
            bias: RelativeBias { buckets: rows, max_distance: s.size_or("relative_attention_max_distance", 128)?, both_ways: true },
            tokens,
            mask: Some(mask),
            read: None,
        };
        let layers = s.size("num_layers")?;
        let x = encoder.build(b, words, layers)?;
        let deeper = s.size_or("num_decoder_layers", layers)?;
        let (scaled, tied) = (s.get("scale_decoder_outputs").is_some(), s.flag_or("tie_word_embeddings", true)?);
        let scaled = if scaled { s.flag_or("scale_decoder_outputs", true)? } else { tied };
        // Published encoders are also marked as encoder-decoders.
        if !s.flag_or("is_encoder_decoder", true)? && part != Part::Encoder {
            return Err(Error::graph("config.json", "`is_encoder_decoder` is false, but `architectures` names an encoder-decoder class"));
        }
        if part == Part::Encoder {
            b.output("last_hidden_state", x);
            return Ok(());
        }
        let tokens = b.input("decoder_input_ids", TensorType::int([Dim::named("batch"), Dim::named("decoder_sequence")]))?;
        let bias = RelativeBias { both_ways: false, ..encoder.bias };
        let decoder = Stack { side: "decoder", bias, tokens, mask: None, read: Some((x, mask)), ..encoder };
        let mut x = decoder.build(b, words, deeper)?;
        b.output("last_hidden_state", x);
        if part == Part::LanguageModel {
            // transformers ties a head that is not stored, regardless of the configuration.
            let weight = if b.has("lm_head.weight") { b.param("lm_head.weight", &[s.size("vocab_size")?, s.size("d_model")?])? } else { words };
            if scaled && family.scales {
                x = b.node("decoder.scaled", Scale { factor: 1.0 / (s.size("d_model")? as f64).sqrt() }, &[x])?;
            }
            let logits = linear_of(b, "lm_head", x, weight)?;
            b.output("logits", logits);
        }
        Ok(())
    }

    /// The encoder or the decoder.
    #[derive(Clone, Copy)]
    struct Stack<'s> {
        side: &'static str,
        function: &'s str,
        gated: bool,
        epsilon: f64,
        heads: usize,
        head_dim: usize,
        neurons: usize,
        bias: RelativeBias,
        tokens: ValueId,
        /// The mask of padding; a decoder is causal instead.
        mask: Option<ValueId>,
        /// The output of the encoder and its padding mask.
        read: Option<(ValueId, ValueId)>,
    }

    impl Stack<'_> {
        fn build(&self, b: &mut Builder, words: ValueId, layers: usize) -> Result<ValueId> {
            let side = self.side;
            let table = b.param(&format!("{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"), &[self.bias.buckets, self.heads])?;
            let mut x = b.node(&format!("{side}.embed_tokens"), Embedding {}, &[self.tokens, words])?;
            for index in 0..layers {
                let name = |half: usize| format!("{side}.block.{index}.layer.{half}");
                x = self.half(b, &name(0), x, |b, half, x| {
                    let bias = b.node(&format!("{half}.SelfAttention.bias"), self.bias, &[self.tokens, table])?;
                    let extras: Vec<ValueId> = self.mask.into_iter().chain([bias]).collect();
                    let attention = Attention { causal: self.mask.is_none(), ..Attention::default() };
                    self.attention(b, &format!("{half}.SelfAttention"), [x; 3], attention, &extras)
                })?;
                if let Some((read, mask)) = self.read {
                    x = self.half(b, &name(1), x, |b, half, x| {
                        self.attention(b, &format!("{half}.EncDecAttention"), [x, read, read], Attention::default(), &[mask])
                    })?;
                }
                x = self.half(b, &name(if self.read.is_some() { 2 } else { 1 }), x, |b, half, x| self.network(b, half, x))?;
            }
            self.norm(b, &format!("{side}.final_layer_norm"), x)
        }

        fn norm(&self, b: &mut Builder, name: &str, x: ValueId) -> Result<ValueId> {
            rms_norm(b, name, name, x, RmsNorm { epsilon: self.epsilon, offset: 0.0 })
        }

        /// Half a layer with this name: `compute` of the normalized stream, and the residual addition.
        fn half(&self, b: &mut Builder, name: &str, x: ValueId, compute: impl Fn(&mut Builder, &str, ValueId) -> Result<ValueId>) -> Result<ValueId> {
            let normed = self.norm(b, &format!("{name}.layer_norm"), x)?;
            let computed = compute(b, name, normed)?;
            b.node(&format!("{name}.sum"), Add {}, &[x, computed])
        }

        fn attention(&self, b: &mut Builder, name: &str, read: [ValueId; 3], attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
            let width = b.width(read[0])?;
            let mut inputs = Vec::with_capacity(5);
            for (part, x) in ["q", "k", "v"].into_iter().zip(read) {
                let module = format!("{name}.{part}");
                let flat = linear_with(b, &module, &module, x, self.heads.saturating_mul(self.head_dim), false)?;
                inputs.push(b.node(&format!("{name}.{part}_heads"), SplitHeads { head_dim: self.head_dim }, &[flat])?);
            }
            inputs.extend(extras);
            let context = b.node(&format!("{name}.context_heads"), attention, &inputs)?;
            let context = b.node(&format!("{name}.context"), MergeHeads {}, &[context])?;
            let module = format!("{name}.o");
            linear_with(b, &module, &module, context, width, false)
        }

        fn network(&self, b: &mut Builder, half: &str, x: ValueId) -> Result<ValueId> {
            let linear = |b: &mut Builder, part: &str, x: ValueId, out: usize| {
                let module = format!("{half}.DenseReluDense.{part}");
                linear_with(b, &module, &module, x, out, false)
            };
            let width = b.width(x)?;
            let function = |b: &mut Builder, x: ValueId| activate(b, &format!("{half}.DenseReluDense.act"), self.function, x);
            let active = if self.gated {
                let (gate, up) = (linear(b, "wi_0", x, self.neurons)?, linear(b, "wi_1", x, self.neurons)?);
                let gate = function(b, gate)?;
                b.node(&format!("{half}.DenseReluDense.gated"), Mul {}, &[gate, up])?
            } else {
                let wide = linear(b, "wi", x, self.neurons)?;
                function(b, wide)?
            };
            linear(b, "wo", active, width)
        }
    }
}
