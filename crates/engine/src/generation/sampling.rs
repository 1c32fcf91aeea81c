//! Selection of the next token.

use super::Sampling;
use crate::error::{Error, Result};

/// Origin of logits in errors.
pub(super) const DRAFT: &str = "generation with the draft";

/// Selects tokens greedily, or by sampling.
pub(super) struct Sampler(Option<(Sampling, fastrand::Rng)>);

/// A token that a draft proposes.
pub(super) struct Proposal {
    pub token: i64,
    /// The distribution that it was drawn from; `None` if it was not drawn, so that it is accepted if the
    /// model selects the same token.
    distribution: Option<Distribution>,
}

impl Sampler {
    /// A sampler for the prompt with this index. Its random numbers do not depend on other prompts, and are
    /// none of those of another seed.
    pub fn new(sampling: Option<Sampling>, prompt: usize) -> Sampler {
        let seed = |seed: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(prompt as u64);
        Sampler(sampling.map(|sampling| (sampling, fastrand::Rng::with_seed(seed(sampling.seed)))))
    }

    /// Whether it selects the most likely tokens.
    pub fn is_greedy(&self) -> bool {
        self.0.is_none()
    }

    /// Selects the next token from the logits.
    pub fn next(&mut self, logits: &[f32]) -> Result<i64> {
        require_finite(logits, "generation")?;
        token_id(match &mut self.0 {
            Some((sampling, random)) => Distribution::draw(logits, sampling, random.f64()),
            None => most_likely(logits, 1).first().copied(),
        })
    }

    /// Selects a token from the logits of a draft.
    pub fn propose(&mut self, logits: &[f32]) -> Result<Proposal> {
        require_finite(logits, DRAFT)?;
        match &mut self.0 {
            Some((sampling, random)) => {
                let distribution = Distribution::unordered(logits, sampling);
                Ok(Proposal { token: token_id(distribution.at(random.f64()))?, distribution: Some(distribution) })
            }
            None => Ok(Proposal { token: token_id(most_likely(logits, 1).first().copied())?, distribution: None }),
        }
    }

    /// A proposal of this token, without logits.
    pub fn suggest(token: i64) -> Proposal {
        Proposal { token, distribution: None }
    }

    /// Accepts one of the proposals for the next token, which have indices, by the logits of the model, or
    /// selects another token, so that the tokens have the distribution of the model. Returns the token and
    /// the index of the accepted proposal. A proposal with a distribution must be the only one.
    pub fn verify(&mut self, logits: &[f32], proposals: &[(usize, &Proposal)]) -> Result<(i64, Option<usize>)> {
        let (Some((sampling, random)), [(index, Proposal { token, distribution: Some(draft) })]) = (&mut self.0, proposals) else {
            let token = self.next(logits)?;
            return Ok((token, proposals.iter().find(|(_, proposal)| proposal.token == token).map(|(index, _)| *index)));
        };
        require_finite(logits, "generation")?;
        let model = Distribution::unordered(logits, sampling);
        let probability = |distribution: &Distribution| usize::try_from(*token).map_or(0.0, |token| distribution.probability(token));
        if random.f64() * probability(draft) < probability(&model) {
            return Ok((*token, Some(*index)));
        }
        token_id(model.without(draft, logits.len()).at(random.f64())).map(|token| (token, None))
    }
}

fn token_id(token: Option<usize>) -> Result<i64> {
    token.and_then(|token| i64::try_from(token).ok()).ok_or_else(|| Error::run("generation", "the vocabulary is empty", ""))
}

/// Fails if a logit is not finite. Suppressed tokens have a logit of -infinity, but not all tokens may be
/// suppressed.
pub(super) fn require_finite(logits: &[f32], what: &str) -> Result<()> {
    let invalid = logits.iter().filter(|logit| logit.is_nan() || **logit == f32::INFINITY).count();
    if invalid > 0 || logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
        let reason = format!("{invalid} of {} logits are not finite", logits.len());
        return Err(Error::run(what, reason, "the weights are damaged, or overflow their format"));
    }
    Ok(())
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

/// Weights of tokens in descending order of their logits.
fn weights(logits: &[f32], tokens: &[usize], temperature: f64) -> Vec<f64> {
    let logit = |token: &usize| logits.get(*token).map_or(f64::NEG_INFINITY, |logit| f64::from(*logit));
    let max = tokens.first().map_or(0.0, logit);
    tokens.iter().map(|token| weight(logit(token), max, temperature)).collect()
}

/// Probability of a token relative to that of the most likely one.
fn weight(logit: f64, max: f64, temperature: f64) -> f64 {
    // Avoids 0 / 0 for equal logits at tiny temperatures.
    if logit == max { 1.0 } else { ((logit - max) / temperature).exp() }
}

