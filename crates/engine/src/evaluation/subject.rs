//! Models to evaluate: a folder of weights, or an ONNX file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use serde_json::{Map, Value};

use super::{BlockwiseCandle, Candle, OnnxRuntime, Precision, Runner, Runtime, without_folded_states};
use crate::data::{Batch, Data, DataSet, Target, Task};
use crate::error::{Error, Result};
use crate::exec::{BlockwiseOptions, Inputs, MemoryNeed, MemoryTracker, Residence, Rounding, Schedule, sizes_of};
use crate::files;
use crate::ir::ops::elements;
use crate::ir::{Graph, Port};
use crate::model::{Config, Model, SynthesizedFiles, auxiliary_path, has_other_weights_than_onnx, preprocessing_folder};
use crate::runtime::{Limits, Session, encoder_decoder};
use crate::work::{MemoryLimit, Work};

/// How often models run over data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// Once. On the CPU, large local models then run block by block even if they fit into memory, if that
    /// takes much less memory. Results are the same.
    Once,
    /// Several times.
    Repeated,
}

/// Loads models to be compared on a device. They are loaded completely if they fit into memory together with
/// the activations of a batch like `inputs`; otherwise the built-in executor runs them block by block. Fails
/// if the models do not fit into the requested memory limit.
pub fn load<'s>(
    subjects: impl IntoIterator<Item = &'s mut Subject>,
    (inputs, device): (&Inputs, &Device),
    memory: MemoryLimit,
    runs: Runs,
    work: &Work<'s>,
) -> Result<Vec<Box<dyn Runner + 's>>> {
    let subjects: Vec<&mut Subject> = subjects.into_iter().collect();
    let is_remote = |subject: &&mut Subject| matches!(&subject.source, Source::Folder { model, .. } if files::is_remote(&model.path));
    let rereads = runs == Runs::Once && device.is_cpu() && !subjects.iter().any(is_remote);
    let needs: Vec<(&str, MemoryNeed)> = subjects.iter().filter_map(|subject| subject.memory_need(inputs, device)).collect();
    let chosen = Schedule::choose(memory, &needs)?;
    let compact = if rereads && chosen == Schedule::Resident { Schedule::compact(&needs) } else { None };
    let schedule = match compact.unwrap_or(chosen) {
        // The models share the cache of activations equally.
        Schedule::Blockwise { states } => Schedule::Blockwise { states: states / needs.len().max(1) as u64 },
        Schedule::Resident => Schedule::Resident,
    };
    drop(needs);
    let bytes: u64 = inputs.values().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum();
    subjects.into_iter().map(|subject| subject.with_default_limits(bytes, memory).load_as((schedule, compact.is_some()), device, work)).collect()
}

/// A smaller batch size than the default one, if logits of the models take more than 256 MiB per batch.
/// `None` if they take less, if the batch size is set, or if another task or a model determines it.
pub fn smaller_batch<'s>(options: &Data, data: &DataSet, subjects: impl IntoIterator<Item = &'s Subject>) -> Result<Option<usize>> {
    if options.batch_size.is_some() || data.task() != Task::LanguageModelling {
        return Ok(None);
    }
    let subjects: Vec<&Subject> = subjects.into_iter().collect();
    if subjects.iter().any(|subject| subject.target().fixed_batch().is_some()) {
        return Ok(None);
    }
    let first = data.first()?;
    Ok(subjects.iter().filter_map(|subject| subject.smaller_batch(&first)).min())
}

/// Maximum size of the outputs of a default batch, in bytes.
const MAX_OUTPUTS: u64 = 256 << 20;

/// An opened model to evaluate.
pub struct Subject {
    folder: PathBuf,
    synthesized: SynthesizedFiles,
    config: Map<String, Value>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    branches: bool,
    rounding: Rounding,
    tracker: Option<Arc<MemoryTracker>>,
    precision: Precision,
    source: Source,
}

enum Source {
    Folder { model: Box<Model>, graph: Box<Graph> },
    Onnx(Option<OnnxRuntime>),
}

impl Subject {
    /// Opens a folder, a `.safetensors` file, or an `.onnx` file. The file of an encoder next to those of its
    /// decoder opens the whole encoder-decoder model. [`preprocessing_folder`] locates the
    /// tokenizer and `config.json` of the latter.
    pub fn open(path: &Path, threads: usize) -> Result<Subject> {
        let is_file = path.extension().is_some_and(|e| e == "onnx");
        let model = if is_file { None } else { Some(Model::open(path)) };
        // A folder with several ONNX files only, or the file of the encoder. Other weights that cannot be
        // read are an error.
        if !matches!(model, Some(Ok(_)))
            && (is_file || !has_other_weights_than_onnx(path))
            && let Some([encoder, ..]) = encoder_decoder(path)
        {
            let folder = preprocessing_folder(&encoder);
            return Subject::with_session(OnnxRuntime::open_written(&encoder, threads)?, &folder, Subject::config_of(&folder)?);
        }
        let Some(model) = model.transpose()? else { return Subject::open_onnx_file(path, threads) };
        match &model.onnx {
            // The built-in executor cannot provide the inputs of a KV cache.
            Some(file) if file.has_kv_cache() => Subject::open_onnx_file(&file.path, threads),
            _ => Subject::from_model(model),
        }
    }

