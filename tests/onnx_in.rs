//! ONNX files as models: opened, written again with nothing or with weights alone changed, and refused where they do not hold together.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::export::{Onnx, Safetensors};
use compress::model::diff;
use compress::onnx::ModelFile;
use compress::onnx::proto::{
    AttributeProto, DataLocation, DataType, Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};
use compress::pass::{ActivationRounding, Cast, FloatFormat, GranularityKind, Palettize, PruneUnstructured, QuantizeDynamic, Step};
use compress::pipeline::verify;
use compress::run_state::RunState;
use compress::runtime::{self, Session};
use compress::work::{Cancel, Silent, Work};
use compress::{Error, Model, Pipeline, Report};
use prost::Message;
use tempfile::TempDir;

fn node(op: &str, inputs: &[&str], outputs: &[&str], attributes: Vec<AttributeProto>) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    NodeProto { op_type: Some(op.into()), input: names(inputs), output: names(outputs), attribute: attributes, ..NodeProto::default() }
}

fn tensor(name: &str, ty: DataType, dims: &[i64]) -> TensorProto {
    TensorProto { name: Some(name.into()), data_type: Some(ty as i32), dims: dims.to_vec(), ..TensorProto::default() }
}

/// Numbers between -1 and 1 that are never zero.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37 + 0.1).sin()).collect()
}

/// A matrix with its axes exchanged.
fn turned(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
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

/// A product, a sum, a lookup of axes, and a choice between two bodies with weights of their own; weights in every kind of place.
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
}

fn builder() -> compress::pipeline::Builder {
    Pipeline::builder().threads(2)
}

/// What ONNX Runtime answers, where there is one.
fn answers(path: &Path) -> Option<BTreeMap<String, Vec<f32>>> {
    runtime::library().ok()?;
    let mut session = Session::open(path, runtime::Options::default()).unwrap();
    let x = Tensor::from_vec(numbers(60), (3, 20), &Device::Cpu).unwrap();
    let inputs = [("x".to_owned(), x), ("positive".to_owned(), Tensor::new(1i64, &Device::Cpu).unwrap())].into();
    let float = |tensor: Tensor| tensor.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    Some(session.run(&inputs).unwrap().into_iter().map(|(name, tensor)| (name, float(tensor))).collect())
}

#[test]
fn weights_are_found_wherever_they_are() {
    let place = Place::new(&model());
    let opened = place.open();
    // A matrix of a product has its outputs first, whatever the file's order.
    let shapes: Vec<(&str, &[usize])> = opened.weights.by_name.iter().map(|(name, w)| (name.as_str(), w.shape.as_slice())).collect();
    assert_eq!(
        shapes,
        [("bias", &[40][..]), ("long", &[600]), ("onnx::MatMul_7", &[40, 20]), ("row", &[1]), ("scale", &[40]), ("shift", &[40]), ("table", &[30, 40])]
    );
    assert_eq!(opened.weights.by_name["onnx::MatMul_7"].floats("").unwrap(), turned(&numbers(800), 20, 40));
    assert_eq!(opened.weights.by_name["bias"].floats("").unwrap(), numbers(40));
    let mut long = Vec::new();
    opened.weights.by_name["long"]
        .visit(1, &mut |block| {
            long.extend(block.now.values.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)));
            Ok(())
        })
        .unwrap();
    assert_eq!(long, (0..600).map(|i| i * i - 5).collect::<Vec<i64>>());
    assert_eq!(opened.weights.metadata["character"], "abc");
    // Two bodies may call different tensors the same: neither is a weight of that name.
    let mut twins = model();
    let bodies = &mut twins.graph.as_mut().unwrap().node[2].attribute;
    let other = bodies[1].g.as_mut().unwrap();
    other.node[0] = constant(raw("scale", &[40]));
    other.node[1].input[1] = "scale".into();
    let place = Place::new(&twins);
    assert!(!place.open().weights.by_name.contains_key("scale"));
    builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert_eq!(std::fs::read(place.path("out.onnx")).unwrap(), twins.encode_to_vec());
}

