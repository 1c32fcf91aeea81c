//! Models in GGUF files against those that they were made from, on files that `scripts/goldens-gguf` made with llama.cpp's own package.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use compress::export::{FileType, Gguf};
use compress::model::text_beside;
use compress::pass::{Cast, QuantizeDynamic};
use compress::store::gguf::{self, Kind};
use compress::store::{Bytes, DType, Encoding, Weight};
use compress::{Model, Pipeline};
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

const FAMILIES: [&str; 13] = [
    "gemma2",
    "gemma3",
    "llama",
    "llama-biases",
    "llama-grouped-tied",
    "llama-head-dim",
    "llama-rope-linear",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "mixtral",
    "qwen2",
    "qwen2-moe",
    "qwen3",
];

/// The model that a golden was made from, with the configuration that it says.
fn source(name: &str) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden(&format!("gguf/{name}.json")), folder.path().join("config.json")).unwrap();
    fs::copy(golden(&format!("models/{name}/model.safetensors")), folder.path().join("model.safetensors")).unwrap();
    let model = Model::open(folder.path()).unwrap();
    (folder, model)
}

/// Every weight of one model in the other, as far apart as adding and taking one away leaves the weights of norms.
fn same_weights(found: &Model, expected: &Model, what: &str) {
    assert!(found.weights.by_name.keys().eq(expected.weights.by_name.keys()), "{what}: {:?}", found.weights.by_name.keys());
    for (name, weight) in &expected.weights.by_name {
        let other: &Weight = found.weights.get(name).unwrap();
        assert_eq!((other.dtype, &other.shape), (weight.dtype, &weight.shape), "{what}: {name}");
        let least = if what.starts_with("gemma") && name.ends_with("norm.weight") { 1.2e-7 } else { 0.0 };
        let (a, b) = (other.floats(name).unwrap(), weight.floats(name).unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= least), "{what}: {name}");
    }
}

#[test]
fn families_are_those_that_they_were_made_from() {
    for name in FAMILIES {
        let (_folder, expected) = source(name);
        let found = Model::open(golden(&format!("gguf/{name}.gguf"))).unwrap();
        same_weights(&found, &expected, name);
        assert!(found.graph().unwrap().to_string() == expected.graph().unwrap().to_string(), "{name}: {}", found.graph().unwrap());
        for key in ["model_type", "architectures", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"] {
            let said = |model: &Model| model.config.get(key).filter(|value| !value.is_null()).cloned();
            assert_eq!(said(&found), said(&expected), "{name}: {key}");
        }
        assert_eq!(found.weights.metadata["general.license"], "apache-2.0");
        assert_eq!(found.stored_bytes(), found.weights.parameters() * 4, "{name}");
    }
}

fn tokenizer(model: &Model) -> tokenizers::Tokenizer {
    text_beside(&model.path, &model.beside.made, "tokenizer.json").unwrap().unwrap().parse().unwrap()
}

/// The tokens of the golden's texts.
fn tokens(model: &Model, texts: &Value) -> Value {
    let tokenizer = tokenizer(model);
    texts.as_array().unwrap().iter().map(|text| Value::from(tokenizer.encode_fast(text.as_str().unwrap(), true).unwrap().get_ids())).collect()
}

#[test]
fn tokenizers_give_the_tokens_that_they_gave() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    for (name, ids) in expected["tokens"].as_object().unwrap() {
        let model = Model::open(golden(&format!("gguf/tokenizer-{name}.gguf"))).unwrap();
        assert_eq!(tokens(&model, &expected["texts"]), *ids, "{name}");
        let made = |file: &str| serde_json::from_str::<Value>(&model.beside.made[Path::new(file)]).unwrap();
        assert_eq!(made("tokenizer_config.json")["chat_template"], "{{ messages }}");
        assert_eq!(made("generation_config.json")["eos_token_id"], *model.config.get("eos_token_id").unwrap(), "{name}");
    }
}

