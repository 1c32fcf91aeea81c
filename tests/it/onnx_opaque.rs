//! Nodes of ONNX files without a typed form: executed as opaque subgraphs, preserved by quantization,
//! and written unchanged.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::nodes;
use crate::common::onnxruntime;
use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};
use compress::internal::RunState;
use compress::pass::{Context, Pass, QuantizeStatic, Smooth, Step};
use compress::pipeline::ResultCache;
use compress::{Model, Pipeline};
use compress_core::store::OpenSizes;
use compress_core::work::{Cancel, MemoryLimit, Silent, Work};
use compress_engine::data::{Data, DataSets};
use compress_engine::evaluation::Subject;
use compress_graph::ir::Op;
use compress_onnx::proto::{AttributeProto, DataType, Dimension, GraphProto, ModelProto, NodeProto, TensorProto};
use prost::Message;

use crate::common::nodes::{close, executed, floats, in_runtime, ints, model, node, numbers, sample, value};

/// An attribute that contains a graph.
fn body(name: &str, nodes: Vec<NodeProto>, initializer: Vec<TensorProto>, outputs: &[&str]) -> AttributeProto {
    let output = outputs.iter().map(|output| value(output, DataType::Float, None)).collect();
    let graph = GraphProto { name: Some(name.into()), node: nodes, initializer, output, ..GraphProto::default() };
    AttributeProto { g: Some(graph), i: None, r#type: Some(5), ..AttributeProto::int(name, 0) }
}

/// Models with nodes without a typed form between their layers, and the number of opaque subgraphs.
fn cases() -> Vec<(&'static str, usize, ModelProto)> {
    let list = |name: &str, values: &[i64]| AttributeProto::ints(name, values.iter().copied());
    let layer = |x: &str, weight: &str, y: &str| node("MatMul", &[x, weight], y, vec![]);
    let weights = || vec![floats("first", &[4, 6]), floats("second", &[6, 4])];
    let positive = vec![
        node("ReduceMax", &["x"], "largest", vec![AttributeProto::int("keepdims", 0)]),
        node("Less", &["largest", "limit"], "small", vec![]),
        layer("x", "first", "a"),
        node(
            "If",
            &["small"],
            "b",
            vec![
                body("then_branch", vec![node("Add", &["a", "within"], "t", vec![])], vec![floats("within", &[6])], &["t"]),
                body("else_branch", vec![layer("x", "turned", "e")], vec![], &["e"]),
            ],
        ),
        layer("b", "second", "y"),
    ];
    // The graph also has a weight `first`.
    let shadowed = vec![
        positive[0].clone(),
        positive[1].clone(),
        positive[2].clone(),
        node(
            "If",
            &["small"],
            "b",
            vec![
                body("then_branch", vec![node("Add", &["a", "first"], "b", vec![])], vec![floats("first", &[6])], &["b"]),
                body("else_branch", vec![node("Cos", &["a"], "t", vec![])], vec![], &["t"]),
            ],
        ),
        layer("b", "second", "y"),
    ];
    // Two results: one is read by a layer directly, the other one by another node first.
    let both = |node: NodeProto| NodeProto { output: vec!["left".into(), "right".into()], ..node };
    let ends = |right: &str| vec![layer("left", "second", "b"), layer(right, "third", "c"), node("Add", &["b", "c"], "y", vec![])];
    let chosen = vec![
        positive[0].clone(),
        positive[1].clone(),
        positive[2].clone(),
        both(node(
            "If",
            &["small"],
            "",
            vec![
                body("then_branch", vec![node("Cos", &["a"], "t", vec![]), node("Sin", &["a"], "u", vec![])], vec![], &["t", "u"]),
                body("else_branch", vec![node("Sin", &["a"], "t", vec![]), node("Cos", &["a"], "u", vec![])], vec![], &["t", "u"]),
            ],
        )),
    ];
    let largest = vec![
        layer("x", "first", "a"),
        both(node("TopK", &["a", "count"], "", vec![])),
        node("GatherElements", &["a", "right"], "found", vec![AttributeProto::int("axis", 1)]),
    ];
    let limit = TensorProto { dims: vec![], ..nodes::given("limit", &[], &[100.0]) };
    let shaped = vec![
        layer("x", "first", "a"),
        node("Shape", &["a"], "sizes", vec![]),
        node("ConstantOfShape", &["sizes"], "zeros", vec![]),
        node("Cos", &["zeros"], "ones", vec![]),
        node("Add", &["a", "ones"], "b", vec![]),
        layer("b", "second", "y"),
    ];
    vec![
        ("one node", 1, model(13, &[0, 4], vec![layer("x", "first", "a"), node("Cos", &["a"], "b", vec![]), layer("b", "second", "y")], weights())),
        (
            "a chain whose attributes become inputs",
            1,
            model(
                11,
                &[0, 4],
                vec![
                    layer("x", "first", "a"),
                    node("Sign", &["a"], "b", vec![]),
                    node("CumSum", &["b", "axis"], "c", vec![]),
                    node("Unsqueeze", &["c"], "d", vec![list("axes", &[0])]),
                    node("Squeeze", &["d"], "e", vec![list("axes", &[0])]),
                    layer("e", "second", "y"),
                ],
                [weights(), vec![TensorProto { dims: vec![], ..ints("axis", &[1]) }]].concat(),
            ),
        ),
        ("a body of two results", 2, model(13, &[0, 4], [chosen, ends("right")].concat(), [weights(), vec![floats("third", &[6, 4]), limit.clone()]].concat())),
        (
            "a node of two results",
            2,
            model(
                11,
                &[0, 4],
                [largest, ends("found")].concat(),
                vec![floats("first", &[4, 6]), floats("second", &[3, 4]), floats("third", &[3, 4]), ints("count", &[3])],
            ),
        ),
        ("a body with a tensor called as a weight of the graph", 1, model(11, &[0, 4], shadowed, [weights(), vec![limit.clone()]].concat())),
        ("bodies that read weights around and within", 1, model(11, &[0, 4], positive, [weights(), vec![floats("turned", &[4, 6]), limit]].concat())),
        ("what follows from sizes alone", 1, model(13, &[0, 4], shaped, weights())),
        (
            "a norm over no axis",
            1,
            model(
                18,
                &[0, 4],
                vec![layer("x", "first", "a"), node("ReduceL2", &["a"], "b", vec![AttributeProto::int("noop_with_empty_axes", 1)]), layer("b", "second", "y")],
                weights(),
            ),
        ),
        (
            "another output of a node",
            2,
            model(
                13,
                &[0, 4],
                vec![
                    layer("x", "first", "a"),
                    NodeProto { output: vec!["b".into(), "places".into()], ..node("TopK", &["a", "count"], "b", vec![]) },
                    node("Relu", &["b"], "c", vec![]),
                    node("ScatterElements", &["a", "places", "b"], "d", vec![AttributeProto::int("axis", 1)]),
                    node("Concat", &["c", "d"], "e", vec![AttributeProto::int("axis", 1)]),
                    layer("e", "wide", "y"),
                ],
                vec![floats("first", &[4, 6]), ints("count", &[2]), floats("wide", &[8, 4])],
            ),
        ),
        (
            "scales that determine the shape",
            1,
            model(
                13,
                &[0, 4],
                vec![layer("x", "first", "a"), node("Resize", &["a", "", "scales"], "b", vec![AttributeProto::text("mode", "cubic")]), layer("b", "wide", "y")],
                vec![floats("first", &[4, 6]), nodes::given("scales", &[2], &[1.0, 2.0]), floats("wide", &[12, 4])],
            ),
        ),
    ]
}

fn pieces(model: &Model) -> usize {
    model.graph().unwrap().nodes().iter().filter(|node| matches!(node.op, Op::Opaque(_))).count()
}

#[test]
fn opaque_subgraphs_are_executed_and_written_unchanged() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    for (what, count, model) in cases() {
        let folder = tempfile::tempdir().unwrap();
        let (path, out, samples) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"), folder.path().join("samples.safetensors"));
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let opened = Model::open(&path).unwrap();
        assert_eq!(pieces(&opened), count, "{what}: {}", opened.graph().unwrap());
        let inputs = sample(&[0, 4]);
        close(what, &executed(opened.clone(), &inputs).unwrap(), &in_runtime(&path, &inputs));

        // Quantized outputs, simulated and in ONNX Runtime.
        // More samples than are used for calibration, so that none of these is held out.
        let many = Tensor::from_vec(numbers(72 * 4, 0.7), (72, 4), &Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("x".to_owned(), many.clone())].into(), &samples).unwrap();
        let calibration = Data { arrays: Some(samples.clone()), samples: Some(64), ..Data::default() };
        let data = DataSets { calibration: Some(calibration.clone()), ..DataSets::default() };
        let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
        let context = Context { work, seed: 0, data: &data, device: Device::Cpu, memory: MemoryLimit::default(), memory_tracker: None, checkpoints: None };
        let pass = QuantizeStatic::default();
        let (simulated, _) = pass.plan(&opened, &RunState::default()).unwrap().execute(&context).unwrap();
        let built = Pipeline::builder().pass(Step::from(pass)).calibration(calibration).threads(1).build().unwrap();
        let report = built.run(opened.clone(), &out).unwrap();
        assert!(report.notes.iter().any(|note| note.starts_with("left in floats: ") && note.contains("Opaque (")), "{what}: {:?}", report.notes);
        let inputs: BTreeMap<String, Tensor> = [("x".to_owned(), many.narrow(0, 0, 5).unwrap())].into();
        let mut subject = Subject::from_model(simulated).unwrap();
        let ours = subject.load(&Device::Cpu, &work).unwrap().run(&inputs).unwrap().remove("y").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (theirs, float) = (in_runtime(&out, &inputs).1, in_runtime(&path, &inputs).1);
        let largest = float.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / (a.len() as f32 * largest);
        assert!(distance(&ours, &theirs) < 0.002, "{what}: {ours:?} simulated, {theirs:?} in ONNX Runtime");
        assert!(distance(&theirs, &float) < 0.03, "{what}: {theirs:?} quantized, {float:?} in floats");

        let written = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap();
        let graph = written.graph.unwrap();
        let operators: BTreeSet<&str> = graph.node.iter().map(|node| node.op_type()).collect();
        assert!(operators.contains("QuantizeLinear") && operators.contains("DequantizeLinear"), "{what}: {operators:?}");
        let rows = graph.input[0].r#type.as_ref().unwrap().tensor_type.as_ref().unwrap().shape.as_ref().unwrap().dim[0].value.clone();
        assert_eq!(rows, Some(Dimension::DimParam("n".into())), "{what}");
    }
}

