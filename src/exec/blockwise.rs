//! All samples through one block of a graph, then through the next: only the parameters of one block, and of the next one that is being
//! read, are in memory, and of the samples only what crosses from block to block.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::ahead::Ahead;
use super::load::Spare;
use super::run::Snapshot;
use super::spill::{SpillFile, State, run_bytes};
use super::{BlockwiseOptions, Executor, MemoryCategory, Observation, Parameters, PartialRun};
use crate::analysis::{self, Block};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::ir::ops::contiguous;
use crate::ir::{Graph, Kind, ValueId};
use crate::store::Weights;
use crate::work::{Event, ProgressUnit, Work};

/// The account of what samples hold between nodes.
const STATES: &str = "states between blocks";

/// A graph that is run block by block.
pub struct Blockwise<'a> {
    executor: Executor<'a>,
    observation: Observation,
    /// By the value's name: it, and how many steps are done when it is computed.
    places: BTreeMap<&'a str, (ValueId, Option<usize>)>,
    blocks: Vec<Block>,
    /// By block: how many steps are done at its end.
    ends: Vec<usize>,
    weights: Weights,
    options: BlockwiseOptions,
    work: Work<'a>,
    samples: Vec<Held>,
    current: Option<usize>,
    /// The last block that will be entered.
    last: usize,
    ahead: Option<Ahead>,
    /// Where states go that are beyond the limit.
    file: Option<Arc<SpillFile>>,
    /// Parameters that were replaced.
    replaced: BTreeSet<String>,
    /// Parameters that nothing but layers of this graph refers to, so that their memory may take others.
    reusable: BTreeSet<String>,
    /// Those of the block before which the block to be read next has room for.
    spare: Vec<Tensor>,
    /// Bytes of states and stopped runs, and those that the tracker knows.
    held: u64,
    told: u64,
    peak: u64,
}

/// A sample on its way.
struct Held {
    batch: Batch,
    /// At the beginning of the block.
    start: State,
    /// Within the block, where there is room for it.
    run: Option<PartialRun>,
}

