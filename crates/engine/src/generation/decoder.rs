//! Logits of a model with a KV cache.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};

use super::proposals::Proposals;
use super::{InputKind, LanguageModel};
use crate::arch::draft_head::HIDDEN_STATES;
use crate::data::DECODER_INPUT_IDS;
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Executor, Inputs, OutputTokens, Parameters, Residence, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::work::Work;

/// The input of spectrograms.
pub(super) const FEATURES: &str = "input_features";
/// Maximum number of prompt tokens per forward pass.
pub(super) const CHUNK_TOKENS: usize = 512;

/// A model that is loaded on a device, with the KV cache of one text.
pub(super) struct Decoder<'g> {
    model: &'g LanguageModel,
    executor: Executor<'g>,
    cache: SequenceCache,
    supports_branches: bool,
    /// Inputs of the encoder.
    inputs: Inputs,
    /// Hidden states for a draft head that were not taken yet.
    states: Option<States>,
}

/// Hidden states for a draft head, `[1, tokens, width]`.
pub(super) struct States {
    /// Position of the first token.
    pub first: usize,
    pub rows: Tensor,
}

impl<'g> Decoder<'g> {
    /// Loads a model. Up to `removable` tokens can be removed from its KV cache, in addition to those of
    /// the last forward pass.
    pub fn load(model: &'g LanguageModel, removable: usize, device: &Device, work: &Work) -> Result<Decoder<'g>> {
        let parameters = Parameters::load(&model.graph, &model.model.weights, device, DType::F32, Residence::most_compact(device, DType::F32), work)?;
        Decoder::with_parameters(model, parameters, removable, device)
    }

    /// As [`load`](Decoder::load), with other parameters than those of the model.
    pub fn with_parameters(model: &'g LanguageModel, parameters: Parameters, removable: usize, device: &Device) -> Result<Decoder<'g>> {
        let executor = Executor::new(&model.graph, parameters, device.clone());
        let cache = SequenceCache::with_removable(&model.graph, removable)?;
        Ok(Decoder { model, executor, supports_branches: cache.supports_branches(&model.graph), cache, inputs: Inputs::new(), states: None })
    }

    /// The model.
    pub fn model(&self) -> &'g LanguageModel {
        self.model
    }

    /// Starts a text with these inputs of the encoder.
    pub fn start(&mut self, inputs: Inputs) {
        self.cache.clear();
        self.states = None;
        self.inputs = inputs;
    }

    /// Number of tokens in the KV cache.
    pub fn cached(&self) -> usize {
        self.cache.tokens()
    }

    /// The largest number of tokens up to `limit` that can follow the first `length` in the same forward
    /// pass. It is smaller if the angles of a rotary embedding change between these lengths.
    pub fn stable_extension(&self, length: usize, limit: usize) -> usize {
        let is_stable = |added: &usize| SequenceCache::is_stable(&self.model.graph, length, length.saturating_add(*added));
        (0..=limit).rev().find(is_stable).unwrap_or(0)
    }

    /// Removes all tokens after the first `tokens` from the KV cache.
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        if let Some(states) = &mut self.states {
            let count = states.rows.dim(1).map_err(computed)?.min(tokens.saturating_sub(states.first));
            states.rows = states.rows.narrow(1, 0, count).map_err(computed)?;
        }
        self.cache.truncate(&self.model.graph, tokens)
    }

    /// Whether proposals can continue the text in several ways.
    pub fn supports_branches(&self) -> bool {
        self.supports_branches
    }

    /// Of the last `count` tokens in the KV cache, which were proposals, retains those with these indices, in
    /// ascending order.
    pub fn retain(&mut self, count: usize, indices: &[usize]) -> Result<()> {
        if indices.iter().enumerate().all(|(at, index)| at == *index) {
            return self.truncate(self.cached().saturating_sub(count).saturating_add(indices.len()));
        }
        if let Some(states) = &mut self.states {
            // They are those of the text from a position on, and of all proposals.
            let before = states.rows.dim(1).map_err(computed)?.saturating_sub(count);
            let kept = (0..before).chain(indices.iter().map(|index| before.saturating_add(*index)));
            let kept: Vec<u32> = kept.filter_map(|row| u32::try_from(row).ok()).collect();
            let kept = Tensor::new(kept, states.rows.device()).map_err(computed)?;
            states.rows = states.rows.index_select(&kept, 1).map_err(computed)?;
        }
        self.cache.retain(count, indices)
    }

