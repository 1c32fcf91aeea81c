//! Causal depthwise convolution over tokens.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::decoding::{DecodingState, Forward, Incremental};
use super::gradient::wide;
use super::{Backward, OpSpec, elements, require_floats, require_vector, sums};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Convolution of each channel of `[batch, sequence, channels]` with a filter of its own, `[channels, 1,
/// kernel]`, over the current token and those before it; tokens before the first one are zero. The short
/// convolutions of Mamba (Gu and Dao, 2023) and of hybrid models after it.
///
/// Optional inputs: an integer mask `[batch, sequence]`, zero for padding, which is read as zeros, and a bias
/// `[channels]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CausalConv {}

/// The mask and the bias, where present.
#[derive(Clone, Copy)]
pub(super) struct Extras<'t> {
    pub(super) mask: Option<&'t Tensor>,
    pub(super) bias: Option<&'t Tensor>,
}

/// Finds the inputs after the weight by their rank.
pub(super) fn extras(rest: &[Tensor]) -> Extras<'_> {
    let of = |rank: usize| rest.iter().find(|extra| extra.rank() == rank);
    Extras { mask: of(2), bias: of(1) }
}

/// The rows of tokens, with zeros for padding.
pub(super) fn masked(x: &Tensor, mask: Option<&Tensor>) -> candle_core::Result<Tensor> {
    mask.map_or(Ok(x.clone()), |mask| x.broadcast_mul(&mask.ne_scalar(0.0)?.to_dtype(x.dtype())?.unsqueeze(2)?))
}

/// One tap of the filters, for broadcasting over tokens.
fn tap(weight: &Tensor, tap: usize) -> candle_core::Result<Tensor> {
    wide(&weight.narrow(2, tap, 1)?.contiguous()?.reshape(weight.dim(0)?)?)
}

impl OpSpec for CausalConv {
    fn arity(&self) -> Range<usize> {
        2..5
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [x, weight] = [inputs[0], inputs[1]];
        require_floats(x, 3, "the input")?;
        require_floats(weight, 3, "the weight")?;
        let channels = &x.shape[2];
        if weight.shape[0] != *channels || weight.shape[1] != Dim::Fixed(1) || weight.shape[2].fixed().is_none_or(|size| size == 0) {
            return Err(format!("the weight must be [{channels}, 1, kernel]"));
        }
        for (place, extra) in inputs[2..].iter().enumerate() {
            match extra.element {
                Element::Int if place > 0 => return Err("the mask must precede the bias, and there can be only one".into()),
                Element::Int if extra.shape != x.shape[..2] => return Err("the mask must be [batch, sequence]".into()),
                Element::Int => {}
                Element::Float if place + 3 < inputs.len() => return Err("the bias must be the last input".into()),
                Element::Float => require_vector(extra, channels, "the bias")?,
            }
        }
        Ok(x.clone())
    }

    /// Models derive the number of channels from other sizes, so that channels cannot be pruned.
    fn axes(&self, inputs: &[&TensorType]) -> String {
        let extras = inputs[2..].iter().map(|extra| if extra.shape.len() == 2 { ", b s!" } else { ", c!" });
        format!("b s! c!, c! _ _{} -> b s! c!", extras.collect::<String>())
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, weight, Extras { mask, bias }) = (&inputs[0], &inputs[1], extras(&inputs[2..]));
        let (sequence, kernel) = (x.dim(1)?, weight.dim(2)?);
        let padded = wide(&masked(x, mask)?)?.pad_with_zeros(1, kernel - 1, 0)?;
        let mut sum = match bias {
            Some(bias) => wide(bias)?.broadcast_as(x.shape())?.contiguous()?,
            None => padded.narrow(1, 0, sequence)?.zeros_like()?,
        };
        for at in 0..kernel {
            sum = (sum + padded.narrow(1, at, sequence)?.broadcast_mul(&tap(weight, at)?)?)?;
        }
        sum.to_dtype(x.dtype())
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let rest = backward.inputs[2..].iter().map(|saved| saved.tensor().cloned()).collect::<candle_core::Result<Vec<_>>>()?;
        let mask = extras(&rest).mask;
        let (gradient, sequence, kernel) = (wide(backward.gradient)?, x.dim(1)?, weight.dim(2)?);
        let of_input = backward.gradient_of(0, || {
            let padded = gradient.pad_with_zeros(1, 0, kernel - 1)?;
            let mut sum = gradient.zeros_like()?;
            for at in 0..kernel {
                sum = (sum + padded.narrow(1, kernel - 1 - at, sequence)?.broadcast_mul(&tap(weight, at)?)?)?;
            }
            masked(&sum, mask)?.to_dtype(x.dtype())
        })?;
        let of_weight = backward.gradient_of(1, || {
            let padded = wide(&masked(x, mask)?)?.pad_with_zeros(1, kernel - 1, 0)?;
            let part = |at: usize| (padded.narrow(1, at, sequence)? * &gradient)?.sum((0, 1));
            let parts = (0..kernel).map(part).collect::<candle_core::Result<Vec<_>>>()?;
            Tensor::stack(&parts, 1)?.reshape(weight.dims())?.to_dtype(weight.dtype())
        })?;
        let mut gradients = vec![of_input, of_weight];
        for (index, input) in backward.inputs.iter().enumerate().skip(2) {
            let is_bias = input.dims().len() == 1;
            gradients.push(if is_bias { backward.gradient_of(index, || gradient.sum((0, 1))?.to_dtype(x.dtype()))? } else { None });
        }
        Ok(gradients)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        sums(output, [&inputs[1].shape[2]], bindings)
    }
}

impl Incremental for CausalConv {
    fn token_axis(&self, input: usize) -> Option<usize> {
        (input != 1).then_some(1)
    }

    /// Buffers have twice the capacity.
    fn state_elements(&self, inputs: &[&TensorType], removable: usize, bindings: &Bindings) -> u64 {
        let row = TensorType::float([inputs[0].shape[0].clone(), inputs[0].shape[2].clone()]);
        let before = inputs[1].shape[2].evaluate(bindings).unwrap_or(0).saturating_add(removable) as u64;
        elements(inputs[0], bindings).saturating_add(elements(&row, bindings).saturating_mul(before)).saturating_mul(2)
    }

    /// Keeps the rows of the last tokens that later outputs read.
    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, forward: &Forward) -> candle_core::Result<Tensor> {
        let Extras { mask, bias } = extras(&inputs[2..]);
        let count = inputs[0].dim(1)?;
        let rows = past.push(0, &masked(&inputs[0], mask)?, 1, inputs[1].dim(2)? - 1)?;
        let all: Vec<Tensor> = [&rows, &inputs[1]].into_iter().chain(bias).cloned().collect();
        forward(&all)?.narrow(1, rows.dim(1)? - count, count)
    }
}
