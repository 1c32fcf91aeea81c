//! Writing GGUF files: comparison with the reference, and unsupported models.

use std::fs;
use std::path::Path;

use compress::export::{FileType, Gguf};
use compress::pass::Cast;
use compress::{Model, Pipeline};
use compress_core::store::gguf::{self, BlockScales, Kind};
use compress_core::store::{Bytes, DType, Encoding, Weight};
use serde_json::Value;

use super::{changed, export, families, golden, same_graph, same_weights, source, tokens, written};

#[test]
fn written_files_equal_the_reference() {
    for name in &families() {
        let (_source, expected) = source(name);
        let (folder, found, report) = written(expected.clone(), FileType::F32);
        same_weights(&found, &expected, name);
        same_graph(&found, &expected, name);
        assert!(report.notes.iter().any(|note| note.contains("tokenizer.json is missing")), "{:?}", report.notes);
        // Keys and tensors of the reference file.
        let theirs = gguf::GgufFile::open(&golden(&format!("gguf/{name}.gguf"))).unwrap();
        let ours = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap();
        assert!(ours.tensors.keys().eq(theirs.tensors.keys()), "{name}: {:?}", ours.tensors.keys());
        for (tensor, weight) in &theirs.tensors {
            let [found, expected] = [&ours.tensors[tensor], weight].map(|weight| weight.floats(tensor).unwrap());
            // Exponential functions differ in the last bit.
            let close = |(a, b): (&f32, &f32)| if tensor.ends_with(".ssm_a") { (a - b).abs() <= 1e-6 * b.abs() } else { a == b };
            assert!(found.len() == expected.len() && found.iter().zip(&expected).all(close), "{name}: {tensor}");
        }
        let own: Vec<_> = theirs.values.iter().filter(|(key, _)| !key.starts_with("general.") && !key.starts_with("tokenizer.")).collect();
        own.iter().for_each(|(key, value)| assert_eq!(ours.values.get(*key), Some(*value), "{name}: {key}"));
        // The reference lacks this key, which older versions of llama.cpp require.
        if let Some(value) = theirs.values.get("nemotron_h.attention.layer_norm_epsilon") {
            assert_eq!(ours.values.get("nemotron_h.attention.layer_norm_rms_epsilon"), Some(value), "{name}");
        }
    }
}

#[test]
fn matrices_have_the_requested_types() {
    let model = || Model::open(golden("gguf/tokenizer-smollm.gguf")).unwrap();
    // Rows of 8 are not complete blocks.
    let (_folder, _, report) = written(model(), FileType::Q4_K_M);
    let note = report.notes.iter().find(|note| note.contains("not a multiple of the block size")).expect("a note");
    assert!(note.contains("Q4_K with rows of 8 are F16") && note.contains("bits per weight"), "{note}");
    assert!(report.layers.iter().all(|layer| layer.encoding == if layer.shape.len() == 1 { "f32" } else { "f16" }));
    let folder = tempfile::tempdir().unwrap();
    let half = Cast::default();
    let run = |file_type| {
        Pipeline::builder()
            .pass(half.clone())
            .export(Gguf { file_type, ..Gguf::default() })
            .measure(false)
            .force(true)
            .build()
            .unwrap()
            .run(model(), folder.path().join("out"))
            .unwrap()
    };
    assert!(run(FileType::F16).notes.iter().any(|note| note.contains("8 BF16 matrices are converted to F16")));
    assert!(!run(FileType::BF16).notes.iter().any(|note| note.contains("converted to F16")));
    let wrong = golden("models/gpt2");
    let refused =
        Pipeline::builder().export(Gguf::default()).build().unwrap().run(Model::open(wrong).unwrap(), std::env::temp_dir().join("never")).err().unwrap();
    assert!(refused.to_string().contains("gguf: model_type `gpt2`"), "{refused}");
}

/// Gemma 1, with weights of a Llama.
fn gemma(json: &mut Value, activation: &str) {
    json["model_type"] = "gemma".into();
    json["head_dim"] = (json["hidden_size"].as_u64().unwrap() / json["num_attention_heads"].as_u64().unwrap()).into();
    json["hidden_act"] = activation.into();
}

