//! The mask of chunked attention.

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::decoding::{DecodingState, Forward, Incremental, of_tokens};
use super::{OpSpec, require, require_rank};
use crate::ir::{Dim, Element, TensorType};

/// The mask of attention within chunks (Llama 4): tokens `[batch, sequence]`, of which only the shape is
/// read, to a bias `[1, sequence, sequence]` for [`Attention`](super::Attention): zero for keys in the
/// chunk of the query, else the lowest number. Chunks are counted from the first position of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChunkBias {
    /// Number of tokens in a chunk.
    pub size: usize,
}

impl Default for ChunkBias {
    fn default() -> Self {
        Self { size: 8192 }
    }
}

impl ChunkBias {
    /// The bias of `sequence` queries after `past` tokens.
    fn pairs(&self, past: usize, sequence: usize, device: &Device) -> candle_core::Result<Tensor> {
        let (end, size) = (past + sequence, self.size.max(1));
        let row = |query: usize| (0..end).map(move |key| if key / size == query / size { 0.0 } else { f32::MIN });
        let pairs: Vec<f32> = (past..end).flat_map(row).collect();
        Tensor::from_vec(pairs, (1, sequence, end), device)
    }
}

impl Incremental for ChunkBias {
    fn token_axis(&self, _input: usize) -> Option<usize> {
        Some(1)
    }

    fn returns_pairs(&self) -> bool {
        true
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, _forward: &Forward) -> candle_core::Result<Tensor> {
        self.pairs(past.tokens(), inputs[0].dim(1)?, inputs[0].device())
    }
}

impl OpSpec for ChunkBias {
    of_tokens!();

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Int, "the tokens")?;
        require_rank(inputs[0], 2, "the tokens")?;
        if self.size == 0 {
            return Err("chunks must have at least one token".into());
        }
        let sequence = &inputs[0].shape[1];
        Ok(TensorType { element: Element::Float, shape: vec![Dim::Fixed(1), sequence.clone(), sequence.clone()] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "_ s! -> _ s! s!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let sequence = inputs[0].dim(1)?;
        constant(format!("chunks of {} in {sequence}", self.size), inputs[0].device(), |device| self.pairs(0, sequence, device))
    }
}
