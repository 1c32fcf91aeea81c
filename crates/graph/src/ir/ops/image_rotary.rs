//! Rotary position embedding of texts with images.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::rotary::rotate_halves;
use super::{Backward, InsertImages, OpSpec, Rotary, RotaryScaling, ScalarOps, require, require_rank};
use crate::ir::{Element, TensorType};

/// Maximum number of patches of an image.
const MAX_PATCHES: usize = 1 << 20;

/// A [`Rotary`] with positions on three axes (M-RoPE of Qwen2-VL: Wang et al., 2024): heads `[batch, heads,
/// sequence, d]` and token ids `[batch, sequence]`. All axes of a text token have the same position. The
/// patches of an image have the position of its start on the first axis, and add their row and column on the
/// others; the next token follows the largest position. Each pair of elements is rotated by one axis.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImageRotary {
    /// Frequencies, and the number of rotated elements.
    pub rotary: Rotary,
    /// Number of pairs of each axis.
    pub sections: [usize; 3],
    /// Whether the axes of neighboring pairs alternate (Qwen3-VL), instead of following each other.
    pub interleaved: bool,
    /// Id of the token of a patch.
    pub token: i64,
    /// Rows and columns of the patches of an image.
    pub grid: [usize; 2],
}

impl ImageRotary {
    /// The axis of each of these pairs.
    pub fn axis_of_pairs(&self, pairs: usize) -> Vec<usize> {
        let [_, rows, columns] = self.sections;
        if !self.interleaved {
            return self.sections.iter().enumerate().flat_map(|(axis, count)| std::iter::repeat_n(axis, *count)).collect();
        }
        let axis = |pair: usize| match pair % 3 {
            1 if pair / 3 < rows => 1,
            2 if pair / 3 < columns => 2,
            _ => 0,
        };
        (0..pairs).map(axis).collect()
    }

    /// The positions of tokens on the three axes, `[batch, sequence, 3]`, as floats, which are exact.
    fn positions(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, sequence) = tokens.dims2()?;
        let [rows, columns] = self.grid.map(|size| size as f64);
        let (is_patch, before) = InsertImages::patches(self.token, tokens)?;
        let images = before.div_scalar(rows * columns)?.floor()?;
        let patch = (&before - (&images * (rows * columns))?)?;
        let row = patch.div_scalar(columns)?.floor()?;
        let column = (&patch - (&row * columns)?)?;
        let place = Tensor::arange(0u32, sequence as u32, tokens.device())?.to_dtype(DType::F32)?.expand((batch, sequence))?;
        let start = ((place - before)? + (images * rows.max(columns))?)?;
        let is_patch = is_patch.to_dtype(DType::F32)?;
        Tensor::stack(&[&start, &(&start + (&row * &is_patch)?)?, &(&start + (&column * &is_patch)?)?], 2)
    }

    /// Rotates forwards, or backwards for a negative sign.
    fn rotated(&self, x: &Tensor, tokens: &Tensor, sign: f64) -> candle_core::Result<Tensor> {
        let (_, _, sequence, width) = x.dims4()?;
        let turned = self.rotary.turned(width);
        let (frequencies, factor) = self.rotary.frequencies(turned, sequence);
        let axes = constant(format!("{self:?} axes {turned}"), x.device(), |device| {
            let axes: Vec<u32> = self.axis_of_pairs(turned / 2).into_iter().map(|axis| axis as u32).collect();
            Tensor::from_vec(axes, turned / 2, device)
        })?;
        let frequencies = constant(format!("{:?} frequencies {turned}", self.rotary), x.device(), |device| {
            Tensor::from_vec(frequencies.into_iter().map(|frequency| frequency as f32).collect::<Vec<_>>(), turned / 2, device)
        })?;
        // transformers computes angles as products of f32 numbers.
        let angles = self.positions(tokens)?.index_select(&axes, 2)?.broadcast_mul(&frequencies)?.unsqueeze(1)?;
        let halves = rotate_halves(&x.narrow(3, 0, turned)?, &(angles.cos()? * factor)?, &(angles.sin()? * (factor * sign))?)?;
        self.rotary.with_rest(halves, x)
    }
}

impl OpSpec for ImageRotary {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let ty = self.rotary.infer(&inputs[..1])?;
        require(inputs[1], Element::Int, "the tokens")?;
        require_rank(inputs[1], 2, "the tokens")?;
        if inputs[1].shape[0] != ty.shape[0] || inputs[1].shape[1] != ty.shape[2] {
            return Err(format!("tokens {} do not fit the heads {ty}", inputs[1]));
        }
        if matches!(self.rotary.scaling, RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope { .. }) {
            return Err("scaling that depends on the length of the text is not supported with images".into());
        }
        if self.grid.contains(&0) || self.grid[0].checked_mul(self.grid[1]).is_none_or(|patches| patches > MAX_PATCHES) {
            return Err(format!("an image of {} x {} patches must have 1 to {MAX_PATCHES}", self.grid[0], self.grid[1]));
        }
        let pairs = ty.shape[3].fixed().map_or(0, |width| self.rotary.turned(width) / 2);
        let sum = self.sections.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if !self.interleaved && sum != Some(pairs) {
            return Err(format!("sections {:?} do not add up to the {pairs} rotated pairs of a head", self.sections));
        }
        Ok(ty)
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s! d!, b s! -> b h s! d!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.rotated(&inputs[0], &inputs[1], 1.0)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let tokens = backward.inputs[1].tensor()?;
        Ok(vec![backward.gradient_of(0, || self.rotated(backward.gradient, tokens, -1.0))?, None])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1
    }
}