/// A graph attribute is executed with the weights that a pass has changed.
#[test]
fn graph_attributes_use_the_weights_of_the_model() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let (_, _, model) = cases().into_iter().find(|(what, ..)| what.starts_with("bodies that read")).unwrap();
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    let mut opened = Model::open(&path).unwrap();
    let inputs = sample(&[0, 4]);
    let before = executed(opened.clone(), &inputs).unwrap();
    let zero = opened.weights.by_name["first"].clone();
    assert!(opened.graph().unwrap().params().any(|(_, value)| value.name == "within"));
    opened.weights.by_name.insert("within".into(), flat(&zero));
    let after = executed(opened, &inputs).unwrap();
    assert!(before.1.iter().zip(&after.1).any(|(a, b)| (a - b).abs() > 1e-3));
}

/// The first six numbers of a weight.
fn flat(weight: &compress_core::store::Weight) -> compress_core::store::Weight {
    let bytes: Vec<u8> = weight.floats("first").unwrap().iter().take(6).flat_map(|value| value.to_le_bytes()).collect();
    let source = compress_core::store::Bytes { dtype: compress_core::store::DType::F32, bytes };
    compress_core::store::Weight::new(compress_core::store::DType::F32, vec![6], compress_core::store::Encoding::Dense, std::sync::Arc::new(source))
}

