//! `compress check --loads`: outputs comply with the rules of the runtimes that load them, and folders and
//! files with the defects of published checkpoints violate the rule that names the defect.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use compress::contract::{self, Checked, Runtime, Target};
use compress::pass::Quantize;
use compress_onnx::proto::TensorProto;
use serde_json::{Value, json};

pub use crate::common::golden;
use crate::common::{DType, Desk, Tensor, Tensors, contents, pipeline, read, write};
use crate::contract_files::onnx;
use crate::low_bits::{llama, samples};

/// A tokenizer without tokens.
const TOKENIZER: &str = r#"{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}"#;
pub const SCHEMES: [&str; 24] = [
    "W4A16",
    "W4A16-ASYM",
    "W2A16",
    "W3A16",
    "W5A16",
    "W6A16",
    "W7A16",
    "W2A16-ASYM",
    "W3A16-ASYM",
    "W8A16",
    "W8A8",
    "W8A8-STATIC",
    "W4A8",
    "W4AFP8",
    "FP8-DYNAMIC",
    "FP8-BLOCK",
    "FP8",
    "NVFP4A16",
    "NVFP4",
    "MXFP4A16",
    "MXFP4",
    "MXFP8A16",
    "MXFP8",
    "MXFP6A16",
];

pub fn check(path: &Path, target: &str) -> Checked {
    contract::check(path, target.parse().unwrap()).unwrap()
}

/// Names of the violated rules.
pub fn violated(path: &Path, target: &str) -> BTreeSet<&'static str> {
    check(path, target).violations.iter().map(|violation| violation.rule).collect()
}

/// A small Llama with a tokenizer.
pub fn model(desk: &Desk) -> PathBuf {
    let folder = llama(desk.path());
    std::fs::write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
    folder
}

fn quantized(desk: &Desk, model: &Path, options: Value) -> PathBuf {
    let pass: Quantize = serde_json::from_value(options).unwrap();
    desk.run(model, pipeline().calibration(samples(desk.path())).pass(pass)).unwrap().path
}

