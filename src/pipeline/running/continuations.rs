//! Short continuations before and after, of decoders that a run has measured on texts.

use std::ops::ControlFlow;

use candle_core::DType;

use super::evaluate::Run;
use crate::error::{Error, Result};
use crate::evaluation::Continued;
use crate::exec::{Residence, transfer};
use crate::generation::{Generate, LanguageModel, Reads, first_difference};
use crate::model::Model;

/// Texts that are continued.
const PROMPTS: usize = 3;
/// Tokens of a text that are given.
const GIVEN: usize = 16;
/// Tokens that come behind them.
const TOKENS: usize = 16;
/// Bytes of parameters that are read in a second at least: every token reads all of them.
const BYTES_PER_SECOND: u64 = 8_000_000_000;
/// Memory of the parameters of a model at most, where the run has no limit of its own.
const MOST_BYTES: u64 = 300_000_000;
/// Of the time of the run so far, so much may be spent, and in any case some milliseconds.
const PART: u32 = 10;
const LEAST_SECONDS: f64 = 0.2;

impl Run<'_> {
    /// The first texts that no pass has used, continued by both models; nothing where that is not possible, takes long or takes much memory, and a note
    /// where it fails.
    ///
    /// # Errors
    /// The work is cancelled.
    pub(super) fn continuations(&self) -> Result<(Vec<Continued>, Option<String>)> {
        let bytes = self.before.weights.parameters().saturating_mul(4 * 2 * (PROMPTS * (TOKENS + 2)) as u64);
        let seconds = bytes as f64 / BYTES_PER_SECOND as f64;
        let resident = |model: &Model| model.weights.by_name.values().map(|weight| Residence::Stored.bytes(weight, DType::F32)).sum::<u64>();
        if resident(self.before).max(resident(self.after)) > self.pipeline.running.memory.map_or(MOST_BYTES, |memory| memory.0) {
            return Ok((Vec::new(), None));
        }
        if !self.writes_safetensors() || seconds > (self.start.elapsed() / PART).as_secs_f64().max(LEAST_SECONDS) {
            return Ok((Vec::new(), None));
        }
        // What is no decoder, or has no text, has no continuations.
        let Ok(before) = LanguageModel::of(self.before.clone()) else { return Ok((Vec::new(), None)) };
        if before.vocabulary().is_err() || before.reads() != Reads::Beginnings {
            return Ok((Vec::new(), None));
        }
        match self.continued(&before) {
            Ok(found) => Ok((found, None)),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(e) => Ok((Vec::new(), Some(format!("texts were not continued: {e}")))),
        }
    }

    fn continued(&self, before: &LanguageModel) -> Result<Vec<Continued>> {
        let mut prompts: Vec<Vec<i64>> = Vec::new();
        self.held_out(&mut |sample| {
            let tokens = sample.inputs.get("input_ids").map(transfer::read::<i64>).transpose().map_err(|e| Error::computed("a text", e))?;
            prompts.extend(tokens.filter(|tokens| tokens.len() > GIVEN).map(|tokens| tokens[..GIVEN].to_vec()));
            Ok(if prompts.len() < PROMPTS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let vocabulary = before.vocabulary()?;
        // Tokenizer and settings are the input's; they are not in the new folder yet.
        let after = LanguageModel::of(Model { path: self.before.path.clone(), ..self.written()? })?;
        let (device, memory) = (self.pipeline.running.device()?, self.pipeline.running.memory()?);
        let (options, work) = (Generate { tokens: TOKENS, sampling: None }, self.work.quiet());
        let generate = |model: &LanguageModel| model.generate(&prompts, &options, &device, memory, &work);
        let (ours, theirs) = (generate(before)?, generate(&after)?);
        let shown = |(prompt, (ours, theirs)): (&Vec<i64>, (&crate::generation::Continuation, &crate::generation::Continuation))| {
            Ok(Continued {
                prompt: vocabulary.decode(prompt)?,
                before: vocabulary.continuation(prompt, &ours.tokens)?,
                after: vocabulary.continuation(prompt, &theirs.tokens)?,
                first_difference: first_difference(&ours.tokens, &theirs.tokens),
            })
        };
        prompts.iter().zip(ours.iter().zip(&theirs)).map(shown).collect()
    }
}
