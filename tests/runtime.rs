//! Every golden model, exported, in ONNX Runtime against the built-in executor; says so and stops where there is none.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::exec::{Executor, Inputs, Parameters, Residence, Rounding};
use compress::export::Onnx;
use compress::onnx::file;
use compress::pass::{Pass, QuantizeDynamic};
use compress::run_state::RunState;
use compress::runtime::{Options, Session, library};
use compress::work::{Cancel, Silent, Work};
use compress::{Model, Pipeline};

const TOLERANCE: f32 = 1e-4;

fn distance(ours: &Tensor, theirs: &Tensor, mask: Option<&Tensor>) -> f32 {
    assert_eq!(ours.dims(), theirs.dims());
    let mut difference = (ours - theirs).unwrap().abs().unwrap();
    if let Some(mask) = mask.filter(|m| difference.rank() == 3 && m.dims() == &difference.dims()[..2]) {
        difference = difference.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap();
    }
    difference.flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// One less the cosine of all numbers at places that are no padding.
fn angle(ours: &Tensor, theirs: &Tensor, mask: Option<&Tensor>) -> f32 {
    let real = |t: &Tensor| match mask.filter(|m| t.rank() == 3 && m.dims() == &t.dims()[..2]) {
        Some(mask) => t.broadcast_mul(&mask.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap()).unwrap(),
        None => t.clone(),
    };
    let product = |a: &Tensor, b: &Tensor| (a * b).unwrap().to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    let (a, b) = (real(ours), real(theirs));
    (1.0 - product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()) as f32
}

/// Exports every golden model and returns where ONNX Runtime and the executor are further apart than `tolerance` says for a name.
fn apart(pass: Option<QuantizeDynamic>, far: fn(&Tensor, &Tensor, Option<&Tensor>) -> f32, tolerance: fn(&str) -> f32) -> Vec<String> {
    let work = Work { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut failures = Vec::new();
    let mut places: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    places.sort();
    for (index, place) in places.into_iter().enumerate() {
        let mut model = Model::open(&place).unwrap();
        let out = tempfile::tempdir().unwrap();
        let opset = 17 + index as u32 % 5;
        let mut pipeline = Pipeline::builder().export(Onnx { opset, ..Onnx::default() });
        if let Some(pass) = &pass {
            match pass.clone().apply(model.clone(), &mut RunState::default(), None) {
                Ok(quantized) => model = quantized,
                // Convolutional networks have no matrix that it takes.
                Err(_) => continue,
            }
            pipeline = pipeline.pass(pass.clone());
        }
        let graph = model.graph().unwrap();
        let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &work).unwrap();
        let golden = candle_core::safetensors::load(place.join("golden.safetensors"), &Device::Cpu).unwrap();
        let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
        let ours = Executor::new(&graph, parameters, Device::Cpu).with_rounding(Rounding::Tensor).run(&inputs).unwrap();
        pipeline.build().unwrap().run(Model::open(&place).unwrap(), out.path().join("out")).unwrap();
        let theirs = Session::open(&out.path().join("out").join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap();
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
fn every_export_computes_what_the_executor_does() {
    if let Err(error) = library() {
        eprintln!("skipped: {error}");
        return;
    }
    let failures = apart(None, distance, |_| TOLERANCE);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_int8_export_computes_what_the_executor_does() {
    if library().is_err() {
        return;
    }
    // A number that lies between two integers may go either way. Where weights are stored input-major, ONNX rounds inputs
    // that were multiplied by the weights' scales, the executor those that were not.
    let tolerance = |name: &str| match name {
        name if name.contains("gpt2") || name.ends_with("modernbert-masked-lm") => 1e-2,
        name if name.ends_with("t5-headless") => 1e-3,
        _ => 1e-4,
    };
    let failures = apart(Some(QuantizeDynamic { embeddings: true, ..Default::default() }), angle, tolerance);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_is_wrong_is_said() {
    if library().is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.onnx");
    std::fs::write(&path, b"no model").unwrap();
    let error = Session::open(&path, Options::default()).unwrap_err().to_string();
    assert!(error.contains("broken.onnx") && error.contains("refuses"), "{error}");
}

/// Many tests compare with ONNX Runtime where it is installed and pass without it. The gate sets this variable
/// so that none of them is skipped there unnoticed.
#[test]
fn onnx_runtime_is_installed_where_the_tests_require_it() {
    if std::env::var_os("COMPRESS_TEST_REQUIRE_ONNXRUNTIME").is_some() {
        let found = library();
        assert!(found.is_ok(), "{}", found.unwrap_err());
    }
}
