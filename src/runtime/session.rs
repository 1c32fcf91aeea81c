//! A model in ONNX Runtime.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{RunOptions, SessionInputValue};
use ort::value::Outlet;

use super::element;
use super::find::environment;
use super::watch::{Limits, Stopped, watched};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::{self, Port};
use crate::work::Cancel;

/// Sums of products of bytes are exact on x86 without VNNI too. Without this option, products of uint8 and int8 are added there in
/// 16 bits, and what is larger is cut off.
const EXACT_SUMS: &str = "session.x64quantprecision";

/// Products of weights of a few bits with activations as the file defines them, 32-bit floats. Without this option, activations of
/// `DequantizeLinear` and `MatMul` are rounded to int8 on the way.
const EXACT_PRODUCTS: &str = "session.qdq_matmulnbits_accuracy_level";

/// The folder of a model's external data, for a model that is loaded from memory.
const DATA_FOLDER: &str = "session.model_external_initializers_file_folder_path";

/// How a model is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Threads of one operator.
    pub threads: usize,
    /// Whether the graph is optimized, which computes its constants, when it is loaded.
    pub optimize: bool,
    /// Limits of loading.
    pub limits: Option<Limits>,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 1, optimize: true, limits: None }
    }
}

/// How products of bytes are added on x86 without VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sums {
    /// In 32 bits.
    Exact,
    /// In pairs with 16-bit saturation.
    Usual,
}

/// A loaded model.
#[derive(Debug)]
pub struct Session {
    path: PathBuf,
    inner: ort::session::Session,
    cancel: Cancel,
    /// How to load it again with sums of 16 bits, where it is a file that was loaded with exact ones.
    inexact: Option<Options>,
    /// Why it was loaded with sums of 16 bits.
    refusal: Option<String>,
}

impl Session {
    /// Loads a model file.
    ///
    /// # Errors
    /// There is no ONNX Runtime, it refuses the model, or an input or all outputs are no tensors of numbers.
    pub fn open(path: &Path, options: Options) -> Result<Session> {
        if files::is_remote(path) {
            return Err(Error::run(path.display(), "is on another machine", "ONNX Runtime opens files of this one: download it"));
        }
        if !path.is_file() {
            let hint = "ONNX Runtime runs exported models: write one with `--export onnx`, or leave out `--runtime onnxruntime`";
            return Err(Error::run(path.display(), "no such file", hint));
        }
        let session = Session::load_either(path, None, options)?;
        Ok(Session { inexact: session.refusal.is_none().then_some(options), ..session })
    }

    /// Loads a model with exact sums, else with usual ones: ONNX Runtime 1.31 converts int8 weights for exact sums, and fails where nodes
    /// share one or where zero points are left out.
    fn load_either(path: &Path, bytes: Option<&[u8]>, options: Options) -> Result<Session> {
        match Session::load(path, bytes, options, Sums::Exact) {
            Err(Error::Malformed { path: named, reason }) => match Session::load(path, bytes, options, Sums::Usual) {
                Ok(session) => Ok(Session { refusal: Some(reason), ..session }),
                Err(_) => Err(Error::Malformed { path: named, reason }),
            },
            loaded => loaded,
        }
    }

    /// Loads a model from its bytes; errors call it by a path.
    ///
    /// # Errors
    /// As [`open`](Session::open).
    pub fn of(bytes: &[u8], path: &Path, options: Options) -> Result<Session> {
        Session::load_either(path, Some(bytes), options)
    }

    /// Holds a file to exact sums, with which everything is run that compress writes.
    ///
    /// # Errors
    /// ONNX Runtime refuses it with the session option for them.
    pub fn require_exact_sums(&mut self) -> Result<()> {
        self.inexact = None;
        let refused = |reason: &String| Error::malformed(&self.path, format!("with {EXACT_SUMS}=1: {reason}"));
        self.refusal.as_ref().map_or(Ok(()), |reason| Err(refused(reason)))
    }

