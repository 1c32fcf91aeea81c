//! Proposals without a network: continuations of earlier occurrences of the last tokens, in the text itself
//! (Saxena, *Prompt Lookup Decoding*, 2023) or in a collection of texts (He et al., *REST: Retrieval-Based
//! Speculative Decoding*, 2023), of which several are verified as a tree (Miao et al., *SpecInfer*, 2024).

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::DType;
use candle_core::npy::NpzTensors;
use rayon::prelude::*;

use super::Vocabulary;
use super::proposals::{LEAST_PROBABILITY, Proposals};
use super::sampling::Sampler;
use crate::data::IGNORED;
use crate::error::{Error, Result};
use crate::exec::transfer;

/// Maximum number of previous tokens by which the next one is predicted.
const CONTEXT: usize = 8;
/// Maximum number of occurrences of a context that are counted. Of more, as many are selected at regular
/// intervals.
const OCCURRENCES: usize = 256;
/// Weight of an occurrence in the text itself, relative to one in the collection.
const OWN_WEIGHT: f64 = 4.0;
/// Weight of the prediction by a shorter context, relative to the number of different tokens that follow the
/// longer one.
const SHORTER_WEIGHT: f64 = 2.0;
/// Separates the texts of a collection.
const END: u32 = u32::MAX;

/// Texts as tokens, whose positions are sorted by the tokens before them.
#[derive(Debug, Default)]
pub struct Ngrams {
    /// The texts, each after [`END`].
    tokens: Vec<u32>,
    /// Positions of predicted tokens, in the order of the previous tokens, of which the last one is compared
    /// first.
    order: Vec<u32>,
}

/// Extensions of collections.
const ARRAYS: &str = "npz";
const TEXT: &str = "txt";

/// How often each token follows a context.
#[derive(Debug, Default, Clone)]
struct Counts(Vec<(u32, f64)>);

impl Counts {
    fn add(&mut self, token: u32, weight: f64) {
        match self.0.iter_mut().find(|(other, _)| *other == token) {
            Some((_, count)) => *count += weight,
            None => self.0.push((token, weight)),
        }
    }

    fn of(&self, token: u32) -> f64 {
        self.0.iter().find(|(other, _)| *other == token).map_or(0.0, |(_, count)| *count)
    }
}

impl Ngrams {
    /// Whether a path is a collection of texts, by its extension: `.npz` or `.txt`.
    pub fn is_collection(path: &Path) -> bool {
        path.extension().is_some_and(|end| end == ARRAYS || end == TEXT)
    }

    /// Reads a collection: the arrays `input_ids`, `attention_mask` and `labels` `[texts, tokens]` of an
    /// `.npz` file, of which the last two are optional, or a text.
    ///
    /// # Errors
    /// The file cannot be read, or is empty.
    pub fn open(path: &Path, vocabulary: &Vocabulary) -> Result<Ngrams> {
        let texts = if path.extension().is_some_and(|end| end == ARRAYS) {
            read_arrays(path)?
        } else {
            vec![vocabulary.encode(&crate::files::read_to_string(path).map_err(Error::io("read", path))?)?]
        };
        let ngrams = Ngrams::new(texts.iter().map(Vec::as_slice)).map_err(|error| match error {
            Error::Option { what, reason } => Error::option(what, format!("{} {reason}", path.display())),
            other => other,
        })?;
        if ngrams.order.is_empty() {
            return Err(Error::option("--draft", format!("{} contains no texts of two or more tokens", path.display())));
        }
        Ok(ngrams)
    }

