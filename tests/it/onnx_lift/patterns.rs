//! Fusion of ops that exporters decompose: each pattern, and near misses.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use compress::pass::QuantizeStatic;
use compress::{Model, Pipeline};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::Data;
use compress_engine::evaluation::Subject;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto, NodeProto, TensorProto};
use compress_onnx::runtime::{self, Session};
use prost::Message;

use crate::common::nodes::{close, executed, floats, given, in_runtime, model, node, sample, value};

/// Name of the op, and its decomposition by exporters between `a` and `p`, of 8 elements each.
fn patterns() -> Vec<(&'static str, Vec<NodeProto>)> {
    let one = |op: &str, inputs: &[&str], output: &str| node(op, inputs, output, vec![]);
    let mean = |x: &str, y: &str, axis: i64| node("ReduceMean", &[x], y, vec![AttributeProto::ints("axes", [axis])]);
    let clip = |x: &str, y: &str| one("Clip", &[x, "zero", "six"], y);
    let variance = |over: Vec<NodeProto>| {
        let mut nodes = vec![mean("a", "m", -1), one("Sub", &["a", "m"], "d"), one("Pow", &["d", "two"], "q"), mean("q", "v", 1)];
        nodes.extend([one("Add", &["v", "epsilon"], "e"), one("Sqrt", &["e"], "s")]);
        nodes.extend(over);
        nodes
    };
    let square = |over: Vec<NodeProto>| [vec![one("Mul", &["a", "a"], "q"), mean("q", "v", -1), one("Add", &["epsilon", "v"], "e")], over].concat();
    let norm = |over: Vec<NodeProto>| [vec![node("ReduceL2", &["a"], "n", vec![AttributeProto::ints("axes", [-1])])], over].concat();
    let tanh = vec![
        one("Pow", &["a", "three"], "c"),
        one("Mul", &["c", "small"], "d"),
        one("Add", &["a", "d"], "e"),
        one("Mul", &["e", "slope"], "f"),
        one("Tanh", &["f"], "g"),
        one("Add", &["g", "one"], "h"),
        one("Mul", &["a", "h"], "i"),
        one("Mul", &["i", "half"], "p"),
    ];
    vec![
        ("LayerNorm", variance(vec![one("Div", &["d", "s"], "n"), one("Mul", &["n", "gamma"], "g"), one("Add", &["beta", "g"], "p")])),
        ("LayerNorm", variance(vec![one("Reciprocal", &["s"], "r"), one("Mul", &["r", "d"], "n"), one("Mul", &["gamma", "n"], "p")])),
        ("RmsNorm", square(vec![one("Sqrt", &["e"], "s"), one("Div", &["a", "s"], "n"), one("Mul", &["gamma", "n"], "p")])),
        ("RmsNorm", square(vec![one("Sqrt", &["e"], "s"), one("Div", &["one", "s"], "r"), one("Mul", &["a", "r"], "n"), one("Mul", &["gamma", "n"], "p")])),
        ("RmsNorm", square(vec![one("Pow", &["e", "minus_half"], "r"), one("Mul", &["a", "r"], "n"), one("Mul", &["n", "gamma"], "p")])),
        (
            "Gelu",
            vec![
                one("Div", &["a", "root"], "b"),
                one("Erf", &["b"], "c"),
                one("Add", &["c", "one"], "d"),
                one("Mul", &["a", "d"], "e"),
                one("Mul", &["e", "half"], "p"),
            ],
        ),
        (
            "Gelu",
            vec![
                one("Mul", &["a", "half"], "b"),
                one("Div", &["a", "root"], "c"),
                one("Erf", &["c"], "d"),
                one("Add", &["one", "d"], "e"),
                one("Mul", &["b", "e"], "p"),
            ],
        ),
        ("Gelu", tanh),
        ("Silu", vec![one("Sigmoid", &["a"], "b"), one("Mul", &["b", "a"], "p")]),
        ("Silu", vec![one("Mul", &["a", "one"], "t"), one("Sigmoid", &["t"], "b"), one("Mul", &["a", "b"], "p")]),
        ("HardSwish", vec![one("Add", &["a", "three"], "b"), clip("b", "c"), one("Mul", &["a", "c"], "d"), one("Div", &["d", "six"], "p")]),
        ("HardSwish", vec![one("Add", &["a", "three"], "b"), clip("b", "c"), one("Div", &["c", "six"], "d"), one("Mul", &["d", "a"], "p")]),
        ("HardSwish", vec![node("HardSigmoid", &["a"], "b", vec![AttributeProto::float("alpha", 1.0 / 6.0)]), one("Mul", &["a", "b"], "p")]),
        ("Mish", vec![one("Softplus", &["a"], "b"), one("Tanh", &["b"], "c"), one("Mul", &["a", "c"], "p")]),
        (
            "Mish",
            vec![one("Exp", &["a"], "b"), one("Add", &["one", "b"], "c"), one("Log", &["c"], "d"), one("Tanh", &["d"], "e"), one("Mul", &["e", "a"], "p")],
        ),
        ("Normalize", norm(vec![one("Clip", &["n", "tiny"], "c"), one("Shape", &["a"], "s"), one("Expand", &["c", "s"], "e"), one("Div", &["a", "e"], "p")])),
        ("Normalize", norm(vec![one("Max", &["tiny", "n"], "c"), one("Div", &["a", "c"], "p")])),
    ]
}

