//! Operators of ONNX files as typed ops: each row of the table, run in the built-in executor and in ONNX
//! Runtime.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::onnxruntime;
use compress::pass::{PruneStructured, Step};
use compress::{Model, Pipeline};
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use prost::Message;

mod attention;
mod exported;
mod functions;
mod interpreter;
mod masked_scores;
mod masks;
mod patterns;
mod rotary;

use crate::common::nodes::{close, executed, floats, given, in_runtime, ints, model, node, sample, value};

/// Name, opset, shape of the input, nodes, initializers.
type Case = (&'static str, i64, Vec<i64>, Vec<NodeProto>, Vec<TensorProto>);

/// As many integers as an input specifies, all of one value.
fn constant_of(output: &str, shape: &str, value: i64) -> NodeProto {
    let attribute = AttributeProto { t: Some(ints("", &[value])), i: None, r#type: Some(4), ..AttributeProto::int("value", 0) };
    node("ConstantOfShape", &[shape], output, vec![attribute])
}

fn cases() -> Vec<Case> {
    let (int, list) = (AttributeProto::int, |name: &str, values: &[i64]| AttributeProto::ints(name, values.iter().copied()));
    let float = AttributeProto::float;
    let text = AttributeProto::text;
    let image = vec![0, 3, 9, 8];
    let one = |name: &'static str, opset, input: &[i64], op: NodeProto, initializers: Vec<TensorProto>| (name, opset, input.to_vec(), vec![op], initializers);
    let mut cases = vec![
        one("MatMul", 13, &[0, 5, 4], node("MatMul", &["x", "w"], "y", vec![]), vec![floats("w", &[4, 6])]),
        one("Gemm", 9, &[0, 4], node("Gemm", &["x", "w", "b"], "y", vec![]), vec![floats("w", &[4, 6]), floats("b", &[6])]),
        one("Gemm, transposed", 13, &[0, 4], node("Gemm", &["x", "w"], "y", vec![int("transB", 1)]), vec![floats("w", &[6, 4])]),
        (
            "a bias, and a product of values",
            13,
            vec![0, 4, 4],
            vec![
                node("MatMul", &["x", "w"], "a", vec![]),
                node("Add", &["bias", "a"], "b", vec![]),
                node("Transpose", &["b"], "c", vec![list("perm", &[0, 2, 1])]),
                node("MatMul", &["b", "c"], "d", vec![]),
                node("Softmax", &["d"], "y", vec![]),
            ],
            vec![floats("w", &[4, 4]), floats("bias", &[4])],
        ),
        one(
            "Conv",
            11,
            &image,
            node("Conv", &["x", "w", "b"], "y", vec![list("strides", &[2, 1]), list("pads", &[1, 0, 2, 1]), list("dilations", &[1, 2])]),
            vec![floats("w", &[4, 3, 3, 2]), floats("b", &[4])],
        ),
        one(
            "Conv of a sequence, in groups",
            13,
            &[0, 4, 9],
            node("Conv", &["x", "w"], "y", vec![list("pads", &[1, 2]), int("group", 2)]),
            vec![floats("w", &[6, 2, 3])],
        ),
        one(
            "ConvTranspose",
            11,
            &image,
            node("ConvTranspose", &["x", "w", "b"], "y", vec![list("strides", &[2, 2]), list("pads", &[1, 1, 0, 1]), list("output_padding", &[1, 0])]),
            vec![floats("w", &[3, 2, 3, 3]), floats("b", &[2])],
        ),
        one(
            "BatchNormalization",
            9,
            &image,
            node("BatchNormalization", &["x", "s", "bb", "mmm", "v"], "y", vec![float("epsilon", 1e-3)]),
            vec![floats("s", &[3]), floats("bb", &[3]), floats("mmm", &[3]), given("v", &[3], &[0.5, 1.0, 2.0])],
        ),
        one("LayerNormalization", 17, &[0, 5, 8], node("LayerNormalization", &["x", "s", "bb"], "y", vec![]), vec![floats("s", &[8]), floats("bb", &[8])]),
        one("RMSNormalization", 23, &[0, 5, 8], node("RMSNormalization", &["x", "s"], "y", vec![float("epsilon", 1e-3)]), vec![floats("s", &[8])]),
        one("Swish", 24, &[0, 4], node("Swish", &["x"], "y", vec![]), vec![]),
        one(
            "MaxPool",
            12,
            &image,
            node("MaxPool", &["x"], "y", vec![list("kernel_shape", &[3, 2]), list("strides", &[2, 2]), list("pads", &[0, 0, 1, 1]), int("ceil_mode", 1)]),
            vec![],
        ),
        one(
            "AveragePool",
            11,
            &image,
            node("AveragePool", &["x"], "y", vec![list("kernel_shape", &[3, 2]), list("pads", &[1, 0, 1, 1]), int("count_include_pad", 1)]),
            vec![],
        ),
        (
            "GlobalAveragePool",
            13,
            image.clone(),
            vec![node("GlobalAveragePool", &["x"], "a", vec![]), node("Flatten", &["a"], "b", vec![]), node("Gemm", &["b", "w"], "y", vec![])],
            vec![floats("w", &[3, 2])],
        ),
        one("Clip, attributes", 9, &image, node("Clip", &["x"], "y", vec![float("min", -0.25), float("max", 0.5)]), vec![]),
        one("Clip, inputs", 13, &image, node("Clip", &["x", "", "high"], "y", vec![]), vec![given("high", &[], &[0.3])]),
        one("Softmax, old", 11, &[0, 5, 4], node("Softmax", &["x"], "y", vec![int("axis", 2)]), vec![]),
        one("Softmax, any axis", 13, &[0, 5, 4], node("Softmax", &["x"], "y", vec![int("axis", 1)]), vec![]),
        one("Pow", 13, &[0, 4], node("Pow", &["x", "two"], "y", vec![]), vec![given("two", &[], &[2.0])]),
        one("Pow, an exponent of more axes", 13, &[0, 4], node("Pow", &["x", "two"], "y", vec![]), vec![given("two", &[1, 1, 1], &[2.0])]),
        one("Div by a number", 13, &[0, 4], node("Div", &["x", "by"], "y", vec![]), vec![given("by", &[], &[3.0])]),
        one("Sub from a weight", 13, &[0, 4], node("Sub", &["w", "x"], "y", vec![]), vec![floats("w", &[4])]),
        one("Mul per channel", 13, &image, node("Mul", &["x", "w"], "y", vec![]), vec![floats("w", &[3, 1, 1])]),
        one("Reshape", 13, &[0, 6, 4], node("Reshape", &["x", "shape"], "y", vec![]), vec![ints("shape", &[0, 3, -1])]),
        one("Squeeze, old", 11, &[0, 1, 4], node("Squeeze", &["x"], "y", vec![list("axes", &[1])]), vec![]),
        one("Unsqueeze", 13, &[0, 4], node("Unsqueeze", &["x", "axes"], "y", vec![]), vec![ints("axes", &[-1, 1])]),
        one("Unsqueeze in front", 13, &[0, 4], node("Unsqueeze", &["x", "axes"], "y", vec![]), vec![ints("axes", &[0])]),
        one("Concat", 13, &[0, 4], node("Concat", &["x", "x"], "y", vec![int("axis", -1)]), vec![]),
        one("Pad, old", 9, &image, node("Pad", &["x"], "y", vec![text("mode", "reflect"), list("pads", &[0, 0, 1, 2, 0, 0, 2, 1])]), vec![]),
        one("Pad", 13, &image, node("Pad", &["x", "p", "v"], "y", vec![]), vec![ints("p", &[0, 0, 1, 2, 0, 0, 2, 1]), given("v", &[], &[0.5])]),
        one("Pad without a value", 13, &image, node("Pad", &["x", "p"], "y", vec![]), vec![ints("p", &[0, 0, 1, 2, 0, 0, 2, 1])]),
        one(
            "Resize by scales",
            13,
            &image,
            node(
                "Resize",
                &["x", "", "scales"],
                "y",
                vec![text("mode", "nearest"), text("coordinate_transformation_mode", "asymmetric"), text("nearest_mode", "floor")],
            ),
            vec![given("scales", &[4], &[1.0, 1.0, 2.0, 2.0])],
        ),
        one("Upsample, old", 9, &image, node("Upsample", &["x", "scales"], "y", vec![]), vec![given("scales", &[4], &[1.0, 1.0, 2.0, 3.0])]),
        one(
            "Upsample by interpolation",
            9,
            &image,
            node("Upsample", &["x", "s"], "y", vec![text("mode", "linear")]),
            vec![given("s", &[4], &[1., 1., 2., 2.])],
        ),
        one("Resize, old", 10, &image, node("Resize", &["x", "scales"], "y", vec![]), vec![given("scales", &[4], &[1.0, 1.0, 1.5, 2.0])]),
        (
            "Resize to the sizes of another value",
            13,
            vec![1, 3, 8, 8],
            vec![
                node("MaxPool", &["x"], "small", vec![list("kernel_shape", &[2, 2]), list("strides", &[2, 2])]),
                node("Shape", &["x"], "shape", vec![]),
                node("Slice", &["shape", "from", "to"], "sides", vec![]),
                node("Shape", &["small"], "own", vec![]),
                node("Slice", &["own", "zero", "from"], "head", vec![]),
                node("Concat", &["head", "sides"], "sizes", vec![int("axis", 0)]),
                node("Resize", &["small", "", "", "sizes"], "y", vec![text("mode", "linear"), text("coordinate_transformation_mode", "pytorch_half_pixel")]),
            ],
            vec![ints("from", &[2]), ints("to", &[4]), ints("zero", &[0])],
        ),
        one(
            "Slice",
            13,
            &[0, 6, 4],
            node("Slice", &["x", "from", "to", "axes"], "y", vec![]),
            vec![ints("from", &[-5]), ints("to", &[i64::MAX]), ints("axes", &[1])],
        ),
        one("Slice of an open axis", 9, &[0, 6], node("Slice", &["x"], "y", vec![list("starts", &[0]), list("ends", &[-1]), list("axes", &[0])]), vec![]),
        (
            "Split by sizes, and evenly",
            13,
            vec![0, 7, 4],
            vec![
                NodeProto { output: vec!["a".into(), "b".into()], ..node("Split", &["x", "parts"], "", vec![int("axis", 1)]) },
                NodeProto { output: vec!["c".into(), "d".into()], ..node("Split", &["b"], "", vec![int("axis", -1)]) },
                node("Concat", &["d", "c"], "turned", vec![int("axis", 2)]),
                node("Concat", &["turned", "a"], "y", vec![int("axis", 1)]),
            ],
            vec![ints("parts", &[2, 5])],
        ),
        (
            "Split into a number of parts, of which one is read",
            18,
            vec![0, 7],
            vec![
                NodeProto { output: vec!["a".into(), "b".into(), "c".into()], ..node("Split", &["x"], "", vec![int("axis", 1), int("num_outputs", 3)]) },
                node("Relu", &["c"], "y", vec![]),
            ],
            vec![],
        ),
        (
            "Reshape to what is left of a batch",
            11,
            vec![0, 3, 4],
            vec![
                node("Shape", &["x"], "s", vec![]),
                node("Gather", &["s", "first"], "b", vec![]),
                node("Concat", &["b", "twelve"], "t", vec![int("axis", 0)]),
                node("Cast", &["x"], "c", vec![int("to", 1)]),
                node("Reshape", &["c", "t"], "y", vec![]),
            ],
            vec![ints("first", &[0]), ints("twelve", &[12])],
        ),
        (
            "Reshape to some sizes of the input",
            18,
            vec![0, 3, 4],
            vec![
                node("Shape", &["x"], "b", vec![int("end", 1)]),
                node("Shape", &["x"], "l", vec![int("start", -1)]),
                node("Concat", &["b", "rest", "l"], "t", vec![int("axis", 0)]),
                node("Reshape", &["x", "t"], "y", vec![]),
            ],
            vec![ints("rest", &[-1, 1])],
        ),
        (
            "Expand to a shape that is computed, with -1 for a size of the input",
            15,
            vec![0, 6, 4],
            vec![
                node("Shape", &["x"], "s", vec![int("end", 1)]),
                node("Concat", &["s", "six", "minus"], "wanted", vec![int("axis", 0)]),
                node("Shape", &["wanted"], "rank", vec![]),
                constant_of("ones", "rank", 1),
                node("Mul", &["ones", "minus"], "negative", vec![]),
                node("Equal", &["wanted", "negative"], "kept", vec![]),
                node("Where", &["kept", "ones", "wanted"], "target", vec![]),
                node("Expand", &["x", "target"], "e", vec![]),
                node("Neg", &["e"], "y", vec![]),
            ],
            vec![ints("six", &[6]), ints("minus", &[-1])],
        ),
        (
            "Expand to a shape that is computed, compared with a single number",
            15,
            vec![0, 6, 4],
            vec![
                node("Shape", &["x"], "s", vec![int("end", 1)]),
                node("Concat", &["s", "six", "minus"], "wanted", vec![int("axis", 0)]),
                node("Equal", &["wanted", "minus"], "kept", vec![]),
                node("Where", &["kept", "one", "wanted"], "target", vec![]),
                node("Expand", &["x", "target"], "e", vec![]),
                node("Neg", &["e"], "y", vec![]),
            ],
            vec![ints("six", &[6]), ints("minus", &[-1]), ints("one", &[1])],
        ),
        (
            "Reshape to sizes of which one replaces a single number",
            15,
            vec![0, 24],
            vec![
                node("Shape", &["x"], "s", vec![int("end", 1)]),
                node("Concat", &["s", "six", "minus"], "wanted", vec![int("axis", 0)]),
                node("Equal", &["wanted", "minus"], "replaced", vec![]),
                node("Where", &["replaced", "four", "wanted"], "target", vec![]),
                node("Reshape", &["x", "target"], "y", vec![]),
            ],
            vec![ints("six", &[6]), ints("minus", &[-1]), ints("four", &[4])],
        ),
        (
            "Reshape to a slice of sizes, and a choice between equal ones",
            15,
            vec![0, 6, 4],
            vec![
                node("Shape", &["x"], "s", vec![]),
                node("Slice", &["s", "zero", "one"], "batch", vec![]),
                node("Slice", &["s", "zero", "one", "zero", "one"], "same", vec![]),
                node("Equal", &["batch", "two"], "unknown", vec![]),
                node("Where", &["unknown", "batch", "same"], "chosen", vec![]),
                node("Concat", &["chosen", "rest"], "target", vec![int("axis", 0)]),
                node("Reshape", &["x", "target"], "y", vec![]),
            ],
            vec![ints("zero", &[0]), ints("one", &[1]), ints("two", &[2]), ints("rest", &[-1, 4])],
        ),
        one("ReduceMean, old", 11, &image, node("ReduceMean", &["x"], "y", vec![list("axes", &[2, 3]), int("keepdims", 0)]), vec![]),
        one("ReduceSum", 13, &image, node("ReduceSum", &["x", "axes"], "y", vec![]), vec![ints("axes", &[-1])]),
        one("CumSum", 14, &image, node("CumSum", &["x", "axis"], "y", vec![]), vec![ints("axis", &[-1])]),
        one(
            "CumSum, exclusive and reversed",
            11,
            &image,
            node("CumSum", &["x", "axis"], "y", vec![int("exclusive", 1), int("reverse", 1)]),
            vec![TensorProto { dims: vec![], ..ints("axis", &[1]) }],
        ),
        one("Identity and Dropout", 13, &[0, 4], node("Relu", &["x"], "y", vec![]), vec![]),
        (
            "nodes in any order",
            13,
            vec![0, 4],
            vec![node("Tanh", &["a"], "y", vec![]), node("Identity", &["x"], "same", vec![]), node("Neg", &["same"], "a", vec![])],
            vec![],
        ),
    ];
    for op in ["Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Neg", "Abs", "HardSwish", "Softplus", "LeakyRelu", "Elu", "HardSigmoid"] {
        cases.push(one(op, 14, &[0, 4], node(op, &["x"], "y", vec![]), vec![]));
    }
    cases
}

#[test]
fn expanding_constants_are_rejected_by_name() {
    let shape = |values: &[i64]| ints("shape", values);
    let zeros = || node("ConstantOfShape", &["shape"], "c", vec![]);
    let add = |with: &str| node("Add", &["x", with], "y", vec![]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let cases = [
        ("ConstantOfShape", vec![zeros(), add("c")], vec![shape(&[1 << 20, 1 << 20])]),
        ("Expand", vec![node("Expand", &["one", "shape"], "c", vec![]), add("c")], vec![shape(&[1 << 40, 4]), given("one", &[1], &[1.0])]),
        ("Tile", vec![node("Tile", &["w", "shape"], "c", vec![]), add("c")], vec![shape(&[1 << 30]), floats("w", &[4])]),
        ("Range", vec![node("Range", &["from", "to", "by"], "r", vec![]), node("Cast", &["r"], "c", vec![AttributeProto::int("to", 1)]), add("c")], {
            let number = |name: &str, value: i64| TensorProto { dims: vec![], ..ints(name, &[value]) };
            vec![number("from", 0), number("to", i64::MAX), number("by", 1)]
        }),
        // The sizes of all values in between are known.
        (
            "Concat",
            vec![
                zeros(),
                node("Neg", &["c"], "d", vec![]),
                node("Flatten", &["d"], "e", vec![]),
                node("Concat", &["e", "e"], "f", vec![AttributeProto::int("axis", 0)]),
                add("f"),
            ],
            vec![shape(&[1 << 14, 1 << 14])],
        ),
        (
            "Add",
            vec![zeros(), node("Reshape", &["c", "column"], "d", vec![]), node("Add", &["c", "d"], "e", vec![]), add("e")],
            vec![shape(&[1 << 16]), ints("column", &[-1, 1])],
        ),
    ];
    let doubled = |times: usize| {
        let name = |number: usize| format!("c{number}");
        let twice = |number: usize| node("Concat", &[&name(number), &name(number)], &name(number + 1), vec![AttributeProto::int("axis", 0)]);
        let sum = [node("ReduceSum", &[&name(times)], "sum", vec![]), add("sum")];
        (0..times).map(twice).chain(sum).collect::<Vec<_>>()
    };
    // The minimum possible size of a value limits trials with samples.
    let from_input = [vec![node("Cos", &["x"], "c0", vec![])], doubled(27)].concat();
    let cases = cases.into_iter().chain([("Concat", doubled(20), vec![floats("c0", &[1024])]), ("Concat", from_input, vec![])]);
    for (op, nodes, initializers) in cases {
        std::fs::write(&path, model(13, &[0, 4], nodes, initializers).encode_to_vec()).unwrap();
        let opened = Model::open(&path).unwrap();
        let error = opened.graph().unwrap_err().to_string();
        assert!(error.contains(&format!("({op}) creates")) && error.contains("elements, which exceeds the limit of 268435456"), "{op}: {error}");
    }
}

#[test]
fn values_of_samples_are_not_limited() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (input, op) in [([64, 64, 32, 32], "MatMul"), ([1 << 10, 1 << 10, 16, 32], "Add")] {
        std::fs::write(&path, model(13, &input, vec![node(op, &["x", "x"], "y", vec![])], vec![]).encode_to_vec()).unwrap();
        let graph = Model::open(&path).unwrap().graph().unwrap_or_else(|e| panic!("{op}: {e}"));
        assert_eq!(graph.nodes().len(), 1, "{graph}");
    }
}

#[test]
fn every_operator_of_the_table_matches_onnx_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (what, opset, input, nodes, initializers) in cases() {
        std::fs::write(&path, model(opset, &input, nodes, initializers).encode_to_vec()).unwrap();
        let inputs = sample(&input);
        let opened = Model::open(&path).unwrap();
        let graph = opened.graph().unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(graph.nodes().iter().all(|node| !matches!(node.op, Op::Opaque(_))), "{what}: {graph}");
        let ours = executed(opened, &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(ours.1.iter().any(|value| *value != 0.0), "{what}");
        if onnxruntime::has_onnx_runtime() {
            close(what, &ours, &in_runtime(&path, &inputs));
        }
    }
}

#[test]
fn only_positive_scales_quantize() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (scale, is_typed) in [(0.1, true), (0.0, false), (-0.1, false), (f32::NAN, false), (f32::INFINITY, false)] {
        let zero = TensorProto { name: Some("z".into()), data_type: Some(DataType::Uint8 as i32), raw_data: Some(vec![3]), ..TensorProto::default() };
        let nodes = vec![
            node("QuantizeLinear", &["x", "s", "z"], "q", vec![]),
            node("DequantizeLinear", &["q", "s", "z"], "d", vec![]),
            node("Relu", &["d"], "y", vec![]),
        ];
        std::fs::write(&path, model(13, &[0, 4], nodes, vec![given("s", &[], &[scale]), zero]).encode_to_vec()).unwrap();
        let graph = Model::open(&path).unwrap().graph();
        let found = graph.is_ok_and(|graph| graph.nodes().iter().any(|node| matches!(node.op, Op::FakeQuantize(_))));
        assert_eq!(found, is_typed, "{scale}");
    }
}

#[test]
fn added_vectors_are_fused_as_biases() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let (_, opset, input, nodes, initializers) = cases().swap_remove(3);
    std::fs::write(&path, model(opset, &input, nodes, initializers).encode_to_vec()).unwrap();
    let graph = Model::open(&path).unwrap().graph().unwrap();
    let linear = graph.nodes().iter().find(|node| matches!(node.op, Op::Linear(_))).unwrap();
    assert_eq!((linear.inputs.len(), graph.value(linear.output).name.as_str()), (3, "b"), "{graph}");
    assert!(graph.nodes().iter().all(|node| !matches!(node.op, Op::Add(_))));
}

