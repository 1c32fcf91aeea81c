//! Continuations of many prompts, in batches of prompts of the same length.

use candle_core::Device;
use rayon::prelude::*;

use super::decoder::Decoder;
use super::run::Prompt;
use super::sampling::Sampler;
use super::{Generate, LanguageModel};
use crate::error::Result;
use crate::exec::{Inputs, MemoryNeed, Schedule};
use crate::work::{Event, MemoryLimit, ProgressUnit, Work};

/// Numbers of texts per batch, of which the largest that fits into memory is used: a forward pass reads all
/// parameters once for all texts.
const BATCH_SIZES: [usize; 4] = [16, 8, 4, 2];

/// A text of a batch.
struct Row {
    tokens: Vec<i64>,
    sampler: Sampler,
    /// Length of a complete text; later tokens are not part of it.
    end: Option<usize>,
}

impl Row {
    /// Appends the next token.
    fn extend(&mut self, model: &LanguageModel, mut logits: Vec<f32>, is_first: bool) -> Result<()> {
        if self.end.is_some() {
            // All texts of a batch have the same length.
            self.tokens.extend(self.tokens.last().copied());
            return Ok(());
        }
        model.suppress(&mut logits, is_first);
        let token = self.sampler.next(&logits)?;
        self.tokens.push(token);
        self.end = model.ends.contains(&token).then_some(self.tokens.len());
        Ok(())
    }
}

impl LanguageModel {
    /// Continues prompts in batches, without a draft, and passes each continuation as tokens to `consume`, in
    /// order, batch by batch. Consecutive prompts of the same length form a batch. The first
    /// `done` prompts are skipped; the random numbers of a prompt depend on its index. A prompt and its
    /// continuation have at most as many tokens as the model has positions. Fails as
    /// [`generate`](LanguageModel::generate), or if `consume` does.
    pub fn generate_batches(
        &self,
        (prompts, done): (&[Vec<i64>], usize),
        options: &Generate,
        device: &Device,
        memory: MemoryLimit,
        work: &Work,
        consume: &mut (dyn FnMut(Vec<Vec<i64>>) -> Result<()> + Send),
    ) -> Result<()> {
        options.check()?;
        self.require_prompts()?;
        prompts.iter().enumerate().try_for_each(|(index, prompt)| self.check(index, prompt))?;
        let rest = prompts.get(done..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        let size = self.batch_size(rest, options, memory)?;
        let mut decoder = Decoder::load(self, 0, device, work)?;
        work.progress.on(Event::Begin { stage: "Sampling", total: prompts.len() as u64, unit: ProgressUnit::Samples });
        work.progress.on(Event::Advance(done as u64));
        // Inside the pool, parallel work starts without waking a thread from outside.
        let result: Result<()> = rayon::scope(|_| {
            let mut index = done;
            for prompts in rest.chunk_by(|one, other| one.len() == other.len()).flat_map(|same| same.chunks(size)) {
                let continuations = self.generate_batch(&mut decoder, (prompts, index), options, work)?;
                index = index.saturating_add(prompts.len());
                consume(continuations)?;
                work.advance(prompts.len() as u64)?;
            }
            Ok(())
        });
        work.progress.on(Event::End);
        result
    }

    /// The number of texts per batch for these prompts.
    fn batch_size(&self, prompts: &[Vec<i64>], options: &Generate, memory: MemoryLimit) -> Result<usize> {
        let prompts: Vec<Prompt> = prompts.iter().map(|prompt| Prompt { tokens: prompt.clone(), inputs: Inputs::new() }).collect();
        self.require_memory(&prompts, options, memory)?;
        let need = self.memory_need(&prompts, options, 1, 0)?;
        let fits = |size: &usize| {
            let need = MemoryNeed { activations: need.activations.saturating_mul(*size as u64), ..need.clone() };
            matches!(Schedule::choose(memory, &[(self.model.config.model_type(), need)]), Ok(Schedule::Resident))
        };
        Ok(BATCH_SIZES.into_iter().find(fits).unwrap_or(1))
    }

    /// Continues prompts of the same length, of which the first has this index.
    fn generate_batch(&self, decoder: &mut Decoder, (prompts, index): (&[Vec<i64>], usize), options: &Generate, work: &Work) -> Result<Vec<Vec<i64>>> {
        let row =
            |(at, prompt): (usize, &Vec<i64>)| Row { tokens: prompt.clone(), sampler: Sampler::new(options.sampling, index.saturating_add(at)), end: None };
        let mut rows: Vec<Row> = prompts.iter().enumerate().map(row).collect();
        let length = prompts.first().map_or(0, Vec::len);
        let room = self.positions.map_or(options.tokens, |positions| positions.saturating_sub(length).min(options.tokens));
        decoder.start(Inputs::new());
        for number in 0..room {
            if rows.iter().all(|row| row.end.is_some()) {
                break;
            }
            let texts: Vec<&[i64]> = rows.iter().map(|row| row.tokens.as_slice()).collect();
            let logits = decoder.batch_logits(&texts, 1, work)?;
            rows.par_iter_mut().zip(logits).try_for_each(|(row, logits)| row.extend(self, logits, number == 0))?;
        }
        let continuation = |mut row: Row| {
            row.tokens.truncate(row.end.unwrap_or(usize::MAX));
            row.tokens.split_off(length)
        };
        Ok(rows.into_iter().map(continuation).collect())
    }
}
