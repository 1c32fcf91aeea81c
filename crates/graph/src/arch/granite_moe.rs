//! Granite with mixtures of experts, and Granite 4: state space layers of Mamba 2, attention with or without
//! rotary embeddings in some layers or in all, and a dense network, in addition to a mixture of experts if
//! there is one.

use super::gguf::{self, GgufExperts, GgufFamily, Recurrent, Setting};
use super::{DECODER, DECODER_SIZES, ExpertLayout, Family, Keys, Sizes};
use crate::store::Role;

const EXPERT_SIZE: (&str, &str, usize) = ("intermediate_size", "layers.0.block_sparse_moe.output_linear.weight", 2);
const SHARED_SIZE: (&str, &str, usize) = ("shared_intermediate_size", "layers.0.shared_mlp.output_linear.weight", 1);

/// The router and the down projections of all experts.
const EXPERTS: &[gguf::Pair] = &[("ffn_gate_inp", "block_sparse_moe.router.layer"), ("ffn_down_exps", "block_sparse_moe.output_linear")];
const GATE_AND_UP: (&str, [&str; 2]) = ("block_sparse_moe.input_linear.weight", ["ffn_gate_exps.weight", "ffn_up_exps.weight"]);

/// Parts of a shared expert.
const SHARED_DOWN: &[gguf::Pair] = &[("ffn_down_shexp", "shared_mlp.output_linear")];
const SHARED_GATE_AND_UP: (&str, [&str; 2]) = ("shared_mlp.input_linear.weight", ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]);

const GGUF: GgufFamily = GgufFamily {
    architecture: "granitemoe",
    class: "GraniteMoeForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, EXPERTS],
    concatenated: &[GATE_AND_UP],
    flags: &[],
    required: &[gguf::NO_ATTENTION_BIAS],
    multipliers: gguf::GRANITE_MULTIPLIERS,
    experts: Some(GgufExperts { count: "num_local_experts", normalized: None, inner: None, ..gguf::QWEN_EXPERTS }),
    ..gguf::LLAMA
};

/// Granite with experts and a shared expert in each layer.
const SHARED_GGUF: GgufFamily = GgufFamily {
    class: "GraniteMoeSharedForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, EXPERTS, SHARED_DOWN],
    concatenated: &[GATE_AND_UP, SHARED_GATE_AND_UP],
    settings: &[Setting::required(gguf::SHARED_NEURONS, "shared_intermediate_size", "0")],
    ..GGUF
};

/// Granite 4 without experts and with attention in all layers.
const ATTENTION_GGUF: GgufFamily = GgufFamily {
    architecture: "granite",
    class: "GraniteMoeHybridForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, &[("ffn_down", "shared_mlp.output_linear")]],
    concatenated: &[("shared_mlp.input_linear.weight", ["ffn_gate.weight", "ffn_up.weight"])],
    settings: &[
        Setting::required("ssm.conv_kernel", "mamba_d_conv", "4"),
        Setting::required("ssm.state_size", "mamba_d_state", "256"),
        Setting::required("ssm.group_count", "mamba_n_groups", "1"),
        Setting::required("ssm.time_step_rank", "mamba_n_heads", "128"),
        Setting::required(gguf::SHARED_NEURONS, "shared_intermediate_size", "1024"),
    ],
    constants: &[("expert_count", 0), ("expert_used_count", 0)],
    required: &[gguf::NO_ATTENTION_BIAS, ("normalization_function", "\"rmsnorm\"")],
    recurrent: Recurrent::UnusedStateSpace,
    experts: None,
    ..GGUF
};

/// Granite 4 without experts.
const DENSE_HYBRID_GGUF: GgufFamily = GgufFamily {
    architecture: "granitehybrid",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, gguf::STATE_SPACE, &[("ffn_down", "shared_mlp.output_linear")]],
    tensors: gguf::STATE_SPACE_HEADS,
    flags: &[("mamba_conv_bias", "ssm_conv1d.bias")],
    constants: &[],
    // llama.cpp needs biases of convolutions.
    required: &[
        gguf::NO_ATTENTION_BIAS,
        ("mamba_conv_bias", "true"),
        ("mamba_expand", "2"),
        ("mamba_proj_bias", "false"),
        ("normalization_function", "\"rmsnorm\""),
    ],
    recurrent: Recurrent::StateSpace,
    without_recurrent: Some(&ATTENTION_GGUF),
    ..ATTENTION_GGUF
};

