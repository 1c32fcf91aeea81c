//! ConvNeXt: depthwise convolutions and pointwise feed-forward networks (Liu et al., 2022).

use super::{CONVOLUTIONAL, Family, Keys, classifier};

pub(super) const CONVNEXT: Family = Family {
    model_type: "convnext",
    graph: graph!(running::build),
    keys: Keys {
        // The number of stages is that of `hidden_sizes`.
        harmless: &["_out_features", "_out_indices", "drop_path_rate", "image_size", "num_stages", "out_features", "out_indices", "stage_names"],
        neutral: &[],
    },
    classifier: classifier("ConvNextForImageClassification", "convnext.", &["classifier"]),
    layer_scale: 1e-6,
    ..CONVOLUTIONAL
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{activate, image_input, layer_norm, linear};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Conv, GlobalAveragePool, Mul, Transpose};
    use crate::ir::{Builder, Dim, ValueId};

    /// Epsilon of all normalizations except the last one.
    const EPSILON: f64 = 1e-6;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("convnext.embeddings.patch_embeddings.weight") { "convnext." } else { "" };
        let (widths, depths) = (sizes(s, "hidden_sizes", &[96, 192, 384, 768])?, sizes(s, "depths", &[3, 3, 9, 3])?);
        let stages = s.size_or("num_stages", 4)?;
        if widths.len() != stages || depths.len() != stages {
            return Err(Error::graph(
                "config.json",
                format!("`num_stages` is {stages}, `hidden_sizes` has {} and `depths` has {}", widths.len(), depths.len()),
            ));
        }
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
        let patch = s.size_or("patch_size", 4)?;
        let mut before = widths.first().copied().unwrap_or(1);
        let x = conv(
            b,
            "embeddings.patch_embeddings",
            &format!("{prefix}embeddings.patch_embeddings"),
            pixels,
            (before, patch, 1),
            Conv { stride: patch.into(), ..Conv::default() },
        )?;
        let mut x = normed(b, "embeddings.layernorm", &format!("{prefix}embeddings.layernorm"), x)?;
        for (stage, (width, depth)) in widths.into_iter().zip(depths).enumerate() {
            let node = format!("encoder.stages.{stage}");
            if stage > 0 || before != width {
                let (name, module) = (format!("{node}.downsampling_layer"), format!("{prefix}{node}.downsampling_layer"));
                x = normed(b, &format!("{name}.0"), &format!("{module}.0"), x)?;
                x = conv(b, &format!("{name}.1"), &format!("{module}.1"), x, (width, 2, 1), Conv { stride: 2.into(), ..Conv::default() })?;
            }
            for layer in 0..depth {
                let name = format!("{node}.layers.{layer}");
                x = block(s, b, &name, &format!("{prefix}{name}"), x, width)?;
            }
            before = width;
        }
        b.output("last_hidden_state", x);
        let mean = b.node("pooler.mean", GlobalAveragePool::default(), &[x])?;
        let pooled = layer_norm(b, "layernorm", &format!("{prefix}layernorm"), mean, s.number_or("layer_norm_eps", 1e-12)?)?;
        if s.class() == "ConvNextForImageClassification" {
            let logits = linear(b, "classifier", "classifier", pooled, s.labels()?)?;
            b.output("logits", logits);
        } else {
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    fn sizes(s: &Settings, key: &str, default: &[usize]) -> Result<Vec<usize>> {
        if s.get(key).is_some() { s.sizes(key) } else { Ok(default.to_vec()) }
    }

    /// A convolution with a bias: output channels, kernel size and groups.
    fn conv(b: &mut Builder, node: &str, module: &str, x: ValueId, (out, side, groups): (usize, usize, usize), op: Conv) -> Result<ValueId> {
        let channels = b.ty(x).shape.get(1).and_then(Dim::fixed).and_then(|all| all.checked_div(groups)).unwrap_or(0);
        let inputs = [x, b.param(&format!("{module}.weight"), &[out, channels, side, side])?, b.param(&format!("{module}.bias"), &[out])?];
        b.node(node, Conv { groups, ..op }, &inputs)
    }

    /// Moves channels to the last axis, or back.
    fn transposed(b: &mut Builder, node: &str, perm: [usize; 4], x: ValueId) -> Result<ValueId> {
        b.node(node, Transpose { perm: perm.to_vec() }, &[x])
    }

    const LAST: [usize; 4] = [0, 2, 3, 1];
    const FIRST: [usize; 4] = [0, 3, 1, 2];

    /// Layer normalization over the channel axis of images.
    fn normed(b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
        let last = transposed(b, &format!("{node}.channels_last"), LAST, x)?;
        let y = layer_norm(b, node, module, last, EPSILON)?;
        transposed(b, &format!("{node}.channels_first"), FIRST, y)
    }

    fn block(s: &Settings, b: &mut Builder, node: &str, module: &str, x: ValueId, width: usize) -> Result<ValueId> {
        let name = |part: &str| format!("{node}.{part}");
        let path = |part: &str| format!("{module}.{part}");
        let y = conv(b, &name("dwconv"), &path("dwconv"), x, (width, 7, width), Conv { padding: 3.into(), ..Conv::default() })?;
        let y = transposed(b, &name("channels_last"), LAST, y)?;
        let y = layer_norm(b, &name("layernorm"), &path("layernorm"), y, EPSILON)?;
        let y = linear(b, &name("pwconv1"), &path("pwconv1"), y, width.saturating_mul(4))?;
        let y = activate(b, &name("act"), s.text_or("hidden_act", "gelu")?, y)?;
        let mut y = linear(b, &name("pwconv2"), &path("pwconv2"), y, width)?;
        if s.number_or("layer_scale_init_value", 1e-6)? > 0.0 {
            let scale = b.param(&path("layer_scale_parameter"), &[width])?;
            y = b.node(&name("scaled"), Mul {}, &[y, scale])?;
        }
        let y = transposed(b, &name("channels_first"), FIRST, y)?;
        b.node(node, Add {}, &[x, y])
    }
}
