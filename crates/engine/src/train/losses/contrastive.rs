//! Contrastive learning, with the other texts of a batch as negatives (Henderson et al., *Efficient Natural
//! Language Response Suggestion for Smart Reply*, 2017; van den Oord et al., *Representation Learning with
//! Contrastive Predictive Coding*, 2018), as `MultipleNegativesRankingLoss` in sentence-transformers.

use candle_core::{D, DType, Result, Tensor};

use super::mask::require_rows_of_samples;
use super::{Loss, LossSum};
use crate::data::{Batch, References};
use crate::error::{self, Error};
use crate::ir::ops::ScalarOps;

/// Smallest norm that an embedding is divided by, as in `torch.nn.functional.normalize`.
const SMALLEST_NORM: f64 = 1e-12;

/// Cross-entropy of the matching text, among all texts of the batch, by cosine similarities of embeddings.
#[derive(Debug, Clone)]
pub struct Contrastive {
    /// Name of the embeddings `[rows, width]`.
    pub value: String,
    /// Temperature that the similarities are divided by.
    pub temperature: f64,
    /// Whether the loss is the mean of both directions.
    pub symmetric: bool,
}

/// The sum over the rows of the negative log-probability of the column of the same number, and its gradient
/// with respect to the scores `[rows, columns]`.
fn cross_entropy(scores: &Tensor) -> Result<(Tensor, Tensor)> {
    let (rows, columns) = scores.dims2()?;
    let eye = Tensor::eye(rows, DType::F32, scores.device())?;
    let targets = if columns > rows { Tensor::cat(&[&eye, &Tensor::zeros((rows, columns - rows), DType::F32, scores.device())?], 1)? } else { eye };
    let shifted = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?;
    let exponentials = shifted.exp()?;
    let sums = exponentials.sum_keepdim(D::Minus1)?;
    let value = (sums.log()?.sum_all()? - (&shifted * &targets)?.sum_all()?)?;
    Ok((value, (exponentials.broadcast_div(&sums)? - targets)?))
}

impl Contrastive {
    /// The sum of the losses of scores `[samples, candidates]`, and its gradient.
    fn of_scores(&self, scores: &Tensor) -> Result<(Tensor, Tensor)> {
        let (value, gradient) = cross_entropy(scores)?;
        if !self.symmetric {
            return Ok((value, gradient));
        }
        let (samples, candidates) = scores.dims2()?;
        let (other, back) = cross_entropy(&scores.narrow(1, 0, samples)?.t()?.contiguous()?)?;
        let back = back.t()?.contiguous()?;
        let negatives = Tensor::zeros((samples, candidates - samples), DType::F32, scores.device())?;
        let back = if candidates > samples { Tensor::cat(&[&back, &negatives], 1)? } else { back };
        Ok((((value + other)? * 0.5)?, ((gradient + back)? * 0.5)?))
    }
}