/// A pattern between two products.
fn with_layers(nodes: Vec<NodeProto>) -> ModelProto {
    let number = |name: &str, value: f32| TensorProto { dims: vec![], ..given(name, &[], &[value]) };
    let all = [vec![node("MatMul", &["x", "first"], "a", vec![])], nodes, vec![node("MatMul", &["p", "second"], "y", vec![])]].concat();
    let mut weights = vec![floats("first", &[8, 8]), floats("second", &[8, 4]), floats("gamma", &[8]), floats("beta", &[8])];
    let numbers =
        [("other", 0.77), ("one", 1.0), ("two", 2.0), ("three", 3.0), ("zero", 0.0), ("six", 6.0), ("half", 0.5), ("minus_half", -0.5), ("epsilon", 1e-5)];
    weights.extend(numbers.map(|(name, value)| number(name, value)));
    weights.extend([
        number("tiny", 1e-12),
        number("root", std::f32::consts::SQRT_2),
        number("small", 0.044_715),
        number("slope", std::f32::consts::FRAC_2_PI.sqrt()),
    ]);
    let read = |name: &str| all.iter().any(|node| node.input.iter().any(|input| input == name));
    let weights = weights.into_iter().filter(|weight| read(weight.name())).collect();
    model(13, &[0, 8], all, weights)
}

#[test]
fn decomposed_ops_are_fused() {
    let folder = tempfile::tempdir().unwrap();
    let [path, same, out] = ["model.onnx", "same.onnx", "out.onnx"].map(|name| folder.path().join(name));
    let samples = folder.path().join("samples.safetensors");
    candle_core::safetensors::save(&sample(&[64, 8]).into_iter().collect(), &samples).unwrap();
    for (number, (op, nodes)) in patterns().into_iter().enumerate() {
        let what = format!("{op}, pattern {number}");
        let file = with_layers(nodes);
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        let graph = Model::open(&path).unwrap().graph().unwrap();
        assert_eq!(graph.nodes().iter().map(|node| node.op.name()).collect::<Vec<_>>(), ["Linear", op, "Linear"], "{what}\n{graph}");
        let inputs = sample(&[0, 8]);
        let ours = executed(Model::open(&path).unwrap(), &inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
        // Unchanged parts are preserved.
        Pipeline::builder().measure(false).build().unwrap().run(Model::open(&path).unwrap(), &same).unwrap();
        assert!(std::fs::read(&same).unwrap() == file.encode_to_vec(), "{what}");
        let calibration = Data { arrays: Some(samples.clone()), ..Data::default() };
        let pass = QuantizeStatic::default();
        Pipeline::builder().pass(pass).calibration(calibration).measure(false).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            let theirs = in_runtime(&path, &inputs);
            close(&what, &ours, &theirs);
            let all = sample(&[64, 8]);
            let (theirs, quantized) = (in_runtime(&path, &all), in_runtime(&out, &all));
            let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            let product: f64 = quantized.1.iter().zip(&theirs.1).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let cosine = product / norm(&quantized.1) / norm(&theirs.1);
            assert!(cosine > 0.995, "{what}: {cosine}");
        }
        for file in [&same, &out] {
            std::fs::remove_file(file).unwrap();
            std::fs::remove_dir_all(file.with_extension("onnx.report")).unwrap();
        }
    }
}

