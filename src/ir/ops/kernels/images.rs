//! Loops over the planes of images: batch normalisation and pooling.

use candle_core::{Result, Tensor};

use super::super::batch_norm::Channels;
use super::super::{Backward, BatchNorm, GlobalAveragePool, MaxPool};
use super::host::{Host, by_channel, channels, channels_first, planes, readable, with_planes};
use super::{Epilogue, Gradients, Kernel};
use crate::kernel::channels as kernel;
use crate::kernel::convolution::max_pool;
use crate::kernel::convolution_gradient::max_pool_gradient;
use crate::kernel::rows::means;

/// Channels in f32 in host memory; others as [`Channels`] does them by itself.
pub(super) struct OnHost;

/// The way that is taken where [`OnHost`] cannot read.
struct Otherwise;

impl Channels for Otherwise {}

fn vector(values: Vec<f32>, x: &Tensor) -> Result<Tensor> {
    let count = values.len();
    Tensor::from_vec(values, count, x.device())
}

fn fits<const N: usize>(x: &Tensor, others: [&Tensor; N]) -> bool {
    x.rank() == 4 && readable([x]) && readable(others)
}

impl Channels for OnHost {
    fn moments(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        if fits(x, []) {
            let x = by_channel(x)?;
            let host = Host::of(&x);
            if let Some(channels) = host.as_ref().and_then(|host| channels(&x, host)) {
                let (means, variances) = kernel::moments(&channels);
                return Ok((vector(means, &x)?, vector(variances, &x)?));
            }
        }
        Otherwise.moments(x)
    }

    fn scaled(&self, x: &Tensor, scale: &Tensor, shift: &Tensor) -> Result<Tensor> {
        if fits(x, [scale, shift]) {
            let (images, count, height, width) = x.dims4()?;
            let x = by_channel(x)?;
            let compute = || {
                let [host, scale, shift] = [Host::of(&x)?, Host::of(scale)?, Host::of(shift)?];
                let mut y = vec![0.0; x.elem_count()];
                kernel::scaled(&channels(&x, &host)?, scale.floats()?, shift.floats()?, &mut y);
                Some(y)
            };
            if let Some(y) = compute() {
                return channels_first(y, [images, count, height, width]);
            }
        }
        Otherwise.scaled(x, scale, shift)
    }

    fn sums(&self, x: &Tensor, gradient: &Tensor, mean: &Tensor) -> Result<[Tensor; 2]> {
        if fits(x, [gradient, mean]) {
            let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
            let compute = || {
                let hosts = [Host::of(&x)?, Host::of(&gradient)?, Host::of(mean)?];
                let (values, gradients) = (channels(&x, &hosts[0])?, channels(&gradient, &hosts[1])?);
                Some([kernel::sums(&gradients), kernel::products(&values, &gradients, hosts[2].floats()?)])
            };
            if let Some([plain, products]) = compute() {
                return Ok([vector(plain, &x)?, vector(products, &x)?]);
            }
        }
        Otherwise.sums(x, gradient, mean)
    }

    fn mixed(&self, x: &Tensor, gradient: &Tensor, factors: [&Tensor; 3]) -> Result<Tensor> {
        if fits(x, [gradient]) && readable(factors) {
            let (images, count, height, width) = x.dims4()?;
            let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
            let compute = || {
                let hosts = [Host::of(&x)?, Host::of(&gradient)?];
                let [a, b, c] = [Host::of(factors[0])?, Host::of(factors[1])?, Host::of(factors[2])?];
                let (a, b, c) = (a.floats()?, b.floats()?, c.floats()?);
                let factors: Vec<[f32; 3]> = a.iter().zip(b).zip(c).map(|((a, b), c)| [*a, *b, *c]).collect();
                let mut y = vec![0.0; x.elem_count()];
                kernel::combined(&channels(&x, &hosts[0])?, &channels(&gradient, &hosts[1])?, &factors, &mut y);
                Some(y)
            };
            if let Some(y) = compute() {
                return channels_first(y, [images, count, height, width]);
            }
        }
        Otherwise.mixed(x, gradient, factors)
    }
}

impl Kernel for BatchNorm {
    fn forward(&self, inputs: &[Tensor], epilogue: &[Epilogue<Tensor>]) -> Result<Option<Tensor>> {
        if epilogue.is_empty() { self.eval_with(inputs, &OnHost).map(Some) } else { Ok(None) }
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        self.backward_with(backward, &OnHost).map(Some)
    }
}

impl Kernel for MaxPool {
    fn forward(&self, inputs: &[Tensor], epilogue: &[Epilogue<Tensor>]) -> Result<Option<Tensor>> {
        let x = &inputs[0];
        let (images, count, height, width) = x.dims4()?;
        let window = self.window([height, width]);
        let [rows, columns] = window.positions();
        let compute = || {
            let host = Host::of(x)?;
            let mut y = vec![0.0; images * count * rows * columns];
            max_pool(&planes(x, &host)?, window, &mut y);
            Some(y)
        };
        if epilogue.is_empty() { compute().map(|y| channels_first(y, [images, count, rows, columns])).transpose() } else { Ok(None) }
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.wants(0) {
            return Ok(Some(vec![None]));
        }
        let x = backward.inputs[0].tensor()?;
        let (images, count, height, width) = x.dims4()?;
        let (x, gradient) = (with_planes(x)?, by_channel(backward.gradient)?);
        let compute = || {
            let (host, gradient) = (Host::of(&x)?, Host::of(&gradient)?);
            let mut y = vec![0.0; x.elem_count()];
            max_pool_gradient(&planes(&x, &host)?, gradient.floats()?, self.window([height, width]), &mut y);
            Some(y)
        };
        let found = compute().map(|y| channels_first(y, [images, count, height, width])).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}

impl Kernel for GlobalAveragePool {
    fn forward(&self, inputs: &[Tensor], epilogue: &[Epilogue<Tensor>]) -> Result<Option<Tensor>> {
        let (images, count, _, _) = inputs[0].dims4()?;
        let compute = || Some(means(&planes(&inputs[0], &Host::of(&inputs[0])?)?));
        let found = if epilogue.is_empty() { compute() } else { None };
        found.map(|y| Tensor::from_vec(y, (count, images), inputs[0].device())?.t()?.contiguous()).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.wants(0) {
            return Ok(Some(vec![None]));
        }
        let &[images, count, height, width] = backward.inputs[0].dims() else { return Ok(None) };
        let shares = (backward.gradient / (height * width) as f64)?.t()?.contiguous()?;
        let compute = || {
            let host = Host::of(&shares)?;
            let mut y = vec![0.0; images * count * height * width];
            kernel::filled(&host.floats()?[..images * count], &mut y);
            Some(y)
        };
        let found = compute().map(|y| channels_first(y, [images, count, height, width])).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}
