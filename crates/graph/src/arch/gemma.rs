//! Gemma, Gemma 2 and Gemma 3 (text): norm weights stored as offsets from 1, and scaled embeddings; from
//! version 2 normalizations before and after each half, and sliding windows in most layers.

use super::gguf::{self, GgufFamily, GgufHead, Windows};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

const GGUF: GgufFamily = GgufFamily {
    architecture: "gemma",
    class: "GemmaForCausalLM",
    interleaved_rope: false,
    norms_plus_one: true,
    flags: &[gguf::ATTENTION_BIAS],
    required: &[gguf::NO_ATTENTION_BIAS],
    head_dim: Some(256),
    activation: ("hidden_act", "gelu_pytorch_tanh"),
    newer_activation_key: Some("hidden_activation"),
    head: GgufHead::Tied,
    ..gguf::LLAMA
};

pub(super) const GEMMA: Family = Family {
    model_type: "gemma",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["attention_dropout", "max_position_embeddings"],
        neutral: &[("hidden_activation", "\"gelu_pytorch_tanh\""), ("partial_rotary_factor", "1.0"), ("use_bidirectional_attention", "false")],
    },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, ..DECODER_SIZES }),
    gguf: Some(&GGUF),
    genai: "gemma",
    ..DECODER
};

pub(super) const GEMMA2: Family = Family {
    model_type: "gemma2",
    graph: graph!(running::build_2),
    keys: Keys {
        harmless: &["attention_dropout", "cache_implementation", "hidden_act", "max_position_embeddings"],
        neutral: &[("partial_rotary_factor", "1.0"), ("use_bidirectional_attention", "false")],
    },
    sizes: Some(&Sizes { custom_head_dim_default: true, heads_must_divide: true, ..DECODER_SIZES }),
    gguf: Some(&GgufFamily {
        architecture: "gemma2",
        class: "Gemma2ForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORMS_AROUND, gguf::NETWORK],
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        newer_activation_key: None,
        windows: Windows::AllBut(2),
        default_window: Some(4096),
        has_query_scalar: true,
        default_soft_caps: Some([50.0, 30.0]),
        key_value_heads: Some(4),
        hidden_size_scaled_layers: Some(46),
        ..GGUF
    }),
    genai: "gemma2",
    ..GEMMA
};

pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    graph: graph!(running::build_3),
    keys: Keys {
        harmless: &[
            "_sliding_window_pattern",
            "attention_dropout",
            "cache_implementation",
            "hidden_act",
            "max_position_embeddings",
            "rope_local_base_freq",
            "rope_theta",
            "sliding_window_pattern",
        ],
        neutral: &[("partial_rotary_factor", "1.0"), ("use_bidirectional_attention", "false")],
    },
    gguf: Some(&GgufFamily {
        architecture: "gemma3",
        class: "Gemma3ForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORMS_AROUND, gguf::NETWORK],
        theta: 1e6,
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        newer_activation_key: None,
        head: GgufHead::Any,
        windows: Windows::AllBut(6),
        has_query_scalar: true,
        has_local_rope: true,
        key_value_heads: Some(4),
        hidden_size_scaled_layers: Some(62),
        ..GGUF
    }),
    genai: "gemma3_text",
    ..GEMMA2
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{self, Decoder, HeadNorms, Layer, Norm, every_layer, is_local, required_window};
    use crate::arch::running::rope::{RopeDefaults, by_layer_type, rotary};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::{RmsNorm, Rotary};

    const NORMS: decoder::Norms =
        [Some("input_layernorm"), Some("post_attention_layernorm"), Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")];

    /// The common properties of all versions, with a default number of key-value heads.
    fn gemma<'s, 'c>(s: &'s Settings<'c>, groups: Option<usize>) -> Result<Decoder<'s, 'c>> {
        let norm = RmsNorm { epsilon: s.number_or("rms_norm_eps", 1e-6)?, offset: 1.0 };
        let embedding_scale = Some((s.size("hidden_size")? as f64).sqrt());
        Ok(Decoder { mlp_bias: false, embedding_scale, ..Decoder::with_norm(s, Some(256), groups, Norm::Rms(norm))? })
    }

    /// The common properties of the later versions.
    fn later<'s, 'c>(s: &'s Settings<'c>) -> Result<Decoder<'s, 'c>> {
        Ok(Decoder {
            scale: 1.0 / s.number_or("query_pre_attn_scalar", 256.0)?.sqrt(),
            norms: NORMS,
            activation: s.text_or("hidden_activation", "gelu_pytorch_tanh")?,
            ..gemma(s, Some(4))?
        })
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // The first published files specify the exact GELU, but were trained with the approximation.
        let activation = s.text_or("hidden_act", "gelu_pytorch_tanh")?;
        let decoder = Decoder { activation: if activation == "gelu" { "gelu_pytorch_tanh" } else { activation }, ..gemma(s, None)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }

    pub fn build_2(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder { soft_cap: cap(s, "attn_logit_softcapping", 50.0)?, logit_cap: cap(s, "final_logit_softcapping", 30.0)?, ..later(s)? };
        let rotary = rotary(s, decoder.head_dim, RopeDefaults::default())?;
        decoder.build(b, |index| Ok(Layer { rotary: Some(rotary.clone()), window: required_window(s, is_local(s, index, 2)?)?, ..Layer::default() }))
    }

    pub fn build_3(s: &Settings, b: &mut Builder) -> Result<()> {
        let number = |key: &str| s.get(key).map(|_| s.number(key)).transpose();
        // Gemma 3 does not cap attention scores, but has the key.
        let (logit_cap, _) = (number("final_logit_softcapping")?, number("attn_logit_softcapping")?);
        if logit_cap.is_some() && s.is_inside() {
            return Err(Error::Unsupported {
                what: "config.json: `final_logit_softcapping` of a model with a vision tower".into(),
                hint: "transformers does not cap its logits, unlike those of the text model: set it to null".into(),
            });
        }
        let decoder = Decoder { head_norms: HeadNorms::Head, logit_cap, ..later(s)? };
        let (global, local) = (rotary_of(s, "full_attention", decoder.head_dim)?, rotary_of(s, "sliding_attention", decoder.head_dim)?);
        let pattern = s.size_or("sliding_window_pattern", 6)?;
        decoder.build(b, |index| {
            let is_local = is_local(s, index, pattern)?;
            let rotary = if is_local { &local } else { &global };
            Ok(Layer { rotary: Some(rotary.clone()), window: required_window(s, is_local)?, ..Layer::default() })
        })
    }

    /// A soft cap with a default; null disables it.
    fn cap(s: &Settings, key: &str, default: f64) -> Result<Option<f64>> {
        if s.is_null(key) { Ok(None) } else { s.number_or(key, default).map(Some) }
    }

    /// Layers with a sliding window use another base of rotary embeddings than those without.
    fn rotary_of(s: &Settings, layers: &'static str, head_dim: usize) -> Result<Rotary> {
        let is_global = layers == "full_attention";
        let base = if is_global { ("rope_theta", 1e6) } else { ("rope_local_base_freq", 1e4) };
        by_layer_type(s, layers, base, head_dim, s.group("rope_scaling").filter(|_| is_global), RopeDefaults::default())
    }
}
