//! Embeddings of whole samples against the teacher's (Reimers and Gurevych, *Making Monolingual Sentence Embeddings
//! Multilingual*, 2020).

use candle_core::{Result, Tensor};

use super::hidden::{apart, projected, projected_back};
use super::mask::require_rows_of_samples;
use super::{Distance, Loss, Sum};
use crate::data::Batch;
use crate::error;

/// Values `[batch, width]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// How far is far.
    pub distance: Distance,
    /// Value of the student and its width.
    pub student: (String, usize),
    /// Value of the teacher and its width.
    pub teacher: (String, usize),
}

impl Loss for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn student(&self) -> Vec<String> {
        vec![self.student.0.clone()]
    }

    fn teacher(&self) -> Vec<String> {
        vec![self.teacher.0.clone()]
    }

    fn projections(&self) -> Vec<(String, usize, usize)> {
        let (student, teacher) = (self.student.1, self.teacher.1);
        if student == teacher { Vec::new() } else { vec![("projection.embedding".to_owned(), student, teacher)] }
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        Ok(batch.samples as f64)
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> Result<Sum> {
        let rows = &student[0];
        require_rows_of_samples(&format!("value `{}`", self.student.0), rows, batch)?;
        let matrix = projections.first();
        let ours = matrix.map_or_else(|| Ok(rows.clone()), |matrix| projected(rows, matrix))?;
        let (value, gradient) = apart(self.distance, &ours, &teacher[0], &Tensor::ones_like)?;
        Ok(match matrix {
            Some(matrix) => {
                let (of_rows, of_matrix) = projected_back(rows, matrix, &gradient)?;
                Sum { value, student: vec![of_rows], projections: vec![of_matrix] }
            }
            None => Sum { value, student: vec![gradient], projections: Vec::new() },
        })
    }
}
