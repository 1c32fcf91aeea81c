//! EfficientNet in transformers: inverted residuals with squeeze-and-excitation, padded as in TensorFlow
//! (Tan and Le, 2019).

use super::{CONVOLUTIONAL, Family, Keys, classifier};

pub(super) const EFFICIENTNET: Family = Family {
    model_type: "efficientnet",
    graph: graph!(running::build),
    keys: Keys { harmless: &["batch_norm_momentum", "drop_connect_rate", "dropout_rate", "image_size", "num_hidden_layers"], neutral: &[] },
    classifier: classifier("EfficientNetForImageClassification", "efficientnet.", &["classifier"]),
    ..CONVOLUTIONAL
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{ConvNorm, activate, image_input, linear, squeeze_excite};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, GlobalAveragePool, Padding, Reduce, ReduceKind, Sigmoid};
    use crate::ir::{Builder, Dim, ValueId};

    /// Configuration shared by all layers.
    struct Net<'s, 'c> {
        s: &'s Settings<'c>,
        prefix: &'static str,
        function: &'s str,
        epsilon: f64,
    }

    /// A stage of layers.
    struct Stage {
        channels: [usize; 2],
        kernel: usize,
        stride: usize,
        expansion: usize,
        repeats: usize,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("efficientnet.embeddings.convolution.weight") { "efficientnet." } else { "" };
        let net = Net { s, prefix, function: s.text_or("hidden_act", "swish")?, epsilon: s.number_or("batch_norm_eps", 1e-3)? };
        let (top, hidden) = (rounded(s, 1280)?, s.size_or("hidden_dim", 2560)?);
        if hidden != top {
            return Err(Error::graph("config.json", format!("`hidden_dim` is {hidden}, but the other keys give {top} channels after the last layer")));
        }
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
        let stem = ["embeddings.convolution", "embeddings.batchnorm"];
        let padding = Padding([0, 0, 1, 1]);
        let x = net.conv(b, stem, pixels, ConvNorm { out: rounded(s, 32)?, kernel: 3, stride: 2, padding: Some(padding), ..ConvNorm::default() })?;
        let mut x = activate(b, "embeddings.activation", net.function, x)?;
        let symmetric = list(s, "depthwise_padding", &[])?;
        let mut index = 0usize;
        for stage in stages(s)? {
            for layer in 0..stage.repeats {
                x = net.block(b, index, &stage, layer == 0, symmetric.contains(&index), x)?;
                index = index.saturating_add(1);
            }
        }
        let x = net.conv(b, ["encoder.top_conv", "encoder.top_bn"], x, ConvNorm { out: top, ..ConvNorm::default() })?;
        let x = activate(b, "encoder.top_activation", net.function, x)?;
        b.output("last_hidden_state", x);
        let pooled = match s.text_or("pooling_type", "mean")? {
            "mean" => b.node("pooler", GlobalAveragePool::default(), &[x])?,
            "max" => b.node("pooler", Reduce { kind: ReduceKind::Max, axes: vec![2, 3], keep_dims: false }, &[x])?,
            other => return Err(Error::graph("config.json", format!("`pooling_type` is \"{other}\", expected \"mean\" or \"max\""))),
        };
        if s.class() == "EfficientNetForImageClassification" {
            let logits = linear(b, "classifier", "classifier", pooled, s.labels()?)?;
            b.output("logits", logits);
        } else {
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    /// A list of integers from 0.
    fn list(s: &Settings, key: &str, default: &[usize]) -> Result<Vec<usize>> {
        let Some(value) = s.get(key) else { return Ok(default.to_vec()) };
        let found: Option<Vec<usize>> =
            value.as_array().and_then(|list| list.iter().map(|n| n.as_u64().filter(|n| *n < 1 << 32).map(|n| n as usize)).collect());
        found.ok_or_else(|| Error::graph("config.json", format!("`{key}` is {value}, expected a list of integers")))
    }

    fn stages(s: &Settings) -> Result<Vec<Stage>> {
        let of = |key: &str, default: &[usize]| list(s, key, default);
        let (read, made) = (of("in_channels", &[32, 16, 24, 40, 80, 112, 192])?, of("out_channels", &[16, 24, 40, 80, 112, 192, 320])?);
        let (kernels, strides) = (of("kernel_sizes", &[3, 3, 5, 3, 5, 5, 3])?, of("strides", &[1, 2, 2, 2, 1, 2, 1])?);
        let (repeats, ratios) = (of("num_block_repeats", &[1, 2, 2, 3, 3, 4, 1])?, of("expand_ratios", &[1, 6, 6, 6, 6, 6, 6])?);
        let depth = s.number_or("depth_coefficient", 3.1)?;
        let mut stages = Vec::with_capacity(read.len());
        for (at, channels) in read.iter().enumerate() {
            let get = |list: &[usize], key: &str| {
                list.get(at).copied().filter(|n| *n > 0).ok_or_else(|| Error::graph("config.json", format!("`{key}` has no value for stage {at}")))
            };
            let (stride, kernel) = (get(&strides, "strides")?, get(&kernels, "kernel_sizes")?);
            if stride > 2 || kernel.is_multiple_of(2) {
                return Err(Error::Unsupported {
                    what: format!("config.json: windows of {kernel} with `strides` of {stride}"),
                    hint: "odd `kernel_sizes` and strides of 1 and 2 are supported".into(),
                });
            }
            stages.push(Stage {
                channels: [rounded(s, *channels)?, rounded(s, get(&made, "out_channels")?)?],
                kernel,
                stride,
                expansion: get(&ratios, "expand_ratios")?,
                repeats: (depth * get(&repeats, "num_block_repeats")? as f64).ceil() as usize,
            });
        }
        Ok(stages)
    }

    /// The scaled number of channels, rounded to a multiple of `depth_divisor`.
    fn rounded(s: &Settings, channels: usize) -> Result<usize> {
        let (divisor, wide) = (s.size_or("depth_divisor", 8)?, channels as f64 * s.number_or("width_coefficient", 2.0)?);
        let steps = ((wide + divisor as f64 / 2.0) as usize).checked_div(divisor).unwrap_or(0).max(1);
        let found = steps.saturating_mul(divisor);
        // Rounding removes at most a tenth.
        Ok(if (found as f64) < 0.9 * wide { found.saturating_add(divisor) } else { found })
    }

    impl Net<'_, '_> {
        /// A convolution and its normalization, with the names of their nodes.
        fn conv(&self, b: &mut Builder, nodes: [&str; 2], x: ValueId, op: ConvNorm) -> Result<ValueId> {
            let [conv, norm] = nodes.map(|node| format!("{}{node}", self.prefix));
            ConvNorm { conv: &conv, norm: &norm, nodes: Some(nodes), epsilon: self.epsilon, ..op }.add(b, x)
        }

        fn block(&self, b: &mut Builder, index: usize, stage: &Stage, first: bool, symmetric: bool, x: ValueId) -> Result<ValueId> {
            let [read, made] = stage.channels;
            let (read, stride) = if first { (read, stage.stride) } else { (made, 1) };
            let node = format!("encoder.blocks.{index}");
            let name = |part: &str| format!("{node}.{part}");
            let wide = read.saturating_mul(stage.expansion);
            let mut y = x;
            if stage.expansion != 1 {
                let parts = [name("expansion.expand_conv"), name("expansion.expand_bn")];
                y = self.conv(b, parts.each_ref().map(String::as_str), y, ConvNorm { out: wide, ..ConvNorm::default() })?;
                y = activate(b, &name("expansion.expand_act"), self.function, y)?;
            }
            let half = stage.kernel / 2;
            let before = if stride == 2 && !symmetric { half.saturating_sub(1) } else { half };
            let padding = Some(Padding([before, before, half, half]));
            let parts = [name("depthwise_conv.depthwise_conv"), name("depthwise_conv.depthwise_norm")];
            let op = ConvNorm { out: wide, kernel: stage.kernel, stride, groups: wide, padding, ..ConvNorm::default() };
            y = self.conv(b, parts.each_ref().map(String::as_str), y, op)?;
            y = activate(b, &name("depthwise_conv.depthwise_act"), self.function, y)?;
            let narrow = ((read as f64 * self.s.number_or("squeeze_expansion_ratio", 0.25)?) as usize).max(1);
            let squeeze = name("squeeze_excite");
            y = squeeze_excite(b, [&squeeze, &format!("{}{squeeze}", self.prefix)], ["reduce", "expand"], y, narrow, self.function, Sigmoid {}.into())?;
            let parts = [name("projection.project_conv"), name("projection.project_bn")];
            y = self.conv(b, parts.each_ref().map(String::as_str), y, ConvNorm { out: made, ..ConvNorm::default() })?;
            if stride == 1 && !first { b.node(&node, Add {}, &[y, x]) } else { Ok(y) }
        }
    }
}