    /// Opens the ONNX file that a model was opened from, without the modifications of the model. Fails if the
    /// model was not opened from an ONNX file.
    pub fn open_original_file(model: &Model, threads: usize) -> Result<Subject> {
        let not_onnx = || Error::option("ONNX Runtime", format!("{} is not an ONNX file", model.path.display()));
        let file = model.onnx.as_ref().ok_or_else(not_onnx)?;
        let mut subject = Subject::open_onnx_file(&file.path, threads)?;
        for input in &mut subject.inputs {
            input.shape = file.input_sizes(&input.name).unwrap_or_else(|| input.shape.clone());
            input.number = file.fixed_scalar(&input.name);
        }
        Ok(subject)
    }

    /// Opens an ONNX file with a tokenizer and `config.json` in its folder or in the parent folder.
    fn open_onnx_file(path: &Path, threads: usize) -> Result<Subject> {
        let folder = preprocessing_folder(path);
        let config = Subject::config_of(&folder)?;
        Subject::open_onnx(path, &folder, config, threads)
    }

    fn config_of(folder: &Path) -> Result<Map<String, Value>> {
        Ok(Config::open(&auxiliary_path(folder, "config.json"))?.values().clone())
    }

    /// Wraps an open model. Fails if an ONNX file that only ONNX Runtime can run has modified weights that
    /// are not written yet.
    pub fn from_model(model: Model) -> Result<Subject> {
        let graph = match (model.graph(), &model.onnx) {
            (Err(_), Some(file)) if file.has_unchanged_weights(&model.weights) => return Subject::open_onnx_file(&file.path, 1),
            (Err(_), Some(_)) => {
                return Err(Error::Unsupported {
                    what: format!("{}: running an .onnx model with modified weights that are not written yet", model.path.display()),
                    hint: "write the model first, then open the written file".into(),
                });
            }
            (graph, _) => without_folded_states(graph?, &model.weights),
        };
        let (inputs, outputs) = Port::from_graph(&graph);
        let (folder, config) = model.preprocessing()?;
        let (synthesized, config) = (model.auxiliary.synthesized.clone(), config.values().clone());
        let branches = model.branches();
        Ok(Subject {
            folder,
            synthesized,
            config,
            inputs,
            outputs,
            branches,
            rounding: Rounding::Token,
            tracker: None,
            precision: Precision::F32,
            source: Source::Folder { model: Box::new(model), graph: Box::new(graph) },
        })
    }

    /// Opens an ONNX file with a separate configuration and tokenizer folder.
    pub fn open_onnx(path: &Path, folder: &Path, config: Map<String, Value>, threads: usize) -> Result<Subject> {
        Subject::with_session(OnnxRuntime::open(path, threads)?, folder, config)
    }

    fn with_session(mut session: OnnxRuntime, folder: &Path, config: Map<String, Value>) -> Result<Subject> {
        let (inputs, outputs) = session.ports();
        let branches = session.sessions_mut().iter().any(|session| session.branches());
        Ok(Subject {
            folder: folder.to_owned(),
            synthesized: SynthesizedFiles::new(),
            config,
            inputs,
            outputs,
            branches,
            rounding: Rounding::Tensor,
            tracker: None,
            precision: Precision::F32,
            source: Source::Onnx(Some(session)),
        })
    }

    /// Opens an ONNX file that compress has written, like [`open_onnx`](Subject::open_onnx), or the files
    /// of an encoder-decoder model. Returns an error if ONNX Runtime cannot load them with the session
    /// option for exact int8 accumulation.
    pub fn open_written(path: &Path, folder: &Path, config: Map<String, Value>, threads: usize) -> Result<Subject> {
        let mut session = OnnxRuntime::open_written(path, threads)?;
        session.sessions_mut().iter_mut().try_for_each(Session::require_exact_sums)?;
        Subject::with_session(session, folder, config)
    }

    /// The session of an ONNX file that is not loaded yet.
    pub fn session_mut(&mut self) -> Option<&mut Session> {
        match &mut self.source {
            Source::Onnx(session) => session.as_mut().and_then(|session| session.sessions_mut().first_mut()),
            Source::Folder { .. } => None,
        }
    }

