//! EAGLE-3 heads as drafts: small networks that read hidden states of the model (Li et al., *EAGLE-3: Scaling
//! up Inference Acceleration of Large Language Models via Training-Time Test*, 2025).

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::decoder::{CHUNK_TOKENS, States, token_inputs};
use super::proposals::{LEAST_PROBABILITY, Proposals};
use super::sampling::{DRAFT, Sampler, require_finite};
use super::{Draft, InputKind, LanguageModel, Ngrams, Source};
use crate::analysis;
use crate::arch::Settings;
use crate::arch::draft_head::{HIDDEN_STATES, PREFIX, Requirements, step_graph, with_fused_states};
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Executor, Inputs, OutputTokens, Parameters, Residence, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::store::DType as StoredType;
use crate::work::Work;

/// Minimum sum of the probabilities of tokens that are accepted and that the head has to read to propose
/// tokens after them. With less, they yield less than reading them costs.
const LEAST_READ: f64 = 0.35;
/// Output of a head: its hidden states.
const OWN_STATES: &str = "last_hidden_state";

/// A head of a model.
pub(super) struct Head {
    pub network: LanguageModel,
    /// The model's ids of the head's tokens.
    pub ids: Vec<usize>,
    /// Texts whose frequencies are interpolated with its probabilities.
    pub ngrams: Option<Arc<Ngrams>>,
}

impl LanguageModel {
    /// Decodes with a head that proposes up to `tokens` tokens per step. The fusion of the hidden states that
    /// it reads becomes part of the model's graph.
    pub(super) fn with_head(mut self, mut head: LanguageModel, tokens: usize) -> Result<LanguageModel> {
        let config = head.model.config.clone();
        let settings = Settings::new(config.values());
        let needs = Requirements::new(&settings)?;
        let refuse = |reason: String| Error::option("--draft", format!("{} {reason}", head.model.path.display()));
        if self.input_kind != InputKind::Prompt {
            return Err(refuse(format!("is a head of a model that takes prompts, but this one takes {}", self.input_kind.plural())));
        }
        if self.logit_count() != needs.vocabulary {
            return Err(refuse(format!("belongs to a model with {} tokens, but this one has {}", needs.vocabulary, self.logit_count())));
        }
        let layers = analysis::layers(&self.graph).ok_or_else(|| refuse("needs hidden states of layers, but the model has no repeated layers".to_owned()))?;
        let states = needs.layers.iter().map(|layer| layers.state(*layer).cloned()).collect::<Option<Vec<String>>>();
        let states = states.ok_or_else(|| refuse(format!("reads layers {:?}, but the model has {}", needs.layers, layers.layers.len())))?;
        let width = |name: &String| self.graph.values().iter().find(|value| value.name == *name).and_then(|value| value.ty.shape.last()?.fixed());
        if let Some(width) = states.iter().map(width).find(|width| *width != Some(needs.width)) {
            return Err(refuse(format!("reads hidden states of width {}, but those of the model have {}", needs.width, width.unwrap_or(0))));
        }
        let ids = head.token_ids(&needs)?;
        self.graph = with_fused_states(&settings, self.graph, &states)?;
        for (_, value) in self.graph.params() {
            if let Some(own) = value.name.strip_prefix(PREFIX) {
                self.model.weights.by_name.insert(value.name.clone(), head.model.weights.get(own)?.clone());
            }
        }
        head.graph = step_graph(&settings)?;
        let ngrams = self.draft.as_ref().and_then(|draft| draft.ngrams().cloned());
        self.draft = Some(Draft { source: Source::Head(Box::new(Head { network: head, ids, ngrams })), tokens });
        Ok(self)
    }

