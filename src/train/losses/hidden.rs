//! Hidden states of the student against those of the teacher (Romero et al., *FitNets*, 2015; Jiao et al., *TinyBERT*,
//! 2020).

use candle_core::{D, Result, Tensor};

use super::{Distance, Loss, mask};
use crate::data::Batch;
use crate::error;

/// Pairs of values `[batch, sequence, width]`, or of images' features `[batch, channels, height, width]`.
#[derive(Debug, Clone)]
pub struct Hidden {
    /// How far is far.
    pub distance: Distance,
    /// Value of the student, of the teacher, and their widths.
    pub pairs: Vec<(String, String, usize, usize)>,
}

impl Hidden {
    fn projection(&self, index: usize) -> Option<(String, usize, usize)> {
        let (_, _, student, teacher) = &self.pairs[index];
        (student != teacher).then(|| (format!("projection.hidden.{index}"), *student, *teacher))
    }
}

/// Distances of rows, summed: squared differences averaged over the columns, or one less the cosine.
pub(super) fn apart(distance: Distance, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match distance {
        Distance::Mse => (a - b)?.sqr()?.mean(D::Minus1),
        Distance::Cosine => {
            let norm = |x: &Tensor| (x.sqr()?.sum(D::Minus1)? + 1e-12)?.sqrt();
            let cosine = ((a * b)?.sum(D::Minus1)? / (norm(a)? * norm(b)?)?)?;
            1.0 - cosine
        }
    }
}

impl Loss for Hidden {
    fn name(&self) -> &'static str {
        "hidden"
    }

    fn student(&self) -> Vec<String> {
        self.pairs.iter().map(|(student, ..)| student.clone()).collect()
    }

    fn teacher(&self) -> Vec<String> {
        self.pairs.iter().map(|(_, teacher, ..)| teacher.clone()).collect()
    }

    fn projections(&self) -> Vec<(String, usize, usize)> {
        (0..self.pairs.len()).filter_map(|index| self.projection(index)).collect()
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        let tokens = mask::tokens(batch).map_err(|e| error::Error::computed("loss `hidden`", e))?;
        Ok(tokens * self.pairs.len() as f64)
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> Result<Tensor> {
        let mut projections = projections.iter();
        let mut sums = Vec::with_capacity(student.len());
        for (index, (student, teacher)) in student.iter().zip(teacher).enumerate() {
            // Channels of images are the columns, every place is a row; their mean is what a sample counts.
            let image = student.rank() == 4;
            let rows = |x: &Tensor| if image { x.permute((0, 2, 3, 1))?.contiguous()?.flatten(1, 2) } else { Ok(x.clone()) };
            let (mut student, teacher) = (rows(student)?, rows(teacher)?);
            if self.projection(index).is_some()
                && let Some(matrix) = projections.next()
            {
                student = student.broadcast_matmul(matrix)?;
            }
            let distances = apart(self.distance, &student, &teacher)?;
            sums.push(if image { distances.mean(1)?.sum_all()? } else { mask::masked(&distances, batch)?.sum_all()? });
        }
        Tensor::stack(&sums, 0)?.sum_all()
    }
}
