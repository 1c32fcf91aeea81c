//! Qwen2-MoE and Qwen3-MoE: mixtures of experts, with a shared expert in Qwen2.

use super::gguf::{self, GgufExperts, GgufFamily};
use super::mixtral::KEYS;
use super::{DECODER, DECODER_SIZES, DenseLayers, ExpertLayout, Family, Sizes};

pub(super) const QWEN2_MOE: Family = Family {
    model_type: "qwen2_moe",
    graph: graph!(running::build_qwen2),
    keys: KEYS,
    sizes: Some(&Sizes {
        other_sizes: &[
            ("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1),
            ("shared_expert_intermediate_size", "layers.0.mlp.shared_expert.down_proj.weight", 1),
            ("intermediate_size", "layers.0.mlp.down_proj.weight", 1),
        ],
        ..DECODER_SIZES
    }),
    routers: &["mlp.gate", "shared_expert_gate"],
    experts: Some(ExpertLayout {
        keys: &["num_experts", "num_local_experts"],
        dense: &[DenseLayers::Indices("mlp_only_layers", "decoder_sparse_step")],
        ..ExpertLayout::SEPARATE
    }),
    gguf: Some(&GgufFamily {
        architecture: "qwen2moe",
        class: "Qwen2MoeForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, gguf::ROUTER, gguf::SHARED_EXPERT],
        interleaved_rope: false,
        flags: &[],
        required: &[gguf::NO_ATTENTION_BIAS],
        experts: Some(GgufExperts { normalized: Some(false), shared: true, ..gguf::QWEN_EXPERTS }),
        ..gguf::LLAMA
    }),
    ..DECODER
};

pub(super) const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    graph: graph!(running::build_qwen3),
    gguf: Some(&GgufFamily {
        architecture: "qwen3moe",
        class: "Qwen3MoeForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORM_BEFORE, gguf::ROUTER],
        interleaved_rope: false,
        flags: &[gguf::ATTENTION_BIAS],
        required: &[gguf::NO_ATTENTION_BIAS],
        head_dim: Some(128),
        experts: Some(gguf::QWEN_EXPERTS),
        ..gguf::LLAMA
    }),
    ..QWEN2_MOE
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, every_layer, slides};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::Route;

    pub fn build_qwen2(s: &Settings, b: &mut Builder) -> Result<()> {
        let shared = Shared { module: "mlp.shared_expert", inner: s.size_or("shared_expert_intermediate_size", 5632)?, gated: true };
        let experts = Experts { shared: Some(shared), ..qwen(s, [60, 4, 1408], false)? };
        let used = s.flag_or("use_sliding_window", false)?;
        let window = |layer: usize| match slides(s, layer, used)? {
            Some(slides) => Ok(slides),
            None if used => Err(Error::Unsupported {
                what: "config.json: `use_sliding_window` without `layer_types`".into(),
                hint: "versions of transformers disagree on which layers have a window then: specify them in `layer_types`".into(),
            }),
            None => Ok(false),
        };
        let decoder = Decoder { qkv_bias: s.flag_or("qkv_bias", true)?, out_bias: false, experts: Some(experts), ..Decoder::new(s, None)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), window)?)
    }

    pub fn build_qwen3(s: &Settings, b: &mut Builder) -> Result<()> {
        let used = s.flag_or("use_sliding_window", false)?;
        let decoder = Decoder { head_norms: HeadNorms::Head, experts: Some(qwen(s, [128, 8, 768], false)?), ..Decoder::new(s, None)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(used))?)
    }

    /// The experts of Qwen, with defaults of their number, of the number per token, of their neurons, and of
    /// the normalization of routing weights.
    pub fn qwen(s: &Settings, [count, top, inner]: [usize; 3], normalised: bool) -> Result<Experts> {
        // The key differs between versions of transformers.
        let key = if s.get("num_local_experts").is_some() && s.get("num_experts").is_none() { "num_local_experts" } else { "num_experts" };
        Ok(Experts {
            count: s.size_or(key, count)?,
            route: Route { top: s.size_or("num_experts_per_tok", top)?, normalised: s.flag_or("norm_topk_prob", normalised)?, ..Route::default() },
            inner: s.size_or("moe_intermediate_size", inner)?,
            plain: plain_layers(s)?,
            step: s.size_or("decoder_sparse_step", 1)?,
            ..Experts::default()
        })
    }

    fn plain_layers(s: &Settings) -> Result<Vec<usize>> {
        const KEY: &str = "mlp_only_layers";
        let Some(value) = s.get(KEY) else { return Ok(Vec::new()) };
        let number = |value: &serde_json::Value| usize::try_from(value.as_u64()?).ok();
        let found: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(number).collect());
        found.ok_or_else(|| Error::graph("config.json", format!("`{KEY}` is {value}, expected a list of layer indices")))
    }
}