    /// The model's ids of the tokens in the vocabulary of a head, from its offsets `d2t`.
    fn token_ids(&self, needs: &Requirements) -> Result<Vec<usize>> {
        const NAME: &str = "d2t";
        let broken = |reason: String| Error::tensor(NAME, reason, "download or train the head again");
        let Some(weight) = self.model.weights.by_name.get(NAME) else {
            return if needs.draft_vocabulary == needs.vocabulary {
                Ok((0..needs.vocabulary).collect())
            } else {
                Err(broken("is missing, although the head has fewer tokens than the model".to_owned()))
            };
        };
        if weight.dtype != StoredType::I64 || weight.shape != [needs.draft_vocabulary] {
            return Err(broken(format!("is {} of shape {:?}, expected I64 of shape [{}]", weight.dtype, weight.shape, needs.draft_vocabulary)));
        }
        let mut bytes = Vec::new();
        weight.visit(1, &mut |block| {
            bytes.extend_from_slice(block.now.values);
            Ok(())
        })?;
        let id = |(own, offset): (usize, &[u8; 8])| usize::try_from(i64::try_from(own).ok()?.checked_add(i64::from_le_bytes(*offset))?).ok();
        let ids = bytes.as_chunks::<8>().0.iter().enumerate().map(id).collect::<Option<Vec<usize>>>();
        let ids = ids.filter(|ids| ids.len() == needs.draft_vocabulary && ids.iter().all(|id| *id < needs.vocabulary));
        ids.ok_or_else(|| broken(format!("has a token outside of the model's vocabulary of {}", needs.vocabulary)))
    }
}

/// A loaded head, with the KV cache of one text.
pub(super) struct HeadDecoder<'g> {
    head: &'g Head,
    executor: Executor<'g>,
    cache: SequenceCache,
    /// Hidden states of the model that were not read yet; the first one is that of the token at the end of
    /// the cache.
    pending: Option<Tensor>,
    supports_branches: bool,
}

/// A token that may be proposed.
struct Candidate {
    token: i64,
    /// The candidate before it; `None` after the text.
    parent: Option<usize>,
    /// Probability that it and those before it are accepted, according to the head.
    probability: f64,
    /// The hidden state of the head, once it has read the token.
    state: Option<Tensor>,
}

impl<'g> HeadDecoder<'g> {
    pub fn load(head: &'g Head, tokens: usize, device: &Device, work: &Work) -> Result<HeadDecoder<'g>> {
        let (graph, weights) = (&head.network.graph, &head.network.model.weights);
        let parameters = Parameters::load(graph, weights, device, DType::F32, Residence::most_compact(device, DType::F32), work)?;
        let cache = SequenceCache::with_removable(graph, tokens)?;
        let supports_branches = cache.supports_branches(graph);
        Ok(HeadDecoder { head, executor: Executor::new(graph, parameters, device.clone()), cache, pending: None, supports_branches })
    }

    /// Starts a text.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.pending = None;
    }

    /// Adds hidden states of the model.
    fn add(&mut self, states: States) -> Result<()> {
        // The model has processed the text again.
        if states.first == 0 {
            self.clear();
        }
        let rows = self.pending.take().map_or_else(|| Ok(states.rows.clone()), |pending| Tensor::cat(&[&pending, &states.rows], 1)).map_err(failed)?;
        self.pending = Some(rows);
        Ok(())
    }

    /// Proposes up to `limit` tokens that follow `all` tokens in a text of `model`, which has computed
    /// `states`: in one continuation, or with branches in several. A token that ends the text is the last one
    /// of a continuation.
    pub fn propose(
        &mut self,
        (all, limit): (&[i64], usize),
        (states, has_branches): (Option<States>, bool),
        model: &LanguageModel,
        sampler: &mut Sampler,
        work: &Work,
    ) -> Result<Proposals> {
        states.map_or(Ok(()), |states| self.add(states))?;
        let mut proposals = Proposals::default();
        let Some(pending) = self.pending.clone().filter(|_| limit > 0) else { return Ok(proposals) };
        // The hidden state of a token is read with the token after it.
        let tokens = all.get(self.cache.tokens().saturating_add(1)..).unwrap_or_default();
        if pending.dim(1).map_err(failed)? != tokens.len() {
            return Err(Error::graph(HIDDEN_STATES, "are not those of all tokens but the last"));
        }
        let mut step = self.read(tokens, &pending, work)?;
        self.pending = None;
        let known = self.cache.tokens();
        if let Some((logits, state)) = step.take_if(|_| has_branches && self.supports_branches && sampler.is_greedy()) {
            proposals = self.branches((all, limit), (&logits, &state), model, work)?;
        }
        let mut text = all.to_vec();
        while let Some((logits, state)) = step.take() {
            let probabilities = self.probabilities(&logits, &text, model)?;
            let proposal = sampler.propose(&probabilities.iter().map(|probability| probability.ln() as f32).collect::<Vec<_>>())?;
            let token = proposal.token;
            proposals.push(proposal, proposals.len().checked_sub(1));
            text.push(token);
            if proposals.len() < limit && !model.ends.contains(&token) {
                step = self.read(&[token], &state, work)?;
            }
        }
        // The hidden states of proposals are replaced by those of the model.
        self.cache.truncate(&self.head.network.graph, known)?;
        Ok(proposals)
    }

