//! Outputs of ONNX files that other values, weights or casts determine, and the form in which changed graphs
//! are written.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use compress::pass::{Amounts, Cast, PruneStructured, PruneUnstructured, PrunedPart, QuantizeDynamic, QuantizeStatic, Step};
use compress::{Model, Pipeline};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::Data;
use compress_graph::ir::{Graph, Op};
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, TensorProto};
use compress_onnx::runtime::{Options, Session};
use prost::Message;

use crate::common::nodes::{close, executed, floats, given, in_runtime, ints, model, node, numbers, sample, value};
use crate::common::onnxruntime;

/// Quantizes a file statically on samples of this shape, and returns the written file.
fn quantized(file: &ModelProto, folder: &Path, shape: &[i64]) -> ModelProto {
    let [path, out, samples] = ["model.onnx", "out.onnx", "samples.safetensors"].map(|name| folder.join(name));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let shape: Vec<usize> = std::iter::once(12).chain(shape.iter().map(|size| *size as usize)).collect();
    let many = Tensor::from_vec(numbers(shape.iter().product(), 0.7), shape, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), many)].into(), &samples).unwrap();
    let calibration = Data { arrays: Some(samples), ..Data::default() };
    let built = Pipeline::builder().pass(Step::from(QuantizeStatic::default())).calibration(calibration).force(true).build().unwrap();
    built.run(Model::open(&path).unwrap(), &out).unwrap_or_else(|e| panic!("{e}"));
    ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap()
}

/// Halves the output channels of the convolution `first` of a file, and returns the written file.
fn pruned(file: &ModelProto, folder: &Path) -> ModelProto {
    let [path, out] = ["model.onnx", "out.onnx"].map(|name| folder.join(name));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let prune = PruneStructured {
        dims: vec![PrunedPart::Channels],
        amount: Some(Amounts::All("0.5".parse().unwrap())),
        round_to: 1,
        targets: vec!["first".parse().unwrap()],
        ..PruneStructured::default()
    };
    let report = Pipeline::builder().pass(prune).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap_or_else(|e| panic!("{e}"));
    assert!(!report.notes.iter().any(|note| note.contains("config.json")), "the file has none: {:?}", report.notes);
    ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap()
}

/// Two products with a ReLU in between, which compute `l`.
fn network() -> (Vec<NodeProto>, Vec<TensorProto>) {
    let products = [node("MatMul", &["x", "first"], "a", vec![]), node("Relu", &["a"], "b", vec![]), node("MatMul", &["b", "second"], "l", vec![])];
    (products.to_vec(), vec![floats("first", &[4, 6]), floats("second", &[6, 4])])
}

/// Quantizes the network with further nodes and these outputs, and returns the written file and its outputs.
fn with_outputs(further: Option<NodeProto>, names: &[&str], folder: &Path) -> (ModelProto, BTreeMap<String, Tensor>) {
    let (mut nodes, weights) = network();
    nodes.extend(further);
    let mut file = model(13, &[0, 4], nodes, weights);
    file.graph.as_mut().unwrap().output = names.iter().map(|name| value(name, DataType::Float, None)).collect();
    let written = quantized(&file, folder, &[4]);
    (written, Session::open(&folder.join("out.onnx"), Options::default()).unwrap().run(&sample(&[0, 4])).unwrap())
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Outputs that are the same value, or the same output twice, are written as ONNX Runtime loads them.
#[test]
fn outputs_may_be_the_same_value() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for names in [["l", "same"], ["same", "l"]] {
        let (_, outputs) = with_outputs(Some(node("Identity", &["l"], "same", vec![])), &names, folder.path());
        assert_eq!(elements(&outputs["l"]), elements(&outputs["same"]));
    }
}

/// An input can be an output too, of the same or another name.
#[test]
fn outputs_may_be_inputs() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, outputs) = with_outputs(Some(node("Identity", &["x"], "copy", vec![])), &["l", "x", "copy"], folder.path());
    let given = elements(&sample(&[0, 4])["x"]);
    assert_eq!(["x", "copy"].map(|name| elements(&outputs[name])), [given.clone(), given]);
}

