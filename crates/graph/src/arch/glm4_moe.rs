//! GLM-4.5 to GLM-4.7: mixtures of experts with the routers of DeepSeek-V3, and partial rotary embeddings.

use super::gguf::{self, GgufExperts, GgufFamily, Setting};
use super::{DECODER, DECODER_SIZES, DenseLayers, ExpertLayout, Family, Keys, SELECTION_BIAS, Sizes};

pub(super) const GLM4_MOE: Family = Family {
    model_type: "glm4_moe",
    graph: graph!(running::build),
    keys: Keys {
        // Layers that predict further tokens follow those of the graph.
        harmless: &["attention_dropout", "intermediate_size", "max_position_embeddings", "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits"],
        neutral: &[],
    },
    sizes: Some(&Sizes {
        other_sizes: &[("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1), ("intermediate_size", "layers.0.mlp.down_proj.weight", 1)],
        ..DECODER_SIZES
    }),
    heads: &["lm_head", "score", "shared_head.head"],
    routers: &["mlp.gate"],
    float32: SELECTION_BIAS,
    experts: Some(ExpertLayout { keys: &["n_routed_experts"], dense: &[DenseLayers::Count("first_k_dense_replace")], ..ExpertLayout::SEPARATE }),
    gguf: Some(&GgufFamily {
        architecture: "glm4moe",
        class: "Glm4MoeForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            gguf::ATTENTION,
            gguf::HEAD_NORMS,
            &[("post_attention_norm", "post_attention_layernorm")],
            gguf::NETWORK,
            gguf::ROUTER,
            gguf::SHARED_EXPERTS,
        ],
        tensors: gguf::SELECTION_BIAS,
        interleaved_rope: false,
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[gguf::ATTENTION_BIAS, ("use_qk_norm", "attn_q_norm.weight")],
        settings: &[
            Setting::optional("expert_shared_count", "n_shared_experts", ["1", "0"]),
            Setting::optional("leading_dense_block_count", "first_k_dense_replace", ["1", "0"]),
            Setting::optional("expert_weights_scale", "routed_scaling_factor", ["1.0", "1.0"]),
            Setting::optional("expert_weights_norm", "norm_topk_prob", ["true", "false"]),
            Setting::optional("expert_group_count", "n_group", ["1", "1"]),
            Setting::optional("expert_group_used_count", "topk_group", ["1", "1"]),
        ],
        constants: &[gguf::SIGMOID_SCORES],
        partial_rotary: Some(("partial_rotary_factor", 0.5)),
        experts: Some(GgufExperts { count: "n_routed_experts", normalized: None, ..gguf::QWEN_EXPERTS }),
        key_value_heads: Some(8),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::deepseek::running::Defaults;
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, Norm, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norm = Norm::rms(s, 1e-5)?;
        let decoder = Decoder {
            head_norms: if s.flag_or("use_qk_norm", false)? { HeadNorms::Head } else { HeadNorms::None },
            out_bias: false,
            mlp_bias: false,
            experts: Some(Defaults { count: 128, top: 8, inner: 1408, scale: 1.0, groups: [1, 1], dense: 1 }.experts(s)?),
            ..Decoder::with_norm(s, None, Some(8), norm)?
        };
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 0.5)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }
}
