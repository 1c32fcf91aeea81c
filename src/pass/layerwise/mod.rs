//! Layerwise compression: modifies linear layers in sequence while calibration samples pass through the
//! model block by block, so that the input of each layer includes the effect of previously modified
//! layers. Memory holds one block, the activations cached between blocks, and the statistics of one
//! value.

mod autoround;
mod block_checkpoints;
mod checks;
mod compensated;
mod corrections;
mod divided_rows;
mod forecast;
mod guide;
mod held_out;
mod layer_format;
mod low_rank;
mod moments;
mod output_feedback;
mod output_moments;
mod palettes;
mod parallel;
mod preserved_zeros;
mod ranks;
mod remaining;
mod report;
mod rescale;
mod rounding;
mod row_scales;
mod runs;
mod sampled;
mod scores;
mod sites;
mod solver;
mod sparse;
mod summary;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::path::PathBuf;
use std::rc::Rc;

use candle_core::{DType, Tensor};

use crate::analysis;
use crate::calibration::select_rows;
use crate::data::{DataSet, SequenceRoles};
use crate::error::{Error, Result, counted};
use crate::evaluation::Subject;
use crate::exec::{Blockwise, BlockwiseOptions, MemoryNeed, Residence};
use crate::heap;
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::{Context, calibrate};
use crate::store::{Weight, Weights};
use crate::train::Team;
use block_checkpoints::BlockReport;
pub(in crate::pass) use block_checkpoints::checkpoint_bytes;
use checks::{require_bytes, require_finite};
pub(in crate::pass) use corrections::{correct, correction_bytes, declare_corrections};
pub(in crate::pass) use forecast::{model_runs, runs_to_layers, runs_to_supported};
use guide::{Factors, Guidance, Guide};
use held_out::Split;
pub(in crate::pass) use low_rank::decompose;
use moments::{Moments, MomentsRequest};
pub(in crate::pass) use palettes::palettize;
use ranks::Ranks;
pub use remaining::Remaining;
use report::MethodReport;
use rescale::{Rescale, Strength};
pub(in crate::pass) use rounding::{quantize, rescale as rescale_channels};
use runs::{ModifiedBlock, Runs};
pub use scores::{Score, Scores, WeightFormat, scores, sizes};
pub(in crate::pass) use sites::retain_supported;
use sites::{Layer, Site, block_of, sites, unsupported};
pub(in crate::pass) use sparse::{input_axes, prune, require};
use summary::{Summary, few_tokens_note, without_gradients_note};

pub(in crate::pass) use super::input_scales::find as find_input_scales;
pub(in crate::pass) use super::kv_cache_scales::{add as add_cache_scales, add_calibrated as add_calibrated_cache_scales};

/// Minimum and maximum memory of activations cached between nodes, in bytes. In between, the limit is a
/// quarter of the size of the model as f32. Above the limit, activations are spilled to disk between
/// blocks, and recomputed from the start of their block for each observed value.
const CACHE_BYTES: [u64; 2] = [128 << 20, 1 << 30];

/// A method that modifies layers.
trait Method {
    /// Returns an error if the method does not support a layer. Called before any work.
    fn check(&self, layer: &Layer) -> Result<()>;

    /// Receives the gradients of a guided run before the first layer.
    fn guided(&mut self, _guide: &Rc<Guide>) {}

    /// Receives the statistics of a value before the layers that read it are modified.
    fn read(&mut self, value: &str, moments: Moments, readers: &Readers) -> Result<()>;

    /// Computes the new weights of a layer that reads the last value, by name. `values` is the current
    /// weight as `[rows, size]`.
    fn change(&mut self, layer: &Layer, weight: &Weight, values: &mut [f32]) -> Result<Vec<(String, Weight)>>;

    /// Approximate memory in bytes for modifying a layer, in addition to the sums of products.
    fn bytes(&self, layer: &Layer) -> usize {
        16 * layer.rows * layer.size
    }

    /// Divides the rows of the next layers among processes, if there are several and rows do not depend on
    /// each other. Returns whether it does: then all of them call [`change`](Method::change) for each layer.
    fn divide_rows(&mut self, _team: Option<&Rc<Team>>) -> bool {
        false
    }

    /// Effective values of the modified weight, in the stored shape of the original weight. `None` if the
    /// layer is not modified.
    fn values(&self, layer: &Layer, changed: &BTreeMap<String, Weight>) -> Result<Option<Vec<f32>>> {
        changed.get(&layer.weight).map(|weight| parallel::floats(weight, &layer.weight)).transpose()
    }