const HYBRID_GGUF: GgufFamily = GgufFamily {
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, gguf::STATE_SPACE, EXPERTS, SHARED_DOWN],
    concatenated: &[GATE_AND_UP, SHARED_GATE_AND_UP],
    without_experts: Some(&DENSE_HYBRID_GGUF),
    without_recurrent: None,
    experts: GGUF.experts,
    ..DENSE_HYBRID_GGUF
};

pub(super) const GRANITE_MOE: Family = Family {
    model_type: "granitemoe",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["attention_dropout", "max_position_embeddings", "output_router_logits", "router_aux_loss_coef"],
        // transformers 4 reads the second one.
        neutral: &[("partial_rotary_factor", "1.0"), ("position_embedding_type", "\"rope\"")],
    },
    sizes: Some(&Sizes { other_sizes: &[EXPERT_SIZE], ..DECODER_SIZES }),
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    routers: &["block_sparse_moe.router"],
    experts: Some(ExpertLayout { keys: &["num_local_experts"], stacked: &["input_linear", "output_linear"], parts: None, ..ExpertLayout::SEPARATE }),
    renames: &[("block_sparse_moe.router.layer", "block_sparse_moe.router")],
    gguf: Some(&GGUF),
    ..DECODER
};

pub(super) const GRANITE_MOE_SHARED: Family = Family {
    model_type: "granitemoeshared",
    graph: graph!(running::build_shared),
    sizes: Some(&Sizes { other_sizes: &[EXPERT_SIZE, SHARED_SIZE], ..DECODER_SIZES }),
    gguf: Some(&SHARED_GGUF),
    ..GRANITE_MOE
};