/// A weight can be an output too, in the axis order of the file.
#[test]
fn outputs_may_be_weights() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (written, outputs) = with_outputs(None, &["l", "second"], folder.path());
    assert!(written.graph.unwrap().node.iter().any(|node| node.op_type() == "QuantizeLinear"));
    assert_eq!(outputs["second"].dims(), [6, 4]);
    let expected: Vec<f32> = floats("second", &[6, 4]).raw_data.unwrap().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(elements(&outputs["second"]), expected);
}

/// A last node that casts an output to another float type does not prevent passes from running the model,
/// and the written file has outputs of this type.
#[test]
fn outputs_may_be_cast_to_other_float_types() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut nodes, weights) = network();
    nodes[2].output = vec!["y".into()];
    quantized(&model(13, &[0, 4], nodes, weights), folder.path(), &[4]);
    let uncast = in_runtime(&folder.path().join("out.onnx"), &sample(&[0, 4]));
    for ty in [DataType::Double, DataType::Float16] {
        let (mut nodes, weights) = network();
        nodes.push(node("Cast", &["l"], "y", vec![AttributeProto::int("to", ty as i64)]));
        let mut file = model(13, &[0, 4], nodes, weights);
        file.graph.as_mut().unwrap().output = vec![value("y", ty, None)];
        let graph = quantized(&file, folder.path(), &[4]).graph.unwrap();
        assert_eq!(graph.output[0].r#type.as_ref().unwrap().tensor_type.as_ref().unwrap().elem_type, Some(ty as i32));
        let path = folder.path().join("out.onnx");
        let ours = in_runtime(&path, &sample(&[0, 4]));
        // The values are those of the file without the cast, which the executor computes too.
        close("opened again", &executed(Model::open(&path).unwrap(), &sample(&[0, 4])).unwrap(), &uncast);
        let largest = uncast.1.iter().fold(0f32, |most, value| most.max(value.abs()));
        assert_eq!(ours.0, uncast.0);
        assert!(ours.1.iter().zip(&uncast.1).all(|(a, b)| (a - b).abs() <= 1e-3 * largest), "{ty:?}: {ours:?}, {uncast:?}");
    }
}

/// A changed graph keeps the opset of the file, whose operators may need it.
#[test]
fn the_opset_of_a_file_is_kept() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let pads = || AttributeProto::ints("pads", [1; 4]);
    let pool = [("kernel_shape", 2), ("dilations", 2)].map(|(name, size)| AttributeProto::ints(name, [size; 2]));
    let nodes = vec![
        node("Conv", &["x", "first"], "a", vec![pads()]),
        node("AveragePool", &["a"], "b", pool.to_vec()),
        node("Conv", &["b", "second"], "y", vec![pads()]),
    ];
    let file = model(19, &[0, 3, 8, 8], nodes, vec![floats("first", &[4, 3, 3, 3]), floats("second", &[2, 4, 3, 3])]);
    assert_eq!(pruned(&file, folder.path()).opset_import[0].version, Some(19));
    let path = folder.path().join("out.onnx");
    close("pool", &executed(Model::open(&path).unwrap(), &sample(&[0, 3, 8, 8])).unwrap(), &in_runtime(&path, &sample(&[0, 3, 8, 8])));
}

/// The mean minus a value, normalized: ONNX Runtime would fuse a square by `Pow` to a layer normalization
/// of the value, which has the other sign.
#[test]
fn norms_of_differences_are_not_fused_wrongly() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let one = |op: &str, inputs: &[&str], output: &str| node(op, inputs, output, vec![]);
    let conv = |x: &str, weight: &str, y: &str| node("Conv", &[x, weight], y, vec![AttributeProto::ints("pads", [1; 4])]);
    let mean = |x: &str, y: &str| node("ReduceMean", &[x], y, vec![AttributeProto::ints("axes", [-1])]);
    let mut nodes = vec![conv("x", "first", "a"), one("Relu", &["a"], "b"), conv("b", "second", "t"), mean("t", "m"), one("Sub", &["m", "t"], "d")];
    nodes.extend([one("Mul", &["d", "d"], "q"), mean("q", "v"), one("Add", &["v", "epsilon"], "e"), one("Sqrt", &["e"], "s")]);
    nodes.extend([one("Div", &["d", "s"], "n"), one("Mul", &["n", "gamma"], "p"), one("Add", &["p", "beta"], "y")]);
    let weights =
        [floats("first", &[4, 3, 3, 3]), floats("second", &[3, 4, 3, 3]), floats("gamma", &[8]), floats("beta", &[8]), given("epsilon", &[], &[1e-2])];
    let file = model(17, &[1, 3, 8, 8], nodes, weights.to_vec());
    pruned(&file, folder.path());
    let out = folder.path().join("out.onnx");
    let inputs = sample(&[1, 3, 8, 8]);
    assert!(Model::open(&out).unwrap().graph().unwrap().nodes().iter().any(|node| node.op.name() == "RmsNorm"));
    close("norm", &executed(Model::open(&out).unwrap(), &inputs).unwrap(), &in_runtime(&out, &inputs));
}

