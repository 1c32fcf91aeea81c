//! Pooling over images and sequences.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::conv::sum;
use super::gradient::wide;
use super::spatial::{Padding, PerAxis};
use super::windows::{Slide, from_taps, images, output_sizes, per_axis, spatial_sizes, taps, with_rank};
use super::{Backward, OpSpec, require};
use crate::ir::{Element, TensorType};

/// Window geometry of a pooling op.
#[derive(Debug, Clone, Copy)]
struct Pool {
    kernel: PerAxis,
    steps: [PerAxis; 2],
    padding: Padding,
    ceil: bool,
}

impl Pool {
    /// Infers the type of pooled images `[batch, channels, height, width]` or sequences `[batch,
    /// channels, length]`.
    fn infer(&self, x: &TensorType) -> Result<TensorType, String> {
        require(x, Element::Float, "the input")?;
        let rank = x.shape.len();
        if !matches!(rank, 3 | 4) {
            return Err("the input must have 3 or 4 axes".into());
        }
        let kernel = &self.kernel.0[4 - rank..];
        let extent = |axis: usize| self.steps[1].0[axis].saturating_mul(self.kernel.0[axis].saturating_sub(1)).saturating_add(1);
        if (4 - rank..2).any(|axis| self.padding.0[axis] >= extent(axis) || self.padding.0[axis + 2] >= extent(axis)) {
            return Err("padding must be smaller than the window".into());
        }
        let mut shape = x.shape[..2].to_vec();
        shape.extend(output_sizes(&x.shape[2..], kernel, self.steps, self.padding, self.ceil)?);
        Ok(TensorType { element: Element::Float, shape })
    }

    /// The window geometry for images of these sizes.
    fn slide(&self, dims: &[usize]) -> candle_core::Result<Slide> {
        let (steps, padding) = per_axis(dims.len(), self.steps, self.padding);
        let kernel = if dims.len() == 3 { [1, self.kernel.0[1]] } else { self.kernel.0 };
        Slide::new(spatial_sizes(dims), kernel, steps, padding, self.ceil)
    }
}

/// Axes of a pooling op: channels are preserved.
fn by_channel(inputs: &[&TensorType]) -> String {
    let places = " _".repeat(inputs[0].shape.len().saturating_sub(2));
    format!("b c{places} -> b c{places}")
}

/// Max pooling of `[batch, channels, height, width]` or `[batch, channels, length]`. For sequences, the
/// values for the width apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MaxPool {
    /// Size of the window.
    pub kernel: PerAxis,
    /// Stride of the window.
    pub stride: PerAxis,
    /// Padding, which is never the maximum.
    pub padding: Padding,
    /// Dilation of the window.
    #[serde(skip_serializing_if = "PerAxis::is_one")]
    pub dilation: PerAxis,
    /// Whether to include windows that start inside and end outside the padded image.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ceil: bool,
}

impl Default for MaxPool {
    fn default() -> Self {
        Self { kernel: 2.into(), stride: 2.into(), padding: 0.into(), dilation: 1.into(), ceil: false }
    }
}

impl MaxPool {
    fn pool(&self) -> Pool {
        Pool { kernel: self.kernel, steps: [self.stride, self.dilation], padding: self.padding, ceil: self.ceil }
    }

    /// The window geometry for images of these sizes.
    pub(super) fn slide(&self, dims: &[usize]) -> candle_core::Result<Slide> {
        self.pool().slide(dims)
    }
}

impl OpSpec for MaxPool {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        self.pool().infer(inputs[0])
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        by_channel(inputs)
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (mut x, mut slide) = (images(&inputs[0])?, self.slide(inputs[0].dims())?);
        if slide.before != [0, 0] || (0..2).any(|axis| slide.covered(axis) > slide.size[axis]) {
            (x, slide) = slide.cut(&x, f64::NEG_INFINITY)?;
        }
        let [down, along] = slide.stride;
        let y = if slide.dilation == [1, 1] {
            x.max_pool2d_with_stride((slide.kernel[0], slide.kernel[1]), (down, along))?
        } else {
            largest(&taps(&x, &slide, f64::NEG_INFINITY)?)?
        };
        with_rank(y, inputs[0].rank())
    }

    /// Of equal values in a window, the first receives the gradient.
    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let (x, gradient) = (images(backward.inputs[0].tensor()?)?, images(backward.gradient)?);
            let slide = self.slide(backward.inputs[0].dims())?;
            let met = taps(&x, &slide, f64::NEG_INFINITY)?;
            let largest = largest(&met)?;
            let mut left = gradient.clone();
            let found = from_taps(&slide, |tap| {
                let part = (met[tap].eq(&largest)?.to_dtype(gradient.dtype())? * &left)?;
                left = (&left - &part)?;
                Ok(part)
            })?;
            with_rank(found, backward.gradient.rank())
        })?;
        Ok(vec![of_input])
    }
}

