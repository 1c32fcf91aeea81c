//! Speculative decoding with the output of a run as the draft of its input.

use std::sync::Arc;

use candle_core::Device;

use crate::error::Result;
use crate::generation::{Continuation, Generate, LanguageModel, Speculation, Speed};
use crate::model::Model;
use crate::pipeline::running::draft::options::DraftTest;
use crate::pipeline::running::evaluate::Run;
use crate::report::draft::{DraftQuality, DraftRun};
use crate::work::MemoryLimit;

impl Run<'_> {
    /// Measures the written output as a draft, if requested, and adds a note if texts differ from those
    /// without it.
    pub(in crate::pipeline::running) fn draft(&self, notes: &mut Vec<String>) -> Result<Option<DraftQuality>> {
        let Some(test) = &self.pipeline.running.draft_test else { return Ok(None) };
        let written = self.written()?;
        let graph = Arc::new(written.graph()?);
        // The files of the input are complete, those of the output are not yet.
        let written = Model { path: self.before.path.clone(), auxiliary: self.before.auxiliary.clone(), changed_graph: Some(graph), ..written };
        let (device, memory) = (self.pipeline.running.device()?, self.pipeline.running.memory()?);
        let generate = |model: &LanguageModel| self.generate_greedily(model, test, (&device, memory));
        let expected = generate(&LanguageModel::new(self.before.clone())?)?;
        let mut quality = DraftQuality {
            prompts: test.prompts.len(),
            prompts_from: test.prompts_from.clone(),
            tokens: test.tokens,
            tokens_per_second: Speed::new(&test.prompts, &expected).decode,
            ..DraftQuality::default()
        };
        for draft_tokens in &test.draft_tokens {
            let model = LanguageModel::new(self.before.clone())?.with_draft(LanguageModel::new(written.clone())?, *draft_tokens)?;
            let found = generate(&model)?;
            let speculation = Speculation::of_all(&found);
            quality.runs.push(DraftRun {
                draft_tokens: *draft_tokens,
                tokens_per_step: speculation.tokens_per_step(),
                acceptance_rate: speculation.acceptance_rate(),
                acceptance_by_position: speculation.acceptance_by_position(),
                tokens_per_second: Speed::new(&test.prompts, &found).decode,
                same_texts: found.iter().zip(&expected).filter(|(found, expected)| found.tokens == expected.tokens).count(),
            });
        }
        let speeds = quality.runs.iter().filter_map(|run| Some((run.tokens_per_second?, run.draft_tokens)));
        quality.recommended = speeds.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, draft_tokens)| draft_tokens);
        notes.extend(quality.runs.iter().filter(|run| run.same_texts < quality.prompts).map(|run| {
            format!(
                "with {} draft tokens, {} of {} greedy texts are those without a draft: the others have tokens whose logits differ by less than the rounding of a forward pass",
                run.draft_tokens, run.same_texts, quality.prompts
            )
        }));
        Ok(Some(quality))
    }

    fn generate_greedily(&self, model: &LanguageModel, test: &DraftTest, (device, memory): (&Device, MemoryLimit)) -> Result<Vec<Continuation>> {
        model.generate(&test.prompts, &Generate { tokens: test.tokens, sampling: None }, device, memory, &self.work)
    }
}
