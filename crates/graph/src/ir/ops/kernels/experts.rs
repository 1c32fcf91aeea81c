//! Kernels for mixtures of experts that process only routed tokens.

use candle_core::{D, Result, Tensor};
use rayon::prelude::*;

use super::super::{Combine, Dispatch};
use super::Kernel;
use super::host::Host;
use crate::kernel::scratch::cleared;

/// Minimum number of rows per job.
const ROWS: usize = 16;

impl Kernel for Dispatch {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let (x, weights) = (inputs[0].contiguous()?, inputs[1].contiguous()?);
        let (width, experts) = (x.dim(D::Minus1)?.max(1), weights.dim(D::Minus1)?.max(1));
        let compute = || {
            let hosts = [Host::new(&x)?, Host::new(&weights)?];
            let (values, weights) = (hosts[0].floats()?, hosts[1].floats()?);
            let mut y = cleared(x.elem_count());
            let rows = y.par_chunks_mut(width).zip(values.par_chunks(width)).zip(weights.par_chunks(experts)).with_min_len(ROWS);
            rows.filter(|(_, weights)| weights[self.expert] != 0.0).for_each(|((y, x), weights)| {
                let weight = if self.weighted { weights[self.expert] } else { 1.0 };
                y.iter_mut().zip(x).for_each(|(y, x)| *y = weight * x);
            });
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, x.dims(), x.device())).transpose()
    }
}

impl Kernel for Combine {
    fn forward(&self, inputs: &[Tensor]) -> Result<Option<Tensor>> {
        let inputs = inputs.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let (width, experts) = (inputs[1].dim(D::Minus1)?.max(1), inputs.len() - 1);
        let compute = || {
            let hosts = inputs.iter().map(Host::new).collect::<Option<Vec<_>>>()?;
            let floats = hosts.iter().map(Host::floats).collect::<Option<Vec<_>>>()?;
            let (weights, values) = floats.split_first()?;
            let mut y = cleared(inputs[1].elem_count());
            y.par_chunks_mut(width).zip(weights.par_chunks(experts)).enumerate().with_min_len(ROWS).for_each(|(row, (y, weights))| {
                for (weight, values) in weights.iter().zip(values).filter(|(weight, _)| **weight != 0.0) {
                    let weight = if self.plain { 1.0 } else { *weight };
                    y.iter_mut().zip(&values[row * width..]).for_each(|(y, x)| *y += weight * x);
                }
            });
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, inputs[1].dims(), inputs[1].device())).transpose()
    }
}
