//! Convolution of images and sequences.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::spatial::{Padding, PerAxis};
use super::windows::{Slide, convolved, from_taps, images, input_gradient, output_sizes, per_axis, spatial_sizes, taps, weight_gradient, with_rank};
use super::{Backward, OpSpec, require, require_rank, require_vector, sums};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Convolution of `[batch, in, height, width]` with `[out, in / groups, kh, kw]`, or of `[batch, in,
/// length]` with `[out, in / groups, k]`; the bias is optional. For sequences, the values for the width
/// apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Conv {
    /// Stride of the window.
    pub stride: PerAxis,
    /// Zero padding.
    pub padding: Padding,
    /// Dilation of the window.
    pub dilation: PerAxis,
    /// Number of groups of channels; a depthwise convolution has as many as channels.
    pub groups: usize,
}

impl Default for Conv {
    fn default() -> Self {
        Self { stride: 1.into(), padding: 0.into(), dilation: 1.into(), groups: 1 }
    }
}

impl OpSpec for Conv {
    fn arity(&self) -> Range<usize> {
        2..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [x, weight] = [inputs[0], inputs[1]];
        let (channels, out, inner) = channels(x, weight, self.groups)?;
        if inner.checked_mul(self.groups) != Some(channels) || !out.is_multiple_of(self.groups) {
            return Err(format!("the input has {channels} channels, but the weight requires {inner} in {} groups and has {out} outputs", self.groups));
        }
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, &weight.shape[0], "the bias")?;
        }
        let mut shape = vec![x.shape[0].clone(), weight.shape[0].clone()];
        shape.extend(output_sizes(&x.shape[2..], &window(weight)?, [self.stride, self.dilation], self.padding, false)?);
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        axes(inputs, self.groups, false)
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        if self.groups > 1 {
            self.groups = size("g");
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, weight) = (images(&inputs[0])?, images(&inputs[1])?);
        let slide = self.slide(inputs[0].dims(), inputs[1].dims())?;
        let y = if self.is_by_channel(&weight) {
            let met = taps(&self.for_each_output(&x, &weight)?, &slide, 0.0)?;
            let parts = met.iter().enumerate().map(|(tap, met)| met.broadcast_mul(&self.tap(&weight, tap)?));
            sum(parts)?
        } else {
            convolved(&x, &weight, &slide, self.groups)?
        };
        with_rank(with_bias(y, inputs.get(2))?, inputs[0].rank())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (rank, gradient) = (backward.gradient.rank(), &images(backward.gradient)?);
        let (x, weight) = (&images(backward.inputs[0].tensor()?)?, &images(backward.inputs[1].tensor()?)?);
        let slide = &self.slide(backward.inputs[0].dims(), backward.inputs[1].dims())?;
        let by_channel = self.is_by_channel(weight);
        let of_input = backward.gradient_of(0, || {
            if by_channel {
                let of_outputs = from_taps(slide, |tap| gradient.broadcast_mul(&self.tap(weight, tap)?))?;
                let (images, outputs, height, width) = of_outputs.dims4()?;
                return with_rank(of_outputs.reshape((images, self.groups, outputs / self.groups, height, width))?.sum(2)?, rank);
            }
            with_rank(input_gradient(gradient, weight, slide, self.groups)?, rank)
        })?;
        let of_weight = backward.gradient_of(1, || {
            if by_channel {
                let met = taps(&self.for_each_output(x, weight)?, slide, 0.0)?;
                let parts = met.iter().map(|met| wide(&(met * gradient)?)?.sum((0, 2, 3))).collect::<candle_core::Result<Vec<_>>>()?;
                return Tensor::stack(&parts, D::Minus1)?.reshape(backward.inputs[1].dims())?.to_dtype(weight.dtype());
            }
            with_rank(weight_gradient(x, gradient, slide, self.groups)?, rank)
        })?;
        let of_bias = backward.gradient_of(2, || wide(gradient)?.sum((0, 2, 3))?.to_dtype(gradient.dtype()))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        sums(output, &inputs[1].shape[1..], bindings)
    }
}

impl Conv {
    /// The window geometry for images and weights of these shapes.
    pub(super) fn slide(&self, x: &[usize], weight: &[usize]) -> candle_core::Result<Slide> {
        let (steps, padding) = per_axis(x.len(), [self.stride, self.dilation], self.padding);
        Slide::new(spatial_sizes(x), spatial_sizes(weight), steps, padding, false)
    }