/// A file of samples with four numbers each, in a folder.
fn calibration(folder: &std::path::Path, samples: usize) -> Data {
    let path = folder.join("samples.safetensors");
    let many = Tensor::from_vec(numbers(samples * 4, 0.7), (samples, 4), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), many)].into(), &path).unwrap();
    Data { arrays: Some(path), ..Data::default() }
}

/// A file with a fixed batch size of four is calibrated and evaluated in batches of four, without
/// incomplete batches.
#[test]
fn fixed_batch_sizes_are_supported() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"));
    let nodes = vec![node("MatMul", &["x", "first"], "a", vec![]), node("Relu", &["a"], "b", vec![]), node("MatMul", &["b", "second"], "y", vec![])];
    std::fs::write(&path, model(13, &[4, 4], nodes, vec![floats("first", &[4, 6]), floats("second", &[6, 4])]).encode_to_vec()).unwrap();
    let run = |smooth| {
        let pass = Step::from(QuantizeStatic { smooth, ..QuantizeStatic::default() });
        let built = Pipeline::builder().pass(pass).calibration(calibration(folder.path(), 12)).threads(1).force(true).build().unwrap();
        let report = built.run(Model::open(&path).unwrap(), &out).unwrap();
        let measured = report.fidelity.clone().unwrap();
        assert_eq!(measured.samples_from, compress_engine::evaluation::SamplesFrom::HeldOut);
        (report, measured.fidelity.cosine)
    };
    let (plain, (report, smoothed)) = (run(Smooth::None).1, run(Smooth::default()));
    // Rescaling does not gain on so few held-out samples; it measures 0.0012 less.
    assert!(plain > 0.98 && smoothed >= plain - 0.002, "{plain} and {smoothed}");
    assert!(report.notes.iter().any(|note| note.contains("the first 8 calibration samples")), "{:?}", report.notes);
}