    /// Proposes up to `limit` tokens after the text `all` that are the most likely to be accepted, in several
    /// continuations (Li et al., *EAGLE-2*, 2024), from the logits and the hidden state after the text.
    fn branches(&mut self, (all, limit): (&[i64], usize), (logits, state): (&[f32], &Tensor), model: &LanguageModel, work: &Work) -> Result<Proposals> {
        let known = self.cache.tokens();
        let mut found = self.likely(logits, (all, &[]), None, model)?;
        loop {
            // A token is at most as likely as the one before it, which has a smaller index.
            let mut best: Vec<(usize, &Candidate)> = found.iter().enumerate().collect();
            best.sort_by(|(_, a), (_, b)| b.probability.total_cmp(&a.probability));
            best.truncate(limit);
            let least = best.get(limit.saturating_sub(1)).map_or(LEAST_PROBABILITY, |(_, least)| least.probability);
            best.sort_unstable_by_key(|(index, _)| *index);
            let is_unread = |(_, one): &&(usize, &Candidate)| one.state.is_none() && one.probability > least && !model.ends.contains(&one.token);
            let is_complete = best.iter().filter(is_unread).map(|(_, one)| one.probability).sum::<f64>() < LEAST_READ;
            if !is_complete {
                // Candidates that were read are read again, because the KV cache has no branches: a few
                // tokens take little more time than one.
                best.retain(|one| one.1.state.is_some() || is_unread(&one));
            }
            let mut proposals = Proposals::default();
            for (_, one) in &best {
                let parent = one.parent.and_then(|parent| best.iter().position(|(other, _)| *other == parent));
                proposals.push(Sampler::suggest(one.token), parent);
            }
            if is_complete {
                return Ok(proposals);
            }
            let before = |one: &Candidate| one.parent.and_then(|parent| found.get(parent)?.state.as_ref()).unwrap_or(state);
            let states = best.iter().map(|(_, one)| before(one)).collect::<Vec<_>>();
            let inputs = inputs(&proposals.tokens().collect::<Vec<_>>(), Tensor::cat(&states, 1))?;
            work.cancel.check()?;
            let outputs = self.executor.run_branches(&inputs, &mut self.cache, OutputTokens::All, &proposals.parents_after(proposals.len()))?;
            self.cache.truncate(&self.head.network.graph, known)?;
            let read: Vec<usize> = best.iter().map(|(index, _)| *index).collect();
            for (row, index) in read.iter().enumerate() {
                let Some(one) = found.get_mut(*index).filter(|one| one.state.is_none()) else { continue };
                let (logits, state) = row_of(&outputs, read.len().saturating_sub(row).saturating_sub(1))?;
                one.state = Some(state);
                let probability = one.probability;
                found.extend(self.likely(&logits, (all, &proposals.path(Some(row))), Some((*index, probability)), model)?);
            }
        }
    }

    /// The tokens that are likely enough to be proposed after a text and a path of candidates, of which the
    /// last one has this index and probability.
    fn likely(&self, logits: &[f32], (all, path): (&[i64], &[i64]), last: Option<(usize, f64)>, model: &LanguageModel) -> Result<Vec<Candidate>> {
        let probabilities = self.probabilities(logits, &[all, path].concat(), model)?;
        let max = probabilities.iter().copied().fold(0.0, f64::max);
        // The head has read the text anyway, so that its best token is proposed.
        let (parent, before, least) = last.map_or((None, 1.0, LEAST_PROBABILITY.min(max)), |(index, before)| (Some(index), before, LEAST_PROBABILITY));
        let candidate = |(token, probability): (i64, &f64)| Candidate { token, parent, probability: before * probability, state: None };
        Ok((0..).zip(&probabilities).map(candidate).filter(|one| one.probability > 0.0 && one.probability >= least).collect())
    }

