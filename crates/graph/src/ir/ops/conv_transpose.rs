//! Transposed convolution of images and sequences.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::conv::{axes, channels, window, with_bias};
use super::gradient::wide;
use super::spatial::{Padding, PerAxis};
use super::windows::{Slide, convolved, images, input_gradient, per_axis, spatial_sizes, weight_gradient, with_rank};
use super::{Backward, OpSpec, require_vector, shape_error, sums};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Transposed convolution of `[batch, in, height, width]` with `[in, out / groups, kh, kw]`, or of
/// `[batch, in, length]` with `[in, out / groups, k]`; the bias is optional. For sequences, the values
/// for the width apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConvTranspose {
    /// Distance of neighboring windows in the output.
    pub stride: PerAxis,
    /// Padding that is cropped from the output.
    pub padding: Padding,
    /// Dilation of the window.
    pub dilation: PerAxis,
    /// Number of groups of channels.
    pub groups: usize,
    /// Additional rows at the bottom and columns at the right of the output.
    #[serde(skip_serializing_if = "none")]
    pub output_padding: PerAxis,
}

fn none(output_padding: &PerAxis) -> bool {
    *output_padding == 0
}

impl Default for ConvTranspose {
    fn default() -> Self {
        Self { stride: 1.into(), padding: 0.into(), dilation: 1.into(), groups: 1, output_padding: 0.into() }
    }
}

impl ConvTranspose {
    /// Output sizes for axes of these sizes and a window with this many taps.
    fn sizes(&self, from: &[Dim], taps: &[usize]) -> Result<Vec<Dim>, String> {
        if self.stride.0.contains(&0) || self.dilation.0.contains(&0) || taps.contains(&0) {
            return Err("stride, dilation and sides of the window must be at least 1".into());
        }
        let made = |(at, (size, taps)): (usize, (&Dim, &usize))| {
            let axis = at + 2 - from.len();
            let reach = self.dilation.0[axis].checked_mul(taps - 1)?.checked_add(1)?.checked_add(self.output_padding.0[axis])?;
            let more = i64::try_from(reach).ok()?.checked_sub(i64::try_from(self.padding.around(axis)?).ok()?)?;
            let more = more.checked_sub(i64::try_from(self.stride.0[axis]).ok()?)?;
            size.times(&Dim::Fixed(self.stride.0[axis]))?.moved(more).filter(|size| *size != Dim::Fixed(0))
        };
        let made: Option<Vec<Dim>> = from.iter().zip(taps).enumerate().map(made).collect();
        made.ok_or_else(|| "the output is empty after removing the padding, or its size overflows".into())
    }

    /// The convolution whose input gradient this op computes: its window moves over the output.
    fn slide(&self, x: &[usize], weight: &[usize]) -> candle_core::Result<Slide> {
        let (places, taps) = (x.iter().skip(2).map(|size| Dim::Fixed(*size)).collect::<Vec<_>>(), weight.iter().skip(2).copied().collect::<Vec<_>>());
        let made: Vec<usize> = self.sizes(&places, &taps).map_err(shape_error)?.iter().filter_map(Dim::fixed).collect();
        let ([stride, dilation], padding) = per_axis(x.len(), [self.stride, self.dilation], self.padding);
        let size = spatial_sizes(&[&x[..2], &made].concat());
        Ok(Slide { size, kernel: spatial_sizes(weight), stride: stride.0, dilation: dilation.0, before: padding.before(), positions: spatial_sizes(x) })
    }
}

impl OpSpec for ConvTranspose {
    fn arity(&self) -> Range<usize> {
        2..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [x, weight] = [inputs[0], inputs[1]];
        let (channels, inner, out) = channels(x, weight, self.groups)?;
        if inner != channels || !inner.is_multiple_of(self.groups) {
            return Err(format!("the input has {channels} channels, but the weight requires {inner} in {} groups", self.groups));
        }
        let out = Dim::product(out, self.groups)?;
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, &out, "the bias")?;
        }
        let mut shape = vec![x.shape[0].clone(), out];
        shape.extend(self.sizes(&x.shape[2..], &window(weight)?)?);
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        axes(inputs, self.groups, true)
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        if self.groups > 1 {
            self.groups = size("g");
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let slide = self.slide(inputs[0].dims(), inputs[1].dims())?;
        let y = input_gradient(&images(&inputs[0])?, &images(&inputs[1])?, &slide, self.groups)?;
        with_rank(with_bias(y, inputs.get(2))?, inputs[0].rank())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (rank, gradient) = (backward.gradient.rank(), &images(backward.gradient)?);
        let (x, weight) = (&images(backward.inputs[0].tensor()?)?, &images(backward.inputs[1].tensor()?)?);
        let slide = &self.slide(backward.inputs[0].dims(), backward.inputs[1].dims())?;
        let of_input = backward.gradient_of(0, || with_rank(convolved(gradient, weight, slide, self.groups)?, rank))?;
        let of_weight = backward.gradient_of(1, || with_rank(weight_gradient(gradient, x, slide, self.groups)?, rank))?;
        let of_bias = backward.gradient_of(2, || wide(gradient)?.sum((0, 2, 3))?.to_dtype(gradient.dtype()))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn macs(&self, inputs: &[&TensorType], _output: &TensorType, bindings: &Bindings) -> u64 {
        sums(inputs[0], &inputs[1].shape[1..], bindings)
    }
}