/// Changes whether words in the vocabulary become one token, for a vocabulary with a word that is not merged.
fn without_a_merge(json: &mut Value, ignore_merges: bool) {
    json["model"]["ignore_merges"] = ignore_merges.into();
    json["model"]["merges"].as_array_mut().unwrap().pop();
}

#[test]
fn unsupported_models_are_rejected_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change, &str); 62] = [
        (
            "qwen3_5",
            "config.json",
            |json| json["rope_parameters"] = serde_json::json!({ "rope_theta": 100.0, "mrope_section": [1, 1, 0, 0, 7] }),
            "`mrope_section` of [1,1,0,0,7]",
        ),
        ("qwen3_5", "config.json", |json| json["rope_parameters"] = serde_json::json!({ "rope_theta": 100.0, "mrope_section": 2 }), "`mrope_section` of 2"),
        ("smollm3", "config.json", |json| json["no_rope_layers"] = serde_json::json!([1, 1, 0, 1]), "`no_rope_layers` of [1,1,0,1]"),
        ("smollm3", "config.json", |json| (json["no_rope_layers"], json["no_rope_layer_interval"]) = (Value::Null, 3.into()), "`no_rope_layer_interval` of 3"),
        ("phi3-longrope", "config.json", |json| json["rope_scaling"]["short_factor"] = serde_json::json!([1.0]), "`short_factor` with 1 numbers"),
        ("llama4-plain", "config.json", |json| json["attention_chunk_size"] = 4.into(), "`attention_chunk_size` of 4"),
        ("llama4-plain", "config.json", |json| json["attn_temperature_tuning"] = 0.into(), "`attn_temperature_tuning` of false"),
        ("llama4-plain", "config.json", |json| json["use_qk_norm"] = false.into(), "`use_qk_norm` of false with 4 experts"),
        ("llama4-plain", "config.json", |json| json["moe_layers"] = serde_json::json!([0]), "`moe_layers` of [0]"),
        ("deepseek-v2", "config.json", |json| json["topk_method"] = "group_limited_greedy".into(), "a configuration without `n_group`"),
        ("deepseek-v2-lite", "config.json", |json| json["num_hidden_layers"] = 28.into(), "`num_hidden_layers` of 28"),
        ("glm4-moe", "config.json", |json| (json["n_group"], json["topk_group"]) = (8.into(), 4.into()), "`n_group` of 8 with 8 experts"),
        ("llama-biases", "config.json", |json| json["attention_bias"] = false.into(), "is a bias that `llama` with this configuration does not have"),
        ("llama-rope-yarn", "config.json", |json| json["rope_scaling"]["beta_fast"] = 16.into(), "`beta_fast` of 16"),
        ("llama-rope-yarn", "config.json", |json| json["rope_parameters"] = serde_json::json!({ "rope_theta": 1e4 }), "`rope_parameters` and `rope_scaling`"),
        (
            "qwen2",
            "config.json",
            |json| json["rope_scaling"] = serde_json::json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 }),
            "rope scaling `llama3`",
        ),
        ("qwen3", "config.json", |json| json["head_dim"] = (1u64 << 40).into(), "heads of 1099511627776"),
        ("tokenizer-pieces", "tokenizer.json", |json| json["normalizer"] = serde_json::json!({ "type": "NFKC" }), "NFKC"),
        ("tokenizer-pieces", "tokenizer.json", |json| json["pre_tokenizer"] = serde_json::json!({ "type": "Whitespace" }), "Whitespace"),
        ("tokenizer-llama-bpe", "tokenizer.json", |json| without_a_merge(json, false), "`model.ignore_merges` of false"),
        ("tokenizer-qwen2", "tokenizer.json", |json| without_a_merge(json, true), "`model.ignore_merges` of true"),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["post_processor"] = serde_json::json!({ "type": "BertProcessing" }), "BertProcessing"),
        (
            "tokenizer-pieces",
            "tokenizer.json",
            |json| json["post_processor"]["single"].as_array_mut().unwrap().insert(0, serde_json::json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } })),
            "`</s>`, `<s>` before every text",
        ),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["added_tokens"][0]["content"] = "Ġ".into(), "`Ġ`"),
        ("tokenizer-qwen2", "tokenizer.json", |json| json["model"]["end_of_word_suffix"] = "</w>".into(), "`</w>`"),
        ("tokenizer-qwen2", "tokenizer_config.json", |json| json["chat_template"] = serde_json::json!([1]), "a list with entries other than"),
        ("granite", "config.json", |json| json["residual_multiplier"] = 0.into(), "`residual_multiplier` of 0"),
        ("llama-rope-yarn", "config.json", |json| json["rope_scaling"]["attention_factor"] = 2.5.into(), "`attention_factor` of 2.5"),
        ("starcoder2", "config.json", |json| json["use_bias"] = false.into(), "`use_bias` of false"),
        ("ernie4_5", "config.json", |json| json["use_bias"] = true.into(), "`use_bias` of true"),
        ("hunyuan-alpha", "config.json", |json| json["rope_scaling"]["alpha"] = 0.into(), "rope scaling `dynamic` without `alpha`"),
        ("gpt-oss", "config.json", |json| json["swiglu_limit"] = 5.0.into(), "`swiglu_limit` of 5.0"),
        ("gpt-oss", "config.json", |json| json["rope_scaling"]["truncate"] = true.into(), "`truncate` of true in rope scaling `yarn`"),
        ("deepseek-v3", "config.json", |json| json["rms_norm_eps"] = 1e-5.into(), "`rms_norm_eps` of 0.00001"),
        ("deepseek-v3", "config.json", |json| json["rope_interleave"] = false.into(), "`rope_interleave` of false"),
        ("deepseek-v3", "config.json", |json| json["rope_scaling"]["mscale"] = 1.0.into(), "`yarn` without equal, positive `mscale` and `mscale_all_dim`"),
        ("deepseek-v3", "config.json", |json| json["rope_scaling"] = serde_json::json!({ "rope_type": "linear", "factor": 2.0 }), "rope scaling `linear`"),
        ("deepseek-v3", "config.json", |json| json["num_hidden_layers"] = 27.into(), "`num_hidden_layers` of 27"),
        ("qwen3_5", "config.json", |json| json["linear_value_head_dim"] = 6.into(), "`linear_value_head_dim` of 6"),
        ("qwen3_5", "config.json", |json| json["attention_bias"] = true.into(), "`attention_bias` of true"),
        (
            "qwen3_5",
            "config.json",
            |json| json["rope_parameters"] = serde_json::json!({ "rope_theta": 100.0, "mrope_section": [0, 1, 1] }),
            "`mrope_section` of [0, 1, 1, 0]",
        ),
        ("qwen3_5", "config.json", |json| json["rope_parameters"]["mrope_section"] = serde_json::json!([3, 3, 3]), "`mrope_section` of [3, 3, 3, 0]"),
        ("qwen3-next", "config.json", |json| json["rms_norm_eps"] = 1e-5.into(), "`rms_norm_eps` of 0.00001"),
        ("qwen3-next", "config.json", |json| json["mlp_only_layers"] = serde_json::json!([1]), "`mlp_only_layers` of [1]"),
        ("granite-hybrid", "config.json", |json| json["time_step_limit"] = serde_json::json!([0.1, 2.0]), "`time_step_limit` of [0.1,2.0]"),
        ("granite-hybrid", "config.json", |json| json["mamba_expand"] = 4.into(), "`mamba_expand` of 4"),
        ("qwen3-next", "config.json", |json| json["norm_topk_prob"] = false.into(), "`norm_topk_prob` of false"),
        ("deepseek-v3", "config.json", |json| json["v_head_dim"] = 7.into(), "4 heads with 15 rows of keys and values"),
        ("deepseek-v2-groups", "config.json", |json| json["topk_group"] = 3.into(), "`topk_group` of 3 with `n_group` of 2"),
        ("deepseek-v2-groups", "config.json", |json| (json["n_group"], json["topk_group"]) = (8.into(), 2.into()), "`n_group` of 8 with 8 experts"),
        ("deepseek-v3", "config.json", |json| drop(json.as_object_mut().unwrap().remove("num_key_value_heads")), "`num_key_value_heads` of 128"),
        ("deepseek-v3", "config.json", |json| json["n_group"] = 3.into(), "`n_group` of 3 with 8 experts"),
        ("deepseek-v2-groups", "config.json", |json| json["topk_method"] = "noaux_tc".into(), "`topk_method` of \"noaux_tc\""),
        ("nemotron-h", "config.json", |json| json["time_step_min"] = 0.4.into(), "`time_step_min` of 0.4"),
        ("nemotron-h", "config.json", |json| json["mamba_n_groups"] = 2.into(), "`mamba_n_groups`, a key of older configurations"),
        ("nemotron-h", "config.json", |json| json["use_conv_bias"] = false.into(), "`use_conv_bias` of false"),
        ("granite-hybrid", "config.json", |json| json["mamba_conv_bias"] = false.into(), "`mamba_conv_bias` of false"),
        ("nemotron-h-moe", "config.json", |json| json["use_bias"] = true.into(), "`use_bias` of true"),
        ("nemotron-h-latent", "config.json", |json| json["mlp_hidden_act"] = "relu".into(), "`mlp_hidden_act` of \"relu\""),
        ("cohere2", "config.json", |json| json["layer_types"] = serde_json::json!(["full_attention"]), "`layer_types` is not supported"),
        ("llama", "config.json", |json| gemma(json, "relu"), "`hidden_act` of \"relu\""),
        ("llama", "config.json", |json| gemma(json, "gelu"), "`lm_head.weight`: differs from the embedding"),
    ];
    for (name, file, change, words) in cases {
        let (folder, model) = changed(name, file, change);
        let error = export(model, folder.path(), FileType::F16).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: `{error}` does not contain `{words}`");
    }
}

