//! MobileNetV2 with the tensor names of torchvision (Sandler et al., 2018).
//!
//! torchvision's checkpoints have no configuration. The minimal one is `{ "model_type": "torchvision",
//! "variant": "mobilenet_v2" }`, with optional `inverted_residual_setting` (expansion, channels, repeats
//! and stride of each group of blocks, of which only the last two are read: channels are those of the
//! weights) and `num_classes`.

use super::Settings;
use super::parts::{ConvNorm, image_input, linear};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Clip, GlobalAveragePool};
use crate::ir::{Builder, Dim, Op, ValueId};

const RELU6: Clip = Clip { min: 0.0, max: 6.0 };

pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let groups = groups(s)?;
    let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
    let mut x = step(b, "features.0", pixels, 2, false)?;
    let mut block = 1usize;
    for (repeat, stride) in groups {
        for index in 0..repeat {
            x = inverted_residual(b, &format!("features.{block}.conv"), x, if index == 0 { stride } else { 1 })?;
            block = block.saturating_add(1);
        }
    }
    x = step(b, &format!("features.{block}"), x, 1, false)?;
    let pooled = b.node("pool", GlobalAveragePool::default(), &[x])?;
    let logits = linear(b, "classifier", "classifier.1", pooled, s.classes()?)?;
    b.output("logits", logits);
    Ok(())
}

/// Repeats and stride of each group of blocks.
fn groups(s: &Settings) -> Result<Vec<(usize, usize)>> {
    let Some(setting) = s.get("inverted_residual_setting") else {
        return Ok(vec![(1, 1), (2, 2), (3, 2), (4, 2), (3, 1), (3, 2), (1, 1)]);
    };
    let number = |row: &serde_json::Value, at: usize| row.get(at).and_then(serde_json::Value::as_u64).filter(|n| (1..1000).contains(n)).map(|n| n as usize);
    let rows: Option<Vec<(usize, usize)>> = setting.as_array().and_then(|rows| rows.iter().map(|row| Some((number(row, 2)?, number(row, 3)?))).collect());
    rows.ok_or_else(|| {
        Error::graph("config.json", format!("`inverted_residual_setting` is {setting}, expected rows of [expansion, channels, repeats, stride]"))
    })
}

/// Number of output channels and kernel size of a convolution.
fn window(b: &Builder, module: &str) -> Result<(usize, usize)> {
    let name = format!("{module}.weight");
    let shape = b.stored_shape(&name).ok_or_else(|| Error::tensor(&name, "is missing", "is this the variant of torchvision that config.json names?"))?;
    match shape.as_slice() {
        [count, _, side, _] if *count > 0 => Ok((*count, *side)),
        _ => Err(Error::tensor(&name, format!("has shape {shape:?}, which has no output channels"), "")),
    }
}

/// A convolution with its normalization and activation, as in torchvision.
#[derive(Clone)]
pub struct Step {
    /// Stride.
    pub stride: usize,
    /// Whether the convolution is depthwise.
    pub depthwise: bool,
    /// Activation, if there is one.
    pub function: Option<Op>,
    /// Epsilon of the normalization; 0 means PyTorch's default.
    pub epsilon: f64,
}

impl Step {
    /// Adds nodes `module.0` to `module.2`, named like the modules.
    pub fn add(&self, b: &mut Builder, module: &str, x: ValueId) -> Result<ValueId> {
        let y = self.conv(b, [&format!("{module}.0"), &format!("{module}.1")], x)?;
        match &self.function {
            Some(function) => b.node(&format!("{module}.2"), function.clone(), &[y]),
            None => Ok(y),
        }
    }

    /// The convolution and the normalization with these names.
    fn conv(&self, b: &mut Builder, [conv, norm]: [&str; 2], x: ValueId) -> Result<ValueId> {
        let (out, kernel) = window(b, conv)?;
        let groups = if self.depthwise { out } else { 1 };
        ConvNorm { conv, norm, out, kernel, stride: self.stride, groups, epsilon: self.epsilon, ..ConvNorm::default() }.add(b, x)
    }
}

fn step(b: &mut Builder, module: &str, x: ValueId, stride: usize, depthwise: bool) -> Result<ValueId> {
    Step { stride, depthwise, function: Some(RELU6.into()), epsilon: 0.0 }.add(b, module, x)
}

/// The residual addition of a block, if its input and output have the same shape.
pub fn residual(b: &mut Builder, node: &str, stride: usize, x: ValueId, y: ValueId) -> Result<ValueId> {
    let same = stride == 1 && b.ty(x).shape.get(1) == b.ty(y).shape.get(1);
    if same { b.node(node, Add {}, &[y, x]) } else { Ok(y) }
}

fn inverted_residual(b: &mut Builder, module: &str, x: ValueId, stride: usize) -> Result<ValueId> {
    // The first block has no expansion: it starts with the depthwise convolution.
    let expands = b.has(&format!("{module}.1.0.weight"));
    let mut y = x;
    if expands {
        y = step(b, &format!("{module}.0"), y, 1, false)?;
    }
    let [at, conv, norm] = if expands { [1, 2, 3] } else { [0, 1, 2] };
    y = step(b, &format!("{module}.{at}"), y, stride, true)?;
    let names = [format!("{module}.{conv}"), format!("{module}.{norm}")];
    y = Step { stride: 1, depthwise: false, function: None, epsilon: 0.0 }.conv(b, names.each_ref().map(String::as_str), y)?;
    residual(b, &format!("{module}.sum"), stride, x, y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_convolution_without_channels_is_refused() {
        let norm = ["weight", "bias", "running_mean", "running_var"].map(|part| (format!("features.0.1.{part}"), vec![8]));
        let convs = [("features.0.0.weight".to_owned(), vec![8, 3, 3, 3]), ("features.1.conv.0.0.weight".to_owned(), vec![0, 1, 3, 3])];
        let stored: std::collections::BTreeMap<String, Vec<usize>> = norm.into_iter().chain(convs).collect();
        let error = build(&Settings::new(&serde_json::Map::new()), &mut Builder::new(&stored)).unwrap_err().to_string();
        assert!(error.contains("`features.1.conv.0.0.weight`: has shape [0, 1, 3, 3]"), "{error}");
    }
}
