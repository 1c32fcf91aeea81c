//! Runs a pipeline: from an opened model to an output with a report.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Pipeline;
use super::carry::{self, carry_over};
use super::measured::Measured;
use super::running::write_graph;
use super::time::StageWork;
use crate::error::{Error, Result, counted};
use crate::export::{Export, Exported, Format, SizeForecast};
use crate::files::Destination;
use crate::model::{ExclusionReason, Model, adapter};
use crate::output::{ResumeFolder, Staging, free_space};
use crate::report::{self, Peak, Report, RuntimeCheck};
use crate::run_state::RunState;
use crate::store::writer::Prebuilt;
use crate::work::{Event, ProgressUnit, Work};

/// Weights that the parts of a run have written, and the time that each pass took in them.
type Parts<'a> = (&'a Prebuilt, &'a [Duration]);

impl Pipeline {
    /// Runs the pipeline and writes the output folder atomically.
    ///
    /// # Errors
    /// Any failure of a pass, a format, the verification or the file system. No partial output remains.
    pub fn run(&self, model: Model, output: impl AsRef<Path>) -> Result<Report> {
        run(self, model, output.as_ref(), None)
    }
}

/// Runs a pipeline. With `parts`, it merges their weights.
pub(super) fn run(pipeline: &Pipeline, model: Model, output: &Path, parts: Option<Parts>) -> Result<Report> {
    let start = Instant::now();
    let mut peak = pipeline.watch_memory()?;
    let mut run = Run::plan(pipeline, model, output, parts)?;
    let staging = run.reserve(output)?;
    let checkpoints = run.open_checkpoints(&staging)?;
    let done = run.finish(staging, checkpoints.as_ref().map(ResumeFolder::path), (start, &mut peak));
    let report = done.map_err(|error| match (error, &checkpoints) {
        (Error::Cancelled, Some(folder)) if folder.has_work() => Error::Interrupted { path: folder.path().to_owned() },
        (error, _) => error,
    })?;
    checkpoints.map_or(Ok(()), ResumeFolder::remove)?;
    Ok(report)
}

/// A run between its stages.
pub(super) struct Run<'a> {
    /// The pipeline with resolved options and opened data sets.
    pub pipeline: Pipeline,
    pub input: Model,
    /// The model after the passes: first the planned one, then the executed one.
    pub after: Model,
    pub state: RunState,
    pub parts: Option<Parts<'a>>,
    /// A note on files of the input that are not copied.
    pub excluded: Option<String>,
    /// Notes on the samples, and on resumption.
    pub start_notes: Vec<String>,
    /// Counted work of the stages, if the rates of the machine are known.
    pub work: Vec<StageWork>,
}

/// Files in the staging folder.
pub(super) struct Written {
    /// The output of each format, by its name.
    pub exports: Vec<(&'static str, Exported)>,
    /// Files of the input whose contents have changed.
    pub resized: BTreeMap<PathBuf, String>,
    /// A note on the graph file.
    pub graph_note: Option<String>,
    /// Runtimes whose rules the files comply with.
    pub loads: Vec<RuntimeCheck>,
    /// Peak resident memory while weights were written.
    pub peak_rss_bytes: Option<u64>,
}

/// A result with the seconds that its work took.
fn seconds_of<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let done = work()?;
    Ok((start.elapsed().as_secs_f64(), done))
}

