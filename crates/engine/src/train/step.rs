//! Losses and gradients of one step, in micro-batches that fit into memory.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use candle_core::{DType, Tensor};

use super::accumulated::Accumulated;
use super::batches::input_bytes;
use super::cache::Entries;
use super::exchange::{Buckets, Exchange};
use super::losses::WeightedTeacher;
use super::memory_reservation::MemoryReservation;
use super::objective::{Items, TeacherOutputs};
use super::trainer::{Trainer, WAITING};
use super::{Precision, Weights, batch_statistics, clip};
use crate::data::{Batch, References};
use crate::error::{Error, Result, counted};
use crate::exec::transfer::{self, Cause};
use crate::exec::{DropoutSeed, ManagedTensor, MemoryCategory, Parameters, Tape};
use crate::ir::{Op, ValueId};

/// Initial loss scale for `f16`.
pub(super) const FIRST_SCALE: f64 = 65536.0;
/// Steps without an overflow after which the loss scale doubles (Micikevicius et al., *Mixed Precision
/// Training*, 2018).
const GROWTH_INTERVAL: u64 = 2000;

/// Losses and gradients of a step.
pub(super) struct StepResult {
    /// Each loss that has items in this step, by name.
    pub losses: BTreeMap<&'static str, f64>,
    /// Gradients of all trained parameters, in f32.
    pub gradients: BTreeMap<String, ManagedTensor>,
    /// Batch statistics, by the name of the running statistic that they update.
    pub statistics: Vec<(String, Tensor)>,
    /// Global gradient norm; `None` if gradients overflowed 16-bit floats, and the step must be skipped.
    pub norm: Option<f64>,
    /// Whether no loss has an item in this step.
    pub is_empty: bool,
}

/// Computes losses and gradients step by step.
pub(super) struct Stepper<'t> {
    trainer: &'t Trainer<'t>,
    /// Values that losses read, by name.
    taps: BTreeMap<String, ValueId>,
    tape: Tape<'t>,
    /// Micro-batch size, if a whole batch does not fit into memory.
    part: Option<usize>,
    /// Number of attempts that ran out of memory.
    retries: usize,
    /// Gradients that several processes exchange together, unless they are offloaded or sharded.
    buckets: Option<Rc<Buckets>>,
}

