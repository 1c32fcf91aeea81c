//! Pooling over images.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::windows::{fit, from_taps, taps};
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Element, TensorType};
use crate::kernel::convolution::Window;

/// The largest value of each window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MaxPool {
    /// Side of the window.
    pub kernel: usize,
    /// Step in both directions.
    pub stride: usize,
    /// Places around the image, which never win.
    pub padding: usize,
}

impl Default for MaxPool {
    fn default() -> Self {
        Self { kernel: 2, stride: 2, padding: 0 }
    }
}

impl OpSpec for MaxPool {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        if self.kernel == 0 || self.stride == 0 || self.padding > self.kernel / 2 {
            return Err("kernel and stride must be at least 1, and padding at most half the kernel".into());
        }
        let mut shape = inputs[0].shape.clone();
        for size in &mut shape[2..] {
            *size = size.window(self.kernel, self.padding, self.stride).ok_or_else(|| format!("the window is larger than the image, {size}"))?;
        }
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, _inputs: usize) -> String {
        "b c _ _ -> b c _ _".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let mut x = inputs[0].clone();
        for axis in [2, 3].into_iter().filter(|_| self.padding > 0) {
            x = fit(&x, axis, self.padding as isize, x.dim(axis)? + 2 * self.padding, f64::NEG_INFINITY)?;
        }
        x.max_pool2d_with_stride(self.kernel, self.stride)
    }

    /// Of equal values in a window, the first has the gradient.
    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.of(0, || {
            let (x, gradient) = (backward.inputs[0].tensor()?, backward.gradient);
            let window = self.window([x.dim(2)?, x.dim(3)?]);
            let met = taps(x, window, f64::NEG_INFINITY)?;
            let largest = met.iter().skip(1).try_fold(met[0].clone(), |largest, met| largest.maximum(met))?;
            let mut left = gradient.clone();
            from_taps(window, |tap| {
                let part = (met[tap].eq(&largest)?.to_dtype(gradient.dtype())? * &left)?;
                left = (&left - &part)?;
                Ok(part)
            })
        })?;
        Ok(vec![of_input])
    }
}

impl MaxPool {
    pub(super) fn window(&self, [height, width]: [usize; 2]) -> Window {
        Window { height, width, kernel: [self.kernel; 2], stride: self.stride, padding: self.padding, dilation: 1 }
    }
}

/// The mean of each channel: `[batch, channels, height, width]` to `[batch, channels]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GlobalAveragePool {}

impl OpSpec for GlobalAveragePool {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        Ok(TensorType { element: Element::Float, shape: inputs[0].shape[..2].to_vec() })
    }

    fn axes(&self, _inputs: usize) -> String {
        "b c _ _ -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        wide(&inputs[0])?.mean((2, 3))?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.of(0, || {
            let share = (backward.gradient / (dims[2] * dims[3]) as f64)?;
            share.reshape((dims[0], dims[1], 1, 1))?.broadcast_as(dims)?.contiguous()
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