    /// Improves the changed weights of a block together, after all its layers were modified. Returns the
    /// weights that it changes again, by name.
    fn refine(&mut self, _block: &mut ModifiedBlock) -> Result<Vec<(String, Weight)>> {
        Ok(Vec::new())
    }

    /// The report on the layers since it was last taken.
    fn report(&mut self) -> &mut MethodReport;
}

/// The layers that read a value, and their current weights.
struct Readers<'a> {
    layers: &'a [Layer],
    model: &'a Model,
    changed: &'a BTreeMap<String, Weight>,
}

impl Readers<'_> {
    /// The current weight of a layer, and its values `[rows, size]`.
    fn values(&self, layer: &Layer) -> Result<(Weight, Vec<f32>)> {
        let weight = self.changed.get(&layer.weight).map_or_else(|| self.model.weights.get(&layer.weight), Ok)?.clone();
        let values = layer.output_major(parallel::floats(&weight, &layer.weight)?);
        require_finite(&layer.weight, &values)?;
        Ok((weight, values))
    }
}

/// Configuration of a layerwise run.
struct Layerwise<'a> {
    /// Name of the pass.
    pub name: &'static str,
    pub context: &'a Context<'a>,
    /// Weights to modify.
    pub targets: &'a BTreeSet<&'a str>,
    /// Statistics to collect of the inputs of layers.
    pub requested: MomentsRequest,
    /// Rescaling of channels before layers are modified.
    pub rescale: Option<Rescale>,
    pub flow: Flow,
}

/// Order and inputs of the steps of a layerwise run.
#[derive(Debug, Clone, Copy, Default)]
struct Flow {
    /// Whether the inputs of all layers of a block are observed before the first layer is modified.
    pub whole_block: bool,
    /// Whether the method refines blocks: the original model runs in parallel, one sample at a time.
    pub refined: bool,
    /// How the gradients of the loss are used.
    pub guidance: Guidance,
}

