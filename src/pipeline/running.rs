//! The half of a pipeline that runs models: data, a device, how to measure, and where results are kept.

mod evaluate;
mod fidelity;
mod free;
mod kept;
mod starter;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use candle_core::Device;

pub use kept::{Entry, Shelf};
pub use starter::starter;

use self::evaluate::Run;
pub(super) use self::evaluate::check_onnx;
use super::carry::write_text;
use super::run::Measured;
use super::{Builder, Pipeline};
use crate::data::{Data, DataSet, DataSets};
use crate::error::{Error, Result};
use crate::evaluation::{Evaluate, Runtime, Subject};
use crate::exec::{Choice, DeviceMemory};
use crate::export::Exported;
use crate::ir::GraphFile;
use crate::model::Model;
use crate::output::Workplace;
use crate::pass::{Context, Samples, Step};
use crate::recipe::Recipe;
use crate::report::{Environment, Peak};
use crate::train::communicator::Place;
use crate::work::Event;

/// Samples of the training data that a pass looks at which needs calibration data and has none of its own.
const LENT: usize = 128;

/// What running models takes.
#[derive(Clone, Default)]
pub(super) struct Running {
    pub data: DataSets,
    pub evaluate: Option<Evaluate>,
    pub device: Choice,
    /// Where results of passes are kept, and whether those of earlier runs may be used without asking.
    pub shelf: Option<(Shelf, bool)>,
}

impl Running {
    /// Takes what a recipe says.
    pub fn take(&mut self, recipe: &Recipe) {
        self.data = recipe.data.clone();
        self.evaluate.clone_from(&recipe.evaluate);
    }

    /// Tells it to a recipe, with paths that hold wherever the recipe is.
    pub fn tell(&self, recipe: &mut Recipe) {
        recipe.data = self.data.absolute();
        recipe.evaluate.clone_from(&self.evaluate);
    }

    /// Holds what is said of evaluation, and passes that run the model, to the data there is.
    pub fn check(&self, steps: &[Step]) -> Result<()> {
        match (&self.evaluate, &self.data.evaluation) {
            (Some(_), None) => return Err(Error::option("evaluate", "needs samples: add `data: { evaluation: ... }`")),
            (_, Some(data)) => data.check()?,
            (None, None) => {}
        }
        for pass in steps.iter().map(Step::pass) {
            if let Some((key, None)) = pass.runs_on().and_then(|samples| self.set(samples)) {
                return Err(Error::option(
                    pass.name(),
                    format!("needs samples to run the model on: add `data: {{ {key}: ... }}`, or --{key} on the command line"),
                ));
            }
        }
        Ok(())
    }

    /// The data sets that are named.
    pub fn sets(&self) -> Vec<Samples> {
        [Samples::Calibration, Samples::Train].into_iter().filter(|samples| matches!(self.set(*samples), Some((_, Some(_))))).collect()
    }

    /// Has passes that look at calibration data look at some of the training data where they have none of their own.
    pub fn lend(&mut self, steps: &[Step]) {
        if self.data.calibration.is_none() && steps.iter().any(|step| step.pass().runs_on() == Some(Samples::Calibration)) {
            let some = |data: &Data| Data { samples: Some(data.samples.map_or(LENT, |samples| samples.min(LENT))), ..data.clone() };
            self.data.calibration = self.data.train.as_ref().map(some);
        }
    }

    /// What decides how models run.
    pub fn describe(&self) -> Option<String> {
        Some(self.device.to_string())
    }

    /// Whether evaluation data is named.
    pub fn evaluates(&self) -> bool {
        self.data.evaluation.is_some()
    }

    /// A data set by what it is for: its key, and what is said of it.
    pub fn set(&self, samples: Samples) -> Option<(&'static str, Option<&Data>)> {
        match samples {
            Samples::Calibration => Some(("calibration", self.data.calibration.as_ref())),
            Samples::Train => Some(("train", self.data.train.as_ref())),
            Samples::None => None,
        }
    }
}

