//! Files that compute with 16-bit floats: lifted to graphs of 32 bits, and written with their types.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress::export::Onnx;
use compress::pass::QuantizeStatic;
use compress_engine::data::Data;
use compress_onnx::Precision;
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use compress_onnx::runtime::{Options, Session};
use prost::Message;

use crate::onnx_in::{Place, builder, constant, node, numbers, tensor, value};

const SAMPLES: usize = 24;

fn halves(name: &str, dims: &[i64], factor: f32) -> TensorProto {
    let values = numbers(dims.iter().product::<i64>() as usize);
    let bytes = values.iter().flat_map(|value| half::f16::from_f32(value * factor).to_le_bytes()).collect();
    TensorProto { raw_data: Some(bytes), ..tensor(name, DataType::Float16, dims) }
}

/// A convolutional network of 16-bit floats, with inputs and outputs of this type.
fn network(ty: DataType) -> ModelProto {
    let pads = || vec![AttributeProto::ints("pads", [1, 1, 1, 1])];
    let cast = |from: &str, to: &str, ty: DataType| node("Cast", &[from], &[to], vec![AttributeProto::int("to", ty as i64)]);
    let is_cast = ty != DataType::Float16;
    let (first, last) = if is_cast { ("h", "l") } else { ("x", "y") };
    let mut nodes: Vec<NodeProto> = Vec::new();
    nodes.extend(is_cast.then(|| cast("x", "h", DataType::Float16)));
    nodes.extend([
        node("Conv", &[first, "k1", "b1"], &["c1"], pads()),
        node("Relu", &["c1"], &["r1"], vec![]),
        node("Conv", &["r1", "k2"], &["c2"], pads()),
        constant(halves("six", &[], 6.0)),
        node("Min", &["c2", "six"], &["m"], vec![]),
        node("Conv", &["m", "k2"], &["c3"], pads()),
        node("GlobalAveragePool", &["c3"], &["p"], vec![]),
        node("Reshape", &["p", "flat"], &["f"], vec![]),
        node("MatMul", &["f", "head"], &[last], vec![]),
    ]);
    nodes.extend(is_cast.then(|| cast("l", "y", DataType::Float)));
    let graph = GraphProto {
        name: Some("half".into()),
        node: nodes,
        initializer: vec![
            halves("k1", &[16, 3, 3, 3], 0.3),
            halves("b1", &[16], 0.1),
            halves("k2", &[16, 16, 3, 3], 0.1),
            TensorProto { int64_data: vec![0, -1], ..tensor("flat", DataType::Int64, &[2]) },
            halves("head", &[16, 8], 0.5),
        ],
        input: vec![value("x", ty, &["n", "3", "8", "8"])],
        output: vec![value("y", ty, &["n", "8"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
    ModelProto { ir_version: Some(7), graph: Some(graph), opset_import, ..ModelProto::default() }
}

fn samples() -> Tensor {
    Tensor::from_vec(numbers(SAMPLES * 3 * 64), (SAMPLES, 3, 8, 8), &Device::Cpu).unwrap()
}

fn answers(path: &Path) -> Vec<f32> {
    let outputs = Session::open(path, Options::default()).unwrap().run(&[("x".to_owned(), samples())].into()).unwrap();
    outputs["y"].to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

/// The graph of a file computes with 32 bits what ONNX Runtime computes with 16 bits.
#[test]
fn the_graph_of_a_file_computes_with_32_bits() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    for ty in [DataType::Float16, DataType::Float] {
        let place = Place::new(&network(ty));
        let model = place.open();
        let graph = model.graph().unwrap();
        assert!(!graph.to_string().contains("Opaque"), "{graph}");
        let outputs = crate::common::outputs(&model, &[("x".to_owned(), samples())].into());
        let (ours, theirs) = (outputs["y"].flatten_all().unwrap().to_vec1::<f32>().unwrap(), answers(&place.input()));
        let largest = theirs.iter().fold(0f32, |most, value| most.max(value.abs()));
        let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(largest > 0.0 && difference <= 5e-3 * largest, "{ty:?}: {difference} of {largest}");
    }
}

/// Integer layers read quantized values directly: runtimes do not fuse them across casts. All other nodes and
/// the inputs and outputs keep their types.
#[test]
fn static_int8_keeps_the_types_of_the_file() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    for ty in [DataType::Float16, DataType::Float] {
        let place = Place::new(&network(ty));
        let data = place.path("samples.safetensors");
        candle_core::safetensors::save(&[("x".to_owned(), samples())].into(), &data).unwrap();
        builder().pass(QuantizeStatic::default()).calibration(Data::at(&data)).build().unwrap().run(place.open(), place.path("int8.onnx")).unwrap();
        let written = place.written("int8.onnx").graph.unwrap();
        for port in [&written.input[0], &written.output[0]] {
            assert_eq!(port.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap().elem_type(), ty, "{port:?}");
        }
        // `k2`, which two convolutions share, stays in floats.
        let ty_of = |name: &str| written.initializer.iter().find(|tensor| tensor.name() == name).unwrap().data_type();
        assert_eq!(["k1", "k2", "head"].map(ty_of), [DataType::Int8, DataType::Float16, DataType::Int8]);
        let producer = |name: &str| written.node.iter().find(|node| node.output.iter().any(|output| output == name)).map(NodeProto::op_type);
        let readers_of = |name: &str| -> BTreeSet<&str> {
            written.node.iter().filter(|node| node.input.iter().any(|input| input == name)).map(NodeProto::op_type).collect()
        };
        let layers: Vec<&NodeProto> =
            written.node.iter().filter(|node| node.input.get(1).is_some_and(|weight| producer(weight) == Some("DequantizeLinear"))).collect();
        assert_eq!(
            layers.iter().map(|layer| (layer.op_type(), producer(&layer.input[0]))).collect::<Vec<_>>(),
            [("Conv", Some("DequantizeLinear")), ("MatMul", Some("DequantizeLinear"))]
        );
        assert_eq!(readers_of(&layers[0].output[0]), ["Relu"].into());
        let relu = written.node.iter().find(|node| node.op_type() == "Relu").unwrap();
        assert_eq!(readers_of(&relu.output[0]), ["QuantizeLinear"].into());
        let agreement = cosine(&answers(&place.input()), &answers(&place.path("int8.onnx")));
        assert!(agreement > 0.995, "{ty:?}: {agreement}");
    }
}

/// Whether a value is computed from the input of a graph without quantization.
fn is_unquantized(graph: &GraphProto, name: &str) -> bool {
    let is_input = graph.input.iter().any(|input| input.name() == name);
    let mut producers = graph.node.iter().filter(|node| node.op_type() != "DequantizeLinear" && node.output.iter().any(|output| output == name));
    is_input || producers.any(|node| node.input.iter().any(|input| is_unquantized(graph, input)))
}

/// In an export with 16-bit floats, values are quantized after the same operators as in one with 32 bits.
/// Only values from layers in floats, which compute with 16 bits, are cast before.
#[test]
fn exports_have_the_same_integer_layers_in_both_precisions() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/resnet-basic");
    let folder = tempfile::tempdir().unwrap();
    let tensors = candle_core::safetensors::load(golden.join("golden.safetensors"), &Device::Cpu).unwrap();
    let inputs = tensors.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix("in/")?.to_owned(), tensor))).collect();
    let data = folder.path().join("samples.safetensors");
    candle_core::safetensors::save(&inputs, &data).unwrap();
    let [single, half] = [Precision::Float32, Precision::Float16].map(|precision| {
        let export = Onnx { precision, ..Onnx::default() };
        let pipeline = builder().pass(QuantizeStatic::default()).calibration(Data::at(&data)).export(export).build().unwrap();
        let out = folder.path().join(format!("{precision:?}"));
        pipeline.run(Model::open(&golden).unwrap(), &out).unwrap();
        let graph = ModelProto::decode(std::fs::read(out.join("model.onnx")).unwrap().as_slice()).unwrap().graph.unwrap();
        let producer = |name: &str| graph.node.iter().find(|node| node.output.iter().any(|output| output == name)).unwrap();
        let operator = |quantizer: &NodeProto| {
            let (mut node, unquantized) = (producer(&quantizer.input[0]), is_unquantized(&graph, &quantizer.input[0]));
            let is_cast = node.op_type() == "Cast";
            assert_eq!(is_cast, precision == Precision::Float16 && unquantized, "{quantizer:?} reads {node:?}");
            if is_cast {
                node = producer(&node.input[0]);
            }
            (node.op_type().to_owned(), unquantized)
        };
        let mut quantized: Vec<(String, bool)> = graph.node.iter().filter(|node| node.op_type() == "QuantizeLinear").map(operator).collect();
        quantized.sort();
        quantized
    });
    let count = |unquantized: bool| single.iter().filter(|(op, found)| op == "Relu" && *found == unquantized).count();
    assert!(count(false) > 3 && count(true) > 0, "{single:?}");
    assert_eq!(single, half);
}