/// Number of tokens that are sorted first to find those of `top_p`, and the factor by which it grows.
const FIRST: usize = 64;
const GROWTH: usize = 16;

/// The share of the probability by which tokens are selected, if it is less than all and the number of tokens
/// is not limited otherwise.
fn nucleus_share(sampling: &Sampling) -> Option<f64> {
    sampling.top_p.filter(|share| *share < 1.0 && sampling.top_k.is_none())
}

/// Whether no token is filtered.
fn is_complete(sampling: &Sampling) -> bool {
    sampling.top_k.is_none() && sampling.top_p.is_none_or(|share| share >= 1.0)
}

/// Relative bound on the effect of the order of summation on a sum of probabilities.
const ROUNDING: f64 = 1e-9;

/// Number of the first weights until their sum reaches a limit, at least one, and their sum.
fn prefix(weights: &[f64], limit: f64) -> (usize, f64) {
    let (mut count, mut sum) = (0usize, 0.0);
    for weight in weights {
        if count > 0 && sum >= limit {
            break;
        }
        (count, sum) = (count.saturating_add(1), sum + weight);
    }
    (count, sum)
}

/// Probabilities of tokens after filtering.
#[derive(Debug, PartialEq)]
struct Distribution {
    /// Tokens in descending order of their logits, unless another order is stated.
    tokens: Vec<usize>,
    /// Probabilities of these tokens, up to a factor.
    weights: Vec<f64>,
    /// Sum of the weights.
    sum: f64,
}

impl Distribution {
    /// The distribution of the next token.
    fn new(logits: &[f32], sampling: &Sampling) -> Distribution {
        let nucleus = nucleus_share(sampling).and_then(|share| Self::nucleus(logits, share, sampling.temperature));
        nucleus.unwrap_or_else(|| Self::sorted(logits, sampling))
    }

