//! Reading GGUF files: weights, configuration, and sharded models.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use compress::export::{FileType, Gguf};
use compress::pass::{Amount, Amounts, PruneStructured, PrunedPart, QuantizeDynamic};
use compress::{Model, Pipeline};
use compress_core::store::gguf;
use compress_core::store::{Bytes, DType, Encoding, Weight};
use compress_graph::ir::Op;
use serde_json::Value;

use super::{export, families, golden, put, rewritten, same_graph, same_weights, source, tokens};

#[test]
fn families_match_their_originals() {
    for name in &families() {
        let (_folder, expected) = source(name);
        let found = Model::open(golden(&format!("gguf/{name}.gguf"))).unwrap();
        same_weights(&found, &expected, name);
        same_graph(&found, &expected, name);
        for key in ["model_type", "architectures", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"] {
            let said = |model: &Model| model.config.get(key).filter(|value| !value.is_null()).cloned();
            assert_eq!(said(&found), said(&expected), "{name}: {key}");
        }
        assert_eq!(found.weights.metadata["general.license"], "apache-2.0");
        assert_eq!(found.stored_bytes(), found.weights.parameters() * 4, "{name}");
    }
}

/// Without a width of heads in the file, it is the quotient of 9 and 2, rounded down.
#[test]
fn heads_whose_number_does_not_divide_the_width_are_read() {
    let amounts = Amounts::Each([(PrunedPart::Heads, Amount::fraction(0.5)), (PrunedPart::Hidden, Amount::Count(7))].into());
    let prune = PruneStructured { amount: Some(amounts), round_to: 1, ..PruneStructured::default() };
    let folder = tempfile::tempdir().unwrap();
    let builder = Pipeline::builder().pass(prune).export(Gguf { file_type: FileType::F32, ..Gguf::default() }).measure(false);
    builder.build().unwrap().run(Model::open(golden("models/mistral")).unwrap(), folder.path().join("out")).unwrap();
    let path = folder.path().join("out/model.gguf");
    assert!(!gguf::GgufFile::open(&path).unwrap().values.contains_key("llama.attention.key_length"));
    let found = Model::open(&path).unwrap();
    let sizes = ["hidden_size", "num_attention_heads", "head_dim"].map(|key| found.config.get(key).and_then(Value::as_u64));
    assert_eq!(sizes, [Some(9), Some(2), Some(4)]);
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
    // The file in a folder with only a tokenizer.
    let alone = folder.path().join("in");
    fs::create_dir(&alone).unwrap();
    fs::copy(&input, alone.join("any.gguf")).unwrap();
    fs::write(alone.join("tokenizer.json"), "{}").unwrap();
    fs::write(alone.join("config.json"), "{}").unwrap();
    let model = Model::open(&alone).unwrap();
    assert_eq!(model.auxiliary.files, [Path::new("tokenizer.json")]);
    assert!(!model.auxiliary.synthesized.contains_key(Path::new("tokenizer.json")));
    assert!(model.auxiliary.notes(&alone).iter().any(|note| note.contains("config.json (they describe the original model)")));
    Pipeline::builder().build().unwrap().run(model, folder.path().join("copy")).unwrap();
    same_weights(&Model::open(folder.path().join("copy")).unwrap(), &Model::open(&input).unwrap(), "copy");
    fs::copy(&input, alone.join("other.gguf")).unwrap();
    assert!(Model::open(&alone).err().unwrap().to_string().contains("2 .gguf files and no safetensors"));
}

/// The command line reads the same from a file and from the folder converted from it.
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

/// A single output file has no auxiliary files, but texts are still tokenized by the input's tokenizer.
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

