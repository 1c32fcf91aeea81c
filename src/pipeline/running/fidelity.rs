//! Fidelity of the output model to the input model without evaluation data.
//!
//! The samples are held-out calibration or training samples, or synthetic ones if there are none. Their
//! number depends only on sizes, so that repeated runs measure on the same samples. On machines that are
//! much slower than expected, only the first sample is measured.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::DType;

use super::embedding_rows::EmbeddingRows;
use super::evaluate::{Run, not_finite_note};
use super::memory::{free_memory, lack_of_memory};
use crate::analysis;
use crate::arch;
use crate::data::{self, Batch, Data};
use crate::error::{Error, Result, counted};
use crate::evaluation::{FidelityAccumulator, MeasuredFidelity, SamplesFrom, Subject, without_folded_states};
use crate::exec::{Blockwise, BlockwiseOptions, MemoryNeed, Residence, Rounding, sizes_of};
use crate::export::Exported;
use crate::ir::{Bindings, Dim, Graph};
use crate::model::Model;
use crate::pass::Samples;
use crate::report::WARNING;
use crate::store::{Encoding, Weights};

/// Budget of multiply-accumulates of one model per byte of the input, if no pass runs the model. This
/// takes about a tenth of the time of reading, transforming, hashing and writing. The size of the output
/// does not count, so that all runs of a sweep are measured on the same samples.
const MACS_PER_BYTE: u64 = 4;
/// Minimum budget of multiply-accumulates, which take a few milliseconds.
const MIN_MACS: u64 = 50_000_000;
/// Number of samples that passes use per sample that is measured.
const USED_PER_MEASURED: usize = 8;
/// Maximum number of samples.
const MAX_SAMPLES: usize = 16;
/// Candidate sizes of synthetic samples: sequence length, and image height and width. The first that
/// fits the budget is used, otherwise the last.
const SIZES: [(usize, usize); 4] = [(128, 224), (64, 160), (32, 96), (16, 64)];
/// Number of samples that the budget should allow for if each sample yields one prediction: several
/// short samples are better than one long one.
const MIN_PREDICTIONS: u64 = 4;
/// Minimum time budget of one model.
const MIN_TIME: Duration = Duration::from_secs(1);

/// Maximum number of logits of each model in memory at once.
const MAX_LOGITS: usize = 1 << 22;

/// Limits of the work for each of the two models.
#[derive(Debug, Clone, Copy)]
struct Budget {
    macs: u64,
    samples: usize,
}

/// Whether the weights of a model match its configuration; true if the model cannot be run for other reasons.
pub(in crate::pipeline) fn matches_config(model: &Model) -> bool {
    model.require_matching_weights().is_ok()
}

/// Samples that no pass has used.
#[derive(Debug, Default)]
pub(super) struct HeldOut {
    /// The data set that they come from; `None` if there are none.
    pub data: Option<String>,
    /// The reason why there are none, if it needs to be reported.
    pub note: Option<String>,
}