#[test]
fn a_pass_writes_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    let input = golden("gguf/tokenizer-qwen2.gguf");
    let out = folder.path().join("out");
    let report = Pipeline::builder().pass(QuantizeDynamic::default()).build().unwrap().run(Model::open(&input).unwrap(), &out).unwrap();
    assert_eq!(report.size.before.bytes, fs::metadata(&input).unwrap().len());
    let written = Model::open(&out).unwrap();
    assert_eq!(tokens(&written, &expected["texts"]), expected["tokens"]["qwen2"]);
    assert!(report.fidelity.is_some_and(|fidelity| fidelity.fidelity.cosine > 0.99));
    let carried: Vec<&str> = report.carried.iter().map(|file| file.path.as_str()).collect();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert!(carried.contains(&name), "{name}: {carried:?}");
    }
    // The file alone in a folder, beside a tokenizer of its own.
    let alone = folder.path().join("in");
    fs::create_dir(&alone).unwrap();
    fs::copy(&input, alone.join("any.gguf")).unwrap();
    fs::write(alone.join("tokenizer.json"), "{}").unwrap();
    fs::write(alone.join("config.json"), "{}").unwrap();
    let model = Model::open(&alone).unwrap();
    assert_eq!(model.beside.files, [Path::new("tokenizer.json")]);
    assert!(!model.beside.made.contains_key(Path::new("tokenizer.json")));
    assert!(model.beside.notes(&alone).iter().any(|note| note.contains("config.json (they describe the weights as they were)")));
    Pipeline::builder().build().unwrap().run(model, folder.path().join("copy")).unwrap();
    same_weights(&Model::open(folder.path().join("copy")).unwrap(), &Model::open(&input).unwrap(), "copy");
    fs::copy(&input, alone.join("other.gguf")).unwrap();
    assert!(Model::open(&alone).err().unwrap().to_string().contains("2 .gguf files and no safetensors"));
}

/// The command line, which reads the same from the file and from the folder that was made of it.
#[cfg(feature = "cli")]
#[test]
fn files_are_evaluated_and_inspected() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_compress")).arg("--json").args(args).current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    fs::copy(golden("gguf/tokenizer-llama-bpe.gguf"), folder.path().join("model.gguf")).unwrap();
    fs::write(folder.path().join("texts.txt"), "Hello world, it's 12345 o'clock!\nhttp://example.org/a/b//c?x=1\n").unwrap();
    run(&["densify", "model.gguf", "-o", "folder"]);
    let score = |model: &str| run(&["eval", model, "--text", "texts.txt", "--task", "language-modelling"])["score"].clone();
    assert!(score("model.gguf")["value"].as_f64().unwrap() > 1.0);
    assert_eq!(score("model.gguf"), score("folder"));
    let seen = run(&["inspect", "model.gguf"]);
    assert_eq!((&seen["cannot_run"], &seen["architecture"]), (&Value::Null, &Value::from("llama")));
    assert_eq!(seen["metadata"]["general.name"], "A tiny model");
    let report = run(&["chain", "folder", "-o", "again", "--export", "gguf: {type: Q8_0}", "--", "cast", "--to", "bf16"]);
    assert_eq!(report["fidelity"]["samples_from"], "synthetic");
    assert!(run(&["verify", "again"]).to_string().contains("opens with 11 weights"));
}

/// Writes a model as GGUF, and opens what was written.
fn written(model: Model, file_type: FileType) -> (tempfile::TempDir, Model, compress::Report) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = Pipeline::builder().export(Gguf { file_type }).measure(false).build().unwrap().run(model, &out).unwrap();
    let back = Model::open(out.join("model.gguf")).unwrap();
    (folder, back, report)
}

