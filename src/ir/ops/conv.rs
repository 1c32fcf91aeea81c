//! Two-dimensional convolution.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::windows::{apart, convolved, fit, from_taps, taps};
use super::{Backward, OpSpec, elements, require_floats, require_rank, require_vector};
use crate::ir::{Bindings, Dim, Element, TensorType};
use crate::kernel::convolution::Window;

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
        let [x, weight] = [inputs[0], inputs[1]];
        require_floats(x, 4, "the input")?;
        require_rank(weight, 4, "the weight")?;
        if self.stride == 0 || self.dilation == 0 || self.groups == 0 {
            return Err("stride, dilation and groups must be at least 1".into());
        }
        let fixed = |dim: &Dim, what: &str| dim.fixed().ok_or_else(|| format!("{what} must be known"));
        let (channels, out, inner) =
            (fixed(&x.shape[1], "the number of channels")?, fixed(&weight.shape[0], "the weight")?, fixed(&weight.shape[1], "the weight")?);
        if inner.checked_mul(self.groups) != Some(channels) || !out.is_multiple_of(self.groups) {
            return Err(format!("the input has {channels} channels, the weight takes {inner} in {} groups and makes {out}", self.groups));
        }
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, &weight.shape[0], "the bias")?;
        }
        let extent = |axis: usize| {
            let taps = fixed(&weight.shape[axis], "the weight")?.checked_sub(1).ok_or("the window has no taps")?;
            self.dilation.checked_mul(taps).and_then(|steps| steps.checked_add(1)).ok_or_else(|| format!("dilation {} is larger than any image", self.dilation))
        };
        let slide = |axis: usize| {
            x.shape[axis].window(extent(axis)?, self.padding, self.stride).ok_or_else(|| format!("the window is larger than the image, {}", x.shape[axis]))
        };
        Ok(TensorType { element: Element::Float, shape: vec![x.shape[0].clone(), weight.shape[0].clone(), slide(2)?, slide(3)?] })
    }

    fn axes(&self, inputs: usize) -> String {
        let bias = if inputs > 2 { ", o" } else { "" };
        match self.groups {
            1 => format!("b k _ _, o k _ _{bias} -> b o _ _"),
            g => format!("b (g={g} c) _ _, (g={g} o) c _ _{} -> b (g={g} o) _ _", if inputs > 2 { format!(", (g={g} o)") } else { String::new() }),
        }
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        if self.groups > 1 {
            self.groups = size("g");
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let y = if self.is_by_channel(weight) {
            let met = taps(&self.for_each_output(x, weight)?, self.window_over(x, weight)?, 0.0)?;
            let parts = met.iter().enumerate().map(|(tap, met)| met.broadcast_mul(&self.tap(weight, tap)?));
            sum(parts)?
        } else {
            convolved(x, weight, self.padding, [self.stride, self.dilation, self.groups])?
        };
        match inputs.get(2) {
            Some(bias) => y.broadcast_add(&bias.reshape((1, bias.elem_count(), 1, 1))?),
            None => Ok(y),
        }
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, weight, gradient) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.gradient);
        let by_channel = self.is_by_channel(weight);
        let of_input = backward.of(0, || {
            if by_channel {
                let of_outputs = from_taps(self.window_over(x, weight)?, |tap| gradient.broadcast_mul(&self.tap(weight, tap)?))?;
                let (images, outputs, height, width) = of_outputs.dims4()?;
                return of_outputs.reshape((images, self.groups, outputs / self.groups, height, width))?.sum(2);
            }
            // With zeros between its elements, the gradient meets the taps one by one, in the opposite order.
            let mut wide = apart(gradient, self.stride)?;
            for axis in [2, 3] {
                let reach = self.dilation * (weight.dim(axis)? - 1);
                wide = fit(&wide, axis, reach as isize - self.padding as isize, x.dim(axis)? + reach, 0.0)?;
            }
            self.in_groups(1, |group| {
                let flipped = self.part(weight, 0, group)?.transpose(0, 1)?.contiguous()?.flip(&[2, 3])?;
                convolved(&self.part(&wide, 1, group)?, &flipped, 0, [1, self.dilation, 1])
            })
        })?;
        let of_weight = backward.of(1, || {
            if by_channel {
                let met = taps(&self.for_each_output(x, weight)?, self.window_over(x, weight)?, 0.0)?;
                let parts = met.iter().map(|met| wide(&(met * gradient)?)?.sum((0, 2, 3))).collect::<candle_core::Result<Vec<_>>>()?;
                return Tensor::stack(&parts, D::Minus1)?.reshape(weight.dims())?.to_dtype(weight.dtype());
            }
            let padded = x.pad_with_zeros(2, self.padding, self.padding)?.pad_with_zeros(3, self.padding, self.padding)?;
            self.in_groups(0, |group| {
                // Images and channels change places: the gradient is the window, and its step the distance of the taps.
                let window = self.part(gradient, 1, group)?.transpose(0, 1)?;
                let mut images = self.part(&padded, 1, group)?.transpose(0, 1)?;
                for axis in [2, 3] {
                    images = images.narrow(axis, 0, self.stride * (window.dim(axis)? - 1) + self.dilation * (weight.dim(axis)? - 1) + 1)?;
                }
                convolved(&images, &window, 0, [self.dilation, self.stride, 1])?.transpose(0, 1)
            })
        })?;
        let of_bias = backward.of(2, || wide(gradient)?.sum((0, 2, 3))?.to_dtype(gradient.dtype()))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let taps: u64 = inputs[1].shape[1..].iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).fold(1, u64::saturating_mul);
        elements(output, bindings).saturating_mul(taps)
    }
}

