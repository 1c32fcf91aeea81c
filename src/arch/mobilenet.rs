//! MobileNetV2 with torchvision's names (Sandler et al., 2018).
//!
//! torchvision's checkpoints come without a configuration; this one is enough:
//! `{ "model_type": "torchvision", "variant": "mobilenet_v2" }`, and where they differ from the usual ones,
//! `inverted_residual_setting` (expansion, channels, repeats and stride of each group of blocks, of which only the
//! last two are looked at: channels are read off the weights) and `num_classes`.

use super::parts::{ConvNorm, image_input, linear};
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Clip, GlobalAveragePool};
use crate::ir::{Builder, Dim, ValueId};

/// Those of all models of torchvision.
pub(super) const KEYS: Keys = Keys { harmless: &["last_channel", "round_nearest", "width_mult"], neutral: &[] };

const RELU6: Clip = Clip { min: 0.0, max: 6.0 };

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let groups = groups(s)?;
    let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
    let mut x = step(b, "features.0", pixels, 3, 2, false)?;
    let mut block = 1usize;
    for (repeat, stride) in groups {
        for index in 0..repeat {
            x = inverted_residual(b, &format!("features.{block}.conv"), x, if index == 0 { stride } else { 1 })?;
            block = block.saturating_add(1);
        }
    }
    x = step(b, &format!("features.{block}"), x, 1, 1, false)?;
    let pooled = b.node("pool", GlobalAveragePool::default(), &[x])?;
    let logits = linear(b, "classifier", "classifier.1", pooled, s.size_or("num_classes", 1000)?)?;
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

/// Channels that a convolution makes.
fn channels(b: &Builder, module: &str) -> Result<usize> {
    let name = format!("{module}.weight");
    let shape = b.stored_shape(&name).ok_or_else(|| Error::tensor(&name, "is missing", "is this a MobileNetV2 of torchvision?"))?;
    let count = shape.first().copied().filter(|count| *count > 0);
    count.ok_or_else(|| Error::tensor(&name, format!("has shape {shape:?}, which makes no channels"), ""))
}

/// Convolution, normalisation and ReLU6, named `module.0` to `module.2`.
fn step(b: &mut Builder, module: &str, x: ValueId, kernel: usize, stride: usize, depthwise: bool) -> Result<ValueId> {
    let (conv, norm) = (format!("{module}.0"), format!("{module}.1"));
    let out = channels(b, &conv)?;
    let y = ConvNorm { conv: &conv, norm: &norm, out, kernel, stride, groups: if depthwise { out } else { 1 } }.add(b, x)?;
    b.node(&format!("{module}.2"), RELU6, &[y])
}

fn inverted_residual(b: &mut Builder, module: &str, x: ValueId, stride: usize) -> Result<ValueId> {
    // The first block does not expand: its depthwise convolution comes first.
    let expands = b.has(&format!("{module}.1.0.weight"));
    let mut y = x;
    if expands {
        y = step(b, &format!("{module}.0"), y, 1, 1, false)?;
    }
    let [at, conv, norm] = if expands { [1, 2, 3] } else { [0, 1, 2] };
    y = step(b, &format!("{module}.{at}"), y, 3, stride, true)?;
    let (conv, norm) = (format!("{module}.{conv}"), format!("{module}.{norm}"));
    let out = channels(b, &conv)?;
    y = ConvNorm { conv: &conv, norm: &norm, out, kernel: 1, stride: 1, groups: 1 }.add(b, y)?;
    let same = stride == 1 && b.ty(x).shape.get(1) == Some(&Dim::Fixed(out));
    if same { b.node(&format!("{module}.sum"), Add {}, &[y, x]) } else { Ok(y) }
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
