//! Sine position embeddings of rows and columns of an image.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, TensorType};

/// Adds sine position embeddings to the features of an image, row by row: `[batch, rows · columns, width]`.
/// A quarter of the width each contains the sines and cosines of the row, and those of the column, for
/// frequencies of `temperature ^ -i/quarter` (Carion et al., *End-to-End Object Detection with
/// Transformers*, 2020, in the order of RT-DETR).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GridPositions {
    /// Rows of the image.
    pub rows: usize,
    /// Columns of the image.
    pub columns: usize,
    /// Base of the frequencies.
    pub temperature: f64,
}

impl Default for GridPositions {
    fn default() -> Self {
        Self { rows: 1, columns: 1, temperature: 10_000.0 }
    }
}

/// Maximum number of elements of the embeddings.
const MAX_ELEMENTS: usize = 1 << 28;

impl GridPositions {
    /// The embeddings of all places, each of this width.
    pub fn embeddings(&self, width: usize) -> Vec<f32> {
        let quarter = width / 4;
        let waves = |at: usize| {
            let angle = move |index: usize| at as f64 * self.temperature.powf(index as f64 / quarter as f64).recip();
            (0..quarter).map(move |index| angle(index).sin()).chain((0..quarter).map(move |index| angle(index).cos()))
        };
        let places = (0..self.rows).flat_map(|row| (0..self.columns).map(move |column| (row, column)));
        places.flat_map(|(row, column)| waves(row).chain(waves(column))).map(|wave| wave as f32).collect()
    }
}

impl OpSpec for GridPositions {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the input")?;
        let width = inputs[0].shape[2].fixed().filter(|width| width.is_multiple_of(4)).ok_or("the width must be a fixed multiple of 4")?;
        let places = self.rows.checked_mul(self.columns);
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return Err("the temperature must be a positive number".into());
        }
        match places.and_then(|places| places.checked_mul(width)) {
            Some(elements) if elements > MAX_ELEMENTS => Err(format!("{elements} elements exceed the maximum of {MAX_ELEMENTS}")),
            Some(_) if places.map(Dim::Fixed).as_ref() == Some(&inputs[0].shape[1]) => Ok(inputs[0].clone()),
            _ => Err(format!("the input must have {} rows of {} places", self.rows, self.columns)),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b _ _ -> b _ _".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, width) = (wide(&inputs[0])?, inputs[0].dim(2)?);
        let embeddings =
            constant(format!("{self:?} {width}"), x.device(), |device| Tensor::from_vec(self.embeddings(width), (1, self.rows * self.columns, width), device))?;
        x.broadcast_add(&embeddings.to_dtype(x.dtype())?)?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || Ok(backward.gradient.clone()))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference values: `build_2d_sinusoidal_position_embedding` of transformers for 2 x 3 places.
    #[test]
    fn embeddings_match_the_reference() {
        let found = GridPositions { rows: 2, columns: 3, temperature: 50.0 }.embeddings(8);
        let expected = [[0.0, 0.0, 1.0, 1.0, 0.8415, 0.1410, 0.5403, 0.9900], [0.8415, 0.1410, 0.5403, 0.9900, 0.9093, 0.2791, -0.4161, 0.9603]];
        for (place, expected) in [1, 5].into_iter().zip(expected) {
            assert!(found[place * 8..].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "place {place}: {:?}", &found[place * 8..place * 8 + 8]);
        }
        assert_eq!(found.len(), 48);
    }

    #[test]
    fn images_must_have_the_places_of_the_input() {
        let infer = |op: GridPositions, width: usize| op.infer(&[&TensorType::float([2, 6, width])]);
        let op = GridPositions { rows: 2, columns: 3, ..GridPositions::default() };
        assert!(infer(op, 8).is_ok() && infer(op, 6).unwrap_err().contains("multiple of 4"));
        assert!(infer(GridPositions { rows: 3, ..op }, 8).unwrap_err().contains("3 rows of 3"));
        assert!(infer(GridPositions { rows: usize::MAX, ..op }, 8).is_err() && infer(GridPositions { temperature: f64::NAN, ..op }, 8).is_err());
    }
}
