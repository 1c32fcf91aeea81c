//! Comparison of log-probabilities of single tokens.

use candle_core::{D, Tensor};

use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};

/// The log-probability of a token, as a runtime has computed it.
pub(super) struct LogProbability {
    /// Row of the logits, counted over all texts.
    pub row: usize,
    pub token: usize,
    pub value: f64,
}

/// Root mean square of the differences from the log-probabilities of these logits, relative to the standard
/// deviation of these. Log-probabilities that are less than the largest of their row minus `range` are raised
/// to that limit. Fails without log-probabilities, and if a row or token does not exist.
pub(super) fn relative_error(logits: &Tensor, found: &[LogProbability], range: Option<f64>) -> Result<f64> {
    if found.is_empty() {
        return Err(Error::run("the runtime", "has returned no log-probabilities", ""));
    }
    let failed = |e: candle_core::Error| Error::run("logits", e, "");
    let width = logits.dim(D::Minus1).map_err(failed)?;
    let values: Vec<f32> = transfer::values(logits, Cause::Answers).map_err(failed)?;
    let norms: Vec<(f64, f64)> = values.chunks(width.max(1)).map(norm).collect();
    let missing = |at: &LogProbability| Error::run("log-probabilities of the runtime", format!("row {}, token {} do not exist", at.row, at.token), "");
    let (mut noise, mut sum, mut squares) = (0f64, 0f64, 0f64);
    for at in found {
        let index = at.row.checked_mul(width).and_then(|begin| begin.checked_add(at.token)).filter(|_| at.token < width);
        let logit = index.and_then(|index| values.get(index)).ok_or_else(|| missing(at))?;
        let (largest, norm) = norms.get(at.row).ok_or_else(|| missing(at))?;
        let lowest = range.map_or(f64::NEG_INFINITY, |range| largest - norm - range);
        let expected = (f64::from(*logit) - norm).max(lowest);
        noise += (at.value - expected).powi(2);
        sum += expected;
        squares += expected * expected;
    }
    let count = (found.len() as f64).max(1.0);
    let variance = squares / count - (sum / count).powi(2);
    Ok((noise / count).sqrt() / variance.sqrt().max(f64::MIN_POSITIVE))
}

/// The largest logit, and the logarithm of the sum of exponentials.
fn norm(row: &[f32]) -> (f64, f64) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|value| f64::from(value - largest).exp()).sum();
    (f64::from(largest), f64::from(largest) + sum.ln())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn errors_are_relative_to_the_standard_deviation() {
        let logits = Tensor::new(&[[[0f32, 3f32.ln()], [5.0, 5.0]]], &Device::Cpu).unwrap();
        let at = |row, token, value: f64| LogProbability { row, token, value };
        let exact = [at(0, 0, 0.25f64.ln()), at(0, 1, 0.75f64.ln()), at(1, 0, 0.5f64.ln())];
        assert!(relative_error(&logits, &exact, None).unwrap() < 1e-6);
        let shifted: Vec<_> = exact.iter().map(|at| LogProbability { value: at.value + 0.1, ..*at }).collect();
        let deviation = {
            let values = [0.25f64.ln(), 0.75f64.ln(), 0.5f64.ln()];
            let mean = values.iter().sum::<f64>() / 3.0;
            (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 3.0).sqrt()
        };
        assert!((relative_error(&logits, &shifted, None).unwrap() - 0.1 / deviation).abs() < 1e-6);
        // Lower values are raised to the limit.
        let limited = [at(0, 0, 0.75f64.ln() - 1.0), at(0, 1, 0.75f64.ln())];
        assert!(relative_error(&logits, &limited, Some(1.0)).unwrap() < 1e-6);
        assert!(relative_error(&logits, &[], None).is_err());
        assert!(relative_error(&logits, &[at(2, 0, 0.0)], None).is_err());
        assert!(relative_error(&logits, &[at(0, 2, 0.0)], None).is_err());
    }
}
