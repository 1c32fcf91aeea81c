//! Kernels for causal convolutions.

use candle_core::{Result, Tensor};

use super::super::causal_conv::{Extras, extras, masked};
use super::super::{Backward, CausalConv};
use super::host::{Host, readable};
use super::{Gradients, Kernel};
use crate::kernel::causal::{self, Rows};
use crate::kernel::scratch::cleared;

/// The sizes of a convolution of these rows with this weight.
fn rows(x: &Tensor, weight: &Tensor) -> Result<Rows> {
    let (_, sequence, channels) = x.dims3()?;
    Ok(Rows { sequence, channels, kernel: weight.dim(2)? })
}

/// The filters as `[kernel, channels]`.
fn taps(weight: &Tensor) -> Result<Tensor> {
    weight.squeeze(1)?.t()?.contiguous()
}

impl Kernel for CausalConv {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let Extras { mask, bias } = extras(&inputs[2..]);
        if !readable([&inputs[0], &inputs[1]]) {
            return Ok(None);
        }
        let rows = rows(&inputs[0], &inputs[1])?;
        let (x, taps) = (masked(&inputs[0], mask)?.contiguous()?, taps(&inputs[1])?);
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let compute = || {
            let (host, taps) = (Host::new(&x)?, Host::new(&taps)?);
            let bias_host = bias.as_ref().map(Host::new);
            let bias = match &bias_host {
                Some(host) => Some(host.as_ref()?.floats()?),
                None => None,
            };
            let count = x.elem_count();
            let mut y = cleared(count);
            causal::forward(rows, &host.floats()?[..count], &taps.floats()?[..rows.kernel * rows.channels], bias, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, x.dims(), x.device())).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        if !readable([x, weight, backward.gradient]) {
            return Ok(None);
        }
        let rest = backward.inputs[2..].iter().map(|saved| saved.tensor().cloned()).collect::<Result<Vec<_>>>()?;
        let (rows, mask) = (rows(x, weight)?, extras(&rest).mask);
        let (read, taps, gradient) = (masked(x, mask)?.contiguous()?, taps(weight)?, backward.gradient.contiguous()?);
        let (Some(x_host), Some(taps_host), Some(gradient_host)) = (Host::new(&read), Host::new(&taps), Host::new(&gradient)) else { return Ok(None) };
        let (Some(values), Some(taps), Some(gradients)) = (x_host.floats(), taps_host.floats(), gradient_host.floats()) else { return Ok(None) };
        let count = read.elem_count();
        let (values, taps, gradients) = (&values[..count], &taps[..rows.kernel * rows.channels], &gradients[..count]);
        let of_input = backward.gradient_of(0, || {
            let mut y = cleared(count);
            causal::input_gradient(rows, gradients, taps, &mut y);
            masked(&Tensor::from_vec(y, x.dims(), x.device())?, mask)
        })?;
        let of_weight = backward.gradient_of(1, || {
            let mut y = cleared(weight.elem_count());
            causal::weight_gradient(rows, values, gradients, &mut y);
            Tensor::from_vec(y, weight.dims(), x.device())
        })?;
        let mut found = vec![of_input, of_weight];
        for (index, input) in backward.inputs.iter().enumerate().skip(2) {
            let is_bias = input.dims().len() == 1;
            found.push(if is_bias { backward.gradient_of(index, || gradient.sum((0, 1)))? } else { None });
        }
        Ok(Some(found))
    }
}
