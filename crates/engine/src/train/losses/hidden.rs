//! Hidden-state distillation (Romero et al., *FitNets*, 2015; Jiao et al., *TinyBERT*, 2020).

use candle_core::{D, Result, Tensor};

use super::{Distance, Loss, LossSum, mask};
use crate::data::{Batch, SequenceRole};
use crate::error;

/// A value of the student and the teacher's value that it is compared with.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Name of the student's value.
    pub student: String,
    /// Name of the teacher's value.
    pub teacher: String,
    /// Widths of the student's and the teacher's value.
    pub widths: (usize, usize),
    /// Role of the tokens that the positions belong to; `None` if the positions are not tokens, so that
    /// each sample has weight 1.
    pub tokens: Option<SequenceRole>,
}

/// Hidden-state loss over pairs of values: `[batch, sequence, width]`, image features
/// `[batch, channels, height, width]`, or `[batch, width]`.
#[derive(Debug, Clone)]
pub struct Hidden {
    /// Distance measure.
    pub distance: Distance,
    /// The pairs that are compared.
    pub pairs: Vec<Pair>,
}

impl Hidden {
    fn projection(&self, index: usize) -> Option<(String, usize, usize)> {
        let (student, teacher) = self.pairs[index].widths;
        (student != teacher).then(|| (format!("projection.hidden.{index}"), student, teacher))
    }
}

