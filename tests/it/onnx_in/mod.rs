//! ONNX files as models: opened, written with no changes or changed weights, quantized on all kinds of
//! samples, and rejected if inconsistent.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bodies;
mod broken;
mod half;
mod hub;
mod layers;
mod mutations;
mod quantized;
mod samples;
mod weights;

use crate::common::onnxruntime;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::Model;
use compress::Pipeline;
use compress_onnx::proto::{
    AttributeProto, DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use compress_onnx::runtime::{self, Session};
use prost::Message;
use tempfile::TempDir;

fn node(op: &str, inputs: &[&str], outputs: &[&str], attributes: Vec<AttributeProto>) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    NodeProto { op_type: Some(op.into()), input: names(inputs), output: names(outputs), attribute: attributes, ..NodeProto::default() }
}

fn tensor(name: &str, ty: DataType, dims: &[i64]) -> TensorProto {
    TensorProto { name: Some(name.into()), data_type: Some(ty as i32), dims: dims.to_vec(), ..TensorProto::default() }
}

/// Non-zero numbers between -1 and 1.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37 + 0.1).sin()).collect()
}

/// A transposed matrix.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

fn raw(name: &str, dims: &[i64]) -> TensorProto {
    let bytes = numbers(dims.iter().product::<i64>() as usize).iter().flat_map(|v| v.to_le_bytes()).collect();
    TensorProto { raw_data: Some(bytes), ..tensor(name, DataType::Float, dims) }
}

fn value(name: &str, ty: DataType, dims: &[&str]) -> ValueInfoProto {
    let size = |text: &&str| text.parse().map_or_else(|_| Dimension::DimParam((*text).to_owned()), Dimension::DimValue);
    let dim = dims.iter().map(|text| DimensionProto { value: Some(size(text)), denotation: None }).collect();
    let tensor_type = TensorTypeProto { elem_type: Some(ty as i32), shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type: Some(tensor_type), ..TypeProto::default() }), ..ValueInfoProto::default() }
}

fn constant(tensor: TensorProto) -> NodeProto {
    let output = tensor.name.clone().unwrap();
    node("Constant", &[], &[&output], vec![AttributeProto { t: Some(tensor), i: None, r#type: Some(4), ..AttributeProto::int("value", 0) }])
}

fn body(name: &str, attribute: &str, nodes: Vec<NodeProto>, output: &str) -> AttributeProto {
    let graph = GraphProto { name: Some(name.into()), node: nodes, output: vec![value(output, DataType::Float, &["n", "40"])], ..GraphProto::default() };
    AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(attribute, 0) }
}

/// A product, a sum, a lookup of axes, and an `If` with two graph attributes that have weights; with
/// weights in every kind of location.
fn model() -> ModelProto {
    let fill = TensorProto { float_data: numbers(40), ..tensor("bias", DataType::Float, &[40]) };
    let branches = vec![
        body("then", "then_branch", vec![constant(raw("scale", &[40])), node("Mul", &["sum", "scale"], &["scaled"], vec![])], "scaled"),
        body("else", "else_branch", vec![constant(raw("shift", &[40])), node("Add", &["sum", "shift"], &["shifted"], vec![])], "shifted"),
    ];
    let long: Vec<i64> = (0..600).map(|i| i * i - 5).collect();
    let graph = GraphProto {
        name: Some("small".into()),
        node: vec![
            node("MatMul", &["x", "onnx::MatMul_7"], &["product"], vec![]),
            node("Add", &["product", "bias"], &["sum"], vec![]),
            node("If", &["positive"], &["chosen"], branches),
            constant(raw("table", &[30, 40])),
            node("Gather", &["table", "row"], &["rows"], vec![AttributeProto::int("axis", 0)]),
            node("Add", &["chosen", "rows"], &["added"], vec![]),
            node("Identity", &["long"], &["kept"], vec![]),
            node("Relu", &["added"], &["y"], vec![]),
        ],
        initializer: vec![
            raw("onnx::MatMul_7", &[20, 40]),
            fill,
            TensorProto { int64_data: long, ..tensor("long", DataType::Int64, &[600]) },
            TensorProto { int64_data: vec![3], ..tensor("row", DataType::Int64, &[1]) },
        ],
        input: vec![value("x", DataType::Float, &["n", "20"]), value("positive", DataType::Bool, &[])],
        output: vec![value("y", DataType::Float, &["n", "40"]), value("kept", DataType::Int64, &["600"])],
        metadata_props: vec![StringStringEntryProto::new("of", "the graph")],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: Some(8),
        producer_name: Some("somebody".into()),
        domain: Some("test".into()),
        model_version: Some(3),
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(13) }],
        metadata_props: vec![StringStringEntryProto::new("character", "abc")],
        ..ModelProto::default()
    }
}

/// A folder with a model file in it.
struct Place(TempDir);

impl Place {
    fn new(model: &ModelProto) -> Place {
        Place::of(&model.encode_to_vec())
    }

    fn of(bytes: &[u8]) -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(place.input(), bytes).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn input(&self) -> PathBuf {
        self.path("in.onnx")
    }

    fn open(&self) -> Model {
        Model::open(self.input()).unwrap()
    }

    /// The written file.
    fn written(&self, name: &str) -> ModelProto {
        ModelProto::decode(std::fs::read(self.path(name)).unwrap().as_slice()).unwrap()
    }
}

fn builder() -> compress::pipeline::Builder {
    Pipeline::builder().threads(2)
}

/// Outputs of ONNX Runtime, if it is available.
fn answers(path: &Path) -> Option<BTreeMap<String, Vec<f32>>> {
    onnxruntime::has_onnx_runtime().then_some(())?;
    let mut session = Session::open(path, runtime::Options::default()).unwrap();
    let x = Tensor::from_vec(numbers(60), (3, 20), &Device::Cpu).unwrap();
    let inputs = [("x".to_owned(), x), ("positive".to_owned(), Tensor::new(1i64, &Device::Cpu).unwrap())].into();
    let float = |tensor: Tensor| tensor.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    Some(session.run(&inputs).unwrap().into_iter().map(|(name, tensor)| (name, float(tensor))).collect())
}