#[test]
fn what_is_written_is_what_was_read() {
    for name in FAMILIES {
        let (_source, expected) = source(name);
        let (folder, found, report) = written(expected.clone(), FileType::F32);
        same_weights(&found, &expected, name);
        assert!(found.graph().unwrap().to_string() == expected.graph().unwrap().to_string(), "{name}: {}", found.graph().unwrap());
        assert!(report.notes.iter().any(|note| note.contains("no tokenizer.json")), "{:?}", report.notes);
        // What the file of the reference says, and where.
        let theirs = gguf::GgufFile::open(&golden(&format!("gguf/{name}.gguf"))).unwrap();
        let ours = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
        assert!(ours.tensors.keys().eq(theirs.tensors.keys()), "{name}: {:?}", ours.tensors.keys());
        for (tensor, weight) in &theirs.tensors {
            assert_eq!(ours.tensors[tensor].floats(tensor).unwrap(), weight.floats(tensor).unwrap(), "{name}: {tensor}");
        }
        let own: Vec<_> = theirs.values.iter().filter(|(key, _)| !key.starts_with("general.") && !key.starts_with("tokenizer.")).collect();
        own.iter().for_each(|(key, value)| assert_eq!(ours.values.get(*key), Some(*value), "{name}: {key}"));
    }
}

#[test]
fn vocabularies_are_written_as_they_were_read() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    for (name, ids) in expected["tokens"].as_object().unwrap() {
        let input = golden(&format!("gguf/tokenizer-{name}.gguf"));
        let (folder, found, _) = written(Model::open(&input).unwrap(), FileType::F16);
        assert_eq!(tokens(&found, &expected["texts"]), *ids, "{name}");
        let [theirs, ours] = [input, folder.path().join("out/model.gguf")].map(|path| gguf::GgufFile::open(&path).unwrap().values);
        let pieces = ["scores", "add_space_prefix", "add_bos_token", "add_eos_token"];
        for (key, value) in theirs.iter().filter(|(key, _)| !pieces.iter().any(|end| key.ends_with(end))) {
            let other = ["general.file_type", "general.name"].contains(&key.as_str());
            assert!(other || ours.get(key) == Some(value), "{name}: {key}");
        }
    }
}

#[test]
fn types_are_those_that_were_asked_for() {
    let model = || Model::open(golden("gguf/tokenizer-smollm.gguf")).unwrap();
    // Rows of 8 are no whole blocks.
    let (_folder, _, report) = written(model(), FileType::Q4_K_M);
    let note = report.notes.iter().find(|note| note.contains("no whole blocks")).expect("a note");
    assert!(note.contains("Q4_K with rows of 8 are F16") && note.contains("bits per weight"), "{note}");
    assert!(report.layers.iter().all(|layer| layer.encoding == if layer.shape.len() == 1 { "f32" } else { "f16" }));
    let folder = tempfile::tempdir().unwrap();
    let half = Cast::default();
    let run = |file_type| {
        Pipeline::builder()
            .pass(half.clone())
            .export(Gguf { file_type })
            .measure(false)
            .force(true)
            .build()
            .unwrap()
            .run(model(), folder.path().join("out"))
            .unwrap()
    };
    assert!(run(FileType::F16).notes.iter().any(|note| note.contains("8 matrices of BF16 become F16")));
    assert!(!run(FileType::BF16).notes.iter().any(|note| note.contains("become F16")));
    let wrong = golden("models/gpt2");
    let refused =
        Pipeline::builder().export(Gguf::default()).build().unwrap().run(Model::open(wrong).unwrap(), std::env::temp_dir().join("never")).err().unwrap();
    assert!(refused.to_string().contains("gguf: model_type `gpt2`"), "{refused}");
}

/// A model with its configuration changed, or that of a vocabulary with the files that it brings.
fn changed(name: &str, file: &str, change: impl Fn(&mut Value)) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    if name.starts_with("tokenizer-") {
        let model = Model::open(golden(&format!("gguf/{name}.gguf"))).unwrap();
        Pipeline::builder().measure(false).force(true).build().unwrap().run(model, folder.path().join("in")).unwrap();
    } else {
        fs::create_dir(folder.path().join("in")).unwrap();
        fs::copy(golden(&format!("gguf/{name}.json")), folder.path().join("in/config.json")).unwrap();
        fs::copy(golden(&format!("models/{name}/model.safetensors")), folder.path().join("in/model.safetensors")).unwrap();
    }
    let path = folder.path().join("in").join(file);
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    let model = Model::open(folder.path().join("in")).unwrap();
    (folder, model)
}

