//! A model that is to be run: a folder, or an ONNX file in one.

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde_json::{Map, Value};

use super::{ByBlocks, Candle, OnnxRuntime, Precision, Runner, Runtime};
use crate::analysis;
use crate::data::Target;
use crate::error::{Error, Result};
use crate::exec::{BlockwiseOptions, Inputs, MemoryNeed, Residence, Rounding, Schedule, sizes_of};
use crate::ir::{Graph, Port};
use crate::model::{Config, Made, Model, preprocessing_folder};
use crate::runtime::Limits;
use crate::runtime::Session;
use crate::work::{MemoryLimit, Work};

/// Loads models that are run side by side: whole where they fit into memory with a batch like this one, else those of the built-in
/// executor block by block.
///
/// # Errors
/// As [`Subject::load`], or they do not fit into memory that was asked for.
pub fn load<'s>(
    subjects: impl IntoIterator<Item = &'s mut Subject>,
    inputs: Option<&Inputs>,
    device: &Device,
    memory: MemoryLimit,
    work: &Work<'s>,
) -> Result<Vec<Box<dyn Runner + 's>>> {
    let subjects: Vec<&mut Subject> = subjects.into_iter().collect();
    let needs: Vec<(&str, MemoryNeed)> = subjects.iter().filter_map(|subject| subject.need(inputs)).collect();
    let schedule = match memory.schedule(&needs)? {
        // Each has a share of the states.
        Schedule::Blockwise { states } => Schedule::Blockwise { states: states / needs.len().max(1) as u64 },
        whole => whole,
    };
    drop(needs);
    subjects.into_iter().map(|subject| subject.load_as(schedule, device, work)).collect()
}

/// A model, opened.
pub struct Subject {
    folder: PathBuf,
    made: Made,
    config: Map<String, Value>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    rounding: Rounding,
    precision: Precision,
    what: What,
}

enum What {
    Folder { model: Box<Model>, graph: Box<Graph> },
    Onnx(Option<OnnxRuntime>),
}

impl Subject {
    /// Opens a folder, a `.safetensors` file, or an `.onnx` file with its tokenizer and `config.json`, see
    /// [`preprocessing_folder`].
    ///
    /// # Errors
    /// It cannot be opened, its family is not known, or there is no ONNX Runtime for an `.onnx` file.
    pub fn open(path: &Path, threads: usize) -> Result<Subject> {
        if path.extension().is_none_or(|e| e != "onnx") {
            let model = Model::open(path)?;
            return match &model.onnx {
                // The built-in executor has no cache to give it.
                Some(file) if file.keeps() => Subject::onnx_file(&file.path, threads),
                _ => Subject::of(model),
            };
        }
        Subject::onnx_file(path, threads)
    }

    /// The ONNX file that a model was opened from, whatever was made of it since.
    ///
    /// # Errors
    /// There is none, there is no ONNX Runtime, or it refuses the file.
    pub fn file_of(model: &Model, threads: usize) -> Result<Subject> {
        let none = || Error::option("ONNX Runtime", format!("{} is no ONNX file", model.path.display()));
        let file = model.onnx.as_ref().ok_or_else(none)?;
        let mut subject = Subject::onnx_file(&file.path, threads)?;
        for input in &mut subject.inputs {
            input.shape = file.input_sizes(&input.name).unwrap_or_else(|| input.shape.clone());
            input.number = file.told_number(&input.name);
        }
        Ok(subject)
    }

    /// An ONNX file with tokenizer and `config.json` next to it, or one folder up.
    fn onnx_file(path: &Path, threads: usize) -> Result<Subject> {
        let folder = preprocessing_folder(path);
        let config = Config::open(&folder.join("config.json"))?;
        Subject::onnx(path, &folder, config.values().clone(), threads)
    }

    /// A model that is open already.
    ///
    /// # Errors
    /// Its family is not known, its weights do not fit its configuration, or it is an ONNX file whose weights have changed since: what is
    /// run is the file.
    pub fn of(model: Model) -> Result<Subject> {
        let graph = match (model.graph(), &model.onnx) {
            (Err(_), Some(file)) if file.holds(&model.weights) => return Subject::onnx_file(&file.path, 1),
            (Err(_), Some(_)) => {
                return Err(Error::Unsupported {
                    what: format!("{}: running an .onnx model with weights that are not written yet", model.path.display()),
                    hint: "write it first, and go on from what was written".into(),
                });
            }
            (graph, _) => graph?,
        };
        let (inputs, outputs) = Port::of(&graph);
        let (folder, config) = model.preprocessing()?;
        let (made, config) = (model.beside.made.clone(), config.values().clone());
        Ok(Subject {
            folder,
            made,
            config,
            inputs,
            outputs,
            rounding: Rounding::Token,
            precision: Precision::F32,
            what: What::Folder { model: Box::new(model), graph: Box::new(graph) },
        })
    }