    /// A collection of texts.
    ///
    /// # Errors
    /// It has more than 2³² - 1 tokens, or a token is not an id.
    pub fn new<'t>(texts: impl IntoIterator<Item = &'t [i64]>) -> Result<Ngrams> {
        let mut tokens = Vec::new();
        for text in texts {
            tokens.push(END);
            for token in text {
                let id = u32::try_from(*token).ok().filter(|id| *id != END);
                tokens.push(id.ok_or_else(|| Error::option("--draft", format!("contains {token}, which is not the id of a token")))?);
            }
        }
        let count = u32::try_from(tokens.len()).map_err(|_| Error::option("--draft", "has more than 4,294,967,295 tokens"))?;
        let is_predicted = |at: &u32| is_token(&tokens, *at) && at.checked_sub(1).is_some_and(|before| is_token(&tokens, before));
        let mut order: Vec<u32> = (0..count).filter(is_predicted).collect();
        order.par_sort_unstable_by(|one, other| context(&tokens, *one).cmp(context(&tokens, *other)).then(one.cmp(other)));
        Ok(Ngrams { tokens, order })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens.iter().filter(|token| **token != END).count()
    }

    /// Memory in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let values = |list: &[u32]| u64::try_from(size_of_val(list)).unwrap_or(u64::MAX);
        values(&self.tokens).saturating_add(values(&self.order))
    }

    /// The largest id of a token.
    pub fn largest(&self) -> Option<u32> {
        self.tokens.iter().copied().filter(|token| *token != END).max()
    }

    /// Proposes at most `limit` tokens, which are the most likely to be accepted after the text `all`: in one
    /// continuation, or with branches in several. A token in `ends` is the last one of its continuation.
    pub(super) fn propose(&self, all: &[i64], limit: usize, has_branches: bool, ends: &BTreeSet<i64>) -> Proposals {
        let mut proposals = Proposals::default();
        // Tokens that were not proposed, with the probability that they and those before them are accepted.
        let (mut candidates, mut last, mut probability) = (Vec::<(f64, Option<usize>, u32)>::new(), None, 1.0);
        while proposals.len() < limit {
            let path = proposals.path(last);
            if !path.last().is_some_and(|token| ends.contains(token)) {
                let next = self.likely(&[all, path.as_slice()].concat()).into_iter().take(if has_branches { limit } else { 1 });
                let next = next.map(|(token, next)| (probability * next, last, token));
                candidates.extend(next.filter(|(probability, ..)| *probability >= LEAST_PROBABILITY));
            }
            // Of equally likely ones, the first.
            let best = candidates.iter().enumerate().rev().max_by(|(_, a), (_, b)| a.0.total_cmp(&b.0)).map(|(at, _)| at);
            let Some(best) = best else { break };
            let (of_best, parent, token) = candidates.remove(best);
            last = Some(proposals.push(Sampler::suggest(i64::from(token)), parent));
            probability = of_best;
        }
        proposals
    }

    /// The tokens that can follow a text, the most likely one first, with their probabilities: interpolated
    /// between contexts of different lengths as by Witten and Bell (1991). The rest of the probability is
    /// that of a context of length 0. Equally likely tokens are ordered by their ids.
    pub(super) fn likely(&self, text: &[i64]) -> Vec<(u32, f64)> {
        let text: Vec<u32> = text.iter().map(|token| u32::try_from(*token).unwrap_or(END)).collect();
        let mut likely = Counts::default();
        for counts in self.counts(&text) {
            let (weight, total) = (SHORTER_WEIGHT * counts.0.len() as f64, counts.0.iter().map(|(_, count)| count).sum::<f64>());
            let shorter = std::mem::take(&mut likely);
            for (token, _) in shorter.0.iter().chain(counts.0.iter().filter(|(token, _)| shorter.of(*token) == 0.0)) {
                likely.0.push((*token, (counts.of(*token) + weight * shorter.of(*token)) / (total + weight)));
            }
        }
        likely.0.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        likely.0
    }

    /// Frequencies of the next token after contexts of 1, 2, … tokens at the end of a text, up to the longest
    /// one that occurs.
    fn counts(&self, text: &[u32]) -> Vec<Counts> {
        let mut all = vec![Counts::default(); CONTEXT];
        let mut found = self.order.as_slice();
        for (length, (counts, token)) in all.iter_mut().zip(text.iter().rev()).enumerate() {
            let nth = |position: &u32| context(&self.tokens, *position).nth(length);
            let first = found.partition_point(|position| nth(position) < Some(*token));
            let end = found.partition_point(|position| nth(position) <= Some(*token));
            found = found.get(first..end).unwrap_or_default();
            let step = found.len().div_ceil(OCCURRENCES).max(1);
            let followers = found.iter().step_by(step).filter_map(|position| self.tokens.get(*position as usize));
            followers.for_each(|token| counts.add(*token, step as f64));
        }
        for (end, next) in text.iter().enumerate().skip(1) {
            let before = text.get(..end).unwrap_or_default();
            let common = before.iter().rev().zip(text.iter().rev()).take(CONTEXT).take_while(|(a, b)| a == b).count();
            all.iter_mut().take(common).for_each(|counts| counts.add(*next, OWN_WEIGHT));
        }
        let known = all.iter().position(|counts| counts.0.is_empty()).unwrap_or(CONTEXT);
        all.truncate(known);
        all
    }
}

