//! Latencies in ONNX Runtime on this machine.

use std::collections::BTreeMap;

use super::formats::{Formats, Unit};
use super::latency::require_slower;
use super::times::Times;
use super::{Budget, Search};
use crate::data::{Data, DataSets};
use crate::error::{Error, Result, counted};
use crate::evaluation::{self, Latency, OnnxRuntime, Subject};
use crate::exec::Inputs;
use crate::export::{Export, Onnx};
use crate::files::Destination;
use crate::model::Model;
use crate::onnx::file::entry;
use crate::output::ScratchFolder;
use crate::pass::Context;
use crate::pipeline::running::memory::lack_for_onnx_runtime;
use crate::report::search::LatencyTable;
use crate::run_state::RunState;

/// Option of the limit, for errors.
const OPTION: &str = "--latency";

/// Writes models in formats, and measures them in alternation with the original model.
struct Stopwatch<'a> {
    model: &'a Model,
    formats: &'a dyn Formats,
    context: &'a Context<'a>,
    /// One calibration sample: arithmetic does not depend on the values of scales.
    data: DataSets,
    inputs: Inputs,
    folder: ScratchFolder,
    original: OnnxRuntime,
}

impl<'a> Stopwatch<'a> {
    /// Loads the original model in ONNX Runtime.
    fn new(model: &'a Model, formats: &'a dyn Formats, context: &'a Context<'a>, inputs: Inputs) -> Result<Stopwatch<'a>> {
        crate::runtime::library()?;
        if let Some(lack) = lack_for_onnx_runtime(&[model, model], None) {
            return Err(Error::run(OPTION, lack, ""));
        }
        let folder = ScratchFolder::new()?;
        let original = open(model, &Onnx::default().into(), &folder, context)?;
        let subject = Subject::from_model(model.clone())?;
        let one = Some(subject.target().fixed_batch().unwrap_or(1));
        let calibration = context.data.calibration.as_ref().map(|set| Data { samples: one, ..set.clone() });
        let data = DataSets { calibration, evaluation: None, ..context.data.clone() };
        Ok(Stopwatch { model, formats, context, data, inputs, folder, original })
    }

    /// The runtime and its version.
    fn runtime() -> String {
        let version = crate::runtime::description().map_or_else(String::new, |(version, _)| format!(" {version}"));
        format!("ONNX Runtime{version}")
    }

    /// Measures the units in the formats with these indices; without units, the original model.
    fn measure(&mut self, units: &[Unit], options: &[usize]) -> Result<Latency> {
        let work = self.context.work.quiet();
        work.cancel.check()?;
        let (device, memory) = (self.context.device.clone(), self.context.memory);
        let context = Context { work, seed: self.context.seed, data: &self.data, device, memory, memory_tracker: None, checkpoints: None };
        let written = self.formats.timed(units, options, &context)?;
        let export = self.formats.writing(units, options, None)?.and_then(|writing| writing.exports.into_iter().next());
        let model = written.map_or_else(|| self.model.clone(), |written| written.model);
        let mut changed = open(&model, &export.unwrap_or_else(|| Onnx::default().into()), &self.folder, self.context)?;
        evaluation::latency(&mut self.original, &mut changed, [&self.inputs; 2], self.context.work.threads)
    }
}

/// Writes a model to a folder, and loads it in ONNX Runtime.
fn open(model: &Model, export: &Export, folder: &ScratchFolder, context: &Context) -> Result<OnnxRuntime> {
    let folder = folder.path().join("model");
    let work = context.work.quiet();
    std::fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
    export.format().write(model, &RunState::default(), &Destination::local(&folder), None, &work)?;
    let session = OnnxRuntime::open_written(&entry(&folder), work.threads)?.cancelled_by(work.cancel);
    std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    Ok(session)
}

