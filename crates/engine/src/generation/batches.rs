//! Continuations of many prompts, in batches of prompts of the same length.

use candle_core::Device;
use rayon::prelude::*;

use super::decoder::Decoder;
use super::run::Prompt;
use super::sampling::Sampler;
use super::{Generate, LanguageModel, Sampling};
use crate::error::Result;
use crate::exec::{Inputs, MemoryNeed, Parameters, Schedule, on_pool_thread};
use crate::work::{Event, MemoryLimit, ProgressUnit, Work};

/// Maximum number of texts per batch on the CPU and on a GPU: a forward pass reads all parameters once for
/// all texts.
const LARGEST_BATCH: [usize; 2] = [16, 256];

fn largest_batch(device: &Device) -> usize {
    let [on_cpu, on_gpu] = LARGEST_BATCH;
    if device.is_cpu() { on_cpu } else { on_gpu }
}

/// A text of a batch.
struct Row {
    tokens: Vec<i64>,
    sampler: Sampler,
    /// Length of a complete text; later tokens are not part of it.
    end: Option<usize>,
}

impl Row {
    /// A prompt, whose random numbers depend on its index.
    fn new(prompt: &[i64], sampling: Option<Sampling>, index: usize) -> Row {
        Row { tokens: prompt.to_vec(), sampler: Sampler::new(sampling, index), end: None }
    }

    /// Appends the next token.
    fn extend(&mut self, model: &LanguageModel, logits: &mut [f32], is_first: bool) -> Result<()> {
        if self.end.is_some() {
            // All texts of a batch have the same length.
            self.tokens.extend(self.tokens.last().copied());
            return Ok(());
        }
        model.suppress(logits, is_first);
        let token = self.sampler.next(logits)?;
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
        let size = self.batch_size(rest, options, (memory, device))?;
        let mut decoder = Decoder::load(self, 0, device, work)?;
        work.progress.on(Event::Begin { stage: "Sampling", total: prompts.len() as u64, done: done as u64, unit: ProgressUnit::Samples });
        let result: Result<()> = on_pool_thread(device, || {
            let mut index = done;
            for prompts in rest.chunk_by(|one, other| one.len() == other.len()).flat_map(|same| same.chunks(size)) {
                let rows = (index..).zip(prompts).map(|(index, prompt)| Row::new(prompt, options.sampling, index)).collect();
                let continuations = self.generate_batch(&mut decoder, rows, options.tokens, work)?;
                index = index.saturating_add(prompts.len());
                consume(continuations)?;
                work.advance(prompts.len() as u64)?;
            }
            Ok(())
        });
        work.progress.on(Event::End);
        result
    }

    /// Continues prompts, each by at most the given number of tokens, with other parameters than those of the
    /// model. Up to `most` prompts of the same length form a batch; the random numbers of a prompt depend on
    /// its index. Fails as [`generate`](LanguageModel::generate).
    pub fn continue_with(
        &self,
        parameters: Parameters,
        (prompts, most): (&[(Vec<i64>, usize)], usize),
        sampling: Option<Sampling>,
        device: &Device,
        work: &Work,
    ) -> Result<Vec<Vec<i64>>> {
        self.require_prompts()?;
        prompts.iter().enumerate().try_for_each(|(index, (prompt, _))| self.check(index, prompt))?;
        let mut decoder = Decoder::with_parameters(self, parameters, 0, device)?;
        let mut order: Vec<(usize, &(Vec<i64>, usize))> = prompts.iter().enumerate().collect();
        order.sort_by_key(|(_, (prompt, _))| prompt.len());
        let mut found = vec![Vec::new(); prompts.len()];
        let largest = largest_batch(device).min(most.max(1));
        let result: Result<()> = on_pool_thread(device, || {
            for group in order.chunk_by(|(_, one), (_, other)| one.0.len() == other.0.len()).flat_map(|same| same.chunks(largest)) {
                let rows = group.iter().map(|(index, (prompt, _))| Row::new(prompt, sampling, *index)).collect();
                let limit = group.iter().map(|(_, (_, tokens))| *tokens).max().unwrap_or(0);
                let continuations = self.generate_batch(&mut decoder, rows, limit, work)?;
                for ((index, (_, tokens)), mut continuation) in group.iter().zip(continuations) {
                    continuation.truncate(*tokens);
                    found.get_mut(*index).into_iter().for_each(|found| *found = std::mem::take(&mut continuation));
                }
            }
            Ok(())
        });
        result.map(|()| found)
    }

    /// The number of texts per batch for these prompts: the largest power of two that fits into memory.
    fn batch_size(&self, prompts: &[Vec<i64>], options: &Generate, (memory, device): (MemoryLimit, &Device)) -> Result<usize> {
        let prompts: Vec<Prompt> = prompts.iter().map(|prompt| Prompt { tokens: prompt.clone(), inputs: Inputs::new() }).collect();
        self.require_memory(&prompts, options, memory, device)?;
        let need = self.memory_need(&prompts, options, [1, 0], device)?;
        let fits = |size: &usize| {
            let need = MemoryNeed { activations: need.activations.saturating_mul(*size as u64), ..need.clone() };
            matches!(Schedule::choose(memory, &[(self.model.config.model_type(), need)]), Ok(Schedule::Resident))
        };
        let sizes = std::iter::successors(Some(largest_batch(device)), |size| Some(size / 2)).take_while(|size| *size > 1);
        Ok(sizes.into_iter().find(fits).unwrap_or(1))
    }

    /// Continues prompts of the same length by at most `tokens` tokens.
    fn generate_batch(&self, decoder: &mut Decoder, mut rows: Vec<Row>, tokens: usize, work: &Work) -> Result<Vec<Vec<i64>>> {
        let length = rows.first().map_or(0, |row| row.tokens.len());
        let room = self.positions.map_or(tokens, |positions| positions.saturating_sub(length).min(tokens));
        decoder.start(Inputs::new());
        for number in 0..room {
            if rows.iter().all(|row| row.end.is_some()) {
                break;
            }
            let texts: Vec<&[i64]> = rows.iter().map(|row| row.tokens.as_slice()).collect();
            let (mut logits, width) = decoder.batch_logits(&texts, 1, work)?;
            rows.par_iter_mut().zip(logits.par_chunks_mut(width)).try_for_each(|(row, logits)| row.extend(self, logits, number == 0))?;
        }
        let continuation = |mut row: Row| {
            row.tokens.truncate(row.end.unwrap_or(usize::MAX));
            row.tokens.split_off(length)
        };
        Ok(rows.into_iter().map(continuation).collect())
    }
}