#[test]
fn unsupported_operators_are_named_and_the_model_still_opens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let refused = |nodes: Vec<NodeProto>| {
        std::fs::write(&path, model(13, &[0, 3, 9, 8], nodes, vec![]).encode_to_vec()).unwrap();
        Model::open(&path).unwrap().graph().unwrap_err().to_string()
    };
    let error = refused(vec![node("Cos", &["x"], "a", vec![]), node("Relu", &["a"], "b", vec![]), node("NonZero", &["b"], "y", vec![])]);
    assert!(error.contains("does not support") && error.contains("node `y` (NonZero): the operator is not supported"), "{error}");
    assert!(error.contains("(output `y`: ") && error.contains("; node `a` (Cos): the operator is not supported"), "{error}");
    let mut double = model(13, &[0, 4], vec![node("Relu", &["x"], "y", vec![])], vec![]);
    double.graph.as_mut().unwrap().input[0] = value("x", DataType::Double, Some(&[1, 4]));
    std::fs::write(&path, double.encode_to_vec()).unwrap();
    assert!(Model::open(&path).unwrap().graph().unwrap_err().to_string().contains("input `x` is Double"));
}

#[test]
fn a_broadcast_from_another_axis_than_the_last_is_not_an_addition() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (axis, bias, is_typed) in [(1, 3, false), (0, 2, false), (2, 4, true), (-1, 4, true)] {
        let attributes = vec![AttributeProto::int("broadcast", 1), AttributeProto::int("axis", axis)];
        let nodes = vec![node("Add", &["x", "b"], "y", attributes)];
        std::fs::write(&path, model(6, &[2, 3, 4], nodes, vec![floats("b", &[bias])]).encode_to_vec()).unwrap();
        match Model::open(&path).unwrap().graph() {
            Ok(graph) => assert_eq!(graph.nodes().iter().any(|node| matches!(node.op, Op::Add(_))), is_typed, "{axis}: {graph}"),
            Err(e) => assert!(!is_typed && e.to_string().contains("broadcasts its second input from axis"), "{axis}: {e}"),
        }
    }
}