/// A copy of a folder with another configuration and other tensors.
pub fn changed(desk: &Desk, folder: &Path, change: impl FnOnce(&mut Value, &mut Tensors)) -> PathBuf {
    let copy = desk.place();
    std::fs::create_dir(&copy).unwrap();
    for (name, bytes) in contents(folder).into_iter().filter(|(name, _)| !name.ends_with(".safetensors")) {
        std::fs::write(copy.join(name), bytes).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let mut tensors = read(folder);
    change(&mut config, &mut tensors);
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();
    write(&copy.join("model.safetensors"), &tensors);
    copy
}

/// Replaces a quantized matrix of a folder by floats.
fn make_dense(tensors: &mut Tensors, module: &str, shape: &[usize]) {
    tensors.retain(|name, _| !name.starts_with(&format!("{module}.")));
    tensors.insert(format!("{module}.weight"), Tensor::random(DType::F32, shape, 1));
}

#[test]
fn outputs_of_every_scheme_load() {
    let desk = Desk::new();
    let model = model(&desk);
    for target in ["vllm", "vllm@0.11", "sglang", "transformers"] {
        assert_eq!(violated(&model, target), BTreeSet::new(), "{target}");
    }
    for scheme in SCHEMES {
        let folder = quantized(&desk, &model, json!({ "scheme": scheme }));
        let is_usual = !["W2", "W3", "W5", "W6", "W7"].iter().any(|width| scheme.starts_with(width));
        let has_few_zero_points = ["W2A16-ASYM", "W3A16-ASYM"].contains(&scheme);
        let (is_mx, is_only_bf16) = (scheme.starts_with("MXFP"), scheme.starts_with("MXFP") || scheme.starts_with("NVFP"));
        // The model is float32.
        let expected = match () {
            () if scheme.ends_with("-ASYM") => BTreeSet::from(["zero-points"]),
            () if is_only_bf16 => BTreeSet::from(["bfloat16"]),
            () => BTreeSet::new(),
        };
        assert_eq!(violated(&folder, "transformers"), expected, "{scheme}");
        if is_only_bf16 {
            let bf16 = changed(&desk, &folder, |config, _| config["dtype"] = json!("bfloat16"));
            assert_eq!(violated(&bf16, "transformers"), BTreeSet::new(), "{scheme}");
        }
        let expected = if has_few_zero_points { BTreeSet::from(["zero-points"]) } else { BTreeSet::new() };
        assert_eq!(violated(&folder, "vllm"), expected, "{scheme}");
        for old in ["vllm@0.11", "sglang"] {
            assert_eq!(violated(&folder, old).contains("bits"), !is_usual, "{old}: {scheme}");
            let expected = if is_mx && old == "vllm@0.11" { BTreeSet::from(["activations"]) } else { BTreeSet::new() };
            assert!(!is_usual || violated(&folder, old) == expected, "{old}: {scheme}: {:?}", check(&folder, old).violations);
        }
    }
    let cache = quantized(&desk, &model, json!({ "scheme": "W4A16", "kv_cache": "fp8" }));
    assert_eq!(violated(&cache, "vllm"), BTreeSet::new());
    let int8 = quantized(&desk, &model, json!({ "scheme": "W4A16", "kv_cache": "int8" }));
    assert_eq!(violated(&int8, "vllm"), BTreeSet::from(["kv-cache"]));
}

/// The defects of the threads in the comments: rule, scheme, change.
#[test]
fn defects_of_published_folders_violate_the_rule_that_names_them() {
    type Change = fn(&mut Value, &mut Tensors);
    const Q: &str = "model.layers.0.self_attn.q_proj";
    let desk = Desk::new();
    let model = model(&desk);
    let cases: [(&str, &str, &str, Change); 27] = [
        // llm-compressor#2163: a separate global scale in a fused layer.
        ("global-scale", "vllm", "NVFP4A16", |_, tensors| {
            tensors.get_mut("model.layers.0.self_attn.k_proj.weight_global_scale").unwrap().bytes = 3.0f32.to_le_bytes().to_vec();
        }),
        ("global-scale", "vllm", "NVFP4", |_, tensors| {
            tensors.get_mut("model.layers.1.mlp.up_proj.input_global_scale").unwrap().bytes = 3.0f32.to_le_bytes().to_vec();
        }),
        ("fp8-block-rows", "vllm", "FP8-DYNAMIC", |config, _| {
            let weights = &mut config["quantization_config"]["config_groups"]["group_0"]["weights"];
            (weights["strategy"], weights["block_structure"]) = (json!("block"), json!([24, 32]));
        }),
        ("actorder", "vllm", "W4A16", |config, _| config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = json!("group")),
        // vllm#31623: `ignore` names one part of a fused layer.
        ("fused-ignore", "vllm", "W4A16", |config, tensors| {
            make_dense(tensors, Q, &[32, 32]);
            config["quantization_config"]["ignore"].as_array_mut().unwrap().push(json!(Q));
        }),
        ("fused-ignore", "sglang", "W4A16", |config, tensors| {
            make_dense(tensors, Q, &[32, 32]);
            config["quantization_config"]["ignore"].as_array_mut().unwrap().push(json!(format!("re:.*{}$", Q.replace('.', "\\."))));
        }),
        ("fused-scheme", "vllm", "W4A16", |_, tensors| make_dense(tensors, Q, &[32, 32])),
        // vllm#53950: the configuration contradicts the weights.
        ("ignored", "transformers", "W4A16", |_, tensors| make_dense(tensors, "model.layers.0.mlp.down_proj", &[32, 96])),
        ("selected", "vllm", "W8A8", |config, _| config["quantization_config"]["ignore"].as_array_mut().unwrap().push(json!("re:.*down_proj$"))),
        ("selected", "transformers", "W8A8", |config, _| config["quantization_config"]["config_groups"]["group_0"]["targets"] = json!(["re:.*mlp.*"])),
        // llm-compressor#959: a missing scale.
        ("scales", "vllm", "W4A16", |_, tensors| drop(tensors.remove("model.layers.1.self_attn.o_proj.weight_scale"))),
        ("scales", "transformers", "W4A16-ASYM", |_, tensors| drop(tensors.remove("model.layers.1.self_attn.o_proj.weight_zero_point"))),
        ("group-rows", "vllm", "W4A16", |config, _| config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(48)),
        ("group-rows", "sglang", "W8A16", |config, _| config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(16)),
        ("group-size", "vllm@0.11", "W4A16-ASYM", |config, _| {
            config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = json!(16);
        }),
        ("activation-groups", "transformers", "FP8-DYNAMIC", |config, _| {
            let activations = &mut config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
            (activations["strategy"], activations["group_size"]) = (json!("group"), json!(48));
        }),
        ("layers", "vllm", "W8A8", |_, tensors| tensors.retain(|name, _| !name.starts_with("model.layers.1."))),
        // vllm#36799: sparse formats.
        ("sparsity", "vllm", "W8A8", |config, _| config["quantization_config"]["sparsity_config"] = json!({ "format": "dense", "targets": ["Linear"] })),
        ("kv-cache-scales", "vllm", "W8A8", |config, _| {
            config["quantization_config"]["kv_cache_scheme"] =
                json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false });
        }),
        // vLLM 0.11 quantizes layers of the classes LinearBase, Attention and FusedMoE only.
        ("head", "vllm@0.11", "W8A8", |config, tensors| {
            config["tie_word_embeddings"] = json!(false);
            tensors.insert("lm_head.weight".to_owned(), Tensor::new(DType::I8, &[48, 32], vec![1; 48 * 32]));
            tensors.insert("lm_head.weight_scale".to_owned(), Tensor::random(DType::F32, &[48, 1], 1));
        }),
        ("activations", "vllm", "W8A8", |config, _| {
            let weights = &mut config["quantization_config"]["config_groups"]["group_0"]["weights"];
            (weights["strategy"], weights["group_size"]) = (json!("group"), json!(32));
        }),
        ("activations", "sglang", "W8A8", |config, _| {
            let weights = &mut config["quantization_config"]["config_groups"]["group_0"]["weights"];
            (weights["strategy"], weights["group_size"]) = (json!("group"), json!(32));
        }),
        ("activations", "sglang", "W8A8", |config, _| {
            config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false);
        }),
        ("activations", "sglang", "W8A8", |config, _| config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = Value::Null),
        ("bfloat16", "transformers", "FP8-DYNAMIC", |config, _| {
            config["quantization_config"]["config_groups"]["group_0"]["format"] = json!("mxfp8-quantized");
        }),
        ("tied-head", "sglang", "W8A8", |config, tensors| {
            (config["tie_embedding"], config["tie_word_embeddings"]) = (json!(true), json!(false));
            tensors.insert("lm_head.weight".to_owned(), Tensor::new(DType::I8, &[48, 32], vec![1; 48 * 32]));
            tensors.insert("lm_head.weight_scale".to_owned(), Tensor::random(DType::F32, &[48, 1], 1));
        }),
        // sglang#38143: a quantized head that is tied.
        ("tied-head", "sglang", "W8A8", |_, tensors| {
            tensors.insert("lm_head.weight".to_owned(), Tensor::new(DType::I8, &[48, 32], vec![1; 48 * 32]));
            tensors.insert("lm_head.weight_scale".to_owned(), Tensor::random(DType::F32, &[48, 1], 1));
        }),
    ];
    for (rule, target, scheme, change) in cases {
        let folder = quantized(&desk, &model, json!({ "scheme": scheme }));
        assert!(!violated(&folder, target).contains(rule), "{rule}: {scheme}");
        let broken = changed(&desk, &folder, change);
        let found = check(&broken, target).violations;
        assert!(found.iter().any(|violation| violation.rule == rule), "{rule}: {found:?}");
    }
}

