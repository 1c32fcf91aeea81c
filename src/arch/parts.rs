//! Pieces that several families share.

use super::Settings;
use crate::error::{Error, Result};
use crate::ir::ops::{
    Attention, BatchNorm, Conv, Gelu, GlobalAveragePool, HardSwish, LayerNorm, Linear, MergeHeads, Mul, Padding, Relu, RmsNorm, Scale, Sigmoid, Silu, Slice,
    SplitHeads, Tanh,
};
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
fn activation(name: &str) -> Result<Op> {
    Ok(match name {
        "gelu" | "gelu_python" => Gelu { tanh: false }.into(),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_accurate" => Gelu { tanh: true }.into(),
        "hardswish" => HardSwish {}.into(),
        "relu" => Relu {}.into(),
        "silu" | "swish" => Silu {}.into(),
        "tanh" => Tanh {}.into(),
        other => {
            return Err(Error::Unsupported {
                what: format!("activation `{other}`"),
                hint: "known: gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, hardswish, relu, silu, swish, tanh".into(),
            });
        }
    })
}

/// The function of this name, also where it takes several ops.
pub(super) fn activate(b: &mut Builder, node: &str, name: &str, x: ValueId) -> Result<ValueId> {
    if name != "quick_gelu" {
        return b.node(node, activation(name)?, &[x]);
    }
    let steep = b.node(&format!("{node}.steep"), Scale { factor: 1.702 }, &[x])?;
    let gate = b.node(&format!("{node}.gate"), Sigmoid {}, &[steep])?;
    b.node(node, Mul {}, &[x, gate])
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

/// Whether the head that the class has, which begins with this module, is one of the checkpoint: folders of sentence-transformers often name
/// the class that an encoder was trained in, and hold the encoder alone, without the prefix that it has in that class.
pub(super) fn has_head(b: &Builder, prefix: &str, module: &str) -> bool {
    !prefix.is_empty() || b.has(&format!("{module}.weight"))
}

/// The weight of a language model's head: its own, or the embedding table where none is stored and the configuration does not deny that
/// they are one. What is stored counts before what is said, as in transformers 5.
pub(super) fn language_head(s: &Settings, b: &mut Builder, name: &str, table: ValueId) -> Result<ValueId> {
    if !b.stores(name) && s.flag_or("tie_word_embeddings", true)? {
        return Ok(table);
    }
    let shape = [s.size("vocab_size")?, b.width(table)?];
    b.param(name, &shape)
}

/// `module.weight` and `module.bias` over the last axis.
pub(super) fn layer_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, epsilon: f64) -> Result<ValueId> {
    layer_norm_with(b, node, module, x, epsilon, true)
}

