//! One step: losses and gradients of some batches, in parts that fit into memory.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Tensor};

use super::cache::Entries;
use super::clip;
use super::loaded::Loaded;
use super::objective::{Items, Theirs};
use super::run::{Trainer, add_up};
use super::{Precision, Weights};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Home, Kept, MemoryCategory, Parameters, Tape};
use crate::ir::ops;
use crate::ir::{Op, ValueId};

/// Factor on the loss at the beginning, for 16-bit floats.
pub(super) const FIRST_SCALE: f64 = 65536.0;
/// Steps without an overflow after which the factor doubles (Micikevicius et al., *Mixed Precision Training*, 2018).
const PATIENCE: u64 = 2000;

/// What a step found.
pub(super) struct StepResult {
    /// Each loss, by name.
    pub losses: BTreeMap<&'static str, f64>,
    /// Gradients of everything that trains, in f32.
    pub gradients: BTreeMap<String, Kept>,
    /// Statistics of batches, by the name of the parameter that follows them.
    pub statistics: Vec<(String, Tensor)>,
    /// The length of all gradients as one vector; none where they were too large for 16-bit floats, and the step must be left out.
    pub norm: Option<f64>,
    /// Whether nothing in the samples counts in any loss.
    pub is_empty: bool,
}

/// What is gathered over the parts of a step; nothing of it leaves the device, unless parameters do.
struct Sums {
    losses: BTreeMap<&'static str, Tensor>,
    gradients: BTreeMap<String, Kept>,
    /// Where gradients live until the step is made.
    home: Home,
    statistics: Vec<(String, Tensor)>,
}

/// Makes steps.
pub(super) struct Stepper<'t> {
    trainer: &'t Trainer<'t>,
    /// Values that losses read, by name.
    taps: BTreeMap<String, ValueId>,
    tape: Tape<'t>,
    part: Option<usize>,
    /// Times that memory was too small.
    retries: usize,
}

