//! Pooling over images.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::host::{Host, channels_first, planes};
use super::{Mode, OpSpec, require, require_arity, require_rank};
use crate::ir::{Element, TensorType};
use crate::kernel::convolution::{Window, max_pool};
use crate::kernel::rows::means;

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
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        require_rank(inputs[0], 4, "the input")?;
        if self.kernel == 0 || self.stride == 0 || 2 * self.padding > self.kernel {
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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer
            && let Some(y) = self.fast(&inputs[0])
        {
            return y;
        }
        let mut x = inputs[0].clone();
        if self.padding > 0 {
            for axis in [2, 3] {
                let mut shape = x.dims().to_vec();
                shape[axis] = self.padding;
                let border = Tensor::full(f32::MIN, shape.as_slice(), x.device())?.to_dtype(x.dtype())?;
                x = Tensor::cat(&[&border, &x, &border], axis)?;
            }
        }
        if mode == Mode::Infer {
            return x.max_pool2d_with_stride(self.kernel, self.stride);
        }
        // The fused kernel's gradient is wrong; rows and columns of each tap are picked and compared.
        let (_, _, height, width) = x.dims4()?;
        let positions = |size: usize, tap: usize| {
            let count = (size - self.kernel) / self.stride + 1;
            Tensor::from_vec((0..count).map(|i| (i * self.stride + tap) as u32).collect::<Vec<_>>(), count, x.device())
        };
        let mut best: Option<Tensor> = None;
        for row in 0..self.kernel {
            let rows = x.index_select(&positions(height, row)?, 2)?;
            for column in 0..self.kernel {
                let tap = rows.index_select(&positions(width, column)?, 3)?;
                best = Some(match best {
                    Some(best) => best.maximum(&tap)?,
                    None => tap,
                });
            }
        }
        best.ok_or_else(|| candle_core::Error::Msg("MaxPool with an empty window".into()))
    }
}

impl MaxPool {
    fn fast(&self, x: &Tensor) -> Option<candle_core::Result<Tensor>> {
        let (images, channels, height, width) = x.dims4().ok()?;
        let window = Window { height, width, kernel: [self.kernel; 2], stride: self.stride, padding: self.padding, dilation: 1 };
        let [rows, columns] = window.positions();
        let host = Host::of(x)?;
        let mut y = vec![0.0; images * channels * rows * columns];
        max_pool(&planes(x, &host)?, window, &mut y);
        Some(channels_first(y, [images, channels, rows, columns]))
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
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        require_rank(inputs[0], 4, "the input")?;
        Ok(TensorType { element: Element::Float, shape: inputs[0].shape[..2].to_vec() })
    }

    fn axes(&self, _inputs: usize) -> String {
        "b c _ _ -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer
            && let Some(y) = fast_mean(&inputs[0])
        {
            return y;
        }
        inputs[0].mean((2, 3))
    }
}

fn fast_mean(x: &Tensor) -> Option<candle_core::Result<Tensor>> {
    let (images, channels, _, _) = x.dims4().ok()?;
    let host = Host::of(x)?;
    let y = means(&planes(x, &host)?);
    Some(Tensor::from_vec(y, (channels, images), x.device()).and_then(|y| y.t()?.contiguous()))
}