/// Weighted sum of the distances between the rows of `a` and `b` (mean squared error over the columns,
/// or 1 - cosine), and its gradient with respect to `a`.
pub(super) fn weighted_distance(distance: Distance, a: &Tensor, b: &Tensor, weights: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<(Tensor, Tensor)> {
    let (distances, gradient) = match distance {
        Distance::Mse => {
            let difference = (a - b)?;
            let width = a.dim(D::Minus1)? as f64;
            (difference.sqr()?.mean(D::Minus1)?, (difference * (2.0 / width))?)
        }
        Distance::Cosine => {
            let norm = |x: &Tensor| (x.sqr()?.sum_keepdim(D::Minus1)? + 1e-12)?.sqrt();
            let (ours, theirs) = (norm(a)?, norm(b)?);
            let cosine = ((a * b)?.sum_keepdim(D::Minus1)? / (&ours * theirs.clone())?)?;
            let towards = b.broadcast_div(&(&ours * theirs)?)?;
            let gradient = (a.broadcast_mul(&(&cosine / ours.sqr()?)?)? - towards)?;
            ((1.0 - cosine.squeeze(D::Minus1)?)?, gradient)
        }
    };
    let weights = weights(&distances)?;
    Ok(((distances * &weights)?.sum_all()?, gradient.broadcast_mul(&weights.unsqueeze(D::Minus1)?)?))
}

/// Multiplies rows by a learned projection.
pub(super) fn project(rows: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    rows.flatten_to(rows.rank() - 2)?.matmul(matrix)?.reshape([&rows.dims()[..rows.rank() - 1], &[matrix.dim(1)?]].concat())
}

/// Gradients with respect to rows and projection, from that of their product.
pub(super) fn project_backward(rows: &Tensor, matrix: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
    let flat = |x: &Tensor| x.flatten_to(x.rank() - 2);
    Ok((project(gradient, &matrix.t()?)?, flat(rows)?.t()?.matmul(&flat(gradient)?)?))
}

impl Loss for Hidden {
    fn name(&self) -> &'static str {
        "hidden"
    }

    fn student(&self) -> Vec<String> {
        self.pairs.iter().map(|pair| pair.student.clone()).collect()
    }

    fn teacher(&self) -> Vec<String> {
        self.pairs.iter().map(|pair| pair.teacher.clone()).collect()
    }

    fn projections(&self) -> Vec<(String, usize, usize)> {
        (0..self.pairs.len()).filter_map(|index| self.projection(index)).collect()
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        let counts = self.pairs.iter().map(|pair| mask::count(batch, pair.tokens)).sum::<Result<f64>>();
        counts.map_err(|e| error::Error::candle("loss `hidden`", e))
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> Result<LossSum> {
        let mut matrices = projections.iter();
        let (mut values, mut gradients, mut projection_gradients) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (student, teacher)) in student.iter().zip(teacher).enumerate() {
            // Image features have one row per pixel, with the channels as columns.
            let image = student.rank() == 4;
            let rows = |x: &Tensor| if image { x.permute((0, 2, 3, 1))?.contiguous() } else { Ok(x.clone()) };
            let (rows, teacher) = (rows(student)?, rows(teacher)?);
            let matrix = self.projection(index).and_then(|_| matrices.next());
            let ours = matrix.map_or_else(|| Ok(rows.clone()), |matrix| project(&rows, matrix))?;
            let weights = |distances: &Tensor| mask::weights(distances, batch, self.pairs[index].tokens);
            let (value, mut gradient) = weighted_distance(self.distance, &ours, &teacher, &weights)?;
            if let Some(matrix) = matrix {
                let (rows_gradient, matrix_gradient) = project_backward(&rows, matrix, &gradient)?;
                gradient = rows_gradient;
                projection_gradients.push(matrix_gradient);
            }
            values.push(value);
            gradients.push(if image { gradient.permute((0, 3, 1, 2))?.contiguous()? } else { gradient });
        }
        Ok(LossSum { value: Tensor::stack(&values, 0)?.sum_all()?, student: gradients, projections: projection_gradients })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::data::References;

    #[test]
    fn only_equal_rows_have_a_distance_of_zero() {
        let rows = Tensor::new(&[[0.5f32, -2.0], [3.0, 1.0]], &Device::Cpu).unwrap();
        let distance = |distance, a: &Tensor, b: &Tensor| {
            let (sum, gradient) = weighted_distance(distance, a, b, &Tensor::ones_like).unwrap();
            (sum.to_scalar::<f32>().unwrap(), gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap())
        };
        for kind in [Distance::Mse, Distance::Cosine] {
            let (sum, gradient) = distance(kind, &rows, &rows);
            assert!(sum.abs() < 1e-6 && gradient < 1e-6, "{kind:?}: {sum} {gradient}");
        }
        let other = Tensor::new(&[[0.5f32, 2.0], [3.0, 1.0]], &Device::Cpu).unwrap();
        // The mean of 0 and 16, and 1 - (0.25 - 4) / 4.25.
        assert!((distance(Distance::Mse, &rows, &other).0 - 8.0).abs() < 1e-6);
        assert!((distance(Distance::Cosine, &rows, &other).0 - 8.0 / 4.25).abs() < 1e-6);
    }

    /// The mean loss of values that differ by 1 everywhere.
    fn mean(tokens: Option<SequenceRole>, dims: &[usize], inputs: &[(&str, Tensor)]) -> f64 {
        let pair = Pair { student: "a".into(), teacher: "b".into(), widths: (3, 3), tokens };
        let loss = Hidden { distance: Distance::Mse, pairs: vec![pair] };
        let inputs = inputs.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        let batch = Batch { inputs, references: References::None, samples: 2 };
        let student = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let sum = loss.sum(std::slice::from_ref(&student), &[student.ones_like().unwrap()], &[], &batch).unwrap();
        let total = sum.student[0].abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        let items = loss.items(&batch).unwrap();
        // The derivative of (1 - 0)² is 2 in magnitude.
        assert!((f64::from(total) / items - 2.0).abs() < 1e-5, "{dims:?}: {total} of {items}");
        let masks = [(Some(SequenceRole::Input), 5.0), (Some(SequenceRole::Decoder), 3.0)];
        assert!(tokens.is_none() || batch.mask(tokens.unwrap()).is_none() || masks.contains(&(tokens, items)), "{items} of {tokens:?}");
        f64::from(sum.value.to_scalar::<f32>().unwrap()) / items
    }

    #[test]
    fn every_kind_of_value_is_a_mean() {
        let ids = ("input_ids", Tensor::ones((2, 5), DType::I64, &Device::Cpu).unwrap());
        let mask = ("attention_mask", Tensor::new(&[[1i64, 1, 1, 1, 0], [1, 0, 0, 0, 0]], &Device::Cpu).unwrap());
        let pixels = ("pixel_values", Tensor::ones((2, 3, 4, 4), DType::F32, &Device::Cpu).unwrap());
        let decoder_ids = ("decoder_input_ids", ids.1.clone());
        let decoder_mask = ("decoder_attention_mask", Tensor::new(&[[1i64, 0, 0, 0, 0], [1, 1, 0, 0, 0]], &Device::Cpu).unwrap());
        for (tokens, dims, inputs) in [
            (Some(SequenceRole::Input), &[2, 5, 3][..], &[ids.clone()][..]),
            (Some(SequenceRole::Input), &[2, 5, 3], &[ids.clone(), mask.clone()]),
            // Encoder and decoder sequences of equal length, each with its own padding.
            (Some(SequenceRole::Input), &[2, 5, 3], &[ids.clone(), mask.clone(), decoder_ids.clone(), decoder_mask.clone()]),
            (Some(SequenceRole::Decoder), &[2, 5, 3], &[ids.clone(), mask.clone(), decoder_ids.clone(), decoder_mask.clone()]),
            (Some(SequenceRole::Decoder), &[2, 5, 3], &[pixels.clone(), decoder_ids]),
            (None, &[2, 3], &[ids.clone(), mask.clone()]),
            // Attention heads of a token model.
            (None, &[2, 5, 7, 3], &[ids.clone(), mask.clone()]),
            (None, &[2, 197, 3], std::slice::from_ref(&pixels)),
            (None, &[2, 3, 7, 5], std::slice::from_ref(&pixels)),
        ] {
            assert!((mean(tokens, dims, inputs) - 1.0).abs() < 1e-6, "{dims:?}");
        }
        // Positions that do not match the tokens are rejected: their padding is unknown.
        let value = Tensor::zeros((2, 7), DType::F32, &Device::Cpu).unwrap();
        for inputs in [vec![ids.clone()], vec![ids, mask]] {
            let inputs = inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
            let batch = Batch { inputs, references: References::None, samples: 2 };
            assert!(mask::weights(&value, &batch, Some(SequenceRole::Input)).unwrap_err().to_string().contains("[2, 7]"));
        }
    }
}