#[test]
fn a_file_that_nothing_touched_is_written_byte_for_byte() {
    let mut bytes = model().encode_to_vec();
    // A field of the model that nobody knows, and one of its graph: field 7, opened again.
    bytes.extend([0x9a, 0x06, 3, b'a', b'b', b'c']);
    bytes.extend([0x3a, 5, 0x9a, 0x06, 2, b'd', b'e']);
    let place = Place::of(&bytes);
    let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert_eq!(std::fs::read(place.path("out.onnx")).unwrap(), bytes);
    assert_eq!(answers(&place.input()), answers(&place.path("out.onnx")));
    assert_eq!((report.size.before.bytes, report.size.after.bytes), (bytes.len() as u64, bytes.len() as u64));
    assert_eq!(report.size.after.parameters, 40 + 600 + 800 + 1 + 40 + 40 + 1200);
    assert!(report.layers.iter().all(|layer| layer.sqnr_db.is_none()) && report.layers.len() == 7);
    assert_eq!(report.recipe["export"][0]["onnx"]["opset"], 17);
    if runtime::library().is_ok() {
        let fidelity = report.fidelity.as_ref().unwrap_or_else(|| panic!("{:?}", report.notes));
        assert_eq!((fidelity.fidelity.max_abs_error, fidelity.fidelity.cosine), (0.0, 1.0));
    }
    // Beside the file lies what a folder would hold.
    assert_eq!(Report::open(&place.path("out.onnx")).unwrap(), report);
    let checks = verify(&place.path("out.onnx"), &Work { threads: 1, progress: &Silent, cancel: &Cancel::default() }).unwrap();
    assert!(checks.len() > 2 && checks.iter().all(|check| check.ok), "{checks:?}");
    let again = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap_err();
    assert!(again.to_string().contains("exists") && again.hint().unwrap().contains("--force"), "{again}");
    // A folder holds the same under the usual name, and opens.
    builder().build().unwrap().run(place.open(), place.path("out")).unwrap();
    assert_eq!(std::fs::read(place.path("out/model.onnx")).unwrap(), bytes);
    assert_eq!(Model::open(place.path("out")).unwrap().weights.parameters(), report.size.after.parameters);
}

#[test]
fn passes_over_weights_change_these_and_nothing_else() {
    let place = Place::new(&model());
    let prune = PruneUnstructured { targets: ["onnx::MatMul_7", "table", "scale"].map(|name| name.parse().unwrap()).to_vec(), ..PruneUnstructured::default() };
    let pipeline = builder().pass(prune).build().unwrap();
    let plan = pipeline.plan(&place.open()).unwrap();
    assert_eq!((plan.files, plan.output_exact), (vec!["model.onnx".to_owned()], true));
    let report = pipeline.run(place.open(), place.path("out.onnx")).unwrap();
    let written = ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap();
    let mut wanted = model();
    wanted.metadata_props.extend(written.metadata_props.iter().find(|entry| entry.key() == "compress.passes").cloned());
    assert!(wanted.metadata_props.len() == 2);
    let graph = wanted.graph.as_mut().unwrap();
    let pruned = |tensor: &mut TensorProto| {
        let mut values = numbers(tensor.dims.iter().product::<i64>() as usize);
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*a].abs().total_cmp(&values[*b].abs()));
        order[..values.len() / 2].iter().for_each(|at| values[*at] = 0.0);
        tensor.raw_data = Some(values.iter().flat_map(|v| v.to_le_bytes()).collect());
    };
    pruned(&mut graph.initializer[0]);
    pruned(graph.node[3].attribute[0].t.as_mut().unwrap());
    pruned(graph.node[2].attribute[0].g.as_mut().unwrap().node[0].attribute[0].t.as_mut().unwrap());
    assert_eq!(written, wanted);
    assert_eq!(report.passes[0].tensors_changed, 3);
    assert_eq!(report.size.after.tensors, report.size.before.tensors);
    let (before, after) = (place.open(), Model::open(place.path("out.onnx")).unwrap());
    let found = diff(&before, &after, &Work { threads: 1, progress: &Silent, cancel: &Cancel::default() }).unwrap();
    assert_eq!(found.weights.iter().filter(|weight| !weight.equal).count(), 3);
    if runtime::library().is_ok() {
        let fidelity = &report.fidelity.as_ref().unwrap_or_else(|| panic!("{:?}", report.notes)).fidelity;
        assert!(fidelity.cosine < 1.0 && fidelity.cosine > 0.5, "{fidelity:?}");
    }
}

#[test]
fn what_a_graph_does_not_take_is_refused_before_anything_is_written() {
    let place = Place::new(&model());
    let refused = |builder: compress::pipeline::Builder, output: &str| {
        let error = builder.build().and_then(|pipeline| pipeline.run(place.open(), place.path(output))).unwrap_err();
        assert!(!place.path(output).exists(), "{error}");
        error.to_string()
    };
    assert!(refused(builder().export(Safetensors::default()), "out").contains("in.onnx: writing an .onnx model as safetensors"));
    assert!(refused(builder().export(Safetensors::default()), "out.onnx").contains("is a file of ONNX"));
    assert!(refused(builder().export(Onnx { opset: 18, ..Onnx::default() }), "out.onnx").contains("opset"));
}