#[test]
fn files_and_keys_of_the_folder_are_checked() {
    let desk = Desk::new();
    let model = model(&desk);
    let without = |name: &str| {
        let copy = changed(&desk, &model, |_, _| {});
        std::fs::remove_file(copy.join(name)).unwrap();
        copy
    };
    for target in ["vllm", "sglang"] {
        assert_eq!(violated(&without("tokenizer.json"), target), BTreeSet::from(["tokenizer"]), "{target}");
    }
    assert_eq!(violated(&without("config.json"), "vllm"), BTreeSet::from(["architectures"]));
    assert_eq!(violated(&without("config.json"), "transformers"), BTreeSet::from(["model-type"]));
    let key = |key: &str, value: Value| changed(&desk, &model, |config, _| config[key] = value);
    assert_eq!(violated(&key("architectures", json!([])), "sglang"), BTreeSet::from(["architectures"]));
    assert_eq!(violated(&key("model_type", json!("compress-llama")), "transformers"), BTreeSet::from(["own-format"]));
    for target in ["vllm", "vllm@0.11", "sglang", "transformers"] {
        for (name, value) in
            [("hidden_act", json!("sily")), ("num_attention_heads", json!("4")), ("dtype", json!("float31")), ("rope_scaling", json!({ "type": "spiral" }))]
        {
            let found = check(&key(name, value), target).violations;
            assert!(found.iter().any(|violation| violation.rule == "shapes" && violation.subject == name), "{target}: {name}: {found:?}");
        }
        for value in [json!({ "quant_method": "other" }), json!({ "bits": 4 }), json!("W4A16")] {
            assert_eq!(violated(&key("quantization_config", value), target), BTreeSet::from(["method"]), "{target}");
        }
    }
    for target in ["vllm", "sglang"] {
        assert_eq!(violated(&key("quantization_config", json!({ "quant_method": "gptq_marlin" })), target), BTreeSet::new());
        assert_eq!(violated(&key("hidden_act", json!("gelu")), target), BTreeSet::from(["activation-function"]));
    }
    assert_eq!(violated(&key("tie_word_embeddings", json!("yes")), "transformers"), BTreeSet::from(["shapes"]));
    assert_eq!(violated(&key("pad_token_id", json!(48)), "transformers"), BTreeSet::from(["shapes"]));
    let with_settings = |text: &str| {
        let copy = changed(&desk, &model, |_, _| {});
        std::fs::write(copy.join("generation_config.json"), text).unwrap();
        violated(&copy, "transformers")
    };
    assert_eq!((with_settings("[]"), with_settings("{}")), (BTreeSet::from(["generation-config"]), BTreeSet::new()));
    assert_eq!(violated(&key("quantization_config", json!({ "quant_method": "other" })), "transformers"), BTreeSet::from(["method"]));
    assert_eq!(violated(&key("quantization_config", json!({ "load_in_4bit": true })), "transformers"), BTreeSet::new());
    // Formats of other tools, which compress does not open, are not rejected.
    assert_eq!(violated(&key("quantization_config", json!({ "quant_method": "bitsandbytes", "load_in_4bit": true })), "transformers"), BTreeSet::new());
    let sparse = json!({ "quant_method": "compressed-tensors", "format": "sparse-24-bitmask" });
    assert_eq!(violated(&key("quantization_config", sparse), "transformers"), BTreeSet::from(["format"]));
}

