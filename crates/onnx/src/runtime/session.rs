//! A model loaded in ONNX Runtime.

use std::collections::BTreeMap;
use std::fmt;
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
use crate::ir::{self, Port};
use crate::work::Cancel;

/// Session option for exact 32-bit accumulation of int8 products on x86 without VNNI. By default, ONNX
/// Runtime adds pairs of uint8 × int8 products there with 16-bit saturation.
const EXACT_ACCUMULATION: &str = "session.x64quantprecision";

/// Session option to multiply `MatMulNBits` weights with 32-bit float activations, as the file defines
/// them. By default, ONNX Runtime fuses `DequantizeLinear` and `MatMul` into a kernel that rounds
/// activations to int8.
const EXACT_PRODUCTS: &str = "session.qdq_matmulnbits_accuracy_level";

/// Session option for the folder of external data, for a model that is loaded from memory.
const DATA_FOLDER: &str = "session.model_external_initializers_file_folder_path";

/// Session option that lists graph optimizations to omit.
const DISABLED_OPTIMIZERS: &str = "optimization.disable_specified_optimizers";

/// Options of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Threads per operator.
    pub threads: usize,
    /// Whether the graph is optimized at load time, which includes constant folding.
    pub optimize: bool,
    /// Limits of loading. By default, any time, and memory for a few copies of the model.
    pub limits: Option<Limits>,
    /// Whether outputs of 8-bit integers are returned as 16-bit instead of 64-bit ones, to save memory.
    pub narrow: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 1, optimize: true, limits: None, narrow: false }
    }
}

/// Accumulation of int8 products on x86 without VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AccumulationMode {
    /// In 32-bit integers.
    Exact,
    /// In pairs with 16-bit saturation.
    Saturating,
}

/// A loaded model.
#[derive(Debug)]
pub struct Session {
    path: PathBuf,
    inner: ort::session::Session,
    cancel: Cancel,
    /// How to reload the model with saturating accumulation, for files that were loaded with exact
    /// accumulation.
    fallback: Option<Loading>,
    /// Why ONNX Runtime refused to load the model with exact accumulation, if it did. Rare values are boxed,
    /// because sessions are stored in enums.
    refusal: Option<Box<str>>,
    /// Limits of each run.
    limits: Option<Limits>,
    /// Size of the model.
    bytes: u64,
    /// Whether constants were folded.
    folds: bool,
    /// See [`branches`](Session::branches).
    branches: bool,
    /// Check of the sizes of values before a run.
    size_check: Option<Box<SizeCheck>>,
    /// See [`Options::narrow`].
    narrow: bool,
}

/// Check of the sizes of values before a run.
pub(crate) struct SizeCheck {
    check: Box<SizeCheckFn>,
    /// Input shapes and memory limit that passed the check last.
    passed: Option<(BTreeMap<String, Vec<usize>>, u64)>,
}

type SizeCheckFn = dyn Fn(&BTreeMap<String, Vec<usize>>, u64) -> std::result::Result<(), String> + Send + Sync;

impl SizeCheck {
    /// `check` fails if a run with inputs of these shapes computes a value of more bytes than the limit.
    pub fn new(check: Box<SizeCheckFn>) -> SizeCheck {
        SizeCheck { check, passed: None }
    }

    fn check(&mut self, run: (BTreeMap<String, Vec<usize>>, u64)) -> std::result::Result<(), String> {
        if self.passed.as_ref() != Some(&run) {
            (self.check)(&run.0, run.1)?;
            self.passed = Some(run);
        }
        Ok(())
    }
}

impl fmt::Debug for SizeCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SizeCheck")
    }
}

/// How a model is loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loading {
    /// Options with limits.
    pub options: Options,
    /// Whether constants are folded, if the graph is optimized at all.
    pub folds: bool,
    /// Size of the model and of its external data.
    pub bytes: u64,
    /// Whether values of the inputs decide which parts of the model run.
    pub branches: bool,
}

impl Session {
    /// Loads a model file.
    pub(crate) fn open_as(path: &Path, loading: Loading) -> Result<Session> {
        let session = Session::load_with_fallback(path, None, loading)?;
        Ok(Session { fallback: session.refusal.is_none().then_some(loading), ..session })
    }