impl<'t> Stepper<'t> {
    pub fn new(trainer: &'t Trainer<'t>, weights: &Weights, part: Option<usize>) -> Stepper<'t> {
        let taps: BTreeMap<String, ValueId> = trainer.graph.outputs().iter().cloned().collect();
        let cuts = super::cuts::cuts(trainer.graph, trainer.options);
        let tape = Tape::new(trainer.graph, trainer.device.clone(), taps.values().copied().collect(), &|name| weights.trains(name), &cuts);
        Stepper { trainer, taps, tape, part, retries: 0 }
    }

    /// Samples that fit at a time, where that is fewer than a batch.
    pub fn part(&self) -> Option<usize> {
        self.part
    }

    /// A batch normalisation with the statistics of the batch, by the name of its output.
    fn normalises_over_batch(&self) -> Option<&str> {
        let mut nodes = self.trainer.graph.nodes().iter();
        let node = nodes.find(|node| matches!(node.op, Op::BatchNorm(op) if op.batch))?;
        Some(&self.trainer.graph.value(node.output).name)
    }

    /// What was found out about memory, in plain words.
    pub fn notes(&self, batch: usize) -> Option<String> {
        let part = self.part?;
        Some(format!(
            "memory holds {part} of the {batch} samples of a batch: they were done in parts, gradients added up ({} tries were too large)",
            self.retries
        ))
    }

    /// Losses and gradients; memory that is too small costs another try with half the samples at a time.
    ///
    /// # Errors
    /// A single sample does not fit, or the loss is not finite.
    pub fn step(&mut self, weights: &Weights, batches: &[Batch], scale: &mut (f64, u64)) -> Result<StepResult> {
        let largest_batch = batches.iter().map(|batch| batch.samples).max().unwrap_or(1);
        let mut items = Items::new();
        for batch in batches {
            for (name, count) in self.trainer.objective.items(batch)? {
                *items.entry(name).or_default() += count;
            }
        }
        // Once a step, however often this process has to try.
        let items = self.trainer.team.means(items)?;
        loop {
            match self.attempt(weights, batches, &items, scale.0) {
                Ok(mut sums) => {
                    let squares = self.complete(&mut sums, weights, scale.0)?;
                    let step = StepResult { is_empty: items.values().all(|count| *count == 0.0), ..self.fetch(sums, &squares, weights, batches)? };
                    self.rescale(step.norm.is_none(), scale);
                    return Ok(step);
                }
                Err(e) if e.is_out_of_memory() => {
                    // Nothing of a try outlives it.
                    for category in [MemoryCategory::Gradients, MemoryCategory::Activations, MemoryCategory::Data] {
                        self.trainer.memory_tracker.give(category, u64::MAX);
                    }
                    let part = self.part.map_or(largest_batch, |part| part.min(largest_batch));
                    // Others wait where this process was, and cannot begin again with it.
                    if part <= 1 || weights.home().is_shared() {
                        return Err(e);
                    }
                    if let Some(name) = self.normalises_over_batch() {
                        let Error::OutOfMemory { what, reason } = e else { return Err(e) };
                        let reason = format!(
                            "{reason}; parts of the batch would have other statistics than the whole in `{name}`: lower `batch_size`, or set `batch_norm: fixed`"
                        );
                        return Err(Error::OutOfMemory { what, reason });
                    }
                    self.part = Some(part.div_ceil(2));
                    self.retries += 1;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Makes gradients those of the whole step, and gives the sum of squares of each, by name.
    fn complete(&self, sums: &mut Sums, weights: &Weights, scale: f64) -> Result<BTreeMap<String, Tensor>> {
        let mut squares = BTreeMap::new();
        for names in sums.home.together(sums.gradients.keys()) {
            self.trainer.memory_tracker.work_on("gradients", "");
            let at_work = Loaded::gradients(self.trainer.memory_tracker, &sums.gradients, &names)?;
            let here = |name: &&String| sums.gradients.get(*name).is_some_and(Kept::is_here);
            let here: Vec<&String> = names.iter().filter(here).collect();
            let mut own: BTreeMap<String, Kept> = here.into_iter().filter_map(|name| sums.gradients.remove_entry(name)).collect();
            let load = |(name, kept): (&String, &Kept)| Ok((name.clone(), kept.load_own(self.trainer.device)?));
            let some = own.iter().map(load).collect::<Result<Vec<(String, Option<Tensor>)>>>()?;
            let mut some: BTreeMap<String, Tensor> = some.into_iter().filter_map(|(name, gradient)| Some((name, gradient?))).collect();
            let before: Vec<_> = some.values().map(Tensor::id).collect();
            if sums.home.is_shared() {
                // They are sums of all processes' gradients.
                multiply(&mut some, 1.0 / self.trainer.team.size() as f64)?;
            } else {
                self.trainer.team.average(&mut some)?;
            }
            if self.trainer.options.precision == Precision::F16 {
                multiply(&mut some, 1.0 / scale)?;
            }
            weights.add_scales(&mut some)?;
            weights.mask(&mut some)?;
            squares.extend(some.keys().cloned().zip(clip::squares(&some)?));
            for (name, gradient) in some {
                let kept = match own.remove(&name) {
                    Some(kept) if before.contains(&gradient.id()) => kept,
                    Some(mut kept) => kept.put(gradient).map(|()| kept)?,
                    None => sums.home.keep(&gradient)?,
                };
                sums.gradients.insert(name, kept);
            }
            drop(at_work);
        }
        Ok(squares)
    }

    /// Moves that factor: down where gradients were too large, up after a while without.
    fn rescale(&self, overflow: bool, (scale, steps): &mut (f64, u64)) {
        if self.trainer.options.precision != Precision::F16 {
            return;
        }
        *steps += 1;
        if overflow {
            (*scale, *steps) = ((*scale / 2.0).max(1.0), 0);
        } else if *steps >= PATIENCE {
            (*scale, *steps) = (*scale * 2.0, 0);
        }
    }

    /// Everything that the host has to know of a step, in one copy: losses, and the lengths of gradients.
    fn fetch(&self, sums: Sums, squares: &BTreeMap<String, Tensor>, weights: &Weights, batches: &[Batch]) -> Result<StepResult> {
        let Sums { losses, gradients, statistics, .. } = sums;
        let numbers: Vec<Tensor> = losses.values().chain(squares.values()).cloned().collect();
        let fetch = || transfer::values::<f64>(&Tensor::stack(&numbers, 0)?, Cause::Step);
        let numbers = fetch().map_err(|e| Error::computed("the figures of a step", e))?;
        let (means, numbers) = numbers.split_at(losses.len());
        if let Some((name, _)) = losses.keys().zip(means).find(|(_, mean)| !mean.is_finite()) {
            if weights.home().is_shared() {
                return Err(Error::Diverged { step: 0, reason: format!("loss `{name}` is not finite") });
            }
            let parameters = weights.parameters()?;
            let reason = self.diverged(&parameters, batches, name);
            parameters.enter(&BTreeSet::new(), Some(self.trainer.memory_tracker))?;
            return Err(reason);
        }
        let norm = match self.norm_of_all(clip::norm_of(squares.keys(), numbers), weights) {
            Ok(norm) => Some(norm),
            Err(_) if self.trainer.options.precision == Precision::F16 => None,
            Err(e) => return Err(e),
        };
        let losses = losses.into_keys().zip(means.iter().copied()).collect();
        Ok(StepResult { losses: self.trainer.team.means(losses)?, gradients, statistics, norm, is_empty: false })
    }

    /// The length of all gradients, of which each process has its share where weights are shared out.
    fn norm_of_all(&self, own: Result<f64>, weights: &Weights) -> Result<f64> {
        if !weights.home().is_shared() {
            return own;
        }
        let team = self.trainer.team;
        let square = own.as_ref().map_or(f64::NAN, |norm| norm * norm);
        let all = team.means(Items::from([("gradients", square)]))?.values().sum::<f64>() * team.size() as f64;
        let elsewhere = || Error::Diverged { step: 0, reason: "a gradient of another process holds values that are NaN or infinite".into() };
        if all.is_finite() { Ok(all.sqrt()) } else { own.and_then(|_| Err(elsewhere())) }
    }

    fn attempt(&self, weights: &Weights, batches: &[Batch], items: &Items, scale: f64) -> Result<Sums> {
        let scale = if self.trainer.options.precision == Precision::F16 { scale } else { 1.0 };
        let parameters = weights.parameters()?;
        let mut sums = Sums { losses: BTreeMap::new(), gradients: BTreeMap::new(), home: weights.home().another()?, statistics: Vec::new() };
        let mut parts = || {
            for batch in batches {
                let part = self.part.unwrap_or(batch.samples).max(1);
                for from in (0..batch.samples).step_by(part) {
                    let part = batch.narrow(from, part.min(batch.samples - from))?;
                    self.part_of(weights, &parameters, &part, (items, scale), &mut sums)?;
                }
            }
            Ok(())
        };
        let done = parts();
        parameters.enter(&BTreeSet::new(), Some(self.trainer.memory_tracker))?;
        done.map(|()| sums)
    }

    fn part_of(&self, weights: &Weights, parameters: &Parameters, batch: &Batch, (items, scale): (&Items, f64), sums: &mut Sums) -> Result<()> {
        let trainer = self.trainer;
        let known =
            trainer.cache.map(|cache| trainer.answers().map_or(Ok(Entries::new()), |answers| answers.of(&mut cache.borrow_mut(), batch))).transpose()?;
        let asked = trainer.teacher.filter(|_| known.is_none());
        let teacher = asked.map(|teacher| Ok::<_, Error>((teacher.values(&batch.inputs)?, teacher.parameters()))).transpose()?;
        let statistics = &mut sums.statistics;
        let forward = self.tape.forward(
            parameters,
            &batch.inputs,
            trainer.memory_tracker,
            Some(&mut |node, operands| {
                if let (Op::BatchNorm(op), [x, ..]) = (&node.op, operands)
                    && op.batch
                {
                    statistics.extend(moments(trainer, node, x)?);
                }
                Ok(())
            }),
        )?;
        let values: BTreeMap<String, Tensor> = self.taps.iter().filter_map(|(name, id)| Some((name.clone(), forward.taps().get(id)?.clone()))).collect();
        let trained = |name: &str| weights.trains(name);
        let shelf = trainer.cache.map(|cache| cache.borrow());
        let theirs = match (&teacher, &known, &shelf) {
            (_, Some(entries), Some(cache)) => Theirs::Known(entries, cache),
            (Some((values, parameters)), ..) => Theirs::Values(values, parameters),
            _ => Theirs::None,
        };
        trainer.memory_tracker.work_on("losses", "");
        let (ours, of_teacher) = trainer.objective.heads();
        parameters.enter(&ours.into_iter().collect(), Some(trainer.memory_tracker))?;
        let of_teacher = of_teacher.into_iter().collect();
        let projections = weights.some(&trainer.objective.projection_names())?;
        asked.map_or(Ok(()), |teacher| teacher.parameters().enter(&of_teacher, None))?;
        let said = trainer.objective.say((&values, parameters), theirs, &projections, batch, &trained, (items, scale))?;
        asked.map_or(Ok(()), |teacher| teacher.parameters().enter(&BTreeSet::new(), None))?;
        drop((values, teacher, shelf, projections));
        for (name, loss) in said.losses {
            let sum = sums.losses.remove(name).map_or(Ok(loss.clone()), |other| other + &loss);
            sums.losses.insert(name, sum.map_err(|e| Error::computed(format!("loss `{name}`"), e))?);
        }
        let from = said.values.into_iter().filter_map(|(name, gradient)| Some((*self.taps.get(&name)?, gradient)));
        let from = from.map(|(id, gradient)| Ok((id, gradient.to_dtype(parameters.compute())?))).collect::<candle_core::Result<_>>();
        let from = from.map_err(|e| Error::computed("the losses", e))?;
        let (gradients, home) = (&mut sums.gradients, &sums.home);
        let mut sink = |name: &str, gradient: Tensor| {
            let (bytes, stay) = add_up(gradients, home, weights.trained.get(name), name, gradient)?;
            trainer.memory_tracker.take_for(MemoryCategory::Gradients, name, bytes)?;
            trainer.memory_tracker.give_for(MemoryCategory::Gradients, name, bytes - stay);
            Ok(())
        };
        for (name, gradient) in said.parameters {
            sink(&name, gradient)?;
        }
        self.tape.backward(forward, from, parameters, trainer.memory_tracker, &mut sink)
    }

    /// Which value was the first that is not finite.
    fn diverged(&self, parameters: &Parameters, batches: &[Batch], loss: &str) -> Error {
        let mut first = None;
        let graph = self.tape.graph();
        let part = |batch: &Batch| self.part.unwrap_or(batch.samples).max(1);
        let parts = batches.iter().flat_map(|batch| (0..batch.samples).step_by(part(batch)).map(move |from| (batch, from)));
        for part in parts.filter_map(|(batch, from)| batch.narrow(from, part(batch).min(batch.samples - from)).ok()) {
            let looked = self.tape.forward(
                parameters,
                &part.inputs,
                self.trainer.memory_tracker,
                Some(&mut |node, operands| {
                    for (id, operand) in node.inputs.iter().zip(operands) {
                        let finite = operand.dtype() == DType::I64 || is_finite(operand).unwrap_or(false);
                        if !finite && first.is_none() {
                            first = Some((graph.value(*id).name.clone(), graph.value(node.output).name.clone()));
                        }
                    }
                    Ok(())
                }),
            );
            drop(looked);
        }
        let reason = match first {
            Some((value, node)) => format!("loss `{loss}` is not finite: `{value}`, which layer `{node}` reads, holds NaN or infinite values"),
            None => format!("loss `{loss}` is not finite, while all values of the model are"),
        };
        Error::Diverged { step: 0, reason }
    }
}

fn multiply(gradients: &mut BTreeMap<String, Tensor>, factor: f64) -> Result<()> {
    for (name, gradient) in gradients {
        *gradient = gradient.affine(factor, 0.0).map_err(|e| Error::computed(format!("gradient of `{name}`"), e))?;
    }
    Ok(())
}

/// Whether all elements are numbers. NaN does not survive a maximum everywhere; a sum keeps it.
fn is_finite(tensor: &Tensor) -> candle_core::Result<bool> {
    Ok(transfer::number(&tensor.to_dtype(DType::F32)?.abs()?.sum_all()?, Cause::Step)?.is_finite())
}

/// Mean and unbiased variance of what a normalisation reads, by the names of the parameters that follow them.
fn moments(trainer: &Trainer, node: &crate::ir::Node, x: &Tensor) -> Result<Vec<(String, Tensor)>> {
    let name = |at: usize| node.inputs.get(at).map(|id| trainer.graph.value(*id).name.clone()).unwrap_or_default();
    let compute = || {
        let (mean, variance) = ops::moments(x)?;
        let count = (x.elem_count() / x.dim(1)?.max(1)) as f64;
        Ok(vec![(name(3), mean), (name(4), variance.affine(count / (count - 1.0).max(1.0), 0.0)?)])
    };
    compute().map_err(|e: candle_core::Error| Error::computed("statistics of a batch", e))
}