/// llama.cpp has files either with dense networks or with experts. The configuration has the number of layers
/// only by the list of their kinds, as transformers saves it.
#[test]
fn dense_networks_in_models_with_experts_are_rejected() {
    let model = Model::open(golden("models/nemotron-h")).unwrap();
    assert!(model.config.get("num_hidden_layers").is_none());
    let folder = tempfile::tempdir().unwrap();
    let error = export(model, folder.path(), FileType::F32).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("layer 1, a dense network in a model with experts"), "{error}");
}

/// The lists of the types of layers take precedence over the pattern, as in transformers.
#[test]
fn all_layers_of_a_list_are_written() {
    let types = serde_json::json!(["mamba", "mlp", "attention", "mamba", "mlp"]);
    for key in ["layer_types", "layers_block_type"] {
        let (folder, model) = changed("nemotron-h", "config.json", |json| {
            json[key] = types.clone();
            json["hybrid_override_pattern"] = "M-*".into();
            json["num_hidden_layers"] = Value::Null;
        });
        let report = export(model, folder.path(), FileType::F32).unwrap_or_else(|e| panic!("{key}: {e}"));
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{key}: {}", report.outputs[0].verified.how);
        let values = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().values;
        assert_eq!(values["nemotron_h.block_count"], gguf::Value::Unsigned(5), "{key}");
    }
}

