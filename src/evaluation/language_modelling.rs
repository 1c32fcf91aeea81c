//! The next token.

use candle_core::IndexOp;
use rayon::prelude::*;

use super::{Metric, Outputs, Score, answer, computed, statistics};
use crate::data::{Batch, References};
use crate::error::{Error, Result};
use crate::exec::transfer::Cause;
use crate::exec::{floats_on_host, read};
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
        let References::Next(places) = &batch.references else { return Ok(()) };
        let (name, logits) = answer(outputs, &["logits"], 3)?;
        let ids = batch.inputs.get("input_ids").ok_or_else(|| Error::option("task", "perplexity needs tokens"))?;
        let (windows, length) = ids.dims2().map_err(computed)?;
        let vocabulary = logits.dim(2).map_err(computed)?;
        if logits.dims() != [windows, length, vocabulary] {
            return Err(Error::option(
                "task",
                format!("output `{name}` is {:?} for tokens of {windows} x {length}; perplexity needs logits for each token", logits.dims()),
            ));
        }
        for (window, places) in places.iter().enumerate().filter(|(_, places)| !places.is_empty()) {
            let tokens = ids.i(window).and_then(|t| t.to_vec1::<i64>()).map_err(computed)?;
            // The logits at a place predict the token at the next one.
            let rows = logits.i((window, places.start - 1..places.end - 1)).map_err(computed)?;
            let next = &tokens[places.clone()];
            let loss = |(row, token): (&[f32], &i64)| {
                let logit = usize::try_from(*token).ok().and_then(|token| row.get(token));
                let unknown = || Error::option("data", format!("token {token} is not among the {vocabulary} of the model"));
                Ok(log_sum_exp(row) - f64::from(*logit.ok_or_else(unknown)?))
            };
            let losses = |values: &[f32]| Ok(values.par_chunks_exact(vocabulary.max(1)).zip(next).map(loss).collect::<Result<Vec<f64>>>());
            for loss in floats_on_host(&rows, Cause::Answers).and_then(|rows| read(&rows, losses)).map_err(computed)?? {
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

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

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
}