fn export(model: Model, folder: &Path, file_type: FileType) -> Result<compress::Report, compress::Error> {
    Pipeline::builder().export(Gguf { file_type }).measure(false).build().unwrap().run(model, folder.join("out"))
}

/// Gemma 1, with weights of a Llama.
fn gemma(json: &mut Value, activation: &str) {
    json["model_type"] = "gemma".into();
    json["head_dim"] = (json["hidden_size"].as_u64().unwrap() / json["num_attention_heads"].as_u64().unwrap()).into();
    json["hidden_act"] = activation.into();
}

#[test]
fn what_a_file_cannot_say_is_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change, &str); 14] = [
        ("llama-rope-yarn", "config.json", |json| json["rope_scaling"]["beta_fast"] = 16.into(), "`beta_fast` of 16"),
        (
            "qwen2",
            "config.json",
            |json| json["rope_scaling"] = serde_json::json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 }),
            "rope scaling `llama3`",
        ),
        ("qwen3", "config.json", |json| json["head_dim"] = (1u64 << 40).into(), "heads of 1099511627776"),
        ("tokenizer-pieces", "tokenizer.json", |json| json["normalizer"] = serde_json::json!({ "type": "NFKC" }), "NFKC"),
        ("tokenizer-pieces", "tokenizer.json", |json| json["pre_tokenizer"] = serde_json::json!({ "type": "Whitespace" }), "Whitespace"),
        ("tokenizer-llama-bpe", "tokenizer.json", |json| json["model"]["ignore_merges"] = false.into(), "`model.ignore_merges` is false"),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["model"]["ignore_merges"] = true.into(), "`model.ignore_merges` is true"),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["post_processor"] = serde_json::json!({ "type": "BertProcessing" }), "BertProcessing"),
        (
            "tokenizer-pieces",
            "tokenizer.json",
            |json| json["post_processor"]["single"].as_array_mut().unwrap().insert(0, serde_json::json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } })),
            "`</s>`, `<s>` before every text",
        ),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["added_tokens"][0]["content"] = "Ġ".into(), "`Ġ`"),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["model"]["end_of_word_suffix"] = "</w>".into(), "`</w>`"),
        ("tokenizer-qwen2", "tokenizer_config.json", |json| json["chat_template"] = serde_json::json!([1]), "a list of something else"),
        ("llama", "config.json", |json| gemma(json, "relu"), "`hidden_act` of \"relu\""),
        ("llama", "config.json", |json| gemma(json, "gelu"), "`lm_head.weight`: differs from the embedding"),
    ];
    for (name, file, change, words) in cases {
        let (folder, model) = changed(name, file, change);
        let error = export(model, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: `{error}` does not say `{words}`");
    }
}