    /// The probabilities of the model's tokens after a text, from the logits of the head.
    fn probabilities(&self, logits: &[f32], text: &[i64], model: &LanguageModel) -> Result<Vec<f64>> {
        require_finite(logits, DRAFT)?;
        let logits: Vec<(usize, f32)> = self.head.ids.iter().copied().zip(logits.iter().copied()).filter(|(id, _)| !model.is_suppressed(*id)).collect();
        let mut frequencies = self.head.ngrams.as_ref().map(|ngrams| ngrams.likely(text)).unwrap_or_default();
        frequencies.retain(|(id, _)| !model.is_suppressed(*id as usize));
        Ok(interpolated(&logits, &frequencies, model.logit_count()))
    }

    /// Reads tokens with the hidden states before them; returns the logits and the hidden state of the last
    /// one.
    fn read(&mut self, tokens: &[i64], states: &Tensor, work: &Work) -> Result<Option<(Vec<f32>, Tensor)>> {
        let (mut last, mut at) = (None, 0usize);
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            work.cancel.check()?;
            let inputs = inputs(chunk, states.narrow(1, at, chunk.len()))?;
            let outputs = self.executor.run_next(&inputs, &mut self.cache, OutputTokens::Last(1))?;
            at = at.saturating_add(chunk.len());
            last = Some(row_of(&outputs, 0)?);
        }
        Ok(last)
    }
}

/// The probabilities of `count` tokens: the given ones, and those of the logits for the rest.
fn interpolated(logits: &[(usize, f32)], given: &[(u32, f64)], count: usize) -> Vec<f64> {
    let max = logits.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    let mut probabilities = vec![0.0; count];
    for (id, logit) in logits {
        probabilities.get_mut(*id).into_iter().for_each(|place| *place = f64::from(logit - max).exp());
    }
    // The rest can be less than the rounding of the sum.
    let rest = (1.0 - given.iter().map(|(_, probability)| probability).sum::<f64>()).max(0.0);
    let total: f64 = probabilities.iter().sum();
    let scale = if total > 0.0 { rest / total } else { 0.0 };
    probabilities.iter_mut().for_each(|probability| *probability *= scale);
    for (id, more) in given {
        probabilities.get_mut(*id as usize).into_iter().for_each(|probability| *probability += more);
    }
    probabilities
}

/// The inputs of a head: tokens, and the hidden states before them.
fn inputs(tokens: &[i64], states: candle_core::Result<Tensor>) -> Result<Inputs> {
    let mut inputs = token_inputs("input_ids", &[tokens])?;
    inputs.insert(HIDDEN_STATES.to_owned(), states.and_then(|states| states.contiguous()).map_err(failed)?);
    Ok(inputs)
}

/// The logits and the hidden state of the token with `after` tokens after it.
fn row_of(outputs: &BTreeMap<String, Tensor>, after: usize) -> Result<(Vec<f32>, Tensor)> {
    let output = |name: &str| outputs.get(name).ok_or_else(|| Error::graph(name, "are not computed"));
    let row = |tensor: &Tensor| tensor.narrow(1, tensor.dim(1)?.saturating_sub(after.saturating_add(1)), 1)?.contiguous();
    let logits = row(output(LOGITS)?).and_then(|row| values(&row, Cause::Answers)).map_err(failed)?;
    Ok((logits, row(output(OWN_STATES)?).map_err(failed)?))
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("the draft head", e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_never_negative() {
        let logits = [(1, 0.0f32), (3, 3f32.ln())];
        for (given, expected) in [(&[][..], [0.0, 0.25, 0.0, 0.75]), (&[(1, 0.25), (2, 0.25)][..], [0.0, 0.375, 0.25, 0.375])] {
            let found = interpolated(&logits, given, 4);
            assert!(found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-6), "{found:?}");
        }
        // The sum of many rounded frequencies can be larger than 1.
        assert_eq!(interpolated(&logits, &[(2, 0.5), (0, 0.5 + 1e-15)], 4)[1..], [0.0, 0.5, 0.0]);
        // The model generates no token of the head.
        assert_eq!(interpolated(&[], &[(2, 0.5)], 4), [0.0, 0.0, 0.5, 0.0]);
    }
}