    /// Terminates runs of an ONNX file that exceed these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Subject {
        match self.source {
            Source::Onnx(session) => Subject { source: Source::Onnx(session.map(|session| session.with_limits(limits))), ..self },
            _ => self,
        }
    }

    /// Limits the memory of an ONNX file on inputs of this size if it has no other limits.
    fn with_default_limits(&mut self, inputs: u64, memory: MemoryLimit) -> &mut Subject {
        if let Source::Onnx(session) = &mut self.source {
            *session = session.take().map(|session| session.with_default_limits(inputs, memory));
        }
        self
    }

    /// Sets the granularity of the dynamic quantization of activations in the built-in executor. The
    /// default is per token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Subject {
        Subject { rounding, ..self }
    }

    /// Records the runs of the built-in executor in a memory tracker, if there is one.
    #[must_use]
    pub fn tracked(self, tracker: Option<&Arc<MemoryTracker>>) -> Subject {
        Subject { tracker: tracker.cloned(), ..self }
    }

    /// Sets the floating-point type of the built-in executor.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Subject {
        Subject { precision, ..self }
    }

    /// Processes the last `steps` tokens of each text one at a time in ONNX Runtime, if the model has a
    /// KV cache.
    #[must_use]
    pub fn with_steps(self, steps: usize) -> Subject {
        let source = match self.source {
            Source::Onnx(session) => Source::Onnx(session.map(|session| session.with_steps(steps))),
            folder => folder,
        };
        Subject { source, ..self }
    }

    /// The runtime that runs the model.
    pub fn runtime(&self) -> Runtime {
        match self.source {
            Source::Folder { .. } => Runtime::Candle,
            Source::Onnx(_) => Runtime::OnnxRuntime,
        }
    }

    /// The graph of a folder; `None` for ONNX files.
    pub fn graph(&self) -> Option<&Graph> {
        match &self.source {
            Source::Folder { graph, .. } => Some(graph),
            Source::Onnx(_) => None,
        }
    }

    /// The interface that data must match.
    pub fn target(&self) -> Target<'_> {
        let described = Target::new(&self.folder, &self.synthesized, &self.config);
        Target { inputs: &self.inputs, outputs: &self.outputs, branches: self.branches, ..described }
    }

    /// Number of samples whose outputs, such as logits of many classes, take at most 256 MiB, or 1, if the
    /// outputs of `batch` take more. `None` for ONNX files.
    fn smaller_batch(&self, batch: &Batch) -> Option<usize> {
        let graph = self.graph()?;
        let sizes = sizes_of(graph, &batch.inputs);
        let outputs = graph.outputs().iter().map(|(_, value)| elements(&graph.value(*value).ty, &sizes));
        let floats = outputs.fold(0, u64::saturating_add);
        let size = (MAX_OUTPUTS / 4).saturating_mul(batch.samples as u64) / floats.max(1);
        usize::try_from(size.max(1)).ok().filter(|size| *size < batch.samples)
    }

    /// Memory needed to run a folder on inputs of these sizes; `None` for ONNX files.
    fn memory_need(&self, inputs: &Inputs, device: &Device) -> Option<(&str, MemoryNeed)> {
        let Source::Folder { model, graph } = &self.source else { return None };
        let sizes = sizes_of(graph, inputs);
        let compute = self.precision.dtype();
        let residence = Residence::most_compact(device, compute);
        Some((model.config.model_type(), MemoryNeed::estimate(graph, &model.weights, compute, residence, &sizes)))
    }

    /// Loads the model. Fails if an ONNX file is loaded twice.
    pub fn load<'s>(&'s mut self, device: &Device, work: &Work<'s>) -> Result<Box<dyn Runner + 's>> {
        self.load_as((Schedule::Resident, false), device, work)
    }

    fn load_as<'s>(&'s mut self, (schedule, tries_first): (Schedule, bool), device: &Device, work: &Work<'s>) -> Result<Box<dyn Runner + 's>> {
        let (rounding, precision, tracker) = (self.rounding, self.precision, self.tracker.clone());
        match (&mut self.source, schedule) {
            (Source::Folder { model, graph }, Schedule::Blockwise { states }) => {
                let options = BlockwiseOptions { rounding, tracker, compute: precision.dtype(), ..BlockwiseOptions::on(device) };
                Ok(Box::new(BlockwiseCandle::new(model, graph, options, states, work).trying_first(tries_first)))
            }
            (Source::Folder { model, graph }, Schedule::Resident) => {
                let loaded = Candle::load(model, graph, precision, device, work)?;
                Ok(Box::new(loaded.with_rounding(rounding).tracked(tracker.as_ref())))
            }
            (Source::Onnx(session), _) => match session.take() {
                Some(session) => Ok(Box::new(session.cancelled_by(work.cancel))),
                None => Err(Error::option("ONNX Runtime", "the model is already loaded")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Tensor};

    use super::*;
    use crate::data::References;

    #[test]
    fn batches_with_large_logits_are_divided() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama");
        let subject = Subject::open(&folder, 1).unwrap();
        let classes: u64 = subject.outputs.iter().map(|port| port.shape.last().copied().flatten().unwrap() as u64).sum();
        let tokens = usize::try_from(MAX_OUTPUTS / 4 / classes / 4).unwrap();
        let size = |samples, tokens| {
            let ids = Tensor::zeros((samples, tokens), DType::I64, &Device::Cpu).unwrap();
            let inputs = [("input_ids".to_owned(), ids.clone()), ("attention_mask".to_owned(), ids)];
            subject.smaller_batch(&Batch { inputs: inputs.into(), references: References::None, samples })
        };
        assert_eq!([size(4, tokens), size(5, tokens), size(4, tokens + 1), size(2, 8 * tokens), size(1, 8 * tokens)], [None, Some(4), Some(3), Some(1), None]);
    }
}
