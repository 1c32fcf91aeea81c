//! Perplexity of language models.

use candle_core::{D, DType, Device, IndexOp, Tensor};
use rayon::prelude::*;

use super::{Metric, Outputs, Score, in_chunks, select_output, statistics, tensor_error};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{floats_on_host, read};
use crate::ir::ops::on_host;
use crate::kernel::rows::log_sum_exp;

/// Name of the outputs of a model without a head.
const HIDDEN_STATES: &str = "last_hidden_state";

/// Sum of the negative log-likelihoods of the target tokens.
#[derive(Debug, Default)]
pub(super) struct Perplexity {
    sum: f64,
    squares: f64,
    count: u64,
}

impl Metric for Perplexity {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let Some(targets) = batch.next_tokens()? else { return Ok(()) };
        let (name, logits) = select_output(outputs, &["logits"], 3)?;
        if name == HIDDEN_STATES {
            return Err(Error::option(
                "task",
                format!(
                    "`language-modelling` needs a language-model head, but this model has none: its output `{name}` contains hidden states; \
                    use the task `embedding` or `fidelity`, or a model that was saved with its head"
                ),
            ));
        }
        let ids = batch.tokens(batch.output_role()).ok_or_else(|| Error::option("task", "perplexity needs tokens"))?;
        let (windows, length) = ids.dims2().map_err(tensor_error)?;
        let vocabulary = logits.dim(2).map_err(tensor_error)?;
        if logits.dims() != [windows, length, vocabulary] {
            return Err(Error::option(
                "task",
                format!("output `{name}` has the shape {:?} for {windows} x {length} tokens; perplexity needs logits for each token", logits.dims()),
            ));
        }
        let checked = |token: i64| {
            let id = u32::try_from(token).ok().filter(|token| (*token as usize) < vocabulary);
            id.ok_or_else(|| Error::option("data", format!("token {token} is outside of the model's vocabulary of {vocabulary} tokens")))
        };
        for (window, targets) in targets.iter().enumerate().filter(|(_, targets)| !targets.is_empty()) {
            // The logits at a position predict the next token.
            let rows = logits.i(window).and_then(|logits| rows_at(&logits, targets)).map_err(tensor_error)?;
            let next = targets.iter().map(|(_, token)| checked(*token)).collect::<Result<Vec<u32>>>()?;
            for loss in losses(&rows, &next).map_err(tensor_error)? {
                self.sum += loss;
                self.squares += loss * loss;
                self.count += 1;
            }
        }
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        if self.count == 0 {
            return Err(Error::option("task", "perplexity needs windows of at least two tokens, and the data has none"));
        }
        let mean = self.sum / self.count as f64;
        Ok(Score {
            metric: "perplexity".into(),
            value: mean.exp(),
            // The interval assumes independent tokens, although the tokens of a text are correlated.
            ci95: statistics::mean_interval(self.sum, self.squares, self.count).map(|ends| ends.map(f64::exp)),
            more: [("tokens".to_owned(), self.count as f64), ("negative_log_likelihood".to_owned(), mean)].into(),
        })
    }
}

/// Rows of logits at the positions of the targets. They are copied only if the positions are not
/// contiguous.
fn rows_at(logits: &Tensor, targets: &[(usize, i64)]) -> candle_core::Result<Tensor> {
    let (first, last) = (targets.first().map_or(0, |(at, _)| *at), targets.last().map_or(0, |(at, _)| *at));
    if last + 1 - first == targets.len() {
        return logits.narrow(0, first, targets.len());
    }
    let positions: Vec<u32> = targets.iter().map(|(at, _)| *at as u32).collect();
    logits.index_select(&transfer::to_device(&Tensor::new(positions, &Device::Cpu)?, logits.device(), Cause::Batch)?, 0)
}