#[test]
fn a_model_in_several_files_is_one() {
    let (_source, expected) = source("llama");
    let whole = gguf::GgufFile::open(&golden("gguf/llama.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let name = |number: usize| folder.path().join(format!("tiny-{number:05}-of-00003.gguf"));
    type Metadata = BTreeMap<String, gguf::Value>;
    // The second file has another key, or another tensor.
    let write = |second: &dyn Fn(&mut Metadata, &mut BTreeMap<String, Weight>)| {
        for part in 0..3usize {
            let mut values = if part == 0 { whole.values.clone() } else { Metadata::new() };
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
        assert!(!found.auxiliary.notes(&path).iter().any(|note| note.contains("split")), "{:?}", found.auxiliary.notes(&path));
    }
    fs::copy(name(1), folder.path().join("other.bin.gguf")).unwrap();
    let refused = |path: &Path, words: &str| {
        let error = Model::open(path).err().unwrap().to_string();
        assert!(error.contains(words), "`{error}` does not contain `{words}`");
    };
    refused(&folder.path().join("other.bin.gguf"), "its name does not end like -00001-of-00003.gguf");
    fs::remove_file(folder.path().join("other.bin.gguf")).unwrap();
    write(&|values, _| drop(values.insert("split.no".into(), gguf::Value::Unsigned(2))));
    refused(&name(1), "but not according to its metadata");
    write(&|values, _| drop(values.insert("llama.block_count".into(), gguf::Value::Unsigned(7))));
    refused(folder.path(), "contains the key `llama.block_count`, which is missing or different in the first file of the model");
    write(&|_, tensors| tensors.extend(whole.tensors.iter().next().map(|(name, weight)| (name.clone(), weight.clone()))));
    refused(&name(1), "is also in another file of the model");
    write(&|_, tensors| drop(tensors.pop_last()));
    refused(&name(1), "`split.tensors.count` is");
    fs::remove_file(name(2)).unwrap();
    refused(&name(1), "tiny-00002-of-00003.gguf");
}

/// Keys that only some families have.
#[test]
fn keys_of_families_are_read_or_refused() {
    let refused = |name: &str, key: &str, value: Option<gguf::Value>, words: &str| {
        let (_folder, model) = rewritten(name, |values, _| match value.clone() {
            Some(value) => drop(values.insert(key.to_owned(), value)),
            None => drop(values.remove(key)),
        });
        let error = model.err().unwrap().to_string();
        assert!(error.contains(words), "{name}: `{error}` does not contain `{words}`");
    };
    refused("minimax-m2", "minimax-m2.expert_gating_func", Some(gguf::Value::Unsigned(1)), "`minimax-m2.expert_gating_func`, which is 1");
    refused("phi", "phi2.attention.layer_norm_epsilon", None, "`phi2.attention.layer_norm_epsilon` is missing");
    refused("glm4-moe", "glm4moe.nextn_predict_layers", Some(gguf::Value::Unsigned(1)), "`glm4moe.nextn_predict_layers`, which is 1");
    // Scores of experts are a softmax by default, as in DeepSeek-V2, which does not normalize the weights of
    // experts.
    refused("deepseek-v3", "deepseek2.expert_gating_func", None, "`deepseek2.expert_weights_norm` of true");
    refused("deepseek-v2", "deepseek2.expert_group_count", Some(gguf::Value::Unsigned(2)), "`deepseek2.expert_group_used_count` is missing");
    refused("nemotron-h", "nemotron_h.ssm.inner_size", Some(gguf::Value::Unsigned(25)), "`nemotron_h.ssm.inner_size` is 25, but there are 4 heads");
    let heads = |heads: &[i64]| Some(gguf::Value::Integers(heads.to_vec()));
    refused("nemotron-h", "nemotron_h.attention.head_count_kv", heads(&[0, 0, 2, 0, 2]), "have numbers for the same layer");
    refused("nemotron-h", "nemotron_h.attention.head_count_kv", heads(&[0, 0, 2, 0]), "zero or the same number for each of 5 layers");
    refused("nemotron-h", "nemotron_h.feed_forward_length", heads(&[0, 24, 0, 0, 23]), "zero or the same number for each of 5 layers");
    refused("granite-hybrid", "granitehybrid.attention.head_count_kv", heads(&[0, 0, 0]), "is zero for all layers");
    // llama.cpp has the epsilon of queries and keys, or of latent vectors, in the same key.
    for (name, architecture) in [("qwen3-next", "qwen3next"), ("qwen3_5", "qwen35"), ("deepseek-v2", "deepseek2"), ("deepseek-v3", "deepseek2")] {
        let key = format!("{architecture}.attention.layer_norm_rms_epsilon");
        refused(name, &key, Some(gguf::Value::Float(0.01)), &format!("`{key}` of 0.01"));
    }
    let epsilon = "nemotron_h.attention.layer_norm_rms_epsilon";
    refused("nemotron-h", epsilon, Some(gguf::Value::Float(0.02)), "`nemotron_h.attention.layer_norm_rms_epsilon` of 0.02");
    let (_folder, model) = rewritten("nemotron-h", |values, _| drop(values.insert(epsilon.to_owned(), gguf::Value::Float(f64::from(0.01_f32)))));
    assert_eq!(model.unwrap().config.get("hybrid_override_pattern"), Some(&Value::from("M-*M-")));
    // With the key of older versions of llama.cpp only.
    let (_folder, model) = rewritten("nemotron-h", |values, _| {
        let value = values.remove("nemotron_h.attention.layer_norm_epsilon").unwrap();
        values.insert(epsilon.to_owned(), value);
    });
    same_graph(&model.unwrap(), &source("nemotron-h").1, "nemotron-h");
    refused("nemotron-h", "nemotron_h.attention.layer_norm_epsilon", None, "`nemotron_h.attention.layer_norm_epsilon` is missing");
    // Without groups, as all files of older versions of llama.cpp.
    let (_folder, model) = rewritten("deepseek-v2-groups", |values, _| drop(values.remove("deepseek2.expert_group_count")));
    assert_eq!(model.unwrap().config.get("topk_method"), Some(&Value::from("greedy")));
    refused("phi3", "phi3.rope.scaling.original_context_length", None, "`phi3.rope.scaling.original_context_length` is missing");
    // llama.cpp has no chunks in such files.
    refused("llama4-plain", "llama4.attention.sliding_window", Some(gguf::Value::Unsigned(0)), "`llama4.attention.sliding_window`, which is 0");
    let (_folder, model) = rewritten("phi3-longrope", |_, tensors| drop(tensors.remove("rope_factors_long.weight")));
    assert!(model.err().unwrap().to_string().contains("has only one of the tensors"));
    let (_folder, model) = rewritten("phi3-longrope", |values, _| drop(values.insert("phi3.rope.scaling.attn_factor".into(), gguf::Value::Float(1.5))));
    assert_eq!(model.unwrap().config.get("rope_scaling").and_then(|scaling| scaling.get("attention_factor")), Some(&1.5.into()));
    // llama.cpp scales attention scores even without this key.
    let multiplier = "deepseek2.rope.scaling.yarn_log_multiplier";
    refused("deepseek-v3", multiplier, None, "other than `yarn`, or without `deepseek2.rope.scaling.yarn_log_multiplier`");
    refused("deepseek-v3", "deepseek2.rope.scaling.type", Some(gguf::Value::Text("linear".into())), "a rope scaling other than `yarn`");
    refused("deepseek-v3", "deepseek2.attention.head_count_kv", Some(gguf::Value::Unsigned(4)), "latent attention with 4 key heads");
    refused("deepseek-v3", "deepseek2.attention.key_length_mla", Some(gguf::Value::Unsigned(4)), "`deepseek2.attention.key_length_mla` of 4");
    refused("qwen3_5", "qwen35.rope.dimension_sections", None, "`qwen35.rope.dimension_sections` is missing");
    refused("qwen3_5", "qwen35.rope.dimension_sections", Some(gguf::Value::Integers(vec![1, 0, 0, 1])), "`qwen35.rope.dimension_sections` of [1, 0, 0, 1]");
    refused("qwen3_5", "qwen35.ssm.inner_size", Some(gguf::Value::Unsigned(21)), "`qwen35.ssm.inner_size` is 21, but there are 4 heads of 5");
    refused("qwen3_5", "qwen35.attention.recurrent_layers", Some(gguf::Value::Bools(vec![true])), "must have a flag for each of 3 layers");
    refused("granite-hybrid", "granitehybrid.ssm.inner_size", Some(gguf::Value::Unsigned(48)), "`granitehybrid.ssm.inner_size` is 48");
    let (_folder, model) = rewritten("granite-hybrid", |_, tensors| drop(tensors.remove("blk.0.ffn_up_exps.weight")));
    assert!(model.err().unwrap().to_string().contains("`blk.0.ffn_up_exps.weight`: is missing"));
    // The first layer may have attention instead of a convolution with biases.
    let (_folder, model) = rewritten("granite-hybrid", |values, tensors| {
        let Some(gguf::Value::Integers(heads)) = values.get_mut("granitehybrid.attention.head_count_kv") else { panic!("no list of heads") };
        heads.swap(0, 1);
        let swapped = |name: &str| name.replace("blk.0.", "blk.X.").replace("blk.1.", "blk.0.").replace("blk.X.", "blk.1.");
        *tensors = std::mem::take(tensors).into_iter().map(|(name, weight)| (swapped(&name), weight)).collect();
    });
    let model = model.unwrap();
    assert_eq!(model.config.get("mamba_conv_bias"), Some(&Value::Bool(true)));
    model.require_matching_weights().unwrap();
    refused("qwen3-next", "qwen3next.ssm.group_count", Some(gguf::Value::Unsigned(3)), "config.json specifies 3 key heads");
    let (_folder, model) = rewritten("qwen3-next", |_, tensors| drop(tensors.remove("blk.0.attn_gate.weight")));
    assert!(model.err().unwrap().to_string().contains("`blk.0.attn_gate.weight`: is missing"));
    // Layers are recurrent except every fourth by default.
    let (_folder, model) = rewritten("qwen3-next", |values, _| drop(values.remove("qwen3next.attention.recurrent_layers")));
    assert_eq!(model.unwrap().config.get("layer_types"), Some(&serde_json::json!(vec!["linear_attention"; 3])));
    for name in ["blk.0.attn_v_b.weight", "blk.1.attn_k_b.weight"] {
        let (_folder, model) = rewritten("deepseek-v3", |_, tensors| drop(tensors.remove(name)));
        assert!(model.err().unwrap().to_string().contains("kv_b_proj.weight`: is stored in parts that are missing"), "{name}");
    }
    let (_folder, model) = rewritten("gpt-oss", |_, tensors| drop(tensors.remove("blk.0.ffn_up_exps.bias")));
    assert!(model.err().unwrap().to_string().contains("gate_up_proj_bias`: is stored in parts that are missing"));
    for value in [None, Some(gguf::Value::Float(0.0))] {
        for (name, key, config_key) in
            [("cohere", "command-r.logit_scale", "logit_scale"), ("deepseek-v2", "deepseek2.expert_weights_scale", "routed_scaling_factor")]
        {
            let (_folder, model) = rewritten(name, |values, _| {
                values.remove(key);
                values.extend(value.clone().map(|value| (key.to_owned(), value)));
            });
            assert_eq!(model.unwrap().config.get(config_key).and_then(Value::as_f64), Some(1.0), "{name}: {value:?}");
        }
    }
    let (_folder, model) = rewritten("glm4-moe", |values, _| {
        ["count", "used_count"].into_iter().for_each(|key| drop(values.insert(format!("glm4moe.expert_group_{key}"), gguf::Value::Unsigned(0))));
    });
    assert_eq!(["n_group", "topk_group"].map(|key| model.as_ref().unwrap().config.get(key).cloned()), [Some(1.into()), Some(1.into())]);
    let (_folder, model) = rewritten("llama-rope-yarn", |values, _| {
        values.insert("llama.rope.scaling.original_context_length".into(), gguf::Value::Unsigned(0));
    });
    assert!(model.unwrap().config.get("rope_scaling").unwrap().get("original_max_position_embeddings").is_none());
    let (_folder, model) = rewritten("llama-rope-linear", |values, _| {
        values.insert("llama.rope.scaling.factor".into(), gguf::Value::Float(0.0));
    });
    assert!(model.unwrap().config.get("rope_scaling").is_none());
    // Without a pattern, every fourth layer has no window, so that both layers have one. Cohere 2 has rotary
    // embeddings only in layers with a window.
    let layers = |model: &Model| {
        let graph = model.graph().unwrap();
        let windows = graph.nodes().iter().filter(|node| matches!(&node.op, Op::Attention(op) if op.window.is_some())).count();
        (windows, graph.nodes().iter().filter(|node| matches!(node.op, Op::Rotary(_))).count())
    };
    let (_folder, model) = rewritten("cohere2", |values, _| drop(values.remove("cohere2.attention.sliding_window_pattern")));
    assert_eq!((layers(&model.unwrap()), layers(&source("cohere2").1)), ((2, 4), (1, 2)));
    let (_folder, model) = rewritten("olmo3", |values, _| drop(values.remove("olmo2.attention.sliding_window_pattern")));
    let model = model.unwrap();
    assert_eq!((model.config.model_type(), layers(&model)), ("olmo3", (2, 4)));
    // llama.cpp decides by the norm of the network, and its converter writes `true` for files without the
    // key.
    for (name, is_parallel) in [("stablelm", false), ("stablelm-parallel", true)] {
        let key = "stablelm.use_parallel_residual".to_owned();
        let (_folder, model) = rewritten(name, |values, _| drop(values.insert(key.clone(), gguf::Value::Bool(!is_parallel))));
        assert_eq!(model.unwrap().config.get("use_parallel_residual"), Some(&Value::from(is_parallel)), "{name}");
    }
    let (_folder, model) = rewritten("phi", |values, _| drop(values.remove("phi2.rope.dimension_count")));
    assert_eq!(model.unwrap().config.get("partial_rotary_factor").and_then(Value::as_f64), Some(1.0));
    let factor = gguf::Value::Float(1.2);
    let (_folder, model) = rewritten("llama-rope-yarn", |values, _| drop(values.insert("llama.rope.scaling.yarn_attn_factor".into(), factor.clone())));
    model.unwrap();
}

/// llama.cpp adds all biases in a file, but a configuration describes only some of them.
#[test]
fn biases_that_a_family_does_not_have_are_refused() {
    for (name, layer) in [("llama", "attn_output"), ("llama", "ffn_down"), ("olmo2", "attn_q"), ("llama", "attn_norm")] {
        let (_folder, model) = rewritten(name, |_, tensors| {
            let rows = tensors[&format!("blk.1.{layer}.weight")].shape[0];
            let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; 4 * rows] });
            tensors.insert(format!("blk.1.{layer}.bias"), Weight::new(DType::F32, vec![rows], Encoding::Dense, bytes));
        });
        let error = model.err().unwrap().to_string();
        assert!(error.contains(".bias`: is a bias that"), "{name}: {error}");
    }
}

