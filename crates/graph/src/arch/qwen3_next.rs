//! Qwen3-Next and the text models of Qwen3.5: gated delta networks in most layers, and attention with a gate
//! in the others; mixtures of experts with a shared expert, or dense networks.

use super::gguf::{self, GgufExperts, GgufFamily, Recurrent};
use super::{DECODER, DECODER_SIZES, DenseLayers, ExpertLayout, Family, Keys, Sizes};
use crate::store::Role;

const KEYS: Keys = Keys {
    harmless: &[
        "attention_dropout",
        "full_attention_interval",
        // Of classes with experts only.
        "intermediate_size",
        // A dtype of the state in other frameworks.
        "mamba_ssm_dtype",
        "max_position_embeddings",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "output_router_logits",
        "router_aux_loss_coef",
        // Images and videos have separate positions, texts do not.
        "rope_parameters.mrope_interleaved",
        "rope_parameters.mrope_section",
    ],
    neutral: &[],
};

/// Keys of published files that transformers does not read, with the values that it computes.
const QWEN3_5_KEYS: Keys = Keys { neutral: &[("attn_output_gate", "true"), ("mlp_only_layers", "[]"), ("output_gate_type", "\"swish\"")], ..KEYS };

/// The default head width is not derived from the residual stream.
const SIZES: Sizes = Sizes { custom_head_dim_default: true, ..DECODER_SIZES };

const EXPERT_SIZES: Sizes = Sizes {
    other_sizes: &[
        ("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1),
        ("shared_expert_intermediate_size", "layers.0.mlp.shared_expert.down_proj.weight", 1),
        ("intermediate_size", "layers.0.mlp.down_proj.weight", 1),
    ],
    ..SIZES
};

/// llama.cpp normalizes the queries and keys of gated delta networks with this epsilon, transformers with a
/// constant.
const DELTA_EPSILON: gguf::Pair = ("rms_norm_eps", "1e-6");

const GGUF: GgufFamily = GgufFamily {
    architecture: "qwen3next",
    class: "Qwen3NextForCausalLM",
    layer: &[
        gguf::NORM_OF_ATTENTION,
        gguf::ATTENTION,
        gguf::HEAD_NORMS,
        gguf::NORM_AFTER_ATTENTION,
        gguf::DELTA,
        &[("ssm_ba", "linear_attn.in_proj_ba")],
        gguf::ROUTER,
        gguf::SHARED_EXPERT,
    ],
    tensors: gguf::DELTA_HEADS,
    interleaved_rope: false,
    norms_plus_one: true,
    flags: &[],
    settings: gguf::DELTA_SETTINGS,
    required: &[gguf::NO_ATTENTION_BIAS, DELTA_EPSILON],
    key_value_heads: Some(2),
    head_dim: Some(256),
    partial_rotary: Some(("partial_rotary_factor", 0.25)),
    recurrent: Recurrent::JointDelta,
    has_query_gate: true,
    experts: Some(GgufExperts { shared: true, ..gguf::QWEN_EXPERTS }),
    ..gguf::LLAMA
};

/// Projections of gated delta networks.
const DELTA_PROJECTIONS: &[gguf::Pair] = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
];

const QWEN3_5_GGUF: GgufFamily = GgufFamily {
    architecture: "qwen35",
    class: "Qwen3_5ForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORM_AFTER_ATTENTION, gguf::DELTA, DELTA_PROJECTIONS, gguf::NETWORK],
    required: &[gguf::NO_ATTENTION_BIAS, DELTA_EPSILON, ("attn_output_gate", "true"), ("output_gate_type", "\"swish\"")],
    key_value_heads: Some(4),
    recurrent: Recurrent::TiledDelta,
    experts: None,
    ..GGUF
};

