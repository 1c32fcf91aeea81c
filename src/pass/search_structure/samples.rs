//! The samples to which options are fitted, and those on which they are scored.

use crate::data::Batch;
use crate::error::{Error, Result, counted};
use crate::evaluation::{Comparison, Samples};
use crate::exec::Rounding;
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate;
use crate::pass::prune_structured::repair::alternating_rows;

/// One of this many samples is held out.
const INTERVAL: usize = 4;
/// Maximum number of held-out samples.
pub(super) const MAX_HELD_OUT: usize = 8;
/// Loss of an option with which outputs are not finite.
const NOT_FINITE: f64 = 1e6;

/// Use of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Use {
    Fitted,
    HeldOut,
}

/// Assigns samples to two halves, to which options are fitted, or to the held-out samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Split {
    samples: usize,
}

impl Split {
    /// Whether a sample is held out.
    pub fn is_held_out(self, sample: usize) -> bool {
        if self.samples < INTERVAL {
            return sample + 1 == self.samples;
        }
        sample % INTERVAL == INTERVAL - 1 && sample / INTERVAL < MAX_HELD_OUT
    }

    /// Indices of the rows of a batch in a half. `first` is the index of its first sample, and `sizes` has
    /// the number of rows of each sample.
    pub fn rows(self, half: usize, first: usize, sizes: &[usize]) -> Vec<u32> {
        let [even, odd] = alternating_rows(sizes, first, &|sample| self.is_held_out(sample));
        if half == 0 { even } else { odd }
    }
}

/// The samples: those to which options are fitted, and the original model's outputs on held-out ones.
pub(super) struct Measurement<'a> {
    pub context: &'a Context<'a>,
    pub batches: Vec<Batch>,
    pub split: Split,
    comparison: Comparison,
    /// Number of held-out samples.
    pub held_out: usize,
}

impl<'a> Measurement<'a> {
    /// Reads the calibration samples.
    pub fn new(model: &Model, context: &'a Context<'a>) -> Result<Measurement<'a>> {
        let mut batches: Vec<Batch> = Vec::new();
        calibrate::for_each("Reading samples", model, context, |batch| {
            batches.push(batch);
            Ok(())
        })?;
        let split = Split { samples: batches.iter().map(|batch| batch.samples).sum() };
        if split.samples < 3 {
            let reason =
                format!("has {}, but options are fitted to two samples or more and scored on others: use at least 3", counted(split.samples, "sample"));
            return Err(Error::option("data: calibration", reason));
        }
        let (mut held_out, mut first) = (Vec::new(), 0);
        for batch in &batches {
            for sample in (0..batch.samples).filter(|sample| split.is_held_out(first + sample)) {
                held_out.push(batch.narrow(sample, 1)?);
            }
            first += batch.samples;
        }
        let count = held_out.len();
        Ok(Measurement { context, batches, split, comparison: Comparison::new(model.clone(), Samples::Batches(held_out)), held_out: count })
    }

    /// The loss of a model, without its name.
    pub fn loss(&self, model: &Model) -> Result<f64> {
        self.named_loss(model).map(|(loss, _)| loss)
    }

    /// The KL divergence of the outputs of a model from the original ones on held-out samples, or one minus
    /// their mean cosine similarity for models without predictions, and its name.
    pub fn named_loss(&self, model: &Model) -> Result<(f64, &'static str)> {
        self.context.work.cancel.check()?;
        let fidelity = self.comparison.fidelity(model, self.context.resources(Rounding::Token))?;
        let (loss, name) = match (fidelity.kl, fidelity.label_kl) {
            (Some(divergence), _) => (divergence, "KL divergence"),
            (None, Some(divergence)) => (divergence, "KL divergence per label"),
            (None, None) => (1.0 - fidelity.cosine, "cosine distance"),
        };
        Ok((if loss.is_finite() { loss.max(0.0) } else { NOT_FINITE }, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No sample is both fitted and held out, and both halves have whole samples.
    #[test]
    fn samples_are_fitted_or_held_out() {
        for (samples, held_out) in [(2, vec![1]), (3, vec![2]), (4, vec![3]), (9, vec![3, 7]), (100, (0..8).map(|at| 4 * at + 3).collect())] {
            let split = Split { samples };
            assert_eq!((0..samples).filter(|sample| split.is_held_out(*sample)).collect::<Vec<_>>(), held_out);
            let sizes = vec![2; samples];
            let mut rows: Vec<u32> = [0, 1].into_iter().flat_map(|half| split.rows(half, 0, &sizes)).collect();
            rows.extend(held_out.iter().flat_map(|sample| [2 * *sample as u32, 2 * *sample as u32 + 1]));
            rows.sort_unstable();
            assert_eq!(rows, (0..2 * samples as u32).collect::<Vec<_>>());
        }
        assert_eq!(Split { samples: 8 }.rows(1, 4, &[1, 2, 3, 1]), [1, 2], "samples 5 and 7, of which 7 is held out");
    }
}