/// A file with an opaque subgraph that requires two differently named sizes to be equal.
fn of_equal_sizes() -> ModelProto {
    let modulo = node("Mod", &["x", "h"], "a", vec![AttributeProto::int("fmod", 1)]);
    let nodes = vec![modulo, node("MatMul", &["a", "first"], "b", vec![]), node("MatMul", &["b", "second"], "y", vec![])];
    let mut file = model(13, &[1, 0], nodes, vec![floats("first", &[4, 6]), floats("second", &[6, 4])]);
    let mut h = value("h", DataType::Float, Some(&[1, 0]));
    let shape = h.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()).and_then(|tensor| tensor.shape.as_mut()).unwrap();
    shape.dim[1].value = Some(Dimension::DimParam("a size / 2".into()));
    file.graph.as_mut().unwrap().input.push(h);
    file
}

#[test]
fn sizes_that_a_file_requires_can_be_specified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, of_equal_sizes().encode_to_vec()).unwrap();
    let sizes = |told: &[(&str, &str)]| -> OpenSizes { told.iter().map(|(name, size)| ((*name).to_owned(), size.parse().unwrap())).collect() };
    let opened = || Model::open(&path).unwrap();
    for (told, wanted) in [
        (sizes(&[("m", "4")]), "`m` is neither an open dimension nor an input; "),
        (sizes(&[("y", "1x4")]), "`y` is not an input; "),
        (sizes(&[("x", "4")]), "`x` has 2 axes, but 1 sizes are specified"),
        (sizes(&[("x", "2x4")]), "`x` has a size of 1, but 2 is specified"),
        (sizes(&[("n", "0")]), "`n` has a size of zero"),
        (sizes(&[("n", "9223372036854775808")]), "`n` is 9223372036854775808, which exceeds the maximum size 9223372036854775807"),
        (sizes(&[("n", "4"), ("x", "1x5")]), "sets a dimension to 5 that is 4 elsewhere"),
    ] {
        let error = opened().fix_sizes(&told).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains("has open dimensions in x: float[1, n], h: float[1, a size / 2]"), "{error}");
    }
    let told = opened();
    told.fix_sizes(&sizes(&[("n", "4"), ("a size / 2", "4")])).unwrap();
    told.fix_sizes(&sizes(&[("x", "1x4"), ("h", "1x4")])).unwrap();
    assert!(told.fix_sizes(&sizes(&[("x", "1x4")])).unwrap_err().to_string().contains("was already opened with other sizes"));
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let error = opened().graph().unwrap_err();
    let hint = error.hint().unwrap();
    assert!(hint.contains("`sizes`, such as NAME=1x512") && hint.contains("open dimensions are in x: float[1, n], h: float[1, a size / 2]"), "{hint}");
    assert_eq!(told.graph().unwrap().inputs().map(|(_, value)| value.ty.to_string()).collect::<Vec<_>>(), ["float[1, 4]", "float[1, 4]"]);
    let numbers = |seed: f32| Tensor::from_vec(numbers(4, seed), (1, 4), &Device::Cpu).unwrap();
    let inputs: BTreeMap<String, Tensor> = [("x".to_owned(), numbers(0.3)), ("h".to_owned(), numbers(2.0))].into();
    close("told", &executed(told, &inputs).unwrap(), &in_runtime(&path, &inputs));
    // The sizes also apply to runs, which evaluate on samples of these sizes.
    let samples = folder.path().join("samples.safetensors");
    let rows = |seed: f32| Tensor::from_vec(nodes::numbers(64, seed), (16, 4), &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("x".to_owned(), rows(0.3)), ("h".to_owned(), rows(2.0))].into(), &samples).unwrap();
    let calibration = Data { arrays: Some(samples), ..Data::default() };
    let builder = || Pipeline::builder().pass(Step::from(QuantizeStatic::default())).calibration(calibration.clone()).threads(1);
    assert!(builder().build().unwrap().run(opened(), folder.path().join("no.onnx")).is_err());
    let report = builder().sizes(sizes(&[("n", "4"), ("h", "1x4")])).build().unwrap().run(opened(), folder.path().join("out.onnx")).unwrap();
    assert!(report.fidelity.unwrap().fidelity.cosine > 0.99);
    // The written file is verified on samples of these sizes too, at the end of the run and later.
    assert!(!report.notes.iter().any(|note| note.contains("was not verified")), "{:?}", report.notes);
    let stated = |note: &String| note.starts_with("the changed graph supports only the specified sizes") && note.ends_with(": h=1x4, n=4");
    assert!(report.notes.iter().any(stated), "{:?}", report.notes);
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let run = compress::pipeline::verify(&folder.path().join("out.onnx"), &work).unwrap().pop().unwrap();
    assert!(run.ok && run.path == "out.onnx, run" && run.finding.contains("within one step"), "{run:?}");
    // A cached result restores weights that nodes without a typed form read, and depends on the sizes of
    // the recipe.
    let cache = ResultCache::new(folder.path().join("cache"), std::time::Duration::ZERO);
    let again = |told: OpenSizes| {
        let built = builder().sizes(told).cache(cache.clone(), true).force(true).build().unwrap();
        let report = built.run(opened(), folder.path().join("again.onnx")).unwrap();
        (report.notes.iter().any(|note| note.contains("was reused from an earlier run")), std::fs::read(folder.path().join("again.onnx")).unwrap())
    };
    let fresh = std::fs::read(folder.path().join("out.onnx")).unwrap();
    for reused in [false, true] {
        assert_eq!(again(sizes(&[("n", "4"), ("h", "1x4")])), (reused, fresh.clone()));
    }
    assert!(!again(sizes(&[("n", "4"), ("a size / 2", "4")])).0);
    let dynamic = Pipeline::builder().pass(Step::from(compress::pass::PruneUnstructured::default())).sizes(sizes(&[("n", "4"), ("h", "1x4")]));
    let report = dynamic.threads(1).build().unwrap().run(opened(), folder.path().join("pruned.onnx")).unwrap();
    assert!(report.fidelity.is_some(), "{:?}", report.notes);
}

