//! Model execution in a pipeline: data sets, the device, evaluation, and the cache of results.

mod agreement;
mod cached_results;
mod continuations;
pub mod draft;
mod embedding_rows;
mod evaluate;
mod fidelity;
mod memory;
mod onnx_comparison;
mod onnx_input;
mod pass_keys;
mod samples;
pub mod search;
mod settings;
mod starter;
mod time;
pub mod trial;
mod unused_layers;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device};

pub use cached_results::{CachedResult, ResultCache};
pub use starter::{has_placeholder, starter};

use self::evaluate::Run;
pub(super) use self::fidelity::matches_config;
pub use self::memory::memory_limit;
pub(super) use self::onnx_comparison::check_onnx;
pub(super) use self::settings::Running;
pub(super) use self::unused_layers::unused_layers;
use super::carry::write_text;
use super::measured::Measured;
use super::plan::ModelMemory;
use super::{Builder, Pipeline};
use crate::analysis;
use crate::data::{Data, DataSet, Target};
use crate::error::{Error, Result};
use crate::evaluation::{Evaluate, Runtime};
use crate::exec::{DeviceChoice, DeviceMemory, MemoryNeed, MemoryTrace, MemoryTracker, Residence, Schedule};
use crate::export::Exported;
use crate::files::Destination;
use crate::heap;
use crate::ir::GraphFile;
use crate::model::Model;
use crate::onnx::file::{ENCODER, MODEL};
use crate::output::ResumeFolder;
use crate::pass::{Checkpoints, Context, Pass, Samples, input_importance};
use crate::report::{Environment, Peak};
use crate::run_state::RunState;
use crate::store::ByteSize;
use crate::train::Team;
use crate::train::communicator::RankConfig;
use crate::work::Event;

/// Whether this build opens ONNX files.
pub(super) const OPENS_ONNX: bool = true;

impl Pipeline {
    /// Runs the passes in a process of rank 1 or higher, up to the last one that several processes run
    /// together. It writes no output.
    ///
    /// # Errors
    /// As [`run`](Pipeline::run).
    pub fn follow(&self, model: &Model, output: impl AsRef<Path>) -> Result<()> {
        if !self.is_distributed() {
            return Ok(());
        }
        // All processes perform the checks of rank 0, so that none waits for a process that has failed.
        self.check_output(model, output.as_ref())?;
        // The name of the output determines its format.
        let (pipeline, file) = self.for_output(output.as_ref())?;
        let (mut pipeline, after, state) = pipeline.resolved(model)?;
        let state = RunState { file, ..state };
        pipeline.check_planned(&after, &state, Some(output.as_ref()))?;
        pipeline.open_samples(after.for_samples(model))?;
        model.check_contents(&pipeline.work())?;
        pipeline.running.follows = true;
        let folder = state.checkpoint_bytes().map(|_| ResumeFolder::path_for(output.as_ref()));
        pipeline.apply_passes(model, folder.as_deref(), &mut Peak::start()).map(drop)
    }

    /// Whether this process writes the output: the only process, or rank 0. The other processes call
    /// [`follow`](Pipeline::follow).
    ///
    /// # Errors
    /// The environment variables of the rank contradict each other, and several processes run a pass
    /// together. Without such a pass, contradictions are ignored and each process works independently.
    pub fn is_leader(&self) -> Result<bool> {
        Ok(self.rank()?.is_none_or(|rank| rank.rank == 0))
    }

    /// The rank of this process. Contradictory environment variables are an error only if several processes
    /// run a pass together.
    fn rank(&self) -> Result<Option<RankConfig>> {
        let rank = RankConfig::from_environment();
        if self.is_distributed() { rank } else { Ok(rank.unwrap_or_default()) }
    }

