//! Every golden model exported to ONNX: ONNX Runtime compared with the built-in executor. Skipped with a
//! message without ONNX Runtime.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common::{nodes, onnxruntime};
use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::export::Onnx;
use compress::internal::RunState;
use compress::pass::{Pass, QuantizeDynamic};
use compress::{Model, Pipeline};
use compress_core::work::{Cancel, Silent, Work};
use compress_engine::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use compress_onnx::file;
use compress_onnx::proto::{AttributeProto, DataType, ModelProto};
use compress_onnx::runtime::{Options, Session};
use prost::Message;

const TOLERANCE: f32 = 1e-4;

fn distance(ours: &Tensor, theirs: &Tensor, mask: Option<&Tensor>) -> f32 {
    assert_eq!(ours.dims(), theirs.dims());
    let mut difference = (ours - theirs).unwrap().abs().unwrap();
    if let Some(mask) = mask.filter(|m| difference.rank() == 3 && m.dims() == &difference.dims()[..2]) {
        difference = difference.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap();
    }
    difference.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// 1 minus the cosine similarity of all values except padding.
fn angle(ours: &Tensor, theirs: &Tensor, mask: Option<&Tensor>) -> f32 {
    let real = |t: &Tensor| match mask.filter(|m| t.rank() == 3 && m.dims() == &t.dims()[..2]) {
        Some(mask) => t.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap(),
        None => t.clone(),
    };
    crate::common::numbers::angle(&real(ours), &real(theirs)) as f32
}

/// Exports every golden model. Returns the names and differences of outputs that exceed the `tolerance`
/// for the name.
fn mismatches(pass: Option<QuantizeDynamic>, far: fn(&Tensor, &Tensor, Option<&Tensor>) -> f32, tolerance: fn(&str) -> f32) -> Vec<String> {
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut failures = Vec::new();
    let mut places: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    places.sort();
    for (index, place) in places.into_iter().enumerate() {
        let mut model = Model::open(&place).unwrap();
        let out = tempfile::tempdir().unwrap();
        let opset = 17 + index as u32 % 8;
        let mut pipeline = Pipeline::builder().export(Onnx { opset: Some(opset), ..Onnx::default() }).measure(false);
        if let Some(pass) = &pass {
            // Convolutional networks have no matrices for this pass.
            let Ok(planned) = pass.plan(&model, &RunState::default()).map(|plan| plan.model) else { continue };
            model = planned;
            pipeline = pipeline.pass(pass.clone());
        }
        let graph = model.graph().unwrap();
        let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
        let golden = candle_core::safetensors::load(place.join("golden.safetensors"), &Device::Cpu).unwrap();
        let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
        let ours = Executor::new(&graph, parameters, Device::Cpu).with_rounding(Rounding::Tensor).run(&inputs).unwrap();
        pipeline.build().unwrap().run(Model::open(&place).unwrap(), out.path().join("out")).unwrap();
        let mut session = Session::open(&out.path().join("out").join(file::MODEL), Options::default()).unwrap();
        assert!(session.folds_constants(), "{}: the size of a constant is unknown", place.display());
        let theirs = session.run(&inputs).unwrap();
        assert_eq!(ours.len(), theirs.len());
        for (name, tensor) in &ours {
            let worst = far(tensor, &theirs[name], inputs.get("attention_mask"));
            if worst > tolerance(&place.to_string_lossy()) || worst.is_nan() {
                failures.push(format!("{} {name} at opset {opset}: {worst:e}", place.display()));
            }
        }
    }
    failures
}

#[test]
fn every_export_equals_the_executor() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let failures = mismatches(None, distance, |_| TOLERANCE);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_int8_export_equals_the_executor() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    // Values halfway between two integers may be rounded either way. For input-major weights, ONNX
    // rounds inputs that were multiplied by the scales of the weights, and the executor rounds unscaled
    // inputs.
    let tolerance = |name: &str| match name {
        name if name.contains("gpt2") || name.ends_with("modernbert-masked-lm") => 1e-2,
        name if name.ends_with("t5-headless") => 1e-3,
        _ => 1e-4,
    };
    let failures = mismatches(Some(QuantizeDynamic { embeddings: true, ..Default::default() }), angle, tolerance);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// ONNX Runtime computes products of constants before it makes integer products exact.
#[test]
fn integer_products_read_no_constants() {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/deberta");
    let out = tempfile::tempdir().unwrap();
    let pipeline = Pipeline::builder().pass(QuantizeDynamic::default()).export(Onnx::default()).measure(false);
    pipeline.build().unwrap().run(Model::open(&place).unwrap(), out.path().join("out")).unwrap();
    let graph = ModelProto::decode(std::fs::read(out.path().join("out").join(file::MODEL)).unwrap().as_slice()).unwrap().graph.unwrap();
    let mut varying: BTreeSet<&str> = graph.input.iter().map(|input| input.name()).collect();
    let (mut products, mut of_constants) = (0, 0);
    for node in &graph.node {
        let varies = node.input.iter().any(|input| varying.contains(input.as_str()));
        match node.op_type() {
            "MatMulInteger" => {
                assert!(varying.contains(node.input[0].as_str()), "{node:?}");
                products += 1;
            }
            "DynamicQuantizeLinear" => of_constants += usize::from(!varies),
            _ => {}
        }
        varying.extend(node.output.iter().filter(|_| varies).map(String::as_str));
    }
    // Each of two layers has six matrices, of which two also multiply the relative positions.
    assert_eq!((products, of_constants), (12, 2));
}

#[test]
fn errors_are_reported() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.onnx");
    let unknown = nodes::model(17, &[2], vec![nodes::node("Unknown", &["x"], "y", vec![])], vec![]).encode_to_vec();
    for (bytes, reason) in [(b"no model".to_vec(), "not an ONNX model"), (unknown, "refuses")] {
        std::fs::write(&path, bytes).unwrap();
        let error = Session::open(&path, Options::default()).unwrap_err().to_string();
        assert!(error.contains("broken.onnx") && error.contains(reason), "{error}");
    }
}

