//! Backward pass of convolutions: by kernels on the CPU in f32, elsewhere as convolutions of the gradient.

use candle_core::{D, Result, Tensor};

use super::host::{Host, by_channel, channels, channels_first, planes, readable, with_planes};
use super::{Backward, Conv};
use crate::kernel::channels as kernel;
use crate::kernel::convolution_gradient::{Sizes, input_gradient, weight_gradient};

/// Gradients of image, weight, and the bias if there is one.
pub(super) fn backward(conv: &Conv, backward: &Backward) -> Result<Vec<Option<Tensor>>> {
    let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
    let mut gradients =
        if readable([x, weight, backward.gradient]) { by_kernels(conv, backward, x, weight)? } else { by_primitives(conv, backward, x, weight)? };
    gradients.truncate(backward.inputs.len());
    Ok(gradients)
}

fn by_kernels(conv: &Conv, backward: &Backward, x: &Tensor, weight: &Tensor) -> Result<Vec<Option<Tensor>>> {
    let (images, inputs, height, width) = x.dims4()?;
    let (outputs, _, kernel_height, kernel_width) = weight.dims4()?;
    let window = conv.window([height, width], [kernel_height, kernel_width]);
    let sizes = Sizes { images, inputs, outputs, groups: conv.groups, window };
    let (x, weight, gradient) = (with_planes(x)?, weight.contiguous()?, by_channel(backward.gradient)?);
    let missing = || candle_core::Error::Msg("a tensor of the host cannot be read".into());
    let gradient_host = Host::of(&gradient);
    let gradient_values = gradient_host.as_ref().and_then(Host::floats).ok_or_else(missing)?;
    let gradient_values = &gradient_values[..gradient.elem_count()];
    let of_input = backward.of(0, || {
        let host = Host::of(&weight);
        let mut y = vec![0.0; x.elem_count()];
        input_gradient(sizes, host.as_ref().and_then(Host::floats).ok_or_else(missing)?, gradient_values, &mut y);
        channels_first(y, [images, inputs, height, width])
    })?;
    let of_weight = backward.of(1, || {
        let host = Host::of(&x);
        let mut y = vec![0.0; weight.elem_count()];
        let planes = host.as_ref().and_then(|host| planes(&x, host)).ok_or_else(missing)?;
        weight_gradient(sizes, &planes, gradient_values, &mut y);
        Tensor::from_vec(y, weight.dims(), x.device())
    })?;
    let of_bias = backward.of(2, || {
        let channels = gradient_host.as_ref().and_then(|host| channels(&gradient, host)).ok_or_else(missing)?;
        Tensor::from_vec(kernel::sums(&channels), outputs, x.device())
    })?;
    Ok(vec![of_input, of_weight, of_bias])
}

