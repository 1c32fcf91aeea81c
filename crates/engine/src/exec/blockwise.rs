//! Block-wise execution: all samples run through one block of a graph, then through the next. Only the
//! parameters of the current block and those being prefetched are in memory, and of the samples only the
//! activations cached between blocks.

mod gradients;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::block_state::{BlockState, run_bytes};
use super::load::SpareTensors;
use super::memory::SpillFile;
use super::prefetch::Prefetch;
use super::residence::coded_parameters;
use super::run::Snapshot;
use super::{BlockwiseOptions, Executor, MemoryCategory, Observation, Parameters, PartialRun};
use crate::analysis::{self, Block};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::ir::ops::contiguous;
use crate::ir::{Graph, Kind, ValueId};
use crate::store::Weights;
use crate::work::{Event, ProgressUnit, Work};

/// Name of cached activations in memory accounting.
const STATES: &str = "states between blocks";

/// A graph that is executed block by block.
pub struct Blockwise<'a> {
    executor: Executor<'a>,
    observation: Observation,
    /// For each value by name, its id, and the number of steps after which it is available, if it is
    /// materialized.
    positions: BTreeMap<&'a str, (ValueId, Option<usize>)>,
    blocks: Vec<Block>,
    /// For each block, the number of steps at its end.
    ends: Vec<usize>,
    weights: Weights,
    options: BlockwiseOptions,
    work: Work<'a>,
    samples: Vec<SampleState>,
    current: Option<usize>,
    /// The last block that will be entered.
    last: usize,
    prefetch: Option<Prefetch>,
    /// Spill file for states beyond the limit.
    file: Option<Arc<SpillFile>>,
    /// Names of replaced parameters.
    replaced: BTreeSet<String>,
    /// Parameters that only linear layers of this graph refer to, so that their memory can be reused.
    reusable: BTreeSet<String>,
    /// Parameters that may stay integers.
    coded: Arc<BTreeSet<String>>,
    /// Tensors of the previous block that can be reused when the next block is read.
    spare: Vec<Tensor>,
    /// Bytes of states and suspended runs, and the amount reported to the tracker.
    cached_bytes: u64,
    reported: u64,
    peak: u64,
}

/// A sample between blocks.
struct SampleState {
    batch: Batch,
    /// State at the start of the block.
    start: BlockState,
    /// Suspended run within the block, if it fits into the limit.
    run: Option<PartialRun>,
}