impl Conv {
    /// How the weight's windows move over an image.
    pub(super) fn window_over(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Window> {
        let ((_, _, height, width), (_, _, rows, columns)) = (x.dims4()?, weight.dims4()?);
        Ok(Window { height, width, kernel: [rows, columns], stride: self.stride, padding: self.padding, dilation: self.dilation })
    }

    /// Whether each channel has a window of its own.
    pub(super) fn is_depthwise(&self, weight: &Tensor) -> bool {
        matches!(weight.dims(), [out, 1, ..] if *out == self.groups)
    }

    /// Whether each output sees one channel: then a product for each tap does all channels at once, where groups would be as many
    /// convolutions.
    fn is_by_channel(&self, weight: &Tensor) -> bool {
        self.groups > 1 && matches!(weight.dims(), [_, 1, ..])
    }

    /// Images with the channel that each output sees.
    fn for_each_output(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let (images, channels, height, width) = x.dims4()?;
        let each = weight.dim(0)? / channels.max(1);
        if each == 1 {
            return Ok(x.clone());
        }
        x.unsqueeze(2)?.broadcast_as((images, channels, each, height, width))?.reshape((images, channels * each, height, width))
    }

    /// One tap of each output's window, beside images.
    fn tap(&self, weight: &Tensor, tap: usize) -> candle_core::Result<Tensor> {
        weight.flatten_from(2)?.narrow(2, tap, 1)?.reshape((1, weight.dim(0)?, 1, 1))
    }

    /// One group's part of an axis.
    fn part(&self, tensor: &Tensor, axis: usize, group: usize) -> candle_core::Result<Tensor> {
        let size = tensor.dim(axis)? / self.groups;
        tensor.narrow(axis, group * size, size)
    }

    fn in_groups(&self, axis: usize, of: impl Fn(usize) -> candle_core::Result<Tensor>) -> candle_core::Result<Tensor> {
        let parts = (0..self.groups).map(of).collect::<candle_core::Result<Vec<_>>>()?;
        Tensor::cat(&parts, axis)?.contiguous()
    }
}

/// The sum of at least one tensor.
fn sum(parts: impl Iterator<Item = candle_core::Result<Tensor>>) -> candle_core::Result<Tensor> {
    parts.reduce(|a, b| a? + b?).ok_or_else(|| candle_core::Error::Msg("a convolution without taps".into()))?
}
