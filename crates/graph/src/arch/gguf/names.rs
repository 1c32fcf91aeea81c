//! Conversion of tensor names between GGUF files and checkpoints.

use super::super::families;
use super::{EXPERT_SCORES, FUSED, GgufFamily, GgufTraits, LATENT, QWEN_EXPERTS, SHARED_NEURONS, Windows};

/// Names of checkpoints may begin with one of these.
const PREFIXES: [&str; 2] = ["model.", "backbone."];

fn without_prefix(name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// Splits the name of a checkpoint tensor into layer number and name within the layer.
pub(super) fn in_layer(name: &str) -> Option<(u32, &str)> {
    split_layer(without_prefix(name), "layers.")
}

/// Splits a name into layer number and module; numbers with leading zeros are rejected.
pub(super) fn split_layer<'n>(module: &'n str, prefix: &str) -> Option<(u32, &'n str)> {
    let (number, module) = module.strip_prefix(prefix)?.split_once('.')?;
    let layer: u32 = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, module))
}

impl GgufFamily {
    /// The `model_type` and the names of an architecture, with or without experts. If several families
    /// remain, they differ in the other traits.
    pub fn from_architecture(name: &str, traits: GgufTraits) -> Option<(&'static str, &'static GgufFamily)> {
        let GgufTraits { experts, windows, scores, state_space, shared } = traits;
        let dense = |gguf: &'static GgufFamily| [Some(gguf), gguf.without_experts].into_iter().flatten();
        let variants = move |gguf| dense(gguf).flat_map(|gguf| [Some(gguf), gguf.without_recurrent].into_iter().flatten());
        let families = families().filter_map(|family| Some((family.model_type, family.gguf?)));
        let families = families.flat_map(|(model_type, gguf)| variants(gguf).map(move |gguf| (model_type, gguf)));
        let mut families = families.filter(|(_, gguf)| gguf.architecture == name && gguf.experts.is_some() == experts);
        let first = families.next()?;
        let own_scores = |gguf: &GgufFamily| gguf.constants.iter().find(|(key, _)| *key == EXPERT_SCORES).map_or(scores, |(_, value)| *value);
        let has = |gguf: &GgufFamily, key: &str| gguf.settings.iter().any(|setting| setting.gguf == key);
        let is_shared = |gguf: &GgufFamily| has(gguf, SHARED_NEURONS) || gguf.experts.is_some_and(|experts| experts.shared);
        let is_same = |(_, gguf): &(&'static str, &'static GgufFamily)| {
            (gguf.windows != Windows::None) == windows && own_scores(gguf) == scores && has(gguf, "ssm.conv_kernel") == state_space && is_shared(gguf) == shared
        };
        Some(if is_same(&first) { first } else { families.find(is_same).unwrap_or(first) })
    }

    /// The supported architectures, for messages.
    pub fn architectures() -> String {
        let mut names: Vec<&str> = families().filter_map(|family| Some(family.gguf?.architecture)).collect();
        names.dedup();
        names.join(", ")
    }

    /// The supported values of `model_type`, for messages.
    pub fn model_types() -> String {
        families().filter(|family| family.gguf.is_some()).map(|family| family.model_type).collect::<Vec<_>>().join(", ")
    }

    /// Number of the layer of a checkpoint tensor.
    pub fn layer(name: &str) -> Option<u32> {
        in_layer(name).map(|(layer, _)| layer)
    }

    /// The name of a checkpoint tensor of a layer.
    pub(super) fn of_layer(&self, layer: u32, tensor: &str) -> String {
        format!("{}layers.{layer}.{tensor}", self.prefix)
    }

    /// Splits the name of a single expert's tensor, such as `blk.7.ffn_up_exps.3.weight`, into the name
    /// of the fused GGUF tensor and the number of the expert; `None` for other names.
    pub fn split_expert(name: &str) -> Option<(String, usize)> {
        let (module, end) = name.rsplit_once('.')?;
        let (module, number) = module.rsplit_once('.')?;
        let (_, part) = module.rsplit_once('.').filter(|(_, part)| FUSED.contains(part))?;
        let expert: usize = number.parse().ok()?;
        (expert.to_string() == number && !part.is_empty()).then(|| (format!("{module}.{end}"), expert))
    }

    /// Whether a GGUF tensor contains one projection of all experts.
    pub fn is_fused_tensor(name: &str) -> bool {
        name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')).is_some_and(|(_, part)| FUSED.contains(&part))
    }

