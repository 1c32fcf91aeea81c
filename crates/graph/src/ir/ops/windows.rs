//! Sliding windows over images, and convolutions built from them.

use candle_core::{DType, Result, Tensor};

use super::gradient::wide;
use super::spatial::{Padding, PerAxis};
use crate::ir::Dim;
use crate::kernel::convolution::Window;

/// Geometry of a sliding window over images; each array is height, width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slide {
    /// Size of the image.
    pub size: [usize; 2],
    /// Size of the window.
    pub kernel: [usize; 2],
    /// Stride.
    pub stride: [usize; 2],
    /// Dilation.
    pub dilation: [usize; 2],
    /// Padding at the top and left.
    pub before: [usize; 2],
    /// Number of positions of the window. The last ones may end outside of the image.
    pub positions: [usize; 2],
}

impl Slide {
    /// Geometry for a padded image; `ceil` as in [`output_sizes`].
    pub fn new(size: [usize; 2], kernel: [usize; 2], [stride, dilation]: [PerAxis; 2], padding: Padding, ceil: bool) -> Result<Slide> {
        let positions = output_sizes(&size.map(Dim::Fixed), &kernel, [stride, dilation], padding, ceil).map_err(super::shape_error)?;
        let positions = [0, 1].map(|axis| positions[axis].fixed().unwrap_or(0));
        Ok(Slide { size, kernel, stride: stride.0, dilation: dilation.0, before: padding.before(), positions })
    }

    /// Number of elements that the window covers in total, including padding.
    pub fn covered(&self, axis: usize) -> usize {
        (self.positions[axis].saturating_sub(1)) * self.stride[axis] + self.dilation[axis] * (self.kernel[axis] - 1) + 1
    }

    /// The common stride of both axes, if there is one; the stride of an axis with one position is
    /// irrelevant.
    fn step(&self) -> Option<usize> {
        common(self.stride, self.positions)
    }

    /// The common dilation of both axes, if there is one; the dilation of an axis with one tap is
    /// irrelevant.
    fn distance(&self) -> Option<usize> {
        common(self.dilation, self.kernel)
    }

    /// The geometry for kernels: padded at the end as far as the window reaches, with the stride limited
    /// to the padded size.
    pub fn window(&self) -> Window {
        let ([height, width], [above, left]) = (self.size, self.before);
        let behind = |axis: usize| self.covered(axis).saturating_sub(self.size[axis] + self.before[axis]);
        let padding = [above, left, behind(0), behind(1)];
        let window = Window { height, width, kernel: self.kernel, stride: self.stride, padding, dilation: self.dilation };
        let padded = window.padded();
        Window { stride: [0, 1].map(|axis| self.stride[axis].min(padded[axis].max(1))), ..window }
    }

    /// Padding, stride and dilation, if each is the same for both axes and all sides.
    fn symmetric(&self) -> Option<[usize; 3]> {
        let (padding, stride, dilation) = (self.before[0], self.step()?, self.distance()?);
        let window = Window { padding: [padding; 4], stride: [stride; 2], dilation: [dilation; 2], ..self.window() };
        let fits = |axis: usize| window.padded()[axis] > dilation * (self.kernel[axis] - 1);
        (self.before == [padding; 2] && fits(0) && fits(1) && window.positions() == self.positions).then_some([padding, stride, dilation])
    }

    /// Pads and crops images to the elements that the window covers, and returns the geometry for them.
    pub fn cut(&self, x: &Tensor, fill: f64) -> Result<(Tensor, Slide)> {
        let size = [self.covered(0), self.covered(1)];
        let mut x = x.clone();
        for axis in [0, 1] {
            x = pad_or_crop(&x, axis + 2, self.before[axis] as isize, size[axis], fill)?;
        }
        Ok((x, Slide { size, before: [0; 2], ..*self }))
    }
}