    /// Loads a model from memory. `path` names it in errors, and its folder contains external data.
    pub(crate) fn from_bytes_as(bytes: &[u8], path: &Path, loading: Loading) -> Result<Session> {
        Session::load_with_fallback(path, Some(bytes), loading)
    }

    /// Loads a model with exact accumulation, or with the default if that fails: for exact accumulation,
    /// ONNX Runtime 1.31 converts int8 weights, and fails if nodes share one or omit zero points.
    fn load_with_fallback(path: &Path, bytes: Option<&[u8]>, loading: Loading) -> Result<Session> {
        match Session::load(path, bytes, loading, AccumulationMode::Exact) {
            Err(Error::Malformed { path: named, reason }) => match Session::load(path, bytes, loading, AccumulationMode::Saturating) {
                Ok(session) => Ok(Session { refusal: Some(reason.into()), ..session }),
                Err(_) => Err(Error::Malformed { path: named, reason }),
            },
            loaded => loaded,
        }
    }

    /// Size of the model and of its external data.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether values of the inputs decide which parts of the model run, for a batch as a whole.
    pub fn branches(&self) -> bool {
        self.branches
    }

    /// Requires exact accumulation. Every file that compress writes supports it. Fails if ONNX Runtime
    /// refuses the model with the session option for exact accumulation.
    pub fn require_exact_sums(&mut self) -> Result<()> {
        self.fallback = None;
        let refused = |reason: &str| Error::malformed(&self.path, format!("with {EXACT_ACCUMULATION}=1: {reason}"));
        self.refusal.as_deref().map_or(Ok(()), |reason| Err(refused(reason)))
    }

    /// Whether constants were folded at load, unless optimization was disabled.
    pub fn folds_constants(&self) -> bool {
        self.folds
    }

    /// Whether the model was loaded with exact accumulation.
    pub fn has_exact_sums(&self) -> bool {
        self.refusal.is_none()
    }

    fn load(path: &Path, bytes: Option<&[u8]>, loading: Loading, accumulation: AccumulationMode) -> Result<Session> {
        let options = loading.options;
        let refused = |e: ort::Error| Error::malformed(path, format!("ONNX Runtime refuses the model: {e}"));
        let builder = ort::session::Session::builder(environment()?).map_err(refused)?;
        let builder = builder.with_intra_threads(options.threads).map_err(|e| refused(e.into()))?;
        // Failures are returned as errors, so nothing is logged.
        let builder = builder.with_log_level(ort::logging::LogLevel::Fatal).map_err(|e| refused(e.into()))?;
        let exact = if accumulation == AccumulationMode::Exact { "1" } else { "0" };
        let builder = builder.with_config_entry(EXACT_ACCUMULATION, exact).map_err(|e| refused(e.into()))?;
        let mut builder = builder.with_config_entry(EXACT_PRODUCTS, "1").map_err(|e| refused(e.into()))?;
        // External data of a model in memory is next to its original file.
        if let (Some(_), Some(folder)) = (bytes, path.parent().and_then(Path::to_str).filter(|folder| !folder.is_empty())) {
            builder = builder.with_config_entry(DATA_FOLDER, folder).map_err(|e| refused(e.into()))?;
        }
        if !options.optimize {
            builder = builder.with_optimization_level(GraphOptimizationLevel::Disable).map_err(|e| refused(e.into()))?;
        }
        if !loading.folds {
            builder = builder.with_config_entry(DISABLED_OPTIMIZERS, "ConstantFolding").map_err(|e| refused(e.into()))?;
        }
        let cancel = Cancel::process();
        let canceler = builder.canceler();
        let load = || match bytes {
            None => builder.commit_from_file(path),
            Some(bytes) => builder.commit_from_memory(bytes),
        };
        let (loaded, stopped) = watched(move || drop(canceler.cancel()), &cancel, options.limits, load);
        stopped.map_or(Ok(()), |stopped| Err(stop_error(path, stopped)))?;
        let inner = loaded.map_err(refused)?;
        let other = |outlet: &&Outlet| element::port(outlet).is_none();
        let unsupported = inner.inputs().iter().find(other).map(|input| ("input", input));
        let unsupported =
            unsupported.or_else(|| inner.outputs().first().filter(|_| inner.outputs().iter().all(|output| other(&output))).map(|output| ("output", output)));
        match unsupported {
            None => {
                let Loading { folds, bytes, branches, .. } = loading;
                let path = path.to_owned();
                Ok(Session {
                    path,
                    inner,
                    cancel,
                    fallback: None,
                    refusal: None,
                    limits: None,
                    bytes,
                    folds,
                    branches,
                    size_check: None,
                    narrow: options.narrow,
                })
            }
            Some((what, outlet)) => Err(Error::Unsupported {
                what: format!("{}: {what} `{}`, which is {},", path.display(), outlet.name(), outlet.dtype()),
                hint: "only models with numeric tensors as inputs and outputs can be run: remove the nodes that process other types".into(),
            }),
        }
    }