    /// An ONNX file with a configuration and a folder for the tokenizer from elsewhere.
    ///
    /// # Errors
    /// There is no ONNX Runtime, or it refuses the file.
    pub fn onnx(path: &Path, folder: &Path, config: Map<String, Value>, threads: usize) -> Result<Subject> {
        let session = OnnxRuntime::open(path, threads)?;
        let (inputs, outputs) = session.ports();
        Ok(Subject {
            folder: folder.to_owned(),
            made: Made::new(),
            config,
            inputs,
            outputs,
            rounding: Rounding::Tensor,
            precision: Precision::F32,
            what: What::Onnx(Some(session)),
        })
    }

    /// An ONNX file that compress has written: it must run with exact sums.
    ///
    /// # Errors
    /// As [`onnx`](Subject::onnx), and where ONNX Runtime refuses it with the session option for exact sums.
    pub(crate) fn written(path: &Path, folder: &Path, config: Map<String, Value>, threads: usize) -> Result<Subject> {
        let mut subject = Subject::onnx(path, folder, config, threads)?;
        subject.session_mut().map_or(Ok(()), Session::require_exact_sums)?;
        Ok(subject)
    }

    /// The session of an ONNX file that is not loaded yet.
    pub(crate) fn session_mut(&mut self) -> Option<&mut Session> {
        match &mut self.what {
            What::Onnx(session) => session.as_mut().map(OnnxRuntime::session_mut),
            What::Folder { .. } => None,
        }
    }

    /// Terminates runs of an ONNX file that exceed these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Subject {
        match self.what {
            What::Onnx(session) => Subject { what: What::Onnx(session.map(|session| session.with_limits(limits))), ..self },
            _ => self,
        }
    }

    /// Has the built-in executor round inputs of int8 layers in another way than for each token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Subject {
        Subject { rounding, ..self }
    }

    /// Has the built-in executor compute with other floats than 32-bit ones.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Subject {
        Subject { precision, ..self }
    }

    /// Has ONNX Runtime give the last tokens of each text, so many, one by one to a decoder with a cache.
    #[must_use]
    pub fn with_steps(self, steps: usize) -> Subject {
        let what = if let What::Onnx(session) = self.what { What::Onnx(session.map(|session| session.with_steps(steps))) } else { self.what };
        Subject { what, ..self }
    }

    /// Who runs it.
    pub fn runtime(&self) -> Runtime {
        match self.what {
            What::Folder { .. } => Runtime::Candle,
            What::Onnx(_) => Runtime::OnnxRuntime,
        }
    }

    /// What it computes; known of folders only.
    pub fn graph(&self) -> Option<&Graph> {
        match &self.what {
            What::Folder { graph, .. } => Some(graph),
            What::Onnx(_) => None,
        }
    }

    /// What data must fit.
    pub fn target(&self) -> Target<'_> {
        Target { folder: &self.folder, made: &self.made, config: &self.config, inputs: &self.inputs, outputs: &self.outputs }
    }

    /// What running it takes, of inputs of these sizes, or of one sample of usual size; known of folders only.
    fn need(&self, inputs: Option<&Inputs>) -> Option<(&str, MemoryNeed)> {
        let What::Folder { model, graph } = &self.what else { return None };
        let sizes = inputs.map_or_else(|| analysis::usual_sizes(graph), |inputs| sizes_of(graph, inputs));
        Some((model.config.model_type(), MemoryNeed::of(graph, &model.weights, self.precision.dtype(), Residence::Stored, &sizes)))
    }

    /// Loads what running needs.
    ///
    /// # Errors
    /// Reading fails, or memory runs out; an ONNX file can be loaded once.
    pub fn load<'s>(&'s mut self, device: &Device, work: &Work<'s>) -> Result<Box<dyn Runner + 's>> {
        self.load_as(Schedule::Whole, device, work)
    }

    fn load_as<'s>(&'s mut self, schedule: Schedule, device: &Device, work: &Work<'s>) -> Result<Box<dyn Runner + 's>> {
        let (rounding, precision) = (self.rounding, self.precision);
        match (&mut self.what, schedule) {
            (What::Folder { model, graph }, Schedule::Blockwise { states }) => {
                let options = BlockwiseOptions { rounding, compute: precision.dtype(), ..BlockwiseOptions::on(device) };
                Ok(Box::new(ByBlocks::new(model, graph, options, states, work)))
            }
            (What::Folder { model, graph }, Schedule::Whole) => Ok(Box::new(Candle::load(model, graph, precision, device, work)?.with_rounding(rounding))),
            (What::Onnx(session), _) => match session.take() {
                Some(session) => Ok(Box::new(session.cancelled_by(work.cancel))),
                None => Err(crate::Error::option("ONNX Runtime", "the model was loaded before")),
            },
        }
    }
}
