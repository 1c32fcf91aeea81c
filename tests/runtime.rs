//! Every golden model, exported, in ONNX Runtime against the built-in executor; says so and stops where there is none.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use compress::exec::{Executor, Inputs, Parameters, Residence};
use compress::export::Onnx;
use compress::onnx::file;
use compress::runtime::{Options, Session, library};
use compress::store::{Cancel, Silent, Sweep};
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

#[test]
fn every_export_computes_what_the_executor_does() {
    if let Err(error) = library() {
        eprintln!("skipped: {error}");
        return;
    }
    let sweep = Sweep { threads: 2, progress: &Silent, cancel: &Cancel::default() };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    let mut failures = Vec::new();
    let mut places: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    places.sort();
    for (index, place) in places.into_iter().enumerate() {
        let model = Model::open(&place).unwrap();
        let graph = model.graph().unwrap();
        let parameters = Parameters::load(&graph, &model.weights, &Device::Cpu, DType::F32, Residence::Computed, &sweep).unwrap();
        let golden = candle_core::safetensors::load(place.join("golden.safetensors"), &Device::Cpu).unwrap();
        let inputs: Inputs = golden.iter().filter_map(|(name, t)| Some((name.strip_prefix("in/")?.to_owned(), t.clone()))).collect();
        let ours = Executor::new(&graph, parameters, Device::Cpu).run(&inputs).unwrap();
        let out = tempfile::tempdir().unwrap();
        let opset = 17 + index as u32 % 5;
        let pipeline = Pipeline::builder().export(Onnx { opset, ..Onnx::default() }).build().unwrap();
        pipeline.run(model.clone(), out.path().join("out")).unwrap();
        let theirs = Session::open(&out.path().join("out").join(file::MODEL), Options::default()).unwrap().run(&inputs).unwrap();
        assert_eq!(ours.len(), theirs.len());
        for (name, tensor) in &ours {
            let worst = distance(tensor, &theirs[name], inputs.get("attention_mask"));
            if worst > TOLERANCE || worst.is_nan() {
                failures.push(format!("{} {name} at opset {opset}: {worst:e}", place.display()));
            }
        }
    }
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
