//! Families of models that GGUF files hold: what they call tensors, and what Hugging Face does.
//!
//! Names are those of `gguf-py/gguf/tensor_mapping.py` in llama.cpp.

/// A family.
#[derive(Debug)]
pub(crate) struct Family {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Other values of it that are written as this family.
    pub also: &'static [&'static str],
    /// The class of the model.
    pub class: &'static str,
    /// Names of modules of a layer, here and there.
    layer: &'static [&'static [Pair]],
    /// Whether rows of queries and keys lie as rotary positions of neighbours need them.
    pub neighbours: bool,
    /// Whether weights of norms are told from zero, where `config.json` means them from one.
    pub norms_from_zero: bool,
    /// Whether heads have a width of their own where `config.json` says nothing.
    pub own_head_dim: bool,
    /// The function of the network, under its key.
    pub activation: (&'static str, &'static str),
    /// How windows of attention lie, if there are any.
    pub windows: Windows,
    /// Factor on products of queries and keys: by the width of heads, or of those that the stream leaves to them in models of this many
    /// layers.
    pub scale_by_stream: Option<u64>,
}

/// Which layers have a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    None,
    /// All but every so many.
    AllBut(usize),
}

type Pair = (&'static str, &'static str);

/// Modules outside of layers.
const WHOLE: [Pair; 3] = [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

const LAYER: &[Pair] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
const NORM_BEFORE: &[Pair] = &[("ffn_norm", "post_attention_layernorm")];
const NORMS_AROUND: &[Pair] =
    &[("ffn_norm", "pre_feedforward_layernorm"), ("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];
const HEAD_NORMS: &[Pair] = &[("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm")];

const LLAMA: Family = Family {
    architecture: "llama",
    model_type: "llama",
    also: &["mistral"],
    class: "LlamaForCausalLM",
    layer: &[LAYER, NORM_BEFORE],
    neighbours: true,
    norms_from_zero: false,
    own_head_dim: false,
    activation: ("hidden_act", "silu"),
    windows: Windows::None,
    scale_by_stream: None,
};

const GEMMA: Family = Family {
    architecture: "gemma",
    model_type: "gemma",
    also: &[],
    class: "GemmaForCausalLM",
    layer: &[LAYER, NORM_BEFORE],
    neighbours: false,
    norms_from_zero: true,
    own_head_dim: true,
    activation: ("hidden_act", "gelu_pytorch_tanh"),
    windows: Windows::None,
    scale_by_stream: None,
};

/// All families.
pub(crate) const FAMILIES: [Family; 6] = [
    LLAMA,
    Family { architecture: "qwen2", model_type: "qwen2", also: &[], class: "Qwen2ForCausalLM", neighbours: false, ..LLAMA },
    Family {
        architecture: "qwen3",
        model_type: "qwen3",
        also: &[],
        class: "Qwen3ForCausalLM",
        layer: &[LAYER, NORM_BEFORE, HEAD_NORMS],
        neighbours: false,
        own_head_dim: true,
        ..LLAMA
    },
    GEMMA,
    Family {
        architecture: "gemma2",
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        layer: &[LAYER, NORMS_AROUND],
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        windows: Windows::AllBut(2),
        scale_by_stream: Some(46),
        ..GEMMA
    },
    Family {
        architecture: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        layer: &[LAYER, NORMS_AROUND, HEAD_NORMS],
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        windows: Windows::AllBut(6),
        scale_by_stream: Some(62),
        ..GEMMA
    },
];

/// The number of a layer, and the module in it; numbers with zeros in front are none.
fn numbered<'n>(module: &'n str, before: &str) -> Option<(u32, &'n str)> {
    let (number, module) = module.strip_prefix(before)?.split_once('.')?;
    let layer: u32 = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, module))
}

impl Family {
    /// The family of an architecture.
    pub fn of_architecture(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.architecture == name)
    }

    /// The name of a tensor in checkpoints of Hugging Face.
    pub fn to_checkpoint(&self, name: &str) -> Option<String> {
        let (module, end) = name.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        if let Some((_, module)) = WHOLE.iter().find(|(here, _)| *here == module) {
            return Some(format!("{module}.{end}"));
        }
        let (layer, module) = numbered(module, "blk.")?;
        let (_, module) = self.layer.iter().copied().flatten().find(|(here, _)| *here == module)?;
        Some(format!("model.layers.{layer}.{module}.{end}"))
    }

    /// The name of a tensor of a checkpoint in GGUF files.
    pub fn to_file(&self, name: &str) -> Option<String> {
        let (module, end) = name.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        let module = module.strip_prefix("model.").unwrap_or(module);
        if let Some((here, _)) = WHOLE.iter().find(|(_, there)| there.strip_prefix("model.").unwrap_or(there) == module) {
            return Some(format!("{here}.{end}"));
        }
        let (layer, module) = numbered(module, "layers.")?;
        let (here, _) = self.layer.iter().copied().flatten().find(|(_, there)| *there == module)?;
        Some(format!("blk.{layer}.{here}.{end}"))
    }

    /// Whether a tensor of a checkpoint is the weight of a norm.
    pub fn is_norm(name: &str) -> bool {
        name.strip_suffix(".weight").is_some_and(|module| module.ends_with("norm"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_one_name() {
        assert_eq!(LLAMA.to_checkpoint("blk.7.attn_q.weight").as_deref(), Some("model.layers.7.self_attn.q_proj.weight"));
        assert_eq!(LLAMA.to_file("model.layers.7.mlp.up_proj.weight").as_deref(), Some("blk.7.ffn_up.weight"));
        assert_eq!(["blk.07.attn_q.weight", "blk.+7.attn_q.weight"].map(|name| LLAMA.to_checkpoint(name)), [None, None]);
    }
}
