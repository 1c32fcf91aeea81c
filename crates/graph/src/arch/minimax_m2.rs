//! MiniMax-M2: mixtures of experts with sigmoid scores, norms of queries and keys over all heads, and partial
//! rotary embeddings.

use super::gguf::{self, GgufExperts, GgufFamily, GgufHead};
use super::{DECODER_SIZES, Family, Keys, Sizes, mixtral};

pub(super) const MINIMAX_M2: Family = Family {
    model_type: "minimax_m2",
    graph: graph!(running::build),
    keys: Keys {
        // Layers that predict further tokens follow those of the graph.
        harmless: &[
            "attention_dropout",
            "max_position_embeddings",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "use_mtp",
        ],
        neutral: &[
            ("qk_norm_type", "\"per_layer\""),
            ("scoring_func", "\"sigmoid\""),
            ("shared_intermediate_size", "0"),
            ("use_qk_norm", "true"),
            ("use_routing_bias", "true"),
        ],
    },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes {
        custom_head_dim_default: true,
        other_sizes: &[("intermediate_size", "layers.0.block_sparse_moe.experts.0.w2.weight", 1)],
        ..DECODER_SIZES
    }),
    gguf: Some(&GgufFamily {
        architecture: "minimax-m2",
        class: "MiniMaxM2ForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORM_BEFORE, &[("ffn_gate_inp", "block_sparse_moe.gate")], gguf::ROUTER],
        tensors: &[("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"), ("exp_probs_b.bias", "mlp.e_score_correction_bias")],
        interleaved_rope: false,
        flags: &[],
        constants: &[gguf::SIGMOID_SCORES],
        // Published folders refer to custom code, which transformers now includes.
        accepted: &["auto_map"],
        head_dim: Some(128),
        theta: 5_000_000.0,
        partial_rotary: Some(("partial_rotary_factor", 1.0)),
        rotary_width: Some("rotary_dim"),
        head: GgufHead::Separate,
        experts: Some(GgufExperts { inner: Some("intermediate_size"), ..mixtral::GGUF_EXPERTS }),
        key_value_heads: Some(8),
        ..gguf::LLAMA
    }),
    ..mixtral::MIXTRAL
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::mixtral::running::block;
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, Norm, every_layer};
    use crate::arch::running::experts::Experts;
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::Route;

    const KINDS: &str = "attn_type_list";

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // Published folders refer to custom code, which transformers now includes.
        let _ = s.get("auto_map");
        if let Some(kinds) = s.get(KINDS)
            && kinds.as_array().is_none_or(|kinds| kinds.iter().any(|kind| kind.as_u64() != Some(1)))
        {
            let hint = "1, softmax attention, is supported for each layer".into();
            return Err(Error::Unsupported { what: format!("config.json: `{KINDS}` of {kinds}"), hint });
        }
        let norm = Norm::rms(s, 1e-6)?;
        let experts = Experts {
            count: s.size_or("num_local_experts", 256)?,
            route: Route { top: s.size_or("num_experts_per_tok", 8)?, normalised: true, sigmoid: true, ..Route::default() },
            inner: s.size("intermediate_size")?,
            block: block(b),
            selection_bias: Some("e_score_correction_bias"),
            parts: ["w1", "w3", "w2"],
            ..Experts::default()
        };
        let decoder = Decoder {
            head_norms: HeadNorms::Projection,
            qkv_bias: false,
            out_bias: false,
            experts: Some(experts),
            ..Decoder::with_norm(s, Some(128), Some(8), norm)?
        };
        // Published files specify the number of rotated elements.
        let part = s.size_or("rotary_dim", decoder.head_dim)? as f64 / decoder.head_dim as f64;
        let rope = RopeDefaults { theta: 5_000_000.0, partial: Some(("partial_rotary_factor", part)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }
}