impl Pipeline {
    /// Does the part of another process in a run: it trains along, and nothing is written.
    ///
    /// # Errors
    /// Anything that goes wrong.
    pub fn follow(&self, model: &Model, output: impl AsRef<Path>) -> Result<()> {
        if !self.trains() {
            return Ok(());
        }
        // What the first process refuses is refused by all: none waits for one that has gone.
        crate::output::check_place(output.as_ref(), self.force, &model.path)?;
        let (mut pipeline, _) = self.settled(model)?;
        pipeline.check_data(model)?;
        pipeline.hold_out(model)?;
        pipeline.perform(model, Some(&Workplace::beside(output.as_ref())), &mut Peak::start()).map(drop)
    }

    /// Whether this process is the one that writes: the only one, or the first of those that the environment names. The others
    /// [`follow`](Pipeline::follow).
    ///
    /// # Errors
    /// A pass trains, and the environment says something about other processes that does not hold together. Without such a pass
    /// each process works for itself then.
    pub fn leads(&self) -> Result<bool> {
        let place = Place::from_environment();
        let place = if self.trains() { place? } else { place.unwrap_or_default() };
        Ok(place.is_none_or(|place| place.rank == 0))
    }

    /// Opens the data that is used, by its key, so that what does not fit is said before any work is done.
    fn open_data(&self, model: &Model) -> Result<BTreeMap<&'static str, DataSet>> {
        let running = &self.running;
        let used = self.steps.iter().filter_map(|step| running.set(step.pass().runs_on()?));
        let options: BTreeMap<&'static str, &Data> =
            used.chain([("evaluation", running.data.evaluation.as_ref())]).filter_map(|(key, options)| Some((key, options?))).collect();
        if options.is_empty() {
            return Ok(BTreeMap::new());
        }
        let subject = Subject::of(model.clone())?;
        let open = |(key, options): (&'static str, &Data)| Ok((key, DataSet::open(options, subject.target())?));
        let opened = options.into_iter().map(open).collect::<Result<_>>()?;
        self.open_device()?;
        let onnxruntime = running.evaluate.as_ref().is_some_and(|evaluate| evaluate.runtime.contains(&Runtime::OnnxRuntime));
        if onnxruntime && self.onnx().is_none() {
            return Err(Error::option("evaluate", "`runtime: [onnxruntime]` needs `onnx` among the exports"));
        }
        if onnxruntime {
            crate::runtime::library()?;
        }
        Ok(opened)
    }

    /// Opens the data, so that what does not fit is said before any work is done.
    pub(super) fn check_data(&self, model: &Model) -> Result<()> {
        self.open_data(model).map(drop)
    }

