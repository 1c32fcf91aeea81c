//! Generation of one text, token by token.

use std::collections::BTreeSet;
use std::time::Instant;

use candle_core::{Device, Tensor};

use super::decoder_prompt::DecoderPrompt;
use super::sampling::Sampler;
use super::{Continuation, Generate, InputKind, LanguageModel, StopReason};
use crate::data::DECODER_INPUT_IDS;
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Executor, Inputs, OutputTokens, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::work::{Event, Work};

/// The input of spectrograms.
pub(super) const FEATURES: &str = "input_features";
/// Maximum number of prompt tokens per forward pass.
pub(super) const CHUNK_TOKENS: usize = 512;

/// Prompt of one text.
pub(super) struct Prompt {
    /// Tokens to continue.
    pub tokens: Vec<i64>,
    /// Inputs of the encoder.
    pub inputs: Inputs,
}

/// Token ids and attention mask of a text without padding.
pub(super) fn token_inputs(name: &str, tokens: Vec<i64>) -> Result<Inputs> {
    let count = tokens.len();
    let row = |values: Vec<i64>| Tensor::from_vec(values, (1, count), &Device::Cpu).map_err(computed);
    Ok([("attention_mask".to_owned(), row(vec![1; count])?), (name.to_owned(), row(tokens)?)].into())
}

/// Generation from one prompt.
pub(super) struct Run<'r, 'g> {
    pub model: &'r LanguageModel,
    pub executor: &'r Executor<'g>,
    pub cache: &'r mut SequenceCache,
    /// Inputs of the encoder.
    pub inputs: Inputs,
    pub work: &'r Work<'r>,
}

impl Run<'_, '_> {
    pub fn continuation(mut self, prompt: Vec<i64>, options: &Generate, mut sampler: Sampler) -> Result<Continuation> {
        let start = Instant::now();
        let mut all = prompt;
        if let Some(prompt) = &self.model.decoder_prompt {
            all.extend(prompt.tokens(self.language(prompt)?));
        }
        let prompt_length = all.len();
        let (mut end, mut prefill_seconds) = (StopReason::Tokens, 0.0);
        let mut count = 0usize;
        while count < options.tokens {
            if self.model.positions.is_some_and(|positions| all.len() > positions) {
                end = StopReason::Positions;
                break;
            }
            let mut logits = self.logits(&all)?;
            let [always, first] = &self.model.suppressed;
            let empty = BTreeSet::new();
            for token in always.iter().chain(if count == 0 { first } else { &empty }) {
                usize::try_from(*token).ok().and_then(|token| logits.get_mut(token)).into_iter().for_each(|logit| *logit = f32::NEG_INFINITY);
            }
            let next = sampler.next(&logits)?;
            all.push(next);
            count = count.saturating_add(1);
            if count == 1 {
                prefill_seconds = start.elapsed().as_secs_f64();
            }
            self.work.progress.on(Event::Advance(1));
            if self.model.ends.contains(&next) {
                end = StopReason::Eos;
                break;
            }
        }
        // Completes the progress after an early end.
        self.work.progress.on(Event::Advance(options.tokens.saturating_sub(count) as u64));
        let decode_seconds = start.elapsed().as_secs_f64() - prefill_seconds;
        Ok(Continuation { tokens: all.split_off(prompt_length), end, prefill_seconds, decode_seconds })
    }

    /// Detects the most likely language, if the prompt does not specify one.
    fn language(&mut self, prompt: &DecoderPrompt) -> Result<Option<i64>> {
        if prompt.languages.is_empty() {
            return Ok(None);
        }
        let logits = self.logits(&prompt.first)?;
        let logit = |token: &i64| usize::try_from(*token).ok().and_then(|token| logits.get(token)).copied().unwrap_or(f32::NEG_INFINITY);
        // Of equal logits, the first token is selected, as in sampling.
        let mut languages = prompt.languages.clone();
        languages.sort_unstable();
        Ok(languages.into_iter().rev().max_by(|a, b| logit(a).total_cmp(&logit(b))))
    }

    /// Logits of the next token. Tokens that are already in the KV cache are not recomputed.
    fn logits(&mut self, all: &[i64]) -> Result<Vec<f32>> {
        let graph = &self.model.graph;
        if !SequenceCache::is_stable(graph, self.cache.tokens(), all.len()) {
            self.cache.clear();
        }
        loop {
            self.work.cancel.check()?;
            let cached = self.cache.tokens();
            let end = cached.saturating_add(CHUNK_TOKENS).min(all.len());
            // If cached values would change with the length, all tokens are computed at once.
            let end = if SequenceCache::is_stable(graph, end, all.len()) { end } else { all.len() };
            let tokens = all.get(cached..end).unwrap_or_default().to_vec();
            let mut inputs = token_inputs(if self.model.input_kind == InputKind::Prompt { "input_ids" } else { DECODER_INPUT_IDS }, tokens)?;
            inputs.extend(self.inputs.clone());
            let outputs = self.executor.run_next(&inputs, self.cache, OutputTokens::Last)?;
            if end == all.len() {
                let logits = outputs.get(LOGITS).ok_or_else(|| Error::graph(LOGITS, "are not computed"))?;
                let values = values(logits, Cause::Answers).map_err(computed)?;
                let width = logits.dims().last().copied().unwrap_or(0);
                return if values.len() == width { Ok(values) } else { Err(Error::graph(LOGITS, "must be those of the last token only")) };
            }
        }
    }
}

fn computed(e: candle_core::Error) -> Error {
    Error::candle("generation", e)
}