#[test]
fn initializers_that_are_inputs_are_weights() {
    let mut old = model();
    old.ir_version = Some(3);
    let graph = old.graph.as_mut().unwrap();
    graph.input.push(value("bias", DataType::Float, &["40"]));
    graph.input.insert(0, value("onnx::MatMul_7", DataType::Float, &["20", "40"]));
    graph.input.push(value("row", DataType::Int64, &["1"]));
    graph.input.push(value("long", DataType::Int64, &["600"]));
    let place = Place::new(&old);
    let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    let mut wanted = model();
    wanted.ir_version = Some(4);
    assert_eq!(ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap(), wanted);
    assert!(report.notes.iter().any(|note| note.contains("4 initializers were inputs too")), "{:?}", report.notes);
    assert_eq!(answers(&place.input()), answers(&place.path("out.onnx")));
}

/// Products of all forms, a convolution and a lookup, in the operators of an opset.
fn layers(opset: i64) -> ModelProto {
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

/// The same file with the numbers that stand for its weights after a pass, as the graph takes them.
fn with_weights(mut model: ModelProto, after: &Model) -> ModelProto {
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        let weight = &after.weights.by_name[tensor.name()];
        if weight.is_float() {
            let mut values = weight.floats(tensor.name()).unwrap();
            if ["first", "third", "fourth"].contains(&tensor.name()) {
                values = turned(&values, weight.shape[0], weight.shape[1]);
            }
            tensor.raw_data = Some(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
    }
    model
}

/// Largest difference of the answers of two files, over the largest answer.
fn distance(a: &Path, b: &Path) -> f32 {
    let (a, b) = (answers_of(a).unwrap(), answers_of(b).unwrap());
    let largest = a.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest
}

fn answers_of(path: &Path) -> Option<Vec<f32>> {
    runtime::library().ok()?;
    let x = Tensor::from_vec(numbers(60), (3, 20), &Device::Cpu).unwrap();
    let mut session = Session::open(path, runtime::Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let y = session.run(&[("x".to_owned(), x)].into()).unwrap().remove("y").unwrap();
    Some(y.flatten_all().unwrap().to_vec1().unwrap())
}

fn applied(step: &Step, model: Model) -> Model {
    step.pass().apply(model, &mut RunState::default(), None).unwrap()
}

#[test]
fn weights_of_other_types_become_what_the_graph_takes() {
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
                assert!(error.to_string().contains("is bf16 now, which ONNX has from opset 13 on"), "{error}");
                continue;
            }
            let report =
                builder().pass(step.clone()).measure(false).build().unwrap().run(place.open(), &out).unwrap_or_else(|e| panic!("{opset}, {number}: {e}"));
            let reference = place.path("reference.onnx");
            let after = applied(step, place.open());
            std::fs::write(&reference, with_weights(layers(opset), &after).encode_to_vec()).unwrap();
            let written = ModelFile::open(&out).unwrap();
            assert_eq!(written.opset(), opset);
            let palettes = report.notes.iter().any(|note| note.contains("as the floats that they stand for"));
            assert_eq!(palettes, number == 8, "{:?}", report.notes);
            if runtime::library().is_ok() {
                let distance = distance(&reference, &out);
                assert!(distance < 1e-5, "opset {opset}, step {number}: {distance}");
            }
            if number > 1 && number < 6 {
                assert!(report.size.after.bytes < report.size.before.bytes, "{opset}, {number}");
            }
        }
    }
}