    /// Terminates runs when this handle is cancelled, instead of that of the process.
    #[must_use]
    pub fn cancelled_by(self, cancel: &Cancel) -> Session {
        Session { cancel: cancel.clone(), ..self }
    }

    /// Terminates runs that exceed these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Session {
        Session { limits: Some(limits), ..self }
    }

    /// Checks the sizes of values before each run that has limits.
    #[must_use]
    pub(crate) fn checked_by(self, size_check: SizeCheck) -> Session {
        Session { size_check: Some(Box::new(size_check)), ..self }
    }

    /// The limits of each run.
    pub fn limits(&self) -> Option<Limits> {
        self.limits
    }

    /// The inputs and outputs that are numeric tensors.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        let ports = |outlets: &[Outlet]| outlets.iter().filter_map(element::port).collect();
        (ports(self.inner.inputs()), ports(self.inner.outputs()))
    }

    /// The ONNX element type number of each output; `None` for outputs that are not numeric tensors.
    pub fn output_types(&self) -> Vec<Option<i32>> {
        self.inner.outputs().iter().map(element::element_type).collect()
    }

    /// Names of the inputs.
    pub fn inputs(&self) -> Vec<String> {
        self.inner.inputs().iter().map(|input| input.name().to_owned()).collect()
    }

    /// Runs the model. Inputs are converted to the element types of the model, outputs to 64-bit integers
    /// (see [`Options::narrow`]) and 32-bit floats. Fails if an input is missing, has the wrong shape, or
    /// holds a value outside of the range of its element type.
    pub fn run(&mut self, inputs: &BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        self.run_within(inputs, self.limits)
    }

    /// [`run`](Session::run) with other limits, after which the run is terminated. Fails if the run exceeds a
    /// limit.
    pub fn run_within(&mut self, inputs: &BTreeMap<String, Tensor>, limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>> {
        let results = self.run_once(inputs, limits);
        let (Err(Error::Malformed { .. }), Some(loading)) = (&results, self.fallback.take()) else { return results };
        // Some files load with exact accumulation and fail only when they run.
        let Ok(mut fallback_session) = Session::load(&self.path, None, loading, AccumulationMode::Saturating) else { return results };
        (fallback_session.cancel, fallback_session.limits) = (self.cancel.clone(), self.limits);
        fallback_session.size_check = self.size_check.take();
        fallback_session.run_once(inputs, limits).map_or(results, |fallback_results| {
            *self = fallback_session;
            Ok(fallback_results)
        })
    }

    fn run_once(&mut self, inputs: &BTreeMap<String, Tensor>, limits: Option<Limits>) -> Result<BTreeMap<String, Tensor>> {
        let path = self.path.clone();
        let failed = |e: &dyn std::fmt::Display| Error::malformed(&path, format!("ONNX Runtime: {e}"));
        // An output that is an input refers to the input's memory, which must live until the outputs are
        // read.
        let (mut values, mut shapes) = (Vec::new(), BTreeMap::new());
        for input in self.inner.inputs() {
            let name = input.name();
            let missing = || Error::option("input", format!("`{name}` is missing; {} requires it", path.display()));
            let tensor = ir::input_tensor(inputs, name).ok_or_else(missing)?.map_err(|e| failed(&e))?;
            let value = element::to_ort_value(&tensor, input).map_err(|e| Error::option("input", format!("`{name}` of {}: {e}", path.display())))?;
            shapes.insert(name.to_owned(), tensor.dims().to_vec());
            values.push((name.to_owned(), value));
        }
        if let (Some(size_check), Some(limits)) = (&mut self.size_check, limits) {
            size_check.check((shapes, limits.memory)).map_err(|reason| Error::run(path.display(), reason, ""))?;
        }
        let named: Vec<(String, SessionInputValue)> = values.iter().map(|(name, value)| (name.clone(), value.into())).collect();
        let options = Arc::new(RunOptions::new().map_err(|e| failed(&e))?);
        let terminated = options.clone();
        let inner = &mut self.inner;
        let (outputs, stopped) = watched(move || drop(terminated.terminate()), &self.cancel, limits, || inner.run_with_options(named, &options));
        stopped.map_or(Ok(()), |stopped| Err(stop_error(&path, stopped)))?;
        let outputs = outputs.map_err(|e| failed(&e))?;
        let mut results = BTreeMap::new();
        for (name, value) in outputs.iter() {
            // Outputs that are not numeric tensors are skipped.
            if let Some(tensor) = element::from_ort_value(&value, self.narrow).map_err(|e| failed(&format!("output `{name}`: {e}")))? {
                results.insert(name.to_owned(), tensor);
            }
        }
        Ok(results)
    }
}

