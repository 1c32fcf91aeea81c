//! Small ONNX models, run in the built-in executor and in ONNX Runtime.

// Every test binary uses a part of this module.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::Model;
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::evaluation::Subject;
use compress_onnx::proto::AttributeProto;
use compress_onnx::proto::{
    DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use compress_onnx::runtime::{self, Session};

pub fn node(op: &str, inputs: &[&str], output: &str, attributes: Vec<AttributeProto>) -> NodeProto {
    let input = inputs.iter().map(|name| (*name).to_owned()).collect();
    NodeProto { op_type: Some(op.into()), input, output: vec![output.to_owned()], attribute: attributes, ..NodeProto::default() }
}

pub fn numbers(count: usize, seed: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect()
}

pub fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let values = numbers(dims.iter().product::<i64>() as usize, name.len() as f32);
    given(name, dims, &values)
}

pub fn given(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    let raw_data = Some(values.iter().flat_map(|v| v.to_le_bytes()).collect());
    TensorProto { name: Some(name.into()), data_type: Some(DataType::Float as i32), dims: dims.to_vec(), raw_data, ..TensorProto::default() }
}

pub fn ints(name: &str, values: &[i64]) -> TensorProto {
    let raw_data = Some(values.iter().flat_map(|v| v.to_le_bytes()).collect());
    TensorProto { name: Some(name.into()), data_type: Some(DataType::Int64 as i32), dims: vec![values.len() as i64], raw_data, ..TensorProto::default() }
}

pub fn value(name: &str, ty: DataType, dims: Option<&[i64]>) -> ValueInfoProto {
    // Zero represents a dynamic size.
    let size = |size: &i64| if *size == 0 { Dimension::DimParam("n".into()) } else { Dimension::DimValue(*size) };
    let dim = |dims: &[i64]| dims.iter().map(|value| DimensionProto { value: Some(size(value)), denotation: None }).collect();
    let tensor = TensorTypeProto { elem_type: Some(ty as i32), shape: dims.map(|dims| TensorShapeProto { dim: dim(dims) }) };
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type: Some(tensor), ..TypeProto::default() }), ..ValueInfoProto::default() }
}

pub fn model(opset: i64, input: &[i64], nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    let graph = GraphProto {
        name: Some("lifted".into()),
        node: nodes,
        initializer,
        input: vec![value("x", DataType::Float, Some(input))],
        output: vec![value("y", DataType::Float, None)],
        ..GraphProto::default()
    };
    let import = OperatorSetIdProto { domain: None, version: Some(opset) };
    ModelProto { ir_version: Some(8), graph: Some(graph), opset_import: vec![import], ..ModelProto::default() }
}

pub fn sample(shape: &[i64]) -> BTreeMap<String, Tensor> {
    let shape: Vec<usize> = shape.iter().map(|size| if *size == 0 { 2 } else { *size as usize }).collect();
    let values: Vec<f32> = numbers(shape.iter().product(), 0.2);
    [("x".to_owned(), Tensor::from_vec(values, shape, &Device::Cpu).unwrap())].into()
}

pub fn executed(model: Model, inputs: &BTreeMap<String, Tensor>) -> compress::Result<(Vec<usize>, Vec<f32>)> {
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    model.graph()?;
    let mut subject = Subject::from_model(model)?;
    let y = subject.load(&Device::Cpu, &work)?.run(inputs)?.remove("y").unwrap();
    Ok((y.dims().to_vec(), y.flatten_all().unwrap().to_vec1().unwrap()))
}

pub fn in_runtime(path: &Path, inputs: &BTreeMap<String, Tensor>) -> (Vec<usize>, Vec<f32>) {
    let mut session = Session::open(path, runtime::Options::default()).unwrap_or_else(|e| panic!("{e}"));
    session.require_exact_sums().unwrap();
    let y = session.run(inputs).unwrap().remove("y").unwrap();
    (y.dims().to_vec(), y.flatten_all().unwrap().to_vec1().unwrap())
}

pub fn close(what: &str, (dims, ours): &(Vec<usize>, Vec<f32>), (their_dims, theirs): &(Vec<usize>, Vec<f32>)) {
    assert_eq!(dims, their_dims, "{what}");
    let largest = theirs.iter().fold(1f32, |largest, v| largest.max(v.abs()));
    let error = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(error <= 2e-5 * largest, "{what}: {error} for values up to {largest}");
}
