//! Experts of gpt-oss in MXFP4, on the folder of `scripts/goldens mxfp4`.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use compress::export::{FileType, Gguf, Layout, Safetensors};
use compress::pass::{Cast, Dequantize, Quantize};
use compress::{Model, Pipeline};
use serde_json::Value;

use crate::common::{self, config, written};
use crate::parity::differences;

fn golden() -> PathBuf {
    common::golden("mxfp4")
}

fn tensors(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

/// The experts of a model.
fn experts(model: &Model) -> BTreeMap<&str, Vec<f32>> {
    let found = model.weights.by_name.iter().filter(|(name, weight)| name.contains(".experts.") && weight.shape.len() == 3);
    found.map(|(name, weight)| (name.as_str(), weight.floats(name).unwrap())).collect()
}

/// The error of opening the folder with changed tensors.
fn error(change: impl FnOnce(&mut HashMap<String, Tensor>)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut all = tensors(&golden().join("model.safetensors"));
    change(&mut all);
    candle_core::safetensors::save(&all, folder.path().join("model.safetensors")).unwrap();
    fs::copy(golden().join("config.json"), folder.path().join("config.json")).unwrap();
    Model::open(folder.path()).err().unwrap().to_string()
}

#[test]
fn values_and_outputs_equal_those_of_transformers() {
    let model = Model::open(golden()).unwrap();
    let expected = tensors(&golden().join("golden.safetensors"));
    let found = experts(&model);
    assert_eq!(found.len(), 4);
    for (name, values) in found {
        assert_eq!(model.weights.by_name[name].shape, expected[name].dims(), "{name}");
        assert_eq!(values, expected[name].flatten_all().unwrap().to_vec1::<f32>().unwrap(), "{name}");
        assert_eq!(model.weights.by_name[name].stored_bytes, model.weights.by_name[name].elements() as u64 / 32 * 17);
    }
    let worst = differences(&golden(), "golden.safetensors").unwrap();
    assert!(worst.len() == 1 && worst[0].1 < 1e-4, "{worst:?}");
}

/// Incomplete checkpoints are refused instead of treated as floats.
#[test]
fn missing_parts_of_experts_are_named() {
    let one = error(|all| drop(all.remove("model.layers.0.mlp.experts.down_proj_scales").unwrap()));
    assert!(one.contains("`model.layers.0.mlp.experts.down_proj_scales` is missing"), "{one}");
    let all = error(|all| all.retain(|name, _| !name.ends_with("_blocks") && !name.ends_with("_scales")));
    assert!(all.contains("`quant_method` of \"mxfp4\" in a model without weights in this format"), "{all}");
}

/// Also after a pass that changes other weights.
#[test]
fn unchanged_experts_keep_their_bytes() {
    let source = tensors(&golden().join("model.safetensors"));
    let cast: Cast = serde_json::from_value(serde_json::json!({ "to": "f16", "targets": ["*.self_attn.*"] })).unwrap();
    for (pipeline, is_cast) in [(Pipeline::builder(), false), (Pipeline::builder().pass(cast), true)] {
        let (folder, report) = written(&golden(), pipeline);
        let out = folder.path().join("out");
        let found = tensors(&out.join("model.safetensors"));
        assert_eq!(found.len(), source.len());
        for (name, tensor) in source.iter().filter(|(name, _)| name.contains(".experts.")) {
            assert_eq!(found[name].dims(), tensor.dims(), "{name}");
            assert_eq!(found[name].dtype(), tensor.dtype(), "{name}");
            let bytes = |tensor: &Tensor| tensor.flatten_all().unwrap().to_dtype(candle_core::DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(bytes(&found[name]), bytes(tensor), "{name}");
        }
        assert_eq!(found["model.layers.0.self_attn.q_proj.weight"].dtype() == candle_core::DType::F16, is_cast);
        assert_eq!(config(&out)["quantization_config"], config(&golden())["quantization_config"]);
        let layer = report.layers.iter().find(|layer| layer.name == "model.layers.1.mlp.experts.down_proj").unwrap();
        assert_eq!(layer.encoding, "mxfp4");
        assert!(report.fidelity.map_or(!is_cast, |fidelity| fidelity.fidelity.cosine > 0.999_9));
        let expected = Model::open(golden()).unwrap();
        assert_eq!(experts(&Model::open(&out).unwrap()), experts(&expected));
    }
}

/// Folders have one quantization method: the experts become floats with the same values.
#[test]
fn experts_become_floats_next_to_other_quantized_weights() {
    let quantize: Quantize = serde_json::from_value(serde_json::json!({ "scheme": "W8A16", "group_size": -1 })).unwrap();
    let cast: Cast = serde_json::from_value(serde_json::json!({ "to": "f16" })).unwrap();
    let dense = Safetensors::with_layout(Layout::Dense);
    for (pipeline, has_note) in [
        (Pipeline::builder().pass(quantize), true),
        (Pipeline::builder().export(dense), true),
        (Pipeline::builder().pass(cast), false),
        (Pipeline::builder().pass(Dequantize::default()), false),
    ] {
        let (folder, report) = written(&golden(), pipeline.measure(false));
        let out = folder.path().join("out");
        let found = tensors(&out.join("model.safetensors"));
        assert!(found.keys().all(|name| !name.ends_with("_blocks") && !name.ends_with("_scales")), "{:?}", found.keys());
        assert_ne!(config(&out).pointer("/quantization_config/quant_method"), Some(&Value::from("mxfp4")));
        let noted = report.notes.iter().any(|note| note.starts_with("4 tensors of experts in MXFP4 stored as bfloat16"));
        assert_eq!(noted, has_note, "{:?}", report.notes);
        assert_eq!(experts(&Model::open(&out).unwrap()), experts(&Model::open(golden()).unwrap()));
    }
}

/// llama.cpp's converter keeps the codes, too.
#[test]
fn experts_are_written_to_gguf_files_in_mxfp4() {
    let export = Gguf { file_type: FileType::BF16, ..Gguf::default() };
    let (folder, report) = written(&golden(), Pipeline::builder().export(export).measure(false));
    let encodings = report.layers.iter().filter(|layer| layer.shape.len() == 3).map(|layer| layer.encoding.as_str());
    assert!(encodings.clone().count() == 4 && encodings.clone().all(|encoding| encoding == "mxfp4"), "{:?}", encodings.collect::<Vec<_>>());
    assert!(report.notes.iter().any(|note| note.contains("llama.cpp rounds the limits")), "{:?}", report.notes);
    let opened = Model::open(folder.path().join("out")).unwrap();
    assert_eq!(experts(&opened), experts(&Model::open(golden()).unwrap()));
}

#[test]
fn parts_that_do_not_match_are_rejected() {
    let error = error(|all| {
        let scales = all.get_mut("model.layers.0.mlp.experts.down_proj_scales").unwrap();
        *scales = scales.narrow(1, 0, 3).unwrap().contiguous().unwrap();
    });
    assert!(error.contains("down_proj`: is not packed as MXFP4") && error.contains("[4, 3, 1]"), "{error}");
}
