//! Attention to few sampled places of feature maps.

use std::ops::Range;

use candle_core::{DType, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::anchors::places;
use super::constants::ScalarOps;
use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, elements, require_floats, softmax};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Multi-scale deformable attention (Zhu et al., *Deformable DETR*, 2020), with reference boxes.
///
/// Inputs: values `[batch, places, heads · d]` of the places of all feature maps, level by level and row by
/// row; offsets `[batch, queries, heads · levels · points · 2]` (horizontal, vertical); scores `[batch,
/// queries, heads · levels · points]`, of which the softmax over levels and points is taken; and boxes
/// `[batch, queries, 4]` (center, width, height; relative to the image). A head samples each level at
/// `center + offset · scale / points · size` by bilinear interpolation, with zeros outside, and returns the
/// weighted sum.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeformableAttention {
    /// Rows and columns of each feature map.
    pub levels: Vec<[usize; 2]>,
    /// Number of sampled places of each level.
    pub points: usize,
    /// Factor on the offsets.
    pub scale: f64,
}

impl Default for DeformableAttention {
    fn default() -> Self {
        Self { levels: vec![[1, 1]], points: 1, scale: 0.5 }
    }
}

/// Sizes of the inputs.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    places: usize,
    heads: usize,
    width: usize,
    queries: usize,
}

/// One of the four neighbors of the sampled places of a level, `[batch, heads, queries, points]` each.
struct Corner {
    /// Rows of the values of all heads, flattened.
    rows: Tensor,
    /// Horizontal and vertical share, zero outside of the feature map.
    shares: [Tensor; 2],
    /// Derivative of each share by the position.
    slopes: [f64; 2],
    /// 1 inside of the feature map in both directions, else 0.
    inside: Tensor,
}

impl DeformableAttention {
    /// Number of samples of a head for a query.
    pub fn samples(&self) -> usize {
        self.levels.len().saturating_mul(self.points)
    }

    /// Factor of an offset, relative to the size of the box.
    pub fn step(&self) -> f64 {
        self.scale / self.points.max(1) as f64
    }

    fn sizes(&self, values: &[usize], scores: &[usize]) -> Sizes {
        let heads = scores[2] / self.samples().max(1);
        Sizes { batch: values[0], places: values[1], heads, width: values[2] / heads.max(1), queries: scores[1] }
    }

    /// Values of each head as rows, `[batch · heads · places, d]`.
    fn rows(values: &Tensor, sizes: Sizes) -> Computed<Tensor> {
        let Sizes { batch, places, heads, width, .. } = sizes;
        values.reshape((batch, places, heads, width))?.transpose(1, 2)?.contiguous()?.reshape((batch * heads * places, width))
    }

    /// The softmax of the scores, `[batch, heads, queries, levels · points]`.
    fn weights(&self, scores: &Tensor, sizes: Sizes) -> Computed<Tensor> {
        let by_head = wide(scores)?.reshape((sizes.batch, sizes.queries, sizes.heads, self.samples()))?;
        softmax::softmax(&by_head.transpose(1, 2)?.contiguous()?)
    }

    /// Horizontal and vertical offsets, `[batch, heads, queries, levels · points]` each.
    fn offsets(&self, offsets: &Tensor, sizes: Sizes) -> Computed<[Tensor; 2]> {
        let all = wide(offsets)?.reshape((sizes.batch, sizes.queries, sizes.heads, self.samples(), 2))?.transpose(1, 2)?;
        Ok([all.narrow(4, 0, 1)?.squeeze(4)?.contiguous()?, all.narrow(4, 1, 1)?.squeeze(4)?.contiguous()?])
    }

    /// A number of each box, `[batch, 1, queries, 1]`.
    fn of_boxes(boxes: &Tensor, number: usize) -> Computed<Tensor> {
        wide(boxes)?.narrow(2, number, 1)?.unsqueeze(1)
    }

