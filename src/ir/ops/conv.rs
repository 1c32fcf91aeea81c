//! Two-dimensional convolution.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, elements, require, require_arity, require_rank, require_vector};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Convolution of `[batch, in, height, width]` with `[out, in / groups, kh, kw]`; the bias may be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Conv {
    /// Step in both directions.
    pub stride: usize,
    /// Zeros around the image.
    pub padding: usize,
    /// Distance of the window's taps.
    pub dilation: usize,
    /// Channels are split into this many groups; as many as channels is a depthwise convolution.
    pub groups: usize,
}

impl Default for Conv {
    fn default() -> Self {
        Self { stride: 1, padding: 0, dilation: 1, groups: 1 }
    }
}

impl OpSpec for Conv {
    fn arity(&self) -> Range<usize> {
        2..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        let [x, weight] = [inputs[0], inputs[1]];
        require(x, Element::Float, "the input")?;
        require_rank(x, 4, "the input")?;
        require_rank(weight, 4, "the weight")?;
        if self.stride == 0 || self.dilation == 0 || self.groups == 0 {
            return Err("stride, dilation and groups must be at least 1".into());
        }
        let fixed = |dim: &Dim, what: &str| dim.fixed().ok_or_else(|| format!("{what} must be known"));
        let (channels, out, inner) =
            (fixed(&x.shape[1], "the number of channels")?, fixed(&weight.shape[0], "the weight")?, fixed(&weight.shape[1], "the weight")?);
        if channels != inner * self.groups || !out.is_multiple_of(self.groups) {
            return Err(format!("the input has {channels} channels, the weight takes {inner} in {} groups and makes {out}", self.groups));
        }
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, &weight.shape[0], "the bias")?;
        }
        let extent = |axis: usize| Ok::<_, String>(self.dilation * (fixed(&weight.shape[axis], "the weight")?.max(1) - 1) + 1);
        let slide = |axis: usize| {
            x.shape[axis].window(extent(axis)?, self.padding, self.stride).ok_or_else(|| format!("the window is larger than the image, {}", x.shape[axis]))
        };
        Ok(TensorType { element: Element::Float, shape: vec![x.shape[0].clone(), weight.shape[0].clone(), slide(2)?, slide(3)?] })
    }

    fn axes(&self, inputs: usize) -> String {
        let bias = if inputs > 2 { ", o" } else { "" };
        match self.groups {
            1 => format!("b k _ _, o k _ _{bias} -> b o _ _"),
            _ => format!("b (g! c) _ _, (g! o) c _ _{} -> b (g! o) _ _", if inputs > 2 { ", (g! o)" } else { "" }),
        }
    }

    fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
        let y = inputs[0].conv2d(&inputs[1], self.padding, self.stride, self.dilation, self.groups)?;
        match inputs.get(2) {
            Some(bias) => y.broadcast_add(&bias.reshape((1, bias.elem_count(), 1, 1))?),
            None => Ok(y),
        }
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let taps: u64 = inputs[1].shape[1..].iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).product();
        elements(output, bindings) * taps
    }
}