    /// Whether it was loaded with exact sums.
    pub fn has_exact_sums(&self) -> bool {
        self.refusal.is_none()
    }

    fn load(path: &Path, bytes: Option<&[u8]>, options: Options, sums: Sums) -> Result<Session> {
        let refused = |e: ort::Error| Error::malformed(path, format!("ONNX Runtime refuses the model: {e}"));
        let builder = ort::session::Session::builder(environment()?).map_err(refused)?;
        let builder = builder.with_intra_threads(options.threads).map_err(|e| refused(e.into()))?;
        // What goes wrong is in the error that comes back.
        let builder = builder.with_log_level(ort::logging::LogLevel::Fatal).map_err(|e| refused(e.into()))?;
        let exact = if sums == Sums::Exact { "1" } else { "0" };
        let builder = builder.with_config_entry(EXACT_SUMS, exact).map_err(|e| refused(e.into()))?;
        let mut builder = builder.with_config_entry(EXACT_PRODUCTS, "1").map_err(|e| refused(e.into()))?;
        // Data files of a model that is given as bytes are next to the file that it is from.
        if let (Some(_), Some(folder)) = (bytes, path.parent().and_then(Path::to_str).filter(|folder| !folder.is_empty())) {
            builder = builder.with_config_entry(DATA_FOLDER, folder).map_err(|e| refused(e.into()))?;
        }
        if !options.optimize {
            builder = builder.with_optimization_level(GraphOptimizationLevel::Disable).map_err(|e| refused(e.into()))?;
        }
        let cancel = Cancel::of_process();
        let canceler = builder.canceler();
        let load = || match bytes {
            None => builder.commit_from_file(path),
            Some(bytes) => builder.commit_from_memory(bytes),
        };
        let (loaded, stopped) = watched(move || drop(canceler.cancel()), &cancel, options.limits, load);
        stopped.map_or(Ok(()), |stopped| Err(stop_error(path, stopped)))?;
        let inner = loaded.map_err(refused)?;
        let other = |outlet: &&Outlet| element::port(outlet).is_none();
        let strange = inner.inputs().iter().find(other).map(|input| ("input", input));
        let strange =
            strange.or_else(|| inner.outputs().first().filter(|_| inner.outputs().iter().all(|output| other(&output))).map(|output| ("output", output)));
        match strange {
            None => Ok(Session { path: path.to_owned(), inner, cancel, inexact: None, refusal: None }),
            Some((what, outlet)) => Err(Error::Unsupported {
                what: format!("{}: {what} `{}`, which is {},", path.display(), outlet.name(), outlet.dtype()),
                hint: "models are run that take and give tensors of numbers: cut off what stands before or behind them".into(),
            }),
        }
    }

    /// Terminates runs when this handle is cancelled, and not that of the process.
    #[must_use]
    pub fn cancelled_by(self, cancel: &Cancel) -> Session {
        Session { cancel: cancel.clone(), ..self }
    }

