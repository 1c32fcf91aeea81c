//! `compress check --loads` on GGUF and ONNX files, adapters, and folders with extra layers: defects violate
//! the rule that names them.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use compress::contract::{self, Runtime};
use compress_onnx::proto::{DataLocation, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto};
use prost::Message;
use serde_json::{Value, json};

use crate::common::{DType, Desk, Tensor, Tensors, write};
use crate::contract::{changed, check, golden, model, violated};

/// Only vLLM fails for tensors of layers that the configuration does not have.
#[test]
fn layers_after_the_last_one_are_extra() {
    let desk = Desk::new();
    let model = model(&desk);
    let fewer = |folder: &Path, key: Option<&str>| {
        changed(&desk, folder, |config, _| {
            config["num_hidden_layers"] = json!(1);
            key.into_iter().for_each(|key| config[key] = json!(1));
        })
    };
    for (target, expected) in [("vllm", BTreeSet::from(["extra-layers"])), ("sglang", BTreeSet::new()), ("transformers", BTreeSet::new())] {
        assert_eq!(violated(&fewer(&model, None), target), expected, "{target}");
    }
    let found = check(&fewer(&model, None), "vllm").violations;
    assert_eq!((found.len(), found[0].subject.as_str()), (1, "model.layers.1"));
    // The layer after the last one predicts further tokens.
    assert_eq!(violated(&fewer(&model, Some("num_nextn_predict_layers")), "vllm"), BTreeSet::new());
}