#[test]
fn computations_that_differ_in_llama_cpp_are_reported() {
    for (name, words) in [("deepseek-v2-groups", "selects 1 of 2 groups of experts by the sum"), ("nemotron-h-moe", "no lower limit of the step sizes")] {
        let (_source, model) = source(name);
        let (_folder, _, report) = written(model, FileType::F32);
        assert!(report.notes.iter().any(|note| note.contains(words)), "{name}: {:?}", report.notes);
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{name}: {}", report.outputs[0].verified.how);
    }
}

/// Defaults of families that are not the number of query heads.
#[test]
fn missing_numbers_of_heads_and_neurons_are_those_of_the_graph() {
    for name in ["starcoder2", "ernie4_5", "glm", "glm4", "qwen3-next", "qwen3_5-moe"] {
        let (folder, model) = changed(name, "config.json", |json| drop(json.as_object_mut().unwrap().remove("num_key_value_heads")));
        let report = export(model, folder.path(), FileType::F32).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{name}: {}", report.outputs[0].verified.how);
    }
    for (key, words) in [("num_key_value_heads", "config.json specifies 8 heads of 4"), ("intermediate_size", "a configuration without `intermediate_size`")] {
        let (folder, model) = changed("nemotron-h", "config.json", |json| drop(json.as_object_mut().unwrap().remove(key)));
        let error = export(model, folder.path(), FileType::F32).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{key}: {error}");
    }
}