    /// The hidden states of the tokens since the last call, for a draft head.
    pub fn take_states(&mut self) -> Option<States> {
        self.states.take()
    }

    /// Adds hidden states of tokens from the position `first` on.
    fn add_states(&mut self, first: usize, rows: &Tensor) -> Result<()> {
        let before = self.states.take().filter(|states| first > states.first);
        self.states = Some(match before {
            Some(before) => States { first: before.first, rows: Tensor::cat(&[&before.rows, rows], 1).map_err(computed)? },
            None => States { first, rows: rows.clone() },
        });
        Ok(())
    }

    /// Logits of the next token after `all` tokens.
    pub fn next_logits(&mut self, all: &[i64], work: &Work) -> Result<Vec<f32>> {
        self.logits((all, &Proposals::default()), work)?.pop().ok_or_else(|| Error::graph(LOGITS, "are not computed"))
    }

    /// Logits of the next token after a text, and after each of the proposals for its continuation. Tokens
    /// that are already in the KV cache are not recomputed; the last token of the text and the proposals must
    /// not be in it.
    pub fn logits(&mut self, (text, proposals): (&[i64], &Proposals), work: &Work) -> Result<Vec<Vec<f32>>> {
        let all: Vec<i64> = text.iter().copied().chain(proposals.tokens()).collect();
        let (values, width) = self.run(&[&all], proposals.len().saturating_add(1), Some(proposals).filter(|proposals| proposals.are_branches()), work)?;
        Ok(values.chunks(width).map(<[f32]>::to_vec).collect())
    }

    /// Logits of the next token after each of the last `rows` positions in several texts of the same length.
    /// Returns the logits text by text, and their number for a token.
    pub fn batch_logits(&mut self, texts: &[&[i64]], rows: usize, work: &Work) -> Result<(Vec<f32>, usize)> {
        self.run(texts, rows, None, work)
    }

    /// As [`batch_logits`](Decoder::batch_logits). With branches, the text ends with these proposals.
    fn run(&mut self, texts: &[&[i64]], rows: usize, branches: Option<&Proposals>, work: &Work) -> Result<(Vec<f32>, usize)> {
        let graph = &self.model.graph;
        let length = texts.first().map_or(0, |text| text.len());
        if !SequenceCache::is_stable(graph, self.cache.tokens(), length) {
            self.cache.clear();
        }
        loop {
            work.cancel.check()?;
            let cached = self.cache.tokens();
            let end = cached.saturating_add(CHUNK_TOKENS).min(length);
            // If cached values would change with the length, all tokens are computed at once. The last
            // forward pass computes all requested rows.
            let is_last = !SequenceCache::is_stable(graph, end, length) || length.saturating_sub(end) < rows;
            let end = if is_last { length } else { end };
            let tokens: Vec<&[i64]> = texts.iter().map(|text| text.get(cached..end).unwrap_or_default()).collect();
            let mut inputs = token_inputs(if self.model.input_kind == InputKind::Prompt { "input_ids" } else { DECODER_INPUT_IDS }, &tokens)?;
            inputs.extend(self.inputs.clone());
            // A draft head reads the hidden states of all tokens.
            let has_states = graph.outputs().iter().any(|(name, _)| name == HIDDEN_STATES);
            let output_tokens = if has_states { OutputTokens::All } else { OutputTokens::Last(rows) };
            let mut outputs = match branches.filter(|_| end == length) {
                Some(proposals) => self.executor.run_branches(&inputs, &mut self.cache, output_tokens, &proposals.parents_after(end.saturating_sub(cached)))?,
                None => self.executor.run_next(&inputs, &mut self.cache, output_tokens)?,
            };
            if let Some(states) = outputs.get(HIDDEN_STATES) {
                self.add_states(cached, states)?;
                if let Some(logits) = outputs.get_mut(LOGITS) {
                    let count = logits.dim(1).map_err(computed)?;
                    *logits = logits.narrow(1, count.saturating_sub(rows), rows.min(count)).and_then(|rows| rows.contiguous()).map_err(computed)?;
                }
            }
            if end == length {
                let logits = outputs.get(LOGITS).ok_or_else(|| Error::graph(LOGITS, "are not computed"))?;
                let values = values(logits, Cause::Answers).map_err(computed)?;
                let width = logits.dims().last().copied().unwrap_or(0).max(1);
                return if values.len() == width.saturating_mul(rows).saturating_mul(texts.len()) {
                    Ok((values, width))
                } else {
                    Err(Error::graph(LOGITS, "must be those of the last tokens only"))
                };
            }
        }
    }
}