    /// How many samples there are of each data set that is used.
    pub(super) fn count_samples(&self, model: &Model) -> Result<BTreeMap<&'static str, usize>> {
        self.open_data(model)?.into_iter().map(|(key, data)| Ok((key, data.count()?))).collect()
    }

    /// The device of this process: what the environment contradicts itself in is told where processes meet.
    fn open_device(&self) -> Result<Device> {
        let place = Place::from_environment().ok().flatten();
        self.running.device.open_for(place.map_or(0, |place| place.local_rank))
    }

    /// The device that models run on, where any does.
    fn used_device(&self) -> Result<Option<Device>> {
        let used = self.steps.iter().any(|step| step.pass().runs_on().is_some()) || self.running.evaluates();
        used.then(|| self.open_device()).transpose()
    }

    /// Most memory of a GPU: 0 where none is used, nothing where it is not known beforehand.
    pub(super) fn planned_vram(&self) -> Result<Option<u64>> {
        Ok(self.used_device()?.is_none_or(|device| device.is_cpu()).then_some(0))
    }

    /// Watches the memory of this process and of the device that models run on.
    pub(super) fn watch(&self) -> Result<Peak> {
        let memory = self.used_device()?.as_ref().map(DeviceMemory::watch);
        Ok(Peak::of(move || memory.as_ref()?.peak()))
    }

    /// The machine, with the device that models run on.
    pub(super) fn environment(&self) -> Result<Environment> {
        let environment = Environment::detect();
        Ok(match self.used_device()? {
            Some(device) => environment.on(crate::exec::name(&device)),
            None => environment,
        })
    }

    /// Leaves some of the calibration samples to be measured on, where passes would use all of them; whether they are measured on does
    /// not matter, so that what is written does not depend on it.
    pub(super) fn hold_out(&mut self, model: &Model) -> Result<Option<String>> {
        if !self.steps.iter().any(|step| step.pass().runs_on() == Some(Samples::Calibration)) {
            return Ok(None);
        }
        let Some(set) = &self.running.data.calibration else { return Ok(None) };
        let less = set.holding_out(Subject::of(model.clone())?.target())?;
        let note = less.samples.filter(|_| less.samples != set.samples).map(|used| {
            format!("passes look at the first {used} calibration samples: the others, a tenth, are left to measure on; `samples` in `data: {{ calibration: ... }}` says how many they take")
        });
        self.running.data.calibration = Some(less);
        Ok(note)
    }

    /// Applies the passes with all that takes running the model; nothing where no pass does.
    pub(super) fn perform(&self, model: &Model, workplace: Option<&Path>, peak: &mut Peak) -> Result<Option<Model>> {
        if self.steps.iter().all(|step| step.pass().runs_on().is_none()) {
            return Ok(None);
        }
        let running = &self.running;
        let mut context =
            Context { workplace: None, resume: self.resume, work: self.work(), seed: self.seed, data: &running.data, device: self.open_device()? };
        if let Some(reason) = running.device.reason() {
            context.work.progress.on(Event::Message(&reason));
        }
        let mut kept = self.kept(model, &context.work)?;
        let found = kept.as_mut().and_then(|kept| kept.found.take());
        let (done, mut after) = found.map_or_else(|| (0, model.clone()), |(number, after)| (number + 1, after));
        for (number, step) in self.steps.iter().enumerate().skip(done) {
            let runs = step.pass().runs_on().is_some();
            if runs {
                after.prepare(&context.work)?;
            }
            context.workplace = workplace.map(|folder| folder.join(format!("{}-{}", number + 1, step.pass().name())));
            let start = Instant::now();
            peak.lap();
            after = step.pass().apply(after, Some(&context))?;
            if let Some(applied) = after.history.last_mut().filter(|_| runs) {
                let lap = peak.lap();
                (applied.peak_rss_bytes, applied.peak_vram_bytes) = (lap.rss_bytes, lap.vram_bytes);
            }
            if let Some(kept) = kept.as_ref().filter(|_| runs) {
                kept.put(number, start.elapsed(), &mut after, &context.work);
            }
        }
        after.settle_ties(model)?;
        Ok(Some(after))
    }

    /// Measures before and after.
    pub(super) fn measure(&self, [before, after]: [&Model; 2], folder: &Path, exports: &mut [(&'static str, Exported)], start: Instant) -> Result<Measured> {
        Run { pipeline: self, before, after, folder, work: self.work(), start }.measure(exports)
    }
}

impl Builder {
    /// Measures before and after on these samples.
    pub fn evaluation(mut self, data: Data) -> Self {
        self.0.running.data.evaluation = Some(data);
        self
    }

    /// Runs passes that need to see activations on these samples.
    pub fn calibration(mut self, data: Data) -> Self {
        self.0.running.data.calibration = Some(data);
        self
    }

    /// Passes that train learn from these samples.
    pub fn train(mut self, data: Data) -> Self {
        self.0.running.data.train = Some(data);
        self
    }

    /// How to measure before and after.
    pub fn evaluate(mut self, evaluate: Evaluate) -> Self {
        self.0.running.evaluate = Some(evaluate);
        self
    }

    /// Where models run; passes over weights need no device.
    pub fn device(mut self, device: Choice) -> Self {
        self.0.running.device = device;
        self
    }

    /// Keeps results of passes that run the model; one of an earlier run is used when resuming, and with `reuse` always.
    pub fn keep(mut self, shelf: Shelf, reuse: bool) -> Self {
        self.0.running.shelf = Some((shelf, reuse));
        self
    }
}

/// Describes what the model computes where `config.json` cannot; a note where the input's description was left out.
pub(super) fn write_graph(after: &Model, folder: &Path) -> Result<Option<String>> {
    let path = folder.join(GraphFile::NAME);
    match (&after.changed_graph, after.graph_file()?) {
        (None, _) => Ok(None),
        (Some(_), Some(file)) => write_text(&path, &format!("{:#}\n", serde_json::to_value(&file).unwrap_or_default())).map(|()| None),
        (Some(_), None) if path.exists() => {
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            Ok(Some(format!("{} of the input was left out: config.json describes the same", GraphFile::NAME)))
        }
        (Some(_), None) => Ok(None),
    }
}