    /// As [`new`](Distribution::new), in order of the tokens if none is filtered: sorting the vocabulary for
    /// each proposal would take a tenth of a step of a small model.
    fn unordered(logits: &[f32], sampling: &Sampling) -> Distribution {
        if !is_complete(sampling) {
            return Self::new(logits, sampling);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = logits.iter().map(|logit| weight(f64::from(*logit), f64::from(max), sampling.temperature)).collect();
        Distribution { tokens: (0..logits.len()).collect(), sum: weights.iter().sum(), weights }
    }

    /// The token at a point between 0 and 1 of the cumulative distribution of the next token.
    fn draw(logits: &[f32], sampling: &Sampling, point: f64) -> Option<usize> {
        // If no token is filtered, only those up to the point need to be sorted.
        let nucleus = if is_complete(sampling) { Self::nucleus(logits, point, sampling.temperature) } else { None };
        nucleus.map_or_else(|| Self::new(logits, sampling).at(point), |nucleus| nucleus.tokens.last().copied())
    }

    /// The distribution from the `top_k` most likely tokens in order.
    fn sorted(logits: &[f32], sampling: &Sampling) -> Distribution {
        let tokens = most_likely(logits, sampling.top_k.unwrap_or(logits.len()));
        let weights = weights(logits, &tokens, sampling.temperature);
        let (count, sum) = prefix(&weights, sampling.top_p.unwrap_or(1.0) * weights.iter().sum::<f64>());
        Distribution { tokens, weights, sum }.first(count)
    }

    /// The same distribution for a share of the probability, without sorting all tokens. `None` if so many
    /// tokens are needed that this is slower, or if rounding of the sum of all probabilities could change the
    /// last one.
    fn nucleus(logits: &[f32], share: f64, temperature: f64) -> Option<Distribution> {
        let mut count = FIRST;
        let most = most_likely(logits, 1);
        let max = most.first().and_then(|token| logits.get(*token)).map_or(0.0, |logit| f64::from(*logit));
        let total: f64 = if count < logits.len() { logits.iter().map(|logit| weight(f64::from(*logit), max, temperature)).sum() } else { 0.0 };
        while count < logits.len() {
            let tokens = most_likely(logits, count);
            let weights = weights(logits, &tokens, temperature);
            let [low, high] = [share - ROUNDING, share + ROUNDING].map(|share| prefix(&weights, share * total));
            if high.1 >= (share + ROUNDING) * total {
                return (low.0 == high.0).then(|| Distribution { tokens, weights, sum: low.1 }.first(low.0));
            }
            count = count.saturating_mul(GROWTH);
        }
        None
    }

    /// The first `count` tokens, whose weights have the sum of the distribution.
    fn first(mut self, count: usize) -> Distribution {
        self.tokens.truncate(count);
        self.weights.truncate(count);
        self
    }

    /// The token at a point between 0 and 1 of the cumulative distribution.
    fn at(&self, point: f64) -> Option<usize> {
        let point = point * self.sum;
        let mut sum = 0.0;
        let at = self.weights.iter().position(|weight| {
            sum += weight;
            point < sum
        });
        // The point may be rounded to the whole sum.
        let last = || self.weights.iter().rposition(|weight| *weight > 0.0).unwrap_or_default();
        self.tokens.get(at.unwrap_or_else(last)).copied()
    }

    /// The probability of a token.
    fn probability(&self, token: usize) -> f64 {
        let weight = self.tokens.iter().position(|other| *other == token).and_then(|at| self.weights.get(at));
        weight.map_or(0.0, |weight| weight / self.sum)
    }

    /// The distribution of a token after the rejection of a proposal from `draft`: the positive differences
    /// of the probabilities, for a vocabulary of `size` tokens.
    fn without(self, draft: &Distribution, size: usize) -> Distribution {
        let mut proposed = vec![0.0; size];
        for (token, weight) in draft.tokens.iter().zip(&draft.weights) {
            proposed.get_mut(*token).into_iter().for_each(|probability| *probability = weight / draft.sum);
        }
        let difference = |(token, weight): (&usize, &f64)| (weight / self.sum - proposed.get(*token).copied().unwrap_or(0.0)).max(0.0);
        let weights: Vec<f64> = self.tokens.iter().zip(&self.weights).map(difference).collect();
        let sum = weights.iter().sum();
        // Equal distributions, whose rounded probabilities led to a rejection.
        if sum > 0.0 { Distribution { weights, sum, ..self } } else { self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    fn seeds_and_prompts_have_different_samples() {
        let logits = [0.0; 1000];
        let samples = |seed: u64, prompt: usize| {
            let mut sampler = Sampler::new(Some(Sampling { seed, ..Sampling::default() }), prompt);
            [0; 8].map(|_| sampler.next(&logits).unwrap())
        };
        let all: BTreeSet<[i64; 8]> = (0..20).flat_map(|seed| (0..20).map(move |prompt| samples(seed, prompt))).collect();
        assert_eq!((all.len(), samples(3, 1)), (400, samples(3, 1)));
    }

    #[test]
    fn tokens_are_filtered_by_top_k_and_top_p() {
        let at = |sampling: Sampling, point: f64| Distribution::new(&LOGITS, &sampling).at(point).unwrap();
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
        assert_eq!(Distribution::new(&[0.0, 2000.0, 0.0], &all).at(0.999), Some(1));
    }

    /// Without filters, the order of tokens does not change their probabilities.
    #[test]
    fn proposals_have_the_probabilities_of_sorted_tokens() {
        let logits: Vec<f32> = (0..200).map(|at| if at % 9 == 0 { f32::NEG_INFINITY } else { (at * 37 % 101) as f32 / 20.0 }).collect();
        for temperature in [0.2, 1.0, 1e-320] {
            let sampling = Sampling { temperature, ..Sampling::default() };
            let [unordered, sorted] = [Distribution::unordered, Distribution::new].map(|make| make(&logits, &sampling));
            for token in 0..logits.len() {
                let [found, expected] = [&unordered, &sorted].map(|distribution| distribution.probability(token));
                assert!((found - expected).abs() <= 1e-12, "{temperature} {token}: {found} {expected}");
            }
            // Suppressed tokens are never drawn, not even after the last one.
            assert!([0.0, 0.3, 1.0].iter().all(|point| unordered.at(*point).is_some_and(|token| logits[token].is_finite())));
        }
        for sampling in [Sampling { top_k: Some(3), ..Sampling::default() }, Sampling { top_p: Some(0.5), ..Sampling::default() }] {
            assert_eq!(Distribution::unordered(&logits, &sampling), Distribution::new(&logits, &sampling));
        }
    }

    /// A nucleus that is found without sorting all tokens equals that of all tokens, bit for bit.
    #[test]
    fn top_p_sorts_only_as_many_tokens_as_it_needs() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut found = 0;
        for spread in [0.01, 1.0, 8.0] {
            // Several tokens have equal logits, also the most likely ones, and some are suppressed.
            let logits: Vec<f32> = (0..3000).map(|at| if at % 7 == 0 { f32::NEG_INFINITY } else { (random.f32() * 600.0).floor() / 600.0 * spread }).collect();
            for share in [1e-3, 0.1, 0.5, 0.9, 0.999, 1.0] {
                for temperature in [0.05, 1.0, 3.0] {
                    let sampling = Sampling { temperature, top_p: Some(share), ..Sampling::default() };
                    let all = Distribution::sorted(&logits, &sampling);
                    found += usize::from(Distribution::nucleus(&logits, share, temperature).is_some_and(|nucleus| nucleus == all));
                    assert_eq!(Distribution::new(&logits, &sampling), all, "{spread} {share} {temperature}");
                }
            }
        }
        assert!(found > 15, "{found}");
        let mut quick = 0;
        for spread in [0.01, 1.0, 8.0, 60.0] {
            let logits: Vec<f32> = (0..3000).map(|at| if at % 7 == 0 { f32::NEG_INFINITY } else { (random.f32() * 600.0).floor() / 600.0 * spread }).collect();
            for point in [0.0, 1e-12, 0.1, 0.5, 0.93, 0.9999, 1.0 - f64::EPSILON] {
                let sampling = Sampling { temperature: 0.7, ..Sampling::default() };
                quick += usize::from(Distribution::nucleus(&logits, point, 0.7).is_some());
                assert_eq!(Distribution::draw(&logits, &sampling, point), Distribution::sorted(&logits, &sampling).at(point), "{spread} {point}");
            }
        }
        assert!(quick > 15, "{quick}");
        // All tokens are sorted once.
        for (top_p, top_k, share) in [(Some(0.9), None, Some(0.9)), (Some(1.0), None, None), (Some(0.9), Some(2), None), (None, None, None)] {
            assert_eq!(nucleus_share(&Sampling { top_p, top_k, ..Sampling::default() }), share, "{top_p:?} {top_k:?}");
        }
        // The sum of the two most likely tokens is exactly half of all.
        let logits = [vec![1.0; 2], vec![f32::NEG_INFINITY; 996], vec![1.0; 2]].concat();
        assert_eq!(Distribution::nucleus(&logits, 0.5, 1.0), None);
        assert_eq!(Distribution::new(&logits, &Sampling { top_p: Some(0.5), ..Sampling::default() }).tokens, [0, 1]);
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

    /// For any distribution of the proposals, the result follows the model's distribution, and the share of
    /// accepted proposals is the sum of the smaller probabilities.
    #[test]
    fn verified_proposals_have_the_distribution_of_the_model() {
        let sampling = Sampling { temperature: 0.8, top_k: Some(3), ..Sampling::default() };
        let exact = Distribution::new(&LOGITS, &sampling);
        let probability = |token: usize| exact.probability(token);
        for draft_logits in [LOGITS, [3.0, 1.0, 2.5, 2.0], [0.0, 0.0, 9.0, 0.0], [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]] {
            let draft = Distribution::new(&draft_logits, &sampling);
            let expected: f64 = (0..4).map(|token| probability(token).min(draft.probability(token))).sum();
            let (mut counts, mut accepted, draws) = ([0usize; 4], 0, 40_000);
            let mut sampler = Sampler::new(Some(sampling), 0);
            for _ in 0..draws {
                let proposal = sampler.propose(&draft_logits).unwrap();
                let (token, found) = sampler.verify(&LOGITS, &[(6, &proposal)]).unwrap();
                assert!(found.is_none() || (token, found) == (proposal.token, Some(6)));
                counts[token as usize] += 1;
                accepted += usize::from(found.is_some());
            }
            for (token, count) in counts.into_iter().enumerate() {
                assert!((count as f64 / f64::from(draws) - probability(token)).abs() < 0.01, "{draft_logits:?}, {token}: {count}");
            }
            assert!((accepted as f64 / f64::from(draws) - expected).abs() < 0.01, "{draft_logits:?}: {accepted}");
        }
    }

    #[test]
    fn greedy_proposals_are_accepted_if_they_are_the_most_likely_token() {
        let mut sampler = Sampler::new(None, 0);
        let verdict = |sampler: &mut Sampler, draft: &[f32]| {
            let proposal = sampler.propose(draft).unwrap();
            let (token, found) = sampler.verify(&LOGITS, &[(0, &proposal)]).unwrap();
            (token, found.is_some())
        };
        assert_eq!(verdict(&mut sampler, &[0.0, 1.0, 0.0, 0.0]), (1, true));
        // Another token with the same logit.
        assert_eq!(verdict(&mut sampler, &[0.0, 0.0, 0.0, 1.0]), (1, false));
        let error = sampler.propose(&[f32::NAN]).map(|proposal| proposal.token).unwrap_err().to_string();
        assert!(error.contains("generation with the draft"), "{error}");
    }
}