    /// The corners of the samples of a level.
    fn corners(&self, level: usize, offsets: &[Tensor; 2], boxes: &Tensor, sizes: Sizes) -> Computed<Vec<Corner>> {
        let [rows, columns] = self.levels[level];
        let first: usize = self.levels[..level].iter().map(|[rows, columns]| rows * columns).sum();
        let device = boxes.device();
        let heads = sizes.batch * sizes.heads;
        let starts = Tensor::arange(0i64, heads as i64, device)?.affine(sizes.places as f64, first as f64)?.reshape((sizes.batch, sizes.heads, 1, 1))?;
        let axis = |axis: usize, size: usize| {
            let offset = offsets[axis].narrow(3, level * self.points, self.points)?.contiguous()?;
            let moved = offset.broadcast_mul(&Self::of_boxes(boxes, axis + 2)?.affine(self.step(), 0.0)?)?;
            let place = moved.broadcast_add(&Self::of_boxes(boxes, axis)?)?.affine(size as f64, -0.5)?;
            // All neighbors of more distant places are outside too.
            let place = place.clamp_scalar(-2.0, size as f64 + 1.0)?;
            let whole = place.floor()?;
            Ok::<_, candle_core::Error>(((place - &whole)?, whole))
        };
        let ((right, column), (below, row)) = (axis(0, columns)?, axis(1, rows)?);
        let side = |whole: &Tensor, share: &Tensor, next: bool, size: usize| {
            let at = if next { whole.affine(1.0, 1.0)? } else { whole.clone() };
            let inside = (at.ge_scalar(0.0)? * at.lt_scalar(size as f64)?)?.to_dtype(share.dtype())?;
            let index = at.clamp_scalar(0.0, size as f64 - 1.0)?.to_dtype(DType::I64)?;
            Ok::<_, candle_core::Error>((index, if next { share.clone() } else { share.affine(-1.0, 1.0)? }, inside))
        };
        let slope = |next: bool| if next { 1.0 } else { -1.0 };
        let mut corners = Vec::with_capacity(4);
        for (down, along) in [(false, false), (false, true), (true, false), (true, true)] {
            let (y, of_y, inside_y) = side(&row, &below, down, rows)?;
            let (x, of_x, inside_x) = side(&column, &right, along, columns)?;
            let rows = (y.affine(columns as f64, 0.0)? + x)?.broadcast_add(&starts)?.flatten_all()?;
            corners.push(Corner { rows, shares: [of_x, of_y], slopes: [slope(along), slope(down)], inside: (inside_x * inside_y)? });
        }
        Ok(corners)
    }

    /// The values of a corner, `[batch, heads, queries, points, d]`.
    fn neighbors(&self, corner: &Corner, values: &Tensor, sizes: Sizes) -> Computed<Tensor> {
        wide(&values.index_select(&corner.rows, 0)?)?.reshape((sizes.batch, sizes.heads, sizes.queries, self.points, sizes.width))
    }
}

impl Corner {
    /// Share of the sampled value.
    fn share(&self) -> Computed<Tensor> {
        (&self.shares[0] * &self.shares[1])? * &self.inside
    }
}

