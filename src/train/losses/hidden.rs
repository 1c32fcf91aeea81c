//! Hidden states of the student against those of the teacher (Romero et al., *FitNets*, 2015; Jiao et al., *TinyBERT*,
//! 2020).

use candle_core::{D, Result, Tensor};

use super::{Distance, Loss, Sum, mask};
use crate::data::{Batch, Side};
use crate::error;

/// A value of the student and one of the teacher.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Name of the student's.
    pub student: String,
    /// Name of the teacher's.
    pub teacher: String,
    /// The width of each.
    pub widths: (usize, usize),
    /// Whose tokens have one each; else a sample counts once, whatever it has.
    pub tokens: Option<Side>,
}

/// Pairs of values `[batch, sequence, width]`, of images' features `[batch, channels, height, width]`, or `[batch, width]`.
#[derive(Debug, Clone)]
pub struct Hidden {
    /// How far is far.
    pub distance: Distance,
    /// What is compared.
    pub pairs: Vec<Pair>,
}

impl Hidden {
    fn projection(&self, index: usize) -> Option<(String, usize, usize)> {
        let (student, teacher) = self.pairs[index].widths;
        (student != teacher).then(|| (format!("projection.hidden.{index}"), student, teacher))
    }
}

/// Distances of rows, squared differences averaged over the columns or one less the cosine: their sum with a weight for each row, and
/// its gradient with respect to the first rows.
pub(super) fn apart(distance: Distance, a: &Tensor, b: &Tensor, weights: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<(Tensor, Tensor)> {
    let (distances, along) = match distance {
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
            let along = (a.broadcast_mul(&(&cosine / ours.sqr()?)?)? - towards)?;
            ((1.0 - cosine.squeeze(D::Minus1)?)?, along)
        }
    };
    let weights = weights(&distances)?;
    Ok(((distances * &weights)?.sum_all()?, along.broadcast_mul(&weights.unsqueeze(D::Minus1)?)?))
}

/// Rows times a learned matrix, and what gradients of the product become: those of rows and of the matrix.
pub(super) fn projected(rows: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    rows.flatten_to(rows.rank() - 2)?.matmul(matrix)?.reshape([&rows.dims()[..rows.rank() - 1], &[matrix.dim(1)?]].concat())
}

/// Gradients of rows and matrix, of that of their product.
pub(super) fn projected_back(rows: &Tensor, matrix: &Tensor, gradient: &Tensor) -> Result<(Tensor, Tensor)> {
    let flat = |x: &Tensor| x.flatten_to(x.rank() - 2);
    Ok((projected(gradient, &matrix.t()?)?, flat(rows)?.t()?.matmul(&flat(gradient)?)?))
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
        counts.map_err(|e| error::Error::computed("loss `hidden`", e))
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> Result<Sum> {
        let mut matrices = projections.iter();
        let (mut values, mut gradients, mut of_projections) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (student, teacher)) in student.iter().zip(teacher).enumerate() {
            // Channels of images are the columns, every place is a row.
            let image = student.rank() == 4;
            let rows = |x: &Tensor| if image { x.permute((0, 2, 3, 1))?.contiguous() } else { Ok(x.clone()) };
            let (rows, teacher) = (rows(student)?, rows(teacher)?);
            let matrix = self.projection(index).and_then(|_| matrices.next());
            let ours = matrix.map_or_else(|| Ok(rows.clone()), |matrix| projected(&rows, matrix))?;
            let weights = |distances: &Tensor| mask::weights(distances, batch, self.pairs[index].tokens);
            let (value, mut gradient) = apart(self.distance, &ours, &teacher, &weights)?;
            if let Some(matrix) = matrix {
                let (of_rows, of_matrix) = projected_back(&rows, matrix, &gradient)?;
                gradient = of_rows;
                of_projections.push(of_matrix);
            }
            values.push(value);
            gradients.push(if image { gradient.permute((0, 3, 1, 2))?.contiguous()? } else { gradient });
        }
        Ok(Sum { value: Tensor::stack(&values, 0)?.sum_all()?, student: gradients, projections: of_projections })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::data::References;

    /// The mean of a loss over values that are 1 apart everywhere but in places that do not count.
    fn mean(tokens: Option<Side>, dims: &[usize], inputs: &[(&str, Tensor)]) -> f64 {
        let pair = Pair { student: "a".into(), teacher: "b".into(), widths: (3, 3), tokens };
        let loss = Hidden { distance: Distance::Mse, pairs: vec![pair] };
        let inputs = inputs.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
        let batch = Batch { inputs, references: References::None, samples: 2 };
        let student = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let sum = loss.sum(std::slice::from_ref(&student), &[student.ones_like().unwrap()], &[], &batch).unwrap();
        let total = sum.student[0].abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        let items = loss.items(&batch).unwrap();
        // Of a mean of squares, all gradients together are twice as long.
        assert!((f64::from(total) / items - 2.0).abs() < 1e-5, "{dims:?}: {total} of {items}");
        let masks = [(Some(Side::Read), 5.0), (Some(Side::Said), 3.0)];
        assert!(tokens.is_none() || batch.mask(tokens.unwrap()).is_none() || masks.contains(&(tokens, items)), "{items} of {tokens:?}");
        f64::from(sum.value.to_scalar::<f32>().unwrap()) / items
    }

    #[test]
    fn every_kind_of_value_is_a_mean() {
        let ids = ("input_ids", Tensor::ones((2, 5), DType::I64, &Device::Cpu).unwrap());
        let mask = ("attention_mask", Tensor::new(&[[1i64, 1, 1, 1, 0], [1, 0, 0, 0, 0]], &Device::Cpu).unwrap());
        let pixels = ("pixel_values", Tensor::ones((2, 3, 4, 4), DType::F32, &Device::Cpu).unwrap());
        let said = ("decoder_input_ids", ids.1.clone());
        let said_mask = ("decoder_attention_mask", Tensor::new(&[[1i64, 0, 0, 0, 0], [1, 1, 0, 0, 0]], &Device::Cpu).unwrap());
        for (tokens, dims, inputs) in [
            (Some(Side::Read), &[2, 5, 3][..], &[ids.clone()][..]),
            (Some(Side::Read), &[2, 5, 3], &[ids.clone(), mask.clone()]),
            // Both sides of one length: each has its own padding.
            (Some(Side::Read), &[2, 5, 3], &[ids.clone(), mask.clone(), said.clone(), said_mask.clone()]),
            (Some(Side::Said), &[2, 5, 3], &[ids.clone(), mask.clone(), said.clone(), said_mask.clone()]),
            (Some(Side::Said), &[2, 5, 3], &[pixels.clone(), said]),
            (None, &[2, 3], &[ids.clone(), mask.clone()]),
            // Heads of a model of tokens.
            (None, &[2, 5, 7, 3], &[ids.clone(), mask.clone()]),
            (None, &[2, 197, 3], std::slice::from_ref(&pixels)),
            (None, &[2, 3, 7, 5], std::slice::from_ref(&pixels)),
        ] {
            assert!((mean(tokens, dims, inputs) - 1.0).abs() < 1e-6, "{dims:?}");
        }
        // Other places than tokens are refused: which of them are padding is not known.
        let value = Tensor::zeros((2, 7), DType::F32, &Device::Cpu).unwrap();
        for inputs in [vec![ids.clone()], vec![ids, mask]] {
            let inputs = inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
            let batch = Batch { inputs, references: References::None, samples: 2 };
            assert!(mask::weights(&value, &batch, Some(Side::Read)).unwrap_err().to_string().contains("[2, 7]"));
        }
    }
}