impl<'a> Run<'a> {
    /// Plans the passes, and opens the data sets.
    fn plan(pipeline: &Pipeline, mut input: Model, output: &Path, parts: Option<Parts<'a>>) -> Result<Run<'a>> {
        let (pipeline, file) = pipeline.for_output(output)?;
        let excluded = exclude_auxiliary(&mut input, file.as_deref());
        input.require_own_files()?;
        let (mut pipeline, mut after, mut state) = pipeline.resolved(&input)?;
        // A student from another folder has its own files.
        let excluded = exclude_auxiliary(&mut after, file.as_deref()).or(excluded);
        after.require_own_files()?;
        state.data_file = file.as_ref().map(|name| format!("{name}.data"));
        state.file = file;
        pipeline.check_planned(&after, &state, Some(output))?;
        let start_notes = pipeline.open_samples(after.for_samples(&input))?;
        let work = if pipeline.rates.is_some() && parts.is_none() { pipeline.work_of(&input, &after, &state)? } else { Vec::new() };
        Ok(Run { pipeline, input, after, state, parts, excluded, start_notes, work })
    }

    /// Creates the staging folder, if the disk has space for the output.
    fn reserve(&mut self, output: &Path) -> Result<Staging> {
        let formats = || self.pipeline.export.iter().map(Export::format);
        let forecasts = formats().map(|format| format.forecast(&self.after, &self.state)).collect::<Result<Vec<SizeForecast>>>()?;
        let staging = Staging::new(output, self.pipeline.replace(), self.pipeline.protected(&self.input))?;
        let is_local = |format: &dyn Format| !(staging.destination().is_streamed() && format.streams());
        let forecasts: Vec<SizeForecast> = forecasts.into_iter().zip(formats()).filter(|(_, format)| is_local(*format)).map(|(forecast, _)| forecast).collect();
        self.state.data_file = staging.data_name().map(str::to_owned);
        // When resuming, the checkpoints already exist.
        let checkpoints = self.state.checkpoint_bytes().filter(|_| !self.pipeline.resume).unwrap_or(0);
        let linked = |(prebuilt, _)| formats().map(|format| format.linked_bytes(&self.after, &self.state, prebuilt)).sum::<Result<u64>>();
        let carried = carry::size(&self.after, self.state.file.is_some())?;
        require_space(&staging, &forecasts, carried.saturating_add(checkpoints), self.parts.map_or(Ok(0), linked)?)?;
        Ok(staging)
    }

    /// Opens the folder for checkpoints, if a pass writes any.
    fn open_checkpoints(&mut self, staging: &Staging) -> Result<Option<ResumeFolder>> {
        if self.state.checkpoint_bytes().is_none() {
            ResumeFolder::require_unused(staging.target())?;
            return Ok(None);
        }
        let folder = ResumeFolder::open(staging.target(), self.pipeline.resume, self.pipeline.force)?;
        if self.pipeline.resume && !folder.has_work() {
            let path = folder.path().display();
            self.start_notes.push(format!("`resume`: {path} contains no work of an interrupted run to continue"));
        } else if self.pipeline.resume {
            let names: BTreeSet<String> = self.pipeline.steps.iter().enumerate().map(|(at, step)| ResumeFolder::name_of_pass(at, step.pass().name())).collect();
            // A draft is trained on files that were written to the folder before the run.
            let is_in_folder = |path: &PathBuf| path.parent().is_some_and(|parent| parent.file_name() == folder.path().file_name());
            let has_files = self.pipeline.enclosed.iter().any(is_in_folder);
            folder.require_own_work(|name| names.contains(name) || has_files && !name.starts_with(|first: char| first.is_ascii_digit()))?;
        }
        // Checkpoints are kept if a run fails, so they must not be computed from a damaged input.
        self.input.check_contents(&self.pipeline.work())?;
        Ok(Some(folder))
    }

    /// All stages after the plan.
    fn finish(&mut self, staging: Staging, checkpoints: Option<&Path>, (start, peak): (Instant, &mut Peak)) -> Result<Report> {
        self.execute(checkpoints, peak)?;
        let (writing, mut written) = seconds_of(|| self.write(&staging, peak))?;
        let (measuring, measured) = seconds_of(|| self.measure(&mut written, staging.destination(), start))?;
        let mut report = self.report(&staging, &written, measured)?;
        report.timing = self.pipeline.timing(&self.work, &self.state, [writing, measuring]);
        self.write_records(&staging, &written, &mut report, (start, peak))?;
        self.publish(staging)?;
        Ok(report)
    }

    /// Does all work that precedes writing: executes passes, and computes statistics of several weights.
    fn execute(&mut self, checkpoints: Option<&Path>, peak: &mut Peak) -> Result<()> {
        if let Some((mut after, mut state)) = self.pipeline.apply_passes(&self.input, checkpoints, peak)? {
            exclude_auxiliary(&mut after, self.state.file.as_deref());
            (state.file, state.data_file) = (self.state.file.take(), self.state.data_file.take());
            (self.after, self.state) = (after, state);
        }
        match self.parts {
            Some((_, times)) => self.state.history.iter().zip(times).for_each(|(applied, time)| applied.meter.add(*time)),
            None => drop(self.state.prepare(&self.pipeline.work())?),
        }
        Ok(())
    }

    /// Writes and verifies the model in all formats, and copies its auxiliary files.
    fn write(&mut self, staging: &Staging, peak: &mut Peak) -> Result<Written> {
        self.exclude_source_card()?;
        let work = self.pipeline.work();
        let mut exports = Vec::with_capacity(self.pipeline.export.len());
        for format in self.pipeline.export.iter().map(Export::format) {
            let exported = format.write(&self.after, &self.state, staging.destination(), self.parts.map(|(prebuilt, _)| prebuilt), &work)?;
            require_finite(&self.pipeline, &self.after, &exported)?;
            exports.push((format.name(), exported));
        }
        if self.after.changed_graph.is_some() || exports.iter().all(|(format, _)| *format != "onnx") {
            self.after.auxiliary.exclude_runtime_config();
        }
        if self.input.is_corrected() || self.after.is_corrected() {
            self.after.auxiliary.exclude(ExclusionReason::Replaced, |file| file.starts_with(adapter::FOLDER));
        }
        let peak_rss_bytes = peak.lap().rss_bytes;
        // Only safetensors are written with the adapter that the configuration of a corrected model names.
        let config = exports.iter().find_map(|(_, exported)| exported.config.clone()).unwrap_or_else(|| self.after.config_without_corrections());
        self.after.auxiliary.exclude_stale_description(&config);
        let resized = self.after.resized_modules(&self.after.path)?;
        carry_over(&self.after, &config, &resized, staging.path(), self.state.file.is_some(), &work)?;
        let graph_note = write_graph(&self.after, staging.path())?;
        if exports.iter().any(|(format, _)| *format == "safetensors") {
            carry::write_adapter_config(&self.after, staging.path())?;
        }
        let loads = self.pipeline.check_written(&self.state, staging.path())?;
        Ok(Written { exports, resized, graph_note, loads, peak_rss_bytes })
    }

    /// Runs the input and the output model. If a format rounds weights, the rounded values are measured.
    fn measure(&self, written: &mut Written, destination: &Destination, start: Instant) -> Result<Measured> {
        let rounded = written.exports.first_mut().and_then(|(_, exported)| exported.stored_weights.take());
        let rounded = rounded.map(|weights| self.after.with_weights(weights)).transpose()?;
        let after = rounded.as_ref().unwrap_or(&self.after);
        self.pipeline.measure([&self.input, after], destination, self.state.file.as_deref(), &mut written.exports, start)
    }

    /// Moves the output to its final location, unless the input was damaged.
    fn publish(&self, staging: Staging) -> Result<()> {
        let work = self.pipeline.work();
        work.cancel.check()?;
        if self.parts.is_none() {
            [&self.input, &self.after].into_iter().try_for_each(|model| model.check_contents(&work))?;
        }
        commit(staging, &work)
    }
}

/// Moves the staging directory to its final location, and reports progress if files are uploaded.
fn commit(staging: Staging, work: &Work) -> Result<()> {
    let total = staging.uploads()?;
    if total == 0 {
        return staging.commit();
    }
    work.progress.on(Event::Begin { stage: "Uploading", total, done: 0, unit: ProgressUnit::Bytes });
    let committed = staging.commit_with_progress(&|bytes| work.advance(bytes).is_ok());
    work.progress.on(Event::End);
    committed
}

/// If the output is a single file, excludes the auxiliary files from it, and returns a note that names them,
/// unless the input is a file too.
fn exclude_auxiliary(model: &mut Model, file: Option<&str>) -> Option<String> {
    let file = file?;
    if model.has_adjacent_files() {
        model.auxiliary.files.clear();
        return None;
    }
    model.auxiliary.not_carried.append(&mut model.auxiliary.files);
    let first = model.auxiliary.not_carried.first()?;
    Some(format!(
        "{} of the input's folder not copied, because the output {file} is a file and not a folder (the first: {})",
        counted(model.auxiliary.not_carried.len(), "file"),
        first.display()
    ))
}

/// Hints for outputs that do not fit on a disk.
const LOCAL_HINT: &str = "free some space, or choose a folder on another disk";
const REMOTE_HINT: &str = "the output is written to a local disk before it is uploaded: set TMPDIR to a folder on a larger disk";

/// Checks before anything is written that the output fits on the disk.
pub(super) fn require_space(staging: &Staging, forecasts: &[SizeForecast], carried: u64, linked: u64) -> Result<()> {
    let written = forecasts.iter().filter(|f| f.exact).map(|f| f.bytes).sum::<u64>();
    let needed = carried + written.saturating_sub(linked);
    let Some(free) = free_space(staging.path()) else { return Ok(()) };
    if needed <= free {
        return Ok(());
    }
    let (needed, free) = (report::format::bytes(needed), report::format::bytes(free));
    Err(Error::Output {
        path: staging.target().to_owned(),
        reason: format!("needs {needed}, but only {free} are free on this disk"),
        hint: if staging.destination().is_remote() { REMOTE_HINT } else { LOCAL_HINT }.to_owned(),
    })
}

/// Checks that all written weights are finite, unless the pipeline allows others.
pub(super) fn require_finite(pipeline: &Pipeline, after: &Model, exported: &Exported) -> Result<()> {
    if pipeline.allow_nonfinite {
        return Ok(());
    }
    // ONNX graphs may contain infinities on purpose: only weights that a pass has changed must be finite.
    let is_original = |name: &str| after.onnx.is_some() && after.weights.by_name.get(name).is_some_and(|weight| !after.changes(name, weight));
    match exported.weights.iter().find(|(name, measured)| measured.nonfinite > 0 && !is_original(name)) {
        None => Ok(()),
        Some((name, measured)) => Err(Error::NotFinite { name: name.clone(), count: measured.nonfinite }),
    }
}