/// The error names weights that are not selected because nodes read them in several ways.
#[test]
fn weights_that_are_read_in_several_ways_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let gemm = node("Gemm", &["x", "w"], "b", vec![AttributeProto::int("transB", 1)]);
    let nodes = vec![node("MatMul", &["x", "w"], "a", vec![]), gemm, node("Add", &["a", "b"], "y", vec![])];
    std::fs::write(&path, model(13, &[0, 4], nodes, vec![floats("w", &[4, 4])]).encode_to_vec()).unwrap();
    let built = Pipeline::builder().pass(QuantizeDynamic::default()).build().unwrap();
    let error = built.run(Model::open(&path).unwrap(), folder.path().join("out.onnx")).unwrap_err().to_string();
    assert!(error.contains("not selected: the weight `w`, which layers read in different axis orders, or which other nodes read too"), "{error}");
}

/// Exporters write equal weights once, and the others as copies by `Identity`.
#[test]
fn copies_of_weights_are_weights_of_layers() {
    let folder = tempfile::tempdir().unwrap();
    let [path, out] = ["model.onnx", "out.onnx"].map(|name| folder.path().join(name));
    let copy = |from: &str, to: &str| node("Identity", &[from], to, vec![]);
    let product = |x: &str, weight: &str, y: &str| node("MatMul", &[x, weight], y, vec![]);
    let nodes = vec![
        product("x", "shared", "a"),
        copy("shared", "second"),
        copy("second", "third"),
        copy("shared", "fourth"),
        product("a", "third", "b"),
        copy("alone", "alone copied"),
        product("b", "alone copied", "c"),
        node("Gemm", &["c", "fourth"], "e", vec![]),
        product("e", "twice", "d"),
        node("Mul", &["d", "twice"], "f", vec![]),
        node("MatMul", &["left", "f"], "y", vec![]),
    ];
    let file = model(13, &[8, 8], nodes, ["shared", "alone", "twice", "left"].map(|name| floats(name, &[8, 8])).to_vec());
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let count = |file: &ModelProto, op: &str| file.graph.as_ref().unwrap().node.iter().filter(|node| node.op_type() == op).count();
    let report = Pipeline::builder().pass(QuantizeDynamic::default()).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap();
    let written = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap();
    // One product reads the integers of a shared weight, and the copies are dequantized floats.
    assert_eq!(["MatMulInteger", "MatMul", "Identity"].map(|op| count(&written, op)), [2, 3, 3]);
    let unchanged = "quantize-dynamic leaves unchanged: the weight `twice`, which layers read in different axis orders, or which other nodes read too, the operand `left`, which is neither a matrix on the right of a MatMul or Gemm nor the kernel of a Conv";
    assert!(report.notes.iter().any(|note| note == unchanged), "{:?}", report.notes);
    // In the graph, all of them are linear layers.
    if onnxruntime::has_onnx_runtime() {
        let inputs = sample(&[8, 8]);
        let graph = Model::open(&path).unwrap().graph().unwrap();
        assert_eq!(graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_))).count(), 4, "{graph}");
        close("copies", &executed(Model::open(&path).unwrap(), &inputs).unwrap(), &in_runtime(&path, &inputs));
    }
    let prune = || PruneUnstructured { amount: Some("0.5".parse().unwrap()), ..PruneUnstructured::default() };
    let report = Pipeline::builder().pass(prune()).force(true).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap();
    assert_eq!(report.passes[0].tensors_changed, 2, "{:?}", report.passes[0]);
    assert!(report.notes.iter().any(|note| note.starts_with("prune-unstructured leaves unchanged: the weight `twice`")), "{:?}", report.notes);
    if onnxruntime::has_onnx_runtime() {
        let written = quantized(&file, folder.path(), &[8]);
        let integers = written.graph.unwrap().initializer.into_iter().filter(|tensor| tensor.dims == [8, 8] && tensor.data_type() == DataType::Int8);
        assert_eq!(integers.count(), 2);
    }
}