#[test]
fn routers_and_experts_are_checked() {
    let desk = Desk::new();
    let mixtral = golden("models/mixtral");
    let run = |options: Value| {
        let pass: Quantize = serde_json::from_value(options).unwrap();
        desk.run(&mixtral, pipeline().pass(pass)).unwrap().path
    };
    let good = run(json!({ "scheme": "W8A8" }));
    assert_eq!(violated(&good, "vllm"), BTreeSet::from(["tokenizer"]));
    assert_eq!(violated(&good, "transformers"), BTreeSet::from(["experts"]));
    // Those of transformers 5.23 that were loaded, and had the outputs of this program's executor.
    for (scheme, is_loaded) in [("W4A16", true), ("W3A16", true), ("W4AFP8", true), ("FP8-DYNAMIC", true), ("W4A16-ASYM", false), ("W4A8", false)] {
        let quantized = run(json!({ "scheme": scheme, "group_size": if scheme.starts_with("FP8") { None } else { Some(8) } }));
        assert_eq!(violated(&quantized, "transformers").contains("experts"), !is_loaded, "{scheme}");
    }
    // Float experts are stacked only in folders of FP8.
    for (scheme, is_loaded) in [("W8A8", false), ("FP8-DYNAMIC", true)] {
        let floats = run(json!({ "scheme": scheme, "ignore": ["*experts*"] }));
        assert_eq!(violated(&floats, "transformers").contains("experts"), !is_loaded, "{scheme}");
    }
    let routers = run(json!({ "scheme": "W8A8", "targets": ["*block_sparse_moe*"] }));
    assert_eq!(violated(&routers, "vllm"), BTreeSet::from(["routers", "tokenizer"]));
    // An expert that was never seen stays in floats.
    let experts = run(json!({ "scheme": "W8A8", "ignore": ["*layers.0*experts.3*"] }));
    assert_eq!(violated(&experts, "vllm"), BTreeSet::from(["experts", "tokenizer"]));
    assert!(check(&experts, "vllm").violations.iter().any(|violation| violation.subject.contains("layers.0.block_sparse_moe.experts.3")));
}

