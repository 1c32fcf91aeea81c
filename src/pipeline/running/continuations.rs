//! Short continuations of held-out texts by the input and the output model, for decoders.

use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::DType;

use super::evaluate::Run;
use crate::error::{Error, Result};
use crate::evaluation::Continuation;
use crate::exec::{Residence, transfer};
use crate::generation::{Generate, InputKind, LanguageModel, first_difference};
use crate::model::Model;

/// Number of texts to continue.
const PROMPTS: usize = 3;
/// Number of prompt tokens.
const PROMPT_TOKENS: usize = 16;
/// Number of generated tokens.
const TOKENS: usize = 16;
/// Conservative memory bandwidth, for estimating the time: each token reads all parameters.
const BYTES_PER_SECOND: u64 = 8_000_000_000;
/// Maximum size of the parameters of a model if the run has no memory limit.
const MAX_BYTES: u64 = 300_000_000;
/// Continuations may take this fraction (1/10) of the duration of the run, or the minimum below.
const TIME_DIVISOR: u32 = 10;
const MIN_SECONDS: f64 = 0.2;

impl Run<'_> {
    /// Continuations of the first held-out texts by both models. Empty if the models cannot generate
    /// text, or if it would take too much time or memory; a note if it fails.
    ///
    /// # Errors
    /// The work is cancelled.
    pub(super) fn continuations(&self) -> Result<(Vec<Continuation>, Option<String>)> {
        let bytes = self.before.weights.parameters().saturating_mul(4 * 2 * (PROMPTS * (TOKENS + 2)) as u64);
        let seconds = bytes as f64 / BYTES_PER_SECOND as f64;
        let resident = |model: &Model| model.weights.by_name.values().map(|weight| Residence::Stored.bytes(weight, DType::F32)).sum::<u64>();
        if resident(self.before).max(resident(self.after)) > self.pipeline.running.memory.map_or(MAX_BYTES, |memory| memory.0) {
            return Ok((Vec::new(), None));
        }
        if !self.writes_safetensors() || seconds > (self.start.elapsed() / TIME_DIVISOR).as_secs_f64().max(MIN_SECONDS) {
            return Ok((Vec::new(), None));
        }
        // Fails for models that are not decoders.
        let Ok(before) = LanguageModel::new(self.before.clone()) else { return Ok((Vec::new(), None)) };
        if before.vocabulary().is_err() || before.input_kind() != InputKind::Prompt {
            return Ok((Vec::new(), None));
        }
        match self.generate(&before) {
            Ok(continuations) => Ok((continuations, None)),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(e) => Ok((Vec::new(), Some(format!("continuations were not generated: {e}")))),
        }
    }

    fn generate(&self, before: &LanguageModel) -> Result<Vec<Continuation>> {
        let mut prompts: Vec<Vec<i64>> = Vec::new();
        self.held_out(&mut |sample| {
            let tokens = sample.inputs.get("input_ids").map(transfer::read::<i64>).transpose().map_err(|e| Error::candle("a text", e))?;
            prompts.extend(tokens.filter(|tokens| tokens.len() > PROMPT_TOKENS).map(|tokens| tokens[..PROMPT_TOKENS].to_vec()));
            Ok(if prompts.len() < PROMPTS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        if prompts.is_empty() {
            return Ok(Vec::new());
        }
        let vocabulary = before.vocabulary()?;
        // The tokenizer and the generation settings are read from the input's folder, because they are
        // not in the output folder yet. `graph.json` is.
        let written = self.written()?;
        let changed_graph = Some(Arc::new(written.graph()?));
        let after = LanguageModel::new(Model { path: self.before.path.clone(), auxiliary: self.before.auxiliary.clone(), changed_graph, ..written })?;
        let (device, memory) = (self.pipeline.running.device()?, self.pipeline.running.memory()?);
        let (options, work) = (Generate { tokens: TOKENS, sampling: None }, self.work.quiet());
        let generate = |model: &LanguageModel| model.generate(&prompts, &options, &device, memory, &work);
        let (input_texts, output_texts) = (generate(before)?, generate(&after)?);
        let continuation = |(prompt, (input, output)): (&Vec<i64>, (&crate::generation::Continuation, &crate::generation::Continuation))| {
            let texts = [vocabulary.continuation(prompt, &input.tokens)?, vocabulary.continuation(prompt, &output.tokens)?];
            Ok(Continuation::new(vocabulary.decode(prompt)?, texts, first_difference(&input.tokens, &output.tokens)))
        };
        prompts.iter().zip(input_texts.iter().zip(&output_texts)).map(continuation).collect()
    }
}