pub(super) const QWEN3_NEXT: Family = Family {
    model_type: "qwen3_next",
    graph: graph!(running::build),
    keys: KEYS,
    sizes: Some(&EXPERT_SIZES),
    routers: &["mlp.gate", "shared_expert_gate"],
    exempt: &[("linear_attn.conv1d", Role::Other), ("linear_attn.in_proj_ba", Role::LinearAttentionGate)],
    experts: Some(ExpertLayout { dense: &[DenseLayers::Indices("mlp_only_layers", "decoder_sparse_step")], ..ExpertLayout::SEPARATE }),
    gguf: Some(&GGUF),
    ..DECODER
};

pub(super) const QWEN3_5: Family = Family {
    model_type: "qwen3_5_text",
    graph: graph!(running::build_dense),
    keys: QWEN3_5_KEYS,
    sizes: Some(&SIZES),
    fused: &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["in_proj_qkv", "in_proj_z"], &["in_proj_b", "in_proj_a"]],
    exempt: &[("linear_attn.conv1d", Role::Other), ("linear_attn.in_proj_a", Role::LinearAttentionGate), ("linear_attn.in_proj_b", Role::LinearAttentionGate)],
    gguf: Some(&QWEN3_5_GGUF),
    ..DECODER
};

pub(super) const QWEN3_5_MOE: Family = Family {
    model_type: "qwen3_5_moe_text",
    graph: graph!(running::build_moe),
    sizes: Some(&EXPERT_SIZES),
    routers: &["mlp.gate", "shared_expert_gate"],
    experts: Some(ExpertLayout::SEPARATE),
    gguf: Some(&GgufFamily {
        architecture: "qwen35moe",
        class: "Qwen3_5MoeForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            gguf::ATTENTION,
            gguf::HEAD_NORMS,
            gguf::NORM_AFTER_ATTENTION,
            gguf::DELTA,
            DELTA_PROJECTIONS,
            gguf::ROUTER,
            gguf::SHARED_EXPERT,
        ],
        // The weights of the selected experts are always normalized.
        experts: Some(GgufExperts { normalized: None, shared: true, ..gguf::QWEN_EXPERTS }),
        key_value_heads: Some(2),
        ..QWEN3_5_GGUF
    }),
    ..QWEN3_5
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::qwen_moe::running::qwen;
    use crate::arch::running::decoder::{Decoder, HeadNorms, LayerNames, Norm, TokenMixer, every_layer};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::parts::{activate, rms_norm, slices};
    use crate::arch::running::rope::RopeDefaults;
    use crate::arch::running::{Settings, indivisible, unknown_layer_type};
    use crate::error::Result;
    use crate::ir::ops::{CausalConv, Concat, Decay, GatedDelta, MergeHeads, Mul, Normalize, RmsNorm, Route, Sigmoid, Silu, SplitHeads};
    use crate::ir::{Builder, ValueId};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let experts = Experts { shared: Some(shared(s)?), ..qwen(s, [512, 10, 512], true)? };
        decoder(s, b, Some(experts), true)
    }

    pub fn build_dense(s: &Settings, b: &mut Builder) -> Result<()> {
        decoder(s, b, None, false)
    }

    pub fn build_moe(s: &Settings, b: &mut Builder) -> Result<()> {
        let experts = Experts {
            count: s.size_or("num_experts", 256)?,
            route: Route { top: s.size_or("num_experts_per_tok", 8)?, normalised: true, ..Route::default() },
            inner: s.size_or("moe_intermediate_size", 512)?,
            shared: Some(shared(s)?),
            ..Experts::default()
        };
        decoder(s, b, Some(experts), false)
    }

    fn shared(s: &Settings) -> Result<Shared> {
        Ok(Shared { module: "mlp.shared_expert", inner: s.size_or("shared_expert_intermediate_size", 512)?, gated: true })
    }

    fn decoder(s: &Settings, b: &mut Builder, experts: Option<Experts>, joint: bool) -> Result<()> {
        let norm = RmsNorm { epsilon: s.number_or("rms_norm_eps", 1e-6)?, offset: 1.0 };
        let delta = DeltaNet::new(s, norm.epsilon, joint)?;
        let groups = if experts.is_some() { 2 } else { 4 };
        let decoder = Decoder {
            head_norms: HeadNorms::Head,
            query_gate: true,
            mlp_bias: false,
            experts,
            mixer: Some(&delta),
            ..Decoder::with_norm(s, Some(256), Some(groups), Norm::Rms(norm))?
        };
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 0.25)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }

    /// A gated delta network (Yang et al., *Gated Delta Networks*, 2025).
    struct DeltaNet {
        /// Number of heads of queries and keys.
        keys: usize,
        /// Number of heads of values for each of them.
        each: usize,
        /// Widths of a key and of a value.
        widths: [usize; 2],
        kernel: usize,
        /// Epsilon of the normalization of its output.
        epsilon: f64,
        /// Whether one projection computes queries, keys, values and output gates, by key head.
        joint: bool,
    }

    /// Inputs of a gated delta network: queries, keys and values, `[batch, sequence, channels]`, the gate of
    /// the output, and rates and decays of the heads before their activation functions.
    struct Projected {
        qkv: ValueId,
        gate: ValueId,
        rate: ValueId,
        decay: ValueId,
    }

    impl DeltaNet {
        fn new(s: &Settings, epsilon: f64, joint: bool) -> Result<DeltaNet> {
            let (keys, values) = (s.size_or("linear_num_key_heads", 16)?, s.size_or("linear_num_value_heads", 32)?);
            let each = values.checked_div(keys).filter(|_| values.is_multiple_of(keys));
            let wrong = || indivisible(("linear_num_value_heads", values), ("linear_num_key_heads", keys));
            Ok(DeltaNet {
                keys,
                each: each.ok_or_else(wrong)?,
                widths: [s.size_or("linear_key_head_dim", 128)?, s.size_or("linear_value_head_dim", 128)?],
                kernel: s.size_or("linear_conv_kernel_dim", 4)?,
                epsilon,
                joint,
            })
        }

        /// Widths of all queries or keys, and of all values.
        fn totals(&self) -> [usize; 2] {
            let [key, value] = self.widths;
            [self.keys.saturating_mul(key), self.keys.saturating_mul(self.each).saturating_mul(value)]
        }

        fn project(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<Projected> {
            let ([keys, values], heads) = (self.totals(), self.keys.saturating_mul(self.each));
            let both = keys.saturating_mul(2).saturating_add(values);
            if self.joint {
                return self.project_jointly(decoder, b, at, x);
            }
            Ok(Projected {
                qkv: decoder.linear(b, at, "linear_attn.in_proj_qkv", x, both, false)?,
                gate: decoder.linear(b, at, "linear_attn.in_proj_z", x, values, false)?,
                rate: decoder.linear(b, at, "linear_attn.in_proj_b", x, heads, false)?,
                decay: decoder.linear(b, at, "linear_attn.in_proj_a", x, heads, false)?,
            })
        }

        /// From two projections, whose rows are ordered by key head.
        fn project_jointly(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<Projected> {
            let ([key, value], name) = (self.widths, |part: &str| at.node(&format!("linear_attn.{part}")));
            let values = self.each.saturating_mul(value);
            let all = self.by_head(decoder, b, at, x, ("in_proj_qkvz", ["q", "k", "v", "z"]), [key, key, values, values])?;
            let [rate, decay] = self.by_head(decoder, b, at, x, ("in_proj_ba", ["b", "a"]), [self.each; 2])?;
            let [q, k, v, gate] = all;
            Ok(Projected { qkv: b.node(&name("qkv"), Concat::default(), &[q, k, v])?, gate, rate, decay })
        }

        /// A projection with these parts for each key head, as one value for each part.
        fn by_head<const N: usize>(
            &self,
            decoder: &Decoder,
            b: &mut Builder,
            at: &LayerNames,
            x: ValueId,
            (projection, parts): (&str, [&str; N]),
            widths: [usize; N],
        ) -> Result<[ValueId; N]> {
            let (name, head_dim) = (|part: &str| at.node(&format!("linear_attn.{part}")), widths.into_iter().fold(0, usize::saturating_add));
            let all = decoder.linear(b, at, &format!("linear_attn.{projection}"), x, self.keys.saturating_mul(head_dim), false)?;
            let heads = b.node(&name(&format!("{projection}_heads")), SplitHeads { head_dim }, &[all])?;
            let mut found = slices(b, parts.map(|part| name(&format!("{part}_of_heads"))), heads, widths)?;
            for (value, part) in found.iter_mut().zip(parts) {
                *value = b.node(&name(part), MergeHeads {}, &[*value])?;
            }
            Ok(found)
        }
    }

    impl TokenMixer for DeltaNet {
        fn add(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<Option<ValueId>> {
            if !is_linear(decoder.s, at.index)? {
                return Ok(None);
            }
            let node = |part: &str| at.node(&format!("linear_attn.{part}"));
            let module = |part: &str| at.module(&format!("linear_attn.{part}"));
            let ([keys, values], [key, value], heads) = (self.totals(), self.widths, self.keys.saturating_mul(self.each));
            let projected = self.project(decoder, b, at, x)?;
            let weight = b.param(&module("conv1d.weight"), &[keys.saturating_mul(2).saturating_add(values), 1, self.kernel])?;
            let mixed = b.node(&node("conv1d"), CausalConv {}, &[projected.qkv, weight, mask])?;
            let mixed = activate(b, &node("conv1d.act"), decoder.activation, mixed)?;
            let mut operands = slices(b, ["query", "key", "value"].map(node), mixed, [keys, keys, values])?.to_vec();
            for (index, (operand, part)) in operands.iter_mut().zip(["query", "key", "value"]).enumerate() {
                let is_value = index == 2;
                *operand = b.node(&node(&format!("{part}_heads")), SplitHeads { head_dim: if is_value { value } else { key } }, &[*operand])?;
                if !is_value {
                    *operand = b.node(&node(&format!("{part}_normalized")), Normalize { epsilon: 1e-6 }, &[*operand])?;
                }
            }
            let bias = b.param(&module("dt_bias"), &[heads])?;
            let logarithms = b.param(&module("A_log"), &[heads])?;
            operands.push(b.node(&node("decay"), Decay::default(), &[projected.decay, bias, logarithms])?);
            operands.push(b.node(&node("rate"), Sigmoid {}, &[projected.rate])?);
            let context = b.node(&node("delta"), GatedDelta { scale: 1.0 / (key as f64).sqrt(), ..GatedDelta::default() }, &operands)?;
            let context = rms_norm(b, &node("norm"), &module("norm"), context, RmsNorm { epsilon: self.epsilon, ..RmsNorm::default() })?;
            let context = b.node(&node("context"), MergeHeads {}, &[context])?;
            let gate = b.node(&node("gate"), Silu {}, &[projected.gate])?;
            let gated = b.node(&node("gated"), Mul {}, &[context, gate])?;
            decoder.linear(b, at, "linear_attn.out_proj", gated, decoder.s.size("hidden_size")?, false).map(Some)
        }
    }

    /// Whether a layer is a gated delta network: by its type, or all except every fourth one.
    fn is_linear(s: &Settings, layer: usize) -> Result<bool> {
        const TYPES: &str = "layer_types";
        let Some(types) = s.get(TYPES) else {
            let interval = s.size_or("full_attention_interval", 4)?;
            return Ok(layer.checked_add(1).is_none_or(|number| !number.is_multiple_of(interval)));
        };
        match types.get(layer).and_then(Value::as_str) {
            Some("linear_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            other => Err(unknown_layer_type(TYPES, layer, other, "linear_attention or full_attention")),
        }
    }
}
