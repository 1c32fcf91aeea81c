//! Mixtral: mixtures of experts in every layer.

use super::gguf::{self, GgufExperts, GgufFamily, Setting};
use super::{DECODER, DECODER_SIZES, ExpertLayout, Family, Keys, Sizes, llama};

pub(super) const KEYS: Keys = Keys {
    // Load balancing of experts only affects training.
    harmless: &[
        "attention_dropout",
        "intermediate_size",
        "max_position_embeddings",
        "max_window_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sliding_window",
        "use_sliding_window",
    ],
    neutral: llama::KEYS.neutral,
};

/// Experts with the names of Mixtral.
pub(super) const GGUF_EXPERTS: GgufExperts = GgufExperts {
    block: "block_sparse_moe.experts",
    parts: ["w1", "w3", "w2"],
    count: "num_local_experts",
    normalized: None,
    inner: None,
    ..gguf::QWEN_EXPERTS
};

pub(super) const MIXTRAL: Family = Family {
    model_type: "mixtral",
    graph: graph!(running::build),
    keys: KEYS,
    sizes: Some(&Sizes { other_sizes: &[("intermediate_size", "layers.0.block_sparse_moe.experts.0.w2.weight", 1)], ..DECODER_SIZES }),
    fused: &[&["q_proj", "k_proj", "v_proj"], &["w1", "w3"]],
    // The name in published files, and that of transformers 5.
    routers: &["block_sparse_moe.gate", "mlp.gate"],
    experts: Some(ExpertLayout {
        keys: &["num_local_experts"],
        parts: Some(["w1", "w3", "w2"]),
        renamed: Some(("mlp", "block_sparse_moe")),
        ..ExpertLayout::SEPARATE
    }),
    gguf: Some(&GgufFamily {
        class: "MixtralForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, &[("ffn_gate_inp", "block_sparse_moe.gate")], gguf::ROUTER],
        flags: &[],
        required: &[gguf::NO_ATTENTION_BIAS],
        drops_window: true,
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        theta: 1e6,
        experts: Some(GGUF_EXPERTS),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, every_layer};
    use crate::arch::running::experts::Experts;
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;
    use crate::ir::ops::Route;

    /// The module of experts: the name in published files, or that of transformers 5.
    pub fn block(b: &Builder) -> &'static str {
        if b.stored_shape("model.layers.0.mlp.gate.weight").is_some() { "mlp" } else { "block_sparse_moe" }
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder::with_epsilon(s, None, 1e-5)?;
        let experts = Experts {
            count: s.size_or("num_local_experts", 8)?,
            route: Route { top: s.size_or("num_experts_per_tok", 2)?, normalised: true, ..Route::default() },
            inner: s.size("intermediate_size")?,
            block: block(b),
            parts: ["w1", "w3", "w2"],
            ..Experts::default()
        };
        let rope = RopeDefaults { theta: 1e6, ..RopeDefaults::default() };
        let decoder = Decoder { experts: Some(experts), ..decoder };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(s.get("sliding_window").is_some()))?)
    }
}