impl Loss for Contrastive {
    fn name(&self) -> &'static str {
        "contrastive"
    }

    fn student(&self) -> Vec<String> {
        vec![self.value.clone()]
    }

    fn teacher(&self) -> Vec<String> {
        Vec::new()
    }

    fn items(&self, batch: &Batch) -> error::Result<f64> {
        match batch.references {
            References::Matches(texts) if batch.samples.saturating_mul(texts.saturating_sub(1)) < 2 => Err(Error::option(
                "losses: contrastive",
                "needs several texts to choose the matching one from, but a batch has a single pair, so that its loss is always 0: \
                 set `batch_size` to at least 2, provide at least 2 pairs, because the last batch can be incomplete, or set `negative_column`",
            )),
            References::Matches(_) => Ok(batch.samples as f64),
            _ => {
                Err(Error::option("losses: contrastive", "needs pairs of matching texts: set `task: contrastive` and `pair_column` in `data: { train: ... }`"))
            }
        }
    }

    fn sum(&self, student: &[Tensor], _teacher: &[Tensor], _projections: &[Tensor], batch: &Batch) -> Result<LossSum> {
        let rows = &student[0];
        require_rows_of_samples(&format!("value `{}`", self.value), rows, batch)?;
        let norms = rows.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum_scalar(SMALLEST_NORM)?;
        let units = rows.broadcast_div(&norms)?;
        let (samples, candidates) = (batch.samples, rows.dim(0)? - batch.samples);
        let (first, others) = (units.narrow(0, 0, samples)?, units.narrow(0, samples, candidates)?);
        let (value, gradient) = self.of_scores(&(first.matmul(&others.t()?.contiguous()?)? / self.temperature)?)?;
        let gradient = (gradient / self.temperature)?;
        let gradients = Tensor::cat(&[gradient.matmul(&others)?, gradient.t()?.contiguous()?.matmul(&first)?], 0)?;
        let along = (&units * &gradients)?.sum_keepdim(D::Minus1)?;
        let gradients = (gradients - units.broadcast_mul(&along)?)?.broadcast_div(&norms)?;
        Ok(LossSum { value, student: vec![gradients], projections: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;

    use super::super::tests::{require_loss_gradients, tensor};
    use super::*;

    fn batch(samples: usize, texts: usize) -> Batch {
        Batch { inputs: Default::default(), references: References::Matches(texts), samples }
    }

    #[test]
    fn gradients_equal_finite_differences() {
        for (texts, symmetric) in [(2, false), (2, true), (3, false), (3, true)] {
            let loss = Contrastive { value: "a".into(), temperature: 0.5, symmetric };
            require_loss_gradients(&format!("{texts} texts, symmetric {symmetric}"), &loss, &[tensor(1, &[3 * texts, 4])], &[], &batch(3, texts));
        }
    }

    /// Losses and gradients are those of sentence-transformers (`scripts/goldens losses`).
    #[test]
    fn losses_equal_those_of_sentence_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training/losses.safetensors");
        let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let mut cases = 0;
        for (name, expected) in golden.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("contrastive/")?.strip_suffix("/loss")?, tensor))) {
            let read = |what: &str| golden[&format!("contrastive/{name}/{what}")].clone();
            let (rows, texts) = (read("embeddings"), if name.contains("negatives") { 3 } else { 2 });
            let samples = rows.dim(0).unwrap() / texts;
            let temperature = f64::from(read("temperature").to_vec1::<f32>().unwrap()[0]);
            let loss = Contrastive { value: "a".into(), temperature, symmetric: name.contains("symmetric") };
            let sum = loss.sum(&[rows], &[], &[], &batch(samples, texts)).unwrap();
            let mean = f64::from(sum.value.to_scalar::<f32>().unwrap()) / samples as f64;
            let expected = f64::from(expected.to_vec1::<f32>().unwrap()[0]);
            assert!((mean - expected).abs() < 1e-5 * expected.abs().max(1.0), "{name}: {mean} instead of {expected}");
            let gradient = ((&sum.student[0] / samples as f64).unwrap() - read("gradient")).unwrap();
            let apart = gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(apart < 1e-5, "{name}: {apart}");
            cases += 1;
        }
        assert_eq!(cases, 4);
    }

    #[test]
    fn single_pairs_are_rejected() {
        let loss = Contrastive { value: "a".into(), temperature: 1.0, symmetric: false };
        let error = loss.items(&batch(1, 2)).unwrap_err().to_string();
        assert!(error.contains("`batch_size`") && error.contains("last batch"), "{error}");
        assert_eq!((loss.items(&batch(2, 2)).unwrap(), loss.items(&batch(1, 3)).unwrap()), (2.0, 1.0));
    }

    #[test]
    fn samples_without_matches_are_rejected() {
        let loss = Contrastive { value: "a".into(), temperature: 1.0, symmetric: false };
        let other = Batch { references: References::None, ..batch(3, 2) };
        assert!(loss.items(&other).unwrap_err().to_string().contains("`task: contrastive`"));
        assert!(batch(3, 2).narrow(0, 1).unwrap_err().to_string().contains("cannot be divided"));
    }
}
