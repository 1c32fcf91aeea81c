//! How close the output's answers are to the input's, where nobody has named evaluation data.
//!
//! Samples are those of the calibration or training data that no pass has used, else random ones. How many depends on sizes alone, so that
//! a run that is repeated says the same; only a machine that is far slower than expected stops earlier.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::DType;

use super::evaluate::Run;
use super::free::{free_memory, lack_of_memory};
use super::rows::Rows;
use crate::analysis;
use crate::data::{self, Batch, Data};
use crate::error::{Error, Result};
use crate::evaluation::{FidelitySums, MeasuredFidelity, SamplesFrom, Subject};
use crate::exec::{Blockwise, BlockwiseOptions, MemoryNeed, Residence, Rounding, sizes_of};
use crate::export::Exported;
use crate::ir::{Bindings, Dim, Graph};
use crate::model::Model;
use crate::pass::Samples;
use crate::store::{Encoding, Weights};

/// Multiply-accumulates of one model for each byte of the input, where passes run no model: about a tenth of the time that reading,
/// making, hashing and writing takes. What is written does not count, so that all runs of a sweep are measured on the same samples.
const MACS_PER_BYTE: u64 = 4;
/// Multiply-accumulates that take a few milliseconds, whatever the size.
const LEAST_MACS: u64 = 50_000_000;
/// Samples that passes run on for each one that is measured.
const USED_PER_MEASURED: usize = 8;
/// Samples at most.
const MOST: usize = 16;
/// Tokens of a text, and height and width of an image whose size is open: the largest that can be afforded, else the last.
const SIZES: [(usize, usize); 4] = [(128, 224), (64, 160), (32, 96), (16, 64)];
/// Samples that are better than one long one where each has one answer.
const SEVERAL: u64 = 4;
/// Time that one model may take in any case.
const LEAST_TIME: Duration = Duration::from_secs(1);

/// Logits of each model that are in memory at a time.
const LOGITS: usize = 1 << 22;

/// What may be spent on each of both models.
#[derive(Debug, Clone, Copy)]
struct Budget {
    macs: u64,
    samples: usize,
}

