//! Files with no changes or only changed weights, with weights in every kind of location.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use compress::export::{Onnx, Safetensors};
use compress::pass::{Cast, Dequantize, Finetune, FloatFormat, Palettize, PruneUnstructured, Quantize, QuantizeDynamic, Scheme, Step, Training};
use compress::pipeline::verify;
use compress::{Model, Report};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::data::Data;
use compress_engine::model::diff;
use compress_onnx::ModelFile;
use compress_onnx::proto::{
    AttributeProto, DataLocation, DataType, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
};
use prost::Message;

use crate::common::onnxruntime::has_onnx_runtime;
use crate::onnx_in::layers::layers;
use crate::onnx_in::{Place, answers, builder, constant, model, node, numbers, raw, tensor, transposed, value};

#[test]
fn weights_are_found_in_all_locations() {
    let place = Place::new(&model());
    let opened = place.open();
    // The matrix of a product has its output axis first, independent of the order in the file.
    let shapes: Vec<(&str, &[usize])> = opened.weights.by_name.iter().map(|(name, w)| (name.as_str(), w.shape.as_slice())).collect();
    assert_eq!(
        shapes,
        [("bias", &[40][..]), ("long", &[600]), ("onnx::MatMul_7", &[40, 20]), ("row", &[1]), ("scale", &[40]), ("shift", &[40]), ("table", &[30, 40])]
    );
    assert_eq!(opened.weights.by_name["onnx::MatMul_7"].floats("").unwrap(), transposed(&numbers(800), 20, 40));
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
    // Graph attributes can use the same name for different tensors, which are then not weights of that
    // name.
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

/// The recipe in the report folder writes the same file again.
#[test]
fn the_recipe_of_a_file_writes_that_file() {
    let place = Place::new(&model());
    let out = place.path("out.onnx");
    builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), &out).unwrap();
    let recipe = compress::Recipe::open(&place.path("out.onnx.report/recipe.yaml"), &[]).unwrap();
    assert_eq!(recipe.output.unwrap().canonicalize().unwrap(), out.canonicalize().unwrap());
}

#[test]
fn an_unchanged_file_is_written_byte_for_byte() {
    let mut bytes = model().encode_to_vec();
    // An unknown field of the model, and one of its graph: field 7, repeated.
    bytes.extend([0x9a, 0x06, 3, b'a', b'b', b'c']);
    bytes.extend([0x3a, 5, 0x9a, 0x06, 2, b'd', b'e']);
    let place = Place::of(&bytes);
    let report = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert_eq!(std::fs::read(place.path("out.onnx")).unwrap(), bytes);
    assert_eq!(answers(&place.input()), answers(&place.path("out.onnx")));
    assert_eq!((report.size.before.bytes, report.size.after.bytes), (bytes.len() as u64, bytes.len() as u64));
    assert_eq!(report.size.after.parameters, 40 + 600 + 800 + 1 + 40 + 40 + 1200);
    assert!(report.layers.iter().all(|layer| layer.sqnr_db.is_none()) && report.layers.len() == 7);
    assert!(report.recipe["export"][0]["onnx"].is_object() && report.recipe["export"][0]["onnx"].get("opset").is_none());
    if crate::common::onnxruntime::has_onnx_runtime() {
        let fidelity = report.fidelity.as_ref().unwrap_or_else(|| panic!("{:?}", report.notes));
        assert_eq!((fidelity.fidelity.max_abs_error, fidelity.fidelity.cosine), (0.0, 1.0));
    }
    // Files next to the model file are those of a model folder.
    assert_eq!(Report::open(&place.path("out.onnx")).unwrap(), report);
    let checks = verify(&place.path("out.onnx"), &Work { threads: 1, progress: &Silent, cancel: &Cancel::default() }).unwrap();
    assert!(checks.len() > 2 && checks.iter().all(|check| check.ok), "{checks:?}");
    let run = checks.iter().find(|check| check.path == "out.onnx, run").unwrap();
    let expected = if crate::common::onnxruntime::has_onnx_runtime() { "ONNX Runtime against the built-in executor on 1 synthetic sample:" } else { "not run" };
    assert!(run.finding.contains(expected), "{run:?}");
    let again = builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap_err();
    assert!(again.to_string().contains("exists") && again.hint().unwrap().contains("force"), "{again}");
    // A folder contains the same under the default name, and opens.
    builder().build().unwrap().run(place.open(), place.path("out")).unwrap();
    assert_eq!(std::fs::read(place.path("out/model.onnx")).unwrap(), bytes);
    assert_eq!(Model::open(place.path("out")).unwrap().weights.parameters(), report.size.after.parameters);
}

