//! Windows that slide over images, tap by tap, and the convolutions that are made of them.

use candle_core::{DType, Result, Tensor};

use super::gradient::wide;
use super::sides::{Padding, PerAxis};
use crate::ir::Dim;
use crate::kernel::convolution::Window;

/// How a window moves over images: numbers for height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slide {
    /// Of the image.
    pub size: [usize; 2],
    /// Taps of the window.
    pub kernel: [usize; 2],
    /// Step from position to position.
    pub stride: [usize; 2],
    /// Distance of the taps.
    pub dilation: [usize; 2],
    /// Places before the image.
    pub before: [usize; 2],
    /// Positions of the window. The last ones may reach beyond the image.
    pub positions: [usize; 2],
}

impl Slide {
    /// Of a window over an image with places around it; `ceil` as in [`slid`].
    pub fn new(size: [usize; 2], kernel: [usize; 2], [stride, dilation]: [PerAxis; 2], padding: Padding, ceil: bool) -> Result<Slide> {
        let positions = slid(&size.map(Dim::Fixed), &kernel, [stride, dilation], padding, ceil).map_err(super::unfit)?;
        let positions = [0, 1].map(|axis| positions[axis].fixed().unwrap_or(0));
        Ok(Slide { size, kernel, stride: stride.0, dilation: dilation.0, before: padding.before(), positions })
    }

    /// Places that the window covers, from the first on.
    pub fn covered(&self, axis: usize) -> usize {
        (self.positions[axis].saturating_sub(1)) * self.stride[axis] + self.dilation[axis] * (self.kernel[axis] - 1) + 1
    }

    /// The step of both axes, where one does for both; an axis with one position has any.
    fn step(&self) -> Option<usize> {
        match (self.stride, self.positions) {
            ([height, width], _) if height == width => Some(width),
            ([height, _], [_, 1]) => Some(height),
            ([_, width], [1, _]) => Some(width),
            _ => None,
        }
    }

    /// The distance of taps on both axes, where one does for both; an axis with one tap has any.
    fn distance(&self) -> Option<usize> {
        match (self.dilation, self.kernel) {
            ([height, width], _) if height == width => Some(width),
            ([height, _], [_, 1]) => Some(height),
            ([_, width], [1, _]) => Some(width),
            _ => None,
        }
    }

    /// The same as kernels know it: with as many places behind the image as the window reaches, and no step beyond them.
    pub fn window(&self) -> Window {
        let ([height, width], [above, left]) = (self.size, self.before);
        let behind = |axis: usize| self.covered(axis).saturating_sub(self.size[axis] + self.before[axis]);
        let padding = [above, left, behind(0), behind(1)];
        let window = Window { height, width, kernel: self.kernel, stride: self.stride, padding, dilation: self.dilation };
        let padded = window.padded();
        Window { stride: [0, 1].map(|axis| self.stride[axis].min(padded[axis].max(1))), ..window }
    }

    /// Padding, stride and dilation, where one number does for both axes and all sides.
    fn even(&self) -> Option<[usize; 3]> {
        let (padding, stride, dilation) = (self.before[0], self.step()?, self.distance()?);
        let window = Window { padding: [padding; 4], stride: [stride; 2], dilation: [dilation; 2], ..self.window() };
        let fits = |axis: usize| window.padded()[axis] > dilation * (self.kernel[axis] - 1);
        (self.before == [padding; 2] && fits(0) && fits(1) && window.positions() == self.positions).then_some([padding, stride, dilation])
    }

    /// Images as far as the window covers them, and how it moves over those.
    pub fn cut(&self, x: &Tensor, fill: f64) -> Result<(Tensor, Slide)> {
        let size = [self.covered(0), self.covered(1)];
        let mut x = x.clone();
        for axis in [0, 1] {
            x = fit(&x, axis + 2, self.before[axis] as isize, size[axis], fill)?;
        }
        Ok((x, Slide { size, before: [0; 2], ..*self }))
    }
}

/// Images with an axis of height, which those of one dimension lack.
pub(super) fn images(x: &Tensor) -> Result<Tensor> {
    if x.rank() == 3 { x.unsqueeze(2) } else { Ok(x.clone()) }
}

/// As [`images`], the other way round: as many axes as `like` has.
pub(super) fn like(y: Tensor, rank: usize) -> Result<Tensor> {
    if rank == 3 { y.squeeze(2) } else { Ok(y) }
}