/// Weights of sentence-transformers' modules have no place in the file.
#[test]
fn weights_of_modules_are_written_beside_the_file() {
    let (folder, _) = changed("llama", "config.json", |_| {});
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    let kinds = ["models.Transformer", "models.Pooling", "models.Dense"].into_iter().zip(["", "1_Pooling", "./2_Dense"]);
    let entries: Vec<Value> = kinds.map(|(kind, path)| serde_json::json!({ "type": format!("sentence_transformers.{kind}"), "path": path })).collect();
    fs::write(input.join("modules.json"), Value::from(entries).to_string()).unwrap();
    let width = Model::open(&input).unwrap().config.get("hidden_size").and_then(Value::as_u64).unwrap() as usize;
    for (module, config) in [
        ("1_Pooling", serde_json::json!({ "pooling_mode": "lasttoken" })),
        ("2_Dense", serde_json::json!({ "in_features": width, "out_features": 3, "bias": false })),
    ] {
        fs::create_dir(input.join(module)).unwrap();
        fs::write(input.join(module).join("config.json"), config.to_string()).unwrap();
    }
    let values: Vec<f32> = (0..3 * width).map(|i| i as f32 / 100.0).collect();
    let weight = candle_core::Tensor::from_vec(values, (3, width), &candle_core::Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("linear.weight", weight)].into(), input.join("2_Dense/model.safetensors")).unwrap();

    let expected = Model::open(&input).unwrap();
    let report = Pipeline::builder().export(Gguf { file_type: FileType::F32 }).build().unwrap().run(expected.clone(), &out).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("no place for the weights of the modules `2_Dense`")), "{:?}", report.notes);
    assert!(report.fidelity.is_some_and(|fidelity| fidelity.fidelity.cosine > 0.9999));
    let found = Model::open(&out).unwrap();
    same_weights(&found, &expected, "modules");
    assert!(found.graph().unwrap().to_string() == expected.graph().unwrap().to_string());
    let alone = Pipeline::builder().measure(false).build().unwrap().run(expected, folder.path().join("small.gguf")).unwrap();
    assert!(alone.notes.iter().any(|note| note.contains("are not written")), "{:?}", alone.notes);
}