impl<'a> Blockwise<'a> {
    /// Prepares a graph. `wanted` are the values that will be looked at, by name; what lies between them stays fused. No parameter is
    /// read yet.
    pub fn new(graph: &'a Graph, weights: &Weights, wanted: impl Fn(&str) -> bool, options: BlockwiseOptions, work: &Work<'a>) -> Blockwise<'a> {
        let executor = Executor::new(graph, Parameters::of(BTreeMap::new(), options.compute), options.device.clone())
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
            // What its steps read, which is what its nodes read where it is computed at all.
            let nodes = observation.steps[begin..*end].iter().flat_map(|step| &step.nodes).map(|index| &graph.nodes()[*index]);
            let inputs = nodes.flat_map(|node| &node.inputs).map(|id| graph.value(*id));
            block.parameters = inputs.filter(|value| value.kind == Kind::Param).map(|value| value.name.clone()).collect();
            begin = *end;
        }
        let mut places: BTreeMap<&str, (ValueId, Option<usize>)> = graph.ids().map(|id| (graph.value(id).name.as_str(), (id, None))).collect();
        for (index, step) in observation.steps.iter().enumerate() {
            let id = graph.nodes()[last(step)].output;
            places.insert(graph.value(id).name.as_str(), (id, Some(index + 1)));
        }
        let needed: BTreeSet<&String> = blocks.iter().flat_map(|block| &block.parameters).collect();
        let by_name = weights.by_name.iter().filter(|(name, _)| needed.contains(name)).map(|(name, weight)| (name.clone(), weight.clone())).collect();
        let weights = Weights { by_name, ..Weights::default() };
        Blockwise {
            executor,
            observation,
            places,
            blocks,
            ends,
            weights,
            options,
            work: *work,
            samples: Vec::new(),
            current: None,
            last: usize::MAX,
            ahead: None,
            file: None,
            replaced: BTreeSet::new(),
            reusable: if reuses { analysis::weights_of_layers(graph) } else { BTreeSet::new() },
            spare: Vec::new(),
            held: 0,
            told: 0,
            peak: 0,
        }
    }

    /// The blocks, in order, with the parameters that each of them reads.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The block of a node, by its position in the graph. What the node reads is shown there, also where the block before computes it.
    pub fn block_of(&self, node: usize) -> usize {
        self.blocks.partition_point(|block| block.nodes.end <= node)
    }

    /// The values that a block computes and that can be looked at, in order.
    pub fn values_of(&self, block: usize) -> Vec<&'a str> {
        let begin = block.checked_sub(1).map_or(0, |before| self.ends[before]);
        let mut found: Vec<(usize, &'a str)> = self
            .places
            .iter()
            .filter_map(|(name, (_, done))| done.filter(|done| *done > begin && *done <= self.ends[block]).map(|done| (done, *name)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Reads nothing ahead beyond this block, which is the last that will be entered.
    pub fn end_at(&mut self, block: usize) {
        self.last = block;
    }

    /// How many batches there are.
    pub fn batches(&self) -> usize {
        self.samples.len()
    }

    /// Goes on with the first batches alone.
    pub fn truncate(&mut self, batches: usize) {
        for sample in self.samples.drain(batches.min(self.samples.len())..) {
            self.held = self.held.saturating_sub(sample.start.bytes() + sample.run.map_or(0, |run| run_bytes(&run, &sample.start)));
        }
        self.account();
    }

    /// A batch.
    pub fn batch(&self, index: usize) -> &Batch {
        &self.samples[index].batch
    }

    /// The most bytes that parameters (those that are being read included), states and stopped runs have taken together.
    pub fn peak_bytes(&self) -> u64 {
        self.peak
    }

    /// Adds samples, before the first block is entered.
    ///
    /// # Errors
    /// They do not fit the graph, or a block was entered.
    pub fn push(&mut self, batch: Batch) -> Result<()> {
        if self.current.is_some() {
            return Err(Error::run("block-wise execution", "takes no more samples once a block was entered", ""));
        }
        let snapshot = self.executor.start(&batch.inputs)?.snapshot();
        let start = self.keep(snapshot)?;
        self.samples.push(Held { batch, start, run: None });
        self.account();
        Ok(())
    }

    /// Loads the parameters of the next block, and begins to read those of the one after it.
    ///
    /// # Errors
    /// It is not the next one, reading fails, memory runs out, or the work is cancelled.
    pub fn enter(&mut self, block: usize) -> Result<()> {
        self.enter_beside(block, None, &BTreeSet::new())
    }

    /// The same, sharing parameters with another graph that has entered its block: those of these names that are loaded there are not
    /// loaded again.
    ///
    /// # Errors
    /// As [`enter`](Blockwise::enter).
    pub fn enter_beside(&mut self, block: usize, other: Option<&Blockwise>, same: &BTreeSet<&str>) -> Result<()> {
        let next = self.current.map_or(0, |current| current + 1);
        if block != next || block >= self.blocks.len() {
            return Err(Error::run("block-wise execution", format!("enters block {block} of {}, expected {next}", self.blocks.len()), ""));
        }
        self.work.cancel.check()?;
        self.current = Some(block);
        let names = &self.blocks[block].parameters;
        let mut loaded = other.map_or_else(
            || self.executor.parameters().some([]),
            |other| other.executor.parameters().some(names.iter().filter(|name| same.contains(name.as_str()))),
        );
        if let Some(ahead) = self.ahead.take_if(|ahead| ahead.block == block) {
            loaded.extend(ahead.join()?);
        }
        let missing: Vec<&String> = names.iter().filter(|name| !self.executor.parameters().has(name) && !loaded.has(name)).collect();
        let (device, compute, residence) = (&self.options.device, self.options.compute, self.options.residence);
        loaded.extend(Parameters::load_named(missing, &self.weights, device, compute, residence, &self.work.quiet())?);
        self.reusable.retain(|name| !same.contains(name.as_str()));
        // What was replaced before this block came stands.
        loaded.retain(|name| !self.executor.parameters().has(name));
        self.executor.change_parameters(|parameters| parameters.extend(loaded));
        self.read_ahead(block + 1, other, same);
        self.account();
        Ok(())
    }

    /// Takes several graphs through the block of this number, where they have it, side by side: parameters of these names are loaded once
    /// for all. Those that have fewer blocks wait in their last one.
    ///
    /// # Errors
    /// As [`enter_beside`](Blockwise::enter_beside) and [`leave`](Blockwise::leave).
    pub fn together(runs: &mut [&mut Blockwise], block: usize, same: &BTreeSet<&str>) -> Result<()> {
        for index in 0..runs.len() {
            let (before, rest) = runs.split_at_mut(index);
            if let Some(run) = rest.first_mut().filter(|run| block < run.blocks.len()) {
                run.enter_beside(block, before.first().map(|first| &**first), same)?;
            }
        }
        runs.iter_mut().filter(|run| block < run.blocks.len()).try_for_each(|run| run.leave())
    }

    /// Begins to read a block's parameters, but for those that are loaded and those that come from elsewhere.
    fn read_ahead(&mut self, block: usize, other: Option<&Blockwise>, same: &BTreeSet<&str>) {
        let Some(next) = self.blocks.get(block).filter(|_| block <= self.last) else { return };
        let elsewhere =
            |name: &str| same.contains(name) && other.and_then(|other| other.blocks.get(block)).is_some_and(|other| other.parameters.contains(name));
        let names: Vec<String> = next.parameters.iter().filter(|name| !self.executor.parameters().has(name) && !elsewhere(name)).cloned().collect();
        let by_name: BTreeMap<_, _> = names.iter().filter_map(|name| Some((name.clone(), self.weights.by_name.get(name)?.clone()))).collect();
        if names.is_empty() || by_name.len() < names.len() {
            return;
        }
        let spare = Spare::of(std::mem::take(&mut self.spare));
        self.ahead = Ahead::read(block, names, Weights { by_name, ..Weights::default() }, spare, &self.options, &self.work);
    }

    /// Goes on to the first block that shows a wanted value.
    ///
    /// # Errors
    /// As [`enter`](Blockwise::enter) and [`leave`](Blockwise::leave); no block from this one on shows it.
    pub fn reach(&mut self, value: &str) -> Result<()> {
        loop {
            if let Ok((begin, end)) = self.range() {
                let leads_in = |id| self.samples.first().is_some_and(|sample| sample.start.holds(id));
                if self.places.get(value).is_some_and(|(id, done)| done.is_some_and(|done| done > begin && done <= end) || leads_in(*id)) {
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

    /// Shows a wanted value of every batch, contiguous: batches go on to it from where they have stopped, or from the beginning of the
    /// block. It is computed in this block, or leads into it.
    ///
    /// # Errors
    /// It is neither, memory runs out, the consumer fails, or the work is cancelled.
    pub fn each(&mut self, value: &str, mut see: impl FnMut(&Batch, &Tensor) -> Result<()>) -> Result<()> {
        self.sweep(|run, index| {
            let tensor = run.value(index, value)?;
            see(&run.samples[index].batch, &tensor)
        })
    }

    /// The same for one batch.
    ///
    /// # Errors
    /// As [`each`](Blockwise::each).
    pub fn value(&mut self, index: usize, value: &str) -> Result<Tensor> {
        let (begin, end) = self.range()?;
        let unusable = |reason: &str| Error::graph(format!("graph value `{value}`"), reason);
        let (id, done) = *self.places.get(value).ok_or_else(|| unusable("does not exist"))?;
        let leads_in = self.samples[index].start.holds(id);
        match done {
            Some(done) if done > end => return Err(unusable("is computed in a later block")),
            Some(done) if done <= begin && !leads_in => return Err(unusable("is computed in an earlier block and not read in this one")),
            None if !leads_in => return Err(unusable("is not wanted, or is no longer there")),
            _ => {}
        }
        if leads_in {
            return contiguous(&self.samples[index].start.get(id, &self.options.device)?).map_err(|e| Error::computed(format!("graph node `{value}`"), e));
        }
        let mut run = self.resume(index, |run| run.done < done.unwrap_or(0) || run.values[id.index()].is_some())?;
        let tensor = self.executor.advance(&self.observation, &mut run, value)?;
        let bytes = run_bytes(&run, &self.samples[index].start);
        if self.held.saturating_add(bytes) <= self.options.limit {
            self.held += bytes;
            self.samples[index].run = Some(run);
        }
        self.account();
        Ok(tensor)
    }

    /// The run of a batch, out of what is held: where it has stopped if a test holds for that, else at the beginning of the block.
    fn resume(&mut self, index: usize, usable: impl Fn(&PartialRun) -> bool) -> Result<PartialRun> {
        let sample = &mut self.samples[index];
        if let Some(run) = sample.run.take() {
            self.held = self.held.saturating_sub(run_bytes(&run, &sample.start));
            if usable(&run) {
                return Ok(run);
            }
        }
        Ok(self.executor.resume(&sample.start.snapshot(&self.options.device)?))
    }

    /// A parameter of this block, in the precision of the computation and in memory of its own.
    ///
    /// # Errors
    /// It is not loaded, or memory runs out.
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        self.executor.parameters().get(name).and_then(|tensor| tensor.copy()).map_err(|e| Error::tensor(name, e, ""))
    }

    /// Puts a tensor in the place of a parameter: nodes of this block and of later ones use it, also those that have run for a value
    /// that was looked at.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        let graph = self.executor.graph();
        let reads = |index: &usize| graph.nodes()[*index].inputs.iter().any(|id| graph.value(*id).name == name);
        let begin = self.range().map_or(0, |(begin, _)| begin);
        if let Some(first) = self.observation.steps.iter().skip(begin).position(|step| step.nodes.iter().any(reads)) {
            for sample in &mut self.samples {
                if let Some(run) = sample.run.take_if(|run| run.done > begin + first) {
                    self.held = self.held.saturating_sub(run_bytes(&run, &sample.start));
                }
            }
        }
        self.executor.replace(name, tensor);
        self.replaced.insert(name.to_owned());
    }

    /// Takes all samples to the end of the block and drops its parameters; of the samples, only what later blocks read is kept. The
    /// last block is left by [`outputs`](Blockwise::outputs).
    ///
    /// # Errors
    /// No block was entered, memory runs out, or the work is cancelled.
    pub fn leave(&mut self) -> Result<()> {
        let (_, end) = self.range()?;
        let Some(next) = self.current.map(|current| current + 1).filter(|next| *next < self.blocks.len()) else { return Ok(()) };
        self.file = None;
        self.sweep(|all, index| {
            let mut run = all.resume(index, |_| true)?;
            all.executor.advance_to(&all.observation, &mut run, end)?;
            all.held = all.held.saturating_sub(all.samples[index].start.bytes());
            let snapshot = run.snapshot();
            drop(run);
            all.samples[index].start = all.keep(snapshot)?;
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

    /// Of the parameters that are about to be dropped, those whose memory another block can use.
    fn dropped(&self, keep: impl Fn(&str) -> bool) -> Vec<Tensor> {
        let Some(current) = self.current else { return Vec::new() };
        let mut wanted: Vec<(&[usize], DType)> = Vec::new();
        for weight in self.blocks.get(current + 2).iter().flat_map(|block| &block.parameters).filter_map(|name| self.weights.by_name.get(name)) {
            wanted.push((&weight.shape, self.options.residence.dtype(weight, self.options.compute)));
        }
        let free = |name: &&String| self.reusable.contains(*name) && !self.replaced.contains(*name) && !keep(name);
        let tensors = self.blocks[current].parameters.iter().filter(free).filter_map(|name| self.executor.parameters().stored(name).ok());
        tensors.filter(|tensor| wanted.iter().position(|want| *want == (tensor.dims(), tensor.dtype())).map(|at| wanted.swap_remove(at)).is_some()).collect()
    }

    /// Takes every batch through the last block, and shows its outputs as [`Executor::run`] gives them.
    ///
    /// # Errors
    /// The last block was not entered, memory runs out, the consumer fails, or the work is cancelled.
    pub fn outputs(&mut self, mut see: impl FnMut(&Batch, BTreeMap<String, Tensor>) -> Result<()>) -> Result<()> {
        self.sweep(|run, index| {
            let outputs = run.answer(index)?;
            see(&run.samples[index].batch, outputs)
        })
    }

    /// The same for one batch.
    ///
    /// # Errors
    /// As [`outputs`](Blockwise::outputs).
    pub fn answer(&mut self, index: usize) -> Result<BTreeMap<String, Tensor>> {
        let (_, end) = self.range()?;
        if self.current.is_none_or(|current| current + 1 < self.blocks.len()) {
            return Err(Error::run("block-wise execution", "gives outputs in the last block", ""));
        }
        let mut run = self.resume(index, |_| true)?;
        self.executor.advance_to(&self.observation, &mut run, end)?;
        self.executor.outputs(&run)
    }

    /// Outputs of one batch for some of its tokens only: the rows computed from these rows, along axis 1, of a wanted value of the last block
    /// on which all later values depend token by token, as [`analysis::head`] finds it.
    ///
    /// # Errors
    /// As [`answer`](Blockwise::answer) and [`value`](Blockwise::value).
    pub fn answer_of_tokens(&mut self, index: usize, value: &str, tokens: Range<usize>) -> Result<BTreeMap<String, Tensor>> {
        let rows = self.value(index, value)?.narrow(1, tokens.start, tokens.len()).and_then(|rows| contiguous(&rows));
        let rows = rows.map_err(|e| Error::computed(format!("graph node `{value}`"), e))?;
        let (begin, end) = self.range()?;
        let (id, done) = *self.places.get(value).ok_or_else(|| Error::graph(format!("graph value `{value}`"), "does not exist"))?;
        let mut run = self.executor.resume(&Snapshot { values: Vec::new(), done: done.unwrap_or(0).max(begin) });
        run.values[id.index()] = Some(rows);
        self.executor.advance_to(&self.observation, &mut run, end)?;
        self.executor.outputs(&run)
    }

    /// The steps of this block.
    fn range(&self) -> Result<(usize, usize)> {
        let current = self.current.ok_or_else(|| Error::run("block-wise execution", "has entered no block", ""))?;
        Ok((current.checked_sub(1).map_or(0, |before| self.ends[before]), self.ends[current]))
    }

    /// Goes over all batches, with progress.
    fn sweep(&mut self, mut batch: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        let stage = format!("Block {} of {}", self.current.map_or(0, |current| current + 1), self.blocks.len());
        let total = self.samples.iter().map(|sample| sample.batch.samples as u64).sum();
        let work = self.work;
        work.progress.on(Event::Begin { stage: &stage, total, unit: ProgressUnit::Samples });
        let done = (0..self.samples.len()).try_for_each(|index| {
            work.cancel.check()?;
            batch(self, index)?;
            work.advance(self.samples[index].batch.samples as u64)
        });
        work.progress.on(Event::End);
        done
    }

    /// A state for the next block: in memory, or its floats in a file where they are beyond the limit.
    fn keep(&mut self, snapshot: Snapshot) -> Result<State> {
        let mut state = State::new(snapshot);
        let beyond = self.held.saturating_add(state.bytes()) > self.options.limit;
        if let Some(folder) = self.options.spill.as_ref().filter(|_| beyond) {
            let file = match &self.file {
                Some(file) => file,
                None => self.file.insert(SpillFile::create(folder)?),
            };
            state.spill(file)?;
        }
        self.held += state.bytes();
        Ok(state)
    }

    /// Notes what is held.
    fn account(&mut self) {
        let parameters = self.executor.parameters().bytes() + self.ahead.as_ref().map_or(0, |ahead| ahead.bytes);
        self.peak = self.peak.max(parameters + self.held);
        if let Some(tracker) = &self.options.tracker {
            tracker.give_for(MemoryCategory::Activations, STATES, self.told.saturating_sub(self.held));
            // There is no budget that could be exceeded.
            let _ = tracker.take_for(MemoryCategory::Activations, STATES, self.held.saturating_sub(self.told));
        }
        self.told = self.held;
    }
}

impl Drop for Blockwise<'_> {
    fn drop(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            let _ = ahead.join();
        }
        self.held = 0;
        self.account();
    }
}
