//! Layers without attention in GGUF files.

use super::names::{in_layer, split_layer};
use super::{GgufFamily, Pair, Setting};

/// Layers without attention of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recurrent {
    /// None.
    None,
    /// Short convolutions, as in LFM2: layers without key-value heads. The number of neurons is that of the
    /// weights.
    ShortConvolution,
    /// Gated delta networks, of which checkpoints have one projection to queries, keys, values and output
    /// gates, ordered by key head, as in Qwen3-Next.
    JointDelta,
    /// Gated delta networks, whose heads of values are ordered by key head in checkpoints, and in GGUF files
    /// by their number within the key head, as in Qwen3.5.
    TiledDelta,
    /// State space layers of Mamba 2, as in Granite 4: layers without key-value heads.
    StateSpace,
    /// None, but files have the sizes of state space layers, as those of Granite 4 with attention in all
    /// layers.
    UnusedStateSpace,
    /// State space layers of Mamba 2 in models whose layers have one part each, as in Nemotron-H: files have
    /// the numbers of key-value heads and of neurons of each layer, of which at most one is not zero.
    SingleParts,
}

/// Shape of a tensor of a state space layer, which is a vector in checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredShape {
    /// A row for each element.
    Column,
    /// A row for each group of heads.
    Groups,
}

/// Elements of a tensor of a gated delta network that are ordered by value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiling {
    /// Rows after those of queries and keys.
    RowsAfterKeys,
    /// All rows.
    Rows,
    /// A row for each head.
    Heads,
    /// All columns.
    Columns,
}

/// Gated delta networks.
pub(in crate::arch) const DELTA: &[Pair] = &[("ssm_conv1d", "linear_attn.conv1d"), ("ssm_norm", "linear_attn.norm"), ("ssm_out", "linear_attn.out_proj")];
pub(in crate::arch) const DELTA_HEADS: &[Pair] = &[("ssm_a", "linear_attn.A_log"), ("ssm_dt.bias", "linear_attn.dt_bias")];
pub(in crate::arch) const DELTA_SETTINGS: &[Setting] = &[
    Setting::required("ssm.conv_kernel", "linear_conv_kernel_dim", "4"),
    Setting::required("ssm.state_size", "linear_key_head_dim", "128"),
    Setting::required("ssm.group_count", "linear_num_key_heads", "16"),
    Setting::required("ssm.time_step_rank", "linear_num_value_heads", "32"),
    Setting::optional("full_attention_interval", "full_attention_interval", ["4", "4"]),
];

/// State space layers.
pub(in crate::arch) const STATE_SPACE: &[Pair] =
    &[("ssm_in", "mamba.in_proj"), ("ssm_conv1d", "mamba.conv1d"), ("ssm_norm", "mamba.norm"), ("ssm_out", "mamba.out_proj")];
pub(in crate::arch) const STATE_SPACE_HEADS: &[Pair] = &[("ssm_a", "mamba.A_log"), ("ssm_d", "mamba.D"), ("ssm_dt.bias", "mamba.dt_bias")];

/// The projection of [`Recurrent::JointDelta`], and its parts in GGUF files: queries, keys and values, and
/// gates.
const JOINT: (&str, [&str; 2]) = ("linear_attn.in_proj_qkvz.weight", ["attn_qkv.weight", "attn_gate.weight"]);

impl Recurrent {
    /// Whether layers are gated delta networks.
    pub fn is_delta(self) -> bool {
        matches!(self, Recurrent::JointDelta | Recurrent::TiledDelta)
    }

    /// Whether files list the number of key-value heads of each layer.
    pub fn lists_heads(self) -> bool {
        self == Recurrent::ShortConvolution || self.has_state_space_sizes()
    }

    /// Whether files have the sizes of state space layers.
    pub fn has_state_space_sizes(self) -> bool {
        matches!(self, Recurrent::StateSpace | Recurrent::UnusedStateSpace)
    }
}

impl GgufFamily {
    /// Whether models may not specify the number of neurons of dense networks, because all layers have
    /// experts.
    pub fn has_optional_neurons(&self) -> bool {
        self.recurrent.is_delta() && self.experts.is_some()
    }

    /// Whether a GGUF tensor contains the filter of a convolution, without the axis of length one that it has
    /// in checkpoints.
    pub fn is_filter(name: &str) -> bool {
        name.ends_with(".shortconv.conv.weight") || name.ends_with(".ssm_conv1d.weight")
    }

    /// Whether a GGUF tensor contains negated decay rates, of which checkpoints contain the logarithms.
    pub fn is_decay(name: &str) -> bool {
        name.ends_with(".ssm_a")
    }