    /// Whether each channel has its own filter (depthwise convolution).
    pub(super) fn is_depthwise(&self, weight: &Tensor) -> bool {
        matches!(weight.dims(), [out, 1, ..] if *out == self.groups)
    }

    /// Whether each output reads one channel. Such convolutions multiply all channels tap by tap, instead
    /// of running one convolution per group.
    fn is_by_channel(&self, weight: &Tensor) -> bool {
        self.groups > 1 && matches!(weight.dims(), [_, 1, ..])
    }

    /// The input channel of each output channel.
    fn for_each_output(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let (images, channels, height, width) = x.dims4()?;
        let each = weight.dim(0)? / channels.max(1);
        if each == 1 {
            return Ok(x.clone());
        }
        x.unsqueeze(2)?.broadcast_as((images, channels, each, height, width))?.reshape((images, channels * each, height, width))
    }

    /// One tap of each output's filter, for broadcasting over images.
    fn tap(&self, weight: &Tensor, tap: usize) -> candle_core::Result<Tensor> {
        weight.flatten_from(2)?.narrow(2, tap, 1)?.reshape((1, weight.dim(0)?, 1, 1))
    }
}

/// Axes of the inputs and the output; a transposed convolution has the first two axes of the weight
/// swapped.
pub(super) fn axes(inputs: &[&TensorType], groups: usize, transposed: bool) -> String {
    let places = " _".repeat(inputs[0].shape.len().saturating_sub(2));
    let (read, made, inner) = match groups {
        1 => ("k".to_owned(), "o".to_owned(), if transposed { "o" } else { "k" }),
        g => (format!("(g={g} c)"), format!("(g={g} o)"), if transposed { "o" } else { "c" }),
    };
    let outer = if transposed { &read } else { &made };
    let bias = if inputs.len() > 2 { format!(", {made}") } else { String::new() };
    format!("b {read}{places}, {outer} {inner}{places}{bias} -> b {made}{places}")
}

/// The number of input channels, and the first two sizes of the weight.
pub(super) fn channels(x: &TensorType, weight: &TensorType, groups: usize) -> Result<(usize, usize, usize), String> {
    require(x, Element::Float, "the input")?;
    if !matches!(x.shape.len(), 3 | 4) {
        return Err("the input must have 3 or 4 axes".into());
    }
    require_rank(weight, x.shape.len(), "the weight")?;
    if groups == 0 {
        return Err("groups must be at least 1".into());
    }
    let fixed = |dim: &Dim, what: &str| dim.fixed().ok_or_else(|| format!("{what} must be fixed"));
    Ok((fixed(&x.shape[1], "the number of channels")?, fixed(&weight.shape[0], "the size of the weight")?, fixed(&weight.shape[1], "the size of the weight")?))
}

/// Size of the window on each axis.
pub(super) fn window(weight: &TensorType) -> Result<Vec<usize>, String> {
    weight.shape[2..].iter().map(|size| size.fixed().ok_or_else(|| "the size of the weight must be fixed".to_owned())).collect()
}

/// Adds a bias to each channel.
pub(super) fn with_bias(y: Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    match bias {
        Some(bias) => y.broadcast_add(&bias.reshape((1, bias.elem_count(), 1, 1))?),
        None => Ok(y),
    }
}

/// The sum of at least one tensor.
pub(super) fn sum(parts: impl Iterator<Item = candle_core::Result<Tensor>>) -> candle_core::Result<Tensor> {
    parts.reduce(|a, b| a? + b?).ok_or_else(|| candle_core::Error::Msg("the window has no taps".into()))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Dim;

    /// Each output element is a sum over the channels of its group and over all taps of the window.
    #[test]
    fn multiply_accumulates_are_counted_over_channels_and_taps() {
        let floats = |shape: &[usize]| TensorType { element: crate::ir::Element::Float, shape: shape.iter().map(|size| Dim::Fixed(*size)).collect() };
        for (x, weight, groups, expected) in [
            (vec![2, 4, 9, 7], vec![8, 2, 3, 5], 2, 2 * 8 * 7 * 3 * (2 * 3 * 5)),
            (vec![1, 6, 8, 8], vec![6, 1, 3, 3], 6, 6 * 6 * 6 * 9),
            (vec![3, 5, 11], vec![7, 5, 4], 1, 3 * 7 * 8 * (5 * 4)),
        ] {
            let (conv, x, weight) = (Conv { groups, ..Conv::default() }, floats(&x), floats(&weight));
            let output = conv.infer(&[&x, &weight]).unwrap();
            assert_eq!(conv.macs(&[&x, &weight], &output, &Bindings::new()), expected);
        }
    }
}
