//! A scale of queries that grows with the position.

use std::ops::Range;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::decoding::{DecodingState, Forward, Incremental};
use super::gradient::wide;
use super::{Backward, OpSpec, require_floats};
use crate::ir::TensorType;

/// Heads `[batch, heads, sequence, d]`, each token times `1 + factor · ln(1 + ⌊(position + offset) /
/// interval⌋)`: temperature tuning of attention in Llama 4 and Ministral 3, after Nakanishi,
/// *Scalable-Softmax Is Superior for Attention*, 2025. Positions are counted from the start of a row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PositionScale {
    /// Number of positions with the same scale.
    pub interval: usize,
    /// Factor on the logarithm.
    pub factor: f64,
    /// Added to positions.
    pub offset: usize,
}

impl Default for PositionScale {
    fn default() -> Self {
        Self { interval: 8192, factor: 0.1, offset: 1 }
    }
}

impl PositionScale {
    /// The scales of `sequence` tokens after `past` ones, `[sequence, 1]`.
    fn scales(&self, past: usize, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        let scale = |position: usize| (1.0 + self.factor * ((position.saturating_add(self.offset) / self.interval.max(1)) as f64).ln_1p()) as f32;
        let make = |device: &Device| Tensor::from_vec((past..past + sequence).map(scale).collect::<Vec<_>>(), (sequence, 1), device);
        if past == 0 { constant(format!("{self:?} {sequence}"), device, make) } else { make(device) }
    }

    fn scaled(&self, x: &Tensor, past: usize) -> candle_core::Result<Tensor> {
        let scales = self.scales(past, x.dim(2)?, x.device())?;
        let wide = wide(x)?;
        wide.broadcast_mul(&scales.to_dtype(wide.dtype())?)?.to_dtype(x.dtype())
    }
}

impl OpSpec for PositionScale {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        if self.interval == 0 {
            return Err("the interval must have at least one position".into());
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s! d -> b h s! d".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.scaled(&inputs[0], 0)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || self.scaled(backward.gradient, 0))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }
}

impl Incremental for PositionScale {
    fn token_axis(&self, _input: usize) -> Option<usize> {
        Some(2)
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, _forward: &Forward) -> candle_core::Result<Tensor> {
        self.scaled(&inputs[0], past.tokens())
    }
}