    /// Whether a GGUF tensor belongs to the router of experts.
    pub fn is_router(name: &str) -> bool {
        name.ends_with(".ffn_gate_inp.weight")
    }

    /// Whether llama.cpp never quantizes a GGUF tensor: routers, filters and norms.
    pub fn is_always_float(name: &str) -> bool {
        name.contains(".ffn_gate_inp") || GgufFamily::is_filter(name) || name.ends_with("_norm.weight")
    }

    /// Whether a layer of the checkpoint has no attention.
    pub fn is_recurrent<'n>(&self, layer: u64, mut names: impl Iterator<Item = &'n String>) -> bool {
        let start = format!("blk.{layer}.");
        self.recurrent != Recurrent::None && names.any(|name| self.to_gguf(name).is_some_and(|name| name.starts_with(&start) && GgufFamily::is_filter(&name)))
    }

    /// The parts of a checkpoint tensor that contains queries, keys, values and output gates of a gated delta
    /// network; `None` for other names.
    pub fn delta_tensors(&self, name: &str) -> Option<Vec<String>> {
        let (joint, parts) = JOINT;
        let (layer, tensor) = in_layer(name).filter(|_| self.recurrent == Recurrent::JointDelta)?;
        (tensor == joint).then(|| parts.iter().map(|part| format!("blk.{layer}.{part}")).collect())
    }

    /// The checkpoint tensor whose parts begin with this GGUF tensor, and the name of the other part.
    pub fn delta_projection(&self, name: &str) -> Option<(String, String)> {
        let (joint, [first, second]) = JOINT;
        let (layer, tensor) = split_layer(name, "blk.").filter(|_| self.recurrent == Recurrent::JointDelta)?;
        (tensor == first).then(|| (self.of_layer(layer, joint), format!("blk.{layer}.{second}")))
    }

    /// The GGUF tensors whose rows a checkpoint tensor concatenates; `None` for other names.
    pub fn concatenated_tensors(&self, name: &str) -> Option<Vec<String>> {
        let (layer, tensor) = in_layer(name)?;
        let (_, parts) = self.concatenated.iter().find(|(whole, _)| *whole == tensor)?;
        Some(parts.iter().map(|part| format!("blk.{layer}.{part}")).collect())
    }

    /// The checkpoint tensor whose rows begin with those of this GGUF tensor, and the name of the other part.
    pub fn concatenation(&self, name: &str) -> Option<(String, String)> {
        let (layer, tensor) = split_layer(name, "blk.")?;
        let (whole, [_, second]) = self.concatenated.iter().find(|(_, [first, _])| *first == tensor)?;
        Some((self.of_layer(layer, whole), format!("blk.{layer}.{second}")))
    }

    /// Whether checkpoints have one tensor for a projection of all experts, like GGUF files.
    pub fn has_stacked_experts(&self) -> bool {
        self.concatenated.iter().any(|(_, parts)| parts.iter().any(|part| GgufFamily::is_fused_tensor(&format!("blk.0.{part}"))))
    }

    /// The shape in which a vector of a checkpoint is stored, if it is not a vector in GGUF files.
    pub fn stored_shape(&self, name: &str) -> Option<StoredShape> {
        let (_, tensor) = split_layer(name, "blk.").filter(|_| matches!(self.recurrent, Recurrent::StateSpace | Recurrent::SingleParts))?;
        match tensor {
            "ssm_a" | "ssm_d" => Some(StoredShape::Column),
            "ssm_norm.weight" => Some(StoredShape::Groups),
            _ => None,
        }
    }

    /// Which elements of a GGUF tensor have another order of value heads than in checkpoints.
    pub fn tiling(&self, name: &str) -> Option<Tiling> {
        let (_, tensor) = split_layer(name, "blk.").filter(|_| self.recurrent == Recurrent::TiledDelta)?;
        match tensor {
            "attn_qkv.weight" | "ssm_conv1d.weight" => Some(Tiling::RowsAfterKeys),
            "attn_gate.weight" => Some(Tiling::Rows),
            "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_a" | "ssm_dt.bias" => Some(Tiling::Heads),
            "ssm_out.weight" => Some(Tiling::Columns),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::GgufTraits;
    use super::*;

    #[test]
    fn tensors_of_recurrent_layers_are_found_by_name() {
        let [next, newer, lfm2] = ["qwen3_next", "qwen3_5_text", "lfm2"].map(|name| crate::arch::family(name).unwrap().gguf.unwrap());
        let joint = "model.layers.2.linear_attn.in_proj_qkvz.weight";
        assert_eq!(next.joined_tensors(joint).unwrap(), ["blk.2.attn_qkv.weight", "blk.2.attn_gate.weight"]);
        assert_eq!(next.delta_projection("blk.2.attn_qkv.weight"), Some((joint.to_owned(), "blk.2.attn_gate.weight".to_owned())));
        assert_eq!((newer.joined_tensors(joint), newer.delta_projection("blk.2.attn_qkv.weight"), next.tiling("blk.2.ssm_a")), (None, None, None));
        assert_eq!(newer.to_gguf("model.layers.2.linear_attn.in_proj_qkv.weight").as_deref(), Some("blk.2.attn_qkv.weight"));
        assert_eq!(
            ["ssm_a", "ssm_out.weight", "ssm_norm.weight"].map(|part| newer.tiling(&format!("blk.2.{part}"))),
            [Some(Tiling::Heads), Some(Tiling::Columns), None]
        );
        let hybrid = crate::arch::family("granitemoehybrid").unwrap().gguf.unwrap();
        let (stacked, dense) = ("model.layers.2.block_sparse_moe.input_linear.weight", "model.layers.2.shared_mlp.input_linear.weight");
        assert_eq!(hybrid.joined_tensors(stacked).unwrap(), ["blk.2.ffn_gate_exps.weight", "blk.2.ffn_up_exps.weight"]);
        let variant = hybrid.without_experts.unwrap();
        assert_eq!(variant.concatenation("blk.2.ffn_gate.weight"), Some((dense.to_owned(), "blk.2.ffn_up.weight".to_owned())));
        assert_eq!((variant.concatenation("blk.2.ffn_up.weight"), hybrid.has_stacked_experts(), variant.has_stacked_experts()), (None, true, false));
        assert_eq!(
            ["ssm_d", "ssm_norm.weight", "ssm_dt.bias"].map(|part| hybrid.stored_shape(&format!("blk.2.{part}"))),
            [Some(StoredShape::Column), Some(StoredShape::Groups), None]
        );
        for experts in [true, false] {
            let traits = GgufTraits { experts, windows: false, scores: 1, state_space: true, shared: true };
            let (model_type, found) = GgufFamily::from_architecture("granitehybrid", traits).unwrap();
            assert_eq!((model_type, found.experts.is_some()), ("granitemoehybrid", experts));
        }
        // Granite 4 with attention in all layers, and Granite 3.
        for (state_space, expected) in [(true, "granitemoehybrid"), (false, "granite")] {
            let traits = GgufTraits { experts: false, windows: false, scores: 1, state_space, shared: state_space };
            assert_eq!(GgufFamily::from_architecture("granite", traits).unwrap().0, expected);
        }
        for (shared, expected) in [(true, "granitemoeshared"), (false, "granitemoe")] {
            let traits = GgufTraits { experts: true, windows: false, scores: 1, state_space: false, shared };
            assert_eq!(GgufFamily::from_architecture("granitemoe", traits).unwrap().0, expected);
        }
        // The names of all tensors of Nemotron-H begin with another prefix, and its experts have no gate.
        for (experts, architecture) in [(true, "nemotron_h_moe"), (false, "nemotron_h")] {
            let traits = GgufTraits { experts, windows: false, scores: 1, state_space: true, shared: experts };
            let (model_type, found) = GgufFamily::from_architecture(architecture, traits).unwrap();
            assert_eq!((model_type, found.experts.is_some(), found.architecture), ("nemotron_h", experts, architecture));
            let (checkpoint, gguf) = ("backbone.layers.2.mixer.in_proj.weight", "blk.2.ssm_in.weight");
            assert_eq!((found.to_gguf(checkpoint).as_deref(), found.to_checkpoint(gguf).as_deref()), (Some(gguf), Some(checkpoint)));
            assert_eq!(found.to_checkpoint("token_embd.weight").as_deref(), Some("backbone.embeddings.weight"));
            assert_eq!((found.to_checkpoint("blk.2.ffn_gate_exps.0.weight"), GgufFamily::layer(checkpoint)), (None, Some(2)));
            assert_eq!(found.stored_shape("blk.2.ssm_norm.weight"), Some(StoredShape::Groups));
        }
        let names =
            ["model.layers.0.self_attn.q_proj.weight", "model.layers.12.conv.conv.weight", "model.layers.3.linear_attn.conv1d.weight"].map(str::to_owned);
        assert_eq!(
            [0, 1, 3, 12].map(|layer| (lfm2.is_recurrent(layer, names.iter()), next.is_recurrent(layer, names.iter()))),
            [(false, false), (false, false), (false, true), (true, false)]
        );
    }
}
