//! One text on its way, token by token.

use std::collections::BTreeSet;
use std::time::Instant;

use candle_core::{Device, Tensor};

use super::opening::Opening;
use super::sampling::Sampler;
use super::{Continuation, End, Generate, LanguageModel, Reads};
use crate::data::DECODED;
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Answers, Executor, Inputs, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::work::{Event, Work};

/// The input of spectrograms.
pub(super) const FEATURES: &str = "input_features";
/// Tokens of a prompt that are run together at most.
pub(super) const PIECE: usize = 512;

/// What a text is made of.
pub(super) struct Beginning {
    /// The tokens that are continued.
    pub tokens: Vec<i64>,
    /// What the encoder reads.
    pub inputs: Inputs,
}

/// A text as the model takes it, without padding.
pub(super) fn texts(name: &str, tokens: Vec<i64>) -> Result<Inputs> {
    let count = tokens.len();
    let row = |values: Vec<i64>| Tensor::from_vec(values, (1, count), &Device::Cpu).map_err(computed);
    Ok([("attention_mask".to_owned(), row(vec![1; count])?), (name.to_owned(), row(tokens)?)].into())
}

/// One prompt on its way.
pub(super) struct Run<'r, 'g> {
    pub model: &'r LanguageModel,
    pub executor: &'r Executor<'g>,
    pub cache: &'r mut SequenceCache,
    /// What the encoder reads.
    pub inputs: Inputs,
    pub work: &'r Work<'r>,
}

impl Run<'_, '_> {
    pub fn continuation(mut self, prompt: Vec<i64>, options: &Generate, mut sampler: Sampler) -> Result<Continuation> {
        let start = Instant::now();
        let mut all = prompt;
        if let Some(opening) = &self.model.opening {
            all.extend(opening.tokens(self.language(opening)?));
        }
        let before = all.len();
        let (mut end, mut prefill_seconds) = (End::Tokens, 0.0);
        let mut found = 0usize;
        while found < options.tokens {
            if self.model.positions.is_some_and(|positions| all.len() > positions) {
                end = End::Positions;
                break;
            }
            let mut logits = self.logits(&all)?;
            let [always, first] = &self.model.suppressed;
            let none = BTreeSet::new();
            for token in always.iter().chain(if found == 0 { first } else { &none }) {
                usize::try_from(*token).ok().and_then(|token| logits.get_mut(token)).into_iter().for_each(|logit| *logit = f32::NEG_INFINITY);
            }
            let next = sampler.next(&logits)?;
            all.push(next);
            found = found.saturating_add(1);
            if found == 1 {
                prefill_seconds = start.elapsed().as_secs_f64();
            }
            self.work.progress.on(Event::Advance(1));
            if self.model.ends.contains(&next) {
                end = End::Eos;
                break;
            }
        }
        // What is left of the count is not to come.
        self.work.progress.on(Event::Advance(options.tokens.saturating_sub(found) as u64));
        let decode_seconds = start.elapsed().as_secs_f64() - prefill_seconds;
        Ok(Continuation { tokens: all.split_off(before), end, prefill_seconds, decode_seconds })
    }

    /// The language that is the likeliest, where that is open.
    fn language(&mut self, opening: &Opening) -> Result<Option<i64>> {
        if opening.languages.is_empty() {
            return Ok(None);
        }
        let logits = self.logits(&opening.first)?;
        let logit = |token: &i64| usize::try_from(*token).ok().and_then(|token| logits.get(token)).copied().unwrap_or(f32::NEG_INFINITY);
        // Of equal ones the first, as everywhere.
        let mut languages = opening.languages.clone();
        languages.sort_unstable();
        Ok(languages.into_iter().rev().max_by(|a, b| logit(a).total_cmp(&logit(b))))
    }

    /// What may come behind all tokens so far, of which the model may have seen some.
    fn logits(&mut self, all: &[i64]) -> Result<Vec<f32>> {
        let graph = &self.model.graph;
        if !SequenceCache::is_stable(graph, self.cache.tokens(), all.len()) {
            self.cache.clear();
        }
        loop {
            self.work.cancel.check()?;
            let seen = self.cache.tokens();
            let piece = seen.saturating_add(PIECE).min(all.len());
            // Where the beginning would be another in the whole, the whole is run at once.
            let piece = if SequenceCache::is_stable(graph, piece, all.len()) { piece } else { all.len() };
            let tokens = all.get(seen..piece).unwrap_or_default().to_vec();
            let mut inputs = texts(if self.model.reads == Reads::Beginnings { "input_ids" } else { DECODED }, tokens)?;
            inputs.extend(self.inputs.clone());
            let outputs = self.executor.run_next(&inputs, self.cache, Answers::Last)?;
            if piece == all.len() {
                let logits = outputs.get(LOGITS).ok_or_else(|| Error::graph(LOGITS, "are not computed"))?;
                let values = values(logits, Cause::Answers).map_err(computed)?;
                let width = logits.dims().last().copied().unwrap_or(0);
                return if values.len() == width { Ok(values) } else { Err(Error::graph(LOGITS, "are not those of the last token alone")) };
            }
        }
    }
}

fn computed(e: candle_core::Error) -> Error {
    Error::computed("generation", e)
}