#[test]
fn frequency_factors_match_the_head_size() {
    let cut = |_: &mut BTreeMap<String, gguf::Value>, tensors: &mut BTreeMap<String, Weight>| {
        let bytes = std::sync::Arc::new(Bytes { dtype: DType::F32, bytes: vec![0; 4] });
        tensors.insert("rope_freqs.weight".into(), Weight::new(DType::F32, vec![1], Encoding::Dense, bytes));
    };
    let (_folder, model) = rewritten("llama-rope-llama3", cut);
    assert!(model.err().unwrap().to_string().contains("has the shape [1], but heads of"));
    let (_folder, model) = rewritten("qwen2", cut);
    assert!(model.err().unwrap().to_string().contains("which is not supported for the architecture `qwen2`"));
}

/// As in llama.cpp, a multiplier of zero has the meaning of a missing one.
#[test]
fn multipliers_have_the_defaults_of_llama_cpp() {
    let multiplier = |gguf_key: &str, value: Option<f64>| {
        rewritten("granite", |values, _| {
            values.remove(&format!("granite.{gguf_key}"));
            values.extend(value.map(|value| (format!("granite.{gguf_key}"), gguf::Value::Float(value))));
        })
        .1
    };
    for value in [None, Some(0.0)] {
        for (gguf_key, key, expected) in
            [("attention.scale", "attention_multiplier", 0.5), ("embedding_scale", "embedding_multiplier", 1.0), ("residual_scale", "residual_multiplier", 1.0)]
        {
            assert_eq!(multiplier(gguf_key, value).unwrap().config.get(key), Some(&expected.into()), "{gguf_key}: {value:?}");
        }
        let error = multiplier("logit_scale", value).err().unwrap().to_string();
        assert!(error.contains("`granite.logit_scale` is missing or zero"), "{error}");
    }
    let with_rope = |used| rewritten("granite", |values, _| drop(values.insert("granite.rope.scaling.finetuned".into(), gguf::Value::Bool(used)))).1;
    assert!(with_rope(true).is_ok());
    let error = with_rope(false).err().unwrap().to_string();
    assert!(error.contains("`granite.rope.scaling.finetuned` of false"), "{error}");
}

