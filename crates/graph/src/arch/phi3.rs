//! Phi-3 and Phi-4: fused projections of queries, keys and values and of gate and up, and partial rotary
//! embeddings.

use super::gguf::{self, Divisors, GgufFamily, Setting, Windows};
use super::{DECODER, DECODER_SIZES, Family, Groups, Keys, Sizes};

pub(super) const PHI3: Family = Family {
    model_type: "phi3",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["attention_dropout", "embd_pdrop", "max_position_embeddings", "original_max_position_embeddings", "resid_pdrop"],
        neutral: &[("full_attn_mod", "1"), ("interpolate_factor", "1"), ("lm_head_bias", "false")],
    },
    sizes: Some(&Sizes { groups: Some(("num_key_value_heads", "layers.0.self_attn.qkv_proj.weight", Groups::Fused)), ..DECODER_SIZES }),
    fused: &[],
    counts_rope_factors: true,
    gguf: Some(&GgufFamily {
        architecture: "phi3",
        class: "Phi3ForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            &[("attn_qkv", "self_attn.qkv_proj"), ("attn_output", "self_attn.o_proj")],
            gguf::NORM_BEFORE,
            &[("ffn_up", "mlp.gate_up_proj"), ("ffn_down", "mlp.down_proj")],
        ],
        interleaved_rope: false,
        other_divisors: Some(Divisors::ShortAndLong),
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        required: &[("lm_head_bias", "false")],
        accepted: &["auto_map"],
        has_implied_heads: true,
        partial_rotary: Some(("partial_rotary_factor", 1.0)),
        windows: Windows::Ignored,
        ..gguf::LLAMA
    }),
    genai: "phi3",
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, every_layer};
    use crate::arch::running::rope::{RopeDefaults, kind, parameters};
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // Published folders refer to custom code, which transformers now includes.
        let _ = s.get("auto_map");
        let decoder = Decoder { fused_qkv: true, fused_gate: Some("gate_up_proj"), qkv_bias: false, out_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
        let kind = parameters(s)?.map_or(Ok("default"), |p| kind(&p))?;
        if !["default", "longrope", "su"].contains(&kind) {
            return Err(Error::Unsupported { what: format!("rope scaling `{kind}` of Phi-3"), hint: "supported: default, longrope".into() });
        }
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 1.0)), original: Some(4096), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(s.get("sliding_window").is_some()))?)
    }
}