/// Routers that select all groups have no restriction, and llama.cpp aborts for such numbers.
#[test]
fn groups_of_experts_that_are_all_selected_are_not_written() {
    for (name, architecture) in [("deepseek-v2-groups", "deepseek2"), ("deepseek-v3", "deepseek2"), ("glm4-moe", "glm4moe")] {
        for number in [1, 2] {
            let (folder, model) = changed(name, "config.json", |json| (json["n_group"], json["topk_group"]) = (number.into(), number.into()));
            let report = export(model, folder.path(), FileType::F32).unwrap_or_else(|e| panic!("{name}: {number}: {e}"));
            assert!(!report.notes.iter().any(|note| note.contains("groups of experts")), "{name}: {number}: {:?}", report.notes);
            assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{name}: {number}: {}", report.outputs[0].verified.how);
            let values = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().values;
            for key in ["expert_group_count", "expert_group_used_count"] {
                assert_eq!(values[&format!("{architecture}.{key}")], gguf::Value::Unsigned(1), "{name}: {number}: {key}");
            }
        }
    }
}

/// GGUF files cannot contain the weights of sentence-transformers' modules.
#[test]
fn weights_of_modules_are_written_to_separate_files() {
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
    let report = Pipeline::builder().export(Gguf { file_type: FileType::F32, ..Gguf::default() }).build().unwrap().run(expected.clone(), &out).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("cannot contain the weights of the modules `2_Dense`")), "{:?}", report.notes);
    assert!(report.fidelity.is_some_and(|fidelity| fidelity.fidelity.cosine > 0.9999));
    let found = Model::open(&out).unwrap();
    same_weights(&found, &expected, "modules");
    assert!(found.graph().unwrap().to_string() == expected.graph().unwrap().to_string());
    let alone = Pipeline::builder().measure(false).build().unwrap().run(expected, folder.path().join("small.gguf")).unwrap();
    assert!(alone.notes.iter().any(|note| note.contains("are not written")), "{:?}", alone.notes);
}

