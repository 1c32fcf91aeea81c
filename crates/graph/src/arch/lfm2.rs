//! LFM2: gated short convolutions, and attention in some layers, with norms of queries and keys.

use super::gguf::{self, GgufFamily, Recurrent, Setting};
use super::{DECODER, DECODER_SIZES, Family, IndirectSizes, Keys, Sizes};
use crate::store::Role;

pub(super) const LFM2: Family = Family {
    model_type: "lfm2",
    graph: graph!(running::build),
    keys: Keys {
        // Published files repeat sizes under names that transformers does not read.
        harmless: &[
            "block_dim",
            "block_ffn_dim_multiplier",
            "block_mlp_init_scale",
            "block_multiple_of",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "max_position_embeddings",
            "num_heads",
            "use_pos_enc",
        ],
        neutral: &[("hidden_act", "\"silu\""), ("partial_rotary_factor", "1.0"), ("theta", "1000000.0")],
    },
    sizes: Some(&Sizes {
        heads: ("num_attention_heads", "layers.0.self_attn.out_proj.weight", 1),
        other_sizes: &[("intermediate_size", "layers.0.feed_forward.w2.weight", 1)],
        ..DECODER_SIZES
    }),
    indirect_sizes: Some(IndirectSizes { replaced: ("block_ff_dim", "intermediate_size"), adjusted: "block_auto_adjust_ff_dim" }),
    fused: &[&["q_proj", "k_proj", "v_proj"], &["w1", "w3"]],
    exempt: &[("conv.conv", Role::Other)],
    gguf: Some(&GgufFamily {
        architecture: "lfm2",
        class: "Lfm2ForCausalLM",
        global: &[("token_embd", "model.embed_tokens"), ("token_embd_norm", "model.embedding_norm"), ("output", "lm_head")],
        layer: &[
            &[("attn_norm", "operator_norm"), ("ffn_norm", "ffn_norm")],
            &[("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.out_proj")],
            &[("attn_q_norm", "self_attn.q_layernorm"), ("attn_k_norm", "self_attn.k_layernorm")],
            &[("shortconv.in_proj", "conv.in_proj"), ("shortconv.conv", "conv.conv"), ("shortconv.out_proj", "conv.out_proj")],
            &[("ffn_gate", "feed_forward.w1"), ("ffn_up", "feed_forward.w3"), ("ffn_down", "feed_forward.w2")],
        ],
        interleaved_rope: false,
        epsilon: Setting { key: "norm_eps", default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        settings: &[Setting::required("shortconv.l_cache", "conv_L_cache", "3")],
        required: &[("conv_bias", "false")],
        theta: 1e6,
        recurrent: Recurrent::ShortConvolution,
        key_value_heads: Some(8),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::running::decoder::{Decoder, HeadNorms, LayerNames, Norm, TokenMixer, every_layer};
    use crate::arch::running::parts::slices;
    use crate::arch::running::rope::RopeDefaults;
    use crate::arch::running::{Settings, unknown_layer_type};
    use crate::error::{Error, Result};
    use crate::ir::ops::{CausalConv, Mul, RmsNorm};
    use crate::ir::{Builder, ValueId};

    const TYPES: &str = "layer_types";
    const ATTENTION_LAYERS: &str = "full_attn_idxs";

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // A key of published files, which takes precedence over `tie_word_embeddings`.
        if !s.flag_or("tie_embedding", true)? && !b.has("lm_head.weight") {
            return Err(Error::graph("config.json", "`tie_embedding` is false, but `lm_head.weight` is missing"));
        }
        let convolution = ShortConvolution { kernel: s.size_or("conv_L_cache", 3)?, bias: s.flag_or("conv_bias", false)? };
        let decoder = Decoder {
            norms: [Some("operator_norm"), None, Some("ffn_norm"), None],
            last_norm: "embedding_norm",
            head_norms: HeadNorms::Head,
            head_norm_names: ["q_layernorm", "k_layernorm"],
            qkv_bias: false,
            out: "out_proj",
            out_bias: false,
            mlp_bias: false,
            activation: "silu",
            mixer: Some(&convolution),
            network: "feed_forward",
            parts: ["w1", "w3", "w2"],
            neurons: Some(neurons(s)?),
            ..Decoder::with_norm(s, None, Some(8), Norm::Rms(RmsNorm { epsilon: s.number_or("norm_eps", 1e-5)?, ..RmsNorm::default() }))?
        };
        let rope = RopeDefaults { theta: 1e6, ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }

    /// Number of neurons of the feed-forward network, which some configurations specify only indirectly.
    fn neurons(s: &Settings) -> Result<usize> {
        let given = if s.get("block_ff_dim").is_some() { s.size("block_ff_dim")? } else { s.size("intermediate_size")? };
        if !s.flag_or("block_auto_adjust_ff_dim", true)? {
            return Ok(given);
        }
        // Rounded in the same order as in transformers.
        let part = (2.0 * given as f64 / 3.0) as usize;
        if s.is_null("block_ffn_dim_multiplier") {
            return Ok(part);
        }
        let scaled = (s.number_or("block_ffn_dim_multiplier", 1.0)? * part as f64) as usize;
        let multiple = s.size_or("block_multiple_of", 256)?;
        scaled.checked_next_multiple_of(multiple).ok_or_else(|| Error::graph("config.json", "`block_ffn_dim_multiplier` is too large"))
    }

    struct ShortConvolution {
        kernel: usize,
        bias: bool,
    }

    impl TokenMixer for ShortConvolution {
        fn add(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<Option<ValueId>> {
            if !is_convolution(decoder.s, at.index)? {
                return Ok(None);
            }
            let width = b.width(x)?;
            let all = decoder.linear(b, at, "conv.in_proj", x, width.saturating_mul(3), self.bias)?;
            let [before, after, x] = slices(b, ["before", "after", "x"].map(|part| at.node(&format!("conv.{part}"))), all, [width; 3])?;
            let gated = b.node(&at.node("conv.gated"), Mul {}, &[before, x])?;
            let mut inputs = vec![gated, b.param(&at.module("conv.conv.weight"), &[width, 1, self.kernel])?, mask];
            if self.bias {
                inputs.push(b.param(&at.module("conv.conv.bias"), &[width])?);
            }
            let mixed = b.node(&at.node("conv.conv"), CausalConv {}, &inputs)?;
            let gated = b.node(&at.node("conv.mixed"), Mul {}, &[after, mixed])?;
            decoder.linear(b, at, "conv.out_proj", gated, width, self.bias).map(Some)
        }
    }

    /// Whether a layer is a convolution: by its type, or by the list of layers with attention. The default is
    /// attention in all layers.
    fn is_convolution(s: &Settings, layer: usize) -> Result<bool> {
        let wrong = |reason: String| Err(Error::graph("config.json", reason));
        let listed = match s.get(ATTENTION_LAYERS) {
            None => true,
            Some(Value::Array(layers)) => layers.iter().any(|index| index.as_u64() == Some(layer as u64)),
            Some(other) => return wrong(format!("`{ATTENTION_LAYERS}` is {other}, expected a list of layer indices")),
        };
        match s.get(TYPES).map(|types| types.get(layer).and_then(Value::as_str)) {
            None => Ok(!listed),
            Some(Some("conv")) => Ok(true),
            Some(Some("full_attention")) => Ok(false),
            Some(other) => Err(unknown_layer_type(TYPES, layer, other, "conv or full_attention")),
        }
    }
}
