//! Divergences between rows of two distributions, and their gradients, for soft targets other than the
//! forward KL divergence, which [`soft`](super::cross_entropy::soft) computes in one pass.

use super::activation::exp;
use super::cross_entropy::total;

/// Divergence of a student's distribution `p` from a teacher's distribution `q`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Divergence {
    /// `Σ q ln(q / p)`.
    Forward,
    /// `Σ p ln(p / q)`.
    Reverse,
    /// `β Σ q ln(q / m) + (1 - β) Σ p ln(p / m)` with `m = β q + (1 - β) p` (Agarwal et al., *On-Policy
    /// Distillation of Language Models*, 2024), which is symmetric for β = 1/2.
    JensenShannon(f32),
    /// `Σ |p - q| / 2`: the probability that a token drawn by the student is rejected in speculative
    /// decoding.
    TotalVariation,
    /// Forward KL divergence times `w` plus total variation times `1 - w`, with `w = exp(-3 a)` for the
    /// acceptance probability `a = Σ min(p, q)` of the row.
    Acceptance,
}

/// A term of the divergence, and `p ∂/∂p` of it. `kl_weight`: the weight `w` of [`Divergence::Acceptance`].
#[inline(always)]
fn term(divergence: Divergence, kl_weight: f32, (ln_p, ln_q): (f32, f32)) -> (f32, f32) {
    let (p, q) = (exp(ln_p), exp(ln_q));
    let kl = || (q * (ln_q - ln_p), -q);
    let variation = || {
        let sign = if p > q { 0.5 } else { -0.5 };
        (sign * (p - q), sign * p)
    };
    match divergence {
        Divergence::Forward => kl(),
        Divergence::Reverse => {
            let loss = p * (ln_p - ln_q);
            (loss, loss)
        }
        Divergence::JensenShannon(beta) => {
            let mean = (beta * q + (1.0 - beta) * p).max(f32::MIN_POSITIVE).ln();
            let student = (1.0 - beta) * p * (ln_p - mean);
            (beta * q * (ln_q - mean) + student, student)
        }
        Divergence::TotalVariation => variation(),
        Divergence::Acceptance => {
            let ((kl, kl_slope), (variation, slope)) = (kl(), variation());
            (kl_weight * kl + (1.0 - kl_weight) * variation, kl_weight * kl_slope + (1.0 - kl_weight) * slope)
        }
    }
}

