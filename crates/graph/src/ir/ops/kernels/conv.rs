//! Convolution kernels.

use candle_core::{Result, Tensor};

use super::super::windows::{images, with_rank};
use super::super::{Backward, Conv};
use super::host::{Host, by_channel, channels, channels_first, planes, readable, steps, with_planes};
use super::{Fused, Gradients, Kernel};
use crate::kernel::channels as kernel;
use crate::kernel::convolution::depthwise;
use crate::kernel::convolution_gradient::{Sizes, input_gradient, weight_gradient};
use crate::kernel::epilogue::{Epilogue, apply_to};
use crate::kernel::operands::Left;
use crate::kernel::scratch::cleared;
use crate::kernel::shifted::convolve;

impl Kernel for Conv {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.fused(inputs, &[])
    }

    fn fused(&self, inputs: &[Tensor], epilogue: &[Fused<Tensor>]) -> Result<Option<Tensor>> {
        let (rank, weight) = (inputs[0].rank(), images(&inputs[1])?.contiguous()?);
        let (x, window) = (&with_planes(&images(&inputs[0])?)?, self.slide(inputs[0].dims(), inputs[1].dims())?.window());
        let (images, (outputs, inner, _, _)) = (x.dim(0)?, weight.dims4()?);
        let [rows, columns] = window.positions();
        let shape = [images, outputs, rows, columns];
        let fits = |like: &Tensor| like.dims() == shape && like.transpose(0, 1).is_ok_and(|t| t.is_contiguous());
        let bias = inputs.get(2).map(|bias| Fused::AddToRows(bias.clone()));
        let compute = || {
            let hosts = steps(bias.iter().chain(epilogue), fits)?;
            let steps = hosts.iter().map(|step| step.map(Host::floats)).collect::<Option<Vec<_>>>()?;
            let (x_host, weight_host) = (Host::new(x)?, Host::new(&weight)?);
            let (planes, values) = (planes(x, &x_host)?, weight_host.floats()?);
            let mut y = cleared(shape.iter().product());
            let size = images * rows * columns;
            if self.is_depthwise(&weight) {
                depthwise(&planes, images, values, window, &mut y);
                apply_to(&steps, &mut y, size);
                return Some(y);
            }
            let (taps, group) = (inner * window.kernel[0] * window.kernel[1], outputs / self.groups);
            let parts = planes.chunks_exact((inner * images).max(1)).zip(y.chunks_exact_mut((group * size).max(1)));
            for (index, (planes, y)) in parts.enumerate() {
                let left = Left::pack(&values[index * group * taps..], group, taps, taps);
                let steps: Vec<_> = steps.iter().map(|step| step.from_row(index * group, size)).collect();
                convolve(planes, images, &left, window, Epilogue::new(&steps), y);
            }
            Some(y)
        };
        compute().map(|values| with_rank(channels_first(values, shape)?, rank)).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        if !readable([x, weight, backward.gradient]) {
            return Ok(None);
        }
        let &[images, inputs, height, width] = x.dims() else { return Ok(None) };
        let (outputs, window) = (weight.dim(0)?, self.slide(x.dims(), weight.dims())?.window());
        let sizes = Sizes { images, inputs, outputs, groups: self.groups, window };
        let (x, weight, gradient) = (with_planes(x)?, weight.contiguous()?, by_channel(backward.gradient)?);
        let hosts = [Host::new(&x), Host::new(&weight), Host::new(&gradient)];
        let [Some(x_host), Some(weight_host), Some(gradient_host)] = &hosts else { return Ok(None) };
        let (Some(planes), Some(weights)) = (planes(&x, x_host), weight_host.floats()) else { return Ok(None) };
        let (Some(channels), Some(values)) = (channels(&gradient, gradient_host), gradient_host.floats()) else { return Ok(None) };
        let values = &values[..gradient.elem_count()];
        let of_input = backward.gradient_of(0, || {
            let mut y = cleared(x.elem_count());
            input_gradient(sizes, weights, values, &mut y);
            channels_first(y, [images, inputs, height, width])
        })?;
        let of_weight = backward.gradient_of(1, || {
            let mut y = cleared(weight.elem_count());
            weight_gradient(sizes, &planes, values, &mut y);
            Tensor::from_vec(y, weight.dims(), x.device())
        })?;
        let of_bias = backward.gradient_of(2, || Tensor::from_vec(kernel::sums(&channels), outputs, x.device()))?;
        Ok(Some([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect()))
    }
}
