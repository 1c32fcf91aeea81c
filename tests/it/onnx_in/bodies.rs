//! Static int8 in bodies of control flow operators.

use candle_core::{DType, Device, Tensor};
use compress::pass::QuantizeStatic;
use compress_engine::data::Data;
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto};
use compress_onnx::runtime::{Options, Session};

use crate::onnx_in::{Place, builder, node, numbers, raw, tensor, value};

const ROWS: usize = 32;

fn named(name: &str, node: NodeProto) -> NodeProto {
    NodeProto { name: Some(name.into()), ..node }
}

fn body(attribute: &str, nodes: Vec<NodeProto>, input: Vec<ValueInfoProto>, output: Vec<ValueInfoProto>) -> AttributeProto {
    let graph = GraphProto { name: Some(attribute.into()), node: nodes, input, output, ..GraphProto::default() };
    AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(attribute, 0) }
}

fn file(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>) -> ModelProto {
    let (input, output) = (vec![value("x", DataType::Float, &["n", "20"])], vec![value("y", DataType::Float, &["n", "8"])]);
    let graph = GraphProto { name: Some("g".into()), node: nodes, initializer, input, output, ..GraphProto::default() };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(13) }];
    ModelProto { ir_version: Some(7), graph: Some(graph), opset_import, ..ModelProto::default() }
}

/// A product before an `If`, whose branches have a product each. The second branch runs if the largest input
/// is at least 0.9.
fn branches(weights: [&str; 2]) -> ModelProto {
    let branch = |attribute: &str, weight: &str| {
        let output = format!("{attribute}_out");
        let product = named(&format!("{attribute}/MatMul"), node("MatMul", &["a", weight], &[&output], vec![]));
        body(attribute, vec![product], vec![], vec![value(&output, DataType::Float, &["n", "8"])])
    };
    let limit = TensorProto { float_data: vec![0.9], ..tensor("limit", DataType::Float, &[]) };
    let nodes = vec![
        node("MatMul", &["x", "first"], &["a"], vec![]),
        node("ReduceMax", &["x"], &["largest"], vec![AttributeProto::int("keepdims", 0)]),
        node("Less", &["largest", "limit"], &["small"], vec![]),
        node("If", &["small"], &["y"], vec![branch("then_branch", weights[0]), branch("else_branch", weights[1])]),
    ];
    file(nodes, vec![raw("first", &[20, 16]), raw("second", &[16, 8]), raw("third", &[16, 8]), limit])
}

/// Three iterations of a product, a `Gemm` with a transposed weight and a convolution over the rows.
fn iterations() -> ModelProto {
    let columns = |name: &str, values: Vec<i64>| TensorProto { dims: vec![values.len() as i64], int64_data: values, ..tensor(name, DataType::Int64, &[]) };
    let nodes = vec![
        node("Identity", &["go"], &["goes"], vec![]),
        node("MatMul", &["state", "turn"], &["turned"], vec![]),
        node("Gemm", &["turned", "mix", "bias"], &["mixed"], vec![AttributeProto::int("transB", 1)]),
        node("Reshape", &["mixed", "image"], &["pixels"], vec![]),
        node("Conv", &["pixels", "kernel"], &["blurred"], vec![AttributeProto::ints("pads", [1, 1])]),
        node("Reshape", &["blurred", "flat"], &["rows"], vec![]),
        node("Mul", &["rows", "scale"], &["small"], vec![]),
        node("Tanh", &["small"], &["next"], vec![]),
    ];
    let ports = vec![value("i", DataType::Int64, &[]), value("go", DataType::Bool, &[]), value("state", DataType::Float, &["n", "20"])];
    let results = vec![value("goes", DataType::Bool, &[]), value("next", DataType::Float, &["n", "20"])];
    let trips = TensorProto { int64_data: vec![3], ..tensor("trips", DataType::Int64, &[]) };
    // Values grow from one iteration to the next, but do not saturate, which would amplify rounding.
    let scale = TensorProto { float_data: vec![0.05], ..tensor("scale", DataType::Float, &[]) };
    let nodes =
        vec![node("Loop", &["trips", "", "x"], &["last"], vec![body("body", nodes, ports, results)]), node("MatMul", &["last", "head"], &["y"], vec![])];
    let weights = vec![raw("turn", &[20, 20]), raw("mix", &[20, 20]), raw("bias", &[20]), raw("kernel", &[4, 4, 3]), raw("head", &[20, 8]), trips, scale];
    file(nodes, [weights, vec![columns("image", vec![-1, 4, 5]), columns("flat", vec![-1, 20])]].concat())
}

fn samples() -> Tensor {
    Tensor::from_vec(numbers(ROWS * 20), (ROWS, 20), &Device::Cpu).unwrap()
}

fn quantized(place: &Place, pass: QuantizeStatic) -> compress::Result<compress::Report> {
    quantized_in_batches(place, pass, None)
}