#[test]
fn products_quantize_what_they_read_as_it_comes() {
    for (opset, granularity, symmetric) in
        [(11, GranularityKind::Channel, true), (13, GranularityKind::Channel, false), (17, GranularityKind::Tensor, true), (21, GranularityKind::Channel, true)]
    {
        let place = Place::new(&layers(opset));
        let step: Step = QuantizeDynamic { granularity, symmetric, embeddings: true, ..QuantizeDynamic::default() }.into();
        let report = builder().pass(step.clone()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        assert_eq!(report.passes[0].tensors_changed, 5, "four matrices and a table");
        // Each with scales, and with zero points where these are not zero.
        assert_eq!(report.size.after.tensors, report.size.before.tensors + if symmetric { 5 } else { 10 });
        let written = ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap();
        let graph = written.graph.unwrap();
        let count = |op: &str| graph.node.iter().filter(|node| node.op_type() == op).count();
        // The last two products read one value.
        assert_eq!([count("MatMulInteger"), count("DynamicQuantizeLinear"), count("MatMul"), count("Gemm"), count("Conv")], [4, 3, 0, 0, 1]);
        let names: Vec<&str> = graph.initializer.iter().map(|tensor| tensor.name()).collect();
        assert!(names.contains(&"first/quantized") && !names.contains(&"first") && names.contains(&"kernel"), "{names:?}");
        let first = graph.initializer.iter().find(|tensor| tensor.name() == "first/quantized").unwrap();
        assert_eq!((first.data_type(), first.dims.as_slice()), (DataType::Int8, &[20, 8][..]));
        let finished = graph.node.iter().find(|node| node.output == ["a"]).unwrap();
        assert_eq!(finished.name(), "/first/MatMul");
        let reference = place.path("reference.onnx");
        std::fs::write(&reference, with_weights(layers(opset), &applied(&step, place.open())).encode_to_vec()).unwrap();
        if runtime::library().is_ok() {
            let distance = distance(&reference, &place.path("out.onnx"));
            assert!(distance < 0.03 && distance > 0.0, "opset {opset}: {distance}");
            let fidelity = &report.fidelity.as_ref().unwrap().fidelity;
            assert!(fidelity.cosine > 0.999, "{fidelity:?}");
        }
    }
    // Before opset 11, nothing quantizes as it comes: weights are stored as integers all the same.
    let place = Place::new(&layers(9));
    let report = builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("4 quantized weights are integers with activations left as floats")), "{:?}", report.notes);
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
fn infinities_that_a_graph_computes_with_are_kept() {
    let mut masked = model();
    let mask: Vec<u8> = [f32::NEG_INFINITY; 40].iter().flat_map(|v| v.to_le_bytes()).collect();
    masked.graph.as_mut().unwrap().initializer[1] = TensorProto { raw_data: Some(mask), ..tensor("bias", DataType::Float, &[40]) };
    let place = Place::new(&masked);
    builder().measure(false).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    let cast = Cast { targets: vec!["bias".parse().unwrap()], ..Cast::default() };
    let error = builder().pass(cast).measure(false).build().unwrap().run(place.open(), place.path("cast.onnx")).unwrap_err();
    assert!(matches!(error, Error::NotFinite { ref name, count: 40 } if name == "bias"), "{error}");
}

/// The model with its largest weight in a file beside it, behind 16 bytes of something else.
fn external(entries: &[(&str, &str)], data: &[u8]) -> Place {
    let mut outside = model();
    let weight = &mut outside.graph.as_mut().unwrap().initializer[0];
    weight.raw_data = None;
    weight.data_location = Some(DataLocation::External as i32);
    weight.external_data = entries.iter().map(|(key, value)| StringStringEntryProto::new(key, *value)).collect();
    let place = Place::new(&outside);
    std::fs::write(place.path("weights.bin"), data).unwrap();
    place
}