/// The common value of both axes, if there is one; that of an axis with the count 1 is irrelevant.
fn common([height, width]: [usize; 2], counts: [usize; 2]) -> Option<usize> {
    match counts {
        _ if height == width => Some(width),
        [_, 1] => Some(height),
        [1, _] => Some(width),
        _ => None,
    }
}

/// Adds a height axis to sequences; images are unchanged.
pub(super) fn images(x: &Tensor) -> Result<Tensor> {
    if x.rank() == 3 { x.unsqueeze(2) } else { Ok(x.clone()) }
}

/// The inverse of [`images`] for a tensor that had this rank.
pub(super) fn with_rank(y: Tensor, rank: usize) -> Result<Tensor> {
    if rank == 3 { y.squeeze(2) } else { Ok(y) }
}

/// Sizes of the spatial axes; a sequence has height 1.
pub(super) fn spatial_sizes(dims: &[usize]) -> [usize; 2] {
    match *dims {
        [_, _, width] => [1, width],
        [_, _, height, width] => [height, width],
        _ => [1, 1],
    }
}

/// Parameters for each axis; a sequence has height 1 without padding.
pub(super) fn per_axis(rank: usize, [stride, dilation]: [PerAxis; 2], padding: Padding) -> ([PerAxis; 2], Padding) {
    let [_, left, _, right] = padding.0;
    if rank == 3 { ([PerAxis([1, stride.0[1]]), PerAxis([1, dilation.0[1]])], Padding([0, left, 0, right])) } else { ([stride, dilation], padding) }
}

/// Output sizes of a window with this many taps on each axis; `ceil` includes positions that start inside
/// and end outside.
pub(super) fn output_sizes(
    sizes: &[Dim],
    taps: &[usize],
    [stride, dilation]: [PerAxis; 2],
    padding: Padding,
    ceil: bool,
) -> std::result::Result<Vec<Dim>, String> {
    if stride.0.contains(&0) || dilation.0.contains(&0) || taps.contains(&0) {
        return Err("stride, dilation and sides of the window must be at least 1".into());
    }
    let mut found = Vec::with_capacity(sizes.len());
    for (at, (size, taps)) in sizes.iter().zip(taps).enumerate() {
        let axis = at + 2 - sizes.len();
        let (stride, around) = (stride.0[axis], padding.around(axis).ok_or("the padding overflows")?);
        let extent = dilation.0[axis].checked_mul(taps - 1).and_then(|steps| steps.checked_add(1));
        let extent = extent.ok_or_else(|| format!("dilation {} overflows", dilation.0[axis]))?;
        let too_large = || format!("the window is larger than the image, {size}");
        let inside = size.window(extent, around, stride).ok_or_else(too_large)?;
        if !ceil || stride == 1 {
            found.push(inside);
            continue;
        }
        let further = around.checked_add(stride - 1).and_then(|around| size.window(extent, around, stride)).ok_or_else(too_large)?;
        let (before, behind) = (padding.0[axis], padding.0[axis + 2]);
        found.push(match (size.fixed(), further.fixed()) {
            // The last position must start inside the image or its padding at the start.
            (Some(size), Some(count)) if (count - 1).saturating_mul(stride) >= size.saturating_add(before) => Dim::Fixed(count - 1),
            (Some(_), Some(_)) => further,
            _ if behind.saturating_add(stride) <= extent => further,
            _ => return Err(format!("the output size of a ceil-mode window cannot be determined for the dynamic size {size}; fix it in the inputs")),
        });
    }
    Ok(found)
}

