//! The half of a pipeline that runs models: data, a device, how to measure, and where results are kept.

mod cached_results;
mod continuations;
mod evaluate;
mod fidelity;
mod files;
mod free;
mod rows;
mod samples;
mod starter;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use candle_core::{DType, Device};

pub use cached_results::{CachedResult, ResultCache};
pub use starter::starter;

use self::evaluate::Run;
pub(super) use self::evaluate::check_onnx;
pub use self::free::memory_limit;
use super::carry::write_text;
use super::plan::ModelMemory;
use super::run::Measured;
use super::{Builder, Pipeline};
use crate::analysis;
use crate::data::{Data, DataSet, DataSets, OpenedSets, Target};
use crate::error::{Error, Result};
use crate::evaluation::{Evaluate, Runtime};
use crate::exec::{Choice, DeviceMemory, MemoryNeed, MemoryTrace, MemoryTracker, Residence, Schedule};
use crate::export::Exported;
use crate::ir::GraphFile;
use crate::model::Model;
use crate::output::Workplace;
use crate::pass::Pass;
use crate::pass::{Context, Samples, input_importance};
use crate::recipe::Recipe;
use crate::report::{Environment, Peak};
use crate::run_state::RunState;
use crate::store::ByteSize;
use crate::train::communicator::Place;
use crate::work::{Event, MemoryLimit};

/// Samples of the training data that a pass looks at which needs calibration data and has none of its own.
const LENT: usize = 128;

/// Whether this build opens ONNX files.
pub(super) const OPENS_ONNX: bool = true;

/// What running models takes.
#[derive(Clone, Default)]
pub(super) struct Running {
    pub data: DataSets,
    pub evaluate: Option<Evaluate>,
    pub device: Choice,
    /// The memory that models may take, where somebody says so.
    pub memory: Option<ByteSize>,
    /// The device, once it is open; clones of the pipeline share it.
    opened: Arc<OnceLock<Device>>,
    /// Where results of passes are cached, and whether those of earlier runs may be used without asking.
    pub cache: Option<(ResultCache, bool)>,
    /// Whether a record of memory is written.
    pub memory_trace: bool,
}

impl Running {
    /// Takes what a recipe says.
    pub fn take(&mut self, recipe: &Recipe) {
        self.data = recipe.data.clone();
        self.evaluate.clone_from(&recipe.evaluate);
        // What the command line says stands.
        self.memory = self.memory.or(recipe.memory);
    }

    /// Tells it to a recipe, with paths that hold wherever the recipe is.
    pub fn tell(&self, recipe: &mut Recipe) {
        recipe.data = self.data.absolute();
        recipe.evaluate.clone_from(&self.evaluate);
        recipe.memory = self.memory;
    }