pub(super) const GRANITE_MOE_HYBRID: Family = Family {
    model_type: "granitemoehybrid",
    graph: graph!(running::build_hybrid),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "init_method",
            // Of mixtures of experts only.
            "intermediate_size",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
            // Of state space layers only.
            "mamba_chunk_size",
            "mamba_conv_bias",
            "mamba_d_conv",
            "mamba_d_head",
            "mamba_d_state",
            "mamba_expand",
            "mamba_n_groups",
            "mamba_n_heads",
            "mamba_proj_bias",
            "time_step_limit",
            // Of rotary embeddings only.
            "max_position_embeddings",
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
        ],
        neutral: &[("normalization_function", "\"rmsnorm\""), ("partial_rotary_factor", "1.0")],
    },
    exempt: &[("mamba.conv1d", Role::Other)],
    gguf: Some(&HYBRID_GGUF),
    ..GRANITE_MOE_SHARED
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::granite::running::with_multipliers;
    use crate::arch::layer_list::{BLOCK_TYPES, LAYER_TYPES};
    use crate::arch::running::decoder::{Decoder, Layer, LayerNames, TokenMixer, every_layer};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::rope::{RopeDefaults, rotary};
    use crate::arch::running::state_space::{StateSpace, limits};
    use crate::arch::running::{Settings, unknown_layer_type};
    use crate::error::{Error, Result};
    use crate::ir::ops::{RmsNorm, Route};
    use crate::ir::{Builder, ValueId};

    const COUNT: &str = "num_local_experts";

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = decoder(s, None, true)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }

    pub fn build_shared(s: &Settings, b: &mut Builder) -> Result<()> {
        const SIZE: &str = "shared_intermediate_size";
        let shared = if s.get(SIZE).is_none_or(|size| *size == 0) { None } else { Some(s.size(SIZE)?) };
        let decoder = decoder(s, shared, true)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }

    pub fn build_hybrid(s: &Settings, b: &mut Builder) -> Result<()> {
        let shared = Some(s.size_or("shared_intermediate_size", 1024)?);
        let decoder = Decoder { mixer: Some(&Mamba {}), ..decoder(s, shared, has_experts(s)?)? };
        let rotary = match s.text_or("position_embedding_type", "nope")? {
            "nope" => None,
            "rope" => Some(rotary(s, decoder.head_dim, RopeDefaults::default())?),
            other => {
                return Err(Error::Unsupported { what: format!("config.json: `position_embedding_type` of {other}"), hint: "supported: rope, nope".into() });
            }
        };
        decoder.build(b, |_| Ok(Layer { rotary: rotary.clone(), ..Layer::default() }))
    }

    /// A decoder with a dense network of this size, in addition to experts if it has them.
    fn decoder<'s, 'c>(s: &'s Settings<'c>, shared: Option<usize>, has_experts: bool) -> Result<Decoder<'s, 'c>> {
        Ok(Decoder {
            network: "shared_mlp",
            fused_gate: Some("input_linear"),
            // The first ones are one projection.
            parts: ["", "", "output_linear"],
            neurons: shared,
            mlp_bias: false,
            experts: if has_experts { Some(experts(s, shared)?) } else { None },
            ..with_multipliers(Decoder::new(s, None)?)?
        })
    }

    fn experts(s: &Settings, shared: Option<usize>) -> Result<Experts> {
        Ok(Experts {
            count: s.size_or(COUNT, 8)?,
            route: Route { top: s.size_or("num_experts_per_tok", 2)?, normalised: true, ..Route::default() },
            inner: s.size("intermediate_size")?,
            block: "block_sparse_moe",
            router: "router.layer",
            stacked: ["input_linear.weight", "output_linear.weight"],
            shared: shared.map(|inner| Shared { module: "shared_mlp", inner, gated: false }),
            ..Experts::default()
        })
    }

    /// Whether there are experts, of which the number can be 0.
    fn has_experts(s: &Settings) -> Result<bool> {
        if s.get(COUNT).is_none_or(|count| *count != 0) {
            return Ok(true);
        }
        if s.flag_or("output_router_logits", false)? {
            return Err(Error::graph("config.json", format!("`output_router_logits` is true, but `{COUNT}` is 0")));
        }
        Ok(false)
    }

    struct Mamba {}

    impl TokenMixer for Mamba {
        fn add(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<Option<ValueId>> {
            let s = decoder.s;
            if !is_state_space(s, at.index)? {
                return Ok(None);
            }
            let (inner, heads) = (s.size("hidden_size")?.saturating_mul(s.size_or("mamba_expand", 2)?), s.size_or("mamba_n_heads", 128)?);
            let layer = StateSpace {
                module: "mamba",
                heads,
                head_dim: head_dim(s, inner, heads)?,
                groups: s.size_or("mamba_n_groups", 1)?,
                state: s.size_or("mamba_d_state", 256)?,
                kernel: s.size_or("mamba_d_conv", 4)?,
                conv_bias: s.flag_or("mamba_conv_bias", true)?,
                bias: s.flag_or("mamba_proj_bias", false)?,
                limits: limits(s, "time_step_limit")?,
                activation: decoder.activation,
                norm: RmsNorm { epsilon: s.number_or("rms_norm_eps", 1e-6)?, ..RmsNorm::default() },
            };
            layer.add(b, at, x, mask).map(Some)
        }
    }

    /// The width of a head, which can only be that of the layer divided by the number of heads.
    fn head_dim(s: &Settings, inner: usize, heads: usize) -> Result<usize> {
        const KEY: &str = "mamba_d_head";
        let Some(width) = inner.checked_div(heads).filter(|_| inner.is_multiple_of(heads)) else {
            return Err(Error::graph("config.json", format!("`mamba_n_heads` {heads} does not divide {inner}, `mamba_expand` times `hidden_size`")));
        };
        match s.get(KEY) {
            Some(given) if given != "auto" && given.as_u64() != Some(width as u64) => {
                Err(Error::graph("config.json", format!("`{KEY}` is {given}, but {heads} heads of a layer of width {inner} have a width of {width}")))
            }
            _ => Ok(width),
        }
    }

    /// Whether a layer is a state space layer, as all are by default.
    fn is_state_space(s: &Settings, layer: usize) -> Result<bool> {
        // transformers maps the first key to the second one.
        let found = [BLOCK_TYPES, LAYER_TYPES].map(|key| Some((key, s.get(key)?)));
        let Some((key, types)) = found.into_iter().flatten().next() else { return Ok(true) };
        match types.get(layer).and_then(Value::as_str) {
            Some("mamba" | "linear_attention") => Ok(true),
            Some("attention" | "full_attention") => Ok(false),
            other => Err(unknown_layer_type(key, layer, other, "mamba or attention")),
        }
    }
}
