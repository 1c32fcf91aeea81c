//! Features of images among the embeddings of a text.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, CumSum, OpSpec, ScalarOps, is_zero, require, require_floats, require_rank};
use crate::ir::{Element, TensorType};

/// Puts the features of an image into a text: embeddings `[batch, sequence, width]`, token ids `[batch,
/// sequence]` and features `[batch, patches, width]`. The positions of `token` take the features of their
/// row, in order. Their number must be that of the patches, which the executor checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InsertImages {
    /// Id of the token of a patch.
    pub token: i64,
    /// Whether features are added to the embeddings, instead of replacing them.
    #[serde(skip_serializing_if = "is_zero")]
    pub add: bool,
}

impl InsertImages {
    /// Whether each token is that of a patch, `[batch, sequence]`, and the number of patches in the row
    /// before it, as floats.
    pub(super) fn patches(token: i64, tokens: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let is_patch = tokens.eq_scalar(token as f64)?;
        let before = CumSum { exclusive: true, ..CumSum::default() }.eval(&[is_patch.to_dtype(DType::F32)?])?;
        Ok((is_patch, before))
    }

    /// For each token of all rows, the row of its patch among those of all images, and whether it is a patch,
    /// `[batch, sequence, width]`.
    fn places(&self, tokens: &Tensor, patches: usize, width: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let (batch, sequence) = tokens.dims2()?;
        let (is_patch, before) = Self::patches(self.token, tokens)?;
        let first = Tensor::arange(0u32, batch as u32, tokens.device())?.to_dtype(DType::F32)?.affine(patches as f64, 0.0)?.unsqueeze(1)?;
        let at = before.minimum_scalar(patches.saturating_sub(1) as f64)?.broadcast_add(&first)?;
        Ok((at.to_dtype(DType::U32)?.flatten_all()?, is_patch.unsqueeze(2)?.expand((batch, sequence, width))?.contiguous()?))
    }
}

impl OpSpec for InsertImages {
    fn arity(&self) -> Range<usize> {
        3..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [x, tokens, features] = [inputs[0], inputs[1], inputs[2]];
        require_floats(x, 3, "the embeddings")?;
        require(tokens, Element::Int, "the tokens")?;
        require_rank(tokens, 2, "the tokens")?;
        require_floats(features, 3, "the features")?;
        if tokens.shape[..] != x.shape[..2] {
            return Err(format!("tokens {tokens} do not fit the embeddings {x}"));
        }
        if features.shape[0] != x.shape[0] || features.shape[2] != x.shape[2] {
            return Err(format!("features of {features} do not fit {x}"));
        }
        features.shape[1].fixed().ok_or("the number of patches must be fixed")?;
        Ok(x.clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s! c, b s!, b _ c -> b s! c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, tokens, features] = [&inputs[0], &inputs[1], &inputs[2]];
        let (batch, patches, width) = features.dims3()?;
        let (at, is_patch) = self.places(tokens, patches, width)?;
        let rows = features.to_dtype(x.dtype())?.reshape((batch * patches, width))?.index_select(&at, 0)?.reshape(x.shape())?;
        if self.add { x + is_patch.where_cond(&rows, &rows.zeros_like()?)? } else { is_patch.where_cond(&rows, &x.contiguous()?) }
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (gradient, dims) = (backward.gradient.contiguous()?, backward.inputs[2].dims());
        let (at, is_patch) = self.places(backward.inputs[1].tensor()?, dims[1], dims[2])?;
        let zeros = gradient.zeros_like()?;
        let of_text = backward.gradient_of(0, || if self.add { Ok(gradient.clone()) } else { is_patch.where_cond(&zeros, &gradient) })?;
        let of_features = backward.gradient_of(2, || {
            let rows = wide(&is_patch.where_cond(&gradient, &zeros)?)?.reshape((at.elem_count(), dims[2]))?;
            sum_rows_by_index(&rows, &at, dims[0] * dims[1])?.reshape(dims)?.to_dtype(gradient.dtype())
        })?;
        Ok(vec![of_text, None, of_features])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1
    }
}