    /// Holds what is said of evaluation, and passes that run the model, to the data there is.
    pub fn check(&self, runs: impl Iterator<Item = (&'static str, Samples)>) -> Result<()> {
        match (&self.evaluate, &self.data.evaluation) {
            (Some(_), None) => return Err(Error::option("evaluate", "needs samples: add `data: { evaluation: ... }`")),
            (_, Some(data)) => data.check()?,
            (None, None) => {}
        }
        for (name, samples) in runs {
            if let Some((key, None)) = self.set(samples) {
                return Err(Error::option(name, format!("needs samples to run the model on: add `data: {{ {key}: ... }}`, or --{key} on the command line")));
            }
        }
        Ok(())
    }

    /// The data sets that are named.
    pub fn sets(&self) -> Vec<Samples> {
        [Samples::Calibration, Samples::Train].into_iter().filter(|samples| matches!(self.set(*samples), Some((_, Some(_))))).collect()
    }

    /// The data sets that a pass reads, by name. Training reads the evaluation data too, where it keeps the best weights; passes with a
    /// goal measure themselves on it.
    pub(super) fn read_by(&self, pass: &dyn Pass) -> Vec<(&'static str, &Data)> {
        let DataSets { calibration, train, evaluation, opened: _ } = &self.data;
        let first = match pass.runs_on() {
            None | Some(Samples::None) => return Vec::new(),
            Some(Samples::Calibration) => ("calibration", calibration),
            Some(Samples::Train) => ("train", train),
        };
        [first, ("evaluation", evaluation)].into_iter().filter_map(|(name, set)| Some((name, set.as_ref()?))).collect()
    }

    /// Has those who look at calibration data look at some of the training data where there is none of their own.
    pub fn lend(&mut self, calibrates: bool) {
        self.data.ignore_labels();
        if calibrates && self.data.calibration.is_none() {
            let some = |data: &Data| Data { samples: Some(data.samples.map_or(LENT, |samples| samples.min(LENT))), ..data.clone() };
            self.data.calibration = self.data.train.as_ref().map(some);
        }
    }

    /// Forgets what an earlier run has opened: files may have changed.
    pub fn begin(&mut self) {
        self.data.opened = OpenedSets::default();
    }

    /// The device that models run on, of several processes on a machine one each; it is opened the first time that it is asked for.
    /// What the environment contradicts itself in is told where processes meet.
    pub fn device(&self) -> Result<Device> {
        if let Some(device) = self.opened.get() {
            return Ok(device.clone());
        }
        let place = Place::from_environment().ok().flatten();
        let device = self.device.open_for(place.map_or(0, |place| place.local_rank))?;
        Ok(self.opened.get_or_init(|| device).clone())
    }

    /// The memory that models may take.
    pub fn memory(&self) -> Result<MemoryLimit> {
        Ok(memory_limit(self.memory, &self.device()?))
    }

    /// Files and folders of all data sets.
    pub fn data_paths(&self) -> Vec<PathBuf> {
        [&self.data.calibration, &self.data.train, &self.data.evaluation].into_iter().flatten().flat_map(Data::paths).cloned().collect()
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
        self.check_output(model, output.as_ref())?;
        let (mut pipeline, ..) = self.settled(model)?;
        pipeline.open_samples(model)?;
        model.check_contents(&pipeline.work())?;
        pipeline.perform(model, Some(&Workplace::beside(output.as_ref())), &mut Peak::start()).map(drop)
    }

    /// Whether this process is the one that writes: the only one, or the first of those that the environment names. The others
    /// [`follow`](Pipeline::follow).
    ///
    /// # Errors
    /// A pass trains, and the environment says something about other processes that does not hold together. Without such a pass
    /// each process works for itself then.
    pub fn leads(&self) -> Result<bool> {
        Ok(self.place()?.is_none_or(|place| place.rank == 0))
    }

    /// The place of this process among those that train together. Contradictions in the environment count where a pass trains alone.
    fn place(&self) -> Result<Option<Place>> {
        let place = Place::from_environment();
        if self.trains() { place } else { Ok(place.unwrap_or_default()) }
    }

    /// Opens the data that is used, by its key, so that what does not fit is said before any work is done.
    fn open_data(&self, target: Target) -> Result<BTreeMap<&'static str, Arc<DataSet>>> {
        let running = &self.running;
        let opened = self.used_data().into_iter().map(|(key, options)| Ok((key, running.data.open(options, target)?))).collect::<Result<_>>()?;
        running.device()?;
        let onnxruntime = running.evaluate.as_ref().is_some_and(|evaluate| evaluate.runtime.contains(&Runtime::OnnxRuntime));
        if onnxruntime && self.onnx().is_none() {
            return Err(Error::option("evaluate", "`runtime: [onnxruntime]` needs `onnx` among the exports"));
        }
        if onnxruntime {
            crate::runtime::library()?;
        }
        Ok(opened)
    }

