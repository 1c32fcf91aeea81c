//! Loading of models in ONNX Runtime within a memory limit.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::path::Path;
use std::time::Duration;

use prost::Message;

use super::branching::depends_on_values;
use super::constant_sizes;
use super::external::{DataFiles, ExternalData};
use super::inlining;
use super::proto::{GraphProto, ModelProto, TensorProto};
use super::run_sizes::check_run;
use super::skeleton::{MIN_RUN, Skeleton};
use crate::error::{Error, Result};
use crate::files;
use crate::runtime::{Limits, Loading, Options, Session, SizeCheck};

impl Session {
    /// Loads a model file. Fails if ONNX Runtime is missing or refuses the model, loading it would take more
    /// memory than the limit, an input is not a numeric tensor, or no output is one.
    pub fn open(path: &Path, options: Options) -> Result<Session> {
        if files::is_remote(path) {
            return Err(Error::run(path.display(), "is a remote file", "ONNX Runtime opens only local files: download it first"));
        }
        if !path.is_file() {
            let hint = "ONNX Runtime runs exported models: write one with the format `onnx`, or omit the runtime `onnxruntime`";
            return Err(Error::run(path.display(), "no such file", hint));
        }
        let file = files::File::open(path).map_err(Error::io("open", path))?;
        let skeleton = Skeleton::read(path, &file)?;
        let model = skeleton.decode(path)?;
        let session = Session::open_as(path, loading(&model, file.length(), path, options)?)?;
        Ok(session.checked_by(size_check(&model)))
    }

    /// Loads a model from memory. `path` names it in errors, and its folder contains external data.
    pub fn from_model(model: &ModelProto, path: &Path, options: Options) -> Result<Session> {
        let bytes = model.encode_to_vec();
        let session = Session::from_bytes_as(&bytes, path, loading(model, bytes.len() as u64, path, options)?)?;
        Ok(session.checked_by(size_check(model)))
    }
}

/// Checks the sizes of values before each run, for which the shapes of large initializers are enough.
fn size_check(model: &ModelProto) -> SizeCheck {
    let initializer = |tensor: &TensorProto| {
        let TensorProto { name, data_type, dims, .. } = tensor;
        let is_large = tensor.encoded_len() as u64 >= MIN_RUN;
        if is_large { TensorProto { name: name.clone(), data_type: *data_type, dims: dims.clone(), ..TensorProto::default() } } else { tensor.clone() }
    };
    let graph = model.graph.as_ref().map(|graph| GraphProto {
        node: graph.node.clone(),
        input: graph.input.clone(),
        initializer: graph.initializer.iter().map(initializer).collect(),
        ..GraphProto::default()
    });
    let shapes = ModelProto { graph, ..ModelProto::default() };
    SizeCheck::new(Box::new(move |inputs, limit| check_run(&shapes, inputs, limit)))
}

/// How a model of this size, whose weights may be missing, can be loaded within the limits. Fails if that
/// would take more memory than the limit.
fn loading(model: &ModelProto, bytes: u64, path: &Path, options: Options) -> Result<Loading> {
    let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
    let mut data_files = DataFiles::new(path);
    tensors.filter_map(|tensor| ExternalData::parse(tensor).ok()?).for_each(|data| drop(data_files.open(data.location)));
    let external = data_files.paths().iter().filter_map(|path| files::length(path).ok()).fold(0, u64::saturating_add);
    let bytes = bytes.saturating_add(external);
    let limits = options.limits.unwrap_or_else(|| Limits::for_size(Duration::MAX, bytes));
    let refused = |reason: String| Error::run(path.display(), reason, "");
    inlining::check_functions(model).map_err(refused)?;
    let folds = constant_sizes::may_fold(model, limits.memory).map_err(refused)?;
    Ok(Loading { options: Options { limits: Some(limits), ..options }, folds, bytes, branches: depends_on_values(model) })
}

#[cfg(test)]
mod tests {
    use super::super::proto::{
        DataType, Dimension, DimensionProto, FunctionProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
    };
    use super::*;

    fn node(op: &str, domain: &str, inputs: &[&str], output: &str) -> NodeProto {
        let input = inputs.iter().map(|name| (*name).to_owned()).collect();
        NodeProto { op_type: Some(op.into()), domain: Some(domain.into()), input, output: vec![output.into()], ..NodeProto::default() }
    }

    /// A model that computes `y` from a vector `x` of one element.
    fn model(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>, functions: Vec<FunctionProto>) -> ModelProto {
        let port = |name: &str| {
            let shape = Some(TensorShapeProto { dim: vec![DimensionProto { value: Some(Dimension::DimParam("n".into())), denotation: None }] });
            let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape });
            ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, ..TypeProto::default() }), ..ValueInfoProto::default() }
        };
        let (input, output) = (vec![port("x")], vec![port("y")]);
        let graph = GraphProto { name: Some("one".into()), node: nodes, initializer, input, output, ..GraphProto::default() };
        let opset_import = [("", 17), ("f", 1)].map(|(domain, version)| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) });
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import: opset_import.to_vec(), functions, ..ModelProto::default() }
    }

    #[test]
    fn values_and_functions_that_are_too_large_are_refused_before_they_are_computed() {
        if !compress_testing::available("ONNX Runtime", crate::runtime::library()) {
            return;
        }
        let path = Path::new("one.onnx");
        let to = TensorProto {
            name: Some("to".into()),
            data_type: Some(DataType::Int64 as i32),
            dims: vec![1],
            int64_data: vec![1 << 30],
            ..TensorProto::default()
        };
        let large = model(vec![node("Expand", "", &["x", "to"], "y")], vec![to], vec![]);
        let limits = Limits { time: Duration::from_secs(600), memory: 1 << 30 };
        let mut session = Session::from_model(&large, path, Options::default()).unwrap().with_limits(limits);
        let x = candle_core::Tensor::new(&[1f32], &candle_core::Device::Cpu).unwrap();
        let error = session.run(&[("x".to_owned(), x)].into()).unwrap_err();
        assert!(matches!(error, Error::Run { .. }) && error.to_string().contains("node `y` (Expand) creates 1073741824 elements"), "{error}");
        let function = |number: usize| {
            let inner = |input: &str, output: &str| match number {
                0 => node("Relu", "", &[input], output),
                _ => node(&format!("f{}", number - 1), "f", &[input], output),
            };
            let opset_import = large.opset_import.clone();
            let node = vec![inner("a", "b"), inner("b", "c")];
            let (input, output) = (vec!["a".to_owned()], vec!["c".to_owned()]);
            FunctionProto { name: Some(format!("f{number}")), domain: Some("f".into()), input, output, node, opset_import, ..FunctionProto::default() }
        };
        let nested = |last: usize| model(vec![node(&format!("f{last}"), "f", &["x"], "y")], vec![], (0..=last).map(function).collect());
        assert!(Session::from_model(&nested(3), path, Options::default()).is_ok());
        let error = Session::from_model(&nested(27), path, Options::default()).unwrap_err().to_string();
        assert!(error.contains("calls of `f27`"), "{error}");
    }
}