/// Protobuf parsers merge a graph that is stored in two parts.
#[test]
fn a_graph_in_two_parts_is_edited_as_one() {
    let whole = layers(13);
    let mut first = whole.graph.clone().unwrap();
    let second = GraphProto {
        node: first.node.split_off(5),
        initializer: first.initializer.split_off(4),
        output: std::mem::take(&mut first.output),
        ..GraphProto::default()
    };
    let mut bytes = ModelProto { graph: Some(first), ..whole.clone() }.encode_to_vec();
    bytes.extend(ModelProto { graph: Some(second), ..ModelProto::default() }.encode_to_vec());
    assert_eq!(ModelProto::decode(bytes.as_slice()).unwrap(), whole);
    let (parts, one) = (Place::of(&bytes), Place::new(&whole));
    for place in [&parts, &one] {
        builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    }
    let written = |place: &Place| {
        let mut graph = place.written("out.onnx").graph.unwrap();
        graph.initializer.sort_by(|a, b| a.name().cmp(b.name()));
        graph
    };
    assert_eq!(written(&parts), written(&one));
}

#[test]
fn passes_over_weights_change_only_weights() {
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
    if crate::common::onnxruntime::has_onnx_runtime() {
        let fidelity = &report.fidelity.as_ref().unwrap_or_else(|| panic!("{:?}", report.notes)).fidelity;
        assert!(fidelity.cosine < 1.0 && fidelity.cosine > 0.5, "{fidelity:?}");
    }
}

#[test]
fn unsupported_changes_are_rejected_before_writing() {
    let place = Place::new(&model());
    let refused = |builder: compress::pipeline::Builder, output: &str| {
        let error = builder.build().and_then(|pipeline| pipeline.run(place.open(), place.path(output))).unwrap_err();
        assert!(!place.path(output).exists(), "{error}");
        error.to_string()
    };
    assert!(refused(builder().export(Safetensors::default()), "out").contains("in.onnx: writing an .onnx model as safetensors"));
    assert!(refused(builder().export(Safetensors::default()), "out.onnx").contains("is of the format onnx, but other formats are configured"));
    assert!(refused(builder().export(Onnx { opset: Some(18), ..Onnx::default() }), "out.onnx").contains("opset"));
    // Matrices of 16 bits are stored as such anyway.
    for (to, is_noted) in [(FloatFormat::F32, true), (FloatFormat::F16, false)] {
        let pass = Cast { to, ..Cast::default() };
        let pipeline = builder().pass(pass).export(Onnx { float16_weights: true, ..Onnx::default() }).measure(false).build().unwrap();
        let notes = pipeline.run(place.open(), place.path(&format!("{to:?}.onnx"))).unwrap().notes;
        assert_eq!(notes.iter().any(|note| note.contains("`float16_weights` has no effect")), is_noted, "{notes:?}");
    }
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
    assert!(report.notes.iter().any(|note| note.contains("4 initializers removed from the inputs")), "{:?}", report.notes);
    assert_eq!(answers(&place.input()), answers(&place.path("out.onnx")));
}