    /// What the model takes, and what it gives; ports that are no tensors of numbers are left out.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        let ports = |outlets: &[Outlet]| outlets.iter().filter_map(element::port).collect();
        (ports(self.inner.inputs()), ports(self.inner.outputs()))
    }

    /// The element type of each output, by ONNX's number; nothing for those that are no tensors of numbers.
    pub fn output_types(&self) -> Vec<Option<i32>> {
        self.inner.outputs().iter().map(element::number).collect()
    }

    /// Names of the inputs.
    pub fn inputs(&self) -> Vec<String> {
        self.inner.inputs().iter().map(|input| input.name().to_owned()).collect()
    }

    /// Runs the model. Inputs are converted to the element types that it takes, outputs to 64-bit integers and 32-bit floats.
    ///
    /// # Errors
    /// An input is missing, does not fit, or holds a number that its element type does not reach; the runtime fails.
    pub fn run(&mut self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        self.run_within(inputs, None)
    }

    /// [`run`](Session::run) that is terminated where it exceeds limits.
    ///
    /// # Errors
    /// As there, and the run exceeds a limit.
    pub fn run_within(&mut self, inputs: &BTreeMap<String, Tensor>, limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>> {
        let results = self.run_once(inputs, limits);
        let (Err(Error::Malformed { .. }), Some(options)) = (&results, self.inexact.take()) else { return results };
        // As in `open`: some files load with exact sums, and do not run.
        let Ok(mut usual) = Session::load(&self.path, None, options, Sums::Usual) else { return results };
        usual.cancel = self.cancel.clone();
        usual.run_once(inputs, limits).map_or(results, |usual_results| {
            *self = usual;
            Ok(usual_results)
        })
    }

    fn run_once(&mut self, inputs: &BTreeMap<String, Tensor>, limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>> {
        let path = self.path.clone();
        let failed = |e: &dyn std::fmt::Display| Error::malformed(&path, format!("ONNX Runtime: {e}"));
        // An output that is an input refers to the input's memory, which must live until the outputs are read.
        let mut values = Vec::new();
        for input in self.inner.inputs() {
            let name = input.name();
            let missing = || Error::option("input", format!("`{name}` is missing, {} takes it", path.display()));
            let tensor = ir::given(inputs, name).ok_or_else(missing)?.map_err(|e| failed(&e))?;
            let value = element::given(&tensor, input).map_err(|e| Error::option("input", format!("`{name}` of {}: {e}", path.display())))?;
            values.push((name.to_owned(), value));
        }
        let given: Vec<(String, SessionInputValue)> = values.iter().map(|(name, value)| (name.clone(), value.into())).collect();
        let options = Arc::new(RunOptions::new().map_err(|e| failed(&e))?);
        let terminated = options.clone();
        let inner = &mut self.inner;
        let (outputs, stopped) = watched(move || drop(terminated.terminate()), &self.cancel, limits, || inner.run_with_options(given, &options));
        stopped.map_or(Ok(()), |stopped| Err(stop_error(&path, stopped)))?;
        let outputs = outputs.map_err(|e| failed(&e))?;
        let mut results = BTreeMap::new();
        for (name, value) in outputs.iter() {
            // Answers are numbers; what else a model of other origin tells is passed over.
            if let Some(tensor) = element::taken(&value).map_err(|e| failed(&format!("output `{name}`: {e}")))? {
                results.insert(name.to_owned(), tensor);
            }
        }
        Ok(results)
    }
}

/// The error of a call that was stopped.
fn stop_error(path: &Path, stopped: Stopped) -> Error {
    match stopped {
        Stopped::Cancelled => Error::Cancelled,
        limit => Error::run(path.display(), format!("ONNX Runtime was stopped: {limit}"), ""),
    }
}

/// Whole numbers of an answer.
///
/// # Errors
/// They are floats.
pub fn integers(answer: &Tensor) -> candle_core::Result<Vec<i64>> {
    answer.flatten_all()?.to_vec1()
}

/// Floats of an answer, one after the other.
///
/// # Errors
/// They cannot be made floats of 32 bits.
pub fn floats(answer: &Tensor) -> candle_core::Result<Vec<f32>> {
    answer.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1()
}

/// An answer where another tensor is.
///
/// # Errors
/// The device runs out of memory.
pub fn beside(answer: &Tensor, like: &Tensor) -> candle_core::Result<Tensor> {
    answer.to_device(like.device())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use prost::Message;

    use super::*;
    use crate::ir::Element;
    use crate::onnx::proto::{
        DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };

    /// Element types by the numbers that ONNX gives them; floats first.
    const TYPES: [i32; 13] = [1, 10, 11, 16, 2, 3, 4, 5, 6, 7, 12, 13, 9];
    const STRING: i32 = 8;

    /// The memory of inputs must not be freed before outputs that refer to it are read.
    #[test]
    fn an_output_that_is_an_input_has_its_values() {
        if super::super::library().is_err() {
            return;
        }
        let mut session = model(&[1], "x", 4096).unwrap();
        let values: Vec<f32> = (0..4096).map(|at| at as f32).collect();
        for _ in 0..8 {
            let given = Tensor::from_vec(values.clone(), 4096, &Device::Cpu).unwrap();
            let outputs = session.run(&[("x1".to_owned(), given)].into()).unwrap();
            assert_eq!(outputs["x1"].to_vec1::<f32>().unwrap(), values);
        }
    }

    /// A model that gives its inputs back, two elements of each type.
    fn identities(types: &[i32]) -> Result<Session> {
        model(types, "y", 2)
    }

    /// The same for another number of elements; outputs have this prefix, inputs `x`.
    fn model(types: &[i32], outputs: &str, elements: i64) -> Result<Session> {
        let port = |prefix: &str, ty: i32| {
            let shape =
                Some(TensorShapeProto { dim: vec![DimensionProto { value: Some(crate::onnx::proto::Dimension::DimValue(elements)), denotation: None }] });
            let tensor_type = Some(TensorTypeProto { elem_type: Some(ty), shape });
            ValueInfoProto { name: Some(format!("{prefix}{ty}")), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
        };
        let node =
            |ty: i32| NodeProto { input: vec![format!("x{ty}")], output: vec![format!("y{ty}")], op_type: Some("Identity".into()), ..NodeProto::default() };
        let graph = GraphProto {
            name: Some("identities".into()),
            node: types.iter().map(|ty| node(*ty)).collect(),
            input: types.iter().map(|ty| port("x", *ty)).collect(),
            output: types.iter().map(|ty| port(outputs, *ty)).collect(),
            ..GraphProto::default()
        };
        let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(17) }];
        let model = ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        Session::open(&path, Options::default())
    }

    #[test]
    fn every_type_of_numbers_is_given_and_taken() {
        if super::super::library().is_err() {
            return;
        }
        let mut session = identities(&TYPES).unwrap();
        let (inputs, outputs) = session.ports();
        assert_eq!((inputs.len(), outputs.len()), (13, 13));
        let floats = Tensor::new(&[0.5f32, -2.0], &Device::Cpu).unwrap();
        let numbers = Tensor::new(&[1i64, 0], &Device::Cpu).unwrap();
        let value = |port: &Port| if port.element == Element::Float { floats.clone() } else { numbers.clone() };
        let given: BTreeMap<String, Tensor> = inputs.iter().map(|port| (port.name.clone(), value(port))).collect();
        let results = session.run(&given).unwrap();
        for port in &outputs {
            let result = &results[&port.name];
            let wanted = if port.element == Element::Float { DType::F32 } else { DType::I64 };
            assert_eq!((result.dtype(), result.to_string()), (wanted, value(port).to_string()), "{}", port.name);
        }
        let mut wrong = |name: &str, tensor: Tensor| {
            let given: BTreeMap<String, Tensor> = given.clone().into_iter().chain([(name.to_owned(), tensor)]).collect();
            session.run(&given).unwrap_err().to_string()
        };
        let far = |number: i64| Tensor::new(&[number, 0], &Device::Cpu).unwrap();
        assert!(wrong("x6", far(1 << 31)).contains("`x6` of"));
        assert!(wrong("x9", far(2)).contains("holds 2"));
        assert!(wrong("x13", far(-1)).contains("holds -1"));
        assert!(wrong("x10", Tensor::new(&[1e5f32, 0.0], &Device::Cpu).unwrap()).contains("holds 100000"));
        assert!(wrong("x7", floats.clone()).contains("holds floats"));
    }

    #[test]
    fn what_is_no_number_is_refused_by_name_when_it_is_opened() {
        if super::super::library().is_err() {
            return;
        }
        let error = identities(&[1, STRING]).unwrap_err().to_string();
        assert!(error.contains("input `x8`") && error.contains("String"), "{error}");
    }
}
