//! Text generation: incremental decoding computes the same logits as the whole text, and greedy texts
//! equal those of transformers (`scripts/goldens generate`).
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{device, work};
use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::work::MemoryLimit;
use compress_engine::data::Speech;
use compress_engine::exec::{Executor, Inputs, OutputTokens, Parameters, Residence, SequenceCache};
use compress_engine::generation::{Generate, LanguageModel, Sampling, StopReason};
use compress_engine::model::SynthesizedFiles;
use compress_graph::ir::{Graph, Op};
use serde_json::{Value, json};

const TOLERANCE: f32 = 2e-5;

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn executor<'g>(model: &Model, graph: &'g Graph) -> Executor<'g> {
    let parameters = work(|work| Parameters::load(graph, &model.weights, &device(), DType::F32, Residence::Stored, work)).unwrap();
    Executor::new(graph, parameters, device())
}

/// The golden models with their names.
fn models() -> impl Iterator<Item = (String, Model)> {
    std::fs::read_dir(golden().join("models")).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().to_string_lossy().into_owned(), Model::open(entry.path()).unwrap())
    })
}

/// The inputs of the outputs that are stored with a golden model.
fn golden_inputs(model: &Model) -> Inputs {
    let stored = candle_core::safetensors::load(model.path.join("golden.safetensors"), &Device::Cpu).unwrap();
    stored.into_iter().filter_map(|(name, tensor)| Some((name.strip_prefix("in/")?.to_owned(), tensor))).collect()
}

/// A range of columns of the inputs with a token axis (for encoder-decoder models, only those of the
/// decoder), and all other inputs.
fn columns(inputs: &Inputs, from: usize, to: usize) -> Inputs {
    let along = |name: &str| name == "decoder_input_ids" || !inputs.contains_key("decoder_input_ids");
    let part = |tensor: &Tensor| tensor.narrow(1, from, to - from).unwrap().contiguous().unwrap();
    inputs.iter().map(|(name, tensor)| (name.clone(), if along(name) { part(tensor) } else { tensor.clone() })).collect()
}

