//! Windows that slide over images, tap by tap.

use candle_core::{DType, Result, Tensor};

use super::gradient::wide;
use crate::kernel::convolution::Window;

/// What each tap of a window meets, `[batch, channels, rows, columns]`, row by row of the window. Places around the image hold `fill`.
pub(super) fn taps(x: &Tensor, window: Window, fill: f64) -> Result<Vec<Tensor>> {
    let positions = window.positions();
    let mut x = x.clone();
    for axis in [0, 1] {
        let length = positions[axis] * window.stride + window.dilation * (window.kernel[axis] - 1);
        x = fit(&x, axis + 2, window.padding as isize, length, fill)?;
    }
    each_tap(window, |taps| {
        let mut met = x.clone();
        for axis in [0, 1] {
            let run = met.narrow(axis + 2, taps[axis] * window.dilation, positions[axis] * window.stride)?;
            met = if window.stride == 1 {
                run
            } else {
                let (before, after) = (run.dims()[..axis + 2].to_vec(), run.dims()[axis + 3..].to_vec());
                let split = [before.as_slice(), &[positions[axis], window.stride], &after].concat();
                run.contiguous()?.reshape(split)?.narrow(axis + 3, 0, 1)?.squeeze(axis + 3)?
            };
        }
        met.contiguous()
    })
}

/// The sum of images whose parts lie where taps have met them: what [`taps`] does, the other way round.
pub(super) fn from_taps(window: Window, mut part: impl FnMut(usize) -> Result<Tensor>) -> Result<Tensor> {
    let sizes = [window.height, window.width];
    let mut sum: Option<Tensor> = None;
    for (index, taps) in each_tap(window, Ok)?.into_iter().enumerate() {
        let mut image = apart(&part(index)?, window.stride)?;
        for axis in [0, 1] {
            let before = (taps[axis] * window.dilation) as isize - window.padding as isize;
            image = fit(&image, axis + 2, before, sizes[axis], 0.0)?;
        }
        sum = Some(match sum {
            Some(sum) => (sum + image)?,
            None => image,
        });
    }
    sum.ok_or_else(|| candle_core::Error::Msg("a window without taps".into()))
}

/// A convolution of images with gaps between taps. In bf16 not every device has one; the same product in 32 bits is rounded then.
pub(super) fn convolved(x: &Tensor, weight: &Tensor, padding: usize, [stride, dilation, groups]: [usize; 3]) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match x.conv2d(&weight, padding, stride, dilation, groups) {
        Err(_) if x.dtype() == DType::BF16 => wide(&x)?.conv2d(&wide(&weight)?, padding, stride, dilation, groups)?.to_dtype(DType::BF16),
        result => result,
    }
}

/// Images with `stride - 1` zeros behind each row and column.
pub(super) fn apart(images: &Tensor, stride: usize) -> Result<Tensor> {
    if stride == 1 {
        return Ok(images.clone());
    }
    let (count, channels, height, width) = images.dims4()?;
    let apart = images.reshape((count * channels, height, 1, width, 1))?.pad_with_zeros(2, 0, stride - 1)?.pad_with_zeros(4, 0, stride - 1)?;
    apart.reshape((count, channels, height * stride, width * stride))
}

/// An axis with so many elements more before it, or less; cut or filled to a length.
pub(super) fn fit(tensor: &Tensor, axis: usize, before: isize, length: usize, fill: f64) -> Result<Tensor> {
    let padding = |count: usize| {
        let mut shape = tensor.dims().to_vec();
        shape[axis] = count;
        Tensor::full(fill as f32, shape, tensor.device())?.to_dtype(tensor.dtype())
    };
    let cut = before.min(0).unsigned_abs().min(tensor.dim(axis)?);
    let before = before.max(0).unsigned_abs().min(length);
    let kept = (tensor.dim(axis)? - cut).min(length - before);
    if kept == 0 {
        return padding(length);
    }
    let kept_part = tensor.narrow(axis, cut, kept)?;
    let after = length - before - kept;
    match (before, after) {
        (0, 0) => Ok(kept_part),
        (0, after) => Tensor::cat(&[&kept_part, &padding(after)?], axis),
        (before, 0) => Tensor::cat(&[&padding(before)?, &kept_part], axis),
        (before, after) => Tensor::cat(&[&padding(before)?, &kept_part, &padding(after)?], axis),
    }
}

/// Something for the row and the column of each tap.
fn each_tap<R>(window: Window, of: impl Fn([usize; 2]) -> Result<R>) -> Result<Vec<R>> {
    let [height, width] = window.kernel;
    (0..height * width).map(|tap| of([tap / width, tap % width])).collect()
}