#[test]
fn weights_beside_the_file_are_read_and_held_to_it() {
    let bytes: Vec<u8> = [vec![9; 16], numbers(800).iter().flat_map(|v| v.to_le_bytes()).collect()].concat();
    let place = external(&[("location", "weights.bin"), ("offset", "16"), ("length", "3200")], &bytes);
    assert_eq!(place.open().weights.by_name["onnx::MatMul_7"].floats("").unwrap(), turned(&numbers(800), 20, 40));
    assert_eq!(place.open().weight_files, [place.input(), place.path("weights.bin")]);
    builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    let mut written = ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap();
    let graph = written.graph.as_mut().unwrap();
    assert_eq!(graph.initializer[0].raw_data.as_deref(), Some(&bytes[16..]));
    assert_eq!(written, model());
    for (entries, data, reason) in [
        (&[("location", "weights.bin"), ("offset", "17")][..], &bytes[..], "takes 3200"),
        (&[("location", "weights.bin"), ("offset", "16"), ("length", "3204")], &bytes, "says 3204 bytes"),
        (&[("location", "weights.bin"), ("offset", "99999")], &bytes, "begins at byte 99999"),
        (&[("location", "weights.bin"), ("offset", "18446744073709551615"), ("length", "3200")], &bytes, "begins at byte"),
        (&[("location", "weights.bin"), ("offset", "16"), ("length", "-1")], &bytes, "`-1`"),
        (&[("location", "../weights.bin")], &bytes, "inside the model's folder"),
        (&[("location", "other.bin")], &bytes, "cannot be opened"),
        (&[], &bytes, "not named"),
    ] {
        let place = external(entries, data);
        let error = Model::open(place.input()).err().unwrap().to_string();
        assert!(error.contains("in.onnx: tensor `onnx::MatMul_7`") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_file_too_large_for_one_message_has_its_weights_beside_it() {
    let place = Place::new(&model());
    let opened = ModelFile::open(&place.input()).unwrap();
    let rewritten = opened.rewrite(&place.open().weights, "large.onnx", &BTreeMap::new(), 4000).unwrap();
    let folder = place.path("large");
    std::fs::create_dir(&folder).unwrap();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    compress::store::writer::write_pieces(&folder, &rewritten.layout, &rewritten.items, &work).unwrap();
    let (before, after) = (place.open(), Model::open(folder.join("large.onnx")).unwrap());
    assert_eq!(after.weight_files, [folder.join("large.onnx"), folder.join("large.onnx.data")]);
    let found = diff(&before, &after, &work).unwrap();
    assert!(found.weights.len() == 7 && found.weights.iter().all(|weight| weight.equal));
    assert_eq!(answers(&place.input()), answers(&folder.join("large.onnx")));
    assert!(std::fs::metadata(folder.join("large.onnx")).unwrap().len() < 4000);
}

/// What a file becomes that is opened and written with nothing changed, if it opens.
fn again(bytes: &[u8]) -> Option<Vec<u8>> {
    let place = Place::of(bytes);
    let opened = Model::open(place.input()).ok()?;
    let rewritten = opened.onnx.as_ref()?.rewrite(&opened.weights, "out.onnx", &BTreeMap::new(), u64::MAX).unwrap();
    let folder = place.path("out");
    std::fs::create_dir(&folder).unwrap();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    compress::store::writer::write_pieces(&folder, &rewritten.layout, &rewritten.items, &work).ok()?;
    let _ = opened.graph();
    Some(std::fs::read(folder.join("out.onnx")).unwrap())
}

#[test]
fn whatever_bytes_there_are_they_are_refused_or_written_so_that_they_open_again() {
    let mut state = 7u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut opened, whole) = (0, [model().encode_to_vec(), layers(13).encode_to_vec()]);
    for round in 0..1200 {
        let mut bytes = whole[round % 2].clone();
        for _ in 0..1 + random(3) {
            // Most bytes are elements: the messages are at the beginning of the one, and everywhere in the other.
            let within = if random(2) == 0 { 700 } else { bytes.len() };
            let at = random(within);
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes[at] ^= 1 << random(8),
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, random(256) as u8),
            }
        }
        if let Some(first) = again(&bytes) {
            opened += 1;
            assert_eq!(again(&first).as_deref(), Some(first.as_slice()), "round {round}");
        }
    }
    assert!(opened > 100 && opened < 1100, "{opened} of 1200 open");
}

#[test]
fn files_that_do_not_hold_together_are_refused_by_name() {
    let whole = model().encode_to_vec();
    let said = |bytes: &[u8]| match Model::open(Place::of(bytes).input()) {
        Err(Error::Malformed { path, reason }) if path.ends_with("in.onnx") => reason,
        other => panic!("{other:?}", other = other.map(|model| model.weights.by_name.len())),
    };
    for end in (0..whole.len()).step_by(7) {
        said(&whole[..end]);
    }
    let change = |change: &dyn Fn(&mut GraphProto)| {
        let mut model = model();
        change(model.graph.as_mut().unwrap());
        said(&model.encode_to_vec())
    };
    assert!(change(&|graph| graph.initializer[0].dims = vec![20, 41]).contains("`onnx::MatMul_7`: has 3200 bytes of elements"));
    assert!(change(&|graph| graph.initializer[0].dims = vec![-20, -40]).contains("negative"));
    assert!(change(&|graph| graph.initializer[0].dims = vec![1 << 40, 1 << 40]).contains("counted"));
    assert!(change(&|graph| graph.initializer[0].raw_data = None).contains("no elements"));
    assert!(change(&|graph| graph.initializer[2].data_type = Some(DataType::Float as i32)).contains("field of others"));
    assert!(change(&|graph| graph.initializer[2].dims = vec![60_000]).contains("fewer elements"));
    assert!(change(&|graph| drop(graph.initializer.remove(0))).contains("reads `onnx::MatMul_7`"));
    assert!(change(&|graph| graph.initializer.push(raw("bias", &[40]))).contains("two initializers are named `bias`"));
    assert!(change(&|graph| graph.node[0].input[0] = "y".into()).contains("circle"));
    assert!(said(b"").contains("ir_version"));
    assert!(said(&[0xff; 40]).contains("not an ONNX model"));
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("model.onnx")).unwrap();
    for name in ["a.onnx", "b.onnx"] {
        std::fs::write(folder.path().join(name), &whole).unwrap();
    }
    assert!(Model::open(folder.path()).err().unwrap().to_string().contains("2 .onnx files"));
}