    /// The checkpoint name of a GGUF tensor.
    pub fn to_checkpoint(&self, name: &str) -> Option<String> {
        if let Some((layer, tensor)) = split_layer(name, "blk.")
            && let Some((_, tensor)) = self.tensors.iter().find(|(gguf, _)| *gguf == tensor)
        {
            return Some(self.of_layer(layer, tensor));
        }
        let (module, end) = name.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        if let Some((_, module)) = self.global.iter().find(|(gguf, _)| *gguf == module) {
            return Some(format!("{module}.{end}"));
        }
        let (layer, module) = split_layer(module, "blk.")?;
        if let (Some(experts), Some((fused, expert))) = (&self.experts, module.split_once('.')) {
            let part = FUSED.iter().zip(experts.parts).find_map(|(name, part)| (*name == fused && !part.is_empty()).then_some(part))?;
            return Some(self.of_layer(layer, &format!("{}.{expert}.{part}.{end}", experts.block)));
        }
        let (_, module) = self.layer.iter().copied().flatten().find(|(gguf, _)| *gguf == module)?;
        Some(self.of_layer(layer, &format!("{module}.{end}")))
    }

    /// The GGUF name of a checkpoint tensor.
    pub fn to_gguf(&self, name: &str) -> Option<String> {
        let name = without_prefix(name);
        if let Some((layer, tensor)) = split_layer(name, "layers.")
            && let Some((gguf, _)) = self.tensors.iter().find(|(_, name)| *name == tensor)
        {
            return Some(format!("blk.{layer}.{gguf}"));
        }
        let (module, end) = name.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        if let Some((gguf, _)) = self.global.iter().find(|(_, name)| without_prefix(name) == module) {
            return Some(format!("{gguf}.{end}"));
        }
        let (layer, module) = split_layer(module, "layers.")?;
        if let (Some(experts), Some(rest)) = (&self.experts, self.strip_experts_module(module)) {
            let (expert, part) = rest.split_once('.')?;
            let fused = FUSED.iter().zip(experts.parts).find_map(|(fused, name)| (part == name).then_some(fused))?;
            return Some(format!("blk.{layer}.{fused}.{expert}.{end}"));
        }
        let (gguf, _) = self.layer.iter().copied().flatten().find(|(_, name)| *name == module)?;
        Some(format!("blk.{layer}.{gguf}.{end}"))
    }