impl Layerwise<'_> {
    /// Modifies the target weights of the model.
    ///
    /// # Errors
    /// If there is no calibration data or it does not match the model, if a target is not the weight of
    /// exactly one linear layer, if the method fails, or if the work is cancelled.
    pub fn run(&self, model: &mut Model, method: &mut dyn Method) -> Result<Summary> {
        let team = ranks::connect(self.context)?;
        // If all processes are interrupted, this one may first notice that another one has stopped.
        let interrupted = |error| if self.context.work.cancel.check().is_err() { Error::Cancelled } else { error };
        let summary = self.run_in(&team, model, method).map_err(interrupted);
        summary.inspect_err(|error| team.stop(error))
    }

    /// Runs as one of several processes.
    fn run_in(&self, team: &Rc<Team>, model: &mut Model, method: &mut dyn Method) -> Result<Summary> {
        let graph = model.graph()?;
        let sites = sites(self.name, &graph, self.targets, self.flow.guidance == Guidance::Tokens)?;
        sites.iter().flat_map(|site| &site.layers).try_for_each(|layer| method.check(layer))?;
        self.require_memory(&graph, model, &sites, method)?;
        let context = self.context;
        let data = context.data.calibration.as_ref().ok_or_else(|| Error::option(self.name, "needs calibration samples: `data: { calibration: ... }`"))?;
        let subject = Subject::from_model(model.clone())?;
        let samples = context.data.open(data, subject.target())?;
        let layers: BTreeSet<String> = self.targets.iter().map(|name| (*name).to_owned()).collect();
        let chains = self.rescale.as_ref().map(|rescale| rescale.chains(&graph, &layers, model)).transpose()?;
        let values: BTreeSet<&str> = sites.iter().map(|site| site.value.as_str()).chain(chains.iter().flat_map(rescale::Chains::values)).collect();
        let ranks = Ranks::open(team, context)?;
        let options = self.blockwise_options(model, ranks.scratch()?);
        let original = model.weights.clone();
        let start = |options| Blockwise::new(&graph, &original, |name| values.contains(name), options, &context.work);
        let guidance = self.flow.guidance;
        let guide = || Guide::open(guidance, &sites, (&graph, model), &samples, &ranks, context).map(Rc::new);
        let guide = (guidance != Guidance::None).then(guide).transpose()?;
        guide.iter().for_each(|guide| method.guided(guide));
        let reference = (self.runs() > 1).then(|| start(options.clone()));
        let mut runs = Runs { reference, blocks: start(options), roles: SequenceRoles::new(&graph), guide, ranks };
        let skipped = chains.as_ref().map(|chains| chains.skipped(runs.blocks.blocks())).unwrap_or_default();
        let mut summary = Summary { samples: self.read_samples(&samples, &mut runs)?, skipped, ..Summary::default() };
        summary.report.notes.extend(rescale::note(&summary.skipped).into_iter().chain(checks::many_samples_note(&samples, summary.samples)));
        let mut by_block: BTreeMap<usize, Vec<&Site>> = BTreeMap::new();
        for site in &sites {
            by_block.entry(block_of(runs.blocks.blocks(), site)?).or_default().push(site);
        }
        let (last, levels) = (by_block.keys().next_back().copied().unwrap_or(0), ranks::levels(&graph, &sites));
        runs.end_at(last);
        let (mut resumed, mut remaining) = (0, Remaining::new("blocks", last + 1));
        for block in 0..=last {
            runs.enter(block, &summary.changed)?;
            let sites = by_block.get(&block).map(Vec::as_slice).unwrap_or_default();
            let stored = runs.ranks.load(block, model, &context.work)?;
            let is_stored = stored.is_some();
            let (changed, report) = match stored {
                Some((changed, report)) => {
                    resumed += 1;
                    self.resume(sites, &original, &mut runs.blocks, method, &changed)?;
                    (changed, report)
                }
                None => {
                    let groups = runs.ranks.groups(sites, &levels, self.flow.whole_block);
                    let (changed, report) = self.solve(block, &groups, chains.as_ref(), model, &mut runs, method)?;
                    runs.ranks.store(block, model, changed, report, &context.work)?
                }
            };
            summary.add(&changed, report);
            model.weights.by_name.extend(changed);
            if block < last {
                runs.leave()?;
            }
            // Otherwise the heap grows from block to block: sizes of solvers and activations differ.
            heap::release_freed();
            remaining.finish(block, is_stored, &context.work);
        }
        summary.report.notes.extend(few_tokens_note(mem::take(&mut summary.few_tokens)));
        summary.report.notes.extend(without_gradients_note(&summary.report.without_gradients));
        if resumed > 0 {
            summary.report.notes.push(format!("{} loaded from the checkpoints of an interrupted run", counted(resumed, "block")));
        }
        Ok(summary)
    }

    /// Options of both models. Parameters, sums of products and factorizations need most of the memory.
    fn blockwise_options(&self, model: &Model, spill: Option<PathBuf>) -> BlockwiseOptions {
        let (context, [min, max]) = (self.context, CACHE_BYTES);
        let cache_bytes = model.weights.parameters().clamp(min, max);
        BlockwiseOptions {
            compute: DType::F32,
            residence: Residence::Stored,
            limit: context.memory.bytes.map_or(cache_bytes, |bytes| (bytes / 4).min(cache_bytes)) / self.runs(),
            spill,
            tracker: context.memory_tracker.clone(),
            ..BlockwiseOptions::on(&context.device)
        }
    }

    /// Reads the samples of this rank into both models. Returns the number of all samples.
    fn read_samples(&self, data: &DataSet, runs: &mut Runs) -> Result<usize> {
        let (own, mut number) = (runs.ranks.batches(data)?, 0);
        runs.ranks.share.first_batch = own.start;
        data.for_each_batch("Reading samples", &self.context.work, |batch| {
            let (parts, count) = if self.flow.refined { (batch.samples, 1) } else { (1, batch.samples) };
            let share = &mut runs.ranks.share;
            if number < own.start {
                share.first_sample += batch.samples;
            }
            (share.samples, share.batches) = (share.samples + batch.samples, share.batches + parts);
            number += 1;
            if !own.contains(&(number - 1)) {
                return Ok(());
            }
            (0..parts).try_for_each(|part| {
                let batch = batch.narrow(part * count, count)?;
                runs.reference.iter_mut().try_for_each(|reference| reference.push(batch.clone()))?;
                runs.blocks.push(batch)
            })
        })?;
        let samples = runs.ranks.share.samples;
        if samples == 0 { Err(Error::option(self.name, "the calibration data is empty")) } else { Ok(samples) }
    }

    /// Continues with the weights of a block from its checkpoint.
    fn resume(&self, sites: &[&Site], original: &Weights, blocks: &mut Blockwise, method: &dyn Method, changed: &BTreeMap<String, Weight>) -> Result<()> {
        let layers = || sites.iter().flat_map(|site| &site.layers);
        let is_other = |name: &String| original.by_name.contains_key(name) && layers().all(|layer| layer.weight != *name);
        for (name, weight) in changed.iter().filter(|(name, _)| is_other(name)) {
            blocks.replace(name, tensor(&weight.floats(name)?, &weight.shape, self.context)?);
        }
        for layer in layers() {
            if let Some(values) = method.values(layer, changed)? {
                blocks.replace(&layer.weight, tensor(&values, &original.get(&layer.weight)?.shape, self.context)?);
            }
        }
        Ok(())
    }

    /// Modifies the layers of a block.
    fn solve(
        &self,
        block: usize,
        groups: &[Vec<&Site>],
        chains: Option<&rescale::Chains>,
        model: &Model,
        runs: &mut Runs,
        method: &mut dyn Method,
    ) -> Result<(BTreeMap<String, Weight>, BlockReport)> {
        let (mut changed, mut report) = (BTreeMap::new(), BlockReport::default());
        if let (Some(rescale), Some(chains)) = (&self.rescale, chains) {
            report.rescaled = rescale.block(chains, block, self, model, (&mut runs.blocks, &runs.ranks), &mut changed)?;
        }
        for (number, group) in groups.iter().enumerate() {
            let divides = method.divide_rows(runs.ranks.team().filter(|_| group.len() == 1));
            let (own, mut observed) = (runs.ranks.own_layers(group, divides), Vec::new());
            for site in group {
                let mut moments = Moments::new(site.layers.first().map_or(0, |layer| layer.size), self.requested);
                let Runs { blocks, reference, guide, ranks, .. } = &mut *runs;
                let mut observe = |moments: &mut Moments| {
                    let first = ranks.share.first_sample;
                    let factors =
                        guide.as_ref().filter(|_| self.flow.guidance == Guidance::Tokens).and_then(|guide| guide.factors(&site.layers.first()?.weight, first));
                    self.observe(site, moments, (&mut *blocks, &*ranks), reference.as_mut().filter(|_| self.requested.original), factors)?;
                    moments.finish(&site.value)
                };
                observe(&mut moments)?;
                if moments.hold_out_more() {
                    observe(&mut moments)?;
                }
                let tokens = moments.tokens();
                // If only magnitudes of features are used, few tokens matter only for experts.
                if tokens < moments.size && (self.requested.products || self.rescale.is_some() || tokens < moments.count) {
                    report.few_tokens.push((tokens, moments.size, site.value.clone()));
                }
                if site.layers.iter().any(|layer| own.contains(&layer.weight)) {
                    observed.push((*site, moments));
                }
            }
            let solved = self.change(group, (observed, &own), model, &runs.ranks, method, &changed)?;
            let (solved, added) = if divides { solved } else { runs.ranks.exchange([block, number], model, solved, &self.context.work)? };
            report.method.extend(added);
            changed.extend(solved);
            for layer in group.iter().flat_map(|site| &site.layers) {
                // Continue with the stored values, which a resumed run would read.
                if let Some(values) = method.values(layer, &changed)? {
                    require_finite(&layer.weight, &values)?;
                    runs.blocks.replace(&layer.weight, tensor(&values, &model.weights.get(&layer.weight)?.shape, self.context)?);
                }
            }
        }
        for (name, weight) in method.refine(&mut ModifiedBlock { index: block, runs, context: self.context })? {
            runs.blocks.replace(&name, tensor(&weight.floats(&name)?, &weight.shape, self.context)?);
            changed.insert(name, weight);
        }
        report.method.extend(mem::take(method.report()));
        Ok((changed, report))
    }

    /// Number of models that run simultaneously.
    fn runs(&self) -> u64 {
        1 + u64::from(self.requested.original || self.flow.refined)
    }

    /// Returns an error if the estimated memory exceeds an explicit limit.
    fn require_memory(&self, graph: &Graph, model: &Model, sites: &[Site], method: &dyn Method) -> Result<()> {
        let Some(limit) = self.context.memory.bytes.filter(|_| self.context.memory.explicit) else { return Ok(()) };
        let need = MemoryNeed::estimate(graph, &model.weights, DType::F32, Residence::Stored, &analysis::usual_sizes(graph));
        // The peak is either the factorization in f64 of the sums of products, or the modification of a
        // weight with both kinds of sums.
        let layer = |layer: &Layer| {
            let square = if self.requested.products { layer.size * layer.size } else { 0 };
            (20 * square).max(12 * square + method.bytes(layer))
        };
        let layers = || sites.iter().flat_map(|site| &site.layers);
        let largest = layers().map(layer).max().unwrap_or(0) as u64;
        // Refining a block needs its gradients and several copies of its weights, and all of its activations.
        let refined =
            |block: &analysis::Block| layers().filter(|layer| block.parameters.contains(&layer.weight)).map(|layer| 32 * layer.rows * layer.size).sum();
        let blocks = if self.flow.refined { analysis::blocks(graph) } else { Vec::new() };
        let refined = blocks.iter().map(refined).max().map_or(0, |bytes: usize| bytes as u64 + 4 * need.activations);
        let moments = guide::bytes_in_memory(self.flow.guidance, sites, self.context.checkpoints.is_some());
        let what = match moments {
            0 => "the blocks of this model and the solver of its largest layer need",
            _ => "the blocks of this model, the second moments of the gradients of all layers and the solver of the largest one need",
        };
        require_bytes(self.name, what, need.blocks + self.runs() * need.activations + largest.max(refined) + moments, limit)
    }

    /// Modifies the `own` layers of observed values. Returns their new weights, and the report of one of
    /// several ranks.
    fn change(
        &self,
        group: &[&Site],
        (observed, own): (Vec<(&Site, Moments)>, &BTreeSet<String>),
        model: &Model,
        ranks: &Ranks,
        method: &mut dyn Method,
        changed: &BTreeMap<String, Weight>,
    ) -> Result<(BTreeMap<String, Weight>, MethodReport)> {
        let (mut solved, mut report) = (BTreeMap::new(), MethodReport::default());
        for (site, moments) in observed {
            let readers = Readers { layers: &site.layers, model, changed };
            method.read(&site.value, moments, &readers)?;
            if ranks.count() > 1 {
                report.extend(ranks.take_report(group, method.report()));
            }
            for layer in site.layers.iter().filter(|layer| own.contains(&layer.weight)) {
                let (weight, mut values) = readers.values(layer)?;
                solved.extend(method.change(layer, &weight, &mut values)?);
            }
        }
        if ranks.count() > 1 {
            report.extend(mem::take(method.report()));
        }
        Ok((solved, report))
    }

    /// Collects statistics of a value over the samples of all ranks, optionally with that of the reference
    /// model, of rows multiplied by factors.
    fn observe(
        &self,
        Site { value, tokens, .. }: &Site,
        moments: &mut Moments,
        (blocks, ranks): (&mut Blockwise, &Ranks),
        mut reference: Option<&mut Blockwise>,
        mut factors: Option<Factors>,
    ) -> Result<()> {
        let op = Op::Linear(crate::ir::ops::Linear::default());
        let (mut index, mut sample) = (0, ranks.share.first_sample);
        let (samples, seed) = (ranks.share.samples, self.context.seed);
        let new_split = |sizes: &[usize]| ranks.first(|| Ok(sizes.iter().copied().max().unwrap_or(0))).map(|longest| Split::new(samples, longest, seed));
        moments.batches = ranks.share.first_batch;
        blocks.each(value, |batch, tensor| {
            let (mut rows, sizes) = calibrate::rows_by_sample(tensor, &op, batch, *tokens)?;
            let mut original = match &mut reference {
                Some(reference) => Some(calibrate::rows(&reference.value(index, value)?, &op, batch, *tokens)?),
                None => None,
            };
            if let Some(factors) = &mut factors {
                factors.scale(value, [Some(&mut rows), original.as_mut()])?;
            }
            index += 1;
            if !moments.request.held_out {
                let all = || (0..rows.dims()[0] as u32).collect();
                original.iter().try_for_each(|original| moments.add_original(value, original, all(), &rows))?;
                return moments.add(value, &rows);
            }
            let split = moments.split.map_or_else(|| new_split(&sizes), Ok)?;
            moments.split = Some(split);
            let (folds, others) = split.indices(sample, &sizes);
            sample += sizes.len();
            let part = |tensor: &Tensor, rows: &[u32]| select_rows(tensor, rows.to_vec()).map_err(calibrate::tensor_error);
            for (fold, held_out) in folds.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                let original = original.as_ref().map(|original| part(original, held_out)).transpose()?;
                moments.hold_out(value, fold, &part(&rows, held_out)?, original.as_ref())?;
            }
            if others.is_empty() {
                return Ok(());
            }
            let rows = part(&rows, &others)?;
            original.iter().try_for_each(|original| moments.add_original(value, original, others.clone(), &rows))?;
            moments.add(value, &rows)
        })?;
        if moments.request.held_out && moments.split.is_none() {
            // A rank without samples.
            moments.split = Some(new_split(&[])?);
        }
        moments.reduce(ranks, &self.context.device)
    }
}

fn tensor(values: &[f32], shape: &[usize], context: &Context) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &context.device).map_err(calibrate::tensor_error)
}