impl<'a> Blockwise<'a> {
    /// Prepares a graph. `wanted` selects the values that can be observed, by name; nodes in between stay
    /// fused. No parameter is read yet.
    pub fn new(graph: &'a Graph, weights: &Weights, wanted: impl Fn(&str) -> bool, options: BlockwiseOptions, work: &Work<'a>) -> Blockwise<'a> {
        let executor = Executor::new(graph, Parameters::from_tensors(BTreeMap::new(), options.compute), options.device.clone())
            .with_rounding(options.rounding)
            .tracked(options.tracker.as_ref());
        let reuses = options.device.is_cpu();
        let mut blocks = analysis::blocks(graph);
        let values: BTreeSet<&str> = blocks.iter().take(blocks.len().saturating_sub(1)).map(|block| block.value.as_str()).collect();
        let outputs: BTreeSet<&str> = graph.outputs().iter().map(|(_, id)| graph.value(*id).name.as_str()).collect();
        let observation = executor.observation(|name| wanted(name) || values.contains(name) || outputs.contains(name));
        let last = |step: &super::plan::FusedNodes| step.nodes.last().copied().unwrap_or(0);
        let ends: Vec<usize> = blocks.iter().map(|block| observation.steps.partition_point(|step| last(step) < block.nodes.end)).collect();
        let mut begin = 0;
        for (block, end) in blocks.iter_mut().zip(&ends) {
            // The parameters of its steps, which are those of its nodes without unneeded ones.
            let nodes = observation.steps[begin..*end].iter().flat_map(|step| &step.nodes).map(|index| &graph.nodes()[*index]);
            let inputs = nodes.flat_map(|node| &node.inputs).map(|id| graph.value(*id));
            block.parameters = inputs.filter(|value| value.kind == Kind::Param).map(|value| value.name.clone()).collect();
            begin = *end;
        }
        let mut positions: BTreeMap<&str, (ValueId, Option<usize>)> = graph.ids().map(|id| (graph.value(id).name.as_str(), (id, None))).collect();
        for (index, step) in observation.steps.iter().enumerate() {
            let id = graph.nodes()[last(step)].output;
            positions.insert(graph.value(id).name.as_str(), (id, Some(index + 1)));
        }
        let needed: BTreeSet<&String> = blocks.iter().flat_map(|block| &block.parameters).collect();
        let by_name = weights.by_name.iter().filter(|(name, _)| needed.contains(name)).map(|(name, weight)| (name.clone(), weight.clone())).collect();
        let weights = Weights { by_name, derived: weights.derived.clone(), ..Weights::default() };
        Blockwise {
            coded: Arc::new(coded_parameters(graph, options.residence, options.compute)),
            executor,
            observation,
            positions,
            blocks,
            ends,
            weights,
            options,
            work: *work,
            samples: Vec::new(),
            current: None,
            last: usize::MAX,
            prefetch: None,
            file: None,
            replaced: BTreeSet::new(),
            reusable: if reuses { analysis::linear_weights(graph) } else { BTreeSet::new() },
            spare: Vec::new(),
            cached_bytes: 0,
            reported: 0,
            peak: 0,
        }
    }

    /// The blocks in order, with the parameters that each of them reads.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The block of a node, by its index in the graph. The inputs of the node can be observed there, even
    /// if the previous block computes them.
    pub fn block_of(&self, node: usize) -> usize {
        self.blocks.partition_point(|block| block.nodes.end <= node)
    }

    /// The observable values that a block computes, in order.
    pub fn values_of(&self, block: usize) -> Vec<&'a str> {
        let begin = block.checked_sub(1).map_or(0, |before| self.ends[before]);
        let mut found: Vec<(usize, &'a str)> = self
            .positions
            .iter()
            .filter_map(|(name, (_, done))| done.filter(|done| *done > begin && *done <= self.ends[block]).map(|done| (done, *name)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Declares that `block` is the last one that will be entered, so that later ones are not prefetched.
    pub fn end_at(&mut self, block: usize) {
        self.last = block;
    }

    /// Number of batches.
    pub fn batches(&self) -> usize {
        self.samples.len()
    }

    /// Drops all batches except the first `batches`.
    pub fn truncate(&mut self, batches: usize) {
        for sample in self.samples.drain(batches.min(self.samples.len())..) {
            self.cached_bytes = self.cached_bytes.saturating_sub(sample.start.bytes() + sample.run.map_or(0, |run| run_bytes(&run, &sample.start)));
        }
        self.account();
    }

    /// The batch with this index.
    pub fn batch(&self, index: usize) -> &Batch {
        &self.samples[index].batch
    }

    /// Peak bytes of parameters (including those being read), states and suspended runs.
    pub fn peak_bytes(&self) -> u64 {
        self.peak
    }

    /// Adds samples before the first block is entered.
    pub fn push(&mut self, batch: Batch) -> Result<()> {
        if self.current.is_some() {
            return Err(Error::run("block-wise execution", "cannot add samples after a block was entered", ""));
        }
        let snapshot = self.executor.start(&batch.inputs)?.snapshot();
        let start = self.store_state(snapshot)?;
        self.samples.push(SampleState { batch, start, run: None });
        self.account();
        Ok(())
    }

    /// Loads the parameters of the next block, and starts prefetching those of the following one. Fails if
    /// `block` is not the next one.
    pub fn enter(&mut self, block: usize) -> Result<()> {
        self.enter_sharing(block, None, &BTreeSet::new())
    }

    /// As [`enter`](Blockwise::enter), sharing parameters with another graph that has entered the block:
    /// those named in `same` that are loaded there are not loaded again.
    pub fn enter_sharing(&mut self, block: usize, other: Option<&Blockwise>, same: &BTreeSet<&str>) -> Result<()> {
        let next = self.current.map_or(0, |current| current + 1);
        if block != next || block >= self.blocks.len() {
            return Err(Error::run("block-wise execution", format!("cannot enter block {block} of {}, expected block {next}", self.blocks.len()), ""));
        }
        self.work.cancel.check()?;
        self.current = Some(block);
        let names = &self.blocks[block].parameters;
        let mut loaded = other.map_or_else(
            || self.executor.parameters().subset([]),
            |other| other.executor.parameters().subset(names.iter().filter(|name| same.contains(name.as_str()))),
        );
        if let Some(prefetch) = self.prefetch.take_if(|prefetch| prefetch.block == block) {
            loaded.extend(prefetch.join()?);
        }
        let missing: Vec<&String> = names.iter().filter(|name| !self.executor.parameters().has(name) && !loaded.has(name)).collect();
        let how = (&self.options.device, self.options.compute, self.options.residence);
        loaded.extend(Parameters::load_reusing(&SpareTensors::default(), missing, &self.coded, &self.weights, how, &self.work.quiet())?);
        self.reusable.retain(|name| !same.contains(name.as_str()));
        // Parameters that were replaced before this block stay replaced.
        loaded.retain(|name| !self.executor.parameters().has(name));
        self.executor.change_parameters(|parameters| parameters.extend(loaded));
        self.start_prefetch(block + 1, other, same);
        self.account();
        Ok(())
    }

    /// Runs several graphs through the block with this index, if they have it. Parameters named in `same`
    /// are loaded once for all. Graphs with fewer blocks stay in their last one.
    pub fn run_block(runs: &mut [&mut Blockwise], block: usize, same: &BTreeSet<&str>) -> Result<()> {
        for index in 0..runs.len() {
            let (before, rest) = runs.split_at_mut(index);
            if let Some(run) = rest.first_mut().filter(|run| block < run.blocks.len()) {
                run.enter_sharing(block, before.first().map(|first| &**first), same)?;
            }
        }
        runs.iter_mut().filter(|run| block < run.blocks.len()).try_for_each(|run| run.leave())
    }

    /// Starts reading a block's parameters, except loaded and shared ones.
    fn start_prefetch(&mut self, block: usize, other: Option<&Blockwise>, same: &BTreeSet<&str>) {
        let Some(next) = self.blocks.get(block).filter(|_| block <= self.last) else { return };
        let elsewhere =
            |name: &str| same.contains(name) && other.and_then(|other| other.blocks.get(block)).is_some_and(|other| other.parameters.contains(name));
        let names: Vec<String> = next.parameters.iter().filter(|name| !self.executor.parameters().has(name) && !elsewhere(name)).cloned().collect();
        let by_name: BTreeMap<_, _> = names.iter().filter_map(|name| Some((name.clone(), self.weights.find(name)?.clone()))).collect();
        if names.is_empty() || by_name.len() < names.len() {
            return;
        }
        let spare = SpareTensors::new(std::mem::take(&mut self.spare));
        self.prefetch = Prefetch::read(block, Weights { by_name, ..Weights::default() }, self.coded.clone(), spare, &self.options, &self.work);
    }

    /// Continues to the first block in which a value can be observed. Fails if the value is not available
    /// from this block on.
    pub fn reach(&mut self, value: &str) -> Result<()> {
        loop {
            if let Ok((begin, end)) = self.range() {
                let leads_in = |id| self.samples.first().is_some_and(|sample| sample.start.contains(id));
                if self.positions.get(value).is_some_and(|(id, done)| done.is_some_and(|done| done > begin && done <= end) || leads_in(*id)) {
                    return Ok(());
                }
                self.leave()?;
            }
            let next = self.current.map_or(0, |current| current + 1);
            if next >= self.blocks.len() {
                return Err(Error::graph(format!("graph value `{value}`"), "is not computed in this block or a later one"));
            }
            self.enter(next)?;
        }
    }

    /// Calls `visit` with a value of every batch, contiguous. Batches resume from their suspended runs or
    /// from the start of the block. The value must be computed in this block or be an input of it.
    pub fn each(&mut self, value: &str, mut visit: impl FnMut(&Batch, &Tensor) -> Result<()>) -> Result<()> {
        self.sweep(|run, index| {
            let tensor = run.value(index, value)?;
            visit(&run.samples[index].batch, &tensor)
        })
    }

    /// The value of one batch.
    pub fn value(&mut self, index: usize, value: &str) -> Result<Tensor> {
        let (begin, end) = self.range()?;
        let unusable = |reason: &str| Error::graph(format!("graph value `{value}`"), reason);
        let (id, done) = *self.positions.get(value).ok_or_else(|| unusable("does not exist"))?;
        let leads_in = self.samples[index].start.contains(id);
        match done {
            Some(done) if done > end => return Err(unusable("is computed in a later block")),
            Some(done) if done <= begin && !leads_in => return Err(unusable("is computed in an earlier block and not read in this one")),
            None if !leads_in => return Err(unusable("was not requested, or is no longer available")),
            _ => {}
        }
        if leads_in {
            return contiguous(&self.samples[index].start.get(id, &self.options.device)?).map_err(|e| Error::candle(format!("graph node `{value}`"), e));
        }
        let mut run = self.resume(index, |run| run.done < done.unwrap_or(0) || run.values[id.index()].is_some())?;
        let tensor = self.executor.advance(&self.observation, &mut run, value)?;
        let bytes = run_bytes(&run, &self.samples[index].start);
        if self.cached_bytes.saturating_add(bytes) <= self.options.limit {
            self.cached_bytes += bytes;
            self.samples[index].run = Some(run);
        }
        self.account();
        Ok(tensor)
    }

    /// Resumes the run of a batch: the suspended run if it is `usable`, else from the start of the block.
    fn resume(&mut self, index: usize, usable: impl Fn(&PartialRun) -> bool) -> Result<PartialRun> {
        let sample = &mut self.samples[index];
        if let Some(run) = sample.run.take() {
            self.cached_bytes = self.cached_bytes.saturating_sub(run_bytes(&run, &sample.start));
            if usable(&run) {
                return Ok(run);
            }
        }
        Ok(self.executor.resume(&sample.start.snapshot(&self.options.device)?))
    }

    /// A parameter of this block in the precision of the computation, copied.
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        self.executor.parameters().get(name).and_then(|tensor| tensor.copy()).map_err(|e| Error::tensor(name, e, ""))
    }

    /// Replaces a parameter for nodes of this block and of later ones, including nodes that already ran
    /// for an observed value.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        let graph = self.executor.graph();
        let reads = |index: &usize| graph.nodes()[*index].inputs.iter().any(|id| graph.value(*id).name == name);
        let begin = self.range().map_or(0, |(begin, _)| begin);
        if let Some(first) = self.observation.steps.iter().skip(begin).position(|step| step.nodes.iter().any(reads)) {
            for sample in &mut self.samples {
                if let Some(run) = sample.run.take_if(|run| run.done > begin + first) {
                    self.cached_bytes = self.cached_bytes.saturating_sub(run_bytes(&run, &sample.start));
                }
            }
        }
        self.executor.replace(name, tensor);
        self.replaced.insert(name.to_owned());
    }

    /// Runs all samples to the end of the block and drops its parameters; of the samples, only values
    /// that later blocks read are retained. The last block is left with [`outputs`](Blockwise::outputs).
    /// Fails if no block was entered.
    pub fn leave(&mut self) -> Result<()> {
        let (_, end) = self.range()?;
        let Some(next) = self.current.map(|current| current + 1).filter(|next| *next < self.blocks.len()) else { return Ok(()) };
        self.file = None;
        self.sweep(|all, index| {
            let mut run = all.resume(index, |_| true)?;
            all.executor.advance_to(&all.observation, &mut run, end)?;
            all.cached_bytes = all.cached_bytes.saturating_sub(all.samples[index].start.bytes());
            let snapshot = run.snapshot();
            drop(run);
            all.samples[index].start = all.store_state(snapshot)?;
            all.account();
            Ok(())
        })?;
        let (replaced, later) = (&self.replaced, &self.blocks[next..]);
        let keep = |name: &str| later[0].parameters.contains(name) || (replaced.contains(name) && later.iter().any(|block| block.parameters.contains(name)));
        self.spare = self.dropped(keep);
        self.executor.change_parameters(|parameters| parameters.retain(keep));
        self.account();
        Ok(())
    }

    /// The parameters about to be dropped whose memory another block can reuse.
    fn dropped(&self, keep: impl Fn(&str) -> bool) -> Vec<Tensor> {
        let Some(current) = self.current else { return Vec::new() };
        let mut wanted: Vec<(&[usize], DType)> = Vec::new();
        for weight in self.blocks.get(current + 2).iter().flat_map(|block| &block.parameters).filter_map(|name| self.weights.find(name)) {
            wanted.push((&weight.shape, self.options.residence.dtype(weight, self.options.compute)));
        }
        let free =
            |name: &&String| self.executor.parameters().coded(name).is_none() && self.reusable.contains(*name) && !self.replaced.contains(*name) && !keep(name);
        let tensors = self.blocks[current].parameters.iter().filter(free).filter_map(|name| self.executor.parameters().stored(name).ok());
        tensors.filter(|tensor| wanted.iter().position(|want| *want == (tensor.dims(), tensor.dtype())).map(|at| wanted.swap_remove(at)).is_some()).collect()
    }

    /// Runs every batch through the last block, and calls `visit` with its outputs as in
    /// [`Executor::run`]. Fails if the last block was not entered.
    pub fn outputs(&mut self, mut visit: impl FnMut(&Batch, BTreeMap<String, Tensor>) -> Result<()>) -> Result<()> {
        self.sweep(|run, index| {
            let outputs = run.outputs_of(index)?;
            visit(&run.samples[index].batch, outputs)
        })
    }

    /// The outputs of one batch.
    pub fn outputs_of(&mut self, index: usize) -> Result<BTreeMap<String, Tensor>> {
        let (_, end) = self.range()?;
        if self.current.is_none_or(|current| current + 1 < self.blocks.len()) {
            return Err(Error::run("block-wise execution", "returns outputs only in the last block", ""));
        }
        let mut run = self.resume(index, |_| true)?;
        self.executor.advance_to(&self.observation, &mut run, end)?;
        self.executor.outputs(&run)
    }

    /// The outputs of one batch for some of its tokens: computed from a slice along axis 1 of an observed
    /// value of the last block, after which all values are computed token by token, as [`analysis::head`]
    /// determines.
    pub fn outputs_of_tokens(&mut self, index: usize, value: &str, tokens: Range<usize>) -> Result<BTreeMap<String, Tensor>> {
        let rows = self.value(index, value)?.narrow(1, tokens.start, tokens.len()).and_then(|rows| contiguous(&rows));
        let rows = rows.map_err(|e| Error::candle(format!("graph node `{value}`"), e))?;
        let (begin, end) = self.range()?;
        let (id, done) = *self.positions.get(value).ok_or_else(|| Error::graph(format!("graph value `{value}`"), "does not exist"))?;
        let mut run = self.executor.resume(&Snapshot { values: Vec::new(), done: done.unwrap_or(0).max(begin) });
        run.values[id.index()] = Some(rows);
        self.executor.advance_to(&self.observation, &mut run, end)?;
        self.executor.outputs(&run)
    }

    /// The steps of this block.
    fn range(&self) -> Result<(usize, usize)> {
        let current = self.current.ok_or_else(|| Error::run("block-wise execution", "no block was entered", ""))?;
        Ok((current.checked_sub(1).map_or(0, |before| self.ends[before]), self.ends[current]))
    }

    /// Processes all batches, with progress events.
    fn sweep(&mut self, mut batch: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        let stage = format!("Block {} of {}", self.current.map_or(0, |current| current + 1), self.blocks.len());
        let total = self.samples.iter().map(|sample| sample.batch.samples as u64).sum();
        let work = self.work;
        work.progress.on(Event::Begin { stage: &stage, total, done: 0, unit: ProgressUnit::Samples });
        let done = (0..self.samples.len()).try_for_each(|index| {
            work.cancel.check()?;
            batch(self, index)?;
            work.advance(self.samples[index].batch.samples as u64)
        });
        work.progress.on(Event::End);
        done
    }

    /// Stores a state for the next block: in memory, or with its floats in a file beyond the limit.
    fn store_state(&mut self, snapshot: Snapshot) -> Result<BlockState> {
        let mut state = BlockState::new(snapshot);
        let beyond = self.cached_bytes.saturating_add(state.bytes()) > self.options.limit;
        if let Some(folder) = self.options.spill.as_ref().filter(|_| beyond) {
            let file = match &self.file {
                Some(file) => file,
                None => self.file.insert(SpillFile::create(folder)?),
            };
            state.spill(file)?;
        }
        self.cached_bytes += state.bytes();
        Ok(state)
    }

    /// Updates the memory accounting.
    fn account(&mut self) {
        let parameters = self.executor.parameters().bytes() + self.prefetch.as_ref().map_or(0, |prefetch| prefetch.bytes);
        self.peak = self.peak.max(parameters + self.cached_bytes);
        if let Some(tracker) = &self.options.tracker {
            tracker.release_named(MemoryCategory::Activations, STATES, self.reported.saturating_sub(self.cached_bytes));
            // This tracker has no budget to exceed.
            let _ = tracker.allocate_named(MemoryCategory::Activations, STATES, self.cached_bytes.saturating_sub(self.reported));
        }
        self.reported = self.cached_bytes;
    }
}

impl Drop for Blockwise<'_> {
    fn drop(&mut self) {
        if let Some(prefetch) = self.prefetch.take() {
            let _ = prefetch.join();
        }
        self.cached_bytes = 0;
        self.account();
    }
}