/// A weight that the body of an `If` reads too is written as floats, and so is the bias of its layer.
#[test]
fn layers_whose_weights_other_nodes_read_are_floats() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let branch = |name: &str, inner: NodeProto| {
        let graph =
            GraphProto { name: Some(name.into()), output: vec![value(&inner.output[0], DataType::Float, None)], node: vec![inner], ..GraphProto::default() };
        AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(name, 0) }
    };
    let branches = vec![branch("then_branch", node("MatMul", &["x", "w"], "p", vec![])), branch("else_branch", node("Identity", &["c"], "q", vec![]))];
    let nodes = vec![
        node("Gemm", &["x", "w", "bias"], "c", vec![]),
        node("ReduceSum", &["c"], "s", vec![AttributeProto::int("keepdims", 0)]),
        node("Greater", &["s", "limit"], "large", vec![]),
        node("If", &["large"], "d", branches),
        node("Relu", &["d"], "e", vec![]),
        node("MatMul", &["e", "second"], "y", vec![]),
    ];
    let weights = vec![floats("w", &[8, 8]), floats("bias", &[8]), floats("second", &[8, 4]), given("limit", &[], &[3.0])];
    let graph = quantized(&model(13, &[0, 8], nodes, weights), folder.path(), &[8]).graph.unwrap();
    let types = |dims: &[i64]| graph.initializer.iter().filter(|tensor| tensor.dims == dims).map(TensorProto::data_type).collect::<Vec<_>>();
    assert_eq!(types(&[8, 8]), [DataType::Float]);
    // Besides the bias, the repeated scale and zero point of the input of the layer.
    assert_eq!(types(&[8]), [DataType::Float, DataType::Uint8, DataType::Float]);
    assert!(graph.initializer.iter().any(|tensor| tensor.data_type() == DataType::Int8), "the other layer is quantized");
}

/// An output that is a weight does not prevent the comparison with the built-in executor.
#[test]
fn weights_as_outputs_are_compared() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [path, out] = ["model.onnx", "out.onnx"].map(|name| folder.path().join(name));
    let (mut nodes, weights) = network();
    nodes.push(node("Neg", &["l"], "y", vec![]));
    let mut file = model(13, &[0, 4], nodes, weights);
    file.graph.as_mut().unwrap().output.push(value("second", DataType::Float, Some(&[6, 4])));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let report = Pipeline::builder().pass(QuantizeDynamic::default()).build().unwrap().run(Model::open(&path).unwrap(), &out).unwrap();
    assert!(!report.notes.iter().any(|note| note.contains("was not verified")), "{:?}", report.notes);
}

