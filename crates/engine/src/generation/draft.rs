//! Speculative decoding: a smaller model or a collection of texts proposes tokens, and the model verifies
//! them in one forward pass (Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*,
//! 2023).

use std::sync::Arc;

use candle_core::Device;
use serde::Serialize;

use super::decoder::{Decoder, FEATURES};
use super::draft_head::{Head, HeadDecoder};
use super::proposals::Proposals;
use super::sampling::{Proposal, Sampler};
use super::{Continuation, Draft, InputKind, LanguageModel, Ngrams, Source};
use crate::error::{Error, Result};
use crate::exec::Inputs;
use crate::work::Work;

/// How many of the proposed tokens were accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Speculation {
    /// Number of steps: forward passes of the model after the first generated token.
    pub steps: usize,
    /// Number of tokens generated in these steps: accepted proposals, and the model's own choices.
    pub tokens: usize,
    /// Number of proposals by their position in a step.
    pub proposed: Vec<usize>,
    /// Number of accepted proposals by their position in a step.
    pub accepted: Vec<usize>,
}

impl Speculation {
    /// The sum over several continuations.
    pub fn of_all(continuations: &[Continuation]) -> Speculation {
        let mut all = Speculation::default();
        for found in continuations.iter().filter_map(|found| found.speculation.as_ref()) {
            all.steps = all.steps.saturating_add(found.steps);
            all.tokens = all.tokens.saturating_add(found.tokens);
            add(&mut all.proposed, found.proposed.iter().copied());
            add(&mut all.accepted, found.accepted.iter().copied());
        }
        all
    }

    /// Mean number of tokens per step: accepted proposals and, unless one of them ends the text, one token
    /// of the model itself. 1 without accepted proposals; `None` without a step.
    pub fn tokens_per_step(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.tokens as f64 / self.steps as f64)
    }

    /// Share of the proposals that were accepted. Those after a rejected one count as rejected.
    pub fn acceptance_rate(&self) -> Option<f64> {
        let sum = |counts: &[usize]| counts.iter().sum::<usize>();
        (sum(&self.proposed) > 0).then(|| sum(&self.accepted) as f64 / sum(&self.proposed) as f64)
    }

    /// The acceptance rate by the position of a proposal in its step.
    pub fn acceptance_by_position(&self) -> Vec<f64> {
        self.accepted.iter().zip(&self.proposed).map(|(accepted, proposed)| *accepted as f64 / *proposed as f64).collect()
    }

    /// Records a step that generated `tokens` tokens, with the number of proposals by their position.
    pub(super) fn record(&mut self, tokens: usize, proposed: &[usize], accepted: usize) {
        self.steps = self.steps.saturating_add(1);
        self.tokens = self.tokens.saturating_add(tokens);
        add(&mut self.proposed, proposed.iter().copied());
        add(&mut self.accepted, (0..proposed.len()).map(|position| usize::from(position < accepted)));
    }
}

/// Adds counts by position.
fn add(sums: &mut Vec<usize>, counts: impl ExactSizeIterator<Item = usize>) {
    sums.resize(sums.len().max(counts.len()), 0);
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(count));
}

impl LanguageModel {
    /// Decodes speculatively: `draft`, a smaller model with the same token ids
    /// ([`Vocabulary::require_draft`]), or a head of the model proposes up to `tokens` tokens per step.
    /// Greedy texts equal those without a draft, except between tokens whose logits differ by less than the
    /// rounding of a forward pass; samples have the same distribution. Texts with tokens that the draft lacks
    /// are continued without proposals. A head keeps n-grams of an earlier call. Fails if the draft does not
    /// take the same kind of input, or is a model after n-grams.
    ///
    /// [`Vocabulary::require_draft`]: super::Vocabulary::require_draft
    pub fn with_draft(mut self, draft: LanguageModel, tokens: usize) -> Result<LanguageModel> {
        require_proposals(tokens)?;
        if draft.input_kind == InputKind::HiddenStates {
            return self.with_head(draft, tokens);
        }
        if self.draft.as_ref().is_some_and(|draft| draft.ngrams().is_some()) {
            return Err(refuse_ngrams());
        }
        let features = |model: &LanguageModel| model.graph.inputs().find(|(_, value)| value.name == FEATURES).map(|(_, value)| value.ty.to_string());
        let refuse = |input: &dyn Fn(&LanguageModel) -> String| {
            let (name, other) = (self.model.config.model_type(), draft.model.config.model_type());
            Err(Error::option("--draft", format!("a model of type `{other}` takes {}, but one of type `{name}` takes {}", input(&draft), input(&self))))
        };
        if self.input_kind != draft.input_kind {
            return refuse(&|model| model.input_kind.plural().to_owned());
        }
        if features(&self) != features(&draft) {
            return refuse(&|model| features(model).unwrap_or_default());
        }
        if let Some(positions) = draft.positions.filter(|positions| self.positions.is_none_or(|own| *positions < own)) {
            self.notes.push(format!("the draft supports at most {positions} tokens (`max_position_embeddings`): longer texts are continued without proposals"));
        }
        self.draft = Some(Draft { source: Source::Model(Box::new(draft)), tokens });
        Ok(self)
    }

