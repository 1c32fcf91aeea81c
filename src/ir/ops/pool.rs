//! Pooling over images.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::replay;
use super::host::{Host, by_channel, channels_first, planes, readable, with_planes};
use super::{Backward, Mode, OpSpec, require_floats};
use crate::ir::{Element, TensorType};
use crate::kernel::channels::filled;
use crate::kernel::convolution::{Window, max_pool};
use crate::kernel::convolution_gradient::max_pool_gradient;
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

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let x = backward.inputs[0].tensor()?;
        if !backward.wants(0) {
            return Ok(vec![None]);
        }
        if readable([x, backward.gradient])
            && let Some(of_input) = self.fast_back(x, backward.gradient)
        {
            return Ok(vec![Some(of_input?)]);
        }
        replay(&|inputs| self.eval(inputs, Mode::Train), backward)
    }
}

impl MaxPool {
    fn fast(&self, x: &Tensor) -> Option<candle_core::Result<Tensor>> {
        let (images, channels, height, width) = x.dims4().ok()?;
        let window = self.window([height, width]);
        let [rows, columns] = window.positions();
        let host = Host::of(x)?;
        let mut y = vec![0.0; images * channels * rows * columns];
        max_pool(&planes(x, &host)?, window, &mut y);
        Some(channels_first(y, [images, channels, rows, columns]))
    }

    fn window(&self, [height, width]: [usize; 2]) -> Window {
        Window { height, width, kernel: [self.kernel; 2], stride: self.stride, padding: self.padding, dilation: 1 }
    }

    fn fast_back(&self, x: &Tensor, gradient: &Tensor) -> Option<candle_core::Result<Tensor>> {
        let (images, channels, height, width) = x.dims4().ok()?;
        let (x, gradient) = (with_planes(x).ok()?, by_channel(gradient).ok()?);
        let (host, gradient) = (Host::of(&x)?, Host::of(&gradient)?);
        let mut y = vec![0.0; x.elem_count()];
        max_pool_gradient(&planes(&x, &host)?, gradient.floats()?, self.window([height, width]), &mut y);
        Some(channels_first(y, [images, channels, height, width]))
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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer
            && let Some(y) = fast_mean(&inputs[0])
        {
            return y;
        }
        inputs[0].mean((2, 3))
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let &[images, channels, height, width] = dims else { candle_core::bail!("images have four axes") };
        let of_input = backward.of(0, || {
            let share = (backward.gradient / (height * width) as f64)?;
            if readable([&share]) {
                let mut y = vec![0.0; dims.iter().product()];
                filled(&share.t()?.flatten_all()?.to_vec1::<f32>()?, &mut y);
                return channels_first(y, [images, channels, height, width]);
            }
            share.reshape((images, channels, 1, 1))?.broadcast_as(dims)?.contiguous()
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

fn fast_mean(x: &Tensor) -> Option<candle_core::Result<Tensor>> {
    let (images, channels, _, _) = x.dims4().ok()?;
    let host = Host::of(x)?;
    let y = means(&planes(x, &host)?);
    Some(Tensor::from_vec(y, (channels, images), x.device()).and_then(|y| y.t()?.contiguous()))
}
