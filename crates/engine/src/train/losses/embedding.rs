//! Distillation of sample embeddings (Reimers and Gurevych, *Making Monolingual Sentence Embeddings
//! Multilingual*, 2020).

use candle_core::{Result, Tensor};

use super::hidden::{project, project_backward, weighted_distance};
use super::mask::require_rows_of_samples;
use super::{Distance, Loss, LossSum};
use crate::data::Batch;
use crate::error;

/// Distance between student and teacher embeddings `[batch, width]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// Distance measure.
    pub distance: Distance,
    /// Name of the student's value, and its width.
    pub student: (String, usize),
    /// Name of the teacher's value, and its width.
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
        Ok(batch.rows() as f64)
    }

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], batch: &Batch) -> Result<LossSum> {
        let rows = &student[0];
        require_rows_of_samples(&format!("value `{}`", self.student.0), rows, batch)?;
        let matrix = projections.first();
        let ours = matrix.map_or_else(|| Ok(rows.clone()), |matrix| project(rows, matrix))?;
        let (value, gradient) = weighted_distance(self.distance, &ours, &teacher[0], &Tensor::ones_like)?;
        Ok(match matrix {
            Some(matrix) => {
                let (rows_gradient, matrix_gradient) = project_backward(rows, matrix, &gradient)?;
                LossSum { value, student: vec![rows_gradient], projections: vec![matrix_gradient] }
            }
            None => LossSum { value, student: vec![gradient], projections: Vec::new() },
        })
    }
}