/// A scalar input is set to the specified number.
#[test]
fn numbers_that_a_file_requires_can_be_specified() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    // The row with that index, counted from four; it exists.
    let nodes = vec![
        node("Sub", &["k", "four"], "at", vec![]),
        node("Gather", &["x", "at"], "a", vec![AttributeProto::int("axis", 0)]),
        node("MatMul", &["a", "first"], "y", vec![]),
    ];
    let mut file = model(13, &[1, 4], nodes, vec![floats("first", &[4, 6]), ints("four", &[4])]);
    file.graph.as_mut().unwrap().input.push(value("k", DataType::Int64, Some(&[])));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    assert!(Model::open(&path).unwrap().graph().is_err());
    let opened = Model::open(&path).unwrap();
    opened.fix_sizes(&[("k".to_owned(), "4".parse().unwrap())].into()).unwrap();
    let x = Tensor::from_vec(numbers(4, 0.3), (1, 4), &Device::Cpu).unwrap();
    let inputs: BTreeMap<String, Tensor> = [("x".to_owned(), x), ("k".to_owned(), Tensor::new(4i64, &Device::Cpu).unwrap())].into();
    close("told", &executed(opened, &inputs).unwrap(), &in_runtime(&path, &inputs));
    // Earlier attempts are repeated, and a run is evaluated with the number.
    let opened = Model::open(&path).unwrap();
    assert!(opened.graph().is_err());
    opened.fix_sizes(&[("k".to_owned(), "4".parse().unwrap())].into()).unwrap();
    opened.graph().unwrap();
    let subject = compress_engine::evaluation::Subject::open_original_file(&opened, 1).unwrap();
    assert_eq!(subject.target().inputs.iter().map(|input| input.number).collect::<Vec<_>>(), [None, Some(4)]);
    Model::open(&path).unwrap().fix_sizes(&[("k".to_owned(), "0".parse().unwrap())].into()).unwrap();
    let graph = file.graph.as_mut().unwrap();
    *graph.input.last_mut().unwrap() = value("k", DataType::Float, Some(&[]));
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let error = Model::open(&path).unwrap().fix_sizes(&[("k".to_owned(), "4".parse().unwrap())].into()).unwrap_err().to_string();
    assert!(error.contains("`k` is a scalar of another type"), "{error}");
}

