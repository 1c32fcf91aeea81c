//! Selection of the next token.

use super::Sampling;
use crate::error::{Error, Result};

/// Selects tokens greedily, or by sampling.
pub(super) struct Sampler(Option<(Sampling, fastrand::Rng)>);

impl Sampler {
    /// A sampler for the prompt with this index. Its random numbers do not depend on other prompts.
    pub fn new(sampling: Option<Sampling>, prompt: usize) -> Sampler {
        Sampler(sampling.map(|sampling| (sampling, fastrand::Rng::with_seed(sampling.seed.wrapping_add(prompt as u64)))))
    }

    /// Selects the next token from the logits.
    pub fn next(&mut self, logits: &[f32]) -> Result<i64> {
        // Suppressed tokens have a logit of -infinity, but not all tokens may be suppressed.
        let invalid = logits.iter().filter(|logit| logit.is_nan() || **logit == f32::INFINITY).count();
        if invalid > 0 || logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            return Err(Error::run(
                "generation",
                format!("{invalid} of {} logits are not finite", logits.len()),
                "the weights are damaged, or overflow their format",
            ));
        }
        let found = match &mut self.0 {
            Some((sampling, random)) => sample(logits, sampling, random.f64()),
            None => most_likely(logits, 1).first().copied(),
        };
        found.and_then(|token| i64::try_from(token).ok()).ok_or_else(|| Error::run("generation", "the vocabulary is empty", ""))
    }
}

/// The `count` most likely tokens in descending order; ties are ordered by token id.
fn most_likely(logits: &[f32], count: usize) -> Vec<usize> {
    let before = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count == 1 {
        return logits.iter().copied().enumerate().min_by(before).map(|(token, _)| token).into_iter().collect();
    }
    let mut tokens: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, before);
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(before);
    tokens.into_iter().map(|(token, _)| token).collect()
}

/// The token at a point between 0 and 1 of the cumulative distribution after filtering.
fn sample(logits: &[f32], sampling: &Sampling, point: f64) -> Option<usize> {
    let tokens = most_likely(logits, sampling.top_k.unwrap_or(logits.len()));
    let logit = |token: &usize| logits.get(*token).map_or(f64::NEG_INFINITY, |logit| f64::from(*logit));
    let max = tokens.first().map_or(0.0, logit);
    // Avoids 0 / 0 for equal logits at tiny temperatures.
    let weight = |token: &usize| if logit(token) == max { 1.0 } else { ((logit(token) - max) / sampling.temperature).exp() };
    let weights: Vec<f64> = tokens.iter().map(weight).collect();
    let limit = sampling.top_p.unwrap_or(1.0) * weights.iter().sum::<f64>();
    let (mut count, mut sum) = (0usize, 0.0);
    for weight in &weights {
        if count > 0 && sum >= limit {
            break;
        }
        (count, sum) = (count.saturating_add(1), sum + weight);
    }
    let point = point * sum;
    let mut sum = 0.0;
    let at = weights.iter().take(count).position(|weight| {
        sum += weight;
        point < sum
    });
    tokens.get(at.unwrap_or(count.saturating_sub(1))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 3.0];

    #[test]
    fn greedy_decoding_selects_the_first_most_likely_token() {
        assert_eq!(Sampler::new(None, 0).next(&LOGITS).unwrap(), 1);
        let error = Sampler::new(None, 0).next(&[1.0, f32::NAN]).unwrap_err().to_string();
        assert!(error.contains("1 of 2 logits"), "{error}");
        assert!(Sampler::new(None, 0).next(&[1.0, f32::INFINITY]).is_err());
        assert!(Sampler::new(None, 0).next(&[f32::NEG_INFINITY; 2]).is_err());
        assert_eq!(Sampler::new(None, 0).next(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1);
    }

    #[test]
    fn tokens_are_filtered_by_top_k_and_top_p() {
        let at = |sampling: Sampling, point: f64| sample(&LOGITS, &sampling, point).unwrap();
        let all = Sampling::default();
        // Probabilities are 0.399, 0.399, 0.147 and 0.054.
        assert_eq!([0.0, 0.39, 0.41, 0.79, 0.81, 0.94, 0.96].map(|point| at(all, point)), [1, 1, 3, 3, 2, 2, 0]);
        assert_eq!([0.0, 0.49, 0.51, 0.999].map(|point| at(Sampling { top_k: Some(2), ..all }, point)), [1, 1, 3, 3]);
        assert_eq!(at(Sampling { top_p: Some(0.39), ..all }, 0.999), 1);
        assert_eq!(at(Sampling { top_p: Some(0.7), ..all }, 0.999), 3);
        assert_eq!(at(Sampling { top_p: Some(0.9), ..all }, 0.999), 2);
        assert_eq!(at(Sampling { temperature: 1e-3, ..all }, 0.999), 3);
        assert_eq!(at(Sampling { temperature: 1e-320, ..all }, 0.1), 1);
        // With a large distance, the other tokens have a probability of 0.
        assert_eq!(sample(&[0.0, 2000.0, 0.0], &all, 0.999), Some(1));
    }

    #[test]
    fn samples_depend_on_the_seed_and_follow_the_probabilities() {
        let draws = |seed: u64| {
            let mut sampler = Sampler::new(Some(Sampling { seed, ..Sampling::default() }), 0);
            (0..4000).map(|_| sampler.next(&LOGITS).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let share = draws(1).iter().filter(|token| **token == 1).count() as f64 / 4000.0;
        assert!((share - 0.399).abs() < 0.04, "{share}");
    }
}