/// The argument of an activation can be a product, whose factors are not those of the activation.
#[test]
fn activations_of_products_are_fused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (number, (op, nodes)) in patterns().into_iter().enumerate().filter(|(_, (op, _))| ["Gelu", "Silu", "HardSwish", "Mish"].contains(op)) {
        let of_product = |mut node: NodeProto| {
            node.input.iter_mut().filter(|name| *name == "a").for_each(|name| *name = "scaled".to_owned());
            node
        };
        let scaled = node("Mul", &["a", "gamma"], "scaled", vec![]);
        let file = with_layers(std::iter::once(scaled).chain(nodes.into_iter().map(of_product)).collect());
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        assert_eq!(ops(&path), ["Linear", "Mul", op, "Linear"], "{op}, pattern {number}");
        if crate::common::onnxruntime::has_onnx_runtime() {
            let inputs = sample(&[0, 8]);
            close(op, &executed(Model::open(&path).unwrap(), &inputs).unwrap(), &in_runtime(&path, &inputs));
        }
    }
}

/// Names of the ops of a file.
fn ops(path: &std::path::Path) -> Vec<&'static str> {
    let graph = Model::open(path).unwrap().graph().unwrap_or_else(|e| panic!("{e}"));
    graph.nodes().iter().map(|node| node.op.name()).collect()
}

/// Constants of a pattern; constants that are parameters of the op may have any value.
const NUMBERS: [&str; 11] = ["one", "two", "three", "zero", "six", "half", "minus_half", "root", "small", "slope", "tiny"];

/// With one constant, value or axis changed, the nodes are not fused, and compute the changed function.
#[test]
fn near_misses_are_not_fused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let mut tried = BTreeMap::new();
    for (number, (op, nodes)) in patterns().into_iter().enumerate() {
        let mut almost: Vec<(String, Vec<NodeProto>)> = Vec::new();
        // The shape of another value can be the same.
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.op_type() != "Shape") {
            for (place, input) in node.input.iter().enumerate() {
                let other = match input.as_str() {
                    // Replacing the number everywhere changes the function.
                    input if NUMBERS.contains(&input) => "other",
                    "a" => "x",
                    _ => continue,
                };
                let mut changed = nodes.clone();
                changed[at].input[place] = other.into();
                almost.push((format!("`{other}` for `{input}`, read by `{}`", node.output[0]), changed));
            }
            if node.op_type().starts_with("Reduce") {
                let mut changed = nodes.clone();
                changed[at].attribute = vec![AttributeProto::ints("axes", [0])];
                almost.push((format!("`{}` over the samples", node.output[0]), changed));
            }
            if node.op_type() == "HardSigmoid" {
                let mut changed = nodes.clone();
                changed[at].attribute = vec![AttributeProto::float("alpha", 0.17)];
                almost.push(("another slope".into(), changed));
            }
        }
        for (what, nodes) in almost {
            *tried.entry(op).or_insert(0) += 1;
            std::fs::write(&path, with_layers(nodes).encode_to_vec()).unwrap();
            let found = ops(&path);
            assert!(!found.contains(&op), "{op}, pattern {number}: {what}\n{found:?}");
            // ONNX Runtime treats any power as a square here (LayerNormFusion).
            if crate::common::onnxruntime::has_onnx_runtime() && !what.contains("`two`") {
                let (_, theirs) = in_runtime(&path, &sample(&[0, 8]));
                let (_, ours) = executed(Model::open(&path).unwrap(), &sample(&[0, 8])).unwrap();
                let same = |(a, b): (&f32, &f32)| (a.is_nan() && b.is_nan()) || (a - b).abs() <= 2e-5 * b.abs().max(1.0);
                assert!(ours.iter().zip(&theirs).all(same), "{op}, pattern {number}: {what}: {ours:?} for {theirs:?}");
            }
        }
    }
    let least = BTreeMap::from([("LayerNorm", 10), ("RmsNorm", 12), ("Gelu", 12), ("Silu", 4), ("HardSwish", 8), ("Mish", 5), ("Normalize", 8)]);
    assert!(least.iter().all(|(op, least)| tried.get(op) >= Some(least)), "{tried:?}");
}