/// Elementwise maximum.
fn largest(tensors: &[Tensor]) -> candle_core::Result<Tensor> {
    tensors.iter().skip(1).try_fold(tensors[0].clone(), |largest, tensor| largest.maximum(tensor))
}

/// Average pooling of `[batch, channels, height, width]` or `[batch, channels, length]`. For sequences,
/// the values for the width apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AveragePool {
    /// Size of the window.
    pub kernel: PerAxis,
    /// Stride of the window.
    pub stride: PerAxis,
    /// Padding.
    pub padding: Padding,
    /// Dilation of the window.
    #[serde(skip_serializing_if = "PerAxis::is_one")]
    pub dilation: PerAxis,
    /// Whether to include windows that start inside and end outside the padded image.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ceil: bool,
    /// Whether the mean includes the padding as zeros; otherwise it is over the elements inside.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub count_padding: bool,
}

impl Default for AveragePool {
    fn default() -> Self {
        Self { kernel: 2.into(), stride: 2.into(), padding: 0.into(), dilation: 1.into(), ceil: false, count_padding: false }
    }
}

impl AveragePool {
    fn pool(&self) -> Pool {
        Pool { kernel: self.kernel, steps: [self.stride, self.dilation], padding: self.padding, ceil: self.ceil }
    }

    /// The reciprocal of the number of elements in each window, `[1, 1, rows, columns]`.
    fn shares(&self, slide: &Slide, rank: usize, like: &Tensor) -> candle_core::Result<Tensor> {
        let (_, padding) = per_axis(rank, [self.stride, self.dilation], self.padding);
        let shares = constant(format!("{self:?} {slide:?}"), like.device(), |device| {
            let counted = |axis: usize| {
                let (before, behind) = if self.count_padding { (padding.0[axis], padding.0[axis + 2]) } else { (0, 0) };
                // Positions count from the start of the padding.
                let inside = slide.before[axis] - before..slide.before[axis] + slide.size[axis] + behind;
                let tap = move |position: usize, tap: usize| position * slide.stride[axis] + tap * slide.dilation[axis];
                (0..slide.positions[axis]).map(move |at| (0..slide.kernel[axis]).filter(|of| inside.contains(&tap(at, *of))).count()).collect::<Vec<_>>()
            };
            let (down, along) = (counted(0), counted(1));
            let values: Vec<f32> = down.iter().flat_map(|rows| along.iter().map(move |columns| 1.0 / (rows * columns).max(1) as f32)).collect();
            Tensor::from_vec(values, (1, 1, down.len(), along.len()), device)
        })?;
        shares.to_dtype(like.dtype())
    }
}

impl OpSpec for AveragePool {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        self.pool().infer(inputs[0])
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        by_channel(inputs)
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, slide) = (wide(&images(&inputs[0])?)?, self.pool().slide(inputs[0].dims())?);
        let met = taps(&x, &slide, 0.0)?;
        let mean = sum(met.into_iter().map(Ok))?.broadcast_mul(&self.shares(&slide, inputs[0].rank(), &x)?)?;
        with_rank(mean.to_dtype(inputs[0].dtype())?, inputs[0].rank())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let (dims, gradient) = (backward.inputs[0].dims(), wide(&images(backward.gradient)?)?);
            let slide = self.pool().slide(dims)?;
            let share = gradient.broadcast_mul(&self.shares(&slide, dims.len(), &gradient)?)?;
            with_rank(from_taps(&slide, |_| Ok(share.clone()))?.to_dtype(backward.gradient.dtype())?, dims.len())
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

/// Global average pooling of `[batch, channels, …]` with any number of spatial axes to `[batch,
/// channels]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GlobalAveragePool {
    /// Whether the spatial axes remain with size 1, as in ONNX.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "keep")]
    pub keep_dims: bool,
}

impl OpSpec for GlobalAveragePool {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let rank = inputs[0].shape.len();
        if rank < 3 {
            return Err("the input must have at least 3 axes".into());
        }
        let mut shape = inputs[0].shape[..2].to_vec();
        shape.resize(if self.keep_dims { rank } else { 2 }, 1.into());
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let places = " _".repeat(inputs[0].shape.len().saturating_sub(2));
        format!("b c{places} -> b c{}", if self.keep_dims { &places } else { "" })
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let places: Vec<usize> = (2..inputs[0].rank()).collect();
        let x = wide(&inputs[0])?;
        let mean = if self.keep_dims { x.mean_keepdim(places) } else { x.mean(places) };
        mean?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.gradient_of(0, || {
            let share = (backward.gradient / dims[2..].iter().product::<usize>() as f64)?;
            let mut shape = dims[..2].to_vec();
            shape.resize(dims.len(), 1);
            share.reshape(shape)?.broadcast_as(dims)?.contiguous()
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