simd! {
    /// Adds the gradient of a divergence between `softmax(x / temperature)` and `softmax(y / temperature)`
    /// with respect to `x / temperature`, times `factor`, to `out`. Returns the divergence. The weights of
    /// [`Divergence::Acceptance`] are constants for the gradient.
    pub fn divergence(x: &[f32], y: &[f32], divergence: Divergence, temperature: f32, factor: f32, out: &mut [f32]) -> f32 {
        let part = 1.0 / temperature;
        let (of_x, of_y) = (total(x, part), total(y, part));
        let logarithms = |(x, y): (&f32, &f32)| (x * part - of_x, y * part - of_y);
        let mut kl_weight = 0.0;
        if divergence == Divergence::Acceptance {
            let acceptance: f32 = x.iter().zip(y).map(logarithms).map(|(ln_p, ln_q)| exp(ln_p.min(ln_q))).sum();
            kl_weight = (-3.0 * acceptance).exp();
        }
        let (mut loss, mut slopes) = (0f32, 0f32);
        for pair in x.iter().zip(y).map(logarithms) {
            let (term, slope) = term(divergence, kl_weight, pair);
            loss += term;
            slopes += slope;
        }
        for (out, pair) in out.iter_mut().zip(x.iter().zip(y).map(logarithms)) {
            let (_, slope) = term(divergence, kl_weight, pair);
            *out += (slope - exp(pair.0) * slopes) * factor;
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::super::cross_entropy::soft;
    use super::*;

    fn row(seed: u32) -> Vec<f32> {
        (0..77u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) as f32 / 512.0 - 4.0).collect()
    }

    fn softmax(row: &[f64], temperature: f64) -> Vec<f64> {
        let total: f64 = row.iter().map(|x| (x / temperature).exp()).sum();
        row.iter().map(|x| (x / temperature).exp() / total).collect()
    }

    /// Definitions in f64.
    fn reference(x: &[f64], y: &[f64], divergence: Divergence, temperature: f64, weight: Option<f64>) -> f64 {
        let (p, q) = (softmax(x, temperature), softmax(y, temperature));
        let kl = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * (a / b).ln()).sum::<f64>();
        let variation = p.iter().zip(&q).map(|(p, q)| (p - q).abs() / 2.0).sum::<f64>();
        match divergence {
            Divergence::Forward => kl(&q, &p),
            Divergence::Reverse => kl(&p, &q),
            Divergence::JensenShannon(beta) => {
                let beta = f64::from(beta);
                let mean: Vec<f64> = p.iter().zip(&q).map(|(p, q)| beta * q + (1.0 - beta) * p).collect();
                beta * kl(&q, &mean) + (1.0 - beta) * kl(&p, &mean)
            }
            Divergence::TotalVariation => variation,
            Divergence::Acceptance => {
                let weight = weight.unwrap_or_else(|| (-3.0 * (1.0 - variation)).exp());
                weight * kl(&q, &p) + (1.0 - weight) * variation
            }
        }
    }

    const ALL: [Divergence; 6] = [
        Divergence::Forward,
        Divergence::Reverse,
        Divergence::JensenShannon(0.5),
        Divergence::JensenShannon(0.125),
        Divergence::TotalVariation,
        Divergence::Acceptance,
    ];

    #[test]
    fn divergences_and_gradients_match_the_definitions() {
        let (x, y) = (row(1), row(977_123_456));
        let wide = |row: &[f32]| row.iter().copied().map(f64::from).collect::<Vec<f64>>();
        let (wide_x, wide_y) = (wide(&x), wide(&y));
        for kind in ALL {
            let mut out = vec![1.0; x.len()];
            let loss = divergence(&x, &y, kind, 2.0, 3.0, &mut out);
            let expected = reference(&wide_x, &wide_y, kind, 2.0, None);
            assert!((f64::from(loss) - expected).abs() < 1e-5 * (1.0 + expected), "{kind:?}: {loss}, expected {expected}");
            let acceptance = 1.0 - reference(&wide_x, &wide_y, Divergence::TotalVariation, 2.0, None);
            let weight = Some((-3.0 * acceptance).exp());
            for at in 0..x.len() {
                let moved = |by: f64| {
                    let mut x = wide_x.clone();
                    x[at] += by;
                    reference(&x, &wide_y, kind, 2.0, weight)
                };
                // With respect to x / 2, times 3.
                let slope = 1.0 + 3.0 * 2.0 * (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(out[at]) - slope).abs() < 1e-5, "{kind:?}, {at}: {}, expected {slope}", out[at]);
            }
        }
    }

    #[test]
    fn the_forward_divergence_equals_soft_targets() {
        let (x, y) = (row(1), row(977_123_456));
        let (mut out, mut expected) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (loss, expected_loss) = (divergence(&x, &y, Divergence::Forward, 2.0, 3.0, &mut out), soft(&x, &y, 2.0, 3.0, &mut expected));
        assert!((loss - expected_loss).abs() < 1e-5);
        assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn equal_rows_have_no_divergence_and_unlikely_classes_no_effect() {
        let mut x = row(1);
        for kind in ALL {
            let mut out = vec![0.0; x.len()];
            assert!(divergence(&x, &x, kind, 1.0, 1.0, &mut out).abs() < 1e-5, "{kind:?}");
            // Total variation has a kink at equal values.
            assert!(matches!(kind, Divergence::TotalVariation | Divergence::Acceptance) || out.iter().all(|x| x.abs() < 1e-5), "{kind:?}");
        }
        // Probabilities of class 3 underflow.
        let mut y = row(977_123_456);
        (x[3], y[3]) = (-1e4, -1e4);
        let without = |row: &[f32]| [&row[..3], &row[4..]].concat();
        for kind in ALL {
            let (mut out, mut expected) = (vec![0.0; x.len()], vec![0.0; x.len() - 1]);
            let loss = divergence(&x, &y, kind, 1.0, 1.0, &mut out);
            let expected_loss = divergence(&without(&x), &without(&y), kind, 1.0, 1.0, &mut expected);
            assert!((loss - expected_loss).abs() < 1e-5 * (1.0 + expected_loss) && out[3].abs() < 1e-6, "{kind:?}: {loss}, expected {expected_loss}");
            assert!(without(&out).iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{kind:?}");
        }
    }
}