/// Sizes of the axes that windows move over; one stands for height and width with height one.
pub(super) fn sides(dims: &[usize]) -> [usize; 2] {
    match *dims {
        [_, _, width] => [1, width],
        [_, _, height, width] => [height, width],
        _ => [1, 1],
    }
}

/// Numbers for each axis, of an image of this rank: one of one dimension is as if it had height one.
pub(super) fn over(rank: usize, [stride, dilation]: [PerAxis; 2], padding: Padding) -> ([PerAxis; 2], Padding) {
    let [_, left, _, right] = padding.0;
    if rank == 3 { ([PerAxis([1, stride.0[1]]), PerAxis([1, dilation.0[1]])], Padding([0, left, 0, right])) } else { ([stride, dilation], padding) }
}

/// The sizes behind a window of so many taps for each axis; `ceil` counts positions that begin inside, though they end beyond.
pub(super) fn slid(sizes: &[Dim], taps: &[usize], [stride, dilation]: [PerAxis; 2], padding: Padding, ceil: bool) -> std::result::Result<Vec<Dim>, String> {
    if stride.0.contains(&0) || dilation.0.contains(&0) || taps.contains(&0) {
        return Err("stride, dilation and sides of the window must be at least 1".into());
    }
    let mut found = Vec::with_capacity(sizes.len());
    for (at, (size, taps)) in sizes.iter().zip(taps).enumerate() {
        let axis = at + 2 - sizes.len();
        let (stride, around) = (stride.0[axis], padding.around(axis).ok_or("the padding is larger than any image")?);
        let extent = dilation.0[axis].checked_mul(taps - 1).and_then(|steps| steps.checked_add(1));
        let extent = extent.ok_or_else(|| format!("dilation {} is larger than any image", dilation.0[axis]))?;
        let too_large = || format!("the window is larger than the image, {size}");
        let inside = size.window(extent, around, stride).ok_or_else(too_large)?;
        if !ceil || stride == 1 {
            found.push(inside);
            continue;
        }
        let further = around.checked_add(stride - 1).and_then(|around| size.window(extent, around, stride)).ok_or_else(too_large)?;
        let (before, behind) = (padding.0[axis], padding.0[axis + 2]);
        found.push(match (size.fixed(), further.fixed()) {
            // The last position must begin inside the image or before it.
            (Some(size), Some(count)) if (count - 1).saturating_mul(stride) >= size.saturating_add(before) => Dim::Fixed(count - 1),
            (Some(_), Some(_)) => further,
            _ if behind.saturating_add(stride) <= extent => further,
            _ => return Err(format!("how often a window that ends beyond the image fits {size} is known for known sizes only; fix it in the inputs")),
        });
    }
    Ok(found)
}