/// Found by loading these folders with transformers 5.23, and comparing outputs with this program's executor.
#[test]
fn folders_that_transformers_loads_with_other_weights_are_rejected() {
    let desk = Desk::new();
    let down = |scheme: &str| json!([{ "targets": ["*down_proj*"], "scheme": scheme }]);
    for (rule, model, options, is_violated) in [
        ("expert-schemes", "qwen3-moe", json!({ "scheme": "FP8-DYNAMIC", "ignore": ["*experts.1.*"] }), true),
        ("expert-schemes", "qwen3-moe", json!({ "scheme": "FP8-DYNAMIC", "ignore": ["*down_proj*"] }), false),
        ("expert-schemes", "qwen3-moe", json!({ "scheme": "FP8-DYNAMIC", "rules": down("FP8-BLOCK") }), false),
        ("expert-schemes", "qwen3-moe", json!({ "scheme": "W4A16", "group_size": 8, "rules": down("W8A16") }), true),
        ("expert-schemes", "qwen3-moe", json!({ "scheme": "W4A16", "group_size": 8 }), false),
        ("routers", "qwen2-moe", json!({ "scheme": "FP8-DYNAMIC", "targets": ["*mlp.gate.weight"] }), true),
        ("routers", "qwen2-moe", json!({ "scheme": "FP8-DYNAMIC", "targets": ["*shared_expert_gate*"] }), false),
        ("dinov2", "dinov2", json!({ "scheme": "FP8-DYNAMIC" }), true),
        ("dinov2", "dinov2-gated", json!({ "scheme": "W4A16", "group_size": 8 }), true),
        ("dinov2", "dinov2-gated", json!({ "scheme": "W8A8", "ignore": ["*weights_in*"] }), true),
        ("dinov2", "dinov2-gated", json!({ "scheme": "W8A8" }), false),
        ("packed-weights", "t5", json!({ "scheme": "W4A16", "group_size": 8 }), true),
        ("packed-weights", "t5", json!({ "scheme": "W8A8" }), false),
        ("packed-weights", "mamba2", json!({ "scheme": "W4A16", "group_size": 8, "targets": ["*out_proj*"] }), true),
        ("packed-weights", "mamba2", json!({ "scheme": "W4A16", "group_size": 8, "targets": ["*in_proj*"] }), false),
        ("positions", "opt", json!({ "scheme": "W8A16", "group_size": 8, "targets": ["*embed_positions*"] }), true),
        ("positions", "opt", json!({ "scheme": "W8A16", "group_size": 8, "targets": ["*embed_tokens*"] }), false),
    ] {
        let pass: Quantize = serde_json::from_value(options.clone()).unwrap();
        let folder = desk.run(&golden("models").join(model), pipeline().measure(false).pass(pass)).unwrap().path;
        let found = check(&folder, "transformers").violations;
        assert_eq!(found.iter().any(|violation| violation.rule == rule), is_violated, "{model} {options}: {found:?}");
    }
    let fp8: Quantize = serde_json::from_value(json!({ "scheme": "FP8-DYNAMIC" })).unwrap();
    let gated = desk.run(&golden("models/dinov2-gated"), pipeline().measure(false).pass(fp8)).unwrap().path;
    let fixed = changed(&desk, &gated, |config, _| {
        let activations = &mut config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
        (activations["strategy"], activations["dynamic"]) = (json!("tensor"), json!(false));
    });
    assert!(violated(&fixed, "transformers").contains("dinov2"));
}

