//! Speculative decoding: with any draft, greedy texts are the same as without one.
#![cfg(feature = "run")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use compress::Model;
use compress_core::work::MemoryLimit;
use compress_engine::generation::{Continuation, Generate, InputKind, LanguageModel, Ngrams, Sampling, Speculation, StopReason};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{device, work};
use crate::generation::{changed, golden, recordings};

/// Texts of a model, with a draft that proposes up to this many tokens.
fn texts(model: &Path, draft: Option<(&Path, usize)>, prompts: &[Vec<i64>], options: &Generate) -> compress::Result<Vec<Continuation>> {
    let open = |path: &Path| LanguageModel::new(Model::open(path)?);
    let model = match draft {
        Some((draft, tokens)) => open(model)?.with_draft(open(draft)?, tokens)?,
        None => open(model)?,
    };
    match model.input_kind() {
        InputKind::Recording => work(|work| model.transcribe(&recordings("whisper"), options, &device(), MemoryLimit::default(), work)),
        _ => work(|work| model.generate(prompts, options, &device(), MemoryLimit::default(), work)),
    }
}

fn greedy(tokens: usize) -> Generate {
    Generate { tokens, sampling: None }
}

/// Tokens and reasons for the end.
fn contents(found: &[Continuation]) -> Vec<(&[i64], StopReason)> {
    found.iter().map(|found| (found.tokens.as_slice(), found.end)).collect()
}

/// Changes the tensors of a model.
fn edit(folder: &TempDir, change: impl Fn(&str, Tensor) -> candle_core::Result<Tensor>) {
    let path = folder.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let edited: HashMap<String, Tensor> = tensors.into_iter().map(|(name, tensor)| (name.clone(), change(&name, tensor).unwrap())).collect();
    candle_core::safetensors::save(&edited, &path).unwrap();
}

/// A golden model whose weights are changed a little, so that it often proposes what the model generates.
fn similar(name: &str, keys: Value) -> TempDir {
    let folder = changed(name, keys);
    edit(&folder, |_, tensor| {
        if tensor.dtype() != DType::F32 || tensor.rank() < 2 {
            return Ok(tensor);
        }
        let waves = Tensor::from_iter((0..tensor.elem_count()).map(|i| 1.0 + 0.15 * (i as f32).sin()), &Device::Cpu)?;
        waves.reshape(tensor.dims())? * tensor
    });
    folder
}

/// With sliding windows, rotary angles that depend on the length, experts, learned positions, and an encoder;
/// with one to nine proposals per step, some of them rejected.
#[test]
fn greedy_texts_are_the_same_with_a_draft() {
    let prompts = [vec![5, 6, 7], vec![9], vec![40, 3, 22, 17, 4, 4, 31, 8, 30]];
    let mut all_rejected = 0;
    for name in [
        "llama",
        "mistral",
        "qwen2-sliding",
        "cohere2",
        "gemma2",
        "gemma3",
        "gpt2",
        "opt",
        "gpt-oss",
        "llama4",
        "mixtral",
        "deepseek-v3",
        "lfm2",
        "qwen3-next",
        "granite-hybrid",
        "phi3-longrope",
        "llama-rope-dynamic",
        "llama-rope-yarn",
        "t5",
        "whisper",
    ] {
        let unlimited = json!({ "eos_token_id": null });
        let (model, draft) = (changed(name, unlimited.clone()), similar(name, unlimited));
        let expected = texts(model.path(), None, &prompts, &greedy(20)).unwrap();
        assert!(expected.iter().all(|found| found.speculation.is_none()));
        for tokens in [1, 2, 4, 9] {
            let found = texts(model.path(), Some((draft.path(), tokens)), &prompts, &greedy(20)).unwrap();
            assert_eq!(contents(&found), contents(&expected), "{name}, {tokens} proposals");
            let speculation = Speculation::of_all(&found);
            let generated: usize = found.iter().map(|found| found.tokens.len() - 1).sum();
            assert_eq!(speculation.tokens, generated, "{name}");
            assert!(speculation.proposed.len() <= tokens && speculation.steps <= generated, "{name}: {speculation:?}");
            let rejected: usize = speculation.proposed.iter().sum::<usize>() - speculation.accepted.iter().sum::<usize>();
            // Every step generates its accepted proposals and a token of the model.
            assert_eq!(speculation.tokens, speculation.accepted.iter().sum::<usize>() + speculation.steps, "{name}");
            all_rejected += rejected;
        }
        // A draft that always agrees, except where rounding differs.
        let all = Speculation::of_all(&texts(model.path(), Some((model.path(), 4)), &prompts, &greedy(20)).unwrap());
        assert!(all.acceptance_rate().is_none_or(|rate| rate > 0.95), "{name}: {all:?}");
        assert!(name == "llama-rope-dynamic" || all.tokens_per_step().unwrap() > 3.0, "{name}: {all:?}");
    }
    assert!(all_rejected > 100, "few proposals were rejected: {all_rejected}");
}