#[test]
fn settings_without_effect_are_accepted() {
    let values = |folder: &Path| gguf::GgufFile::open(&folder.join("out/model.gguf")).unwrap().values;
    let (folder, model) = changed("llama-rope-yarn", "config.json", |json| {
        json["rope_scaling"]["beta_fast"] = 32.into();
        json["rope_scaling"]["beta_slow"] = 1.0.into();
    });
    let report = export(model, folder.path(), FileType::F32).unwrap();
    assert!(values(folder.path()).keys().all(|key| !key.contains("beta")));
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
    let (folder, model) = changed("llama-rope-yarn", "config.json", |json| {
        let factor = json["rope_scaling"]["factor"].as_f64().unwrap();
        json["rope_scaling"]["attention_factor"] = (0.1 * factor.ln() + 1.0).into();
    });
    let report = export(model, folder.path(), FileType::F32).unwrap();
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
    // The code that the key names is that of transformers.
    let (folder, model) = changed("minimax-m2", "config.json", |json| json["auto_map"] = serde_json::json!({ "AutoConfig": "other.Config" }));
    export(model, folder.path(), FileType::F32).unwrap();
    // All words are merged, so that the setting has no effect.
    let (folder, _) = changed("tokenizer-qwen2", "tokenizer.json", |json| {
        json["model"]["ignore_merges"] = true.into();
        json["normalizer"] = serde_json::json!({ "type": "Sequence", "normalizers": [] });
    });
    export(Model::open(folder.path().join("in")).unwrap(), folder.path(), FileType::F16).unwrap();
    // A file has no config.json that could be corrected later.
    let (folder, model) = changed("llama", "config.json", |json| json["vocab_size"] = 40.into());
    assert!(export(model, folder.path(), FileType::F32).unwrap_err().to_string().contains("has shape [48, 16], but the configuration requires [40, 16]"));
    assert!(!folder.path().join("out").exists());
    // Added tokens can contain spaces, and special tokens of tokenizers without a post-processor are
    // configured elsewhere.
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
    let settings: Value = serde_json::from_str(&back.auxiliary.synthesized[Path::new("tokenizer_config.json")]).unwrap();
    assert_eq!(settings["chat_template"], json["chat_template"]);
    // As in transformers, the template in a separate file takes precedence, and that of a processor is the
    // last.
    let template = |file: &str, text: &str| {
        fs::write(folder.path().join("in").join(file), text).unwrap();
        fs::remove_dir_all(folder.path().join("out")).unwrap();
        export(Model::open(folder.path().join("in")).unwrap(), folder.path(), FileType::F16).unwrap();
        values(folder.path())["tokenizer.chat_template"].clone()
    };
    assert_eq!(template("chat_template.json", r#"{ "chat_template": "d" }"#), gguf::Value::Text("a".to_owned()));
    assert_eq!(template("chat_template.jinja", "c"), gguf::Value::Text("c".to_owned()));
    fs::remove_file(folder.path().join("in/chat_template.jinja")).unwrap();
    assert_eq!(template("tokenizer_config.json", "{}"), gguf::Value::Text("d".to_owned()));
}

/// Converters write the 64-bit value of a 32-bit float; GGUF files contain 32 bits.
#[test]
fn numbers_are_compared_in_the_precision_that_the_file_stores() {
    for (name, key, value) in [
        ("llama", "rms_norm_eps", 9.999999747378752e-6),
        ("llama", "rope_theta", 10000.0001),
        ("llama-rope-linear", "rms_norm_eps", 9.999999974752427e-7),
        ("gemma2", "attn_logit_softcapping", 49.99999999),
        ("gemma2", "final_logit_softcapping", 30.1),
        ("qwen3", "rms_norm_eps", 1.0000001e-5),
        ("granite", "logits_scaling", 6.1),
    ] {
        let (folder, model) = changed(name, "config.json", |json| json[key] = value.into());
        let report = export(model, folder.path(), FileType::F32).unwrap_or_else(|e| panic!("{name}: {key}: {e}"));
        assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{name}: {key}: {}", report.outputs[0].verified.how);
    }
}

#[test]
fn a_head_equal_to_the_embedding_is_stored_once() {
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
    assert!(error.contains("`output_norm.weight` must be a float tensor"), "{error}");
}

/// llama.cpp would reject files with tensors of layers that it does not expect.
#[test]
fn layers_that_predict_further_tokens_are_not_written() {
    let (_source, mut model) = source("glm4-moe");
    let norm = model.weights.by_name["model.layers.1.input_layernorm.weight"].clone();
    model.weights.by_name.insert("model.layers.2.input_layernorm.weight".into(), norm.clone());
    model.weights.by_name.insert("model.layers.2.enorm.weight".into(), norm);
    model.config.set("num_nextn_predict_layers", 1.into());
    let (folder, _, report) = written(model, FileType::F32);
    let tensors = gguf::GgufFile::open(&folder.path().join("out/model.gguf")).unwrap().tensors;
    assert!(tensors.keys().all(|name| !name.starts_with("blk.2.")), "{:?}", tensors.keys());
    assert!(report.notes.iter().any(|note| note.contains("2 tensors of layers after the 2 of `num_hidden_layers` are not written")), "{:?}", report.notes);
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
}

/// llama.cpp has no head that is tied to the embedding in some families, and only such heads in others.
#[test]
fn heads_that_llama_cpp_does_not_support_are_rejected() {
    for (name, words) in [("stablelm", "a head that is tied to the embedding"), ("cohere2", "differs from the embedding")] {
        let (_source, mut model) = source(name);
        if model.weights.by_name.remove("lm_head.weight").is_some() {
            model.config.set("tie_word_embeddings", true.into());
        } else {
            let weight = &model.weights.by_name["model.embed_tokens.weight"];
            let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; weight.elements() * 4] });
            let head = Weight::new(DType::F32, weight.shape.clone(), Encoding::Dense, bytes);
            model.weights.by_name.insert("lm_head.weight".into(), head);
            model.config.set("tie_word_embeddings", false.into());
        }
        let folder = tempfile::tempdir().unwrap();
        let error = export(model, folder.path(), FileType::F32).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: {error}");
    }
}

#[test]
fn blocks_hold_finite_values() {
    let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0xFF; 64 * 4] });
    let weight = Weight::new(DType::F32, vec![2, 32], Encoding::Dense, bytes);
    let (blocks, _) = weight.in_gguf(Kind::Blocks(compress_kernels::ggml::BlockType::Q8_0), "embedding", BlockScales::Plain);
    let error = blocks.visit(1, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("`embedding`: contains NaN or infinite values"), "{error}");
}