/// The elements that each tap of a window reads, `[batch, channels, rows, columns]`, in row-major order
/// of the taps. The padding has the value `fill`.
pub(super) fn taps(x: &Tensor, slide: &Slide, fill: f64) -> Result<Vec<Tensor>> {
    let Slide { positions, stride, dilation, .. } = *slide;
    let mut x = x.clone();
    for axis in [0, 1] {
        let length = positions[axis] * stride[axis] + dilation[axis] * (slide.kernel[axis] - 1);
        x = pad_or_crop(&x, axis + 2, slide.before[axis] as isize, length, fill)?;
    }
    each_tap(slide, |taps| {
        let mut met = x.clone();
        for axis in [0, 1] {
            let run = met.narrow(axis + 2, taps[axis] * dilation[axis], positions[axis] * stride[axis])?;
            met = if stride[axis] == 1 {
                run
            } else {
                let (before, after) = (run.dims()[..axis + 2].to_vec(), run.dims()[axis + 3..].to_vec());
                let split = [before.as_slice(), &[positions[axis], stride[axis]], &after].concat();
                run.contiguous()?.reshape(split)?.narrow(axis + 3, 0, 1)?.squeeze(axis + 3)?
            };
        }
        met.contiguous()
    })
}

/// The adjoint of [`taps`]: adds the part of each tap to the elements that it reads.
pub(super) fn from_taps(slide: &Slide, mut part: impl FnMut(usize) -> Result<Tensor>) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for (index, taps) in each_tap(slide, Ok)?.into_iter().enumerate() {
        let mut image = interleave_zeros(&part(index)?, slide.stride)?;
        for axis in [0, 1] {
            let before = (taps[axis] * slide.dilation[axis]) as isize - slide.before[axis] as isize;
            image = pad_or_crop(&image, axis + 2, before, slide.size[axis], 0.0)?;
        }
        sum = Some(match sum {
            Some(sum) => (sum + image)?,
            None => image,
        });
    }
    sum.ok_or_else(|| candle_core::Error::Msg("the window has no taps".into()))
}

/// Grouped convolution of images.
pub(super) fn convolved(x: &Tensor, weight: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let (x, slide) = if slide.symmetric().is_some() { (x.clone(), *slide) } else { slide.cut(x, 0.0)? };
    let Some([padding, stride, dilation]) = slide.symmetric() else {
        let product = matrices(weight, groups)?.broadcast_matmul(&columns(&x, &slide, groups)?)?;
        return product.reshape((x.dim(0)?, weight.dim(0)?, slide.positions[0], slide.positions[1]));
    };
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    // Not every device supports convolution in bf16; computes it in 32 bits and rounds the result there.
    match x.conv2d(&weight, padding, stride, dilation, groups) {
        Err(_) if x.dtype() == DType::BF16 => wide(&x)?.conv2d(&wide(&weight)?, padding, stride, dilation, groups)?.to_dtype(DType::BF16),
        result => result,
    }
}

/// The gradient of the input of a convolution, which is also a transposed convolution.
pub(super) fn input_gradient(gradient: &Tensor, weight: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let Some(dilation) = slide.distance() else {
        let (images, outputs, rows, columns) = gradient.dims4()?;
        let gradient = gradient.reshape((images, groups, outputs / groups.max(1), rows * columns))?;
        let met = matrices(weight, groups)?.transpose(2, 3)?.contiguous()?.broadcast_matmul(&gradient)?;
        let count = slide.kernel[0] * slide.kernel[1];
        let met = met.reshape((images, groups * weight.dim(1)?, count, rows, columns))?;
        return from_taps(slide, |tap| met.narrow(2, tap, 1)?.squeeze(2));
    };
    // A convolution of the gradient, with zeros between its elements, by the flipped weight.
    let mut wide = interleave_zeros(gradient, slide.stride)?;
    for axis in [0, 1] {
        let reach = dilation * (slide.kernel[axis] - 1);
        wide = pad_or_crop(&wide, axis + 2, reach as isize - slide.before[axis] as isize, slide.size[axis] + reach, 0.0)?;
    }
    let around = Slide::new(spatial_sizes(wide.dims()), slide.kernel, [1.into(), dilation.into()], 0.into(), false)?;
    in_groups(groups, 1, |group| {
        let flipped = part(weight, groups, 0, group)?.transpose(0, 1)?.contiguous()?.flip(&[2, 3])?;
        convolved(&part(&wide, groups, 1, group)?, &flipped, &around, 1)
    })
}

