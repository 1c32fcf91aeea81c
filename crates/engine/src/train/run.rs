//! The training loop: steps, evaluations and checkpoints.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use candle_core::Device;

use super::average::Average;
use super::batches::{Batches, Samples, input_bytes};
use super::checkpoint::Tensors;
use super::draw::Draw;
use super::memory::Timeline;
use super::memory_reservation::MemoryReservation;
use super::optimizer;
use super::records::{Evaluation, StepRecord};
use super::state::{self, Position, TrainState};
use super::step::{StepResult, Stepper};
use super::trainer::{Trainer, WAITING};
use super::{Every, Offload, OnPolicySampler, Training, Weights, clip};
use crate::data::Batch;
use crate::error::{Error, Result, counted};
use crate::evaluation::lower_is_better;
use crate::exec::transfer::{self, Cause, Copies, Direction};
use crate::exec::{ManagedTensor, MemoryCategory, Placement, on_pool_thread};
use crate::work::{Event, ProgressUnit};

/// Result of a training.
pub struct Trained {
    /// Weights to write into the model.
    pub state: Tensors,
    /// Metrics of the steps, thinned out.
    pub curve: Vec<StepRecord>,
    /// Scores during training.
    pub evaluations: Vec<Evaluation>,
    /// Memory usage over time.
    pub timeline: Timeline,
    /// Total number of steps.
    pub steps: u64,
    /// Steps that were skipped because gradients overflowed 16-bit floats.
    pub skipped_steps: u64,
    /// Steps of this run, without those before a resume.
    pub steps_of_this_run: u64,
    /// Copies between host and device since the first step; the set-up of the optimizer is not counted.
    pub copies: Copies,
    /// Whether the weights before the first step were selected.
    pub unchanged: bool,
    /// Whether the training was started with another number of steps.
    pub extended: bool,
    /// Notes for the report.
    pub notes: Vec<String>,
}

/// Number of steps in the curve of the report: thinned out at twice as many.
const CURVE_STEPS: usize = 400;
/// Default checkpoint interval.
const DEFAULT_INTERVAL: Every = Every::Minutes(10.0);

/// State of a running training.
pub(super) struct State<'a> {
    pub train: TrainState<'a>,
    pub total: u64,
    /// Steps of earlier runs, before a resume.
    pub earlier: u64,
    saved: Instant,
    waited: Duration,
    busy: Duration,
    log: Option<super::log::Logs>,
    /// Copies before the first step.
    copies: Copies,
}

impl State<'_> {
    /// Steps since the start of this run, without those before a resume.
    fn steps_of_this_run(&self) -> u64 {
        self.train.position.step - self.earlier
    }
}