/// The model with its largest weight in an external file, after 16 unrelated bytes.
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
fn external_weights_are_read_and_checked() {
    let bytes: Vec<u8> = [vec![9; 16], numbers(800).iter().flat_map(|v| v.to_le_bytes()).collect()].concat();
    let place = external(&[("location", "weights.bin"), ("offset", "16"), ("length", "3200")], &bytes);
    assert_eq!(place.open().weights.by_name["onnx::MatMul_7"].floats("").unwrap(), transposed(&numbers(800), 20, 40));
    // Without a length, other tensors may follow.
    let followed = external(&[("location", "weights.bin"), ("offset", "16")], &[&bytes[..], &[9; 16]].concat());
    assert_eq!(followed.open().weights.by_name["onnx::MatMul_7"].floats("").unwrap(), transposed(&numbers(800), 20, 40));
    assert_eq!(place.open().weight_files, [place.input(), place.path("weights.bin")]);
    builder().build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    let mut written = ModelProto::decode(std::fs::read(place.path("out.onnx")).unwrap().as_slice()).unwrap();
    let graph = written.graph.as_mut().unwrap();
    assert_eq!(graph.initializer[0].raw_data.as_deref(), Some(&bytes[16..]));
    assert_eq!(written, model());
    for (entries, data, reason) in [
        (
            &[("location", "weights.bin"), ("offset", "17")][..],
            &bytes[..],
            "requires 3200 bytes for its shape [20, 40], and `weights.bin` has 3199 from byte 17 on",
        ),
        (&[("location", "weights.bin"), ("offset", "16"), ("length", "3204")], &bytes, "specifies 3204 bytes, but requires 3200 bytes for its shape [20, 40]"),
        (&[("location", "weights.bin"), ("offset", "99999")], &bytes, "begins at byte 99999"),
        (&[("location", "weights.bin"), ("offset", "18446744073709551615"), ("length", "3200")], &bytes, "begins at byte"),
        (&[("location", "weights.bin"), ("offset", "16"), ("length", "-1")], &bytes, "`-1`"),
        (&[("location", "../weights.bin")], &bytes, "inside the model's folder"),
        (&[("location", "other.bin")], &bytes, "cannot be opened"),
        (&[], &bytes, "has no `location`"),
    ] {
        let place = external(entries, data);
        let error = Model::open(place.input()).err().unwrap().to_string();
        assert!(error.contains("in.onnx: tensor `onnx::MatMul_7`") && error.contains(reason), "{error}");
    }
}

/// Files with inputs of other types than numbers are written and verified, but not run.
#[test]
fn files_that_cannot_be_run_are_verified() {
    let mut text = model();
    let mut input = value("text", DataType::Float, &["n"]);
    // Type 8 is a string.
    input.r#type.as_mut().and_then(|ty| ty.tensor_type.as_mut()).unwrap().elem_type = Some(8);
    text.graph.as_mut().unwrap().input.push(input);
    let place = Place::new(&text);
    let report = builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
    assert_eq!(report.notes.iter().any(|note| note.contains("out.onnx was not verified end to end: not run: ")), has_onnx_runtime(), "{:?}", report.notes);
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let checks = verify(&place.path("out.onnx"), &work).unwrap();
    assert!(checks.iter().all(|check| check.ok), "{checks:?}");
    assert!(checks.iter().any(|check| check.path == "out.onnx, run" && check.skipped && check.finding.starts_with("not run: ")), "{checks:?}");
}

#[test]
fn a_file_too_large_for_one_message_has_external_weights() {
    let place = Place::new(&model());
    let opened = ModelFile::open(&place.input()).unwrap();
    let rewritten = opened.rewrite(&place.open().weights, ["large.onnx", "large.onnx.data"], &BTreeMap::new(), 4000).unwrap();
    let folder = place.path("large");
    std::fs::create_dir(&folder).unwrap();
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    compress_core::store::writer::write_pieces(&compress_core::files::Destination::local(&folder), &rewritten.layout, &rewritten.items, &work).unwrap();
    let (before, after) = (place.open(), Model::open(folder.join("large.onnx")).unwrap());
    assert_eq!(after.weight_files, [folder.join("large.onnx"), folder.join("large.onnx.data")]);
    let found = diff(&before, &after, &work).unwrap();
    assert!(found.weights.len() == 7 && found.weights.iter().all(|weight| weight.equal));
    assert_eq!(answers(&place.input()), answers(&folder.join("large.onnx")));
    assert!(std::fs::metadata(folder.join("large.onnx")).unwrap().len() < 4000);
}

