//! Speculative decoding with a draft, compared with decoding without one.

use std::sync::Arc;

use candle_core::Device;

use crate::error::Result;
use crate::generation::{Continuation, Generate, LanguageModel, Speculation, Speed};
use crate::model::Model;
use crate::pipeline::running::draft::options::DraftTest;
use crate::pipeline::running::evaluate::Run;
use crate::report::draft::{DraftQuality, DraftRun};
use crate::work::{MemoryLimit, Work};

impl DraftTest {
    /// Decodes greedily with each number of draft tokens, and without a draft. `open` opens the model with a
    /// draft that proposes up to this many tokens per step, or without one. Returns notes on texts that
    /// differ from those without a draft.
    ///
    /// # Errors
    /// The model cannot be opened, or decoding fails.
    pub fn measure(
        &self,
        open: impl Fn(Option<usize>) -> Result<LanguageModel>,
        (device, memory): (&Device, MemoryLimit),
        work: &Work,
    ) -> Result<(DraftQuality, Vec<String>)> {
        let generate = |draft_tokens: Option<usize>| -> Result<Vec<Continuation>> {
            open(draft_tokens)?.generate(&self.prompts, &Generate { tokens: self.tokens, sampling: None }, device, memory, work)
        };
        let expected = generate(None)?;
        let mut quality = DraftQuality {
            prompts: self.prompts.len(),
            prompts_from: self.prompts_from.clone(),
            tokens: self.tokens,
            tokens_per_second: Speed::new(&self.prompts, &expected).decode,
            ..DraftQuality::default()
        };
        for draft_tokens in &self.draft_tokens {
            let found = generate(Some(*draft_tokens))?;
            let speculation = Speculation::of_all(&found);
            quality.runs.push(DraftRun {
                draft_tokens: *draft_tokens,
                tokens_per_step: speculation.tokens_per_step(),
                acceptance_rate: speculation.acceptance_rate(),
                acceptance_by_position: speculation.acceptance_by_position(),
                tokens_per_second: Speed::new(&self.prompts, &found).decode,
                same_texts: found.iter().zip(&expected).filter(|(found, expected)| found.tokens == expected.tokens).count(),
            });
        }
        let speeds = quality.runs.iter().filter_map(|run| Some((run.tokens_per_second?, run.draft_tokens)));
        quality.recommended = speeds.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, draft_tokens)| draft_tokens);
        let notes = quality.runs.iter().filter(|run| run.same_texts < quality.prompts).map(|run| {
            format!(
                "with {} draft tokens, {} of {} greedy texts are those without a draft: the others have tokens whose logits differ by less than the rounding of a forward pass",
                run.draft_tokens, run.same_texts, quality.prompts
            )
        });
        let notes = notes.collect();
        Ok((quality, notes))
    }
}

impl Run<'_> {
    /// Measures the written output as a draft, if requested.
    pub(in crate::pipeline::running) fn draft(&self, notes: &mut Vec<String>) -> Result<Option<DraftQuality>> {
        let Some(test) = &self.pipeline.running.draft_test else { return Ok(None) };
        let written = self.written()?;
        let graph = Arc::new(written.graph()?);
        // The files of the input are complete, those of the output are not yet.
        let written = Model { path: self.before.path.clone(), auxiliary: self.before.auxiliary.clone(), changed_graph: Some(graph), ..written };
        let open = |draft_tokens: Option<usize>| {
            let model = LanguageModel::new(self.before.clone())?;
            match draft_tokens {
                Some(tokens) => model.with_draft(LanguageModel::new(written.clone())?, tokens),
                None => Ok(model),
            }
        };
        let (device, memory) = (self.pipeline.running.device()?, self.pipeline.running.memory()?);
        let (quality, found) = test.measure(open, (&device, memory), &self.work)?;
        notes.extend(found);
        Ok(Some(quality))
    }
}