impl Trainer<'_> {
    /// Runs the training. Fails if a loss is not finite, or if the run is interrupted, in which case it can
    /// be resumed from the last checkpoint.
    pub fn run(&self, weights: &mut Weights) -> Result<Trained> {
        self.train(weights).inspect_err(|error| self.team.stop(error))
    }

    fn train(&self, weights: &mut Weights) -> Result<Trained> {
        let settings = self.options.optimizer_settings(weights.linear().clone(), weights.trained.keys())?;
        let home = match weights.home() {
            Placement::Memory(_) | Placement::Sharded(_) if self.options.offload.contains(&Offload::Optimizer) => Placement::Memory(Device::Cpu),
            // Each process updates the parameters that it owns.
            Placement::Sharded(shares) => Placement::Memory(shares.device().clone()),
            home => home.clone(),
        };
        let average_home = if weights.home().is_sharded() { weights.home().clone() } else { home.clone() };
        let batches = Batches::new(self.data, self.batch, self.options, self.context.seed, (self.team.rank(), self.team.size()))?;
        // The number of steps of epochs is known only now.
        if let Some(reason) = self.options.schedule.check(Some(batches.steps())) {
            return Err(Error::option(format!("{}: schedule", self.context.name), reason));
        }
        // Options that may change on resume are not part of the identity.
        let Training { final_checkpoint, patience, .. } = self.options;
        let identity = format!("{} {} {final_checkpoint:?} {patience:?}", self.context.identity, batches.steps());
        self.team.agree("model, data or options", &identity)?;
        let optimizer = optimizer::build(self.options.optimizer, &settings, &home)?;
        if self.options.shards_optimizer() && self.team.size() > 1 && !weights.home().is_sharded() {
            self.team.shard_optimizer(&weights.trained, &*optimizer);
        }
        let position = Position {
            identity: self.context.identity.clone(),
            evaluation: self.context.evaluation.clone(),
            processes: self.team.size(),
            seed: self.context.seed,
            total: batches.steps(),
            patience: self.options.patience,
            scale: (super::step::FIRST_SCALE, 0),
            ..Position::default()
        };
        let mut state = State {
            train: TrainState {
                position,
                optimizer,
                average: self.options.average.map(|decay| Average::new(&weights.trained, decay, &average_home)).transpose()?,
                weights,
                best: None,
            },
            total: batches.steps(),
            earlier: 0,
            saved: Instant::now(),
            waited: Duration::ZERO,
            busy: Duration::ZERO,
            log: None,
            copies: transfer::copies(),
        };
        let extension = self.restore(&mut state, &batches)?;
        if self.team.size() > 1 {
            self.team.agree("step and weights", &state.train.hash(self.graph)?)?;
        }
        if let Some(folder) = self.context.folder.as_ref().filter(|_| self.team.rank() == 0) {
            state.log = Some(super::log::Logs::open(folder, &self.options.logs, self.context.name, &self.objective.losses, state.train.position.step)?);
        }
        let mut timeline = Timeline::new();
        let mut stepper = Stepper::new(self, state.train.weights, state.train.position.part)?;
        let precomputed = self.fill_teacher_cache(&batches, &state.train.position)?;
        self.context.work.progress.on(Event::Begin { stage: "Training", total: state.total, done: state.train.position.step, unit: ProgressUnit::Steps });
        let done = self.steps(&batches, &mut state, &mut stepper, &mut timeline);
        self.context.work.progress.on(Event::End);
        done?;
        let mut trained = self.finish(state, stepper, timeline)?;
        trained.extended = extension.is_some();
        trained.notes.extend(extension);
        if precomputed > 0 {
            trained.notes.push(format!("the teacher's logits of {} were computed block by block before the first step", counted(precomputed, "sample")));
        }
        Ok(trained)
    }

    fn steps(&self, batches: &Batches, state: &mut State, stepper: &mut Stepper, timeline: &mut Timeline) -> Result<()> {
        if self.out_of_patience(state) {
            return Ok(());
        }
        // The initial model can be the best one.
        if state.train.position.step == 0 && self.options.evaluate_every.is_some() {
            self.evaluate(state)?;
        }
        let (waiting, is_interrupted) = (Cell::new(0), Cell::new(false));
        let wait = |batch: &Batch| {
            self.require_uninterrupted().inspect_err(|_| is_interrupted.set(true))?;
            let bytes = input_bytes(batch);
            waiting.set(waiting.get() + bytes);
            self.memory_tracker.allocate_named(MemoryCategory::Data, WAITING, bytes)
        };
        let done = batches.for_each_step(state.train.position.data, state.train.position.step, wait, |samples| {
            self.memory_tracker.release_named(MemoryCategory::Data, WAITING, waiting.take());
            let start = Instant::now();
            let samples = self.changed(samples, state, stepper.part())?;
            self.step(state, stepper, &samples, start)?;
            state.busy += start.elapsed();
            timeline.add("training", state.train.position.step, self.memory_tracker.all());
            Ok(if self.out_of_patience(state) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        if is_interrupted.get() { Err(self.interrupted(state)?) } else { done }
    }

    /// Saves the state after the last completed step. Returns the error of an interrupted training.
    fn interrupted(&self, state: &mut State) -> Result<Error> {
        let step = state.train.position.step;
        match self.context.folder.as_ref().filter(|_| step > 0) {
            Some(folder) => self.save(state).map(|()| Error::Paused { step, path: state::path(folder) }),
            None => Ok(Error::Cancelled),
        }
    }

    /// The samples of a step with random changes: augmented images, and texts with masked tokens or with
    /// continuations of the student.
    fn changed(&self, samples: Samples, state: &State, part: Option<usize>) -> Result<Samples> {
        let draw = Draw { seed: self.context.seed, step: state.train.position.step, rank: self.team.rank() };
        let mut batches = samples.batches;
        if let Some(options) = self.options.augment {
            batches = options.augmented(batches, draw)?;
        }
        if let Some(masker) = self.masker {
            batches = masker.masked(batches, draw)?;
        }
        if let Some(sampler) = self.sampler {
            let continued = sampler.continued(batches, state.train.weights, (self.device, part), draw, &self.context.work);
            batches = continued.map_err(|e| self.explain(e, state))?;
        }
        Ok(Samples { batches, ..samples })
    }

    pub(super) fn out_of_patience(&self, state: &State) -> bool {
        self.options.patience.is_some_and(|patience| state.train.position.waited >= patience)
    }

    fn step(&self, state: &mut State, stepper: &mut Stepper, samples: &Samples, start: Instant) -> Result<()> {
        let before = transfer::copies();
        let number = state.train.position.step + 1;
        let update = number - state.train.position.idle();
        let rate = self.options.schedule.rate(update - 1, state.total, self.options.learning_rate);
        self.memory_tracker.begin_step(Some(number));
        let draw = Draw { seed: self.context.seed, step: state.train.position.step, rank: self.team.rank() };
        let result = stepper.step(state.train.weights, &samples.batches, &mut state.train.position.scale, draw.random().u64(..));
        let StepResult { losses, gradients, statistics, norm, is_empty } = match result {
            // No weight has changed in this step.
            Err(Error::Cancelled) if self.team.size() == 1 => return Err(self.interrupted(state)?),
            result => result.map_err(|e| self.explain(e, state))?,
        };
        if let Some(norm) = norm.filter(|_| !is_empty) {
            self.update(state, gradients, norm, (rate, update))?;
            for (name, statistic) in &statistics {
                state.train.weights.update_statistics(name, statistic)?;
            }
            if !statistics.is_empty() && self.team.size() > 1 {
                state.train.weights.average_statistics(self.graph, self.team)?;
            }
        }
        state.train.position.count_idle(norm.is_none(), is_empty);
        self.require_few_copies(&before)?;
        self.memory_tracker.set(MemoryCategory::Gradients, 0)?;
        self.memory_tracker.set(MemoryCategory::Optimizer, state.train.optimizer.bytes() + state.train.average.as_ref().map_or(0, Average::bytes))?;
        state.train.position.step = number;
        state.train.position.data = samples.next;
        state.train.position.part = stepper.part();
        let count: usize = samples.batches.iter().map(|batch| batch.samples).sum();
        let loss = self.objective.total(&losses);
        state.waited += samples.waited;
        let (took, waited) = (start.elapsed(), state.waited.as_secs_f64());
        let row = StepRecord {
            step: number,
            epoch: samples.next.epoch,
            loss,
            losses: losses.into_iter().map(|(name, loss)| (name.to_owned(), loss)).collect(),
            learning_rate: rate,
            gradient_norm: norm,
            samples_per_second: count as f64 / ((samples.waited + took).as_secs_f64() + 1e-9),
            waited: waited / (waited + (state.busy + took).as_secs_f64() + 1e-9),
        };
        if let Some(log) = &mut state.log {
            log.add(&row)?;
        }
        self.context.work.progress.on(Event::Message(&format!("loss {loss:.4}  rate {rate:.1e}")));
        state.train.position.curve.push(row);
        if state.train.position.curve.len() >= 2 * CURVE_STEPS {
            let last = state.train.position.curve.pop();
            state.train.position.curve = state.train.position.curve.iter().step_by(2).cloned().chain(last).collect();
        }
        self.context.work.progress.on(Event::Advance(1));
        if self.options.evaluate_every.is_some_and(|every| number.is_multiple_of(every)) {
            self.evaluate(state)?;
        }
        self.save_for_extension(state)?;
        if number == state.total && self.options.evaluate_every.is_some_and(|every| !number.is_multiple_of(every)) {
            self.evaluate(state)?;
        }
        let due = match self.options.checkpoint_every.unwrap_or(DEFAULT_INTERVAL) {
            Every::Steps(steps) => number.is_multiple_of(steps),
            Every::Minutes(minutes) => state.saved.elapsed().as_secs_f64() >= 60.0 * minutes,
        };
        // Clocks differ between processes: that of rank 0 decides.
        let (interrupted, due) = self.team.poll_interruption(self.context.work.cancel, due)?;
        if interrupted {
            return Err(self.interrupted(state)?);
        }
        if due && number < state.total { self.save(state) } else { Ok(()) }
    }

    /// Updates all trained parameters, with gradients of the given global norm.
    fn update(&self, state: &mut State, mut gradients: BTreeMap<String, ManagedTensor>, norm: f64, (rate, number): (f64, u64)) -> Result<()> {
        let TrainState { weights, optimizer, average, .. } = &mut state.train;
        on_pool_thread(self.device, || {
            let max_norm = if self.options.clip_norm > 0.0 { self.options.clip_norm } else { f64::INFINITY };
            average.iter_mut().for_each(Average::begin_step);
            for names in weights.home().name_groups(weights.trained.keys()) {
                self.memory_tracker.work_on("optimizer", "");
                let mut reservation = MemoryReservation::for_gradients(self.memory_tracker, &gradients, &names)?;
                let mut own = BTreeMap::new();
                for name in &names {
                    let local = gradients.remove(name).filter(ManagedTensor::is_local);
                    own.extend(local.map(|kept| Ok((name.clone(), kept.open()?))).transpose()?);
                }
                clip::scale_to_norm(&mut own, norm, max_norm)?;
                let mut changed = BTreeMap::new();
                for name in names {
                    let Some(kept) = weights.trained.get(&name).filter(|kept| kept.is_local()) else { continue };
                    reservation.add(MemoryCategory::Weights, &name, kept)?;
                    let parameter = kept.open()?;
                    if let Some(gradient) = own.remove(&name) {
                        if weights.home().is_offloaded() {
                            let average_bytes = average.as_ref().map_or(0, |_| kept.size());
                            reservation.add_bytes(MemoryCategory::Optimizer, &name, optimizer.state_bytes(&name, parameter.dims()) + average_bytes)?;
                        }
                        let mut workspace = MemoryReservation::new(self.memory_tracker);
                        workspace.add_bytes(MemoryCategory::Optimizer, &name, optimizer.workspace_bytes(&name, parameter.dims()))?;
                        // The part that this process updates, in the memory of the parameter.
                        let part = self.team.own_part(&name).filter(|part| part.len() < parameter.elem_count());
                        let narrow = |part: &Range<usize>| parameter.flatten_all()?.narrow(0, part.start, part.len());
                        let elements = part.as_ref().map_or(Ok(parameter.clone()), narrow).map_err(|e| Error::candle(format!("parameter `{name}`"), e))?;
                        optimizer.update_part(&name, kept.dims(), &elements, &gradient, rate, number)?;
                        weights.keep_zeros(&name, part.as_ref(), &elements)?;
                    }
                    changed.insert(name, parameter);
                }
                self.team.gather_parameters(&changed)?;
                average.as_mut().map_or(Ok(()), |average| average.update(&changed))?;
                for (name, parameter) in changed {
                    weights.trained.get_mut(&name).map_or(Ok(()), |kept| kept.put(parameter))?;
                }
            }
            Ok(())
        })
    }

    /// In strict mode, checks that a step copies only its samples to the device and one tensor of
    /// metrics back.
    fn require_few_copies(&self, before: &Copies) -> Result<()> {
        let since = |((direction, cause), count): (&(Direction, Cause), &u64)| {
            let copies = count - before.get(&(*direction, *cause)).unwrap_or(&0);
            let allowed = match (direction, cause) {
                (Direction::In, Cause::Batch) => u64::MAX,
                (Direction::Out, Cause::Step) => 1,
                // Offloaded and sharded tensors are copied in both directions.
                (_, Cause::Offload) if !self.options.offload.is_empty() || self.options.shards_parameters() => u64::MAX,
                (_, Cause::Answers) if self.cache.is_some() || self.further_teachers.iter().any(|further| further.cache.is_some()) => u64::MAX,
                _ => 0,
            };
            (copies > allowed).then(|| format!("{copies} copies ({direction:?}) for {cause:?}, but only {allowed} are allowed"))
        };
        match transfer::copies().iter().find_map(since).filter(|_| transfer::is_strict()) {
            Some(reason) => Err(Error::run("a training step", reason, "")),
            None => Ok(()),
        }
    }

    /// Adds the step, and the checkpoint that training can be resumed from, to an error.
    fn explain(&self, error: Error, state: &State) -> Error {
        let Error::Diverged { reason, .. } = error else { return error };
        let checkpoint = match (&self.context.folder, state.train.position.step) {
            (Some(folder), 1..) if state::path(folder).exists() => format!("; the last checkpoint is {}", state::path(folder).display()),
            _ => String::new(),
        };
        Error::Diverged { step: state.train.position.step + 1, reason: format!("{reason}{checkpoint}") }
    }

    fn evaluate(&self, state: &mut State) -> Result<()> {
        let Some(evaluate) = self.context.evaluate else { return Ok(()) };
        let current = state.train.current(self.graph);
        let gathered = state.train.weights.gather_model(&current, self.team.rank() == 0)?;
        // Passed as bits, since JSON has no NaN.
        let score = self.team.broadcast(|| Ok(evaluate(state.train.weights, &gathered)?.map(|score| (score.metric, score.value.to_bits()))))?;
        drop(gathered);
        let Some((metric, value)) = score.map(|(metric, bits)| (metric, f64::from_bits(bits))) else { return Ok(()) };
        let best = value.is_finite() && state.train.position.evaluations.iter().all(|other| better(&metric, value, other.value));
        let evaluation = Evaluation { step: state.train.position.step, metric: metric.clone(), value };
        state.log.as_mut().map_or(Ok(()), |log| log.score(&evaluation))?;
        state.train.position.evaluations.push(evaluation);
        state.train.position.waited = if best { 0 } else { state.train.position.waited + 1 };
        if best {
            state.train.keep_best(current)?;
        }
        self.context.work.progress.on(Event::Message(&format!("{metric} {value:.4}")));
        Ok(())
    }

    fn save(&self, state: &mut State) -> Result<()> {
        let Some(folder) = &self.context.folder else { return Ok(()) };
        state.saved = Instant::now();
        state.train.save(folder, self.graph, self.team, self.options.keep_checkpoints.unwrap_or(1))
    }

    fn finish(&self, mut state: State, stepper: Stepper, timeline: Timeline) -> Result<Trained> {
        let mut notes = self.objective.notes.clone();
        notes.extend(self.options.schedule.unfinished_warmup(state.total));
        notes.extend(self.sampler.map(OnPolicySampler::note));
        notes.extend(stepper.notes(self.batch).into_iter().chain(state.train.position.idle_steps(self.masker.is_some())?));
        let (busy, waited) = (state.busy.as_secs_f64(), state.waited.as_secs_f64());
        notes.push(format!(
            "{} in {:.0} s, of which {:.1} % was spent waiting for samples",
            counted(state.steps_of_this_run() as usize, "step"),
            busy + waited,
            100.0 * waited / (busy + waited + 1e-9)
        ));
        if let Some((bytes, steps)) = timeline.growth() {
            notes.push(format!("the resident memory of the process grew by {} MB over {steps} steps: a possible memory leak", bytes >> 20));
        }
        let current = state.train.current(self.graph);
        if self.out_of_patience(&state) {
            notes.push(format!("stopped early after step {}: {} evaluations without improvement", state.train.position.step, state.train.position.waited));
        }
        if let (Some(best), Some(score)) = (&state.train.best, best(&state.train.position.evaluations)) {
            notes.push(format!("the weights of step {} were selected, {} {:.4}", score.step, score.metric, score.value));
            let unchanged = score.step == 0;
            return Ok(Trained { unchanged, ..self.trained(best.clone(), &mut state, timeline, notes)? });
        }
        self.trained(current, &mut state, timeline, notes)
    }

    fn trained(&self, tensors: Tensors, state: &mut State, timeline: Timeline, notes: Vec<String>) -> Result<Trained> {
        // Later passes run in every process.
        let tensors = state.train.weights.gather(tensors, true)?;
        let steps_of_this_run = state.steps_of_this_run();
        let position = std::mem::take(&mut state.train.position);
        let mut copies = transfer::copies();
        copies.iter_mut().for_each(|(key, count)| *count -= state.copies.get(key).copied().unwrap_or(0));
        copies.retain(|_, count| *count > 0);
        Ok(Trained {
            state: tensors,
            curve: position.curve,
            evaluations: position.evaluations,
            timeline,
            steps: position.step,
            skipped_steps: position.skipped,
            steps_of_this_run,
            copies,
            unchanged: false,
            extended: false,
            notes,
        })
    }
}

fn best(evaluations: &[Evaluation]) -> Option<&Evaluation> {
    evaluations.iter().reduce(|best, other| if better(&best.metric, other.value, best.value) { other } else { best })
}

/// Whether a score is better than another; a finite score is better than any other.
fn better(metric: &str, value: f64, other: f64) -> bool {
    value.is_finite() && (!other.is_finite() || if lower_is_better(metric) { value < other } else { value > other })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_scores_are_worse_than_others_and_survive_serialization() {
        let scored = |value| Evaluation { step: 3, metric: "perplexity".into(), value };
        assert!(better("perplexity", 9.0, f64::NAN) && better("accuracy", 0.1, f64::NAN));
        assert!(!better("perplexity", f64::NAN, 9.0) && !better("accuracy", f64::INFINITY, 0.9));
        assert!(better("perplexity", 8.0, 9.0) && !better("accuracy", 0.8, 0.9));
        assert_eq!(best(&[scored(f64::NAN), scored(7.0), scored(8.0)]).map(|best| best.value), Some(7.0));
        let again: Evaluation = serde_json::from_str(&serde_json::to_string(&scored(f64::NAN)).unwrap()).unwrap();
        assert!(again.value.is_nan());
        assert_eq!(serde_json::from_str::<Evaluation>(&serde_json::to_string(&scored(7.5)).unwrap()).unwrap(), scored(7.5));
    }
}