/// OLMo 3 has a base for each type of layer, which llama.cpp reads too.
#[test]
fn bases_of_both_layer_types_are_read_and_written() {
    let base = |key: &str| format!("olmo2.rope.{key}");
    for (bases, written) in [([20_000.0, 30_000.0], [Some(20_000.0), Some(30_000.0)]), ([20_000.0, 20_000.0], [Some(20_000.0), None])] {
        let (_folder, model) = rewritten("olmo3", |values, _| {
            values.insert(base("freq_base"), gguf::Value::Float(bases[0]));
            if bases[1] != bases[0] {
                values.insert(base("freq_base_swa"), gguf::Value::Float(bases[1]));
            }
        });
        let model = model.unwrap();
        let graph = model.graph().unwrap();
        let thetas: Vec<f64> = graph.nodes().iter().filter_map(|node| if let Op::Rotary(op) = &node.op { Some(op.theta) } else { None }).collect();
        // The first layer has a window. Each layer rotates queries and keys.
        assert_eq!(thetas, [bases[1], bases[1], bases[0], bases[0]], "{graph}");
        let out = tempfile::tempdir().unwrap();
        export(model, out.path(), FileType::F32).unwrap();
        let values = gguf::GgufFile::open(&out.path().join("out/model.gguf")).unwrap().values;
        let found = ["freq_base", "freq_base_swa"].map(|key| if let Some(gguf::Value::Float(value)) = values.get(&base(key)) { Some(*value) } else { None });
        assert_eq!(found, written);
    }
}
