//! Whisper: speech recognition with an encoder of log-mel spectrograms and a decoder (Radford et al.,
//! 2022).

use super::{EMPTY, Family, Keys, ModelKind, Sizes};

pub(super) const WHISPER: Family = Family {
    model_type: "whisper",
    kind: ModelKind::EncoderDecoder,
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "activation_dropout",
            "apply_spec_augment",
            "attention_dropout",
            "classifier_proj_size",
            "decoder_layerdrop",
            "dropout",
            "encoder_layerdrop",
            "forced_decoder_ids",
            "init_std",
            // transformers computes a factor from it but does not use it.
            "scale_embedding",
            "mask_feature_length",
            "mask_feature_min_masks",
            "mask_feature_prob",
            "mask_time_length",
            "mask_time_min_masks",
            "mask_time_prob",
            "median_filter_width",
            "use_weighted_layer_sum",
        ],
        // The first three are aliases of other keys.
        neutral: &[
            ("hidden_size", "null"),
            ("num_attention_heads", "null"),
            ("num_key_value_heads", "null"),
            ("is_causal", "true"),
            ("is_decoder", "false"),
            ("is_encoder_decoder", "true"),
            ("tie_encoder_decoder", "false"),
        ],
    },
    sizes: Some(&Sizes {
        prefixes: &["model.", ""],
        hidden: ("d_model", "decoder.embed_tokens.weight", 1),
        heads: ("encoder_attention_heads", "encoder.layers.0.self_attn.q_proj.weight", 0),
        decoder_heads: Some(("decoder_attention_heads", "decoder.layers.0.self_attn.q_proj.weight", 0)),
        groups: None,
        head_dim: None,
        custom_head_dim_default: false,
        heads_must_divide: false,
        other_sizes: &[("encoder_ffn_dim", "encoder.layers.0.fc1.weight", 0), ("decoder_ffn_dim", "decoder.layers.0.fc1.weight", 0)],
        layers: "encoder_layers",
        unread: &[],
    }),
    tied: &[("proj_out.weight", "model.decoder.embed_tokens.weight")],
    fused: &[&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], &["encoder_attn.k_proj", "encoder_attn.v_proj"]],
    embeddings: &["embed_tokens", "embed_positions"],
    heads: &["proj_out"],
    ..EMPTY
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Cross, Names, NormPosition};
    use crate::arch::running::parts::{activate, language_head, layer_norm};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Conv, Embedding, Linear, Positions, Transpose};
    use crate::ir::{Builder, Dim, TensorType, ValueId};

    const NAMES: Names = Names {
        attention: "self_attn",
        qkv: ["q_proj", "k_proj", "v_proj"],
        out: "self_attn.out_proj",
        attended: "attended",
        norms: ["self_attn_layer_norm", "final_layer_norm"],
        network: ["fc1", "act", "fc2"],
        sum: "",
        scales: None,
    };

    /// Names of cross-attention.
    const CROSS: Names =
        Names { attention: "encoder_attn", out: "encoder_attn.out_proj", attended: "informed", norms: ["encoder_attn_layer_norm", ""], ..NAMES };

    const EPSILON: f64 = 1e-5;
    /// Kernel size of both convolutions.
    const TAPS: usize = 3;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("model.encoder.conv1.weight") { "model." } else { "" };
        if !matches!(s.class(), "" | "WhisperForConditionalGeneration" | "WhisperModel") {
            return Err(Error::Unsupported {
                what: format!("config.json: `architectures` of \"{}\"", s.class()),
                hint: "supported classes: WhisperForConditionalGeneration, WhisperModel; passes that only read weights support any class".into(),
            });
        }
        if s.get("num_hidden_layers").is_some() && s.size("num_hidden_layers")? != s.size("encoder_layers")? {
            return Err(Error::graph("config.json", "`num_hidden_layers` is an alias of `encoder_layers`, but has another value"));
        }
        let encoded = encoder(s, b, prefix)?;
        let (x, table) = decoder(s, b, prefix, encoded)?;
        b.output("last_hidden_state", x);
        if s.class() == "WhisperForConditionalGeneration" || b.has("proj_out.weight") {
            let weight = language_head(s, b, "proj_out.weight", table)?;
            let logits = b.node("proj_out", Linear { input_major: false }, &[x, weight])?;
            b.output("logits", logits);
        }
        Ok(())
    }

    fn block<'b>(s: &Settings<'b>, side: [&str; 2], attention: Attention, cross: Option<Cross<'b>>) -> Result<Block<'b>> {
        let [heads, neurons] = side;
        Ok(Block {
            names: &NAMES,
            norms: NormPosition::Before,
            epsilon: EPSILON,
            head_dim: s.head_dim("d_model", heads)?,
            attention,
            extras: &[],
            qkv_bias: None,
            cross,
            neurons: s.size(neurons)?,
            activation: Some(s.text_or("activation_function", "gelu")?),
        })
    }

    /// The encoder output for a spectrogram, `[batch, positions, width]`.
    fn encoder(s: &Settings, b: &mut Builder, prefix: &str) -> Result<ValueId> {
        let (width, bins, places) = (s.size("d_model")?, s.size("num_mel_bins")?, s.size("max_source_positions")?);
        let frames = places.saturating_mul(2);
        let mut x = b.input("input_features", TensorType::float([Dim::named("batch"), Dim::Fixed(bins), Dim::Fixed(frames)]))?;
        for (part, read, stride) in [("conv1", bins, 1), ("conv2", width, 2)] {
            let (node, module) = (format!("encoder.{part}"), format!("{prefix}encoder.{part}"));
            let inputs = [x, b.param(&format!("{module}.weight"), &[width, read, TAPS])?, b.param(&format!("{module}.bias"), &[width])?];
            x = b.node(&node, Conv { stride: stride.into(), padding: (TAPS / 2).into(), ..Conv::default() }, &inputs)?;
            x = activate(b, &format!("{node}.act"), "gelu", x)?;
        }
        let x = b.node("encoder.places", Transpose { perm: vec![0, 2, 1] }, &[x])?;
        let positions = b.param(&format!("{prefix}encoder.embed_positions.weight"), &[places, width])?;
        let x = b.node("encoder.embeddings", Add {}, &[x, positions])?;
        let block = block(s, ["encoder_attention_heads", "encoder_ffn_dim"], Attention::default(), None)?;
        let x = block.stack(b, prefix, "encoder.layers", s.size("encoder_layers")?, x)?;
        layer_norm(b, "encoder.layer_norm", &format!("{prefix}encoder.layer_norm"), x, EPSILON)
    }

    /// The decoder output for tokens and the encoder output, and the token embedding table.
    fn decoder(s: &Settings, b: &mut Builder, prefix: &str, encoded: ValueId) -> Result<(ValueId, ValueId)> {
        let width = s.size("d_model")?;
        let tokens = b.input("decoder_input_ids", TensorType::int([Dim::named("batch"), Dim::named("decoder_sequence")]))?;
        let table = b.param(&format!("{prefix}decoder.embed_tokens.weight"), &[s.size("vocab_size")?, width])?;
        let words = b.node("decoder.embed_tokens", Embedding {}, &[tokens, table])?;
        let positions = b.node("decoder.positions", Positions::default(), &[tokens])?;
        let places = b.param(&format!("{prefix}decoder.embed_positions.weight"), &[s.size("max_target_positions")?, width])?;
        let places = b.node("decoder.embed_positions", Embedding {}, &[positions, places])?;
        let x = b.node("decoder.embeddings", Add {}, &[words, places])?;
        let cross = Cross { names: &CROSS, read: encoded };
        let causal = Attention { causal: true, ..Attention::default() };
        let block = block(s, ["decoder_attention_heads", "decoder_ffn_dim"], causal, Some(cross))?;
        let x = block.stack(b, prefix, "decoder.layers", s.size("decoder_layers")?, x)?;
        let x = layer_norm(b, "decoder.layer_norm", &format!("{prefix}decoder.layer_norm"), x, EPSILON)?;
        Ok((x, table))
    }
}