#[test]
fn what_changes_nothing_is_accepted() {
    let values = |folder: &Path| gguf::GgufFile::open(&folder.join("out/model.gguf")).unwrap().values;
    let (folder, model) = changed("llama-rope-yarn", "config.json", |json| {
        json["rope_scaling"]["beta_fast"] = 32.into();
        json["rope_scaling"]["beta_slow"] = 1.0.into();
    });
    let report = export(model, folder.path(), FileType::F32).unwrap();
    assert!(values(folder.path()).keys().all(|key| !key.contains("beta")));
    assert!(report.outputs[0].verified.how.contains("computes what the one computes"), "{}", report.outputs[0].verified.how);
    // As many tokens as there are rows.
    let (folder, model) = changed("llama", "config.json", |json| json["vocab_size"] = 40.into());
    export(model, folder.path(), FileType::F32).unwrap();
    assert_eq!(values(folder.path())["llama.vocab_size"], gguf::Value::Unsigned(48));
    // Tokens that texts name as they are have spaces, and what stands around texts without a processor is said elsewhere.
    let (folder, _) = changed("tokenizer-pieces", "tokenizer.json", |json| {
        json["post_processor"] = Value::Null;
        let id = json["model"]["vocab"].as_object().unwrap().len() - 1;
        let added = serde_json::json!({ "id": id, "content": "\u{2581}\u{2581}!", "special": false });
        json["model"]["vocab"].as_object_mut().unwrap().retain(|_, number| *number != id);
        json["model"]["merges"].as_array_mut().unwrap().clear();
        json["added_tokens"].as_array_mut().unwrap().push(added);
    });
    let settings = folder.path().join("in/tokenizer_config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&settings).unwrap()).unwrap();
    json["add_bos_token"] = true.into();
    json["chat_template"] = serde_json::json!([{ "name": "default", "template": "a" }, { "name": "tool_use", "template": "b" }]);
    fs::write(&settings, json.to_string()).unwrap();
    export(Model::open(folder.path().join("in")).unwrap(), folder.path(), FileType::F16).unwrap();
    let said = values(folder.path());
    assert!(matches!(&said["tokenizer.ggml.tokens"], gguf::Value::Texts(tokens) if tokens.iter().any(|token| token == "  !")));
    assert_eq!(said["tokenizer.ggml.add_bos_token"], gguf::Value::Bool(true));
    assert_eq!(said["tokenizer.ggml.add_eos_token"], gguf::Value::Bool(false));
    let back = Model::open(folder.path().join("out/model.gguf")).unwrap();
    let settings: Value = serde_json::from_str(&back.beside.made[Path::new("tokenizer_config.json")]).unwrap();
    assert_eq!(settings["chat_template"], json["chat_template"]);
}

/// Of Qwen 3, whose experts are in all layers there.
#[test]
fn experts_come_and_go() {
    let experts = |json: &mut Value| {
        json["mlp_only_layers"] = serde_json::json!([]);
        json["num_hidden_layers"] = 1.into();
    };
    let opened = |change: &dyn Fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_str(&fs::read_to_string(golden("models/qwen3-moe/config-4.json")).unwrap()).unwrap();
        experts(&mut json);
        change(&mut json);
        fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        fs::copy(golden("models/qwen3-moe/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let mut model = Model::open(folder.path()).unwrap();
        model.weights.by_name.retain(|name, _| !name.starts_with("model.layers.1."));
        (folder, model)
    };
    let (_source, model) = opened(&|_| {});
    let (folder, found, report) = written(model.clone(), FileType::F32);
    same_weights(&found, &model, "qwen3-moe");
    assert!(found.graph().unwrap().to_string() == model.graph().unwrap().to_string());
    assert!(report.layers.iter().any(|layer| layer.name == "model.layers.0.mlp.experts.3.up_proj.weight"));
    let file = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
    assert_eq!(file.tensors["blk.0.ffn_up_exps.weight"].shape, [4, 12, 16]);
    assert_eq!(file.values["qwen3moe.expert_feed_forward_length"], gguf::Value::Unsigned(12));
    let refused = |(folder, model): (tempfile::TempDir, Model), words: &str| {
        let error = export(model, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "`{error}` does not say `{words}`");
    };
    refused(opened(&|json| json["norm_topk_prob"] = false.into()), "`norm_topk_prob` of false");
    refused(opened(&|json| json["mlp_only_layers"] = serde_json::json!([1])), "`mlp_only_layers` of [1]");
    for missing in ["1", "3"] {
        let (source, mut model) = opened(&|_| {});
        model.weights.by_name.remove(&format!("model.layers.0.mlp.experts.{missing}.up_proj.weight"));
        refused((source, model), "4 experts");
    }
    // As many as are said.
    let (_folder, model) = rewritten("mixtral", |values, _| drop(values.insert("llama.expert_count".into(), gguf::Value::Unsigned(3))));
    assert!(model.err().unwrap().to_string().contains("has the shape [4, 16, 12], where there are 3 experts"));
}

#[test]
fn a_head_that_is_the_embedding_is_stored_once() {
    let (_source, mut model) = source("gemma2");
    let embedding = model.weights.by_name["model.embed_tokens.weight"].clone();
    model.weights.by_name.insert("lm_head.weight".into(), embedding);
    let folder = tempfile::tempdir().unwrap();
    export(model.clone(), folder.path(), FileType::F32).unwrap();
    assert!(!gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().tensors.contains_key("output.weight"));
    let bytes = std::sync::Arc::new(Bytes { dtype: DType::I32, bytes: vec![0; 64] });
    model.weights.by_name.insert("model.norm.weight".into(), Weight::new(DType::I32, vec![16], Encoding::Dense, bytes));
    let folder = tempfile::tempdir().unwrap();
    let error = export(model, folder.path(), FileType::F32).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("where `output_norm.weight` holds floats"), "{error}");
}

#[test]
fn blocks_hold_finite_values() {
    let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0xFF; 64 * 4] });
    let weight = Weight::new(DType::F32, vec![2, 32], Encoding::Dense, bytes);
    let (blocks, _) = weight.in_gguf(Kind::Blocks(compress::kernel::ggml::BlockType::Q8_0), "embedding");
    let error = blocks.visit(1, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("`embedding`: holds values that are not finite"), "{error}");
}

