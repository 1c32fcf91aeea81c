//! The loop: batches in, steps of the optimizer, checkpoints and evaluations in between.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Deserializer, Serialize};

use super::average::Average;
use super::batches::{Batches, Samples};
use super::cache::Cache;
use super::checkpoint::Tensors;
use super::loaded::Loaded;
use super::memory::Timeline;
use super::optimizer;
use super::state::{self, Position, TrainState};
use super::step::{StepResult, Stepper};
use super::surroundings::Surroundings;
use super::{Every, Objective, Offload, Teacher, Team, Training, Weights, clip};
use crate::data::DataSet;
use crate::error::{Error, Result};
use crate::evaluation::lower_is_better;
use crate::exec::transfer::{self, Cause, Copies, Direction};
use crate::exec::{Home, Kept, MemoryCategory, MemoryTracker};
use crate::ir::Graph;
use crate::work::{Event, ProgressUnit};

/// Figures of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Counted from 1.
    pub step: u64,
    /// Times that the data had been gone through.
    pub epoch: u64,
    /// The weighted sum of losses.
    pub loss: f64,
    /// Each loss alone.
    pub losses: BTreeMap<String, f64>,
    /// Of this step.
    pub learning_rate: f64,
    /// Of all gradients, before they were clipped; none where they were too large for 16-bit floats and the step was left out.
    pub gradient_norm: Option<f64>,
    /// Including all waiting.
    pub samples_per_second: f64,
    /// Part of the time that the step waited for its samples.
    pub waited: f64,
}

/// A score on the way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps that were done.
    pub step: u64,
    /// What was measured.
    pub metric: String,
    /// Its value.
    #[serde(deserialize_with = "score")]
    pub value: f64,
}

/// A training, ready to run.
pub struct Trainer<'a> {
    /// How it goes.
    pub options: &'a Training,
    /// The part of the student's graph that losses depend on.
    pub graph: &'a Graph,
    /// What it learns from.
    pub teacher: Option<&'a Teacher>,
    /// Answers that the teacher has given before.
    pub cache: Option<&'a RefCell<Cache>>,
    /// What it makes small.
    pub objective: &'a Objective,
    /// Its samples.
    pub data: &'a DataSet,
    /// Samples that are read together.
    pub batch: usize,
    /// Where it runs.
    pub device: &'a Device,
    /// Accounts of memory.
    pub memory_tracker: &'a MemoryTracker,
    /// Other processes that train with this one.
    pub team: &'a Team,
    /// Everything else.
    pub around: Surroundings<'a>,
}

/// What came of it.
pub struct Trained {
    /// Weights to write.
    pub state: Tensors,
    /// Figures of all steps, thinned out.
    pub curve: Vec<Row>,
    /// Scores on the way.
    pub evaluations: Vec<Evaluation>,
    /// Memory over time.
    pub timeline: Timeline,
    /// Steps taken.
    pub steps: u64,
    /// Steps among them that were skipped, since gradients overflowed 16-bit floats.
    pub skipped_steps: u64,
    /// Steps among them that an earlier run has not taken.
    pub steps_of_this_run: u64,
    /// Plain words for the report.
    pub notes: Vec<String>,
}

/// Rows of the curve that the report keeps.
const ROWS: usize = 400;
/// Checkpoints when nothing is said.
const USUAL: Every = Every::Minutes(10.0);

/// A training that runs.
struct State<'a> {
    train: TrainState<'a>,
    total: u64,
    /// Steps that an earlier run has taken.
    earlier: u64,
    saved: Instant,
    waited: Duration,
    busy: Duration,
    log: Option<super::log::Logs>,
}

