//! A model that is to be run: a folder, or an ONNX file in one.

use std::path::{Path, PathBuf};

use candle_core::Device;
use serde_json::{Map, Value};

use super::{Candle, OnnxRuntime, Runner, Runtime};
use crate::data::Target;
use crate::error::Result;
use crate::exec::Rounding;
use crate::ir::{Graph, Port};
use crate::model::{Config, Model};
use crate::work::Work;

/// A model, opened.
pub struct Subject {
    folder: PathBuf,
    config: Map<String, Value>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    rounding: Rounding,
    what: What,
}

enum What {
    Folder { model: Box<Model>, graph: Box<Graph> },
    Onnx(Option<OnnxRuntime>),
}

impl Subject {
    /// Opens a folder, a `.safetensors` file, or an `.onnx` file, whose folder then holds tokenizer and `config.json`.
    ///
    /// # Errors
    /// It cannot be opened, its family is not known, or there is no ONNX Runtime for an `.onnx` file.
    pub fn open(path: &Path, threads: usize) -> Result<Subject> {
        if path.extension().is_none_or(|e| e != "onnx") {
            return Subject::of(Model::open(path)?);
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let config = Config::open(&folder.join("config.json"))?;
        Subject::onnx(path, folder, config.values().clone(), threads)
    }

    /// A model that is open already.
    ///
    /// # Errors
    /// Its family is not known, or its weights do not fit its configuration.
    pub fn of(model: Model) -> Result<Subject> {
        let graph = model.graph()?;
        let (inputs, outputs) = Port::of(&graph);
        let (folder, config) = (model.path.clone(), model.config.values().clone());
        Ok(Subject { folder, config, inputs, outputs, rounding: Rounding::Token, what: What::Folder { model: Box::new(model), graph: Box::new(graph) } })
    }

    /// An ONNX file with a configuration and a folder for the tokenizer from elsewhere.
    ///
    /// # Errors
    /// There is no ONNX Runtime, or it refuses the file.
    pub fn onnx(path: &Path, folder: &Path, config: Map<String, Value>, threads: usize) -> Result<Subject> {
        let session = OnnxRuntime::open(path, threads)?;
        let (inputs, outputs) = session.ports();
        Ok(Subject { folder: folder.to_owned(), config, inputs, outputs, rounding: Rounding::Tensor, what: What::Onnx(Some(session)) })
    }

    /// Has the built-in executor round inputs of int8 layers in another way than for each token.
    #[must_use]
    pub fn with_rounding(self, rounding: Rounding) -> Subject {
        Subject { rounding, ..self }
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
        Target { folder: &self.folder, config: &self.config, inputs: &self.inputs, outputs: &self.outputs }
    }

    /// Loads what running needs.
    ///
    /// # Errors
    /// Reading fails, or memory runs out; an ONNX file can be loaded once.
    pub fn load(&mut self, device: &Device, work: &Work) -> Result<Box<dyn Runner + '_>> {
        match &mut self.what {
            What::Folder { model, graph } => Ok(Box::new(Candle::load(model, graph, device, work)?.with_rounding(self.rounding))),
            What::Onnx(session) => match session.take() {
                Some(session) => Ok(Box::new(session)),
                None => Err(crate::Error::option("ONNX Runtime", "the model was loaded before")),
            },
        }
    }
}
