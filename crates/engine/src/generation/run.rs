//! Generation of one text, token by token, or by several tokens with a draft.

use std::time::Instant;

use super::decoder::Decoder;
use super::decoder_prompt::DecoderPrompt;
use super::draft::{Drafter, Speculation};
use super::proposals::Proposals;
use super::sampling::Sampler;
use super::{Continuation, Generate, StopReason};
use crate::error::Result;
use crate::exec::Inputs;
use crate::work::{Event, Work};

/// Prompt of one text.
pub(super) struct Prompt {
    /// Tokens to continue.
    pub tokens: Vec<i64>,
    /// Inputs of the encoder.
    pub inputs: Inputs,
}

/// Generation from one prompt.
pub(super) struct Run<'r, 'g> {
    pub decoder: &'r mut Decoder<'g>,
    pub draft: Option<&'r mut Drafter<'g>>,
    pub work: &'r Work<'r>,
}

/// Result of a forward pass of the model.
struct Step {
    /// Number of accepted proposals.
    accepted: usize,
    /// Whether the last token ends the text.
    is_end: bool,
}

impl Run<'_, '_> {
    pub fn continuation(mut self, prompt: Vec<i64>, options: &Generate, mut sampler: Sampler) -> Result<Continuation> {
        let start = Instant::now();
        let model = self.decoder.model();
        let mut all = prompt;
        if let Some(prompt) = &model.decoder_prompt {
            all.extend(prompt.tokens(self.language(prompt)?));
        }
        let prompt_length = all.len();
        let (mut end, mut prefill_seconds) = (StopReason::Tokens, 0.0);
        let mut speculation = self.draft.is_some().then(Speculation::default);
        let mut count = 0usize;
        while count < options.tokens {
            if model.positions.is_some_and(|positions| all.len() > positions) {
                end = StopReason::Positions;
                break;
            }
            let proposals = self.proposals(&all, options.tokens.saturating_sub(count), count == 0, &mut sampler)?;
            let step = self.step(&mut all, &proposals, count == 0, &mut sampler)?;
            let added = all.len().saturating_sub(prompt_length).saturating_sub(count);
            match &mut speculation {
                Some(speculation) if count > 0 => speculation.record(added, &proposals.by_position(), step.accepted),
                _ => {}
            }
            if count == 0 {
                prefill_seconds = start.elapsed().as_secs_f64();
            }
            count = count.saturating_add(added);
            self.work.progress.on(Event::Advance(added as u64));
            if step.is_end {
                end = StopReason::Eos;
                break;
            }
        }
        // Completes the progress after an early end.
        self.work.progress.on(Event::Advance(options.tokens.saturating_sub(count) as u64));
        let decode_seconds = start.elapsed().as_secs_f64() - prefill_seconds;
        Ok(Continuation { tokens: all.split_off(prompt_length), end, prefill_seconds, decode_seconds, speculation })
    }

    /// Proposals of the draft for the next tokens, of which at most `remaining` are generated. None for the
    /// first token: the draft reads the prompt.
    fn proposals(&mut self, all: &[i64], remaining: usize, is_first: bool, sampler: &mut Sampler) -> Result<Proposals> {
        let model = self.decoder.model();
        let Some(draft) = &mut self.draft else { return Ok(Proposals::default()) };
        if is_first {
            return draft.read(all, self.work).map(|()| Proposals::default());
        }
        // The model adds a token to the accepted ones.
        let room = model.positions.map_or(usize::MAX, |positions| positions.saturating_sub(all.len()));
        let limit = self.decoder.stable_extension(all.len(), draft.tokens().min(remaining.saturating_sub(1)).min(room));
        draft.propose((all, limit), self.decoder, sampler, self.work)
    }

    /// Verifies proposals in one forward pass: appends the accepted ones and the model's own next token.
    fn step(&mut self, all: &mut Vec<i64>, proposals: &Proposals, is_first: bool, sampler: &mut Sampler) -> Result<Step> {
        let model = self.decoder.model();
        let mut rows = self.decoder.logits((all, proposals), self.work)?;
        let (mut accepted, mut is_end) = (Vec::<usize>::new(), false);
        // The first row is that of the text.
        while let Some(logits) = rows.get_mut(accepted.last().map_or(0, |index| index.saturating_add(1))) {
            model.suppress(logits, is_first);
            let (token, found) = sampler.verify(logits, &proposals.after(accepted.last().copied()))?;
            all.push(token);
            accepted.extend(found);
            is_end = model.ends.contains(&token);
            if is_end || found.is_none() {
                break;
            }
        }
        // The last token was not read yet, unless it is a proposal that ends the text. Rejected proposals are
        // removed.
        let read = all.len().saturating_sub(1);
        self.decoder.retain(proposals.len(), &accepted)?;
        self.draft.as_mut().map_or(Ok(()), |draft| draft.truncate(read))?;
        Ok(Step { accepted: accepted.len(), is_end })
    }

    /// Detects the most likely language, if the prompt does not specify one.
    fn language(&mut self, prompt: &DecoderPrompt) -> Result<Option<i64>> {
        if prompt.languages.is_empty() {
            return Ok(None);
        }
        let logits = self.decoder.next_logits(&prompt.first, self.work)?;
        let logit = |token: &i64| usize::try_from(*token).ok().and_then(|token| logits.get(token)).copied().unwrap_or(f32::NEG_INFINITY);
        // Of equal logits, the first token is selected, as in sampling.
        let mut languages = prompt.languages.clone();
        languages.sort_unstable();
        Ok(languages.into_iter().rev().max_by(|a, b| logit(a).total_cmp(&logit(b))))
    }
}