/// The error for a call that was stopped.
fn stop_error(path: &Path, stopped: Stopped) -> Error {
    match stopped {
        Stopped::Cancelled => Error::Cancelled,
        limit => Error::run(path.display(), format!("ONNX Runtime was stopped: {limit}"), ""),
    }
}

/// Elements of an integer output. Fails if the output has floats.
pub fn integers(output: &Tensor) -> candle_core::Result<Vec<i64>> {
    output.flatten_all()?.to_vec1()
}

/// Elements of an output, as 32-bit floats.
pub fn floats(output: &Tensor) -> candle_core::Result<Vec<f32>> {
    output.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1()
}

/// Copies an input to the host.
pub(crate) fn to_host(input: &Tensor) -> candle_core::Result<Tensor> {
    input.to_device(&candle_core::Device::Cpu)
}

/// Copies an output to the device of another tensor.
pub fn to_device_of(output: &Tensor, like: &Tensor) -> candle_core::Result<Tensor> {
    output.to_device(like.device())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use prost::Message;

    use super::*;
    use crate::ir::Element;
    use crate::proto::{DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto};

    /// ONNX element type numbers; floats first.
    const TYPES: [i32; 13] = [1, 10, 11, 16, 2, 3, 4, 5, 6, 7, 12, 13, 9];
    const STRING: i32 = 8;

    /// The memory of inputs must not be freed before outputs that refer to it are read.
    #[test]
    fn outputs_that_alias_inputs_have_their_values() {
        if !compress_testing::available("ONNX Runtime", super::super::library()) {
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

    /// A model that returns its inputs, two elements of each type.
    fn identities(types: &[i32]) -> Result<Session> {
        model(types, "y", 2)
    }

    /// The same with `elements` elements. Outputs have the prefix `outputs`, inputs `x`.
    fn model(types: &[i32], outputs: &str, elements: i64) -> Result<Session> {
        let port = |prefix: &str, ty: i32| {
            let shape = Some(TensorShapeProto { dim: vec![DimensionProto { value: Some(crate::proto::Dimension::DimValue(elements)), denotation: None }] });
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
    fn every_numeric_type_is_converted() {
        if !compress_testing::available("ONNX Runtime", super::super::library()) {
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
        session.narrow = true;
        for (name, result) in session.run(&given).unwrap() {
            let is_narrow = ["y2", "y3"].contains(&name.as_str());
            assert_eq!(result.dtype() == DType::I16, is_narrow, "{name}");
            assert!(!is_narrow || result.to_vec1::<i16>().unwrap() == [1, 0]);
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
    fn non_numeric_inputs_are_refused_by_name() {
        if !compress_testing::available("ONNX Runtime", super::super::library()) {
            return;
        }
        let error = identities(&[1, STRING]).unwrap_err().to_string();
        assert!(error.contains("input `x8`") && error.contains("String"), "{error}");
    }
}
