//! Pieces that several families share.

use super::Settings;
use crate::error::{Error, Result};
use crate::ir::ops::{Attention, BatchNorm, Conv, Gelu, LayerNorm, Linear, MergeHeads, Relu, RmsNorm, Silu, Slice, SplitHeads, Tanh};
use crate::ir::{Builder, Dim, Op, TensorType, ValueId};

/// Token ids and mask, `[batch, sequence]`.
pub(super) fn text_inputs(b: &mut Builder) -> Result<(ValueId, ValueId)> {
    let tokens = || TensorType::int([Dim::named("batch"), Dim::named("sequence")]);
    Ok((b.input("input_ids", tokens())?, b.input("attention_mask", tokens())?))
}

/// Images `[batch, channels, height, width]`.
pub(super) fn image_input(b: &mut Builder, channels: usize, height: Dim, width: Dim) -> Result<ValueId> {
    b.input("pixel_values", TensorType::float([Dim::named("batch"), Dim::Fixed(channels), height, width]))
}

/// The activation function of this name in configurations.
pub(super) fn activation(name: &str) -> Result<Op> {
    Ok(match name {
        "gelu" | "gelu_python" => Gelu { tanh: false }.into(),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_accurate" => Gelu { tanh: true }.into(),
        "relu" => Relu {}.into(),
        "silu" | "swish" => Silu {}.into(),
        "tanh" => Tanh {}.into(),
        other => {
            return Err(Error::Unsupported {
                what: format!("activation `{other}`"),
                hint: "known: gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu, silu, swish, tanh".into(),
            });
        }
    })
}

/// `module.weight [out, in]`, and `module.bias` when it is there.
pub(super) fn linear(b: &mut Builder, node: &str, module: &str, x: ValueId, out: usize) -> Result<ValueId> {
    let bias = b.has(&format!("{module}.bias"));
    linear_with(b, node, module, x, out, bias)
}

/// The same, where the configuration says whether there is a bias.
pub(super) fn linear_with(b: &mut Builder, node: &str, module: &str, x: ValueId, out: usize, bias: bool) -> Result<ValueId> {
    let width = b.width(x)?;
    let mut inputs = vec![x, b.param(&format!("{module}.weight"), &[out, width])?];
    if bias {
        inputs.push(b.param(&format!("{module}.bias"), &[out])?);
    }
    b.node(node, Linear { input_major: false }, &inputs)
}

/// A layer without a bias whose weight `[out, in]` is a value.
pub(super) fn linear_of(b: &mut Builder, node: &str, x: ValueId, weight: ValueId) -> Result<ValueId> {
    b.node(node, Linear { input_major: false }, &[x, weight])
}

/// The weight of a language model's head: its own, or the embedding table where none is stored and the configuration does not deny that
/// they are one.
pub(super) fn language_head(s: &Settings, b: &mut Builder, name: &str, table: ValueId) -> Result<ValueId> {
    if !b.has(name) && s.flag_or("tie_word_embeddings", true)? {
        return Ok(table);
    }
    let shape = [s.size("vocab_size")?, b.width(table)?];
    b.param(name, &shape)
}

/// `module.weight` and `module.bias` over the last axis.
pub(super) fn layer_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, epsilon: f64) -> Result<ValueId> {
    let width = b.width(x)?;
    // The first published checkpoints say gamma and beta.
    let [weight, bias] = if b.has(&format!("{module}.gamma")) { ["gamma", "beta"] } else { ["weight", "bias"] };
    let inputs = [x, b.param(&format!("{module}.{weight}"), &[width])?, b.param(&format!("{module}.{bias}"), &[width])?];
    b.node(node, LayerNorm { epsilon }, &inputs)
}

/// `module.weight` over the last axis.
pub(super) fn rms_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, norm: RmsNorm) -> Result<ValueId> {
    let width = b.width(x)?;
    let weight = b.param(&format!("{module}.weight"), &[width])?;
    b.node(node, norm, &[x, weight])
}

/// Parts of the last axis, one behind the other, of these widths.
pub(super) fn slices<const N: usize>(b: &mut Builder, nodes: [String; N], all: ValueId, widths: [usize; N]) -> Result<[ValueId; N]> {
    let (mut found, mut start) = ([all; N], 0usize);
    for ((value, node), width) in found.iter_mut().zip(&nodes).zip(widths) {
        *value = b.node(node, Slice::of_last(start, width), &[all])?;
        start = start.saturating_add(width);
    }
    Ok(found)
}

/// Heads, attention, and back; `q`, `k` and `v` are `[batch, sequence, heads · head_dim]`.
pub(super) fn attend(b: &mut Builder, node: &str, [q, k, v]: [ValueId; 3], head_dim: usize, mask: Option<ValueId>, causal: bool) -> Result<ValueId> {
    let mut heads = Vec::with_capacity(4);
    for (part, value) in [("query", q), ("key", k), ("value", v)] {
        heads.push(b.node(&format!("{node}.{part}_heads"), SplitHeads { head_dim }, &[value])?);
    }
    heads.extend(mask);
    let scale = 1.0 / (head_dim as f64).sqrt();
    let context = b.node(&format!("{node}.context_heads"), Attention { scale, causal, ..Attention::default() }, &heads)?;
    b.node(&format!("{node}.context"), MergeHeads {}, &[context])
}

/// A convolution and its normalisation, which share a node name.
pub(super) struct ConvNorm<'a> {
    /// Module of the convolution.
    pub conv: &'a str,
    /// Module of the normalisation.
    pub norm: &'a str,
    /// Channels out.
    pub out: usize,
    /// Side of the window.
    pub kernel: usize,
    /// Step.
    pub stride: usize,
    /// Groups.
    pub groups: usize,
}

impl ConvNorm<'_> {
    /// Adds both; the image keeps its size but for the stride.
    pub(super) fn add(&self, b: &mut Builder, x: ValueId) -> Result<ValueId> {
        let channels = b.ty(x).shape.get(1).and_then(Dim::fixed).and_then(|all| all.checked_div(self.groups)).unwrap_or(0);
        let weight = b.param(&format!("{}.weight", self.conv), &[self.out, channels, self.kernel, self.kernel])?;
        let op = Conv { stride: self.stride.into(), padding: (self.kernel / 2).into(), groups: self.groups, ..Conv::default() };
        let y = b.node(self.conv, op, &[x, weight])?;
        batch_norm(b, self.norm, y, self.out)
    }
}

/// `module.{weight,bias,running_mean,running_var}` over axis 1.
pub(super) fn batch_norm(b: &mut Builder, module: &str, x: ValueId, channels: usize) -> Result<ValueId> {
    let mut inputs = vec![x];
    for part in ["weight", "bias", "running_mean", "running_var"] {
        inputs.push(b.param(&format!("{module}.{part}"), &[channels])?);
    }
    b.node(module, BatchNorm { epsilon: 1e-5, batch: false }, &inputs)
}