impl Run<'_> {
    /// Measures an input of this graph; what cannot be measured is a note, and no reason to stop.
    ///
    /// # Errors
    /// The work is cancelled.
    pub(super) fn fidelity(&self, graph: Result<Graph>, exports: &[(&'static str, Exported)]) -> Result<(Option<MeasuredFidelity>, Option<String>)> {
        let skipped = |reason: String| Ok((None, Some(format!("fidelity was not measured: {reason}"))));
        let graph = match graph {
            Ok(graph) => graph,
            // Files that nobody has described are not expected to run.
            Err(_) if self.before.config.model_type().is_empty() => return Ok((None, None)),
            Err(e) => return skipped(e.to_string()),
        };
        if let Some(reason) = self.too_large(&graph) {
            return skipped(reason);
        }
        match self.compared(&graph, exports) {
            Ok(measured) => measured.fidelity.not_finite().map_or(Ok((Some(measured), None)), skipped),
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(e) => skipped(e.to_string()),
        }
    }

    /// The reason if the blocks of the models do not fit into memory.
    fn too_large(&self, graph: &Graph) -> Option<String> {
        let sizes = analysis::usual_sizes(graph);
        let need = |graph: &Graph, model: &Model| MemoryNeed::of(graph, &model.weights, DType::F32, Residence::Stored, &sizes);
        let needs = [Some(need(graph, self.before)), self.after.graph().ok().map(|graph| need(&graph, self.after))];
        let activations = needs.iter().flatten().map(|need| need.activations).max().unwrap_or(0);
        let blocks = needs.iter().flatten().map(|need| need.blocks).fold(activations, u64::saturating_add);
        lack_of_memory("running both models block by block", blocks, self.pipeline.running.memory, free_memory())
    }

    /// Runs both models side by side, block by block: the memory of a block serves the next one, and weights that both share are loaded once.
    fn compared(&self, graph: &Graph, exports: &[(&'static str, Exported)]) -> Result<MeasuredFidelity> {
        let device = self.pipeline.running.device()?;
        let (samples_from, data, mut samples) = self.samples(graph)?;
        let written = self.written()?;
        let (ours, theirs) = ((graph, &self.before.weights), (&written.graph()?, &written.weights));
        let rows = Rows::looked_up([ours, theirs], &mut samples)?;
        let ((graph, weights), (their_graph, their_weights)) = (rows.of(ours)?, rows.of(theirs)?);
        let (options, work) = (BlockwiseOptions::on(&device), self.work.quiet());
        let rounding = if self.writes_safetensors() { Rounding::Token } else { Rounding::Tensor };
        // Logits of a large vocabulary are computed for some tokens at a time.
        let heads = [(&graph, &weights), (&their_graph, &their_weights)].map(|(graph, weights)| separable_head(graph, weights, rounding));
        let [head, their_head] = if heads.iter().all(Option::is_some) { heads } else { Default::default() };
        let mut before = Blockwise::new(&graph, &weights, |name| head == Some(name), options.clone(), &work);
        let mut after = Blockwise::new(&their_graph, &their_weights, |name| their_head == Some(name), BlockwiseOptions { rounding, ..options }, &work);
        for sample in &samples {
            before.push(sample.clone())?;
            after.push(sample.clone())?;
        }
        let same = self.unchanged(&written, exports);
        let (limit, begun) = (2 * LEAST_TIME.max(self.start.elapsed() / 8), Instant::now());
        for block in 0..before.blocks().len().max(after.blocks().len()) {
            Blockwise::together(&mut [&mut before, &mut after], block, &same)?;
            if begun.elapsed() > limit {
                before.truncate(1);
                after.truncate(1);
            }
        }
        let mut sums = FidelitySums::default();
        for (index, sample) in samples.iter().enumerate().take(before.batches()) {
            self.work.cancel.check()?;
            let lengths = sample.token_count().zip(classes(&graph));
            let (Some(head), Some(their_head), Some((length, classes))) = (head, their_head, lengths) else {
                sums.add(sample, &before.answer(index)?, &after.answer(index)?)?;
                continue;
            };
            let at_once = (LOGITS / (classes * sample.samples)).max(1);
            for from in (0..length).step_by(at_once) {
                let tokens = from..length.min(from + at_once);
                let (ours, theirs) = (before.answer_of_tokens(index, head, tokens.clone())?, after.answer_of_tokens(index, their_head, tokens.clone())?);
                sums.add(&sample.clone().tokens_within(tokens)?, &ours, &theirs)?;
            }
        }
        Ok(MeasuredFidelity { samples_from, samples: before.batches(), data, fidelity: sums.finish() })
    }

    /// Weights that are in the output as they were in the input.
    fn unchanged<'m>(&self, written: &'m Model, exports: &[(&'static str, Exported)]) -> BTreeSet<&'m str> {
        // What was not written, like a head that is tied, is what something else holds.
        let mut kept_as_they_were: BTreeMap<&str, bool> = BTreeMap::new();
        for (name, seen) in exports.iter().flat_map(|(_, exported)| &exported.weights) {
            *kept_as_they_were.entry(name).or_insert(true) &= !seen.changed;
        }
        let same = |(name, weight): &(&'m String, &crate::store::Weight)| {
            let before = self.before.weights.by_name.get(*name);
            let kept = self.after.weights.by_name.get(*name);
            before.is_some_and(|before| before.shape == weight.shape && before.encoding == weight.encoding && before.dtype == weight.dtype)
                && kept.is_some_and(|kept| kept.origin == crate::store::Origin::File)
                && kept_as_they_were.get(name.as_str()) == Some(&true)
        };
        written.weights.by_name.iter().filter(same).map(|(name, _)| name.as_str()).collect()
    }

    /// The samples: those that no pass has used, else random ones.
    fn samples(&self, graph: &Graph) -> Result<(SamplesFrom, Option<String>, Vec<Batch>)> {
        let budget = self.budget();
        let mut found = Found { graph, budget, spent: 0, samples: Vec::new() };
        let path = self.held_out(&mut |sample| found.take(sample))?;
        if !found.samples.is_empty() {
            return Ok((SamplesFrom::HeldOut, path, found.samples));
        }
        let mut found = Found { graph, budget, spent: 0, samples: Vec::new() };
        let sizes = found.affordable();
        for number in 0..MOST as u64 {
            if found.take(data::synthetic_of(graph, self.pipeline.seed.wrapping_add(number), &sizes)?)?.is_break() {
                break;
            }
        }
        Ok((SamplesFrom::Synthetic, None, found.samples))
    }

    /// Hands over samples that no pass has used until they are enough; answers where they are from.
    pub(super) fn held_out(&self, take: &mut dyn FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<Option<String>> {
        let sets = &self.pipeline.running.data;
        for (set, kind) in [(&sets.calibration, Samples::Calibration), (&sets.train, Samples::Train)] {
            let Some(set) = set else { continue };
            let read = self.read_by_passes();
            let used = self.pipeline.runs().any(|(_, samples)| samples == kind);
            let others: Vec<&Data> = read.into_values().filter(|other| !std::ptr::eq(*other, set)).collect();
            let used = if used { set.samples } else { Some(0) };
            let mut any = false;
            if let Some(used) = used {
                let subject = Subject::of(self.before.clone())?;
                sets.for_each_beyond(set, used, &others, subject.target(), |sample| {
                    any = true;
                    take(sample)
                })?;
            }
            if any {
                return Ok(set.paths().next().map(|path| path.display().to_string()));
            }
        }
        Ok(None)
    }

    /// The data sets read by passes, by key.
    pub(super) fn read_by_passes(&self) -> BTreeMap<&'static str, &Data> {
        self.pipeline.runs().filter_map(|(_, samples)| self.pipeline.running.set(samples)).filter_map(|(key, set)| Some((key, set?))).collect()
    }

    /// What may be spent, so that measuring takes at most a fifth of the run.
    fn budget(&self) -> Budget {
        let used = |samples| match samples {
            Samples::Calibration => self.pipeline.running.data.calibration.as_ref().map(|set: &Data| set.samples.unwrap_or(usize::MAX)),
            Samples::Train => Some(usize::MAX),
            Samples::None => None,
        };
        let used = self.pipeline.runs().filter_map(|(_, samples)| used(samples)).max();
        if let Some(used) = used {
            return Budget { macs: u64::MAX, samples: (used / USED_PER_MEASURED).clamp(1, MOST) };
        }
        Budget { macs: MACS_PER_BYTE.saturating_mul(self.before.stored_bytes()).max(LEAST_MACS), samples: MOST }
    }
}

/// The input of the head, if all outputs follow from it token by token and the head does not round the tokens of a sample together.
fn separable_head<'g>(graph: &'g Graph, weights: &Weights, rounding: Rounding) -> Option<&'g str> {
    let node = analysis::shared_head(graph)?;
    let [input, weight, ..] = node.inputs.as_slice() else { return None };
    let together = rounding == Rounding::Tensor && weights.by_name.get(&graph.value(*weight).name)?.encoding != Encoding::Dense;
    (!together).then_some(graph.value(*input).name.as_str())
}

/// The number of classes that a head computes.
fn classes(graph: &Graph) -> Option<usize> {
    graph.value(analysis::shared_head(graph)?.output).ty.shape.last().and_then(Dim::fixed).filter(|classes| *classes > 0)
}

/// Samples that a budget has room for.
struct Found<'g> {
    graph: &'g Graph,
    budget: Budget,
    spent: u64,
    samples: Vec<Batch>,
}

impl Found<'_> {
    /// Takes a sample; the first in any case.
    fn take(&mut self, sample: Batch) -> Result<ControlFlow<()>> {
        let sample = self.shortened(sample)?;
        let cost = analysis::cost(self.graph, &sizes_of(self.graph, &sample.inputs)).0;
        if !self.samples.is_empty() && self.spent.saturating_add(cost) > self.budget.macs {
            return Ok(ControlFlow::Break(()));
        }
        self.spent = self.spent.saturating_add(cost);
        self.samples.push(sample);
        Ok(if self.samples.len() < self.budget.samples { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }

    /// The beginning of a text whose tokens are answered one by one, as much as can be afforded; other samples are whole.
    fn shortened(&self, sample: Batch) -> Result<Batch> {
        let length = self.affordable().get("sequence").copied().filter(|_| self.budget.macs < u64::MAX);
        match length.filter(|_| self.answers_by_token()) {
            Some(length) => sample.shortened(length),
            None => Ok(sample),
        }
    }

    fn answers_by_token(&self) -> bool {
        self.graph.outputs().iter().any(|(name, id)| name == "logits" && self.graph.value(*id).ty.shape.len() == 3)
    }

    /// The largest sizes of open axes that one sample can be run at; several, where a sample has one answer.
    fn affordable(&self) -> Bindings {
        let longest = data::longest(self.graph).unwrap_or(usize::MAX);
        let sizes = SIZES.map(|(sequence, image)| {
            self.graph.bind(|name| match name {
                "sequence" => sequence.min(longest),
                "height" | "width" => image,
                _ => 1,
            })
        });
        let share = self.budget.macs / if self.answers_by_token() { 1 } else { SEVERAL };
        let fits = |sizes: &&Bindings| analysis::cost(self.graph, sizes).0 <= share;
        sizes.iter().find(fits).or(sizes.last()).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_as_many_as_the_budget_has_room_for() {
        let text = "input input_ids: int[batch, sequence]\nparam t: float[50, 64]\nparam w: float[50, 64]\nx = Embedding(input_ids, t) -> float[batch, sequence, 64]\nlogits = Linear(x, w) -> float[batch, sequence, 50]\noutput logits = logits\n";
        let graph: Graph = text.parse().unwrap();
        let token = 64 * 50;
        let found = |macs: u64, samples: usize| {
            let mut found = Found { graph: &graph, budget: Budget { macs, samples }, spent: 0, samples: Vec::new() };
            let sizes = found.affordable();
            while found.take(data::synthetic_of(&graph, 0, &sizes).unwrap()).unwrap().is_continue() {}
            (found.samples.len(), found.samples[0].inputs["input_ids"].dims().to_vec())
        };
        assert_eq!(found(0, 16), (1, vec![1, 16]));
        assert_eq!(found(100 * token, 16), (1, vec![1, 64]));
        assert_eq!(found(400 * token, 16), (3, vec![1, 128]));
        assert_eq!(found(u64::MAX, 5), (5, vec![1, 128]));
    }
}
