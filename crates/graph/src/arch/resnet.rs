//! ResNet, with the tensor names of transformers and of torchvision.
//!
//! torchvision's checkpoints have no configuration. The minimal one is `{ "model_type": "torchvision",
//! "variant": "resnet18" }`, with optional `layers` (blocks of each stage), `width` (channels of the
//! first stage) and `num_classes`.

use super::{CONVOLUTIONAL, Family, Keys, classifier};

pub(super) const RESNET: Family = Family {
    model_type: "resnet",
    graph: graph!(running::build),
    keys: Keys { harmless: &["out_features", "out_indices", "stage_names"], neutral: &[] },
    has_stage_widths: true,
    classifier: classifier("ResNetForImageClassification", "resnet.", &["classifier.1"]),
    ..CONVOLUTIONAL
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{ConvNorm, activate, image_input, linear};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, AveragePool, GlobalAveragePool, MaxPool, Padding, PerAxis, Relu};
    use crate::ir::{Builder, Dim, ValueId};

    fn image(s: &Settings, b: &mut Builder) -> Result<ValueId> {
        image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))
    }

    const STEM_POOL: MaxPool = MaxPool { kernel: PerAxis([3; 2]), stride: PerAxis([2; 2]), padding: Padding([1; 4]), dilation: PerAxis([1; 2]), ceil: false };

    fn conv_norm(b: &mut Builder, module: &str, x: ValueId, out: usize, kernel: usize, stride: usize) -> Result<ValueId> {
        ConvNorm { conv: &format!("{module}.convolution"), norm: &format!("{module}.normalization"), out, kernel, stride, ..ConvNorm::default() }.add(b, x)
    }

    /// `ResNetModel` and `ResNetForImageClassification` of transformers.
    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("resnet.embedder.embedder.convolution.weight") { "resnet." } else { "" };
        let act = s.text_or("hidden_act", "relu")?;
        let pixels = image(s, b)?;
        let stem = conv_norm(b, &format!("{prefix}embedder.embedder"), pixels, s.size("embedding_size")?, 7, 2)?;
        let stem = activate(b, "embedder.act", act, stem)?;
        let mut x = b.node("embedder.pooler", STEM_POOL, &[stem])?;
        let (widths, depths) = (s.sizes("hidden_sizes")?, s.sizes("depths")?);
        if widths.len() != depths.len() {
            return Err(Error::graph("config.json", "`hidden_sizes` and `depths` differ in length"));
        }
        let bottleneck = match s.text_or("layer_type", "bottleneck")? {
            "bottleneck" => true,
            "basic" => false,
            other => return Err(Error::Unsupported { what: format!("ResNet layer_type `{other}`"), hint: "supported: basic, bottleneck".into() }),
        };
        let first = if s.flag_or("downsample_in_first_stage", false)? { 2 } else { 1 };
        let early = s.flag_or("downsample_in_bottleneck", false)?;
        for (stage, (&out, &depth)) in widths.iter().zip(&depths).enumerate() {
            for layer in 0..depth {
                let stride = if layer > 0 {
                    1
                } else if stage == 0 {
                    first
                } else {
                    2
                };
                let module = format!("{prefix}encoder.stages.{stage}.layers.{layer}");
                // (kernel, channels, stride) of each convolution.
                let convs = if bottleneck {
                    let inner = out / 4;
                    vec![(1, inner, if early { stride } else { 1 }), (3, inner, if early { 1 } else { stride }), (1, out, 1)]
                } else {
                    vec![(3, out, stride), (3, out, 1)]
                };
                x = residual(b, &module, x, &convs, stride, act)?;
            }
        }
        b.output("last_hidden_state", x);
        let pooled = b.node("pooler", GlobalAveragePool::default(), &[x])?;
        if s.class() == "ResNetForImageClassification" {
            let logits = linear(b, "classifier", "classifier.1", pooled, s.labels()?)?;
            b.output("logits", logits);
        } else {
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    fn residual(b: &mut Builder, module: &str, x: ValueId, convs: &[(usize, usize, usize)], stride: usize, act: &str) -> Result<ValueId> {
        let mut y = x;
        for (index, &(kernel, out, stride)) in convs.iter().enumerate() {
            let part = format!("{module}.layer.{index}");
            y = conv_norm(b, &part, y, out, kernel, stride)?;
            if index < convs.len().saturating_sub(1) {
                // `hidden_act` only applies to the stem and the residual additions.
                y = b.node(&format!("{part}.activation"), Relu {}, &[y])?;
            }
        }
        let out = convs.last().map_or(0, |c| c.1);
        let same = stride == 1 && b.ty(x).shape.get(1) == Some(&Dim::Fixed(out));
        let shortcut = if same { x } else { conv_norm(b, &format!("{module}.shortcut"), x, out, 1, stride)? };
        let sum = b.node(&format!("{module}.sum"), Add {}, &[y, shortcut])?;
        activate(b, module, act, sum)
    }

    /// `RTDetrResNetBackbone` of transformers (ResNet-D: He et al., *Bag of Tricks*, 2018): a stem of three
    /// convolutions, and shortcuts that average before their convolution.
    pub struct VariantD<'c> {
        pub s: Settings<'c>,
        /// Prefix of the nodes.
        pub node: &'c str,
        /// Prefix of the modules.
        pub module: &'c str,
    }

    impl VariantD<'_> {
        fn conv(&self, b: &mut Builder, name: &str, x: ValueId, (kernel, out, stride): (usize, usize, usize)) -> Result<ValueId> {
            let [conv, norm] = ["convolution", "normalization"].map(|part| format!("{}.{name}.{part}", self.module));
            let [conv_node, norm_node] = ["convolution", "normalization"].map(|part| format!("{}.{name}.{part}", self.node));
            ConvNorm { conv: &conv, norm: &norm, nodes: Some([conv_node.as_str(), norm_node.as_str()]), out, kernel, stride, ..ConvNorm::default() }.add(b, x)
        }

        /// The selected feature maps of images of this height and width.
        pub fn build(&self, b: &mut Builder, [height, width]: [usize; 2]) -> Result<Vec<ValueId>> {
            let (s, node) = (&self.s, self.node);
            let kind = s.text_or("model_type", "rt_detr_resnet")?;
            if kind != "rt_detr_resnet" {
                return Err(Error::Unsupported { what: format!("backbone `{kind}`"), hint: "supported: rt_detr_resnet".into() });
            }
            let act = s.text_or("hidden_act", "relu")?;
            let (widths, depths) = (s.sizes_or("hidden_sizes", &[256, 512, 1024, 2048])?, s.sizes_or("depths", &[3, 4, 6, 3])?);
            if widths.len() != depths.len() {
                return Err(Error::graph("config.json", "`hidden_sizes` and `depths` of the backbone differ in length"));
            }
            let bottleneck = match s.text_or("layer_type", "bottleneck")? {
                "bottleneck" => true,
                "basic" => false,
                other => return Err(Error::Unsupported { what: format!("ResNet layer_type `{other}`"), hint: "supported: basic, bottleneck".into() }),
            };
            let early = s.flag_or("downsample_in_bottleneck", false)?;
            let first = if s.flag_or("downsample_in_first_stage", false)? { 2 } else { 1 };
            let chosen = self.stages(widths.len())?;
            let embedding = s.size_or("embedding_size", 64)?;
            let mut x = image_input(b, s.size_or("num_channels", 3)?, Dim::Fixed(height), Dim::Fixed(width))?;
            for (index, (out, stride)) in [(embedding / 2, 2), (embedding / 2, 1), (embedding, 1)].into_iter().enumerate() {
                let name = format!("embedder.embedder.{index}");
                x = self.conv(b, &name, x, (3, out, stride))?;
                x = activate(b, &format!("{node}.{name}.activation"), act, x)?;
            }
            x = b.node(&format!("{node}.embedder.pooler"), STEM_POOL, &[x])?;
            let mut maps = vec![x];
            for (stage, (&out, &depth)) in widths.iter().zip(&depths).enumerate() {
                for layer in 0..depth {
                    let stride = match (layer, stage) {
                        (1.., _) => 1,
                        (_, 0) => first,
                        _ => 2,
                    };
                    let name = format!("encoder.stages.{stage}.layers.{layer}");
                    let convs = if bottleneck {
                        let inner = out / 4;
                        vec![(1, inner, if early { stride } else { 1 }), (3, inner, if early { 1 } else { stride }), (1, out, 1)]
                    } else {
                        vec![(3, out, stride), (3, out, 1)]
                    };
                    let same = b.ty(x).shape.get(1) == Some(&Dim::Fixed(out));
                    // Basic layers average if the number of channels changes, bottlenecks if the size does.
                    let averages = if bottleneck { stride == 2 } else { !same };
                    let projects = if bottleneck { !same || stride == 2 } else { layer == 0 };
                    x = self.layer(b, &name, x, (&convs, act), (averages, projects.then_some((out, stride))))?;
                }
                maps.push(x);
            }
            Ok(maps.into_iter().enumerate().filter(|(index, _)| chosen.contains(index)).map(|(_, map)| map).collect())
        }

        /// A residual layer. The shortcut may average 2 x 2 places, and have a convolution with this width
        /// and stride.
        fn layer(
            &self,
            b: &mut Builder,
            name: &str,
            x: ValueId,
            (convs, act): (&[(usize, usize, usize)], &str),
            (averages, projected): (bool, Option<(usize, usize)>),
        ) -> Result<ValueId> {
            let node = format!("{}.{name}", self.node);
            let mut y = x;
            for (index, &shape) in convs.iter().enumerate() {
                let part = format!("{name}.layer.{index}");
                y = self.conv(b, &part, y, shape)?;
                if index < convs.len().saturating_sub(1) {
                    // `hidden_act` only applies to the stem and the residual additions.
                    y = b.node(&format!("{}.{part}.activation", self.node), Relu {}, &[y])?;
                }
            }
            let mut shortcut = x;
            if averages {
                let pool = AveragePool { ceil: true, ..AveragePool::default() };
                shortcut = b.node(&format!("{node}.shortcut.0"), pool, &[shortcut])?;
            }
            if let Some((out, stride)) = projected {
                let (part, stride) = if averages { ("shortcut.1", 1) } else { ("shortcut", stride) };
                shortcut = self.conv(b, &format!("{name}.{part}"), shortcut, (1, out, stride))?;
            }
            let sum = b.node(&format!("{node}.sum"), Add {}, &[y, shortcut])?;
            activate(b, &node, act, sum)
        }

        /// The indices of the stages whose feature maps are selected; 0 is the stem.
        fn stages(&self, count: usize) -> Result<Vec<usize>> {
            let wrong = |reason: String| Error::graph("config.json", reason);
            let Some(names) = self.s.get("out_features") else {
                // Without a configuration, transformers selects the last three stages.
                let default = if self.s.get("model_type").is_some() { vec![count] } else { vec![2, 3, 4] };
                return self.s.sizes_or("out_indices", &default);
            };
            let index =
                |name: &str| if name == "stem" { Some(0) } else { name.strip_prefix("stage")?.parse().ok().filter(|index| (1..=count).contains(index)) };
            let chosen: Option<Vec<usize>> = names.as_array().and_then(|names| names.iter().map(|name| index(name.as_str()?)).collect());
            let chosen = chosen.ok_or_else(|| wrong(format!("`out_features` is {names}, expected a list of stages from \"stage1\" to \"stage{count}\"")))?;
            let listed = self.s.sizes_or("out_indices", &chosen)?;
            if listed == chosen { Ok(chosen) } else { Err(wrong(format!("`out_indices` is {listed:?}, but `out_features` is {names}"))) }
        }
    }

    /// Name, whether blocks are bottlenecks, and number of blocks of each stage.
    const VARIANTS: [(&str, bool, [usize; 4]); 5] = [
        ("resnet18", false, [2, 2, 2, 2]),
        ("resnet34", false, [3, 4, 6, 3]),
        ("resnet50", true, [3, 4, 6, 3]),
        ("resnet101", true, [3, 4, 23, 3]),
        ("resnet152", true, [3, 8, 36, 3]),
    ];

    /// torchvision's `resnet18` and larger variants.
    pub fn build_torchvision(s: &Settings, b: &mut Builder) -> Result<()> {
        let variant = s.text("variant")?;
        let Some((_, bottleneck, layers)) = VARIANTS.iter().find(|(name, ..)| *name == variant) else {
            return Err(Error::Unsupported {
            what: format!("torchvision variant `{variant}`"),
            hint: "supported: efficientnet_b0 to efficientnet_b7, mobilenet_v2, mobilenet_v3_large, mobilenet_v3_small, resnet18, resnet34, resnet50, resnet101, resnet152".into(),
        });
        };
        let width = s.size_or("width", 64)?;
        let pixels = image(s, b)?;
        let stem = ConvNorm { conv: "conv1", norm: "bn1", out: width, kernel: 7, stride: 2, ..ConvNorm::default() }.add(b, pixels)?;
        let stem = b.node("relu", Relu {}, &[stem])?;
        let mut x = b.node("maxpool", STEM_POOL, &[stem])?;
        let depths = if s.get("layers").is_some() { s.sizes("layers")? } else { layers.to_vec() };
        let mut inner = width;
        for (stage, depth) in (1..).zip(depths) {
            for layer in 0..depth {
                let stride = if layer == 0 && stage > 1 { 2 } else { 1 };
                let module = format!("layer{stage}.{layer}");
                let convs = if *bottleneck {
                    vec![(1, inner, 1), (3, inner, stride), (1, inner.saturating_mul(4), 1)]
                } else {
                    vec![(3, inner, stride), (3, inner, 1)]
                };
                x = torchvision_block(b, &module, x, &convs, stride)?;
            }
            inner = inner.saturating_mul(2);
        }
        let pooled = b.node("avgpool", GlobalAveragePool::default(), &[x])?;
        let logits = linear(b, "fc", "fc", pooled, s.classes()?)?;
        b.output("logits", logits);
        Ok(())
    }

    fn torchvision_block(b: &mut Builder, module: &str, x: ValueId, convs: &[(usize, usize, usize)], stride: usize) -> Result<ValueId> {
        let mut y = x;
        for (number, &(kernel, out, stride)) in (1..).zip(convs) {
            y = ConvNorm { conv: &format!("{module}.conv{number}"), norm: &format!("{module}.bn{number}"), out, kernel, stride, ..ConvNorm::default() }
                .add(b, y)?;
            if number < convs.len() {
                y = b.node(&format!("{module}.relu{number}"), Relu {}, &[y])?;
            }
        }
        let out = convs.last().map_or(0, |c| c.1);
        let same = stride == 1 && b.ty(x).shape.get(1) == Some(&Dim::Fixed(out));
        let shortcut = if same {
            x
        } else {
            ConvNorm { conv: &format!("{module}.downsample.0"), norm: &format!("{module}.downsample.1"), out, kernel: 1, stride, ..ConvNorm::default() }
                .add(b, x)?
        };
        let sum = b.node(&format!("{module}.sum"), Add {}, &[y, shortcut])?;
        b.node(module, Relu {}, &[sum])
    }
}