/// A copy of a quantized folder whose embedding has the quantization of a query projection.
fn with_embeddings(desk: &Desk, folder: &Path) -> PathBuf {
    changed(desk, folder, |config, tensors| {
        let part = |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix("model.layers.0.self_attn.q_proj.")?.to_owned(), tensor.clone()));
        let parts: Vec<(String, Tensor)> = tensors.iter().filter_map(part).collect();
        tensors.remove("model.embed_tokens.weight");
        tensors.extend(parts.into_iter().map(|(part, tensor)| (format!("model.embed_tokens.{part}"), tensor)));
        config["quantization_config"]["config_groups"]["group_0"]["targets"].as_array_mut().unwrap().push(json!("Embedding"));
    })
}

#[test]
fn quantized_embeddings_are_checked() {
    let desk = Desk::new();
    let model = model(&desk);
    // vLLM 0.33 loads packed symmetric integers of 2, 4 and 8 bits.
    for (scheme, is_loaded) in [("W4A16", true), ("W8A16", true), ("W3A16", false), ("W4A16-ASYM", false), ("FP8-DYNAMIC", false)] {
        let folder = with_embeddings(&desk, &quantized(&desk, &model, json!({ "scheme": scheme })));
        assert_eq!(violated(&folder, "vllm").contains("embeddings"), !is_loaded, "{scheme}");
        for other in ["vllm@0.11", "sglang"] {
            assert!(violated(&folder, other).contains("embeddings"), "{other}: {scheme}");
        }
    }
}

/// transformers loads packed zero points only with an option, and not at all in several groups or with
/// quantized embeddings.
#[test]
fn the_next_step_for_zero_points_depends_on_the_folder() {
    let desk = Desk::new();
    let model = model(&desk);
    let reason = |folder: &Path| {
        let found = check(folder, "transformers").violations;
        found.into_iter().find(|violation| violation.rule == "zero-points").unwrap().reason
    };
    let plain = quantized(&desk, &model, json!({ "scheme": "W4A16-ASYM" }));
    assert!(reason(&plain).contains("does not load by default"));
    let embeddings = with_embeddings(&desk, &plain);
    assert!(reason(&embeddings).contains("the embeddings are quantized too"));
    let several = changed(&desk, &plain, |config, _| {
        let groups = &mut config["quantization_config"]["config_groups"];
        groups["group_1"] = groups["group_0"].clone();
        groups["group_1"]["targets"] = json!(["re:.*down_proj$"]);
        groups["group_1"]["weights"]["group_size"] = json!(96);
    });
    assert!(reason(&several).contains("another group size or scheme"));
}

/// The first test that names a rule and its runtime.
fn test_of(runtime: &str, rule: &str) -> Option<&'static str> {
    let names = [format!("\"{runtime}\""), format!("{runtime}@")];
    let is_for = |text: &str| text.contains(&format!("\"{rule}\"")) && names.iter().any(|name| text.contains(name));
    let tests = [include_str!("contract.rs"), include_str!("contract_files.rs"), include_str!("adapters.rs"), include_str!("loads.rs")]
        .into_iter()
        .flat_map(|text| text.split("#[test]").skip(1));
    tests.filter(|text| is_for(text)).find_map(|text| Some(text.split_once("fn ")?.1.split_once('(')?.0))
}