/// The gradient of the weight of a convolution.
pub(super) fn weight_gradient(x: &Tensor, gradient: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let (_, outputs, rows, width) = gradient.dims4()?;
    let (Some(stride), Some(dilation)) = (slide.step(), slide.distance()) else {
        let (images, channels) = (x.dim(0)?, x.dim(1)?);
        let gradient = gradient.reshape((images, groups, outputs / groups.max(1), rows * width))?;
        let product = gradient.matmul(&columns(x, slide, groups)?.transpose(2, 3)?)?;
        let shape = (outputs, channels / groups.max(1), slide.kernel[0], slide.kernel[1]);
        return wide(&product)?.sum(0)?.reshape(shape)?.to_dtype(x.dtype());
    };
    let (x, _) = slide.cut(x, 0.0)?;
    // A convolution of the input by the gradient, with stride and dilation swapped.
    let around = Slide::new(spatial_sizes(x.dims()), [rows, width], [dilation.into(), stride.into()], 0.into(), false)?;
    let around = Slide { positions: slide.kernel, ..around };
    in_groups(groups, 0, |group| {
        // Swaps the image and channel axes.
        let window = part(gradient, groups, 1, group)?.transpose(0, 1)?;
        convolved(&part(&x, groups, 1, group)?.transpose(0, 1)?, &window, &around, 1)?.transpose(0, 1)
    })
}

/// The elements that the window reads at each position (im2col), `[batch, groups, channels of a group ·
/// taps, positions]`.
fn columns(x: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let (images, channels) = (x.dim(0)?, x.dim(1)?);
    let met = Tensor::stack(&taps(x, slide, 0.0)?, 2)?;
    met.reshape((images, groups, channels / groups.max(1) * slide.kernel[0] * slide.kernel[1], slide.positions[0] * slide.positions[1]))
}

/// The weight of a convolution as matrices, `[1, groups, outputs of a group, inputs of a group · taps]`.
fn matrices(weight: &Tensor, groups: usize) -> Result<Tensor> {
    let (outputs, inputs, rows, columns) = weight.dims4()?;
    weight.reshape((1, groups, outputs / groups.max(1), inputs * rows * columns))
}

/// The part of an axis that belongs to one group.
fn part(tensor: &Tensor, groups: usize, axis: usize, group: usize) -> Result<Tensor> {
    let size = tensor.dim(axis)? / groups.max(1);
    tensor.narrow(axis, group * size, size)
}

fn in_groups(groups: usize, axis: usize, of: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
    let parts = (0..groups).map(of).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&parts, axis)?.contiguous()
}

/// Inserts `stride - 1` zeros after each row and column.
fn interleave_zeros(images: &Tensor, [down, along]: [usize; 2]) -> Result<Tensor> {
    if [down, along] == [1, 1] {
        return Ok(images.clone());
    }
    let (count, channels, height, width) = images.dims4()?;
    let spaced = images.reshape((count * channels, height, 1, width, 1))?.pad_with_zeros(2, 0, down - 1)?.pad_with_zeros(4, 0, along - 1)?;
    spaced.reshape((count, channels, height * down, width * along))
}

/// Pads the start of an axis by `before` elements, or crops it for negative numbers, then crops or pads
/// the end to `length`.
pub(super) fn pad_or_crop(tensor: &Tensor, axis: usize, before: isize, length: usize, fill: f64) -> Result<Tensor> {
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

/// Calls a function with the row and the column of each tap.
fn each_tap<R>(slide: &Slide, of: impl Fn([usize; 2]) -> Result<R>) -> Result<Vec<R>> {
    let [height, width] = slide.kernel;
    (0..height * width).map(|tap| of([tap / width, tap % width])).collect()
}