impl LanguageModel {
    /// Sets the logits of tokens to -infinity that are not generated at all, or not as the first token.
    pub(super) fn suppress(&self, logits: &mut [f32], is_first: bool) {
        let [always, first] = &self.suppressed;
        let empty = BTreeSet::new();
        for token in always.iter().chain(if is_first { first } else { &empty }) {
            usize::try_from(*token).ok().and_then(|token| logits.get_mut(token)).into_iter().for_each(|logit| *logit = f32::NEG_INFINITY);
        }
    }

    /// Whether a token is not generated at all.
    pub(super) fn is_suppressed(&self, token: usize) -> bool {
        let [always, _] = &self.suppressed;
        i64::try_from(token).is_ok_and(|token| always.contains(&token))
    }

    /// Number of tokens that the logits have.
    pub(super) fn logit_count(&self) -> usize {
        let logits = self.graph.outputs().iter().find(|(name, _)| name == LOGITS);
        logits.and_then(|(_, id)| self.graph.value(*id).ty.shape.last()?.fixed()).unwrap_or(usize::MAX)
    }
}

/// Token ids and attention masks of texts of the same length, without padding.
pub(super) fn token_inputs(name: &str, texts: &[&[i64]]) -> Result<Inputs> {
    let shape = (texts.len(), texts.first().map_or(0, |text| text.len()));
    let tokens = texts.concat();
    let rows = |values: Vec<i64>| Tensor::from_vec(values, shape, &Device::Cpu).map_err(computed);
    Ok([("attention_mask".to_owned(), rows(vec![1; tokens.len()])?), (name.to_owned(), rows(tokens)?)].into())
}

fn computed(e: candle_core::Error) -> Error {
    Error::candle("generation", e)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::generation::sampling::Sampler;
    use crate::model::Model;
    use crate::work::{Cancel, Silent};

    /// A draft head reads the hidden states of the text, whether its tokens were retained from branches or
    /// computed one after another.
    #[test]
    fn hidden_states_after_branches_are_those_of_the_text() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let open = |path: &str| LanguageModel::new(Model::open(golden.join(path)).unwrap()).unwrap();
        let model = open("models/llama").with_draft(open("draft-head"), 4).unwrap();
        let cancel = Cancel::default();
        let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
        let text = [3, 9, 20];
        let states = |branches: &Proposals, retained: &[usize]| {
            let mut decoder = Decoder::load(&model, 4, &Device::Cpu, &work).unwrap();
            decoder.next_logits(&text[..2], &work).unwrap();
            decoder.logits((&text, branches), &work).unwrap();
            decoder.retain(branches.len(), retained).unwrap();
            let states = decoder.take_states().unwrap();
            assert_eq!((states.first, decoder.cached()), (0, text.len() + retained.len()));
            states.rows.squeeze(0).unwrap().to_vec2::<f32>().unwrap().concat()
        };
        let mut branches = Proposals::default();
        let first = branches.push(Sampler::suggest(5), None);
        branches.push(Sampler::suggest(6), None);
        let second = branches.push(Sampler::suggest(7), Some(first));
        branches.push(Sampler::suggest(8), Some(second));
        let chain = Proposals::chain([5, 7, 8].map(Sampler::suggest).into());
        for (retained, count) in [(&[0, 2][..], 2), (&[0, 2, 3], 3), (&[0], 1), (&[1], 0), (&[], 0)] {
            let (found, expected) = (states(&branches, retained), states(&chain, &[0, 1, 2][..count]));
            let rows = (text.len() + count) * (found.len() / (text.len() + retained.len()));
            assert!(found.iter().zip(&expected[..rows]).all(|(found, expected)| (found - expected).abs() < 1e-5), "{retained:?}");
        }
    }
}