/// The table of docs/runtimes.md has a row for each rule, with the test that holds it. `COMPRESS_ACCEPT=1
/// cargo test --test it contract::documentation` writes it.
#[test]
fn documentation_lists_every_rule() {
    let desk = Desk::new();
    let folder = model(&desk);
    let mut table = vec!["| runtime | rule | requirement | source | versions | test |".to_owned(), "| --- | --- | --- | --- | --- | --- |".to_owned()];
    for runtime in Runtime::ALL {
        let output = match runtime {
            Runtime::LlamaCpp => golden("gguf/tokenizer-gpt-2.gguf"),
            Runtime::OnnxRuntime => onnx(&desk, ("", "Relu"), TensorProto::default(), [17, 8]),
            _ => folder.clone(),
        };
        // Rules in the order of the code, with the versions that they apply to.
        let mut rows: Vec<(String, &str, Vec<&str>)> = Vec::new();
        for &version in runtime.versions() {
            let target: Target = format!("{}@{version}", runtime.name()).parse().unwrap();
            let mut next = 0;
            for rule in contract::check(&output, target).unwrap().rules {
                let row = format!("| {} | `{}` | {} | `{}` |", runtime.name(), rule.name, rule.sentence, rule.source);
                let known = rows.iter().position(|(known, ..)| *known == row);
                let at = known.unwrap_or(next);
                if known.is_none() {
                    rows.insert(at, (row, rule.name, Vec::new()));
                }
                rows[at].2.push(version);
                next = at + 1;
            }
        }
        for (row, rule, versions) in rows {
            let versions = if versions.len() == runtime.versions().len() { "all".to_owned() } else { versions.join(", ") };
            let test = test_of(runtime.name(), rule).unwrap_or_else(|| panic!("no test names the rule `{rule}` of {}", runtime.name()));
            table.push(format!("{row} {versions} | `{test}` |"));
        }
    }
    assert!(table.len() > 70, "{} rows", table.len());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runtimes.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let begin = page.find("| runtime | rule |").unwrap();
    let end = begin + page[begin..].find("\n\n").unwrap();
    if std::env::var_os("COMPRESS_ACCEPT").is_some() {
        std::fs::write(path, format!("{}{}{}", &page[..begin], table.join("\n"), &page[end..])).unwrap();
        return;
    }
    let listed: Vec<&str> = page[begin..end].lines().collect();
    assert_eq!(listed, table, "run the command above");
}

#[test]
#[cfg(feature = "cli")]
fn the_command_reports_violations_and_the_next_step() {
    let desk = Desk::new();
    let model = model(&desk);
    let run = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_compress")).arg("check").args(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let path = model.to_str().unwrap();
    // Only budgets need a report.
    let (code, stdout, stderr) = run(&[path, "--loads", "vllm@0.33,transformers", "--loads", "sglang"]);
    assert_eq!((code, stdout.lines().count()), (0, 3), "{stderr}");
    assert!(stdout.starts_with("vllm 0.33: the output complies with") && stdout.contains("a static check"), "{stdout}");
    std::fs::remove_file(model.join("tokenizer.json")).unwrap();
    let (code, stdout, stderr) = run(&[path, "--loads", "vllm"]);
    assert_eq!(code, 1);
    assert!(stdout.contains("vllm 0.33: tokenizer: `tokenizer.json` is missing") && stdout.contains("; copy the tokenizer files"), "{stdout}");
    assert!(stderr.contains("1 violation of the rules of vllm 0.33"), "{stderr}");
    let (code, stdout, _) = run(&[path, "--loads", "vllm", "--json"]);
    let result: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &result["ok"], &result["loads"][0]["violations"][0]["rule"]), (1, &json!(false), &json!("tokenizer")));
    assert!(result.get("budgets").is_none());
    // An error for one runtime does not hide the results of the others.
    let file = golden("gguf/tokenizer-gpt-2.gguf");
    let (code, stdout, stderr) = run(&[file.to_str().unwrap(), "--loads", "vllm,llama.cpp"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stdout.contains("vllm 0.33: not checked: ") && stdout.contains("llama.cpp 2026: the output complies with"), "{stdout}");
    assert!(stderr.contains("checking a single file for vllm"), "{stderr}");
    let (code, stdout, _) = run(&[file.to_str().unwrap(), "--loads", "vllm,llama.cpp", "--json"]);
    let result: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &result["ok"], &result["loads"][0]["runtime"], &result["loads"][1]["violations"]), (1, &json!(false), &json!("vllm"), &json!([])));
    assert!(result["loads"][0]["error"].is_string(), "{result}");
    let missing = desk.place();
    let (code, stdout, stderr) = run(&[missing.to_str().unwrap(), "--loads", "vllm,llama.cpp"]);
    assert!(code == 1 && stdout.is_empty() && stderr.contains("cannot open") && stderr.contains("check the name"), "{stdout}{stderr}");
    for (loads, reason) in [("tgi", "use one of vllm, sglang, transformers, llama.cpp, onnxruntime"), ("vllm@0.1", "use one of 0.11, 0.33")] {
        let (code, _, stderr) = run(&[path, "--loads", loads]);
        assert!(code == 2 && stderr.contains(reason), "{stderr}");
    }
}