#[test]
fn a_single_output_file_is_supported() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (golden("gguf/tokenizer-llama-bpe.gguf"), folder.path().join("small.gguf"));
    let report = Pipeline::builder().build().unwrap().run(Model::open(&input).unwrap(), &out).unwrap();
    assert_eq!(report.outputs[0].path, "small.gguf");
    let found = Model::open(&out).unwrap();
    let expected: Value = serde_json::from_str(&fs::read_to_string(golden("gguf/tokens.json")).unwrap()).unwrap();
    assert_eq!(tokens(&found, &expected["texts"]), expected["tokens"]["llama-bpe"]);
    assert!(folder.path().join("small.gguf.report/report.json").is_file() && !folder.path().join("tokenizer.json").exists());
    let (cancel, silent) = (compress_core::work::Cancel::default(), compress_core::work::Silent);
    let checks = compress::pipeline::verify(&out, &compress_core::work::Work { threads: 1, progress: &silent, cancel: &cancel }).unwrap();
    assert!(checks.len() > 1 && checks.iter().all(|check| check.ok), "{checks:?}");
    let other = Pipeline::builder().export(compress::export::Safetensors::default()).build().unwrap();
    let error = other.run(Model::open(&input).unwrap(), folder.path().join("other.gguf")).err().unwrap().to_string();
    assert!(error.contains("is of the format gguf, but other formats are configured"), "{error}");
}

/// `verify` rejects a file whose properties do not fit its tensors.
#[test]
fn verification_compares_shapes_with_properties() {
    let (_input, model) = source("llama");
    let folder = tempfile::tempdir().unwrap();
    export(model, folder.path(), FileType::F32).unwrap();
    let checks = crate::common::work(|work| compress::pipeline::verify(&folder.path().join("out"), work)).unwrap();
    assert!(checks.iter().all(|check| check.ok), "{checks:?}");
    // After a key: the type, and an integer of four bytes.
    let (path, key) = (folder.path().join("out/model.gguf"), b"llama.feed_forward_length");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&40u32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let checks = crate::common::work(|work| compress::pipeline::verify(&folder.path().join("out"), work)).unwrap();
    let is_found = |check: &compress::pipeline::Check| check.path == "model.gguf" && !check.ok && check.finding.contains("but the configuration requires");
    assert!(checks.iter().any(is_found), "{checks:?}");
}

/// Earlier versions of transformers stored them.
#[test]
fn rotary_frequencies_are_not_written() {
    let (folder, _) = changed("llama", "config.json", |_| {});
    let path = folder.path().join("in/model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    let frequencies = candle_core::Tensor::new(&[1f32, 0.01], &candle_core::Device::Cpu).unwrap();
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), frequencies);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let report = export(Model::open(folder.path().join("in")).unwrap(), folder.path(), FileType::F32).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("1 tensor of rotary frequencies (`inv_freq`) not written")), "{:?}", report.notes);
    assert!(report.outputs[0].verified.how.contains("with the same graph as the original"), "{}", report.outputs[0].verified.how);
}

/// Floats with the errors of 4 bits are rarely intended.
#[test]
fn the_note_on_dequantized_weights_names_a_smaller_type() {
    let note = |pass: compress::pass::Quantize, file_type| {
        let (_source, model) = source("llama");
        let folder = tempfile::tempdir().unwrap();
        let run = Pipeline::builder().pass(pass).export(Gguf { file_type, ..Gguf::default() }).measure(false).build().unwrap();
        let notes = run.run(model, folder.path().join("out")).unwrap().notes;
        notes.into_iter().find(|note| note.contains("dequantized")).expect("a note")
    };
    let pass = |scheme: &str| serde_json::from_value::<compress::pass::Quantize>(serde_json::json!({ "scheme": scheme, "group_size": -1 })).unwrap();
    // Rows of these models are shorter than the blocks.
    let four = note(pass("W4A16"), FileType::F16);
    assert!(four.contains("has their rounding errors") && four.contains("--to f32 --export 'gguf: { type: Q4_0 }'`"), "{four}");
    let eight = note(pass("W8A16"), FileType::BF16);
    assert!(eight.contains("no type of GGUF files stores these codes") && eight.contains("--export 'gguf: { type: Q8_0 }'`"), "{eight}");
    let twice = note(pass("W4A16"), FileType::Q4_0);
    assert!(!twice.contains("not smaller") && twice.contains("quantized twice") && twice.contains("--to f32 --export 'gguf: { type: Q4_0 }'"), "{twice}");
}