/// A folder with an adapter of PEFT.
fn peft_adapter(desk: &Desk, change: impl FnOnce(&mut Value)) -> PathBuf {
    let folder = desk.place();
    std::fs::create_dir(&folder).unwrap();
    let mut config = json!({ "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "modules_to_save": null });
    change(&mut config);
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let name = |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.{part}.weight");
    let factors = [("lora_A", [8, 32], 1), ("lora_B", [32, 8], 2)].map(|(part, shape, seed)| (name(part), Tensor::random(DType::F32, &shape, seed)));
    write(&folder.join("adapter_model.safetensors"), &factors.into_iter().collect());
    folder
}

#[test]
fn adapters_are_checked_for_vllm() {
    let desk = Desk::new();
    assert_eq!(violated(&peft_adapter(&desk, |_| {}), "vllm"), BTreeSet::new());
    assert_eq!(violated(&peft_adapter(&desk, |config| config["modules_to_save"] = json!(["score"])), "vllm"), BTreeSet::new());
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 6] = [
        (|config| config["use_dora"] = json!(true), "has `use_dora`"),
        (|config| config["r"] = json!(513), "has rank 513"),
        (|config| config["rank_pattern"] = json!({ "q_proj": 600 }), "has rank 600"),
        (|config| config["modules_to_save"] = json!(["score", "lm_head"]), "has \"lm_head\" in `modules_to_save`"),
        (|config| config["bias"] = json!("lora_only"), "has `bias` of `lora_only`"),
        (|config| drop(config.as_object_mut().unwrap().remove("target_modules")), "has no `target_modules`"),
    ];
    for (change, reason) in cases {
        let folder = peft_adapter(&desk, change);
        for target in ["vllm", "vllm@0.11"] {
            let found = check(&folder, target).violations;
            assert!(found.len() == 1 && found[0].rule == "adapter" && found[0].reason.starts_with(reason), "{target}: {reason}: {found:?}");
        }
    }
    // Other runtimes load the base model.
    for (target, rule) in [("sglang", "architectures"), ("transformers", "model-type")] {
        let found = check(&peft_adapter(&desk, |_| {}), target).violations;
        assert!(found.len() == 1 && found[0].rule == rule && found[0].reason.contains("contains an adapter"), "{target}: {found:?}");
    }
}

/// The head of `scripts/goldens draft-head`, and heads that vLLM or `speculators` refuse.
#[test]
fn draft_heads_are_checked_for_vllm() {
    let desk = Desk::new();
    let head = golden("draft-head");
    type Change = fn(&mut Value, &mut Tensors);
    let cases: [(Change, &str); 14] = [
        (|config, _| config["transformer_layer_config"] = json!(null), "transformer_layer_config: is missing"),
        (|config, _| config["speculators_config"]["verifier"]["name_or_path"] = json!(""), "speculators_config: has no `verifier`"),
        (|config, _| config["speculators_config"]["proposal_methods"] = json!([]), "speculators_config: has no `proposal_methods`"),
        (|config, _| config["transformer_layer_config"]["model_type"] = json!("gpt2"), "transformer_layer_config: has the `model_type` `gpt2`"),
        (|config, _| config["transformer_layer_config"]["hidden_size"] = json!(24), "embed_tokens.weight: has the shape [48, 16]"),
        (|config, _| config["target_hidden_size"] = json!(24), "fc.weight: has the shape [16, 48], but config.json requires [16, 72]"),
        (|config, _| config["eagle_aux_hidden_state_layer_ids"] = json!([0, 1]), "eagle_aux_hidden_state_layer_ids: has 2 layers"),
        (|config, _| config["draft_vocab_size"] = json!(21), "lm_head.weight: has the shape [20, 16]"),
        (|_, tensors| drop(tensors.remove("d2t")), "d2t: is missing, but the head has 20 of 48 tokens"),
        (|_, tensors| drop(tensors.insert("d2t".into(), Tensor::new(DType::I64, &[19], vec![0; 19 * 8]))), "d2t: has the shape [19]"),
        (|_, tensors| drop(tensors.insert("d2t".into(), Tensor::new(DType::I32, &[20], vec![0; 20 * 4]))), "d2t: has the dtype I32"),
        (|_, tensors| drop(tensors.insert("t2d".into(), Tensor::new(DType::BOOL, &[47], vec![1; 47]))), "t2d: has the shape [47]"),
        (|_, tensors| tensors.get_mut("d2t").unwrap().bytes[8..16].copy_from_slice(&47i64.to_le_bytes()), "d2t: maps token 1 of the head to the id 48"),
        (
            |_, tensors| drop(tensors.insert("layers.0.self_attn.q_norm.weight".into(), Tensor::random(DType::F32, &[8], 1))),
            "layers.0.self_attn.q_norm.weight: does not belong to a layer of `llama`",
        ),
    ];
    for target in ["vllm", "vllm@0.11"] {
        assert!(!violated(&head, target).contains("draft-head"), "{target}");
        for (change, expected) in cases {
            let found = check(&changed(&desk, &head, change), target).violations;
            let reasons: Vec<String> = found
                .iter()
                .filter(|violation| violation.rule == "draft-head")
                .map(|violation| format!("{}: {}", violation.subject, violation.reason))
                .collect();
            assert!(reasons.iter().any(|reason| reason.starts_with(expected)), "{target}: {expected}: {reasons:?}");
        }
    }
    // Layers of Qwen3 have norms of heads, which vLLM 0.11 does not create.
    let qwen3 = changed(&desk, &head, |config, tensors| {
        config["transformer_layer_config"]["model_type"] = json!("qwen3");
        tensors.insert("layers.0.self_attn.q_norm.weight".into(), Tensor::random(DType::F32, &[8], 1));
    });
    assert_eq!(["vllm", "vllm@0.11"].map(|target| violated(&qwen3, target).contains("draft-head")), [false, true]);
}

/// Changes a few bytes that follow a text in a file.
fn edited(desk: &Desk, file: &Path, after: &[u8], skip: usize, new: &[u8]) -> PathBuf {
    let mut bytes = std::fs::read(file).unwrap();
    let at = bytes.windows(after.len()).position(|window| window == after).unwrap() + after.len() + skip;
    bytes[at..at + new.len()].copy_from_slice(new);
    let path = desk.place().with_extension("gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn gguf_files_are_checked() {
    let desk = Desk::new();
    for name in ["gpt-2", "llama-bpe", "pieces", "qwen2", "smollm", "tekken"] {
        let found = check(&golden(&format!("gguf/tokenizer-{name}.gguf")), "llama.cpp");
        assert!(found.is_met(), "{name}: {:?}", found.violations);
    }
    let file = golden("gguf/tokenizer-gpt-2.gguf");
    let name = b"blk.0.attn_q.weight";
    // After the name of a matrix: the number of axes, two sizes, and the type. 12 is Q4_K, 16 is IQ2_XXS,
    // which compress does not read.
    for id in [12u32, 16] {
        assert_eq!(violated(&edited(&desk, &file, name, 4 + 16, &id.to_le_bytes()), "llama.cpp"), BTreeSet::from(["rows"]));
    }
    assert_eq!(violated(&edited(&desk, &file, name, 4 + 16, &4u32.to_le_bytes()), "llama.cpp"), BTreeSet::from(["types"]));
    assert_eq!(violated(&edited(&desk, &file, b"token_embd.weight", 4 + 8, &300u64.to_le_bytes()), "llama.cpp"), BTreeSet::from(["data", "vocabulary-size"]));
    // After a key: the type, the length of a text, and the text.
    assert_eq!(violated(&edited(&desk, &file, b"general.architecture", 12, b"LLAMA"), "llama.cpp"), BTreeSet::from(["architecture", "keys"]));
    assert_eq!(violated(&edited(&desk, &file, b"tokenizer.ggml.pre", 12, b"gpt-9"), "llama.cpp"), BTreeSet::from(["pre-tokenizer"]));
    assert_eq!(violated(&edited(&desk, &file, b"general.type", 12, b"other"), "llama.cpp"), BTreeSet::from(["type"]));
    assert_eq!(violated(&edited(&desk, &file, b"tokenizer.ggml.merge", 0, b"S"), "llama.cpp"), BTreeSet::from(["tokenizer"]));
    assert_eq!(violated(&edited(&desk, &file, b"llama.context_lengt", 0, b"H"), "llama.cpp"), BTreeSet::from(["keys"]));
    assert_eq!(violated(&edited(&desk, &file, b"llama.block_count", 4, &3u32.to_le_bytes()), "llama.cpp"), BTreeSet::from(["layers"]));
    assert_eq!(violated(&edited(&desk, &file, b"llama.block_count", 4, &0u32.to_le_bytes()), "llama.cpp"), BTreeSet::from(["layers"]));
    // A file without its last bytes, and one without its last tensors.
    let bytes = std::fs::read(&file).unwrap();
    let truncated = desk.place().with_extension("gguf");
    for length in [bytes.len() - 40, bytes.len() / 2] {
        std::fs::write(&truncated, &bytes[..length]).unwrap();
        let found = check(&truncated, "llama.cpp").violations;
        assert!(found.iter().any(|violation| violation.rule == "data" && violation.reason.contains("is it truncated?")), "{length}: {found:?}");
    }
    std::fs::write(&truncated, &bytes[..1000]).unwrap();
    assert!(contract::check(&truncated, "llama.cpp".parse().unwrap()).is_err());
    // Files without a vocabulary, and folders without a file.
    assert_eq!(violated(&edited(&desk, &file, b"tokenizer.ggml.model", 12, b"none"), "llama.cpp"), BTreeSet::from(["tokenizer"]));
    assert_eq!(violated(&golden("gguf/llama.gguf"), "llama.cpp"), BTreeSet::from(["tokenizer"]));
    assert_eq!(violated(&model(&desk), "llama.cpp"), BTreeSet::from(["file-format"]));
}

/// An ONNX file with one node on an initializer.
pub fn onnx(desk: &Desk, op: (&str, &str), weight: TensorProto, [opset, format]: [i64; 2]) -> PathBuf {
    let weight = TensorProto { name: Some("w".into()), dims: vec![4], ..weight };
    let node = NodeProto { input: vec!["w".into()], output: vec!["y".into()], op_type: Some(op.1.into()), domain: Some(op.0.into()), ..NodeProto::default() };
    let graph = GraphProto { node: vec![node], initializer: vec![weight], ..GraphProto::default() };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(opset) }];
    let model = ModelProto { ir_version: Some(format), graph: Some(graph), opset_import, ..ModelProto::default() };
    let path = desk.place();
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("model.onnx"), model.encode_to_vec()).unwrap();
    path
}

