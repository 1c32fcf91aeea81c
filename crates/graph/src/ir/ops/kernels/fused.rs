//! Fused operations of candle for GPUs, which save memory traffic. They have no gradients.

use candle_core::{Result, Tensor};
use candle_nn::ops::{layer_norm, rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope;

use super::super::Op;
use super::super::gradient::wide;
use super::Kernel;

/// The kernel of an op, if there is a fused operation.
pub(super) fn kernel(op: &Op) -> Option<Box<dyn Kernel>> {
    let supported = matches!(op, Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Softmax(_) | Op::Rotary(_) | Op::Attention(_));
    supported.then(|| Box::new(Fused(op.clone())) as Box<dyn Kernel>)
}

#[derive(Debug)]
struct Fused(Op);

/// Softmax over the last axis, computed in at least 32 bits.
fn softmax(x: &Tensor) -> Result<Tensor> {
    softmax_last_dim(&wide(x)?.contiguous()?)?.to_dtype(x.dtype())
}

impl Kernel for Fused {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let x = inputs[0].contiguous()?;
        match &self.0 {
            Op::LayerNorm(op) if inputs.len() > 2 => layer_norm(&x, &inputs[1], &inputs[2], op.epsilon as f32),
            Op::RmsNorm(op) if op.offset == 0.0 => rms_norm(&x, &inputs[1], op.epsilon as f32),
            Op::Softmax(op) if op.over_last(x.rank()) => softmax(&x),
            Op::Rotary(op) => {
                let (_, _, sequence, width) = x.dims4()?;
                let turned = op.turned(width);
                let (cos, sin) = op.tables(turned, 0..sequence, x.device())?;
                let turned = rope(&x.narrow(3, 0, turned)?.contiguous()?, &cos.to_dtype(x.dtype())?, &sin.to_dtype(x.dtype())?)?;
                op.with_rest(turned, &x)
            }
            Op::Attention(op) => op.attend(inputs, softmax),
            other => other.spec().eval(inputs),
        }
        .map(Some)
    }
}
