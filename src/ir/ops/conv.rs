//! Two-dimensional convolution.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::conv_gradient;
use super::host::{Host, Steps, channels_first, planes};
use super::{After, Backward, Mode, OpSpec, elements, require_floats, require_rank, require_vector};
use crate::ir::{Bindings, Dim, Element, TensorType};
use crate::kernel::convolution::{Window, depthwise};
use crate::kernel::epilogue::{self, Epilogue, Fused};
use crate::kernel::matmul::Left;
use crate::kernel::shifted::convolve;

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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer
            && let Some(y) = self.eval_then(inputs, &[])?
        {
            return Ok(y);
        }
        let (x, padding) = self.evenly(&inputs[0], &inputs[1])?;
        let y = x.conv2d(&inputs[1], padding, self.stride, self.dilation, self.groups)?;
        match inputs.get(2) {
            Some(bias) => y.broadcast_add(&bias.reshape((1, bias.elem_count(), 1, 1))?),
            None => Ok(y),
        }
    }

    fn eval_then(&self, inputs: &[Tensor], after: &[After]) -> candle_core::Result<Option<Tensor>> {
        let (x, weight) = (&inputs[0], inputs[1].contiguous()?);
        let (images, _, height, width) = x.dims4()?;
        let (channels, inner, kernel_height, kernel_width) = weight.dims4()?;
        let window = self.window([height, width], [kernel_height, kernel_width]);
        let [rows, columns] = window.positions();
        let shape = [images, channels, rows, columns];
        let fits = |like: &Tensor| like.dims() == shape && like.transpose(0, 1).is_ok_and(|t| t.is_contiguous());
        let compute = || {
            let bias = match inputs.get(2) {
                Some(bias) if bias.is_contiguous() => Some(Host::of(bias)?),
                Some(_) => return None,
                None => None,
            };
            let steps = Steps::new(after, fits)?;
            let mut finish = Vec::new();
            if let Some(bias) = &bias {
                finish.push(Fused::AddToRows(bias.floats()?));
            }
            finish.extend(steps.finish()?);
            let (x_host, weight) = (Host::of(x)?, Host::of(&weight)?);
            let (planes, weight) = (planes(x, &x_host)?, weight.floats()?);
            let mut y = vec![0.0; shape.iter().product()];
            let size = images * rows * columns;
            if inner == 1 && channels == self.groups {
                depthwise(&planes, images, weight, window, &mut y);
                epilogue::apply_to(&finish, &mut y, size);
                return Some(y);
            }
            let (taps, group) = (inner * kernel_height * kernel_width, channels / self.groups);
            let parts = planes.chunks_exact((inner * images).max(1)).zip(y.chunks_exact_mut((group * size).max(1)));
            for (index, (planes, y)) in parts.enumerate() {
                let left = Left::pack(&weight[index * group * taps..], group, taps, taps);
                let steps: Vec<Fused> = finish.iter().map(|step| step.from_row(index * group, size)).collect();
                convolve(planes, images, &left, window, Epilogue::of(&steps), y);
            }
            Some(y)
        };
        compute().map(|values| channels_first(values, shape)).transpose()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        conv_gradient::backward(self, backward)
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
    pub(super) fn window(&self, [height, width]: [usize; 2], kernel: [usize; 2]) -> Window {
        Window { height, width, kernel, stride: self.stride, padding: self.padding, dilation: self.dilation }
    }

    /// The image and its padding, so that the last windows leave equally much over in both directions: candle's
    /// gradient takes what is left over in height for both.
    fn evenly(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<(Tensor, usize)> {
        let room = |axis: usize| Ok::<_, candle_core::Error>((x.dim(axis)? + 2 * self.padding).saturating_sub(self.dilation * (weight.dim(axis)? - 1) + 1));
        let (height, width) = (room(2)?, room(3)?);
        let left = [height % self.stride, width % self.stride];
        if left[0] == left[1] {
            return Ok((x.clone(), self.padding));
        }
        let mut x = x.clone();
        for (axis, left) in [(2, left[0]), (3, left[1])] {
            x = x.pad_with_zeros(axis, self.padding, self.padding)?;
            x = x.narrow(axis, 0, x.dim(axis)? - left)?;
        }
        Ok((x.contiguous()?, 0))
    }
}