/// Largest difference of the outputs for the last tokens, without padding.
fn distance(whole: &Tensor, last: &Tensor, mask: &Tensor) -> f32 {
    let (length, count) = (whole.dim(1).unwrap(), last.dim(1).unwrap());
    let difference = (whole.narrow(1, length - count, count).unwrap() - last).unwrap().abs().unwrap();
    let mask = mask.narrow(1, length - count, count).unwrap().to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap().to_device(last.device()).unwrap();
    difference.broadcast_mul(&mask).unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// Every golden decoder, with padding, grouped-query attention, sliding windows, soft caps and experts.
/// The cache is restarted at lengths where rotary frequencies change.
#[test]
fn incremental_decoding_equals_whole_texts() {
    let mut families = Vec::new();
    for (name, model) in models() {
        let graph = model.graph().unwrap();
        let Ok(mut cache) = SequenceCache::new(&graph) else { continue };
        families.push(name.clone());
        let executor = executor(&model, &graph);
        let inputs = golden_inputs(&model);
        let mask = &inputs.get("decoder_input_ids").map_or_else(|| inputs["attention_mask"].clone(), |tokens| tokens.ones_like().unwrap());
        let length = mask.dim(1).unwrap();
        let wholes: Vec<BTreeMap<String, Tensor>> = (1..=length).map(|end| executor.run(&columns(&inputs, 0, end)).unwrap()).collect();
        for pieces in [vec![length], vec![1; length], vec![4, 3, 1, length - 8], vec![length - 2, 1, 1]] {
            for answers in [OutputTokens::All, OutputTokens::Last(1), OutputTokens::Last(3)] {
                cache.clear();
                let mut seen = 0;
                for piece in &pieces {
                    if !SequenceCache::is_stable(&graph, seen, seen + piece) {
                        cache.clear();
                    }
                    let end = seen + piece;
                    let count = end - cache.tokens();
                    let outputs = executor.run_next(&columns(&inputs, cache.tokens(), end), &mut cache, answers).unwrap();
                    assert_eq!(cache.tokens(), end);
                    let rows = if let OutputTokens::Last(last) = answers { last.min(count) } else { count };
                    for (output, whole) in &wholes[end - 1] {
                        let last = &outputs[output];
                        assert_eq!(last.dim(1).unwrap(), rows);
                        let apart = distance(whole, last, &mask.narrow(1, 0, end).unwrap())
                            / whole.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap().max(1.0);
                        assert!(apart < TOLERANCE, "{name}: {output} of {piece} tokens after {seen} of {pieces:?}: {apart:e}");
                    }
                    seen = end;
                }
            }
        }
    }
    assert!(families.len() > 30, "{families:?}");
    for family in [
        "mt5",
        "t5",
        "t5-gated",
        "t5-headless",
        "whisper",
        "whisper-headless",
        "cohere2",
        "deepseek-v2",
        "deepseek-v3",
        "ernie4_5",
        "gemma",
        "gemma2",
        "gemma3",
        "glm4",
        "glm4-moe",
        "gpt2",
        "gpt-neox",
        "gpt-oss",
        "granite",
        "granite-moe-shared",
        "granite-hybrid",
        "granite-hybrid-dense",
        "hunyuan",
        "lfm2",
        "lfm2-biases",
        "llama",
        "llama4",
        "mamba2",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron-h",
        "nemotron-h-latent",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3-longrope",
        "qwen2-moe-fused",
        "qwen3-moe",
        "qwen3-next",
        "qwen3_5",
        "smollm3",
        "stablelm",
        "starcoder2",
    ] {
        assert!(families.iter().any(|name| name == family), "{family} is not among {families:?}");
    }
}

/// Tokens that continue a text in several ways compute the outputs of their branches, and retained tokens
/// become the text. Rotary frequencies that change with the length exclude a few families.
#[test]
fn branches_equal_whole_texts() {
    const PARENTS: [Option<usize>; 5] = [None, Some(0), Some(0), Some(1), Some(2)];
    const BRANCHES: [[usize; 3]; 2] = [[0, 1, 3], [0, 2, 4]];
    let mut families = 0;
    for (name, model) in models() {
        let graph = model.graph().unwrap();
        let Ok(mut cache) = SequenceCache::new(&graph) else { continue };
        if !cache.supports_branches(&graph) || !SequenceCache::is_stable(&graph, 6, 12) {
            continue;
        }
        families += 1;
        let executor = executor(&model, &graph);
        let inputs = golden_inputs(&model);
        let texts = columns(&inputs, 0, 6);
        // The same next tokens in each row, without padding.
        let next = |tokens: &[i64]| -> Inputs {
            let of_input = |(name, tensor): (&String, &Tensor)| {
                let tokens = if name.ends_with("input_ids") { tokens.to_vec() } else { vec![1; tokens.len()] };
                let row = Tensor::new(tokens, &Device::Cpu).unwrap().to_dtype(tensor.dtype()).unwrap();
                (name.clone(), row.unsqueeze(0).unwrap().repeat((tensor.dim(0).unwrap(), 1)).unwrap())
            };
            columns(&inputs, 0, 1).iter().map(of_input).collect()
        };
        let whole = |tokens: &[i64]| {
            let next = next(tokens);
            let both = |(name, text): (&String, &Tensor)| (name.clone(), Tensor::cat(&[text, &next[name]], 1).unwrap());
            executor.run(&texts.iter().map(both).collect()).unwrap()
        };
        let is_equal = |found: &Tensor, expected: &Tensor| {
            let scale = expected.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap().max(1.0);
            let apart = (found - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() / scale;
            assert!(apart < TOLERANCE, "{name}: {apart:e}");
        };
        let tokens = [7, 11, 5, 13, 9];
        executor.run_next(&texts, &mut cache, OutputTokens::Last(1)).unwrap();
        let branches = executor.run_branches(&next(&tokens), &mut cache, OutputTokens::All, &PARENTS).unwrap();
        for branch in BRANCHES {
            for (output, whole) in whole(&branch.map(|at| tokens[at])) {
                let rows = Tensor::new(branch.map(|at| at as u32).as_slice(), branches[&output].device()).unwrap();
                is_equal(&branches[&output].index_select(&rows, 1).unwrap(), &whole.narrow(1, 6, 3).unwrap());
            }
        }
        cache.retain(5, &BRANCHES[1]).unwrap();
        assert_eq!(cache.tokens(), 9);
        let found = executor.run_next(&next(&[12]), &mut cache, OutputTokens::All).unwrap();
        for (output, whole) in whole(&[7, 5, 9, 12]) {
            is_equal(&found[&output], &whole.narrow(1, 9, 1).unwrap());
        }
    }
    assert!(families > 20, "{families}");
}

/// Tokens that were removed from the cache, in any family, have no effect on the next ones.
#[test]
fn removed_tokens_have_no_effect() {
    let mut families = 0;
    for (name, model) in models() {
        let graph = model.graph().unwrap();
        let Ok(mut cache) = SequenceCache::with_removable(&graph, 3) else { continue };
        let executor = executor(&model, &graph);
        let inputs = golden_inputs(&model);
        let tokens = if inputs.contains_key("decoder_input_ids") { "decoder_input_ids" } else { "input_ids" };
        let mask = if tokens == "input_ids" { inputs["attention_mask"].clone() } else { inputs[tokens].ones_like().unwrap() };
        let length = inputs[tokens].dim(1).unwrap();
        if !SequenceCache::is_stable(&graph, length - 4, length) {
            continue;
        }
        families += 1;
        let mut others = inputs.clone();
        others.insert(tokens.to_owned(), (&inputs[tokens] * 0.0).and_then(|zeros| zeros + 3.0).unwrap());
        let mut whole = SequenceCache::new(&graph).unwrap();
        let run =
            |inputs: &Inputs, cache: &mut SequenceCache, to: usize| executor.run_next(&columns(inputs, cache.tokens(), to), cache, OutputTokens::All).unwrap();
        run(&inputs, &mut whole, length - 3);
        run(&inputs, &mut cache, length - 4);
        // One by one, then in one run after a token that stays.
        (length - 3..length).for_each(|to| drop(run(&others, &mut cache, to)));
        cache.truncate(&graph, length - 4).unwrap();
        run(&inputs, &mut cache, length - 3);
        run(&others, &mut cache, length);
        cache.truncate(&graph, length - 3).unwrap();
        assert_eq!(cache.tokens(), length - 3);
        let (found, expected) = (run(&inputs, &mut cache, length), run(&inputs, &mut whole, length));
        for (output, expected) in &expected {
            let apart = distance(expected, &found[output], &mask.narrow(1, length - 3, 3).unwrap());
            assert!(apart < TOLERANCE * expected.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap().max(1.0), "{name}: {output}: {apart:e}");
        }
    }
    assert!(families > 30, "{families}");
}

/// The convolutions of Mamba 2 have biases, so that padding before a text is not zero after them.
#[test]
fn padding_before_a_text_leaves_states_unchanged() {
    for name in ["granite-hybrid", "mamba2", "nemotron-h"] {
        let model = Model::open(golden().join("models").join(name)).unwrap();
        let graph = model.graph().unwrap();
        let executor = executor(&model, &graph);
        let logits = |padding: usize| {
            let row = |text: [i64; 4]| Tensor::new([vec![0; padding], text.to_vec()].concat(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let inputs: Inputs = [("input_ids".to_owned(), row([5, 9, 30, 7])), ("attention_mask".to_owned(), row([1; 4]))].into();
            executor.run(&inputs).unwrap()["logits"].clone()
        };
        let (plain, padded) = (logits(0), logits(3).narrow(1, 3, 4).unwrap());
        let apart = distance(&plain, &padded, &Tensor::ones((1, 4), DType::I64, &Device::Cpu).unwrap());
        assert!(apart < TOLERANCE * plain.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap().max(1.0), "{name}: {apart:e}");
    }
}

#[test]
fn tokens_before_a_sliding_window_cannot_be_removed() {
    let truncated = |removable: usize, tokens: usize| {
        let model = Model::open(golden().join("models/mistral")).unwrap();
        let graph = model.graph().unwrap();
        let (executor, mut cache) = (executor(&model, &graph), SequenceCache::with_removable(&graph, removable).unwrap());
        let one = |value: i64| Tensor::new(&[[value]], &Device::Cpu).unwrap();
        for token in 3..23 {
            let inputs: Inputs = [("input_ids".to_owned(), one(token)), ("attention_mask".to_owned(), one(1))].into();
            executor.run_next(&inputs, &mut cache, OutputTokens::Last(1)).unwrap();
        }
        cache.truncate(&graph, tokens).map(|()| cache.tokens()).map_err(|e| e.to_string())
    };
    assert_eq!([truncated(0, 19), truncated(4, 15), truncated(20, 0)], [Ok(19), Ok(15), Ok(0)]);
    let refused = truncated(4, 14).unwrap_err();
    assert!(refused.contains("graph node `layers.0.self_attn.") && refused.contains("the last 6 cannot be removed"), "{refused}");
}

#[test]
fn sliding_windows_bound_the_kv_cache() {
    let kept = |name: &str, tokens: usize| {
        let model = Model::open(golden().join("models").join(name)).unwrap();
        let graph = model.graph().unwrap();
        let (executor, mut cache) = (executor(&model, &graph), SequenceCache::new(&graph).unwrap());
        let one = |value: i64| Tensor::new(&[[value]], &Device::Cpu).unwrap();
        for token in 0..tokens as i64 {
            let inputs: Inputs = [("input_ids".to_owned(), one(3 + token % 40)), ("attention_mask".to_owned(), one(1))].into();
            executor.run_next(&inputs, &mut cache, OutputTokens::Last(1)).unwrap();
        }
        assert!(graph.nodes().iter().any(|node| matches!(node.op, Op::Attention(_))));
        cache.bytes()
    };
    assert_eq!(kept("mistral", 60), kept("mistral", 400));
    assert!(kept("mistral-no-window", 400) > 3 * kept("mistral", 400));
}

fn generated(path: &Path, prompts: &[Vec<i64>], options: &Generate) -> compress::Result<Vec<compress_engine::generation::Continuation>> {
    let model = LanguageModel::new(Model::open(path)?)?;
    work(|work| model.generate(prompts, options, &device(), MemoryLimit::default(), work))
}

fn transcribed(path: &Path, features: &[Tensor], options: &Generate) -> compress::Result<Vec<compress_engine::generation::Continuation>> {
    let model = LanguageModel::new(Model::open(path)?)?;
    work(|work| model.transcribe(features, options, &device(), MemoryLimit::default(), work))
}

/// The spectrograms of a golden model.
pub fn recordings(name: &str) -> Vec<Tensor> {
    let stored = candle_core::safetensors::load(golden().join("models").join(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let features = &stored["in/input_features"];
    (0..features.dim(0).unwrap()).map(|row| features.narrow(0, row, 1).unwrap()).collect()
}

/// A golden model with another configuration.
pub fn changed(name: &str, keys: Value) -> tempfile::TempDir {
    let (from, folder) = (golden().join("models").join(name), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn greedy_texts_are_those_of_transformers() {
    let table: BTreeMap<String, Vec<BTreeMap<String, Vec<i64>>>> =
        serde_json::from_str(&std::fs::read_to_string(golden().join("generation.json")).unwrap()).unwrap();
    assert!(table.len() > 8);
    for (name, rows) in table {
        let folder = changed(&name, json!({ "eos_token_id": null }));
        let options = Generate { tokens: rows[0]["tokens"].len(), sampling: None };
        let found = if rows[0].contains_key("row") {
            let features = recordings(&name);
            let features: Vec<Tensor> = rows.iter().map(|row| features[row["row"][0] as usize].clone()).collect();
            transcribed(folder.path(), &features, &options)
        } else {
            let prompts: Vec<Vec<i64>> = rows.iter().map(|row| row["prompt"].clone()).collect();
            generated(folder.path(), &prompts, &options)
        };
        for (found, row) in found.unwrap().iter().zip(&rows) {
            assert_eq!((&found.tokens, found.end), (&row["tokens"], StopReason::Tokens), "{name}, {row:?}");
        }
    }
}

#[test]
fn texts_end_at_the_end_of_sequence_token() {
    let options = Generate { tokens: 20, sampling: None };
    let prompt = vec![vec![5, 6, 7]];
    let all = generated(changed("gpt2", json!({ "eos_token_id": null })).path(), &prompt, &options).unwrap().remove(0);
    // 16 positions.
    assert_eq!((all.tokens.len(), all.end), (14, StopReason::Positions));
    let at = (1..all.tokens.len()).find(|at| !all.tokens[..*at].contains(&all.tokens[*at])).expect("a second token");
    let ended = |folder: &tempfile::TempDir| {
        let found = generated(folder.path(), &prompt, &options).unwrap().remove(0);
        assert_eq!(found.end, StopReason::Eos);
        found.tokens
    };
    let listed = changed("gpt2", json!({ "eos_token_id": [47, all.tokens[at]] }));
    assert_eq!(ended(&listed), all.tokens[..=at]);
    // generation_config.json takes precedence over config.json.
    std::fs::write(listed.path().join("generation_config.json"), json!({ "eos_token_id": all.tokens[0] }).to_string()).unwrap();
    assert_eq!(ended(&listed), all.tokens[..1]);
    std::fs::write(listed.path().join("generation_config.json"), json!({ "eos_token_id": "x", "repetition_penalty": 1.2 }).to_string()).unwrap();
    assert!(generated(listed.path(), &prompt, &options).unwrap_err().to_string().contains("eos_token_id"));
}

/// `scripts/goldens speech`.
#[test]
fn spectrograms_are_those_of_transformers() {
    for name in ["usual", "other"] {
        let folder = golden().join("speech").join(name);
        let found = Speech::open(&folder, &SynthesizedFiles::new()).unwrap().read(&folder.join("speech.wav")).unwrap();
        let expected = &candle_core::safetensors::load(folder.join("features.safetensors"), &Device::Cpu).unwrap()["input_features"];
        assert_eq!(found.dims(), expected.dims());
        let apart = (found - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(apart < 1e-4, "{name}: {apart:e}");
    }
}

#[test]
fn recordings_that_do_not_fit_are_refused_by_name() {
    let speech = |name: &str| Speech::open(&golden().join("speech").join(name), &SynthesizedFiles::new()).unwrap();
    let wav = |name: &str| golden().join("speech").join(name).join("speech.wav");
    let rate = speech("usual").read(&wav("other")).unwrap_err().to_string();
    assert!(rate.contains("a sampling rate of 8000 Hz") && rate.contains("requires 16000 Hz"), "{rate}");
    let folder = tempfile::tempdir().unwrap();
    let refused = |changed: &dyn Fn(&mut Vec<u8>)| {
        let (mut bytes, path) = (std::fs::read(wav("usual")).unwrap(), folder.path().join("speech.wav"));
        changed(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        speech("usual").read(&path).unwrap_err().to_string()
    };
    let stereo = refused(&|bytes| bytes[22..36].copy_from_slice(&[2, 0, 0x80, 0x3e, 0, 0, 0, 0xfa, 0, 0, 4, 0, 16, 0]));
    assert!(stereo.contains("has 2 channels"), "{stereo}");
    let long = refused(&|bytes| {
        bytes[40..44].copy_from_slice(&40_000u32.to_le_bytes());
        bytes.resize(44 + 40_000, 0);
    });
    assert!(long.contains("1.2 seconds long") || long.contains("1.3 seconds long"), "{long}");
    assert!(refused(&|bytes| bytes.truncate(1000)).contains("is truncated"));
    std::fs::write(folder.path().join("preprocessor_config.json"), json!({ "feature_extractor_type": "WhisperFeatureExtractor", "dither": 0.1 }).to_string())
        .unwrap();
    let dither = Speech::open(folder.path(), &SynthesizedFiles::new()).unwrap_err().to_string();
    assert!(dither.contains("`dither` of 0.1"), "{dither}");
}

/// Suppressed tokens are never generated, and tokens suppressed at the beginning are generated later.
#[test]
fn suppressed_tokens_are_not_generated() {
    let options = Generate { tokens: 12, sampling: None };
    let tokens = |said: Value| {
        let folder = changed("t5", json!({ "eos_token_id": null }));
        std::fs::write(folder.path().join("generation_config.json"), said.to_string()).unwrap();
        generated(folder.path(), &[vec![5, 9, 21]], &options).unwrap().remove(0).tokens
    };
    let said = |key: &str, value: Value| json!({ "decoder_start_token_id": 0, key: value });
    let usual = tokens(json!({ "decoder_start_token_id": 0 }));
    let never = tokens(said("suppress_tokens", json!(usual)));
    assert!(never.iter().all(|token| !usual.contains(token)), "{usual:?}, {never:?}");
    assert_ne!(tokens(said("begin_suppress_tokens", json!([usual[0]])))[0], usual[0]);
    assert_ne!(tokens(json!({ "decoder_start_token_id": 7 })), usual);
}

/// The most likely of the supported languages follows the first token, as in transformers.
#[test]
fn an_unspecified_language_is_detected() {
    let of = |said: Value| {
        let folder = changed("whisper", json!({ "eos_token_id": null }));
        std::fs::write(folder.path().join("generation_config.json"), said.to_string()).unwrap();
        transcribed(folder.path(), &recordings("whisper")[..1], &Generate { tokens: 6, sampling: None }).unwrap().remove(0).tokens
    };
    let languages = 11..14i64;
    let others: Vec<i64> = (0..48).filter(|token| !languages.contains(token)).collect();
    let likeliest = of(json!({ "decoder_start_token_id": 2, "suppress_tokens": others }))[0];
    let open = of(json!({ "decoder_start_token_id": 2, "lang_to_id": { "<|a|>": 11, "<|b|>": 12, "<|c|>": 13 } }));
    let told = |language: i64| of(json!({ "decoder_start_token_id": 2, "forced_decoder_ids": [[1, language]] }));
    assert_eq!(open, told(likeliest));
    assert!(languages.clone().any(|language| told(language) != open));
}

#[test]
fn draws_repeat_and_prompts_do_not_depend_on_each_other() {
    let folder = changed("llama", json!({ "eos_token_id": null }));
    let options = |seed: u64| Generate { tokens: 12, sampling: Some(Sampling { temperature: 1.5, top_k: Some(20), seed, ..Sampling::default() }) };
    let (one, other) = (vec![5, 6, 7], vec![9, 4]);
    let tokens =
        |prompts: &[Vec<i64>], seed: u64| generated(folder.path(), prompts, &options(seed)).unwrap().into_iter().map(|found| found.tokens).collect::<Vec<_>>();
    assert_eq!(tokens(&[one.clone(), other.clone()], 3), tokens(&[one.clone(), other.clone()], 3));
    let alone = |seed: u64| tokens(std::slice::from_ref(&one), seed);
    assert_eq!(tokens(&[one.clone(), other.clone()], 3)[0], alone(3)[0]);
    assert_ne!(alone(3), alone(4));
}

#[test]
fn models_that_cannot_generate_are_rejected_by_name() {
    let refused = |path: &Path, prompt: &[i64], options: &Generate| generated(path, &[prompt.to_vec()], options).unwrap_err().to_string();
    let models = golden().join("models");
    let usual = Generate::default();
    for (name, reason) in [("bert", "`bert` are not decoders"), ("vit", "`vit` are not decoders"), ("sentence-mean", "are not decoders")] {
        let found = refused(&models.join(name), &[3], &usual);
        assert!(found.contains(reason), "{name}: {found}");
    }
    for (name, reason) in [("t5-encoder", "`t5` are not decoders"), ("whisper", "takes recordings"), ("t5-headless", "has no output `logits`")] {
        let found = refused(&models.join(name), &[3], &usual);
        assert!(found.contains(reason), "{name}: {found}");
    }
    let found = transcribed(&models.join("t5"), &[], &usual).unwrap_err().to_string();
    assert!(found.contains("`t5` take texts"), "{found}");
    let found = LanguageModel::new(Model::open(models.join("whisper")).unwrap()).unwrap().speech().unwrap_err().to_string();
    assert!(found.contains("preprocessor_config.json") && found.contains("is missing"), "{found}");
    let bidirectional = refused(changed("llama", json!({ "is_causal": false })).path(), &[3], &usual);
    assert!(bidirectional.contains("graph node `layers.0.self_attn.context_heads`") && bidirectional.contains("attend to later tokens"), "{bidirectional}");
    let llama = models.join("llama");
    assert!(refused(&llama, &[], &usual).contains("prompt 1: has no token"));
    assert!(refused(&llama, &[3; 33], &usual).contains("has 33 tokens, but the model supports at most 32"));
    assert!(refused(&llama, &[48], &usual).contains("`input_ids`: contains 48 at row 0, column 0; `model.embed_tokens.weight` has 48 rows"));
    assert!(refused(&llama, &[3], &Generate { tokens: 0, sampling: None }).contains("tokens: is 0"));
    for (sampling, reason) in [
        (Sampling { temperature: 0.0, ..Sampling::default() }, "temperature: is 0, but must be greater than 0"),
        (Sampling { top_p: Some(1.5), ..Sampling::default() }, "top-p: is 1.5, but must be greater than 0 and at most 1"),
        (Sampling { top_k: Some(0), ..Sampling::default() }, "top-k: is 0, but must be at least 1"),
    ] {
        assert!(refused(&llama, &[3], &Generate { tokens: 3, sampling: Some(sampling) }).contains(reason), "{sampling:?}");
    }
    let model = LanguageModel::new(Model::open(&llama).unwrap()).unwrap();
    let memory = MemoryLimit { bytes: Some(1000), explicit: true };
    let found = work(|work| model.generate(&[vec![3]], &usual, &Device::Cpu, memory, work)).unwrap_err().to_string();
    assert!(found.contains("of memory"), "{found}");
}