/// The texts in an `.npz` file, without padding; of prompts, only the last tokens.
fn read_arrays(path: &Path) -> Result<Vec<Vec<i64>>> {
    let failed = |e| Error::candle(path.display().to_string(), e);
    let arrays = NpzTensors::new(path).map_err(failed)?;
    let array = |name: &str| {
        let found =
            arrays.get(name).and_then(|array| array.map(|array| Ok((array.dims().to_vec(), transfer::read::<i64>(&array.to_dtype(DType::I64)?)?))).transpose());
        found.map_err(failed)
    };
    let wrong = |reason: String| Error::option("--draft", format!("{} {reason}", path.display()));
    let (shape, ids) = array("input_ids")?.ok_or_else(|| wrong("has no array `input_ids`".into()))?;
    let [_, width] = shape[..] else { return Err(wrong(format!("has `input_ids` of shape {shape:?}, expected [texts, tokens]"))) };
    let [mask, labels] = ["attention_mask", "labels"].map(|name| match array(name)? {
        Some((other, _)) if other != shape => Err(wrong(format!("has `{name}` of shape {other:?}, but `input_ids` of {shape:?}"))),
        found => Ok(found.map(|(_, values)| values)),
    });
    let (mask, labels) = (mask?, labels?);
    let rows = |values: &Option<Vec<i64>>, row: usize| {
        values.as_ref().map(|values| values.iter().skip(row.saturating_mul(width)).take(width).copied().collect::<Vec<i64>>())
    };
    let text = |(row, ids): (usize, &[i64])| {
        let predicted = rows(&labels, row).and_then(|labels| labels.iter().position(|label| *label != IGNORED));
        let mask = rows(&mask, row).unwrap_or_default();
        let is_text = |at: &usize| mask.get(*at).is_none_or(|mask| *mask != 0);
        let tokens = ids.iter().enumerate().skip(predicted.unwrap_or(0).saturating_sub(CONTEXT)).filter(|(at, _)| is_text(at));
        tokens.map(|(_, token)| *token).collect()
    };
    Ok(ids.chunks_exact(width.max(1)).enumerate().map(text).collect())
}

fn is_token(tokens: &[u32], at: u32) -> bool {
    tokens.get(at as usize).is_some_and(|token| *token != END)
}