    /// The name relative to the module that contains the experts of a layer.
    fn strip_experts_module<'n>(&self, module: &'n str) -> Option<&'n str> {
        let experts = self.experts.as_ref()?;
        [experts.block, QWEN_EXPERTS.block].into_iter().find_map(|block| module.strip_prefix(block)?.strip_prefix('.'))
    }

    /// The GGUF tensors with the rows of a checkpoint tensor that contains one projection of all
    /// experts, or two that are concatenated in each expert; `None` for other names.
    pub fn fused_tensors(&self, name: &str) -> Option<Vec<String>> {
        let (layer, module) = in_layer(name)?;
        let rest = self.strip_experts_module(module)?;
        let (part, end) = match rest.strip_suffix("_bias") {
            Some(part) if self.experts.is_some_and(|experts| experts.is_input_major) => (part, "bias"),
            _ => (rest, "weight"),
        };
        let parts = match part {
            "gate_up_proj" => FUSED.get(..2),
            "down_proj" => FUSED.get(2..),
            _ => None,
        };
        Some(parts?.iter().map(|fused| format!("blk.{layer}.{fused}.{end}")).collect())
    }

    /// Whether a checkpoint tensor contains one projection of all experts as `[experts, in, out]`, or its
    /// bias.
    pub fn is_input_major(&self, name: &str) -> bool {
        self.experts.is_some_and(|experts| experts.is_input_major) && self.fused_tensors(name).is_some()
    }

    /// The checkpoint tensor `[experts, in, out]` with the outputs of a GGUF tensor of all experts, and the
    /// position of the first of these outputs.
    fn input_major(&self, name: &str) -> Option<(String, usize)> {
        let experts = self.experts.filter(|experts| experts.is_input_major)?;
        let (layer, module) = split_layer(name, "blk.")?;
        let (fused, end) = module.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end))?;
        let position = FUSED.iter().position(|name| *name == fused)?;
        let (part, first) = if position == 2 { ("down_proj", 0) } else { ("gate_up_proj", position) };
        let end = if end == "bias" { "_bias" } else { "" };
        Some((self.of_layer(layer, &format!("{}.{part}{end}", experts.block)), first))
    }

    /// The GGUF tensors with the keys and the values of a projection of latent vectors; `None` for other
    /// names.
    pub fn latent_tensors(&self, name: &str) -> Option<Vec<String>> {
        let (layer, module) = in_layer(name).filter(|_| self.is_latent)?;
        let (parts, latent) = LATENT;
        (module.strip_suffix(".weight") == Some(latent)).then(|| parts.iter().map(|part| format!("blk.{layer}.{part}.weight")).collect())
    }

    /// Whether a GGUF tensor contains the keys or the values of a projection of latent vectors.
    pub fn is_latent_part(name: &str) -> bool {
        let (parts, _) = LATENT;
        name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')).is_some_and(|(_, part)| parts.contains(&part))
    }

    /// The GGUF tensors that are joined to a checkpoint tensor when a file is opened; `None` for other names.
    pub fn joined_tensors(&self, name: &str) -> Option<Vec<String>> {
        self.latent_tensors(name)
            .or_else(|| self.delta_tensors(name))
            .or_else(|| self.concatenated_tensors(name))
            .or_else(|| self.fused_tensors(name).filter(|_| self.is_input_major(name)))
    }

    /// The checkpoint tensor to which a GGUF tensor is joined, and its position among the joined ones.
    pub fn joined_name(&self, name: &str) -> Option<(String, usize)> {
        let (layer, module) = split_layer(name, "blk.")?;
        let (parts, latent) = LATENT;
        let position = parts.iter().position(|part| module.strip_suffix(".weight") == Some(*part)).filter(|_| self.is_latent);
        position.map(|position| (self.of_layer(layer, &format!("{latent}.weight")), position)).or_else(|| self.input_major(name))
    }

    /// Whether a checkpoint tensor is the weight of a normalization layer, other than those of gated delta
    /// networks, which multiply by the weight itself in all families.
    pub fn is_norm(name: &str) -> bool {
        name.strip_suffix(".weight").is_some_and(|module| module.ends_with("norm") && !module.ends_with("linear_attn.norm"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GgufFamily, LLAMA};

    #[test]
    fn names_are_converted_in_both_directions() {
        assert_eq!(LLAMA.to_checkpoint("blk.7.attn_q.weight").as_deref(), Some("model.layers.7.self_attn.q_proj.weight"));
        assert_eq!(LLAMA.to_gguf("model.layers.7.mlp.up_proj.weight").as_deref(), Some("blk.7.ffn_up.weight"));
        let [mixtral, qwen] = ["mixtral", "qwen3_moe"].map(|name| crate::arch::family(name).unwrap().gguf.unwrap());
        for (family, gguf, checkpoint) in [
            (mixtral, "blk.3.ffn_up_exps.12.weight", "model.layers.3.block_sparse_moe.experts.12.w3.weight"),
            (mixtral, "blk.3.ffn_gate_inp.weight", "model.layers.3.block_sparse_moe.gate.weight"),
            (qwen, "blk.3.ffn_down_exps.0.weight", "model.layers.3.mlp.experts.0.down_proj.weight"),
        ] {
            assert_eq!((family.to_checkpoint(gguf).as_deref(), family.to_gguf(checkpoint).as_deref()), (Some(checkpoint), Some(gguf)));
        }
        let fused = |name: &str| mixtral.fused_tensors(name).map(|parts| parts.join(" "));
        assert_eq!(fused("model.layers.3.mlp.experts.gate_up_proj").as_deref(), Some("blk.3.ffn_gate_exps.weight blk.3.ffn_up_exps.weight"));
        assert_eq!(fused("model.layers.3.block_sparse_moe.experts.down_proj").as_deref(), Some("blk.3.ffn_down_exps.weight"));
        assert_eq!((fused("model.layers.3.mlp.experts.0.down_proj.weight"), LLAMA.fused_tensors("model.layers.3.mlp.experts.down_proj")), (None, None));
        assert_eq!(mixtral.to_gguf("model.layers.3.mlp.gate.weight").as_deref(), Some("blk.3.ffn_gate_inp.weight"));
        assert_eq!(GgufFamily::split_expert("blk.3.ffn_up_exps.12.weight"), Some(("blk.3.ffn_up_exps.weight".into(), 12)));
        assert!(
            GgufFamily::split_expert("blk.3.ffn_up.weight").is_none()
                && GgufFamily::is_fused_tensor("blk.3.ffn_up_exps.weight")
                && !GgufFamily::is_fused_tensor("blk.3.ffn_up.weight")
        );
        let [deepseek, gpt_oss] = ["deepseek_v3", "gpt_oss"].map(|name| crate::arch::family(name).unwrap().gguf.unwrap());
        for (family, checkpoint, parts) in [
            (deepseek, "model.layers.3.self_attn.kv_b_proj.weight", ["blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight"]),
            (gpt_oss, "model.layers.3.mlp.experts.gate_up_proj_bias", ["blk.3.ffn_gate_exps.bias", "blk.3.ffn_up_exps.bias"]),
        ] {
            assert_eq!(family.joined_tensors(checkpoint).unwrap(), parts);
            let back = parts.map(|part| family.joined_name(part).unwrap());
            assert_eq!(back, [(checkpoint.to_owned(), 0), (checkpoint.to_owned(), 1)]);
        }
        assert_eq!((deepseek.joined_name("blk.3.ffn_up_exps.weight"), LLAMA.joined_name("blk.3.attn_k_b.weight")), (None, None));
        assert_eq!(["blk.07.attn_q.weight", "blk.+7.attn_q.weight"].map(|name| LLAMA.to_checkpoint(name)), [None, None]);
    }
}