/// Layers that are left in floats between quantized layers: ignored, without a quantized form, or opaque.
/// ONNX Runtime does not quantize their weights, nor does a second export change them.
#[test]
fn float_layers_between_quantized_values_stay_in_floats() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, out, samples) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"), folder.path().join("samples.safetensors"));
    let conv = |x: &str, weight: &str, y: &str| node("Conv", &[x, weight], y, vec![AttributeProto::ints("pads", [1; 4])]);
    let relu = |x: &str, y: &str| node("Relu", &[x], y, vec![]);
    let shape = vec![AttributeProto::ints("kernel_shape", [2; 2]), AttributeProto::ints("strides", [2; 2])];
    let nodes = vec![
        conv("x", "first", "a"),
        relu("a", "b"),
        node("MaxPool", &["b"], "pooled", shape.clone()),
        conv("pooled", "ignored", "c"),
        relu("c", "d"),
        conv("d", "third", "e"),
        relu("e", "f"),
        node("Conv", &["f", "opaque"], "g", vec![AttributeProto::text("auto_pad", "SAME_UPPER")]),
        relu("g", "h"),
        conv("h", "fifth", "i"),
        relu("i", "j"),
        node("ConvTranspose", &["j", "transposed"], "k", shape),
        relu("k", "l"),
        conv("l", "last", "y"),
    ];
    // One scale for the whole tensor would round most values of these kernels to zero.
    let kernel = |name: &str, outputs: i64, inputs: i64, size: i64| {
        let mut values: Vec<f32> = numbers((outputs * inputs * size * size) as usize, name.len() as f32).iter().map(|value| value / 6.0).collect();
        values[0] *= if ["ignored", "opaque", "transposed"].contains(&name) { 300.0 } else { 1.0 };
        given(name, &[outputs, inputs, size, size], &values)
    };
    let weights = ["ignored", "third", "opaque", "fifth"].map(|name| kernel(name, 6, 6, 3));
    let ends = vec![kernel("first", 6, 3, 3), kernel("transposed", 6, 6, 2), kernel("last", 4, 6, 3)];
    std::fs::write(&path, model(13, &[0, 3, 8, 8], nodes, [weights.to_vec(), ends].concat()).encode_to_vec()).unwrap();
    let x = Tensor::from_vec(numbers(40 * 192, 0.7), (40, 3, 8, 8), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), x.clone())].into(), &samples).unwrap();
    let calibration = Data { arrays: Some(samples), ..Data::default() };
    let pass = QuantizeStatic { ignore: vec!["ignored".parse().unwrap()], ..QuantizeStatic::default() };
    let built = Pipeline::builder().pass(Step::from(pass)).calibration(calibration).threads(1).force(true).build().unwrap();
    let report = built.run(Model::open(&path).unwrap(), &out).unwrap();
    let how = &report.outputs.iter().find(|output| output.path == "out.onnx").unwrap().verified.how;
    assert!(how.contains("quantized values are within one step"), "{how}");
    let inputs = [("x".to_owned(), x.narrow(0, 0, 4).unwrap())].into();
    let run = |path: &Path, optimize| {
        let mut session = Session::open(path, Options { optimize, ..Options::default() }).unwrap();
        session.run(&inputs).unwrap()["y"].flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let distance = |a: &[f32], b: &[f32]| {
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt();
        norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
    };
    let off = distance(&run(&out, true), &run(&out, false));
    assert!(off < 0.003, "{off}");
    // The file is opened with the same quantizers, one for each value, and written again.
    let opened = Model::open(&out).unwrap();
    let quantizers = |graph: &Graph| graph.nodes().iter().filter(|node| matches!(node.op, Op::FakeQuantize(_))).count();
    let graph = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap().graph.unwrap();
    assert_eq!(quantizers(&opened.graph().unwrap()), graph.node.iter().filter(|node| node.op_type() == "QuantizeLinear").count());
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let verified = compress::pipeline::verify(&out, &work).unwrap().pop().unwrap();
    assert!(verified.ok && verified.finding.contains("within one step"), "{verified:?}");
}

/// ONNX Runtime divides averages over padding by another count in integers, and rejects dilated averages, and
/// resizes with `axes` between quantized values: these compute in floats.
#[test]
fn nodes_that_runtimes_compute_wrongly_in_integers_stay_in_floats() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let rounded_up = vec![
        AttributeProto::ints("kernel_shape", [3; 2]),
        AttributeProto::ints("strides", [2; 2]),
        AttributeProto::int("ceil_mode", 1),
        AttributeProto::int("count_include_pad", 1),
    ];
    let resize = vec![AttributeProto::ints("axes", [2, 3]), AttributeProto::text("mode", "linear")];
    let dilated = vec![AttributeProto::ints("kernel_shape", [2; 2]), AttributeProto::ints("dilations", [2; 2])];
    let pool = |attributes| node("AveragePool", &["b"], "c", attributes);
    let cases = [("pool", pool(rounded_up)), ("dilated pool", pool(dilated)), ("resize", node("Resize", &["b", "", "", "sizes"], "c", resize))];
    for (what, between) in cases {
        let conv = |x: &str, weight: &str, y: &str| node("Conv", &[x, weight], y, vec![]);
        let nodes = vec![conv("x", "first", "a"), node("Relu", &["a"], "b", vec![]), between, conv("c", "second", "y")];
        let weights = vec![floats("first", &[6, 3, 3, 3]), floats("second", &[4, 6, 1, 1]), ints("sizes", &[5, 9])];
        let written = quantized(&model(19, &[0, 3, 12, 12], nodes, weights), folder.path(), &[3, 12, 12]);
        assert!(written.graph.unwrap().node.iter().any(|node| node.op_type() == "QuantizeLinear"), "{what}");
        let inputs = sample(&[4, 3, 12, 12]);
        let [before, after] = ["model.onnx", "out.onnx"].map(|name| in_runtime(&folder.path().join(name), &inputs));
        assert_eq!(before.0, after.0, "{what}");
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut before.1.iter().zip(&after.1).map(|(a, b)| a - b)) / norm(&mut before.1.iter().copied());
        assert!(error < 0.05, "{what}: {error}");
    }
}