impl OpSpec for DeformableAttention {
    fn arity(&self) -> Range<usize> {
        4..5
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        for (ty, what) in inputs.iter().zip(["the values", "the offsets", "the scores", "the boxes"]) {
            require_floats(ty, 3, what)?;
        }
        let [values, offsets, scores, boxes] = [0, 1, 2, 3].map(|input| &inputs[input].shape);
        if values[1] != Dim::Fixed(places(&self.levels)?) {
            return Err(format!("the values must have {} places", places(&self.levels)?));
        }
        let samples = self.samples();
        let [width, moved, scored] = [&values[2], &offsets[2], &scores[2]].map(|size| size.fixed());
        let (Some(width), Some(moved), Some(scored)) = (width, moved, scored) else { return Err("the widths must be fixed".into()) };
        let heads = scored.checked_div(samples).filter(|heads| *heads > 0 && scored.is_multiple_of(samples));
        let heads = heads.ok_or_else(|| format!("{scored} scores are not a multiple of {samples} samples"))?;
        if !width.is_multiple_of(heads) || scored.checked_mul(2) != Some(moved) {
            return Err(format!("{heads} heads cannot have values of width {width} and {moved} offsets"));
        }
        let rows = |shape: &[Dim]| shape[..2] == scores[..2];
        if values[0] != scores[0] || !rows(offsets) || !rows(boxes) || boxes[2] != Dim::Fixed(4) {
            return Err("the inputs do not have the same batch and queries, or the boxes not 4 numbers".into());
        }
        Ok(TensorType { element: Element::Float, shape: vec![scores[0].clone(), scores[1].clone(), width.into()] })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let samples = self.samples().max(1);
        let heads = inputs[2].shape.get(2).and_then(Dim::fixed).unwrap_or(0) / samples;
        let head = format!("(h={heads} d)");
        let offsets = samples.saturating_mul(2);
        format!("b _ {head}, b q! (h={heads} o!={offsets}), b q! (h={heads} s!={samples}), b q! _ -> b q! {head}")
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        let sizes = self.sizes(inputs[0].dims(), inputs[2].dims());
        let (values, weights) = (Self::rows(&inputs[0], sizes)?, self.weights(&inputs[2], sizes)?);
        let (offsets, boxes) = (self.offsets(&inputs[1], sizes)?, &inputs[3]);
        let mut sum = Tensor::zeros((sizes.batch, sizes.heads, sizes.queries, sizes.width), weights.dtype(), weights.device())?;
        for level in 0..self.levels.len() {
            let weights = weights.narrow(3, level * self.points, self.points)?;
            for corner in self.corners(level, &offsets, boxes, sizes)? {
                let share = (corner.share()? * &weights)?.unsqueeze(4)?;
                sum = (sum + self.neighbors(&corner, &values, sizes)?.broadcast_mul(&share)?.sum(3)?)?;
            }
        }
        sum.transpose(1, 2)?.contiguous()?.reshape((sizes.batch, sizes.queries, sizes.heads * sizes.width))?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let dtype = backward.gradient.dtype();
        let sizes = self.sizes(backward.inputs[0].dims(), backward.inputs[2].dims());
        let boxes = backward.inputs[3].tensor()?;
        let (values, weights) = (Self::rows(backward.inputs[0].tensor()?, sizes)?, self.weights(backward.inputs[2].tensor()?, sizes)?);
        let offsets = self.offsets(backward.inputs[1].tensor()?, sizes)?;
        let Sizes { batch, places, heads, width, queries } = sizes;
        let gradient = wide(backward.gradient)?.reshape((batch, queries, heads, width))?.transpose(1, 2)?.contiguous()?.unsqueeze(3)?;
        let mut of_values = Tensor::zeros((batch * heads * places, width), gradient.dtype(), gradient.device())?;
        // Of each level, for its points: gradients of the softmax, and of horizontal and vertical positions.
        let (mut of_weights, mut of_positions) = (Vec::new(), [Vec::new(), Vec::new()]);
        for (level, sides) in self.levels.iter().enumerate() {
            let weights = weights.narrow(3, level * self.points, self.points)?.contiguous()?;
            let mut sums = [weights.zeros_like()?, weights.zeros_like()?, weights.zeros_like()?];
            for corner in self.corners(level, &offsets, boxes, sizes)? {
                let along = self.neighbors(&corner, &values, sizes)?.broadcast_mul(&gradient)?.sum(4)?;
                let along = (along * &corner.inside)?;
                let [x, y] = &corner.shares;
                sums[0] = (&sums[0] + (&along * (x * y)?)?)?;
                let weighted = (along * &weights)?;
                sums[1] = (&sums[1] + (&weighted * y)?.affine(corner.slopes[0], 0.0)?)?;
                sums[2] = (&sums[2] + (&weighted * x)?.affine(corner.slopes[1], 0.0)?)?;
                if backward.needs_gradient(0) {
                    let share = (corner.share()? * &weights)?.unsqueeze(4)?;
                    let rows = gradient.broadcast_mul(&share)?.reshape((corner.rows.elem_count(), width))?;
                    of_values = (of_values + sum_rows_by_index(&rows, &corner.rows, batch * heads * places)?)?;
                }
            }
            let [weight, x, y] = sums;
            of_weights.push(weight);
            of_positions[0].push(x.affine(sides[1] as f64, 0.0)?);
            of_positions[1].push(y.affine(sides[0] as f64, 0.0)?);
        }
        let [x, y] = &of_positions;
        let of_positions = [Tensor::cat(x, 3)?, Tensor::cat(y, 3)?];
        let tokens = |by_head: Tensor, width: usize| by_head.transpose(1, 2)?.contiguous()?.reshape((batch, queries, width))?.to_dtype(dtype);
        let of_values = backward.gradient_of(0, || {
            let by_place = of_values.reshape((batch, heads, places, width))?.transpose(1, 2)?.contiguous()?;
            by_place.reshape((batch, places, heads * width))?.to_dtype(dtype)
        })?;
        let of_offsets = backward.gradient_of(1, || {
            let axis = |axis: usize| of_positions[axis].broadcast_mul(&Self::of_boxes(boxes, axis + 2)?.affine(self.step(), 0.0)?)?.unsqueeze(4);
            let both = Tensor::cat(&[axis(0)?, axis(1)?], 4)?;
            tokens(both, heads * self.samples() * 2)
        })?;
        let of_scores = backward.gradient_of(2, || tokens(softmax::back(&weights, &Tensor::cat(&of_weights, 3)?)?, heads * self.samples()))?;
        let of_boxes = backward.gradient_of(3, || {
            let sum = |by_sample: &Tensor| by_sample.sum_keepdim((1, 3))?.reshape((batch, queries, 1));
            let size = |axis: usize| sum(&(&of_positions[axis] * &offsets[axis])?.affine(self.step(), 0.0)?);
            Tensor::cat(&[sum(&of_positions[0])?, sum(&of_positions[1])?, size(0)?, size(1)?], 2)?.to_dtype(dtype)
        })?;
        Ok(vec![of_values, of_offsets, of_scores, of_boxes])
    }