impl Trainer<'_> {
    /// Trains.
    ///
    /// # Errors
    /// Samples do not fit, the loss is not finite, memory is too small for a single sample, or the work is interrupted; then
    /// it can go on from the last checkpoint.
    pub fn run(&self, weights: &mut Weights) -> Result<Trained> {
        self.train(weights).inspect_err(|error| self.team.stop(error))
    }

    fn train(&self, weights: &mut Weights) -> Result<Trained> {
        let settings = optimizer::Settings { weight_decay: self.options.weight_decay, momentum: self.options.momentum, ..optimizer::Settings::default() };
        let home = match weights.home() {
            Home::Memory(_) | Home::Shared(_) if self.options.offload.contains(&Offload::Optimizer) => Home::Memory(Device::Cpu),
            // Each process changes what it keeps.
            Home::Shared(shares) => Home::Memory(shares.device().clone()),
            home => home.clone(),
        };
        let of_average = if weights.home().is_shared() { weights.home().clone() } else { home.clone() };
        self.team.agree("model, data or options", &self.around.identity)?;
        let batches = Batches::new(self.data, self.batch, self.options, self.around.seed, (self.team.rank(), self.team.size()))?;
        if self.options.shards_optimizer() && self.team.size() > 1 && !weights.home().is_shared() {
            self.team.share_out(&weights.trained);
        }
        let position = Position {
            identity: self.around.identity.clone(),
            evaluation: self.around.evaluation.clone(),
            processes: self.team.size(),
            seed: self.around.seed,
            scale: (super::step::FIRST_SCALE, 0),
            ..Position::default()
        };
        let mut state = State {
            train: TrainState {
                position,
                optimizer: optimizer::build(self.options.optimizer, &settings, &home)?,
                average: self.options.average.map(|decay| Average::new(&weights.trained, decay, &of_average)).transpose()?,
                weights,
                best: None,
            },
            total: batches.steps(),
            earlier: 0,
            saved: Instant::now(),
            waited: Duration::ZERO,
            busy: Duration::ZERO,
            log: None,
        };
        if let Some(folder) = self.around.folder.as_deref().filter(|_| self.around.resume) {
            state.train.restore(folder, self.graph, self.team)?;
            state.earlier = state.train.position.step;
        }
        if self.team.size() > 1 {
            self.team.agree("step and weights", &state.train.hash(self.graph)?)?;
        }
        if let Some(folder) = self.around.folder.as_ref().filter(|_| self.team.rank() == 0) {
            state.log = Some(super::log::Logs::open(folder, &self.options.logs, self.around.name, &self.objective.losses, state.train.position.step)?);
        }
        let mut timeline = Timeline::new();
        let mut stepper = Stepper::new(self, state.train.weights, state.train.position.part);
        let answered = self.answer_ahead(&batches, &state.train.position)?;
        self.around.work.progress.on(Event::Begin { stage: "Training", total: state.total, unit: ProgressUnit::Steps });
        self.around.work.advance(state.train.position.step)?;
        let done = self.steps(&batches, &mut state, &mut stepper, &mut timeline);
        self.around.work.progress.on(Event::End);
        done?;
        let mut trained = self.finish(state, stepper, timeline)?;
        if answered > 0 {
            trained.notes.push(format!("the teacher answered {answered} samples block by block, before the first step"));
        }
        Ok(trained)
    }

    fn steps(&self, batches: &Batches, state: &mut State, stepper: &mut Stepper, timeline: &mut Timeline) -> Result<()> {
        if self.out_of_patience(state) {
            return Ok(());
        }
        batches.for_each_step(state.train.position.data, state.train.position.step, |samples| {
            let start = Instant::now();
            self.step(state, stepper, &samples)?;
            state.busy += start.elapsed();
            timeline.add("training", state.train.position.step, self.memory_tracker.all());
            Ok(if self.out_of_patience(state) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
    }

    fn out_of_patience(&self, state: &State) -> bool {
        self.options.patience.is_some_and(|patience| state.train.position.waited >= patience)
    }

    fn step(&self, state: &mut State, stepper: &mut Stepper, samples: &Samples) -> Result<()> {
        let (start, before) = (Instant::now(), transfer::copies());
        let number = state.train.position.step + 1;
        let update = number - state.train.position.skipped;
        let rate = self.options.schedule.rate(update - 1, state.total, self.options.learning_rate);
        self.memory_tracker.begin_step(Some(number));
        let StepResult { losses, gradients, statistics, norm, is_empty } =
            stepper.step(state.train.weights, &samples.batches, &mut state.train.position.scale).map_err(|e| self.explain(e, state))?;
        if let Some(norm) = norm {
            self.update(state, gradients, norm, (rate, update))?;
            for (name, statistic) in &statistics {
                state.train.weights.follow(name, statistic)?;
            }
            if !statistics.is_empty() && self.team.size() > 1 {
                state.train.weights.share_statistics(self.graph, self.team)?;
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
        let row = Row {
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
        self.around.work.progress.on(Event::Message(&format!("loss {loss:.4}  rate {rate:.1e}")));
        state.train.position.curve.push(row);
        if state.train.position.curve.len() >= 2 * ROWS {
            let last = state.train.position.curve.pop();
            state.train.position.curve = state.train.position.curve.iter().step_by(2).cloned().chain(last).collect();
        }
        self.around.work.progress.on(Event::Advance(1));
        if self.options.evaluate_every.is_some_and(|every| number.is_multiple_of(every)) || number == state.total && self.options.evaluate_every.is_some() {
            self.evaluate(state)?;
        }
        let due = match self.options.checkpoint_every.unwrap_or(USUAL) {
            Every::Steps(steps) => number.is_multiple_of(steps),
            Every::Minutes(minutes) => state.saved.elapsed().as_secs_f64() >= 60.0 * minutes,
        };
        // Clocks differ: that of the first process counts.
        let (interrupted, due) = self.team.stopped(self.around.work.cancel, due)?;
        if (due && number < state.total) || interrupted {
            self.save(state)?;
        }
        match (interrupted, &self.around.folder) {
            (false, _) => Ok(()),
            (true, Some(folder)) => Err(Error::Paused { step: number, path: state::path(folder) }),
            (true, None) => Err(Error::Cancelled),
        }
    }

    /// Moves all that trains along gradients of this length.
    fn update(&self, state: &mut State, mut gradients: BTreeMap<String, Kept>, norm: f64, (rate, number): (f64, u64)) -> Result<()> {
        let TrainState { weights, optimizer, average, .. } = &mut state.train;
        let most = if self.options.clip_norm > 0.0 { self.options.clip_norm } else { f64::INFINITY };
        average.iter_mut().for_each(Average::begin_step);
        for names in weights.home().together(weights.trained.keys()) {
            self.memory_tracker.work_on("optimizer", "");
            let mut at_work = Loaded::gradients(self.memory_tracker, &gradients, &names)?;
            let mut along = BTreeMap::new();
            for name in &names {
                let here = gradients.remove(name).filter(Kept::is_here);
                along.extend(here.map(|kept| Ok((name.clone(), kept.open()?))).transpose()?);
            }
            clip::shorten(&mut along, norm, most)?;
            let mut changed = BTreeMap::new();
            for name in names {
                let Some(kept) = weights.trained.get(&name).filter(|kept| kept.is_here()) else { continue };
                at_work.add(MemoryCategory::Weights, &name, kept)?;
                let parameter = kept.open()?;
                if let Some(gradient) = along.remove(&name).filter(|_| self.team.owns(&name)) {
                    if weights.home().is_away() {
                        let of_average = average.as_ref().map_or(0, |_| kept.size());
                        at_work.take(MemoryCategory::Optimizer, &name, optimizer.needs(parameter.dims()) + of_average)?;
                    }
                    optimizer.update(&name, &parameter, &gradient, rate, number)?;
                }
                changed.insert(name, parameter);
            }
            self.team.share(&changed)?;
            average.as_mut().map_or(Ok(()), |average| average.update(&changed))?;
            for (name, parameter) in changed {
                weights.trained.get_mut(&name).map_or(Ok(()), |kept| kept.put(parameter))?;
            }
        }
        Ok(())
    }

    /// Where copies count, holds those of a step to its samples on the way in and its figures on the way out.
    fn require_few_copies(&self, before: &Copies) -> Result<()> {
        let since = |((direction, cause), count): (&(Direction, Cause), &u64)| {
            let made = count - before.get(&(*direction, *cause)).unwrap_or(&0);
            let allowed = match (direction, cause) {
                (Direction::In, Cause::Batch) => u64::MAX,
                (Direction::Out, Cause::Step) => 1,
                // What lies elsewhere is fetched and brought back.
                (_, Cause::Offload) if !self.options.offload.is_empty() || self.options.shards_parameters() => u64::MAX,
                (_, Cause::Answers) if self.cache.is_some() => u64::MAX,
                _ => 0,
            };
            (made > allowed).then(|| format!("{made} copies ({direction:?}) for {cause:?}, {allowed} are allowed"))
        };
        match transfer::copies().iter().find_map(since).filter(|_| transfer::is_strict()) {
            Some(reason) => Err(Error::run("a training step", reason, "")),
            None => Ok(()),
        }
    }

    /// Says what can still be gone on from.
    fn explain(&self, error: Error, state: &State) -> Error {
        let Error::Diverged { reason, .. } = error else { return error };
        let kept = match (&self.around.folder, state.train.position.step) {
            (Some(folder), 1..) if state::path(folder).exists() => format!("; the last good state is in {}", state::path(folder).display()),
            _ => String::new(),
        };
        Error::Diverged { step: state.train.position.step + 1, reason: format!("{reason}{kept}") }
    }

    fn evaluate(&self, state: &mut State) -> Result<()> {
        let Some(evaluate) = self.around.evaluate else { return Ok(()) };
        let current = state.train.current(self.graph);
        let whole = state.train.weights.whole_model(&current, self.team.rank() == 0)?;
        // Bits of numbers that may be none.
        let score = self.team.told(|| Ok(evaluate(state.train.weights, &whole)?.map(|score| (score.metric, score.value.to_bits()))))?;
        drop(whole);
        let Some((metric, value)) = score.map(|(metric, bits)| (metric, f64::from_bits(bits))) else { return Ok(()) };
        let best = value.is_finite() && state.train.position.evaluations.iter().all(|other| better(&metric, value, other.value));
        let evaluation = Evaluation { step: state.train.position.step, metric: metric.clone(), value };
        state.log.as_mut().map_or(Ok(()), |log| log.score(&evaluation))?;
        state.train.position.evaluations.push(evaluation);
        state.train.position.waited = if best { 0 } else { state.train.position.waited + 1 };
        if best {
            state.train.keep_best(current)?;
        }
        self.around.work.progress.on(Event::Message(&format!("{metric} {value:.4}")));
        Ok(())
    }

    fn save(&self, state: &mut State) -> Result<()> {
        let Some(folder) = &self.around.folder else { return Ok(()) };
        state.saved = Instant::now();
        state.train.save(folder, self.graph, self.team)
    }

    fn finish(&self, mut state: State, stepper: Stepper, timeline: Timeline) -> Result<Trained> {
        let mut notes = self.objective.notes.clone();
        notes.extend(stepper.notes(self.batch).into_iter().chain(state.train.position.idle_steps()?));
        let (busy, waited) = (state.busy.as_secs_f64(), state.waited.as_secs_f64());
        notes.push(format!(
            "{} steps in {:.0} s; waited for samples {:.1} % of the time",
            state.train.position.step - state.earlier,
            busy + waited,
            100.0 * waited / (busy + waited + 1e-9)
        ));
        if let Some((bytes, steps)) = timeline.growth() {
            notes.push(format!("memory of the process grew by {} MB over {steps} steps while the tensors of training did not: a leak", bytes >> 20));
        }
        let current = state.train.current(self.graph);
        if self.out_of_patience(&state) {
            notes.push(format!("stopped early after step {}: {} evaluations without a better score", state.train.position.step, state.train.position.waited));
        }
        if let (Some(best), Some(score)) = (&state.train.best, best(&state.train.position.evaluations)) {
            notes.push(format!("the weights of step {} are kept, {} {:.4}", score.step, score.metric, score.value));
            return self.trained(best.clone(), &mut state, timeline, notes);
        }
        self.trained(current, &mut state, timeline, notes)
    }

    fn trained(&self, tensors: Tensors, state: &mut State, timeline: Timeline, notes: Vec<String>) -> Result<Trained> {
        // Passes behind this one go on in every process.
        let tensors = state.train.weights.whole(tensors, true)?;
        let position = std::mem::take(&mut state.train.position);
        let steps_of_this_run = position.step - state.earlier;
        Ok(Trained {
            state: tensors,
            curve: position.curve,
            evaluations: position.evaluations,
            timeline,
            steps: position.step,
            skipped_steps: position.skipped,
            steps_of_this_run,
            notes,
        })
    }
}

fn best(evaluations: &[Evaluation]) -> Option<&Evaluation> {
    evaluations.iter().reduce(|best, other| if better(&best.metric, other.value, best.value) { other } else { best })
}

/// Whether a score is better than another; any number is better than none.
fn better(metric: &str, value: f64, other: f64) -> bool {
    value.is_finite() && (!other.is_finite() || if lower_is_better(metric) { value < other } else { value > other })
}

/// A score; what JSON has no number for is none.
fn score<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A type that masters have.
pub(super) const MASTER: DType = DType::F32;

/// Adds a gradient to the sum of those of its name, in f32; gives the bytes that the addition takes, and those among them that stay.
/// Of a parameter that processes share out, gradients of all are added, in the process that keeps it.
pub(super) fn add_up(sums: &mut BTreeMap<String, Kept>, home: &Home, parameter: Option<&Kept>, name: &str, gradient: Tensor) -> Result<(u64, u64)> {
    use crate::ir::ops::sum;
    let failed = |e: candle_core::Error| Error::computed(format!("gradient of `{name}`"), e);
    let gradient = gradient.to_dtype(MASTER).map_err(failed)?;
    let gradient = parameter.map_or(Ok(gradient.clone()), |parameter| parameter.sum_of_all(gradient))?;
    let (kept, bytes) = match sums.remove(name) {
        None => {
            let kept = parameter.map_or_else(|| home.keep(&gradient), |parameter| home.keep_with(&gradient, parameter))?;
            let stays = kept.bytes();
            (kept, (4 * gradient.elem_count() as u64, stays))
        }
        // Nobody else refers to the tensor, so that the sum takes its place.
        Some(kept) if home.is_memory() => {
            let other = kept.open()?;
            drop(kept);
            (sum(other, gradient).map_err(failed)?.into(), (0, 0))
        }
        Some(mut kept) => {
            let bytes = kept.size();
            if let Some(other) = kept.load_own(gradient.device())? {
                kept.put(sum(other, gradient).map_err(failed)?)?;
            }
            (kept, (bytes, 0))
        }
    };
    sums.insert(name.to_owned(), kept);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_that_is_no_number_is_worse_than_any_and_is_read_back() {
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
