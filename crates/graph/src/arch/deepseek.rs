//! DeepSeek-V2: latent attention, partial rotary embeddings, and experts after the first layers.

use super::{DECODER, DECODER_SIZES, ExpertLayout, Family, Keys, Sizes};

pub(super) const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    graph: graph!(running::build),
    keys: Keys {
        // Load balancing of experts only affects training, and the head widths are derived from other keys.
        harmless: &[
            "attention_dropout",
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "output_router_logits",
            "pretraining_tp",
            "qk_head_dim",
            "seq_aux",
        ],
        neutral: &[
            ("layer_types", "[]"),
            ("moe_layer_freq", "1"),
            ("norm_topk_prob", "false"),
            ("partial_rotary_factor", "1.0"),
            ("scoring_func", "\"softmax\""),
        ],
    },
    sizes: Some(&Sizes {
        heads: ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0),
        groups: None,
        head_dim: None,
        heads_must_divide: true,
        other_sizes: &[("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1), ("intermediate_size", "layers.0.mlp.down_proj.weight", 1)],
        ..DECODER_SIZES
    }),
    fused: &[&["q_a_proj", "kv_a_proj_with_mqa"], &["gate_proj", "up_proj"]],
    routers: &["mlp.gate"],
    experts: Some(ExpertLayout { keys: &["n_routed_experts"], ..ExpertLayout::SEPARATE }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, PARTS, every_layer};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::latent::Latent;
    use crate::arch::running::rope::{RopeDefaults, attention_scale, parameters};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::{ExpertGroups, Route};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // Published folders refer to custom code, which transformers now includes.
        let _ = s.get("auto_map");
        let latent = Latent::new(s)?;
        let plain = Decoder::new(s, Some(latent.head_dim()))?;
        if plain.groups != plain.heads {
            return Err(Error::graph(
                "config.json",
                format!(
                    "`num_key_value_heads` is {}, expected as many as `num_attention_heads`, {}: the keys of all heads are computed from one latent vector",
                    plain.groups, plain.heads
                ),
            ));
        }
        let head_dim = latent.head_dim();
        let mscale = match parameters(s)? {
            Some(p) => attention_scale(&p)?,
            None => 1.0,
        };
        let decoder = Decoder { head_dim, scale: mscale * mscale / (head_dim as f64).sqrt(), experts: Some(mixture(s)?), latent: Some(latent), ..plain };
        decoder.build(b, every_layer(s, latent.rope, RopeDefaults::default(), |_| Ok(false))?)
    }

    /// The experts: from layer `first_k_dense_replace` on, with shared experts as one network
    /// of their total width.
    fn mixture(s: &Settings) -> Result<Experts> {
        const METHOD: &str = "topk_method";
        const SHARED: &str = "n_shared_experts";
        let experts = s.size_or("n_routed_experts", 64)?;
        // The greedy method ignores groups, but configurations may specify them.
        let [count, top] = ["n_group", "topk_group"].map(|key| if s.get(key).is_some() { s.size(key).map(Some) } else { Ok(None) });
        let (count, top) = (count?, top?);
        let groups = match s.text_or(METHOD, "greedy")? {
            "greedy" => None,
            "group_limited_greedy" => match (count, top) {
                (Some(count), Some(top)) if experts.is_multiple_of(count) && top <= count => Some(ExpertGroups { count, top }),
                (Some(count), Some(top)) => {
                    let reason = format!("`n_group` of {count} does not divide `n_routed_experts`, {experts}, or `topk_group` of {top} is more than that");
                    return Err(Error::graph("config.json", reason));
                }
                _ => return Err(Error::graph("config.json", format!("`{METHOD}` of group_limited_greedy needs `n_group` and `topk_group`"))),
            },
            other => {
                return Err(Error::Unsupported { what: format!("config.json: `{METHOD}` of {other}"), hint: "supported: greedy, group_limited_greedy".into() });
            }
        };
        let inner = s.size_or("moe_intermediate_size", 1407)?;
        let shared = match s.is_null(SHARED) {
            true => None,
            false => Some(Shared { name: "shared_experts", inner: inner.saturating_mul(s.size_or(SHARED, 2)?), gated: false }),
        };
        Ok(Experts {
            count: experts,
            route: Route { top: s.size("num_experts_per_tok")?, scale: s.number_or("routed_scaling_factor", 1.0)?, groups, ..Route::default() },
            inner,
            block: "mlp",
            parts: PARTS,
            shared,
            plain: Vec::new(),
            first: first_layer(s)?,
            step: 1,
        })
    }

    fn first_layer(s: &Settings) -> Result<usize> {
        const KEY: &str = "first_k_dense_replace";
        let Some(value) = s.get(KEY) else { return Ok(0) };
        let found = value.as_u64().and_then(|number| usize::try_from(number).ok());
        found.ok_or_else(|| Error::graph("config.json", format!("`{KEY}` is {value}, expected the number of layers without experts")))
    }
}