#[test]
fn onnx_files_are_checked() {
    let desk = Desk::new();
    let floats = || TensorProto { data_type: Some(DataType::Float as i32), raw_data: Some(vec![0; 16]), ..TensorProto::default() };
    let int4 = || TensorProto { data_type: Some(DataType::Int4 as i32), raw_data: Some(vec![0; 2]), ..TensorProto::default() };
    let good = onnx(&desk, ("", "Relu"), floats(), [17, 8]);
    for version in Runtime::OnnxRuntime.versions() {
        assert_eq!(violated(&good, &format!("onnxruntime@{version}")), BTreeSet::new(), "{version}");
    }
    assert_eq!(violated(&onnx(&desk, ("", "Relu"), floats(), [27, 13]), "onnxruntime"), BTreeSet::from(["opset"]));
    assert_eq!(violated(&onnx(&desk, ("", "Relu"), floats(), [26, 14]), "onnxruntime"), BTreeSet::from(["ir-version"]));
    assert_eq!(violated(&onnx(&desk, ("", "Relu"), floats(), [21, 10]), "onnxruntime@1.17"), BTreeSet::from(["ir-version", "opset"]));
    assert_eq!(violated(&onnx(&desk, ("", "Cast"), int4(), [20, 9]), "onnxruntime"), BTreeSet::from(["int4"]));
    assert_eq!(violated(&onnx(&desk, ("", "Cast"), int4(), [21, 10]), "onnxruntime"), BTreeSet::new());
    assert_eq!(violated(&onnx(&desk, ("com.microsoft", "GatherBlockQuantized"), int4(), [17, 8]), "onnxruntime"), BTreeSet::new());
    assert_eq!(violated(&onnx(&desk, ("com.example", "Own"), floats(), [17, 8]), "onnxruntime"), BTreeSet::from(["domains"]));
    let external = |length: &str| TensorProto {
        data_type: Some(DataType::Float as i32),
        data_location: Some(DataLocation::External as i32),
        external_data: vec![StringStringEntryProto::new("location", "data"), StringStringEntryProto::new("length", length)],
        ..TensorProto::default()
    };
    let folder = onnx(&desk, ("", "Relu"), external("16"), [17, 8]);
    assert_eq!(violated(&folder, "onnxruntime"), BTreeSet::from(["external-data"]));
    std::fs::write(folder.join("data"), [0; 16]).unwrap();
    assert_eq!(violated(&folder, "onnxruntime"), BTreeSet::new());
    std::fs::write(folder.join("data"), [0; 12]).unwrap();
    assert_eq!(violated(&folder, "onnxruntime"), BTreeSet::from(["external-data"]));
    // Without a length, the shape determines it. Other lengths than that of the shape are refused.
    for (length, bytes, is_met) in [("0", 16, true), ("0", 20, true), ("0", 12, false), ("12", 16, false), ("20", 32, false), ("x", 16, false)] {
        let folder = onnx(&desk, ("", "Relu"), external(length), [17, 8]);
        std::fs::write(folder.join("data"), vec![0; bytes]).unwrap();
        assert_eq!(violated(&folder, "onnxruntime").is_empty(), is_met, "{length}: {bytes}");
    }
    // Elements in the file that do not fit the shape, and graphs that are not valid.
    let short = TensorProto { data_type: Some(DataType::Float as i32), raw_data: Some(vec![0; 12]), ..TensorProto::default() };
    assert_eq!(violated(&onnx(&desk, ("", "Relu"), short, [17, 8]), "onnxruntime"), BTreeSet::from(["graph"]));
    let edited = |change: fn(&mut ModelProto)| {
        let folder = onnx(&desk, ("", "Relu"), floats(), [17, 8]);
        let mut model = ModelProto::decode(std::fs::read(folder.join("model.onnx")).unwrap().as_slice()).unwrap();
        change(&mut model);
        std::fs::write(folder.join("model.onnx"), model.encode_to_vec()).unwrap();
        violated(&folder, "onnxruntime")
    };
    let changes: [fn(&mut ModelProto); 5] = [
        |model| model.graph = None,
        |model| model.ir_version = None,
        |model| model.opset_import.clear(),
        |model| model.graph.as_mut().unwrap().node[0].input[0] = "missing".into(),
        |model| model.graph.as_mut().unwrap().node[0].input[0] = "y".into(),
    ];
    for change in changes {
        assert_eq!(edited(change), BTreeSet::from(["graph"]));
    }
    // ONNX Runtime only warns about initializers with the same name.
    let repeated = |model: &mut ModelProto| {
        let initializers = &mut model.graph.as_mut().unwrap().initializer;
        initializers.push(initializers[0].clone());
    };
    assert_eq!(edited(repeated), BTreeSet::new());
    assert_eq!(violated(&model(&desk), "onnxruntime"), BTreeSet::from(["file-format"]));
}
