//! Hunyuan (dense): norms of queries and keys after the rotary embedding, and a fixed factor on its base.

use super::gguf::{self, GgufFamily, Setting};
use super::{DECODER, Family, Keys};

pub(super) const HUNYUAN_V1_DENSE: Family = Family {
    model_type: "hunyuan_v1_dense",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "eod_token_id", "max_position_embeddings", "pretraining_tp"], neutral: &[("partial_rotary_factor", "1.0")] },
    gguf: Some(&GgufFamily {
        architecture: "hunyuan-dense",
        class: "HunYuanDenseV1ForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            gguf::ATTENTION,
            &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")],
            gguf::NORM_BEFORE,
            gguf::NETWORK,
        ],
        interleaved_rope: false,
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        required: &[gguf::NO_ATTENTION_BIAS],
        has_alpha_scaling: true,
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, Layer};
    use crate::arch::running::rope::{RopeDefaults, kind, parameters, rotary, scaled};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::Rotary;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder {
            head_norms: HeadNorms::AfterRotary,
            head_norm_names: ["query_layernorm", "key_layernorm"],
            mlp_bias: false,
            ..Decoder::with_epsilon(s, None, 1e-5)?
        };
        let rotary = rotary_of(s, decoder.head_dim)?;
        decoder.build(b, |_| Ok(Layer { rotary: Some(rotary.clone()), ..Layer::default() }))
    }

    /// Scaling of the kind `dynamic` with `alpha` raises the base, independent of the length of a text.
    fn rotary_of(s: &Settings, head_dim: usize) -> Result<Rotary> {
        let plain = RopeDefaults::default();
        let Some(p) = parameters(s)? else { return rotary(s, head_dim, plain) };
        if kind(&p)? != "dynamic" || p.number_or("alpha", 0.0)? == 0.0 {
            return rotary(s, head_dim, plain);
        }
        if head_dim < 4 {
            return Err(Error::graph("config.json", "`alpha` of rope scaling needs heads of at least 4 elements"));
        }
        let base = if p.get("rope_theta").is_some() { p } else { *s };
        let width = head_dim as f64;
        let theta = base.number_or("rope_theta", plain.theta)? * p.number("alpha")?.powf(width / (width - 2.0));
        // Other parameters have no effect.
        for key in ["beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"] {
            let _ = p.get(key);
        }
        scaled(s, None, theta, head_dim, plain)
    }
}