/// The first calibration sample.
fn sample(model: &Model, data: &DataSets) -> Result<Inputs> {
    let subject = Subject::from_model(model.clone())?;
    let calibration = data.calibration.as_ref().ok_or_else(|| Error::option("auto", "needs `--calibration`"))?;
    let batch = data.open(calibration, subject.target())?.first()?;
    Ok(if subject.target().fixed_batch().is_some() { batch.inputs } else { batch.narrow(0, 1)?.inputs })
}

/// Checks that a table belongs to this search. `has_branches`: whether units are weights that are pruned
/// together, instead of single weights; their names are compared with the scores.
fn check(table: &LatencyTable, threads: usize, inputs: &BTreeMap<String, Vec<usize>>, formats: &[String], (model, has_branches): (&Model, bool)) -> Result<()> {
    let reason = if table.threads != threads {
        format!("the times were measured with {}, but this search has {threads}: specify `--threads {}`", counted(table.threads, "thread"), table.threads)
    } else if table.inputs != *inputs {
        format!("the times were measured with other inputs: {:?} instead of {inputs:?}", table.inputs)
    } else if table.formats != formats {
        format!("the times are those of the formats {}, but this search has {}", table.formats.join(", "), formats.join(", "))
    } else if table.parameters != model.weights.parameters() {
        format!(
            "the times are those of a model with {} parameters, and this one has {}: name another file, or remove this one",
            table.parameters,
            model.weights.parameters()
        )
    } else if let Some(unit) = table.units.iter().find(|unit| !has_branches && !model.weights.by_name.contains_key(*unit)) {
        format!("the times are those of another model, with the layer `{unit}`")
    } else if !(table.original_ms.is_finite() && table.original_ms > 0.0) {
        format!("`original_ms` is {}, which is not a time", table.original_ms)
    } else {
        return Ok(());
    };
    Err(Error::option("--times", reason))
}

impl Search<'_> {
    /// Latencies in ONNX Runtime, if the limit is one of the latency. Without recorded times, the original
    /// model is measured.
    ///
    /// # Errors
    /// If ONNX Runtime is missing, if the recorded times are those of another search, or if the original
    /// model is within the limit.
    pub(super) fn times<'t>(&'t self, formats: &'t dyn Formats, recorded: &'t mut Option<LatencyTable>) -> Result<Option<Times<'t>>> {
        let Some(Budget::Latency(limit)) = self.budget else { return Ok(None) };
        let inputs = sample(self.model, self.context.data)?;
        let shapes: BTreeMap<String, Vec<usize>> = inputs.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect();
        let (names, threads) = (formats.names(), self.context.work.threads);
        recorded.as_ref().map_or(Ok(()), |table| check(table, threads, &shapes, &names, (self.model, !self.fractions.is_empty())))?;
        let new = move || Stopwatch::new(self.model, formats, self.context, inputs.clone());
        let mut stopwatch = None;
        let table = match recorded {
            Some(table) => table,
            None => {
                let original_ms = stopwatch.insert(new()?).measure(&[], &[])?.after_ms.p50;
                recorded.insert(LatencyTable {
                    parameters: self.model.weights.parameters(),
                    runtime: Stopwatch::runtime(),
                    threads,
                    inputs: shapes,
                    formats: names,
                    original_ms,
                    ..LatencyTable::default()
                })
            }
        };
        require_slower(table.original_ms, limit)?;
        let runtime = table.runtime.clone();
        let measure = move |units: &[Unit], options: &[usize]| {
            let stopwatch = match &mut stopwatch {
                Some(stopwatch) => stopwatch,
                None => stopwatch.insert(new()?),
            };
            if runtime != Stopwatch::runtime() {
                let reason = format!(
                    "the times were measured with {runtime}, and this is {}: remove the file, so that all times are measured again",
                    Stopwatch::runtime()
                );
                return Err(Error::option("--times", reason));
            }
            stopwatch.measure(units, options)
        };
        Ok(Some(Times::new(table, Box::new(measure))))
    }
}
