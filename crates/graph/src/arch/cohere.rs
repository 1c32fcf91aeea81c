//! Cohere Command: attention and feed-forward network side by side, layer normalization without a bias,
//! rotary embeddings of neighboring elements, and scaled logits. The second version has sliding windows in
//! most layers, and no position embedding in the others.

use super::gguf::{self, GgufFamily, GgufHead, Setting, Windows};
use super::{DECODER, Family, Keys};

const GGUF: GgufFamily = GgufFamily {
    architecture: "command-r",
    class: "CohereForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NETWORK],
    interleaved_rope: false,
    epsilon: gguf::LAYER_EPSILON,
    flags: &[],
    settings: &[Setting::optional("logit_scale", "logit_scale", ["0.0625", "1.0"])],
    required: &[gguf::NO_ATTENTION_BIAS, ("use_qk_norm", "false")],
    has_implied_heads: true,
    theta: 500_000.0,
    head: GgufHead::Tied,
    ..gguf::LLAMA
};

pub(super) const COHERE: Family = Family {
    model_type: "cohere",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("partial_rotary_factor", "1.0"), ("use_qk_norm", "false")] },
    gguf: Some(&GGUF),
    ..DECODER
};

pub(super) const COHERE2: Family = Family {
    model_type: "cohere2",
    graph: graph!(running::build_2),
    keys: Keys {
        // Published files state whether the embedding was sharded in training.
        harmless: &[
            "_sliding_window_pattern",
            "attention_dropout",
            "cache_implementation",
            "max_position_embeddings",
            "sliding_window_pattern",
            "use_parallel_embedding",
        ],
        neutral: &[
            ("layer_switch", "4"),
            ("order_of_interleaved_layers", "\"local_attn_first\""),
            ("partial_rotary_factor", "1.0"),
            ("position_embedding_type", "\"rope_gptj\""),
            ("rotary_pct", "1.0"),
            ("use_embedding_sharing", "true"),
            ("use_gated_activation", "true"),
            ("use_parallel_block", "true"),
            ("use_qk_norm", "false"),
        ],
    },
    gguf: Some(&GgufFamily {
        architecture: "cohere2",
        class: "Cohere2ForCausalLM",
        theta: 1e4,
        windows: Windows::Listed(4),
        default_window: Some(4096),
        ..GGUF
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Layer, Norm, every_layer, is_local, required_window};
    use crate::arch::running::rope::{RopeDefaults, require_theta, rotary};
    use crate::error::Result;
    use crate::ir::Builder;

    fn cohere<'s, 'c>(s: &'s Settings<'c>) -> Result<Decoder<'s, 'c>> {
        let norm = Norm::Layer { epsilon: s.number_or("layer_norm_eps", 1e-5)?, bias: false };
        let decoder = Decoder::with_norm(s, None, None, norm)?;
        Ok(Decoder { parallel: true, interleaved: true, mlp_bias: false, logit_scale: Some(s.number_or("logit_scale", 0.0625)?), ..decoder })
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        require_theta(s)?;
        let decoder = cohere(s)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults { theta: 500_000.0, ..RopeDefaults::default() }, |_| Ok(false))?)
    }

    pub fn build_2(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = cohere(s)?;
        let rotary = rotary(s, decoder.head_dim, RopeDefaults::default())?;
        let pattern = s.size_or("sliding_window_pattern", 4)?;
        decoder.build(b, |index| {
            let is_local = is_local(s, index, pattern)?;
            Ok(Layer { rotary: is_local.then(|| rotary.clone()), window: required_window(s, is_local)?, ..Layer::default() })
        })
    }
}
