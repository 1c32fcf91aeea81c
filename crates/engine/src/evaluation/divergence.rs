//! Kullback-Leibler divergence of predictions, from logits.

use candle_core::{D, Tensor};

use crate::ir::ops::ScalarOps;

/// Kullback-Leibler divergence `sum p (ln p - ln q)` of the softmax distributions of two rows of logits.
pub(super) fn of_classes(a: &[f32], b: &[f32]) -> f64 {
    let total = |logits: &[f32]| {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(highest) + logits.iter().map(|l| f64::from(l - highest).exp()).sum::<f64>().ln()
    };
    let (all_a, all_b) = (total(a), total(b));
    a.iter().zip(b).map(|(x, y)| term(f64::from(*x) - all_a, f64::from(*y) - all_b)).sum()
}

/// Mean divergence of the labels of two rows of logits, each of which has a Bernoulli distribution with the
/// probability `sigmoid(logit)`.
pub(super) fn of_labels(a: &[f32], b: &[f32]) -> f64 {
    let log_sigmoid = |x: f64| -((-x).max(0.0) + (-x.abs()).exp().ln_1p());
    let label = |(x, y): (&f32, &f32)| {
        let (x, y) = (f64::from(*x), f64::from(*y));
        // `max` ignores NaN.
        if x.is_nan() || y.is_nan() { f64::NAN } else { term(log_sigmoid(x), log_sigmoid(y)) + term(log_sigmoid(-x), log_sigmoid(-y)) }
    };
    a.iter().zip(b).map(label).sum::<f64>() / a.len().max(1) as f64
}

/// `p (ln p - ln q)` from the logarithms of both probabilities. It is 0 for p = 0, also if q = 0, where the
/// difference is NaN.
fn term(p: f64, q: f64) -> f64 {
    let probability = p.exp();
    if probability == 0.0 { 0.0 } else { probability * (p - q) }
}

/// [`of_classes`] for rows `[rows, classes]` on a device.
pub(super) fn of_classes_on_device(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let log_softmax = |logits: &Tensor| logits.broadcast_sub(&logits.log_sum_exp(D::Minus1)?.unsqueeze(1)?);
    terms(&log_softmax(a)?, &log_softmax(b)?)?.sum(D::Minus1)
}

/// [`of_labels`] for rows `[rows, labels]` on a device.
pub(super) fn of_labels_on_device(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let log_sigmoid = |x: &Tensor| (x.neg()?.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?.neg();
    let of = |a: &Tensor, b: &Tensor| terms(&log_sigmoid(a)?, &log_sigmoid(b)?);
    (of(a, b)? + of(&a.neg()?, &b.neg()?)?)?.mean(D::Minus1)
}

/// [`term`] for each element.
fn terms(p: &Tensor, q: &Tensor) -> candle_core::Result<Tensor> {
    let probability = p.exp()?;
    probability.eq_scalar(0.0)?.where_cond(&probability, &(&probability * (p - q)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, with probabilities instead of their logarithms.
    #[test]
    fn labels_have_bernoulli_distributions() {
        let (a, b) = ([0.3f32, -2.0, 4.0, 0.0], [0.1f32, -1.0, 2.5, 0.0]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
        let label = |(a, b): (&f32, &f32)| {
            let (p, q) = (sigmoid(*a), sigmoid(*b));
            p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()
        };
        let expected = a.iter().zip(&b).map(label).sum::<f64>() / 4.0;
        assert!(expected > 0.0 && (of_labels(&a, &b) - expected).abs() < 1e-12, "{expected}");
        assert_eq!((of_labels(&a, &a), of_labels(&[f32::INFINITY, f32::NEG_INFINITY], &[f32::INFINITY, f32::NEG_INFINITY])), (0.0, 0.0));
        assert_eq!(of_labels(&[200.0], &[-200.0]), 200.0);
        assert!(of_labels(&[f32::NAN], &[1.0]).is_nan() && of_labels(&[1.0], &[f32::NAN]).is_nan());
    }
}