/// Texts of a model with n-grams of a collection, or only of the text itself.
fn with_ngrams(model: &Path, collection: &[Vec<i64>], options: &Generate) -> Vec<Continuation> {
    let ngrams = Arc::new(Ngrams::new(collection.iter().map(Vec::as_slice)).unwrap());
    let model = LanguageModel::new(Model::open(model).unwrap()).unwrap().with_ngrams(ngrams, 4).unwrap();
    work(|work| model.generate(&PROMPTS.map(<[i64]>::to_vec), options, &device(), MemoryLimit::default(), work)).unwrap()
}

const PROMPTS: [&[i64]; 3] = [&[5, 6, 7], &[9], &[40, 3, 22, 17, 4, 4, 31, 8, 30]];

/// The collection contains the texts of the model, texts with other continuations, or nothing.
#[test]
fn greedy_texts_are_the_same_with_ngrams() {
    let prompts = PROMPTS.map(<[i64]>::to_vec);
    for name in ["llama", "qwen2-sliding", "gpt2", "lfm2", "llama-rope-dynamic"] {
        let model = changed(name, json!({ "eos_token_id": null }));
        let expected = texts(model.path(), None, &prompts, &greedy(20)).unwrap();
        let own: Vec<Vec<i64>> = prompts.iter().zip(&expected).map(|(prompt, found)| [prompt.clone(), found.tokens.clone()].concat()).collect();
        let other: Vec<Vec<i64>> = own.iter().map(|text| text.iter().enumerate().map(|(at, token)| if at % 5 == 4 { 1 } else { *token }).collect()).collect();
        // Contexts with several continuations, of which the model selects any.
        let both = [&other[..], &own[..], &other[..]].concat();
        for (what, collection) in [("own", &own[..]), ("other", &other[..]), ("both", &both[..]), ("none", &[])] {
            let found = with_ngrams(model.path(), collection, &greedy(20));
            assert_eq!(contents(&found), contents(&expected), "{name}, {what}");
            let all = Speculation::of_all(&found);
            assert_eq!(all.tokens, all.accepted.iter().sum::<usize>() + all.steps, "{name}, {what}");
            match what {
                "own" => assert!(name == "llama-rope-dynamic" || all.tokens_per_step().unwrap() > 2.5, "{name}: {all:?}"),
                "other" => assert!(all.acceptance_rate().is_none_or(|rate| rate < 0.95), "{name}: {all:?}"),
                _ => {}
            }
        }
    }
    // Proposals do not change sampled texts.
    let sampling = Generate { tokens: 12, sampling: Some(Sampling { seed: 5, ..Sampling::default() }) };
    let sampled = |collection: &[Vec<i64>]| with_ngrams(&golden().join("models/llama"), collection, &sampling);
    let plain = texts(&golden().join("models/llama"), None, &prompts, &sampling).unwrap();
    let own: Vec<Vec<i64>> = prompts.iter().zip(&plain).map(|(prompt, found)| [prompt.clone(), found.tokens.clone()].concat()).collect();
    for collection in [&prompts[..], &own[..]] {
        assert_eq!(contents(&sampled(collection)), contents(&plain));
    }
    let beyond = Arc::new(Ngrams::new([&[3, 4_000_000][..]]).unwrap());
    let refused = LanguageModel::new(Model::open(golden().join("models/llama")).unwrap()).unwrap().with_ngrams(beyond, 2).map(drop).unwrap_err().to_string();
    assert!(refused.contains("contain the token 4000000, but the model has"), "{refused}");
}

