//! Embeddings of whole samples against the teacher's (Reimers and Gurevych, *Making Monolingual Sentence Embeddings
//! Multilingual*, 2020).

use candle_core::{Result, Tensor};

use super::hidden::apart;
use super::{Distance, Loss};
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

    fn sum(&self, student: &[Tensor], teacher: &[Tensor], projections: &[Tensor], _batch: &Batch) -> Result<Tensor> {
        let student = match projections.first() {
            Some(matrix) => student[0].matmul(matrix)?,
            None => student[0].clone(),
        };
        apart(self.distance, &student, &teacher[0])?.sum_all()
    }
}
