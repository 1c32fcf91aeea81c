//! Functions and sparse initializers of files.

use compress::Model;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, FunctionProto, ModelProto, NodeProto, OperatorSetIdProto, SparseTensorProto, TensorProto};
use prost::Message;

use crate::common::nodes::{close, executed, floats, given, in_runtime, ints, model, node, sample};

fn call(name: &str, inputs: &[&str], output: &str, attributes: Vec<AttributeProto>) -> NodeProto {
    NodeProto { domain: Some("local".into()), ..node(name, inputs, output, attributes) }
}

/// An attribute of a node in a function that has the value of an attribute of the call.
fn reference(name: &str, of_call: &str) -> AttributeProto {
    AttributeProto { f: None, ref_attr_name: Some(of_call.into()), ..AttributeProto::float(name, 0.0) }
}

fn function(name: &str, node: Vec<NodeProto>) -> FunctionProto {
    let import = |domain: Option<&str>, version| OperatorSetIdProto { domain: domain.map(str::to_owned), version: Some(version) };
    FunctionProto {
        name: Some(name.into()),
        domain: Some("local".into()),
        input: vec!["a".into(), "w".into()],
        output: vec!["b".into()],
        node,
        opset_import: vec![import(None, 13), import(Some("local"), 1)],
        ..FunctionProto::default()
    }
}

/// A layer with an activation, and a function that calls it and has a default value.
fn functions() -> Vec<FunctionProto> {
    let layer = vec![node("MatMul", &["a", "w"], "t", vec![]), node("LeakyRelu", &["t"], "b", vec![reference("alpha", "slope")])];
    let two = node("Constant", &[], "c", vec![AttributeProto::tensor("value", given("", &[], &[2.0]))]);
    let squared = vec![call("Layer", &["a", "w"], "t", vec![reference("slope", "steep")]), two, node("Pow", &["t", "c"], "b", vec![])];
    vec![
        FunctionProto { attribute: vec!["slope".into()], ..function("Layer", layer) },
        FunctionProto { attribute_proto: vec![AttributeProto::float("steep", 0.25)], ..function("Squared", squared) },
    ]
}

fn with_functions(nodes: Vec<NodeProto>, weights: Vec<TensorProto>, functions: Vec<FunctionProto>) -> ModelProto {
    let mut file = model(13, &[0, 4], nodes, weights);
    file.opset_import.push(OperatorSetIdProto { domain: Some("local".into()), version: Some(1) });
    file.functions = functions;
    file
}

fn compared(what: &str, file: &ModelProto) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{what}: {e}"));
    let inputs = sample(&[0, 4]);
    let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
    if crate::common::onnxruntime::has_onnx_runtime() {
        close(what, &ours, &in_runtime(&path, &inputs));
    }
    graph.nodes().iter().map(|node| if let Op::Opaque(op) = &node.op { op.label.clone() } else { node.op.name().to_owned() }).collect()
}

#[test]
fn functions_are_inlined() {
    let slope = |name: &str, value: f64| vec![AttributeProto::float(name, value)];
    let nodes = vec![
        call("Squared", &["x", "w"], "p", slope("steep", 0.5)),
        call("Squared", &["p", "w"], "q", vec![]),
        call("Layer", &["q", "w"], "r", slope("slope", 0.1)),
        node("Add", &["p", "r"], "y", vec![]),
    ];
    let found = compared("functions", &with_functions(nodes, vec![floats("w", &[4, 4])], functions()));
    let count = |op: &str| found.iter().filter(|name| *name == op).count();
    assert_eq!(["MatMul", "LeakyRelu", "Power", "Add"].map(count), [3, 3, 2, 1], "{found:?}");
    assert_eq!(found.len(), 9, "{found:?}");
}

