//! Phi-1 to Phi-2: attention and feed-forward network side by side, layer normalization, partial rotary
//! embeddings, and biases in all layers.

use super::gguf::{self, GgufFamily, GgufHead};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const PHI: Family = Family {
    model_type: "phi",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "embd_pdrop", "max_position_embeddings", "resid_pdrop"], neutral: &[] },
    sizes: Some(&Sizes {
        heads: ("num_attention_heads", "layers.0.self_attn.dense.weight", 1),
        other_sizes: &[("intermediate_size", "layers.0.mlp.fc2.weight", 1)],
        ..DECODER_SIZES
    }),
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    gguf: Some(&GgufFamily {
        architecture: "phi2",
        class: "PhiForCausalLM",
        global: &[("token_embd", "model.embed_tokens"), ("output_norm", "model.final_layernorm"), ("output", "lm_head")],
        layer: &[
            gguf::NORM_OF_ATTENTION,
            &[("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.dense")],
            &[("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
        ],
        interleaved_rope: false,
        epsilon: gguf::LAYER_EPSILON,
        flags: &[],
        required: &[("qk_layernorm", "false")],
        has_implied_heads: true,
        partial_rotary: Some(("partial_rotary_factor", 0.5)),
        activation: ("hidden_act", "gelu_new"),
        head: GgufHead::Separate,
        ..gguf::LLAMA
    }),
    genai: "phi",
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, Norm, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::{Error, Result};
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norm = Norm::Layer { epsilon: s.number_or("layer_norm_eps", 1e-5)?, bias: true };
        let has_head_norms = s.flag_or("qk_layernorm", false)?;
        let decoder = Decoder {
            parallel: true,
            last_norm: "final_layernorm",
            head_norms: if has_head_norms { HeadNorms::Head } else { HeadNorms::None },
            head_norm_names: ["q_layernorm", "k_layernorm"],
            qkv_bias: true,
            out: "dense",
            out_bias: true,
            ungated: Some(["fc1", "fc2"]),
            mlp_bias: true,
            activation: s.text_or("hidden_act", "gelu_new")?,
            head_bias: true,
            ..Decoder::with_norm(s, None, None, norm)?
        };
        let derived = s.size("hidden_size")?.checked_div(decoder.heads);
        if has_head_norms && derived != Some(decoder.head_dim) {
            let width = decoder.head_dim;
            let reason =
                format!("`head_dim` is {width}, but with `qk_layernorm`, the norms of transformers have the width `hidden_size` / `num_attention_heads`");
            return Err(Error::graph("config.json", reason));
        }
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 0.5)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }
}
