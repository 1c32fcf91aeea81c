//! Kernels over planes of images: batch normalization, pooling, resizing.

use candle_core::{Device, Error, Result, Tensor};

use super::super::batch_norm::ChannelOps;
use super::super::{Backward, BatchNorm, GlobalAveragePool, MaxPool, OpSpec, Resize};
use super::host::{Host, by_channel, channels, channels_first, planes, readable, with_planes};
use super::{Gradients, Kernel};
use crate::kernel::channels as kernel;
use crate::kernel::convolution::{Window, max_pool};
use crate::kernel::convolution_gradient::max_pool_gradient;
use crate::kernel::resize::resize;
use crate::kernel::rows::means;
use crate::kernel::scratch::cleared;

/// Channel operations for images that kernels [can read](is_readable).
pub(super) struct OnHost;

/// Whether kernels can read images and the vectors of their channels.
pub(super) fn is_readable<'t>(x: &Tensor, others: impl IntoIterator<Item = &'t Tensor>) -> bool {
    x.rank() == 4 && readable([x]) && others.into_iter().all(|other| readable([other]))
}

fn unreadable() -> Error {
    Error::Msg("no kernel supports the layout of the images".into())
}

fn vector(values: Vec<f32>) -> Result<Tensor> {
    let count = values.len();
    Tensor::from_vec(values, count, &Device::Cpu)
}

impl ChannelOps for OnHost {
    fn moments(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let x = by_channel(x)?;
        let compute = || Some(kernel::moments(&channels(&x, &Host::new(&x)?)?));
        let (means, variances) = compute().ok_or_else(unreadable)?;
        Ok((vector(means)?, vector(variances)?))
    }

    fn scaled(&self, x: &Tensor, scale: &Tensor, shift: &Tensor) -> Result<Tensor> {
        let (images, count, height, width) = x.dims4()?;
        let x = by_channel(x)?;
        let compute = || {
            let [host, scale, shift] = [Host::new(&x)?, Host::new(scale)?, Host::new(shift)?];
            let mut y = cleared(x.elem_count());
            kernel::scaled(&channels(&x, &host)?, scale.floats()?, shift.floats()?, &mut y);
            Some(y)
        };
        channels_first(compute().ok_or_else(unreadable)?, [images, count, height, width])
    }

    fn sums(&self, x: &Tensor, gradient: &Tensor, mean: &Tensor) -> Result<[Tensor; 2]> {
        let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
        let compute = || {
            let hosts = [Host::new(&x)?, Host::new(&gradient)?, Host::new(mean)?];
            let (values, gradients) = (channels(&x, &hosts[0])?, channels(&gradient, &hosts[1])?);
            Some([kernel::sums(&gradients), kernel::products(&values, &gradients, hosts[2].floats()?)])
        };
        let [plain, products] = compute().ok_or_else(unreadable)?;
        Ok([vector(plain)?, vector(products)?])
    }

    fn mixed(&self, x: &Tensor, gradient: &Tensor, factors: [&Tensor; 3]) -> Result<Tensor> {
        let (images, count, height, width) = x.dims4()?;
        let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
        let compute = || {
            let hosts = [Host::new(&x)?, Host::new(&gradient)?];
            let [a, b, c] = [Host::new(factors[0])?, Host::new(factors[1])?, Host::new(factors[2])?];
            let factors: Vec<[f32; 3]> = a.floats()?.iter().zip(b.floats()?).zip(c.floats()?).map(|((a, b), c)| [*a, *b, *c]).collect();
            let mut y = cleared(x.elem_count());
            kernel::combined(&channels(&x, &hosts[0])?, &channels(&gradient, &hosts[1])?, &factors, &mut y);
            Some(y)
        };
        channels_first(compute().ok_or_else(unreadable)?, [images, count, height, width])
    }
}

impl Kernel for BatchNorm {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        if is_readable(&inputs[0], &inputs[1..]) { self.eval_with(inputs, &OnHost).map(Some) } else { Ok(None) }
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let read = (1..backward.inputs.len()).filter(|input| self.reads_input(*input)).map(|input| backward.inputs[input].tensor());
        let read = read.collect::<Result<Vec<_>>>()?;
        let fits = is_readable(backward.inputs[0].tensor()?, read.into_iter().chain([backward.gradient]));
        if fits { self.backward_with(backward, &OnHost).map(Some) } else { Ok(None) }
    }
}

impl MaxPool {
    /// The window geometry, if the kernels support it.
    fn window(&self, dims: &[usize]) -> Result<Option<Window>> {
        Ok(if dims.len() == 4 { Some(self.slide(dims)?.window()).filter(|window| window.dilation == [1, 1]) } else { None })
    }
}

impl Kernel for MaxPool {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let x = &inputs[0];
        let (&[images, count, ..], Some(window)) = (x.dims(), self.window(x.dims())?) else { return Ok(None) };
        let [rows, columns] = window.positions();
        let compute = || {
            let host = Host::new(x)?;
            let mut y = cleared(images * count * rows * columns);
            max_pool(&planes(x, &host)?, window, &mut y);
            Some(y)
        };
        compute().map(|y| channels_first(y, [images, count, rows, columns])).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.needs_gradient(0) {
            return Ok(Some(vec![None]));
        }
        let x = backward.inputs[0].tensor()?;
        let (&[images, count, height, width], Some(window)) = (x.dims(), self.window(x.dims())?) else { return Ok(None) };
        let (x, gradient) = (with_planes(x)?, by_channel(backward.gradient)?);
        let compute = || {
            let (host, gradient) = (Host::new(&x)?, Host::new(&gradient)?);
            let mut y = cleared(x.elem_count());
            max_pool_gradient(&planes(&x, &host)?, gradient.floats()?, window, &mut y);
            Some(y)
        };
        let found = compute().map(|y| channels_first(y, [images, count, height, width])).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}

impl Kernel for Resize {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let x = &inputs[0];
        let (&[images, count, _, columns], Some(places)) = (x.dims(), self.image_indices(x.dims())?) else { return Ok(None) };
        let [rows_after, columns_after] = places.size;
        let compute = || {
            let host = Host::new(x)?;
            let mut y = cleared(images * count * rows_after * columns_after);
            resize(&planes(x, &host)?, columns, &places, &mut y);
            Some(y)
        };
        compute().map(|y| channels_first(y, [images, count, rows_after, columns_after])).transpose()
    }
}

impl Kernel for GlobalAveragePool {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let &[images, count, _, _] = inputs[0].dims() else { return Ok(None) };
        let compute = || Some(means(&planes(&inputs[0], &Host::new(&inputs[0])?)?));
        let mean = compute().map(|y| Tensor::from_vec(y, (count, images), inputs[0].device())?.t()?.contiguous()).transpose()?;
        mean.map(|mean| if self.keep_dims { mean.reshape((images, count, 1, 1)) } else { Ok(mean) }).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.needs_gradient(0) {
            return Ok(Some(vec![None]));
        }
        let &[images, count, height, width] = backward.inputs[0].dims() else { return Ok(None) };
        let shares = (backward.gradient.reshape((images, count))? / (height * width) as f64)?.t()?.contiguous()?;
        let compute = || {
            let host = Host::new(&shares)?;
            let mut y = cleared(images * count * height * width);
            kernel::filled(&host.floats()?[..images * count], &mut y);
            Some(y)
        };
        let found = compute().map(|y| channels_first(y, [images, count, height, width])).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}
