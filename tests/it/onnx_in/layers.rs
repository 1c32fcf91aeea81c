//! Weights with changed dtypes, and the form in which they are written to the graph.

use std::path::Path;

use candle_core::{Device, Tensor};
use compress::internal::RunState;
use compress::pass::{ActivationRounding, Cast, FloatFormat, GranularityKind, Palettize, PruneUnstructured, Quantize, QuantizeDynamic, Step};
use compress::{Error, Model};
use compress_onnx::ModelFile;
use compress_onnx::proto::{AttributeProto, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use compress_onnx::runtime::{self, Session};
use prost::Message;

use crate::onnx_in::{Place, builder, constant, model, node, numbers, raw, tensor, transposed, value};

/// All forms of products, a convolution and an embedding lookup, in the operators of an opset.
pub fn layers(opset: i64) -> ModelProto {
    let product = NodeProto { name: Some("/first/MatMul".into()), ..node("MatMul", &["x", "first"], &["a"], vec![]) };
    let gemm = |rows: bool| vec![AttributeProto::int("transB", i64::from(rows))];
    let shape = constant(TensorProto { int64_data: vec![1, 3, 4, 4], ..tensor("image", DataType::Int64, &[4]) });
    let flat = constant(TensorProto { int64_data: vec![3, 12], ..tensor("flat", DataType::Int64, &[2]) });
    let graph = GraphProto {
        name: Some("layers".into()),
        node: vec![
            product,
            node("Gemm", &["a", "second", "bias"], &["b"], gemm(true)),
            node("Relu", &["b"], &["c"], vec![]),
            node("Gemm", &["c", "third", "sixteen"], &["d"], gemm(false)),
            node("MatMul", &["c", "fourth"], &["e"], vec![]),
            node("Add", &["d", "e"], &["f"], vec![]),
            shape,
            node("Reshape", &["f", "image"], &["g"], vec![]),
            node("Conv", &["g", "kernel"], &["h"], vec![]),
            flat,
            node("Reshape", &["h", "flat"], &["i"], vec![]),
            node("Gather", &["table", "rows"], &["j"], vec![]),
            node("Add", &["i", "j"], &["y"], vec![]),
        ],
        initializer: vec![
            raw("first", &[20, 8]),
            raw("second", &[12, 8]),
            raw("bias", &[12]),
            raw("third", &[12, 16]),
            raw("sixteen", &[16]),
            raw("fourth", &[12, 16]),
            raw("kernel", &[4, 3, 2, 2]),
            raw("table", &[30, 12]),
            TensorProto { int64_data: vec![3, 29, 3], ..tensor("rows", DataType::Int64, &[3]) },
        ],
        input: vec![value("x", DataType::Float, &["3", "20"])],
        output: vec![value("y", DataType::Float, &["3", "12"])],
        ..GraphProto::default()
    };
    let import = OperatorSetIdProto { domain: None, version: Some(opset) };
    ModelProto { ir_version: Some(if opset > 20 { 10 } else { 8 }), graph: Some(graph), opset_import: vec![import], ..ModelProto::default() }
}

/// The same file with the values of its weights after a pass, in the dtypes of the graph.
fn with_weights(mut model: ModelProto, after: &Model) -> ModelProto {
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        let weight = &after.weights.by_name[tensor.name()];
        if weight.is_float() {
            let mut values = weight.floats(tensor.name()).unwrap();
            if tensor.dims.iter().map(|size| *size as usize).ne(weight.shape.iter().copied()) {
                values = transposed(&values, weight.shape[0], weight.shape[1]);
            }
            tensor.raw_data = Some(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
    }
    model
}

/// Largest difference of the outputs of two files, relative to the largest output.
pub fn distance(a: &Path, b: &Path) -> f32 {
    let (a, b) = (answers_of(a).unwrap(), answers_of(b).unwrap());
    let largest = a.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest
}

pub fn answers_of(path: &Path) -> Option<Vec<f32>> {
    crate::common::onnxruntime::has_onnx_runtime().then_some(())?;
    let x = Tensor::from_vec(numbers(60), (3, 20), &Device::Cpu).unwrap();
    let mut session = Session::open(path, runtime::Options::default()).unwrap_or_else(|e| panic!("{e}"));
    session.require_exact_sums().unwrap();
    let y = session.run(&[("x".to_owned(), x)].into()).unwrap().remove("y").unwrap();
    Some(y.flatten_all().unwrap().to_vec1().unwrap())
}

fn applied(step: &Step, model: Model) -> Model {
    step.pass().plan(&model, &RunState::default()).unwrap().model
}

#[test]
fn weights_are_converted_to_the_dtypes_of_the_graph() {
    let group = |symmetric| QuantizeDynamic {
        granularity: GranularityKind::Group,
        group_size: Some(4),
        symmetric,
        activations: ActivationRounding::None,
        embeddings: true,
        ..QuantizeDynamic::default()
    };
    let integers = |granularity, symmetric| QuantizeDynamic {
        granularity,
        symmetric,
        activations: ActivationRounding::None,
        embeddings: true,
        ..QuantizeDynamic::default()
    };
    let steps: Vec<Step> = vec![
        Cast { to: FloatFormat::F16, ..Cast::default() }.into(),
        Cast { to: FloatFormat::Bf16, ..Cast::default() }.into(),
        integers(GranularityKind::Channel, true).into(),
        integers(GranularityKind::Channel, false).into(),
        integers(GranularityKind::Tensor, true).into(),
        integers(GranularityKind::Tensor, false).into(),
        group(true).into(),
        group(false).into(),
        Palettize { bits: 4, ..Palettize::default() }.into(),
    ];
    for opset in [9, 12, 13, 17, 21] {
        let place = Place::new(&layers(opset));
        for (number, step) in steps.iter().enumerate() {
            let out = place.path(&format!("{number}.onnx"));
            if number == 1 && opset < 13 {
                let error = builder().pass(step.clone()).build().unwrap().run(place.open(), &out).unwrap_err();
                assert!(error.to_string().contains("has been changed to bf16, which requires opset 13"), "{error}");
                continue;
            }
            let report =
                builder().pass(step.clone()).measure(false).build().unwrap().run(place.open(), &out).unwrap_or_else(|e| panic!("{opset}, {number}: {e}"));
            let reference = place.path("reference.onnx");
            let after = applied(step, place.open());
            std::fs::write(&reference, with_weights(layers(opset), &after).encode_to_vec()).unwrap();
            let written = ModelFile::open(&out).unwrap();
            assert_eq!(written.opset(), opset);
            let palettes = report.notes.iter().any(|note| note.contains("as dequantized floats"));
            assert_eq!(palettes, number == 8, "{:?}", report.notes);
            let is_warning = |note: &String| note.starts_with("warning: onnx: writes the values of") && note.contains("not smaller");
            assert_eq!(report.notes.iter().any(is_warning), palettes, "{:?}", report.notes);
            assert!(!report.notes.iter().any(|note| note.contains("the size of")), "{:?}", report.notes);
            if crate::common::onnxruntime::has_onnx_runtime() {
                let distance = distance(&reference, &out);
                assert!(distance < 1e-5, "opset {opset}, step {number}: {distance}");
            }
            if number > 1 && number < 6 {
                assert!(report.size.after.bytes < report.size.before.bytes, "{opset}, {number}");
            }
        }
    }
}

/// Weights that a `Cast` converts to 32 bits, as `cast` writes them, have the roles of the original ones.
#[test]
fn weights_stored_in_16_bits_are_those_of_layers() {
    for (opset, to) in [(11, FloatFormat::F16), (17, FloatFormat::F16), (17, FloatFormat::Bf16)] {
        let place = Place::new(&layers(opset));
        let half = place.path("half.onnx");
        builder().pass(Cast { to, ..Cast::default() }).measure(false).build().unwrap().run(place.open(), &half).unwrap();
        let opened = Model::open(&half).unwrap();
        for (name, weight) in &place.open().weights.by_name {
            let stored = &opened.weights.by_name[name];
            assert_eq!((&stored.shape, stored.role), (&weight.shape, weight.role), "{name}");
        }
        let operators = |graph: &Model| graph.graph().unwrap().nodes().iter().map(|node| node.op.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(operators(&opened), operators(&place.open()), "no opaque nodes");
        let steps: Vec<(&str, Step, f32)> = vec![
            ("integers", QuantizeDynamic { embeddings: true, ..QuantizeDynamic::default() }.into(), 0.1),
            ("stored", QuantizeDynamic { activations: ActivationRounding::None, ..QuantizeDynamic::default() }.into(), 0.1),
            ("floats", Cast { to: FloatFormat::F32, ..Cast::default() }.into(), 0.03),
            ("zeros", PruneUnstructured { amount: Some("0.05".parse().unwrap()), ..PruneUnstructured::default() }.into(), 0.1),
        ];
        for (what, step, tolerance) in steps {
            let name = format!("{what}.onnx");
            builder().pass(step).build().unwrap().run(Model::open(&half).unwrap(), place.path(&name)).unwrap_or_else(|e| panic!("{opset}, {what}: {e}"));
            let graph = place.written(&name).graph.unwrap();
            let count = |op: &str| graph.node.iter().filter(|node| node.op_type() == op).count();
            match what {
                "integers" => assert_eq!([count("MatMulInteger"), count("MatMul"), count("Gemm")], [4, 0, 0]),
                "floats" => assert_eq!(count("Cast"), 0),
                _ => {}
            }
            if crate::common::onnxruntime::has_onnx_runtime() {
                let distance = distance(&place.input(), &place.path(&name));
                assert!(distance < tolerance, "opset {opset}, {what}: {distance}");
            }
        }
    }
}

/// Casts that are not supported are named.
#[test]
fn weights_read_through_other_casts_are_noted() {
    let mut model = layers(17);
    let graph = model.graph.as_mut().unwrap();
    let first = graph.initializer.iter_mut().find(|tensor| tensor.name() == "first").unwrap();
    let doubles = numbers(160).iter().flat_map(|value| f64::from(*value).to_le_bytes()).collect();
    *first = TensorProto { raw_data: Some(doubles), ..tensor("doubles", DataType::Double, &[20, 8]) };
    graph.node.insert(0, node("Cast", &["doubles"], &["first"], vec![AttributeProto::int("to", DataType::Float as i64)]));
    let place = Place::new(&model);
    let report = builder().pass(QuantizeDynamic::default()).measure(false).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("1 tensor not treated as weights of layers") && note.contains("`doubles`")), "{:?}", report.notes);
}

#[test]
fn products_quantize_their_inputs_dynamically() {
    for (opset, granularity, symmetric) in
        [(11, GranularityKind::Channel, true), (13, GranularityKind::Channel, false), (17, GranularityKind::Tensor, true), (21, GranularityKind::Channel, true)]
    {
        let place = Place::new(&layers(opset));
        let step: Step = QuantizeDynamic { granularity, symmetric, embeddings: true, ..QuantizeDynamic::default() }.into();
        let report = builder().pass(step.clone()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        assert_eq!(report.passes[0].tensors_changed, 5, "four matrices and a table");
        // Each with scales, and with zero points if these are not zero.
        assert_eq!(report.size.after.tensors, report.size.before.tensors + if symmetric { 5 } else { 10 });
        let written = ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap();
        let graph = written.graph.unwrap();
        let count = |op: &str| graph.node.iter().filter(|node| node.op_type() == op).count();
        // The last two products share an input.
        assert_eq!([count("MatMulInteger"), count("DynamicQuantizeLinear"), count("MatMul"), count("Gemm"), count("Conv")], [4, 3, 0, 0, 1]);
        let names: Vec<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        assert!(names.contains(&"first/quantized") && !names.contains(&"first") && names.contains(&"kernel"), "{names:?}");
        let first = graph.initializer.iter().find(|tensor| tensor.name() == "first/quantized").unwrap();
        assert_eq!((first.data_type(), first.dims.as_slice()), (DataType::Int8, &[20, 8][..]));
        let finished = graph.node.iter().find(|node| node.output == ["a"]).unwrap();
        assert_eq!(finished.name(), "/first/MatMul");
        let reference = place.path("reference.onnx");
        std::fs::write(&reference, with_weights(layers(opset), &applied(&step, place.open())).encode_to_vec()).unwrap();
        if crate::common::onnxruntime::has_onnx_runtime() {
            let distance = distance(&reference, &place.path("out.onnx"));
            assert!(distance < 0.03 && distance > 0.0, "opset {opset}: {distance}");
            let fidelity = &report.fidelity.as_ref().unwrap().fidelity;
            assert!(fidelity.cosine > 0.999, "{fidelity:?}");
        }
    }
    // Otherwise weights are still stored as integers, and a note states why.
    let mut scaled = layers(13);
    scaled.graph.as_mut().unwrap().node[1].attribute.push(AttributeProto { f: Some(0.5), i: None, r#type: Some(1), ..AttributeProto::int("alpha", 0) });
    let mut halves = layers(13);
    let graph = halves.graph.as_mut().unwrap();
    graph.node.truncate(1);
    graph.initializer = vec![TensorProto { raw_data: Some(vec![0; 320]), ..tensor("first", DataType::Float16, &[20, 8]) }];
    graph.input = vec![value("x", DataType::Float16, &["3", "20"])];
    graph.output = vec![value("a", DataType::Float16, &["3", "8"])];
    for (model, note) in [
        (layers(9), "4 quantized weights, stored as integers but applied to float activations, because the opset of this file has no dynamic quantization"),
        (scaled, "1 quantized weight, stored as integers but applied to float activations, because `alpha`, `beta` or `transA` of a Gemm"),
        (halves, "1 quantized weight, stored as integers but applied to float activations, because integer products return float32"),
    ] {
        let place = Place::new(&model);
        let report = builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        assert!(report.notes.iter().any(|found| found.contains(note)), "{note}: {:?}", report.notes);
    }
}

#[test]
fn new_nodes_have_unique_names() {
    for name in ["x/quantized", "x", "w"] {
        let mut model = layers(13);
        let graph = model.graph.as_mut().unwrap();
        let stays = graph.node.iter_mut().find(|node| !["MatMul", "Gemm", "Conv"].contains(&node.op_type())).unwrap();
        stays.name = Some(name.to_owned());
        let place = Place::new(&model);
        for (out, pass) in [("bytes.onnx", QuantizeDynamic::default().into()), ("halves.onnx", Cast { to: FloatFormat::F16, ..Cast::default() }.into())] {
            let pass: Step = pass;
            builder().pass(pass).build().unwrap().run(place.open(), place.path(out)).unwrap_or_else(|e| panic!("{name}, {out}: {e}"));
            let nodes = place.written(out).graph.unwrap().node;
            let named: Vec<&str> = nodes.iter().map(|node| node.name()).filter(|name| !name.is_empty()).collect();
            let different: std::collections::BTreeSet<&str> = named.iter().copied().collect();
            assert_eq!((named.len(), named.contains(&name)), (different.len(), true), "{name}, {out}: {named:?}");
        }
    }
}

/// Files in which two nodes, or a node and the graph's outputs, read the matrix `w`.
fn shared_weights(opset: i64) -> Vec<(&'static str, ModelProto)> {
    let rows = || vec![AttributeProto::int("transB", 1)];
    let index = || TensorProto { int64_data: vec![3, 19, 3], ..tensor("rows", DataType::Int64, &[3]) };
    let file = |what, dims: &[i64], nodes: Vec<NodeProto>, more: Vec<TensorProto>, width: &str| {
        let mut model = layers(opset);
        let graph = model.graph.as_mut().unwrap();
        graph.node = nodes;
        graph.initializer = [vec![raw("w", dims)], more].concat();
        graph.output = vec![value("y", DataType::Float, &["3", width])];
        (what, model)
    };
    let (tanh, add) = (|| node("Tanh", &["x"], &["t"], vec![]), || node("Add", &["a", "b"], &["y"], vec![]));
    let matmul = |x, y| node("MatMul", &[x, "w"], &[y], vec![]);
    let mut shown = file("MatMul and an output", &[20, 8], vec![matmul("x", "y"), node("Identity", &["w"], &["same"], vec![])], vec![], "8");
    shown.1.graph.as_mut().unwrap().output.push(value("same", DataType::Float, &["20", "8"]));
    vec![
        file("two MatMul", &[20, 8], vec![matmul("x", "a"), tanh(), matmul("t", "b"), add()], vec![], "8"),
        file("MatMul and Gemm", &[20, 8], vec![matmul("x", "a"), node("Gemm", &["a", "w"], &["y"], rows())], vec![], "20"),
        file("Gemm and MatMul", &[8, 20], vec![node("Gemm", &["x", "w"], &["a"], rows()), matmul("a", "y")], vec![], "20"),
        file("MatMul and Gather", &[20, 8], vec![matmul("x", "a"), node("Gather", &["w", "rows"], &["b"], vec![]), add()], vec![index()], "8"),
        file(
            "the second weight is read first",
            &[20, 8],
            vec![node("MatMul", &["x", "v"], &["b"], vec![]), matmul("x", "a"), add()],
            vec![raw("v", &[20, 8])],
            "8",
        ),
        shown,
    ]
}

/// Checks the topological order of nodes, as `onnx.checker` does.
fn require_sorted(what: &str, graph: &GraphProto) {
    let initializers = graph.initializer.iter().map(|tensor| tensor.name());
    let mut known: Vec<&str> = initializers.chain(graph.input.iter().map(|input| input.name())).collect();
    for node in &graph.node {
        let missing = node.input.iter().find(|name| !name.is_empty() && !known.contains(&name.as_str()));
        assert!(missing.is_none(), "{what}: `{}` reads `{}` before it is computed", node.name(), missing.unwrap());
        known.extend(node.output.iter().map(String::as_str));
    }
}

#[test]
fn a_weight_of_several_readers_is_quantized_once_and_read_in_each_orientation() {
    let pass = |granularity, symmetric| QuantizeDynamic {
        granularity,
        symmetric,
        group_size: (granularity == GranularityKind::Group).then_some(4),
        targets: vec!["re:^[vw]$".parse().unwrap()],
        ..QuantizeDynamic::default()
    };
    let passes = [
        pass(GranularityKind::Channel, true),
        pass(GranularityKind::Channel, false),
        pass(GranularityKind::Tensor, false),
        QuantizeDynamic { activations: ActivationRounding::None, ..pass(GranularityKind::Group, true) },
    ];
    for opset in [11, 13, 21] {
        for (what, model) in shared_weights(opset) {
            let place = Place::new(&model);
            for (number, pass) in passes.iter().enumerate() {
                let what = format!("{what}, opset {opset}, pass {number}");
                let (out, step) = (place.path(&format!("{number}.onnx")), Step::from(pass.clone()));
                builder().pass(step.clone()).build().unwrap().run(place.open(), &out).unwrap_or_else(|e| panic!("{what}: {e}"));
                let graph = place.written(&format!("{number}.onnx")).graph.unwrap();
                require_sorted(&what, &graph);
                let mut read: Vec<&str> = graph.node.iter().filter(|node| node.op_type() == "MatMulInteger").map(|node| node.input[1].as_str()).collect();
                let products = read.len();
                read.dedup();
                assert_eq!(read.len(), products, "{what}");
                if crate::common::onnxruntime::has_onnx_runtime() {
                    let reference = place.path("reference.onnx");
                    std::fs::write(&reference, with_weights(model.clone(), &applied(&step, place.open())).encode_to_vec()).unwrap();
                    let distance = distance(&reference, &out);
                    assert!(distance < if products == 0 { 1e-5 } else { 0.03 }, "{what}: {distance}");
                }
            }
        }
    }
}

#[test]
fn layers_are_named_by_their_weights_and_by_their_nodes() {
    let place = Place::new(&layers(17));
    let changed = |pass: QuantizeDynamic| {
        let plan = builder().pass(pass).build().and_then(|pipeline| pipeline.plan(&place.open()));
        plan.map(|plan| plan.passes[0].selected.clone()).map_err(|e| e.to_string())
    };
    let named = |name: &str| vec![name.parse().unwrap()];
    assert_eq!(changed(QuantizeDynamic::default()).unwrap(), ["first", "fourth", "second", "third"]);
    assert_eq!(changed(QuantizeDynamic { targets: named("/first/*"), ..QuantizeDynamic::default() }).unwrap(), ["first"]);
    assert_eq!(changed(QuantizeDynamic { ignore: named("/first/MatMul"), ..QuantizeDynamic::default() }).unwrap(), ["fourth", "second", "third"]);
    assert!(changed(QuantizeDynamic { ignore: named("/second/MatMul"), ..QuantizeDynamic::default() }).unwrap_err().contains("matches no tensor"));
    let pruned = builder().pass(PruneUnstructured::default()).build().unwrap().plan(&place.open()).unwrap();
    assert_eq!(pruned.passes[0].selected, ["first", "fourth", "kernel", "second", "third"]);
}

#[test]
fn infinities_of_a_graph_are_preserved() {
    let mut masked = model();
    let mask: Vec<u8> = [f32::NEG_INFINITY; 40].iter().flat_map(|v| v.to_le_bytes()).collect();
    masked.graph.as_mut().unwrap().initializer[1] = TensorProto { raw_data: Some(mask), ..tensor("bias", DataType::Float, &[40]) };
    let place = Place::new(&masked);
    builder().measure(false).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    let cast = Cast { targets: vec!["bias".parse().unwrap()], ..Cast::default() };
    let error = builder().pass(cast).measure(false).build().unwrap().run(place.open(), place.path("cast.onnx")).unwrap_err();
    assert!(matches!(error, Error::NotFinite { ref name, count: 40 } if name == "bias"), "{error}");
}

#[test]
fn convolutions_are_left_to_static_quantization() {
    let graph = GraphProto {
        name: Some("convolution".into()),
        node: vec![node("Conv", &["x", "kernel"], &["y"], vec![])],
        initializer: vec![raw("kernel", &[4, 3, 2, 2])],
        input: vec![value("x", DataType::Float, &["1", "3", "8", "8"])],
        output: vec![value("y", DataType::Float, &["1", "4", "7", "7"])],
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(17) }];
    let place = Place::new(&ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() });
    for targets in [vec![], vec!["kernel".parse().unwrap()]] {
        let steps: [Step; 2] =
            [Quantize { targets: targets.clone(), ..Quantize::default() }.into(), QuantizeDynamic { targets, ..QuantizeDynamic::default() }.into()];
        for step in steps {
            let error = builder().pass(step.clone()).build().unwrap().plan(&place.open()).unwrap_err();
            let text = format!("{error}; {}", error.hint().unwrap_or_default());
            assert!(text.contains("`quantize-static` with calibration data") && !text.contains("safetensors"), "{}: {text}", step.pass().name());
        }
    }
}