/// An inner value that is an output, or that another node reads, is still computed, in addition to the
/// op.
#[test]
fn inner_values_with_other_readers_are_computed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (number, (op, nodes)) in patterns().into_iter().enumerate() {
        let is_inner = |node: &&NodeProto| node.output[0] != "p" && node.op_type() != "Shape";
        let inner: Vec<String> = nodes.iter().filter(is_inner).map(|node| node.output[0].clone()).collect();
        for name in inner {
            for as_output in [true, false] {
                let mut file = with_layers(nodes.clone());
                let graph = file.graph.as_mut().unwrap();
                if as_output {
                    graph.output.push(value(&name, DataType::Float, None));
                } else {
                    graph.node.push(node("Abs", &[&name], "beside", vec![]));
                    graph.output.push(value("beside", DataType::Float, None));
                }
                std::fs::write(&path, file.encode_to_vec()).unwrap();
                let opened = Model::open(&path).unwrap();
                let lifted = opened.graph().unwrap_or_else(|e| panic!("{op}, pattern {number}: {e}"));
                assert!(lifted.values().iter().any(|value| value.name == name), "{op}, pattern {number}: `{name}` is gone\n{lifted}");
                assert!(lifted.nodes().iter().any(|node| node.op.name() == op), "{op}, pattern {number}: `{name}`\n{lifted}");
                if crate::common::onnxruntime::has_onnx_runtime() {
                    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
                    let inputs: BTreeMap<String, Tensor> = sample(&[0, 8]);
                    let ours = Subject::from_model(opened).unwrap().load(&Device::Cpu, &work).unwrap().run(&inputs).unwrap();
                    let theirs = Session::open(&path, runtime::Options::default()).unwrap().run(&inputs).unwrap();
                    assert_eq!(theirs.len(), 2);
                    let flat = |tensor: &Tensor| (tensor.dims().to_vec(), tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
                    theirs.iter().for_each(|(output, theirs)| close(output, &flat(&ours[output]), &flat(theirs)));
                }
            }
        }
    }
}

#[test]
fn patterns_that_broadcast_their_input_are_not_fused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let one = |op: &str, inputs: &[&str], output: &str| node(op, inputs, output, vec![]);
    let mean = |x: &str, y: &str| node("ReduceMean", &[x], y, vec![AttributeProto::ints("axes", [-1])]);
    // One number per sample, which the weights expand to eight.
    let mut nodes = vec![mean("a", "t"), one("Mul", &["t", "t"], "q"), mean("q", "v"), one("Add", &["v", "epsilon"], "e"), one("Sqrt", &["e"], "s")];
    nodes.extend([one("Div", &["t", "s"], "n"), one("Mul", &["n", "gamma"], "p")]);
    std::fs::write(&path, with_layers(nodes).encode_to_vec()).unwrap();
    let graph = Model::open(&path).unwrap().graph().unwrap();
    assert!(graph.nodes().iter().all(|node| !matches!(node.op, Op::RmsNorm(_))), "{graph}");
    if crate::common::onnxruntime::has_onnx_runtime() {
        let inputs = sample(&[0, 8]);
        close("apart", &executed(Model::open(&path).unwrap(), &inputs).unwrap(), &in_runtime(&path, &inputs));
    }
}
