//! Kernels for GPUs: those of [`gpu`], and fused operations of candle, which have no gradients.

use candle_core::{Result, Tensor};
use candle_nn::ops::{layer_norm, rms_norm, softmax_last_dim};

use super::super::activation::derivative_operand;
use super::super::embedding::from_start;
use super::super::gradient::wide;
use super::super::linear::by_row;
use super::super::{Backward, Linear, Op, OpSpec, RmsNorm, Rotary};
use super::{Gradients, Kernel, fused_attention};
use crate::gpu;

/// The kernel of an op, if there is one for GPUs.
pub(super) fn kernel(op: &Op) -> Option<Box<dyn Kernel>> {
    let supported = matches!(
        op,
        Op::Linear(_)
            | Op::LayerNorm(_)
            | Op::RmsNorm(_)
            | Op::Softmax(_)
            | Op::Rotary(_)
            | Op::Attention(_)
            | Op::SplitHeads(_)
            | Op::MergeHeads(_)
            | Op::Add(_)
            | Op::Mul(_)
            | Op::Embedding(_)
    );
    (supported || op.activation().is_some()).then(|| Box::new(OnGpu(op.clone())) as Box<dyn Kernel>)
}

#[derive(Debug)]
struct OnGpu(Op);

/// Softmax over the last axis, computed in at least 32 bits.
fn softmax(x: &Tensor) -> Result<Tensor> {
    softmax_last_dim(&wide(x)?.contiguous()?)?.to_dtype(x.dtype())
}

fn linear(op: Linear, inputs: &[Tensor]) -> Result<Option<Tensor>> {
    let Some(bias) = inputs.get(2) else { return Ok(None) };
    // The product is a new tensor that can be overwritten.
    let product = op.eval(&inputs[..2])?;
    let bias = bias.to_dtype(product.dtype())?;
    match gpu::add_bias(&product, &bias)? {
        Some(()) => Ok(Some(product)),
        None => product.broadcast_add(&bias).map(Some),
    }
}

fn rotate(op: &Rotary, x: &Tensor, sign: f64) -> Result<Option<Tensor>> {
    let (_, _, sequence, width) = x.dims4()?;
    let (cos, sin) = op.tables(op.turned(width), 0..sequence, x.device())?;
    gpu::rotate(x, (&cos, &sin), sign)
}

fn norm_back(backward: &Backward, epsilon: f64, offset: f64, centred: bool) -> Result<Option<Gradients>> {
    let (x, weight) = (backward.inputs[0].tensor()?.contiguous()?, backward.inputs[1].tensor()?);
    let sums = backward.needs_gradient(1) || backward.needs_gradient(2);
    let found = gpu::norm_back(&x, weight, &backward.gradient.contiguous()?, (epsilon, offset, centred), sums)?;
    let Some((of_x, sums)) = found else { return Ok(None) };
    let all = std::iter::once(Some(of_x)).chain(sums.map_or([None, None], |sums| sums.map(Some)));
    Ok(Some(all.take(backward.inputs.len()).enumerate().map(|(at, found)| found.filter(|_| backward.needs_gradient(at))).collect()))
}

/// The product of the gradient with each factor, if a broadcast did not expand them.
fn multiply_back(backward: &Backward) -> Result<Option<Gradients>> {
    let mut found = Vec::new();
    for (at, other) in [(0, 1), (1, 0)] {
        if !backward.needs_gradient(at) {
            found.push(None);
            continue;
        }
        if backward.inputs[at].dims() != backward.gradient.dims() {
            return Ok(None);
        }
        let Some(product) = gpu::multiply(&backward.gradient.contiguous()?, &backward.inputs[other].tensor()?.contiguous()?)? else { return Ok(None) };
        found.push(Some(product));
    }
    Ok(Some(found))
}

impl Kernel for OnGpu {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let x = &inputs[0];
        if let Some(function) = self.0.activation() {
            return gpu::activate(function, &x.contiguous()?);
        }
        match &self.0 {
            Op::Linear(op) => linear(*op, inputs),
            Op::LayerNorm(op) if inputs.len() > 2 => layer_norm(&x.contiguous()?, &inputs[1], &inputs[2], op.epsilon as f32).map(Some),
            Op::RmsNorm(RmsNorm { epsilon, offset: 0.0 }) => rms_norm(&x.contiguous()?, &inputs[1], *epsilon as f32).map(Some),
            Op::Softmax(op) if op.over_last(x.rank()) => softmax(x).map(Some),
            Op::Rotary(op) => rotate(op, x, 1.0),
            Op::Attention(op) => match fused_attention::forward(op, inputs)? {
                Some(output) => Ok(Some(output)),
                None => op.attend(inputs, softmax, None).map(Some),
            },
            op @ (Op::SplitHeads(_) | Op::MergeHeads(_)) => heads(op, x),
            Op::Add(_) => gpu::add(&x.contiguous()?, &inputs[1].contiguous()?),
            Op::Mul(_) => gpu::multiply(&x.contiguous()?, &inputs[1].contiguous()?),
            _ => Ok(None),
        }
    }

    fn backward(&self, backward: &Backward) -> Result<Option<Gradients>> {
        let needed = |found: Option<Tensor>| found.map(|found| vec![Some(found).filter(|_| backward.needs_gradient(0))]);
        if let Some(function) = self.0.activation() {
            let operand = derivative_operand(Some(function), backward)?.contiguous()?;
            return gpu::activate_back(function, &operand, &backward.gradient.contiguous()?).map(needed);
        }
        match &self.0 {
            Op::LayerNorm(op) => norm_back(backward, op.epsilon, 0.0, true),
            Op::RmsNorm(op) => norm_back(backward, op.epsilon, op.offset, false),
            Op::Rotary(op) => rotate(op, backward.gradient, -1.0).map(needed),
            Op::Attention(op) => fused_attention::backward(op, backward),
            Op::SplitHeads(_) => heads(&Op::MergeHeads(super::super::MergeHeads {}), backward.gradient).map(needed),
            Op::MergeHeads(_) => {
                let head_dim = backward.inputs[0].dims()[3];
                heads(&Op::SplitHeads(super::super::SplitHeads { head_dim }), backward.gradient).map(needed)
            }
            Op::Mul(_) => multiply_back(backward),
            Op::Embedding(_) if backward.needs_gradient(1) => {
                let table = backward.inputs[1].dims();
                let rows = by_row(backward.gradient, table[1])?.contiguous()?;
                let sums = gpu::sum_rows_by_index(&rows, &from_start(backward.inputs[0].tensor()?, table[0])?, table[0])?;
                Ok(sums.map(|sums| vec![None, Some(sums)]))
            }
            _ => Ok(None),
        }
    }
}

/// Splits or merges heads, with a contiguous result.
fn heads(op: &Op, x: &Tensor) -> Result<Option<Tensor>> {
    let x = x.contiguous()?;
    match op {
        Op::SplitHeads(_) => gpu::contiguous(&op.spec().eval(&[x])?),
        _ => {
            let (batch, heads, sequence, width) = x.dims4()?;
            let merged = gpu::contiguous(&x.transpose(1, 2)?)?;
            merged.map(|merged| merged.reshape((batch, sequence, heads * width))).transpose()
        }
    }
}
