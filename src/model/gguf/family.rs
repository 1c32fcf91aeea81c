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
    /// What experts are called, where there are any.
    pub experts: Option<Experts>,
}

/// Experts of a family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts {
    /// The module of a layer that they are in, by their numbers.
    block: &'static str,
    /// What their parts are called there: those of `ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps`.
    parts: [&'static str; 3],
    /// The key of `config.json` that says how many there are.
    pub count: &'static str,
    /// Whether the weights of those that see a token add up to one, as llama.cpp computes them.
    pub normalised: bool,
    /// Whether neurons of experts have a number of their own, beside that of networks without experts.
    pub own_inner: bool,
    /// Whether there is one that sees every token.
    pub shared: bool,
}

/// Tensors that hold a part of all experts.
const OF_ALL: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];

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
/// What has no name in families with experts; their networks are in the others.
const ATTENTION: &[Pair] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
];
const ROUTER: &[Pair] = &[("ffn_gate_inp", "mlp.gate")];
const SHARED_EXPERT: &[Pair] = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];
const QWEN_EXPERTS: Experts =
    Experts { block: "mlp.experts", parts: ["gate_proj", "up_proj", "down_proj"], count: "num_experts", normalised: true, own_inner: true, shared: false };
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
    experts: None,
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
    experts: None,
};

/// All families.
pub(crate) const FAMILIES: [Family; 9] = [
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
    Family {
        model_type: "mixtral",
        also: &[],
        class: "MixtralForCausalLM",
        // The name of published files, and that of transformers 5.
        layer: &[ATTENTION, NORM_BEFORE, &[("ffn_gate_inp", "block_sparse_moe.gate")], ROUTER],
        experts: Some(Experts { block: "block_sparse_moe.experts", parts: ["w1", "w3", "w2"], count: "num_local_experts", own_inner: false, ..QWEN_EXPERTS }),
        ..LLAMA
    },
    Family {
        architecture: "qwen2moe",
        model_type: "qwen2_moe",
        also: &[],
        class: "Qwen2MoeForCausalLM",
        layer: &[ATTENTION, NORM_BEFORE, ROUTER, SHARED_EXPERT],
        neighbours: false,
        experts: Some(Experts { normalised: false, shared: true, ..QWEN_EXPERTS }),
        ..LLAMA
    },
    Family {
        architecture: "qwen3moe",
        model_type: "qwen3_moe",
        also: &[],
        class: "Qwen3MoeForCausalLM",
        layer: &[ATTENTION, NORM_BEFORE, HEAD_NORMS, ROUTER],
        neighbours: false,
        own_head_dim: true,
        experts: Some(QWEN_EXPERTS),
        ..LLAMA
    },
];

/// The number of a layer, and the module in it; numbers with zeros in front are none.
fn numbered<'n>(module: &'n str, before: &str) -> Option<(u32, &'n str)> {
    let (number, module) = module.strip_prefix(before)?.split_once('.')?;
    let layer: u32 = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, module))
}