    /// The data sets that passes and evaluation read, by key.
    fn used_data(&self) -> BTreeMap<&'static str, &Data> {
        let used = self.runs().filter_map(|(_, samples)| self.running.set(samples));
        used.chain([("evaluation", self.running.data.evaluation.as_ref())]).filter_map(|(key, options)| Some((key, options?))).collect()
    }

    /// The device that models run on, where any does.
    fn used_device(&self) -> Result<Option<Device>> {
        let used = self.runs().next().is_some() || self.running.evaluates();
        used.then(|| self.running.device()).transpose()
    }

    /// Most memory of a GPU: 0 where none is used, nothing where it is not known beforehand.
    pub(super) fn planned_vram(&self) -> Result<Option<u64>> {
        Ok(self.used_device()?.is_none_or(|device| device.is_cpu()).then_some(0))
    }

    /// What running the model takes, where anything does.
    ///
    /// # Errors
    /// It takes more than was asked for.
    pub(super) fn planned_model_memory(&self, model: &Model) -> Result<Option<ModelMemory>> {
        let Some(graph) = self.used_device()?.and_then(|_| model.graph().ok()) else { return Ok(None) };
        let need = MemoryNeed::of(&graph, &model.weights, DType::F32, Residence::Stored, &analysis::usual_sizes(&graph));
        let limit = self.running.memory()?;
        let schedule = limit.schedule(&[(model.config.model_type(), need.clone())])?;
        Ok(Some(ModelMemory {
            whole_bytes: need.whole(),
            blockwise_bytes: need.uncut.is_none().then(|| need.blockwise()),
            limit_bytes: limit.bytes,
            blockwise: schedule != Schedule::Whole,
        }))
    }

    fn trains(&self) -> bool {
        self.steps.iter().any(|step| step.pass().runs_on() == Some(Samples::Train))
    }

    /// Watches the memory of this process and of the device that models run on.
    pub(super) fn watch(&self) -> Result<Peak> {
        // Fidelity alone is measured where that can be done, and left out where not.
        let measuring = || if self.measures { self.running.device().ok() } else { None };
        let memory = self.used_device()?.or_else(measuring).as_ref().map(DeviceMemory::watch);
        Ok(Peak::of(move || memory.as_ref()?.peak()))
    }

    /// The machine, with the device that models run on; `measured` says whether they ran after the passes.
    pub(super) fn environment(&self, measured: bool) -> Result<Environment> {
        let environment = Environment::detect();
        let device = if measured { Some(self.running.device()?) } else { self.used_device()? };
        Ok(match device {
            Some(device) => environment.on(crate::exec::name(&device), crate::runtime::description()),
            None => environment,
        })
    }

    /// Applies the passes with all that takes running the model; nothing where no pass does.
    pub(super) fn perform(&self, model: &Model, workplace: Option<&Path>, peak: &mut Peak) -> Result<Option<(Model, RunState)>> {
        if self.runs().next().is_none() {
            return Ok(None);
        }
        let running = &self.running;
        let mut context = Context {
            workplace: None,
            resume: self.resume,
            work: self.work(),
            seed: self.seed,
            data: &running.data,
            device: running.device()?,
            memory: running.memory()?,
            memory_tracker: None,
        };
        let mut traces = Vec::new();
        if let Some(reason) = running.device.reason() {
            context.work.progress.on(Event::Message(&reason));
        }
        let mut cache = self.result_cache(model, &context.work)?;
        let found = cache.as_mut().and_then(|cache| cache.found.take());
        let (done, mut after, mut run) = found.map_or_else(|| (0, model.clone(), self.start.clone()), |(number, after, run)| (number + 1, after, run));
        run.input = Some(model.path.clone());
        let reads = |run: &mut RunState, pass: &dyn Pass| {
            run.read.entry(pass.name().into()).or_default().extend(pass.reads());
            let sets = running.read_by(pass).into_iter();
            run.read.extend(sets.map(|(name, set)| (format!("{name} {set:?}"), set.paths().cloned().collect())));
        };
        self.steps.iter().take(done).for_each(|step| reads(&mut run, step.pass()));
        for (number, step) in self.steps.iter().enumerate().skip(done) {
            let runs = step.pass().runs_on().is_some();
            if runs {
                run.prepare(&context.work)?;
            }
            context.workplace = workplace.map(|folder| folder.join(format!("{}-{}", number + 1, step.pass().name())));
            let start = Instant::now();
            peak.lap();
            context.memory_tracker = (runs && running.memory_trace).then(|| Arc::new(MemoryTracker::default().recorded()));
            after = step.pass().apply(after, &mut run, Some(&context))?;
            reads(&mut run, step.pass());
            traces.extend(context.memory_tracker.take().and_then(|tracker| Some((step.pass().name().to_owned(), tracker.trace()?))));
            if let Some(applied) = run.history.last_mut().filter(|_| runs) {
                let lap = peak.lap();
                (applied.peak_rss_bytes, applied.peak_vram_bytes) = (lap.rss_bytes, lap.vram_bytes);
            }
            if let Some(cache) = cache.as_ref().filter(|_| runs) {
                cache.put(number, start.elapsed(), &after, &mut run, &context.work);
            }
        }
        super::builder::close(&mut after, model, &mut run)?;
        if self.export.iter().any(|export| export.format().runs_on().is_some()) {
            run.prepare(&context.work)?;
            run.importance = Some(Arc::new(input_importance(&after, &context)?));
        }
        if running.memory_trace {
            run.attached.insert("memory-trace.json".into(), Arc::new(MemoryTrace::events(&traces).to_string().into_bytes()));
        }
        Ok(Some((after, run)))
    }

    /// Measures before and after.
    pub(super) fn measure(
        &self,
        [before, after]: [&Model; 2],
        folder: &Path,
        file: Option<&str>,
        exports: &mut [(&'static str, Exported)],
        start: Instant,
    ) -> Result<Measured> {
        let file = file.unwrap_or(crate::onnx::file::MODEL);
        Run { pipeline: self, before, after, folder, file, work: self.work(), start }.measure(exports)
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
        (self.0.running.device, self.0.running.opened) = (device, Arc::default());
        self
    }

    /// The memory that models may take; those that do not fit run block by block. Without it, that is what is free.
    pub fn memory(mut self, bytes: Option<u64>) -> Self {
        self.0.running.memory = bytes.map(ByteSize);
        self
    }

    /// Writes `memory-trace.json`: what passes that run the model hold in memory when.
    pub fn memory_trace(mut self, wanted: bool) -> Self {
        self.0.running.memory_trace = wanted;
        self
    }

    /// Caches results of passes that run the model; one of an earlier run is used when resuming, and with `reuse` always.
    pub fn cache(mut self, cache: ResultCache, reuse: bool) -> Self {
        self.0.running.cache = Some((cache, reuse));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_opened_once_for_a_pipeline_and_what_is_made_of_it() {
        let pipeline = Pipeline::builder().device(Choice::Cpu).build().unwrap();
        let settled = pipeline.clone();
        assert!(pipeline.running.opened.get().is_none(), "nothing is opened before it is needed");
        settled.running.device().unwrap();
        assert!(pipeline.running.opened.get().is_some());
        let other = Builder(pipeline).device(Choice::Auto).build().unwrap();
        assert!(other.running.opened.get().is_none(), "another choice is another device");
    }

    /// What later passes make of weights takes no room from what an earlier one keeps.
    #[test]
    fn room_for_unfinished_work_is_that_behind_each_pass() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let kept = |steps: Vec<crate::pass::Step>| Pipeline::builder().passes(steps).build().unwrap().settled(&model).unwrap().2.kept_bytes;
        let decompose = || crate::pass::Step::from(crate::pass::Decompose::default());
        let once = kept(vec![decompose()]);
        assert!(once > 0);
        assert_eq!(kept(vec![decompose(), crate::pass::Cast::default().into()]), once);
        assert!(kept(vec![decompose(), decompose()]) > once);
    }
}
