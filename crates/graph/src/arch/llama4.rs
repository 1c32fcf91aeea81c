//! Text models of Llama 4: attention within chunks and normalized queries and keys in most layers, no
//! position embedding in the others, whose queries are scaled by their position, and experts with scaled
//! inputs next to a shared expert.

use super::gguf::{self, Divisors, GgufExperts, GgufFamily, Setting, Windows};
use super::{DECODER, DECODER_SIZES, DenseLayers, ExpertLayout, Family, Keys, Sizes};

pub(super) const LLAMA4_TEXT: Family = Family {
    model_type: "llama4_text",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "cache_implementation",
            "for_llm_compressor",
            "interleave_moe_layer_step",
            "max_position_embeddings",
            "no_rope_layer_interval",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            // Of chunks and of scaled queries only.
            "attention_chunk_size",
            "attn_scale",
            "floor_scale",
        ],
        neutral: &[("partial_rotary_factor", "1.0")],
    },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes {
        custom_head_dim_default: true,
        other_sizes: &[
            ("intermediate_size", "layers.0.feed_forward.experts.down_proj", 1),
            ("intermediate_size", "layers.0.feed_forward.experts.0.down_proj.weight", 1),
            ("intermediate_size_mlp", "layers.0.feed_forward.down_proj.weight", 1),
        ],
        ..DECODER_SIZES
    }),
    routers: &["feed_forward.router"],
    experts: Some(ExpertLayout { keys: &["num_local_experts"], dense: &[DenseLayers::Experts("moe_layers")], ..ExpertLayout::SEPARATE }),
    splits_experts: true,
    gguf: Some(&GgufFamily {
        architecture: "llama4",
        class: "Llama4ForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            gguf::ATTENTION,
            gguf::NORM_BEFORE,
            &[("ffn_gate", "feed_forward.gate_proj"), ("ffn_up", "feed_forward.up_proj"), ("ffn_down", "feed_forward.down_proj")],
            &[
                ("ffn_gate_inp", "feed_forward.router"),
                ("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"),
                ("ffn_up_shexp", "feed_forward.shared_expert.up_proj"),
                ("ffn_down_shexp", "feed_forward.shared_expert.down_proj"),
            ],
        ],
        interleaved_rope: false,
        other_divisors: Some(Divisors::Single),
        rope_period: Some(4),
        neurons: "intermediate_size_mlp",
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        settings: &[Setting::required("interleave_moe_layer_step", "interleave_moe_layer_step", "1")],
        required: &[gguf::NO_ATTENTION_BIAS, ("attention_chunk_size", "8192"), ("attn_scale", "0.1"), ("floor_scale", "8192")],
        head_dim: Some(128),
        theta: 500_000.0,
        windows: Windows::Chunks,
        experts: Some(GgufExperts {
            block: "feed_forward.experts",
            count: "num_local_experts",
            normalized: None,
            inner: Some("intermediate_size"),
            is_input_major: true,
            ..gguf::QWEN_EXPERTS
        }),
        key_value_heads: Some(8),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::layer_list::LAYER_TYPES;
    use crate::arch::running::decoder::{Decoder, Layer, Norm};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::rope::{RopeDefaults, rotary};
    use crate::arch::running::{Settings, unknown_layer_type};
    use crate::arch::smollm3::running::{uses_rotary, uses_rotary_by_interval};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::{PositionScale, Route};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        const EPSILON: f64 = 1e-5;
        let head_dim = Some(128).filter(|_| !s.is_null("head_dim"));
        let decoder = Decoder {
            interleaved: true,
            network: "feed_forward",
            neurons: Some(s.size_or("intermediate_size_mlp", 16384)?),
            mlp_bias: false,
            experts: Some(experts(s)?),
            ..Decoder::with_norm(s, head_dim, Some(8), Norm::rms(s, EPSILON)?)?
        };
        let rotary = rotary(s, decoder.head_dim, RopeDefaults { theta: 500_000.0, ..RopeDefaults::default() })?;
        let unit_norm = if s.flag_or("use_qk_norm", true)? { Some(s.number_or("rms_norm_eps", EPSILON)?) } else { None };
        let is_scaled = is_scaled(s)?;
        decoder.build(b, |index| {
            let has_rotary = match s.get("no_rope_layers").and_then(Value::as_array) {
                Some(list) if list.is_empty() => uses_rotary_by_interval(s, index)?,
                _ => uses_rotary(s, index)?,
            };
            let scale = || Ok::<_, Error>(PositionScale { interval: s.size_or("floor_scale", 8192)?, factor: s.number_or("attn_scale", 0.1)?, offset: 1 });
            Ok(Layer {
                rotary: has_rotary.then(|| rotary.clone()),
                chunk: if is_chunked(s, index, has_rotary)? { Some(chunk(s)?) } else { None },
                unit_norm: unit_norm.filter(|_| has_rotary),
                query_scale: if is_scaled && !has_rotary { Some(scale()?) } else { None },
                ..Layer::default()
            })
        })
    }

    fn experts(s: &Settings) -> Result<Experts> {
        const INDICES: &str = "moe_layers";
        let (layers, inner) = (s.size("num_hidden_layers")?, s.size("intermediate_size")?);
        let step = s.size_or("interleave_moe_layer_step", 1)?;
        let (mut step, mut plain) = (step, Vec::new());
        if let Some(value) = s.get(INDICES) {
            let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
            let listed: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(number).collect());
            let listed = listed.ok_or_else(|| Error::graph("config.json", format!("`{INDICES}` is {value}, expected a list of layer indices")))?;
            (step, plain) = (1, (0..layers).filter(|layer| !listed.contains(layer)).collect());
        }
        Ok(Experts {
            count: s.size_or("num_local_experts", 16)?,
            route: Route { top: s.size_or("num_experts_per_tok", 1)?, sigmoid: true, ..Route::default() },
            inner,
            block: "feed_forward",
            router: "router",
            input_major: true,
            weighted_inputs: true,
            shared: Some(Shared { module: "feed_forward.shared_expert", inner, gated: false }),
            plain,
            step,
            ..Experts::default()
        })
    }

    /// Whether queries without rotary embedding are scaled. Published files have a number, of which only zero
    /// means false.
    fn is_scaled(s: &Settings) -> Result<bool> {
        const KEY: &str = "attn_temperature_tuning";
        let number = s.get(KEY).and_then(Value::as_u64);
        number.map_or_else(|| s.flag_or(KEY, !s.is_null(KEY)), |number| Ok(number > 0))
    }

    /// Whether the queries of a layer attend only to keys of their chunk.
    fn is_chunked(s: &Settings, layer: usize, has_rotary: bool) -> Result<bool> {
        match s.get(LAYER_TYPES).map(|types| types.get(layer).and_then(Value::as_str)) {
            None => Ok(has_rotary),
            Some(Some("chunked_attention")) => Ok(true),
            Some(Some("full_attention")) => Ok(false),
            Some(other) => Err(unknown_layer_type(LAYER_TYPES, layer, other, "chunked_attention or full_attention")),
        }
    }

    /// Number of tokens in a chunk.
    fn chunk(s: &Settings) -> Result<usize> {
        const KEY: &str = "attention_chunk_size";
        if s.is_null(KEY) {
            return Err(Error::graph("config.json", format!("`{KEY}` is null, but layers require one")));
        }
        if !s.flag_or("is_causal", true)? {
            return Err(Error::Unsupported {
                what: "config.json: `is_causal` of false with chunked attention".into(),
                hint: "chunks are supported only with causal attention".into(),
            });
        }
        s.size_or(KEY, 8192)
    }
}