/// Negative log-likelihood of each target token. Logits on a device are reduced there.
fn losses(rows: &Tensor, next: &[u32]) -> candle_core::Result<Vec<f64>> {
    let width = rows.dim(1)?;
    if on_host(rows.device()) {
        let loss = |(row, token): (&[f32], &u32)| log_sum_exp(row) - row.get(*token as usize).map_or(f64::NAN, |logit| f64::from(*logit));
        let all = |values: &[f32]| Ok(values.par_chunks_exact(width.max(1)).zip(next).map(loss).collect());
        return floats_on_host(rows, Cause::Answers).and_then(|rows| read(&rows, all));
    }
    in_chunks(next.len(), width, |part| losses_on_device(&rows.narrow(0, part.start, part.len())?, &next[part]))
}

/// [`losses`] of logits on a device.
fn losses_on_device(rows: &Tensor, next: &[u32]) -> candle_core::Result<Vec<f64>> {
    let rows = rows.to_dtype(DType::F64)?.contiguous()?;
    let indices = transfer::to_device(&Tensor::new(next, &Device::Cpu)?, rows.device(), Cause::Batch)?.unsqueeze(1)?;
    let targets = rows.gather(&indices, 1)?.squeeze(1)?;
    transfer::values(&(rows.log_sum_exp(D::Minus1)? - targets)?, Cause::Answers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::References;

    #[test]
    fn uniform_logits_have_the_perplexity_of_the_vocabulary_size() {
        let mut metric = Perplexity::default();
        let ids = Tensor::new(&[[1i64, 2, 3, 0]], &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("input_ids".to_owned(), ids)].into(), references: References::Next(std::iter::once(1..3).collect()), samples: 1 };
        let logits = Tensor::full(2f32, (1, 4, 5), &Device::Cpu).unwrap();
        metric.add(&batch, &[("logits".to_owned(), logits)].into()).unwrap();
        let score = metric.score().unwrap();
        assert!((score.value - 5.0).abs() < 1e-5);
        assert_eq!(score.more["tokens"], 2.0);
        let few = Tensor::zeros((1, 4, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert!(metric.add(&batch, &[("logits".to_owned(), few)].into()).unwrap_err().to_string().contains("token 3"));
    }

    /// The interval of the mean loss has 1.96 standard errors on both sides.
    #[test]
    fn the_interval_is_that_of_the_losses_of_the_tokens() {
        let logits: Vec<f32> = (0..20).map(|at| ((at * 7) % 11) as f32 * 0.5).collect();
        let logits = Tensor::from_vec(logits, (1, 4, 5), &Device::Cpu).unwrap();
        let ids = Tensor::new(&[[1i64, 2, 3, 0]], &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("input_ids".to_owned(), ids)].into(), references: References::Next(std::iter::once(1..4).collect()), samples: 1 };
        let mut metric = Perplexity::default();
        metric.add(&batch, &[("logits".to_owned(), logits.clone())].into()).unwrap();
        let losses = losses(&logits.i((0, ..3)).unwrap(), &[2, 3, 0]).unwrap();
        let mean = losses.iter().sum::<f64>() / 3.0;
        let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / 2.0;
        let [low, high] = metric.score().unwrap().ci95.unwrap().map(f64::ln);
        assert!((low + high - 2.0 * mean).abs() < 1e-6, "{low} {high} {mean}");
        assert!(((high - low) / 2.0 / (variance / 3.0).sqrt() - 1.96).abs() < 0.01, "{low} {high} {variance}");
    }

    #[test]
    fn host_and_device_losses_are_equal() {
        let logits = Tensor::new(&[[1f32, -2.0, 30.0, 0.5], [0.0, f32::NEG_INFINITY, 2.0, -7.0], [80.0, 81.0, 1.0, 3.0]], &Device::Cpu).unwrap();
        let (host, device) = (losses(&logits, &[2, 0, 1]).unwrap(), losses_on_device(&logits, &[2, 0, 1]).unwrap());
        assert!(host.len() == 3 && host.iter().zip(&device).all(|(a, b)| (a - b).abs() < 1e-6), "{host:?} {device:?}");
        assert_eq!(losses_on_device(&logits, &[0, 1, 0]).unwrap()[1], f64::INFINITY);
    }
}
