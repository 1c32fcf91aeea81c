//! Models with the tensor names of torchvision, and its models with squeeze-and-excitation (MobileNetV3:
//! Howard et al., 2019; EfficientNet: Tan and Le, 2019).
//!
//! torchvision's checkpoints have no configuration; the minimal one is `{ "model_type": "torchvision",
//! "variant": "mobilenet_v3_small" }`. Channels and kernel sizes are those of the weights. For other
//! blocks than those of the variant, `blocks` lists the activation ("RE" or "HS") and stride of each
//! block of MobileNetV3, or the stride of each stage of EfficientNet.

use super::{CONVOLUTIONAL, Family, Keys, classifier};

pub(super) const TORCHVISION: Family = Family {
    model_type: "torchvision",
    graph: graph!(running::build),
    keys: Keys { harmless: &["last_channel", "round_nearest", "width_mult"], neutral: &[] },
    // The module of the head depends on the variant.
    classifier: classifier("", "", &["classifier.1"]),
    ..CONVOLUTIONAL
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::resnet::running as resnet;
    use crate::arch::running::Settings;
    use crate::arch::running::mobilenet;
    use crate::arch::running::mobilenet::{Step, residual};
    use crate::arch::running::parts::{image_input, linear, squeeze_excite};
    use crate::error::{Error, Result};
    use crate::ir::ops::{GlobalAveragePool, HardSigmoid, HardSwish, Relu, Sigmoid, Silu};
    use crate::ir::{Builder, Dim, Op, ValueId};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        match s.text("variant")? {
            "mobilenet_v2" => mobilenet::build(s, b),
            "mobilenet_v3_large" => mobilenet_v3(s, b, &LARGE),
            "mobilenet_v3_small" => mobilenet_v3(s, b, &SMALL),
            "efficientnet_b0" | "efficientnet_b1" | "efficientnet_b2" | "efficientnet_b3" | "efficientnet_b4" => efficientnet(s, b, 0.0),
            "efficientnet_b5" | "efficientnet_b6" | "efficientnet_b7" => efficientnet(s, b, 1e-3),
            _ => resnet::build_torchvision(s, b),
        }
    }

    const RE: bool = false;
    const HS: bool = true;

    /// Whether a block uses hard swish, and its stride.
    type Row = (bool, usize);

    const LARGE: [Row; 15] =
        [(RE, 1), (RE, 2), (RE, 1), (RE, 2), (RE, 1), (RE, 1), (HS, 2), (HS, 1), (HS, 1), (HS, 1), (HS, 1), (HS, 1), (HS, 2), (HS, 1), (HS, 1)];
    const SMALL: [Row; 11] = [(RE, 2), (RE, 2), (RE, 1), (HS, 2), (HS, 1), (HS, 1), (HS, 1), (HS, 1), (HS, 2), (HS, 1), (HS, 1)];
    /// Strides of EfficientNet's stages.
    const STEPS: [usize; 7] = [1, 2, 2, 2, 1, 2, 1];

    /// Epsilon of the normalizations of MobileNetV3.
    const EPSILON: f64 = 1e-3;

    /// A list from the configuration, or the default.
    fn rows<R: Copy>(s: &Settings, usual: &[R], read: impl Fn(&Value) -> Option<R>, what: &str) -> Result<Vec<R>> {
        let Some(blocks) = s.get("blocks") else { return Ok(usual.to_vec()) };
        let found: Option<Vec<R>> = blocks.as_array().and_then(|rows| rows.iter().map(read).collect());
        found.ok_or_else(|| Error::graph("config.json", format!("`blocks` is {blocks}, expected {what}")))
    }

    fn step_of(value: &Value) -> Option<usize> {
        value.as_u64().filter(|n| (1..100).contains(n)).map(|n| n as usize)
    }

    /// An inverted residual: expansion, depthwise convolution, squeeze-and-excitation and projection, of
    /// which those in the checkpoint are added.
    struct Inverted<'n> {
        function: Op,
        /// Activation and gate of squeeze-and-excitation.
        inner: &'n str,
        factors: Op,
        epsilon: f64,
        stride: usize,
    }

    impl Inverted<'_> {
        fn add(&self, b: &mut Builder, module: &str, x: ValueId) -> Result<ValueId> {
            let step = |stride, depthwise, function| Step { stride, depthwise, function, epsilon: self.epsilon };
            // The expansion has a kernel size of 1.
            let side = |b: &Builder, at: usize| b.stored_shape(&format!("{module}.{at}.0.weight")).and_then(|shape| shape.last().copied());
            let (mut at, mut y) = (0usize, x);
            if side(b, 0) == Some(1) {
                y = step(1, false, Some(self.function.clone())).add(b, &format!("{module}.0"), y)?;
                at = 1;
            }
            y = step(self.stride, true, Some(self.function.clone())).add(b, &format!("{module}.{at}"), y)?;
            at = at.saturating_add(1);
            let gate = format!("{module}.{at}");
            if let Some(narrow) = b.stored_shape(&format!("{gate}.fc1.weight")).and_then(|shape| shape.first().copied()) {
                y = squeeze_excite(b, [&gate, &gate], ["fc1", "fc2"], y, narrow, self.inner, self.factors.clone())?;
                at = at.saturating_add(1);
            }
            y = step(1, false, None).add(b, &format!("{module}.{at}"), y)?;
            residual(b, &format!("{module}.sum"), self.stride, x, y)
        }
    }

    fn mobilenet_v3(s: &Settings, b: &mut Builder, usual: &[Row]) -> Result<()> {
        let read = |row: &Value| {
            let smooth = match row.get(0)?.as_str()? {
                "RE" => RE,
                "HS" => HS,
                _ => return None,
            };
            Some((smooth, step_of(row.get(1)?)?))
        };
        let blocks = rows(s, usual, read, "rows of \"RE\" or \"HS\" and a stride")?;
        let outer = |stride| Step { stride, depthwise: false, function: Some(HardSwish {}.into()), epsilon: EPSILON };
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
        let mut x = outer(2).add(b, "features.0", pixels)?;
        let mut number = 1usize;
        for (smooth, stride) in blocks {
            let function: Op = if smooth { HardSwish {}.into() } else { Relu {}.into() };
            let factors = HardSigmoid { alpha: 1.0 / 6.0, beta: 0.5 }.into();
            let block = Inverted { function, inner: "relu", factors, epsilon: EPSILON, stride };
            x = block.add(b, &format!("features.{number}.block"), x)?;
            number = number.saturating_add(1);
        }
        x = outer(1).add(b, &format!("features.{number}"), x)?;
        let pooled = b.node("avgpool", GlobalAveragePool::default(), &[x])?;
        let wide = b.stored_shape("classifier.0.weight").and_then(|shape| shape.first().copied());
        let wide = wide.ok_or_else(|| Error::tensor("classifier.0.weight", "is missing", "is this a MobileNetV3 of torchvision?"))?;
        let dense = linear(b, "classifier.0", "classifier.0", pooled, wide)?;
        let active = b.node("classifier.1", HardSwish {}, &[dense])?;
        let logits = linear(b, "classifier", "classifier.3", active, s.classes()?)?;
        b.output("logits", logits);
        Ok(())
    }

    fn efficientnet(s: &Settings, b: &mut Builder, epsilon: f64) -> Result<()> {
        let steps = rows(s, &STEPS, step_of, "a list of strides")?;
        let outer = |stride| Step { stride, depthwise: false, function: Some(Silu {}.into()), epsilon };
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::named("height"), Dim::named("width"))?;
        let mut x = outer(2).add(b, "features.0", pixels)?;
        let mut number = 1usize;
        for first in steps {
            for layer in 0usize.. {
                let module = format!("features.{number}.{layer}.block");
                if b.stored_shape(&format!("{module}.0.0.weight")).is_none() {
                    break;
                }
                let stride = if layer == 0 { first } else { 1 };
                let block = Inverted { function: Silu {}.into(), inner: "silu", factors: Sigmoid {}.into(), epsilon, stride };
                x = block.add(b, &module, x)?;
            }
            number = number.saturating_add(1);
        }
        x = outer(1).add(b, &format!("features.{number}"), x)?;
        let pooled = b.node("avgpool", GlobalAveragePool::default(), &[x])?;
        let logits = linear(b, "classifier", "classifier.1", pooled, s.classes()?)?;
        b.output("logits", logits);
        Ok(())
    }
}