impl Family {
    /// The family of an architecture, whose networks are experts or not.
    pub fn of_architecture(name: &str, experts: bool) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.architecture == name && family.experts.is_some() == experts)
    }

    /// The tensor that holds a part of all experts, and the number of the one that this is; nothing for other names. Both are names in files,
    /// where `blk.7.ffn_up_exps.3.weight` stands for what has no name there.
    pub fn of_all(name: &str) -> Option<(String, usize)> {
        let (module, end) = name.rsplit_once('.')?;
        let (module, number) = module.rsplit_once('.')?;
        let (_, part) = module.rsplit_once('.').filter(|(_, part)| OF_ALL.contains(part))?;
        let expert: usize = number.parse().ok()?;
        (expert.to_string() == number && !part.is_empty()).then(|| (format!("{module}.{end}"), expert))
    }

    /// Whether a tensor of a file holds a part of all experts.
    pub fn holds_all(name: &str) -> bool {
        name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')).is_some_and(|(_, part)| OF_ALL.contains(&part))
    }

    /// The name of a tensor in checkpoints of Hugging Face.
    pub fn to_checkpoint(&self, name: &str) -> Option<String> {
        let (module, end) = name.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        if let Some((_, module)) = WHOLE.iter().find(|(here, _)| *here == module) {
            return Some(format!("{module}.{end}"));
        }
        let (layer, module) = numbered(module, "blk.")?;
        if let (Some(experts), Some((here, expert))) = (&self.experts, module.split_once('.')) {
            let part = OF_ALL.iter().zip(experts.parts).find_map(|(of_all, part)| (*of_all == here).then_some(part))?;
            return Some(format!("model.layers.{layer}.{}.{expert}.{part}.{end}", experts.block));
        }
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
        if let (Some(experts), Some(rest)) = (&self.experts, self.in_experts(module)) {
            let (expert, part) = rest.split_once('.')?;
            let here = OF_ALL.iter().zip(experts.parts).find_map(|(of_all, there)| (part == there).then_some(of_all))?;
            return Some(format!("blk.{layer}.{here}.{expert}.{end}"));
        }
        let (here, _) = self.layer.iter().copied().flatten().find(|(_, there)| *there == module)?;
        Some(format!("blk.{layer}.{here}.{end}"))
    }

    /// What stands behind the module that holds the experts of a layer.
    fn in_experts<'n>(&self, module: &'n str) -> Option<&'n str> {
        let experts = self.experts.as_ref()?;
        [experts.block, QWEN_EXPERTS.block].into_iter().find_map(|block| module.strip_prefix(block)?.strip_prefix('.'))
    }

    /// The tensors of a file whose rows lie in a tensor of a checkpoint that holds a part of all experts, or two parts, one behind the other in
    /// each expert; nothing for other names.
    pub fn fused(&self, name: &str) -> Option<Vec<String>> {
        let (layer, module) = numbered(name.strip_prefix("model.").unwrap_or(name), "layers.")?;
        let parts = match self.in_experts(module)? {
            "gate_up_proj" => OF_ALL.get(..2),
            "down_proj" => OF_ALL.get(2..),
            _ => None,
        };
        Some(parts?.iter().map(|here| format!("blk.{layer}.{here}.weight")).collect())
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
        let [mixtral, .., qwen] = &FAMILIES[6..] else { panic!("families with experts") };
        for (family, here, there) in [
            (mixtral, "blk.3.ffn_up_exps.12.weight", "model.layers.3.block_sparse_moe.experts.12.w3.weight"),
            (mixtral, "blk.3.ffn_gate_inp.weight", "model.layers.3.block_sparse_moe.gate.weight"),
            (qwen, "blk.3.ffn_down_exps.0.weight", "model.layers.3.mlp.experts.0.down_proj.weight"),
        ] {
            assert_eq!((family.to_checkpoint(here).as_deref(), family.to_file(there).as_deref()), (Some(there), Some(here)));
        }
        let fused = |name: &str| mixtral.fused(name).map(|parts| parts.join(" "));
        assert_eq!(fused("model.layers.3.mlp.experts.gate_up_proj").as_deref(), Some("blk.3.ffn_gate_exps.weight blk.3.ffn_up_exps.weight"));
        assert_eq!(fused("model.layers.3.block_sparse_moe.experts.down_proj").as_deref(), Some("blk.3.ffn_down_exps.weight"));
        assert_eq!((fused("model.layers.3.mlp.experts.0.down_proj.weight"), LLAMA.fused("model.layers.3.mlp.experts.down_proj")), (None, None));
        assert_eq!(mixtral.to_file("model.layers.3.mlp.gate.weight").as_deref(), Some("blk.3.ffn_gate_inp.weight"));
        assert_eq!(Family::of_all("blk.3.ffn_up_exps.12.weight"), Some(("blk.3.ffn_up_exps.weight".into(), 12)));
        assert!(Family::of_all("blk.3.ffn_up.weight").is_none() && Family::holds_all("blk.3.ffn_up_exps.weight") && !Family::holds_all("blk.3.ffn_up.weight"));
        assert_eq!(["blk.07.attn_q.weight", "blk.+7.attn_q.weight"].map(|name| LLAMA.to_checkpoint(name)), [None, None]);
    }
}
