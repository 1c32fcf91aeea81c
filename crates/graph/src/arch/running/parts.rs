//! Building blocks shared by several families.

use super::Settings;
use crate::error::{Error, Result};
use crate::ir::ops::{
    Attention, BatchNorm, Conv, Gelu, GlobalAveragePool, HardSwish, LayerNorm, Linear, MergeHeads, Mul, Padding, Power, Relu, RmsNorm, Scale, Sigmoid, Silu,
    Slice, SplitHeads, Tanh,
};
use crate::ir::{Builder, Dim, Op, TensorType, ValueId};

/// Adds the inputs of token ids and attention mask, `[batch, sequence]`.
pub fn text_inputs(b: &mut Builder) -> Result<(ValueId, ValueId)> {
    let tokens = || TensorType::int([Dim::named("batch"), Dim::named("sequence")]);
    Ok((b.input("input_ids", tokens())?, b.input("attention_mask", tokens())?))
}

/// Adds the input of images `[batch, channels, height, width]`.
pub fn image_input(b: &mut Builder, channels: usize, height: Dim, width: Dim) -> Result<ValueId> {
    b.input("pixel_values", TensorType::float([Dim::named("batch"), Dim::Fixed(channels), height, width]))
}

/// The activation op with this name in configurations.
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
                hint: "supported: gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, hardswish, relu, relu2, silu, swish, tanh".into(),
            });
        }
    })
}

/// Adds the activation function with this name, which may need several ops.
pub fn activate(b: &mut Builder, node: &str, name: &str, x: ValueId) -> Result<ValueId> {
    match name {
        "quick_gelu" => swish(b, node, 1.702, x),
        "relu2" => {
            let positive = b.node(&format!("{node}.positive"), Relu {}, &[x])?;
            b.node(node, Power { exponent: 2.0 }, &[positive])
        }
        _ => b.node(node, activation(name)?, &[x]),
    }
}

/// Adds `x · sigmoid(slope · x)`.
pub fn swish(b: &mut Builder, node: &str, slope: f64, x: ValueId) -> Result<ValueId> {
    let steep = b.node(&format!("{node}.steep"), Scale { factor: slope }, &[x])?;
    let gate = b.node(&format!("{node}.gate"), Sigmoid {}, &[steep])?;
    b.node(node, Mul {}, &[x, gate])
}

/// A linear layer with `module.weight [out, in]`, and `module.bias` if the checkpoint has it.
pub fn linear(b: &mut Builder, node: &str, module: &str, x: ValueId, out: usize) -> Result<ValueId> {
    let bias = b.has(&format!("{module}.bias"));
    linear_with(b, node, module, x, out, bias)
}

/// A linear layer with or without a bias, as the configuration specifies.
pub fn linear_with(b: &mut Builder, node: &str, module: &str, x: ValueId, out: usize, bias: bool) -> Result<ValueId> {
    let width = b.width(x)?;
    let mut inputs = vec![x, b.param(&format!("{module}.weight"), &[out, width])?];
    if bias {
        inputs.push(b.param(&format!("{module}.bias"), &[out])?);
    }
    b.node(node, Linear { input_major: false }, &inputs)
}

/// A linear layer without a bias whose weight `[out, in]` is an existing value.
pub fn linear_of(b: &mut Builder, node: &str, x: ValueId, weight: ValueId) -> Result<ValueId> {
    b.node(node, Linear { input_major: false }, &[x, weight])
}

/// Whether the checkpoint contains the head of the model class, which starts with `module`. Folders of
/// sentence-transformers often name the class that an encoder was trained in, but contain only the
/// encoder, without the prefix of that class.
pub fn has_head(b: &Builder, prefix: &str, module: &str) -> bool {
    !prefix.is_empty() || b.has(&format!("{module}.weight"))
}

/// The weight of a language-model head: a stored tensor, or the embedding table if none is stored and the
/// configuration does not disable tied embeddings. As in transformers 5, a stored tensor takes precedence
/// over the configuration, and `tie_embedding`, a key of LFM2, over `tie_word_embeddings`.
pub fn language_head(s: &Settings, b: &mut Builder, name: &str, table: ValueId) -> Result<ValueId> {
    if !b.stores(name) && s.flag_or("tie_embedding", s.ties_head()?)? {
        return Ok(table);
    }
    let shape = [s.size("vocab_size")?, b.width(table)?];
    b.param(name, &shape)
}

/// Layer normalization over the last axis with `module.weight` and `module.bias`.
pub fn layer_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, epsilon: f64) -> Result<ValueId> {
    layer_norm_with(b, node, module, x, epsilon, true)
}