    /// Opens the data sets that are used, by key, so that incompatible data is reported before any work
    /// is done.
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
        let used = self.model_runs().filter_map(|(_, samples)| self.running.data_set(samples));
        used.chain([("evaluation", self.running.data.evaluation.as_ref())]).filter_map(|(key, options)| Some((key, options?))).collect()
    }

    /// The device that models run on, if a pass or the evaluation runs one.
    fn used_device(&self) -> Result<Option<Device>> {
        let used = self.model_runs().next().is_some() || self.running.evaluates();
        used.then(|| self.running.device()).transpose()
    }

    /// Peak GPU memory: 0 if no GPU is used, `None` if it is not known in advance.
    pub(super) fn planned_vram(&self) -> Result<Option<u64>> {
        Ok(self.used_device()?.is_none_or(|device| device.is_cpu()).then_some(0))
    }

    /// Memory needed to run the model, if a pass or the evaluation runs it.
    ///
    /// # Errors
    /// It exceeds the requested limit.
    pub(super) fn planned_model_memory(&self, model: &Model) -> Result<Option<ModelMemory>> {
        let Some(graph) = self.used_device()?.and_then(|_| model.graph().ok()) else { return Ok(None) };
        let need = MemoryNeed::estimate(&graph, &model.weights, DType::F32, Residence::Stored, &analysis::usual_sizes(&graph));
        let limit = self.running.memory()?;
        let schedule = Schedule::choose(limit, &[(model.config.model_type(), need.clone())])?;
        Ok(Some(ModelMemory {
            whole_bytes: need.total(),
            blockwise_bytes: need.uncut.is_none().then(|| need.blockwise()),
            limit_bytes: limit.bytes,
            blockwise: schedule != Schedule::Resident,
        }))
    }

    /// Whether several processes run a pass together, if a launcher has started them.
    fn is_distributed(&self) -> bool {
        self.steps.iter().any(|step| is_distributed(step.pass()))
    }

    /// Starts to track the peak memory of this process and of the device that models run on.
    pub(super) fn watch_memory(&self) -> Result<Peak> {
        // If the device is used only to measure fidelity, a device that cannot be opened is not an error.
        let measuring = || if self.measures { self.running.device().ok() } else { None };
        let memory = self.used_device()?.or_else(measuring).as_ref().map(DeviceMemory::watch);
        Ok(Peak::with_vram(move || memory.as_ref()?.peak()))
    }

    /// Description of the machine, with the device that models run on. `measured`: fidelity was
    /// measured, so that the device was used in any case.
    pub(super) fn environment(&self, measured: bool) -> Result<Environment> {
        let environment = Environment::detect();
        let device = if measured { Some(self.running.device()?) } else { self.used_device()? };
        Ok(match device {
            Some(device) => environment.on(crate::exec::device_name(&device), crate::runtime::description()),
            None => environment,
        })
    }

    /// Applies the passes with the context for running the model. `None` if no pass or format runs the
    /// model: then the planned state is already complete. A process that [follows](Pipeline::follow) returns
    /// `None` after the last pass that several processes run together.
    pub(super) fn apply_passes(&self, model: &Model, work_dir: Option<&Path>, peak: &mut Peak) -> Result<Option<(Model, RunState)>> {
        if self.model_runs().next().is_none() {
            return Ok(None);
        }
        let running = &self.running;
        let mut context = Context {
            checkpoints: None,
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
        let cached = cache.as_mut().and_then(|cache| cache.found.take());
        let (done, mut after, mut run) = cached.map_or_else(|| (0, model.clone(), self.start(model)), |(number, after, run)| (number + 1, after, run));
        let follows = running.follows;
        let last = self.steps.iter().rposition(|step| is_distributed(step.pass()));
        let mut keys = work_dir.map(|_| self.pass_keys(model, &context.work)).transpose()?;
        for (number, step) in self.steps.iter().enumerate() {
            let key = keys.as_mut().map(|keys| keys.checkpoint(step.pass())).transpose()?;
            if number < done {
                continue;
            }
            if follows && last.is_none_or(|last| number > last) {
                return Ok(None);
            }
            let runs_model = step.pass().runs_on().is_some();
            if runs_model {
                run.prepare(&context.work)?;
            }
            let folder = work_dir.map(|folder| folder.join(ResumeFolder::name_of_pass(number, step.pass().name())));
            // Only processes that run a pass together share its folder.
            let folder = folder.filter(|_| !follows || is_distributed(step.pass()));
            let is_shared = step.pass().shares_samples();
            context.checkpoints = folder.zip(key).map(|(folder, key)| Checkpoints { folder, key, resume: self.resume, is_shared });
            let start = Instant::now();
            peak.lap();
            context.memory_tracker = (runs_model && running.memory_trace).then(|| Arc::new(MemoryTracker::default().recorded().counting()));
            let (model, applied) = step.pass().plan(&after, &run)?.execute(&context)?;
            if is_shared && last == Some(number) && context.checkpoints.is_some() {
                // Rank 0 removes the checkpoints at the end, when no other process may read them.
                Team::from_environment(&context.device)?.wait()?;
            }
            Pipeline::add_record(&mut run, applied, (&after, &model));
            after = model;
            if runs_model {
                heap::release_freed();
            }
            let counted_macs = context.memory_tracker.as_ref().and_then(|tracker| tracker.macs());
            traces.extend(context.memory_tracker.take().and_then(|tracker| Some((step.pass().name().to_owned(), tracker.trace()?))));
            if let Some(applied) = run.history.last_mut().filter(|_| runs_model) {
                let lap = peak.lap();
                (applied.peak_rss_bytes, applied.peak_vram_bytes) = (lap.rss_bytes, lap.vram_bytes);
                (applied.seconds, applied.counted_macs) = (Some(start.elapsed().as_secs_f64()), counted_macs);
            }
            if let Some(cache) = cache.as_ref().filter(|_| runs_model) {
                cache.put(number, start.elapsed(), &after, &mut run, &context.work);
            }
        }
        if follows {
            return Ok(None);
        }
        self.finish_passes(&mut after, model, &mut run)?;
        if self.export.iter().any(|export| export.format().runs_on().is_some()) {
            run.prepare(&context.work)?;
            run.importance = Some(Arc::new(input_importance(&after, &context)?));
            for export in &self.export {
                let files = export.format().attached(&after, &run)?;
                run.attached.extend(files.into_iter().map(|(name, bytes)| (name, Arc::new(bytes))));
            }
        }
        if running.memory_trace {
            run.attached.insert("memory-trace.json".into(), Arc::new(MemoryTrace::events(&traces).to_string().into_bytes()));
        }
        Ok(Some((after, run)))
    }

    /// Measures the input and the output model.
    pub(super) fn measure(
        &self,
        [before, after]: [&Model; 2],
        destination: &Destination,
        file: Option<&str>,
        exports: &mut [(&'static str, Exported)],
        start: Instant,
    ) -> Result<Measured> {
        let is_split = exports.iter().flat_map(|(_, exported)| &exported.files).any(|written| written.name == ENCODER);
        let file = file.unwrap_or(if is_split { ENCODER } else { MODEL });
        let run = Run { pipeline: self, before, after, destination, file, work: self.work(), start };
        let mut measured = run.measure(exports)?;
        measured.draft = run.draft(&mut measured.notes)?;
        Ok(measured)
    }
}

/// Whether several processes run a pass together, if a launcher has started them.
fn is_distributed(pass: &dyn Pass) -> bool {
    pass.runs_on() == Some(Samples::Train) || pass.shares_samples()
}

impl Builder {
    /// Sets the data on which the input and the output model are evaluated.
    pub fn evaluation(mut self, data: Data) -> Self {
        self.0.running.data.evaluation = Some(data);
        self
    }

    /// Sets the calibration data.
    pub fn calibration(mut self, data: Data) -> Self {
        self.0.running.data.calibration = Some(data);
        self
    }

    /// Sets the training data.
    pub fn train(mut self, data: Data) -> Self {
        self.0.running.data.train = Some(data);
        self
    }

    /// Sets how the input and the output model are evaluated.
    pub fn evaluate(mut self, evaluate: Evaluate) -> Self {
        self.0.running.evaluate = Some(evaluate);
        self
    }

    /// Sets the device that models run on; passes over weights do not use it.
    pub fn device(mut self, device: DeviceChoice) -> Self {
        (self.0.running.device, self.0.running.opened) = (device, Arc::default());
        self
    }

    /// Sets the memory limit of running models; models that exceed it run block by block. The default is
    /// most of the free memory.
    pub fn memory(mut self, bytes: Option<u64>) -> Self {
        self.0.running.memory = bytes.map(ByteSize);
        self
    }

    /// Whether to write `memory-trace.json`: the allocations over time of passes that run the model.
    pub fn memory_trace(mut self, enabled: bool) -> Self {
        self.0.running.memory_trace = enabled;
        self
    }

    /// Caches the results of passes that run the model. Results of earlier runs are used when resuming,
    /// or always with `reuse`.
    pub fn cache(mut self, cache: ResultCache, reuse: bool) -> Self {
        self.0.running.cache = Some((cache, reuse));
        self
    }
}

/// Writes the graph of a model that `config.json` cannot describe. Returns a note if the input's graph
/// file became redundant and was removed.
pub(super) fn write_graph(after: &Model, folder: &Path) -> Result<Option<String>> {
    let path = folder.join(GraphFile::NAME);
    match (&after.changed_graph, after.graph_file()?) {
        (None, _) => Ok(None),
        (Some(_), Some(file)) => write_text(&path, &format!("{:#}\n", serde_json::to_value(&file).unwrap_or_default())).map(|()| None),
        (Some(_), None) if path.exists() => {
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            Ok(Some(format!("{} of the input was not copied: config.json describes the same graph", GraphFile::NAME)))
        }
        (Some(_), None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_of_a_pipeline_share_the_opened_device() {
        let pipeline = Pipeline::builder().device(DeviceChoice::Cpu).build().unwrap();
        let clone = pipeline.clone();
        assert!(pipeline.running.opened.get().is_none(), "the device is opened before it is needed");
        clone.running.device().unwrap();
        assert!(pipeline.running.opened.get().is_some());
        let other = Builder(pipeline).device(DeviceChoice::Auto).build().unwrap();
        assert!(other.running.opened.get().is_none(), "a different choice must not reuse the device");
    }

    /// A later pass that shrinks weights does not reduce the space needed for the checkpoints of an
    /// earlier one.
    #[test]
    fn checkpoint_space_is_summed_over_passes() {
        let model = Model::open(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama")).unwrap();
        let bytes = |steps: Vec<crate::pass::Step>| Pipeline::builder().passes(steps).build().unwrap().resolved(&model).unwrap().2.checkpoint_bytes().unwrap();
        let decompose = || crate::pass::Step::from(crate::pass::Decompose::default());
        let once = bytes(vec![decompose()]);
        assert!(once > 0);
        assert_eq!(bytes(vec![decompose(), crate::pass::Cast::default().into()]), once);
        assert!(bytes(vec![decompose(), decompose()]) > once);
    }
}