/// The same, where the configuration says whether there is a bias.
pub(super) fn layer_norm_with(b: &mut Builder, node: &str, module: &str, x: ValueId, epsilon: f64, with_bias: bool) -> Result<ValueId> {
    let width = b.width(x)?;
    // The first published checkpoints say gamma and beta.
    let [weight, bias] = if b.stores(&format!("{module}.gamma")) { ["gamma", "beta"] } else { ["weight", "bias"] };
    let mut inputs = vec![x, b.param(&format!("{module}.{weight}"), &[width])?];
    if with_bias {
        inputs.push(b.param(&format!("{module}.{bias}"), &[width])?);
    }
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

/// Heads, attention, and back; `q`, `k` and `v` are `[batch, sequence, heads · head_dim]`. The factor on products is divided by the root of the
/// width of heads; `extras` are a mask and a bias.
pub(super) fn attend(b: &mut Builder, node: &str, qkv: [ValueId; 3], head_dim: usize, attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
    let heads = split_heads(b, node, qkv, head_dim)?;
    attend_heads(b, node, heads, head_dim, attention, extras)
}

/// Heads of queries, keys and values.
pub(super) fn split_heads(b: &mut Builder, node: &str, mut qkv: [ValueId; 3], head_dim: usize) -> Result<[ValueId; 3]> {
    for (part, value) in ["query", "key", "value"].into_iter().zip(&mut qkv) {
        *value = b.node(&format!("{node}.{part}_heads"), SplitHeads { head_dim }, &[*value])?;
    }
    Ok(qkv)
}

/// Attention of heads, and back.
pub(super) fn attend_heads(b: &mut Builder, node: &str, heads: [ValueId; 3], head_dim: usize, attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
    let scale = attention.scale / (head_dim as f64).sqrt();
    let context = b.node(&format!("{node}.context_heads"), Attention { scale, ..attention }, &[&heads, extras].concat())?;
    b.node(&format!("{node}.context"), MergeHeads {}, &[context])
}

/// A convolution and its normalisation.
#[derive(Default)]
pub(super) struct ConvNorm<'a> {
    /// Module of the convolution.
    pub conv: &'a str,
    /// Module of the normalisation.
    pub norm: &'a str,
    /// Names of their nodes, where those are not the modules'.
    pub nodes: Option<[&'a str; 2]>,
    /// Channels out.
    pub out: usize,
    /// Side of the window, and the step; nothing is one.
    pub kernel: usize,
    /// Step; nothing is one.
    pub stride: usize,
    /// Groups; nothing is one.
    pub groups: usize,
    /// Zeros around the image; by default as many that it keeps its size but for the stride.
    pub padding: Option<Padding>,
    /// Number added to variances; nothing is that of PyTorch.
    pub epsilon: f64,
}

impl ConvNorm<'_> {
    /// Adds both.
    pub(super) fn add(&self, b: &mut Builder, x: ValueId) -> Result<ValueId> {
        let (kernel, groups) = (self.kernel.max(1), self.groups.max(1));
        let channels = b.ty(x).shape.get(1).and_then(Dim::fixed).and_then(|all| all.checked_div(groups)).unwrap_or(0);
        let weight = b.param(&format!("{}.weight", self.conv), &[self.out, channels, kernel, kernel])?;
        let padding = self.padding.unwrap_or_else(|| (kernel / 2).into());
        let op = Conv { stride: self.stride.max(1).into(), padding, groups, ..Conv::default() };
        let [conv, norm] = self.nodes.unwrap_or([self.conv, self.norm]);
        let y = b.node(conv, op, &[x, weight])?;
        batch_norm(b, norm, self.norm, y, self.out, self.epsilon)
    }
}

/// `module.{weight,bias,running_mean,running_var}` over axis 1.
fn batch_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, channels: usize, epsilon: f64) -> Result<ValueId> {
    let mut inputs = vec![x];
    for part in ["weight", "bias", "running_mean", "running_var"] {
        inputs.push(b.param(&format!("{module}.{part}"), &[channels])?);
    }
    b.node(node, BatchNorm { epsilon: if epsilon > 0.0 { epsilon } else { 1e-5 }, batch: false }, &inputs)
}

/// Factors on channels, found from the mean of each by two small layers (Hu et al., 2018): names of the node and the module, names of the
/// layers, what stands between them and the function that makes factors.
pub(super) fn squeeze_excite(
    b: &mut Builder,
    [node, module]: [&str; 2],
    [reduce, expand]: [&str; 2],
    x: ValueId,
    narrow: usize,
    function: &str,
    gate: Op,
) -> Result<ValueId> {
    let wide = b.ty(x).shape.get(1).and_then(Dim::fixed).unwrap_or(0);
    let conv = |b: &mut Builder, part: &str, x: ValueId, [out, read]: [usize; 2]| {
        let inputs = [x, b.param(&format!("{module}.{part}.weight"), &[out, read, 1, 1])?, b.param(&format!("{module}.{part}.bias"), &[out])?];
        b.node(&format!("{node}.{part}"), Conv::default(), &inputs)
    };
    let mean = b.node(&format!("{node}.squeeze"), GlobalAveragePool { keep: true }, &[x])?;
    let few = conv(b, reduce, mean, [narrow, wide])?;
    let few = activate(b, &format!("{node}.act"), function, few)?;
    let factors = conv(b, expand, few, [wide, narrow])?;
    let factors = b.node(&format!("{node}.gate"), gate, &[factors])?;
    b.node(node, Mul {}, &[x, factors])
}