/// ONNX Runtime computes functions with the opset of the graph. That of the function must not have another
/// meaning: before opset 13, a softmax normalized over all axes from the second one on.
#[test]
fn functions_of_another_opset_are_inlined_or_refused_by_name() {
    let file = |opset: i64, axis: Vec<AttributeProto>| {
        let mut part = function("Part", vec![node("Softmax", &["a"], "t", axis), node("Mul", &["t", "w"], "b", vec![])]);
        part.opset_import[0].version = Some(opset);
        let nodes = vec![node("Unsqueeze", &["x", "last"], "r", vec![]), call("Part", &["r", "w"], "s", vec![]), node("Squeeze", &["s", "last"], "y", vec![])];
        with_functions(nodes, vec![floats("w", &[4, 1]), ints("last", &[2])], vec![part])
    };
    for opset in [11, 14] {
        let found = compared("another opset", &file(opset, vec![AttributeProto::int("axis", -1)]));
        assert!(found.iter().any(|op| op == "Softmax"), "{found:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, file(11, vec![]).encode_to_vec()).unwrap();
    let hint = Model::open(&path).unwrap().graph().unwrap_err().hint().unwrap_or_default();
    assert!(hint.contains("(Part) calls a function of the file (node `t` (Softmax) in the function has opset 11, and another meaning in opset 13"), "{hint}");
}

/// Functions are also called in bodies of control flow operators.
#[test]
fn functions_in_bodies_are_inlined() {
    if !crate::common::onnxruntime::has_onnx_runtime() {
        return;
    }
    let branch = |name: &str, slope: f64| {
        let inner = call("Layer", &["x", "w"], "t", vec![AttributeProto::float("slope", slope)]);
        let output = vec![crate::common::nodes::value("t", DataType::Float, None)];
        let graph = compress_onnx::proto::GraphProto { name: Some(name.into()), node: vec![inner], output, ..Default::default() };
        AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(name, 0) }
    };
    let nodes = vec![
        node("ReduceMax", &["x"], "m", vec![AttributeProto::int("keepdims", 0)]),
        node("Greater", &["m", "limit"], "large", vec![]),
        node("If", &["large"], "y", vec![branch("then_branch", 0.5), branch("else_branch", 0.1)]),
    ];
    let found = compared("bodies", &with_functions(nodes, vec![floats("w", &[4, 4]), given("limit", &[], &[0.0])], functions()));
    assert!(found.iter().any(|label| label.contains("(If)")), "{found:?}");
}

#[test]
fn sparse_initializers_are_dense_in_the_executor() {
    let values = |values: &[f32]| given("s", &[values.len() as i64], values);
    let pairs = TensorProto { dims: vec![3, 2], ..ints("", &[0, 1, 2, 0, 3, 3]) };
    for (what, indices) in [("positions", ints("", &[1, 8, 15])), ("pairs", pairs.clone())] {
        let sparse = SparseTensorProto { values: Some(values(&[0.5, -2.0, 3.0])), indices: Some(indices), dims: vec![4, 4] };
        let mut file = model(13, &[0, 4], vec![node("Add", &["x", "row"], "t", vec![]), node("Where", &["mask", "t", "s"], "y", vec![])], vec![]);
        file.graph.as_mut().unwrap().input[0] = crate::common::nodes::value("x", DataType::Float, Some(&[4, 4]));
        let mask = TensorProto { data_type: Some(DataType::Bool as i32), raw_data: Some(vec![1, 0, 1, 0]), ..given("mask", &[4], &[]) };
        file.graph.as_mut().unwrap().initializer.extend([floats("row", &[4]), mask]);
        file.graph.as_mut().unwrap().sparse_initializer.push(sparse);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        let inputs = sample(&[4, 4]);
        let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
        // Elements of the second and the fourth column.
        let sparse: Vec<f32> = (0..16).filter(|at| at % 2 == 1).map(|at| ours.1[at]).collect();
        assert_eq!(sparse, [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0], "{what}");
        if crate::common::onnxruntime::has_onnx_runtime() {
            close(what, &ours, &in_runtime(&path, &inputs));
        }
    }
    let outside = TensorProto { dims: vec![3, 2], ..ints("", &[0, 1, 2, 0, 3, 4]) };
    let sparse = SparseTensorProto { values: Some(values(&[0.5, -2.0, 3.0])), indices: Some(outside), dims: vec![4, 4] };
    let mut file = model(13, &[0, 4], vec![node("Add", &["x", "s"], "y", vec![])], vec![]);
    file.graph.as_mut().unwrap().sparse_initializer.push(sparse);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let error = Model::open(&path).unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("sparse initializer `s`: index 4 is out of range for 4 elements"), "{error}");
    // The number of elements of all sparse initializers is limited.
    let mut file = model(13, &[0, 4], vec![node("Add", &["x", "s"], "y", vec![])], vec![]);
    file.graph.as_mut().unwrap().sparse_initializer = [("s", 4), ("large", 1 << 14)]
        .map(|(name, size)| SparseTensorProto { values: Some(given(name, &[1], &[0.5])), indices: Some(ints("", &[3])), dims: vec![size, size] })
        .to_vec();
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let error = Model::open(&path).unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("sparse initializer `large`: it has 268435456 elements, and all sparse initializers may have 268435456"), "{error}");
}
