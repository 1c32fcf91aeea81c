//! Weights of bitsandbytes and ModelOpt, on the folders of `scripts/goldens other-tools`.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use compress::export::{Layout, Safetensors};
use compress::pass::{Cast, Dequantize, Quantize};
use compress::{Model, Pipeline};
use serde_json::{Value, json};

use crate::common::{self, DType, Tensor, Tensors, written};
use crate::parity::differences;

const FOLDERS: [&str; 5] = ["nf4", "fp4", "int8", "nvfp4", "mixed"];
const SEPARATE: &str = "hf_quant_config.json";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

fn golden(name: &str) -> PathBuf {
    common::golden("other-tools").join(name)
}

fn tensors(file: &Path) -> Tensors {
    common::read(file)
}

/// The values of a tensor of floats.
fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.values().into_iter().map(|value| value as f32).collect()
}

fn read(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Fails if a weight differs from the values of the golden file.
fn require_equal(name: &str, model: &Model) {
    let expected = tensors(&golden(name).join("golden.safetensors"));
    let expected: Vec<_> = expected.iter().filter(|(name, _)| !name.contains('/')).collect();
    assert_eq!(expected.len(), 7, "{name}");
    for (key, values) in expected {
        let weight = &model.weights.by_name[key];
        assert_eq!(weight.shape, values.shape, "{name} {key}");
        assert_eq!(weight.dense(key).floats(key).unwrap(), floats(values), "{name} {key}");
    }
}

/// The error of opening a folder with changed tensors and another configuration.
fn error(name: &str, change: impl FnOnce(&mut Tensors, &mut Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (mut all, mut config) = (tensors(&golden(name).join("model.safetensors")), read(&golden(name).join("config.json")));
    change(&mut all, &mut config);
    common::write(&folder.path().join("model.safetensors"), &all);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if golden(name).join(SEPARATE).is_file() {
        fs::copy(golden(name).join(SEPARATE), folder.path().join(SEPARATE)).unwrap();
    }
    Model::open(folder.path()).err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn values_and_outputs_equal_those_of_the_tools() {
    for name in FOLDERS {
        require_equal(name, &Model::open(golden(name)).unwrap());
        let (folder, _) = written(&golden(name), Pipeline::builder().pass(Dequantize::default()).measure(false));
        let out = folder.path().join("out");
        assert_eq!(read(&out.join("config.json")).get("quantization_config"), None, "{name}");
        assert!(!out.join(SEPARATE).exists(), "{name}");
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
        let cast: Cast = serde_json::from_value(json!({ "to": "f32", "targets": ["model.embed_tokens.weight"] })).unwrap();
        for pipeline in [Pipeline::builder(), Pipeline::builder().pass(cast)] {
            let (folder, _) = written(&golden(name), pipeline.measure(false));
            let out = folder.path().join("out");
            let found = tensors(&out.join("model.safetensors"));
            assert_eq!(found.len(), source.len(), "{name}");
            for (key, tensor) in source.iter().filter(|(key, _)| *key != "model.embed_tokens.weight") {
                assert!(&found[key] == tensor, "{name} {key}");
            }
            let (described, input) = (&read(&out.join("config.json"))["quantization_config"], read(&golden(name).join("config.json")));
            if name == "mixed" {
                assert_eq!((&described["quant_method"], &described["quantization"]["quant_algo"]), (&json!("modelopt"), &json!("MIXED_PRECISION")));
            } else {
                assert_eq!(described, &input["quantization_config"], "{name}");
            }
            assert_eq!(out.join(SEPARATE).exists(), golden(name).join(SEPARATE).exists(), "{name}");
            require_equal(name, &Model::open(&out).unwrap());
        }
    }
}

/// The tensors of bitsandbytes describe themselves.
#[test]
fn weights_of_bitsandbytes_keep_their_bytes_without_a_description() {
    for name in ["nf4", "int8"] {
        let input = tempfile::tempdir().unwrap();
        fs::copy(golden(name).join("model.safetensors"), input.path().join("model.safetensors")).unwrap();
        let mut config = read(&golden(name).join("config.json"));
        config.as_object_mut().unwrap().remove("quantization_config").unwrap();
        fs::write(input.path().join("config.json"), config.to_string()).unwrap();
        let (folder, _) = written(input.path(), Pipeline::builder().measure(false));
        let out = folder.path().join("out");
        assert!(tensors(&out.join("model.safetensors")) == tensors(&golden(name).join("model.safetensors")), "{name}");
        assert_eq!(read(&out.join("config.json")).get("quantization_config"), None, "{name}");
        require_equal(name, &Model::open(&out).unwrap());
    }
}

/// Folders have one quantization method. Weights of ModelOpt keep their codes and scales in the format of
/// compressed-tensors.
#[test]
fn weights_are_converted_next_to_other_quantized_weights() {
    for name in FOLDERS {
        let quantize: Quantize = serde_json::from_value(json!({ "scheme": "W8A16", "group_size": -1, "targets": ["lm_head.weight"] })).unwrap();
        let (folder, report) = written(&golden(name), Pipeline::builder().pass(quantize).measure(false));
        let out = folder.path().join("out");
        let is_modelopt = golden(name).join(SEPARATE).exists();
        assert!(!out.join(SEPARATE).exists(), "{name}");
        let described = &read(&out.join("config.json"))["quantization_config"];
        assert_eq!(described["quant_method"], "compressed-tensors", "{name}");
        let note = if is_modelopt { "7 weights in FP8 or NVFP4 stored in the format of" } else { "7 weights of bitsandbytes stored as floats" };
        assert!(report.notes.iter().any(|found| found.contains(note)), "{name}: {:?}", report.notes);
        assert_eq!(report.notes.iter().any(|found| found.contains("KV cache by ModelOpt")), name == "nvfp4", "{name}: {:?}", report.notes);
        let (found, model) = (tensors(&out.join("model.safetensors")), Model::open(&out).unwrap());
        assert_eq!(found.keys().any(|key| key.ends_with("_global_scale")), is_modelopt, "{name}");
        assert!(!found.keys().any(|key| key.contains("absmax") || key.ends_with("SCB") || key.ends_with("scale_2")), "{name}");
        let expected = tensors(&golden(name).join("golden.safetensors"));
        assert_eq!(model.weights.by_name[DOWN].dense(DOWN).floats(DOWN).unwrap(), floats(&expected[DOWN]), "{name}");
        if name == "nvfp4" {
            assert_eq!(floats(&found["model.layers.0.mlp.down_proj.input_global_scale"]), [0.0007f32.recip()]);
            let layout = Safetensors::with_layout(Layout::CompressedTensors);
            let (folder, _) = written(&golden(name), Pipeline::builder().export(layout).measure(false));
            let group = &read(&folder.path().join("out/config.json"))["quantization_config"]["config_groups"]["group_0"];
            assert_eq!((&group["weights"]["num_bits"], &group["input_activations"]["dynamic"]), (&json!(4), &json!("local")));
        }
    }
}

/// Dense weights of bitsandbytes need no separate dequantization.
#[test]
fn weights_of_bitsandbytes_are_quantized_again() {
    for name in ["nf4", "int8"] {
        let quantize: Quantize = serde_json::from_value(json!({ "scheme": "W4A16", "group_size": 32 })).unwrap();
        let (folder, _) = written(&golden(name), Pipeline::builder().pass(quantize).measure(false));
        let weights = &read(&folder.path().join("out/config.json"))["quantization_config"]["config_groups"]["group_0"]["weights"];
        assert_eq!((&weights["num_bits"], &weights["group_size"]), (&json!(4), &json!(32)), "{name}");
    }
}

#[test]
fn incomplete_and_contradicting_folders_are_refused() {
    let part = |suffix: &str| format!("{DOWN}{suffix}");
    let module = |part: &str| format!("model.layers.0.mlp.down_proj.{part}");
    let removed = |folder: &str, name: &str| error(folder, |all, _| drop(all.remove(name).unwrap()));
    for (folder, name) in [
        ("nf4", part(".absmax")),
        ("nf4", part(".quant_map")),
        ("nf4", part(".nested_absmax")),
        ("nf4", part(".nested_quant_map")),
        ("nvfp4", part("_scale")),
        ("nvfp4", module("input_scale")),
    ] {
        let found = removed(folder, &name);
        assert!(found.contains(&format!("tensor `{name}`: is missing")), "{folder} {name}: {found}");
    }
    let found = removed("nf4", &part(".quant_state.bitsandbytes__nf4"));
    assert!(found.contains(&format!("tensor `{DOWN}`: has no `quant_state` of bitsandbytes")), "{found}");
    let found = removed("fp4", DOWN);
    assert!(found.contains(DOWN) && found.contains("does not contain the indices of 6144 elements"), "{found}");
    let found = removed("int8", DOWN);
    assert!(found.contains("is not a matrix of int8, but `model.layers.0.mlp.down_proj.SCB`"), "{found}");
    let found = error("nvfp4", |all, _| drop(all.insert(module("pre_quant_scale"), Tensor::new(DType::F32, &[96], vec![0; 384]))));
    assert!(found.contains("pre_quant_scale`: changes the input or output of a layer"), "{found}");
    // Experts in one tensor, as of gpt-oss and Llama 4.
    let experts = "model.layers.0.mlp.experts.up_proj";
    for (folder, suffix, dtype) in [("nvfp4", "_weight_scale_2", DType::U8), ("mixed", "_weight_scale", DType::F8_E4M3)] {
        let found = error(folder, |all, _| {
            all.insert(experts.to_owned(), Tensor::new(dtype, &[2, 8, 4], vec![0; 64]));
            all.insert(format!("{experts}{suffix}"), Tensor::new(DType::F32, &[], vec![0, 0, 128, 63]));
        });
        assert!(found.contains(&format!("tensor `{experts}`: contains quantized experts in one tensor by ModelOpt")), "{folder}: {found}");
    }
    let format = module("weight_format");
    let found = error("int8", |all, _| drop(all.insert(format, Tensor::new(DType::U8, &[], vec![1]))));
    assert!(found.contains("weight_format`: is not 0"), "{found}");
    let scales = Tensor::new(DType::F32, &[3], vec![0; 12]);
    let found = error("int8", |all, _| drop(all.insert(module("SCB"), scales)));
    assert!(found.contains("requires 64 elements of type F32"), "{found}");
    let text = |all: &mut Tensors, text: &str| {
        all.insert(part(".quant_state.bitsandbytes__nf4"), Tensor::new(DType::U8, &[text.len()], text.as_bytes().to_vec()));
    };
    let found = error("nf4", |all, _| text(all, "{}"));
    assert!(found.contains("is not a JSON object of bitsandbytes"), "{found}");
    let found = error("nf4", |all, _| text(all, r#"{"quant_type": "nf4", "blocksize": 0, "dtype": "bfloat16", "shape": [64, 288]}"#));
    assert!(found.contains("in blocks of 0"), "{found}");
    let found = error("nf4", |all, _| text(all, r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}"#));
    assert!(found.contains("does not contain the indices of 4096 elements"), "{found}");
    let found = error("nf4", |_, config| config["quantization_config"]["rotation"] = json!(true));
    assert!(found.contains("`rotation` of true"), "{found}");
    let found = error("nvfp4", |_, config| config["quantization_config"]["quant_algo"] = json!("W4A8_AWQ"));
    assert!(found.contains("`quant_algo` of \"W4A8_AWQ\" in a description by ModelOpt is not supported"), "{found}");
    let found = error("nvfp4", |all, _| drop(all.insert(part("_scale_2"), Tensor::new(DType::F32, &[], vec![0; 4]))));
    assert!(found.contains("weight_scale_2`: is not a positive number"), "{found}");
    let found = error("nvfp4", |all, _| drop(all.insert(DOWN.to_owned(), Tensor::new(DType::U8, &[64, 40], vec![0; 2560]))));
    assert!(found.contains("is not packed as NVFP4: codes U8 [64, 40], scales F8_E4M3 [64, 6]"), "{found}");
    let found = error("mixed", |all, _| all.retain(|name, _| !name.contains("_proj")));
    assert!(found.contains("`quant_method` of \"modelopt\" in a model without weights in this format"), "{found}");
}