#[test]
fn a_lifted_model_loses_channels_and_is_written_under_its_names() {
    let nodes = vec![
        node("Conv", &["x", "w", "b"], "a", vec![AttributeProto::ints("pads", [1; 4])]),
        node("Relu", &["a"], "r", vec![]),
        // A scalar has no axes.
        node("Mul", &["half", "r"], "h", vec![]),
        node("Conv", &["h", "v"], "c", vec![]),
        node("GlobalAveragePool", &["c"], "g", vec![]),
        node("Flatten", &["g"], "f", vec![]),
        node("Gemm", &["f", "head"], "y", vec![]),
    ];
    let half = TensorProto { dims: vec![], ..given("half", &[], &[0.5]) };
    let weights = vec![floats("w", &[8, 3, 3, 3]), floats("b", &[8]), half, floats("v", &[8, 8, 3, 3]), floats("head", &[8, 4])];
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"));
    let mut whole = model(13, &[0, 3, 9, 8], nodes, weights);
    whole.metadata_props.push(compress_onnx::proto::StringStringEntryProto::new("character", "abc"));
    std::fs::write(&path, whole.encode_to_vec()).unwrap();
    let options = r#"{ "amount": 0.5, "dims": ["channels"], "round_to": 2 }"#;
    let step: Step = serde_json::from_str::<PruneStructured>(options).unwrap().into();
    let report = Pipeline::builder().pass(step).threads(2).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap();
    assert!(report.size.after.parameters < report.size.before.parameters * 2 / 3, "{:?}", report.size);
    let compute = report.compute.as_ref().expect("every node is typed");
    assert!(compute.after.macs < compute.before.macs * 2 / 3, "{compute:?}");
    let budget = compress::report::Budgets { max_macs_ratio: Some(0.7), ..Default::default() };
    assert!(budget.check(&report).unwrap().iter().all(|finding| finding.ok));
    let written = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap();
    assert!(written.metadata_props.iter().any(|entry| entry.value() == "abc"));
    let graph = written.graph.unwrap();
    assert_eq!((graph.input[0].name(), graph.output[0].name()), ("x", "y"));
    assert!(graph.node.iter().any(|node| node.output == ["r"]));
    if onnxruntime::has_onnx_runtime() {
        let inputs = sample(&[0, 3, 9, 8]);
        // The written file is lifted again.
        close("pruned", &executed(Model::open(&out).unwrap(), &inputs).unwrap(), &in_runtime(&out, &inputs));
        assert!(report.fidelity.is_some(), "{:?}", report.notes);
    }
}