/// Rounded scales of a resize would change the shape of its output.
#[test]
fn cast_does_not_change_numbers_that_determine_shapes() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [path, out] = ["model.onnx", "out.onnx"].map(|name| folder.path().join(name));
    let how = || ["coordinate_transformation_mode", "nearest_mode"].into_iter().zip(["asymmetric", "floor"]);
    let file = |first: Option<NodeProto>| {
        let nodes = vec![
            node("Conv", &["x", "first"], "a", vec![]),
            node("Resize", &["a", "", "scales"], "b", how().map(|(key, value)| AttributeProto::text(key, value)).collect()),
            node("Mul", &["b", "factor"], "y", vec![]),
        ];
        let scales = [given("scales", &[4], &[1.0, 1.0, 1.1, 1.1]), given("ones", &[2], &[1.0, 1.0]), given("rest", &[2], &[1.1, 1.1])];
        let scales = scales.into_iter().filter(|scale| first.is_none() == (scale.name() == "scales"));
        let weights = [floats("first", &[6, 3, 1, 1]), given("factor", &[], &[1e-12])].into_iter().chain(scales).collect();
        model(13, &[0, 3, 20, 20], first.into_iter().chain(nodes).collect(), weights)
    };
    let cast = |options: serde_json::Value| {
        let pass: Cast = serde_json::from_value(options).unwrap();
        Pipeline::builder().pass(pass).force(true).build().unwrap().run(Model::open(&path).unwrap(), &out)
    };
    let inputs = sample(&[2, 3, 20, 20]);
    let concat = node("Concat", &["ones", "rest"], "scales", vec![AttributeProto::int("axis", 0)]);
    for (first, to) in [(Some(concat), "f16"), (None, "f16"), (None, "bf16")] {
        std::fs::write(&path, file(first).encode_to_vec()).unwrap();
        let report = cast(serde_json::json!({ "to": to })).unwrap();
        assert_eq!(report.passes[0].details["converted"], 1, "{to}");
        assert_eq!(in_runtime(&out, &inputs).0, [2, 6, 22, 22], "{to}");
    }
    let error = cast(serde_json::json!({ "targets": ["scales"] })).unwrap_err().to_string();
    assert!(error.contains("`scales`") && error.contains("constant of the graph"), "{error}");
}

/// Negative indices of `Gather` count from the end of a table.
#[test]
fn tables_are_indexed_from_the_end() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let to_integers = |name: &str, y: &str| node("Cast", &[name], y, vec![AttributeProto::int("to", DataType::Int64 as i64)]);
    let nodes = vec![
        node("Mul", &["x", "five"], "scaled", vec![]),
        to_integers("scaled", "whole"),
        node("Gather", &["table", "whole"], "rows", vec![]),
        node("MatMul", &["rows", "second"], "y", vec![]),
    ];
    let weights = vec![given("five", &[1], &[5.0]), floats("table", &[12, 6]), floats("second", &[6, 4])];
    std::fs::write(&path, model(13, &[0, 4], nodes, weights).encode_to_vec()).unwrap();
    let values: Vec<f32> = (0..8).map(|at| (at as f32 - 4.0) / 3.0).collect();
    let inputs = [("x".to_owned(), Tensor::from_vec(values, (2, 4), &Device::Cpu).unwrap())].into();
    close("negative indices", &executed(Model::open(&path).unwrap(), &inputs).unwrap(), &in_runtime(&path, &inputs));
}
