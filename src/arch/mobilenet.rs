//! MobileNetV2 with torchvision's names (Sandler et al., 2018).
//!
//! torchvision's checkpoints come without a configuration; this one is enough:
//! `{ "model_type": "torchvision_mobilenet_v2", "num_labels": 1000 }`. Channels are read off the weights, so any
//! width multiplier does; `strides` (of the blocks' groups, by default `[1, 2, 2, 2, 1, 2, 1]`) and `repeats`
//! (by default `[1, 2, 3, 4, 3, 3, 1]`) may be given for other variants.

use super::Settings;
use super::parts::{ConvNorm, image_input, linear};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Clip, GlobalAveragePool};
use crate::ir::{Builder, Dim, ValueId};

const RELU6: Clip = Clip { min: 0.0, max: 6.0 };

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let list = |key: &str, default: [usize; 7]| if s.get(key).is_some() { s.sizes(key) } else { Ok(default.to_vec()) };
    let (strides, repeats) = (list("strides", [1, 2, 2, 2, 1, 2, 1])?, list("repeats", [1, 2, 3, 4, 3, 3, 1])?);
    if strides.len() != repeats.len() {
        return Err(Error::option("config.json", "`strides` and `repeats` differ in length"));
    }
    let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
    let mut x = step(b, "features.0", 0, pixels, 3, 2, false)?;
    let mut block = 1;
    for (&stride, &repeat) in strides.iter().zip(&repeats) {
        for index in 0..repeat {
            x = inverted_residual(b, &format!("features.{block}.conv"), x, if index == 0 { stride } else { 1 })?;
            block += 1;
        }
    }
    x = step(b, &format!("features.{block}"), 0, x, 1, 1, false)?;
    let pooled = b.node("pool", GlobalAveragePool {}, &[x])?;
    let logits = linear(b, "classifier", "classifier.1", pooled, s.labels()?)?;
    b.output("logits", logits);
    Ok(())
}

/// Channels that a convolution makes.
fn channels(b: &Builder, module: &str) -> Result<usize> {
    let name = format!("{module}.weight");
    let shape = b.stored_shape(&name).ok_or_else(|| Error::tensor(&name, "is missing", "is this a MobileNetV2 of torchvision?"))?;
    Ok(shape.first().copied().unwrap_or(0))
}

/// Convolution, normalisation and ReLU6, named `module.index` and `module.index + 1`.
fn step(b: &mut Builder, module: &str, index: usize, x: ValueId, kernel: usize, stride: usize, depthwise: bool) -> Result<ValueId> {
    let (conv, norm) = (format!("{module}.{index}"), format!("{module}.{}", index + 1));
    let out = channels(b, &conv)?;
    let y = ConvNorm { conv: &conv, norm: &norm, out, kernel, stride, groups: if depthwise { out } else { 1 } }.add(b, x)?;
    b.node(&format!("{module}.{}", index + 2), RELU6, &[y])
}

fn inverted_residual(b: &mut Builder, module: &str, x: ValueId, stride: usize) -> Result<ValueId> {
    // The first block does not expand: its depthwise convolution comes first.
    let expands = b.has(&format!("{module}.1.0.weight"));
    let mut y = x;
    if expands {
        y = step(b, &format!("{module}.0"), 0, y, 1, 1, false)?;
    }
    let at = usize::from(expands);
    y = step(b, &format!("{module}.{at}"), 0, y, 3, stride, true)?;
    let (conv, norm) = (format!("{module}.{}", at + 1), format!("{module}.{}", at + 2));
    let out = channels(b, &conv)?;
    y = ConvNorm { conv: &conv, norm: &norm, out, kernel: 1, stride: 1, groups: 1 }.add(b, y)?;
    let same = stride == 1 && b.ty(x).shape.get(1) == Some(&Dim::Fixed(out));
    if same { b.node(&format!("{module}.sum"), Add {}, &[y, x]) } else { Ok(y) }
}
