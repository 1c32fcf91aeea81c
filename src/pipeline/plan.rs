//! What a run would do and need, before any tensor is read.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Pipeline;
use crate::error::Result;
use crate::export::SizeForecast;
use crate::model::Model;
use crate::report::WARNING;
use crate::store::{Weight, block_elements};

/// What one pass would do.
#[derive(Debug, Clone, Serialize)]
pub struct PassPlan {
    /// Name of the pass.
    pub name: &'static str,
    /// Its options, defaults written out.
    pub options: serde_json::Value,
    /// How weights are chosen.
    pub rule: String,
    /// Names of the weights that it takes.
    pub selected: Vec<String>,
    /// Elements of these weights.
    pub parameters: u64,
    /// Floats of two or more dimensions that it leaves alone.
    pub unselected: Vec<String>,
}

/// Memory that it takes to run the model, estimated for one sample of usual size.
#[derive(Debug, Clone, Serialize)]
pub struct ModelMemory {
    /// Bytes, with all parameters in memory.
    pub whole_bytes: u64,
    /// Bytes, block by block; nothing where the model cannot be cut into blocks.
    pub blockwise_bytes: Option<u64>,
    /// Bytes that models may take: those that were asked for, else what is free; nothing where that is not known.
    pub limit_bytes: Option<u64>,
    /// Whether evaluation and calibration run it block by block.
    pub blockwise: bool,
}

/// What a run would do and need.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// The input, folder or file.
    pub model: String,
    /// Bytes of the input files' tensors.
    pub input_bytes: u64,
    /// Elements of all weights.
    pub parameters: u64,
    /// Pass by pass.
    pub passes: Vec<PassPlan>,
    /// How many samples there are of each data set that is used.
    pub samples: BTreeMap<&'static str, usize>,
    /// Times that input is gone over before writing, in bytes.
    pub prepare_bytes: u64,
    /// Files that would be written.
    pub files: Vec<String>,
    /// Their size. If it is neither exact nor an estimate, it is the most that the size can be.
    pub output_bytes: u64,
    /// Whether the size is exact.
    pub output_exact: bool,
    /// Whether the size is an estimate, because it depends on what passes find in the weights or on samples.
    pub output_estimated: bool,
    /// Most memory that the run needs, estimated: blocks in flight and the program itself.
    pub peak_rss_bytes: u64,
    /// Most memory of a GPU: 0 where none is used, nothing where it is not known beforehand.
    pub peak_vram_bytes: Option<u64>,
    /// What running the model takes; nothing where no pass and no evaluation does.
    pub model_memory: Option<ModelMemory>,
    /// Plain words.
    pub notes: Vec<String>,
}

/// Resident size of the program and its tables.
const PROGRAM: u64 = 16 << 20;
/// Counters of one thread that ranks weights.
const RANKING: u64 = 3 << 20;

pub(super) fn plan(pipeline: &Pipeline, model: &Model) -> Result<Plan> {
    model.require_own_files()?;
    let (pipeline, after, run) = &pipeline.settled(model)?;
    let (samples, of_samples) = pipeline.count_samples(model)?;
    let peak_vram_bytes = pipeline.planned_vram()?;
    let model_memory = pipeline.planned_model_memory(model)?;
    let forecasts: Vec<SizeForecast> = pipeline.export.iter().map(|e| e.format().forecast(after, run)).collect::<Result<_>>()?;
    let threads = pipeline.work().threads as u64;
    let stages = 2 + pipeline.steps.len() as u64;
    let block = model.weights.by_name.values().map(block_bytes).max().unwrap_or(0);
    let passes = run
        .history
        .iter()
        .map(|applied| PassPlan {
            name: applied.name,
            options: applied.options.clone(),
            rule: applied.rule.clone(),
            selected: applied.tensors.iter().cloned().collect(),
            parameters: applied.tensors.iter().filter_map(|name| model.weights.by_name.get(name)).map(|w| w.elements() as u64).sum(),
            unselected: applied.unselected(&model.weights),
        })
        .collect();
    let from_passes = run.history.iter().flat_map(|applied| &applied.notes);
    let mut notes: Vec<String> = of_samples.iter().chain(&model.beside.in_weight_files).chain(&run.notes).chain(from_passes).cloned().collect();
    notes.sort_by_key(|note| !note.starts_with(WARNING));
    Ok(Plan {
        model: model.path.to_string_lossy().into_owned(),
        input_bytes: model.stored_bytes(),
        parameters: model.weights.parameters(),
        passes,
        samples,
        prepare_bytes: run.preparations.iter().map(|p| p.bytes()).sum(),
        files: forecasts.iter().flat_map(|f| f.files.clone()).collect(),
        output_bytes: forecasts.iter().map(|f| f.bytes).sum(),
        output_estimated: run.estimated,
        output_exact: forecasts.iter().all(|f| f.exact),
        peak_rss_bytes: PROGRAM + threads * (RANKING + stages * block + run.memory_by_thread) + run.memory,
        peak_vram_bytes,
        model_memory,
        notes,
    })
}

/// Bytes of the largest block that is held of a weight.
fn block_bytes(weight: &Weight) -> u64 {
    (block_elements(weight.row()).min(weight.elements()) * (weight.dtype.bitsize() / 8).max(1)) as u64
}