/// Every length, and every token of a text as its last one, at any position of a proposal.
#[test]
fn texts_end_at_the_same_token_with_a_draft() {
    let prompts = [vec![5, 6, 7], vec![30, 2]];
    let unlimited = json!({ "eos_token_id": null });
    let (model, draft) = (changed("llama", unlimited.clone()), similar("llama", unlimited));
    let all = texts(model.path(), None, &prompts, &greedy(12)).unwrap();
    for draft in [model.path(), draft.path()] {
        for length in 1..=12 {
            let found = texts(model.path(), Some((draft, 4)), &prompts, &greedy(length)).unwrap();
            for (found, all) in found.iter().zip(&all) {
                assert_eq!((found.tokens.as_slice(), found.end), (&all.tokens[..length], StopReason::Tokens));
            }
        }
        for end in 0..12 {
            let ending = changed("llama", json!({ "eos_token_id": all[0].tokens[end] }));
            let (expected, found) =
                (texts(ending.path(), None, &prompts, &greedy(12)).unwrap(), texts(ending.path(), Some((draft, 4)), &prompts, &greedy(12)).unwrap());
            assert_eq!(expected[0].end, StopReason::Eos);
            assert_eq!(contents(&found), contents(&expected), "{end}");
        }
    }
    // 16 positions, of which the prompt occupies 3 to 16.
    let gpt2 = changed("gpt2", json!({ "eos_token_id": null }));
    for length in 3..=16 {
        let prompt = [(0..length).map(|token| 3 + token % 7).collect::<Vec<i64>>()];
        let (expected, found) =
            (texts(gpt2.path(), None, &prompt, &greedy(30)).unwrap(), texts(gpt2.path(), Some((gpt2.path(), 4)), &prompt, &greedy(30)).unwrap());
        assert_eq!((contents(&found), found[0].end), (contents(&expected), StopReason::Positions));
    }
}

/// Beyond its positions, a draft proposes nothing, which a note states.
#[test]
fn texts_are_longer_than_the_positions_of_a_draft() {
    let (model, draft) = (changed("llama", json!({ "eos_token_id": null })), similar("llama", json!({ "max_position_embeddings": 8 })));
    let prompts = [vec![5, 6, 7], vec![9; 8], vec![9; 12]];
    let expected = texts(model.path(), None, &prompts, &greedy(12)).unwrap();
    let found = texts(model.path(), Some((draft.path(), 3)), &prompts, &greedy(12)).unwrap();
    assert_eq!(contents(&found), contents(&expected));
    let proposed = |index: usize| found[index].speculation.as_ref().unwrap().proposed.iter().sum::<usize>();
    assert!(proposed(0) >= 3 && proposed(1) == 0 && proposed(2) == 0, "{found:?}");
    let open = |folder: &TempDir| LanguageModel::new(Model::open(folder.path()).unwrap()).unwrap();
    let notes = |model: LanguageModel| model.notes().iter().filter(|note| note.contains("the draft supports at most 8 tokens")).count();
    assert_eq!(notes(open(&model).with_draft(open(&draft), 3).unwrap()), 1);
    assert_eq!(notes(open(&draft).with_draft(open(&draft), 3).unwrap()), 0);
}

/// A padded vocabulary: the draft never proposes tokens that the model lacks, and reads none that it lacks.
#[test]
fn vocabularies_of_other_sizes_are_supported() {
    let sized = |size: usize| {
        let folder = changed("llama", json!({ "eos_token_id": null, "vocab_size": size }));
        edit(&folder, |name, tensor| match name {
            "model.embed_tokens.weight" | "lm_head.weight" if size < 48 => tensor.narrow(0, 0, size)?.contiguous(),
            // The added tokens have the largest logits.
            "model.embed_tokens.weight" | "lm_head.weight" if size > 48 => Tensor::cat(&[&tensor, &(tensor.narrow(0, 0, size - 48)? * 3.0)?], 0),
            _ => Ok(tensor),
        });
        folder
    };
    let prompts = [vec![5, 6, 7], vec![9, 21]];
    let (model, small, large) = (sized(48), sized(20), sized(60));
    for (model, draft) in [(&model, &small), (&model, &large), (&small, &model), (&large, &small)] {
        let expected = texts(model.path(), None, &prompts[..1], &greedy(20)).unwrap();
        let found = texts(model.path(), Some((draft.path(), 4)), &prompts[..1], &greedy(20)).unwrap();
        assert_eq!(contents(&found), contents(&expected));
    }
    // The second prompt has a token that the small draft lacks.
    let found = texts(model.path(), Some((small.path(), 4)), &prompts, &greedy(20)).unwrap();
    assert_eq!(contents(&found), contents(&texts(model.path(), None, &prompts, &greedy(20)).unwrap()));
    assert!(found[1].speculation.as_ref().unwrap().proposed.is_empty());
}

