//! Cohere Command: attention and feed-forward network side by side, layer normalization without a bias,
//! rotary embeddings of neighboring elements, and scaled logits. The second version has sliding windows in
//! most layers, and no position embedding in the others.

use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const COHERE: Family = Family {
    model_type: "cohere",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("partial_rotary_factor", "1.0"), ("use_qk_norm", "false")] },
    ..DECODER
};

pub(super) const COHERE2: Family = Family {
    model_type: "cohere2",
    graph: graph!(running::build_2),
    keys: Keys {
        harmless: &["_sliding_window_pattern", "attention_dropout", "cache_implementation", "max_position_embeddings", "sliding_window_pattern"],
        neutral: &[
            ("layer_switch", "4"),
            ("order_of_interleaved_layers", "\"local_attn_first\""),
            ("partial_rotary_factor", "1.0"),
            ("position_embedding_type", "\"rope_gptj\""),
            ("rotary_pct", "1.0"),
            ("use_embedding_sharing", "true"),
            ("use_gated_activation", "true"),
            ("use_parallel_block", "true"),
            ("use_parallel_embedding", "false"),
            ("use_qk_norm", "false"),
        ],
    },
    sizes: Some(&Sizes { head_dim: None, ..DECODER_SIZES }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Layer, Norm, every_layer, is_local, required_window};
    use crate::arch::running::rope::{RopeDefaults, require_theta, rotary};
    use crate::error::Result;
    use crate::ir::Builder;

    fn cohere<'s, 'c>(s: &'s Settings<'c>, head_dim: Option<usize>) -> Result<Decoder<'s, 'c>> {
        let norm = Norm::Layer { epsilon: s.number_or("layer_norm_eps", 1e-5)?, bias: false };
        let decoder = Decoder::with_norm(s, head_dim, None, norm)?;
        Ok(Decoder { parallel: true, interleaved: true, mlp_bias: false, logit_scale: Some(s.number_or("logit_scale", 0.0625)?), ..decoder })
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        require_theta(s)?;
        let decoder = cohere(s, None)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults { theta: 500_000.0, ..RopeDefaults::default() }, |_| Ok(false))?)
    }

    pub fn build_2(s: &Settings, b: &mut Builder) -> Result<()> {
        // A head width in the configuration has no effect.
        let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
        let decoder = Decoder { head_dim, scale: 1.0 / (head_dim as f64).sqrt(), ..cohere(s, Some(head_dim))? };
        let rotary = rotary(s, head_dim, RopeDefaults::default())?;
        let pattern = s.size_or("sliding_window_pattern", 4)?;
        decoder.build(b, |index| {
            let is_local = is_local(s, index, pattern)?;
            Ok(Layer { rotary: is_local.then(|| rotary.clone()), window: required_window(s, is_local)? })
        })
    }
}
