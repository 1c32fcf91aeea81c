//! The next token.

use candle_core::{D, DType, Device, IndexOp, Tensor};
use rayon::prelude::*;

use super::{Metric, Outputs, Score, answer, by_parts, computed, statistics};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{floats_on_host, read};
use crate::ir::ops::on_host;
use crate::kernel::rows::log_sum_exp;

/// Sums of `-ln p` of the tokens that came.
#[derive(Debug, Default)]
pub(super) struct Perplexity {
    sum: f64,
    squares: f64,
    count: u64,
}

impl Metric for Perplexity {
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()> {
        let Some(asked) = batch.next_tokens()? else { return Ok(()) };
        let (name, logits) = answer(outputs, &["logits"], 3)?;
        let ids = batch.tokens(batch.answered()).ok_or_else(|| Error::option("task", "perplexity needs tokens"))?;
        let (windows, length) = ids.dims2().map_err(computed)?;
        let vocabulary = logits.dim(2).map_err(computed)?;
        if logits.dims() != [windows, length, vocabulary] {
            return Err(Error::option(
                "task",
                format!("output `{name}` is {:?} for tokens of {windows} x {length}; perplexity needs logits for each token", logits.dims()),
            ));
        }
        let known = |token: i64| {
            let there = u32::try_from(token).ok().filter(|token| (*token as usize) < vocabulary);
            there.ok_or_else(|| Error::option("data", format!("token {token} is not among the {vocabulary} of the model")))
        };
        for (window, asked) in asked.iter().enumerate().filter(|(_, asked)| !asked.is_empty()) {
            // The logits at a place predict the token at the next one.
            let rows = logits.i(window).and_then(|logits| rows_at(&logits, asked)).map_err(computed)?;
            let next = asked.iter().map(|(_, token)| known(*token)).collect::<Result<Vec<u32>>>()?;
            for loss in losses(&rows, &next).map_err(computed)? {
                self.sum += loss;
                self.squares += loss * loss;
                self.count += 1;
            }
        }
        Ok(())
    }

    fn score(&self) -> Result<Score> {
        if self.count == 0 {
            return Err(Error::option("task", "perplexity needs windows of two tokens or more, and there is none in the data"));
        }
        let mean = self.sum / self.count as f64;
        Ok(Score {
            metric: "perplexity".into(),
            value: mean.exp(),
            // Tokens of one text depend on each other: the interval is that of independent ones.
            ci95: statistics::mean(self.sum, self.squares, self.count).map(|ends| ends.map(f64::exp)),
            more: [("tokens".to_owned(), self.count as f64), ("negative_log_likelihood".to_owned(), mean)].into(),
        })
    }
}

/// Rows of logits at places, which are copied only where others lie between them.
fn rows_at(logits: &Tensor, asked: &[(usize, i64)]) -> candle_core::Result<Tensor> {
    let (first, last) = (asked.first().map_or(0, |(at, _)| *at), asked.last().map_or(0, |(at, _)| *at));
    if last + 1 - first == asked.len() {
        return logits.narrow(0, first, asked.len());
    }
    let places: Vec<u32> = asked.iter().map(|(at, _)| *at as u32).collect();
    logits.index_select(&transfer::to_device(&Tensor::new(places, &Device::Cpu)?, logits.device(), Cause::Batch)?, 0)
}

/// `-ln p` of the tokens that came, by rows of logits; of values on a device, these numbers alone come back.
fn losses(rows: &Tensor, next: &[u32]) -> candle_core::Result<Vec<f64>> {
    let width = rows.dim(1)?;
    if on_host(rows.device()) {
        let loss = |(row, token): (&[f32], &u32)| log_sum_exp(row) - row.get(*token as usize).map_or(f64::NAN, |logit| f64::from(*logit));
        let all = |values: &[f32]| Ok(values.par_chunks_exact(width.max(1)).zip(next).map(loss).collect());
        return floats_on_host(rows, Cause::Answers).and_then(|rows| read(&rows, all));
    }
    by_parts(next.len(), width, |part| losses_there(&rows.narrow(0, part.start, part.len())?, &next[part]))
}

/// The same, computed where the logits are.
fn losses_there(rows: &Tensor, next: &[u32]) -> candle_core::Result<Vec<f64>> {
    let rows = rows.to_dtype(DType::F64)?.contiguous()?;
    let places = transfer::to_device(&Tensor::new(next, &Device::Cpu)?, rows.device(), Cause::Batch)?.unsqueeze(1)?;
    let chosen = rows.gather(&places, 1)?.squeeze(1)?;
    transfer::values(&(rows.log_sum_exp(D::Minus1)? - chosen)?, Cause::Answers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::References;

    #[test]
    fn an_even_guess_has_the_perplexity_of_its_choices() {
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

    #[test]
    fn losses_are_the_same_where_they_are_computed() {
        let logits = Tensor::new(&[[1f32, -2.0, 30.0, 0.5], [0.0, f32::NEG_INFINITY, 2.0, -7.0], [80.0, 81.0, 1.0, 3.0]], &Device::Cpu).unwrap();
        let (here, there) = (losses(&logits, &[2, 0, 1]).unwrap(), losses_there(&logits, &[2, 0, 1]).unwrap());
        assert!(here.len() == 3 && here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-6), "{here:?} {there:?}");
        assert_eq!(losses_there(&logits, &[0, 1, 0]).unwrap()[1], f64::INFINITY);
    }
}