/// Values that would be expanded beyond the memory limit are reported before anything runs.
#[test]
fn expanding_values_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    for (what, nodes, numbers) in [
        ("Expand", vec![node("Expand", &["x", "shape"], "y", vec![])], vec![1 << 20, 1 << 10, 4]),
        ("Tile", vec![node("Tile", &["x", "shape"], "y", vec![])], vec![1 << 20, 1 << 10]),
        (
            "Tile",
            vec![node("Tile", &["x", "shape"], "a", vec![]), node("Abs", &["a"], "b", vec![]), node("Tile", &["b", "shape"], "y", vec![])],
            vec![1 << 8, 1 << 8],
        ),
    ] {
        std::fs::write(&path, model(13, &[0, 4], nodes, vec![ints("shape", &numbers)]).encode_to_vec()).unwrap();
        let error = Model::open(&path).unwrap().graph().unwrap_err().to_string();
        assert!(error.contains(&format!("({what}) creates at least")) && error.contains("exceeds the limit of 268435456"), "{what}: {error}");
    }
}

/// Attention as one operator of another domain is not changed, its weights are recognized, and the
/// layers around it are quantized.
#[test]
fn attention_of_another_domain_is_opaque() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (path, out, samples) = (folder.path().join("model.onnx"), folder.path().join("out.onnx"), folder.path().join("samples.safetensors"));
    let attention = node("Attention", &["a", "qkv", "bias"], "b", vec![AttributeProto::int("num_heads", 2)]);
    let multi_head = node("MultiHeadAttention", &["b", "b", "b"], "c", vec![AttributeProto::int("num_heads", 2)]);
    let [attention, multi_head] = [attention, multi_head].map(|node| NodeProto { domain: Some("com.microsoft".into()), ..node });
    let nodes = vec![node("MatMul", &["x", "first"], "a", vec![]), attention, multi_head, node("MatMul", &["c", "second"], "y", vec![])];
    let weights = vec![floats("first", &[8, 8]), floats("qkv", &[8, 24]), floats("bias", &[24]), floats("second", &[8, 4])];
    let mut file = model(17, &[0, 5, 8], nodes, weights);
    file.opset_import.push(compress_onnx::proto::OperatorSetIdProto { domain: Some("com.microsoft".into()), version: Some(1) });
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let opened = Model::open(&path).unwrap();
    assert_eq!((pieces(&opened), opened.graph().unwrap().params().count()), (1, 4), "{}", opened.graph().unwrap());
    let inputs = sample(&[0, 5, 8]);
    close("as it is", &executed(opened.clone(), &inputs).unwrap(), &in_runtime(&path, &inputs));
    candle_core::safetensors::save(&sample(&[32, 5, 8]).into_iter().collect(), &samples).unwrap();
    let calibration = Data { arrays: Some(samples), ..Data::default() };
    let built = Pipeline::builder().pass(Step::from(QuantizeStatic::default())).calibration(calibration).threads(1).build().unwrap();
    let report = built.run(opened, &out).unwrap();
    assert!(report.fidelity.unwrap().fidelity.cosine > 0.99);
    let written = ModelProto::decode(std::fs::read(&out).unwrap().as_slice()).unwrap();
    assert!(written.opset_import.iter().any(|import| import.domain() == "com.microsoft" && import.version() == 1));
    assert_eq!(written.graph.unwrap().node.iter().filter(|node| node.domain() == "com.microsoft").count(), 2);
}

