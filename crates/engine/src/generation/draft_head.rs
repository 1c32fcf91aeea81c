//! EAGLE-3 heads as drafts: small networks that read hidden states of the model (Li et al., *EAGLE-3: Scaling
//! up Inference Acceleration of Large Language Models via Training-Time Test*, 2025).

use candle_core::{DType, Device, Tensor};

use super::decoder::{CHUNK_TOKENS, States, token_inputs};
use super::sampling::{Proposal, Sampler};
use super::{Draft, InputKind, LanguageModel, Source};
use crate::analysis;
use crate::arch::Settings;
use crate::arch::draft_head::{HIDDEN_STATES, PREFIX, Requirements, step_graph, with_fused_states};
use crate::error::{Error, Result};
use crate::exec::transfer::{Cause, values};
use crate::exec::{Executor, OutputTokens, Parameters, Residence, SequenceCache};
use crate::ir::decoder::LOGITS;
use crate::store::DType as StoredType;
use crate::work::Work;

/// Output of a head: its hidden states.
const OWN_STATES: &str = "last_hidden_state";

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
        self.draft = Some(Draft { source: Source::Head(Box::new(head), ids), tokens });
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
    head: &'g LanguageModel,
    executor: Executor<'g>,
    cache: SequenceCache,
    /// The model's ids of the head's tokens.
    ids: &'g [usize],
    /// Hidden states of the model that were not read yet; the first one is that of the token at the end of
    /// the cache.
    pending: Option<Tensor>,
}

impl<'g> HeadDecoder<'g> {
    pub fn load(head: &'g LanguageModel, ids: &'g [usize], tokens: usize, device: &Device, work: &Work) -> Result<HeadDecoder<'g>> {
        let parameters = Parameters::load(&head.graph, &head.model.weights, device, DType::F32, Residence::most_compact(device, DType::F32), work)?;
        let cache = SequenceCache::with_removable(&head.graph, tokens)?;
        Ok(HeadDecoder { head, executor: Executor::new(&head.graph, parameters, device.clone()), cache, ids, pending: None })
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
    /// `states`. A token that ends the text is the last one.
    pub fn propose(
        &mut self,
        (all, limit): (&[i64], usize),
        states: Option<States>,
        model: &LanguageModel,
        sampler: &mut Sampler,
        work: &Work,
    ) -> Result<Vec<Proposal>> {
        states.map_or(Ok(()), |states| self.add(states))?;
        let mut proposals = Vec::with_capacity(limit);
        let Some(pending) = self.pending.clone().filter(|_| limit > 0) else { return Ok(proposals) };
        // The hidden state of a token is read with the token after it.
        let tokens = all.get(self.cache.tokens().saturating_add(1)..).unwrap_or_default();
        if pending.dim(1).map_err(failed)? != tokens.len() {
            return Err(Error::graph(HIDDEN_STATES, "are not those of all tokens but the last"));
        }
        let mut step = self.read(tokens, &pending, work)?;
        self.pending = None;
        let known = self.cache.tokens();
        while let Some((logits, state)) = step.take() {
            let mut spread = vec![f32::NEG_INFINITY; model.logit_count()];
            for (id, logit) in self.ids.iter().zip(logits) {
                spread.get_mut(*id).into_iter().for_each(|place| *place = logit);
            }
            model.suppress(&mut spread, false);
            let proposal = sampler.propose(&spread)?;
            let token = proposal.token;
            proposals.push(proposal);
            if proposals.len() < limit && !model.ends.contains(&token) {
                step = self.read(&[token], &state, work)?;
            }
        }
        // The hidden states of proposals are replaced by those of the model.
        self.cache.truncate(&self.head.graph, known)?;
        Ok(proposals)
    }

    /// Reads tokens with the hidden states before them; returns the logits and the hidden state of the last
    /// one.
    fn read(&mut self, tokens: &[i64], states: &Tensor, work: &Work) -> Result<Option<(Vec<f32>, Tensor)>> {
        let (mut last, mut at) = (None, 0usize);
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            work.cancel.check()?;
            let mut inputs = token_inputs("input_ids", &[chunk])?;
            inputs.insert(HIDDEN_STATES.to_owned(), states.narrow(1, at, chunk.len()).and_then(|rows| rows.contiguous()).map_err(failed)?);
            let mut outputs = self.executor.run_next(&inputs, &mut self.cache, OutputTokens::Last(1))?;
            let mut output = |name: &str| outputs.remove(name).ok_or_else(|| Error::graph(name, "are not computed"));
            last = Some((output(LOGITS)?, output(OWN_STATES)?));
            at = at.saturating_add(chunk.len());
        }
        let Some((logits, state)) = last else { return Ok(None) };
        let row = |tensor: &Tensor| tensor.narrow(1, tensor.dim(1)?.saturating_sub(1), 1)?.contiguous();
        let logits = row(&logits).and_then(|row| values(&row, Cause::Answers)).map_err(failed)?;
        Ok(Some((logits, row(&state).map_err(failed)?)))
    }
}

fn failed(e: candle_core::Error) -> Error {
    Error::candle("the draft head", e)
}