/// Beside a file that is written nothing is put, and texts are still read by the tokenizer that the input brings.
#[test]
fn texts_are_read_where_a_file_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let texts = folder.path().join("texts.txt");
    fs::write(&texts, "Hello world, it's 12345 o'clock!\n".repeat(20)).unwrap();
    let input = golden("gguf/tokenizer-llama-bpe.gguf");
    let recipe = format!("model: {}\ndata:\n  evaluation: {{ text: {}, task: language-modelling }}\noutput: out\n", input.display(), texts.display());
    let recipe = compress::Recipe::parse(&recipe, Path::new("recipe.yaml")).unwrap();
    let model = Model::open(&input).unwrap();
    let out = folder.path().join("out/model.onnx");
    let report = Pipeline::builder().recipe(&recipe).build().unwrap().run(model, &out).unwrap();
    assert!(report.accuracy.is_some());
    assert!(out.is_file() && !folder.path().join("out/tokenizer.json").exists());
}

/// A golden with other keys and tensors, opened.
fn rewritten(
    name: &str,
    change: impl Fn(&mut BTreeMap<String, gguf::Value>, &mut BTreeMap<String, Weight>),
) -> (tempfile::TempDir, Result<Model, compress::Error>) {
    let file = gguf::GgufFile::open(&golden(&format!("gguf/{name}.gguf"))).unwrap();
    let (mut values, mut tensors) = (file.values, file.tensors);
    change(&mut values, &mut tensors);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    put(&path, values, &tensors);
    let model = Model::open(&path);
    (folder, model)
}