impl<'t> Stepper<'t> {
    pub fn new(trainer: &'t Trainer<'t>, weights: &Weights, part: Option<usize>) -> Result<Stepper<'t>> {
        let taps: BTreeMap<String, ValueId> = trainer.graph.outputs().iter().cloned().collect();
        let cuts = super::cuts::cuts(trainer.graph, trainer.options);
        let tape = Tape::new(trainer.graph, trainer.device.clone(), taps.values().copied().collect(), &|name| weights.trains(name), &cuts);
        let tape = tape.with_dropout(super::dropout::dropout(trainer.graph, trainer.options)?);
        let before = || trainer.objective.heads().0.into_iter().chain(trainer.objective.projection_names()).collect();
        let exchanges = trainer.team.size() > 1 && weights.home().is_memory();
        let buckets = exchanges.then(|| Rc::new(Buckets::new(trainer.graph, &weights.trained, &before())));
        Ok(Stepper { trainer, taps, tape, part, retries: 0, buckets })
    }

    /// Micro-batch size, if a whole batch does not fit into memory.
    pub fn part(&self) -> Option<usize> {
        self.part
    }

    /// Output name of a batch normalization that uses the statistics of the batch, if there is one.
    fn batch_statistics_node(&self) -> Option<&str> {
        let mut nodes = self.trainer.graph.nodes().iter();
        let node = nodes.find(|node| matches!(node.op, Op::BatchNorm(op) if op.batch))?;
        Some(&self.trainer.graph.value(node.output).name)
    }

    /// Why batches cannot be split, with advice; `None` if they can.
    fn indivisible(&self, batches: &[Batch]) -> Option<String> {
        let name = self.batch_statistics_node();
        let has_matches = batches.iter().any(|batch| matches!(batch.references, References::Matches(_)));
        let matches = || has_matches.then(|| "`contrastive` compares all its texts: lower `batch_size`".to_owned());
        name.map(|name| format!("`{name}` normalizes over the whole batch: lower `batch_size`, or set `batch_norm: fixed`")).or_else(matches)
    }

    /// A note for the report, if batches were split.
    pub fn notes(&self, batch: usize) -> Option<String> {
        let part = self.part?;
        Some(format!(
            "batches of {batch} samples did not fit into memory and were split into micro-batches of {part} with gradient accumulation (after {})",
            counted(self.retries, "failed attempt")
        ))
    }

    /// Computes losses and gradients. If memory runs out, retries with half the micro-batch size. Fails if a
    /// single sample does not fit into memory, a loss is not finite, or the training is interrupted.
    ///
    /// `seed` is that of the random numbers of the step.
    pub fn step(&mut self, weights: &Weights, batches: &[Batch], scale: &mut (f64, u64), seed: u64) -> Result<StepResult> {
        let largest_batch = batches.iter().map(|batch| batch.samples).max().unwrap_or(1);
        let mut items = Items::new();
        for batch in batches {
            for (name, count) in self.trainer.objective.items(batch)? {
                *items.entry(name).or_default() += count;
            }
        }
        // A collective: it must run once per step, independent of the number of attempts.
        let items = self.trainer.team.means(items)?;
        let buckets = self.buckets.clone();
        let mut exchange = buckets.as_deref().map(|buckets| Exchange::new(buckets, self.trainer.team));
        loop {
            match self.attempt(weights, batches, &items, (scale.0, seed), exchange.as_mut()) {
                Ok(mut accumulated) => {
                    let squares = self.complete(&mut accumulated, weights, scale.0, exchange)?;
                    let mut step = StepResult { is_empty: items.values().all(|count| *count == 0.0), ..self.fetch(accumulated, squares, weights, batches)? };
                    // The losses on logits have common items.
                    let items_of = |loss: &str| items.get(if matches!(loss, "soft" | "hard") { "logits" } else { loss });
                    step.losses.retain(|loss, _| items_of(loss).is_none_or(|count| *count > 0.0));
                    self.rescale(step.norm.is_none(), scale);
                    return Ok(step);
                }
                Err(e) if e.is_out_of_memory() => {
                    // The tensors of the failed attempt have been dropped.
                    for category in [MemoryCategory::Gradients, MemoryCategory::Activations, MemoryCategory::Data] {
                        self.trainer.memory_tracker.release(category, u64::MAX);
                    }
                    let part = self.part.map_or(largest_batch, |part| part.min(largest_batch));
                    // With sharded weights the other processes are inside a collective, and cannot retry.
                    if part <= 1 || weights.home().is_sharded() {
                        return Err(e);
                    }
                    if let Some(why) = self.indivisible(batches) {
                        let Error::OutOfMemory { what, reason } = e else { return Err(e) };
                        return Err(Error::OutOfMemory { what, reason: format!("{reason}; the batch cannot be split, because {why}") });
                    }
                    self.part = Some(part.div_ceil(2));
                    self.retries += 1;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Averages gradients over the processes, unscales and masks them. Returns their names and sums of
    /// squares.
    fn complete(&self, accumulated: &mut Accumulated, weights: &Weights, scale: f64, exchange: Option<Exchange>) -> Result<(Vec<String>, Vec<Tensor>)> {
        if let Some(exchange) = exchange {
            let mut means = exchange.finish()?;
            if self.trainer.options.precision == Precision::F16 {
                multiply(&mut means, 1.0 / scale)?;
            }
            let squares = (means.keys().cloned().collect(), clip::squares(&means)?.into_iter().collect());
            accumulated.gradients = means.into_iter().map(|(name, mean)| (name, mean.into())).collect();
            return Ok(squares);
        }
        let mut squares = (Vec::new(), Vec::new());
        for names in accumulated.home.name_groups(accumulated.gradients.keys()) {
            self.trainer.memory_tracker.work_on("gradients", "");
            let reservation = MemoryReservation::for_gradients(self.trainer.memory_tracker, &accumulated.gradients, &names)?;
            let is_local = |name: &&String| accumulated.gradients.get(*name).is_some_and(ManagedTensor::is_local);
            let local: Vec<&String> = names.iter().filter(is_local).collect();
            let mut own: BTreeMap<String, ManagedTensor> = local.into_iter().filter_map(|name| accumulated.gradients.remove_entry(name)).collect();
            let load = |(name, kept): (&String, &ManagedTensor)| Ok((name.clone(), kept.load_own(self.trainer.device)?));
            let loaded = own.iter().map(load).collect::<Result<Vec<(String, Option<Tensor>)>>>()?;
            let mut loaded: BTreeMap<String, Tensor> = loaded.into_iter().filter_map(|(name, gradient)| Some((name, gradient?))).collect();
            let before: Vec<_> = loaded.values().map(Tensor::id).collect();
            if accumulated.home.is_sharded() {
                // Gradients are already summed over the processes.
                multiply(&mut loaded, 1.0 / self.trainer.team.size() as f64)?;
            } else {
                self.trainer.team.average(&mut loaded)?;
            }
            if self.trainer.options.precision == Precision::F16 {
                multiply(&mut loaded, 1.0 / scale)?;
            }
            weights.add_scale_gradients(&mut loaded)?;
            weights.mask(&mut loaded)?;
            squares.0.extend(loaded.keys().cloned());
            squares.1.extend(clip::squares(&loaded)?);
            for (name, gradient) in loaded {
                let kept = match own.remove(&name) {
                    Some(kept) if before.contains(&gradient.id()) => kept,
                    Some(mut kept) => kept.put(gradient).map(|()| kept)?,
                    None => accumulated.home.store(&gradient)?,
                };
                accumulated.gradients.insert(name, kept);
            }
            drop(reservation);
        }
        Ok(squares)
    }

    /// Adjusts the loss scale: halves it after an overflow, doubles it after enough steps without one.
    fn rescale(&self, overflow: bool, (scale, steps): &mut (f64, u64)) {
        if self.trainer.options.precision != Precision::F16 {
            return;
        }
        *steps += 1;
        if overflow {
            (*scale, *steps) = ((*scale / 2.0).max(1.0), 0);
        } else if *steps >= GROWTH_INTERVAL {
            (*scale, *steps) = (*scale * 2.0, 0);
        }
    }

    /// Copies losses and gradient norms to the host in one transfer.
    fn fetch(&self, accumulated: Accumulated, (names, squares): (Vec<String>, Vec<Tensor>), weights: &Weights, batches: &[Batch]) -> Result<StepResult> {
        let Accumulated { losses, gradients, statistics, .. } = accumulated;
        let fetch = || {
            if losses.is_empty() && squares.is_empty() {
                return Ok(Vec::new());
            }
            let losses = losses.values().map(|loss| loss.reshape(1)).collect::<candle_core::Result<Vec<_>>>()?;
            transfer::values::<f64>(&Tensor::cat(&[losses, squares].concat(), 0)?, Cause::Step)
        };
        let numbers = fetch().map_err(|e| Error::candle("the metrics of a step", e))?;
        let (means, numbers) = numbers.split_at(losses.len());
        if let Some((name, _)) = losses.keys().zip(means).find(|(_, mean)| !mean.is_finite()) {
            if weights.home().is_sharded() {
                return Err(Error::Diverged { step: 0, reason: format!("loss `{name}` is not finite") });
            }
            let parameters = weights.parameters()?;
            let reason = self.diverged(&parameters, batches, name);
            parameters.enter(&BTreeSet::new(), Some(self.trainer.memory_tracker))?;
            return Err(reason);
        }
        // Groups of names do not change the order of the sum.
        let squares: BTreeMap<&String, f64> = names.iter().zip(numbers.iter().copied()).collect();
        let norm = match self.global_norm(clip::norm_of(&squares), weights) {
            Ok(norm) => Some(norm),
            Err(_) if self.trainer.options.precision == Precision::F16 => None,
            Err(e) => return Err(e),
        };
        let losses = losses.into_keys().zip(means.iter().copied()).collect();
        Ok(StepResult { losses: self.trainer.team.means(losses)?, gradients, statistics, norm, is_empty: false })
    }

    /// The gradient norm over all processes; with a sharded state, each process has only the norm of its
    /// shard.
    fn global_norm(&self, own: Result<f64>, weights: &Weights) -> Result<f64> {
        let team = self.trainer.team;
        if !weights.home().is_sharded() && !team.is_optimizer_sharded() {
            return own;
        }
        let square = own.as_ref().map_or(f64::NAN, |norm| norm * norm);
        let all = team.means(Items::from([("gradients", square)]))?.values().sum::<f64>() * team.size() as f64;
        let remote_error = || Error::Diverged { step: 0, reason: "a gradient of another process contains NaN or infinite values".into() };
        if all.is_finite() { Ok(all.sqrt()) } else { own.and_then(|_| Err(remote_error())) }
    }

    fn attempt(
        &self,
        weights: &Weights,
        batches: &[Batch],
        items: &Items,
        (scale, seed): (f64, u64),
        mut exchange: Option<&mut Exchange>,
    ) -> Result<Accumulated> {
        let scale = if self.trainer.options.precision == Precision::F16 { scale } else { 1.0 };
        let parameters = weights.parameters()?;
        // All batches of a step are in memory together, but the tape counts only the batch in progress.
        let bytes = batches.iter().map(input_bytes);
        let waiting = bytes.clone().sum::<u64>() - bytes.max().unwrap_or(0);
        self.trainer.memory_tracker.allocate_named(MemoryCategory::Data, WAITING, waiting)?;
        let (gradients, statistics, reducing) = (BTreeMap::new(), Vec::new(), None);
        let mut accumulated = Accumulated { losses: BTreeMap::new(), gradients, home: weights.home().sibling()?, reducing, statistics };
        let mut dropout = DropoutSeed { seed, first: 0 };
        let mut parts = || {
            let mut parts = batches.iter().flat_map(|batch| micro_batches(batch, self.part)).peekable();
            while let Some(part) = parts.next() {
                if dropout.first > 0 {
                    self.trainer.require_uninterrupted()?;
                }
                let exchange = exchange.as_deref_mut().map(|exchange| (exchange, parts.peek().is_none()));
                let part = part?;
                self.micro_batch(weights, &parameters, (&part, dropout), (items, scale), &mut accumulated, exchange)?;
                dropout.first += part.rows();
            }
            exchange.as_deref_mut().map_or(Ok(()), |exchange| exchange.start_rest(weights, &mut accumulated.gradients))
        };
        let done = parts();
        self.trainer.memory_tracker.release_named(MemoryCategory::Data, WAITING, waiting);
        parameters.enter(&BTreeSet::new(), Some(self.trainer.memory_tracker))?;
        done.map(|()| accumulated)
    }

    /// Forward and backward pass of one micro-batch. In the last one of a step, gradients are exchanged once
    /// they are complete.
    fn micro_batch(
        &self,
        weights: &Weights,
        parameters: &Parameters,
        (batch, dropout): (&Batch, DropoutSeed),
        (items, scale): (&Items, f64),
        accumulated: &mut Accumulated,
        mut exchange: Option<(&mut Exchange, bool)>,
    ) -> Result<()> {
        let trainer = self.trainer;
        let cached = trainer
            .cache
            .map(|cache| trainer.cached_teacher().map_or(Ok(Entries::default()), |cached| cached.entries(&mut cache.borrow_mut(), batch)))
            .transpose()?;
        let running_teacher = trainer.teacher.filter(|_| cached.is_none());
        let teacher = running_teacher.map(|teacher| Ok::<_, Error>((teacher.values(&batch.inputs)?, teacher.parameters()))).transpose()?;
        let losses = trainer.objective.over_logits().filter(|_| !trainer.further_teachers.is_empty());
        let further =
            losses.map_or(Ok(Vec::new()), |losses| trainer.further_teachers.iter().map(|teacher| teacher.run(losses, batch)).collect::<Result<_>>())?;
        let (statistics, graph) = (&mut accumulated.statistics, trainer.graph);
        let forward = self.tape.forward_with(
            Some(dropout),
            parameters,
            &batch.inputs,
            trainer.memory_tracker,
            Some(&mut |node, operands| {
                if let (Op::BatchNorm(op), [x, ..]) = (&node.op, operands)
                    && op.batch
                {
                    statistics.extend(batch_statistics::moments(graph, node, x)?);
                }
                Ok(())
            }),
        )?;
        let values: BTreeMap<String, Tensor> = self.taps.iter().filter_map(|(name, id)| Some((name.clone(), forward.taps().get(id)?.clone()))).collect();
        let trained = |name: &str| weights.trains(name);
        let cache = trainer.cache.map(|cache| cache.borrow());
        let teacher_outputs = match (&teacher, &cached, &cache) {
            (_, Some(entries), Some(cache)) => TeacherOutputs::Cached(entries, cache),
            (Some((values, parameters)), ..) => TeacherOutputs::Values(values, parameters),
            _ => TeacherOutputs::None,
        };
        let teacher_outputs = match losses.and_then(|losses| losses.teacher.as_ref()) {
            Some(source) => {
                let first = WeightedTeacher { weight: 1.0, source, outputs: teacher_outputs };
                let others = trainer.further_teachers.iter().zip(&further).map(|(teacher, outputs)| teacher.weighted(outputs));
                TeacherOutputs::Several(std::iter::once(first).chain(others).collect())
            }
            None => teacher_outputs,
        };
        trainer.memory_tracker.work_on("losses", "");
        let (student_heads, teacher_heads) = trainer.objective.heads();
        parameters.enter(&student_heads.into_iter().collect(), Some(trainer.memory_tracker))?;
        let teacher_heads = teacher_heads.into_iter().collect();
        let projections = weights.load_trained(&trainer.objective.projection_names())?;
        running_teacher.map_or(Ok(()), |teacher| teacher.parameters().enter(&teacher_heads, None))?;
        for further in trainer.further_teachers {
            further.teacher.parameters().enter(&further.head.iter().cloned().collect(), None)?;
        }
        let output = trainer.objective.evaluate((&values, parameters), teacher_outputs, &projections, batch, &trained, (items, scale))?;
        running_teacher.map_or(Ok(()), |teacher| teacher.parameters().enter(&BTreeSet::new(), None))?;
        trainer.further_teachers.iter().try_for_each(|further| further.teacher.parameters().enter(&BTreeSet::new(), None))?;
        drop((values, teacher, cache, further, projections));
        for (name, loss) in output.losses {
            let sum = accumulated.losses.remove(name).map_or(Ok(loss.clone()), |other| other + &loss);
            accumulated.losses.insert(name, sum.map_err(|e| Error::candle(format!("loss `{name}`"), e))?);
        }
        let seeds = output.values.into_iter().filter_map(|(name, gradient)| Some((*self.taps.get(&name)?, gradient)));
        let seeds = seeds.map(|(id, gradient)| Ok((id, gradient.to_dtype(parameters.compute())?))).collect::<candle_core::Result<_>>();
        let seeds = seeds.map_err(|e| Error::candle("the losses", e))?;
        let mut sink = |name: &str, gradient: Tensor, is_backward: bool| {
            let transient = if weights.is_computed(name) { gradient.elem_count() * gradient.dtype().size_in_bytes() } else { 0 } as u64;
            trainer.memory_tracker.allocate_named(MemoryCategory::Gradients, name, transient)?;
            trainer.memory_tracker.release_named(MemoryCategory::Gradients, name, transient);
            for (trained, gradient) in weights.trained_gradients(name, gradient)? {
                if !exchange.as_ref().is_some_and(|(exchange, _)| exchange.has_started(&trained)) {
                    accumulated.add(trainer.memory_tracker, weights, trained, &gradient)?;
                }
            }
            let last = exchange.as_mut().filter(|(_, is_last)| *is_last && is_backward);
            last.map_or(Ok(()), |(exchange, _)| exchange.advance(name, weights, &mut accumulated.gradients))
        };
        for (name, gradient) in output.parameters {
            sink(&name, gradient, false)?;
        }
        self.tape.backward(forward, seeds, parameters, trainer.memory_tracker, &mut |name, gradient| sink(name, gradient, true))?;
        accumulated.settle(trainer.memory_tracker, weights)
    }

    /// Runs the forward pass again to find the first value that is not finite.
    fn diverged(&self, parameters: &Parameters, batches: &[Batch], loss: &str) -> Error {
        let mut first = None;
        let graph = self.tape.graph();
        let is_infinite = |tensor: &Tensor| !is_finite(tensor).unwrap_or(false);
        for part in batches.iter().flat_map(|batch| micro_batches(batch, self.part)).flatten() {
            let result = self.tape.forward(
                parameters,
                &part.inputs,
                self.trainer.memory_tracker,
                Some(&mut |node, operands| {
                    if first.is_none() {
                        let infinite = node.inputs.iter().zip(operands).find(|(_, operand)| is_infinite(operand));
                        first = infinite.map(|(id, _)| (graph.value(*id).name.clone(), Some(graph.value(node.output).name.clone())));
                    }
                    Ok(())
                }),
            );
            // No node reads the outputs.
            if first.is_none()
                && let Ok(forward) = &result
            {
                first = forward.taps().iter().find(|(_, tap)| is_infinite(tap)).map(|(id, _)| (graph.value(*id).name.clone(), None));
            }
            drop(result);
            // The tensors of this micro-batch have been dropped.
            for category in [MemoryCategory::Activations, MemoryCategory::Data] {
                self.trainer.memory_tracker.release(category, u64::MAX);
            }
            if first.is_some() {
                break;
            }
        }
        let reason = match first {
            Some((value, Some(node))) => format!("loss `{loss}` is not finite: `{value}`, an input of layer `{node}`, contains NaN or infinite values"),
            Some((value, None)) => format!("loss `{loss}` is not finite: `{value}`, which losses read, contains NaN or infinite values"),
            None => format!("loss `{loss}` is not finite, although all values of the model are"),
        };
        Error::Diverged { step: 0, reason }
    }
}

/// Splits a batch into micro-batches of at most `size` samples. Without a size, it is not split.
fn micro_batches(batch: &Batch, size: Option<usize>) -> impl Iterator<Item = Result<Batch>> {
    let size = size.unwrap_or(batch.samples).max(1);
    (0..batch.samples).step_by(size).map(move |from| batch.narrow(from, size.min(batch.samples - from)))
}

fn multiply(gradients: &mut BTreeMap<String, Tensor>, factor: f64) -> Result<()> {
    for (name, gradient) in gradients {
        *gradient = gradient.affine(factor, 0.0).map_err(|e| Error::candle(format!("gradient of `{name}`"), e))?;
    }
    Ok(())
}

/// Whether all elements are finite: the sum of their products with zero is. A maximum ignores NaN on some
/// devices, and a sum of large elements overflows.
fn is_finite(tensor: &Tensor) -> candle_core::Result<bool> {
    Ok(transfer::number(&tensor.to_dtype(DType::F32)?.affine(0.0, 0.0)?.sum_all()?, Cause::Step)?.is_finite())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn micro_batches_contain_each_sample_once() {
        let numbers = Tensor::arange(0i64, 5, &Device::Cpu).unwrap();
        let batch = Batch { inputs: [("x".to_owned(), numbers)].into(), references: References::None, samples: 5 };
        let split = |size| {
            let parts = micro_batches(&batch, size).collect::<Result<Vec<_>>>().unwrap();
            parts.iter().map(|part| transfer::read::<i64>(&part.inputs["x"]).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(split(None), [vec![0, 1, 2, 3, 4]]);
        assert_eq!(split(Some(8)), [vec![0, 1, 2, 3, 4]]);
        assert_eq!(split(Some(2)), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(split(Some(0)), split(Some(1)));
        assert_eq!(split(Some(1)).len(), 5);
    }

    #[test]
    fn large_elements_are_finite() {
        let finite = |values: &[f32]| is_finite(&Tensor::new(values, &Device::Cpu).unwrap()).unwrap();
        assert!(finite(&[3e38; 4]) && finite(&[-3e38, 0.0]));
        assert!(!finite(&[1.0, f32::NAN]) && !finite(&[f32::INFINITY, 1.0]) && !finite(&[f32::NEG_INFINITY]));
        assert!(is_finite(&Tensor::new(&[i64::MAX, 0], &Device::Cpu).unwrap()).unwrap());
        assert!(is_finite(&Tensor::new(&[3e38f32; 2], &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()).unwrap());
    }
}
