//! GLM-4.7-Flash: latent attention of DeepSeek-V3, and experts in the layers that the configuration lists.

use super::{DenseLayers, ExpertLayout, Family, Keys, deepseek};

pub(super) const GLM4_MOE_LITE: Family = Family {
    model_type: "glm4_moe_lite",
    graph: graph!(running::build),
    keys: Keys {
        // Layers that predict further tokens follow those of the graph. vLLM reads `first_k_dense_replace`,
        // transformers `mlp_layer_types`.
        harmless: &[
            "attention_dropout",
            "first_k_dense_replace",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "num_nextn_predict_layers",
            "output_router_logits",
            "pretraining_tp",
        ],
        neutral: &[("partial_rotary_factor", "1.0"), ("topk_method", "\"noaux_tc\"")],
    },
    experts: Some(ExpertLayout {
        keys: &["n_routed_experts"],
        dense: &[DenseLayers::Types("mlp_layer_types"), DenseLayers::Count("first_k_dense_replace")],
        ..ExpertLayout::SEPARATE
    }),
    gguf: None,
    ..deepseek::DEEPSEEK_V3
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::deepseek::running::{Defaults, decoder, latent};
    use crate::arch::running::Settings;
    use crate::arch::running::experts::Experts;
    use crate::arch::running::latent::Latent;
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let experts = Defaults { count: 64, top: 4, inner: 1536, scale: 1.8, groups: [1, 1], dense: 0 }.experts(s)?;
        // transformers ignores `first_k_dense_replace`.
        let experts = Experts { plain: plain_layers(s)?, first: 0, ..experts };
        decoder(s, b, latent(s, Latent::with_defaults(s, [768, 192, 256])?)?, experts, (Some(20), 1e-5))
    }

    /// The layers with a dense network, by default the first.
    fn plain_layers(s: &Settings) -> Result<Vec<usize>> {
        const KEY: &str = "mlp_layer_types";
        let Some(value) = s.get(KEY) else { return Ok(vec![0]) };
        let kinds: Option<Vec<&str>> = value.as_array().and_then(|kinds| kinds.iter().map(serde_json::Value::as_str).collect());
        let kinds = kinds.filter(|kinds| kinds.iter().all(|kind| ["dense", "sparse"].contains(kind)) && Some(kinds.len()) == s.size("num_hidden_layers").ok());
        let Some(kinds) = kinds else {
            return Err(Error::graph("config.json", format!("`{KEY}` is {value}, expected `dense` or `sparse` for each of `num_hidden_layers`")));
        };
        Ok(kinds.iter().enumerate().filter(|(_, kind)| **kind == "dense").map(|(layer, _)| layer).collect())
    }
}