    /// Decodes speculatively without a network: proposes up to `tokens` tokens per step, which followed an
    /// earlier occurrence of the end of the text, in the text or in the collection, unless the model would
    /// probably reject them. Models whose layers support it verify several continuations at once. Greedy
    /// texts are as with [`with_draft`](LanguageModel::with_draft); samples are those without a draft, with
    /// the same exception.
    ///
    /// If the draft is a head, its probabilities are interpolated with these frequencies, `tokens` replaces
    /// its number, and samples only have the same distribution.
    ///
    /// # Errors
    /// `tokens` is 0, the collection contains ids that the model lacks, or the draft is a model.
    pub fn with_ngrams(mut self, ngrams: Arc<Ngrams>, tokens: usize) -> Result<LanguageModel> {
        require_proposals(tokens)?;
        let count = self.logit_count();
        if let Some(token) = ngrams.largest().filter(|token| usize::try_from(*token).map_or(true, |token| token >= count)) {
            return Err(Error::option(
                "--draft",
                format!("the texts contain the token {token}, but the model has {count} tokens: they are those of another model"),
            ));
        }
        let source = match self.draft.take().map(|draft| draft.source) {
            Some(Source::Model(_)) => return Err(refuse_ngrams()),
            Some(Source::Head(head)) => Source::Head(Box::new(Head { ngrams: Some(ngrams), ..*head })),
            Some(Source::Ngrams(_)) | None => Source::Ngrams(ngrams),
        };
        self.draft = Some(Draft { source, tokens });
        Ok(self)
    }
}

fn refuse_ngrams() -> Error {
    Error::option("--draft", "is a model, whose proposals cannot be combined with those of n-grams, but those of an EAGLE-3 head can")
}

fn require_proposals(tokens: usize) -> Result<()> {
    if tokens == 0 { Err(Error::option("--draft-tokens", "is 0, but must be at least 1")) } else { Ok(()) }
}

/// A loaded draft.
pub(super) struct Drafter<'g> {
    kind: Kind<'g>,
    tokens: usize,
}