/// Writes a file of these keys and tensors.
fn put(path: &Path, values: BTreeMap<String, gguf::Value>, tensors: &BTreeMap<String, Weight>) {
    let planned: Vec<_> = tensors.iter().map(|(name, weight)| (name.clone(), Kind::Plain(DType::F32), weight.shape.clone())).collect();
    let (mut bytes, padding) = gguf::header(&values.into_iter().collect::<Vec<_>>(), &planned).unwrap();
    for ((name, weight), padding) in tensors.iter().zip(padding) {
        bytes.extend(weight.floats(name).unwrap().iter().flat_map(|value| value.to_le_bytes()));
        bytes.resize(bytes.len() + padding as usize, 0);
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_model_in_several_files_is_one() {
    let (_source, expected) = source("llama");
    let whole = gguf::GgufFile::open(&golden("gguf/llama.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let name = |number: usize| folder.path().join(format!("tiny-{number:05}-of-00003.gguf"));
    type Said = BTreeMap<String, gguf::Value>;
    // The second file with another key, or another tensor.
    let write = |second: &dyn Fn(&mut Said, &mut BTreeMap<String, Weight>)| {
        for part in 0..3usize {
            let mut values = if part == 0 { whole.values.clone() } else { Said::new() };
            values.extend(
                [("no", part as u64), ("count", 3), ("tensors.count", whole.tensors.len() as u64)]
                    .map(|(key, number)| (format!("split.{key}"), gguf::Value::Unsigned(number))),
            );
            let mut tensors: BTreeMap<_, _> = whole
                .tensors
                .iter()
                .enumerate()
                .filter(|(at, _)| at * 3 / whole.tensors.len() == part)
                .map(|(_, (name, weight))| (name.clone(), weight.clone()))
                .collect();
            if part == 1 {
                second(&mut values, &mut tensors);
            }
            put(&name(part + 1), values, &tensors);
        }
    };
    write(&|_, _| {});
    for path in [folder.path().to_owned(), name(1), name(3)] {
        let found = Model::open(&path).unwrap();
        same_weights(&found, &expected, "llama");
        assert_eq!(found.weight_files, [1, 2, 3].map(name));
        assert!(!found.beside.notes(&path).iter().any(|note| note.contains("split")), "{:?}", found.beside.notes(&path));
    }
    fs::copy(name(1), folder.path().join("other.bin.gguf")).unwrap();
    let refused = |path: &Path, words: &str| {
        let error = Model::open(path).err().unwrap().to_string();
        assert!(error.contains(words), "`{error}` does not say `{words}`");
    };
    refused(&folder.path().join("other.bin.gguf"), "its name does not end like -00001-of-00003.gguf");
    fs::remove_file(folder.path().join("other.bin.gguf")).unwrap();
    write(&|values, _| drop(values.insert("split.no".into(), gguf::Value::Unsigned(2))));
    refused(&name(1), "does not say that it is");
    write(&|values, _| drop(values.insert("llama.block_count".into(), gguf::Value::Unsigned(7))));
    refused(folder.path(), "says `llama.block_count`, which the first file of the model does not");
    write(&|_, tensors| tensors.extend(whole.tensors.iter().next().map(|(name, weight)| (name.clone(), weight.clone()))));
    refused(&name(1), "is in another file of the model too");
    write(&|_, tensors| drop(tensors.pop_last()));
    refused(&name(1), "`split.tensors.count` is");
    fs::remove_file(name(2)).unwrap();
    refused(&name(1), "tiny-00002-of-00003.gguf");
}

#[test]
fn a_file_is_written_where_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (golden("gguf/tokenizer-llama-bpe.gguf"), folder.path().join("small.gguf"));
    let report = Pipeline::builder().build().unwrap().run(Model::open(&input).unwrap(), &out).unwrap();
    assert_eq!(report.outputs[0].path, "small.gguf");
    let found = Model::open(&out).unwrap();
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    assert_eq!(tokens(&found, &expected["texts"]), expected["tokens"]["llama-bpe"]);
    assert!(folder.path().join("small.gguf.report/report.json").is_file() && !folder.path().join("tokenizer.json").exists());
    let (cancel, silent) = (compress::work::Cancel::default(), compress::work::Silent);
    let checks = compress::pipeline::verify(&out, &compress::work::Work { threads: 1, progress: &silent, cancel: &cancel }).unwrap();
    assert!(checks.len() > 1 && checks.iter().all(|check| check.ok), "{checks:?}");
    let other = Pipeline::builder().export(compress::export::Safetensors::default()).build().unwrap();
    let error = other.run(Model::open(&input).unwrap(), folder.path().join("other.gguf")).err().unwrap().to_string();
    assert!(error.contains("is a file of the format gguf"), "{error}");
}

#[test]
fn vocabularies_of_pieces_have_defaults_and_need_scores() {
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    let named = ["bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"];
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| values.retain(|key, _| !named.iter().any(|end| key.ends_with(end))));
    let model = model.unwrap();
    assert_eq!(tokens(&model, &expected["texts"]), expected["tokens"]["pieces"]);
    assert_eq!((&model.config.get("bos_token_id").unwrap(), &model.config.get("eos_token_id").unwrap()), (&&1.into(), &&2.into()));
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| match values.get_mut("tokenizer.ggml.scores") {
        Some(gguf::Value::Floats(scores)) => scores.fill(-1000.0),
        _ => panic!("no scores"),
    });
    let model = model.unwrap();
    assert!(!model.beside.made.contains_key(Path::new("tokenizer.json")));
    assert!(model.beside.in_weight_files.iter().any(|note| note.contains("its scores are all equal (-1000)")), "{:?}", model.beside.in_weight_files);
    let long = "x".repeat(600);
    let (_folder, model) = rewritten("tokenizer-pieces", |values, _| match values.get_mut("tokenizer.ggml.tokens") {
        Some(gguf::Value::Texts(tokens)) => tokens[300].clone_from(&long),
        _ => panic!("no tokens"),
    });
    assert!(model.unwrap().beside.in_weight_files.iter().any(|note| note.contains("a token of 600 bytes")));
}

#[test]
fn factors_on_frequencies_are_as_many_as_there_are() {
    let cut = |_: &mut BTreeMap<String, gguf::Value>, tensors: &mut BTreeMap<String, Weight>| {
        let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; 4] });
        tensors.insert("rope_freqs.weight".into(), Weight::new(DType::F32, vec![1], Encoding::Dense, bytes));
    };
    let (_folder, model) = rewritten("llama-rope-llama3", cut);
    assert!(model.err().unwrap().to_string().contains("has the shape [1], where heads of"));
    let (_folder, model) = rewritten("qwen2", cut);
    assert!(model.err().unwrap().to_string().contains("which only models of the architecture `llama` have"));
}