fn quantized_in_batches(place: &Place, pass: QuantizeStatic, batch_size: Option<usize>) -> compress::Result<compress::Report> {
    let path = place.path("samples.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), samples())].into(), &path).unwrap();
    let data = Data { batch_size, ..Data::at(&path) };
    builder().pass(pass).calibration(data).build()?.run(place.open(), place.path("int8.onnx"))
}

/// The cosine of the outputs of both files in ONNX Runtime for all samples at once.
fn agreement(place: &Place) -> f64 {
    agreement_in_batches(place, ROWS)
}

fn agreement_in_batches(place: &Place, size: usize) -> f64 {
    let [before, after] = [place.input(), place.path("int8.onnx")].map(|path| {
        let mut session = Session::open(&path, Options::default()).unwrap();
        session.require_exact_sums().unwrap();
        let batches = (0..ROWS).step_by(size).map(|from| samples().narrow(0, from, size).unwrap());
        let outputs: Vec<Tensor> = batches.map(|batch| session.run(&[("x".to_owned(), batch)].into()).unwrap()["y"].clone()).collect();
        Tensor::cat(&outputs, 0).unwrap().to_dtype(DType::F64).unwrap()
    });
    let product = |a: &Tensor, b: &Tensor| (a * b).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    product(&before, &after) / (product(&before, &before) * product(&after, &after)).sqrt()
}

/// The operators of a body, and the types of these weights.
fn written(place: &Place, attribute: &str, weights: &[&str]) -> (Vec<String>, Vec<DataType>) {
    let graph = place.written("int8.onnx").graph.unwrap();
    let bodies = graph.node.iter().flat_map(|node| &node.attribute).filter(|found| found.name() == attribute);
    let ops = bodies.flat_map(|found| &found.g.as_ref().unwrap().node).map(|node| node.op_type().to_owned()).collect();
    let ty = |name: &&str| graph.initializer.iter().find(|tensor| tensor.name() == *name).unwrap().data_type();
    (ops, weights.iter().map(ty).collect())
}

#[test]
fn branches_that_run_are_quantized() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let place = Place::new(&branches(["second", "third"]));
    let report = quantized_in_batches(&place, QuantizeStatic::default(), Some(ROWS)).unwrap();
    let note = "1 layer in bodies of control flow operators left in floats (the first: `second`, because no calibration sample reaches it in batches of 32";
    assert!(report.notes.iter().any(|found| found.starts_with(note)), "{:?}", report.notes);
    let (ops, types) = written(&place, "else_branch", &["first", "second", "third"]);
    assert_eq!(ops, ["QuantizeLinear", "DequantizeLinear", "Reshape", "DequantizeLinear", "MatMul"]);
    assert_eq!(types, [DataType::Int8, DataType::Float, DataType::Int8]);
    assert_eq!(written(&place, "then_branch", &[]).0, ["MatMul"]);
    assert!(agreement(&place) > 0.999, "{}", agreement(&place));
}

/// The largest input of some samples is below the limit, but not that of the batch.
#[test]
fn samples_select_their_branches_one_by_one() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let mut model = branches(["second", "third"]);
    let weights = &mut model.graph.as_mut().unwrap().initializer;
    weights.iter_mut().filter(|tensor| tensor.name() == "limit").for_each(|limit| limit.float_data = vec![0.995]);
    let place = Place::new(&model);
    let report = quantized(&place, QuantizeStatic::default()).unwrap();
    assert!(!report.notes.iter().any(|found| found.contains("control flow operators left in floats")), "{:?}", report.notes);
    assert_eq!(written(&place, "then_branch", &["second", "third"]).1, [DataType::Int8; 2]);
    assert!(agreement_in_batches(&place, 1) > 0.999, "{}", agreement_in_batches(&place, 1));
}

#[test]
fn layers_of_loops_are_quantized() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let place = Place::new(&iterations());
    quantized(&place, QuantizeStatic::default()).unwrap();
    let (ops, types) = written(&place, "body", &["turn", "mix", "kernel", "head", "bias"]);
    assert_eq!(types, [DataType::Int8, DataType::Int8, DataType::Int8, DataType::Int8, DataType::Float]);
    assert_eq!(ops.iter().filter(|op| *op == "QuantizeLinear").count(), 3, "{ops:?}");
    // With only the ranges of the first iteration, it would be 0.988.
    assert!(agreement(&place) > 0.995, "{}", agreement(&place));
}

/// ONNX Runtime converts the integers of a weight for one node only.
#[test]
fn weights_of_several_layers_in_bodies_stay_in_floats() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let place = Place::new(&branches(["third", "third"]));
    let report = quantized(&place, QuantizeStatic::default()).unwrap();
    let note = "1 layer weight left in floats, the first: `third`, because node `then_branch/MatMul` is in a body";
    assert!(report.notes.iter().any(|found| found.starts_with(note)), "{:?}", report.notes);
    let error = quantized(&place, QuantizeStatic { targets: vec!["third".parse().unwrap()], ..QuantizeStatic::default() }).unwrap_err();
    assert!(error.to_string().contains("`third`: cannot be quantized: node `then_branch/MatMul` is in a body"), "{error}");
    assert!(error.hint().unwrap().contains("quantize-dynamic"), "{error:?}");
}

/// The bodies of both branches have an initializer of their own with the same name.
#[test]
fn tensors_without_a_unique_name_are_counted_in_a_note() {
    let branch = |attribute: &str| {
        let output = format!("{attribute}_out");
        let mut body = body(attribute, vec![node("MatMul", &["a", "own"], &[&output], vec![])], vec![], vec![value(&output, DataType::Float, &["n", "16"])]);
        body.g.as_mut().unwrap().initializer = vec![raw("own", &[16, 16])];
        body
    };
    let limit = TensorProto { float_data: vec![0.9], ..tensor("limit", DataType::Float, &[]) };
    let nodes = vec![
        node("MatMul", &["x", "first"], &["a"], vec![]),
        node("ReduceMax", &["x"], &["largest"], vec![AttributeProto::int("keepdims", 0)]),
        node("Less", &["largest", "limit"], &["small"], vec![]),
        node("If", &["small"], &["b"], vec![branch("then_branch"), branch("else_branch")]),
        node("MatMul", &["b", "last"], &["y"], vec![]),
    ];
    let place = Place::new(&file(nodes, vec![raw("first", &[20, 16]), raw("last", &[16, 8]), limit]));
    let report = builder().pass(compress::pass::QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("int8.onnx")).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("2 float tensors with 2.0 kB not processed or counted")), "{:?}", report.notes);
}
