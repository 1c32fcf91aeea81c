//! Communicator of a single process.

use candle_core::Tensor;

use super::Communicator;
use crate::error::Result;

/// The only rank of a single-process training.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleProcess;

impl Communicator for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum(&mut self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }

    fn broadcast(&mut self, tensor: &Tensor, _from: usize) -> Result<Tensor> {
        Ok(tensor.clone())
    }

    fn gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes.to_vec()])
    }
}