/// What each tap of a window meets, `[batch, channels, rows, columns]`, row by row of the window. Places around the image hold `fill`.
pub(super) fn taps(x: &Tensor, slide: &Slide, fill: f64) -> Result<Vec<Tensor>> {
    let Slide { positions, stride, dilation, .. } = *slide;
    let mut x = x.clone();
    for axis in [0, 1] {
        let length = positions[axis] * stride[axis] + dilation[axis] * (slide.kernel[axis] - 1);
        x = fit(&x, axis + 2, slide.before[axis] as isize, length, fill)?;
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

/// The sum of images whose parts lie where taps have met them: what [`taps`] does, the other way round.
pub(super) fn from_taps(slide: &Slide, mut part: impl FnMut(usize) -> Result<Tensor>) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for (index, taps) in each_tap(slide, Ok)?.into_iter().enumerate() {
        let mut image = apart(&part(index)?, slide.stride)?;
        for axis in [0, 1] {
            let before = (taps[axis] * slide.dilation[axis]) as isize - slide.before[axis] as isize;
            image = fit(&image, axis + 2, before, slide.size[axis], 0.0)?;
        }
        sum = Some(match sum {
            Some(sum) => (sum + image)?,
            None => image,
        });
    }
    sum.ok_or_else(|| candle_core::Error::Msg("a window without taps".into()))
}

/// A convolution of images, its channels in groups.
pub(super) fn convolved(x: &Tensor, weight: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let (x, slide) = if slide.even().is_some() { (x.clone(), *slide) } else { slide.cut(x, 0.0)? };
    let Some([padding, stride, dilation]) = slide.even() else {
        let product = matrices(weight, groups)?.broadcast_matmul(&columns(&x, &slide, groups)?)?;
        return product.reshape((x.dim(0)?, weight.dim(0)?, slide.positions[0], slide.positions[1]));
    };
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    // In bf16 not every device has one; the same product in 32 bits is rounded then.
    match x.conv2d(&weight, padding, stride, dilation, groups) {
        Err(_) if x.dtype() == DType::BF16 => wide(&x)?.conv2d(&wide(&weight)?, padding, stride, dilation, groups)?.to_dtype(DType::BF16),
        result => result,
    }
}

/// The gradient of a convolution's images; also what a transposed convolution is.
pub(super) fn input_gradient(gradient: &Tensor, weight: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let Some(dilation) = slide.distance() else {
        let (images, outputs, rows, columns) = gradient.dims4()?;
        let gradient = gradient.reshape((images, groups, outputs / groups.max(1), rows * columns))?;
        let met = matrices(weight, groups)?.transpose(2, 3)?.contiguous()?.broadcast_matmul(&gradient)?;
        let count = slide.kernel[0] * slide.kernel[1];
        let met = met.reshape((images, groups * weight.dim(1)?, count, rows, columns))?;
        return from_taps(slide, |tap| met.narrow(2, tap, 1)?.squeeze(2));
    };
    // With zeros between its elements, the gradient meets the taps one by one, in the opposite order.
    let mut wide = apart(gradient, slide.stride)?;
    for axis in [0, 1] {
        let reach = dilation * (slide.kernel[axis] - 1);
        wide = fit(&wide, axis + 2, reach as isize - slide.before[axis] as isize, slide.size[axis] + reach, 0.0)?;
    }
    let around = Slide::new(sides(wide.dims()), slide.kernel, [1.into(), dilation.into()], 0.into(), false)?;
    in_groups(groups, 1, |group| {
        let flipped = part(weight, groups, 0, group)?.transpose(0, 1)?.contiguous()?.flip(&[2, 3])?;
        convolved(&part(&wide, groups, 1, group)?, &flipped, &around, 1)
    })
}

/// The gradient of a convolution's weight.
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
    // The gradient is the window, and its step the distance of the taps.
    let around = Slide::new(sides(x.dims()), [rows, width], [dilation.into(), stride.into()], 0.into(), false)?;
    let around = Slide { positions: slide.kernel, ..around };
    in_groups(groups, 0, |group| {
        // Images and channels change places.
        let window = part(gradient, groups, 1, group)?.transpose(0, 1)?;
        convolved(&part(&x, groups, 1, group)?.transpose(0, 1)?, &window, &around, 1)?.transpose(0, 1)
    })
}

/// What the window meets at each position, `[batch, groups, channels of a group times taps, positions]`.
fn columns(x: &Tensor, slide: &Slide, groups: usize) -> Result<Tensor> {
    let (images, channels) = (x.dim(0)?, x.dim(1)?);
    let met = Tensor::stack(&taps(x, slide, 0.0)?, 2)?;
    met.reshape((images, groups, channels / groups.max(1) * slide.kernel[0] * slide.kernel[1], slide.positions[0] * slide.positions[1]))
}

/// A convolution's weight, `[1, groups, outputs of a group, inputs of a group times taps]`.
fn matrices(weight: &Tensor, groups: usize) -> Result<Tensor> {
    let (outputs, inputs, rows, columns) = weight.dims4()?;
    weight.reshape((1, groups, outputs / groups.max(1), inputs * rows * columns))
}

/// One group's part of an axis.
fn part(tensor: &Tensor, groups: usize, axis: usize, group: usize) -> Result<Tensor> {
    let size = tensor.dim(axis)? / groups.max(1);
    tensor.narrow(axis, group * size, size)
}

fn in_groups(groups: usize, axis: usize, of: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
    let parts = (0..groups).map(of).collect::<Result<Vec<_>>>()?;
    Tensor::cat(&parts, axis)?.contiguous()
}

/// Images with `stride - 1` zeros behind each row and column.
fn apart(images: &Tensor, [down, along]: [usize; 2]) -> Result<Tensor> {
    if [down, along] == [1, 1] {
        return Ok(images.clone());
    }
    let (count, channels, height, width) = images.dims4()?;
    let apart = images.reshape((count * channels, height, 1, width, 1))?.pad_with_zeros(2, 0, down - 1)?.pad_with_zeros(4, 0, along - 1)?;
    apart.reshape((count, channels, height * down, width * along))
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
fn each_tap<R>(slide: &Slide, of: impl Fn([usize; 2]) -> Result<R>) -> Result<Vec<R>> {
    let [height, width] = slide.kernel;
    (0..height * width).map(|tap| of([tap / width, tap % width])).collect()
}
