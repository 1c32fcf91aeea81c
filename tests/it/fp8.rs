//! FP8 weights of `quant_method: fp8`, on the folders of `scripts/goldens fp8`.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use compress::export::{FileType, Gguf, Layout, Safetensors};
use compress::pass::{Cast, Dequantize, Quantize};
use compress::{Model, Pipeline};
use serde_json::{Value, json};

use crate::common::{self, config, written};
use crate::contract::violated;
use crate::parity::differences;

const FOLDERS: [&str; 4] = ["blocks", "ragged", "tensor", "stacked"];

fn golden(name: &str) -> PathBuf {
    common::golden("fp8").join(name)
}

fn tensors(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// Fails if a weight differs from the values of transformers.
fn require_equal(name: &str, model: &Model) {
    let expected = tensors(&golden(name).join("golden.safetensors"));
    let expected: Vec<_> = expected.iter().filter(|(name, _)| !name.contains('/')).collect();
    assert!(expected.len() >= 6, "{name}");
    for (key, values) in expected {
        let weight = &model.weights.by_name[key];
        assert_eq!(weight.shape, values.dims(), "{name} {key}");
        assert_eq!(weight.dense(key).floats(key).unwrap(), floats(values), "{name} {key}");
    }
}

/// The error of opening a folder with changed tensors and another configuration.
fn error(name: &str, change: impl FnOnce(&mut HashMap<String, Tensor>, &mut Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (mut all, mut config) = (tensors(&golden(name).join("model.safetensors")), config(&golden(name)));
    change(&mut all, &mut config["quantization_config"]);
    candle_core::safetensors::save(&all, folder.path().join("model.safetensors")).unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    Model::open(folder.path()).err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn values_and_outputs_equal_those_of_transformers() {
    for name in FOLDERS {
        require_equal(name, &Model::open(golden(name)).unwrap());
        let (folder, _) = written(&golden(name), Pipeline::builder().pass(Dequantize::default()).measure(false));
        let out = folder.path().join("out");
        assert_eq!(config(&out).get("quantization_config"), None);
        fs::copy(golden(name).join("golden.safetensors"), out.join("golden.safetensors")).unwrap();
        let worst = differences(&out, "golden.safetensors").unwrap();
        assert!(worst.len() == 1 && worst[0].1 < 1e-4, "{name}: {worst:?}");
    }
}

/// Also after a pass that changes other weights.
#[test]
fn unchanged_weights_keep_their_bytes() {
    for name in FOLDERS {
        let source = tensors(&golden(name).join("model.safetensors"));
        let cast: Cast = serde_json::from_value(json!({ "to": "f16", "targets": ["model.embed_tokens.weight"] })).unwrap();
        for (pipeline, is_cast) in [(Pipeline::builder(), false), (Pipeline::builder().pass(cast), true)] {
            let (folder, report) = written(&golden(name), pipeline);
            let out = folder.path().join("out");
            let found = tensors(&out.join("model.safetensors"));
            assert_eq!(found.len(), source.len(), "{name}");
            for (key, tensor) in source.iter().filter(|(key, _)| *key != "model.embed_tokens.weight") {
                assert_eq!((found[key].dims(), found[key].dtype()), (tensor.dims(), tensor.dtype()), "{name} {key}");
                assert_eq!(floats(&found[key]), floats(tensor), "{name} {key}");
            }
            assert_eq!(found["model.embed_tokens.weight"].dtype() == DType::F16, is_cast);
            assert_eq!(config(&out)["quantization_config"], config(&golden(name))["quantization_config"]);
            assert!(report.layers.iter().filter(|layer| layer.encoding.starts_with("fp8")).count() >= 6, "{name}");
            require_equal(name, &Model::open(&out).unwrap());
        }
    }
}

/// Folders have one quantization method. Matrices keep their codes and scales in the format of
/// compressed-tensors.
#[test]
fn weights_are_converted_next_to_other_quantized_weights() {
    for name in FOLDERS {
        let quantize: Quantize = serde_json::from_value(json!({ "scheme": "W8A16", "group_size": -1, "targets": ["lm_head.weight"] })).unwrap();
        let layout = Safetensors::with_layout(Layout::CompressedTensors);
        for pipeline in [Pipeline::builder().pass(quantize), Pipeline::builder().export(layout)] {
            let (folder, report) = written(&golden(name), pipeline.measure(false));
            let out = folder.path().join("out");
            let found = tensors(&out.join("model.safetensors"));
            assert!(found.keys().all(|key| !key.ends_with("_scale_inv") && !key.ends_with("activation_scale")), "{:?}", found.keys());
            let described = &config(&out)["quantization_config"];
            assert_eq!(described["quant_method"], "compressed-tensors");
            let groups: Vec<&Value> = described["config_groups"].as_object().unwrap().values().collect();
            let fp8 = groups.iter().find(|group| group["weights"]["type"] == "float").unwrap();
            let (strategy, dynamic) = if name == "tensor" { ("tensor", false) } else { ("block", true) };
            assert_eq!((&fp8["weights"]["strategy"], &fp8["input_activations"]["dynamic"]), (&json!(strategy), &json!(dynamic)), "{name}");
            // compressed-tensors fails if groups of activations do not divide a row.
            assert!(!violated(&out, "transformers").contains("activation-groups"), "{name}: {described}");
            assert!(report.notes.iter().any(|note| note.contains("in FP8 or NVFP4 stored in the format of compressed-tensors")), "{:?}", report.notes);
            assert_eq!(report.notes.iter().any(|note| note.contains("2 tensors of experts in FP8 stored as floats")), name == "stacked", "{:?}", report.notes);
            // Scales determine the dtype of values in compressed-tensors.
            let (opened, source) = (Model::open(&out).unwrap(), Model::open(golden(name)).unwrap());
            for (key, weight) in source.weights.by_name.iter().filter(|(key, _)| key.ends_with("_proj.weight")) {
                assert_eq!(opened.weights.by_name[key].floats(key).unwrap(), weight.floats(key).unwrap(), "{name} {key}");
            }
        }
    }
}

#[test]
fn weights_are_requantized_and_written_as_gguf() {
    let quantize: Quantize = serde_json::from_value(json!({ "scheme": "W4A16", "group_size": 32 })).unwrap();
    let (folder, _) = written(&golden("blocks"), Pipeline::builder().pass(Dequantize::default()).pass(quantize).measure(false));
    let weights = &config(&folder.path().join("out"))["quantization_config"]["config_groups"]["group_0"]["weights"];
    assert_eq!((&weights["num_bits"], &weights["group_size"]), (&json!(4), &json!(32)));
    let (folder, _) = written(&golden("blocks"), Pipeline::builder().export(Gguf { file_type: FileType::F32, ..Gguf::default() }).measure(false));
    let file = fs::read_dir(folder.path().join("out")).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.extension().is_some_and(|e| e == "gguf"));
    let name = "model.layers.0.mlp.down_proj.weight";
    let (opened, expected) = (Model::open(file.unwrap()).unwrap(), tensors(&golden("blocks").join("golden.safetensors")));
    assert_eq!(opened.weights.by_name[name].floats(name).unwrap(), floats(&expected[name]));
}

#[test]
fn incomplete_and_contradicting_folders_are_refused() {
    let (name, scales) = ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv");
    let found = error("blocks", |all, _| drop(all.remove(scales).unwrap()));
    assert!(found.contains(scales) && found.contains("is missing, but"), "{found}");
    let found = error("blocks", |all, _| drop(all.remove(name).unwrap()));
    assert!(found.contains(&format!("contains scales of FP8, but `{name}` is missing")), "{found}");
    let found = error("blocks", |all, _| drop(all.insert(name.to_owned(), Tensor::zeros((64, 96), DType::BF16, &Device::Cpu).unwrap())));
    assert!(found.contains(&format!("but `{name}` is BF16")), "{found}");
    let found = error("blocks", |_, described| described["weight_block_size"] = json!([16, 32]));
    assert!(found.contains("config.json specifies blocks of 16 x 32"), "{found}");
    let found = error("blocks", |_, described| described["weight_block_size"] = Value::Null);
    assert!(found.contains("config.json specifies one scale"), "{found}");
    let found = error("tensor", |_, described| described["weight_block_size"] = json!([128, 128]));
    assert!(found.contains("scales of shape [] for FP8 codes"), "{found}");
    let found = error("blocks", |all, _| drop(all.insert(scales.to_owned(), Tensor::full(120u8, (2, 3), &Device::Cpu).unwrap())));
    assert!(found.contains("has scales of type U8"), "{found}");
    let found = error("blocks", |_, described| described["activation_scheme"] = json!("static"));
    assert!(found.contains(".activation_scale`: is missing, but config.json specifies static quantization"), "{found}");
    let found = error("blocks", |_, described| described["expert_dtype"] = json!("fp4"));
    assert!(found.contains("`expert_dtype` of \"fp4\" with `quant_method` of \"fp8\" is not supported"), "{found}");
    let found = error("blocks", |all, _| all.retain(|name, _| !name.contains("_proj")));
    assert!(found.contains("`quant_method` of \"fp8\" in a model without weights in this format"), "{found}");
}

/// Older files have other names, and settings without an effect on the values.
#[test]
fn other_spellings_are_read() {
    let spelled = |described: &mut Value| {
        described["scale_fmt"] = json!("ue8m0");
        described["ignored_layers"] = described["modules_to_not_convert"].take();
    };
    assert_eq!(error("blocks", |_, described| spelled(described)), "");
    let rename = |all: &mut HashMap<String, Tensor>| {
        let names = |name: String| name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale");
        *all = std::mem::take(all).into_iter().map(|(name, tensor)| (names(name), tensor)).collect();
    };
    let without_size = |described: &mut Value| drop(described.as_object_mut().unwrap().remove("weight_block_size"));
    assert_eq!(
        error("tensor", |all, described| {
            rename(all);
            without_size(described);
        }),
        ""
    );
}