/// Nodes are copied only to a file of their opset.
#[test]
fn opaque_nodes_of_newer_opsets_are_reported_by_name() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let nodes = vec![node("MatMul", &["x", "first"], "a", vec![]), node("Softsign", &["a"], "b", vec![]), node("MatMul", &["b", "second"], "y", vec![])];
    std::fs::write(&path, model(25, &[0, 4], nodes, vec![floats("first", &[4, 6]), floats("second", &[6, 4])]).encode_to_vec()).unwrap();
    let built = Pipeline::builder().pass(Step::from(QuantizeStatic::default())).calibration(calibration(folder.path(), 12)).threads(1).build().unwrap();
    let error = built.run(Model::open(&path).unwrap(), folder.path().join("out.onnx")).unwrap_err();
    assert!(error.to_string().contains("copying node `b` (Softsign), which has no typed form, from opset 25 to a file of opset 17 to 24"), "{error}");
    assert!(error.hint().unwrap().contains("onnx.version_converter"), "{:?}", error.hint());
}

/// A weight of the graph and a constant of a body have the same name.
#[test]
fn names_with_two_meanings_are_refused() {
    let own = body("then_branch", vec![node("MatMul", &["x", "turned"], "t", vec![])], vec![nodes::given("turned", &[4, 6], &numbers(24, 0.3))], &["t"]);
    let outer = body("else_branch", vec![node("MatMul", &["x", "turned"], "e", vec![])], vec![], &["e"]);
    let graph = vec![
        node("ReduceMean", &["x"], "mean", vec![AttributeProto::int("keepdims", 0)]),
        node("Less", &["mean", "limit"], "small", vec![]),
        node("If", &["small"], "b", vec![own, outer]),
        node("MatMul", &["b", "second"], "y", vec![]),
    ];
    let limit = TensorProto { dims: vec![], ..nodes::given("limit", &[], &[100.0]) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, model(11, &[0, 4], graph, vec![floats("turned", &[4, 6]), floats("second", &[6, 6]), limit]).encode_to_vec()).unwrap();
    let error = Model::open(&path).unwrap().graph().unwrap_err().to_string();
    assert!(error.contains("defines `turned`, and another one reads a value of this name outside"), "{error}");
}