#[test]
fn suppressed_tokens_are_not_generated_with_a_draft() {
    let prompt = [vec![5, 9, 21]];
    let with = |settings: Value| {
        let (model, draft) = (changed("t5", json!({ "eos_token_id": null })), similar("t5", json!({})));
        std::fs::write(model.path().join("generation_config.json"), settings.to_string()).unwrap();
        let expected = texts(model.path(), None, &prompt, &greedy(12)).unwrap();
        for draft in [model.path(), draft.path()] {
            assert_eq!(contents(&texts(model.path(), Some((draft, 4)), &prompt, &greedy(12)).unwrap()), contents(&expected));
        }
        expected[0].tokens.clone()
    };
    let usual = with(json!({ "decoder_start_token_id": 0 }));
    with(json!({ "decoder_start_token_id": 0, "suppress_tokens": usual }));
    with(json!({ "decoder_start_token_id": 0, "begin_suppress_tokens": [usual[0]] }));
}

/// The third token of many samples has the same distribution with a draft as without one.
#[test]
fn samples_follow_the_distribution_of_the_model() {
    let (model, draft) = (changed("llama", json!({ "eos_token_id": null })), similar("llama", json!({})));
    let options = |seed: u64| Generate { tokens: 9, sampling: Some(Sampling { temperature: 0.9, top_k: Some(2), top_p: Some(0.95), seed }) };
    let sampled = |draft: Option<(&Path, usize)>, prompts: usize| texts(model.path(), draft, &vec![vec![5, 6, 7]; prompts], &options(3)).unwrap();
    let tokens = |found: &[Continuation]| found.iter().map(|found| found.tokens.clone()).collect::<Vec<_>>();
    // Samples are determined by the seed and the index of the prompt.
    let with = sampled(Some((draft.path(), 4)), 600);
    assert_eq!(tokens(&with[..5]), tokens(&sampled(Some((draft.path(), 4)), 5)));
    let speculation = Speculation::of_all(&with);
    assert!(speculation.acceptance_rate().is_some_and(|rate| rate > 0.05 && rate < 0.999), "{speculation:?}");
    let same = Speculation::of_all(&sampled(Some((model.path(), 4)), 20));
    assert!(same.acceptance_rate().is_some_and(|rate| rate > 0.95), "{same:?}");
    // The third token, which is proposed or replaces a proposal.
    let shares = |found: &[Continuation]| {
        let mut shares = vec![0f64; 48];
        found.iter().for_each(|text| shares[text.tokens[2] as usize] += 1.0 / found.len() as f64);
        shares
    };
    let without = sampled(None, 600);
    assert_ne!(tokens(&without), tokens(&with));
    let distance: f64 = shares(&with).iter().zip(&shares(&without)).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
    assert!(distance < 0.12, "{distance}");
}

#[test]
fn unsuitable_drafts_are_refused_by_name() {
    let models = golden().join("models");
    let refused = |model: &str, draft: &str, tokens: usize| {
        texts(&models.join(model), Some((&models.join(draft), tokens)), &[vec![3]], &greedy(3)).map(|_| ()).unwrap_err().to_string()
    };
    let found = refused("llama", "t5", 4);
    assert!(found.contains("draft: a model of type `t5` takes source texts, but one of type `llama` takes prompts to continue"), "{found}");
    assert!(refused("llama", "bert", 4).contains("`bert` are not decoders"));
    assert!(refused("llama", "llama", 0).contains("draft-tokens: is 0"));
    // Both models must fit into memory.
    let open = || LanguageModel::new(Model::open(models.join("llama")).unwrap()).unwrap();
    let generate = |model: LanguageModel, bytes: u64| {
        let memory = MemoryLimit { bytes: Some(bytes), explicit: true };
        work(|work| model.generate(&[vec![3]], &greedy(3), &Device::Cpu, memory, work)).map(|_| ()).map_err(|e| e.to_string())
    };
    let message = generate(open(), 1).unwrap_err();
    let need: u64 = message.split("takes ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap();
    assert_eq!(generate(open(), need), Ok(()));
    assert!(generate(open().with_draft(open(), 4).unwrap(), need).unwrap_err().contains("of memory"));
    assert_eq!(generate(open().with_draft(open(), 4).unwrap(), 3 * need), Ok(()));
}