impl Run<'_> {
    /// Measures the fidelity of the output to an input with this graph. If it cannot be measured,
    /// returns a note instead of an error.
    ///
    /// # Errors
    /// The work is cancelled.
    pub(super) fn fidelity(&self, graph: Result<Graph>, exports: &[(&'static str, Exported)]) -> Result<(Option<MeasuredFidelity>, Option<String>)> {
        let skipped = |reason: String| Ok((None, Some(format!("fidelity was not measured: {reason}"))));
        let graph = match graph {
            Ok(graph) => graph,
            // Models without a configuration are not expected to run.
            Err(_) if self.before.config.model_type().is_empty() => return Ok((None, None)),
            Err(e @ Error::Tensor { .. }) => {
                let reason = "fidelity was not measured, and runtimes are likely to refuse the output: the weights and config.json do not match";
                return Ok((None, Some(format!("{WARNING}{reason}: {e}"))));
            }
            Err(e) if arch::is_indivisible(&e) => {
                let reason = "fidelity was not measured, and runtimes are likely to refuse the output";
                let next = "correct the sizes, as in the original configuration of the model, and repeat the run";
                return Ok((None, Some(format!("{WARNING}{reason}: {e}: {next}"))));
            }
            Err(e) => return skipped(e.to_string()),
        };
        if let Some(reason) = self.too_large(&graph) {
            return skipped(reason);
        }
        match self.preprocessing_differs() {
            Ok(false) => {}
            Ok(true) => return skipped("the student differs from the input in preprocessing or classes".into()),
            Err(e) => return skipped(e.to_string()),
        }
        let unread = self.unread_note(&graph, exports);
        let compared = match self.with_tokens_of_output() {
            Ok(None) => self.compare_models(&graph, exports),
            Ok(Some(input)) => input.graph().and_then(|graph| self.compared_with(&input).compare_models(&graph, exports)),
            Err(e) => Err(e),
        };
        match compared {
            Ok((measured, note)) => {
                let note = note.into_iter().chain(unread).reduce(|note, other| format!("{note}; {other}"));
                Ok(not_finite_note(&measured.fidelity).map_or((Some(measured), note), |note| (None, Some(note))))
            }
            Err(Error::Cancelled) => Err(Error::Cancelled),
            Err(e) => skipped(e.to_string()),
        }
    }

    /// A warning about changed weights that the graph does not read, such as those of a vision tower.
    fn unread_note(&self, graph: &Graph, exports: &[(&'static str, Exported)]) -> Option<String> {
        let read: BTreeSet<&str> = graph.params().map(|(_, value)| value.name.as_str()).collect();
        let weights = exports.iter().flat_map(|(_, exported)| &exported.weights);
        // A pass may rename weights.
        let is_unread = |name: &str| self.before.weights.by_name.contains_key(name) && !read.contains(name);
        let unread: BTreeSet<&str> = weights.filter(|(name, measured)| measured.changed && is_unread(name)).map(|(name, _)| name.as_str()).collect();
        let first = unread.first()?;
        let count = counted(unread.len(), "changed weight");
        Some(format!("{WARNING}fidelity does not include {count} that the model does not read for these samples (the first: `{first}`)"))
    }

    /// The reason if the blocks of the models do not fit into memory.
    fn too_large(&self, graph: &Graph) -> Option<String> {
        let sizes = analysis::usual_sizes(graph);
        let need = |graph: &Graph, model: &Model| MemoryNeed::estimate(graph, &model.weights, DType::F32, Residence::Stored, &sizes);
        let needs = [Some(need(graph, self.before)), self.after.graph().ok().map(|graph| need(&graph, self.after))];
        let activations = needs.iter().flatten().map(|need| need.activations).max().unwrap_or(0);
        let blocks = needs.iter().flatten().map(|need| need.blocks).fold(activations, u64::saturating_add);
        lack_of_memory("running both models block by block", blocks, self.pipeline.running.memory, free_memory())
    }

    /// Compares both models block by block. The memory of a block is reused for the next one, and
    /// weights shared by both models are loaded once.
    fn compare_models(&self, graph: &Graph, exports: &[(&'static str, Exported)]) -> Result<(MeasuredFidelity, Option<String>)> {
        let device = self.pipeline.running.device()?;
        let (samples_from, HeldOut { data, note }, mut samples) = self.samples(graph)?;
        let first = samples.first().filter(|_| samples_from == SamplesFrom::HeldOut).and_then(|sample| self.fingerprint(sample));
        let written = self.written()?;
        let (graph, output_graph) = (without_folded_states(graph.clone(), &self.before.weights), without_folded_states(written.graph()?, &written.weights));
        let (input, output) = ((&graph, &self.before.weights), (&output_graph, &written.weights));
        let rows = EmbeddingRows::from_samples([input, output], &mut samples)?;
        let ((graph, weights), (output_graph, output_weights)) = (rows.reduce(input)?, rows.reduce(output)?);
        let (options, work) = (BlockwiseOptions::on(&device), self.work.quiet());
        let rounding = if self.writes_safetensors() { Rounding::Token } else { Rounding::Tensor };
        // Logits of a large vocabulary are computed for a limited number of tokens at a time.
        let heads = [(&graph, &weights), (&output_graph, &output_weights)].map(|(graph, weights)| separable_head(graph, weights, rounding));
        let [head, output_head] = if heads.iter().all(Option::is_some) { heads } else { Default::default() };
        let mut before = Blockwise::new(&graph, &weights, |name| head == Some(name), options.clone(), &work);
        let mut after = Blockwise::new(&output_graph, &output_weights, |name| output_head == Some(name), BlockwiseOptions { rounding, ..options }, &work);
        for sample in &samples {
            before.push(sample.clone())?;
            after.push(sample.clone())?;
        }
        let unchanged = self.unchanged_weights(&written, exports);
        let (limit, start) = (2 * MIN_TIME.max(self.start.elapsed() / 8), Instant::now());
        run_blocks(&mut [&mut before, &mut after], &unchanged, || start.elapsed() > limit)?;
        let mut accumulator = FidelityAccumulator::new(self.before.logit_kind()?);
        for (index, sample) in samples.iter().enumerate().take(before.batches()) {
            self.work.cancel.check()?;
            let lengths = sample.token_count().zip(classes(&graph));
            let (Some(head), Some(output_head), Some((length, classes))) = (head, output_head, lengths) else {
                accumulator.add(sample, &before.outputs_of(index)?, &after.outputs_of(index)?)?;
                continue;
            };
            let chunk = (MAX_LOGITS / (classes * sample.samples)).max(1);
            for start in (0..length).step_by(chunk) {
                let tokens = start..length.min(start + chunk);
                let expected = before.outputs_of_tokens(index, head, tokens.clone())?;
                let actual = after.outputs_of_tokens(index, output_head, tokens.clone())?;
                accumulator.add(&sample.clone().tokens_within(tokens)?, &expected, &actual)?;
            }
        }
        let mut measured = MeasuredFidelity::new(samples_from, before.batches(), data, accumulator.finish());
        measured.first_sample = first;
        Ok((measured, note))
    }

    /// A hash that identifies a held-out sample in other reports; `None` if tokens have new ids, or the
    /// output is a student with its own preprocessing.
    pub(super) fn fingerprint(&self, sample: &Batch) -> Option<String> {
        let has_same_inputs = self.after.retained_tokens.is_none() && self.after.path == self.before.path;
        sample.fingerprint().ok().filter(|_| has_same_inputs)
    }

    /// Whether the output is a student from another folder that preprocesses samples differently.
    fn preprocessing_differs(&self) -> Result<bool> {
        if self.after.path == self.before.path {
            return Ok(false);
        }
        let [before, after] = [self.before, self.after].map(|model| Subject::from_model(model.clone()));
        let (before, after) = (before?, after?);
        let sets = &self.pipeline.running.data;
        // Arrays are not preprocessed, and options of the data take precedence over the models' files.
        match sets.calibration.as_ref().or(sets.train.as_ref()) {
            Some(set) => {
                let own = sets.open(set, after.target())?;
                Ok(sets.open(set, before.target())?.difference_from(&own)?.is_some())
            }
            None => Ok(!data::has_same_preprocessing([before.target(), after.target()])?),
        }
    }

    /// Names of weights that are identical in the input and the output.
    fn unchanged_weights<'m>(&self, written: &'m Model, exports: &[(&'static str, Exported)]) -> BTreeSet<&'m str> {
        // Weights that were not written separately, such as tied heads, do not count as unchanged.
        let mut is_unchanged: BTreeMap<&str, bool> = BTreeMap::new();
        for (name, measured) in exports.iter().flat_map(|(_, exported)| &exported.weights) {
            *is_unchanged.entry(name).or_insert(true) &= !measured.changed;
        }
        let is_same = |(name, weight): &(&'m String, &crate::store::Weight)| {
            let before = self.before.weights.by_name.get(*name);
            let after = self.after.weights.by_name.get(*name);
            before.is_some_and(|before| before.shape == weight.shape && before.encoding == weight.encoding && before.dtype == weight.dtype)
                && after.is_some_and(|after| after.origin == crate::store::Origin::File)
                && is_unchanged.get(name.as_str()) == Some(&true)
        };
        written.weights.by_name.iter().filter(is_same).map(|(name, _)| name.as_str()).collect()
    }

    /// The samples to measure on: held-out samples if there are any, otherwise synthetic ones.
    fn samples(&self, graph: &Graph) -> Result<(SamplesFrom, HeldOut, Vec<Batch>)> {
        let budget = self.budget();
        let mut selection = SampleSelection { graph, budget, spent: 0, samples: Vec::new() };
        let held_out = self.held_out(&mut |sample| selection.push(sample))?;
        if !selection.samples.is_empty() {
            return Ok((SamplesFrom::HeldOut, held_out, selection.samples));
        }
        let mut selection = SampleSelection { graph, budget, spent: 0, samples: Vec::new() };
        let sizes = selection.affordable_sizes();
        for number in 0..MAX_SAMPLES as u64 {
            if selection.push(data::synthetic_with_sizes(graph, self.pipeline.seed.wrapping_add(number), &sizes)?)?.is_break() {
                break;
            }
        }
        Ok((SamplesFrom::Synthetic, held_out, selection.samples))
    }

    /// Passes held-out samples to `take` until it returns `Break`. Returns the data set that they come from.
    pub(super) fn held_out(&self, take: &mut dyn FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<HeldOut> {
        let sets = &self.pipeline.running.data;
        let mut note = None;
        for (set, kind) in [(&sets.calibration, Samples::Calibration), (&sets.train, Samples::Train)] {
            // Each text of a packed sample has its own context, which the compared models do not know. A
            // training draws from all samples of a mixture, so that none of them are held out.
            let is_drawn = |set: &Data| kind == Samples::Train && !set.mix.is_empty();
            let Some(set) = set.as_ref().filter(|set| !set.is_packed() && !is_drawn(set)) else { continue };
            if self.after.retained_tokens.is_some() && !set.has_texts() {
                note = Some("fidelity was not measured on held-out samples: they contain token ids of the original vocabulary".to_owned());
                continue;
            }
            let read = self.read_by_passes();
            let used = self.pipeline.model_runs().any(|(_, samples)| samples == kind);
            let others: Vec<&Data> = read.into_values().filter(|other| !std::ptr::eq(*other, set)).collect();
            let used = if used { set.samples } else { Some(0) };
            let mut any = false;
            if let Some(used) = used {
                let subject = Subject::from_model(self.after.for_samples(self.before).clone())?;
                let compared = sets.for_each_held_out(set, used, &others, subject.target(), |sample| {
                    any = true;
                    take(sample)
                })?;
                if !compared {
                    note = Some("fidelity was not measured on held-out samples: another data set has too many texts to compare with them".to_owned());
                }
            }
            if any {
                return Ok(HeldOut { data: set.names(), note: None });
            }
        }
        Ok(HeldOut { data: None, note })
    }

    /// The data sets read by passes, by key.
    pub(super) fn read_by_passes(&self) -> BTreeMap<&'static str, &Data> {
        self.pipeline.model_runs().filter_map(|(_, samples)| self.pipeline.running.data_set(samples)).filter_map(|(key, set)| Some((key, set?))).collect()
    }

    /// The budget with which measuring takes at most a fifth of the time of the run.
    fn budget(&self) -> Budget {
        let used = |samples| match samples {
            Samples::Calibration => self.pipeline.running.data.calibration.as_ref().map(|set: &Data| set.samples.unwrap_or(usize::MAX)),
            Samples::Train => Some(usize::MAX),
            Samples::None => None,
        };
        let used = self.pipeline.model_runs().filter_map(|(_, samples)| used(samples)).max();
        if let Some(used) = used {
            return Budget { macs: u64::MAX, samples: (used / USED_PER_MEASURED).clamp(1, MAX_SAMPLES) };
        }
        Budget { macs: MACS_PER_BYTE.saturating_mul(self.before.stored_bytes()).max(MIN_MACS), samples: MAX_SAMPLES }
    }
}

/// Runs all blocks of models, which load the weights named in `same` once. When `is_late`, only the first
/// sample remains.
fn run_blocks(models: &mut [&mut Blockwise], same: &BTreeSet<&str>, is_late: impl Fn() -> bool) -> Result<()> {
    let blocks = models.iter().map(|model| model.blocks().len()).max();
    for block in 0..blocks.unwrap_or(0) {
        Blockwise::run_block(models, block, same)?;
        if is_late() {
            models.iter_mut().for_each(|model| model.truncate(1));
        }
    }
    Ok(())
}

/// Name of the input of the head, if the head computes all outputs token by token. `None` if its
/// activations are quantized with a scale per sample instead of per token.
fn separable_head<'g>(graph: &'g Graph, weights: &Weights, rounding: Rounding) -> Option<&'g str> {
    let node = analysis::shared_head(graph)?;
    let [input, weight, ..] = node.inputs.as_slice() else { return None };
    let is_shared_scale = rounding == Rounding::Tensor && weights.by_name.get(&graph.value(*weight).name)?.encoding != Encoding::Dense;
    (!is_shared_scale).then_some(graph.value(*input).name.as_str())
}

/// The number of classes that a head computes.
fn classes(graph: &Graph) -> Option<usize> {
    graph.value(analysis::shared_head(graph)?.output).ty.shape.last().and_then(Dim::fixed).filter(|classes| *classes > 0)
}

/// Samples whose cost stays within a budget.
struct SampleSelection<'g> {
    graph: &'g Graph,
    budget: Budget,
    spent: u64,
    samples: Vec<Batch>,
}

impl SampleSelection<'_> {
    /// Adds a sample, unless it exceeds the budget. The first sample is always added.
    fn push(&mut self, sample: Batch) -> Result<ControlFlow<()>> {
        let sample = self.shortened(sample)?;
        let cost = analysis::cost(self.graph, &sizes_of(self.graph, &sample.inputs)).0;
        if !self.samples.is_empty() && self.spent.saturating_add(cost) > self.budget.macs {
            return Ok(ControlFlow::Break(()));
        }
        self.spent = self.spent.saturating_add(cost);
        self.samples.push(sample);
        Ok(if self.samples.len() < self.budget.samples { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    }

    /// A prefix of a text, as long as the budget allows, if the model predicts each token. Other samples,
    /// and texts with images, are not shortened.
    fn shortened(&self, sample: Batch) -> Result<Batch> {
        if sample.inputs.values().any(|tensor| tensor.rank() != 2) {
            return Ok(sample);
        }
        let length = self.affordable_sizes().get("sequence").copied().filter(|_| self.budget.macs < u64::MAX);
        match length.filter(|_| self.predicts_tokens()) {
            Some(length) => sample.shortened(length),
            None => Ok(sample),
        }
    }

    /// Whether the model computes logits for each token.
    fn predicts_tokens(&self) -> bool {
        self.graph.outputs().iter().any(|(name, id)| name == "logits" && self.graph.value(*id).ty.shape.len() == 3)
    }

    /// The largest sizes of dynamic axes whose cost fits the budget. If a sample yields one prediction,
    /// several samples must fit.
    fn affordable_sizes(&self) -> Bindings {
        let longest = data::max_positions(self.graph).unwrap_or(usize::MAX);
        let patches = self.graph.image_patches().map_or(0, |(_, patches)| patches);
        let sizes = SIZES.map(|(sequence, image)| {
            self.graph.bind(|name| match name {
                "sequence" => sequence.min(longest) + patches,
                "height" | "width" => image,
                _ => 1,
            })
        });
        let share = self.budget.macs / if self.predicts_tokens() { 1 } else { MIN_PREDICTIONS };
        let fits = |sizes: &&Bindings| analysis::cost(self.graph, sizes).0 <= share;
        sizes.iter().find(fits).or(sizes.last()).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_comparison_continues_with_the_first_sample() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let graph = model.graph().unwrap();
        let cancel = crate::work::Cancel::default();
        let work = crate::work::Work { threads: 1, progress: &crate::work::Silent, cancel: &cancel };
        let outputs = |late_after: usize| {
            let options = BlockwiseOptions::on(&candle_core::Device::Cpu);
            let [mut before, mut after] = [(); 2].map(|()| Blockwise::new(&graph, &model.weights, |_| false, options.clone(), &work));
            for model in [&mut before, &mut after] {
                (0..3).for_each(|seed| model.push(data::synthetic(&graph, seed).unwrap()).unwrap());
            }
            let checks = std::cell::Cell::new(0);
            let is_late = || checks.replace(checks.get() + 1) >= late_after;
            run_blocks(&mut [&mut before, &mut after], &BTreeSet::new(), is_late).unwrap();
            assert!(checks.get() > 1 && before.batches() == after.batches());
            let first = before.outputs_of(0).unwrap()["logits"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            (before.batches(), first)
        };
        let (count, all) = outputs(usize::MAX);
        assert_eq!(count, 3);
        assert_eq!([outputs(0), outputs(1)], [(1, all.clone()), (1, all)]);
    }

    #[test]
    fn the_budget_limits_the_number_and_size_of_samples() {
        let text = "input input_ids: int[batch, sequence]\nparam t: float[50, 64]\nparam w: float[50, 64]\nx = Embedding(input_ids, t) -> float[batch, sequence, 64]\nlogits = Linear(x, w) -> float[batch, sequence, 50]\noutput logits = logits\n";
        let graph: Graph = text.parse().unwrap();
        let token = 64 * 50;
        let found = |macs: u64, samples: usize| {
            let mut selection = SampleSelection { graph: &graph, budget: Budget { macs, samples }, spent: 0, samples: Vec::new() };
            let sizes = selection.affordable_sizes();
            while selection.push(data::synthetic_with_sizes(&graph, 0, &sizes).unwrap()).unwrap().is_continue() {}
            (selection.samples.len(), selection.samples[0].inputs["input_ids"].dims().to_vec())
        };
        assert_eq!(found(0, 16), (1, vec![1, 16]));
        assert_eq!(found(100 * token, 16), (1, vec![1, 64]));
        assert_eq!(found(400 * token, 16), (3, vec![1, 128]));
        assert_eq!(found(u64::MAX, 5), (5, vec![1, 128]));
    }
}
