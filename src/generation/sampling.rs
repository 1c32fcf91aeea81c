//! Which token comes next.

use super::Sampling;
use crate::error::{Error, Result};

/// Chooses tokens.
pub(super) struct Sampler(Option<(Sampling, fastrand::Rng)>);

impl Sampler {
    /// For the prompt of this number: what is drawn for one does not depend on the others.
    pub fn new(sampling: Option<Sampling>, prompt: usize) -> Sampler {
        Sampler(sampling.map(|sampling| (sampling, fastrand::Rng::with_seed(sampling.seed.wrapping_add(prompt as u64)))))
    }

    /// The next token by the logits of all.
    pub fn next(&mut self, logits: &[f32]) -> Result<i64> {
        // A token may be out of the question, but not all of them.
        let broken = logits.iter().filter(|logit| logit.is_nan() || **logit == f32::INFINITY).count();
        if broken > 0 || logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            return Err(Error::run(
                "generation",
                format!("{broken} of {} logits are not numbers", logits.len()),
                "the weights are damaged, or too large for their format",
            ));
        }
        let found = match &mut self.0 {
            Some((sampling, random)) => drawn(logits, sampling, random.f64()),
            None => ordered(logits, 1).first().copied(),
        };
        found.and_then(|token| i64::try_from(token).ok()).ok_or_else(|| Error::run("generation", "there is no token to take", ""))
    }
}

/// So many of the likeliest tokens, the likeliest first; of equal ones, the first.
fn ordered(logits: &[f32], count: usize) -> Vec<usize> {
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

/// The token at a point between 0 and 1 of those that are kept, side by side.
fn drawn(logits: &[f32], sampling: &Sampling, point: f64) -> Option<usize> {
    let tokens = ordered(logits, sampling.top_k.unwrap_or(logits.len()));
    let logit = |token: &usize| logits.get(*token).map_or(f64::NEG_INFINITY, |logit| f64::from(*logit));
    let most = tokens.first().map_or(0.0, logit);
    // Equal ones stay so, however cold it is.
    let part = |token: &usize| if logit(token) == most { 1.0 } else { ((logit(token) - most) / sampling.temperature).exp() };
    let parts: Vec<f64> = tokens.iter().map(part).collect();
    let wanted = sampling.top_p.unwrap_or(1.0) * parts.iter().sum::<f64>();
    let (mut kept, mut sum) = (0usize, 0.0);
    for part in &parts {
        if kept > 0 && sum >= wanted {
            break;
        }
        (kept, sum) = (kept.saturating_add(1), sum + part);
    }
    let point = point * sum;
    let mut sum = 0.0;
    let at = parts.iter().take(kept).position(|part| {
        sum += part;
        point < sum
    });
    tokens.get(at.unwrap_or(kept.saturating_sub(1))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 3.0];

    #[test]
    fn the_first_of_the_likeliest_comes() {
        assert_eq!(Sampler::new(None, 0).next(&LOGITS).unwrap(), 1);
        let broken = Sampler::new(None, 0).next(&[1.0, f32::NAN]).unwrap_err().to_string();
        assert!(broken.contains("1 of 2 logits"), "{broken}");
        assert!(Sampler::new(None, 0).next(&[1.0, f32::INFINITY]).is_err());
        assert!(Sampler::new(None, 0).next(&[f32::NEG_INFINITY; 2]).is_err());
        assert_eq!(Sampler::new(None, 0).next(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1);
    }

    #[test]
    fn tokens_are_kept_by_number_and_by_probability() {
        let at = |sampling: Sampling, point: f64| drawn(&LOGITS, &sampling, point).unwrap();
        let all = Sampling::default();
        // Probabilities are 0.399, 0.399, 0.147 and 0.054.
        assert_eq!([0.0, 0.39, 0.41, 0.79, 0.81, 0.94, 0.96].map(|point| at(all, point)), [1, 1, 3, 3, 2, 2, 0]);
        assert_eq!([0.0, 0.49, 0.51, 0.999].map(|point| at(Sampling { top_k: Some(2), ..all }, point)), [1, 1, 3, 3]);
        assert_eq!(at(Sampling { top_p: Some(0.39), ..all }, 0.999), 1);
        assert_eq!(at(Sampling { top_p: Some(0.7), ..all }, 0.999), 3);
        assert_eq!(at(Sampling { top_p: Some(0.9), ..all }, 0.999), 2);
        assert_eq!(at(Sampling { temperature: 1e-3, ..all }, 0.999), 3);
        assert_eq!(at(Sampling { temperature: 1e-320, ..all }, 0.1), 1);
        // Far apart, the likeliest alone has any probability at all.
        assert_eq!(drawn(&[0.0, 2000.0, 0.0], &all, 0.999), Some(1));
    }

    #[test]
    fn draws_are_those_of_the_seed_and_as_likely_as_they_should_be() {
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
