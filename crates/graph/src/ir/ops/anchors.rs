//! Anchor boxes of the places of feature maps.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, TensorType};

/// How anchors change a value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnchorUse {
    /// Adds the logits of the anchors to boxes `[batch, places, 4]`.
    #[default]
    Add,
    /// Replaces the places whose anchors are invalid with zeros, `[batch, places, width]`.
    Mask,
}

/// Anchor boxes (center, width, height; relative to the image) of the places of feature maps, level by
/// level and row by row (RT-DETR: Zhao et al., 2023). An anchor is centered in its place, and is a square of
/// `size · 2 ^ level`. Anchors with a number outside of [`VALID`](Self::VALID) are invalid: their logits are
/// [`f32::MAX`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Anchors {
    /// Rows and columns of each feature map.
    pub levels: Vec<[usize; 2]>,
    /// Width and height of the anchors of the first level.
    pub size: f64,
    /// How the anchors change the value.
    pub apply: AnchorUse,
}

impl Default for Anchors {
    fn default() -> Self {
        Self { levels: vec![[1, 1]], size: 0.05, apply: AnchorUse::Add }
    }
}

/// Maximum number of places.
const MAX_PLACES: usize = 1 << 24;

/// Number of places of all levels.
pub(super) fn places(levels: &[[usize; 2]]) -> Result<usize, String> {
    let sum = |sum: usize, [rows, columns]: &[usize; 2]| rows.checked_mul(*columns).filter(|places| *places > 0)?.checked_add(sum);
    let places = levels.iter().try_fold(0, sum).filter(|places| (1..=MAX_PLACES).contains(places));
    places.ok_or_else(|| format!("feature maps of {levels:?} places are empty or too large"))
}

impl Anchors {
    /// The range of the numbers of valid anchors.
    pub const VALID: Range<f32> = 0.01..0.99;

    /// The numbers of each anchor, computed in 32 bits like PyTorch's.
    fn boxes(&self) -> impl Iterator<Item = [f32; 4]> {
        let of_level = move |(level, &[rows, columns]): (i32, &[usize; 2])| {
            let side = (self.size * 2f64.powi(level)) as f32;
            let center = |place: usize, of: usize| (place as f32 + 0.5) / of as f32;
            (0..rows * columns).map(move |place| [center(place % columns, columns), center(place / columns, rows), side, side])
        };
        (0i32..).zip(&self.levels).flat_map(of_level)
    }

    fn is_valid(anchor: &[f32; 4]) -> bool {
        anchor.iter().all(|number| *number > Self::VALID.start && *number < Self::VALID.end)
    }

    /// The number of each element that is added, or with which places are multiplied.
    pub fn numbers(&self) -> Vec<f32> {
        let logits = |anchor: [f32; 4]| if Self::is_valid(&anchor) { anchor.map(|x| (x / (1.0 - x)).ln()) } else { [f32::MAX; 4] };
        match self.apply {
            AnchorUse::Add => self.boxes().flat_map(logits).collect(),
            AnchorUse::Mask => self.boxes().map(|anchor| f32::from(Self::is_valid(&anchor))).collect(),
        }
    }

    /// [`numbers`](Self::numbers) for broadcasting with a value.
    fn tensor(&self, like: &Tensor) -> candle_core::Result<Tensor> {
        let numbers = constant(format!("{self:?}"), like.device(), |device| {
            let width = if self.apply == AnchorUse::Add { 4 } else { 1 };
            let numbers = self.numbers();
            let places = numbers.len() / width;
            Tensor::from_vec(numbers, (1, places, width), device)
        })?;
        numbers.to_dtype(like.dtype())
    }
}

impl OpSpec for Anchors {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the input")?;
        let places = places(&self.levels)?;
        if inputs[0].shape[1] != Dim::Fixed(places) {
            return Err(format!("the input must have {places} places"));
        }
        if self.apply == AnchorUse::Add && inputs[0].shape[2] != Dim::Fixed(4) {
            return Err("boxes must have 4 numbers".into());
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        match self.apply {
            AnchorUse::Add => "b _ _ -> b _ _",
            AnchorUse::Mask => "b _ c -> b _ c",
        }
        .into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        let numbers = self.tensor(&x)?;
        match self.apply {
            AnchorUse::Add => x.broadcast_add(&numbers)?,
            AnchorUse::Mask => x.broadcast_mul(&numbers)?,
        }
        .to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || match self.apply {
            AnchorUse::Add => Ok(backward.gradient.clone()),
            AnchorUse::Mask => backward.gradient.broadcast_mul(&self.tensor(backward.gradient)?),
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `RTDetrModel.generate_anchors` of transformers for ((1, 2), (1, 64)).
    #[test]
    fn anchors_match_the_reference() {
        let op = Anchors { levels: vec![[1, 2], [1, 64]], ..Anchors::default() };
        let near = |found: &[f32], expected: [f32; 4]| assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}, not {expected:?}");
        let boxes = op.numbers();
        near(&boxes[..4], [-1.098_612_3, 0.0, -2.944_439, -2.944_439]);
        near(&boxes[4..8], [1.098_612_3, 0.0, -2.944_439, -2.944_439]);
        near(&boxes[12..16], [-3.729_700_6, 0.0, -2.197_224_6, -2.197_224_6]);
        // The centers of the first and the last column are too close to the border.
        assert_eq!(boxes[8..12], [f32::MAX; 4]);
        let mask = Anchors { apply: AnchorUse::Mask, ..op }.numbers();
        assert_eq!((mask[..4].to_vec(), mask[65], mask.iter().sum::<f32>()), (vec![1.0, 1.0, 0.0, 1.0], 0.0, 64.0));
    }

    #[test]
    fn feature_maps_must_have_the_places_of_the_input() {
        let infer = |levels: &[[usize; 2]]| Anchors { levels: levels.to_vec(), ..Anchors::default() }.infer(&[&TensorType::float([2, 7, 4])]);
        assert!(infer(&[[2, 3], [1, 1]]).is_ok());
        assert!(infer(&[[2, 3]]).unwrap_err().contains("6 places"));
        assert!([&[][..], &[[7, 1], [0, 3]], &[[usize::MAX, 2]]].iter().all(|levels| infer(levels).is_err()));
    }
}