/// Layer normalization with or without a bias, as the configuration specifies.
pub fn layer_norm_with(b: &mut Builder, node: &str, module: &str, x: ValueId, epsilon: f64, with_bias: bool) -> Result<ValueId> {
    let width = b.width(x)?;
    // The first published checkpoints use the names gamma and beta.
    let [weight, bias] = if b.stores(&format!("{module}.gamma")) { ["gamma", "beta"] } else { ["weight", "bias"] };
    let mut inputs = vec![x, b.param(&format!("{module}.{weight}"), &[width])?];
    if with_bias {
        inputs.push(b.param(&format!("{module}.{bias}"), &[width])?);
    }
    b.node(node, LayerNorm { epsilon }, &inputs)
}

/// RMS normalization over the last axis with `module.weight`.
pub fn rms_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, norm: RmsNorm) -> Result<ValueId> {
    let width = b.width(x)?;
    let weight = b.param(&format!("{module}.weight"), &[width])?;
    b.node(node, norm, &[x, weight])
}

/// Splits the last axis into parts of these widths.
pub fn slices<const N: usize>(b: &mut Builder, nodes: [String; N], all: ValueId, widths: [usize; N]) -> Result<[ValueId; N]> {
    let (mut found, mut start) = ([all; N], 0usize);
    for ((value, node), width) in found.iter_mut().zip(&nodes).zip(widths) {
        *value = b.node(node, Slice::last_axis(start, width), &[all])?;
        start = start.saturating_add(width);
    }
    Ok(found)
}

/// Multi-head attention of `q`, `k` and `v`, `[batch, sequence, heads · head_dim]`. The scale of
/// `attention` is divided by the square root of the head width; `extras` are the mask and the bias.
pub fn attend(b: &mut Builder, node: &str, qkv: [ValueId; 3], head_dim: usize, attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
    let heads = split_heads(b, node, qkv, head_dim)?;
    attend_heads(b, node, heads, head_dim, attention, extras)
}

/// Splits queries, keys and values into heads.
pub fn split_heads(b: &mut Builder, node: &str, mut qkv: [ValueId; 3], head_dim: usize) -> Result<[ValueId; 3]> {
    for (part, value) in ["query", "key", "value"].into_iter().zip(&mut qkv) {
        *value = b.node(&format!("{node}.{part}_heads"), SplitHeads { head_dim }, &[*value])?;
    }
    Ok(qkv)
}

/// Attention of heads, with the merged result.
pub fn attend_heads(b: &mut Builder, node: &str, heads: [ValueId; 3], head_dim: usize, attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
    let scale = attention.scale / (head_dim as f64).sqrt();
    let context = b.node(&format!("{node}.context_heads"), Attention { scale, ..attention }, &[&heads, extras].concat())?;
    b.node(&format!("{node}.context"), MergeHeads {}, &[context])
}

/// A convolution followed by batch normalization.
#[derive(Default)]
pub struct ConvNorm<'a> {
    /// Module of the convolution.
    pub conv: &'a str,
    /// Module of the normalization.
    pub norm: &'a str,
    /// Names of the nodes, if they differ from the modules.
    pub nodes: Option<[&'a str; 2]>,
    /// Number of output channels.
    pub out: usize,
    /// Kernel size; 0 means 1.
    pub kernel: usize,
    /// Stride; 0 means 1.
    pub stride: usize,
    /// Number of groups; 0 means 1.
    pub groups: usize,
    /// Padding; by default that for an unchanged size with stride 1.
    pub padding: Option<Padding>,
    /// Epsilon of the normalization; 0 means PyTorch's default.
    pub epsilon: f64,
}

impl ConvNorm<'_> {
    /// Adds both nodes.
    pub fn add(&self, b: &mut Builder, x: ValueId) -> Result<ValueId> {
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

/// Batch normalization over axis 1 with `module.{weight,bias,running_mean,running_var}`.
fn batch_norm(b: &mut Builder, node: &str, module: &str, x: ValueId, channels: usize, epsilon: f64) -> Result<ValueId> {
    let mut inputs = vec![x];
    for part in ["weight", "bias", "running_mean", "running_var"] {
        inputs.push(b.param(&format!("{module}.{part}"), &[channels])?);
    }
    b.node(node, BatchNorm { epsilon: if epsilon > 0.0 { epsilon } else { 1e-5 }, batch: false }, &inputs)
}

/// Squeeze-and-excitation (Hu et al., 2018): factors on channels, computed by two layers from the mean of
/// each channel. Takes the names of node and module, the names of the layers, the number of hidden
/// channels, the activation between the layers and the gate.
pub fn squeeze_excite(
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
    let mean = b.node(&format!("{node}.squeeze"), GlobalAveragePool { keep_dims: true }, &[x])?;
    let few = conv(b, reduce, mean, [narrow, wide])?;
    let few = activate(b, &format!("{node}.act"), function, few)?;
    let factors = conv(b, expand, few, [wide, narrow])?;
    let factors = b.node(&format!("{node}.gate"), gate, &[factors])?;
    b.node(node, Mul {}, &[x, factors])
}
