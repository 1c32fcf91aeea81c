//! Predicts the work, the output and the memory of a run without reading a tensor.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::time::{StageWork, sum_of};
use super::{Pipeline, carry};
use crate::contract::Checked;
use crate::error::Result;
use crate::export::SizeForecast;
use crate::model::Model;
use crate::report::WARNING;
use crate::run_state::Applied;
use crate::store::{Weight, block_elements};

/// Plan of one pass.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PassPlan {
    /// Name of the pass.
    pub name: &'static str,
    /// Its options, including defaults.
    pub options: serde_json::Value,
    /// How weights are chosen.
    pub rule: String,
    /// Names of the weights that it changes.
    pub selected: Vec<String>,
    /// Elements of these weights.
    pub parameters: u64,
    /// Float weights of two or more dimensions that it leaves unchanged.
    pub unselected: Vec<String>,
}

/// Memory needed to run the model, estimated for one sample of typical size.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ModelMemory {
    /// Bytes with all parameters in memory.
    pub whole_bytes: u64,
    /// Bytes if run block by block; `None` if the model cannot be split into blocks.
    pub blockwise_bytes: Option<u64>,
    /// Memory limit of running models in bytes: the requested limit, otherwise most of the free memory;
    /// `None` if that is unknown.
    pub limit_bytes: Option<u64>,
    /// Whether evaluation and calibration run it block by block.
    pub blockwise: bool,
}

/// Predicted work, output and memory of a run.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The input, folder or file.
    pub model: String,
    /// Bytes of the input files' tensors.
    pub input_bytes: u64,
    /// Elements of all weights.
    pub parameters: u64,
    /// Plans of the passes, in order.
    pub passes: Vec<PassPlan>,
    /// Number of samples of each data set that is used.
    pub samples: BTreeMap<&'static str, usize>,
    /// Bytes read before writing, for statistics that several weights share.
    pub prepare_bytes: u64,
    /// Files that would be written.
    pub files: Vec<String>,
    /// Their size. It is an upper bound if it is neither exact nor an estimate.
    pub output_bytes: u64,
    /// Whether the size is exact.
    pub output_exact: bool,
    /// Whether the size is an estimate, because it depends on the values of the weights or on samples.
    pub output_estimated: bool,
    /// Estimated peak resident memory: blocks being processed and the program itself.
    pub peak_rss_bytes: u64,
    /// Peak GPU memory: 0 if no GPU is used, `None` if it is not known in advance.
    pub peak_vram_bytes: Option<u64>,
    /// Memory needed to run the model; `None` if neither a pass nor the evaluation runs it.
    pub model_memory: Option<ModelMemory>,
    /// Counted work of the stages, with estimated times if the rates of the machine are known. Passes that
    /// only change weights while they are written are part of the last stages.
    pub work: Vec<StageWork>,
    /// Sum of the estimated times; `None` if no time is estimated.
    pub estimated_seconds: Option<f64>,
    /// Rules of the runtimes in `loads` that the planned output complies with. All rules are checked again on
    /// the written files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<Checked>,
    /// Notes and warnings.
    pub notes: Vec<String>,
}

/// Resident size of the program and its tables, in bytes.
const PROGRAM: u64 = 16 << 20;
/// Bytes of the counters of one thread that ranks weights.
const RANKING: u64 = 3 << 20;

impl Pipeline {
    /// Plans a run from the headers of the model, without reading a tensor.
    ///
    /// # Errors
    /// Every error of a run that can be detected before the first tensor is read.
    pub fn plan(&self, model: &Model) -> Result<Plan> {
        plan(self, model, None)
    }

    /// Plans a run that writes this output.
    ///
    /// # Errors
    /// As [`plan`](Pipeline::plan), or if the output is a file of another format.
    #[doc(hidden)]
    pub fn plan_output(&self, model: &Model, output: &Path) -> Result<Plan> {
        plan(self, model, Some(output))
    }
}

fn plan(pipeline: &Pipeline, model: &Model, output: Option<&Path>) -> Result<Plan> {
    model.require_own_files()?;
    let (pipeline, file) = output.map_or_else(|| Ok((pipeline.clone(), None)), |output| pipeline.for_output(output))?;
    let (pipeline, after, mut run) = pipeline.resolved(model)?;
    run.data_file = file.as_ref().map(|name| format!("{name}.data"));
    run.file = file;
    let (pipeline, after, run) = (&pipeline, &after, &run);
    let loads = pipeline.check_planned(after, run, output)?;
    let (samples, sample_notes) = pipeline.count_samples(after.for_samples(model))?;
    let peak_vram_bytes = pipeline.planned_vram()?;
    let model_memory = pipeline.planned_model_memory(model)?;
    let forecasts: Vec<SizeForecast> = pipeline.export.iter().map(|e| e.format().forecast(after, run)).collect::<Result<_>>()?;
    let threads = pipeline.work().threads as u64;
    let stages = 2 + pipeline.steps.len() as u64;
    let block = model.weights.by_name.values().map(block_bytes).max().unwrap_or(0);
    let most = |bytes: fn(&Applied) -> u64| run.history.iter().map(bytes).max().unwrap_or(0);
    let work = pipeline.work_of(model, after, run)?;
    let passes = run
        .history
        .iter()
        .map(|applied| PassPlan {
            name: applied.name,
            options: applied.options.clone(),
            rule: applied.rule.clone(),
            selected: applied.tensors.iter().cloned().collect(),
            parameters: applied.parameters,
            unselected: applied.unselected.clone(),
        })
        .collect();
    let from_passes = run.history.iter().flat_map(|applied| &applied.notes);
    let noted = sample_notes.iter().chain(&model.auxiliary.in_weight_files).chain(&run.notes).chain(from_passes).cloned();
    let mut notes: Vec<String> = noted.chain(carry::stale_config(after, run)).collect();
    notes.sort_by_key(|note| !note.starts_with(WARNING));
    Ok(Plan {
        model: model.path.to_string_lossy().into_owned(),
        input_bytes: model.stored_bytes(),
        parameters: model.weights.parameters(),
        passes,
        samples,
        prepare_bytes: run.history.iter().flat_map(|applied| &applied.preparations).map(|preparation| preparation.bytes()).sum(),
        files: forecasts.iter().flat_map(|f| f.files.clone()).collect(),
        output_bytes: forecasts.iter().map(|f| f.bytes).sum(),
        output_estimated: run.is_estimated(),
        output_exact: forecasts.iter().all(|f| f.exact),
        peak_rss_bytes: PROGRAM + threads * (RANKING + stages * block + most(|applied| applied.memory_by_thread)) + most(|applied| applied.memory),
        peak_vram_bytes,
        model_memory,
        estimated_seconds: sum_of(&work),
        work,
        loads,
        notes,
    })
}

/// Bytes of the largest block of a weight that is in memory at once.
fn block_bytes(weight: &Weight) -> u64 {
    (block_elements(weight.row()).min(weight.elements()) * (weight.dtype.bitsize() / 8).max(1)) as u64
}