/// The tokens before a position of the same text, the last one first.
fn context(tokens: &[u32], position: u32) -> impl Iterator<Item = u32> + '_ {
    tokens.get(..position as usize).unwrap_or_default().iter().rev().copied().take_while(|token| *token != END).take(CONTEXT)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::Sampling;
    use super::*;

    /// Texts with many repetitions.
    fn texts(count: usize, length: usize, seed: u64) -> Vec<Vec<i64>> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..count).map(|_| (0..random.usize(0..=length)).map(|_| random.i64(0..4)).collect()).collect()
    }

    fn ngrams(texts: &[Vec<i64>]) -> Ngrams {
        Ngrams::new(texts.iter().map(Vec::as_slice)).unwrap()
    }

    /// All occurrences of each context are counted, within texts only, and those in the text itself more
    /// often.
    #[test]
    fn counts_match_the_definition() {
        let collection = texts(12, 9, 1);
        let found = ngrams(&collection);
        for text in texts(60, 12, 2) {
            let text: Vec<u32> = text.iter().map(|token| *token as u32).collect();
            let counts = found.counts(&text);
            for length in 1..=CONTEXT.min(text.len()) {
                let end = &text[text.len() - length..];
                let mut expected = [0.0; 4];
                for (weight, text) in collection.iter().map(|text| (1.0, text.iter().map(|token| *token as u32).collect())).chain([(OWN_WEIGHT, text.clone())])
                {
                    text.windows(length + 1).filter(|window| window[..length] == *end).for_each(|window| expected[window[length] as usize] += weight);
                }
                let found = counts.get(length - 1).cloned().unwrap_or_default();
                assert_eq!([0, 1, 2, 3].map(|token| found.of(token)), expected, "{text:?} {length}");
            }
        }
        assert!(ngrams(&[]).counts(&[1, 2]).is_empty() && found.counts(&[]).is_empty());
    }

    /// A regular sample of the occurrences represents frequent contexts.
    #[test]
    fn frequent_contexts_are_counted_in_part() {
        let text: Vec<i64> = (0..4 * OCCURRENCES as i64).flat_map(|at| [7, if at % 4 == 0 { 2 } else { 1 }]).collect();
        let counts = ngrams(&[text]).counts(&[7]);
        let [of_one, of_two] = [1, 2].map(|token| counts[0].of(token));
        assert_eq!(of_one + of_two, 4.0 * OCCURRENCES as f64);
        assert!((of_two / (of_one + of_two) - 0.25).abs() < 0.05, "{of_one} {of_two}");
    }

    #[test]
    fn the_longest_context_predicts_the_next_token() {
        let found = ngrams(&[vec![1, 2, 3], vec![1, 2, 3], vec![9, 2, 4], vec![6, 5], vec![6, 8]]);
        let next = |text: &[i64]| found.likely(text).first().copied();
        assert_eq!(next(&[1, 2]).unwrap().0, 3);
        assert_eq!(next(&[9, 2]).unwrap().0, 4);
        // Unknown tokens, and tokens at the ends of texts.
        assert_eq!((next(&[7]), next(&[3]), next(&[])), (None, None, None));
        // Equally frequent tokens; the text itself counts more.
        assert_eq!((next(&[6]).unwrap().0, next(&[6, 8, 6]).unwrap().0), (5, 8));
        // A context that occurred once makes its token more likely, but not certain.
        assert!((0.3..0.9).contains(&next(&[9, 2]).unwrap().1));
        assert!(next(&[0, 2]).unwrap().1 < next(&[1, 2]).unwrap().1);
    }

    /// Suggestions do not change the selected token, whether it is the most likely one or drawn.
    #[test]
    fn suggestions_are_accepted_if_the_model_selects_them() {
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        let suggestions = [3, 0].map(Sampler::suggest);
        let indexed: Vec<_> = [4, 9].into_iter().zip(&suggestions).collect();
        for sampling in [None, Some(Sampling::default())] {
            let [mut alone, mut verifying] = [0; 2].map(|_| Sampler::new(sampling, 0));
            for _ in 0..200 {
                let token = alone.next(&logits).unwrap();
                let index = match token {
                    3 => Some(4),
                    0 => Some(9),
                    _ => None,
                };
                assert_eq!(verifying.verify(&logits, &indexed).unwrap(), (token, index));
            }
        }
    }

    /// The most likely tokens are proposed first, after each other or as alternatives.
    #[test]
    fn the_tokens_that_are_most_likely_to_be_accepted_are_proposed() {
        let text = |end: [i64; 3]| [vec![5], end.to_vec()].concat();
        let found = ngrams(&[text([1, 2, 9]), text([1, 2, 9]), text([1, 3, 9]), text([4, 6, 7]), text([4, 6, 7])].map(|text| vec![text; 20]).concat());
        let propose = |limit, has_branches, ends: &[i64]| found.propose(&[8, 5], limit, has_branches, &ends.iter().copied().collect());
        let chain = propose(3, false, &[]);
        assert_eq!((chain.tokens().collect::<Vec<_>>(), chain.are_branches()), (vec![1, 2, 9], false));
        let tree = propose(4, true, &[]);
        let paths: BTreeSet<Vec<i64>> = (0..tree.len()).map(|index| tree.path(Some(index))).collect();
        assert_eq!(paths, [vec![1], vec![4], vec![4, 6], vec![4, 6, 7]].into());
        assert_eq!(propose(4, false, &[1]).tokens().collect::<Vec<_>>(), [1]);
        assert!(propose(4, true, &[1]).tokens().all(|token| token != 2));
        assert_eq!((propose(0, true, &[]).len(), found.propose(&[], 4, true, &BTreeSet::new()).len()), (0, 0));
    }

    /// Padding and the beginnings of prompts are not included.
    #[test]
    fn arrays_contain_texts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts.npz");
        let array = |name: &'static str, values: &[[i64; 12]; 2]| (name, Tensor::new(values, &Device::Cpu).unwrap());
        let ids = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [21, 22, 23, 0, 0, 0, 0, 0, 0, 0, 0, 0]];
        let mask = [[1; 12], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]];
        let mut labels = [[IGNORED; 12]; 2];
        labels[0][10..].copy_from_slice(&[11, 12]);
        labels[1][1..3].copy_from_slice(&[22, 23]);
        let read = |arrays: &[(&str, Tensor)]| {
            Tensor::write_npz(arrays, &path).unwrap();
            read_arrays(&path).map_err(|e| e.to_string())
        };
        let all = [array("input_ids", &ids), array("attention_mask", &mask), array("labels", &labels)];
        assert_eq!(read(&all).unwrap(), [(3..=12).collect::<Vec<_>>(), vec![21, 22, 23]]);
        assert_eq!(read(&all[..1]).unwrap()[1].len(), 12);
        assert!(read(&all[1..]).unwrap_err().contains("has no array `input_ids`"));
        let short = ("labels", Tensor::zeros((2, 5), DType::I64, &Device::Cpu).unwrap());
        assert!(read(&[all[0].clone(), short]).unwrap_err().contains("has `labels` of shape [2, 5]"));
        assert!(Ngrams::new([&[3, -1][..]]).unwrap_err().to_string().contains("contains -1, which is not the id"));
    }
}
