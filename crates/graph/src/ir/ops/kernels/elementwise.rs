//! Elementwise kernels.

use candle_core::{Result, Tensor};

use super::super::activation::derivative_operand;
use super::super::gradient::summed_to;
use super::super::{Add, Backward, Clip, FakeQuantize, Gelu, HardSigmoid, HardSwish, LeakyRelu, LearnedFakeQuantize, Mul, Op, Relu, Sigmoid, Silu, Tanh};
use super::host::{Host, activated, column_sums, combined, readable, with_layout_of};
use super::{Gradients, Kernel};
use crate::kernel::activation::ActivationFunction;
use crate::kernel::activation_gradient::{derivative, scale_derivative};
use crate::kernel::rows;

impl Op {
    /// The elementwise function that an op computes, if it has a kernel.
    pub fn activation(&self) -> Option<ActivationFunction> {
        match self {
            Op::Relu(op) => Relu::function(op),
            Op::Gelu(op) => Gelu::function(op),
            Op::Silu(op) => Silu::function(op),
            Op::Sigmoid(op) => Sigmoid::function(op),
            Op::Tanh(op) => Tanh::function(op),
            Op::Clip(op) => Clip::function(op),
            Op::FakeQuantize(op) => FakeQuantize::function(op),
            Op::HardSigmoid(op) => HardSigmoid::function(op),
            Op::HardSwish(op) => HardSwish::function(op),
            Op::LeakyRelu(op) => LeakyRelu::function(op),
            _ => None,
        }
    }
}

impl Kernel for ActivationFunction {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        activated(&inputs[0], *self).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        if !backward.needs_gradient(0) {
            return Ok(Some(vec![None]));
        }
        let operand = derivative_operand(Some(*self), backward)?;
        let found = combined(operand, &with_layout_of(backward.gradient, operand)?, |x, g, out| derivative(*self, x, g, out)).transpose()?;
        Ok(found.map(|gradient| vec![Some(gradient)]))
    }
}

impl LearnedFakeQuantize {
    /// The quantizer with the current scale.
    fn fixed(&self, logarithm: &Tensor) -> Option<FakeQuantize> {
        let logarithm = *Host::new(logarithm)?.floats()?.first()?;
        Some(self.at(logarithm))
    }
}

impl Kernel for LearnedFakeQuantize {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        self.fixed(&inputs[1]).and_then(|fixed| fixed.function()).map_or(Ok(None), |function| function.forward(&inputs[..1]))
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let (x, logarithm) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let Some(fixed) = self.fixed(logarithm) else { return Ok(None) };
        let value_only = Backward { inputs: &backward.inputs[..1], needs_gradient: &backward.needs_gradient[..1], ..*backward };
        let Some(mut found) = fixed.function().map_or(Ok(None), |function| function.backward(&value_only))? else { return Ok(None) };
        let of_logarithm = if backward.needs_gradient(1) {
            let moved = |x: &[f32], g: &[f32], out: &mut [f32]| scale_derivative(fixed.scale, fixed.zero_point as f32, x, g, out);
            let Some(parts) = combined(x, &with_layout_of(backward.gradient, x)?, moved) else { return Ok(None) };
            Some(parts?.sum_all()?.reshape(1)?)
        } else {
            None
        };
        found.push(of_logarithm);
        Ok(Some(found))
    }
}

impl Kernel for Add {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        combined(&inputs[0], &inputs[1], rows::add).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let of = |input: usize| backward.gradient_of(input, || summed(backward.gradient, backward.inputs[input].dims()));
        Ok(Some(vec![of(0)?, of(1)?]))
    }
}

impl Kernel for Mul {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        combined(&inputs[0], &inputs[1], rows::multiply).transpose()
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let of = |input: usize| {
            backward.gradient_of(input, || {
                let other = backward.inputs[1 - input].tensor()?;
                let product = combined(backward.gradient, other, rows::multiply);
                summed(&product.unwrap_or_else(|| backward.gradient.broadcast_mul(other))?, backward.inputs[input].dims())
            })
        };
        Ok(Some(vec![of(0)?, of(1)?]))
    }
}

/// Reduces the gradient of a broadcast result to the shape of the operand, with column sums if only
/// leading axes were broadcast.
fn summed(gradient: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let kept = dims.iter().rev().zip(gradient.dims().iter().rev()).take_while(|(a, b)| a == b).count();
    if gradient.dims() != dims && readable([gradient]) && dims[..dims.len() - kept].iter().all(|size| *size == 1) {
        let width = dims.iter().product::<usize>();
        if let Some(sums) = column_sums(&gradient.reshape((gradient.elem_count() / width.max(1), width))?)? {
            return sums.reshape(dims);
        }
    }
    summed_to(gradient, dims)
}
