//! Losses over logits in host memory, row by row; the gradient overwrites the logits.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::divergence::{Divergence, Soft};
use crate::ir::ops::on_host;
use crate::kernel::cross_entropy::{hard, soft};
use crate::kernel::divergence::divergence;
use crate::kernel::scratch::Scratch;
use crate::train::floats::{CHUNK, change, read};

/// Targets of the logits, and factors on the gradients.
pub(super) struct LogitTargets<'a> {
    /// Number of classes; further columns are padding.
    pub classes: usize,
    /// Soft targets, gradient factor, and the teacher's logits `[rows, classes]`.
    pub soft: Option<(Soft, f64, &'a Tensor)>,
    /// Label smoothing, gradient factor, and the class of each row.
    pub hard: Option<(f64, f64, &'a [u32])>,
}

/// Whether a tensor can be modified in place as an f32 slice.
pub(super) fn is_host_slice(tensor: &Tensor) -> bool {
    on_host(tensor.device()) && tensor.dtype() == DType::F32 && tensor.is_contiguous()
}

impl LogitTargets<'_> {
    /// Overwrites logits `[rows, columns]` with the gradient. Returns the sums of the soft and of the
    /// hard loss over the rows.
    pub fn replace_by_gradient(&self, logits: &Tensor) -> Result<[f64; 2]> {
        let columns = logits.dim(1)?;
        let mut sums = [0.0; 2];
        let mut compute = |values: &mut [f32], theirs: &[f32]| {
            let rows = values.par_chunks_exact_mut(columns.max(1)).enumerate();
            let losses: Vec<[f32; 2]> = rows.map(|(row, out)| self.row(row, out, theirs)).collect();
            // Summed in row order, independent of the threads.
            losses.iter().for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, loss)| *sum += f64::from(*loss)));
            Ok(())
        };
        change(logits, |values| match self.soft {
            Some((_, _, theirs)) => read(theirs, |theirs| compute(values, theirs)),
            None => compute(values, &[]),
        })?;
        Ok(sums)
    }

    fn row(&self, row: usize, out: &mut [f32], theirs: &[f32]) -> [f32; 2] {
        let mut x = Scratch::new(self.classes.min(out.len()));
        let count = x.len();
        x.copy_from_slice(&out[..count]);
        out.fill(0.0);
        let out = &mut out[..count];
        let mut losses = [0.0; 2];
        if let Some((targets, factor, _)) = self.soft {
            let (theirs, temperature) = (theirs.get(row * count..(row + 1) * count).unwrap_or_default(), targets.temperature as f32);
            losses[0] = match targets.divergence {
                Divergence::Forward => soft(&x, theirs, temperature, factor as f32, out),
                other => divergence(&x, theirs, other, temperature, factor as f32, out),
            };
        }
        if let Some((smoothing, factor, classes)) = self.hard {
            let class = classes.get(row).map_or(usize::MAX, |class| *class as usize);
            losses[1] = hard(&x, class, (smoothing / count as f64) as f32, (1.0 - smoothing) as f32, factor as f32, out);
        }
        losses
    }
}

/// Adds to a tensor in place.
pub(super) fn add_to(sum: &Tensor, more: &Tensor) -> Result<()> {
    read(more, |more| {
        change(sum, |sum: &mut [f32]| {
            sum.par_chunks_mut(CHUNK).zip(more.par_chunks(CHUNK)).for_each(|(sum, more)| sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x));
            Ok(())
        })
    })
}