/// A matrix of doubles or floats, and its input.
fn gemm(ty: DataType) -> ModelProto {
    let values = numbers(64 * 64);
    let bytes = match ty {
        DataType::Double => values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    let graph = GraphProto {
        node: vec![node("Gemm", &["x", "w"], &["y"], vec![AttributeProto::int("transB", 1)])],
        initializer: vec![TensorProto { raw_data: Some(bytes), ..tensor("w", ty, &[64, 64]) }],
        input: vec![value("x", ty, &["n", "64"])],
        output: vec![value("y", ty, &["n", "64"])],
        ..GraphProto::default()
    };
    ModelProto { graph: Some(graph), ..model() }
}

/// Formats without ONNX operators are stored as the floats that the graph expects.
#[test]
fn weights_of_doubles_stay_doubles() {
    let steps: [Step; 2] = [Palettize::default().into(), Quantize { scheme: Scheme::Fp8Dynamic, ..Quantize::default() }.into()];
    for step in steps {
        let place = Place::new(&gemm(DataType::Double));
        builder().pass(step).build().unwrap().run(place.open(), place.path("out.onnx")).unwrap();
        let written = place.written("out.onnx").graph.unwrap().initializer;
        assert_eq!(written.iter().map(|tensor| tensor.data_type()).collect::<Vec<_>>(), [DataType::Double]);
        let found = Model::open(place.path("out.onnx")).unwrap().weights.get("w").unwrap().floats("w").unwrap();
        let errors = found.iter().zip(numbers(64 * 64)).map(|(found, value)| (found - value).abs());
        assert!((1e-3..0.2).contains(&errors.fold(0f32, f32::max)));
    }
}

/// The hint of a file that passes cannot run names the next step.
#[test]
fn files_that_cannot_be_converted_have_a_next_step() {
    let changed = |change: &dyn Fn(&mut ModelProto)| {
        let mut model = gemm(DataType::Float);
        change(&mut model);
        let error = Place::new(&model).open().graph().unwrap_err();
        error.hint().unwrap_or_default()
    };
    let function = changed(&|model| {
        let graph = model.graph.as_mut().unwrap();
        let output = graph.node.last().unwrap().output[0].clone();
        let inner = NodeProto { name: Some("call".into()), domain: Some("local".into()), ..node("Twice", &["before"], &[&output], vec![]) };
        graph.node.last_mut().unwrap().output = vec!["before".into()];
        graph.node.push(inner);
        // Functions whose operators have the same meaning in the graph are inlined.
        let imports = vec![OperatorSetIdProto { domain: None, version: Some(11) }];
        let body = vec![node("Softmax", &["a"], &["b"], vec![])];
        let (input, output) = (vec!["a".to_owned()], vec!["b".to_owned()]);
        let twice = FunctionProto {
            name: Some("Twice".into()),
            domain: Some("local".into()),
            input,
            output,
            node: body,
            opset_import: imports,
            ..FunctionProto::default()
        };
        model.functions.push(twice);
        model.opset_import.push(OperatorSetIdProto { domain: Some("local".into()), version: Some(1) });
    });
    assert!(
        function.contains("node `call` (Twice) calls a function of the file (node `b` (Softmax) in the function has opset 11, and another meaning in opset"),
        "{function}"
    );
    let double = changed(&|model| model.graph.as_mut().unwrap().input = vec![value("x", DataType::Double, &["n", "64"])]);
    assert!(double.contains("the input `x` is Double: export the model in float32"), "{double}");
}

#[test]
fn messages_state_what_to_do_with_the_file() {
    let place = Place::new(&gemm(DataType::Float));
    let samples = place.path("samples.safetensors");
    candle_core::safetensors::save(&[("x".to_owned(), Tensor::from_vec(numbers(640), (10, 64), &Device::Cpu).unwrap())].into(), &samples).unwrap();
    builder().pass(QuantizeDynamic::default()).build().unwrap().run(place.open(), place.path("int8.onnx")).unwrap();
    let cases: [(&str, Step, &str); 3] = [
        ("in.onnx", Quantize { scheme: Scheme::Fp8, ..Quantize::default() }.into(), "which an .onnx file cannot store: use FP8-DYNAMIC"),
        ("int8.onnx", Dequantize::default().into(), "MatMulInteger"),
        ("in.onnx", Finetune::default().into(), "the outputs of the model are `y`; "),
    ];
    for (file, step, part) in cases {
        let pipeline = builder().calibration(Data::at(&samples)).train(Data::at(&samples)).pass(step).build().unwrap();
        let error = pipeline.run(Model::open(place.path(file)).unwrap(), place.path("out.onnx")).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// By default, a training changes neither scalars nor `Constant` nodes, unless the layers of the file are in
/// such nodes, too. The report names them, and the trained operands of arithmetic.
#[test]
fn numbers_of_the_code_are_not_trained() {
    let scalar = TensorProto { float_data: vec![0.5], ..tensor("half", DataType::Float, &[]) };
    let layers = [raw("first", &[4, 6]), raw("second", &[6, 3])];
    let trained = |in_nodes: bool, targets: &[&str]| {
        let mut nodes = vec![
            constant(raw("shift", &[6])),
            node("MatMul", &["x", "first"], &["a"], vec![]),
            node("Mul", &["a", "half"], &["b"], vec![]),
            node("Sub", &["b", "shift"], &["c"], vec![]),
            node("Mul", &["c", "gain"], &["d"], vec![]),
            node("MatMul", &["d", "second"], &["logits"], vec![]),
        ];
        let mut initializer = vec![scalar.clone(), raw("gain", &[6])];
        if in_nodes {
            nodes.splice(0..0, layers.clone().map(constant));
        } else {
            initializer.extend(layers.clone());
        }
        let (input, output) = (vec![value("x", DataType::Float, &["n", "4"])], vec![value("logits", DataType::Float, &["n", "3"])]);
        let graph = GraphProto { node: nodes, initializer, input, output, ..super::model().graph.unwrap() };
        let place = Place::new(&ModelProto { graph: Some(graph), ..super::model() });
        let x = Tensor::from_vec(numbers(64), (16, 4), &Device::Cpu).unwrap();
        let labels = Tensor::from_vec((0..16).map(|at| at % 3).collect::<Vec<i64>>(), 16, &Device::Cpu).unwrap();
        candle_core::safetensors::save(&[("x".to_owned(), x), ("labels".to_owned(), labels)].into(), place.path("samples.safetensors")).unwrap();
        let targets = targets.iter().map(|pattern| pattern.parse().unwrap()).collect();
        let training = Training { max_steps: Some(3), learning_rate: 1e-2, targets, ..Training::default() };
        let pass = Finetune { training, ..Finetune::default() };
        let pipeline = builder().train(Data::at(&place.path("samples.safetensors"))).pass(pass).measure(false).build().unwrap();
        let report = pipeline.run(place.open(), place.path("out.onnx")).unwrap();
        let [before, after] = ["in.onnx", "out.onnx"].map(|file| Model::open(place.path(file)).unwrap());
        let floats = |model: &Model, name: &str| model.weights.get(name).unwrap().floats(name).unwrap().to_vec();
        let changed = ["first", "second", "gain", "half", "shift"].into_iter().filter(|name| floats(&before, name) != floats(&after, name));
        (changed.collect::<Vec<_>>(), report.notes.join("\n"))
    };
    let (changed, notes) = trained(false, &[]);
    assert_eq!(changed, ["first", "second", "gain"]);
    let expected =
        ["not trained, because they are numbers of the graph, such as the epsilon of a norm: 2 tensors (the first: `half`)", "1 tensor (the first: `gain`)"];
    assert!(expected.iter().all(|part| notes.contains(part)), "{notes}");
    assert_eq!(trained(true, &[]).0, ["first", "second", "gain", "shift"]);
    let (changed, notes) = trained(false, &["*"]);
    assert!(changed.len() == 5 && !notes.contains("not trained"), "{changed:?}, {notes}");
}
