//! Transposed convolution of images, and of sequences.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::conv::{axes, channels, window, with_bias};
use super::gradient::wide;
use super::sides::{Padding, PerAxis};
use super::windows::{Slide, convolved, images, input_gradient, like, over, sides, weight_gradient};
use super::{Backward, OpSpec, elements, require_vector, unfit};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// What the gradient of a convolution does with images: `[batch, in, height, width]` and `[in, out / groups, kh, kw]`, or
/// `[batch, in, length]` and `[in, out / groups, k]`; the bias may be left out. Of numbers for two axes, a sequence takes those for the
/// width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConvTranspose {
    /// Distance of neighbouring windows in the output.
    pub stride: PerAxis,
    /// Places of the output that are cut off.
    pub padding: Padding,
    /// Distance of the window's taps.
    pub dilation: PerAxis,
    /// Channels are split into this many groups.
    pub groups: usize,
    /// Rows below and columns right of what windows reach.
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
    /// What windows of so many taps make of axes of these sizes.
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
        made.ok_or_else(|| "the padding cuts off all that there is, or what is left is larger than any memory".into())
    }

    /// The convolution whose gradient it is: how its windows move over the output.
    fn slide(&self, x: &[usize], weight: &[usize]) -> candle_core::Result<Slide> {
        let (places, taps) = (x.iter().skip(2).map(|size| Dim::Fixed(*size)).collect::<Vec<_>>(), weight.iter().skip(2).copied().collect::<Vec<_>>());
        let made: Vec<usize> = self.sizes(&places, &taps).map_err(unfit)?.iter().filter_map(Dim::fixed).collect();
        let ([stride, dilation], padding) = over(x.len(), [self.stride, self.dilation], self.padding);
        let size = sides(&[&x[..2], &made].concat());
        Ok(Slide { size, kernel: sides(weight), stride: stride.0, dilation: dilation.0, before: padding.before(), positions: sides(x) })
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
            return Err(format!("the input has {channels} channels, the weight takes {inner} in {} groups", self.groups));
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
        like(with_bias(y, inputs.get(2))?, inputs[0].rank())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (rank, gradient) = (backward.gradient.rank(), &images(backward.gradient)?);
        let (x, weight) = (&images(backward.inputs[0].tensor()?)?, &images(backward.inputs[1].tensor()?)?);
        let slide = &self.slide(backward.inputs[0].dims(), backward.inputs[1].dims())?;
        let of_input = backward.of(0, || like(convolved(gradient, weight, slide, self.groups)?, rank))?;
        let of_weight = backward.of(1, || like(weight_gradient(gradient, x, slide, self.groups)?, rank))?;
        let of_bias = backward.of(2, || wide(gradient)?.sum((0, 2, 3))?.to_dtype(gradient.dtype()))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn macs(&self, inputs: &[&TensorType], _output: &TensorType, bindings: &Bindings) -> u64 {
        let taps: u64 = inputs[1].shape[1..].iter().map(|d| d.evaluate(bindings).unwrap_or(0) as u64).fold(1, u64::saturating_mul);
        elements(inputs[0], bindings).saturating_mul(taps)
    }
}