/// Values that ONNX Runtime would compute while it loads a file are limited, however the file is opened.
#[test]
fn values_computed_at_load_are_limited() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let name = |number: usize| format!("s{number}");
    let twice = |number: usize| nodes::node("Concat", &[&name(number), &name(number)], &name(number + 1), vec![AttributeProto::int("axis", 0)]);
    let mut all = vec![nodes::node("Shape", &["x"], "s0", vec![])];
    all.extend((0..27).map(twice));
    all.extend([nodes::node("ReduceMax", &["s27"], "m", vec![]), nodes::node("Cast", &["m"], "f", vec![AttributeProto::int("to", 1)])]);
    all.extend([nodes::node("MatMul", &["x", "w"], "a", vec![]), nodes::node("Mul", &["a", "f"], "y", vec![])]);
    let model = nodes::model(13, &[1, 4], all, vec![nodes::floats("w", &[4, 4])]);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    for opened in [Session::open(&path, Options::default()), Session::from_model(&model, &path, Options::default())] {
        let error = opened.unwrap_err().to_string();
        assert!(error.contains("would take more than 1024 MB") && error.contains("(Concat) creates"), "{error}");
    }
    let pipeline = Pipeline::builder().pass(QuantizeDynamic::default()).threads(1).build().unwrap();
    let report = pipeline.run(Model::open(&path).unwrap(), folder.path().join("out.onnx")).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("was not verified end to end") && note.contains("1024 MB")), "{:?}", report.notes);
}

#[test]
fn output_types_have_the_numbers_of_onnx() {
    if !onnxruntime::has_onnx_runtime() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cast.onnx");
    let types = [
        (DataType::Float, 1),
        (DataType::Uint8, 2),
        (DataType::Int8, 3),
        (DataType::Uint16, 4),
        (DataType::Int16, 5),
        (DataType::Int32, 6),
        (DataType::Int64, 7),
        (DataType::Bool, 9),
        (DataType::Float16, 10),
        (DataType::Double, 11),
        (DataType::Uint32, 12),
        (DataType::Uint64, 13),
        (DataType::Bfloat16, 16),
    ];
    for (ty, number) in types {
        let mut file = nodes::model(13, &[2], vec![nodes::node("Cast", &["x"], "y", vec![AttributeProto::int("to", number)])], vec![]);
        file.graph.as_mut().unwrap().output = vec![nodes::value("y", ty, None)];
        std::fs::write(&path, file.encode_to_vec()).unwrap();
        assert_eq!(Session::open(&path, Options::default()).unwrap().output_types(), [Some(number as i32)], "{ty:?}");
    }
}