    /// Four neighbors of each sample.
    fn macs(&self, _inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        elements(output, bindings).saturating_mul(self.samples() as u64).saturating_mul(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_do_not_match_are_refused() {
        let op = DeformableAttention { levels: vec![[3, 4], [2, 1]], points: 3, scale: 0.5 };
        let infer = |shapes: [[usize; 3]; 4]| {
            let types = shapes.map(TensorType::float);
            op.infer(&types.iter().collect::<Vec<_>>()).map(|ty| ty.to_string())
        };
        let shapes = [[2, 14, 6], [2, 5, 24], [2, 5, 12], [2, 5, 4]];
        assert_eq!(infer(shapes).unwrap(), "float[2, 5, 6]");
        for (input, axis, size, reason) in [
            (0, 1, 13, "14 places"),
            (0, 2, 7, "2 heads cannot have values of width 7"),
            (1, 2, 12, "12 offsets"),
            (2, 2, 13, "13 scores are not a multiple of 6 samples"),
            (3, 2, 2, "4 numbers"),
            (3, 1, 6, "same batch and queries"),
        ] {
            let mut wrong = shapes;
            wrong[input][axis] = size;
            let error = infer(wrong).unwrap_err();
            assert!(error.contains(reason), "{error}, not {reason}");
        }
        let empty = DeformableAttention { points: 0, ..op.clone() };
        assert!(empty.infer(&shapes.map(TensorType::float).iter().collect::<Vec<_>>()).is_err());
    }
}