enum Kind<'g> {
    Model(DraftDecoder<'g>),
    Head(HeadDecoder<'g>),
    Ngrams(&'g Ngrams),
}

/// A loaded draft model.
struct DraftDecoder<'g>(Decoder<'g>);

impl<'g> Drafter<'g> {
    pub fn load(draft: &'g Draft, device: &Device, work: &Work) -> Result<Drafter<'g>> {
        let kind = match &draft.source {
            Source::Model(model) => Kind::Model(DraftDecoder(Decoder::load(model, draft.tokens, device, work)?)),
            Source::Head(head) => Kind::Head(HeadDecoder::load(head, draft.tokens, device, work)?),
            Source::Ngrams(ngrams) => Kind::Ngrams(ngrams),
        };
        Ok(Drafter { kind, tokens: draft.tokens })
    }

    /// Maximum number of proposals per step.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Starts a text with these inputs of the encoder.
    pub fn start(&mut self, inputs: Inputs) {
        match &mut self.kind {
            Kind::Model(draft) => draft.0.start(inputs),
            Kind::Head(head) => head.clear(),
            Kind::Ngrams(_) => {}
        }
    }

    /// Adds a prompt to the KV cache, so that the first step does not have to. A head needs the hidden states
    /// of the model, which reads the prompt afterwards.
    pub fn read(&mut self, prompt: &[i64], work: &Work) -> Result<()> {
        match &mut self.kind {
            Kind::Model(draft) if draft.limit(prompt, 1) > 0 => draft.0.next_logits(prompt, work).map(drop),
            _ => Ok(()),
        }
    }

    /// Removes all tokens after the first `tokens` from the KV cache. That of a head has no other tokens.
    pub fn truncate(&mut self, tokens: usize) -> Result<()> {
        match &mut self.kind {
            Kind::Model(draft) => draft.0.truncate(tokens),
            Kind::Head(_) | Kind::Ngrams(_) => Ok(()),
        }
    }

    /// Proposes up to `limit` tokens that follow `all` tokens in a text of the model. A token that ends the
    /// text is the last one of a continuation.
    pub fn propose(&mut self, (all, limit): (&[i64], usize), decoder: &mut Decoder, sampler: &mut Sampler, work: &Work) -> Result<Proposals> {
        let model = decoder.model();
        match &mut self.kind {
            Kind::Model(draft) => draft.propose(all, limit, model, sampler, work).map(Proposals::chain),
            Kind::Head(head) => head.propose((all, limit), (decoder.take_states(), decoder.supports_branches()), model, sampler, work),
            Kind::Ngrams(ngrams) => Ok(ngrams.propose(all, limit, decoder.supports_branches(), &model.ends)),
        }
    }
}

impl DraftDecoder<'_> {
    /// The number of tokens up to `limit` that it can propose after `all` tokens.
    fn limit(&self, all: &[i64], limit: usize) -> usize {
        let model = self.0.model();
        let vocabulary = model.logit_count();
        let is_known = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < vocabulary);
        if !all.get(self.0.cached()..).unwrap_or_default().iter().all(is_known) {
            return 0;
        }
        // The last proposal is not read.
        let room = model.positions.map_or(usize::MAX, |positions| positions.saturating_add(1).saturating_sub(all.len()));
        match limit.min(room) {
            0 => 0,
            limit => self.0.stable_extension(all.len(), limit.saturating_sub(1)).saturating_add(1),
        }
    }

    /// See [`Drafter::propose`].
    fn propose(&mut self, all: &[i64], limit: usize, model: &LanguageModel, sampler: &mut Sampler, work: &Work) -> Result<Vec<Proposal>> {
        let limit = self.limit(all, limit);
        let (mut text, mut proposals) = (all.to_vec(), Vec::with_capacity(limit));
        while proposals.len() < limit {
            let mut logits = self.0.next_logits(&text, work)?;
            logits.truncate(model.logit_count());
            model.suppress(&mut logits, false);
            let proposal = sampler.propose(&logits)?;
            let token = proposal.token;
            text.push(token);
            proposals.push(proposal);
            if model.ends.contains(&token) {
                break;
            }
        }
        Ok(proposals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_all_steps() {
        let mut one = Speculation::default();
        assert_eq!((one.tokens_per_step(), one.acceptance_rate()), (None, None));
        // Three proposals, of which two are accepted; none are; a step at the end without proposals.
        let steps: [(usize, &[usize], usize); 3] = [(3, &[1, 1, 1], 2), (1, &[1, 1, 1], 0), (1, &[], 0)];
        steps.into_iter().for_each(|(tokens, proposed, accepted)| one.record(tokens, proposed, accepted));
        assert_eq!((one.tokens_per_step(), one.acceptance_rate()), (Some(5.0 / 3.0), Some(2.0 / 6.0)));
        assert_eq!(one.acceptance_by_position(), [0.5, 0.5, 0.0]);
        let mut other = Speculation::default();
        other.record(2, &[1], 1);
        let found = |speculation: Option<Speculation>| Continuation {
            tokens: Vec::new(),
            end: super::super::StopReason::Tokens,
            prefill_seconds: 0.0,
            decode_seconds: 0.0,
            speculation,
        };
        let all = Speculation::of_all(&[found(Some(one)), found(None), found(Some(other))]);
        assert_eq!((all.steps, all.tokens, all.proposed.as_slice(), all.accepted.as_slice()), (4, 7, [3, 2, 2].as_slice(), [2, 1, 0].as_slice()));
    }
}