fn by_primitives(conv: &Conv, backward: &Backward, x: &Tensor, weight: &Tensor) -> Result<Vec<Option<Tensor>>> {
    let gradient = backward.gradient;
    let sizes = [x.dim(2)?, x.dim(3)?];
    let kernel = [weight.dim(2)?, weight.dim(3)?];
    let depthwise = conv.groups == x.dim(1)? && conv.groups == weight.dim(0)? && conv.groups > 1;
    // With zeros between its elements, the gradient meets taps one by one, whatever the stride.
    let apart = |gradient: &Tensor| gradient_apart(gradient, conv.stride);
    let of_input = backward.of(0, || {
        let mut wide = apart(gradient)?;
        for axis in [0, 1] {
            let reach = conv.dilation * (kernel[axis] - 1);
            wide = fit(&wide, axis + 2, reach as isize - conv.padding as isize, sizes[axis] + reach)?;
        }
        if depthwise {
            return taps(kernel, |row, column, tap| {
                let turned = weight.flatten_from(2)?.narrow(1, 0, 1)?.narrow(2, kernel[0] * kernel[1] - 1 - tap, 1)?;
                let part = wide.narrow(2, row * conv.dilation, sizes[0])?.narrow(3, column * conv.dilation, sizes[1])?;
                part.broadcast_mul(&turned.reshape((1, conv.groups, 1, 1))?)
            })?
            .into_iter()
            .try_fold(None, |sum: Option<Tensor>, part| sum.map_or_else(|| Ok(Some(part.clone())), |sum| (sum + &part).map(Some)))?
            .ok_or_else(|| candle_core::Error::Msg("a convolution without taps".into()));
        }
        let parts = groups(conv, |group| {
            let turned = part(weight, 0, conv.groups, group)?.transpose(0, 1)?.contiguous()?.flip(&[2, 3])?.contiguous()?;
            part(&wide, 1, conv.groups, group)?.contiguous()?.conv2d(&turned, 0, 1, conv.dilation, 1)
        })?;
        Tensor::cat(&parts, 1)
    })?;
    let of_weight = backward.of(1, || {
        if depthwise {
            let wide = apart(gradient)?;
            let mut padded = x.clone();
            for axis in [0, 1] {
                let length = wide.dim(axis + 2)? + conv.dilation * (kernel[axis] - 1);
                padded = fit(&padded, axis + 2, conv.padding as isize, length)?;
            }
            let (height, width) = (wide.dim(2)?, wide.dim(3)?);
            let parts = taps(kernel, |row, column, _| {
                let part = padded.narrow(2, row * conv.dilation, height)?.narrow(3, column * conv.dilation, width)?;
                super::gradient::wide(&(part * &wide)?)?.sum((0, 2, 3))
            })?;
            return Tensor::stack(&parts, D::Minus1)?.reshape(weight.dims())?.to_dtype(weight.dtype());
        }
        let padded = x.pad_with_zeros(2, conv.padding, conv.padding)?.pad_with_zeros(3, conv.padding, conv.padding)?;
        let parts = groups(conv, |group| {
            // Images and channels change places: the gradient is the window, and its step the distance of the taps.
            let images = part(&padded, 1, conv.groups, group)?.transpose(0, 1)?.contiguous()?;
            let window = part(gradient, 1, conv.groups, group)?.transpose(0, 1)?.contiguous()?;
            let reach = |axis: usize| conv.stride * (window.dims()[axis] - 1) + conv.dilation * (kernel[axis - 2] - 1) + 1;
            let images = images.narrow(2, 0, reach(2))?.narrow(3, 0, reach(3))?.contiguous()?;
            images.conv2d(&window, 0, conv.dilation, conv.stride, 1)?.transpose(0, 1)
        })?;
        Tensor::cat(&parts, 0)?.contiguous()
    })?;
    let of_bias = backward.of(2, || super::gradient::wide(gradient)?.sum((0, 2, 3))?.to_dtype(gradient.dtype()))?;
    Ok(vec![of_input, of_weight, of_bias])
}

/// One of some equal parts of an axis.
fn part(tensor: &Tensor, axis: usize, parts: usize, index: usize) -> Result<Tensor> {
    let size = tensor.dim(axis)? / parts;
    tensor.narrow(axis, index * size, size)
}

fn groups(conv: &Conv, of: impl Fn(usize) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    (0..conv.groups).map(of).collect()
}

/// Something for the row, the column and the number of each tap.
fn taps([height, width]: [usize; 2], of: impl Fn(usize, usize, usize) -> Result<Tensor>) -> Result<Vec<Tensor>> {
    (0..height * width).map(|tap| of(tap / width, tap % width, tap)).collect()
}

/// Images with `stride - 1` zeros behind each row and column.
fn gradient_apart(gradient: &Tensor, stride: usize) -> Result<Tensor> {
    if stride == 1 {
        return Ok(gradient.clone());
    }
    let (images, channels, height, width) = gradient.dims4()?;
    let apart = gradient.reshape((images * channels, height, 1, width, 1))?.pad_with_zeros(2, 0, stride - 1)?.pad_with_zeros(4, 0, stride - 1)?;
    apart.reshape((images, channels, height * stride, width * stride))
}

/// An axis with zeros before it, or without its first elements if there are less than none; cut or filled to a length.
fn fit(tensor: &Tensor, axis: usize, before: isize, length: usize) -> Result<Tensor> {
    let tensor = if before < 0 {
        let cut = before.unsigned_abs().min(tensor.dim(axis)?);
        tensor.narrow(axis, cut, tensor.dim(axis)? - cut)?
    } else {
        tensor.pad_with_zeros(axis, before.unsigned_abs(), 0)?
    };
    let have = tensor.dim(axis)?;
    if have < length { tensor.pad_with_zeros(axis, 0, length - have) } else { tensor.narrow(axis, 0, length) }
}
